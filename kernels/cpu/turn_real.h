/* Template (no guard: included once per element type, with REAL and FN(name)): a matrix turned. */

/* to [columns, rows] = from [rows, columns] turned, by squares that stay in the cache. */
static inline void FN(turn)(REAL *to, const REAL *from, int64_t rows, int64_t columns) {
  enum { SIDE = 32 };
  for (int64_t r0 = 0; r0 < rows; r0 += SIDE)
    for (int64_t c0 = 0; c0 < columns; c0 += SIDE)
      for (int64_t r = r0; r < r0 + SIDE && r < rows; r++)
        for (int64_t c = c0; c < c0 + SIDE && c < columns; c++) to[c * rows + r] = from[r * columns + c];
}
