/* Work split over the threads of the CPU backend. */
#ifndef TY_KERNELS_CPU_PARALLEL_H
#define TY_KERNELS_CPU_PARALLEL_H

#include "../base.h"

typedef void ty_range_fn(void *context, int64_t begin, int64_t end);

/* Calls fn on pieces that cover [0, n), each at least `grain` long except the last and beginning at a multiple of it;
 * on this thread alone when n <= grain. Pieces are skipped once Ctrl-C was pressed (the dispatcher then reports it). */
void ty_parallel_for(int64_t n, int64_t grain, ty_range_fn *fn, void *context);

/* The same, but no piece is ever skipped: for work that must not stop half way, like an optimizer's step. */
void ty_parallel_for_all(int64_t n, int64_t grain, ty_range_fn *fn, void *context);

/* Threads the next ty_parallel_for may use. */
int ty_parallel_threads(void);

/* For calls from this thread; 0: OMP_NUM_THREADS, or as many as this process has cores. */
void ty_parallel_set_threads(int n);

#endif
