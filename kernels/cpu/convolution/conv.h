/* What the parts of the convolution share: the geometry of one call. */
#ifndef TY_KERNELS_CPU_CONV_H
#define TY_KERNELS_CPU_CONV_H

#include "../matmul/gemm.h"

enum { MOST_CHANNELS = 1024 }; /* in one sum of conv_pointwise: longer ones are better taken in blocks */

/* x [n, c, h, w], weight [o, c/groups, kh, kw], y [n, o, oh, ow]. */
typedef struct conv_shape {
  int64_t n, c, h, w, o, kh, kw, oh, ow;
  int64_t sh, sw, ph, pw, dh, dw, groups;
  int64_t cg, og;             /* channels per group */
  struct ty_storage *weights; /* ty_kernel_args.weights of conv2d, else NULL */
} conv_shape;

static inline conv_shape conv_shape_of(const ty_view *x, const ty_view *weight, const ty_view *y, const ty_p_conv *p) {
  return (conv_shape){
    .n = x->size[0],
    .c = x->size[1],
    .h = x->size[2],
    .w = x->size[3],
    .o = weight->size[0],
    .kh = weight->size[2],
    .kw = weight->size[3],
    .oh = y->size[2],
    .ow = y->size[3],
    .sh = p->stride[0],
    .sw = p->stride[1],
    .ph = p->padding[0],
    .pw = p->padding[1],
    .dh = p->dilation[0],
    .dw = p->dilation[1],
    .groups = p->groups,
    .cg = weight->size[1],
    .og = weight->size[0] / p->groups,
  };
}

/* ty_kept_open() for a form of the weight: `detail` is what else of the call its layout depends on. */
static inline ty_kept conv_kept(const conv_shape *s, const float *weight, const void *maker, int64_t detail,
                                size_t bytes, bool anyway) {
  ty_kept_form form = { weight, maker, { s->o, s->cg, s->kh, s->kw, s->groups, s->dh, s->dw, detail } };
  return ty_kept_open(s->weights, &form, bytes, anyway);
}

/* What is done to a result before it is stored: y = act(conv + bias + residual). */
typedef struct conv_epilogue {
  const float *bias, *residual; /* [o], and like y; or NULL */
  ty_activation activation;
} conv_epilogue;

static inline bool conv_is_depthwise(const conv_shape *s) { return s->cg == 1 && s->og == 1 && s->groups > 1; }

/* Whether the gradient for the input is a convolution of the results' with the kernels turned, and of which shape. */
static inline bool conv_turned(const conv_shape *s, conv_shape *turned) {
  conv_shape t = *s;
  t.c = s->o, t.h = s->oh, t.w = s->ow, t.o = s->c, t.oh = s->h, t.ow = s->w;
  t.cg = s->og, t.og = s->cg;
  t.ph = (s->kh - 1) * s->dh - s->ph, t.pw = (s->kw - 1) * s->dw - s->pw;
  *turned = t;
  return s->sh == 1 && s->sw == 1 && t.ph >= 0 && t.pw >= 0;
}

/* f32 3x3 kernels, stride and dilation 1, one group, by Winograd's transforms (conv_winograd.c). All return false after
 * ty_fail() when scratch memory is short. */
bool TY_KERNEL(conv_winograd)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                              float *y);
bool TY_KERNEL(conv_winograd_input)(const conv_shape *s, const float *g, const float *weight, float *dx);
bool TY_KERNEL(conv_winograd_weight)(const conv_shape *s, const float *g, const float *x, float *dw);

/* f32 dilated kernels by their phases, each of which conv_winograd takes (conv_dilated.c). conv_dilated_shape: whether
 * there are phases, and how large. */
bool TY_KERNEL(conv_dilated_shape)(const conv_shape *s, conv_shape *phase);
bool TY_KERNEL(conv_dilated)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                             float *y);
bool TY_KERNEL(conv_dilated_input)(const conv_shape *s, const float *g, const float *weight, float *dx);
bool TY_KERNEL(conv_dilated_weight)(const conv_shape *s, const float *g, const float *x, float *dw);

/* Any f32 convolution by sums over taps (conv_direct.c). */
bool TY_KERNEL(conv_direct)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e, float *y);
bool TY_KERNEL(conv_direct_input)(const conv_shape *s, const float *g, const float *weight, float *dx);
bool TY_KERNEL(conv_direct_weight)(const conv_shape *s, const float *g, const float *x, float *dw);

/* f32 forward for images of few channels and for small groups (conv_planes.c), and the gradient of small groups' weight
 * (conv_planes_weight.c). */
bool TY_KERNEL(conv_planes)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e, float *y);
bool TY_KERNEL(conv_planes_weight)(const conv_shape *s, const float *g, const float *x, float *dw);

/* 1x1 kernels without padding, one group (conv_pointwise.c). turned: weight is [c, o]. */
bool TY_KERNEL(conv_pointwise)(const conv_shape *s, const float *x, const float *weight, bool turned,
                               const conv_epilogue *e, float *y);

#endif
