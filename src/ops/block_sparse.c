/* Attention of blocks of queries to listed blocks of keys. */
#include <string.h>

#include "op.h"

/* What both ops have in common. */
typedef struct given {
  ty_tensor *q, *k, *v, *blocks; /* blocks: i64, expanded to [b, h, nq, m] */
  int64_t own[2];                /* the first sizes of blocks before that */
  ty_dtype wide;
  ty_p_blocks p;
} given;

/* A block that is longer than the sequence is the sequence. */
static int64_t block_of(int64_t asked, int64_t length) { return asked < length ? asked : length > 0 ? length : 1; }

/* Places of the arguments: q, k and v from `first` on; blocks and what follows it from `blocks` on. */
static bool take(ty_call *c, int first, int blocks, given *x) {
  const ty_value *a = c->arg + first;
  *x = (given){ .q = a[0].t, .k = a[1].t, .v = a[2].t };
  if (!ty_check_ndim(c, first, 4, 4, "[b, h, t, d]") || !ty_check_ndim(c, first + 1, 4, 4, "[b, hkv, s, d]") ||
      !ty_check_ndim(c, first + 2, 4, 4, "[b, hkv, s, dv]"))
    return false;
  const int64_t *q = x->q->v.size, *k = x->k->v.size, *v = x->v->v.size;
  if (ty_dtype_of(x->k) != ty_dtype_of(x->q) || ty_dtype_of(x->v) != ty_dtype_of(x->q))
    return ty_op_fail(c, TY_EINVAL, "q, k and v: expected one dtype, got %s, %s and %s", ty_describe(x->q),
                      ty_describe(x->k), ty_describe(x->v));
  if (k[0] != q[0] || k[3] != q[3])
    return ty_op_fail(c, TY_EINVAL, "k: expected the batch size and the width of q %s, got %s", ty_describe(x->q),
                      ty_describe(x->k));
  if (v[0] != k[0] || v[1] != k[1] || v[2] != k[2])
    return ty_op_fail(c, TY_EINVAL, "v: expected the batch size, heads and length of k %s, got %s", ty_describe(x->k),
                      ty_describe(x->v));
  if (k[1] == 0 ? q[1] != 0 : q[1] % k[1] != 0)
    return ty_op_fail(c, TY_EINVAL, "q: expected a multiple of the %lld heads of k %s, got %s", (long long)k[1],
                      ty_describe(x->k), ty_describe(x->q));
  const ty_value *list = c->arg + blocks;
  int64_t query = list[1].i, key = list[2].i;
  if (query < 1) return ty_op_fail(c, TY_EINVAL, "query_block: expected 1 or more, got %lld", (long long)query);
  if (key < 1) return ty_op_fail(c, TY_EINVAL, "key_block: expected 1 or more, got %lld", (long long)key);
  if (!ty_check_index_dtype(c, blocks) || !ty_check_ndim(c, blocks, 4, 4, "[b, h, queries, kept]")) return false;
  const int64_t *l = list[0].t->v.size;
  int64_t of_queries = q[2] / query + (q[2] % query != 0);
  if ((l[0] != 1 && l[0] != q[0]) || (l[1] != 1 && l[1] != q[1]) || l[2] != of_queries)
    return ty_op_fail(c, TY_EINVAL, "blocks: expected [%lld or 1, %lld or 1, %lld, kept], got %s", (long long)q[0],
                      (long long)q[1], (long long)of_queries, ty_describe(list[0].t));
  x->own[0] = l[0], x->own[1] = l[1];
  x->blocks = ty_expand(ty_to(list[0].t, TY_I64), TY_INTS(q[0], q[1], of_queries, l[3]));
  x->wide = ty_is_half(ty_dtype_of(x->q)) ? TY_F32 : ty_dtype_of(x->q);
  x->p = (ty_p_blocks){ .scale = ty_attention_scale(list[3].f, q[3]),
                        .query_block = block_of(query, q[2]),
                        .key_block = block_of(key, k[2]) };
  return x->blocks != NULL;
}

bool fwd_block_sparse_attention(ty_call *c) {
  given x;
  if (!take(c, 0, 3, &x)) return false;
  int64_t size[] = { x.q->v.size[0], x.q->v.size[1], x.q->v.size[2], x.v->v.size[3] };
  return ty_out(c, 0, ty_device_of(x.q), ty_dtype_of(x.q), 4, size) &&
         ty_out(c, 1, ty_device_of(x.q), x.wide, 3, size) &&
         ty_launch(c, (ty_tensor *[]){ x.q, x.k, x.v, x.blocks }, 4, &x.p);
}

/* Argument `arg`, which must have this shape, as `dtype`; NULL where it was left out, and after an error. */
static ty_tensor *saved(ty_call *c, int arg, int ndim, const int64_t *size, ty_dtype dtype) {
  ty_tensor *t = c->arg[arg].t;
  if (!t) return NULL;
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0)
    return ty_to(t, dtype);
  ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s, got %s", c->op->args[arg].name, ty_shape_text(ndim, size),
             ty_describe(t));
  return NULL;
}

/* The lists of keys turned about, for kernels that give each block of keys to one owner: the entries of the lists
 * [b, h, nq * m] in the order of their blocks, and where each block's begin and end [b, h, nk + 1]. */
static bool turn(const given *x, ty_tensor *blocks, ty_tensor **order, ty_tensor **begins) {
  const int64_t *n = x->blocks->v.size, s = x->k->v.size[2], of_keys = s / x->p.key_block + (s % x->p.key_block != 0);
  ty_tensor *sorted[2] = { NULL },
            *flat = ty_reshape(ty_to(blocks, TY_I64), TY_INTS(x->own[0], x->own[1], n[2] * n[3]));
  if (!flat) return false;
  ty_sort(flat, -1, false, sorted);
  ty_tensor *numbers = ty_expand(ty_arange(0, of_keys + 1, 1, TY_I64, ty_device_of(flat)),
                                 TY_INTS(x->own[0], x->own[1], of_keys + 1));
  if (!sorted[0] || !numbers) return false;
  *begins = ty_expand(ty_searchsorted(sorted[0], numbers, false), TY_INTS(n[0], n[1], of_keys + 1));
  *order = ty_expand(sorted[1], TY_INTS(n[0], n[1], n[2] * n[3]));
  return *begins && *order;
}

bool fwd_block_sparse_attention_backward(ty_call *c) {
  const ty_block_sparse_attention_backward_args *a = TY_ARGS(block_sparse_attention_backward, c);
  given x;
  if (!take(c, 1, 7, &x)) return false;
  int64_t result[] = { x.q->v.size[0], x.q->v.size[1], x.q->v.size[2], x.v->v.size[3] };
  ty_tensor *g = saved(c, 0, 4, result, ty_dtype_of(x.q)), *y = saved(c, 4, 4, result, ty_dtype_of(x.q));
  ty_tensor *lse = saved(c, 5, 3, result, x.wide), *dlse = saved(c, 6, 3, result, x.wide);
  if (!g || !y || !lse || (a->dlse.t && !dlse)) return false;
  ty_tensor *order = NULL, *begins = NULL;
  if (ty_device_of(x.q) != TY_CPU && ty_device_of(x.q) != TY_META && !turn(&x, a->blocks.t, &order, &begins))
    return false;
  return ty_out_like(c, 0, x.q, ty_dtype_of(x.q)) && ty_out_like(c, 1, x.k, ty_dtype_of(x.k)) &&
         ty_out_like(c, 2, x.v, ty_dtype_of(x.v)) &&
         ty_launch(c, (ty_tensor *[]){ g, x.q, x.k, x.v, y, lse, dlse, x.blocks, order, begins }, 10, &x.p);
}

/* ---- in differentiable ops ---- */

/* How often the lists name each key for each query, [b, h, t, s]. */
static ty_tensor *counts(const given *x) {
  int64_t t = x->q->v.size[2], s = x->k->v.size[2];
  int64_t of_keys = s / x->p.key_block + (s % x->p.key_block != 0);
  const int64_t *n = x->blocks->v.size;
  /* Column 0 is for places without a block. */
  ty_tensor *zeros = ty_zeros(TY_INTS(n[0], n[1], n[2], of_keys + 1), x->wide, ty_device_of(x->q));
  ty_tensor *sum = ty_scatter_add(zeros, 3, ty_add(x->blocks, 1), ty_ones_like(x->blocks, x->wide));
  sum = ty_narrow(sum, 3, 1, of_keys);
  if (!sum) return NULL;
  ty_tensor *wide = ty_expand(ty_unsqueeze(ty_unsqueeze(sum, 4), 3),
                              TY_INTS(n[0], n[1], n[2], x->p.query_block, of_keys, x->p.key_block));
  wide = ty_reshape(wide, TY_INTS(n[0], n[1], n[2] * x->p.query_block, of_keys * x->p.key_block));
  return wide ? ty_narrow(ty_narrow(wide, 2, 0, t), 3, 0, s) : NULL;
}

/* The gradients with the [t, s] matrix. Unlisted scores are a large negative number and their weights are set to 0
 * afterwards, so that rows that see nothing stay finite. */
static bool composed(ty_vjp *c, given *x) {
  ty_tensor *q = ty_to(x->q, x->wide), *k = ty_to(x->k, x->wide), *v = ty_to(x->v, x->wide), *count = counts(x);
  if (!q || !k || !v || !count) return false;
  k = ty_repeat_heads(k, q->v.size[1]), v = ty_repeat_heads(v, q->v.size[1]);
  ty_tensor *listed = ty_gt(count, 0);
  ty_tensor *scores = ty_mul(ty_matmul(q, ty_transpose(k, -2, -1)), x->p.scale);
  scores = ty_where(listed, ty_add(scores, ty_log(ty_clamp(count, 1, INFINITY))), -1e30);
  ty_tensor *p = ty_where(listed, ty_softmax(scores, -1), 0.0), *ds = NULL;
  if (c->g[0]) {
    ty_tensor *g = ty_to(c->g[0], x->wide), *dp = ty_matmul(g, ty_transpose(v, -2, -1));
    ds = ty_mul(p, ty_sub(dp, ty_sum(ty_mul(dp, p), TY_INTS(-1), true, TY_DTYPE_DEFAULT)));
    if (c->need[2]) c->dx[2] = ty_sum_heads(ty_matmul(ty_transpose(p, -2, -1), g), ty_vjp_size(c, 2));
  }
  if (c->g[1]) {
    ty_tensor *of_lse = ty_mul(p, ty_unsqueeze(c->g[1], -1));
    ds = ds ? ty_add(ds, of_lse) : of_lse;
  }
  if (c->need[0]) c->dx[0] = ty_mul(ty_matmul(ds, k), x->p.scale);
  if (c->need[1])
    c->dx[1] = ty_sum_heads(ty_mul(ty_matmul(ty_transpose(ds, -2, -1), q), x->p.scale), ty_vjp_size(c, 1));
  return true;
}

bool vjp_block_sparse_attention(ty_vjp *c) {
  const ty_block_sparse_attention_args *a = TY_ARGS(block_sparse_attention, c);
  if (!c->g[0] && !c->g[1]) return true;
  if (!ty_vjp_plain()) {
    const int64_t *q = a->q.t->v.size, *l = a->blocks.t->v.size;
    given x = { .q = a->q.t,
                .k = a->k.t,
                .v = a->v.t,
                .wide = ty_is_half(ty_vjp_dtype(c, 0)) ? TY_F32 : ty_vjp_dtype(c, 0),
                .p = { .scale = ty_attention_scale(a->scale.f, q[3]),
                       .query_block = block_of(a->query_block.i, q[2]),
                       .key_block = block_of(a->key_block.i, a->k.t->v.size[2]) } };
    x.blocks = ty_expand(ty_to(a->blocks.t, TY_I64), TY_INTS(q[0], q[1], l[2], l[3]));
    return x.blocks && composed(c, &x);
  }
  ty_tensor *g = c->g[0] ? c->g[0] : ty_zeros_like(c->out[0], TY_DTYPE_DEFAULT), *d[3] = { NULL };
  if (!g) return false;
  ty_block_sparse_attention_backward(g, a->q.t, a->k.t, a->v.t, c->out[0], c->out[1], c->g[1], a->blocks.t,
                                     a->query_block.i, a->key_block.i, a->scale.f, d);
  for (int i = 0; i < 3; i++) c->dx[i] = d[i];
  return true;
}
