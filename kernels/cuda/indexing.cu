/* Reading by index: gather, index_select, ravel_index, nonzero. Pure moves work on elements of 1, 2, 4 or 8 bytes, whatever their
 * dtype. Writers (scatter ...) are in scatter.cu. */
#include "../indexing.h"
#include "indexing.cuh"

namespace {

/* ---- gather ---- */

template <class T>
__global__ void __launch_bounds__(INDEX_THREADS)
    gather(const ew_plan p, int64_t size, int64_t step, bool wide, ty_cuda_watch watch) {
  const uint32_t n = static_cast<uint32_t>(p.count), stride = gridDim.x * INDEX_THREADS;
  T *out = static_cast<T *>(const_cast<void *>(p.data[0]));
  const T *x = static_cast<const T *>(p.data[1]);
  const index_list index = { p.data[2], wide };
  for (uint32_t i = blockIdx.x * INDEX_THREADS + threadIdx.x; i < n; i += stride) {
    int64_t offset[EW_OPERANDS];
    ew_offsets<2>(p, i, offset);
    int64_t at = index_at(index, offset[2]);
    if (ty_in_range(watch, at, size)) out[offset[0]] = x[offset[1] + at * step];
  }
}

/* ---- index_select ---- */

/* Rows of `width` packs; a row is moved by `lanes` neighbouring threads, a power of two. */
struct selection {
  int64_t rows, count, size, width;
  int lanes;
};

template <class P>
__global__ void __launch_bounds__(INDEX_THREADS)
    select_rows(const P *x, P *out, index_list index, selection s, ty_cuda_watch watch) {
  enum { AT_ONCE = 4 };
  const int lane = threadIdx.x & (s.lanes - 1), each = INDEX_THREADS / s.lanes;
  for (int64_t row = int64_t{ blockIdx.x } * each + threadIdx.x / s.lanes; row < s.rows;
       row += int64_t{ gridDim.x } * each) {
    int64_t outer = 0, j = row;
    if (s.rows != s.count) {
      outer = s.rows < INT32_MAX ? static_cast<uint32_t>(row) / static_cast<uint32_t>(s.count) : row / s.count;
      j = row - outer * s.count;
    }
    int64_t at = index_at(index, j);
    if (!ty_in_range(watch, at, s.size)) continue;
    const P *from = x + (outer * s.size + at) * s.width;
    P *to = out + row * s.width;
    int64_t i = lane;
    for (; i + (AT_ONCE - 1) * s.lanes < s.width; i += AT_ONCE * s.lanes) {
      P pack[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) pack[k] = from[i + k * s.lanes];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) to[i + k * s.lanes] = pack[k];
    }
    for (; i < s.width; i += s.lanes) to[i] = from[i];
  }
}

/* fn(P{}) for the widest pack that rows of so many bytes at these addresses are made of. */
template <class Fn> bool for_packs(int64_t bytes, const void *a, const void *b, Fn fn) {
  uint64_t all = static_cast<uint64_t>(bytes) | reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  return all % 16 == 0  ? fn(ty_pack<uint64_t, 2>{})
         : all % 8 == 0 ? fn(uint64_t{})
         : all % 4 == 0 ? fn(uint32_t{})
         : all % 2 == 0 ? fn(uint16_t{})
                        : fn(uint8_t{});
}

/* ---- ravel_index ---- */

struct dimensions {
  int n;
  const int64_t *index[TY_MAX_DIMS];
  int64_t size[TY_MAX_DIMS];
};

__global__ void __launch_bounds__(INDEX_THREADS) ravel(dimensions d, int64_t n, int64_t *out, ty_cuda_watch watch) {
  for (int64_t i = int64_t{ blockIdx.x } * INDEX_THREADS + threadIdx.x; i < n;
       i += int64_t{ gridDim.x } * INDEX_THREADS) {
    int64_t all = 0;
    for (int j = 0; j < d.n; j++) {
      int64_t given = d.index[j][i], at = given < 0 && given >= -d.size[j] ? given + d.size[j] : given;
      all = all * d.size[j] + (ty_in_range(watch, at, d.size[j]) ? at : 0);
    }
    out[i] = all;
  }
}

/* ---- nonzero: tiles are counted, the counts summed up, and every tile writes its positions from there ---- */

enum { ROUNDS = 16, TILE = ROUNDS * INDEX_THREADS, WARPS = INDEX_THREADS / TY_WARP };

/* A float is zero when all its bits but the sign are. */
template <class T>
__global__ void __launch_bounds__(INDEX_THREADS) count_nonzero(const T *x, int64_t n, T mask, int64_t *counts) {
  TY_SHARED(int, room, TY_WARP);
  int64_t begin = int64_t{ blockIdx.x } * TILE + threadIdx.x;
  int found = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int64_t i = begin + r * INDEX_THREADS;
    found += i < n && (x[i] & mask) != 0;
  }
  found = ty_block_reduce(found, ty_plus<int>{}, room);
  if (threadIdx.x == 0) counts[blockIdx.x] = found;
}

__global__ void __launch_bounds__(1024) sum_up(int64_t *counts, int64_t n) {
  TY_SHARED(int64_t, room, TY_WARP);
  index_sum_up(counts, n, room);
}

struct coordinates {
  int ndim;
  int64_t size[TY_MAX_DIMS];
};

template <class T>
__global__ void __launch_bounds__(INDEX_THREADS)
    write_nonzero(const T *x, int64_t n, T mask, const int64_t *starts, coordinates c, int64_t *out, int64_t rows) {
  TY_SHARED(int, before, ROUNDS *WARPS);
  TY_SHARED(unsigned, votes, ROUNDS *WARPS);
  TY_SHARED(int, room, TY_WARP);
  const int warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP;
  const int64_t begin = int64_t{ blockIdx.x } * TILE + threadIdx.x;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int64_t i = begin + r * INDEX_THREADS;
    unsigned vote = __ballot_sync(0xffffffffu, i < n && (x[i] & mask) != 0);
    if (lane == 0) {
      votes[r * WARPS + warp] = vote;
      before[r * WARPS + warp] = __popc(vote);
    }
  }
  __syncthreads();
  int total, own = threadIdx.x < ROUNDS * WARPS ? before[threadIdx.x] : 0;
  int sum = index_sum_before(own, &total, room);
  if (threadIdx.x < ROUNDS * WARPS) before[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < ROUNDS; r++) {
    unsigned vote = votes[r * WARPS + warp];
    if (!(vote >> lane & 1)) continue;
    int64_t row = starts[blockIdx.x] + before[r * WARPS + warp] + __popc(vote & ((1u << lane) - 1));
    if (row >= rows) continue; /* the tensor has changed since it was counted */
    int64_t rest = begin + r * INDEX_THREADS;
    for (int d = c.ndim - 1; d >= 0; d--) {
      int64_t next = d == 0            ? 0
                     : n <= UINT32_MAX ? static_cast<uint32_t>(rest) / static_cast<uint32_t>(c.size[d])
                                       : rest / c.size[d];
      out[row * c.ndim + d] = rest - next * c.size[d];
      rest = next;
    }
  }
}

} // namespace

/* in: x, index; dim. out has the shape of index. */
TY_CUDA_KERNEL(gather) {
  const ty_view *x = k->in[0], *index = k->in[1], *out = k->out[0];
  index_map m;
  index_map_init(&m, x, index, static_cast<const ty_p_dim *>(k->params)->dim, out);
  const int64_t size = m.size, step = m.step;
  const bool wide = m.wide;
  const ty_cuda_watch watch = ty_cuda_watched();
  return ty_for_sizes(x->dtype, [&](auto type) {
    typedef decltype(type) T;
    return ew_in_parts(m.plan, m.bytes, [&](const ew_plan &p) {
      return TY_LAUNCH(gather<T>, ty_cuda_blocks(p.count, INDEX_THREADS), INDEX_THREADS, 0, p, size, step, wide, watch);
    });
  });
}

/* in: x, index of any shape taken flat; dim. */
TY_CUDA_KERNEL(index_select) {
  const ty_view *x = k->in[0], *index = k->in[1], *out = k->out[0];
  ty_lines l = ty_lines_of(x, static_cast<const ty_p_dim *>(k->params)->dim);
  int64_t bytes = l.inner * ty_dtype_size[x->dtype];
  if (l.outer * index->count == 0) return true;
  const index_list list = index_list_of(index);
  const ty_cuda_watch watch = ty_cuda_watched();
  return for_packs(bytes, x->data, out->data, [&](auto pack) {
    typedef decltype(pack) P;
    selection s = { l.outer * index->count, index->count, l.size, bytes / static_cast<int64_t>(sizeof(P)), 1 };
    while (s.lanes < INDEX_THREADS && s.lanes * 2 <= s.width) s.lanes *= 2;
    const P *from = static_cast<const P *>(x->data);
    P *to = static_cast<P *>(out->data);
    return TY_LAUNCH(select_rows<P>, ty_cuda_blocks(s.rows, INDEX_THREADS / s.lanes), INDEX_THREADS, 0, from, to, list,
                     s, watch);
  });
}

/* in: x; out: [count, ndim] with the count that the op has found. */
TY_CUDA_KERNEL(nonzero) {
  const ty_view *x = k->in[0], *out = k->out[0];
  if (x->count == 0 || out->count == 0) return true;
  const int64_t n = x->count, tiles = (n + TILE - 1) / TILE, rows = out->size[0];
  if (tiles > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "nonzero of more than 2^43 elements is not supported on cuda");
  ty_cuda_scratch memory(static_cast<size_t>(tiles) * sizeof(int64_t));
  if (!memory.data) return false;
  int64_t *starts = memory.as<int64_t>(), *to = static_cast<int64_t *>(out->data);
  coordinates c = { x->ndim, {} };
  memcpy(c.size, x->size, sizeof c.size);
  const unsigned blocks = static_cast<unsigned>(tiles);
  return ty_for_sizes(x->dtype, [&](auto type) {
    typedef decltype(type) T;
    const T all = static_cast<T>(~T{}), mask = ty_is_float(static_cast<ty_dtype>(x->dtype)) ? all >> 1 : all;
    const T *from = static_cast<const T *>(x->data);
    return TY_LAUNCH(count_nonzero<T>, blocks, INDEX_THREADS, 0, from, n, mask, starts) &&
           TY_LAUNCH(sum_up, 1, 1024, 0, starts, tiles) &&
           TY_LAUNCH(write_nonzero<T>, blocks, INDEX_THREADS, 0, from, n, mask, starts, c, to, rows);
  });
}

/* in: positions i64 in each of the dimensions; sizes. out: their number over all. */
TY_CUDA_KERNEL(ravel_index) {
  const ty_p_sizes *p = static_cast<const ty_p_sizes *>(k->params);
  const int64_t n = k->out[0]->count;
  if (n == 0) return true;
  dimensions d = { p->n, {}, {} };
  for (int j = 0; j < p->n; j++) {
    d.index[j] = static_cast<const int64_t *>(k->in[j]->data);
    d.size[j] = p->size[j];
  }
  const ty_cuda_watch watch = ty_cuda_watched();
  int64_t *out = static_cast<int64_t *>(k->out[0]->data);
  return TY_LAUNCH(ravel, ty_cuda_blocks(n, INDEX_THREADS), INDEX_THREADS, 0, d, n, out, watch);
}
