/* matmul_trit: products with weights of trit-planes that stay packed. The gradients are made of the decoded weight. */
#include <string.h>

#include "op.h"

enum { TRITS = 5, BLOCK = 64, SIGN = 128 }; /* of a byte; rows whose bytes lie beside each other */

static int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }

bool fwd_matmul_trit(ty_call *c) {
  const ty_matmul_trit_args *a = TY_ARGS(matmul_trit, c);
  ty_tensor *x = a->x.t, *trits = a->trits.t, *scales = a->scales.t;
  const int64_t group = a->group.i;
  int n = x->v.ndim;
  if (!ty_check_floats(c, 0) || !ty_check_floats(c, 2)) return false;
  if (group < 1) return ty_op_fail(c, TY_EINVAL, "group: expected at least 1, got %lld", (long long)group);
  if (!n || !x->v.size[n - 1])
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., k] with k above 0, got %s", ty_describe(x));
  const int64_t groups = parts(x->v.size[n - 1], group), bytes = parts(group, TRITS), *t = trits->v.size;
  if (ty_dtype_of(trits) != TY_U8 || trits->v.ndim != 5 || t[0] != groups || t[2] != bytes || t[4] != BLOCK)
    return ty_op_fail(c, TY_EINVAL, "trits: expected u8 [%lld, blocks, %lld, planes, %d] for x %s, got %s",
                      (long long)groups, (long long)bytes, BLOCK, ty_describe(x), ty_describe(trits));
  const int64_t *s = scales->v.size;
  if (scales->v.ndim != 3 || s[0] != groups || parts(s[1], BLOCK) != t[1] || s[2] != t[3])
    return ty_op_fail(c, TY_EINVAL, "scales: expected [%lld, n, %lld] for trits %s, n of %lld blocks of %d, got %s",
                      (long long)groups, (long long)t[3], ty_describe(trits), (long long)t[1], BLOCK,
                      ty_describe(scales));
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[n - 1] = s[1];
  ty_dtype dtype = ty_dtype_of(x), wide = dtype == TY_F64 ? TY_F64 : TY_F32;
  ty_tensor *in[] = { x, trits, scales };
  if (!(in[0] = ty_to(x, wide))) return false;
  /* The kernel of the CPU reads scales in f16 as they are. */
  const bool as_they_are = wide == TY_F32 && ty_dtype_of(scales) == TY_F16 && ty_device_of(x) < TY_CUDA;
  if (!as_they_are && !(in[2] = ty_to(scales, wide))) return false;
  return ty_out(c, 0, ty_device_of(x), dtype, n, size) && ty_launch(c, in, 3, &(ty_p_dim){ .k = group });
}

/* The trits as numbers: [groups, rows, planes, group]. A byte is the sign and the magnitude of a number whose digits in
 * base 3, once 121 is added, are the trits plus 1. */
static ty_tensor *numbers_of(ty_tensor *trits, int64_t rows, int64_t group, ty_dtype dtype) {
  enum { LARGEST = 121 };
  ty_tensor *code = ty_to(trits, dtype), *negative = ty_to(ty_ge(trits, (double)SIGN), dtype), *digit[TRITS];
  ty_tensor *size = ty_clamp(ty_sub(code, ty_mul(negative, (double)SIGN)), 0, LARGEST);
  ty_tensor *left = ty_add(ty_mul(size, ty_sub(1.0, ty_mul(negative, 2.0))), (double)LARGEST);
  const int64_t *n = trits->v.size;
  for (int j = 0; j < TRITS; j++) {
    ty_tensor *next = ty_floor(ty_div(left, 3.0));
    digit[j] = ty_sub(ty_sub(left, ty_mul(next, 3.0)), 1.0);
    left = next;
  }
  ty_tensor *all = ty_stack(TY_LIST(digit[0], digit[1], digit[2], digit[3], digit[4]), -1);
  all = ty_permute(all, TY_INTS(0, 1, 4, 3, 2, 5)); /* was [groups, blocks, bytes, planes, BLOCK, TRITS] */
  all = ty_reshape(all, TY_INTS(n[0], n[1] * BLOCK, n[3], n[2] * TRITS));
  return ty_narrow(ty_narrow(all, 1, 0, rows), 3, 0, group);
}

bool vjp_matmul_trit(ty_vjp *c) {
  const ty_matmul_trit_args *a = TY_ARGS(matmul_trit, c);
  ty_tensor *x = a->x.t, *trits = a->trits.t, *g = c->g[0];
  const int64_t group = a->group.i, groups = trits->v.size[0], rows = a->scales.t->v.size[1];
  const int64_t columns = x->v.size[x->v.ndim - 1];
  ty_dtype dtype = ty_dtype_of(g);
  ty_tensor *t = numbers_of(trits, rows, group, dtype);
  if (c->need[0]) {
    ty_tensor *w = ty_sum(ty_mul(t, ty_unsqueeze(ty_to(a->scales.t, dtype), 3)), TY_INTS(2), false, TY_DTYPE_DEFAULT);
    w = ty_reshape(ty_transpose(w, 0, 1), TY_INTS(rows, groups * group)); /* w was [groups, n, group] */
    c->dx[0] = ty_matmul(g, ty_narrow(w, 1, 0, columns));
  }
  if (c->need[2]) {
    ty_tensor *tall = ty_reshape(g, TY_INTS(-1, rows)), *wide = ty_reshape(x, TY_INTS(-1, columns));
    ty_tensor *dw = ty_matmul(ty_transpose(tall, 0, 1), wide);
    dw = ty_pad(dw, TY_INTS(0, groups * group - columns), "constant", 0);
    dw = ty_transpose(ty_reshape(dw, TY_INTS(rows, groups, group)), 0, 1);
    c->dx[2] = ty_sum(ty_mul(t, ty_unsqueeze(dw, 2)), TY_INTS(3), false, TY_DTYPE_DEFAULT);
  }
  return true;
}
