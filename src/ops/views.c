/* Views: the same memory in another shape. Nothing is copied, except by reshape where strides leave no other way. */
#include <string.h>

#include "../autograd/autograd.h"

/* ---- reshape ---- */

/* Strides of `size` on v's memory, if there are any: splits and merges v's contiguous runs. */
static bool reshaped_strides(const ty_view *v, int ndim, const int64_t *size, int64_t *stride) {
  if (v->contiguous) {
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
      stride[d] = step;
      step = (int64_t)((uint64_t)step * (uint64_t)(size[d] ? size[d] : 1)); /* may wrap where there is no element */
    }
    return true;
  }
  /* v without its sizes of 1, which have no say */
  int64_t old_size[TY_MAX_DIMS], old_stride[TY_MAX_DIMS];
  int olds = 0;
  for (int d = 0; d < v->ndim; d++) {
    if (v->size[d] == 1) continue;
    old_size[olds] = v->size[d];
    old_stride[olds++] = v->stride[d];
  }
  int old = olds - 1, new = ndim - 1;
  while (new >= 0) {
    if (size[new] == 1) {
      stride[new --] = 1;
      continue;
    }
    if (old < 0) return false;
    int64_t have = old_size[old], want = size[new], step = old_stride[old];
    int first = new;
    while (have != want) { /* grow both runs until they cover the same elements */
      if (have < want) {
        if (--old < 0 || old_stride[old] != old_stride[old + 1] * old_size[old + 1]) return false;
        have *= old_size[old];
      } else {
        if (--new < 0) return false;
        want *= size[new];
      }
    }
    for (int d = first; d >= new; d--) {
      stride[d] = step;
      step *= size[d];
    }
    old--;
    new --;
  }
  return old < 0;
}

/* Fills in a -1 and checks the count. */
static bool resolve_size(ty_call *c, const ty_tensor *x, ty_ints want, int64_t *size) {
  int unknown = -1;
  int64_t known = 1;
  if (want.n > TY_MAX_DIMS) return ty_op_fail(c, TY_EINVAL, "size: at most %d dimensions, got %d", TY_MAX_DIMS, want.n);
  for (int i = 0; i < want.n; i++) {
    size[i] = want.v[i];
    if (size[i] == -1 && unknown < 0) {
      unknown = i;
    } else if (size[i] < 0 || __builtin_mul_overflow(known, size[i], &known)) {
      return ty_op_fail(c, TY_EINVAL, "size: %s is not a possible shape for x %s", ty_shape_text(want.n, want.v),
                        ty_describe(x));
    }
  }
  if (unknown >= 0) {
    if (known == 0 || x->v.count % known != 0)
      return ty_op_fail(c, TY_EINVAL, "size: %s does not divide the %lld elements of x %s",
                        ty_shape_text(want.n, want.v), (long long)x->v.count, ty_describe(x));
    size[unknown] = x->v.count / known;
  } else if (known != x->v.count) {
    return ty_op_fail(c, TY_EINVAL, "size: %s has %lld elements, x %s has %lld", ty_shape_text(want.n, want.v),
                      (long long)known, ty_describe(x), (long long)x->v.count);
  }
  return true;
}

bool fwd_reshape(ty_call *c) {
  const ty_reshape_args *a = TY_ARGS(reshape, c);
  ty_tensor *x = a->x.t;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  if (!resolve_size(c, x, a->size.is, size)) return false;
  int n = a->size.is.n;
  if (reshaped_strides(&x->v, n, size, stride)) return ty_out_view(c, 0, x, n, size, stride, 0);
  ty_tensor *copy = ty_clone(x);
  return copy && reshaped_strides(&copy->v, n, size, stride) && ty_out_view(c, 0, copy, n, size, stride, 0);
}

bool vjp_reshape(ty_vjp *c) {
  c->dx[0] = ty_reshape(c->g[0], ty_vjp_size(c, 0));
  return true;
}

bool fwd_flatten(ty_call *c) {
  const ty_flatten_args *a = TY_ARGS(flatten, c);
  ty_tensor *x = a->x.t;
  int start, stop;
  if (!ty_check_dim(c, 1, x->v.ndim, &start) || !ty_check_dim(c, 2, x->v.ndim, &stop)) return false;
  if (start > stop)
    return ty_op_fail(c, TY_EINVAL, "stop: expected at least start %d, got %d for x %s", start, stop, ty_describe(x));
  if (x->v.ndim == 0) return ty_out_set(c, 0, ty_reshape(x, TY_INTS(1)));
  int64_t size[TY_MAX_DIMS], merged = 1;
  int n = 0;
  for (int d = 0; d < start; d++) size[n++] = x->v.size[d];
  for (int d = start; d <= stop; d++) merged *= x->v.size[d];
  size[n++] = merged;
  for (int d = stop + 1; d < x->v.ndim; d++) size[n++] = x->v.size[d];
  return ty_out_set(c, 0, ty_reshape(x, (ty_ints){ size, n }));
}

/* ---- dimensions in another order ---- */

bool fwd_transpose(ty_call *c) {
  ty_tensor *x = TY_ARGS(transpose, c)->x.t;
  int a, b;
  if (!ty_check_dim(c, 1, x->v.ndim, &a) || !ty_check_dim(c, 2, x->v.ndim, &b)) return false;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  memcpy(stride, x->v.stride, sizeof stride);
  if (x->v.ndim) {
    size[a] = x->v.size[b], size[b] = x->v.size[a];
    stride[a] = x->v.stride[b], stride[b] = x->v.stride[a];
  }
  return ty_out_view(c, 0, x, x->v.ndim, size, stride, 0);
}

bool vjp_transpose(ty_vjp *c) {
  const ty_transpose_args *a = TY_ARGS(transpose, c);
  c->dx[0] = ty_transpose(c->g[0], a->dim0.i, a->dim1.i);
  return true;
}

bool fwd_permute(ty_call *c) {
  const ty_permute_args *a = TY_ARGS(permute, c);
  ty_tensor *x = a->x.t;
  uint32_t mask;
  int n = x->v.ndim;
  if (a->dims.is.n != n)
    return ty_op_fail(c, TY_EINVAL, "dims: expected all %d dimensions of x %s, got %d", n, ty_describe(x),
                      a->dims.is.n);
  if (!ty_check_dims(c, 1, n, &mask)) return false;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  for (int i = 0; i < n; i++) {
    int64_t d = a->dims.is.v[i] < 0 ? a->dims.is.v[i] + n : a->dims.is.v[i];
    size[i] = x->v.size[d];
    stride[i] = x->v.stride[d];
  }
  return ty_out_view(c, 0, x, n, size, stride, 0);
}

bool vjp_permute(ty_vjp *c) {
  ty_ints dims = TY_ARGS(permute, c)->dims.is;
  int64_t inverse[TY_MAX_DIMS];
  for (int i = 0; i < dims.n; i++) inverse[dims.v[i] < 0 ? dims.v[i] + dims.n : dims.v[i]] = i;
  c->dx[0] = ty_permute(c->g[0], (ty_ints){ inverse, dims.n });
  return true;
}

/* ---- sizes of 1 ---- */

bool fwd_expand(ty_call *c) {
  const ty_expand_args *a = TY_ARGS(expand, c);
  ty_tensor *x = a->x.t;
  int n = a->size.is.n, shift = n - x->v.ndim;
  if (shift < 0 || n > TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "size: expected %d to %d sizes for x %s, got %d", x->v.ndim, TY_MAX_DIMS,
                      ty_describe(x), n);
  int64_t size[TY_MAX_DIMS], count = 1;
  for (int i = 0; i < n; i++) {
    int64_t have = i < shift ? 1 : x->v.size[i - shift], want = a->size.is.v[i];
    if (want == -1 && i >= shift) want = have;
    if (want < 0 || (have != 1 && want != have))
      return ty_op_fail(c, TY_EINVAL, "size: x %s does not expand to %s", ty_describe(x),
                        ty_shape_text(n, a->size.is.v));
    size[i] = want;
    if (want && (count > INT64_MAX / 16 / want))
      return ty_op_fail(c, TY_EINVAL, "size: %s is not a possible shape", ty_shape_text(n, a->size.is.v));
    count *= want ? want : 1;
  }
  ty_view v;
  ty_view_expand(&v, &x->v, n, size);
  return ty_out_view(c, 0, x, n, size, v.stride, 0);
}

bool vjp_expand(ty_vjp *c) {
  c->dx[0] = c->g[0]; /* the engine sums over what was repeated */
  return true;
}

bool fwd_squeeze(ty_call *c) {
  const ty_squeeze_args *a = TY_ARGS(squeeze, c);
  ty_tensor *x = a->x.t;
  uint32_t mask;
  if (!ty_check_dims(c, 1, x->v.ndim, &mask)) return false;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  int n = 0;
  for (int d = 0; d < x->v.ndim; d++) {
    if ((mask >> d & 1) && x->v.size[d] == 1) continue;
    size[n] = x->v.size[d];
    stride[n++] = x->v.stride[d];
  }
  return ty_out_view(c, 0, x, n, size, stride, 0);
}

bool vjp_squeeze(ty_vjp *c) { return vjp_reshape(c); }

bool fwd_unsqueeze(ty_call *c) {
  ty_tensor *x = TY_ARGS(unsqueeze, c)->x.t;
  int dim, n = x->v.ndim;
  if (n == TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "x: %s has as many dimensions as a tensor can have", ty_describe(x));
  if (!ty_check_dim(c, 1, n + 1, &dim)) return false;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  for (int d = 0; d <= n; d++) {
    size[d] = d == dim ? 1 : x->v.size[d - (d > dim)];
    stride[d] = d == dim ? 1 : x->v.stride[d - (d > dim)];
  }
  return ty_out_view(c, 0, x, n + 1, size, stride, 0);
}

bool vjp_unsqueeze(ty_vjp *c) { return vjp_reshape(c); }

/* ---- parts ---- */

bool fwd_slice(ty_call *c) {
  const ty_slice_args *a = TY_ARGS(slice, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (x->v.ndim == 0) return ty_op_fail(c, TY_EINVAL, "x: expected at least one dimension, got %s", ty_describe(x));
  if (!ty_check_dim(c, 1, x->v.ndim, &dim)) return false;
  if (a->step.i < 1)
    return ty_op_fail(c, TY_EINVAL, "step: expected at least 1, got %lld (flip reverses)", (long long)a->step.i);
  int64_t n = x->v.size[dim], start = a->start.i, stop = a->stop.i, step = a->step.i;
  start = start < 0   ? (start + n < 0 ? 0 : start + n)
          : start > n ? n
                      : start; /* bounds beyond the ends are cut, as in Python */
  stop = stop < 0 ? stop + n : stop > n ? n : stop;
  int64_t length = stop > start ? (stop - start - 1) / step + 1 : 0;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  memcpy(stride, x->v.stride, sizeof stride);
  size[dim] = length;
  if (length > 1) stride[dim] *= step;
  return ty_out_view(c, 0, x, x->v.ndim, size, stride, length ? start * x->v.stride[dim] : 0);
}

bool vjp_slice(ty_vjp *c) {
  const ty_slice_args *a = TY_ARGS(slice, c);
  int64_t dim = a->dim.i < 0 ? a->dim.i + c->in[0].ndim : a->dim.i;
  c->dx[0] = ty_slice_backward(c->g[0], c->in[0].size[dim], dim, a->start.i, a->stop.i, a->step.i);
  return true;
}

bool fwd_slice_backward(ty_call *c) {
  const ty_slice_backward_args *a = TY_ARGS(slice_backward, c);
  ty_tensor *g = a->g.t;
  int64_t size[TY_MAX_DIMS];
  int dim;
  if (!ty_check_dim(c, 2, g->v.ndim, &dim)) return false;
  memcpy(size, g->v.size, sizeof size);
  size[dim] = a->size.i;
  ty_tensor *zeros = ty_zeros((ty_ints){ size, g->v.ndim }, ty_dtype_of(g), ty_device_of(g));
  ty_tensor *part = ty_slice(zeros, dim, a->start.i, a->stop.i, a->step.i);
  return part && ty_copy_into(part, g) && ty_out_set(c, 0, zeros);
}

bool vjp_slice_backward(ty_vjp *c) {
  const ty_slice_backward_args *a = TY_ARGS(slice_backward, c);
  c->dx[0] = ty_slice(c->g[0], a->dim.i, a->start.i, a->stop.i, a->step.i);
  return true;
}

bool fwd_select(ty_call *c) {
  const ty_select_args *a = TY_ARGS(select, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (x->v.ndim == 0) return ty_op_fail(c, TY_EINVAL, "x: expected at least one dimension, got %s", ty_describe(x));
  if (!ty_check_dim(c, 1, x->v.ndim, &dim)) return false;
  int64_t n = x->v.size[dim], i = a->index.i;
  if (i < -n || i >= n)
    return ty_op_fail(c, TY_EINDEX, "index: %lld is out of range for dimension %d of x %s", (long long)i, dim,
                      ty_describe(x));
  if (i < 0) i += n;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  for (int d = 0; d < x->v.ndim - 1; d++) {
    size[d] = x->v.size[d + (d >= dim)];
    stride[d] = x->v.stride[d + (d >= dim)];
  }
  return ty_out_view(c, 0, x, x->v.ndim - 1, size, stride, i * x->v.stride[dim]);
}

bool vjp_select(ty_vjp *c) {
  const ty_select_args *a = TY_ARGS(select, c);
  int64_t dim = a->dim.i < 0 ? a->dim.i + c->in[0].ndim : a->dim.i, n = c->in[0].size[dim];
  int64_t i = a->index.i < 0 ? a->index.i + n : a->index.i;
  c->dx[0] = ty_slice_backward(ty_unsqueeze(c->g[0], dim), n, dim, i, i + 1, 1);
  return true;
}

bool fwd_narrow(ty_call *c) {
  const ty_narrow_args *a = TY_ARGS(narrow, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (x->v.ndim == 0) return ty_op_fail(c, TY_EINVAL, "x: expected at least one dimension, got %s", ty_describe(x));
  if (!ty_check_dim(c, 1, x->v.ndim, &dim)) return false;
  int64_t n = x->v.size[dim], start = a->start.i < 0 ? a->start.i + n : a->start.i;
  if (start < 0 || a->length.i < 0 || start > n || a->length.i > n - start)
    return ty_op_fail(c, TY_EINVAL, "start, length: %lld positions from %lld do not lie in dimension %d of x %s",
                      (long long)a->length.i, (long long)a->start.i, dim, ty_describe(x));
  return ty_out_set(c, 0, ty_slice(x, dim, start, start + a->length.i, 1));
}

bool fwd_diagonal(ty_call *c) {
  const ty_diagonal_args *a = TY_ARGS(diagonal, c);
  ty_tensor *x = a->x.t;
  int p, q, n = 0;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[..., n, m]")) return false;
  if (!ty_check_dim(c, 2, x->v.ndim, &p) || !ty_check_dim(c, 3, x->v.ndim, &q)) return false;
  if (p == q) return ty_op_fail(c, TY_EINVAL, "dim1: expected another dimension than dim0 %d", p);
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS], k = a->offset.i;
  for (int d = 0; d < x->v.ndim; d++) {
    if (d == p || d == q) continue;
    size[n] = x->v.size[d];
    stride[n++] = x->v.stride[d];
  }
  int64_t rows = x->v.size[p] + (k < 0 ? k : 0), columns = x->v.size[q] - (k > 0 ? k : 0);
  int64_t length = rows < columns ? rows : columns;
  size[n] = length > 0 ? length : 0;
  stride[n] = x->v.stride[p] + x->v.stride[q];
  int64_t offset = length <= 0 ? 0 : k >= 0 ? k * x->v.stride[q] : -k * x->v.stride[p];
  return ty_out_view(c, 0, x, n + 1, size, stride, offset);
}

bool vjp_diagonal(ty_vjp *c) {
  const ty_diagonal_args *a = TY_ARGS(diagonal, c);
  c->dx[0] = ty_diagonal_backward(c->g[0], ty_vjp_size(c, 0), a->offset.i, a->dim0.i, a->dim1.i);
  return true;
}

bool fwd_diagonal_backward(ty_call *c) {
  const ty_diagonal_backward_args *a = TY_ARGS(diagonal_backward, c);
  ty_tensor *g = a->g.t, *zeros = ty_zeros(a->size.is, ty_dtype_of(g), ty_device_of(g));
  ty_tensor *diagonal = ty_diagonal(zeros, a->offset.i, a->dim0.i, a->dim1.i);
  return diagonal && ty_copy_into(diagonal, g) && ty_out_set(c, 0, zeros);
}

bool vjp_diagonal_backward(ty_vjp *c) {
  const ty_diagonal_backward_args *a = TY_ARGS(diagonal_backward, c);
  c->dx[0] = ty_diagonal(c->g[0], a->offset.i, a->dim0.i, a->dim1.i);
  return true;
}
