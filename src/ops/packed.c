/* Products with weights that are stored without their zeros, and such weights as dense ones. What is stored is data:
 * kernels check that it fits together. Gradients never flow into it. */
#include "../../kernels/packed.h"

#include <stdio.h>
#include <string.h>

#include "op.h"

enum { FEW = 64 /* rows of x that read the weight as it is stored */ };

static bool check_stored(ty_call *c, int arg, ty_dtype dtype, int ndim, int64_t size) {
  const ty_tensor *t = c->arg[arg].t;
  if (ty_dtype_of(t) == dtype && t->v.ndim == ndim && (size < 0 || t->v.size[ndim - 1] == size)) return true;
  char wanted[32] = "n";
  if (size >= 0) snprintf(wanted, sizeof wanted, "%lld", (long long)size);
  return ty_op_fail(c, TY_EINVAL, "%s: expected %s [%s%s], got %s", c->op->args[arg].name, ty_dtype_name[dtype],
                    ndim == 2 ? "rows, " : "", wanted, ty_describe(t));
}

static bool check_bitmap(ty_call *c, int first, int64_t columns) {
  return check_stored(c, first, TY_F16, 1, -1) && check_stored(c, first + 1, TY_U8, 2, (columns + 7) / 8) &&
         check_stored(c, first + 2, TY_I64, 1, c->arg[first + 1].t->v.size[0] + 1);
}

static bool check_csl(ty_call *c, int first, int64_t rows, int64_t columns) {
  return check_stored(c, first, TY_I32, 1, -1) &&
         check_stored(c, first + 1, TY_I64, 1,
                      ty_csl_count(rows, TY_CSL_TALL) * ty_csl_count(columns, TY_CSL_WIDE) + 1);
}

static bool check_size(ty_call *c, const char *name, int64_t n) {
  if (n >= 0 && n < INT32_MAX) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected 0 or more, below 2^31, got %lld", name, (long long)n);
}

/* y = x w' by a kernel in f32, for few rows, or with the dense weight. */
static bool product(ty_call *c, int64_t rows, ty_tensor **in, int nin, ty_tensor *dense) {
  ty_tensor *x = in[0], *y, *wide;
  int n = x->v.ndim;
  if (dense) {
    bool was = ty_set_grad_enabled(c->record);
    c->record = false;
    y = ty_linear(x, ty_to(dense, ty_dtype_of(x)), NULL, NULL, "none");
    ty_set_grad_enabled(was);
    return ty_out_set(c, 0, y);
  }
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[n - 1] = rows;
  if (!ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), n, size)) return false;
  y = wide = c->out[0];
  if (ty_dtype_of(x) == TY_F32) return ty_launch(c, in, nin, NULL);
  if (!(in[0] = ty_to(x, TY_F32))) return false;
  if (!(wide = ty_scope_add(ty_tensor_new(ty_device_of(y), TY_F32, n, size)))) return false;
  return ty_launch_kernel((ty_op_id)c->op->id, &wide, 1, in, nin, NULL) && ty_copy_into(y, wide);
}

static bool many(const ty_tensor *x) {
  int64_t last = x->v.size[x->v.ndim - 1];
  return ty_dtype_of(x) == TY_F64 || (last && x->v.count / last > FEW);
}

bool fwd_linear_bitmap(ty_call *c) {
  const ty_linear_bitmap_args *a = TY_ARGS(linear_bitmap, c);
  ty_tensor *x = a->x.t;
  if (!ty_check_floats(c, 0) || !ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., columns]")) return false;
  int64_t columns = x->v.size[x->v.ndim - 1];
  if (!check_bitmap(c, 1, columns)) return false;
  ty_tensor *dense = NULL;
  if (many(x) && !(dense = ty_dense_bitmap(a->values.t, a->bitmap.t, a->starts.t, columns))) return false;
  return product(c, a->bitmap.t->v.size[0], (ty_tensor *[]){ x, a->values.t, a->bitmap.t, a->starts.t }, 4, dense);
}

bool vjp_linear_bitmap(ty_vjp *c) {
  const ty_linear_bitmap_args *a = TY_ARGS(linear_bitmap, c);
  ty_ints size = ty_vjp_size(c, 0);
  ty_tensor *w = ty_dense_bitmap(a->values.t, a->bitmap.t, a->starts.t, size.v[size.n - 1]);
  if (c->need[0]) c->dx[0] = ty_matmul(c->g[0], ty_to(w, ty_dtype_of(c->g[0])));
  return true;
}

bool fwd_linear_csl(ty_call *c) {
  const ty_linear_csl_args *a = TY_ARGS(linear_csl, c);
  ty_tensor *x = a->x.t;
  if (!ty_check_floats(c, 0) || !ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., columns]") ||
      !check_size(c, "rows", a->rows.i))
    return false;
  int64_t columns = x->v.size[x->v.ndim - 1];
  if (!check_csl(c, 1, a->rows.i, columns)) return false;
  ty_tensor *dense = NULL;
  if (many(x) && !(dense = ty_dense_csl(a->words.t, a->starts.t, a->rows.i, columns))) return false;
  return product(c, a->rows.i, (ty_tensor *[]){ x, a->words.t, a->starts.t }, 3, dense);
}

bool vjp_linear_csl(ty_vjp *c) {
  const ty_linear_csl_args *a = TY_ARGS(linear_csl, c);
  ty_ints size = ty_vjp_size(c, 0);
  ty_tensor *w = ty_dense_csl(a->words.t, a->starts.t, a->rows.i, size.v[size.n - 1]);
  if (c->need[0]) c->dx[0] = ty_matmul(c->g[0], ty_to(w, ty_dtype_of(c->g[0])));
  return true;
}

bool fwd_dense_bitmap(ty_call *c) {
  const ty_dense_bitmap_args *a = TY_ARGS(dense_bitmap, c);
  if (!check_size(c, "columns", a->columns.i) || !check_bitmap(c, 0, a->columns.i)) return false;
  int64_t size[] = { a->bitmap.t->v.size[0], a->columns.i };
  return ty_out(c, 0, ty_device_of(a->bitmap.t), TY_F16, 2, size) &&
         ty_launch(c, (ty_tensor *[]){ a->values.t, a->bitmap.t, a->starts.t }, 3, NULL);
}

bool fwd_dense_csl(ty_call *c) {
  const ty_dense_csl_args *a = TY_ARGS(dense_csl, c);
  if (!check_size(c, "rows", a->rows.i) || !check_size(c, "columns", a->columns.i) ||
      !check_csl(c, 0, a->rows.i, a->columns.i))
    return false;
  int64_t size[] = { a->rows.i, a->columns.i };
  return ty_out(c, 0, ty_device_of(a->words.t), TY_F16, 2, size) &&
         ty_launch(c, (ty_tensor *[]){ a->words.t, a->starts.t }, 2, NULL);
}
