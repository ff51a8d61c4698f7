/* Attention without the [t, s] matrix, after FlashAttention (Dao et al. 2022): tiles of GROUP queries by KEYS keys
 * stay in the cache, the softmax is carried along the keys (Milakov and Gimelshein 2018), and the backward pass
 * computes the probabilities again from the rows' log-sum-exp. Query rows of all heads that share a key-value head
 * are treated alike, so that decoding with grouped heads reads the keys once. All cuts depend on the shapes alone. */
#include <string.h>

#include "../../attention_span.h"
#include "../cpu.h"
#include "../exp_weight.h"
#include "tile_names.h"

#include "../../half.h"

#if defined(__AVX512F__)
#include "../tiles.h"
#endif

enum {
  KEYS = 64,         /* keys of a tile */
  QUERIES = 128,     /* query rows of a forward task */
  SPLIT = 512,       /* keys of a forward task, when there are few */
  TASKS = 16,        /* fewer than these are split further */
  BACK_QUERIES = 64, /* query rows of a backward tile */
  SPAN = 16          /* backward tiles whose queries are packed at a time */
};

/* A query row of a task: which head, where, and the keys [low, high) it may see, without [gap_low, gap_high). */
typedef struct query {
  int64_t head, pos, low, high, gap_low, gap_high;
} query;

/* Where the keys and values of a sequence lie that has them in pages: numbers of pages of `size` rows. */
typedef struct page_list {
  const int64_t *numbers;
  int64_t step, size;
} page_list;

typedef struct plan {
  const ty_view *q, *k, *v, *mask; /* mask: NULL or broadcast to [b, h, t, s] */
  const page_list *pages;          /* NULL: keys lie one after another */
  int64_t batch, heads, kv_heads, group, t, s, d, dv;
  int64_t head_row, pos_row; /* of the result: from one head to the next, from one position to the next */
  double scale, softcap;     /* softcap 0: none */
  ty_reach reach;
} plan;

static plan plan_of(const ty_view *q, const ty_view *k, const ty_view *v, const ty_view *mask, const ty_view *begins,
                    const ty_p_attention *p) {
  return (plan){
    .q = q,
    .k = k,
    .v = v,
    .mask = mask,
    .batch = q->size[0],
    .heads = q->size[1],
    .kv_heads = k->size[1],
    .group = k->size[1] ? q->size[1] / k->size[1] : 0,
    .t = q->size[2],
    .s = k->size[2],
    .d = q->size[3],
    .dv = v->size[3],
    .head_row = q->size[2],
    .pos_row = 1,
    .scale = p->scale,
    .softcap = p->softcap,
    .reach = ty_reach_of(q->size[2], k->size[2], p, begins),
  };
}

/* Blocks of at most `most` query rows that cover the group of one key-value head: part of a head, or several heads. */
static int64_t blocks_of(const plan *p, int64_t most) {
  if (p->t == 0) return 0;
  if (p->t >= most) return p->group * ((p->t + most - 1) / most);
  int64_t heads = most / p->t;
  return (p->group + heads - 1) / heads;
}

static int block_rows(const plan *p, int64_t kv_head, int64_t block, int64_t most, query *rows) {
  int64_t first_head, first, n;
  if (p->t >= most) {
    int64_t per_head = (p->t + most - 1) / most;
    first_head = block / per_head, first = block % per_head * most;
    n = p->t - first < most ? p->t - first : most;
  } else {
    int64_t heads = most / p->t;
    first_head = block * heads, first = 0;
    n = (p->group - first_head < heads ? p->group - first_head : heads) * p->t;
  }
  for (int64_t i = 0; i < n; i++) {
    query *r = rows + i;
    r->head = kv_head * p->group + first_head + (first + i) / p->t;
    r->pos = (first + i) % p->t;
    ty_span span = ty_span_of(&p->reach, r->pos);
    bool any = span.low < span.high;
    r->low = any ? span.low : 0, r->high = any ? span.high : 0;
    r->gap_low = span.gap_low, r->gap_high = span.gap_high;
  }
  return (int)n;
}

/* The keys that any of the rows sees. */
static void reach(const query *rows, int n, int64_t *low, int64_t *high) {
  *low = INT64_MAX, *high = 0;
  for (int i = 0; i < n; i++) {
    if (rows[i].high <= rows[i].low) continue;
    if (rows[i].low < *low) *low = rows[i].low;
    if (rows[i].high > *high) *high = rows[i].high;
  }
  if (*high == 0) *low = 0;
}

/* Whether none of the rows sees any of the keys [from, to), as they lie in a gap. */
static bool all_in_gap(const query *rows, int n, int64_t from, int64_t to) {
  for (int i = 0; i < n; i++)
    if (rows[i].low < rows[i].high && !(rows[i].gap_low <= from && to <= rows[i].gap_high)) return false;
  return true;
}

typedef struct gradients {
  const ty_view *g, *y, *lse, *dlse, *dq, *dk, *dv, *dmask; /* dlse and dmask: NULL or wanted */
} gradients;

/* Blocks of queries that see listed blocks of keys, [b, h, queries, kept]. */
typedef struct block_lists {
  const ty_view *list;
  int64_t query_block, key_block, queries, kept;
} block_lists;

static bool block_lists_of(block_lists *x, const ty_view *list, const ty_p_blocks *p, int64_t s) {
  *x = (block_lists){ list, p->query_block, p->key_block, list->size[2], list->size[3] };
  int64_t keys = s / p->key_block + (s % p->key_block != 0);
  for (int64_t b = 0; b < (list->stride[0] ? list->size[0] : 1) && list->count; b++)
    for (int64_t h = 0; h < (list->stride[1] ? list->size[1] : 1); h++)
      for (int64_t i = 0; i < x->queries; i++)
        for (int64_t j = 0; j < x->kept; j++) {
          int64_t at = *(const int64_t *)(const void *)element(list, b, h, i, j);
          if (at < -1 || at >= keys)
            return ty_fail(TY_EINDEX, "blocks: index %lld is out of range for size %lld", (long long)at,
                           (long long)keys);
        }
  return true;
}

#include "attention_names.h"

#define REAL float
#define REAL_INT int32_t
#define LANES LANES_F32
#define FN(name) name##_f32
#include "tile.h"
#include "attention_tile.h"
#include "attention_forward.h"
#if defined(TY_TILES)
#include "attention_tiles.h"
#endif
#include "attention_paged.h"
#include "attention_backward.h"
#if defined(TY_TILES)
#include "attention_tiles_backward.h"
#endif
#include "attention_blocks.h"
#undef REAL
#undef REAL_INT
#undef LANES
#undef FN

#define REAL double
#define REAL_INT int64_t
#define LANES LANES_F64
#define FN(name) name##_f64
#include "tile.h"
#include "attention_tile.h"
#include "attention_forward.h"
#include "attention_paged.h"
#include "attention_backward.h"
#include "attention_blocks.h"

#include "attention_half.h"

bool TY_KERNEL(attention)(const ty_kernel_args *k) {
  plan p = plan_of(k->in[0], k->in[1], k->in[2], k->in[3], k->in[4], k->params);
  if (!ty_reach_check(&p.reach)) return false;
#if defined(TY_TILES)
  bool done = false, fits = k->in[0]->dtype == TY_F32 || k->in[0]->dtype == TY_BF16;
  if (fits && (!tiles_forward(&p, k->out[0], k->out[1], &done) || done)) return done;
#endif
  if (ty_is_half((ty_dtype)k->in[0]->dtype)) return forward_half(k);
  return k->in[0]->dtype == TY_F64 ? forward_f64(&p, k->out[0], k->out[1]) : forward_f32(&p, k->out[0], k->out[1]);
}

/* in: g, q, k, v, y, lse, mask, begins; out: dq, dk, dv and, when it has elements, the gradient of the mask. */
bool TY_KERNEL(attention_backward)(const ty_kernel_args *k) {
  plan p = plan_of(k->in[1], k->in[2], k->in[3], k->in[6], k->in[7], k->params);
  if (!ty_reach_check(&p.reach)) return false;
  gradients a = { .g = k->in[0],
                  .y = k->in[4],
                  .lse = k->in[5],
                  .dq = k->out[0],
                  .dk = k->out[1],
                  .dv = k->out[2],
                  .dmask = k->nout > 3 && k->out[3] && k->out[3]->count ? k->out[3] : NULL };
#if defined(TY_TILES)
  bool done = false;
  if (k->in[1]->dtype == TY_BF16 && !a.dmask && (!tiles_backward(&p, &a, &done) || done)) return done;
#endif
  if (ty_is_half((ty_dtype)k->in[1]->dtype)) return backward_half(k, &a);
  return k->in[1]->dtype == TY_F64 ? backward_f64(&p, &a) : backward_f32(&p, &a);
}

static plan plan_of_blocks(const ty_view *q, const ty_view *k, const ty_view *v, const ty_p_blocks *p) {
  return plan_of(q, k, v, NULL, NULL, &(ty_p_attention){ .scale = p->scale, .window = -1 });
}

bool TY_KERNEL(block_sparse_attention)(const ty_kernel_args *k) {
  const ty_p_blocks *params = k->params;
  plan p = plan_of_blocks(k->in[0], k->in[1], k->in[2], params);
  block_lists lists;
  if (!block_lists_of(&lists, k->in[3], params, p.s)) return false;
  return k->in[0]->dtype == TY_F64 ? blocks_forward_f64(&p, &lists, k->out[0], k->out[1])
                                   : blocks_forward_f32(&p, &lists, k->out[0], k->out[1]);
}

/* in: g, q, k, v, y, lse, dlse, blocks, and two that GPUs take; out: dq, dk, dv. */
bool TY_KERNEL(block_sparse_attention_backward)(const ty_kernel_args *k) {
  const ty_p_blocks *params = k->params;
  plan p = plan_of_blocks(k->in[1], k->in[2], k->in[3], params);
  block_lists lists;
  if (!block_lists_of(&lists, k->in[7], params, p.s)) return false;
  gradients a = {
    .g = k->in[0], .y = k->in[4], .lse = k->in[5], .dlse = k->in[6], .dq = k->out[0], .dk = k->out[1], .dv = k->out[2]
  };
  return k->in[1]->dtype == TY_F64 ? blocks_backward_f64(&p, &lists, &a) : blocks_backward_f32(&p, &lists, &a);
}

bool TY_KERNEL(paged_attention)(const ty_kernel_args *k) {
  return k->in[0]->dtype == TY_F64 ? paged_f64(k) : paged_f32(k);
}
