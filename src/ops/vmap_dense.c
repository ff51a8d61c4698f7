/* Rules of ty.vmap for ops on batches [n, ...], where all samples' n become one: convolutions, pools, losses,
 * attention, norms, recurrences; and for positions that come as data. */
#include <string.h>

#include "map_rules.h"

static ty_ints sizes_of(const ty_tensor *t) { return (ty_ints){ t->v.size, t->v.ndim }; }

/* ---- the samples' first dimensions as one ---- */

/* t [n, ...] of each sample as [batch * n, ...]; one of size 1 is repeated. */
static ty_tensor *folded(ty_mapped *m, ty_tensor *t, int64_t n) {
  t = ty_whole(m, t);
  if (t && t->v.size[1] == 1 && n > 1) {
    int64_t size[TY_MAX_DIMS];
    memcpy(size, t->v.size, sizeof *size * (size_t)t->v.ndim);
    size[1] = n;
    t = ty_expand(t, (ty_ints){ size, t->v.ndim });
  }
  return ty_merged_dims(t, 0, 2);
}

/* Results whose first dimension has the samples' n. */
static bool unfolded(ty_mapped *m, const ty_value *arg) {
  ty_tensor *whole[TY_MAX_OUTPUTS];
  if (!ty_map_outputs(m, arg, whole)) return false;
  for (int i = 0; i < m->op->nout; i++)
    if (!ty_map_give(m, i, ty_split_dim(whole[i], 0, m->level->size))) return false;
  return true;
}

/* Tensors from argument `from` on, up to `to`, are folded; others have to be the same for all samples. */
static bool fold_range(ty_mapped *m, ty_value *arg, int from, int to) {
  if (m->arg[from].t->v.ndim == 0) return map_forward(m);
  int64_t n = m->arg[from].t->v.size[0];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  for (int i = 0; i < m->op->nargs; i++) {
    if (!ty_has_tensor(&arg[i])) continue;
    if (i < from || i >= to) {
      if (ty_differs(m, arg[i].t)) return ty_map_refuse(m, i);
    } else {
      if (arg[i].t->v.ndim == 0) return map_forward(m); /* its error */
      if (!(arg[i].t = folded(m, arg[i].t, n))) return false;
    }
  }
  return true;
}

static bool fold(ty_mapped *m, int to) {
  ty_value arg[TY_MAX_ARGS];
  return fold_range(m, arg, 0, to) && unfolded(m, arg);
}

bool map_fold(ty_mapped *m) { return fold(m, m->op->nargs); }
bool map_fold_first(ty_mapped *m) { return fold(m, 1); }

/* Rows and what belongs to each; the weights of classes, which come later, are the same for all. */
bool map_fold_rows(ty_mapped *m) { return fold(m, m->op->id == TY_OP_cross_entropy_rows ? 2 : 4); }

/* The same where `size` is that of the result. */
bool map_fold_sized(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  int64_t size[TY_MAX_DIMS];
  if (!fold_range(m, arg, 0, m->op->nargs)) return false;
  for (int i = 0; i < m->op->nargs; i++) {
    if (strcmp(m->op->args[i].name, "size") != 0) continue;
    if (arg[i].is.n < 1 || arg[i].is.n > TY_MAX_DIMS) return map_forward(m);
    memcpy(size, arg[i].is.v, sizeof *size * (size_t)arg[i].is.n);
    size[0] *= m->level->size;
    arg[i].is.v = size;
  }
  return unfolded(m, arg);
}

/* Of other than images it is made of other ops. */
bool map_interpolate(ty_mapped *m) {
  const char *mode = m->arg[3].s;
  bool images = m->arg[0].t->v.ndim == 4 && !m->arg[5].i &&
                (strcmp(mode, "nearest") == 0 || strcmp(mode, "bilinear") == 0);
  return images ? map_fold(m) : map_forward(m);
}

bool map_linear_cross_entropy(ty_mapped *m) {
  const ty_linear_cross_entropy_args *a = TY_ARGS(linear_cross_entropy, m);
  ty_tensor *y = ty_linear(a->x.t, a->weight.t, NULL, NULL, "none");
  if (!y) return false;
  ty_tensor *rows = ty_reshape(y, TY_INTS(-1, y->v.size[y->v.ndim - 1]));
  ty_tensor *target = ty_reshape(a->target.t, TY_INTS(a->target.t->v.count));
  return rows && target &&
         ty_map_give_sample(m, 0,
                            ty_cross_entropy(rows, target, a->class_weight.t, a->ignore_index.i, a->label_smoothing.f,
                                             a->reduction.s));
}

/* ---- convolutions: weights that differ by sample are groups ---- */

/* [batch, n, c, h, w] as [n, batch * c, h, w], and back. */
static ty_tensor *channels_of(ty_tensor *whole) { return ty_merged_dims(ty_moved_dim(whole, 0, 1), 1, 2); }
static ty_tensor *of_channels(ty_tensor *y, int64_t batch) { return ty_moved_dim(ty_split_dim(y, 1, batch), 1, 0); }

bool map_conv2d(ty_mapped *m) {
  const ty_conv2d_args *a = TY_ARGS(conv2d, m);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *bias = a->bias.t, *y;
  ty_activation activation = ty_activation_named(a->activation.s);
  if ((*m->record && activation) || x->v.ndim != 4 || weight->v.ndim != 4) return map_forward(m);
  if (!ty_differs(m, weight) && !ty_differs(m, bias)) {
    ty_value arg[TY_MAX_ARGS];
    memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
    int64_t n = x->v.size[0];
    arg[0].t = folded(m, x, n);
    if (a->residual.t && !(arg[7].t = folded(m, a->residual.t, n))) return false;
    return arg[0].t && unfolded(m, arg);
  }
  if (!ty_differs(m, weight)) {
    y = ty_conv2d(x, weight, NULL, a->stride.is, a->padding.is, a->dilation.is, a->groups.i, NULL, "none");
  } else {
    if (x->v.size[1] != weight->v.size[1] * a->groups.i) return map_forward(m); /* its error */
    bool shared = !ty_differs(m, x) && a->groups.i == 1;
    ty_tensor *from = shared ? x : channels_of(ty_whole(m, x)), *w = ty_merged_dims(ty_whole(m, weight), 0, 2);
    y = ty_conv2d(from, w, NULL, a->stride.is, a->padding.is, a->dilation.is, shared ? 1 : a->groups.i * m->level->size,
                  NULL, "none");
    y = y ? ty_scope_add(ty_map_of_full(of_channels(y, m->level->size), m->level)) : NULL;
  }
  if (bias) y = ty_add(y, ty_reshape(bias, TY_INTS(bias->v.count, 1, 1)));
  if (a->residual.t) y = ty_add(y, a->residual.t);
  return y && ty_map_give_sample(m, 0, ty_activate(y, activation));
}

bool map_conv2d_backward_input(ty_mapped *m) {
  const ty_conv2d_backward_input_args *a = TY_ARGS(conv2d_backward_input, m);
  int64_t size[4], batch = m->level->size;
  if (a->size.is.n != 4 || a->g.t->v.ndim != 4 || a->weight.t->v.ndim != 4) return map_forward(m);
  memcpy(size, a->size.is.v, sizeof size);
  if (!ty_differs(m, a->weight.t)) {
    ty_tensor *g = folded(m, a->g.t, a->g.t->v.size[0]);
    size[0] *= batch;
    ty_tensor *dx = ty_conv2d_backward_input(g, a->weight.t, (ty_ints){ size, 4 }, a->stride.is, a->padding.is,
                                             a->dilation.is, a->groups.i);
    return ty_map_give(m, 0, ty_split_dim(dx, 0, batch));
  }
  size[1] *= batch;
  ty_tensor *g = channels_of(ty_whole(m, a->g.t)), *w = ty_merged_dims(ty_whole(m, a->weight.t), 0, 2);
  ty_tensor *dx = ty_conv2d_backward_input(g, w, (ty_ints){ size, 4 }, a->stride.is, a->padding.is, a->dilation.is,
                                           a->groups.i * batch);
  return ty_map_give(m, 0, of_channels(dx, batch));
}

/* The gradient of one sample for a kernel as one product: of its windows, as columns, with what comes back. */
static ty_tensor *weight_by_windows(ty_mapped *m, const ty_conv2d_backward_weight_args *a) {
  const int64_t *size = a->size.is.v, n = a->x.t->v.size[0];
  ty_tensor *columns = ty_unfold(folded(m, a->x.t, n), TY_INTS(size[2], size[3]), a->dilation.is, a->padding.is,
                                 a->stride.is);
  if (!columns) return NULL;
  const int64_t rows = columns->v.size[1], windows = columns->v.size[2], batch = m->level->size;
  ty_tensor *g = ty_reshape(ty_whole(m, a->g.t), TY_INTS(batch, n, size[0], windows)), *dw;
  columns = ty_reshape(columns, TY_INTS(batch, n, rows, windows));
  if (n == 1) {
    dw = ty_matmul(ty_select(g, 1, 0), ty_transpose(ty_select(columns, 1, 0), 1, 2));
  } else {
    g = ty_reshape(ty_transpose(g, 1, 2), TY_INTS(batch, size[0], n * windows));
    columns = ty_reshape(ty_transpose(columns, 1, 2), TY_INTS(batch, rows, n * windows));
    dw = ty_matmul(g, ty_transpose(columns, 1, 2));
  }
  return ty_reshape(dw, TY_INTS(batch, size[0], size[1], size[2], size[3]));
}

bool map_conv2d_backward_weight(ty_mapped *m) {
  const ty_conv2d_backward_weight_args *a = TY_ARGS(conv2d_backward_weight, m);
  int64_t size[4], batch = m->level->size;
  if (a->size.is.n != 4 || a->g.t->v.ndim != 4 || a->x.t->v.ndim != 4) return map_forward(m);
  memcpy(size, a->size.is.v, sizeof size);
  if (a->groups.i == 1 && a->x.t->v.size[0] > 0) return ty_map_give(m, 0, weight_by_windows(m, a));
  size[0] *= batch;
  ty_tensor *g = channels_of(ty_whole(m, a->g.t)), *x = channels_of(ty_whole(m, a->x.t));
  ty_tensor *dw = ty_conv2d_backward_weight(g, x, (ty_ints){ size, 4 }, a->stride.is, a->padding.is, a->dilation.is,
                                            a->groups.i * batch);
  return ty_map_give(m, 0, ty_split_dim(dw, 0, batch));
}

/* ---- attention and recurrences ---- */

/* q, k, v and what has their first dimension, and a mask that broadcasts to [b, h, t, s]. */
bool map_attention(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *whole[TY_MAX_OUTPUTS];
  bool backward = m->op->id == TY_OP_attention_backward;
  int tensors = backward ? 6 : 3, packed = backward ? 12 : 8;
  if (backward && m->arg[10].i) return ty_map_refuse(m, 6);
  if (ty_has_tensor(&m->arg[packed]) && ty_differs(m, m->arg[packed].t)) return ty_map_refuse(m, packed);
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  int64_t b = m->arg[0].t->v.ndim ? m->arg[0].t->v.size[0] : 1;
  for (int i = 0; i < tensors; i++) {
    if (arg[i].t->v.ndim < 3) return map_forward(m); /* its error */
    if (!(arg[i].t = ty_merged_dims(ty_whole(m, arg[i].t), 0, 2))) return false;
  }
  ty_tensor *mask = m->arg[tensors].t;
  if (ty_has_tensor(&m->arg[tensors])) {
    if (mask->v.ndim > 4) return map_forward(m);
    if (ty_differs(m, mask) || (mask->v.ndim == 4 && mask->v.size[0] > 1)) {
      ty_tensor *full = ty_whole_of_rank(m, mask, 4);
      const int64_t *s = full ? full->v.size : NULL;
      if (full && s[1] != b) full = ty_expand(full, TY_INTS(s[0], b, s[2], s[3], s[4]));
      if (!(arg[tensors].t = ty_merged_dims(full, 0, 2))) return false;
    }
  }
  if (!ty_map_outputs(m, arg, whole)) return false;
  for (int i = 0; i < m->op->nout; i++) {
    bool ok = backward && i == 3 ? ty_map_give_sample(m, i, whole[i]) /* empty */
                                 : ty_map_give(m, i, ty_split_dim(whole[i], 0, m->level->size));
    if (!ok) return false;
  }
  return true;
}

/* All but the rates have a row for each sequence. */
bool map_selective_scan(ty_mapped *m) {
  for (int i = 0; i < 6; i++)
    if (ty_has_tensor(&m->arg[i]) && i != 2 && m->arg[i].t->v.ndim != 3) return map_forward(m);
  if (ty_differs(m, m->arg[2].t)) return ty_map_refuse(m, 2);
  ty_value arg[TY_MAX_ARGS];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  int64_t n = -1;
  for (int i = 0; i < 6 && n < 0; i++)
    if (ty_has_tensor(&arg[i]) && i != 2) n = arg[i].t->v.size[0];
  for (int i = 0; i < 6; i++)
    if (ty_has_tensor(&arg[i]) && i != 2 && !(arg[i].t = folded(m, arg[i].t, n))) return false;
  return unfolded(m, arg);
}

bool map_gated(ty_mapped *m) {
  for (int i = 0; i < 4; i++)
    if (m->arg[i].t->v.ndim != 4) return map_forward(m);
  if (ty_has_tensor(&m->arg[6])) return ty_map_refuse(m, 6);
  return fold(m, 5);
}

/* x [t, b, ...], weight, bias and state [n, b, ...]: all samples' b become one. */
bool map_recurrence(ty_mapped *m) {
  static const int batch_at[] = { 1, 1, 2, 1 };
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *whole[4];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  for (int i = 1; i < 3; i++)
    if (ty_has_tensor(&arg[i]) && ty_differs(m, arg[i].t)) return ty_map_refuse(m, i);
  for (int i = 0; i < 4; i += 3) {
    if (arg[i].t->v.ndim != 3) return map_forward(m);
    if (!(arg[i].t = ty_merged_dims(ty_moved_dim(ty_whole(m, arg[i].t), 0, 1), 1, 2))) return false;
  }
  if (!ty_map_outputs(m, arg, whole)) return false;
  for (int i = 0; i < 4; i++) {
    ty_tensor *y = ty_split_dim(whole[i], batch_at[i], m->level->size);
    if (!ty_map_give(m, i, ty_moved_dim(y, batch_at[i], 0))) return false;
  }
  return true;
}

/* x [..., c, t] and kernel [c, taps], or g as x: all samples' channels become those of one. */
bool map_long_conv(ty_mapped *m) {
  if (m->op->id == TY_OP_fft_conv_lines && !ty_differs(m, m->arg[1].t)) return map_leading(m);
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *whole[1];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  for (int i = 0; i < 2; i++) {
    const int nd = arg[i].t->v.ndim;
    if (nd < 2) return map_forward(m);
    if (!(arg[i].t = ty_merged_dims(ty_moved_dim(ty_whole(m, arg[i].t), 0, nd - 2), nd - 2, 2))) return false;
  }
  if (!ty_map_outputs(m, arg, whole)) return false;
  const int at = whole[0]->v.ndim - 2;
  return ty_map_give(m, 0, ty_moved_dim(ty_split_dim(whole[0], at, m->level->size), at, 0));
}

/* ---- norms ---- */

/* The op without its weight and bias on samples, whose results are given, but for the `main` one, which is returned. */
static ty_tensor *without_parameters(ty_mapped *m, int weight, int bias, int main) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  arg[weight] = (ty_value){ .kind = TY_NONE };
  if (bias >= 0) arg[bias] = arg[weight];
  arg[weight].t = NULL;
  if (bias >= 0) arg[bias].t = NULL;
  if (m->op->id == TY_OP_group_norm) arg[5].s = "none";
  if (!ty_call_op((ty_op_id)m->op->id, arg, out)) return NULL;
  for (int i = 0; i < m->op->nout; i++)
    if (i != main) m->out[i] = out[i];
  return ty_scope_add(out[main]);
}

/* y times weight plus bias, each reshaped to [..] with `tail` sizes of 1 behind. */
static ty_tensor *with_parameters(ty_tensor *y, ty_tensor *weight, ty_tensor *bias, int tail) {
  ty_dtype dtype = y ? ty_dtype_of(y) : TY_F32;
  ty_tensor *p[] = { weight, bias };
  for (int i = 0; i < 2 && y; i++) {
    if (!p[i]) continue;
    int64_t size[TY_MAX_DIMS];
    int n = p[i]->v.ndim;
    memcpy(size, p[i]->v.size, sizeof *size * (size_t)n);
    for (int d = 0; d < tail; d++) size[n + d] = 1;
    ty_tensor *shaped = tail ? ty_reshape(p[i], (ty_ints){ size, n + tail }) : p[i];
    y = i ? ty_add(y, shaped) : ty_mul(y, shaped);
  }
  return ty_to(y, dtype);
}

/* layer_norm and rms_norm: over the last dimensions, so that the batch stands in front of others. */
bool map_row_norm(ty_mapped *m) {
  bool biased = m->op->id == TY_OP_layer_norm;
  ty_tensor *weight = m->arg[2].t, *bias = biased ? m->arg[3].t : NULL, *x = m->arg[0].t;
  int n = m->arg[1].is.n ? m->arg[1].is.n : weight ? weight->v.ndim : 1;
  if (n > x->v.ndim) return ty_op_fail(m, TY_EINVAL, "x: expected at least %d dimensions, got %s", n, ty_describe(x));
  if (!ty_differs(m, weight) && !ty_differs(m, bias)) {
    ty_value arg[TY_MAX_ARGS];
    memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
    return (arg[0].t = ty_whole(m, x)) && ty_map_call(m, arg);
  }
  if (weight && !m->arg[1].is.n && n != 1) { /* the weight said how many dimensions */
    ty_value arg[TY_MAX_ARGS];
    memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
    arg[1].is = sizes_of(weight);
    ty_mapped shaped = *m;
    shaped.arg = arg;
    return map_row_norm(&shaped);
  }
  ty_tensor *y = without_parameters(m, 2, biased ? 3 : -1, 0);
  return y && ty_map_give_sample(m, 0, with_parameters(y, weight, bias, 0));
}

bool map_add_norm(ty_mapped *m) {
  const ty_add_norm_args *a = TY_ARGS(add_norm, m);
  if (a->p.f > 0)
    return ty_op_fail(m, TY_EUNSUPPORTED, "p: ty.vmap has no rule with dropout; use ty.dropout and a norm of its own");
  if (a->x.t->v.ndim == 0) return map_forward(m);
  if (ty_differs(m, a->weight.t) || ty_differs(m, a->bias.t)) {
    ty_tensor *y = without_parameters(m, 2, 3, 1);
    return y && ty_map_give_sample(m, 1, with_parameters(y, a->weight.t, a->bias.t, 0));
  }
  ty_value arg[TY_MAX_ARGS];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  arg[0].t = ty_whole(m, a->x.t);
  arg[1].t = ty_whole(m, a->residual.t);
  return arg[0].t && arg[1].t && ty_map_call(m, arg);
}

bool map_group_norm(ty_mapped *m) {
  const ty_group_norm_args *a = TY_ARGS(group_norm, m);
  if (!ty_differs(m, a->weight.t) && !ty_differs(m, a->bias.t)) return fold(m, 1);
  if (a->x.t->v.ndim < 2) return map_forward(m);
  ty_tensor *y = with_parameters(without_parameters(m, 2, 3, 0), a->weight.t, a->bias.t, a->x.t->v.ndim - 2);
  return y && ty_map_give_sample(m, 0, ty_activate(y, ty_activation_named(a->activation.s)));
}

/* Statistics or factors by channel: each sample has channels of its own. */
bool map_channels(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *whole[3];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (arg[0].t->v.ndim < 2) return map_forward(m);
  if (!(arg[0].t = channels_of(ty_whole(m, arg[0].t)))) return false;
  for (int i = 1; i < 3; i++)
    if (ty_has_tensor(&arg[i]) && !(arg[i].t = ty_merged_dims(ty_whole(m, arg[i].t), 0, 2))) return false;
  if (!ty_map_outputs(m, arg, whole) || !ty_map_give(m, 0, of_channels(whole[0], m->level->size))) return false;
  for (int i = 1; i < m->op->nout; i++)
    if (!ty_map_give(m, i, ty_split_dim(whole[i], 0, m->level->size))) return false;
  return true;
}

/* ---- positions as data ---- */

/* Positions in n rows of each sample as positions in the rows of all: [batch, ...]. One that is not in [-n, n)
 * becomes one that no tensor has, so that the kernel finds it. */
static ty_tensor *rows_of_all(ty_mapped *m, ty_tensor *index, int64_t n) {
  int64_t size[TY_MAX_DIMS + 1];
  ty_tensor *at = ty_to(ty_whole(m, index), TY_I64);
  if (!n) return at;
  for (int d = 0; d <= index->v.ndim; d++) size[d] = d ? 1 : m->level->size;
  ty_tensor *start = ty_reshape(ty_arange(0, m->level->size * n, n, TY_I64, ty_device_of(index)),
                                (ty_ints){ size, index->v.ndim + 1 });
  ty_tensor *from_start = at ? ty_where(ty_lt(at, 0), ty_add(at, n), at) : NULL;
  ty_tensor *inside = from_start ? ty_logical_and(ty_operand(ty_ge(from_start, 0)), ty_operand(ty_lt(from_start, n)))
                                 : NULL;
  return inside ? ty_where(inside, ty_add(from_start, start), m->level->size * n) : NULL;
}

static ty_tensor *flat(ty_tensor *t) { return t ? ty_reshape(t, TY_INTS(t->v.count)) : NULL; }

bool map_embedding(ty_mapped *m) {
  ty_tensor *weight = m->arg[0].t, *index = m->arg[1].t;
  if (!ty_differs(m, weight)) return ty_map_give(m, 0, ty_embedding(weight, ty_whole(m, index), m->arg[2].i));
  if (weight->v.ndim != 2) return map_forward(m);
  ty_tensor *rows = ty_merged_dims(ty_whole(m, weight), 0, 2);
  return ty_map_give(m, 0, ty_embedding(rows, rows_of_all(m, index, weight->v.size[0]), -1));
}

bool map_embedding_backward(ty_mapped *m) {
  const ty_embedding_backward_args *a = TY_ARGS(embedding_backward, m);
  ty_tensor *g = ty_whole(m, a->g.t), *index = a->index.t;
  if (a->padding_index.i >= 0 && g) {
    ty_tensor *padding = ty_unsqueeze(ty_eq(ty_whole(m, index), a->padding_index.i), -1);
    g = ty_masked_fill(g, padding, 0);
  }
  ty_tensor *at = rows_of_all(m, index, a->rows.i);
  return g && at &&
         ty_map_give(m, 0,
                     ty_split_dim(ty_embedding_backward(g, at, a->rows.i * m->level->size, -1), 0, m->level->size));
}

/* The dimension behind the batch first, and both as one. */
static ty_tensor *rows_first(ty_tensor *whole, int dim) {
  return ty_merged_dims(ty_moved_dim(whole, dim + 1, 1), 0, 2);
}

static ty_tensor *rows_back(ty_tensor *rows, int64_t batch, int dim) {
  return ty_moved_dim(ty_split_dim(rows, 0, batch), 1, dim + 1);
}

static bool dim_of(ty_mapped *m, int n, int *dim) {
  int64_t d = m->arg[1].i;
  if (d < -n || d >= n || n == 0)
    return ty_op_fail(m, TY_EINVAL, "dim: expected a dimension in [%d, %d], got %lld", -n, n - 1, (long long)d);
  *dim = (int)(d < 0 ? d + n : d);
  return true;
}

/* The op on a number as on a vector of one, whose result is a number. */
static bool of_number(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (!(arg[0].t = ty_unsqueeze(arg[0].t, 0))) return false;
  if (arg[2].t->v.ndim == 0 && !(arg[2].t = ty_unsqueeze(arg[2].t, 0))) return false;
  if (m->op->nargs > 3 && ty_has_tensor(&arg[3]) && !(arg[3].t = ty_reshape(arg[3].t, TY_INTS(arg[3].t->v.count))))
    return false;
  if (!ty_call_op((ty_op_id)m->op->id, arg, out)) return false;
  return ty_map_give_sample(m, 0, ty_reshape(ty_scope_add(out[0]), TY_NO_INTS));
}

bool map_index_select(ty_mapped *m) {
  ty_tensor *x = m->arg[0].t, *index = m->arg[2].t;
  int dim;
  if (x->v.ndim == 0) return of_number(m);
  if (!dim_of(m, x->v.ndim, &dim)) return false;
  if (!ty_differs(m, index)) return ty_map_give(m, 0, ty_index_select(x->batch->full, dim + 1, index));
  int64_t batch = m->level->size, k = index->v.count;
  if (!ty_differs(m, x)) { /* all that any sample wants, at once */
    ty_tensor *y = ty_index_select(x, dim, flat(index->batch->full));
    return ty_map_give(m, 0, ty_moved_dim(ty_split_dim(y, dim, batch), dim, 0));
  }
  ty_tensor *at = flat(rows_of_all(m, ty_reshape(index, TY_INTS(k)), x->v.size[dim]));
  return ty_map_give(m, 0, rows_back(ty_index_select(rows_first(x->batch->full, dim), 0, at), batch, dim));
}

bool map_index_select_backward(ty_mapped *m) {
  const ty_index_select_backward_args *a = TY_ARGS(index_select_backward, m);
  ty_tensor *g = a->g.t, *index = a->index.t;
  int dim;
  if (g->v.ndim == 0) return of_number(m);
  if (!dim_of(m, g->v.ndim, &dim)) return false;
  if (!ty_differs(m, index))
    return ty_map_give(m, 0, ty_index_select_backward(ty_whole(m, g), dim + 1, index, a->size.i));
  ty_tensor *at = flat(rows_of_all(m, ty_reshape(index, TY_INTS(index->v.count)), a->size.i));
  ty_tensor *dx = ty_index_select_backward(rows_first(ty_whole(m, g), dim), 0, at, a->size.i * m->level->size);
  return ty_map_give(m, 0, rows_back(dx, m->level->size, dim));
}

/* index_add and index_copy */
bool map_index_add(ty_mapped *m) {
  ty_tensor *x = m->arg[0].t, *index = m->arg[2].t;
  bool tensor = m->arg[3].kind == TY_TENSOR, differs = ty_differs(m, index);
  ty_value arg[] = { m->arg[0], m->arg[1], m->arg[2], m->arg[3] };
  ty_tensor *whole[1];
  int dim;
  if (x->v.ndim == 0) return of_number(m);
  if (!dim_of(m, x->v.ndim, &dim) || (tensor && arg[3].t->v.ndim != x->v.ndim)) return map_forward(m);
  arg[0].t = ty_whole(m, x);
  if (tensor) arg[3].t = ty_whole(m, arg[3].t);
  arg[1].i = dim + 1;
  if (differs) {
    arg[0].t = rows_first(arg[0].t, dim);
    if (tensor) arg[3].t = rows_first(arg[3].t, dim);
    arg[1].i = 0;
    arg[2].t = flat(rows_of_all(m, ty_reshape(index, TY_INTS(index->v.count)), x->v.size[dim]));
  }
  if (!arg[0].t || !arg[2].t || (tensor && !arg[3].t) || !ty_map_outputs(m, arg, whole)) return false;
  return ty_map_give(m, 0, differs ? rows_back(whole[0], m->level->size, dim) : whole[0]);
}

/* One more index, the sample itself, for the batch. Indexed dimensions come first, as where they are no neighbours. */
bool map_index_put(ty_mapped *m) {
  const ty_index_put__args *a = TY_ARGS(index_put_, m);
  ty_tensor *x = a->x.t, *index[TY_MAX_DIMS + 1];
  int64_t dims[TY_MAX_DIMS + 1], size[TY_MAX_DIMS + 1], order[TY_MAX_DIMS + 1];
  int n = a->indices.ts.n, rank = 0, at = 0;
  bool indexed[TY_MAX_DIMS] = { false };
  if (!ty_differs(m, x))
    return ty_op_fail(m, TY_EUNSUPPORTED,
                      "x: inside ty.vmap %s, which is the same for all samples, cannot be written with what differs by "
                      "sample",
                      ty_describe(x));
  if (n < 1 || n > TY_MAX_DIMS || (a->dims.is.n && a->dims.is.n != n)) return map_forward(m);
  for (int i = 0; i < n; i++) {
    ty_tensor *t = a->indices.ts.v[i];
    int64_t d = a->dims.is.n ? a->dims.is.v[i] : i;
    if (d < 0) d += x->v.ndim;
    if (ty_dtype_of(t) == TY_BOOL)
      return ty_op_fail(
          m, TY_EUNSUPPORTED,
          "indices: inside ty.vmap how many elements a mask selects would differ by sample; use ty.where");
    if (d < 0 || d >= x->v.ndim || indexed[d]) return map_forward(m);
    indexed[d] = true;
    dims[i] = d;
    if (t->v.ndim > rank) rank = t->v.ndim;
  }
  int before = 0, first = 0, last = x->v.ndim - 1;
  while (!indexed[first]) first++;
  while (!indexed[last]) last--;
  bool adjacent = last - first + 1 == n;
  if (adjacent) before = first;
  /* the indexed dimensions in their order, then the others */
  ty_tensor *in_order[TY_MAX_DIMS];
  for (int d = 0; d < x->v.ndim; d++)
    if (indexed[d]) order[at++] = d;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++)
      if (order[j] == dims[i]) in_order[j] = a->indices.ts.v[i];
  for (int d = 0; d < x->v.ndim; d++)
    if (!indexed[d]) order[at++] = d;
  for (int d = 0; d < x->v.ndim; d++) dims[d + 1] = order[d] + 1;
  dims[0] = 0;
  ty_tensor *target = ty_permute(x->batch->full, (ty_ints){ dims, x->v.ndim + 1 });
  for (int d = 0; d <= rank; d++) size[d] = d ? 1 : m->level->size;
  index[0] = ty_reshape(ty_arange(0, m->level->size, 1, TY_I64, ty_device_of(x)), (ty_ints){ size, rank + 1 });
  for (int i = 0; i < n; i++) {
    ty_tensor *t = in_order[i];
    index[i + 1] = ty_differs(m, t) ? ty_whole_of_rank(m, t, rank) : t;
    if (!index[i + 1]) return false;
  }
  ty_value values = a->values;
  if (ty_has_tensor(&values)) {
    ty_tensor *v = ty_differs(m, values.t) ? ty_whole_of_rank(m, values.t, rank + x->v.ndim - n) : values.t;
    if (before) { /* [before, indices, after]: the indices first */
      v = ty_whole_of_rank(m, values.t, rank + x->v.ndim - n);
      if (!v || v->v.ndim != 1 + rank + x->v.ndim - n) return map_forward(m);
      at = 0;
      dims[at++] = 0;
      for (int d = 0; d < rank; d++) dims[at++] = 1 + before + d;
      for (int d = 0; d < before; d++) dims[at++] = 1 + d;
      for (int d = 1 + before + rank; d < v->v.ndim; d++) dims[at++] = d;
      v = ty_permute(v, (ty_ints){ dims, v->v.ndim });
    }
    if (!v) return false;
    values = ty_value_of_tensor(v);
  }
  return target && index[0] &&
         ty_index_put_(target, (ty_tensors){ index, n + 1 }, values, a->accumulate.i, TY_NO_INTS) &&
         ty_map_give_sample(m, 0, x);
}

/* A composition, which writes into a copy: of x as each sample's own. */
bool map_index_put_copy(ty_mapped *m) {
  const ty_index_put_args *a = TY_ARGS(index_put, m);
  ty_tensor *x = ty_differs(m, a->x.t) ? a->x.t : ty_map_each(a->x.t, m->level);
  x = ty_clone(x);
  return x && ty_map_give_sample(m, 0, ty_index_put_(x, a->indices.ts, a->values, a->accumulate.i, a->dims.is));
}
