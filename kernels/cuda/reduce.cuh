/* The walk of every reduction over any view. A block of threads computes `outputs` neighbouring results with `lanes`
 * threads each: side by side along the reduced elements where these lie closest together in memory (rows), else along
 * the results (columns). Where the results alone do not fill the GPU, the reduced elements are split over blocks, and a
 * second kernel joins the states of the splits.
 *
 * A reduction is a class with
 *   X                  what elements are computed with; S: a state; start()
 *   add<N, V>(s, x, first, step)  N elements: V neighbours from position `first`, V from first + step, ...
 *   join(s, t)         the order of s and t must not matter
 *   store(out, dtype, index, s) */
#ifndef TY_KERNELS_CUDA_REDUCE_CUH
#define TY_KERNELS_CUDA_REDUCE_CUH

#include "elementwise.cuh"
#include "teams.cuh"

enum { REDUCE_THREADS = 256 };
/* Vectors, or single elements, that a thread loads at once. */
template <int V> constexpr int reduce_unroll = V > 1 ? 4 : 8;

/* Dimensions from the innermost out. */
struct reduce_dims {
  int n;
  bool wide; /* positions do not fit 32 bits */
  int64_t count;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  ew_divisor divisor[TY_MAX_DIMS];
};

struct reduce_plan {
  const void *data;
  void *out;
  int dtype, out_dtype;
  reduce_dims kept, reduced;
  bool rows;
  int outputs, lanes;
  int64_t tiles;        /* blocks for all results */
  int64_t splits, each; /* reduced elements of a split */
};

TY_DEVICE int64_t reduce_offset(const reduce_dims &d, int64_t i) {
  if (d.n == 1) return i * d.stride[0];
  int64_t offset = 0;
  if (d.wide) {
    for (int k = 0; k < d.n - 1; k++) {
      offset += i % d.size[k] * d.stride[k];
      i /= d.size[k];
    }
    return offset + i * d.stride[d.n - 1];
  }
  uint32_t at = static_cast<uint32_t>(i);
  for (int k = 0; k < d.n - 1; k++) {
    uint32_t next = ew_divide(at, d.divisor[k]);
    offset += static_cast<int64_t>(at - next * d.divisor[k].d) * d.stride[k];
    at = next;
  }
  return offset + at * d.stride[d.n - 1];
}

/* ---- elements as they are computed with ---- */

struct reduce_integers {}; /* any integer dtype, as i64 */
struct reduce_bits {};     /* any dtype, as its bits without the sign of floats: zero is zero */

template <class T> struct reduce_source {
  typedef ty_compute<T> X;
  template <int G, int V> TY_DEVICE_MEMBER static void load(const reduce_plan &p, const int64_t *at, X *x) {
    const T *from = static_cast<const T *>(p.data);
#pragma unroll
    for (int g = 0; g < G; g++) {
      ty_pack<T, V> pack = *reinterpret_cast<const ty_pack<T, V> *>(from + at[g]);
#pragma unroll
      for (int v = 0; v < V; v++) x[g * V + v] = ty_widen(pack.v[v]);
    }
  }
};
template <class T, class X, int G> TY_DEVICE void reduce_load_as(const void *data, const int64_t *at, X *x, X mask) {
#pragma unroll
  for (int g = 0; g < G; g++) x[g] = static_cast<X>(static_cast<const T *>(data)[at[g]]) & mask;
}
template <> struct reduce_source<reduce_integers> {
  typedef int64_t X;
  template <int G, int V> TY_DEVICE_MEMBER static void load(const reduce_plan &p, const int64_t *at, X *x) {
    switch (p.dtype) {
      case TY_I8: return reduce_load_as<int8_t, X, G>(p.data, at, x, -1);
      case TY_I16: return reduce_load_as<int16_t, X, G>(p.data, at, x, -1);
      case TY_I32: return reduce_load_as<int32_t, X, G>(p.data, at, x, -1);
      case TY_I64: return reduce_load_as<int64_t, X, G>(p.data, at, x, -1);
      default: return reduce_load_as<uint8_t, X, G>(p.data, at, x, -1);
    }
  }
};
template <> struct reduce_source<reduce_bits> {
  typedef uint64_t X;
  template <int G, int V> TY_DEVICE_MEMBER static void load(const reduce_plan &p, const int64_t *at, X *x) {
    switch (p.dtype) {
      case TY_F16:
      case TY_BF16: return reduce_load_as<uint16_t, X, G>(p.data, at, x, 0x7fff);
      case TY_F32: return reduce_load_as<uint32_t, X, G>(p.data, at, x, 0x7fffffff);
      case TY_F64: return reduce_load_as<uint64_t, X, G>(p.data, at, x, UINT64_MAX >> 1);
      case TY_I16: return reduce_load_as<uint16_t, X, G>(p.data, at, x, UINT64_MAX);
      case TY_I32: return reduce_load_as<uint32_t, X, G>(p.data, at, x, UINT64_MAX);
      case TY_I64: return reduce_load_as<uint64_t, X, G>(p.data, at, x, UINT64_MAX);
      default: return reduce_load_as<uint8_t, X, G>(p.data, at, x, UINT64_MAX);
    }
  }
};

/* ---- the kernels ---- */

/* The state of reduced elements [begin, end) of the result at `base`, as far as they are this lane's. */
template <class T, int V, class R>
TY_DEVICE typename R::S reduce_lane(const reduce_plan &p, const R &r, int64_t base, int64_t begin, int64_t end,
                                    int lane) {
  typedef typename R::X X;
  enum { UNROLL = reduce_unroll<V> };
  typename R::S s = r.start();
  const int64_t step = static_cast<int64_t>(p.lanes) * V, jump = step * p.reduced.stride[0];
  int64_t i = begin + static_cast<int64_t>(lane) * V;
  for (; i + (UNROLL - 1) * step < end; i += UNROLL * step) {
    int64_t at[UNROLL];
    X x[UNROLL * V];
    at[0] = base + reduce_offset(p.reduced, i);
    if (p.reduced.n == 1) {
#pragma unroll
      for (int g = 1; g < UNROLL; g++) at[g] = at[0] + g * jump;
    } else {
#pragma unroll
      for (int g = 1; g < UNROLL; g++) at[g] = base + reduce_offset(p.reduced, i + g * step);
    }
    reduce_source<T>::template load<UNROLL, V>(p, at, x);
    r.template add<UNROLL * V, V>(s, x, i, step);
  }
  for (; i < end; i += step) {
    int64_t at[1] = { base + reduce_offset(p.reduced, i) };
    X x[V];
    reduce_source<T>::template load<1, V>(p, at, x);
    r.template add<V, V>(s, x, i, step);
  }
  return s;
}

template <class T, int V, class R>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
    reduce_kernel(const reduce_plan p, const R r, typename R::S *__restrict__ partial) {
  typedef typename R::S S;
  TY_SHARED(S, room, REDUCE_THREADS);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = p.rows ? thread % p.lanes : thread / p.outputs;
  const int own = p.rows ? thread / p.lanes : thread % p.outputs;
  for (int64_t u = blockIdx.x; u < p.tiles * p.splits; u += gridDim.x) {
    const int64_t split = u / p.tiles, o = (u - split * p.tiles) * p.outputs + own;
    S s = r.start();
    if (o < p.kept.count) {
      const int64_t begin = split * p.each, most = begin + p.each;
      s = reduce_lane<T, V>(p, r, reduce_offset(p.kept, o), begin, most < p.reduced.count ? most : p.reduced.count,
                            lane);
    }
    if (p.rows) {
      ty_team_join(
          s, p.lanes, [&](S &a, const S &b) { r.join(a, b); }, room);
    } else if (p.lanes > 1) {
      room[thread] = s;
      for (int half = p.lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane >= half) continue;
        S t = room[thread + half * p.outputs];
        r.join(s, t);
        room[thread] = s;
      }
      __syncthreads();
    }
    if (lane > 0 || o >= p.kept.count) continue;
    if (partial) partial[o * p.splits + split] = s;
    else r.store(p.out, p.out_dtype, o, s);
  }
}

/* Joins the splits of each result, a warp for each. */
template <class R>
__global__ void __launch_bounds__(REDUCE_THREADS)
    reduce_splits(const reduce_plan p, const R r, const typename R::S *__restrict__ partial) {
  typedef typename R::S S;
  TY_SHARED(S, room, 1);
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  const int64_t warps = REDUCE_THREADS / TY_WARP;
  for (int64_t first = blockIdx.x * warps; first < p.kept.count; first += gridDim.x * warps) {
    const int64_t o = first + static_cast<int>(threadIdx.x) / TY_WARP;
    S s = r.start();
    if (o < p.kept.count)
      for (int64_t i = lane; i < p.splits; i += TY_WARP) r.join(s, partial[o * p.splits + i]);
    ty_team_join(
        s, TY_WARP, [&](S &a, const S &b) { r.join(a, b); }, room);
    if (lane == 0 && o < p.kept.count) r.store(p.out, p.out_dtype, o, s);
  }
}

/* ---- the plan ---- */

/* Dimensions [first, last) of a view: sizes of 1 go, neighbours that are one dimension in memory merge. */
static inline void reduce_collapse(reduce_dims *d, const ty_view *v, int first, int last) {
  d->n = 0;
  d->count = 1;
  for (int i = last - 1; i >= first; i--) {
    int outer = d->n - 1;
    d->count *= v->size[i];
    if (v->size[i] == 1) continue;
    if (outer >= 0 && v->stride[i] == d->stride[outer] * d->size[outer]) {
      d->size[outer] *= v->size[i];
      continue;
    }
    d->size[d->n] = v->size[i];
    d->stride[d->n++] = v->stride[i];
  }
  if (d->n == 0) {
    d->size[0] = 1;
    d->stride[0] = 1;
    d->n = 1;
  }
  d->wide = d->count > INT32_MAX;
  if (!d->wide && d->count > 0)
    for (int i = 0; i < d->n; i++) d->divisor[i].set(static_cast<uint32_t>(d->size[i]));
}

/* Whether the reduced elements come in vectors of `bytes`. */
static inline bool reduce_vectors(const reduce_plan &p, int v, int element) {
  uintptr_t bytes = static_cast<uintptr_t>(v) * static_cast<uintptr_t>(element);
  if (p.reduced.stride[0] != 1 || p.reduced.size[0] % v || reinterpret_cast<uintptr_t>(p.data) % bytes) return false;
  for (int i = 0; i < p.kept.n; i++)
    if (p.kept.size[i] > 1 && p.kept.stride[i] % v) return false;
  for (int i = 1; i < p.reduced.n; i++)
    if (p.reduced.stride[i] % v) return false;
  return true;
}

/* How the threads are laid out for vectors of v reduced elements. */
static inline void reduce_layout(reduce_plan *p, int v, int unroll) {
  const int64_t groups = (p->reduced.count + v - 1) / v;
  const int64_t fill = int64_t{ ty_cuda_processors() } * 8; /* blocks at once */
  if (p->rows) {
    p->lanes = ty_power_of_two((groups + unroll - 1) / unroll, TY_WARP);
    bool few = p->kept.count * TY_WARP < fill * REDUCE_THREADS;
    if (groups > (few ? 2 : 32) * TY_WARP * unroll) p->lanes = REDUCE_THREADS;
    p->outputs = REDUCE_THREADS / p->lanes;
  } else {
    int side = ty_power_of_two(p->kept.count, TY_WARP);
    p->lanes = ty_power_of_two((groups + unroll - 1) / unroll, REDUCE_THREADS / side);
    p->outputs = REDUCE_THREADS / p->lanes;
  }
  p->tiles = (p->kept.count + p->outputs - 1) / p->outputs;
  int64_t least = static_cast<int64_t>(p->lanes) * 4 * unroll; /* vectors that are worth a block */
  p->splits = p->tiles >= fill / 2 ? 1 : fill / p->tiles;
  if (p->splits > groups / least) p->splits = groups / least;
  if (p->splits < 1) p->splits = 1;
  p->each = (groups + p->splits - 1) / p->splits * v;
}

template <class T, int V, class R> static inline bool reduce_launch(reduce_plan *p, const R &r) {
  typedef typename R::S S;
  reduce_layout(p, V, reduce_unroll<V>);
  const reduce_plan plan = *p;
  int64_t blocks = plan.tiles * plan.splits;
  unsigned grid = ty_cuda_blocks(blocks, 1, 8);
  if (plan.splits == 1)
    return TY_LAUNCH((reduce_kernel<T, V, R>), grid, REDUCE_THREADS, 0, plan, r, static_cast<S *>(nullptr));
  ty_cuda_scratch scratch(static_cast<size_t>(plan.kept.count * plan.splits) * sizeof(S));
  if (!scratch.data) return false;
  S *partial = scratch.as<S>();
  unsigned finish = ty_cuda_blocks(plan.kept.count, REDUCE_THREADS / TY_WARP);
  return TY_LAUNCH((reduce_kernel<T, V, R>), grid, REDUCE_THREADS, 0, plan, r, partial) &&
         TY_LAUNCH((reduce_splits<R>), finish, REDUCE_THREADS, 0, plan, r, partial);
}

/* Reduces elements of T, V at a time where they lie together. */
template <class T, int V, class R> static inline bool reduce_run(const ty_kernel_args *k, const R &r) {
  const ty_view *in = k->in[0];
  const ty_p_reduce *params = static_cast<const ty_p_reduce *>(k->params);
  reduce_plan p;
  memset(&p, 0, sizeof p);
  p.data = in->data;
  p.dtype = in->dtype;
  p.out = k->out[0]->data;
  p.out_dtype = k->out[0]->dtype;
  int split = in->ndim - params->ndim_reduced;
  reduce_collapse(&p.kept, in, 0, split);
  reduce_collapse(&p.reduced, in, split, in->ndim);
  if (p.kept.count == 0) return true;
  bool alone = p.kept.count == 1 || p.reduced.count <= 1;
  p.rows = alone || p.reduced.stride[0] <= p.kept.stride[0];
  if constexpr (V > 1)
    if (p.rows && reduce_vectors(p, V, sizeof(T))) return reduce_launch<T, V>(&p, r);
  return reduce_launch<T, 1>(&p, r);
}

#endif
