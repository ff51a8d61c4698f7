/* Writing by index: scatter, scatter_add, scatter_combine, index_add, index_copy. Of repeated indices the last wins, and sums over them have one
 * order: positions are sorted by index, threads sum up pieces of a fixed number of them, and where an index goes on
 * over several pieces their sums are put together from the first to the last. */
#include "../indexing.h"
#include "index_sort.cuh"
#include "joins.cuh"

namespace {

/* out starts as a copy of x, or as zeros when there is none. */
bool fill(const ty_view *out, const ty_view *x) {
  size_t bytes = static_cast<size_t>(out->count) * ty_dtype_size[out->dtype];
  if (!x) return ty_cuda_zero(out->data, bytes);
  if (x->data == out->data || !bytes) return true;
  cudaMemcpyAsync(out->data, x->data, bytes, cudaMemcpyDefault, ty_cuda_stream());
  return ty_cuda_launched("a copy");
}

/* ---- where no destination is met twice, or all get the same ---- */

struct set {
  template <class T> TY_DEVICE_MEMBER void operator()(T &to, T from) const { to = from; }
};
struct add {
  template <class T> TY_DEVICE_MEMBER void operator()(T &to, T from) const {
    to = ty_narrow<T>(static_cast<ty_compute<T>>(ty_widen(to) + ty_widen(from)));
  }
};

/* The last position that met a destination, counted from 1. */
__global__ void __launch_bounds__(INDEX_THREADS) find_last(const ew_plan p, int64_t size, int64_t step, bool wide,
                                                           uint32_t done, uint32_t *last, ty_cuda_watch watch) {
  const uint32_t n = static_cast<uint32_t>(p.count), stride = gridDim.x * INDEX_THREADS;
  const index_list index = { p.data[2], wide };
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += stride) {
    int64_t offset[EW_OPERANDS];
    ew_offsets<2>(p, i, offset);
    int64_t at = index_at(index, offset[2]);
    if (ty_in_range(watch, at, size))
      atomicMax(last + (offset[1] + at * step), done + static_cast<uint32_t>(offset[2]) + 1);
  }
}

/* last: as found, or NULL. */
template <class T, class Put>
__global__ void __launch_bounds__(INDEX_THREADS)
    scatter(const ew_plan p, int64_t size, int64_t step, bool wide, uint32_t done, const uint32_t *last, Put put,
            ty_cuda_watch watch) {
  const uint32_t n = static_cast<uint32_t>(p.count), stride = gridDim.x * INDEX_THREADS;
  const T *src = static_cast<const T *>(p.data[0]);
  T *out = static_cast<T *>(const_cast<void *>(p.data[1]));
  const index_list index = { p.data[2], wide };
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += stride) {
    int64_t offset[EW_OPERANDS];
    ew_offsets<2>(p, i, offset);
    int64_t at = index_at(index, offset[2]);
    if (!ty_in_range(watch, at, size)) continue;
    int64_t to = offset[1] + at * step;
    if (!last || last[to] == done + static_cast<uint32_t>(offset[2]) + 1) put(out[to], src[offset[0]]);
  }
}

/* fn(plan, positions of the index before it, the numbers of its destinations) for every part of a plan; `last` as
 * found, or NULL. */
template <class Fn> bool in_parts(const index_map &m, uint32_t *last, Fn fn) {
  const char *out = static_cast<const char *>(m.plan.data[1]), *index = static_cast<const char *>(m.plan.data[2]);
  return ew_in_parts(m.plan, m.bytes, [&](const ew_plan &p) {
    int64_t done = (static_cast<const char *>(p.data[2]) - index) / m.bytes[2];
    int64_t before = (static_cast<const char *>(p.data[1]) - out) / m.bytes[1];
    return fn(p, static_cast<uint32_t>(done), last ? last + before : nullptr);
  });
}

template <class T, class Put> bool scatter_plainly(const index_map &m, uint32_t *last, Put put) {
  const int64_t size = m.size, step = m.step;
  const bool wide = m.wide;
  const ty_cuda_watch watch = ty_cuda_watched();
  return in_parts(m, last, [&](const ew_plan &p, uint32_t done, uint32_t *found) {
    return TY_LAUNCH((scatter<T, Put>), ty_cuda_blocks(p.count, INDEX_THREADS), INDEX_THREADS, 0, p, size, step, wide,
                     done, found, put, watch);
  });
}

bool find_all_last(const index_map &m, uint32_t *last) {
  const int64_t size = m.size, step = m.step;
  const bool wide = m.wide;
  const ty_cuda_watch watch = ty_cuda_watched();
  return in_parts(m, last, [&](const ew_plan &p, uint32_t done, uint32_t *found) {
    return TY_LAUNCH(find_last, ty_cuda_blocks(p.count, INDEX_THREADS), INDEX_THREADS, 0, p, size, step, wide, done,
                     found, watch);
  });
}

/* ---- sums over sorted positions ---- */

/* n sorted positions in pieces; keys from `dropped` on are left out. Rows of `width` packs, `outer` times. */
struct runs {
  const uint32_t *keys, *positions;
  uint32_t n, dropped, piece;
  int64_t pieces, outer, width;
  int lanes; /* threads that share a row, a power of two */
};

/* V neighbours, and sums of them (or what Join makes): of what they are computed with, which are rounded once, when they
 * are put. */
template <class T, int V, class Join> struct row_sum {
  typedef ty_compute<T> C;
  C x[V];
  bool empty;
  TY_DEVICE_MEMBER void clear() {
    empty = !Join::STARTS;
    for (int k = 0; k < V; k++) x[k] = 0;
  }
  template <class From> TY_DEVICE_MEMBER void add(const From *from) {
    C y[V];
    ty_load<V>(from, y);
    for (int k = 0; k < V; k++) x[k] = !Join::STARTS && empty ? y[k] : Join::join(x[k], y[k]);
    empty = false;
  }
  template <class To> TY_DEVICE_MEMBER void put(To *to) const { ty_store<V>(to, x); }
};

TY_DEVICE uint32_t piece_end(const runs &r, uint32_t begin) { return begin + r.piece < r.n ? begin + r.piece : r.n; }
TY_DEVICE bool goes_on(const runs &r, uint32_t at) { return at > 0 && at < r.n && r.keys[at - 1] == r.keys[at]; }

/* Every (outer, piece, pack): fn(outer, piece, pack). */
template <class Fn> TY_DEVICE void for_pieces(const runs &r, Fn fn) {
  const int lane = threadIdx.x & (r.lanes - 1), each = INDEX_THREADS / r.lanes;
  const int64_t rows = r.outer * r.pieces;
  for (int64_t row = int64_t{ blockIdx.x } * each + threadIdx.x / r.lanes; row < rows;
       row += int64_t{ gridDim.x } * each) {
    int64_t outer = r.outer == 1 ? 0 : row / r.pieces;
    for (int64_t i = lane; i < r.width; i += r.lanes) fn(outer, row - outer * r.pieces, i);
  }
}

/* Runs of a key within a piece are added to their target; the sum of one that comes from the piece before is the first
 * partial sum of its piece, and the second that of one that begins here and goes on. */
template <class T, int V, class Join, class Place>
__global__ void __launch_bounds__(INDEX_THREADS, 1) sum_runs(runs r, Place place, ty_compute<T> *partial) {
  for_pieces(r, [&](int64_t outer, int64_t piece, int64_t i) {
    uint32_t begin = static_cast<uint32_t>(piece) * r.piece, end = piece_end(r, begin), j = begin;
    while (j < end && r.keys[j] < r.dropped) {
      const uint32_t first = j, key = r.keys[j], position = r.positions[j];
      row_sum<T, V, Join> sum;
      sum.clear();
      do sum.add(place.source(outer, r.positions[j], i));
      while (++j < end && r.keys[j] == key);
      bool comes = first == begin && goes_on(r, begin), goes = j == end && goes_on(r, end);
      if (comes || goes) {
        sum.put(partial + (((outer * r.pieces + piece) * 2 + !comes) * r.width + i) * V);
      } else {
        T *to = place.target(outer, key, position, i);
        sum.add(to);
        sum.put(to);
      }
    }
  });
}

/* Runs over several pieces: by the piece that each begins in. */
template <class T, int V, class Join, class Place>
__global__ void __launch_bounds__(INDEX_THREADS, 1) join_runs(runs r, Place place, const ty_compute<T> *partial) {
  for_pieces(r, [&](int64_t outer, int64_t piece, int64_t i) {
    uint32_t begin = static_cast<uint32_t>(piece) * r.piece, end = piece_end(r, begin);
    const uint32_t key = r.keys[end - 1];
    if (!goes_on(r, end) || key >= r.dropped || (r.keys[begin] == key && goes_on(r, begin))) return;
    const ty_compute<T> *from = partial + (((outer * r.pieces + piece) * 2 + 1) * r.width + i) * V;
    row_sum<T, V, Join> sum;
    sum.clear();
    sum.add(from);
    from -= r.width * V; /* to the first ones */
    while (goes_on(r, end) && r.keys[end] == key) {
      from += 2 * r.width * V;
      sum.add(from);
      end = piece_end(r, end);
    }
    T *to = place.target(outer, key, r.positions[piece_end(r, begin) - 1], i);
    sum.add(to);
    sum.put(to);
  });
}

template <class T, int V, class Join, class Place> bool add_runs(runs r, const Place &place) {
  /* Short pieces where there is little to do, so that there are threads enough. */
  for (r.piece = 8; r.piece < 64 && r.n / r.piece * r.width * r.outer > 1 << 18;) r.piece *= 2;
  r.pieces = (int64_t{ r.n } + r.piece - 1) / r.piece;
  for (r.lanes = 1; r.lanes < INDEX_THREADS && r.lanes * 2 <= r.width;) r.lanes *= 2;
  ty_cuda_scratch memory(static_cast<size_t>(r.outer * r.pieces * 2 * r.width * V) * sizeof(ty_compute<T>));
  if (!memory.data) return false;
  ty_compute<T> *partial = memory.as<ty_compute<T>>();
  const unsigned blocks = ty_cuda_blocks(r.outer * r.pieces, INDEX_THREADS / r.lanes);
  return TY_LAUNCH((sum_runs<T, V, Join, Place>), blocks, INDEX_THREADS, 0, r, place, partial) &&
         TY_LAUNCH((join_runs<T, V, Join, Place>), blocks, INDEX_THREADS, 0, r, place, partial);
}

/* ---- scatter_add ---- */

template <class T> struct element_place { /* of a position of the index */
  ew_plan plan;
  int64_t step;
  bool wide;
  TY_DEVICE_MEMBER const T *source(int64_t, uint32_t position, int64_t) const {
    return static_cast<const T *>(plan.data[0]) + position;
  }
  TY_DEVICE_MEMBER T *target(int64_t, uint32_t, uint32_t position, int64_t) const {
    int64_t offset[EW_OPERANDS];
    ew_offsets<2>(plan, position, offset);
    int64_t at = index_at(index_list{ plan.data[2], wide }, position);
    return static_cast<T *>(const_cast<void *>(plan.data[1])) + offset[1] + at * step;
  }
};

/* The number of the destination, of those that positions of this index can have; `dropped` for an index out of range.
 * */
__global__ void __launch_bounds__(INDEX_THREADS)
    number_elements(index_list index, uint32_t n, ew_divisor line, ew_divisor inner, uint32_t size, uint32_t dropped,
                    uint32_t *keys, ty_cuda_watch watch) {
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += gridDim.x * INDEX_THREADS) {
    int64_t at = index_at(index, i);
    uint32_t key = dropped;
    if (ty_in_range(watch, at, size))
      key = (ew_divide(i, line) * size + static_cast<uint32_t>(at)) * inner.d + (i - ew_divide(i, inner) * inner.d);
    keys[i] = key;
  }
}

/* Around 4 million positions at a time, whose pairs stay in the cache while they are sorted. */
enum { CHUNK = 1 << 22 };

template <class T, class Join>
bool scatter_add_chunk(index_sorter *sorter, const ty_view *out, const ty_view *index, const ty_view *src, int dim) {
  const ty_lines l = ty_lines_of(index, dim);
  const ty_cuda_watch watch = ty_cuda_watched();
  index_map m;
  index_map_init(&m, out, index, dim, src);
  const uint32_t n = static_cast<uint32_t>(index->count), size = static_cast<uint32_t>(m.size);
  const uint32_t dropped = static_cast<uint32_t>(l.outer * m.size * l.inner);
  ew_divisor line, inner;
  line.set(static_cast<uint32_t>(l.size * l.inner));
  inner.set(static_cast<uint32_t>(l.inner));
  const index_list list = index_list_of(index);
  uint32_t *keys = sorter->keys;
  if (!TY_LAUNCH(number_elements, ty_cuda_blocks(n, INDEX_THREADS), INDEX_THREADS, 0, list, n, line, inner, size,
                 dropped, keys, watch) ||
      !sorter->sort(n, dropped + 1))
    return false;
  element_place<T> place = { m.plan, m.step, m.wide };
  for (int d = 0; d < place.plan.ndim; d++) place.plan.divisor[d].set(static_cast<uint32_t>(place.plan.size[d]));
  return add_runs<T, 1, Join>(runs{ sorter->keys, sorter->positions, n, dropped, 0, 0, 1, 1, 0 }, place);
}

template <class T, class Join>
bool scatter_add_sorted(const ty_view *out, const ty_view *index, const ty_view *src, int dim) {
  /* Positions of the outermost dimension have destinations of their own, unless it is the indexed one. */
  int64_t positions = dim > 0 ? index->size[0] : 1, count = index->count / positions, targets = out->count;
  int64_t each = count > CHUNK ? 1 : CHUNK / count < positions ? CHUNK / count : positions;
  if (dim > 0) targets = out->count / out->size[0] * each;
  if (each * count >= INT32_MAX || targets >= UINT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "sums at 2^31 repeated positions, or 2^32 destinations, are not supported on cuda");
  index_sorter sorter(static_cast<uint32_t>(each * count));
  for (int64_t begin = 0; sorter.ok && begin < positions; begin += each) {
    ty_view to = *out, at = *index, from = *src;
    if (dim > 0) {
      int64_t n = each < positions - begin ? each : positions - begin;
      at.size[0] = from.size[0] = to.size[0] = n;
      at.count = from.count = n * count;
      to.count = out->count / out->size[0] * n;
      at.data = static_cast<char *>(at.data) + begin * count * ty_dtype_size[at.dtype];
      from.data = static_cast<char *>(from.data) + begin * count * static_cast<int64_t>(sizeof(T));
      to.data = static_cast<char *>(to.data) + out->count / out->size[0] * begin * static_cast<int64_t>(sizeof(T));
    }
    if (!scatter_add_chunk<T, Join>(&sorter, &to, &at, &from, dim)) return false;
  }
  return sorter.ok;
}

/* ---- index_add ---- */

template <class T, int V> struct row_place {
  const T *src;
  T *out;
  int64_t count, size, width;
  TY_DEVICE_MEMBER const T *source(int64_t outer, uint32_t position, int64_t i) const {
    return src + ((outer * count + position) * width + i) * V;
  }
  TY_DEVICE_MEMBER T *target(int64_t outer, uint32_t key, uint32_t, int64_t i) const {
    return out + ((outer * size + key) * width + i) * V;
  }
};

__global__ void __launch_bounds__(INDEX_THREADS)
    number_rows(index_list index, uint32_t n, uint32_t size, int64_t skip, uint32_t *keys, ty_cuda_watch watch) {
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += gridDim.x * INDEX_THREADS) {
    int64_t at = index_at(index, i);
    keys[i] = ty_in_range(watch, at, size) && at != skip ? static_cast<uint32_t>(at) : size;
  }
}

template <class T, int V>
bool add_rows(const runs &r, const ty_lines &l, const ty_view *out, const ty_view *src, int64_t count) {
  runs packs = r;
  packs.width = l.inner / V;
  row_place<T, V> place = { static_cast<const T *>(src->data), static_cast<T *>(out->data), count, l.size,
                            packs.width };
  return add_runs<T, V, join_sum>(packs, place);
}

/* ---- index_copy ---- */

/* The last position that names a row, counted from 1. */
__global__ void __launch_bounds__(INDEX_THREADS)
    find_last_rows(index_list index, uint32_t n, int64_t size, uint32_t *last, ty_cuda_watch watch) {
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += gridDim.x * INDEX_THREADS) {
    int64_t at = index_at(index, i);
    if (ty_in_range(watch, at, size)) atomicMax(last + at, i + 1);
  }
}

/* Element i of [outer, count, inner]; src_step 0: one value for all. */
template <class T>
__global__ void __launch_bounds__(INDEX_THREADS)
    copy_rows(const T *src, int64_t src_step, T *out, index_list index, int64_t count, int64_t size, int64_t inner,
              int64_t all, const uint32_t *last) {
  for (int64_t i = int64_t{ blockIdx.x } * INDEX_THREADS + threadIdx.x; i < all;
       i += int64_t{ gridDim.x } * INDEX_THREADS) {
    int64_t row = i / inner, outer = row / count, j = row - outer * count, at = index_at(index, j);
    if (at < 0 || at >= size || last[at] != static_cast<uint32_t>(j) + 1) continue;
    out[(outer * size + at) * inner + (i - row * inner)] = src[i * src_step];
  }
}

/* fn(T{}) for the type that the dtype is added in: integers as unsigned, which wrap. */
template <class Fn> bool for_sums(int dtype, Fn fn) {
  return ty_is_float((ty_dtype)dtype) ? ty_for_floats(dtype, "index_add", fn) : ty_for_sizes(dtype, fn);
}

} // namespace

/* in: x or NULL for zeros, index, src (shaped like index, or one value); dim. */
TY_CUDA_KERNEL(scatter) {
  const ty_view *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const int dim = static_cast<const ty_p_dim *>(k->params)->dim;
  if (!fill(out, k->in[0])) return false;
  if (index->count == 0) return true;
  const bool repeats = src->count > 1 && index->size[dim] > 1;
  if (repeats && index->count >= UINT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "scatter: 2^32 positions, which may repeat, are not supported on cuda");
  index_map m;
  index_map_init(&m, out, index, dim, src);
  size_t bytes = repeats ? static_cast<size_t>(out->count) * sizeof(uint32_t) : 0;
  ty_cuda_scratch memory(bytes);
  if (!memory.data) return false;
  uint32_t *last = repeats ? memory.as<uint32_t>() : nullptr;
  if (repeats && (!ty_cuda_zero(last, bytes) || !find_all_last(m, last))) return false;
  return ty_for_sizes(out->dtype, [&](auto x) { return scatter_plainly<decltype(x)>(m, last, set{}); });
}

/* The same, adding. */
TY_CUDA_KERNEL(scatter_add) {
  const ty_view *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const int dim = static_cast<const ty_p_dim *>(k->params)->dim;
  if (!fill(out, k->in[0])) return false;
  if (index->count == 0) return true;
  return for_sums(out->dtype, [&](auto x) {
    typedef decltype(x) T;
    if (ty_lines_of(index, dim).size > 1) return scatter_add_sorted<T, join_sum>(out, index, src, dim);
    index_map m;
    index_map_init(&m, out, index, dim, src);
    return scatter_plainly<T>(m, nullptr, add{});
  });
}

/* in: x (which out may be) or NULL for zeros, index of any shape taken flat, src; dim, k: an index that adds nothing
 * (-1: none). */
TY_CUDA_KERNEL(index_add) {
  const ty_view *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const ty_p_dim *p = static_cast<const ty_p_dim *>(k->params);
  const ty_lines l = ty_lines_of(out, p->dim);
  if (!fill(out, k->in[0])) return false;
  if (index->count == 0) return true;
  if (index->count >= INT32_MAX || l.size >= UINT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "2^31 indices, or 2^32 rows, are not supported on cuda");
  const uint32_t n = static_cast<uint32_t>(index->count), size = static_cast<uint32_t>(l.size);
  const int64_t skip = p->k;
  const ty_cuda_watch watch = ty_cuda_watched();
  const index_list list = index_list_of(index);
  index_sorter sorter(n);
  if (!sorter.ok) return false;
  uint32_t *keys = sorter.keys;
  if (!TY_LAUNCH(number_rows, ty_cuda_blocks(n, INDEX_THREADS), INDEX_THREADS, 0, list, n, size, skip, keys, watch))
    return false;
  if (src->count == 0) return true;
  if (!sorter.sort(n, size + 1)) return false;
  const runs r = { sorter.keys, sorter.positions, n, size, 0, 0, l.outer, 0, 0 };
  return for_sums(out->dtype, [&](auto x) {
    typedef decltype(x) T;
    if constexpr (std::is_floating_point<ty_compute<T>>::value) {
      enum { V = 16 / sizeof(T) };
      if (l.inner % V == 0 &&
          (reinterpret_cast<uintptr_t>(src->data) | reinterpret_cast<uintptr_t>(out->data)) % 16 == 0)
        return add_rows<T, V>(r, l, out, src, index->count);
    }
    return add_rows<T, 1>(r, l, out, src, index->count);
  });
}

/* The same as scatter_add, combining: p_dim.k says how. */
TY_CUDA_KERNEL(scatter_combine) {
  const ty_view *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const ty_p_dim *p = static_cast<const ty_p_dim *>(k->params);
  if (!fill(out, k->in[0])) return false;
  if (index->count == 0) return true;
  if (p->k == TY_COMBINE_PRODUCT)
    return for_sums(out->dtype,
                    [&](auto x) { return scatter_add_sorted<decltype(x), join_product>(out, index, src, p->dim); });
  return ty_for_numbers(out->dtype, "scatter_reduce", [&](auto x) {
    typedef decltype(x) T;
    return p->k == TY_COMBINE_MAX ? scatter_add_sorted<T, join_larger>(out, index, src, p->dim)
                                  : scatter_add_sorted<T, join_smaller>(out, index, src, p->dim);
  });
}

/* in: x (which out may be), index of any shape taken flat, src or one value; dim. */
TY_CUDA_KERNEL(index_copy) {
  const ty_view *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const ty_lines l = ty_lines_of(out, static_cast<const ty_p_dim *>(k->params)->dim);
  if (!fill(out, k->in[0])) return false;
  if (index->count == 0) return true;
  if (index->count >= INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "2^31 indices are not supported on cuda");
  const uint32_t n = static_cast<uint32_t>(index->count);
  const size_t bytes = static_cast<size_t>(l.size ? l.size : 1) * sizeof(uint32_t);
  ty_cuda_scratch memory(bytes);
  if (!memory.data || !ty_cuda_zero(memory.data, bytes)) return false;
  const int64_t all = l.outer * n * l.inner, step = src->ndim > 0, count = n, size = l.size, inner = l.inner;
  const index_list list = index_list_of(index);
  const ty_cuda_watch watch = ty_cuda_watched();
  uint32_t *last = memory.as<uint32_t>();
  if (!TY_LAUNCH(find_last_rows, ty_cuda_blocks(n, INDEX_THREADS), INDEX_THREADS, 0, list, n, size, last, watch))
    return false;
  if (all == 0) return true;
  return ty_for_sizes(out->dtype, [&](auto x) {
    typedef decltype(x) T;
    const T *from = static_cast<const T *>(src->data);
    T *to = static_cast<T *>(out->data);
    return TY_LAUNCH((copy_rows<T>), ty_cuda_blocks(all, INDEX_THREADS), INDEX_THREADS, 0, from, step, to, list, count,
                     size, inner, all, last);
  });
}
