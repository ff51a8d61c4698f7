/* Ops that make tensors: constants, ranges, random numbers, and filling in place. */
#include <string.h>

#include "../autograd/autograd.h"

static ty_dtype dtype_or(const ty_value *v, ty_dtype otherwise) {
  return v->i == TY_DTYPE_DEFAULT ? otherwise : (ty_dtype)v->i;
}
static int device_or_cpu(const ty_value *v) { return v->i == TY_DEVICE_DEFAULT ? TY_CPU : (int)v->i; }

/* A new tensor of a size argument as output 0. */
static bool out_sized(ty_call *c, int arg, const ty_value *dtype, const ty_value *device, ty_dtype otherwise) {
  ty_ints size = c->arg[arg].is;
  ty_dtype d = dtype_or(dtype, otherwise);
  if ((c->op->flags & FLOATS) && !ty_is_float(d))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected a float dtype (f64 f32 f16 bf16), got %s", ty_dtype_name[d]);
  if (size.n > TY_MAX_DIMS) return ty_op_fail(c, TY_EINVAL, "size: at most %d dimensions, got %d", TY_MAX_DIMS, size.n);
  for (int i = 0; i < size.n; i++)
    if (size.v[i] < 0)
      return ty_op_fail(c, TY_EINVAL, "size: expected sizes of at least 0, got %s", ty_shape_text(size.n, size.v));
  return ty_out(c, 0, device_or_cpu(device), d, size.n, size.v);
}

static bool fill_with(ty_tensor *t, ty_value value) {
  ty_p_numbers p = { .a = ty_number_of(value) };
  return ty_launch_kernel(TY_OP_fill_, &t, 1, NULL, 0, &p);
}

static bool fill(ty_tensor *t, int64_t value) { return fill_with(t, ty_value_of_int(value)); }

bool fwd_empty(ty_call *c) {
  const ty_empty_args *a = TY_ARGS(empty, c);
  return out_sized(c, 0, &a->dtype, &a->device, TY_F32);
}

bool fwd_zeros(ty_call *c) {
  const ty_zeros_args *a = TY_ARGS(zeros, c);
  return out_sized(c, 0, &a->dtype, &a->device, TY_F32) && fill(c->out[0], 0);
}

bool fwd_ones(ty_call *c) {
  const ty_ones_args *a = TY_ARGS(ones, c);
  return out_sized(c, 0, &a->dtype, &a->device, TY_F32) && fill(c->out[0], 1);
}

bool fwd_full(ty_call *c) {
  const ty_full_args *a = TY_ARGS(full, c);
  return out_sized(c, 0, &a->dtype, &a->device, TY_F32) && fill_with(c->out[0], a->value);
}

static bool out_like(ty_call *c, const ty_value *dtype) {
  ty_tensor *x = c->arg[0].t;
  ty_dtype d = dtype_or(dtype, ty_dtype_of(x));
  if ((c->op->flags & FLOATS) && !ty_is_float(d))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected a float dtype (f64 f32 f16 bf16), got %s", ty_dtype_name[d]);
  return ty_out_like(c, 0, x, d);
}

bool fwd_empty_like(ty_call *c) { return out_like(c, &c->arg[1]); }
bool fwd_zeros_like(ty_call *c) { return out_like(c, &c->arg[1]) && fill(c->out[0], 0); }
bool fwd_ones_like(ty_call *c) { return out_like(c, &c->arg[1]) && fill(c->out[0], 1); }
bool fwd_full_like(ty_call *c) { return out_like(c, &c->arg[2]) && fill_with(c->out[0], c->arg[1]); }

/* ---- ranges ---- */

static bool is_whole(ty_value v) { return v.kind == TY_INT || (v.f == floor(v.f) && fabs(v.f) < 0x1p63); }

/* How many elements the range has; the bounds are finite, and the step is not 0. */
static double range_count(ty_number start, ty_number stop, ty_number step, bool whole) {
  if (!whole) return ceil((stop.f - start.f) / step.f);
  if (step.i > 0 ? start.i >= stop.i : start.i <= stop.i) return 0;
  uint64_t way = step.i > 0 ? (uint64_t)stop.i - (uint64_t)start.i : (uint64_t)start.i - (uint64_t)stop.i;
  uint64_t stride = step.i > 0 ? (uint64_t)step.i : 0 - (uint64_t)step.i;
  return (double)(way / stride + (way % stride != 0));
}

bool fwd_arange(ty_call *c) {
  const ty_arange_args *a = TY_ARGS(arange, c);
  bool one = a->stop.kind == TY_NONE; /* arange(n) */
  ty_value from = one ? ty_value_of_int(0) : a->start, to = one ? a->start : a->stop;
  ty_value by = a->step.kind == TY_NONE ? ty_value_of_int(1) : a->step;
  ty_number start = ty_number_of(from), stop = ty_number_of(to), step = ty_number_of(by);
  if (step.f == 0 || !isfinite(start.f) || !isfinite(stop.f) || !isfinite(step.f))
    return ty_op_fail(c, TY_EINVAL, "step: expected finite bounds and a step that is not 0, got %g, %g, %g", start.f,
                      stop.f, step.f);
  bool whole = is_whole(from) && is_whole(to) && is_whole(by);
  double n = range_count(start, stop, step, whole);
  if (n > 0x1p53) return ty_op_fail(c, TY_EINVAL, "stop: %g elements are too many", n);
  int64_t count = n > 0 ? (int64_t)n : 0;
  ty_p_range p = { start, step, whole };
  return ty_out(c, 0, device_or_cpu(&a->device), dtype_or(&a->dtype, whole ? TY_I64 : TY_F32), 1, &count) &&
         ty_launch(c, NULL, 0, &p);
}

bool fwd_linspace(ty_call *c) {
  const ty_linspace_args *a = TY_ARGS(linspace, c);
  int64_t n = a->count.i;
  ty_dtype d = dtype_or(&a->dtype, TY_F32);
  if (n < 0) return ty_op_fail(c, TY_EINVAL, "count: expected at least 0, got %lld", (long long)n);
  if (!ty_is_float(d))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected a float dtype (f64 f32 f16 bf16), got %s", ty_dtype_name[d]);
  ty_p_range p = { .start.f = a->start.f, .step.f = n > 1 ? (a->stop.f - a->start.f) / (double)(n - 1) : 0 };
  return ty_out(c, 0, device_or_cpu(&a->device), d, 1, &n) && ty_launch(c, NULL, 0, &p);
}

bool fwd_eye(ty_call *c) {
  const ty_eye_args *a = TY_ARGS(eye, c);
  int64_t size[] = { a->n.i, a->m.i < 0 ? a->n.i : a->m.i };
  if (size[0] < 0) return ty_op_fail(c, TY_EINVAL, "n: expected at least 0, got %lld", (long long)size[0]);
  if (!ty_out(c, 0, device_or_cpu(&a->device), dtype_or(&a->dtype, TY_F32), 2, size) || !fill(c->out[0], 0))
    return false;
  ty_tensor *diagonal = ty_diagonal(c->out[0], 0, 0, 1);
  return diagonal && fill(diagonal, 1);
}

/* ---- random numbers ---- */

static bool draw(ty_op_id kernel, ty_tensor *t, double a, double b) {
  ty_p_random p = ty_draw(t->v.count, a, b);
  return ty_launch_kernel(kernel, &t, 1, NULL, 0, &p);
}

bool fwd_rand(ty_call *c) {
  const ty_rand_args *a = TY_ARGS(rand, c);
  return out_sized(c, 0, &a->dtype, &a->device, TY_F32) && draw(TY_OP_uniform_, c->out[0], 0, 1);
}

bool fwd_randn(ty_call *c) {
  const ty_randn_args *a = TY_ARGS(randn, c);
  return out_sized(c, 0, &a->dtype, &a->device, TY_F32) && draw(TY_OP_normal_, c->out[0], 0, 1);
}

bool fwd_rand_like(ty_call *c) { return out_like(c, &c->arg[1]) && draw(TY_OP_uniform_, c->out[0], 0, 1); }
bool fwd_randn_like(ty_call *c) { return out_like(c, &c->arg[1]) && draw(TY_OP_normal_, c->out[0], 0, 1); }

static bool check_bounds(ty_call *c, int64_t low, int64_t high) {
  if (low < high) return true;
  return ty_op_fail(c, TY_EINVAL, "high: expected more than low %lld, got %lld", (long long)low, (long long)high);
}

bool fwd_randint(ty_call *c) {
  const ty_randint_args *a = TY_ARGS(randint, c);
  return check_bounds(c, a->low.i, a->high.i) && out_sized(c, 2, &a->dtype, &a->device, TY_I64) &&
         draw(TY_OP_randint_, c->out[0], (double)a->low.i, (double)a->high.i);
}

bool fwd_randperm(ty_call *c) {
  const ty_randperm_args *a = TY_ARGS(randperm, c);
  int64_t n = a->n.i;
  ty_dtype d = dtype_or(&a->dtype, TY_I64);
  if (n < 0) return ty_op_fail(c, TY_EINVAL, "n: expected at least 0, got %lld", (long long)n);
  if (d != TY_I64 && d != TY_I32)
    return ty_op_fail(c, TY_EINVAL, "dtype: expected i64 or i32, got %s", ty_dtype_name[d]);
  if (!ty_out(c, 0, device_or_cpu(&a->device), d, 1, &n)) return false;
  ty_p_random p = ty_draw(2 * n, 0, 0); /* a 64-bit key per element */
  return ty_launch(c, NULL, 0, &p);
}

bool fwd_bernoulli(ty_call *c) {
  ty_tensor *p = TY_ARGS(bernoulli, c)->p.t;
  ty_p_random r = ty_draw(p->v.count, 0, 0);
  return ty_out_like(c, 0, p, ty_dtype_of(p)) && ty_launch(c, &p, 1, &r);
}

bool fwd_seeded_noise(ty_call *c) {
  static const char *const kinds[] = { "normal", "uniform", "poisson", NULL };
  const ty_seeded_noise_args *a = TY_ARGS(seeded_noise, c);
  ty_tensor *x = a->x.t;
  const int kind = ty_check_choice(c, 2, kinds);
  if (kind < 0) return false;
  const ty_p_seeded_noise p = { .seed = (uint64_t)a->seed.i, .kind = kind };
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &p);
}

bool fwd_multinomial(ty_call *c) {
  const ty_multinomial_args *a = TY_ARGS(multinomial, c);
  ty_tensor *p = a->probs.t;
  int64_t size[TY_MAX_DIMS], count = a->count.i;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n]")) return false;
  int last = p->v.ndim - 1;
  int64_t n = p->v.size[last];
  if (count < 1) return ty_op_fail(c, TY_EINVAL, "count: expected at least 1, got %lld", (long long)count);
  if (n == 0 || (!a->replacement.i && count > n))
    return ty_op_fail(c, TY_EINVAL, "count: cannot draw %lld of %lld without replacement from probs %s",
                      (long long)count, (long long)n, ty_describe(p));
  if (count > INT64_MAX / (p->v.count > n ? p->v.count / n : 1))
    return ty_op_fail(c, TY_EINVAL, "count: %lld for each row of probs %s are too many", (long long)count,
                      ty_describe(p));
  memcpy(size, p->v.size, sizeof size);
  size[last] = count;
  ty_p_random r = ty_draw(a->replacement.i ? p->v.count / n * count : p->v.count, (double)count,
                          (double)a->replacement.i);
  return ty_out(c, 0, ty_device_of(p), TY_I64, p->v.ndim, size) && ty_launch(c, &p, 1, &r);
}

/* ---- filling in place ---- */

static bool target(ty_call *c) { return (c->out[0] = ty_retain(c->arg[0].t)) != NULL; }

bool fwd_fill_(ty_call *c) { return target(c) && fill_with(c->out[0], TY_ARGS(fill_, c)->value); }

bool fwd_uniform_(ty_call *c) {
  const ty_uniform__args *a = TY_ARGS(uniform_, c);
  return target(c) && draw(TY_OP_uniform_, c->out[0], a->low.f, a->high.f);
}

bool fwd_normal_(ty_call *c) {
  const ty_normal__args *a = TY_ARGS(normal_, c);
  if (!(a->std.f >= 0)) return ty_op_fail(c, TY_EINVAL, "std: expected at least 0, got %g", a->std.f);
  return target(c) && draw(TY_OP_normal_, c->out[0], a->mean.f, a->std.f);
}

bool fwd_randint_(ty_call *c) {
  const ty_randint__args *a = TY_ARGS(randint_, c);
  return check_bounds(c, a->low.i, a->high.i) && target(c) &&
         draw(TY_OP_randint_, c->out[0], (double)a->low.i, (double)a->high.i);
}
