/* layer_norm, rms_norm, group_norm and batch_norm. Statistics are kept for the backward rules, in f32 for half
 * precision. */
#include <string.h>

#include "op.h"

/* What sums and statistics are kept in. */
static ty_dtype wide(ty_dtype d) { return ty_is_half(d) ? TY_F32 : d; }

/* Brings an optional tensor to `dtype`; false when that fails. */
static bool convert(ty_tensor **t, ty_dtype dtype) { return !*t || (*t = ty_to(*t, dtype)) != NULL; }

static ty_ints sizes_of(const ty_tensor *t) { return (ty_ints){ t->v.size, t->v.ndim }; }

/* `arg` (a weight or a bias of the x at position `x`), when given, has the shape `size`. */
static bool check_parameter_of(ty_call *c, int x, int arg, int ndim, const int64_t *size) {
  const ty_tensor *t = c->arg[arg].t;
  if (!t) return true;
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0)
    return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s for x %s, got %s", c->op->args[arg].name,
                    ty_shape_text(ndim, size), ty_describe(c->arg[x].t), ty_describe(t));
}

static bool check_parameter(ty_call *c, int arg, int ndim, const int64_t *size) {
  return check_parameter_of(c, 0, arg, ndim, size);
}

/* How many of the last dimensions of x are normalised: those of normalized_shape, of the weight, or one. */
static int normalized_dims(const ty_value *shape, const ty_tensor *weight) {
  return shape->is.n ? shape->is.n : weight ? weight->v.ndim : 1;
}

static bool check_normalized(ty_call *c, int *n) {
  const ty_tensor *x = c->arg[0].t;
  const ty_value *shape = &c->arg[1];
  *n = normalized_dims(shape, c->arg[2].t);
  bool inside = *n > 0 && *n <= x->v.ndim;
  const int64_t *last = x->v.size + (inside ? x->v.ndim - *n : 0);
  bool fits = inside && (!shape->is.n || memcmp(shape->is.v, last, sizeof *last * (size_t)*n) == 0);
  if (!fits && shape->is.n)
    return ty_op_fail(c, TY_EINVAL, "normalized_shape: expected the last sizes of x %s, got %s", ty_describe(x),
                      ty_shape_text(shape->is.n, shape->is.v));
  if (!fits)
    return ty_op_fail(c, TY_EINVAL, "x: expected at least %d dimensions, got %s", *n > 0 ? *n : 1, ty_describe(x));
  return check_parameter(c, 2, *n, last);
}

/* An output for one number per row: the shape of x with the normalised dimensions at 1. */
static bool out_statistic(ty_call *c, int i, const ty_tensor *x, int n) {
  int64_t size[TY_MAX_DIMS];
  for (int d = 0; d < x->v.ndim; d++) size[d] = d < x->v.ndim - n ? x->v.size[d] : 1;
  return ty_out(c, i, ty_device_of(x), wide(ty_dtype_of(x)), x->v.ndim, size);
}

bool fwd_layer_norm(ty_call *c) {
  const ty_layer_norm_args *a = TY_ARGS(layer_norm, c);
  ty_tensor *x = a->x.t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  ty_p_norm p = { .eps = a->eps.f };
  int n;
  if (!check_normalized(c, &n) || !check_parameter(c, 3, n, x->v.size + x->v.ndim - n)) return false;
  if (!ty_out_like(c, 0, x, ty_dtype_of(x)) || !out_statistic(c, 1, x, n) || !out_statistic(c, 2, x, n)) return false;
  ty_tensor *weight = a->weight.t, *bias = a->bias.t;
  if (!convert(&weight, dtype) || !convert(&bias, dtype)) return false;
  return ty_launch(c, (ty_tensor *[]){ x, weight, bias }, 3, &p);
}

bool fwd_rms_norm(ty_call *c) {
  const ty_rms_norm_args *a = TY_ARGS(rms_norm, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t;
  ty_p_norm p = { .eps = a->eps.f };
  int n;
  if (!check_normalized(c, &n) || !ty_out_like(c, 0, x, ty_dtype_of(x)) || !out_statistic(c, 1, x, n)) return false;
  return convert(&weight, wide(ty_dtype_of(x))) && ty_launch(c, (ty_tensor *[]){ x, weight }, 2, &p);
}

/* The channels of x [n, c, ...] in `groups`. */
static bool check_groups(ty_call *c, const ty_tensor *x, int64_t groups) {
  if (groups > 0 && x->v.size[1] % groups == 0) return true;
  return ty_op_fail(c, TY_EINVAL, "groups: expected a divisor of the %lld channels of x %s, got %lld",
                    (long long)x->v.size[1], ty_describe(x), (long long)groups);
}

bool fwd_group_norm(ty_call *c) {
  const ty_group_norm_args *a = TY_ARGS(group_norm, c);
  ty_tensor *x = a->x.t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[n, c, ...]") || !check_groups(c, x, a->groups.i)) return false;
  if (!check_parameter(c, 2, 1, x->v.size + 1) || !check_parameter(c, 3, 1, x->v.size + 1)) return false;
  ty_p_norm p = { .eps = a->eps.f, .groups = a->groups.i };
  if (!ty_check_activation(c, 5, &p.activation)) return false;
  int64_t size[] = { x->v.size[0], a->groups.i };
  if (!ty_out_like(c, 0, x, ty_dtype_of(x)) || !ty_out(c, 1, ty_device_of(x), dtype, 2, size) ||
      !ty_out(c, 2, ty_device_of(x), dtype, 2, size))
    return false;
  ty_tensor *weight = a->weight.t, *bias = a->bias.t;
  if (!convert(&weight, dtype) || !convert(&bias, dtype)) return false;
  return ty_launch(c, (ty_tensor *[]){ x, weight, bias }, 3, &p);
}

/* ---- gradients by the fused kernels ----
 * Parameter gradients are empty where there is no weight. */

static bool out_parameter(ty_call *c, int i, const ty_tensor *x, const ty_tensor *weight) {
  ty_dtype dtype = wide(ty_dtype_of(x));
  if (weight) return ty_out(c, i, ty_device_of(x), dtype, weight->v.ndim, weight->v.size);
  return ty_out(c, i, ty_device_of(x), dtype, 1, (int64_t[]){ 0 });
}

/* Arguments g, x, [mean,] rstd, weight of a backward op: `rows` statistics, `parameters` weights (-1: as many as a
 * row is wide). bias: where an activation follows. */
static bool backward(ty_call *c, int64_t rows, int64_t parameters, ty_tensor *bias, const ty_p_norm *p) {
  ty_tensor *x = c->arg[1].t, *in[6] = { c->arg[0].t, x };
  bool has_mean = c->op->id != TY_OP_rms_norm_backward;
  ty_dtype dtype = wide(ty_dtype_of(x));
  int n = has_mean ? 5 : 4;
  if (!ty_check_floats(c, 1)) return false;
  if (!ty_same_shape(&in[0]->v, &x->v))
    return ty_op_fail(c, TY_EINVAL, "g: expected the shape of x %s, got %s", ty_describe(x), ty_describe(in[0]));
  for (int i = 2; i < n - 1; i++) {
    in[i] = c->arg[i].t;
    if (in[i]->v.count != rows || !ty_is_float(ty_dtype_of(in[i])))
      return ty_op_fail(c, TY_EINVAL, "%s: expected %lld floats for x %s, got %s", c->op->args[i].name, (long long)rows,
                        ty_describe(x), ty_describe(in[i]));
  }
  if (parameters < 0 && rows > 0) parameters = x->v.count / rows;
  ty_tensor *weight = in[n - 1] = c->arg[n - 1].t;
  if ((rows == 0 && x->v.count) || (rows > 0 && x->v.count % rows != 0))
    return ty_op_fail(c, TY_EINVAL, "rstd: expected one for each row of x %s, got %lld", ty_describe(x),
                      (long long)rows);
  if (weight && ((parameters >= 0 && weight->v.count != parameters) || !ty_is_float(ty_dtype_of(weight))))
    return ty_op_fail(c, TY_EINVAL, "weight: expected %lld floats for x %s, got %s", (long long)parameters,
                      ty_describe(x), ty_describe(weight));
  if (!ty_out_like(c, 0, x, ty_dtype_of(x)) || !out_parameter(c, 1, x, weight)) return false;
  if (has_mean && !out_parameter(c, 2, x, weight)) return false;
  in[5] = bias;
  for (int i = 0; i < 6; i++)
    if (i != 1 && !convert(&in[i], i ? dtype : ty_dtype_of(x))) return false;
  return ty_launch(c, in, c->op->id == TY_OP_group_norm_backward ? 6 : n, p);
}

bool fwd_layer_norm_backward(ty_call *c) { return backward(c, c->arg[3].t->v.count, -1, NULL, &(ty_p_norm){ 0 }); }

bool fwd_rms_norm_backward(ty_call *c) { return backward(c, c->arg[2].t->v.count, -1, NULL, &(ty_p_norm){ 0 }); }

bool fwd_group_norm_backward(ty_call *c) {
  const ty_group_norm_backward_args *a = TY_ARGS(group_norm_backward, c);
  const ty_tensor *x = a->x.t;
  if (!ty_check_ndim(c, 1, 2, TY_MAX_DIMS, "[n, c, ...]") || !check_groups(c, x, a->groups.i)) return false;
  if (!check_parameter_of(c, 1, 6, 1, x->v.size + 1)) return false;
  ty_p_norm p = { .groups = a->groups.i };
  return ty_check_activation(c, 7, &p.activation) &&
         backward(c, x->v.size[0] * a->groups.i, x->v.size[1], a->bias.t, &p);
}

bool fwd_batch_norm_backward(ty_call *c) {
  const ty_tensor *x = c->arg[1].t;
  if (!ty_check_ndim(c, 1, 2, TY_MAX_DIMS, "[n, c, ...]")) return false;
  return backward(c, x->v.size[1], x->v.size[1], NULL, &(ty_p_norm){ 0 });
}

/* ---- gradients as compositions, which have gradients themselves ---- */

/* x over `dims`, with mean 0 (when centred) and mean square 1; *rstd: what it was multiplied by. */
ty_tensor *ty_normalized(ty_tensor *x, ty_ints dims, bool centred, double eps, ty_tensor **rstd) {
  if (centred) x = ty_sub(x, ty_mean(x, dims, true));
  *rstd = ty_rsqrt(ty_add(ty_mean(ty_square(x), dims, true), eps));
  return ty_mul(x, *rstd);
}

/* dx from h and the gradient of h: see kernels/cpu/norm/norm_real.h. */
ty_tensor *ty_normalized_gradient(ty_tensor *gh, ty_tensor *h, ty_tensor *rstd, ty_ints dims, bool centred) {
  ty_tensor *dx = ty_sub(gh, ty_mul(h, ty_mean(ty_mul(gh, h), dims, true)));
  if (centred) dx = ty_sub(dx, ty_mean(gh, dims, true));
  return ty_mul(rstd, dx);
}

/* For layer_norm and rms_norm. */
static bool rows_composed(ty_vjp *c, bool centred, double eps) {
  ty_dtype dtype = wide(ty_vjp_dtype(c, 0));
  ty_tensor *x = ty_to(c->arg[0].t, dtype), *weight = c->arg[2].t, *g = ty_to(c->g[0], dtype), *rstd;
  int n = normalized_dims(&c->arg[1], weight);
  int64_t dims[TY_MAX_DIMS];
  for (int i = 0; i < n; i++) dims[i] = i - n;
  ty_tensor *h = ty_normalized(x, (ty_ints){ dims, n }, centred, eps, &rstd);
  c->dx[0] = ty_normalized_gradient(weight ? ty_mul(g, ty_to(weight, dtype)) : g, h, rstd, (ty_ints){ dims, n },
                                    centred);
  if (c->need[1]) c->dx[1] = ty_sum_to(ty_mul(g, h), ty_vjp_size(c, 1));
  return true;
}

bool vjp_layer_norm(ty_vjp *c) {
  const ty_layer_norm_args *a = TY_ARGS(layer_norm, c);
  if (!c->g[0]) return true;
  if (!ty_vjp_plain()) {
    rows_composed(c, true, a->eps.f);
  } else {
    ty_tensor *d[3] = { NULL };
    ty_layer_norm_backward(c->g[0], a->x.t, c->out[1], c->out[2], a->weight.t, d);
    c->dx[0] = d[0], c->dx[1] = d[1];
    if (a->weight.t) c->dx[2] = d[2];
  }
  if (c->need[2] && !c->dx[2]) c->dx[2] = ty_sum_to(ty_to(c->g[0], wide(ty_vjp_dtype(c, 0))), ty_vjp_size(c, 2));
  return true;
}

bool vjp_rms_norm(ty_vjp *c) {
  const ty_rms_norm_args *a = TY_ARGS(rms_norm, c);
  if (!c->g[0]) return true;
  if (!ty_vjp_plain()) return rows_composed(c, false, a->eps.f);
  ty_tensor *d[2] = { NULL };
  ty_rms_norm_backward(c->g[0], a->x.t, c->out[1], a->weight.t, d);
  c->dx[0] = d[0], c->dx[1] = d[1];
  return true;
}

/* t [c] as [c, 1, ...], which broadcasts against [n, c, ...] of `ndim` dimensions. */
static ty_tensor *per_channel(ty_tensor *t, int ndim) {
  if (!t) return NULL;
  int64_t size[TY_MAX_DIMS] = { t->v.size[0] };
  for (int d = 1; d < ndim - 1; d++) size[d] = 1;
  return ty_reshape(t, (ty_ints){ size, ndim - 1 });
}

/* All dimensions of [n, c, ...] but the channels. */
static ty_ints not_channels(int ndim, int64_t *dims) {
  dims[0] = 0;
  for (int d = 2; d < ndim; d++) dims[d - 1] = d;
  return (ty_ints){ dims, ndim - 1 };
}

/* With weights per channel and g the gradient of the result. x as `shape` is normalised over the dimensions `over`. */
static void channels_composed(ty_vjp *c, ty_tensor *g, ty_tensor *weight, ty_ints shape, ty_ints over, double eps) {
  ty_dtype dtype = wide(ty_vjp_dtype(c, 0));
  ty_ints size = ty_vjp_size(c, 0);
  int64_t dims[TY_MAX_DIMS];
  ty_tensor *gh = g = ty_to(g, dtype), *rstd;
  ty_tensor *h = ty_normalized(ty_reshape(ty_to(c->arg[0].t, dtype), shape), over, true, eps, &rstd);
  if (weight) gh = ty_mul(g, per_channel(ty_to(weight, dtype), size.n));
  c->dx[0] = ty_reshape(ty_normalized_gradient(ty_reshape(gh, shape), h, rstd, over, true), size);
  if (c->need[1])
    c->dx[1] = ty_sum(ty_mul(g, ty_reshape(h, size)), not_channels(size.n, dims), false, TY_DTYPE_DEFAULT);
}

/* The gradient of a bias per channel from g, that of the result, where the kernel did not give it. */
static bool channel_bias(ty_vjp *c, ty_tensor *g) {
  int64_t dims[TY_MAX_DIMS];
  if (c->need[2] && !c->dx[2])
    c->dx[2] = ty_sum(ty_to(g, wide(ty_vjp_dtype(c, 0))), not_channels(ty_vjp_size(c, 0).n, dims), false,
                      TY_DTYPE_DEFAULT);
  return true;
}

bool vjp_group_norm(ty_vjp *c) {
  const ty_group_norm_args *a = TY_ARGS(group_norm, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *bias = a->bias.t, *g = c->g[0];
  ty_activation activation = ty_activation_named(a->activation.s);
  bool plain = activation == TY_NO_ACTIVATION;
  if (!g) return true;
  if (ty_vjp_plain() && (plain || weight || !bias)) {
    ty_tensor *d[3] = { NULL };
    ty_group_norm_backward(g, x, c->out[1], c->out[2], weight, a->groups.i, plain ? NULL : bias, a->activation.s, d);
    c->dx[0] = d[0], c->dx[1] = d[1];
    if (weight) c->dx[2] = d[2];
  } else {
    int64_t in_group = x->v.size[1] / a->groups.i;
    for (int d = 2; d < x->v.ndim; d++) in_group *= x->v.size[d];
    if (!plain) {
      ty_tensor *out[3] = { NULL };
      ty_group_norm(ty_to(x, wide(ty_vjp_dtype(c, 0))), a->groups.i, weight, bias, a->eps.f, "none", out);
      g = ty_mul(ty_to(g, wide(ty_vjp_dtype(c, 0))), ty_activation_slope(out[0], activation));
    }
    channels_composed(c, g, weight, TY_INTS(x->v.size[0], a->groups.i, in_group), TY_INTS(2), a->eps.f);
  }
  return channel_bias(c, g);
}

/* ---- batch_norm ---- */

bool fwd_batch_norm_fused(ty_call *c) {
  const ty_batch_norm_fused_args *a = TY_ARGS(batch_norm_fused, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *bias = a->bias.t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  ty_p_norm p = { .eps = a->eps.f };
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[n, c, ...]")) return false;
  if (!check_parameter(c, 1, 1, x->v.size + 1) || !check_parameter(c, 2, 1, x->v.size + 1)) return false;
  if (!ty_out_like(c, 0, x, ty_dtype_of(x)) || !ty_out(c, 1, ty_device_of(x), dtype, 1, x->v.size + 1) ||
      !ty_out(c, 2, ty_device_of(x), dtype, 1, x->v.size + 1))
    return false;
  return convert(&weight, dtype) && convert(&bias, dtype) && ty_launch(c, (ty_tensor *[]){ x, weight, bias }, 3, &p);
}

bool vjp_batch_norm_fused(ty_vjp *c) {
  const ty_batch_norm_fused_args *a = TY_ARGS(batch_norm_fused, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t;
  if (c->g[1] || c->g[2]) return ty_op_fail(c, TY_EUNSUPPORTED, "mean and variance have no gradient");
  if (ty_vjp_plain()) {
    ty_tensor *d[3] = { NULL };
    ty_batch_norm_backward(c->g[0], x, c->out[1], ty_rsqrt(ty_add(c->out[2], a->eps.f)), weight, d);
    c->dx[0] = d[0], c->dx[1] = d[1];
    if (weight) c->dx[2] = d[2];
  } else {
    int64_t dims[TY_MAX_DIMS];
    channels_composed(c, c->g[0], weight, sizes_of(x), not_channels(x->v.ndim, dims), a->eps.f);
  }
  return channel_bias(c, c->g[0]);
}

/* ---- by given statistics ---- */

/* scale and shift at positions `from` up to `to` have one number for each channel of x. */
static bool check_channels(ty_call *c, const ty_tensor *x, int from, int to) {
  for (int i = from; i < to; i++) {
    const ty_tensor *t = c->arg[i].t;
    if (t->v.ndim != 1 || t->v.size[0] != x->v.size[1] || !ty_is_float(ty_dtype_of(t)))
      return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor [%lld], one for each channel of x %s, got %s",
                        c->op->args[i].name, (long long)x->v.size[1], ty_describe(x), ty_describe(t));
  }
  return true;
}

bool fwd_channel_affine(ty_call *c) {
  const ty_channel_affine_args *a = TY_ARGS(channel_affine, c);
  ty_tensor *x = a->x.t, *scale = a->scale.t, *shift = a->shift.t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[n, c, ...]") || !check_channels(c, x, 1, 3)) return false;
  if (!ty_out_like(c, 0, x, ty_dtype_of(x)) || !convert(&scale, dtype) || !convert(&shift, dtype)) return false;
  return ty_launch(c, (ty_tensor *[]){ x, scale, shift }, 3, NULL);
}

bool fwd_channel_affine_backward(ty_call *c) {
  ty_tensor *g = c->arg[0].t, *x = c->arg[1].t, *scale = c->arg[2].t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  if (!ty_check_floats(c, 1) || !ty_check_ndim(c, 1, 2, TY_MAX_DIMS, "[n, c, ...]")) return false;
  if (!check_channels(c, x, 2, 3)) return false;
  if (!ty_same_shape(&g->v, &x->v))
    return ty_op_fail(c, TY_EINVAL, "g: expected the shape of x %s, got %s", ty_describe(x), ty_describe(g));
  if (!ty_out_like(c, 0, x, ty_dtype_of(x))) return false;
  for (int i = 1; i < 3; i++)
    if (!ty_out(c, i, ty_device_of(x), dtype, 1, scale->v.size)) return false;
  g = ty_to(g, ty_dtype_of(x));
  return g && convert(&scale, dtype) && ty_launch(c, (ty_tensor *[]){ g, x, scale }, 3, NULL);
}

bool vjp_channel_affine(ty_vjp *c) {
  const ty_channel_affine_args *a = TY_ARGS(channel_affine, c);
  ty_tensor *g = c->g[0], *d[3] = { NULL };
  int64_t dims[TY_MAX_DIMS];
  int ndim = g->v.ndim;
  if (ty_vjp_plain() && c->need[1]) {
    ty_channel_affine_backward(g, a->x.t, a->scale.t, d);
    for (int i = 0; i < 3; i++) c->dx[i] = d[i];
    return true;
  }
  ty_dtype dtype = wide(ty_vjp_dtype(c, 0));
  g = ty_to(g, dtype);
  if (c->need[0]) c->dx[0] = ty_mul(g, per_channel(ty_to(a->scale.t, dtype), ndim));
  if (c->need[1]) c->dx[1] = ty_sum(ty_mul(g, ty_to(a->x.t, dtype)), not_channels(ndim, dims), false, TY_DTYPE_DEFAULT);
  if (c->need[2]) c->dx[2] = ty_sum(g, not_channels(ndim, dims), false, TY_DTYPE_DEFAULT);
  return true;
}

/* ---- batch_norm itself ---- */

/* running = running + momentum * (now - running), not recorded. */
static bool update_running(ty_tensor *running, ty_tensor *now, double momentum) {
  if (!running) return true;
  if (!now || !(now = ty_to(now, ty_dtype_of(running)))) return false;
  ty_value arg[] = { ty_value_of_tensor(running), ty_value_of_tensor(now), ty_value_of_float(momentum) };
  return ty_call_inplace(TY_OP_lerp, arg);
}

bool fwd_batch_norm(ty_call *c) {
  const ty_batch_norm_args *a = TY_ARGS(batch_norm, c);
  ty_tensor *x = a->x.t, *mean = a->running_mean.t, *var = a->running_var.t;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[n, c, ...]")) return false;
  for (int i = 1; i <= 4; i++)
    if (!check_parameter(c, i, 1, x->v.size + 1)) return false;
  if (!mean != !var) return ty_op_fail(c, TY_EINVAL, "running_mean and running_var: expected both or neither");

  if (a->training.i || !mean) {
    int64_t count = x->v.size[0];
    for (int d = 2; d < x->v.ndim; d++) count *= x->v.size[d];
    if (count < 2 && x->v.size[1])
      return ty_op_fail(c, TY_EINVAL, "x: expected more than one value per channel to take statistics of, got %s",
                        ty_describe(x));
    ty_tensor *out[3] = { NULL };
    if (!ty_batch_norm_fused(x, a->weight.t, a->bias.t, a->eps.f, out)) return false;
    if (a->training.i && mean) {
      bool was = ty_set_grad_enabled(false);
      bool ok = update_running(mean, out[1], a->momentum.f) &&
                update_running(var, ty_mul(out[2], (double)count / (double)(count - 1)), a->momentum.f);
      ty_set_grad_enabled(was);
      if (!ok) return false;
    }
    return ty_out_set(c, 0, out[0]);
  }

  ty_dtype dtype = wide(ty_dtype_of(x));
  ty_tensor *scale = ty_rsqrt(ty_add(ty_to(var, dtype), a->eps.f));
  if (a->weight.t) scale = ty_mul(scale, ty_to(a->weight.t, dtype));
  ty_tensor *shift = ty_neg(ty_mul(ty_to(mean, dtype), scale));
  if (a->bias.t) shift = ty_add(shift, ty_to(a->bias.t, dtype));
  return ty_out_set(c, 0, ty_channel_affine(x, scale, shift));
}
