/* Ops that move elements: concat and stack, tile, pad, flip, roll, triangles. */
#include <string.h>

#include "../../kernels/pad.h"
#include "../autograd/autograd.h"

bool fwd_concat(ty_call *c) {
  const ty_concat_args *a = TY_ARGS(concat, c);
  ty_tensors xs = a->xs.ts;
  if (xs.n == 0) return ty_op_fail(c, TY_EINVAL, "xs: expected at least one tensor, got none");
  const ty_tensor *first = xs.v[0];
  int dim, n = first->v.ndim;
  if (n == 0)
    return ty_op_fail(c, TY_EINVAL,
                      "xs: expected tensors with at least one dimension, got %s (stack joins 0-d tensors)",
                      ty_describe(first));
  if (a->dim.i < -n || a->dim.i >= n)
    return ty_op_fail(c, TY_EINVAL, "dim: expected a dimension in [%d, %d], got %lld for %s", -n, n - 1,
                      (long long)a->dim.i, ty_describe(first));
  dim = (int)(a->dim.i < 0 ? a->dim.i + n : a->dim.i);
  int64_t size[TY_MAX_DIMS];
  memcpy(size, first->v.size, sizeof size);
  size[dim] = 0;
  ty_dtype dtype = ty_dtype_of(first);
  for (int i = 0; i < xs.n; i++) {
    const ty_tensor *x = xs.v[i];
    bool fits = x->v.ndim == n;
    for (int d = 0; fits && d < n; d++) fits = d == dim || x->v.size[d] == size[d];
    if (!fits)
      return ty_op_fail(c, TY_EINVAL,
                        "xs: tensor %d is %s, expected the shape of the first, %s, except in dimension %d", i,
                        ty_describe(x), ty_describe(first), dim);
    size[dim] += x->v.size[dim];
    dtype = ty_promote(dtype, ty_dtype_of(x));
  }
  if (!ty_out(c, 0, ty_device_of(first), dtype, n, size)) return false;
  int64_t at = 0;
  for (int i = 0; i < xs.n; i++) {
    ty_tensor *part = ty_slice(c->out[0], dim, at, at + xs.v[i]->v.size[dim], 1);
    if (!part || !ty_copy_into(part, xs.v[i])) return false;
    at += xs.v[i]->v.size[dim];
  }
  return true;
}

bool vjp_concat(ty_vjp *c) {
  const ty_concat_args *a = TY_ARGS(concat, c);
  int dim = (int)(a->dim.i < 0 ? a->dim.i + c->in[0].ndim : a->dim.i);
  int64_t at = 0;
  for (int i = 0; i < c->nin; i++) {
    int64_t length = c->in[i].size[dim];
    if (c->need[i]) c->dx[i] = ty_slice(c->g[0], dim, at, at + length, 1);
    at += length;
  }
  return true;
}

bool fwd_stack(ty_call *c) {
  const ty_stack_args *a = TY_ARGS(stack, c);
  ty_tensors xs = a->xs.ts;
  if (xs.n == 0) return ty_op_fail(c, TY_EINVAL, "xs: expected at least one tensor, got none");
  int n = xs.v[0]->v.ndim + 1;
  if (a->dim.i < -n || a->dim.i >= n)
    return ty_op_fail(c, TY_EINVAL, "dim: expected a dimension in [%d, %d], got %lld for %s", -n, n - 1,
                      (long long)a->dim.i, ty_describe(xs.v[0]));
  size_t bytes = sizeof(ty_tensor *) * (size_t)xs.n;
  ty_tensor **rows = ty_scratch_alloc(bytes);
  if (!rows) return false;
  bool ok = true;
  for (int i = 0; i < xs.n && ok; i++) {
    if (!ty_same_shape(&xs.v[i]->v, &xs.v[0]->v))
      ok = ty_op_fail(c, TY_EINVAL, "xs: tensor %d is %s, expected the shape of the first, %s", i, ty_describe(xs.v[i]),
                      ty_describe(xs.v[0]));
    else ok = (rows[i] = ty_unsqueeze(xs.v[i], a->dim.i)) != NULL;
  }
  ok = ok && ty_out_set(c, 0, ty_concat((ty_tensors){ rows, xs.n }, a->dim.i));
  ty_scratch_free(rows, bytes);
  return ok;
}

/* As a view: sizes become [1, s0, 1, s1 ...], expand to [t0, s0, t1, s1 ...], merge. */
bool fwd_tile(ty_call *c) {
  const ty_tile_args *a = TY_ARGS(tile, c);
  ty_tensor *x = a->x.t;
  ty_ints times = a->times.is;
  int shift = times.n - x->v.ndim;
  if (shift < 0 || times.n > TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "times: expected at least %d counts for x %s, got %d", x->v.ndim, ty_describe(x),
                      times.n);
  for (int i = 0; i < times.n; i++)
    if (times.v[i] < 0)
      return ty_op_fail(c, TY_EINVAL, "times: expected counts of at least 0, got %s", ty_shape_text(times.n, times.v));
  ty_tensor *y = x;
  for (int d = 0; d < times.n && y; d++) { /* one dimension at a time keeps within TY_MAX_DIMS */
    int64_t one[TY_MAX_DIMS + 1], many[TY_MAX_DIMS + 1], merged[TY_MAX_DIMS];
    int n = 0;
    if (d == 0 && shift > 0) {
      int64_t lead[TY_MAX_DIMS];
      for (int i = 0; i < times.n; i++) lead[i] = i < shift ? 1 : x->v.size[i - shift];
      y = ty_reshape(y, (ty_ints){ lead, times.n });
      if (!y) break;
    }
    if (times.v[d] == 1) continue;
    if (y->v.size[d] == 1) {
      for (int i = 0; i < times.n; i++) many[i] = i == d ? times.v[d] : y->v.size[i];
      y = ty_expand(y, (ty_ints){ many, times.n });
      continue;
    }
    if (y->v.size[d] > 0 && times.v[d] > INT64_MAX / y->v.size[d])
      return ty_op_fail(c, TY_EINVAL, "times: %lld times the %lld elements of dimension %d are too many",
                        (long long)times.v[d], (long long)y->v.size[d], d);
    /* [before, 1, rest] -> [before, t, rest] -> merged */
    int64_t before = 1, rest = 1;
    for (int i = 0; i < times.n; i++) {
      if (i < d) before *= y->v.size[i];
      else rest *= y->v.size[i];
      merged[i] = i == d ? y->v.size[i] * times.v[d] : y->v.size[i];
    }
    one[n] = before, many[n++] = before;
    one[n] = 1, many[n++] = times.v[d];
    one[n] = rest, many[n++] = rest;
    y = ty_reshape(ty_expand(ty_reshape(y, (ty_ints){ one, n }), (ty_ints){ many, n }), (ty_ints){ merged, times.n });
  }
  return ty_out_set(c, 0, y == x ? ty_clone(x) : ty_contiguous(y));
}

/* ---- pad ---- */

bool fwd_pad_edges(ty_call *c) {
  const ty_pad_edges_args *a = TY_ARGS(pad_edges, c);
  ty_tensor *x = a->x.t, *value = a->value.t;
  ty_p_pad p = { .mode = (ty_padding)a->mode.i };
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  bool fits = a->pads.is.n % 2 == 0 && a->pads.is.n / 2 <= x->v.ndim && value->v.count == 1 &&
              ty_dtype_of(value) == ty_dtype_of(x) && a->mode.i >= TY_PAD_CONSTANT && a->mode.i <= TY_PAD_CIRCULAR;
  for (int i = 0; fits && i < a->pads.is.n; i += 2) {
    int d = x->v.ndim - 1 - i / 2;
    int64_t before = a->pads.is.v[i], after = a->pads.is.v[i + 1];
    int64_t most = p.mode == TY_PAD_REFLECT ? size[d] - 1 : p.mode == TY_PAD_CIRCULAR ? size[d] : INT32_MAX;
    if (p.mode == TY_PAD_REPLICATE && size[d] == 0) most = 0;
    most = most < 0 ? 0 : most;
    fits = before >= 0 && after >= 0 && before <= most && after <= most;
    p.before[d] = before;
    size[d] += before + after;
  }
  if (!fits) return ty_op_fail(c, TY_EINVAL, "pads: they do not fit x %s", ty_describe(x));
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ x, value }, 2, &p);
}

/* g [.., n, ..] among zeros: `before` and `after` of them in dimension d. */
static ty_tensor *among_zeros(ty_tensor *g, int d, int64_t before, int64_t after) {
  if (!g) return NULL;
  int64_t pads[2 * TY_MAX_DIMS] = { 0 };
  int n = 2 * (g->v.ndim - d);
  pads[n - 2] = before, pads[n - 1] = after;
  return ty_pad(g, ((ty_ints){ pads, n }), "constant", 0);
}

/* What edges of dimension d that were copied from x add to the gradient of x [.., n, ..]. */
static ty_tensor *add_edges(ty_tensor *dx, ty_tensor *g, int d, int64_t before, int64_t after, ty_padding mode) {
  int64_t n = dx->v.size[d], end = before + n + after;
  for (int side = 0; side < 2; side++) {
    int64_t width = side ? after : before;
    if (!width || !dx) continue;
    ty_tensor *edge = side ? ty_slice(g, d, before + n, end, 1) : ty_slice(g, d, 0, before, 1);
    if (!edge) return NULL;
    int64_t at; /* where in x the edge came from */
    if (mode == TY_PAD_REFLECT) {
      edge = ty_flip(edge, TY_INTS(d));
      at = side ? n - 1 - width : 1;
    } else if (mode == TY_PAD_REPLICATE) {
      edge = ty_sum(edge, TY_INTS(d), true, TY_DTYPE_DEFAULT);
      at = side ? n - 1 : 0;
      width = 1;
    } else {
      at = side ? 0 : n - width;
    }
    edge = among_zeros(edge, d, at, n - at - width);
    dx = edge ? ty_add(dx, edge) : NULL;
  }
  return dx;
}

bool vjp_pad_edges(ty_vjp *c) {
  const ty_pad_edges_args *a = TY_ARGS(pad_edges, c);
  ty_tensor *g = c->g[0];
  for (int i = 0; i < a->pads.is.n && g; i += 2) {
    int d = g->v.ndim - 1 - i / 2;
    int64_t before = a->pads.is.v[i], after = a->pads.is.v[i + 1];
    if (!before && !after) continue;
    ty_tensor *dx = ty_slice(g, d, before, g->v.size[d] - after, 1);
    g = dx && a->mode.i != TY_PAD_CONSTANT ? add_edges(dx, g, d, before, after, (ty_padding)a->mode.i) : dx;
  }
  c->dx[0] = g;
  if (c->need[1] && g) { /* of the constant */
    ty_tensor *all = ty_sum(c->g[0], (ty_ints){ 0 }, false, TY_DTYPE_DEFAULT);
    ty_tensor *own = ty_sum(g, (ty_ints){ 0 }, false, TY_DTYPE_DEFAULT);
    if (a->mode.i != TY_PAD_CONSTANT) own = all;
    c->dx[1] = all && own ? ty_sub(all, own) : NULL;
  }
  return true;
}

bool fwd_pad(ty_call *c) {
  const ty_pad_args *a = TY_ARGS(pad, c);
  ty_tensor *x = a->x.t;
  ty_ints pads = a->pads.is;
  int mode = ty_check_choice(c, 2, (const char *const[]){ "constant", "reflect", "replicate", "circular", NULL });
  if (mode < 0) return false;
  if (pads.n % 2 || pads.n / 2 > x->v.ndim)
    return ty_op_fail(c, TY_EINVAL, "pads: expected pairs for at most %d dimensions of x %s, got %d integers",
                      x->v.ndim, ty_describe(x), pads.n);
  for (int i = 0; i < pads.n; i++) {
    int64_t n = x->v.size[x->v.ndim - 1 - i / 2], most = mode == 1 ? n - 1 : n;
    bool bad = pads.v[i] < -n || pads.v[i] > INT32_MAX ||
               (mode == 2 ? pads.v[i] > 0 && n == 0 : mode != 0 && pads.v[i] > most);
    if (bad)
      return ty_op_fail(c, TY_EINVAL, "pads: %lld does not fit dimension %d of x %s in mode \"%s\"",
                        (long long)pads.v[i], x->v.ndim - 1 - i / 2, ty_describe(x), a->mode.s);
  }
  /* Edges first, from the whole of x; then negative padding cuts. */
  int64_t around[2 * TY_MAX_DIMS] = { 0 };
  bool any = false;
  for (int i = 0; i < pads.n; i++) {
    around[i] = pads.v[i] < 0 ? 0 : pads.v[i];
    any = any || around[i];
  }
  ty_tensor *y = x;
  if (any) {
    ty_value value = a->value.kind == TY_NONE ? ty_value_of_int(0) : a->value;
    ty_tensor *one = ty_full((ty_ints){ 0 }, value, ty_dtype_of(x), ty_device_of(x));
    y = one ? ty_pad_edges(x, one, (ty_ints){ around, pads.n }, mode) : NULL;
  }
  for (int i = 0; i < pads.n && y; i += 2) {
    int dim = x->v.ndim - 1 - i / 2;
    int64_t before = pads.v[i], after = pads.v[i + 1];
    if (before < 0 && after < 0 && -before - after > x->v.size[dim])
      return ty_op_fail(c, TY_EINVAL, "pads: {%lld, %lld} cut more than dimension %d of x %s", (long long)before,
                        (long long)after, dim, ty_describe(x));
    if (before < 0 || after < 0)
      y = ty_slice(y, dim, before < 0 ? -before : 0, y->v.size[dim] + (after < 0 ? after : 0), 1);
  }
  return y && ty_out_set(c, 0, y == x ? ty_clone(x) : y);
}

/* ---- order along dimensions ---- */

bool fwd_flip(ty_call *c) {
  ty_tensor *x = TY_ARGS(flip, c)->x.t;
  uint32_t mask;
  if (TY_ARGS(flip, c)->dims.is.n == 0)
    return ty_op_fail(c, TY_EINVAL, "dims: expected at least one dimension, got none");
  if (!ty_check_dims(c, 1, x->v.ndim, &mask)) return false;
  ty_p_dim p = { .k = mask };
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &p);
}

bool vjp_flip(ty_vjp *c) {
  c->dx[0] = ty_flip(c->g[0], TY_ARGS(flip, c)->dims.is);
  return true;
}

bool fwd_roll_line(ty_call *c) {
  const ty_roll_line_args *a = TY_ARGS(roll_line, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (!ty_check_dim(c, 2, x->v.ndim, &dim)) return false;
  const int64_t n = x->v.size[dim], k = n ? a->shift.i % n : 0;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim, .k = k < 0 ? k + n : k });
}

bool vjp_roll_line(ty_vjp *c) {
  const ty_roll_line_args *a = TY_ARGS(roll_line, c);
  c->dx[0] = ty_roll_line(c->g[0], -a->shift.i, a->dim.i);
  return true;
}

/* Whether the op for whole lines is the faster way: enough of them for all threads, one after the other. */
static bool suits_lines(const ty_tensor *x, int64_t dim) {
  enum { LINES = 32 };
  int64_t lines = 1;
  for (int64_t d = 0; d < dim; d++) lines *= x->v.size[d];
  return lines >= LINES && x->v.contiguous && ty_device_of(x) == TY_CPU;
}

bool fwd_roll(ty_call *c) {
  const ty_roll_args *a = TY_ARGS(roll, c);
  ty_tensor *x = a->x.t;
  ty_ints shifts = a->shifts.is, dims = a->dims.is;
  uint32_t mask;
  bool flat = dims.n == 0; /* over all elements in order */
  if (shifts.n == 0 || (flat ? shifts.n != 1 : shifts.n != dims.n))
    return ty_op_fail(c, TY_EINVAL, "shifts: expected one per dimension (%d), got %d", flat ? 1 : dims.n, shifts.n);
  if (!ty_check_dims(c, 2, x->v.ndim, &mask)) return false;
  ty_tensor *y = flat ? ty_reshape(x, TY_INTS(x->v.count)) : x;
  for (int i = 0; i < shifts.n && y && x->v.ndim; i++) {
    int64_t dim = flat ? 0 : dims.v[i] < 0 ? dims.v[i] + x->v.ndim : dims.v[i], n = y->v.size[dim];
    int64_t k = n ? shifts.v[i] % n : 0;
    if (k < 0) k += n;
    if (k && suits_lines(y, dim)) y = ty_roll_line(y, k, dim);
    else if (k) y = ty_concat(TY_LIST(ty_slice(y, dim, n - k, n, 1), ty_slice(y, dim, 0, n - k, 1)), dim);
  }
  if (flat && y) y = ty_reshape(y, (ty_ints){ x->v.size, x->v.ndim });
  return ty_out_set(c, 0, y == x ? ty_clone(x) : y);
}

static bool triangle(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[..., n, m]")) return false;
  ty_p_dim p = { .k = c->arg[1].i };
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &p);
}

bool fwd_tril(ty_call *c) { return triangle(c); }
bool fwd_triu(ty_call *c) { return triangle(c); }

bool vjp_tril(ty_vjp *c) {
  c->dx[0] = ty_tril(c->g[0], TY_ARGS(tril, c)->diagonal.i);
  return true;
}

bool vjp_triu(ty_vjp *c) {
  c->dx[0] = ty_triu(c->g[0], TY_ARGS(triu, c)->diagonal.i);
  return true;
}
