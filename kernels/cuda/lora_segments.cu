/* Adapters of low rank, one for each segment of rows. A block of threads has one row of x: its warps take the products
 * with the rows of A in turn, a few at a time; then a thread has columns of the result. */
#include "cuda.cuh"

namespace {

enum { WARPS = 4, THREADS = WARPS * TY_WARP, TOGETHER = 32 /* pairs */ };

struct ls_job {
  int64_t rows, in, width, a_slots, b_slots, wa, wb, a_parts, b_parts, pairs, segments;
  const int64_t *a_rows, *b_rows, *begins, *ranks;
};

/* Reports what would lead out of the tensors. */
__global__ void __launch_bounds__(THREADS) ls_check(const ls_job j, ty_cuda_watch watch) {
  const int64_t n = j.pairs * (j.a_parts + j.b_parts) + j.segments + 1;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; at < n;
       at += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t b = at - j.pairs * j.a_parts, i = b - j.pairs * j.b_parts;
    if (b < 0) ty_in_range(watch, j.a_rows[at], j.a_slots);
    else if (i < 0) ty_in_range(watch, j.b_rows[b], j.b_slots);
    else {
      for (int which = 0; which < 2; which++) {
        const int64_t *from = which ? j.ranks : j.begins, last = which ? j.pairs : j.rows;
        const bool rises = i == 0 ? from[0] == 0 : from[i - 1] <= from[i];
        if (!rises || (i == j.segments && from[i] != last)) ty_report(watch, TY_INDEX_OUT_OF_RANGE, from[i], last + 1);
      }
    }
  }
}

template <class T, class K>
__global__ void __launch_bounds__(THREADS)
    ls_forward(const ls_job j, const T *y, const T *x, const K *a, const K *b, T *out) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, warp = static_cast<int>(threadIdx.x) / TY_WARP;
  TY_SHARED(T, h, TOGETHER);
  for (int64_t row = blockIdx.x; row < j.rows; row += gridDim.x) {
    int64_t low = 0, high = j.segments; /* the segment of this row */
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (j.begins[middle] <= row) low = middle;
      else high = middle;
    }
    const int64_t end = min(j.ranks[low + 1], j.pairs);
    for (int64_t c = threadIdx.x; c < j.width; c += THREADS) out[row * j.width + c] = y[row * j.width + c];
    for (int64_t pair = max(j.ranks[low], int64_t{ 0 }); pair < end; pair += TOGETHER) {
      const int some = static_cast<int>(min(end - pair, static_cast<int64_t>(TOGETHER)));
      __syncthreads();
      for (int e = warp; e < some; e += WARPS) {
        T sum = 0;
        for (int64_t c = lane; c < j.in; c += TY_WARP) {
          const int64_t slot = j.a_rows[(pair + e) * j.a_parts + c / j.wa];
          if (slot >= 0 && slot < j.a_slots)
            sum += x[row * j.in + c] * static_cast<T>(ty_widen(a[slot * j.wa + c % j.wa]));
        }
        sum = ty_warp_reduce(sum, ty_plus<T>{});
        if (lane == 0) h[e] = sum;
      }
      __syncthreads();
      for (int64_t c = threadIdx.x; c < j.width; c += THREADS) {
        T sum = out[row * j.width + c];
        for (int e = 0; e < some; e++) {
          const int64_t slot = j.b_rows[(pair + e) * j.b_parts + c / j.wb];
          if (slot >= 0 && slot < j.b_slots) sum += h[e] * static_cast<T>(ty_widen(b[slot * j.wb + c % j.wb]));
        }
        out[row * j.width + c] = sum;
      }
    }
    __syncthreads();
  }
}

template <class T, class K> bool launch(const ty_kernel_args *k, const ls_job &j) {
  const T *y = ty_data_of<const T>(k->in[0]), *x = ty_data_of<const T>(k->in[1]);
  const K *a = ty_data_of<const K>(k->in[2]), *b = ty_data_of<const K>(k->in[3]);
  T *out = ty_data_of<T>(k->out[0]);
  const ls_job job = j;
  const ty_cuda_watch watch = ty_cuda_watched();
  const int64_t n = j.pairs * (j.a_parts + j.b_parts) + j.segments + 1;
  return TY_LAUNCH(ls_check, ty_cuda_blocks(n, THREADS), THREADS, 0, job, watch) &&
         (j.rows * j.width == 0 ||
          TY_LAUNCH((ls_forward<T, K>), ty_cuda_blocks(j.rows, 1), THREADS, 0, job, y, x, a, b, out));
}

} // namespace

/* in: y and x in f32 or f64, a, b, a_rows, b_rows, begins, ranks; out: the result. */
TY_CUDA_KERNEL(lora_segments) {
  const ty_view *x = k->in[1], *a = k->in[2], *b = k->in[3];
  ls_job j = {};
  j.rows = x->size[0], j.in = x->size[1], j.width = k->in[0]->size[1];
  j.a_slots = a->size[0], j.wa = a->size[1], j.b_slots = b->size[0], j.wb = b->size[1];
  j.pairs = k->in[4]->size[0], j.a_parts = k->in[4]->size[1], j.b_parts = k->in[5]->size[1];
  j.segments = k->in[6]->size[0] - 1;
  j.a_rows = ty_data_of<const int64_t>(k->in[4]), j.b_rows = ty_data_of<const int64_t>(k->in[5]);
  j.begins = ty_data_of<const int64_t>(k->in[6]), j.ranks = ty_data_of<const int64_t>(k->in[7]);
  switch (a->dtype) {
    case TY_F64: return launch<double, double>(k, j);
    case TY_F32: return launch<float, float>(k, j);
    case TY_F16: return launch<float, ty_f16>(k, j);
    case TY_BF16: return launch<float, ty_bf16>(k, j);
    default: return ty_cuda_no_kernel("lora_segments", a->dtype);
  }
}
