/* softmax and log_softmax along one dimension, and their gradients. A line is read until it is in the cache: once
 * for the largest element, once for exponentials and sum, once to scale. */
#include "../cpu.h"
#include "../exp_rows.h"
#include "../lines.h"
#include "narrow.h"
#include "../stream.h"

enum {
  COLUMNS =
      64, /* lines taken together when their elements are apart: whole vectors, and the sums stay in the first cache */
  WORK = 16384, /* elements that are worth a thread */
  ROOM = 4096,  /* elements of a line that are kept in the first cache until they are scaled */
  LONG = 131072 /* those of a longer one in the second */
};

typedef struct job {
  const void *x; /* forward: the input; backward: the result */
  const void *g;
  void *out;
  int64_t n, inner, blocks; /* blocks of COLUMNS lines in `inner` */
  bool log;
  bool stream; /* the result goes past the caches */
} job;

#define REAL float
#define FN(name) name##_f32
#include "softmax_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "softmax_real.h"

#if defined(__AVX512F__)
#include "softmax_narrow.h"
#endif

static bool run(const ty_kernel_args *k, ty_range_fn *lines, ty_range_fn *columns, const void *x, const void *g,
                bool log) {
  ty_lines l = ty_lines_of(k->out[0], ((const ty_p_dim *)k->params)->dim);
  if (k->out[0]->count == 0) return true;
  job j = { .x = x,
            .g = g,
            .out = k->out[0]->data,
            .n = l.size,
            .inner = l.inner,
            .log = log,
            .stream = stream_pays(k->out[0]->count * ty_dtype_size[k->out[0]->dtype]),
            .blocks = (l.inner + COLUMNS - 1) / COLUMNS };
  int64_t per_block = l.size * (l.inner < COLUMNS ? l.inner : COLUMNS);
  if (l.inner == 1) ty_parallel_for(l.outer, 1 + WORK / l.size, lines, &j);
  else ty_parallel_for(l.outer * j.blocks, 1 + WORK / per_block, columns, &j);
  return true;
}

static bool forward(const ty_kernel_args *k, bool log) {
  bool wide = k->in[0]->dtype == TY_F64;
#if defined(__AVX512F__)
  if (!wide && ty_lines_of(k->out[0], ((const ty_p_dim *)k->params)->dim).size <= NARROW_WIDTH)
    return run(k, narrow_lines, columns_f32, k->in[0]->data, NULL, log);
#endif
  return run(k, wide ? lines_f64 : lines_f32, wide ? columns_f64 : columns_f32, k->in[0]->data, NULL, log);
}

static bool backward(const ty_kernel_args *k, bool log) {
  bool wide = k->in[0]->dtype == TY_F64;
#if defined(__AVX512F__)
  if (!wide && ty_lines_of(k->out[0], ((const ty_p_dim *)k->params)->dim).size <= NARROW_WIDTH)
    return run(k, narrow_lines_backward, columns_backward_f32, k->in[1]->data, k->in[0]->data, log);
#endif
  return run(k, wide ? lines_backward_f64 : lines_backward_f32, wide ? columns_backward_f64 : columns_backward_f32,
             k->in[1]->data, k->in[0]->data, log);
}

bool TY_KERNEL(softmax)(const ty_kernel_args *k) { return forward(k, false); }
bool TY_KERNEL(log_softmax)(const ty_kernel_args *k) { return forward(k, true); }
bool TY_KERNEL(softmax_backward)(const ty_kernel_args *k) { return backward(k, false); }
bool TY_KERNEL(log_softmax_backward)(const ty_kernel_args *k) { return backward(k, true); }
