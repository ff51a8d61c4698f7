/* norm_list: the norm of all elements of many tensors, in f64. Each block adds up one chunk of one tensor; the sums of
 * the chunks are joined in order by one block at the end. */
#include "teams.cuh"
#include "tensor_list.cuh"

enum { THREADS = TY_LIST_THREADS };

enum norm_kind { SQUARES, MAGNITUDES, NONZEROS, LARGEST, SMALLEST, POWERS };

struct norm_job {
  norm_kind kind;
  double p, limit;
};

TY_DEVICE double join(const norm_job &j, double a, double b) {
  if (j.kind == LARGEST) return ty_larger<double>{}(a, b);
  if (j.kind == SMALLEST) return ty_smaller<double>{}(a, b);
  return a + b;
}
TY_DEVICE double nothing(const norm_job &j) { return j.kind == SMALLEST ? std::numeric_limits<double>::infinity() : 0; }

TY_DEVICE double term(const norm_job &j, double x) {
  double a = x < 0 ? -x : x;
  a = a > j.limit ? j.limit : a; /* NaN stays */
  switch (j.kind) {
    case SQUARES: return a * a;
    case NONZEROS: return a != 0;
    case POWERS: return pow(a, j.p);
    default: return a;
  }
}

/* n elements from x, all threads of a block. */
template <class T> TY_DEVICE double sum_chunk(const norm_job &j, const void *data, int64_t from, int64_t n) {
  enum { V = 16 / sizeof(T), PACKS = 4 };
  const T *x = static_cast<const T *>(data) + from;
  double s = nothing(j);
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    const int64_t step = int64_t{ THREADS } * V * PACKS;
    for (; done + step <= n; done += step) {
      ty_compute<T> v[PACKS * V];
#pragma unroll
      for (int i = 0; i < PACKS; i++)
        ty_load<V>(x + done + (i * THREADS + static_cast<int>(threadIdx.x)) * V, v + i * V);
#pragma unroll
      for (int i = 0; i < PACKS * V; i++) s = join(j, s, term(j, static_cast<double>(v[i])));
    }
  }
  for (int64_t i = done + threadIdx.x; i < n; i += THREADS)
    s = join(j, s, term(j, static_cast<double>(ty_widen(x[i]))));
  return s;
}

TY_DEVICE double join_block(const norm_job &j, double s, ty_shared_ptr<double> room) {
  return ty_block_reduce(
      s, [&](double a, double b) { return join(j, a, b); }, room);
}

__global__ void __launch_bounds__(THREADS) norm_chunks(const norm_job j, const ty_tensor_list b, double *part) {
  TY_SHARED(double, room, TY_WARP);
  for (int64_t u = blockIdx.x; u < b.start[b.n]; u += gridDim.x) {
    const ty_list_chunk c = ty_list_chunk_at(b, u);
    double s = 0;
    switch (c.dtype) {
      case TY_F64: s = sum_chunk<double>(j, c.data, c.from, c.n); break;
      case TY_F32: s = sum_chunk<float>(j, c.data, c.from, c.n); break;
      case TY_F16: s = sum_chunk<ty_f16>(j, c.data, c.from, c.n); break;
      default: s = sum_chunk<ty_bf16>(j, c.data, c.from, c.n); break;
    }
    s = join_block(j, s, room);
    if (threadIdx.x == 0) part[u] = s;
  }
}

__global__ void __launch_bounds__(THREADS)
    norm_finish(const norm_job j, const double *part, int64_t chunks, double *out) {
  TY_SHARED(double, room, TY_WARP);
  double s = nothing(j);
  for (int64_t i = threadIdx.x; i < chunks; i += THREADS) s = join(j, s, part[i]);
  s = join_block(j, s, room);
  if (threadIdx.x == 0) *out = j.kind == SQUARES ? sqrt(s) : j.kind == POWERS ? pow(s, 1 / j.p) : s;
}

/* in: n tensors; out: one f64; params: ty_p_scalars, a: p, b: elements count as at most this in magnitude. */
TY_CUDA_KERNEL(norm_list) {
  const ty_p_scalars *params = static_cast<const ty_p_scalars *>(k->params);
  const double p = params->a;
  const norm_kind kind = p == 2           ? SQUARES
                         : p == 1         ? MAGNITUDES
                         : p == 0         ? NONZEROS
                         : p == INFINITY  ? LARGEST
                         : p == -INFINITY ? SMALLEST
                                          : POWERS;
  const norm_job j = { kind, p, params->b };
  int64_t chunks = 0;
  for (int i = 0; i < k->nin; i++) chunks += (k->in[i]->count + TY_LIST_CHUNK - 1) / TY_LIST_CHUNK;
  ty_cuda_scratch scratch(static_cast<size_t>(chunks ? chunks : 1) * sizeof(double));
  if (!scratch.data) return false;
  double *part = scratch.as<double>(), *out = static_cast<double *>(k->out[0]->data);
  return ty_each_tensor_list(k,
                             [&](const ty_tensor_list &b, unsigned blocks, int64_t before) {
                               return TY_LAUNCH(norm_chunks, blocks, THREADS, 0, j, b, part + before);
                             }) &&
         TY_LAUNCH(norm_finish, 1, THREADS, 0, j, part, chunks, out);
}
