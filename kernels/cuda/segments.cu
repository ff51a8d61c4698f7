/* Segments of positions along a dimension: bringing equal elements of an index together, reductions, what gives their
 * result back to every position, and softmax. A team of threads has a segment of one column, and puts together what its
 * members have in a fixed order. */
#include "segments.cuh"

#include "../indexing.h"
#include "exp_sum.cuh"
#include "index_sort.cuh"
#include "joins.cuh"
#include "teams.cuh"

namespace {

/* ---- equal elements together ---- */

__global__ void __launch_bounds__(INDEX_THREADS)
    number(index_list index, uint32_t n, uint32_t m, uint32_t *keys, ty_cuda_watch watch) {
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += gridDim.x * INDEX_THREADS) {
    const int64_t at = index_at(index, i);
    keys[i] = ty_in_range(watch, at, m) ? static_cast<uint32_t>(at) : m;
  }
}

__global__ void __launch_bounds__(INDEX_THREADS) write_sorted(const uint32_t *keys, const uint32_t *positions,
                                                              uint32_t n, int64_t m, int64_t *order, int64_t *offsets) {
  const int64_t all = n > m + 1 ? n : m + 1, step = int64_t{ gridDim.x } * INDEX_THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * INDEX_THREADS + threadIdx.x; i < all; i += step) {
    if (i < n) order[i] = positions[i];
    if (i > m) continue;
    uint32_t low = 0, high = n; /* how many keys are below i */
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (keys[middle] < i) low = middle + 1;
      else high = middle;
    }
    offsets[i] = low;
  }
}

/* ---- teams ---- */

template <class T> struct segment_job {
  const T *x, *y; /* y: of weights_backward */
  T *out;
  ty_offsets offsets;
  index_list order;
  int64_t n, m, inner, lines; /* lines: outer * m * inner */
  int team;
  ty_number empty;
};

/* Segment s of a column, for a member of its team: positions from `at` on, in steps of the team. */
struct segment_place {
  int64_t outer, s, i, begin, end, at;
};

/* fn(place, whether it is one) for all segments of all columns; all threads of a block call it together. */
template <class T, class Fn> TY_DEVICE void for_segments(const segment_job<T> &j, const Fn &fn) {
  const int64_t each = INDEX_THREADS / j.team;
  for (int64_t first = blockIdx.x * each; first < j.lines; first += gridDim.x * each) {
    const int64_t line = first + threadIdx.x / j.team;
    segment_place p = {};
    if (line < j.lines) {
      p.i = line % j.inner;
      p.s = line / j.inner % j.m;
      p.outer = line / j.inner / j.m;
      p.begin = j.offsets.begin(p.s);
      p.end = j.offsets.begin(p.s + 1);
      p.at = p.begin + threadIdx.x % j.team;
    }
    fn(p, line < j.lines);
  }
}

/* Where element j of a segment lies, or -1 after a report. */
template <class T>
TY_DEVICE int64_t element(const segment_job<T> &j, const segment_place &p, int64_t at, const ty_cuda_watch &watch) {
  if (j.order.data) {
    at = index_at(j.order, at);
    if (!ty_in_range(watch, at, j.n)) return -1;
  }
  return (p.outer * j.n + at) * j.inner + p.i;
}

template <class C> struct joined {
  C x;
  int32_t some;
};

template <class T, class Join>
__global__ void __launch_bounds__(INDEX_THREADS, 1) reduce_segments(const segment_job<T> j, ty_cuda_watch watch) {
  typedef ty_compute<T> C;
  TY_SHARED(joined<C>, room, TY_WARP);
  for_segments(j, [&](const segment_place &p, bool inside) {
    joined<C> s = { C(0), 0 };
    for (int64_t at = p.at; at < p.end; at += j.team) {
      const int64_t e = element(j, p, at, watch);
      if (e < 0) continue;
      const C x = ty_widen(j.x[e]);
      s.x = s.some ? Join::join(s.x, x) : x;
      s.some = 1;
    }
    ty_team_join(
        s, j.team,
        [](joined<C> &a, const joined<C> &b) {
          if (b.some) a.x = a.some ? Join::join(a.x, b.x) : b.x;
          a.some |= b.some;
        },
        room);
    if (!inside || threadIdx.x % j.team != 0) return;
    const C empty = std::is_floating_point<C>::value ? static_cast<C>(j.empty.f) : static_cast<C>(j.empty.i);
    j.out[(p.outer * j.m + p.s) * j.inner + p.i] = ty_narrow<T>(s.some ? s.x : empty);
  });
}

template <class T>
__global__ void __launch_bounds__(INDEX_THREADS, 1) spread(const segment_job<T> j, ty_cuda_watch watch) {
  for_segments(j, [&](const segment_place &p, bool inside) {
    if (!inside) return;
    const T x = j.x[(p.outer * j.m + p.s) * j.inner + p.i];
    for (int64_t at = p.at; at < p.end; at += j.team) {
      const int64_t e = element(j, p, at, watch);
      if (e >= 0) j.out[e] = x;
    }
  });
}

template <class T>
__global__ void __launch_bounds__(INDEX_THREADS, 1) weigh(const segment_job<T> j, ty_cuda_watch watch) {
  typedef ty_compute<T> C;
  typedef ty_exp_sum<C> S;
  TY_SHARED(S, room, TY_WARP);
  for_segments(j, [&](const segment_place &p, bool inside) {
    S s = ty_exp_sum_start<C>();
    for (int64_t at = p.at; at < p.end; at += j.team) {
      const int64_t e = element(j, p, at, watch);
      if (e < 0) continue;
      const C x = ty_widen(j.x[e]);
      ty_exp_sum_add<C, 1>(s, &x);
    }
    ty_team_join(
        s, j.team, [](S &a, const S &b) { ty_exp_sum_join(a, b); }, room);
    if (!inside) return;
    const C scale = ty_finite(s.top) ? 1 / s.sum : s.top - s.top;
    for (int64_t at = p.at; at < p.end; at += j.team) {
      const int64_t e = element(j, p, at, watch);
      if (e >= 0) j.out[e] = ty_narrow<T>(ty_exp(ty_widen(j.x[e]) - s.top) * scale);
    }
  });
}

/* x: the gradient of y. */
template <class T>
__global__ void __launch_bounds__(INDEX_THREADS, 1) weigh_backward(const segment_job<T> j, ty_cuda_watch watch) {
  typedef ty_compute<T> C;
  TY_SHARED(C, room, TY_WARP);
  for_segments(j, [&](const segment_place &p, bool inside) {
    C sum = 0;
    for (int64_t at = p.at; at < p.end; at += j.team) {
      const int64_t e = element(j, p, at, watch);
      if (e >= 0) sum += ty_widen(j.x[e]) * ty_widen(j.y[e]);
    }
    ty_team_join(
        sum, j.team, [](C &a, const C &b) { a += b; }, room);
    if (!inside) return;
    for (int64_t at = p.at; at < p.end; at += j.team) {
      const int64_t e = element(j, p, at, watch);
      if (e >= 0) j.out[e] = ty_narrow<T>(ty_widen(j.y[e]) * (ty_widen(j.x[e]) - sum));
    }
  });
}

/* Segments of the dimension of `whole`, which has all positions; fn(job, blocks, what watches). Outputs that an order
 * need not reach begin as zeros. */
template <class T, class Fn> bool over_segments(const ty_kernel_args *k, const ty_view *whole, const Fn &fn) {
  const ty_view *order = k->in[2];
  const ty_p_segments *p = static_cast<const ty_p_segments *>(k->params);
  const ty_lines l = ty_lines_of(whole, p->dim);
  segment_job<T> j = {};
  j.offsets = ty_offsets_of(k->in[1], l.size);
  if (!ty_offsets_checked(j.offsets)) return false;
  j.x = static_cast<const T *>(k->in[0]->data);
  j.y = k->nin > 3 ? static_cast<const T *>(k->in[3]->data) : nullptr;
  j.out = static_cast<T *>(k->out[0]->data);
  if (order) j.order = index_list_of(order);
  j.n = l.size;
  j.m = j.offsets.m;
  j.inner = l.inner;
  j.lines = l.outer * j.m * l.inner;
  j.empty = p->empty;
  if (j.lines == 0 || k->out[0]->count == 0) return true;
  /* Neighbouring columns are read together; of few, neighbouring positions. */
  const int64_t warp = TY_WARP, beside = warp / (l.inner < warp ? l.inner : warp), mean = l.size / j.m;
  j.team = ty_power_of_two(beside < mean ? beside : mean, TY_WARP);
  const size_t bytes = static_cast<size_t>(k->out[0]->count) * sizeof(T);
  if (order && k->out[0] == whole && !ty_cuda_zero(k->out[0]->data, bytes)) return false;
  return fn(j, ty_cuda_blocks(j.lines, INDEX_THREADS / j.team), ty_cuda_watched());
}

template <class T, class Join> bool reduce(const ty_kernel_args *k) {
  return over_segments<T>(k, k->in[0], [&](const segment_job<T> &j, unsigned blocks, const ty_cuda_watch &watch) {
    const segment_job<T> job = j;
    return TY_LAUNCH((reduce_segments<T, Join>), blocks, INDEX_THREADS, 0, job, watch);
  });
}

} // namespace

/* in: index [n]; out: order [n], offsets [m + 1]. */
TY_CUDA_KERNEL(segments_of) {
  const ty_view *index = k->in[0];
  const int64_t m = k->out[1]->count - 1;
  if (index->count >= INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "2^31 indices are not supported on cuda");
  const uint32_t n = static_cast<uint32_t>(index->count), limit = static_cast<uint32_t>(m);
  int64_t *order = static_cast<int64_t *>(k->out[0]->data), *offsets = static_cast<int64_t *>(k->out[1]->data);
  if (n == 0) return ty_cuda_zero(offsets, sizeof *offsets * static_cast<size_t>(m + 1));
  index_sorter sorter(n);
  if (!sorter.ok) return false;
  uint32_t *keys = sorter.keys;
  const index_list list = index_list_of(index);
  const ty_cuda_watch watch = ty_cuda_watched();
  if (!TY_LAUNCH(number, ty_cuda_blocks(n, INDEX_THREADS), INDEX_THREADS, 0, list, n, limit, keys, watch) ||
      !sorter.sort(n, limit + 1))
    return false;
  const uint32_t *sorted = sorter.keys, *positions = sorter.positions;
  return TY_LAUNCH(write_sorted, ty_cuda_blocks(n > m ? n : m + 1, INDEX_THREADS), INDEX_THREADS, 0, sorted, positions,
                   n, m, order, offsets);
}

/* in: x, offsets [m + 1], order [n] or NULL. */
TY_CUDA_KERNEL(segment_sum) {
  return ty_for_numbers(k->out[0]->dtype, "segment_sum", [&](auto x) { return reduce<decltype(x), join_sum>(k); });
}

/* The same; what `k` of the parameters says. */
TY_CUDA_KERNEL(segment_combine) {
  const int64_t kind = static_cast<const ty_p_segments *>(k->params)->k;
  return ty_for_numbers(k->out[0]->dtype, "segment_combine", [&](auto x) {
    typedef decltype(x) T;
    return kind == TY_COMBINE_MAX   ? reduce<T, join_larger>(k)
           : kind == TY_COMBINE_MIN ? reduce<T, join_smaller>(k)
                                    : reduce<T, join_product>(k);
  });
}

/* in: g, offsets, order or NULL. */
TY_CUDA_KERNEL(segment_spread) {
  return ty_for_sizes(k->out[0]->dtype, [&](auto x) {
    typedef decltype(x) T;
    return over_segments<T>(k, k->out[0], [&](const segment_job<T> &j, unsigned blocks, const ty_cuda_watch &watch) {
      const segment_job<T> job = j;
      return TY_LAUNCH(spread<T>, blocks, INDEX_THREADS, 0, job, watch);
    });
  });
}

/* in: x, offsets, order or NULL. */
TY_CUDA_KERNEL(segment_weights) {
  return ty_for_floats(k->out[0]->dtype, "segment_softmax", [&](auto x) {
    typedef decltype(x) T;
    return over_segments<T>(k, k->out[0], [&](const segment_job<T> &j, unsigned blocks, const ty_cuda_watch &watch) {
      const segment_job<T> job = j;
      return TY_LAUNCH(weigh<T>, blocks, INDEX_THREADS, 0, job, watch);
    });
  });
}

/* in: g, offsets, order or NULL, y. */
TY_CUDA_KERNEL(segment_weights_backward) {
  return ty_for_floats(k->out[0]->dtype, "segment_softmax", [&](auto x) {
    typedef decltype(x) T;
    return over_segments<T>(k, k->out[0], [&](const segment_job<T> &j, unsigned blocks, const ty_cuda_watch &watch) {
      const segment_job<T> job = j;
      return TY_LAUNCH(weigh_backward<T>, blocks, INDEX_THREADS, 0, job, watch);
    });
  });
}
