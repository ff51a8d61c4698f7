/* Attention of packed queries of many sequences to keys in pages. */
#include "op.h"

static bool check_counts(ty_call *c, int arg, int64_t n) {
  const ty_tensor *x = c->arg[arg].t;
  if (!ty_check_index_dtype(c, arg)) return false;
  return (x->v.ndim == 1 && x->v.size[0] == n) ||
         ty_op_fail(c, TY_EINVAL, "%s: expected [%lld], got %s", c->op->args[arg].name, (long long)n, ty_describe(x));
}

bool fwd_paged_attention(ty_call *c) {
  const ty_paged_attention_args *a = TY_ARGS(paged_attention, c);
  ty_tensor *q = a->q.t, *k = a->k.t, *v = a->v.t;
  if (!ty_check_ndim(c, 0, 3, 3, "[n, h, d]") || !ty_check_ndim(c, 1, 3, 3, "[slots, hkv, d]") ||
      !ty_check_ndim(c, 2, 3, 3, "[slots, hkv, dv]"))
    return false;
  const ty_dtype own = ty_dtype_of(q), wide = ty_is_half(own) ? TY_F32 : own, stored = ty_dtype_of(k);
  if (stored != wide && !(wide == TY_F32 && ty_is_half(stored)))
    return ty_op_fail(c, TY_EINVAL, "k: expected the dtype of q %s, or f16 or bf16 for f32, got %s", ty_describe(q),
                      ty_describe(k));
  if (ty_dtype_of(v) != stored)
    return ty_op_fail(c, TY_EINVAL, "v: expected the dtype of k %s, got %s", ty_describe(k), ty_describe(v));
  const int64_t heads = q->v.size[1], kv_heads = k->v.size[1], slots = k->v.size[0];
  if (k->v.size[2] != q->v.size[2])
    return ty_op_fail(c, TY_EINVAL, "k: expected the width of q %s, got %s", ty_describe(q), ty_describe(k));
  if (v->v.size[0] != slots || v->v.size[1] != kv_heads)
    return ty_op_fail(c, TY_EINVAL, "v: expected the slots and heads of k %s, got %s", ty_describe(k), ty_describe(v));
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0)
    return ty_op_fail(c, TY_EINVAL, "q: expected a multiple of the %lld heads of k %s, got %s", (long long)kv_heads,
                      ty_describe(k), ty_describe(q));
  if (!ty_check_index_dtype(c, 3) || !ty_check_ndim(c, 3, 2, 2, "[sequences, most]")) return false;
  const int64_t sequences = a->pages.t->v.size[0];
  if (!check_counts(c, 4, sequences + 1) || !check_counts(c, 5, sequences)) return false;
  if (a->page.i < 1 || slots % a->page.i != 0)
    return ty_op_fail(c, TY_EINVAL, "page: expected a size that divides the %lld rows of k, got %lld", (long long)slots,
                      (long long)a->page.i);
  if (sequences == 0 && q->v.size[0] != 0)
    return ty_op_fail(c, TY_EINVAL, "pages: expected sequences for %lld queries, got none", (long long)q->v.size[0]);
  if (!(a->softcap.f >= 0 && a->softcap.f < (double)INFINITY))
    return ty_op_fail(c, TY_EINVAL, "softcap: expected a positive number or 0 for none, got %g", a->softcap.f);
  if (own != wide) {
    ty_tensor *y = ty_paged_attention(ty_to(q, wide), k, v, a->pages.t, a->cu_seqlens.t, a->lengths.t, a->page.i,
                                      a->scale.f, a->window.i, a->softcap.f);
    return ty_out_set(c, 0, ty_to(y, own));
  }
  ty_tensor *pages = ty_to(a->pages.t, TY_I64), *begins = ty_to(a->cu_seqlens.t, TY_I64),
            *lengths = ty_to(a->lengths.t, TY_I64);
  if (!pages || !begins || !lengths) return false;
  const int64_t size[] = { q->v.size[0], heads, v->v.size[2] };
  const ty_p_paged p = { .scale = ty_attention_scale(a->scale.f, q->v.size[2]),
                         .softcap = a->softcap.f,
                         .page = a->page.i,
                         .window = a->window.i };
  return ty_out(c, 0, ty_device_of(q), wide, 3, size) &&
         ty_launch(c, (ty_tensor *[]){ q, k, v, pages, begins, lengths }, 6, &p);
}
