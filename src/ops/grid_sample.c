/* Images and volumes sampled at the positions of a grid, and grids of affine maps. Besides the kernels of the gradients
 * stands their composition of differentiable ops, which serves second derivatives, and GPUs, where adding up a gradient
 * at positions that come as data has an order by the ops that sort them. */
#include "../../kernels/grid_sample.h"
#include "op.h"

/* ---- options ---- */

static bool read_options(ty_call *c, int first, int dims, ty_p_grid_sample *p) {
  int mode = ty_check_choice(c, first, (const char *const[]){ "bilinear", "nearest", "bicubic", NULL });
  int padding = mode < 0
                    ? -1
                    : ty_check_choice(c, first + 1, (const char *const[]){ "zeros", "border", "reflection", NULL });
  if (padding < 0) return false;
  p->mode = (ty_grid_mode)mode;
  p->padding = (ty_grid_padding)padding;
  p->align_corners = c->arg[first + 2].i;
  return p->mode != TY_GRID_BICUBIC || dims == 2 ||
         ty_op_fail(c, TY_EINVAL, "mode: \"bicubic\" is for images [n, c, h, w] only");
}

/* The grid at `arg` for an image of `size`. */
static bool check_grid(ty_call *c, int arg, int dims, const int64_t *size) {
  const ty_tensor *grid = c->arg[arg].t;
  if (!ty_check_floats(c, arg)) return false;
  if (grid->v.ndim != dims + 2 || grid->v.size[0] != size[0] || grid->v.size[dims + 1] != dims)
    return ty_op_fail(c, TY_EINVAL, "grid: expected [%lld, %s, %d] for an image of %s, got %s", (long long)size[0],
                      dims == 2 ? "oh, ow" : "od, oh, ow", dims, ty_shape_text(dims + 2, size), ty_describe(grid));
  for (int d = 0; d < dims; d++)
    if (size[2 + d] < 1) return ty_op_fail(c, TY_EINVAL, "x: nothing to sample in %s", ty_shape_text(dims + 2, size));
  return true;
}

/* g against the image's and the grid's sizes. */
static bool check_gradient(ty_call *c, int dims, const int64_t *size, const ty_tensor *grid) {
  const ty_tensor *g = c->arg[0].t;
  bool ok = g->v.ndim == dims + 2 && g->v.size[0] == size[0] && g->v.size[1] == size[1];
  for (int d = 0; ok && d < dims; d++) ok = g->v.size[2 + d] == grid->v.size[1 + d];
  return ok || ty_op_fail(c, TY_EINVAL, "g: expected [%lld, %lld, ...] with the places of grid %s, got %s",
                          (long long)size[0], (long long)size[1], ty_describe(grid), ty_describe(g));
}

bool fwd_grid_sample(ty_call *c) {
  const ty_grid_sample_args *a = TY_ARGS(grid_sample, c);
  ty_tensor *x = a->x.t, *grid = a->grid.t;
  int dims = x->v.ndim - 2;
  ty_p_grid_sample p;
  int64_t size[5];
  if (!ty_check_ndim(c, 0, 4, 5, "[n, c, h, w] or [n, c, d, h, w]") || !read_options(c, 2, dims, &p) ||
      !check_grid(c, 1, dims, x->v.size))
    return false;
  ty_dtype dtype = ty_promote(ty_dtype_of(x), ty_dtype_of(grid));
  x = ty_to(x, dtype), grid = ty_to(grid, dtype);
  if (!x || !grid) return false;
  size[0] = x->v.size[0], size[1] = x->v.size[1];
  for (int d = 0; d < dims; d++) size[2 + d] = grid->v.size[1 + d];
  return ty_out(c, 0, ty_device_of(x), dtype, dims + 2, size) && ty_launch(c, (ty_tensor *[]){ x, grid }, 2, &p);
}

/* ---- the gradients as differentiable ops ---- */

/* Neighbours along one dimension, as in kernels/grid_sample.h, of positions [n, 1, places]. */
typedef struct axis {
  ty_tensor *at[4], *outside[4], *weight[4], *slope[4]; /* at: i64, within the image */
} axis;

static ty_tensor *odd(ty_tensor *x) { return ty_sub(x, ty_mul(ty_floor(ty_mul(x, 0.5)), 2.0)); }

/* u mirrored at low and high; *sign, which has no gradient, is 1 or -1 with the side that u is seen from. */
static ty_tensor *reflected(ty_tensor *u, double low, double high, ty_tensor **sign) {
  double span = high - low;
  if (span <= 0) {
    *sign = ty_zeros_like(u, TY_DTYPE_DEFAULT);
    return *sign;
  }
  ty_tensor *a = ty_sub(ty_detach(u), low), *far = ty_abs(a), *turns = ty_floor(ty_div(far, span));
  ty_tensor *rest = ty_sub(far, ty_mul(turns, span)), *back = ty_gt(odd(turns), 0.5);
  ty_tensor *there = ty_add(ty_where(back, ty_sub(ty_full_like(rest, span, TY_DTYPE_DEFAULT), rest), rest), low);
  *sign = ty_where(ty_lt(a, 0.0), -1.0, 1.0);
  *sign = ty_to(ty_where(back, ty_neg(*sign), *sign), ty_dtype_of(u));
  return ty_add(there, ty_mul(*sign, ty_sub(u, ty_detach(u))));
}

/* u brought into the image, and what its slope is multiplied by. */
static ty_tensor *inside(const ty_p_grid_sample *p, ty_tensor *u, int64_t size, ty_tensor **sign) {
  double last = (double)(size - 1);
  *sign = NULL;
  if (p->padding == TY_GRID_ZEROS || !u) return u;
  if (p->padding == TY_GRID_REFLECTION)
    u = p->align_corners ? reflected(u, 0, last, sign) : reflected(u, -0.5, last + 0.5, sign);
  if (!u) return NULL;
  ty_tensor *above = ty_gt(u, 0.0), *below = ty_lt(u, last);
  ty_tensor *free = above && below ? ty_logical_and(ty_operand(above), ty_operand(below)) : NULL;
  free = free ? ty_to(free, ty_dtype_of(u)) : NULL;
  *sign = *sign ? ty_mul(*sign, free) : free;
  return *sign ? ty_clamp(u, 0.0, last) : NULL;
}

static bool place(axis *a, int k, ty_tensor *u, int64_t size) {
  ty_tensor *low = ty_lt(u, 0.0), *high = ty_gt(u, (double)(size - 1));
  if (!low || !high) return false;
  a->outside[k] = ty_logical_or(ty_operand(low), ty_operand(high));
  a->at[k] = ty_to(ty_clamp(u, 0.0, (double)(size - 1)), TY_I64);
  return a->outside[k] && a->at[k];
}

/* Polynomial with coefficients from the highest power. */
static ty_tensor *polynomial(ty_tensor *t, double a, double b, double c, double d) {
  return ty_add(ty_mul(ty_add(ty_mul(ty_add(ty_mul(t, a), b), t), c), t), d);
}

/* Positions g of the grid along a dimension of `size`. */
static bool axis_of(const ty_p_grid_sample *p, ty_tensor *g, int64_t size, axis *a) {
  double by_grid = (double)(p->align_corners ? size - 1 : size) / 2;
  ty_tensor *sign = NULL;
  g = ty_where(ty_isnan(g), -1.0, g);
  ty_tensor *u = g ? ty_sub(ty_mul(ty_add(g, 1.0), by_grid), p->align_corners ? 0.0 : 0.5) : NULL;
  if (u && p->mode != TY_GRID_BICUBIC) u = inside(p, u, size, &sign);
  if (!u) return false;
  ty_tensor *fixed = ty_detach(u);
  if (p->mode == TY_GRID_NEAREST) return place(a, 0, ty_round(fixed), size);
  ty_tensor *before = ty_floor(fixed), *t = ty_sub(u, before);
  if (!t) return false;
  if (p->mode == TY_GRID_BILINEAR) {
    ty_tensor *slope = sign ? ty_mul(sign, by_grid) : ty_full_like(t, by_grid, TY_DTYPE_DEFAULT);
    a->weight[1] = t, a->weight[0] = ty_sub(ty_ones_like(t, TY_DTYPE_DEFAULT), t);
    a->slope[1] = slope, a->slope[0] = ty_neg(slope);
    return a->weight[0] && a->slope[0] && place(a, 0, before, size) && place(a, 1, ty_add(before, 1.0), size);
  }
  const double c = -0.75;
  for (int k = 0; k < 4; k++) {
    bool near = k == 1 || k == 2;
    ty_tensor *unused, *v = k == 0 ? ty_add(t, 1.0) : k == 1 ? t : ty_sub(ty_full_like(t, k - 1, TY_DTYPE_DEFAULT), t);
    double side = k < 2 ? by_grid : -by_grid;
    a->weight[k] = near ? polynomial(v, c + 2, -c - 3, 0, 1) : polynomial(v, c, -5 * c, 8 * c, -4 * c);
    a->slope[k] = ty_mul(
        near ? polynomial(v, 0, 3 * (c + 2), -2 * (c + 3), 0) : polynomial(v, 0, 3 * c, -10 * c, 8 * c), side);
    ty_tensor *at = inside(p, ty_add(before, (double)(k - 1)), size, &unused);
    if (!a->weight[k] || !a->slope[k] || !at || !place(a, k, ty_round(at), size)) return false;
  }
  return true;
}

typedef struct sampling {
  ty_p_grid_sample p;
  int dims, taps;
  int64_t size[5], places; /* of the image; positions of the grid */
  axis axes[3];            /* in the order of the image's dimensions */
} sampling;

static bool prepare(sampling *s, const ty_p_grid_sample *p, ty_tensor *grid, ty_ints size) {
  *s = (sampling){ .p = *p, .dims = size.n - 2, .taps = ty_grid_taps(p->mode), .places = 1 };
  for (int d = 0; d < size.n; d++) s->size[d] = size.v[d];
  for (int d = 0; d < s->dims; d++) s->places *= grid->v.size[1 + d];
  for (int d = 0; d < s->dims; d++) {
    ty_tensor *g = ty_select(grid, -1, s->dims - 1 - d);
    if (!g || !axis_of(p, ty_reshape(g, TY_INTS(size.v[0], 1, s->places)), size.v[2 + d], &s->axes[d])) return false;
  }
  return true;
}

/* The pixels [n, c, places] of neighbour k, which are counted along the last dimension first, and where it is outside. */
static bool neighbour(const sampling *s, int k, int tap[3], ty_tensor **at, ty_tensor **outside) {
  *at = *outside = NULL;
  for (int d = s->dims - 1; d >= 0; d--, k /= s->taps) tap[d] = k % s->taps;
  for (int d = 0; d < s->dims; d++) {
    const axis *a = &s->axes[d];
    *at = *at ? ty_add(ty_mul(*at, s->size[2 + d]), a->at[tap[d]]) : a->at[tap[d]];
    *outside = *outside ? ty_logical_or(ty_operand(*outside), ty_operand(a->outside[tap[d]])) : a->outside[tap[d]];
    if (!*at || !*outside) return false;
  }
  *at = ty_contiguous(ty_expand(*at, TY_INTS(s->size[0], s->size[1], s->places)));
  return *at;
}

static int neighbours(const sampling *s) { return s->dims == 2 ? s->taps * s->taps : s->taps * s->taps * s->taps; }

/* The product of the weights, along `by` of the slope; NULL and no error: 1. */
static ty_tensor *factor(const sampling *s, const int *tap, int by) {
  ty_tensor *w = NULL;
  for (int d = 0; d < s->dims; d++) {
    ty_tensor *one = d == by ? s->axes[d].slope[tap[d]] : s->axes[d].weight[tap[d]];
    if (one) w = w ? ty_mul(w, one) : one;
  }
  return w;
}

/* What each position's gradient g [n, c, places] adds to the pixels it is made of. */
static ty_tensor *spread(const sampling *s, ty_tensor *g) {
  int64_t pixels = 1;
  for (int d = 0; d < s->dims; d++) pixels *= s->size[2 + d];
  ty_tensor *dx = NULL, *at, *outside;
  for (int k = 0, tap[3]; k < neighbours(s); k++) {
    if (!neighbour(s, k, tap, &at, &outside)) return NULL;
    ty_tensor *w = factor(s, tap, -1), *part = ty_masked_fill(w ? ty_mul(g, w) : g, outside, 0.0);
    part = part ? ty_gather_backward(part, 2, at, TY_INTS(s->size[0], s->size[1], pixels)) : NULL;
    dx = !part ? NULL : dx ? ty_add(dx, part) : part;
    if (!dx) return NULL;
  }
  return ty_reshape(dx, (ty_ints){ s->size, s->dims + 2 });
}

/* The gradient for a grid of `size`. */
static ty_tensor *slopes(const sampling *s, ty_tensor *g, ty_tensor *x, ty_ints size) {
  ty_tensor *sum[3] = { NULL, NULL, NULL }, *list[3], *at, *outside;
  if (s->p.mode == TY_GRID_NEAREST) return ty_zeros(size, ty_dtype_of(g), ty_device_of(g));
  x = ty_reshape(x, TY_INTS(s->size[0], s->size[1], -1));
  for (int k = 0, tap[3]; k < neighbours(s); k++) {
    if (!x || !neighbour(s, k, tap, &at, &outside)) return NULL;
    ty_tensor *v = ty_masked_fill(ty_gather(x, 2, at), outside, 0.0);
    v = ty_sum(ty_mul(g, v), TY_INTS(1), true, TY_DTYPE_DEFAULT);
    for (int d = 0; d < s->dims; d++) {
      ty_tensor *part = ty_mul(v, factor(s, tap, d));
      sum[d] = sum[d] ? ty_add(sum[d], part) : part;
      if (!sum[d]) return NULL;
    }
  }
  for (int d = 0; d < s->dims; d++) list[s->dims - 1 - d] = ty_reshape(sum[d], TY_INTS(s->size[0], s->places));
  for (int d = 0; d < s->dims; d++)
    if (!list[d]) return NULL;
  ty_tensor *all = ty_stack((ty_tensors){ list, s->dims }, 2);
  return all ? ty_reshape(all, size) : NULL;
}

/* ---- the gradients ---- */

/* In f32 at least. */
static ty_tensor *widened(ty_tensor *t) { return ty_is_half(ty_dtype_of(t)) ? ty_to(t, TY_F32) : t; }

bool vjp_grid_sample(ty_vjp *c) {
  const ty_grid_sample_args *a = TY_ARGS(grid_sample, c);
  ty_ints size = ty_vjp_size(c, 0);
  const char *mode = a->mode.s, *padding = a->padding.s;
  bool corners = a->align_corners.i;
  if (ty_vjp_plain()) {
    if (c->need[0]) c->dx[0] = ty_grid_sample_backward_input(c->g[0], a->grid.t, size, mode, padding, corners);
    if (c->need[1]) c->dx[1] = ty_grid_sample_backward_grid(c->g[0], a->x.t, a->grid.t, mode, padding, corners);
    return true;
  }
  ty_p_grid_sample p = { .align_corners = corners };
  p.mode = mode[0] == 'n' ? TY_GRID_NEAREST : mode[2] == 'c' ? TY_GRID_BICUBIC : TY_GRID_BILINEAR;
  p.padding = padding[0] == 'z' ? TY_GRID_ZEROS : padding[0] == 'b' ? TY_GRID_BORDER : TY_GRID_REFLECTION;
  sampling s;
  ty_tensor *grid = widened(a->grid.t), *g = widened(c->g[0]), *x = widened(a->x.t);
  if (!grid || !g || !x || !prepare(&s, &p, grid, size)) return false;
  if (!(g = ty_reshape(g, TY_INTS(size.v[0], size.v[1], s.places)))) return false;
  if (c->need[0]) c->dx[0] = spread(&s, g);
  if (c->need[1]) c->dx[1] = slopes(&s, g, x, ty_vjp_size(c, 1));
  return true;
}

bool fwd_grid_sample_backward_input(ty_call *c) {
  const ty_grid_sample_backward_input_args *a = TY_ARGS(grid_sample_backward_input, c);
  ty_tensor *g = a->g.t, *grid = a->grid.t;
  ty_ints size = a->size.is;
  int dims = size.n - 2;
  ty_p_grid_sample p;
  if (dims != 2 && dims != 3) return ty_op_fail(c, TY_EINVAL, "size: expected four or five sizes, got %d", size.n);
  for (int i = 0; i < size.n; i++)
    if (size.v[i] < 0) return ty_op_fail(c, TY_EINVAL, "size: expected sizes, got %s", ty_shape_text(size.n, size.v));
  if (!read_options(c, 3, dims, &p) || !check_grid(c, 1, dims, size.v) || !check_gradient(c, dims, size.v, grid))
    return false;
  ty_dtype dtype = ty_promote(ty_dtype_of(g), ty_dtype_of(grid));
  g = ty_to(g, dtype), grid = ty_to(grid, dtype);
  if (!g || !grid) return false;
  if (ty_device_of(g) == TY_CPU || ty_device_of(g) == TY_META)
    return ty_out(c, 0, ty_device_of(g), dtype, size.n, size.v) && ty_launch(c, (ty_tensor *[]){ g, grid }, 2, &p);
  sampling s;
  g = widened(g), grid = widened(grid);
  if (!g || !grid || !prepare(&s, &p, grid, size)) return false;
  ty_tensor *dx = spread(&s, ty_reshape(g, TY_INTS(size.v[0], size.v[1], s.places)));
  return ty_out_set(c, 0, dx ? ty_to(dx, dtype) : NULL);
}

bool fwd_grid_sample_backward_grid(ty_call *c) {
  const ty_grid_sample_backward_grid_args *a = TY_ARGS(grid_sample_backward_grid, c);
  ty_tensor *g = a->g.t, *x = a->x.t, *grid = a->grid.t;
  int dims = x->v.ndim - 2;
  ty_p_grid_sample p;
  if (!ty_check_floats(c, 1) || !ty_check_ndim(c, 1, 4, 5, "[n, c, h, w] or [n, c, d, h, w]") ||
      !read_options(c, 3, dims, &p) || !check_grid(c, 2, dims, x->v.size) || !check_gradient(c, dims, x->v.size, grid))
    return false;
  ty_dtype dtype = ty_promote(ty_promote(ty_dtype_of(g), ty_dtype_of(x)), ty_dtype_of(grid));
  g = ty_to(g, dtype), x = ty_to(x, dtype), grid = ty_to(grid, dtype);
  return g && x && grid && ty_out_like(c, 0, grid, dtype) && ty_launch(c, (ty_tensor *[]){ g, x, grid }, 3, &p);
}

/* ---- affine maps ---- */

/* Positions of `count` pixels, from -1 to 1. */
static ty_tensor *positions(int64_t count, bool align_corners, ty_dtype dtype, int device) {
  double last = align_corners ? 1 : 1 - 1 / (double)count;
  if (count == 1) last = 0;
  return ty_linspace(-last, last, count, dtype, device);
}

bool fwd_affine_grid(ty_call *c) {
  const ty_affine_grid_args *a = TY_ARGS(affine_grid, c);
  ty_tensor *theta = a->theta.t;
  ty_ints size = a->size.is;
  int dims = size.n - 2;
  if (dims != 2 && dims != 3)
    return ty_op_fail(c, TY_EINVAL, "size: expected {n, c, h, w} or {n, c, d, h, w}, got %d integers", size.n);
  for (int i = 0; i < size.n; i++)
    if (size.v[i] < 1 || size.v[i] > INT32_MAX)
      return ty_op_fail(c, TY_EINVAL, "size: expected integers of at least 1, got %s", ty_shape_text(size.n, size.v));
  const int64_t *t = theta->v.size;
  if (theta->v.ndim != 3 || t[0] != size.v[0] || t[1] != dims || t[2] != dims + 1)
    return ty_op_fail(c, TY_EINVAL, "theta: expected [%lld, %d, %d] for size %s, got %s", (long long)size.v[0], dims,
                      dims + 1, ty_shape_text(size.n, size.v), ty_describe(theta));
  ty_tensor *y = ty_select(theta, 2, dims); /* the shift, and every coordinate by its column */
  int64_t shape[] = { t[0], 1, 1, 1, dims };
  if (dims == 2) shape[3] = dims;
  y = ty_reshape(y, (ty_ints){ shape, dims + 2 });
  for (int k = 0; k < dims; k++) {
    int64_t line[] = { 1, 1, 1, 1, 1 }, count = size.v[size.n - 1 - k];
    line[dims - k] = count;
    ty_tensor *along = positions(count, a->align_corners.i, ty_dtype_of(theta), ty_device_of(theta));
    along = ty_reshape(along, (ty_ints){ line, dims + 2 });
    y = ty_add(ty_mul(ty_reshape(ty_select(theta, 2, k), (ty_ints){ shape, dims + 2 }), along), y);
  }
  return ty_out_set(c, 0, y);
}
