/* Products with a sparse matrix in compressed rows. A team of threads has a pack of columns of a row, or a sampled
 * element, and puts together what its members have in a fixed order. */
#include "segments.cuh"

#include "teams.cuh"

namespace {

template <class T> struct product_job {
  const T *values, *x;
  T *y;
  ty_offsets offsets;
  index_list columns, order;
  int64_t m, n, width; /* width: packs of a row of x */
  int team;
};

template <class C, int V> struct pack_sum { C x[V]; };

template <class T, int V>
__global__ void __launch_bounds__(INDEX_THREADS, 1) multiply(const product_job<T> j, ty_cuda_watch watch) {
  typedef ty_compute<T> C;
  typedef pack_sum<C, V> S;
  TY_SHARED(S, room, TY_WARP);
  const int64_t each = INDEX_THREADS / j.team, packs = j.m * j.width;
  for (int64_t first = blockIdx.x * each; first < packs; first += gridDim.x * each) {
    const int64_t pack = first + threadIdx.x / j.team, r = pack / j.width, at = pack % j.width * V;
    S s;
#pragma unroll
    for (int v = 0; v < V; v++) s.x[v] = 0;
    const int64_t end = pack < packs ? j.offsets.begin(r + 1) : 0;
    for (int64_t e = pack < packs ? j.offsets.begin(r) + threadIdx.x % j.team : 0; e < end; e += j.team) {
      const int64_t column = index_at(j.columns, e), place = j.order.data ? index_at(j.order, e) : e;
      if (!ty_in_range(watch, column, j.n) || !ty_in_range(watch, place, j.offsets.n)) continue;
      const C value = ty_widen(j.values[place]);
      C x[V];
      ty_load<V>(j.x + column * j.width * V + at, x);
#pragma unroll
      for (int v = 0; v < V; v++) s.x[v] += value * x[v];
    }
    if (j.team > 1)
      ty_team_join(
          s, j.team,
          [](S &a, const S &b) {
#pragma unroll
            for (int v = 0; v < V; v++) a.x[v] += b.x[v];
          },
          room);
    if (pack < packs && threadIdx.x % j.team == 0) ty_store<V>(j.y + r * j.width * V + at, s.x);
  }
}

template <class T> struct sample_job {
  const T *a, *b;
  T *out;
  ty_offsets offsets;
  index_list columns, order;
  int64_t n, k, width;
  int team;
};

template <class T, int V>
__global__ void __launch_bounds__(INDEX_THREADS, 1) sample(const sample_job<T> j, ty_cuda_watch watch) {
  typedef ty_compute<T> C;
  TY_SHARED(C, room, TY_WARP);
  const int64_t each = INDEX_THREADS / j.team;
  for (int64_t first = blockIdx.x * each; first < j.k; first += gridDim.x * each) {
    const int64_t e = first + threadIdx.x / j.team;
    const int64_t column = e < j.k ? index_at(j.columns, e) : 0,
                  place = e < j.k && j.order.data ? index_at(j.order, e) : e;
    C sum = 0;
    const bool inside = e < j.k && ty_in_range(watch, column, j.n) && ty_in_range(watch, place, j.k);
    if (inside) {
      const T *a = j.a + j.offsets.segment(e) * j.width * V, *b = j.b + column * j.width * V;
      for (int64_t i = threadIdx.x % j.team; i < j.width; i += j.team) {
        C x[V], y[V];
        ty_load<V>(a + i * V, x);
        ty_load<V>(b + i * V, y);
#pragma unroll
        for (int v = 0; v < V; v++) sum += x[v] * y[v];
      }
    }
    ty_team_join(
        sum, j.team, [](C &a, const C &b) { a += b; }, room);
    if (inside && threadIdx.x % j.team == 0) j.out[place] = ty_narrow<T>(sum);
  }
}

template <class T, int V> bool run_multiply(const ty_kernel_args *k) {
  const int64_t entries = k->in[3]->count, d = k->in[1]->size[1];
  product_job<T> j = {};
  j.values = ty_data_of<const T>(k->in[0]);
  j.x = ty_data_of<const T>(k->in[1]);
  j.y = ty_data_of<T>(k->out[0]);
  j.offsets = ty_offsets_of(k->in[2], entries);
  j.columns = index_list_of(k->in[3]);
  if (k->in[4]) j.order = index_list_of(k->in[4]);
  j.m = j.offsets.m, j.n = k->in[1]->size[0], j.width = d / V;
  if (!ty_offsets_checked(j.offsets)) return false;
  if (k->out[0]->count == 0) return true;
  /* Of few columns the entries of a row are read by several threads. */
  const int64_t warp = TY_WARP, beside = warp / (j.width < warp ? j.width : warp), mean = entries / j.m;
  j.team = ty_power_of_two(beside < mean ? beside : mean, TY_WARP);
  const product_job<T> job = j;
  return TY_LAUNCH((multiply<T, V>), ty_cuda_blocks(j.m * j.width, INDEX_THREADS / j.team), INDEX_THREADS, 0, job,
                   ty_cuda_watched());
}

template <class T, int V> bool run_sample(const ty_kernel_args *k) {
  const int64_t entries = k->in[3]->count, d = k->in[1]->size[1];
  sample_job<T> j = {};
  j.a = ty_data_of<const T>(k->in[0]);
  j.b = ty_data_of<const T>(k->in[1]);
  j.out = ty_data_of<T>(k->out[0]);
  j.offsets = ty_offsets_of(k->in[2], entries);
  j.columns = index_list_of(k->in[3]);
  if (k->in[4]) j.order = index_list_of(k->in[4]);
  j.n = k->in[1]->size[0], j.k = entries, j.width = d / V;
  if (!ty_offsets_checked(j.offsets)) return false;
  if (entries == 0) return true;
  if (k->in[4] && !ty_cuda_zero(j.out, static_cast<size_t>(entries) * sizeof(T))) return false;
  j.team = ty_power_of_two(j.width, TY_WARP);
  const sample_job<T> job = j;
  return TY_LAUNCH((sample<T, V>), ty_cuda_blocks(entries, INDEX_THREADS / j.team), INDEX_THREADS, 0, job,
                   ty_cuda_watched());
}

} // namespace

/* in: values [k], x [n, d], offsets [m + 1], columns [k], order [k] or NULL. */
TY_CUDA_KERNEL(sparse_mm) {
  return ty_for_floats(k->out[0]->dtype, "sparse_mm", [&](auto type) {
    typedef decltype(type) T;
    enum { V = 16 / sizeof(T) };
    const bool packs = k->in[1]->size[1] % V == 0 && ty_aligned(k->in[1]->data) && ty_aligned(k->out[0]->data);
    return packs ? run_multiply<T, V>(k) : run_multiply<T, 1>(k);
  });
}

/* in: a [m, d], b [n, d], offsets [m + 1], columns [k], order [k] or NULL. */
TY_CUDA_KERNEL(sddmm) {
  return ty_for_floats(k->out[0]->dtype, "sddmm", [&](auto type) {
    typedef decltype(type) T;
    enum { V = 16 / sizeof(T) };
    const bool packs = k->in[1]->size[1] % V == 0 && ty_aligned(k->in[0]->data) && ty_aligned(k->in[1]->data);
    return packs ? run_sample<T, V>(k) : run_sample<T, 1>(k);
  });
}
