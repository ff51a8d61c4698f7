/* The innermost loops of the matrix product for one element type; included by gemm.c with REAL and NAME(x) set.
 *
 * A micro-kernel holds up to MR rows by one or two vectors of C in registers (8 x 2 of the 32 registers of AVX-512,
 * 6 x 2 of 16 elsewhere) while it runs down k. It reads A by strides: packing A pays only where its rows are not
 * contiguous, so that neighbours in k come from different cache lines, or where it is large. Rows are named variables,
 * not arrays: gcc keeps arrays of vectors in memory. For every row count there is one function, so that edge panels
 * cost what they compute. */

#if TY_VECTOR_BYTES == 64
#define MR 8
#else
#define MR 6
#endif
#define VL ((int)(TY_VECTOR_BYTES / sizeof(REAL)))
#define NR (2 * VL)

typedef REAL NAME(vec) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define V NAME(vec)

#define ROWS_1(X) X(0)
#define ROWS_2(X) ROWS_1(X) X(1)
#define ROWS_3(X) ROWS_2(X) X(2)
#define ROWS_4(X) ROWS_3(X) X(3)
#define ROWS_5(X) ROWS_4(X) X(4)
#define ROWS_6(X) ROWS_5(X) X(5)
#define ROWS_7(X) ROWS_6(X) X(6)
#define ROWS_8(X) ROWS_7(X) X(7)

#define DECLARE(i) V c##i##0 = { 0 }, c##i##1 = { 0 };
#define DECLARE_NARROW(i) V c##i##0 = { 0 };
#define STEP(i)                 \
  c##i##0 += a[i * a_row] * b0; \
  c##i##1 += a[i * a_row] * b1;
#define STEP_NARROW(i) c##i##0 += a[i * a_row] * b0;
#define SET(i)                     \
  *(V *)(c + i * c_row) = c##i##0; \
  *(V *)(c + i * c_row + VL) = c##i##1;
#define SET_NARROW(i) *(V *)(c + i * c_row) = c##i##0;
#define ADD(i)                      \
  *(V *)(c + i * c_row) += c##i##0; \
  *(V *)(c + i * c_row + VL) += c##i##1;
#define ADD_NARROW(i) *(V *)(c + i * c_row) += c##i##0;

#define MICRO(rows)                                                                                                   \
  static void NAME(wide_##rows)(int64_t k, const REAL *restrict a, int64_t a_row, int64_t a_col,                      \
                                const REAL *restrict b, int64_t b_row, REAL *restrict c, int64_t c_row, bool add) {   \
    ROWS_##rows(DECLARE) for (; k > 0; k--, a += a_col, b += b_row) {                                                 \
      const V b0 = *(const V *)b, b1 = *(const V *)(b + VL);                                                          \
      ROWS_##rows(STEP)                                                                                               \
    }                                                                                                                 \
    if (add) {                                                                                                        \
      ROWS_##rows(ADD)                                                                                                \
    } else {                                                                                                          \
      ROWS_##rows(SET)                                                                                                \
    }                                                                                                                 \
  }                                                                                                                   \
  static void NAME(narrow_##rows)(int64_t k, const REAL *restrict a, int64_t a_row, int64_t a_col,                    \
                                  const REAL *restrict b, int64_t b_row, REAL *restrict c, int64_t c_row, bool add) { \
    ROWS_##rows(DECLARE_NARROW) for (; k > 0; k--, a += a_col, b += b_row) {                                          \
      const V b0 = *(const V *)b;                                                                                     \
      ROWS_##rows(STEP_NARROW)                                                                                        \
    }                                                                                                                 \
    if (add) {                                                                                                        \
      ROWS_##rows(ADD_NARROW)                                                                                         \
    } else {                                                                                                          \
      ROWS_##rows(SET_NARROW)                                                                                         \
    }                                                                                                                 \
  }
/* clang-format off */
MICRO(1) MICRO(2) MICRO(3) MICRO(4) MICRO(5) MICRO(6)
/* clang-format on */

#if MR == 8
    MICRO(7) MICRO(8)
#define WIDEST(width) , NAME(width##_7), NAME(width##_8)
#else
#define WIDEST(width)
#endif

        typedef void NAME(micro_fn)(int64_t k, const REAL *restrict a, int64_t a_row, int64_t a_col,
                                    const REAL *restrict b, int64_t b_row, REAL *restrict c, int64_t c_row, bool add);

static NAME(micro_fn) *const NAME(micro)[2][MR] = {
  /* [vectors - 1][rows - 1] */
  { NAME(narrow_1), NAME(narrow_2), NAME(narrow_3), NAME(narrow_4), NAME(narrow_5), NAME(narrow_6) WIDEST(narrow) },
  { NAME(wide_1), NAME(wide_2), NAME(wide_3), NAME(wide_4), NAME(wide_5), NAME(wide_6) WIDEST(wide) },
};

/* ---- dot products of contiguous rows: c[i][j] += sum_k a[i][k] b[j][k] ---- */

static inline REAL NAME(lanes)(V v) {
  REAL s = 0;
  for (int i = 0; i < VL; i++) s += v[i];
  return s;
}

#define DOT_DECLARE(i, j) V s##i##j = { 0 };
#define DOT_STEP(i, j) s##i##j += x##i * y##j;
#define DOT_END(i, j)                                                             \
  {                                                                               \
    REAL t = NAME(lanes)(s##i##j);                                                \
    for (int64_t p = whole; p < k; p++) t += a[i * a_row + p] * b[j * b_row + p]; \
    c[i * c_i + j * c_j] += t;                                                    \
  }
#define DOT_X(i) const V x##i = *(const V *)(a + i * a_row + p);
#define DOT_Y(j) const V y##j = *(const V *)(b + j * b_row + p);
#define GRID_14(X) X(0, 0) X(0, 1) X(0, 2) X(0, 3)
#define GRID_24(X) GRID_14(X) X(1, 0) X(1, 1) X(1, 2) X(1, 3)
#define GRID_11(X) X(0, 0)
#define DOT(rows, columns)                                                                                        \
  static void NAME(dot_##rows##columns)(int64_t k, const REAL *restrict a, int64_t a_row, const REAL *restrict b, \
                                        int64_t b_row, REAL *restrict c, int64_t c_i, int64_t c_j) {              \
    int64_t whole = k - k % VL;                                                                                   \
    GRID_##rows##columns(DOT_DECLARE) for (int64_t p = 0; p < whole; p += VL){ ROWS_##rows(DOT_X) ROWS_##columns( \
        DOT_Y) GRID_##rows##columns(DOT_STEP) } GRID_##rows##columns(DOT_END)                                     \
  }
DOT(1, 1) DOT(1, 4) DOT(2, 4)
