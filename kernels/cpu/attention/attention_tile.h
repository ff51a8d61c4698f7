/* Template (no guard: attention.c includes it once per element type): packing and the products of one attention
 * tile. Included after tile.h. */

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
