/* What is where and how often: unique, searchsorted, bucketize, histogram, histc, bincount. */
#include "../autograd/autograd.h"

static bool fail_meta(ty_call *c, const ty_tensor *t, const char *what) {
  return ty_op_fail(c, TY_EUNSUPPORTED, "%s depends on the values, which %s does not have", what, ty_describe(t));
}

/* ---- equal neighbours ---- */

/* For x [n]: the first of each run of equal neighbours, the number of the run of each position, and lengths. A NaN
 * equals nothing, so that each is a run of its own. */
static bool runs_of(ty_tensor *x, ty_tensor **values, ty_tensor **run, ty_tensor **lengths) {
  int64_t n = x->v.size[0];
  int device = ty_device_of(x);
  if (n == 0) {
    *values = ty_clone(x);
    *run = ty_zeros(TY_INTS(0), TY_I64, device);
    *lengths = ty_zeros(TY_INTS(0), TY_I64, device);
    return *values && *run && *lengths;
  }
  ty_tensor *first = ty_ones(TY_INTS(1), TY_BOOL, device);
  ty_tensor *next = ty_slice(x, 0, 1, n, 1), *before = ty_slice(x, 0, 0, n - 1, 1);
  ty_tensor *other = next && before ? ty_ne(next, before) : NULL;
  ty_tensor *begins = first && other ? ty_concat(TY_LIST(first, other), 0) : NULL;
  ty_tensor *at = begins ? ty_nonzero(begins) : NULL;
  if (!at) return false;
  at = ty_reshape(at, TY_INTS(at->v.size[0]));
  ty_tensor *stop = at ? ty_full(TY_INTS(1), n, TY_I64, device) : NULL;
  if (!stop) return false;
  *values = ty_index_select(x, 0, at);
  *run = ty_sub(ty_cumsum(begins, 0, false), 1);
  *lengths = ty_sub(ty_concat(TY_LIST(ty_slice(at, 0, 1, at->v.size[0], 1), stop), 0), at);
  return *values && *run && *lengths;
}

static bool set_runs(ty_call *c, const ty_tensor *x, ty_tensor *values, ty_tensor *run, ty_tensor *lengths) {
  return ty_out_set(c, 0, values) && ty_out_set(c, 1, ty_reshape(run, (ty_ints){ x->v.size, x->v.ndim })) &&
         ty_out_set(c, 2, lengths);
}

bool fwd_unique(ty_call *c) {
  ty_tensor *x = TY_ARGS(unique, c)->x.t, *sorted[2], *values, *run, *lengths;
  if (ty_device_of(x) == TY_META) return fail_meta(c, x, "the number of different elements");
  ty_tensor *flat = ty_reshape(x, TY_INTS(x->v.count));
  if (!flat || !ty_sort(flat, 0, false, sorted) || !runs_of(sorted[0], &values, &run, &lengths)) return false;
  ty_tensor *inverse = ty_scatter(run, 0, sorted[1], ty_operand(run)); /* back to where they came from */
  return inverse && set_runs(c, x, values, inverse, lengths);
}

bool fwd_unique_consecutive(ty_call *c) {
  ty_tensor *x = TY_ARGS(unique_consecutive, c)->x.t, *values, *run, *lengths;
  if (ty_device_of(x) == TY_META) return fail_meta(c, x, "the number of different elements");
  ty_tensor *flat = ty_reshape(x, TY_INTS(x->v.count));
  return flat && runs_of(flat, &values, &run, &lengths) && set_runs(c, x, values, run, lengths);
}

/* ---- places in what is sorted ---- */

/* What both are compared in: floats as they are (halves in f32), integers in i64. */
static ty_dtype compared_in(const ty_tensor *a, const ty_tensor *b) {
  ty_dtype d = ty_promote(ty_dtype_of(a), ty_dtype_of(b));
  return d == TY_F64 ? TY_F64 : ty_is_float(d) ? TY_F32 : TY_I64;
}

/* A number as a tensor beside the lines that it is looked for in. */
static ty_tensor *looked_for(const ty_value *v, const ty_tensor *sorted) {
  if (v->kind == TY_TENSOR) return v->t;
  ty_dtype d = v->kind == TY_INT ? TY_I64 : ty_is_float(ty_dtype_of(sorted)) ? ty_dtype_of(sorted) : TY_F32;
  return ty_full(TY_NO_INTS, *v, d, ty_device_of(sorted));
}

static bool search(ty_call *c, ty_tensor *sorted, ty_tensor *values, bool right) {
  ty_dtype d = compared_in(sorted, values);
  ty_tensor *in[] = { ty_to(sorted, d), ty_to(values, d) };
  bool shared = sorted->v.ndim == 1;
  return in[0] && in[1] && ty_out_like(c, 0, values, TY_I64) &&
         ty_launch_kernel(TY_OP_searchsorted, c->out, 1, in, 2, &(ty_p_dim){ .flag = right, .flag2 = shared });
}

bool fwd_searchsorted(ty_call *c) {
  const ty_searchsorted_args *a = TY_ARGS(searchsorted, c);
  ty_tensor *s = a->sorted.t, *v = looked_for(&a->values, s);
  if (!v || !ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n]")) return false;
  bool fits = s->v.ndim == 1 || s->v.ndim == v->v.ndim;
  for (int d = 0; fits && s->v.ndim > 1 && d < s->v.ndim - 1; d++) fits = s->v.size[d] == v->v.size[d];
  if (!fits)
    return ty_op_fail(c, TY_EINVAL, "values: expected the dimensions of sorted %s but for the last, got %s",
                      ty_describe(s), ty_describe(v));
  return search(c, s, v, a->right.i);
}

bool fwd_bucketize(ty_call *c) {
  const ty_bucketize_args *a = TY_ARGS(bucketize, c);
  return ty_check_ndim(c, 1, 1, 1, "[n]") && ty_out_set(c, 0, ty_searchsorted(a->boundaries.t, a->x, a->right.i));
}

/* ---- counts ---- */

bool fwd_bincount(ty_call *c) {
  const ty_bincount_args *a = TY_ARGS(bincount, c);
  ty_tensor *x = a->x.t, *weight = a->weight.kind == TY_TENSOR ? a->weight.t : NULL;
  if (!ty_check_ndim(c, 0, 1, 1, "[n]")) return false;
  if (weight && !ty_same_shape(&weight->v, &x->v))
    return ty_op_fail(c, TY_EINVAL, "weight: expected the shape of x %s, got %s", ty_describe(x), ty_describe(weight));
  if (a->least.i < 0)
    return ty_op_fail(c, TY_EINVAL, "least: expected a number of at least 0, got %lld", (long long)a->least.i);
  if (ty_device_of(x) == TY_META) return fail_meta(c, x, "the number of counts");
  int64_t n = 0;
  if (x->v.count) {
    ty_tensor *low = ty_min(x, TY_NO_INTS, false), *high = ty_max(x, TY_NO_INTS, false);
    bool ok = low && high;
    int64_t least = ok ? (int64_t)ty_item(low, &ok) : 0;
    n = ok ? (int64_t)ty_item(high, &ok) + 1 : 0;
    if (!ok) return false;
    if (least < 0) return ty_op_fail(c, TY_EINVAL, "x: expected integers of at least 0, got %lld", (long long)least);
  }
  if (n < a->least.i) n = a->least.i;
  int device = ty_device_of(x);
  if (weight) {
    ty_tensor *none = ty_zeros(TY_INTS(n), ty_dtype_of(weight), device);
    return none && ty_out_set(c, 0, ty_index_add(none, 0, ty_to(x, TY_I64), weight));
  }
  if (n == 0) return ty_out_set(c, 0, ty_zeros(TY_INTS(0), TY_I64, device));
  if (device == TY_CPU) { /* three times as fast as looking for edges */
    ty_tensor *one = ty_expand(ty_ones(TY_INTS(1), TY_I64, device), TY_INTS(x->v.count));
    return ty_out_set(c, 0, ty_scatter_add(ty_zeros(TY_INTS(n), TY_I64, device), 0, ty_to(x, TY_I64), one));
  }
  ty_tensor *edges = ty_arange(0.0, (double)n + 1, TY_NO_NUMBER, TY_F64, device);
  return edges && ty_out_set(c, 0, ty_histogram_counts(ty_to(x, TY_F64), edges, true));
}

/* bins + 1 edges, evenly between low and high; where both are the same, between those of x. Scoped. */
static ty_tensor *even_edges(ty_call *c, ty_tensor *x, int64_t bins, double low, double high) {
  int device = ty_device_of(x);
  ty_dtype d = ty_dtype_of(x);
  if (bins < 1 || bins > INT32_MAX) {
    ty_op_fail(c, TY_EINVAL, "bins: expected a number from 1 to 2147483647, got %lld", (long long)bins);
    return NULL;
  }
  if (!(low <= high) || !isfinite(high - low)) {
    ty_op_fail(c, TY_EINVAL, "max: expected finite bounds with min <= max, got %g and %g", low, high);
    return NULL;
  }
  if (low == high && x->v.count == 0) low -= 0.5, high += 0.5;
  if (low < high) return ty_linspace(low, high, bins + 1, d, device);
  ty_tensor *least = ty_min(x, TY_NO_INTS, false), *most = ty_max(x, TY_NO_INTS, false);
  ty_tensor *equal = least && most ? ty_eq(least, most) : NULL;
  if (!equal) return NULL;
  ty_tensor *part = ty_linspace(0, 1, bins + 1, d, device),
            *rest = part ? ty_linspace(1, 0, bins + 1, d, device) : NULL;
  ty_tensor *from = rest ? ty_where(equal, ty_sub(least, 0.5), least) : NULL;
  ty_tensor *to = from ? ty_where(equal, ty_add(most, 0.5), most) : NULL;
  return to ? ty_add(ty_mul(from, rest), ty_mul(to, part)) : NULL; /* exact at both ends */
}

/* How many elements of x lie between neighbouring edges, i64 [bins]; `even`: these are evenly spaced. */
static ty_tensor *counts_of(ty_tensor *x, ty_tensor *edges, bool even) {
  return ty_histogram_counts(ty_reshape(x, TY_INTS(x->v.count)), edges, even);
}

/* What halves are counted in: their edges would be rounded too far. */
static ty_tensor *widened(ty_tensor *x) { return ty_is_half(ty_dtype_of(x)) ? ty_to(x, TY_F32) : x; }

bool fwd_histc(ty_call *c) {
  const ty_histc_args *a = TY_ARGS(histc, c);
  ty_tensor *x = widened(a->x.t), *edges = x ? even_edges(c, x, a->bins.i, a->min.f, a->max.f) : NULL;
  return edges && ty_out_set(c, 0, ty_to(counts_of(x, edges, true), ty_dtype_of(a->x.t)));
}

bool fwd_histogram_counts(ty_call *c) {
  const ty_histogram_counts_args *a = TY_ARGS(histogram_counts, c);
  ty_tensor *x = a->x.t, *edges = a->edges.t;
  if (!ty_check_ndim(c, 0, 1, 1, "[n]") || !ty_check_ndim(c, 1, 1, 1, "[bins + 1]") || !ty_check_floats(c, 1))
    return false;
  if (edges->v.size[0] < 2) return ty_op_fail(c, TY_EINVAL, "edges: expected at least two, got %s", ty_describe(edges));
  ty_dtype d = compared_in(x, edges);
  ty_tensor *in[] = { ty_to(x, d), ty_to(edges, d) };
  return in[0] && in[1] && ty_out(c, 0, ty_device_of(x), TY_I64, 1, TY_INTS(edges->v.size[0] - 1).v) &&
         ty_launch(c, in, 2, &(ty_p_dim){ .flag = a->even.i });
}

/* The sums of the weights between neighbouring edges. */
static ty_tensor *weights_between(ty_tensor *x, ty_tensor *edges, ty_tensor *weight) {
  int64_t bins = edges->v.size[0] - 1;
  int device = ty_device_of(x);
  ty_tensor *flat = ty_reshape(x, TY_INTS(x->v.count)), *low = ty_select(edges, 0, 0), *high = ty_select(edges, 0, -1);
  if (!flat || !low || !high) return NULL;
  ty_tensor *bin = ty_minimum(ty_searchsorted(edges, flat, true), bins); /* the last bin has its upper edge too */
  ty_tensor *from = ty_ge(flat, low), *to = from ? ty_le(flat, high) : NULL;
  ty_tensor *inside = to ? ty_logical_and(ty_operand(from), ty_operand(to)) : NULL;
  bin = inside && bin ? ty_where(inside, bin, 0) : NULL; /* 0: for all that is outside */
  ty_tensor *none = bin ? ty_zeros(TY_INTS(bins + 1), ty_dtype_of(weight), device) : NULL;
  ty_tensor *sums = none ? ty_index_add(none, 0, bin, ty_reshape(weight, TY_INTS(weight->v.count))) : NULL;
  return sums ? ty_slice(sums, 0, 1, bins + 1, 1) : NULL;
}

bool fwd_histogram(ty_call *c) {
  const ty_histogram_args *a = TY_ARGS(histogram, c);
  ty_tensor *x = widened(a->x.t), *weight = a->weight.kind == TY_TENSOR ? a->weight.t : NULL, *edges;
  ty_dtype d = ty_dtype_of(a->x.t);
  if (!x) return false;
  if (weight && (!ty_same_shape(&weight->v, &x->v) || !ty_is_float(ty_dtype_of(weight))))
    return ty_op_fail(c, TY_EINVAL, "weight: expected floats of the shape of x %s, got %s", ty_describe(a->x.t),
                      ty_describe(weight));
  bool even = a->bins.kind != TY_TENSOR;
  if (!even) {
    edges = a->bins.t;
    if (edges->v.ndim != 1 || edges->v.size[0] < 2 || !ty_is_float(ty_dtype_of(edges)))
      return ty_op_fail(c, TY_EINVAL, "bins: expected a number, or at least two edges as floats [bins + 1], got %s",
                        ty_describe(edges));
    edges = ty_to(edges, ty_dtype_of(x));
  } else {
    if (a->bins.kind != TY_INT)
      return ty_op_fail(c, TY_EINVAL, "bins: expected an integer or a tensor of edges, got %g", a->bins.f);
    bool low = a->min.kind != TY_NONE, high = a->max.kind != TY_NONE;
    if (low != high) return ty_op_fail(c, TY_EINVAL, "max: expected both min and max, or none, got one");
    edges = even_edges(c, x, a->bins.i, low ? ty_number_of(a->min).f : 0, high ? ty_number_of(a->max).f : 0);
  }
  if (!edges) return false;
  ty_tensor *sums = weight ? weights_between(x, edges, ty_to(weight, ty_dtype_of(x)))
                           : ty_to(counts_of(x, edges, even), ty_dtype_of(x));
  if (sums && a->density.i) {
    ty_tensor *width = ty_diff(edges, 1, 0, NULL, NULL), *total = ty_sum(sums, TY_NO_INTS, false, TY_DTYPE_DEFAULT);
    sums = width && total ? ty_div(ty_div(sums, total), width) : NULL;
  }
  return sums && ty_out_set(c, 0, ty_to(sums, d)) && ty_out_set(c, 1, ty_to(edges, d));
}
