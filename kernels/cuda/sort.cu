/* sort and topk along one dimension, stable. Values become unsigned keys whose order is the wanted one (NaN largest, -0
 * equal to 0), paired with their position, so that no two pairs are equal. Tiles of pairs are sorted in shared memory
 * (Batcher 1968); lines of several tiles are merged, or, where few are wanted, the best of each tile are sorted
 * again. The longest lines, one of which keeps a GPU busy, are sorted digit by digit. */
#include <utility>

#include "../cpu/lines.h"
#include "radix_sort.cuh"
#include "teams.cuh"

enum { THREADS = 256, TILE = 2048, PART = 1024 /* pairs that a block merges */, OWN = PART / THREADS };

struct sort_job {
  int dtype;
  uint64_t flip; /* all ones of a key for descending order: ties still stay in order */
  ty_lines l;
  int64_t k;            /* how many come out of each line */
  int64_t first, lines; /* those of this launch */
  const void *x;
  void *values; /* NULL: positions alone are wanted */
  int64_t *positions;
};

/* ---- keys and pairs ---- */

TY_DEVICE uint64_t float_key(uint64_t bits, uint64_t sign, uint64_t infinity) {
  if ((bits & ~sign) > infinity) return sign | (sign - 1); /* NaN */
  if (bits == sign) bits = 0;
  return bits & sign ? ~bits & (sign | (sign - 1)) : bits | sign;
}

TY_DEVICE uint64_t key_at(const void *x, int64_t i, int dtype) {
  switch (dtype) {
    case TY_BOOL:
    case TY_U8: return static_cast<const uint8_t *>(x)[i];
    case TY_I8: return static_cast<const uint8_t *>(x)[i] ^ 0x80u;
    case TY_I16: return static_cast<const uint16_t *>(x)[i] ^ 0x8000u;
    case TY_I32: return static_cast<const uint32_t *>(x)[i] ^ 0x80000000u;
    case TY_I64: return static_cast<const uint64_t *>(x)[i] ^ 0x8000000000000000u;
    case TY_F16: return float_key(static_cast<const uint16_t *>(x)[i], 0x8000u, 0x7c00u);
    case TY_BF16: return float_key(static_cast<const uint16_t *>(x)[i], 0x8000u, 0x7f80u);
    case TY_F32: return float_key(static_cast<const uint32_t *>(x)[i], 0x80000000u, 0x7f800000u);
    default: return float_key(static_cast<const uint64_t *>(x)[i], 0x8000000000000000u, 0x7ff0000000000000u);
  }
}

/* Key and position in 32 bits each. */
struct narrow_pair {
  uint64_t both;
  TY_DEVICE_MEMBER static narrow_pair make(uint64_t key, int64_t at) {
    return { key << 32 | static_cast<uint64_t>(at) };
  }
  TY_DEVICE_MEMBER static narrow_pair last() { return { UINT64_MAX }; } /* behind every other */
  TY_DEVICE_MEMBER static bool before(const narrow_pair &a, const narrow_pair &b) { return a.both < b.both; }
  TY_DEVICE_MEMBER static int64_t position(const narrow_pair &a) { return static_cast<int64_t>(a.both & UINT32_MAX); }
};
struct wide_pair {
  uint64_t key;
  int64_t at;
  TY_DEVICE_MEMBER static wide_pair make(uint64_t key, int64_t at) { return { key, at }; }
  TY_DEVICE_MEMBER static wide_pair last() { return { UINT64_MAX, INT64_MAX }; }
  TY_DEVICE_MEMBER static bool before(const wide_pair &a, const wide_pair &b) {
    return a.key < b.key || (a.key == b.key && a.at < b.at);
  }
  TY_DEVICE_MEMBER static int64_t position(const wide_pair &a) { return a.at; }
};

/* ---- lines in memory ---- */

TY_DEVICE int64_t line_in(const sort_job &j, int64_t line, int64_t size) {
  if (j.l.inner == 1) return (j.first + line) * size; /* no division */
  const int64_t outer = (j.first + line) / j.l.inner;
  return outer * size * j.l.inner + (j.first + line - outer * j.l.inner);
}

template <class T> TY_DEVICE void move(void *to, int64_t i, const void *from, int64_t at) {
  static_cast<T *>(to)[i] = static_cast<const T *>(from)[at];
}

/* The i-th of a line's results. */
template <class P> TY_DEVICE void emit(const sort_job &j, int64_t line, int64_t i, const P &pair) {
  const int64_t at = P::position(pair), to = line_in(j, line, j.k) + i * j.l.inner;
  j.positions[to] = at;
  if (!j.values) return;
  const int64_t from = line_in(j, line, j.l.size) + at * j.l.inner;
  switch (j.dtype) {
    case TY_BOOL:
    case TY_U8:
    case TY_I8: return move<uint8_t>(j.values, to, j.x, from);
    case TY_I16:
    case TY_F16:
    case TY_BF16: return move<uint16_t>(j.values, to, j.x, from);
    case TY_I32:
    case TY_F32: return move<uint32_t>(j.values, to, j.x, from);
    default: return move<uint64_t>(j.values, to, j.x, from);
  }
}

/* ---- tiles ---- */

/* Sorts every `length` (a power of two) neighbours of a tile. Up to 32 apart, the pairs that a warp compares are its
 * own. */
template <class P> TY_DEVICE void sort_shared(ty_shared_ptr<P> tile, int length) {
  for (int size = 2; size <= length; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int p = static_cast<int>(threadIdx.x); p < TILE / 2; p += THREADS) {
        const int i = 2 * p - (p & (stride - 1)), j = i + stride;
        const P a = tile[i], b = tile[j];
        const bool rising = (i & (length - 1) & size) == 0;
        if (P::before(b, a) == rising) {
          tile[i] = b;
          tile[j] = a;
        }
      }
      if (stride > TY_WARP || (stride == 1 && size >= TY_WARP)) __syncthreads();
      else __syncwarp();
    }
  }
  __syncthreads();
}

/* Sorts pieces of `length` of each line of n: of x, or of pairs that are there already. The first `keep` of each piece
 * go to `to`, or, where it is NULL, out. */
template <class P>
__global__ void __launch_bounds__(THREADS)
    sort_tiles(const sort_job j, const P *from, int64_t n, int length, P *to, int keep) {
  TY_SHARED(P, tile, TILE);
  const int64_t pieces = (n + length - 1) / length, all = j.lines * pieces;
  const int each = TILE / length; /* pieces of a block */
  for (int64_t first = int64_t{ blockIdx.x } * each; first < all; first += int64_t{ gridDim.x } * each) {
    for (int s = static_cast<int>(threadIdx.x); s < TILE; s += THREADS) {
      const int64_t piece = first + s / length, line = pieces == 1 ? piece : piece / pieces;
      const int64_t i = (piece - line * pieces) * length + s % length;
      P pair = P::last();
      if (piece < all && i < n)
        pair = from ? from[line * n + i]
                    : P::make(key_at(j.x, line_in(j, line, j.l.size) + i * j.l.inner, j.dtype) ^ j.flip, i);
      tile[s] = pair;
    }
    __syncthreads();
    sort_shared<P>(tile, length);
    for (int s = static_cast<int>(threadIdx.x); s < TILE; s += THREADS) {
      const int64_t piece = first + s / length, line = pieces == 1 ? piece : piece / pieces;
      if (piece >= all || s % length >= keep) continue;
      const P pair = tile[s];
      if (to) to[piece * keep + s % length] = pair;
      else emit(j, line, s % length, pair);
    }
    __syncthreads();
  }
}

/* ---- merging ---- */

/* How many of a's come among the first d of a and b together. */
template <class P, class A> TY_DEVICE int64_t split_at(const A &a, int64_t na, const A &b, int64_t nb, int64_t d) {
  int64_t low = d > nb ? d - nb : 0, high = d < na ? d : na;
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    const P left = a[mid], right = b[d - 1 - mid];
    if (P::before(left, right)) low = mid + 1;
    else high = mid;
  }
  return low;
}

/* Merges neighbouring runs of `width` in each line of n pairs; a block makes PART pairs of the result. */
template <class P>
__global__ void __launch_bounds__(THREADS)
    merge_runs(const sort_job j, const P *from, int64_t n, int64_t width, P *to) {
  TY_SHARED(P, room, PART);
  TY_SHARED(int64_t, splits, 2);
  const int64_t parts = n / PART; /* n is a multiple of TILE, and so is width */
  for (int64_t part = blockIdx.x; part < j.lines * parts; part += gridDim.x) {
    const int64_t line = part / parts, at = (part - line * parts) * PART, start = at / (2 * width) * (2 * width);
    const P *a = from + line * n + start, *b = a + width;
    const int64_t na = width < n - start ? width : n - start, rest = n - start - na, nb = width < rest ? width : rest;
    if (threadIdx.x < 2) splits[threadIdx.x] = split_at<P>(a, na, b, nb, at - start + threadIdx.x * PART);
    __syncthreads();
    const int64_t from_a = splits[0], to_a = splits[1], from_b = at - start - from_a;
    const int count = static_cast<int>(to_a - from_a);
    for (int i = static_cast<int>(threadIdx.x); i < PART; i += THREADS)
      room[i] = i < count ? a[from_a + i] : b[from_b + i - count];
    __syncthreads();
    const int d = static_cast<int>(threadIdx.x) * OWN;
    int p = static_cast<int>(split_at<P>(room + 0, count, room + count, PART - count, d)), q = count + d - p;
    for (int i = 0; i < OWN; i++) {
      bool left = q >= PART;
      if (!left && p < count) {
        const P x = room[p], y = room[q];
        left = P::before(x, y);
      }
      const P pair = room[left ? p : q];
      p += left;
      q += !left;
      if (to) to[line * n + at + d + i] = pair;
      else if (at + d + i < j.k) emit(j, line, at + d + i, pair);
    }
    __syncthreads();
  }
}

/* ---- long lines, digit by digit ---- */

/* From so many elements on, merging would move more. */
enum { RADIX_LEAST = 1 << 17 };

/* The bits of a value from its key; NaN and 0, which have one key each for several values, are read. */
TY_DEVICE uint64_t bits_of(uint64_t key, const void *x, int64_t i, int dtype) {
  switch (dtype) {
    case TY_BOOL:
    case TY_U8: return key;
    case TY_I8: return key ^ 0x80u;
    case TY_I16: return key ^ 0x8000u;
    case TY_I32: return key ^ 0x80000000u;
    case TY_I64: return key ^ 0x8000000000000000u;
    default: break;
  }
  const int bytes = dtype == TY_F64 ? 8 : dtype == TY_F32 ? 4 : 2;
  const uint64_t sign = uint64_t{ 1 } << (8 * bytes - 1);
  if (key != sign && key != (sign | (sign - 1))) return key & sign ? key ^ sign : ~key;
  return bytes == 8   ? static_cast<const uint64_t *>(x)[i]
         : bytes == 4 ? uint64_t{ static_cast<const uint32_t *>(x)[i] }
                      : uint64_t{ static_cast<const uint16_t *>(x)[i] };
}

/* A line as what is read and written. */
template <class K> struct radix_line {
  sort_job j;
  int64_t from, to; /* its first elements */
  TY_DEVICE_MEMBER K key(uint32_t i) const {
    return static_cast<K>(key_at(j.x, from + i * j.l.inner, j.dtype) ^ j.flip);
  }
  TY_DEVICE_MEMBER uint32_t position(uint32_t i) const { return i; }
  TY_DEVICE_MEMBER void put(uint32_t i, K key, uint32_t position) const {
    if (i >= j.k) return;
    const int64_t at = to + i * j.l.inner;
    j.positions[at] = position;
    if (!j.values) return;
    const uint64_t bits = bits_of(key ^ j.flip, j.x, from + position * j.l.inner, j.dtype);
    switch (j.dtype) {
      case TY_BOOL:
      case TY_U8:
      case TY_I8: static_cast<uint8_t *>(j.values)[at] = static_cast<uint8_t>(bits); return;
      case TY_I16:
      case TY_F16:
      case TY_BF16: static_cast<uint16_t *>(j.values)[at] = static_cast<uint16_t>(bits); return;
      case TY_I32:
      case TY_F32: static_cast<uint32_t *>(j.values)[at] = static_cast<uint32_t>(bits); return;
      default: static_cast<uint64_t *>(j.values)[at] = bits;
    }
  }
};

template <class K> static bool run_radix(const sort_job &j, int bits) {
  typedef radix_pairs<K> pairs;
  const uint32_t n = static_cast<uint32_t>(j.l.size);
  const size_t each = size_t{ n } * (sizeof(K) + sizeof(uint32_t)), before = bits > RADIX_BITS ? 2 : 0;
  ty_cuda_scratch scratch(before * each + radix_counts<K>(n) * sizeof(uint32_t));
  if (!scratch.data) return false;
  K *keys = scratch.as<K>();
  uint32_t *positions = reinterpret_cast<uint32_t *>(keys + before * n), *counts = positions + before * n;
  pairs a = { keys, positions }, b = { keys + n, positions + n };
  for (int64_t line = 0; line < j.lines; line++) {
    const int64_t outer = line / j.l.inner, inner = line - outer * j.l.inner;
    const radix_line<K> own = { j, outer * j.l.size * j.l.inner + inner, outer * j.k * j.l.inner + inner };
    if (bits <= RADIX_BITS) {
      if (!radix_pass<K>(own, own, n, 0, counts)) return false;
      continue;
    }
    if (!radix_pass<K>(own, a, n, 0, counts)) return false;
    int shift = RADIX_BITS;
    for (; shift < bits - RADIX_BITS; shift += RADIX_BITS, std::swap(a, b))
      if (!radix_pass<K>(a, b, n, shift, counts)) return false;
    if (!radix_pass<K>(a, own, n, shift, counts)) return false;
  }
  return true;
}

/* ---- entries ---- */

template <class P>
static bool launch_tiles(const sort_job &j, const P *from, int64_t n, P *to, int keep, int64_t *left) {
  int length = ty_power_of_two(n, TILE);
  int64_t pieces = (n + length - 1) / length;
  if (keep > length) keep = length;
  *left = pieces * keep;
  unsigned grid = ty_cuda_blocks(j.lines * pieces, TILE / length);
  return TY_LAUNCH((sort_tiles<P>), grid, THREADS, 0, j, from, n, length, to, keep);
}

/* Lines of several tiles: `room` pairs of each fit into `a` and `b`. */
template <class P> static bool run_long(const sort_job &j, bool few, P *a, P *b) {
  const P *none = nullptr;
  P *out = nullptr;
  int64_t n, ignored;
  if (!launch_tiles<P>(j, none, j.l.size, a, few ? static_cast<int>(j.k) : int{ TILE }, &n)) return false;
  if (few) {
    for (; n > TILE; std::swap(a, b))
      if (!launch_tiles<P>(j, a, n, b, static_cast<int>(j.k), &n)) return false;
    return launch_tiles<P>(j, a, n, out, static_cast<int>(j.k), &ignored);
  }
  unsigned grid = ty_cuda_blocks(j.lines * (n / PART), 1);
  for (int64_t width = TILE; width < n; width *= 2, std::swap(a, b)) {
    P *to = 2 * width < n ? b : out;
    const P *from = a;
    if (!TY_LAUNCH((merge_runs<P>), grid, THREADS, 0, j, from, n, width, to)) return false;
  }
  return true;
}

template <class P> static bool run(sort_job j) {
  int64_t lines = j.lines, ignored;
  P *out = nullptr;
  const P *none = nullptr;
  if (j.l.size <= TILE) return launch_tiles<P>(j, none, j.l.size, out, static_cast<int>(j.k), &ignored);
  const bool few = j.k <= TILE / 4;
  const int64_t tiles = (j.l.size + TILE - 1) / TILE, room = tiles * (few ? j.k : int64_t{ TILE });
  int64_t batch = (int64_t{ 256 } << 20) / (2 * room * static_cast<int64_t>(sizeof(P))); /* lines at a time */
  batch = batch < 1 ? 1 : batch < lines ? batch : lines;
  ty_cuda_scratch scratch(static_cast<size_t>(2 * batch * room) * sizeof(P));
  if (!scratch.data) return false;
  for (j.first = 0; j.first < lines; j.first += batch) {
    j.lines = batch < lines - j.first ? batch : lines - j.first;
    if (!run_long<P>(j, few, scratch.as<P>(), scratch.as<P>() + batch * room)) return false;
  }
  return true;
}

static bool sort_lines(const ty_kernel_args *k, int64_t count) {
  const ty_view *x = k->in[0];
  const ty_p_dim *p = static_cast<const ty_p_dim *>(k->params);
  const int bits = 8 * ty_dtype_size[x->dtype];
  sort_job j = {};
  j.dtype = x->dtype;
  j.flip = p->flag ? UINT64_MAX >> (64 - bits) : 0;
  j.l = ty_lines_of(x, p->dim);
  j.k = count < 0 ? j.l.size : count;
  j.lines = j.l.outer * j.l.inner;
  j.x = x->data;
  j.values = k->nout > 1 ? k->out[0]->data : nullptr;
  j.positions = static_cast<int64_t *>(k->out[k->nout - 1]->data);
  if (j.lines == 0 || j.k == 0) return true;
  if (j.l.size >= RADIX_LEAST && j.l.size < INT32_MAX && j.k > TILE / 4)
    return bits <= 32 ? run_radix<uint32_t>(j, bits) : run_radix<uint64_t>(j, bits);
  return bits <= 32 && j.l.size < UINT32_MAX ? run<narrow_pair>(j) : run<wide_pair>(j);
}

/* in: x; out: values (left out: positions alone), positions; dim, flag: descending. */
TY_CUDA_KERNEL(sort) { return sort_lines(k, -1); }

/* The same for the k first in order; flag: the largest. */
TY_CUDA_KERNEL(topk) { return sort_lines(k, static_cast<const ty_p_dim *>(k->params)->k); }
