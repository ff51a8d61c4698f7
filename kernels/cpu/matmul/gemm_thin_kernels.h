/* The loop of gemm_thin.h for one element type of the large operand; included with IN (its type), LOAD(p) and ONE(p)
 * (a vector and a single element as REAL), and EACH(x), names.
 *
 * c += a b; b and c with contiguous columns. Eight rows of b at a time, which stay cached for the rows of a. */

static void EACH(rows)(const NAME(thin) * t, int64_t begin, int64_t end) {
  for (int64_t j0 = begin; j0 < end; j0 += CHUNK) {
    int64_t n = MIN2(CHUNK, end - j0), p = 0, row = t->g->b_row;
    for (; p + 8 <= t->g->k; p += 8) {
      const IN *restrict b = (const IN *)t->g->b + p * row + j0;
      for (int64_t i = 0; i < t->g->m; i++) {
        const REAL *a = t->a + i * t->a_row + p * t->a_col;
        REAL *restrict c = t->c + i * t->c_row + j0;
        REAL x0 = a[0], x1 = a[t->a_col], x2 = a[2 * t->a_col], x3 = a[3 * t->a_col];
        REAL x4 = a[4 * t->a_col], x5 = a[5 * t->a_col], x6 = a[6 * t->a_col], x7 = a[7 * t->a_col];
#define AT(r) LOAD(b + r * row + j)
        int64_t j = 0;
        for (; j + VL <= n; j += VL) {
          if (i == 0)
            for (int r = 8; r < 16; r++) __builtin_prefetch(b + r * row + j);
          *(V *)(c + j) = *(V *)(c + j) + x0 * AT(0) + x1 * AT(1) + x2 * AT(2) + x3 * AT(3) + x4 * AT(4) + x5 * AT(5) +
                          x6 * AT(6) + x7 * AT(7);
        }
#undef AT
#define AT(r) ONE(b + r * row + j)
        for (; j < n; j++)
          c[j] = c[j] + x0 * AT(0) + x1 * AT(1) + x2 * AT(2) + x3 * AT(3) + x4 * AT(4) + x5 * AT(5) + x6 * AT(6) +
                 x7 * AT(7);
#undef AT
      }
    }
    for (; p < t->g->k; p++) {
      const IN *restrict b = (const IN *)t->g->b + p * row + j0;
      for (int64_t i = 0; i < t->g->m; i++) {
        REAL *restrict c = t->c + i * t->c_row + j0, x = t->a[i * t->a_row + p * t->a_col];
        for (int64_t j = 0; j < n; j++) c[j] += x * ONE(b + j);
      }
    }
  }
}

#undef IN
#undef LOAD
#undef ONE
#undef EACH
