/* One dimension resized (kernels/resample.h), and the gradient of that. */
#include "../../resample.h"

#include "../cpu.h"

ty_kernel TY_KERNEL(resample);
ty_kernel TY_KERNEL(resample_backward);

#define BLOCK 512 /* columns that go together */

/* [outer, in, inner] and [outer, out, inner]. */
typedef struct resizing {
  const void *from;
  void *to;
  int64_t in, out, inner, taps;
  const ty_resample_span *spans; /* [out] */
  const void *weights;           /* [out, taps] */
} resizing;

#define REAL float
#define NAME(x) x##_f32
#include "resample_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "resample_real.h"

static bool run(const ty_kernel_args *k, const ty_view *image, const ty_view *result, bool back) {
  const ty_p_resample *p = k->params;
  if (k->out[0]->count == 0) return true;
  int64_t outer = 1, inner = 1, in = image->size[p->dim], out = result->size[p->dim];
  for (int d = 0; d < p->dim; d++) outer *= image->size[d];
  for (int d = p->dim + 1; d < image->ndim; d++) inner *= image->size[d];
  const int64_t taps = ty_resample_taps(p, in, out);
  const bool wide = image->dtype == TY_F64;
  const size_t row = sizeof(double) * (size_t)taps;
  const size_t bytes = (size_t)out * (sizeof(ty_resample_span) + row) + row;
  char *memory = ty_scratch_alloc(bytes);
  if (!memory) return false;
  double *weights = (double *)(void *)memory, *line = weights + out * taps;
  ty_resample_span *spans = (ty_resample_span *)(void *)(line + taps);
  const double step = ty_resample_step(p, in, out);
  for (int64_t i = 0; i < out; i++) {
    spans[i] = ty_resample_span_of(p, i, step, in, out, taps, line);
    for (int t = 0; t < spans[i].count; t++) {
      if (wide) weights[i * taps + t] = line[t];
      else ((float *)(void *)weights)[i * taps + t] = (float)line[t];
    }
  }
  resizing r = { k->in[0]->data, k->out[0]->data, in, out, inner, taps, spans, weights };
  if (inner == 1)
    ty_parallel_for(outer, 1 + 16384 / (in + out * taps),
                    back ? (wide ? back_lines_f64 : back_lines_f32) : (wide ? lines_f64 : lines_f32), &r);
  else if (back)
    ty_parallel_for(outer * ((inner + BLOCK - 1) / BLOCK), 1 + 16 / (in + out),
                    wide ? back_blocks_f64 : back_blocks_f32, &r);
  else ty_parallel_for(outer * out, 1 + 16384 / (inner * taps), wide ? rows_f64 : rows_f32, &r);
  ty_scratch_free(memory, bytes);
  return true;
}

bool TY_KERNEL(resample)(const ty_kernel_args *k) { return run(k, k->in[0], k->out[0], false); }
bool TY_KERNEL(resample_backward)(const ty_kernel_args *k) { return run(k, k->out[0], k->in[0], true); }
