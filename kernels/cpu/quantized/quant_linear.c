/* Products with block-quantized weights: linear_quantized, y = x W' + bias, and linear_quantized_backward, dx = g W.
 * Rows of x are rounded to bytes with a scale for each 32 elements, so that the products are of integers; the error is
 * that of the rounding, at most 1/254 of the largest |x| of each group; with weights of 4 bits, whose own rounding is
 * far coarser, scales are powers of two and it is at most 1/127. Few rows are multiplied with NF4, whose levels are no
 * integers, as words (quant_nf4.h). Many rows with NF4, many with Q2_K and Q3_K where neither VNNI nor AVX2 makes
 * products of bytes (quant_tile.h), and gradients are multiplied in f32, decoded panel by panel. Many rows are
 * multiplied on the CPU's tiles where it has them (quant_tiles.c), with x rounded in the same way, but for Q2_K and
 * Q3_K, of which both x and the weights have 16 bits there. */
#include "dequantize.h"
#include "../matmul/gemm.h"
#include "quant_codes.h"
#include "quant_tiles.h"
#include "sum_of_eight.h"
#include "../transpose.h"

enum {
  FEW = 8,                        /* rows of x for which decoding W is most of the work */
  AHEAD = 4096,                   /* bytes: W then comes from memory, row after row */
  NEAR = 16384,                   /* bytes of x that stay in the first cache beside W */
  GROUP = 32,                     /* rows of W for each part of x where it has more */
  PUT = 4,                        /* rows of W whose sums are added up at a time */
  TILE_ROWS = TY_VECTOR_BYTES / 8 /* of x, for quant_tile.h */
};

#if defined(__AVX2__) && !defined(__AVX512F__)
#define TILE_256 /* quant_tile_256.h */
#endif

typedef struct product {
  ty_dtype dtype;
  const char *w;
  int64_t w_row; /* bytes */
  int64_t rows, n, columns;
  const float *plain; /* x [rows][columns] */
  const coded *x;     /* the same as bytes */
  int16_t *words;     /* the same for NF4 */
  float *word_scale;
  const float *bias;
  float *y; /* [rows][n] */
  bool failed;
} product;

static bool has_vnni(void) {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

#if defined(__AVX512F__)
/* Elements of k, whole lines, of which x's few rows stay in the first cache. A single row is read as fast from the
 * second one as W from memory. */
static int64_t part_of(const product *p, int64_t size) {
  int64_t lines = NEAR / (LINE * size * p->rows);
  if (p->rows == 1 || p->columns * size * p->rows <= NEAR) return p->columns;
  return (lines > 1 ? lines : 1) * LINE;
}

/* The sums of PUT vectors. */
static inline __m128 sums_of(const __m512 v[PUT]) {
  __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  a = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* y[r][j], y[r][j + 1] ... from what the rows of x have made with (a part of) n rows of W, at most PUT. */
static inline void put(const product *p, int64_t rows, int64_t j, int64_t n, bool first, const __m512 sums[FEW][PUT]) {
  const __mmask8 there = (__mmask8)((1 << n) - 1);
  for (int64_t r = 0; r < rows; r++) {
    float *y = p->y + r * p->n + j;
    const float *more = !first ? y : p->bias ? p->bias + j : NULL;
    __m128 sum = sums_of(sums[r]);
    if (more) sum = _mm_add_ps(sum, _mm_maskz_loadu_ps(there, more));
    _mm_mask_storeu_ps(y, there, sum);
  }
}
#endif

#include "quant_dots.h"
#include "quant_nf4.h"

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512vnni")
#include "quant_few.h"
#include "quant_tile.h"
#pragma GCC pop_options
#endif

#include "quant_low_bits.h"
#if defined(__AVX2__)
#include "quant_eights.h"
#endif
#if defined(TILE_256)
#include "quant_tile.h"
#endif

/* ---- rows of x as bytes ---- */

typedef struct coding {
  coded *to;
  const float *x;
  int64_t rows;
} coding;

static void code_rows(void *context, int64_t begin, int64_t end) {
  const coding *c = context;
  code_x(c->x, c->rows, begin, end, c->to);
}

/* Codes the rows of x as *c wants them, which p->x then is. Returns the bytes of scratch memory, from c->scale on; 0:
 * an error is set. */
static size_t code(product *p, coded *c) {
  int64_t count = (c->k + c->block - 1) / c->block * c->block * c->rows;
  int64_t factors = c->lines    ? count / LINE * line_factors(c->dtype)
                    : c->eights ? count / EIGHT * EIGHT_FACTORS
                                : count / 32 + count / c->group;
  int64_t starts = c->lines || c->eights ? 0 : count / c->group;
  size_t bytes = (size_t)count + (size_t)factors * sizeof(float) + (size_t)starts * sizeof(int32_t);
  c->scale = ty_scratch_alloc(bytes);
  if (!c->scale) return ty_fail(TY_ENOMEM, "linear: out of memory"), 0;
  c->sum = c->scale + count / 32;
  c->start = (int32_t *)(void *)(c->scale + factors);
  c->q = (int8_t *)(c->start + starts);
  p->x = c;
  ty_parallel_for(c->rows, 1 + 16384 / c->k, code_rows, &(coding){ c, p->plain, p->rows });
  return bytes;
}

/* Whether quant_eights.h multiplies this format. */
static bool in_eights(ty_dtype dtype) {
#if defined(__AVX2__)
  return dtype == TY_Q4_0 || dtype == TY_Q4_K || dtype == TY_Q6_K;
#else
  (void)dtype;
  return false;
#endif
}

/* Whether rows of x are many enough for quant_tile.h. With AVX2 measured at 9, 12, 16 and 32 rows, GFLOP/s of a core so
 * and by few rows at a time: q8_0 48, 64, 75, 91 to 59, 61, 63, 62; q4_0 66, 92, 104, 141 to 117, 116, 106, 116;
 * q6_k 50, 69, 79, 103 to 70, 79, 78, 80; mxfp4 63, 81, 97, 120 to 51, 62, 65, 60. */
static bool in_tiles(ty_dtype dtype, int64_t rows) {
#if defined(TILE_256)
  if (dtype == TY_Q8_0) return rows >= 12;
  if (dtype == TY_Q6_K) return rows >= 20;
  return rows > (in_eights(dtype) ? 3 * FEW : FEW);
#else
  (void)dtype;
  return rows > FEW && has_vnni();
#endif
}

/* Whether products of bytes are the faster way: without instructions for them, and without a kernel for its format,
 * many rows are better off with a weight that is decoded to f32 once for them all. */
static bool better_by_codes(ty_dtype dtype, int64_t rows) {
  enum { MANY = 96 };
  return rows < MANY || in_eights(dtype) || in_tiles(dtype, rows);
}

static bool by_codes(product *p) {
  int64_t k = p->columns;
  bool vnni = has_vnni();
  if (vnni && p->rows > FEW && p->rows <= 2 * FEW) { /* a tile of so few rows costs more than reading W again */
    product head = *p, rest = *p;
    head.rows = FEW, rest.rows -= FEW;
    rest.plain += FEW * k, rest.y += FEW * p->n;
    return by_codes(&head) && by_codes(&rest);
  }
  bool tiles = in_tiles(p->dtype, p->rows), lines = vnni && !tiles;
  coded c = { .k = k, .dtype = p->dtype, .group = code_group(p->dtype), .zero = code_zero(p->dtype), .lines = lines };
  c.mins = p->dtype == TY_Q4_K || p->dtype == TY_Q2_K;
  c.eights = !tiles && !vnni && in_eights(p->dtype);
  c.power = p->dtype == TY_Q4_0 || p->dtype == TY_Q4_K;
  c.rows = tiles ? (p->rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : p->rows;
  c.block = tiles ? 256 : lines ? LINE : c.eights ? EIGHT : k;
  size_t bytes = code(p, &c);
  if (!bytes) return false;
  int64_t grain = 1 + 65536 / k / p->rows;
#if defined(__AVX512F__) || defined(TILE_256)
  if (tiles) ty_parallel_for((p->n + TILE_COLUMNS - 1) / TILE_COLUMNS, 1 + grain / TILE_COLUMNS, tile_panels, p);
  else
#endif
#if defined(__AVX512F__)
      if (lines)
    ty_parallel_for(p->n, grain, few_rows, p);
  else
#endif
#if defined(__AVX2__)
      if (c.eights)
    ty_parallel_for(p->n, grain, eights_rows, p);
  else
#endif
    ty_parallel_for(p->n, grain, dots_rows, p);
  ty_scratch_free(c.scale, bytes);
  return p->failed ? ty_fail(TY_ENOMEM, "linear: out of memory") : true;
}

/* On the CPU's tiles, where it has them. False: not done so, but if *ok is false it has failed. */
static bool by_tiles(const product *p, bool *ok) {
  if (p->columns == 0 || !TY_KERNEL(quant_has_tiles)(p->dtype, p->rows, p->n)) return false;
  ty_quant_product t = { .dtype = p->dtype,
                         .w = p->w,
                         .w_row = p->w_row,
                         .rows = p->rows,
                         .n = p->n,
                         .k = p->columns,
                         .x = p->plain,
                         .bias = p->bias,
                         .y = p->y };
  *ok = TY_KERNEL(quant_tiles)(&t);
  return !*ok || !t.far;
}

static bool low_bits(ty_dtype dtype) { return dtype == TY_Q2_K || dtype == TY_Q3_K; }

#if defined(__AVX2__)
static bool by_low_codes(product *p) {
  coded c = { .k = p->columns, .block = p->columns, .rows = p->rows, .group = 16, .zero = -1 };
  size_t bytes = code(p, &c);
  if (!bytes) return false;
  ty_parallel_for(p->n, 1 + 65536 / c.k / p->rows, low_rows, p);
  ty_scratch_free(c.scale, bytes);
  return true;
}
#endif

/* ---- in f32 ---- */

typedef struct weights {
  ty_dtype dtype;
  const char *w;
  int64_t w_row, columns;
} weights;

/* B[k][j] = W[j][k] */
static void pack_turned(const void *context, int64_t k0, int64_t kc, int64_t j0, int64_t nc, void *dst,
                        int64_t stride) {
  enum { MOST = 256 };
  const weights *w = context;
  float rows[TY_PANEL_BYTES / sizeof(float)][MOST];
  for (int64_t k = 0; k < kc; k += MOST) {
    int64_t n = kc - k < MOST ? kc - k : MOST;
    for (int64_t j = 0; j < nc; j++)
      TY_KERNEL(decode_row)(w->dtype, w->w + (j0 + j) * w->w_row, w->columns, k0 + k, k0 + k + n, rows[j]);
    ty_transpose_uint32_t((uint32_t *)dst + k * stride, stride, (const uint32_t *)(const void *)rows, MOST, n, nc);
  }
}

/* B[k][j] = W[k][j] */
static void pack_plain(const void *context, int64_t k0, int64_t kc, int64_t j0, int64_t nc, void *dst, int64_t stride) {
  const weights *w = context;
  int64_t begin = j0 / 32 * 32, end = (j0 + nc + 31) / 32 * 32;
  float row[TY_PANEL_BYTES / sizeof(float) + 64];
  for (int64_t k = 0; k < kc; k++) {
    TY_KERNEL(decode_row)(w->dtype, w->w + (k0 + k) * w->w_row, w->columns, begin, end, row);
    memcpy((float *)dst + k * stride, row + j0 - begin, (size_t)nc * sizeof(float));
  }
}

bool TY_KERNEL(linear_quantized)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *w = k->in[1], *bias = k->in[2], *out = k->out[0];
  if (!out->count) return true;
  int64_t n = w->size[0], columns = w->size[1], rows = out->count / n;
  ty_dtype dtype = (ty_dtype)w->dtype;
  int64_t w_row = ty_row_bytes(dtype, columns);
  product p = { .dtype = dtype,
                .w = w->data,
                .w_row = w_row,
                .rows = rows,
                .n = n,
                .columns = columns,
                .plain = x->data,
                .bias = bias ? bias->data : NULL,
                .y = out->data };
  bool ok;
  if (by_tiles(&p, &ok)) return ok;
  const bool low = low_bits(dtype) && !has_vnni() && !in_tiles(dtype, rows);
  if (dtype != TY_NF4 && !low && columns > 0 && better_by_codes(dtype, rows)) return by_codes(&p);
#if defined(__AVX2__)
  if (low && rows <= FEW && columns > 0) return by_low_codes(&p);
#endif
  if (dtype == TY_NF4 && rows <= FEW && columns > 0) return by_nf4(&p);
  weights b = { dtype, w->data, w_row, columns };
  return TY_KERNEL(gemm_f32)(&(ty_gemm){ .m = rows,
                                         .n = n,
                                         .k = columns,
                                         .a = x->data,
                                         .a_row = columns,
                                         .a_col = 1,
                                         .b = &b,
                                         .c = out->data,
                                         .c_row = n,
                                         .bias = bias ? bias->data : NULL,
                                         .pack = pack_turned });
}

bool TY_KERNEL(linear_quantized_backward)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *w = k->in[1], *out = k->out[0];
  if (!out->count) return true;
  int64_t n = w->size[0], columns = w->size[1], rows = out->count / columns;
  weights b = { (ty_dtype)w->dtype, w->data, ty_row_bytes((ty_dtype)w->dtype, columns), columns };
  return TY_KERNEL(gemm_f32)(&(ty_gemm){ .m = rows,
                                         .n = columns,
                                         .k = n,
                                         .a = g->data,
                                         .a_row = n,
                                         .a_col = 1,
                                         .b = &b,
                                         .c = out->data,
                                         .c_row = columns,
                                         .pack = pack_plain });
}
