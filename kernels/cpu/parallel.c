#include "parallel.h"

#include <omp.h>

int ty_parallel_threads(void) { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

static void split(int64_t n, int64_t grain, ty_range_fn *fn, void *context, bool polls) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  int64_t pieces = (n + grain - 1) / grain;
  int threads = ty_parallel_threads();
  if (pieces == 1) {
    fn(context, 0, n);
    return;
  }
  /* A few pieces per thread: enough to balance and to notice Ctrl-C, few enough to stay cheap. */
  int64_t most = (int64_t)threads * 16;
  int64_t step = grain * ((pieces + most - 1) / most);
  if (threads == 1) {
    for (int64_t i = 0; i < n && !(polls && ty_interrupted); i += step) fn(context, i, i + step < n ? i + step : n);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < n; i += step)
    if (!(polls && ty_interrupted)) fn(context, i, i + step < n ? i + step : n);
}

void ty_parallel_for(int64_t n, int64_t grain, ty_range_fn *fn, void *context) { split(n, grain, fn, context, true); }
void ty_parallel_for_all(int64_t n, int64_t grain, ty_range_fn *fn, void *context) {
  split(n, grain, fn, context, false);
}
