/* Convolutions in window order: Lu, Chu and Liu 2022, "Im2win: Memory Efficient Convolution On SIMD Architectures". What
 * the windows of a row of results see of a channel is written once, column by column, [columns][kh]: each window is then
 * one run of kh * kw values, and windows share the columns that they have in common, where a matrix of windows would
 * repeat them. Products of runs with kernels in the same order, a panel of output channels side by side at a time, are
 * added up in registers. There is room for one image's windows and, for each thread, one panel of kernels. */
#include <stdatomic.h>
#include <string.h>

#include "conv.h"

enum {
  PLACES = 6,        /* results of a channel that are summed at once: with two vectors of channels, all registers */
  PASS = 384,        /* taps of a panel of kernels: they stay in the L1 cache */
  TASK_PLACES = 1536 /* of a task */
};

typedef struct job {
  const conv_shape *s;
  const void *x, *weight, *bias;
  void *y, *windows;          /* of one image, [oh][c][used][kh] */
  int64_t used;               /* columns that windows see */
  int64_t runs, length, step; /* of a window: runs of neighbours, and elements from one to the next */
  int64_t channels;           /* of a pass */
  int64_t image, blocks, chunks;
  atomic_bool failed;
} job;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static job job_of(const conv_shape *s) {
  job j = { .s = s, .used = (s->ow - 1) * s->sw + (s->kw - 1) * s->dw + 1 };
  const bool together = s->dw == 1;
  j.runs = together ? 1 : s->kw, j.length = together ? s->kh * s->kw : s->kh, j.step = s->dw * s->kh;
  j.channels = least(s->cg, 1 + PASS / (s->kh * s->kw));
  j.chunks = (s->oh * s->ow + TASK_PLACES - 1) / TASK_PLACES;
  return j;
}

#define REAL float
#define NAME(x) x##_f32
#include "conv_im2win_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "conv_im2win_real.h"

/* in: x, weight, bias or NULL. */
bool TY_KERNEL(conv2d_im2win)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *weight = k->in[1], *bias = k->in[2], *y = k->out[0];
  const conv_shape s = conv_shape_of(x, weight, y, k->params);
  if (y->count == 0) return true;
  job j = job_of(&s);
  j.x = x->data, j.weight = weight->data, j.bias = bias ? bias->data : NULL, j.y = y->data;
  const bool wide = y->dtype == TY_F64;
  const size_t bytes = (size_t)(s.c * s.oh * j.used * s.kh + 1) * (wide ? 8 : 4);
  if (!(j.windows = ty_scratch_alloc(bytes))) return false;
  if (wide) run_f64(&j);
  else run_f32(&j);
  ty_scratch_free(j.windows, bytes);
  return !atomic_load(&j.failed) || ty_fail(TY_ENOMEM, "out of memory for a convolution");
}
