/* The innermost loops of the matrix product for one element type; included with these set:
 *   REAL, NAME(x)          type of the sums, and names
 *   UNIT                   what one step of k reads of A and of B: a number, or several neighbours in k
 *   MULTIPLY_ADD(c, a, b)  c, a vector of sums, plus the products of unit a and a vector of units b
 *   STARTS                 what sums begin with: 0, or 1: a row before the panel of B
 *   STRIDED                set where kernels that read A and B by strides are wanted besides those that read panels
 *
 * A micro-kernel holds up to MR rows by one or two vectors of C in registers (8 x 2 of the 32 registers of AVX-512,
 * 6 x 2 of 16 elsewhere) while it runs down k. Rows are named variables, not arrays: gcc keeps arrays of vectors in
 * memory. For every row count there is one function, so that edge panels cost what they compute. */

#include "gemm_ahead.h"

#ifndef TY_GEMM_ROWS
#define TY_GEMM_ROWS
#define ROWS_1(X) X(0)
#define ROWS_2(X) ROWS_1(X) X(1)
#define ROWS_3(X) ROWS_2(X) X(2)
#define ROWS_4(X) ROWS_3(X) X(3)
#define ROWS_5(X) ROWS_4(X) X(4)
#define ROWS_6(X) ROWS_5(X) X(5)
#define ROWS_7(X) ROWS_6(X) X(6)
#define ROWS_8(X) ROWS_7(X) X(7)
#if TY_VECTOR_BYTES == 64
#define MR 8
#define EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#else
#define MR 6
#define EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
#endif

#define VL ((int)(TY_VECTOR_BYTES / sizeof(REAL)))
#define NR (2 * VL)

typedef REAL NAME(vec) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef UNIT NAME(units) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(UNIT)), may_alias));
#define V NAME(vec)
#define W NAME(units)

#define DECLARE(i) V c##i##0 = { 0 }, c##i##1 = { 0 };
#define DECLARE_NARROW(i) V c##i##0 = { 0 };
#if STARTS
#define BEGIN(i) V c##i##0 = *(const V *)(b - NR), c##i##1 = *(const V *)(b - NR + VL);
#define BEGIN_NARROW(i) V c##i##0 = *(const V *)(b - NR);
#else
#define BEGIN(i) DECLARE(i)
#define BEGIN_NARROW(i) DECLARE_NARROW(i)
#endif
#define SET(i)                     \
  *(V *)(c + i * c_row) = c##i##0; \
  *(V *)(c + i * c_row + VL) = c##i##1;
#define SET_NARROW(i) *(V *)(c + i * c_row) = c##i##0;
#define ADD(i)                      \
  *(V *)(c + i * c_row) += c##i##0; \
  *(V *)(c + i * c_row + VL) += c##i##1;
#define ADD_NARROW(i) *(V *)(c + i * c_row) += c##i##0;
#define STORE(rows, set, plus) \
  if (add) {                   \
    ROWS_##rows(plus)          \
  } else {                     \
    ROWS_##rows(set)           \
  }

/* ---- A as a panel [k][rows], B as a panel [k][NR] ---- */

#define STEP(i)                    \
  MULTIPLY_ADD(c##i##0, a[i], b0); \
  MULTIPLY_ADD(c##i##1, a[i], b1);
#define STEP_NARROW(i) MULTIPLY_ADD(c##i##0, a[i], b0);
#define STEP_ROWS(rows)                                    \
  {                                                        \
    const W b0 = *(const W *)b, b1 = *(const W *)(b + VL); \
    ROWS_##rows(STEP) a += rows;                           \
    b += NR;                                               \
  }
#define STEP_ROWS_NARROW(rows)          \
  {                                     \
    const W b0 = *(const W *)b;         \
    ROWS_##rows(STEP_NARROW) a += rows; \
    b += NR;                            \
  }

/* Down k by TY_AHEAD_STEP: lines of C, which are the next panel's after its own, `far` lines, with each two steps
 * `fetch`, and in the end `turn`. */
#define DOWN(rows, far, fetch, turn)                                              \
  for (; k >= TY_AHEAD_STEP; k -= TY_AHEAD_STEP, near += near_row, line += far) { \
    __builtin_prefetch(near);                                                     \
    __builtin_prefetch(near + NR * sizeof(REAL) - 1);                             \
    for (int i = 0; i < far; i++) __builtin_prefetch(line[i], 0, 2);              \
    _Pragma("GCC unroll 8") for (int i = 0; i < TY_AHEAD_STEP; i += 2) {          \
      fetch;                                                                      \
      STEP_ROWS(rows) STEP_ROWS(rows)                                             \
    }                                                                             \
    turn;                                                                         \
  }
#define PANELS(rows)                                                                                                  \
  static void NAME(panels_##rows)(int64_t k, const UNIT *restrict a, const UNIT *restrict b, REAL *restrict c,        \
                                  int64_t c_row, bool add, const ty_ahead *ahead) {                                   \
    ROWS_##rows(BEGIN) const void *const *line = ahead->far_lines;                                                    \
    const char *next = ahead->a, *near = (const char *)c;                                                             \
    const int64_t near_row = c_row * (int64_t)sizeof(REAL);                                                           \
    if (next) {                                                                                                       \
      const int64_t next_row = ahead->a_row, next_k = ahead->a_next;                                                  \
      DOWN(rows, 1, (__builtin_prefetch(next), next += next_row), next += next_k)                                     \
    } else {                                                                                                          \
      DOWN(rows, TY_AHEAD_FAR, (void)0, (void)0)                                                                      \
    }                                                                                                                 \
    for (; k > 0; k--) STEP_ROWS(rows)                                                                                \
    STORE(rows, SET, ADD)                                                                                             \
  }                                                                                                                   \
  static void NAME(panels_narrow_##rows)(int64_t k, const UNIT *restrict a, const UNIT *restrict b, REAL *restrict c, \
                                         int64_t c_row, bool add, const ty_ahead *ahead) {                            \
    ROWS_##rows(BEGIN_NARROW) for (; k > 0; k--) STEP_ROWS_NARROW(rows) STORE(rows, SET_NARROW, ADD_NARROW)           \
  }
EACH_HEIGHT(PANELS)

typedef void NAME(panels_fn)(int64_t k, const UNIT *restrict a, const UNIT *restrict b, REAL *restrict c, int64_t c_row,
                             bool add, const ty_ahead *ahead);
#define WIDE_NAME(rows) NAME(panels_##rows),
#define NARROW_NAME(rows) NAME(panels_narrow_##rows),
static NAME(panels_fn) *const NAME(panels)[2][MR] = { /* [vectors - 1][rows - 1] */
                                                      { EACH_HEIGHT(NARROW_NAME) },
                                                      { EACH_HEIGHT(WIDE_NAME) }
};
#undef WIDE_NAME
#undef NARROW_NAME

/* ---- A and B by strides ---- */

#ifdef STRIDED
#define STEP_STRIDED(i)                    \
  MULTIPLY_ADD(c##i##0, a[i * a_row], b0); \
  MULTIPLY_ADD(c##i##1, a[i * a_row], b1);
#define STEP_STRIDED_NARROW(i) MULTIPLY_ADD(c##i##0, a[i * a_row], b0);

#define MICRO(rows)                                                                                                   \
  static void NAME(wide_##rows)(int64_t k, const UNIT *restrict a, int64_t a_row, int64_t a_col,                      \
                                const UNIT *restrict b, int64_t b_row, REAL *restrict c, int64_t c_row, bool add) {   \
    ROWS_##rows(DECLARE) for (; k > 0; k--, a += a_col, b += b_row) {                                                 \
      const W b0 = *(const W *)b, b1 = *(const W *)(b + VL);                                                          \
      ROWS_##rows(STEP_STRIDED)                                                                                       \
    }                                                                                                                 \
    STORE(rows, SET, ADD)                                                                                             \
  }                                                                                                                   \
  static void NAME(narrow_##rows)(int64_t k, const UNIT *restrict a, int64_t a_row, int64_t a_col,                    \
                                  const UNIT *restrict b, int64_t b_row, REAL *restrict c, int64_t c_row, bool add) { \
    ROWS_##rows(DECLARE_NARROW) for (; k > 0; k--, a += a_col, b += b_row) {                                          \
      const W b0 = *(const W *)b;                                                                                     \
      ROWS_##rows(STEP_STRIDED_NARROW)                                                                                \
    }                                                                                                                 \
    STORE(rows, SET_NARROW, ADD_NARROW)                                                                               \
  }
EACH_HEIGHT(MICRO)

typedef void NAME(micro_fn)(int64_t k, const UNIT *restrict a, int64_t a_row, int64_t a_col, const UNIT *restrict b,
                            int64_t b_row, REAL *restrict c, int64_t c_row, bool add);
#define WIDE_NAME(rows) NAME(wide_##rows),
#define NARROW_NAME(rows) NAME(narrow_##rows),
static NAME(micro_fn) *const NAME(micro)[2][MR] = { { EACH_HEIGHT(NARROW_NAME) }, { EACH_HEIGHT(WIDE_NAME) } };
#undef WIDE_NAME
#undef NARROW_NAME
#endif
