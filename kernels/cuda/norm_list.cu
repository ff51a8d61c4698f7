/* norm_list: the norm of all elements of many tensors, in f64. Each block adds up one chunk of one tensor; the sums of
 * the chunks are joined in order by one block at the end. */
#include "teams.cuh"

enum { THREADS = 256, CHUNK = 32768, BATCH = 64 /* tensors of a launch: their table is an argument of the kernel */ };

enum norm_kind { SQUARES, MAGNITUDES, NONZEROS, LARGEST, SMALLEST, POWERS };

struct norm_job {
  norm_kind kind;
  double p, limit;
};

struct norm_batch {
  int n;
  const void *data[BATCH];
  int64_t count[BATCH], start[BATCH + 1]; /* start: chunks before each tensor */
  uint8_t dtype[BATCH];
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

__global__ void __launch_bounds__(THREADS) norm_chunks(const norm_job j, const norm_batch b, double *part) {
  TY_SHARED(double, room, TY_WARP);
  for (int64_t u = blockIdx.x; u < b.start[b.n]; u += gridDim.x) {
    int low = 0, high = b.n; /* the last tensor that begins at u or before */
    while (high - low > 1) {
      int mid = (low + high) / 2;
      if (b.start[mid] <= u) low = mid;
      else high = mid;
    }
    const int64_t from = (u - b.start[low]) * CHUNK, rest = b.count[low] - from,
                  n = rest < CHUNK ? rest : int64_t{ CHUNK };
    double s = 0;
    switch (b.dtype[low]) {
      case TY_F64: s = sum_chunk<double>(j, b.data[low], from, n); break;
      case TY_F32: s = sum_chunk<float>(j, b.data[low], from, n); break;
      case TY_F16: s = sum_chunk<ty_f16>(j, b.data[low], from, n); break;
      default: s = sum_chunk<ty_bf16>(j, b.data[low], from, n); break;
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
  for (int i = 0; i < k->nin; i++) chunks += (k->in[i]->count + CHUNK - 1) / CHUNK;
  ty_cuda_scratch scratch(static_cast<size_t>(chunks ? chunks : 1) * sizeof(double));
  if (!scratch.data) return false;
  double *part = scratch.as<double>(), *out = static_cast<double *>(k->out[0]->data);
  norm_batch b;
  b.n = 0;
  b.start[0] = 0;
  double *to = part;
  for (int i = 0; i < k->nin; i++) {
    const ty_view *x = k->in[i];
    if (x->count > 0) { /* empty tensors have no chunk */
      b.data[b.n] = x->data;
      b.count[b.n] = x->count;
      b.dtype[b.n] = static_cast<uint8_t>(x->dtype);
      b.start[b.n + 1] = b.start[b.n] + (x->count + CHUNK - 1) / CHUNK;
      b.n++;
    }
    if (b.n == 0 || (b.n < BATCH && i + 1 < k->nin)) continue;
    const int64_t n = b.start[b.n];
    if (!TY_LAUNCH(norm_chunks, ty_cuda_blocks(n, 1, 8), THREADS, 0, j, b, to)) return false;
    to += n;
    b.n = 0;
  }
  return TY_LAUNCH(norm_finish, 1, THREADS, 0, j, part, chunks, out);
}
