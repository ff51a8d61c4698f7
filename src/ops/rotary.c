/* Rotary position embedding. Su et al. 2021, "RoFormer". */
#include <string.h>

#include "op.h"

/* cos and sin [..., pairs] against x [..., width]. */
static bool check(ty_call *c) {
  const ty_rotary_args *a = TY_ARGS(rotary, c);
  const ty_tensor *x = a->x.t, *cos = a->cos.t, *sin = a->sin.t;
  if (!ty_check_floats(c, 1) || !ty_check_floats(c, 2)) return false;
  if (x->v.ndim < 1 || cos->v.ndim < 1)
    return ty_op_fail(c, TY_EINVAL, "%s: expected at least one dimension, got %s", x->v.ndim ? "cos" : "x",
                      ty_describe(x->v.ndim ? cos : x));
  if (!ty_same_shape(&cos->v, &sin->v))
    return ty_op_fail(c, TY_EINVAL, "sin: expected the shape of cos %s, got %s", ty_describe(cos), ty_describe(sin));
  int64_t width = x->v.size[x->v.ndim - 1], pairs = cos->v.size[cos->v.ndim - 1];
  bool fits = 2 * pairs <= width && cos->v.ndim <= x->v.ndim;
  for (int d = 0; fits && d < cos->v.ndim - 1; d++) {
    int64_t n = cos->v.size[d];
    fits = n == 1 || n == x->v.size[d + x->v.ndim - cos->v.ndim];
  }
  if (!fits)
    return ty_op_fail(c, TY_EINVAL,
                      "cos: expected [..., pairs] that broadcasts to x %s, with at most %lld pairs, got %s",
                      ty_describe(x), (long long)(width / 2), ty_describe(cos));
  return true;
}

bool fwd_rotary(ty_call *c) {
  const ty_rotary_args *a = TY_ARGS(rotary, c);
  ty_tensor *x = a->x.t, *cos = a->cos.t, *sin = a->sin.t;
  ty_dtype dtype = ty_dtype_of(x) == TY_F64 ? TY_F64 : TY_F32;
  if (!check(c) || !ty_out_like(c, 0, x, ty_dtype_of(x))) return false;
  if (!(cos = ty_to(cos, dtype)) || !(sin = ty_to(sin, dtype))) return false;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[x->v.ndim - 1] = cos->v.size[cos->v.ndim - 1];
  cos = ty_expand(cos, (ty_ints){ size, x->v.ndim });
  sin = ty_expand(sin, (ty_ints){ size, x->v.ndim });
  return cos && sin && ty_launch(c, (ty_tensor *[]){ x, cos, sin }, 3, &(ty_p_dim){ .flag = a->interleaved.i });
}

/* Elements 0, 1 .. of the pairs of t. */
static ty_tensor *part(ty_tensor *t, int which, int64_t pairs, bool interleaved) {
  int64_t start = interleaved ? which : which * pairs;
  return ty_slice(t, -1, start, interleaved ? 2 * pairs : start + pairs, interleaved ? 2 : 1);
}

/* Turning back undoes a rotation: that is the gradient for x. */
bool vjp_rotary(ty_vjp *c) {
  const ty_rotary_args *a = TY_ARGS(rotary, c);
  ty_tensor *g = c->g[0], *x = a->x.t, *cos = a->cos.t;
  if (c->need[0]) c->dx[0] = ty_rotary(g, cos, ty_neg(a->sin.t), a->interleaved.i);
  if (!c->need[1] && !c->need[2]) return true;
  int64_t pairs = cos->v.size[cos->v.ndim - 1];
  ty_tensor *p = part(x, 0, pairs, a->interleaved.i), *q = part(x, 1, pairs, a->interleaved.i);
  ty_tensor *gp = part(g, 0, pairs, a->interleaved.i), *gq = part(g, 1, pairs, a->interleaved.i);
  if (c->need[1]) c->dx[1] = ty_add(ty_mul(gp, p), ty_mul(gq, q));
  if (c->need[2]) c->dx[2] = ty_sub(ty_mul(gq, p), ty_mul(gp, q));
  return true;
}
