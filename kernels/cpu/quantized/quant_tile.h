/* y = x W' for many rows of x: two vectors of rows of W at a time, 32 with AVX-512 and 16 with AVX2, are decoded to
 * bytes, 256 elements of k of each, turned so that a vector has four elements of each row, and multiplied with a few
 * rows of x at a time. Sums of a group are exact integers, which scales bring to f32. Included by quant_linear.c where
 * VNNI is set, or where there is AVX2 and no AVX-512. */

#define INLINE static inline __attribute__((always_inline))

enum {
  TILE_K = 256,
  TILE_COLUMNS = TY_VECTOR_BYTES / 2,
  TILE_MOST = 512, /* rows of x; their sums stay in the second cache */
  TILE_TURNS = 2,  /* panels that share a part of x while it is in the second cache */
  SOON = 4         /* rows of W that are asked for ahead of decoding */
};

typedef struct panel {
  uint32_t code[TILE_K / 4][TILE_COLUMNS];
  float scale[TILE_K / 16][TILE_COLUMNS];
  float min[TILE_K / 16][TILE_COLUMNS];
#if defined(__AVX512F__)
  bool exponents; /* the bits of scale are less those of 1: those of a power of two added to them multiply with it */
#else
  uint32_t sign[TILE_K / 4][TILE_COLUMNS]; /* Q8_0: w, of which code has |w| */
#endif
} panel;

/* How many rows of W the panel from row j on has; less than none beyond the last one. */
static inline int64_t columns_at(const product *p, int64_t j) {
  return p->n - j < TILE_COLUMNS ? p->n - j : TILE_COLUMNS;
}

/* Asks for rows [i0, i1) of the panel of W from row j on, TILE_K elements from k0. near: 3 the first cache, 2 the
 * second. */
INLINE void fetch_rows(const product *p, int64_t j, int64_t k0, int64_t i0, int64_t i1, const int near) {
  int64_t block = ty_dtype_block[p->dtype], size = ty_dtype_size[p->dtype], bytes = TILE_K / block * size;
  if (i1 > columns_at(p, j)) i1 = columns_at(p, j);
  for (int64_t i = i0; i < i1; i++) {
    const char *at = p->w + (j + i) * p->w_row + k0 / block * size;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, near);
  }
}

/* Rows of W from j on, elements [k0, k0 + kc). */
static void pack_panel(const product *p, int64_t j, int64_t k0, int64_t kc, panel *to) {
  int64_t columns = columns_at(p, j);
  uint32_t code[TILE_COLUMNS][TILE_K / 4] __attribute__((aligned(64)));
  float scale[TILE_COLUMNS][TILE_K / 16], min[TILE_COLUMNS][TILE_K / 16];
  for (int64_t i = 0; i < TILE_COLUMNS; i++) {
    fetch_rows(p, j, k0, i + SOON, i + SOON + 1, 3);
    const char *row = p->w + (j + (i < columns ? i : 0)) * p->w_row; /* what is beside W is the first row again */
    row_codes(p->dtype, row, k0, kc, (uint8_t *)code[i]);
    row_scales(p->dtype, row, k0, kc, scale[i], min[i]);
  }
  ty_transpose_uint32_t(to->code[0], TILE_COLUMNS, code[0], TILE_K / 4, kc / 4, TILE_COLUMNS);
  int64_t groups = kc / p->x->group;
  for (int64_t g = 0; g < groups; g++)
    for (int i = 0; i < TILE_COLUMNS; i++) to->scale[g][i] = scale[i][g];
  if (p->x->mins)
    for (int64_t g = 0; g < groups; g++)
      for (int i = 0; i < TILE_COLUMNS; i++) to->min[g][i] = min[i][g];
}

#if defined(__AVX512F__)
#include "quant_tile_512.h"
#else
#include "quant_tile_256.h"
#endif

/* Panel `at` of W, elements of k from k0 on, with rows [r0, r1) of x; next: the panel and k that come then. */
static void tile(const product *p, int64_t at, int64_t k0, int64_t r0, int64_t r1, float *sums, int64_t next,
                 int64_t next_k) {
  const coded *x = p->x;
  int64_t j = at * TILE_COLUMNS, kc = x->k - k0 < TILE_K ? x->k - k0 : TILE_K, first = coded_at(x, r0, k0);
  const float *y = k0 + kc == x->k ? p->y + r0 * p->n + j : NULL;
  panel b;
  pack_panel(p, j, k0, kc, &b);
  multiply_tile(p, &b, kc, first, r1 - r0, sums, next * TILE_COLUMNS, next_k, y);
}

/* Panels [begin, end) of W, with all rows of x; a few panels take turns at each part of x. */
static void tile_panels(void *context, int64_t begin, int64_t end) {
  product *p = context;
  const coded *x = p->x;
  int64_t size = TILE_COLUMNS * (x->rows < TILE_MOST ? x->rows : TILE_MOST);
  size_t bytes = sizeof(float) * (size_t)(size * TILE_TURNS);
  float *sums = ty_scratch_alloc(bytes);
  if (!sums) {
    p->failed = true;
    return;
  }
  for (int64_t at = begin, turns; at < end && !ty_interrupted; at += turns) {
    turns = end - at < TILE_TURNS ? end - at : TILE_TURNS;
    for (int64_t r0 = 0; r0 < p->rows; r0 += TILE_MOST) {
      int64_t r1 = r0 + TILE_MOST < x->rows ? r0 + TILE_MOST : x->rows;
      memset(sums, 0, bytes);
      for (int64_t k0 = 0; k0 < x->k; k0 += TILE_K)
        for (int64_t i = 0; i < turns; i++) {
          int64_t next = at + i + 1, next_k = k0;
          if (next == at + turns && k0 + TILE_K < x->k) next = at, next_k = k0 + TILE_K;
          else if (next == at + turns) next_k = 0;
          tile(p, at + i, k0, r0, r1, sums + i * size, next, next_k);
        }
      for (int64_t i = 0; i < turns; i++)
        put_sums(p, (at + i) * TILE_COLUMNS, r0, r1 < p->rows ? r1 : p->rows, sums + i * size);
    }
  }
  ty_scratch_free(sums, bytes);
}
#undef INLINE
