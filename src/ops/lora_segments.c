/* Adapters of low rank, one for each segment of rows, from the rows of a pool. */
#include "op.h"

/* Where the rows of argument `pool` are that hold `width` elements. */
static bool check_rows(ty_call *c, int arg, int pool, int64_t width) {
  const ty_tensor *rows = c->arg[arg].t, *x = c->arg[pool].t;
  const int64_t each = x->v.size[1], wanted = each ? (width + each - 1) / each : 0;
  if (!ty_check_index_dtype(c, arg) || !ty_check_ndim(c, arg, 2, 2, "[pairs, rows of each]")) return false;
  if (width > 0 && each == 0)
    return ty_op_fail(c, TY_EINVAL, "%s: expected rows with elements, got %s", c->op->args[pool].name, ty_describe(x));
  return rows->v.size[1] == wanted ||
         ty_op_fail(c, TY_EINVAL, "%s: expected [pairs, %lld], as %lld elements are in rows of %lld, got %s",
                    c->op->args[arg].name, (long long)wanted, (long long)width, (long long)each, ty_describe(rows));
}

bool fwd_lora_segments(ty_call *c) {
  const ty_lora_segments_args *p = TY_ARGS(lora_segments, c);
  ty_tensor *y = p->y.t, *x = p->x.t, *a = p->a.t, *b = p->b.t;
  if (!ty_check_ndim(c, 0, 2, 2, "[n, out]") || !ty_check_ndim(c, 1, 2, 2, "[n, in]") ||
      !ty_check_ndim(c, 2, 2, 2, "[slots, wa]") || !ty_check_ndim(c, 3, 2, 2, "[slots, wb]"))
    return false;
  const ty_dtype own = ty_dtype_of(x), wide = ty_is_half(own) ? TY_F32 : own, stored = ty_dtype_of(a);
  if (ty_dtype_of(y) != own || y->v.size[0] != x->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "y: expected the rows and the dtype of x %s, got %s", ty_describe(x),
                      ty_describe(y));
  if (stored != wide && !(wide == TY_F32 && ty_is_half(stored)))
    return ty_op_fail(c, TY_EINVAL, "a: expected the dtype of x %s, or f16 or bf16 for f32, got %s", ty_describe(x),
                      ty_describe(a));
  if (ty_dtype_of(b) != stored)
    return ty_op_fail(c, TY_EINVAL, "b: expected the dtype of a %s, got %s", ty_describe(a), ty_describe(b));
  if (!check_rows(c, 4, 2, x->v.size[1]) || !check_rows(c, 5, 3, y->v.size[1])) return false;
  const int64_t pairs = p->a_rows.t->v.size[0];
  if (p->b_rows.t->v.size[0] != pairs)
    return ty_op_fail(c, TY_EINVAL, "b_rows: expected as many pairs as in a_rows %s, got %s", ty_describe(p->a_rows.t),
                      ty_describe(p->b_rows.t));
  const ty_tensor *begins = p->begins.t, *ranks = p->ranks.t;
  if (!ty_check_index_dtype(c, 6) || !ty_check_index_dtype(c, 7) || !ty_check_ndim(c, 6, 1, 1, "[segments + 1]"))
    return false;
  if (begins->v.size[0] < 1)
    return ty_op_fail(c, TY_EINVAL, "begins: expected [segments + 1], got %s", ty_describe(begins));
  if (ranks->v.ndim != 1 || ranks->v.size[0] != begins->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "ranks: expected [%lld], got %s", (long long)begins->v.size[0], ty_describe(ranks));
  if (own != wide) {
    ty_tensor *sum = ty_lora_segments(ty_to(y, wide), ty_to(x, wide), a, b, p->a_rows.t, p->b_rows.t, p->begins.t,
                                      p->ranks.t);
    return ty_out_set(c, 0, ty_to(sum, own));
  }
  ty_tensor *where[4];
  for (int i = 0; i < 4; i++)
    if (!(where[i] = ty_to(c->arg[4 + i].t, TY_I64))) return false;
  return ty_out_like(c, 0, y, wide) &&
         ty_launch(c, (ty_tensor *[]){ y, x, a, b, where[0], where[1], where[2], where[3] }, 8, NULL);
}
