/* Template (no guard: attention.c includes it once per element type): vectors, packing and the register-blocked
 * products of one attention tile. REAL is the element, LANES how many a vector holds. */

typedef REAL VEC __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* c[m][0 .. nv vectors) = sum over k of a[m * am + k * ak] * b[k * bk ...], stored, added to c, or added to
 * c[m] * factor[m]. mr, nv, mode, am and ak are constants where it is inlined, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void product(const int mr, const int nv, const int mode, int64_t kn,
                                                          const REAL *restrict a, const int64_t am, const int64_t ak,
                                                          const REAL *restrict b, int64_t bk, REAL *restrict c,
                                                          int64_t cm, const REAL *factor) {
  VEC sum[8][4];
#pragma GCC unroll 8
  for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) {
      if (mode == SET) sum[m][v] = (VEC){ 0 };
      else sum[m][v] = *(const VEC *)(c + m * cm + v * LANES);
      if (mode == RESCALE) sum[m][v] *= factor[m];
    }
  for (int64_t k = 0; k < kn; k++) {
    VEC x[4];
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) x[v] = *(const VEC *)(b + k * bk + v * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
      REAL w = a[m * am + k * ak];
#pragma GCC unroll 4
      for (int v = 0; v < nv; v++) sum[m][v] += w * x[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) *(VEC *)(c + m * cm + v * LANES) = sum[m][v];
}

/* n columns, a multiple of LANES; few rows take more columns at once to hide the latency of the multiply-add. */
#define COLUMNS(rows, wide, mode, am, ak, factor)                                                  \
  do {                                                                                             \
    int64_t j = 0;                                                                                 \
    for (; j + wide * LANES <= n; j += wide * LANES)                                               \
      product(rows, wide, mode, kn, a, am, ak, b + j, bk, c + j, cm, factor);                      \
    for (; j < n; j += LANES) product(rows, 1, mode, kn, a, am, ak, b + j, bk, c + j, cm, factor); \
  } while (0)

/* Scores: a is a panel of GROUP rows, k-major; b [kn][KEYS]; c [GROUP][KEYS]. */
static void product_scores(int rows, int64_t n, int64_t kn, const REAL *a, const REAL *b, REAL *c) {
  const int64_t bk = KEYS, cm = KEYS;
  if (rows == 1) COLUMNS(1, 4, SET, 1, GROUP, NULL);
  else if (rows == 2) COLUMNS(2, 4, SET, 1, GROUP, NULL);
  else if (rows <= 4) COLUMNS(4, 2, SET, 1, GROUP, NULL);
  else COLUMNS(GROUP, 2, SET, 1, GROUP, NULL);
}

/* c [rows][n] = c * factor + a b: a is [rows][KEYS], b [kn][n]. */
static void product_values(int rows, int64_t n, int64_t kn, const REAL *a, const REAL *b, REAL *c, const REAL *factor) {
  const int64_t bk = n, cm = n;
  if (rows == 1) COLUMNS(1, 4, RESCALE, KEYS, 1, factor);
  else if (rows == 2) COLUMNS(2, 4, RESCALE, KEYS, 1, factor);
  else if (rows <= 4) COLUMNS(4, 2, RESCALE, KEYS, 1, factor);
  else COLUMNS(GROUP, 2, RESCALE, KEYS, 1, factor);
}

/* c [rows][n] += a b, as above. */
static void product_queries(int rows, int64_t n, int64_t kn, const REAL *a, const REAL *b, REAL *c) {
  const int64_t bk = n, cm = n;
  if (rows == 1) COLUMNS(1, 4, ADD, KEYS, 1, NULL);
  else if (rows == 2) COLUMNS(2, 4, ADD, KEYS, 1, NULL);
  else if (rows <= 4) COLUMNS(4, 2, ADD, KEYS, 1, NULL);
  else COLUMNS(GROUP, 2, ADD, KEYS, 1, NULL);
}

/* c [GROUP][n] += a' b: a is [kn][KEYS], of which GROUP columns are used; b [kn][n]. */
static void product_keys(int64_t n, int64_t kn, const REAL *a, const REAL *b, REAL *c) {
  const int64_t bk = n, cm = n;
  COLUMNS(GROUP, 2, ADD, 1, KEYS, NULL);
}
#undef COLUMNS

/* The first halves of a and b, or the second, interleaved. */
#if VEC_BYTES == 64
#define FIRST_16 \
  (INDEX) { 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23 }
#define SECOND_16 \
  (INDEX) { 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31 }
#endif
#define FIRST_8 \
  (INDEX) { 0, 8, 1, 9, 2, 10, 3, 11 }
#define SECOND_8 \
  (INDEX) { 4, 12, 5, 13, 6, 14, 7, 15 }
#define FIRST_4 \
  (INDEX) { 0, 4, 1, 5 }
#define SECOND_4 \
  (INDEX) { 2, 6, 3, 7 }
#define FIRST_2 \
  (INDEX) { 0, 2 }
#define SECOND_2 \
  (INDEX) { 1, 3 }
#define FIRST_HALVES PASTE(FIRST_, LANES)
#define SECOND_HALVES PASTE(SECOND_, LANES)
typedef REAL_INT INDEX __attribute__((vector_size(VEC_BYTES)));
typedef REAL WHOLE __attribute__((vector_size(VEC_BYTES)));

/* Transposes a LANES x LANES block: log2(LANES) rounds of the perfect shuffle. */
static inline void transpose(const REAL *src, int64_t src_row, REAL *dst, int64_t dst_row) {
  WHOLE x[LANES], y[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    VEC row = *(const VEC *)(src + i * src_row);
    x[i] = (WHOLE)row;
  }
#pragma GCC unroll 4
  for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + LANES / 2], FIRST_HALVES);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + LANES / 2], SECOND_HALVES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) *(VEC *)(dst + i * dst_row) = (VEC)x[i];
}

/* dst[k][j] = src[j][k] for j < n <= KEYS and k < width; the columns up to KEYS become zero. */
static void pack_across(REAL *dst, const REAL *src, int64_t row, int64_t column, int64_t n, int64_t width) {
  if (n < KEYS) memset(dst, 0, (size_t)(width * KEYS) * sizeof(REAL));
  int64_t whole_j = column == 1 ? n / LANES * LANES : 0, whole_k = width / LANES * LANES;
  for (int64_t j = 0; j < whole_j; j += LANES) {
    for (int64_t k = 0; k < whole_k; k += LANES) transpose(src + j * row + k, row, dst + k * KEYS + j, KEYS);
    for (int64_t k = whole_k; k < width; k++)
      for (int64_t i = j; i < j + LANES; i++) dst[k * KEYS + i] = src[i * row + k];
  }
  for (int64_t j = whole_j; j < n; j++)
    for (int64_t k = 0; k < width; k++) dst[k * KEYS + j] = src[j * row + k * column];
}

/* One row of `width` elements times `scale`, zeros after it up to `room`. */
static inline void pack_row(REAL *restrict dst, const REAL *restrict src, int64_t column, int64_t width, int64_t room,
                            REAL scale) {
  if (column == 1)
    for (int64_t k = 0; k < width; k++) dst[k] = src[k] * scale;
  else
    for (int64_t k = 0; k < width; k++) dst[k] = src[k * column] * scale;
  for (int64_t k = width; k < room; k++) dst[k] = 0;
}

static void pack_along(REAL *dst, const REAL *src, int64_t row, int64_t column, int64_t n, int64_t width,
                       int64_t room) {
  for (int64_t j = 0; j < n; j++) pack_row(dst + j * room, src + j * row, column, width, room, 1);
}

/* Row `r` of a set of rows in panels of GROUP, k-major: where product_scores() wants it. */
static inline void pack_panel_row(REAL *restrict panels, int64_t r, const REAL *restrict src, int64_t column,
                                  int64_t width, REAL scale) {
  REAL *dst = panels + r / GROUP * GROUP * width + r % GROUP;
  for (int64_t k = 0; k < width; k++) dst[k * GROUP] = src[k * column] * scale;
}

static inline void clear_panel_row(REAL *panels, int64_t r, int64_t width) {
  REAL *dst = panels + r / GROUP * GROUP * width + r % GROUP;
  for (int64_t k = 0; k < width; k++) dst[k * GROUP] = 0;
}

/* The largest of n elements, a multiple of LANES; anything if one is NaN. */
static inline REAL row_max(const REAL *s, int64_t n) {
  REAL top = s[0];
  n = n / LANES * LANES; /* known to the compiler now */
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < n; j++) top = s[j] > top ? s[j] : top;
  return top;
}
