/* Argument checks that forward functions share. */
#include <stdio.h>
#include <string.h>

#include "op.h"

bool ty_check_floats(ty_call *c, int arg) {
  const ty_tensor *t = c->arg[arg].t;
  if (!t || ty_is_float(ty_dtype_of(t))) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor (f64 f32 f16 bf16), got %s", c->op->args[arg].name,
                    ty_describe(t));
}

bool ty_check_ndim(ty_call *c, int arg, int lo, int hi, const char *layout) {
  const ty_tensor *t = c->arg[arg].t;
  if (!t || (t->v.ndim >= lo && t->v.ndim <= hi)) return true;
  char range[32];
  snprintf(range, sizeof range, lo == hi ? "%d" : "%d to %d", lo, hi);
  return ty_op_fail(c, TY_EINVAL, "%s: expected %s (%s dimensions), got %s", c->op->args[arg].name, layout, range,
                    ty_describe(t));
}

bool ty_check_index_dtype(ty_call *c, int arg) {
  const ty_tensor *t = c->arg[arg].t;
  if (!t || ty_dtype_of(t) == TY_I64 || ty_dtype_of(t) == TY_I32) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected indices of dtype i64 or i32, got %s", c->op->args[arg].name,
                    ty_describe(t));
}

bool ty_check_dim(ty_call *c, int arg, int ndim, int *dim) {
  int64_t d = c->arg[arg].i, n = ndim ? ndim : 1;
  if (d < -n || d >= n)
    return ty_op_fail(c, TY_EINVAL, "%s: expected a dimension in [%lld, %lld], got %lld for %s", c->op->args[arg].name,
                      (long long)-n, (long long)n - 1, (long long)d,
                      ty_describe(c->arg[0].kind == TY_TENSOR ? c->arg[0].t : NULL));
  *dim = (int)(d < 0 ? d + n : d);
  return true;
}

bool ty_check_dims(ty_call *c, int arg, int ndim, uint32_t *mask) {
  ty_ints dims = c->arg[arg].is;
  int64_t n = ndim ? ndim : 1;
  *mask = 0;
  for (int i = 0; i < dims.n; i++) {
    int64_t d = dims.v[i];
    if (d < -n || d >= n)
      return ty_op_fail(c, TY_EINVAL, "%s: expected dimensions in [%lld, %lld], got %lld for %s", c->op->args[arg].name,
                        (long long)-n, (long long)n - 1, (long long)d,
                        ty_describe(c->arg[0].kind == TY_TENSOR ? c->arg[0].t : NULL));
    uint32_t bit = 1u << (d < 0 ? d + n : d);
    if (*mask & bit)
      return ty_op_fail(c, TY_EINVAL, "%s: dimension %lld is named twice", c->op->args[arg].name, (long long)d);
    *mask |= bit;
  }
  if (!dims.n) *mask = (1u << ndim) - 1;
  if (!ndim) *mask = 0;
  return true;
}

const char *ty_ints_text(int n, const int64_t *v) {
  static _Thread_local char buffers[6][96];
  static _Thread_local int at;
  char *b = buffers[at = (at + 1) % 6];
  size_t used = (size_t)snprintf(b, sizeof *buffers, "{");
  for (int i = 0; i < n && used < sizeof *buffers; i++)
    used += (size_t)snprintf(b + used, sizeof *buffers - used, i ? ", %lld" : "%lld", (long long)v[i]);
  if (used < sizeof *buffers) snprintf(b + used, sizeof *buffers - used, "}");
  return b;
}

bool ty_check_each(ty_call *c, int arg, int n, int64_t lo, int64_t *out) {
  static const char *const words[] = { "one", "one", "one or two", "one or three" };
  ty_ints v = c->arg[arg].is;
  if (v.n != 1 && v.n != n)
    return ty_op_fail(c, TY_EINVAL, "%s: expected %s integer%s, got %d", c->op->args[arg].name, words[n],
                      n == 1 ? "" : "s", v.n);
  bool low = false, high = false;
  for (int i = 0; i < n; i++) {
    out[i] = v.v[v.n == 1 ? 0 : i];
    low = low || out[i] < lo, high = high || out[i] > INT32_MAX;
  }
  if (!low && !high) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected integers of at %s %lld, got %s", c->op->args[arg].name,
                    low ? "least" : "most", (long long)(low ? lo : INT32_MAX), ty_ints_text(n, out));
}

bool ty_check_pair(ty_call *c, int arg, int64_t lo, int64_t out[2]) { return ty_check_each(c, arg, 2, lo, out); }

int ty_check_choice(ty_call *c, int arg, const char *const *choices) {
  const char *text = c->arg[arg].s;
  char all[160] = "";
  for (int i = 0; choices[i]; i++) {
    if (text && strcmp(text, choices[i]) == 0) return i;
    size_t n = strlen(all);
    snprintf(all + n, sizeof all - n, i ? ", \"%s\"" : "\"%s\"", choices[i]);
  }
  ty_op_fail(c, TY_EINVAL, "%s: expected one of %s, got \"%s\"", c->op->args[arg].name, all, text ? text : "nil");
  return -1;
}

bool ty_broadcast(const ty_op *op, const ty_view *a, const ty_view *b, int *ndim, int64_t *size) {
  int n = a->ndim > b->ndim ? a->ndim : b->ndim;
  for (int i = 1; i <= n; i++) {
    int64_t p = i <= a->ndim ? a->size[a->ndim - i] : 1, q = i <= b->ndim ? b->size[b->ndim - i] : 1;
    if (p != q && p != 1 && q != 1)
      return ty_op_fail_(op, TY_EINVAL, "shapes %s and %s do not broadcast: dimension %d has sizes %lld and %lld",
                         ty_shape_text(a->ndim, a->size), ty_shape_text(b->ndim, b->size), n - i, (long long)p,
                         (long long)q);
    size[n - i] = p == 1 ? q : p;
  }
  *ndim = n;
  return true;
}
