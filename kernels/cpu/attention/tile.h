/* Template (no guard: included once per element type, after tile_names.h): vectors, a register-blocked product and
 * the transposition of a block, for kernels that work on small tiles in the cache. REAL is the element, REAL_INT the
 * integer of its size, LANES how many a vector holds. */

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

/* One row of `width` elements times `scale`, zeros after it up to `room`. */
static inline void pack_row(REAL *restrict dst, const REAL *restrict src, int64_t column, int64_t width, int64_t room,
                            REAL scale) {
  if (column == 1)
    for (int64_t k = 0; k < width; k++) dst[k] = src[k] * scale;
  else
    for (int64_t k = 0; k < width; k++) dst[k] = src[k * column] * scale;
  for (int64_t k = width; k < room; k++) dst[k] = 0;
}
