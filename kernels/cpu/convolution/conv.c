/* conv2d and its gradients, f32 and f64; f16 and bf16 by conv_half.c. */
#include <string.h>

#include "conv_lanes.h"
#include "conv_tiles.h"

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

/* Whether Winograd's transforms pay: tiles compute 4x4 results with 36 products each for 9 each, and whole vectors of
 * the `channels` that are summed over (or, for the weight, belong to x) are transformed. */
static bool suits_winograd(const conv_shape *s, int64_t channels) {
  if (s->kh != 3 || s->kw != 3 || s->sh != 1 || s->sw != 1 || s->dh != 1 || s->dw != 1 || s->groups != 1) return false;
  double tiles = (double)((s->oh + 3) / 4) * (double)((s->ow + 3) / 4), area = (double)(s->oh * s->ow);
  return channels >= 12 && 36 * tiles < 6.5 * area;
}

/* The same of the phases of a dilated kernel. */
static bool suits_phases(const conv_shape *s, int64_t channels) {
  conv_shape phase;
  return TY_KERNEL(conv_dilated_shape)(s, &phase) && suits_winograd(&phase, channels);
}

/* 1x1 kernels are plain products; depthwise ones have kernels of their own. */
static bool is_plain(const conv_shape *s) {
  return conv_is_depthwise(s) || (s->kh == 1 && s->kw == 1 && s->sh == 1 && s->sw == 1 && s->ph == 0 && s->pw == 0);
}

/* Patches side by side, large enough that each is a long dot product: the matrix of windows has every element once.
 * Sums over taps are faster where channels come last without effort: whole vectors of them, and with AVX-512 three. */
static bool is_patches(const conv_shape *s) {
  return s->kh == s->sh && s->kw == s->sw && s->ph == 0 && s->pw == 0 && s->dh == 1 && s->dw == 1 && s->groups == 1 &&
         s->kh * s->kw * s->c >= 256 && s->o >= 4 * LANES && s->c < LANES && (s->c != 3 || LANES < 16);
}

/* A 1x1 kernel with a stride sees some positions only; those, packed, make it a plain product. */
static bool is_sparse(const conv_shape *s) {
  return s->kh == 1 && s->kw == 1 && s->ph == 0 && s->pw == 0 && !is_plain(s);
}

typedef struct sparse {
  conv_shape shape; /* of the plain product */
  const conv_shape *s;
  const float *from;
  float *to;
  size_t bytes; /* of the packed positions */
} sparse;

static sparse sparse_of(const conv_shape *s) {
  sparse p = { .s = s, .shape = *s, .bytes = sizeof(float) * (size_t)(s->n * s->c * s->oh * s->ow) };
  p.shape.h = s->oh, p.shape.w = s->ow, p.shape.sh = p.shape.sw = 1;
  return p;
}

static void pick_planes(void *context, int64_t begin, int64_t end) {
  const sparse *p = context;
  const conv_shape *s = p->s;
  for (int64_t r = begin * s->oh; r < end * s->oh; r++)
    copy_run_f32(p->from + (r / s->oh * s->h + r % s->oh * s->sh) * s->w, s->sw, s->ow, p->to + r * s->ow);
}

static void spread_planes(void *context, int64_t begin, int64_t end) {
  const sparse *p = context;
  const conv_shape *s = p->s;
  memset(p->to + begin * s->h * s->w, 0, sizeof(float) * (size_t)((end - begin) * s->h * s->w));
  for (int64_t r = begin * s->oh; r < end * s->oh; r++) {
    const float *restrict from = p->from + r * s->ow;
    float *restrict to = p->to + (r / s->oh * s->h + r % s->oh * s->sh) * s->w;
    for (int64_t j = 0; j < s->ow; j++) to[j * s->sw] = from[j];
  }
}

static void share_planes(sparse *p, ty_range_fn *fn, const float *from, float *to) {
  p->from = from, p->to = to;
  ty_parallel_for(p->s->n * p->s->c, 1 + 32768 / (p->s->h * p->s->w), fn, p);
}

/* The packed positions of x; NULL after ty_fail(). */
static float *pick(sparse *p, const float *x) {
  float *packed = ty_scratch_alloc(p->bytes);
  if (packed) share_planes(p, pick_planes, x, packed);
  return packed;
}

/* ---- residual and activation after a product ---- */

typedef struct finish {
  const conv_epilogue *e;
  float *y;
} finish;

static void finish_range(void *context, int64_t begin, int64_t end) {
  const finish *f = context;
  const float *residual = f->e->residual ? f->e->residual + begin : NULL;
  finish_run(f->y + begin, 0, residual, f->e->activation, f->y + begin, end - begin);
}

static bool plain_f32(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e, float *y) {
  if (!conv_f32(s, x, weight, e->bias, y)) return false;
  finish f = { e, y };
  if (e->residual || e->activation) ty_parallel_for(s->n * s->o * s->oh * s->ow, 16384, finish_range, &f);
  return true;
}

/* ---- every case ---- */

/* 1x1 kernels with enough positions in an image. */
static bool is_pointwise(const conv_shape *s) {
  return s->kh == 1 && s->kw == 1 && s->ph == 0 && s->pw == 0 && s->groups == 1 && s->c <= MOST_CHANNELS &&
         s->oh * s->ow >= LANES;
}

/* Groups that would leave most of a vector of channels empty, where vectors of pixels are rarely cut short. */
static bool is_groups(const conv_shape *s) {
  return s->groups > 1 && s->cg <= LANES / 2 && s->og <= LANES / 2 && s->oh * s->ow >= 4 * LANES;
}

/* 1x1 kernels on tiles, forward or for the input, where they are the faster way. Three numbers of bf16 for one of f32 are
 * six products for one: Winograd's transforms save more. */
static bool pointwise_tiles(const conv_shape *s, const conv_tiles_call *c, bool *done) {
  *done = false;
  bool fills = is_plain(s) && s->groups == 1 && s->c >= 32 && s->o >= 32 && s->oh * s->ow >= LANES;
  return !fills || TY_KERNEL(conv_tiles)(s, c, done);
}

static bool convolve_f32(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e, float *y) {
  conv_tiles_call call = { .x = x, .weight = weight, .residual = e->residual, .bias = e->bias };
  call.activation = e->activation, call.y = y;
  bool done;
  if (!pointwise_tiles(s, &call, &done) || done) return done;
  if (is_pointwise(s)) return TY_KERNEL(conv_pointwise)(s, x, weight, false, e, y);
  if (is_sparse(s)) {
    sparse p = sparse_of(s);
    float *packed = pick(&p, x);
    bool ok = packed && plain_f32(&p.shape, packed, weight, e, y);
    if (packed) ty_scratch_free(packed, p.bytes);
    return ok;
  }
  if (is_plain(s) || is_patches(s)) return plain_f32(s, x, weight, e, y);
  if (s->c <= 4 && s->groups == 1 && s->ow >= LANES) return TY_KERNEL(conv_planes)(s, x, weight, e, y);
  if (is_groups(s)) return TY_KERNEL(conv_planes)(s, x, weight, e, y);
  if (suits_winograd(s, s->c)) return TY_KERNEL(conv_winograd)(s, x, weight, e, y);
  if (suits_phases(s, s->c)) return TY_KERNEL(conv_dilated)(s, x, weight, e, y);
  return TY_KERNEL(conv_direct)(s, x, weight, e, y);
}

/* The gradient of groups for the input. */
static bool groups_input(const conv_shape *s, const conv_shape *t, const float *g, const float *weight, float *dx) {
  const conv_epilogue none = { NULL, NULL, TY_NO_ACTIVATION };
  size_t bytes = sizeof(float) * (size_t)(s->o * s->cg * s->kh * s->kw);
  float *turned = ty_scratch_alloc(bytes);
  if (!turned) return false;
  turn_weight_f32(s, weight, turned);
  bool ok = TY_KERNEL(conv_planes)(t, g, turned, &none, dx);
  ty_scratch_free(turned, bytes);
  return ok;
}

static bool pointwise_input(const conv_shape *s, const float *g, const float *weight, float *dx) {
  const conv_epilogue none = { NULL, NULL, TY_NO_ACTIVATION };
  conv_tiles_call call = { .backward = true, .x = g, .weight = weight, .y = dx };
  bool done;
  if (!pointwise_tiles(s, &call, &done) || done) return done;
  conv_shape t = *s;
  t.c = s->o, t.o = s->c;
  if (is_pointwise(&t)) return TY_KERNEL(conv_pointwise)(&t, g, weight, true, &none, dx);
  return conv_backward_input_f32(s, g, weight, dx);
}

static bool input_gradient_f32(const conv_shape *s, const float *g, const float *weight, float *dx) {
  if (is_sparse(s)) {
    sparse p = sparse_of(s);
    float *packed = ty_scratch_alloc(p.bytes);
    bool ok = packed && pointwise_input(&p.shape, g, weight, packed);
    if (ok) share_planes(&p, spread_planes, packed, dx);
    if (packed) ty_scratch_free(packed, p.bytes);
    return ok;
  }
  /* With few channels most of a vector of them would be empty: products scattered over dx waste less. */
  bool narrow = 4 * s->cg < LANES && (s->sh > 1 || s->sw > 1);
  if (is_plain(s)) return pointwise_input(s, g, weight, dx);
  if (narrow) return conv_backward_input_f32(s, g, weight, dx);
  if (suits_winograd(s, s->o)) return TY_KERNEL(conv_winograd_input)(s, g, weight, dx);
  if (suits_phases(s, s->o)) return TY_KERNEL(conv_dilated_input)(s, g, weight, dx);
  conv_shape turned;
  if (conv_turned(s, &turned) && is_groups(&turned)) return groups_input(s, &turned, g, weight, dx);
  return TY_KERNEL(conv_direct_input)(s, g, weight, dx);
}

static bool weight_gradient_f32(const conv_shape *s, const float *g, const float *x, float *dw) {
  if (is_sparse(s)) {
    sparse p = sparse_of(s);
    float *packed = pick(&p, x);
    bool ok = packed && TY_KERNEL(conv_direct_weight)(&p.shape, g, packed, dw);
    if (packed) ty_scratch_free(packed, p.bytes);
    return ok;
  }
  bool tiles = TY_KERNEL(gemm_has_tiles)() && is_plain(s) && s->og >= 32 && s->cg >= 32 && s->oh * s->ow >= 128;
  if (tiles || conv_is_depthwise(s)) return conv_backward_weight_f32(s, g, x, dw);
  if (suits_winograd(s, s->c)) return TY_KERNEL(conv_winograd_weight)(s, g, x, dw);
  /* Narrow slices of large weights would read the transforms of all phases from memory again and again. */
  bool narrow = LANES < 16 && s->c * s->o >= 160 * 160;
  if (!narrow && suits_phases(s, s->c)) return TY_KERNEL(conv_dilated_weight)(s, g, x, dw);
  if (is_groups(s)) return TY_KERNEL(conv_planes_weight)(s, g, x, dw);
  return TY_KERNEL(conv_direct_weight)(s, g, x, dw);
}

/* ---- the kernels ---- */

ty_kernel TY_KERNEL(conv2d_half);
ty_kernel TY_KERNEL(conv2d_half_input);
ty_kernel TY_KERNEL(conv2d_half_weight);

static bool report(bool ok) { return ok || ty_fail(TY_ENOMEM, "out of memory for a convolution"); }

static void clear(const ty_view *v) { memset(v->data, 0, (size_t)v->count * ty_dtype_size[v->dtype]); }

/* Whether there is nothing to multiply: an empty batch, no channels, or no taps. */
static bool is_empty(const conv_shape *s) { return s->n * s->oh * s->ow * s->cg * s->kh * s->kw * s->o == 0; }

static void finish_f64(const double *residual, ty_activation activation, double *restrict y, int64_t n) {
  for (int64_t i = 0; residual && i < n; i++) y[i] += residual[i];
  ty_activate_f64(activation, y, n);
}

bool TY_KERNEL(conv2d)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *weight = k->in[1], *bias = k->nin > 2 ? k->in[2] : NULL, *y = k->out[0];
  conv_shape s = conv_shape_of(x, weight, y, k->params);
  const ty_p_conv *p = k->params;
  const void *b = bias ? bias->data : NULL;
  s.weights = k->weights;
  if (y->count == 0) return true;
  if (ty_is_half((ty_dtype)y->dtype)) return report(TY_KERNEL(conv2d_half)(k));
  const void *residual = k->nin > 3 && k->in[3] ? k->in[3]->data : NULL;
  if (y->dtype == TY_F64) {
    bool ok = conv_f64(&s, x->data, weight->data, b, y->data);
    if (ok && (residual || p->activation)) finish_f64(residual, p->activation, y->data, y->count);
    return report(ok);
  }
  const conv_epilogue e = { b, residual, p->activation };
  if (is_empty(&s)) return report(plain_f32(&s, x->data, weight->data, &e, y->data));
  return report(convolve_f32(&s, x->data, weight->data, &e, y->data));
}

bool TY_KERNEL(conv2d_backward_input)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *weight = k->in[1], *dx = k->out[0];
  conv_shape s = conv_shape_of(dx, weight, g, k->params);
  if (dx->count == 0) return true;
  if (ty_is_half((ty_dtype)dx->dtype)) return report(TY_KERNEL(conv2d_half_input)(k));
  if (is_empty(&s)) return clear(dx), true;
  if (dx->dtype == TY_F64) return report(conv_backward_input_f64(&s, g->data, weight->data, dx->data));
  return report(input_gradient_f32(&s, g->data, weight->data, dx->data));
}

bool TY_KERNEL(conv2d_backward_weight)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *x = k->in[1], *dw = k->out[0];
  conv_shape s = conv_shape_of(x, dw, g, k->params);
  if (dw->count == 0) return true;
  if (ty_is_half((ty_dtype)dw->dtype)) return report(TY_KERNEL(conv2d_half_weight)(k));
  if (is_empty(&s)) return clear(dw), true;
  if (dw->dtype == TY_F64) return report(conv_backward_weight_f64(&s, g->data, x->data, dw->data));
  return report(weight_gradient_f32(&s, g->data, x->data, dw->data));
}
