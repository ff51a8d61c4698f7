/* The innermost loops of gemm_dots.h for one element type of the large operand, W; included with IN (its type), PARTS
 * (vectors of sums that one step of k feeds), LOAD(q, p) (part q of the elements at p, as REAL) and EACH(x), names.
 *
 * A kernel holds the sums of up to MR rows of x by one or DOT_COLUMNS rows of W, a vector each, while it runs down k;
 * `rest` has what is left past the last whole step, filled up with zeros. It asks for the rows that come `next`. */

#define DOT_DECLARE_1(i) V s##i##0 = { 0 };
#define DOT_DECLARE_2(i) DOT_DECLARE_1(i) V s##i##1 = { 0 };
#define DOT_DECLARE_3(i) DOT_DECLARE_2(i) V s##i##2 = { 0 };
#define DOT_DECLARE_4(i) DOT_DECLARE_3(i) V s##i##3 = { 0 };
#define DOT_LOAD_1(q, p, row) const V y0 = LOAD(q, p);
#define DOT_LOAD_2(q, p, row) DOT_LOAD_1(q, p, row) const V y1 = LOAD(q, (p) + (row));
#define DOT_LOAD_3(q, p, row) DOT_LOAD_2(q, p, row) const V y2 = LOAD(q, (p) + 2 * (row));
#define DOT_LOAD_4(q, p, row) DOT_LOAD_3(q, p, row) const V y3 = LOAD(q, (p) + 3 * (row));
#define DOT_ADD_1(i)                 \
  V x##i = *(const V *)(x + i * VL); \
  if (i < MR / 2) KEEP(x##i)         \
  s##i##0 += x##i * y0;
#define DOT_ADD_2(i) DOT_ADD_1(i) s##i##1 += x##i * y1;
#define DOT_ADD_3(i) DOT_ADD_2(i) s##i##2 += x##i * y2;
#define DOT_ADD_4(i) DOT_ADD_3(i) s##i##3 += x##i * y3;
#define DOT_NEXT(j) __builtin_prefetch(next + j * next_row, 0, 2);
#define DOT_STORE_1(i) *(V *)(sums + i * VL) = s##i##0;
#define DOT_STORE_2(i) DOT_STORE_1(i) * (V *)(sums + (DOT_ROWS + i) * VL) = s##i##1;
#define DOT_STORE_3(i) DOT_STORE_2(i) * (V *)(sums + (2 * DOT_ROWS + i) * VL) = s##i##2;
#define DOT_STORE_4(i) DOT_STORE_3(i) * (V *)(sums + (3 * DOT_ROWS + i) * VL) = s##i##3;
#define DOT_PART(q, rows, columns, p, row) \
  { DOT_LOAD_##columns(q, p, row) ROWS_##rows(DOT_ADD_##columns) x += rows * VL; }
#if PARTS == 2
#define DOT_PARTS(rows, columns, p, row) \
  { DOT_PART(0, rows, columns, p, row) DOT_PART(1, rows, columns, p, row) }
#else
#define DOT_PARTS(rows, columns, p, row) DOT_PART(0, rows, columns, p, row)
#endif
#define DOTS_BY(rows, columns)                                                                                      \
  static void EACH(dots_##rows##_##columns)(int64_t steps, const REAL *restrict x, const void *w_at, int64_t w_row, \
                                            const void *rest_at, const void *next_at, int64_t next_row,             \
                                            REAL *restrict sums) {                                                  \
    const IN *w = w_at, *rest = rest_at, *next = next_at;                                                           \
    ROWS_##rows(DOT_DECLARE_##columns) for (; steps > 0; steps--, w += PARTS * VL, next += PARTS * VL) {            \
      ROWS_##columns(DOT_NEXT) DOT_PARTS(rows, columns, w, w_row)                                                   \
    }                                                                                                               \
    if (rest) DOT_PARTS(rows, columns, rest, PARTS *VL)                                                             \
    ROWS_##rows(DOT_STORE_##columns)                                                                                \
  }
#if TY_VECTOR_BYTES == 64
#define DOTS_WIDE(rows) DOTS_BY(rows, 3)
#define DOTS_WIDE_NAME(rows) EACH(dots_##rows##_3),
#else
DOTS_BY(1, 4) /* one row alone: sums wait for themselves, so there are more of them */
#define DOTS_WIDE(rows) DOTS_BY(rows, 2)
#define DOTS_WIDE_NAME(rows) EACH(dots_##rows##_2),
#endif
#define DOTS_NARROW(rows) DOTS_BY(rows, 1)
#define DOTS_NARROW_NAME(rows) EACH(dots_##rows##_1),
EACH_HEIGHT(DOTS_WIDE)
EACH_HEIGHT(DOTS_NARROW)

static const NAME(dots_kind) EACH(dots_kind) = {
#if TY_VECTOR_BYTES < 64
  .alone = EACH(dots_1_4),
#endif
  .size = sizeof(IN),
  .parts = PARTS,
  .run = { { EACH_HEIGHT(DOTS_NARROW_NAME) }, { EACH_HEIGHT(DOTS_WIDE_NAME) } }
};

#undef DOT_DECLARE_1
#undef DOT_DECLARE_2
#undef DOT_DECLARE_3
#undef DOT_DECLARE_4
#undef DOT_LOAD_1
#undef DOT_LOAD_2
#undef DOT_LOAD_3
#undef DOT_LOAD_4
#undef DOT_ADD_1
#undef DOT_ADD_2
#undef DOT_ADD_3
#undef DOT_ADD_4
#undef DOT_NEXT
#undef DOT_STORE_1
#undef DOT_STORE_2
#undef DOT_STORE_3
#undef DOT_STORE_4
#undef DOT_PART
#undef DOT_PARTS
#undef DOTS_BY
#undef DOTS_WIDE
#undef DOTS_WIDE_NAME
#undef DOTS_NARROW
#undef DOTS_NARROW_NAME
#undef IN
#undef PARTS
#undef LOAD
#undef EACH
