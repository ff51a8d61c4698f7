/* Rules of ty.vmap: what they share, and those of elementwise ops, views, reductions and products. */
#include <string.h>

#include "map_rules.h"

/* ---- what rules share ---- */

ty_tensor *ty_whole(ty_mapped *m, ty_tensor *t) {
  if (!t || ty_differs(m, t)) return t ? t->batch->full : NULL;
  int64_t size[TY_MAX_DIMS + 1];
  size[0] = m->level->size;
  memcpy(size + 1, t->v.size, sizeof *size * (size_t)t->v.ndim);
  return ty_expand(t, (ty_ints){ size, t->v.ndim + 1 });
}

ty_tensor *ty_whole_of_rank(ty_mapped *m, ty_tensor *t, int rank) {
  if (!t) return NULL;
  int more = rank - t->v.ndim;
  ty_tensor *full = ty_whole(m, t);
  if (!full || more <= 0) return full;
  int64_t size[TY_MAX_DIMS];
  if (rank + 1 > TY_MAX_DIMS) {
    ty_op_fail(m, TY_EINVAL, "ty.vmap: a tensor has at most %d dimensions, the batch among them", TY_MAX_DIMS);
    return NULL;
  }
  size[0] = full->v.size[0];
  for (int d = 1; d <= rank; d++) size[d] = d <= more ? 1 : full->v.size[d - more];
  return ty_reshape(full, (ty_ints){ size, rank + 1 });
}

ty_tensor *ty_moved_dim(ty_tensor *t, int from, int to) {
  if (!t || from == to) return t;
  int64_t dims[TY_MAX_DIMS];
  int n = 0;
  for (int d = 0; d < t->v.ndim; d++)
    if (d != from) dims[n++] = d;
  memmove(dims + to + 1, dims + to, sizeof *dims * (size_t)(n - to));
  dims[to] = from;
  return ty_permute(t, (ty_ints){ dims, n + 1 });
}

ty_tensor *ty_merged_dims(ty_tensor *t, int at, int n) {
  if (!t) return NULL;
  int64_t size[TY_MAX_DIMS], all = 1;
  int k = 0;
  for (int d = 0; d < t->v.ndim; d++) {
    if (d < at || d >= at + n) {
      size[k++] = t->v.size[d];
    } else {
      all *= t->v.size[d];
      if (d == at + n - 1) size[k++] = all;
    }
  }
  return ty_reshape(t, (ty_ints){ size, k });
}

ty_tensor *ty_split_dim(ty_tensor *t, int at, int64_t n) {
  if (!t) return NULL;
  int64_t size[TY_MAX_DIMS + 1];
  int k = 0;
  for (int d = 0; d < t->v.ndim; d++) {
    if (d == at) size[k++] = n;
    size[k++] = d == at && n ? t->v.size[d] / n : t->v.size[d];
  }
  return ty_reshape(t, (ty_ints){ size, k });
}

bool ty_map_give_sample(ty_mapped *m, int i, ty_tensor *t) { return (m->out[i] = ty_retain(t)) != NULL; }
bool ty_map_give(ty_mapped *m, int i, ty_tensor *whole) {
  return (m->out[i] = ty_map_of_full(whole, m->level)) != NULL;
}

bool ty_map_outputs(ty_mapped *m, const ty_value *arg, ty_tensor **whole) {
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  if (!ty_call_op((ty_op_id)m->op->id, arg, out)) return false;
  bool ok = true;
  for (int i = 0; i < m->op->nout; i++) ok &= (whole[i] = ty_scope_add(out[i])) != NULL;
  return ok;
}

bool ty_map_call(ty_mapped *m, const ty_value *arg) {
  ty_tensor *whole[TY_MAX_OUTPUTS];
  if (!ty_map_outputs(m, arg, whole)) return false;
  if (m->op->flags & WRITES) return ty_map_give_sample(m, 0, m->arg[0].t);
  for (int i = 0; i < m->op->nout; i++)
    if (!ty_map_give(m, i, whole[i])) return false;
  return true;
}

bool ty_map_refuse(ty_mapped *m, int i) {
  return ty_op_fail(m, TY_EUNSUPPORTED, "%s: ty.vmap has no rule for one that differs by sample, got %s",
                    m->op->args[i].name, ty_describe(m->arg[i].t));
}

bool ty_map_same_from(const ty_mapped *m, int first) {
  for (int i = first; i < m->op->nargs; i++)
    if (ty_has_tensor(&m->arg[i]) && ty_differs(m, m->arg[i].t)) return false;
  return true;
}

typedef ty_tensor *of_tensor(ty_mapped *m, ty_tensor *t, int number);

/* The arguments with each tensor replaced; `lists` has room for the tensors in lists. */
static bool replace(ty_mapped *m, ty_value *arg, ty_tensor **lists, of_tensor *f, int number) {
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  for (int i = 0; i < m->op->nargs; i++) {
    if (ty_has_tensor(&arg[i])) {
      if (!(arg[i].t = f(m, arg[i].t, number))) return false;
    } else if (arg[i].kind == TY_TENSORS) {
      for (int j = 0; j < arg[i].ts.n; j++)
        if (!(lists[j] = f(m, m->arg[i].ts.v[j], number))) return false;
      arg[i].ts.v = lists;
      lists += arg[i].ts.n;
    }
  }
  return true;
}

static int in_lists(const ty_mapped *m) {
  int n = 0;
  for (int i = 0; i < m->op->nargs; i++)
    if (m->arg[i].kind == TY_TENSORS) n += m->arg[i].ts.n;
  return n;
}

/* The most dimensions that a sample's tensor has. */
static int highest_rank(const ty_mapped *m) {
  int rank = 0;
  for (int i = 0; i < m->op->nargs; i++) {
    if (ty_has_tensor(&m->arg[i]) && m->arg[i].t->v.ndim > rank) rank = m->arg[i].t->v.ndim;
    for (int j = 0; m->arg[i].kind == TY_TENSORS && j < m->arg[i].ts.n; j++)
      if (m->arg[i].ts.v[j]->v.ndim > rank) rank = m->arg[i].ts.v[j]->v.ndim;
  }
  return rank;
}

/* ---- elementwise ---- */

static ty_tensor *if_it_differs(ty_mapped *m, ty_tensor *t, int rank) {
  return ty_differs(m, t) ? ty_whole_of_rank(m, t, rank) : t;
}

/* All tensors broadcast to each other: the batch goes in front of the dimensions of the largest. */
bool map_each(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *lists[in_lists(m) + 1];
  return replace(m, arg, lists, if_it_differs, highest_rank(m)) && ty_map_call(m, arg);
}

/* The first tensor has any number of dimensions in front; the others belong to all of it. */
bool map_leading(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (m->arg[0].t->v.ndim == 0 && m->op->id == TY_OP_view_dtype) return map_forward(m);
  for (int i = 1; i < m->op->nargs; i++)
    if (ty_has_tensor(&arg[i]) && ty_differs(m, arg[i].t)) return ty_map_refuse(m, i);
  return (arg[0].t = ty_whole(m, arg[0].t)) && ty_map_call(m, arg);
}

/* The op's own function, which is made of other ops. */
bool map_forward(ty_mapped *m) {
  ty_call c = { m->op, m->arg, m->out, *m->record };
  bool ok = m->op->forward(&c);
  *m->record = c.record;
  return ok;
}

/* ---- dimensions by number ---- */

/* With one dimension for a number, so that none that is named is the batch's. */
static ty_tensor *whole_vector(ty_mapped *m, ty_tensor *t, int rank) { return ty_whole_of_rank(m, t, rank ? rank : 1); }

static bool is_dim(const ty_arg *a) { return strncmp(a->name, "dim", 3) == 0; }

/* `d` of a sample with n dimensions as one of the whole. */
static bool moved_by_one(ty_mapped *m, int i, int64_t *d, int n) {
  int64_t limit = n ? n : 1;
  if (*d < -limit || *d >= limit)
    return ty_op_fail(m, TY_EINVAL, "%s: expected a dimension in [%lld, %lld], got %lld", m->op->args[i].name,
                      (long long)-limit, (long long)limit - 1, (long long)*d);
  *d = *d < 0 ? *d + limit + 1 : *d + 1;
  return true;
}

/* Every tensor has the same dimensions; arguments that are called dim, dims, dim0 ... count them, none of a list
 * means all. A `size` is that of all. */
bool map_dims(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *lists[in_lists(m) + 1], *whole[TY_MAX_OUTPUTS];
  int64_t dims[TY_MAX_DIMS + 1], size[TY_MAX_DIMS + 1];
  int n = highest_rank(m);
  if (m->op->id == TY_OP_squeeze && n == 0) return ty_map_give_sample(m, 0, m->arg[0].t);
  bool number = n == 0 && m->op->id != TY_OP_unsqueeze && m->op->id != TY_OP_slice && m->op->id != TY_OP_select &&
                m->op->id != TY_OP_diagonal_backward;
  if (!replace(m, arg, lists, number || n ? whole_vector : ty_whole_of_rank, n)) return false;
  for (int i = 0; i < m->op->nargs; i++) {
    const ty_arg *a = &m->op->args[i];
    if (strcmp(a->name, "size") == 0 && (a->kind == TY_ARG_INTS || a->kind == TY_ARG_VARINTS)) {
      if (arg[i].is.n > TY_MAX_DIMS) return ty_op_fail(m, TY_EINVAL, "size: at most %d dimensions", TY_MAX_DIMS);
      size[0] = m->level->size;
      memcpy(size + 1, m->arg[i].is.v, sizeof *size * (size_t)arg[i].is.n);
      n = arg[i].is.n;
      if (number && !n) size[1] = 1;
      arg[i].is = (ty_ints){ size, n + 1 + (number && !n) };
    }
  }
  if (m->op->id == TY_OP_unsqueeze) n++;
  if (m->op->id == TY_OP_fft_line || m->op->id == TY_OP_irfft_line) n--; /* pairs in a last dimension */
  for (int i = 0; i < m->op->nargs; i++) {
    const ty_arg *a = &m->op->args[i];
    if (!is_dim(a)) continue;
    if (a->kind == TY_ARG_INT) {
      if (!moved_by_one(m, i, &arg[i].i, n)) return false;
    } else if (a->kind == TY_ARG_INTS || a->kind == TY_ARG_VARINTS) {
      bool all = arg[i].is.n == 0 && m->op->id != TY_OP_flip;
      int count = all ? (n ? n : 1) : arg[i].is.n;
      if (count > TY_MAX_DIMS) return ty_op_fail(m, TY_EINVAL, "%s: at most %d dimensions", a->name, TY_MAX_DIMS);
      for (int j = 0; j < count; j++) {
        dims[j] = all ? j : m->arg[i].is.v[j];
        if (!moved_by_one(m, i, &dims[j], n)) return false;
      }
      arg[i].is = (ty_ints){ dims, count };
    }
  }
  if (!ty_map_outputs(m, arg, whole)) return false;
  for (int i = 0; i < m->op->nout; i++) {
    if (number && whole[i]->v.ndim == 2 && whole[i]->v.size[1] == 1) whole[i] = ty_squeeze(whole[i], TY_INTS(1));
    if (!whole[i] || !ty_map_give(m, i, whole[i])) return false;
  }
  return true;
}

bool map_permute(ty_mapped *m) {
  int64_t dims[TY_MAX_DIMS + 1] = { 0 };
  ty_ints want = m->arg[1].is;
  int n = m->arg[0].t->v.ndim;
  if (want.n != n) return map_forward(m); /* its error */
  for (int i = 0; i < n; i++) {
    dims[i + 1] = want.v[i];
    if (!moved_by_one(m, 1, &dims[i + 1], n)) return false;
  }
  return ty_map_give(m, 0, ty_permute(ty_whole(m, m->arg[0].t), (ty_ints){ dims, n + 1 }));
}

/* reshape and expand */
bool map_sized(ty_mapped *m) {
  int64_t size[TY_MAX_DIMS + 1];
  ty_ints want = m->arg[1].is;
  ty_value arg[] = { m->arg[0], m->arg[1] };
  bool expand = m->op->id == TY_OP_expand;
  if (want.n >= TY_MAX_DIMS)
    return ty_op_fail(m, TY_EINVAL, "size: at most %d dimensions, the batch among them", TY_MAX_DIMS);
  if (expand && want.n < m->arg[0].t->v.ndim)
    return ty_op_fail(m, TY_EINVAL, "size: expected %d sizes or more for x %s, got %d", m->arg[0].t->v.ndim,
                      ty_describe(m->arg[0].t), want.n);
  size[0] = m->level->size;
  memcpy(size + 1, want.v, sizeof *size * (size_t)want.n);
  for (int i = 0; !expand && i < want.n && m->level->size;
       i++) { /* -1 by the sample's, which says more where it is empty */
    int64_t known = 1;
    if (want.v[i] != -1) continue;
    for (int j = 0; j < want.n; j++) known *= j == i ? 1 : want.v[j];
    if (known > 0 && m->arg[0].t->v.count % known == 0) size[i + 1] = m->arg[0].t->v.count / known;
  }
  arg[0].t = expand ? ty_whole_of_rank(m, arg[0].t, want.n) : ty_whole(m, arg[0].t);
  arg[1].is = (ty_ints){ size, want.n + 1 };
  return arg[0].t && ty_map_call(m, arg);
}

bool map_sum_to(ty_mapped *m) {
  ty_tensor *x = m->arg[0].t, *y;
  ty_ints want = m->arg[1].is;
  int64_t size[TY_MAX_DIMS + 1], result[TY_MAX_DIMS + 1];
  int more = x->v.ndim - want.n;
  if (more < 0) return map_forward(m);
  size[0] = result[0] = m->level->size;
  for (int d = 0; d < x->v.ndim; d++) size[d + 1] = d < more ? 1 : want.v[d - more];
  memcpy(result + 1, want.v, sizeof *result * (size_t)want.n);
  y = ty_sum_to(ty_whole(m, x), (ty_ints){ size, x->v.ndim + 1 });
  return ty_map_give(m, 0, y ? ty_reshape(y, (ty_ints){ result, want.n + 1 }) : NULL);
}

/* ---- matrices and products ---- */

/* The batch in front of any others. */
bool map_matrices(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  for (int i = 0; i < m->op->nargs; i++)
    if (ty_has_tensor(&m->arg[i]) && m->arg[i].t->v.ndim < 2)
      return ty_op_fail(m, TY_EINVAL, "%s: expected a matrix, got %s", m->op->args[i].name, ty_describe(m->arg[i].t));
  return replace(m, arg, NULL, ty_whole_of_rank, highest_rank(m)) && ty_map_call(m, arg);
}

/* Tensors with one and the same dimensions, of which the op looks at the last. */
bool map_last(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *whole[TY_MAX_OUTPUTS];
  if (m->arg[0].t->v.ndim == 0) return ty_op_fail(m, TY_EINVAL, "x: expected at least one dimension");
  if (!replace(m, arg, NULL, ty_whole_of_rank, highest_rank(m)) || !ty_map_outputs(m, arg, whole)) return false;
  for (int i = 0; i < m->op->nout; i++) { /* what is not there is empty for all */
    bool empty = whole[i]->v.ndim == 1 && whole[i]->v.size[0] == 0;
    if (!(empty ? ty_map_give_sample(m, i, whole[i]) : ty_map_give(m, i, whole[i]))) return false;
  }
  return true;
}

/* Tensors of one shape. */
bool map_alike(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  return replace(m, arg, NULL, ty_whole_of_rank, 0) && ty_map_call(m, arg);
}

bool map_matmul(ty_mapped *m) {
  ty_tensor *x = m->arg[0].t, *y = m->arg[1].t;
  int p = x->v.ndim, q = y->v.ndim;
  if (p == 0 || q == 0) return map_forward(m); /* its error */
  if (!ty_differs(m, y) && q <= 2) return ty_map_give(m, 0, ty_matmul(x->batch->full, y));
  if (!ty_differs(m, x) && p == 2 && q == 1) /* rows of y, one product */
    return ty_map_give(m, 0, ty_matmul(y->batch->full, ty_transpose(x, 0, 1)));
  bool row = p == 1, column = q == 1;
  int rank = p > q ? p : q;
  if (rank < 2) rank = 2;
  if (row) x = ty_unsqueeze(x, 0);
  if (column) y = ty_unsqueeze(y, 1);
  if (!x || !y) return false;
  if (ty_differs(m, x)) x = ty_whole_of_rank(m, x, rank);
  if (ty_differs(m, y)) y = ty_whole_of_rank(m, y, rank);
  ty_tensor *z = ty_matmul(x, y);
  if (row) z = ty_squeeze(z, TY_INTS(-2));
  if (column) z = ty_squeeze(z, TY_INTS(-1));
  return ty_map_give(m, 0, z);
}

bool map_linear(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *x = m->arg[0].t, *weight = m->arg[1].t, *bias = m->arg[2].t, *residual = m->arg[3].t;
  ty_activation activation = ty_activation_named(m->arg[4].s);
  bool quantized = ty_is_quantized(ty_dtype_of(weight));
  if ((*m->record && activation) || quantized) return map_forward(m); /* separate ops */
  if (x->v.ndim && !ty_differs(m, weight) && !ty_differs(m, bias)) {  /* one tall product */
    memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
    arg[0].t = ty_whole(m, x);
    if (residual && !(arg[3].t = ty_whole(m, residual))) return false;
    return arg[0].t && ty_map_call(m, arg);
  }
  if (weight->v.ndim != 2 || x->v.ndim == 0 || x->v.size[x->v.ndim - 1] != weight->v.size[1])
    return ty_op_fail(m, TY_EINVAL, "x: expected [..., in] for weight [out, in], got %s for %s", ty_describe(x),
                      ty_describe(weight));
  if (!ty_differs(m, weight)) {
    x = ty_linear(x, weight, NULL, NULL, "none");
  } else {
    ty_tensor *rows = x->v.ndim == 1 ? ty_unsqueeze(x, 0) : ty_merged_dims(x, 0, x->v.ndim - 1);
    int64_t size[TY_MAX_DIMS];
    memcpy(size, x->v.size, sizeof size);
    size[x->v.ndim - 1] = weight->v.size[0];
    int n = x->v.ndim;
    x = ty_matmul(rows, ty_transpose(weight, 0, 1));
    if (n != 2) x = x ? ty_reshape(x, (ty_ints){ size, n }) : NULL;
  }
  if (bias) x = ty_add(x, bias);
  if (residual) x = ty_add(x, residual);
  return x && ty_map_give_sample(m, 0, ty_activate(x, activation));
}

/* Angles broadcast to x from the right. */
bool map_rotary(ty_mapped *m) {
  ty_value arg[] = { m->arg[0], m->arg[1], m->arg[2], m->arg[3] };
  int rank = m->arg[0].t->v.ndim;
  bool same = ty_map_same_from(m, 1);
  arg[0].t = ty_whole(m, arg[0].t);
  for (int i = 1; i < 3; i++) {
    if (arg[i].t->v.ndim > rank) return map_forward(m); /* its error */
    if (!same) arg[i].t = ty_whole_of_rank(m, arg[i].t, rank);
  }
  return arg[0].t && arg[1].t && arg[2].t && ty_map_call(m, arg);
}

bool map_searchsorted(ty_mapped *m) {
  ty_value arg[] = { m->arg[0], m->arg[1], m->arg[2] };
  ty_tensor *sorted = arg[0].t, *values = arg[1].t;
  if (arg[1].kind != TY_TENSOR) { /* a number, in each sample's line */
    ty_dtype d = arg[1].kind == TY_INT ? TY_I64 : ty_is_float(ty_dtype_of(sorted)) ? ty_dtype_of(sorted) : TY_F32;
    values = ty_full(TY_NO_INTS, arg[1], d, ty_device_of(sorted));
    if (!values) return false;
    arg[1] = ty_value_of_tensor(values);
  }
  if (!ty_differs(m, sorted) && sorted->v.ndim == 1) {
    arg[1].t = ty_whole(m, values);
    return arg[1].t && ty_map_call(m, arg);
  }
  if (sorted->v.ndim == 1) { /* one line for all of a sample's values */
    ty_tensor *flat = ty_reshape(values, TY_INTS(values->v.count)), *whole[1];
    arg[0].t = ty_whole(m, sorted), arg[1].t = flat ? ty_whole(m, flat) : NULL;
    if (!arg[0].t || !arg[1].t || !ty_map_outputs(m, arg, whole)) return false;
    ty_tensor *at = ty_scope_add(ty_map_of_full(whole[0], m->level));
    return at && ty_map_give_sample(m, 0, ty_reshape(at, (ty_ints){ values->v.size, values->v.ndim }));
  }
  return map_last(m);
}

bool map_one_hot(ty_mapped *m) {
  if (m->arg[1].i < 0)
    return ty_op_fail(m, TY_EUNSUPPORTED, "classes: inside ty.vmap their number cannot depend on the values; pass it");
  return map_leading(m);
}

/* ---- writing ---- */

bool map_copy(ty_mapped *m) {
  ty_tensor *x = m->arg[0].t, *source = m->arg[1].t;
  if (x->storage == source->storage && !(source = ty_clone(source))) return false;
  return ty_copy_into(x, source) && ty_map_give_sample(m, 0, x);
}

/* ---- the table ---- */

typedef bool rule(ty_mapped *m);

static rule *const listed[TY_OP_COUNT] = {
#define MAP(op, name) [TY_OP_##op] = map_##name,
#include "vmap.def"
#undef MAP
};

/* Elementwise ops are known by the function that they share. */
static bool is_elementwise(const ty_op *op) {
  return op->forward == fwd_unary || op->forward == fwd_unary_float || op->forward == fwd_test ||
         op->forward == fwd_binary || op->forward == fwd_scaled_sum || op->forward == fwd_binary_float ||
         op->forward == fwd_compare || op->forward == fwd_shift;
}

static rule *rule_of(const ty_op *op) {
  if (listed[op->id]) return listed[op->id];
  return is_elementwise(op) ? map_each : op->forward == fwd_activation_backward ? map_alike : NULL;
}

bool ty_has_map_rule(const ty_op *op) { return rule_of(op) != NULL; }

static void innermost(ty_level **level, const ty_tensor *t) {
  if (t && t->batch && (!*level || t->batch->level->id > (*level)->id)) *level = t->batch->level;
}

ty_level *ty_level_of_call(const ty_op *op, const ty_value *arg) {
  ty_level *level = (op->flags & RANDOM) && rule_of(op) ? ty_level_running() : NULL;
  for (int i = 0; i < op->nargs; i++) {
    if (arg[i].kind == TY_TENSOR) innermost(&level, arg[i].t);
    for (int j = 0; arg[i].kind == TY_TENSORS && j < arg[i].ts.n; j++) innermost(&level, arg[i].ts.v[j]);
  }
  return level;
}

/* A result that is an argument itself becomes a tensor of its own, for its history. */
static bool own(const ty_op *op, const ty_value *arg, ty_tensor **out) {
  for (int i = 0; i < op->nargs && !op->composed; i++) {
    if (arg[i].kind != TY_TENSOR || arg[i].t != *out) continue;
    ty_tensor *alias = ty_tensor_alias(*out);
    ty_release(*out);
    *out = alias;
    return alias != NULL;
  }
  return true;
}

bool ty_call_mapped(ty_level *level, const ty_op *op, const ty_value *arg, ty_tensor **out, bool *record) {
  rule *f = rule_of(op);
  if (!f)
    return ty_op_fail_(op, TY_EUNSUPPORTED, "ty.vmap has no rule for this op; call it outside of the mapped function");
  ty_mapped m = { op, arg, out, level, record };
  ty_scope scope;
  ty_scope_open(&scope);
  bool was = ty_set_grad_enabled(op->composed && ty_grad_enabled());
  ty_level *running = ty_level_running();
  level->refs++;
  if (!op->composed && level->running) ty_level_set_running(level->outer); /* for what the rule calls that is random */
  bool ok = f(&m);
  for (int i = 0; ok && i < op->nout && !(op->flags & WRITES); i++) ok = own(op, arg, &out[i]);
  ty_level_set_running(running);
  ty_level_release(level);
  ty_set_grad_enabled(was);
  ty_scope_close(&scope);
  return ok;
}

bool ty_map_plain_backward(const ty_vjp *c) {
  switch (c->op->id) {
    case TY_OP_tanh:
    case TY_OP_sigmoid:
    case TY_OP_relu:
    case TY_OP_gelu:
    case TY_OP_silu:
    case TY_OP_softmax:
    case TY_OP_log_softmax:
    case TY_OP_glu:
    case TY_OP_linear_scan:
    case TY_OP_cdist:
    case TY_OP_segment_weights:
    case TY_OP_block_sparse_attention:
    case TY_OP_cross_entropy_rows: return true;
    case TY_OP_scaled_dot_product_attention: return !c->need[3];
    default: return false;
  }
}
