/* What the kernels of attention for tensor cores share: tiles of halves in shared memory, what a thread must know of a
 * query row, and the two products. A block has four warps, each with 16 MT rows of the tile that the block owns; it walks
 * along tiles of the other side. */
#ifndef TY_KERNELS_CUDA_ATTENTION_TENSOR_CUH
#define TY_KERNELS_CUDA_ATTENTION_TENSOR_CUH

#include "attention.cuh"
#include "mma.cuh"

enum { AT_WARPS = 4, AT_TENSOR_THREADS = AT_WARPS * TY_WARP };

#define AT_LOG2E 1.4426950408889634f
#define AT_LN2 0.6931471805599453f

TY_DEVICE float at_exp2(float x) {
#ifdef TY_ON_GPU
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/* The columns of a tile, for rows of q and v as wide as these. */
static inline int at_tensor_width(const at_plan &p) {
  const int widest = p.q.width > p.v.width ? p.q.width : p.v.width;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

/* ---- tiles ---- */

/* Where chunk c of row r stands in a tile of W columns: those of one number in eight rows are in different banks. */
template <int W> TY_DEVICE int at_place(int r, int c) { return r * (W / 8) + (c & ~7) + ((c & 7) ^ (r & 7)); }

/* Row r's chunks odd, 2 + odd, 4 + odd and 6 + odd. From them it is always as far to those of rows 8, 16 ... further, and
 * to chunks 8, 16 ... further: constants, once the loops are unrolled. */
template <int W> TY_DEVICE void at_four_places(ty_chunks tile, int r, int odd, ty_chunks (&place)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) place[i] = tile + at_place<W>(r, 2 * i + odd);
}
template <int W> TY_DEVICE ty_chunks at_further(const ty_chunks (&place)[4], int rows, int chunks) {
  return place[chunks / 2 % 4] + (rows * (W / 8) + chunks / 8 * 8);
}

/* Eight columns of a row that stand anywhere; zeros beyond its width. */
template <class T> TY_DEVICE ty_chunk at_gather(const at_view &v, const T *row, int c) {
  ty_chunk x = {};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (c * 8 + i < v.width) x.v[i / 2] |= static_cast<uint32_t>(row[(c * 8 + i) * v.stride[3]].bits) << i % 2 * 16;
  return x;
}

/* Begins to fill a tile with the rows that row(i) finds, which is NULL where there is none. The loop is not
 * unrolled: addresses prepared ahead of their use would take the registers of the sums. */
template <class T, int W, int ROWS, class Row>
TY_DEVICE void at_bring(ty_chunks tile, const at_view &v, const Row &row) {
  const int c = static_cast<int>(threadIdx.x) % (W / 8);
  const bool within = c * 8 < v.width;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x) / (W / 8); r < ROWS; r += AT_TENSOR_THREADS / (W / 8)) {
    const T *at = within ? row(r) : nullptr;
    if (v.packs) ty_copy_async(tile + at_place<W>(r, c), at ? at + c * 8 : nullptr);
    else tile[at_place<W>(r, c)] = at ? at_gather<T>(v, at, c) : ty_chunk{};
  }
}

/* The query rows from r0 of a key-value head. */
template <class T, int W, int ROWS>
TY_DEVICE void at_bring_rows(ty_chunks tile, const at_plan &p, const at_view &v, int b, int kv_head, int r0) {
  const int head0 = r0 / p.t, pos0 = r0 % p.t;
  const T *base = static_cast<const T *>(v.data) + b * v.stride[0] + int64_t{ kv_head } * p.group * v.stride[1];
  at_bring<T, W, ROWS>(tile, v, [&](int i) -> const T * {
    int head = head0, pos = pos0 + i;
    if (pos >= p.t) head += pos / p.t, pos %= p.t;
    return r0 + i < p.rows ? base + head * v.stride[1] + pos * v.stride[2] : nullptr;
  });
}

template <class T, int W, int KEYS>
TY_DEVICE void at_bring_keys(ty_chunks tile, const at_plan &p, const at_view &v, int b, int kv_head, int j0) {
  const T *base = static_cast<const T *>(v.data) + b * v.stride[0] + kv_head * v.stride[1];
  at_bring<T, W, KEYS>(tile, v,
                       [&](int i) -> const T * { return j0 + i < p.s ? base + (j0 + i) * v.stride[2] : nullptr; });
}

/* ---- query rows ---- */

/* Two chunks say what is needed of a row. Rows that there are not, and those that saw nothing, see no key. */
struct at_facts {
  float lse, delta; /* times log2(e); for the gradients */
  int64_t mask;     /* where its row of the mask begins */
  at_span keys;
};
enum { AT_FACTS = 2 };

TY_DEVICE at_facts at_facts_of(const at_plan &p, int b, int kv_head, int r) {
  const at_row row = at_row_of(p, kv_head, r, p.rows);
  return { 0, 0, b * p.mask_stride[0] + row.head * p.mask_stride[1] + row.pos * p.mask_stride[2], row.keys };
}
template <class Pointer> TY_DEVICE void at_put_facts(Pointer to, const at_facts &f) {
  ty_chunk x = { { __float_as_uint(f.lse), __float_as_uint(f.delta), static_cast<uint32_t>(f.keys.low),
                   static_cast<uint32_t>(f.keys.high) } };
  ty_chunk y = { { static_cast<uint32_t>(f.mask), static_cast<uint32_t>(f.mask >> 32),
                   static_cast<uint32_t>(f.keys.gap_low), static_cast<uint32_t>(f.keys.gap_high) } };
  to[0] = x;
  to[1] = y;
}
/* Without `second` there is neither a mask nor a gap. */
TY_DEVICE at_facts at_get_facts(ty_chunks from, bool second) {
  const ty_chunk x = from[0];
  at_facts f = {
    __uint_as_float(x.v[0]), __uint_as_float(x.v[1]), 0, { static_cast<int>(x.v[2]), static_cast<int>(x.v[3]), 0, 0 }
  };
  if (!second) return f;
  const ty_chunk y = from[1];
  f.mask = static_cast<int64_t>(uint64_t{ y.v[1] } << 32 | y.v[0]);
  f.keys.gap_low = static_cast<int>(y.v[2]), f.keys.gap_high = static_cast<int>(y.v[3]);
  return f;
}

/* What is the same for a whole block leaves the registers to the sums, too. */
TY_DEVICE ty_chunk at_chunk_of(const at_span &x) {
  return { { static_cast<uint32_t>(x.low), static_cast<uint32_t>(x.high), static_cast<uint32_t>(x.gap_low),
             static_cast<uint32_t>(x.gap_high) } };
}
TY_DEVICE at_span at_span_in(const ty_chunk &x) {
  return { static_cast<int>(x.v[0]), static_cast<int>(x.v[1]), static_cast<int>(x.v[2]), static_cast<int>(x.v[3]) };
}

TY_DEVICE bool at_two_facts(const at_plan &p) { return p.mask || p.reach.sinks; }

/* The score times log2(e) of a row and a key, from their product: -infinity where the key is hidden. CAP: there is a cap
 * of scores. */
template <bool CAP = false> TY_DEVICE float at_score2(const at_plan &p, const at_facts &row, int key, float product) {
  const float hidden = -std::numeric_limits<float>::infinity();
  if (!at_has(row.keys, key)) return hidden;
  float x = product * static_cast<float>(p.scale * 1.4426950408889634);
  if (CAP) {
    const float cap = static_cast<float>(p.softcap * 1.4426950408889634);
    x = cap * at_tanh(x / cap);
  }
  if (!p.mask) return x;
  int64_t at = row.mask + key * p.mask_stride[3];
  if (p.mask_is_bool) return static_cast<const uint8_t *>(p.mask)[at] ? x : hidden;
  return x + static_cast<const float *>(p.mask)[at] * AT_LOG2E;
}

/* ---- products ---- */

/* sum[m][n] += rows 16 m + `row` of one tile times rows 8 n of another, over W columns. */
template <class T, int W, int MT, int NT>
TY_DEVICE void at_multiply_rows(ty_chunks own, int row, ty_chunks other, float (&sum)[MT][NT][4]) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  ty_chunks own_at[4], other_at[4];
  at_four_places<W>(own, row + lane % 16, lane / 16, own_at);
  at_four_places<W>(other, lane / 16 * 8 + lane % 8, lane / 8 % 2, other_at);
#pragma unroll
  for (int k = 0; k < W / 16; k++) {
    uint32_t x[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) ty_load_matrices(x[m], at_further<W>(own_at, m * 16, k * 2));
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t y[4];
      ty_load_matrices(y, at_further<W>(other_at, n * 8, k * 2));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        ty_multiply<T>(sum[m][n], x[m], y[0], y[1]);
        ty_multiply<T>(sum[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

/* Sums of at_multiply_rows() as the weights of at_weigh_rows(). */
template <class T, int MT, int NT> TY_DEVICE void at_narrow(const float (&x)[MT][NT][4], uint32_t (&w)[MT][NT][2]) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) w[m][n][h] = ty_pack_halves<T>(x[m][n][2 * h], x[m][n][2 * h + 1]);
}

/* sum[m][n] += weights times the first 8 KT rows of a tile, of which column 8 (n + `from`) on; 8 divides `from`. */
template <class T, int W, int MT, int KT, int NT>
TY_DEVICE void at_weigh_rows(const uint32_t (&w)[MT][KT][2], ty_chunks tile, int from, float (&sum)[MT][NT][4]) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  ty_chunks at[4];
  at_four_places<W>(tile + from, lane % 16, lane / 16, at);
#pragma unroll
  for (int k = 0; k < KT; k += 2)
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t y[4];
      ty_load_matrices_transposed(y, at_further<W>(at, k * 8, n));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint32_t x[4] = { w[m][k][0], w[m][k][1], w[m][k + 1][0], w[m][k + 1][1] };
        ty_multiply<T>(sum[m][n], x, y[0], y[1]);
        ty_multiply<T>(sum[m][n + 1], x, y[2], y[3]);
      }
    }
}

/* Stores the sums of row `row` + 16 m + 8 h times factor[m][h] from column 8 `from` on. row_at(i) finds row i of `to`,
 * which have `width` elements and are contiguous; NULL where there is none. */
template <class T, int MT, int NT, class Row>
TY_DEVICE void at_store_rows(const T *to, const float (&sum)[MT][NT][4], const float (&factor)[MT][2], int row,
                             int from, int width, const Row &row_at) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, quad = lane % 4;
  const bool whole = width % 8 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      T *at = row_at(row + m * 16 + h * 8 + lane / 4);
#pragma unroll
      for (int n = 0; n < NT; n += 4) {
        ty_chunk x;
#pragma unroll
        for (int i = 0; i < 4; i++)
          x.v[i] = ty_pack_halves<T>(sum[m][n + i][2 * h] * factor[m][h], sum[m][n + i][2 * h + 1] * factor[m][h]);
        if (whole) {
          ty_transpose_quad(x.v);
          const int column = (from + n + quad) * 8;
          if (at && column < width) *reinterpret_cast<ty_chunk *>(at + column) = x;
        } else {
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const int column = (from + n + i / 2) * 8 + quad * 2 + i % 2;
            if (at && column < width) at[column] = T{ static_cast<uint16_t>(x.v[i / 2] >> i % 2 * 16) };
          }
        }
      }
    }
}

#endif
