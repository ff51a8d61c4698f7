/* Template, for one type: REAL and FN(name). */

static bool FN(finite)(const REAL *x, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!isfinite(x[i])) return false;
  return true;
}
