/* Matrix products and linear layers: shape rules by torch.matmul's conventions, and their gradients. */
#include <string.h>

#include "op.h"

/* One launch: a [batch..., m, k] and b [batch..., k, n] with equal ndim, sizes of a's and b's batch possibly 1. */
typedef struct product {
  ty_view a, b;
  int ndim;
  int64_t size[TY_MAX_DIMS]; /* of the result */
} product;

static void push_dim(ty_view *v, bool front, int64_t size, int64_t stride) {
  int at = front ? 0 : v->ndim;
  for (int d = v->ndim; d > at; d--) {
    v->size[d] = v->size[d - 1];
    v->stride[d] = v->stride[d - 1];
  }
  v->size[at] = size;
  v->stride[at] = stride;
  v->ndim++;
}

/* Whether the dimensions 0 .. ndim-2 of v are one dimension in memory, and its stride. */
static bool rows_merge(const ty_view *v, int64_t *stride) {
  int64_t next = 0, step = 0;
  bool any = false;
  for (int d = v->ndim - 2; d >= 0; d--) {
    if (v->size[d] == 1) continue;
    if (any && v->stride[d] != next) return false;
    if (!any) step = v->stride[d];
    next = v->stride[d] * v->size[d];
    any = true;
  }
  *stride = any ? step : v->size[v->ndim - 1];
  return true;
}

/* Runs the kernel on p, whose result fills `out` (of any shape with as many elements, like residual). */
static bool launch(const ty_op *op, product *p, const ty_view *bias, const ty_view *residual, ty_activation activation,
                   ty_tensor *out, ty_storage *weights) {
  ty_view y = out->v;
  const ty_p_activation params = { activation };
  bool shared = true; /* is there one b for all of the batch? */
  for (int d = 0; d < p->ndim - 2; d++) shared = shared && p->b.size[d] == 1;
  int64_t stride;
  if (p->ndim > 2 && shared && rows_merge(&p->a, &stride)) { /* one tall product */
    int n = p->ndim;
    int64_t k = p->a.size[n - 1], rows = 1;
    for (int d = 0; d < n - 1; d++) rows *= p->size[d];
    ty_view a = {
      .data = p->a.data, .dtype = p->a.dtype, .ndim = 2, .size = { rows, k }, .stride = { stride, p->a.stride[n - 1] }
    };
    ty_view b = { .data = p->b.data,
                  .dtype = p->b.dtype,
                  .ndim = 2,
                  .size = { k, p->size[n - 1] },
                  .stride = { p->b.stride[n - 2], p->b.stride[n - 1] } };
    ty_view_set_contiguous(&y, 2, (int64_t[]){ rows, p->size[n - 1] });
    ty_view_update(&a);
    ty_view_update(&b);
    const ty_view *outs[] = { &y }, *ins[] = { &a, &b, bias, residual };
    return ty_run_kernel_on(TY_OP_matmul, ty_device_of(out), outs, 1, ins, 4, &params, weights) ||
           ty_op_fail_(op, ty_error_code(), "%s", ty_error());
  }
  ty_view a, b;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, p->size, sizeof size);
  size[p->ndim - 1] = p->a.size[p->ndim - 1];
  ty_view_expand(&a, &p->a, p->ndim, size);
  size[p->ndim - 2] = p->b.size[p->ndim - 2];
  size[p->ndim - 1] = p->size[p->ndim - 1];
  ty_view_expand(&b, &p->b, p->ndim, size);
  ty_view_set_contiguous(&y, p->ndim, p->size);
  const ty_view *outs[] = { &y }, *ins[] = { &a, &b, bias, residual };
  return ty_run_kernel_on(TY_OP_matmul, ty_device_of(out), outs, 1, ins, 4, &params, weights) ||
         ty_op_fail_(op, ty_error_code(), "%s", ty_error());
}

/* A batch of matrices that does not merge into one, against a single b, is copied: one large product beats many. */
static ty_tensor *merged(ty_tensor *x, const ty_tensor *b) {
  int64_t stride;
  if (!x || x->v.ndim <= 2 || b->v.ndim > 2 || rows_merge(&x->v, &stride)) return x;
  return ty_contiguous(x);
}

bool fwd_matmul(ty_call *c) {
  const ty_matmul_args *arg = TY_ARGS(matmul, c);
  ty_tensor *x = arg->x.t, *y = arg->y.t;
  ty_dtype dtype = ty_promote(ty_dtype_of(x), ty_dtype_of(y));
  if (x->v.ndim == 0 || y->v.ndim == 0)
    return ty_op_fail(c, TY_EINVAL, "%s: expected at least one dimension, got %s", x->v.ndim ? "y" : "x",
                      ty_describe(x->v.ndim ? y : x));
  int64_t inner = x->v.size[x->v.ndim - 1], other = y->v.size[y->v.ndim > 1 ? y->v.ndim - 2 : 0];
  if (inner != other)
    return ty_op_fail(c, TY_EINVAL, "x %s and y %s: expected the last size of x, %lld, to equal %s of y, %lld",
                      ty_describe(x), ty_describe(y), (long long)inner, y->v.ndim > 1 ? "the last but one" : "the size",
                      (long long)other);
  x = merged(ty_to(x, dtype), y);
  y = ty_to(y, dtype);
  if (!x || !y) return false;
  product p = { .a = x->v, .b = y->v };
  if (x->v.ndim == 1) push_dim(&p.a, true, 1, inner);
  if (y->v.ndim == 1) push_dim(&p.b, false, 1, 1);
  int64_t m = p.a.size[p.a.ndim - 2], n = p.b.size[p.b.ndim - 1];
  /* Batch dimensions broadcast; the last two do not. */
  ty_view batch_a = p.a, batch_b = p.b;
  batch_a.ndim -= 2;
  batch_b.ndim -= 2;
  if (!ty_broadcast(c->op, &batch_a, &batch_b, &p.ndim, p.size)) return false;
  while (p.a.ndim < p.ndim + 2) push_dim(&p.a, true, 1, 0);
  while (p.b.ndim < p.ndim + 2) push_dim(&p.b, true, 1, 0);
  p.size[p.ndim++] = m;
  p.size[p.ndim++] = n;
  int64_t size[TY_MAX_DIMS];
  int ndim = p.ndim - 2;
  memcpy(size, p.size, sizeof size);
  if (x->v.ndim > 1) size[ndim++] = m;
  if (y->v.ndim > 1) size[ndim++] = n;
  return ty_out(c, 0, ty_device_of(x), dtype, ndim, size) &&
         launch(c->op, &p, NULL, NULL, TY_NO_ACTIVATION, c->out[0], y->v.ndim == 2 ? ty_weights_at_rest(y) : NULL);
}

/* Everything before the last dimension as one. */
static ty_tensor *as_rows(ty_tensor *x) {
  if (x->v.ndim == 2) return x;
  int64_t rows = 1;
  for (int d = 0; d < x->v.ndim - 1; d++) rows *= x->v.size[d];
  return ty_reshape(x, TY_INTS(rows, x->v.size[x->v.ndim - 1]));
}

/* a times b, laid out like a matrix of that shape, which may be a transposed view: what a gradient becomes on its way
 * back through the view is then in order, and nothing copies it. */
static ty_tensor *product_like(const ty_view *like, ty_tensor *a, ty_tensor *b) {
  if (like->stride[0] != 1 || like->stride[1] == 1) return ty_matmul(a, b);
  return ty_transpose(ty_matmul(ty_transpose(b, 0, 1), ty_transpose(a, 0, 1)), 0, 1);
}

bool vjp_matmul(ty_vjp *c) {
  const ty_matmul_args *arg = TY_ARGS(matmul, c);
  ty_tensor *x = arg->x.t, *y = arg->y.t, *g = c->g[0];
  bool row = x->v.ndim == 1, column = y->v.ndim == 1;
  if (row) x = ty_unsqueeze(x, 0);
  if (column) {
    y = ty_unsqueeze(y, 1);
    g = ty_unsqueeze(g, -1);
  }
  if (row) g = ty_unsqueeze(g, -2);
  if (!x || !y || !g) return false;
  if (c->need[0]) {
    c->dx[0] = ty_matmul(g, ty_transpose(y, -2, -1));
    if (row) c->dx[0] = ty_squeeze(c->dx[0], TY_INTS(-2));
  }
  if (c->need[1]) {
    bool shared = y->v.ndim == 2; /* one y for the whole batch: a single product sums over it */
    if (shared) c->dx[1] = product_like(&y->v, ty_transpose(as_rows(x), 0, 1), as_rows(g));
    else c->dx[1] = ty_matmul(ty_transpose(x, -2, -1), g);
    if (column) c->dx[1] = ty_squeeze(c->dx[1], TY_INTS(-1));
  }
  return true;
}

/* ---- linear ---- */

static bool check_linear(ty_call *c) {
  const ty_linear_args *arg = TY_ARGS(linear, c);
  const ty_tensor *x = arg->x.t, *weight = arg->weight.t, *bias = arg->bias.t, *residual = arg->residual.t;
  bool codes = ty_is_quantized(ty_dtype_of(weight));
  if (!ty_check_floats(c, 0) || (!codes && !ty_check_floats(c, 1)) || !ty_check_ndim(c, 1, 2, 2, "[out, in]"))
    return false;
  if (x->v.ndim == 0 || x->v.size[x->v.ndim - 1] != weight->v.size[1])
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., %lld] for weight %s, got %s", (long long)weight->v.size[1],
                      ty_describe(weight), ty_describe(x));
  if (bias && !ty_check_floats(c, 2)) return false;
  if (bias && (bias->v.ndim != 1 || bias->v.size[0] != weight->v.size[0]))
    return ty_op_fail(c, TY_EINVAL, "bias: expected [%lld] for weight %s, got %s", (long long)weight->v.size[0],
                      ty_describe(weight), ty_describe(bias));
  if (!residual) return true;
  int n = x->v.ndim;
  bool fits = residual->v.ndim == n && residual->v.size[n - 1] == weight->v.size[0] &&
              memcmp(residual->v.size, x->v.size, sizeof *x->v.size * (size_t)(n - 1)) == 0;
  return (ty_check_floats(c, 3) && fits) ||
         ty_op_fail(c, TY_EINVAL, "residual: expected floats of the result's shape [..., %lld], got %s",
                    (long long)weight->v.size[0], ty_describe(residual));
}

/* The backward rule needs what the activation is applied to: while gradients are recorded, separate ops keep it. */
static bool linear_apart(ty_call *c, ty_activation activation) {
  const ty_linear_args *arg = TY_ARGS(linear, c);
  c->record = false;
  bool was = ty_set_grad_enabled(true);
  ty_tensor *y = ty_activate(ty_linear(arg->x.t, arg->weight.t, arg->bias.t, arg->residual.t, "none"), activation);
  ty_set_grad_enabled(was);
  return ty_out_set(c, 0, y);
}

/* A block-quantized weight: an op of its own, and what follows it as separate ones. */
static bool linear_of_codes(ty_call *c, ty_activation activation) {
  const ty_linear_args *arg = TY_ARGS(linear, c);
  bool was = ty_set_grad_enabled(c->record);
  c->record = false;
  ty_tensor *y = ty_linear_quantized(arg->x.t, arg->weight.t, arg->bias.t);
  if (arg->residual.t) y = ty_add(y, ty_to(arg->residual.t, ty_dtype_of(arg->x.t)));
  if (activation) y = ty_activate(y, activation);
  ty_set_grad_enabled(was);
  return ty_out_set(c, 0, y);
}

bool fwd_linear(ty_call *c) {
  const ty_linear_args *arg = TY_ARGS(linear, c);
  ty_tensor *x = arg->x.t, *weight = arg->weight.t, *bias = arg->bias.t, *residual = arg->residual.t;
  ty_activation activation;
  if (!ty_check_activation(c, 4, &activation) || !check_linear(c)) return false;
  if (ty_is_quantized(ty_dtype_of(weight))) return linear_of_codes(c, activation);
  if (activation && c->record) return linear_apart(c, activation);
  ty_dtype dtype = ty_promote(ty_dtype_of(x), ty_dtype_of(weight)), wide = ty_is_half(dtype) ? TY_F32 : dtype;
  product p = { .ndim = x->v.ndim };
  memcpy(p.size, x->v.size, sizeof p.size);
  p.size[p.ndim - 1] = weight->v.size[0];
  if (!ty_out(c, 0, ty_device_of(x), dtype, p.ndim, p.size)) return false;
  x = merged(ty_to(x, dtype), weight);
  weight = ty_to(weight, dtype);
  if (bias && !(bias = ty_to(bias, wide))) return false;
  if (bias && !bias->v.contiguous && !(bias = ty_contiguous(bias))) return false;
  if (residual && (!(residual = ty_to(residual, dtype)) || !(residual = ty_contiguous(residual)))) return false;
  if (!x || !weight) return false;
  p.a = x->v;
  p.b = weight->v;
  p.b.size[0] = weight->v.size[1];
  p.b.size[1] = weight->v.size[0];
  p.b.stride[0] = weight->v.stride[1];
  p.b.stride[1] = weight->v.stride[0];
  if (p.ndim == 1) {
    push_dim(&p.a, true, 1, p.a.size[0]);
    p.size[1] = p.size[0];
    p.size[0] = 1;
    p.ndim = 2;
  }
  while (p.b.ndim < p.ndim) push_dim(&p.b, true, 1, 0);
  ty_view_update(&p.b);
  return launch(c->op, &p, bias ? &bias->v : NULL, residual ? &residual->v : NULL, activation, c->out[0],
                ty_weights_at_rest(weight));
}

bool vjp_linear(ty_vjp *c) {
  const ty_linear_args *arg = TY_ARGS(linear, c);
  ty_tensor *g = c->g[0];
  if (c->need[0]) c->dx[0] = ty_matmul(g, arg->weight.t);
  if (c->need[1]) c->dx[1] = product_like(&arg->weight.t->v, ty_transpose(as_rows(g), 0, 1), as_rows(arg->x.t));
  if (c->need[2]) c->dx[2] = ty_sum(as_rows(g), TY_INTS(0), false, TY_DTYPE_DEFAULT);
  if (c->need[3]) c->dx[3] = g;
  return true;
}

/* ---- bytes ---- */

bool fwd_matmul_int8(ty_call *c) {
  const ty_matmul_int8_args *arg = TY_ARGS(matmul_int8, c);
  ty_tensor *x = arg->x.t, *y = arg->y.t;
  if (ty_dtype_of(x) != TY_I8 && ty_dtype_of(x) != TY_U8)
    return ty_op_fail(c, TY_EINVAL, "x: expected u8 or i8, got %s", ty_describe(x));
  if (ty_dtype_of(y) != TY_I8 || y->v.ndim != 2)
    return ty_op_fail(c, TY_EINVAL, "y: expected i8 [k, n], got %s", ty_describe(y));
  if (x->v.ndim < 2 || x->v.size[x->v.ndim - 1] != y->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., m, %lld] for y %s, got %s", (long long)y->v.size[0],
                      ty_describe(y), ty_describe(x));
  int64_t size[TY_MAX_DIMS];
  int n = x->v.ndim;
  memcpy(size, x->v.size, sizeof size);
  size[n - 1] = y->v.size[1];
  if (!ty_out(c, 0, ty_device_of(x), TY_I32, n, size)) return false;
  ty_view out = c->out[0]->v, in = x->v;
  int64_t stride;
  if (n > 2 && rows_merge(&x->v, &stride)) { /* one tall product */
    int64_t k = in.size[n - 1], step = in.stride[n - 1], rows = 1;
    for (int d = 0; d < n - 1; d++) rows *= in.size[d];
    in.ndim = 2;
    in.size[0] = rows, in.size[1] = k, in.stride[0] = stride, in.stride[1] = step;
    ty_view_update(&in);
    ty_view_set_contiguous(&out, 2, (int64_t[]){ rows, y->v.size[1] });
  }
  const ty_view *outs[] = { &out }, *ins[] = { &in, &y->v };
  return ty_run_kernel_on(TY_OP_matmul_int8, ty_device_of(x), outs, 1, ins, 2, NULL, ty_weights_at_rest(y));
}
