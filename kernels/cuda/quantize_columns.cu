/* quantize_columns: a warp for each row. A lane owns every 32nd column; it alone reads and changes them. */
#include "cuda.cuh"

namespace {

enum { THREADS = 128, WARPS = THREADS / TY_WARP };

template <class T> struct columns_of {
  const T *w, *factor, *scale, *offset;
  uint8_t *code;
  T *error, *left; /* left: what is still to be rounded of each row */
  int64_t rows, n;
  T top;
};

template <class T> __global__ void __launch_bounds__(THREADS) columns(const columns_of<T> p) {
  const int lane = threadIdx.x % TY_WARP;
  for (int64_t row = int64_t{ blockIdx.x } * WARPS + threadIdx.x / TY_WARP; row < p.rows;
       row += int64_t{ gridDim.x } * WARPS) {
    const int64_t first = row * p.n;
    for (int64_t i = lane; i < p.n; i += TY_WARP) p.left[first + i] = p.w[first + i];
    for (int64_t i = 0; i < p.n; i++) {
      T e = 0;
      if (i % TY_WARP == lane) {
        T s = p.scale[first + i], at = p.offset[first + i], x = p.left[first + i];
        T q = rint((x - at) / s);
        q = s != 0 && q > 0 ? q : T(0); /* NaN: 0 */
        q = q < p.top ? q : p.top;
        e = (x - (s * q + at)) / p.factor[i * p.n + i];
        p.code[first + i] = static_cast<uint8_t>(q);
        p.error[first + i] = e;
      }
      e = __shfl_sync(0xffffffffu, e, static_cast<int>(i % TY_WARP));
      int64_t next = i - i % TY_WARP + lane;
      for (next += next > i ? 0 : TY_WARP; next < p.n; next += TY_WARP)
        p.left[first + next] -= e * p.factor[i * p.n + next];
    }
  }
}

template <class T> bool run(const ty_kernel_args *k) {
  const ty_view *w = k->in[0];
  ty_cuda_scratch left(static_cast<size_t>(w->count) * sizeof(T));
  if (!left.data) return false;
  const columns_of<T> p = { static_cast<const T *>(w->data),
                            static_cast<const T *>(k->in[1]->data),
                            static_cast<const T *>(k->in[2]->data),
                            static_cast<const T *>(k->in[3]->data),
                            static_cast<uint8_t *>(k->out[0]->data),
                            static_cast<T *>(k->out[1]->data),
                            left.as<T>(),
                            w->size[0],
                            w->size[1],
                            static_cast<T>(static_cast<const ty_p_dim *>(k->params)->k - 1) };
  return TY_LAUNCH((columns<T>), ty_cuda_blocks(p.rows, WARPS), THREADS, 0, p);
}

} // namespace

TY_CUDA_KERNEL(quantize_columns) {
  if (!k->in[0]->count) return true;
  return k->in[0]->dtype == TY_F64 ? run<double>(k) : run<float>(k);
}
