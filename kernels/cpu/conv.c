/* conv2d and its gradients, f32 and f64. */
#include <string.h>

#include "conv.h"
#include "onednn.h"

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

/* ---- the f32 convolutions that oneDNN does faster ---- */

enum {
  WIDE = 16
}; /* channels from which its blocked layouts pay; 1x1 and depthwise kernels are faster on plain ones */

static bool suits_library(const conv_shape *s) {
  bool pointwise = s->kh == 1 && s->kw == 1;
  double work = (double)(s->n * s->oh * s->ow) * (double)(s->o * s->cg * s->kh * s->kw);
  return s->cg >= WIDE && s->og >= WIDE && !pointwise && work >= 1e6;
}

static ty_onednn_conv library_conv(const conv_shape *s, ty_onednn_pass pass, int64_t n) {
  return (ty_onednn_conv){
    .pass = pass,
    .threads = ty_parallel_threads(),
    .n = n,
    .c = s->c,
    .h = s->h,
    .w = s->w,
    .o = s->o,
    .kh = s->kh,
    .kw = s->kw,
    .oh = s->oh,
    .ow = s->ow,
    .sh = s->sh,
    .sw = s->sw,
    .ph = s->ph,
    .pw = s->pw,
    .dh = s->dh,
    .dw = s->dw,
    .groups = s->groups,
    .x_image = s->c * s->h * s->w,
    .y_image = s->o * s->oh * s->ow,
  };
}

/* Images that one call may take without keeping Ctrl-C waiting. */
static int64_t images_at_once(const conv_shape *s) {
  double work = (double)(s->oh * s->ow) * (double)(s->o * s->cg * s->kh * s->kw);
  int64_t n = (int64_t)(1e10 / work) + 1;
  return n < s->n ? n : s->n;
}

/* FORWARD or INPUT. False: not done. */
static bool library_images(const conv_shape *s, ty_onednn_pass pass, float *x, const float *weight, const float *bias,
                           float *y, bool *ok) {
  if (!suits_library(s)) return false;
  int64_t step = images_at_once(s);
  *ok = true;
  for (int64_t n = 0; n < s->n && *ok && !ty_interrupted; n += step) {
    ty_onednn_conv c = library_conv(s, pass, s->n - n < step ? s->n - n : step);
    c.bias = bias != NULL;
    if (!ty_onednn_convolve(&c, x + n * c.x_image, (float *)(uintptr_t)weight, bias, y + n * c.y_image, ok))
      return false;
  }
  return true;
}

/* The gradient for the weight is summed in parts that do not depend on the number of threads: ranges of images, and of
 * output channels when the weight is too large for many partial sums. */
typedef struct weight_parts {
  const conv_shape *s;
  const float *g, *x;
  float *sums;                  /* [parts][o, cg, kh, kw] */
  int64_t parts, slices, slice; /* ranges of images; ranges of output channels and the channels in each */
  bool failed, declined;
} weight_parts;

static void library_weight_units(void *context, int64_t begin, int64_t end) {
  weight_parts *w = context;
  const conv_shape *s = w->s;
  int64_t per_channel = s->cg * s->kh * s->kw;
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t part = u / w->slices, channel = u % w->slices * w->slice;
    int64_t first = s->n * part / w->parts, last = s->n * (part + 1) / w->parts;
    ty_onednn_conv c = library_conv(s, TY_ONEDNN_WEIGHT, last - first);
    c.threads = 1;
    c.o = s->o - channel < w->slice ? s->o - channel : w->slice;
    bool ok = true;
    if (!ty_onednn_convolve(&c, (float *)(uintptr_t)w->x + first * c.x_image,
                            w->sums + (part * s->o + channel) * per_channel, NULL,
                            (float *)(uintptr_t)w->g + first * c.y_image + channel * s->oh * s->ow, &ok))
      w->declined = true;
    if (!ok) w->failed = true;
  }
}

static bool library_weight(const conv_shape *s, const float *g, const float *x, float *dw, bool *ok) {
  if (!suits_library(s)) return false;
  int64_t count = s->o * s->cg * s->kh * s->kw, most = (1 << 22) / count, deep = s->n * s->oh * s->ow / 512;
  if (most > deep) most = deep; /* a part must be worth the sums it writes */
  weight_parts w = { .s = s, .g = g, .x = x, .sums = dw, .parts = s->n < 8 ? s->n : 8, .slices = 1, .slice = s->o };
  if (w.parts > most) w.parts = most > 1 ? most : 1;
  if (w.parts < 8 && s->groups == 1) {
    w.slices = (8 + w.parts - 1) / w.parts;
    w.slice = ((s->o + w.slices - 1) / w.slices + 31) / 32 * 32;
    w.slices = (s->o + w.slice - 1) / w.slice;
  }
  size_t bytes = sizeof(float) * (size_t)(w.parts * count);
  if (w.parts > 1 && !(w.sums = ty_scratch_alloc(bytes))) return *ok = false, true;
  ty_parallel_for(w.parts * w.slices, 1, library_weight_units, &w);
  if (w.parts > 1) {
    memcpy(dw, w.sums, sizeof(float) * (size_t)count);
    for (int64_t p = 1; p < w.parts; p++) {
      const float *restrict sum = w.sums + p * count;
      for (int64_t i = 0; i < count; i++) dw[i] += sum[i];
    }
    ty_scratch_free(w.sums, bytes);
  }
  *ok = !w.failed;
  return !w.declined;
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
  bool ok;
  if (y->count == 0) return true;
  if (y->dtype == TY_F64) return report(conv_f64(&s, x->data, weight->data, b, y->data));
  if (library_images(&s, TY_ONEDNN_FORWARD, x->data, weight->data, b, y->data, &ok)) return report(ok);
  return report(conv_f32(&s, x->data, weight->data, b, y->data));
}

bool TY_KERNEL(conv2d_backward_input)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *weight = k->in[1], *dx = k->out[0];
  conv_shape s = conv_shape_of(dx, weight, g, k->params);
  bool ok;
  if (dx->count == 0) return true;
  if (is_empty(&s)) return clear(dx), true;
  if (dx->dtype == TY_F64) return report(conv_backward_input_f64(&s, g->data, weight->data, dx->data));
  if (library_images(&s, TY_ONEDNN_INPUT, dx->data, weight->data, NULL, g->data, &ok)) return report(ok);
  return report(conv_backward_input_f32(&s, g->data, weight->data, dx->data));
}

bool TY_KERNEL(conv2d_backward_weight)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *x = k->in[1], *dw = k->out[0];
  conv_shape s = conv_shape_of(x, dw, g, k->params);
  bool ok;
  if (dw->count == 0) return true;
  if (is_empty(&s)) return clear(dw), true;
  if (dw->dtype == TY_F64) return report(conv_backward_weight_f64(&s, g->data, x->data, dw->data));
  if (library_weight(&s, g->data, x->data, dw->data, &ok)) return report(ok);
  return report(conv_backward_weight_f32(&s, g->data, x->data, dw->data));
}
