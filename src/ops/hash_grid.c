/* Multi-resolution hash grids, alone and with a small network behind them, and their gradients. Beside the kernels
 * stands what is made of differentiable ops, which serves second derivatives, and GPUs, where sums at rows that come as
 * data have an order by the ops that sort them. */
#include <string.h>

#include "../../kernels/hash_grid.h"
#include "op.h"

/* ---- what the ops are given ---- */

/* x [n, 2 or 3] at `arg`, then, at `options`, resolutions and entries. Returns the rows of the table, or -1 after an
 * error. */
static int64_t read_grid(ty_call *c, int arg, int options, ty_p_hash_grid *p) {
  const ty_tensor *x = c->arg[arg].t;
  const ty_ints list = c->arg[options].is;
  const int64_t entries = c->arg[options + 1].i;
  int64_t rows = 0;
  if (!ty_check_floats(c, arg) || !ty_check_ndim(c, arg, 2, 2, "[n, 2 or 3]")) return -1;
  *p = (ty_p_hash_grid){ .dims = (int)x->v.size[1], .entries = entries };
  if (x->v.size[1] != 2 && x->v.size[1] != 3)
    return ty_op_fail(c, TY_EINVAL, "%s: expected [n, 2 or 3], got %s", c->op->args[arg].name, ty_describe(x)) - 1;
  if (entries < 2 || entries > TY_HASH_ENTRIES || (entries & (entries - 1)))
    return ty_op_fail(c, TY_EINVAL, "entries: expected a power of two from 2 to %d, got %lld", TY_HASH_ENTRIES,
                      (long long)entries) -
           1;
  if (list.n < 1 || list.n > TY_HASH_LEVELS)
    return ty_op_fail(c, TY_EINVAL, "resolutions: expected 1 to %d levels, got %d", TY_HASH_LEVELS, list.n) - 1;
  for (p->levels = 0; p->levels < list.n; p->levels++) {
    const int64_t r = list.v[p->levels];
    if (r < 1 || r > TY_HASH_RESOLUTION)
      return ty_op_fail(c, TY_EINVAL, "resolutions: expected 1 to %d cells a side, got %lld", TY_HASH_RESOLUTION,
                        (long long)r) -
             1;
    p->resolution[p->levels] = (int32_t)r;
    rows += ty_hash_rows(p, p->levels);
  }
  return rows <= INT32_MAX
             ? rows
             : ty_op_fail(c, TY_EINVAL, "entries: expected fewer than 2^31 rows in all, got %lld", (long long)rows) - 1;
}

static bool check_table(ty_call *c, int arg, int64_t rows) {
  const ty_tensor *table = c->arg[arg].t;
  if (!ty_check_floats(c, arg)) return false;
  return (table->v.ndim == 2 && table->v.size[0] == rows && table->v.size[1] > 0 && table->v.size[1] <= 64) ||
         ty_op_fail(c, TY_EINVAL,
                    "table: expected [%lld, features], the rows of all levels and 1 to 64 features, got %s",
                    (long long)rows, ty_describe(table));
}

/* A tensor of this shape. */
static bool check_shape(ty_call *c, int arg, int ndim, const int64_t *size) {
  const ty_tensor *t = c->arg[arg].t;
  if (!ty_check_floats(c, arg)) return false;
  return (t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0) ||
         ty_op_fail(c, TY_EINVAL, "%s: expected %s, got %s", c->op->args[arg].name, ty_shape_text(ndim, size),
                    ty_describe(t));
}

/* Those tensors in the widest dtype among them, in place; NULL stays. */
static bool together(ty_tensor **list, int n) {
  ty_dtype dtype = ty_dtype_of(list[0]);
  for (int i = 1; i < n; i++)
    if (list[i]) dtype = ty_promote(dtype, ty_dtype_of(list[i]));
  for (int i = 0; i < n; i++)
    if (list[i] && !(list[i] = ty_to(list[i], dtype))) return false;
  return true;
}

/* ---- differentiable ops ---- */

typedef struct cells {
  ty_tensor *row;              /* i32 [n, levels, corners], of the whole table */
  ty_tensor *far[3], *near[3]; /* [n, levels]: shares of the corners with the higher coordinate, and of the others */
  ty_tensor *slope[3];         /* [n, levels]: of `far` by x */
  int dims;
  int64_t n, levels, features;
} cells;

static bool cells_of(ty_tensor *x, ty_ints resolutions, int64_t entries, int64_t features, cells *s) {
  *s = (cells){ .dims = (int)x->v.size[1], .n = x->v.size[0], .levels = resolutions.n, .features = features };
  double sides[TY_HASH_LEVELS];
  ty_tensor *found[2];
  for (int i = 0; i < resolutions.n; i++) sides[i] = (double)resolutions.v[i];
  ty_tensor *side = ty_from_data(sides, TY_F64, 1, (int64_t[]){ resolutions.n });
  side = side ? ty_to(ty_to_device(side, ty_device_of(x), false), ty_dtype_of(x)) : NULL;
  if (!side || !ty_hash_corners(x, resolutions, entries, found)) return false;
  s->row = found[0];
  ty_tensor *inside = ty_clamp(x, 0.0, 1.0), *fixed = ty_detach(x), *low = ty_ge(fixed, 0.0), *high = ty_le(fixed, 1.0);
  ty_tensor *free = low && high ? ty_logical_and(ty_operand(low), ty_operand(high)) : NULL;
  if (!inside || !free || !(free = ty_to(free, ty_dtype_of(x)))) return false;
  for (int j = 0; j < s->dims; j++) {
    ty_tensor *at = ty_mul(ty_unsqueeze(ty_select(inside, 1, j), 1), side);
    ty_tensor *cell = at ? ty_minimum(ty_floor(ty_detach(at)), ty_sub(side, 1.0)) : NULL;
    if (!cell) return false;
    s->far[j] = ty_sub(at, cell);
    s->near[j] = ty_sub(ty_ones_like(s->far[j], TY_DTYPE_DEFAULT), s->far[j]);
    s->slope[j] = ty_mul(ty_unsqueeze(ty_select(free, 1, j), 1), side);
    if (!s->far[j] || !s->near[j] || !s->slope[j]) return false;
  }
  return true;
}

/* What corner k weighs, but for dimension `without`; NULL and no error where nothing is left. */
static ty_tensor *share(const cells *s, int k, int without) {
  ty_tensor *w = NULL;
  for (int j = 0; j < s->dims; j++) {
    ty_tensor *one = k >> j & 1 ? s->far[j] : s->near[j];
    if (j != without) w = w ? ty_mul(w, one) : one;
  }
  return w;
}

static ty_tensor *rows_of_corner(const cells *s, int k) { return ty_contiguous(ty_select(s->row, 2, k)); }

/* The gradient of a table of `rows`: g [n, levels * features] goes to the corners by their shares. */
static ty_tensor *spread(const cells *s, ty_tensor *g, int64_t rows) {
  ty_tensor *sum = NULL;
  if (!(g = ty_reshape(g, TY_INTS(s->n, s->levels, s->features)))) return NULL;
  for (int k = 0; k < 1 << s->dims; k++) {
    ty_tensor *part = ty_mul(g, ty_unsqueeze(share(s, k, -1), -1));
    part = part ? ty_embedding_backward(part, rows_of_corner(s, k), rows, -1) : NULL;
    sum = !part ? NULL : sum ? ty_add(sum, part) : part;
    if (!sum) return NULL;
  }
  return sum;
}

/* The gradient of x. */
static ty_tensor *slopes(const cells *s, ty_tensor *g, ty_tensor *table) {
  ty_tensor *sum[3] = { NULL, NULL, NULL };
  if (!(g = ty_reshape(g, TY_INTS(s->n, s->levels, s->features)))) return NULL;
  for (int k = 0; k < 1 << s->dims; k++) {
    ty_tensor *v = ty_mul(g, ty_embedding(table, rows_of_corner(s, k), -1));
    v = v ? ty_sum(v, TY_INTS(-1), false, TY_DTYPE_DEFAULT) : NULL;
    for (int j = 0; j < s->dims; j++) {
      ty_tensor *part = v ? ty_mul(ty_mul(v, share(s, k, j)), s->slope[j]) : NULL;
      if (!part) return NULL;
      sum[j] = !sum[j] ? (k >> j & 1 ? part : ty_neg(part)) : k >> j & 1 ? ty_add(sum[j], part) : ty_sub(sum[j], part);
    }
  }
  for (int j = 0; j < s->dims; j++)
    if (!sum[j] || !(sum[j] = ty_sum(sum[j], TY_INTS(1), false, TY_DTYPE_DEFAULT))) return NULL;
  return ty_stack((ty_tensors){ sum, s->dims }, 1);
}

/* ---- the grid ---- */

bool fwd_hash_grid(ty_call *c) {
  const ty_hash_grid_args *a = TY_ARGS(hash_grid, c);
  ty_p_hash_grid p;
  const int64_t rows = read_grid(c, 0, 2, &p);
  if (rows < 0 || !check_table(c, 1, rows)) return false;
  ty_tensor *in[] = { a->x.t, a->table.t };
  if (!together(in, 2)) return false;
  return ty_out(c, 0, ty_device_of(in[0]), ty_dtype_of(in[0]), 2,
                (int64_t[]){ in[0]->v.size[0], p.levels * in[1]->v.size[1] }) &&
         ty_launch(c, in, 2, &p);
}

/* Gradients from that of the features. */
static bool grid_gradients(ty_vjp *c, ty_tensor *g, ty_tensor *x, ty_tensor *table, ty_ints resolutions,
                           int64_t entries) {
  if (ty_vjp_plain()) {
    if (c->need[0]) c->dx[0] = ty_hash_grid_backward_input(g, x, table, resolutions, entries);
    if (c->need[1]) c->dx[1] = ty_hash_grid_backward_table(g, x, resolutions, entries);
    return true;
  }
  cells s;
  ty_tensor *list[] = { g, x, table };
  if (ty_is_half(ty_dtype_of(g)) && !(list[0] = ty_to(g, TY_F32))) return false;
  if (!together(list, 3) || !cells_of(list[1], resolutions, entries, table->v.size[1], &s)) return false;
  if (c->need[0] && !(c->dx[0] = slopes(&s, list[0], list[2]))) return false;
  return !c->need[1] || (c->dx[1] = spread(&s, list[0], table->v.size[0]));
}

bool vjp_hash_grid(ty_vjp *c) {
  const ty_hash_grid_args *a = TY_ARGS(hash_grid, c);
  return grid_gradients(c, c->g[0], a->x.t, a->table.t, a->resolutions.is, a->entries.i);
}

/* g of as many features a level as divide it. Returns them, or 0 after an error. */
static int64_t check_features(ty_call *c, const ty_tensor *x, const ty_p_hash_grid *p) {
  const ty_tensor *g = c->arg[0].t;
  const bool ok = g->v.ndim == 2 && g->v.size[0] == x->v.size[0] && g->v.size[1] > 0 && g->v.size[1] % p->levels == 0 &&
                  g->v.size[1] / p->levels <= 64;
  if (!ok)
    ty_op_fail(c, TY_EINVAL, "g: expected [%lld, %d levels * 1 to 64 features], got %s", (long long)x->v.size[0],
               p->levels, ty_describe(g));
  return ok ? g->v.size[1] / p->levels : 0;
}

bool fwd_hash_grid_backward_table(ty_call *c) {
  const ty_hash_grid_backward_table_args *a = TY_ARGS(hash_grid_backward_table, c);
  ty_p_hash_grid p;
  const int64_t rows = read_grid(c, 1, 2, &p);
  int64_t features;
  if (rows < 0 || !(features = check_features(c, a->x.t, &p))) return false;
  ty_tensor *in[] = { a->g.t, a->x.t };
  if (!together(in, 2)) return false;
  const int device = ty_device_of(in[0]);
  const ty_dtype dtype = ty_dtype_of(in[0]);
  if (device == TY_CPU || device == TY_META)
    return ty_out(c, 0, device, dtype, 2, (int64_t[]){ rows, features }) && ty_launch(c, in, 2, &p);
  cells s;
  for (int i = 0; i < 2; i++)
    if (ty_is_half(dtype) && !(in[i] = ty_to(in[i], TY_F32))) return false;
  ty_tensor *d = cells_of(in[1], a->resolutions.is, a->entries.i, features, &s) ? spread(&s, in[0], rows) : NULL;
  return ty_out_set(c, 0, d ? ty_to(d, dtype) : NULL);
}

bool fwd_hash_grid_backward_input(ty_call *c) {
  const ty_hash_grid_backward_input_args *a = TY_ARGS(hash_grid_backward_input, c);
  ty_p_hash_grid p;
  const int64_t rows = read_grid(c, 1, 3, &p);
  if (rows < 0 || !check_table(c, 2, rows) ||
      !check_shape(c, 0, 2, (int64_t[]){ a->x.t->v.size[0], p.levels * a->table.t->v.size[1] }))
    return false;
  ty_tensor *in[] = { a->g.t, a->x.t, a->table.t };
  return together(in, 3) && ty_out_like(c, 0, in[1], ty_dtype_of(in[1])) && ty_launch(c, in, 3, &p);
}

bool fwd_hash_corners(ty_call *c) {
  const ty_hash_corners_args *a = TY_ARGS(hash_corners, c);
  ty_tensor *x = a->x.t;
  ty_p_hash_grid p;
  if (read_grid(c, 0, 1, &p) < 0) return false;
  const int64_t size[] = { x->v.size[0], p.levels, 1 << p.dims };
  return ty_out(c, 0, ty_device_of(x), TY_I32, 3, size) && ty_out(c, 1, ty_device_of(x), ty_dtype_of(x), 3, size) &&
         ty_launch(c, &x, 1, &p);
}

/* ---- a network behind it ---- */

/* Arguments of the network from `first` on: first [width, features], last [out, width], resolutions, entries and hidden
 * [layers, width, width]. */
static bool check_network(ty_call *c, int first, int64_t features) {
  const ty_tensor *w = c->arg[first].t, *last = c->arg[first + 1].t, *hidden = c->arg[first + 4].t;
  if (!ty_check_floats(c, first) || !ty_check_floats(c, first + 1) || (hidden && !ty_check_floats(c, first + 4)))
    return false;
  if (w->v.ndim != 2 || w->v.size[1] != features || w->v.size[0] < 1)
    return ty_op_fail(c, TY_EINVAL, "first: expected [width, %lld], the features of all levels, got %s",
                      (long long)features, ty_describe(w));
  const int64_t width = w->v.size[0];
  if (last->v.ndim != 2 || last->v.size[1] != width || last->v.size[0] < 1)
    return ty_op_fail(c, TY_EINVAL, "last: expected [out, %lld] for first %s, got %s", (long long)width, ty_describe(w),
                      ty_describe(last));
  if (hidden && (hidden->v.ndim != 3 || hidden->v.size[1] != width || hidden->v.size[2] != width))
    return ty_op_fail(c, TY_EINVAL, "hidden: expected [layers, %lld, %lld] for first %s, got %s", (long long)width,
                      (long long)width, ty_describe(w), ty_describe(hidden));
  return true;
}

/* Of what hash_field keeps of x for its gradient: blocks, lines, points. */
static void sizes_kept(const ty_tensor *x, const ty_tensor *first, const ty_tensor *hidden, int64_t *size) {
  size[0] = (x->v.size[0] + TY_HASH_BLOCK - 1) / TY_HASH_BLOCK;
  size[1] = first->v.size[1] + (1 + (hidden ? hidden->v.size[0] : 0)) * first->v.size[0];
  size[2] = TY_HASH_BLOCK;
}

bool fwd_hash_field(ty_call *c) {
  const ty_hash_field_args *a = TY_ARGS(hash_field, c);
  ty_p_hash_grid p;
  const int64_t rows = read_grid(c, 0, 4, &p);
  if (rows < 0 || !check_table(c, 1, rows) || !check_network(c, 2, p.levels * a->table.t->v.size[1])) return false;
  ty_tensor *in[] = { a->x.t, a->table.t, a->first.t, a->last.t, a->hidden.t };
  if (!together(in, 5)) return false;
  const int device = ty_device_of(in[0]);
  const ty_dtype dtype = ty_dtype_of(in[0]);
  const int64_t n = in[0]->v.size[0];
  int64_t kept[3];
  sizes_kept(in[0], in[2], in[4], kept);
  /* On GPUs making it anew costs less than memory. */
  if (!c->record || ty_is_half(dtype) || (device != TY_CPU && device != TY_META)) kept[0] = 0;
  return ty_out(c, 0, device, dtype, 2, (int64_t[]){ n, in[3]->v.size[0] }) && ty_out(c, 1, device, dtype, 3, kept) &&
         ty_launch(c, in, 5, &p);
}

bool fwd_hash_field_backward(ty_call *c) {
  const ty_hash_field_backward_args *a = TY_ARGS(hash_field_backward, c);
  ty_p_hash_grid p;
  const int64_t rows = read_grid(c, 1, 5, &p);
  if (rows < 0 || !check_table(c, 2, rows) || !check_network(c, 3, p.levels * a->table.t->v.size[1]) ||
      !check_shape(c, 0, 2, (int64_t[]){ a->x.t->v.size[0], a->last.t->v.size[0] }))
    return false;
  ty_tensor *in[] = { a->g.t, a->x.t, a->table.t, a->first.t, a->last.t, a->hidden.t, a->kept.t };
  int64_t kept[3];
  sizes_kept(in[1], in[3], in[5], kept);
  if ((in[6] && !check_shape(c, 9, 3, kept)) || !together(in, 7)) return false;
  const int device = ty_device_of(in[0]);
  const ty_dtype dtype = ty_dtype_of(in[0]);
  const int64_t width = in[3]->v.size[0], none[] = { 0, width, width }, all = in[3]->v.size[1];
  const int64_t features = in[2]->v.size[1], n = in[1]->v.size[0];
  const bool whole = a->whole.i, apart = whole && device != TY_CPU && device != TY_META;
  if (apart) { /* sums at rows that come as data are for the ops that sort them */
    ty_tensor *d[5];
    if (!ty_hash_field_backward(in[0], in[1], in[2], in[3], in[4], a->resolutions.is, a->entries.i, in[5], false, NULL,
                                d))
      return false;
    d[4] = ty_hash_grid_backward_table(d[0], in[1], a->resolutions.is, a->entries.i);
    for (int i = 1; i < 5; i++)
      if (!ty_out_set(c, i, d[i])) return false;
    return ty_out(c, 0, device, dtype, 2, (int64_t[]){ 0, all });
  }
  return ty_out(c, 0, device, dtype, 2, (int64_t[]){ whole ? 0 : n, all }) && ty_out_like(c, 1, in[3], dtype) &&
         ty_out_like(c, 2, in[4], dtype) && ty_out(c, 3, device, dtype, 3, in[5] ? in[5]->v.size : none) &&
         ty_out(c, 4, device, dtype, 2, (int64_t[]){ whole ? rows : 0, features }) && ty_launch(c, in, 7, &p);
}

enum { MOST_LAYERS = 64 };

/* The layers one by one; returns the gradient of the features. */
static ty_tensor *layer_gradients(ty_vjp *c, const ty_hash_field_args *a) {
  ty_tensor *list[] = { c->g[0], a->first.t, a->last.t, a->hidden.t, a->x.t, a->table.t };
  if (ty_is_half(ty_dtype_of(list[0])) && !(list[0] = ty_to(list[0], TY_F32))) return NULL;
  if (!together(list, 6)) return NULL;
  ty_tensor *g = list[0], *first = list[1], *last = list[2], *hidden = list[3], *h[MOST_LAYERS + 2];
  const int64_t layers = hidden ? hidden->v.size[0] : 0;
  if (layers > MOST_LAYERS) {
    ty_op_fail(c, TY_EUNSUPPORTED, "hidden: second derivatives through more than %d layers are not supported",
               MOST_LAYERS);
    return NULL;
  }
  h[0] = ty_hash_grid(list[4], list[5], a->resolutions.is, a->entries.i);
  for (int64_t i = 0; i <= layers; i++)
    if (!(h[i + 1] = ty_relu(ty_linear(h[i], i ? ty_select(hidden, 0, i - 1) : first, NULL, NULL, "none"))))
      return NULL;
  ty_tensor *parts[MOST_LAYERS];
  c->dx[3] = ty_matmul(ty_transpose(g, 0, 1), h[layers + 1]);
  g = ty_matmul(g, last);
  for (int64_t i = layers; i >= 0 && g; i--) {
    ty_tensor *open = ty_to(ty_gt(ty_detach(h[i + 1]), 0.0), ty_dtype_of(g));
    if (!open || !(g = ty_mul(g, open))) return NULL;
    ty_tensor *d = ty_matmul(ty_transpose(g, 0, 1), h[i]);
    if (i) parts[i - 1] = d;
    else c->dx[2] = d;
    if (!d || !(g = ty_matmul(g, i ? ty_select(hidden, 0, i - 1) : first))) return NULL;
  }
  if (c->need[4])
    c->dx[4] = layers ? ty_stack((ty_tensors){ parts, (int)layers }, 0) : ty_zeros_like(hidden, TY_DTYPE_DEFAULT);
  return g;
}

bool vjp_hash_field(ty_vjp *c) {
  const ty_hash_field_args *a = TY_ARGS(hash_field, c);
  ty_ints resolutions = a->resolutions.is;
  if (!ty_vjp_plain()) {
    ty_tensor *g = layer_gradients(c, a);
    return g && grid_gradients(c, g, a->x.t, a->table.t, resolutions, a->entries.i);
  }
  ty_tensor *d[5];
  const bool whole = c->need[1] && !c->need[0];
  if (!ty_hash_field_backward(c->g[0], a->x.t, a->table.t, a->first.t, a->last.t, resolutions, a->entries.i,
                              a->hidden.t, whole, c->out && c->out[1] && c->out[1]->v.count ? c->out[1] : NULL, d))
    return false;
  if (c->need[2]) c->dx[2] = d[1];
  if (c->need[3]) c->dx[3] = d[2];
  if (c->need[4]) c->dx[4] = d[3];
  if (whole) c->dx[1] = d[4];
  return whole || grid_gradients(c, d[0], a->x.t, a->table.t, resolutions, a->entries.i);
}
