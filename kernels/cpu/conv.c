/* conv2d and its gradients, f32 and f64. */
#include <string.h>

#include "conv.h"

ty_kernel TY_KERNEL(conv2d);
ty_kernel TY_KERNEL(conv2d_backward_input);
ty_kernel TY_KERNEL(conv2d_backward_weight);

#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_f32
#define GEMM TY_KERNEL(gemm_f32)
#include "conv_real.h"
#undef REAL
#undef INTEGER
#undef NAME
#undef GEMM

#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_f64
#define GEMM TY_KERNEL(gemm_f64)
#include "conv_real.h"

/* ---- which f32 convolution is computed how ---- */

/* Whether Winograd's transforms pay: tiles compute 4x4 results with 36 products each for 9 each, and the transforms
 * cost about as much as 8 channels more. */
static bool suits_winograd(const conv_shape *s) {
  if (s->kh != 3 || s->kw != 3 || s->sh != 1 || s->sw != 1 || s->dh != 1 || s->dw != 1 || s->groups != 1) return false;
  double tiles = (double)((s->oh + 3) / 4) * (double)((s->ow + 3) / 4), area = (double)(s->oh * s->ow);
  return s->c >= 12 && s->o >= 12 && 36 * tiles < 6.5 * area;
}

/* 1x1 kernels are plain products; depthwise ones have kernels of their own. */
static bool is_plain(const conv_shape *s) {
  return conv_is_depthwise(s) || (s->kh == 1 && s->kw == 1 && s->sh == 1 && s->sw == 1 && s->ph == 0 && s->pw == 0);
}

static bool convolve_f32(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e, float *y) {
  if (is_plain(s)) return conv_f32(s, x, weight, e->bias, y);
  if (suits_winograd(s)) return TY_KERNEL(conv_winograd)(s, x, weight, e, y);
  return TY_KERNEL(conv_direct)(s, x, weight, e, y);
}

static bool input_gradient_f32(const conv_shape *s, const float *g, const float *weight, float *dx) {
  if (is_plain(s)) return conv_backward_input_f32(s, g, weight, dx);
  if (suits_winograd(s)) return TY_KERNEL(conv_winograd_input)(s, g, weight, dx);
  return TY_KERNEL(conv_direct_input)(s, g, weight, dx);
}

static bool weight_gradient_f32(const conv_shape *s, const float *g, const float *x, float *dw) {
  if (is_plain(s)) return conv_backward_weight_f32(s, g, x, dw);
  if (suits_winograd(s)) return TY_KERNEL(conv_winograd_weight)(s, g, x, dw);
  return TY_KERNEL(conv_direct_weight)(s, g, x, dw);
}

/* ---- the kernels ---- */

static bool report(bool ok) { return ok || ty_fail(TY_ENOMEM, "out of memory for a convolution"); }

static void clear(const ty_view *v) { memset(v->data, 0, (size_t)v->count * ty_dtype_size[v->dtype]); }

/* Whether there is nothing to multiply: an empty batch, no channels, or no taps. */
static bool is_empty(const conv_shape *s) { return s->n * s->oh * s->ow * s->cg * s->kh * s->kw * s->o == 0; }

bool TY_KERNEL(conv2d)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *weight = k->in[1], *bias = k->nin > 2 ? k->in[2] : NULL, *y = k->out[0];
  conv_shape s = conv_shape_of(x, weight, y, k->params);
  const void *b = bias ? bias->data : NULL;
  if (y->count == 0) return true;
  if (y->dtype == TY_F64) return report(conv_f64(&s, x->data, weight->data, b, y->data));
  if (is_empty(&s)) return report(conv_f32(&s, x->data, weight->data, b, y->data));
  const conv_epilogue e = { b, NULL, TY_NO_ACTIVATION };
  return report(convolve_f32(&s, x->data, weight->data, &e, y->data));
}

bool TY_KERNEL(conv2d_backward_input)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *weight = k->in[1], *dx = k->out[0];
  conv_shape s = conv_shape_of(dx, weight, g, k->params);
  if (dx->count == 0) return true;
  if (is_empty(&s)) return clear(dx), true;
  if (dx->dtype == TY_F64) return report(conv_backward_input_f64(&s, g->data, weight->data, dx->data));
  return report(input_gradient_f32(&s, g->data, weight->data, dx->data));
}

bool TY_KERNEL(conv2d_backward_weight)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *x = k->in[1], *dw = k->out[0];
  conv_shape s = conv_shape_of(x, dw, g, k->params);
  if (dw->count == 0) return true;
  if (is_empty(&s)) return clear(dw), true;
  if (dw->dtype == TY_F64) return report(conv_backward_weight_f64(&s, g->data, x->data, dw->data));
  return report(weight_gradient_f32(&s, g->data, x->data, dw->data));
}
