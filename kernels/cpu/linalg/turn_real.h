/* Template (no guard: included once per element type, with REAL and FN(name)): a matrix turned. */

#define NAME(x) FN(x)
#include "../transpose_real.h"
#undef NAME

/* to [columns, rows] = from [rows, columns] turned. */
static inline void FN(turn)(REAL *to, const REAL *from, int64_t rows, int64_t columns) {
  FN(transpose)(from, columns, rows, columns, to, rows);
}
