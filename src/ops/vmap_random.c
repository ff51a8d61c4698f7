/* Rules of ty.vmap for ops that draw random numbers: different ones for each sample, or the same for all. */
#include <string.h>

#include "map_rules.h"

static bool wants_error(ty_mapped *m) {
  return m->level->randomness == TY_RANDOM_ERROR &&
         !ty_op_fail(m, TY_EUNSUPPORTED,
                     "inside ty.vmap random numbers are \"different\" for each sample or the \"same\" for all: pass "
                     "randomness to ty.vmap");
}

static bool same(const ty_mapped *m) { return m->level->randomness == TY_RANDOM_SAME; }

/* The call as it would be outside of the level. */
static bool as_outside(ty_mapped *m, const ty_value *arg, ty_tensor **result) {
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  return ty_call_op((ty_op_id)m->op->id, arg, out) && (*result = ty_scope_add(out[0])) != NULL;
}

bool map_random_sized(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *y;
  int64_t size[TY_MAX_DIMS + 1];
  if (wants_error(m)) return false;
  if (same(m)) return as_outside(m, m->arg, &y) && ty_map_give_sample(m, 0, y);
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  int at = m->op->id == TY_OP_randint ? 2 : 0;
  if (arg[at].is.n > TY_MAX_DIMS) return ty_op_fail(m, TY_EINVAL, "size: at most %d dimensions", TY_MAX_DIMS);
  size[0] = m->level->size;
  memcpy(size + 1, arg[at].is.v, sizeof *size * (size_t)arg[at].is.n);
  arg[at].is = (ty_ints){ size, arg[at].is.n + 1 };
  return ty_map_call(m, arg);
}

bool map_randperm(ty_mapped *m) {
  ty_tensor *y;
  if (wants_error(m)) return false;
  if (same(m) || m->arg[0].i < 0) return as_outside(m, m->arg, &y) && ty_map_give_sample(m, 0, y);
  int device = m->arg[2].i == TY_DEVICE_DEFAULT ? TY_CPU : (int)m->arg[2].i;
  ty_tensor *keys = ty_rand(TY_INTS(m->level->size, m->arg[0].i), TY_F64, device);
  ty_dtype dtype = m->arg[1].i == TY_DTYPE_DEFAULT ? TY_I64 : (ty_dtype)m->arg[1].i;
  return ty_map_give(m, 0, ty_to(ty_argsort(keys, 1, false), dtype));
}

/* An empty tensor like a sample's, which is the same for all. */
static ty_tensor *blank_like(const ty_tensor *x, ty_dtype dtype) {
  return ty_scope_add(ty_tensor_new(ty_device_of(x), dtype, x->v.ndim, x->v.size));
}

bool map_random_like(ty_mapped *m) {
  ty_value arg[] = { m->arg[0], m->arg[1] };
  ty_tensor *y;
  if (wants_error(m)) return false;
  if (same(m)) {
    arg[0].t = blank_like(arg[0].t, ty_dtype_of(arg[0].t));
    return arg[0].t && as_outside(m, arg, &y) && ty_map_give_sample(m, 0, y);
  }
  arg[0].t = ty_whole(m, arg[0].t);
  return arg[0].t && ty_map_call(m, arg);
}

bool map_bernoulli(ty_mapped *m) {
  ty_tensor *p = m->arg[0].t, *y;
  if (wants_error(m)) return false;
  if (same(m) && !ty_differs(m, p)) return as_outside(m, m->arg, &y) && ty_map_give_sample(m, 0, y);
  if (same(m)) {
    ty_tensor *u = ty_rand((ty_ints){ p->v.size, p->v.ndim }, TY_F32, ty_device_of(p));
    return u && ty_map_give_sample(m, 0, ty_to(ty_lt(u, p), ty_dtype_of(p)));
  }
  ty_value arg[] = { m->arg[0] };
  return (arg[0].t = ty_whole(m, p)) && (arg[0].t = ty_contiguous(arg[0].t)) && ty_map_call(m, arg);
}

bool map_multinomial(ty_mapped *m) {
  ty_value arg[] = { m->arg[0], m->arg[1], m->arg[2] };
  ty_tensor *y;
  if (wants_error(m)) return false;
  if (same(m) && ty_differs(m, arg[0].t)) return ty_map_refuse(m, 0);
  if (same(m)) return as_outside(m, m->arg, &y) && ty_map_give_sample(m, 0, y);
  return arg[0].t->v.ndim ? (arg[0].t = ty_whole(m, arg[0].t)) && ty_map_call(m, arg) : map_forward(m);
}

bool map_random_fill(ty_mapped *m) {
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *x = m->arg[0].t, *y;
  if (wants_error(m)) return false;
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (!ty_differs(m, x)) {
    if (same(m)) return as_outside(m, arg, &y) && ty_map_give_sample(m, 0, x);
    return ty_op_fail(m, TY_EUNSUPPORTED,
                      "x: inside ty.vmap %s, which is the same for all samples, cannot be filled with numbers that "
                      "differ; make it there",
                      ty_describe(x));
  }
  if (!same(m)) return (arg[0].t = ty_whole(m, x)) && ty_map_call(m, arg);
  arg[0].t = blank_like(x, ty_dtype_of(x));
  return arg[0].t && as_outside(m, arg, &y) && ty_copy_into(x, arg[0].t) && ty_map_give_sample(m, 0, x);
}

bool map_seeded_noise(ty_mapped *m) {
  ty_value arg[] = { m->arg[0], m->arg[1], m->arg[2] };
  ty_tensor *y;
  if (strcmp(arg[2].s, "poisson") == 0) return ty_map_refuse(m, 0);
  arg[0].t = blank_like(arg[0].t, ty_dtype_of(arg[0].t));
  return arg[0].t && as_outside(m, arg, &y) && ty_map_give_sample(m, 0, y);
}

/* A composition: what it draws for is counted here, over all samples. */
bool map_dropout(ty_mapped *m) {
  ty_tensor *x = m->arg[0].t;
  double p = m->arg[1].f;
  if (!(p > 0 && p <= 1) || !m->arg[2].i) return map_forward(m);
  if (wants_error(m)) return false;
  if (same(m)) {
    ty_tensor *ones = ty_ones_like(blank_like(x, ty_dtype_of(x)), TY_DTYPE_DEFAULT);
    ty_level *was = ty_level_set_running(m->level->outer);
    ty_tensor *mask = ty_dropout(ones, p, true);
    ty_level_set_running(was);
    return mask && ty_map_give_sample(m, 0, ty_mul(x, mask));
  }
  int64_t count = m->level->size * x->v.count;
  for (const ty_level *l = m->level->outer; l; l = l->outer) count *= l->randomness == TY_RANDOM_SAME ? 1 : l->size;
  if (!ty_differs(m, x)) x = ty_map_each(x, m->level);
  if (!x) return false;
  ty_p_random r = ty_draw(count, p, 0);
  return ty_map_give_sample(m, 0, ty_dropout_apply(x, p, (int64_t)r.seed, (int64_t)r.offset));
}

bool map_dropout_apply(ty_mapped *m) {
  ty_value arg[] = { m->arg[0], m->arg[1], m->arg[2], m->arg[3] };
  arg[0].t = ty_whole(m, arg[0].t);
  return arg[0].t && ty_map_call(m, arg);
}
