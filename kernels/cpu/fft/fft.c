/* Fourier and cosine transforms: kernels/fft.h. Short lines, and lines across memory, go several at once through the
 * lanes of vectors; long ones are cut into matrices, whose columns and rows do. */
#include <string.h>

#include "../../fft.h"
#include "../../fft_plan.h"
#include "../cpu.h"

#define VEC_BYTES TY_VECTOR_BYTES

#define REAL float
#define REAL_INT int32_t
#define PAIRS 2
#if VEC_BYTES == 64
#define LANES 16
#elif VEC_BYTES == 32
#define LANES 8
#else
#define LANES 4
#endif
#define FN(x) x##_f32
#include "fft_real.h"
#undef REAL
#undef REAL_INT
#undef PAIRS
#undef LANES
#undef FN

#define REAL double
#define REAL_INT int64_t
#define PAIRS 1
#if VEC_BYTES == 64
#define LANES 8
#elif VEC_BYTES == 32
#define LANES 4
#else
#define LANES 2
#endif
#define FN(x) x##_f64
#include "fft_real.h"

/* Runs the job `j` that JOB(type of the job, type of its numbers) declares. */
#define RETURN_RUN(dtype, JOB) \
  if ((dtype) == TY_F64) {     \
    JOB(job_f64, double);      \
    return run_f64(&j);        \
  }                            \
  JOB(job_f32, float);         \
  return run_f32(&j)

static bool run(const ty_kernel_args *k, ty_fft_kind kind) {
  const ty_p_fft *p = k->params;
  const ty_view *x = k->in[0], *y = k->out[0];
  if (!y->count) return true;
  int64_t outer = 1, inner = 1;
  const int ndim = y->ndim - (kind == TY_FFT_COMPLEX || kind == TY_FFT_REAL);
  for (int d = 0; d < p->dim; d++) outer *= y->size[d];
  for (int d = p->dim + 1; d < ndim; d++) inner *= y->size[d];
#define JOB(type, real)                         \
  type j = { .kind = kind,                      \
             .x = x->data,                      \
             .y = y->data,                      \
             .lines = outer * inner,            \
             .inner = inner,                    \
             .n = p->n,                         \
             .length = x->size[p->dim],         \
             .frames = 1,                       \
             .signal = x->size[p->dim] * inner, \
             .out = y->size[p->dim],            \
             .inverse = p->inverse,             \
             .doubled = p->doubled,             \
             .scale = (real)p->scale,           \
             .first = (real)p->first }
  RETURN_RUN(x->dtype, JOB);
#undef JOB
}

/* in: x [..., t], the window [n] or NULL; out [..., frames, n / 2 + 1, 2] */
bool TY_KERNEL(rfft_frames)(const ty_kernel_args *k) {
  const ty_p_fft *p = k->params;
  const ty_view *x = k->in[0], *window = k->nin > 1 ? k->in[1] : NULL, *y = k->out[0];
  if (!y->count) return true;
  const int64_t bins = p->n / 2 + 1, count = y->size[y->ndim - 3];
#define JOB(type, real)                              \
  type j = { .kind = TY_FFT_REAL,                    \
             .x = x->data,                           \
             .y = y->data,                           \
             .lines = y->count / (2 * bins),         \
             .inner = 1,                             \
             .n = p->n,                              \
             .length = p->n,                         \
             .out = bins,                            \
             .frames = count,                        \
             .signal = x->size[x->ndim - 1],         \
             .hop = p->hop,                          \
             .window = window ? window->data : NULL, \
             .scale = (real)p->scale }
  RETURN_RUN(x->dtype, JOB);
#undef JOB
}

/* in: x [..., c, t] and the kernel [c, m], out [..., c, length]; or, for the kernel's gradient, x and g, out [c, m] */
static bool convolve(const ty_kernel_args *k, bool of_kernel) {
  const ty_p_fft_conv *p = k->params;
  const ty_view *x = k->in[0], *other = k->in[1], *y = k->out[0];
  if (!y->count) return true;
  if (!x->count || !other->count) {
    memset(y->data, 0, (size_t)y->count * ty_dtype_size[y->dtype]);
    return true;
  }
  const int64_t channels = x->size[x->ndim - 2], taken = x->size[x->ndim - 1];
#define JOB(type)                           \
  conv_##type j = {                         \
    .x = x->data,                           \
    .kernel = other->data,                  \
    .y = y->data,                           \
    .batch = x->count / (channels * taken), \
    .channels = channels,                   \
    .taken = taken,                         \
    .taps = other->size[other->ndim - 1],   \
    .length = y->size[y->ndim - 1],         \
    .start = p->start,                      \
    .turned = p->turned,                    \
    .of_kernel = of_kernel                  \
  }
  if (x->dtype == TY_F64) {
    JOB(f64);
    return run_conv_f64(&j, p->n);
  }
  JOB(f32);
  return run_conv_f32(&j, p->n);
#undef JOB
}

/* in: x [..., h, w], or pairs [..., h, w, 2]; out [..., h, bins, 2], of real x with bins = w / 2 + 1, else w */
bool TY_KERNEL(fft_plane)(const ty_kernel_args *k) {
  const ty_p_fft *p = k->params;
  const ty_view *x = k->in[0], *y = k->out[0];
  if (!y->count) return true;
  const bool real = x->ndim < y->ndim;
  const int64_t h = y->size[y->ndim - 3], bins = y->size[y->ndim - 2], w = x->size[x->ndim - (real ? 1 : 2)];
#define PLANES(type, job, scalar)                                                                                    \
  type planes = { .from = h * w * (real ? 1 : 2), .to = h * bins * 2 };                                              \
  planes.rows = (job){ .kind = real ? TY_FFT_REAL : TY_FFT_COMPLEX,                                                  \
                       .x = x->data,                                                                                 \
                       .y = y->data,                                                                                 \
                       .lines = h,                                                                                   \
                       .inner = 1,                                                                                   \
                       .n = w,                                                                                       \
                       .length = w,                                                                                  \
                       .out = bins,                                                                                  \
                       .frames = 1,                                                                                  \
                       .signal = w,                                                                                  \
                       .inverse = p->inverse,                                                                        \
                       .scale = (scalar)p->scale };                                                                  \
  planes.columns = (job) {                                                                                           \
    .kind = TY_FFT_COMPLEX, .x = y->data, .y = y->data, .lines = bins, .inner = bins, .n = h, .length = h, .out = h, \
    .frames = 1, .signal = h * bins, .inverse = p->inverse, .scale = 1                                               \
  }
  const int64_t count = y->count / (h * bins * 2);
  if (x->dtype == TY_F64) {
    PLANES(planes_f64, job_f64, double);
    return run_planes_f64(&planes, count);
  }
  PLANES(planes_f32, job_f32, float);
  return run_planes_f32(&planes, count);
#undef PLANES
}

bool TY_KERNEL(fft_line)(const ty_kernel_args *k) { return run(k, TY_FFT_COMPLEX); }
bool TY_KERNEL(rfft_line)(const ty_kernel_args *k) { return run(k, TY_FFT_REAL); }
bool TY_KERNEL(irfft_line)(const ty_kernel_args *k) { return run(k, TY_FFT_HALF); }
bool TY_KERNEL(dct_line)(const ty_kernel_args *k) { return run(k, TY_FFT_COSINE); }
bool TY_KERNEL(fft_conv_lines)(const ty_kernel_args *k) { return convolve(k, false); }
bool TY_KERNEL(fft_conv_kernel)(const ty_kernel_args *k) { return convolve(k, true); }
