/* Gated linear attention (Yang et al. 2024): S[t] = exp(g[t]) S[t-1] + k[t]' v[t], row by row of S [dk, dv], and o[t] =
 * scale q[t] S[t]. A sequence is walked in chunks of CHUNK tokens, whose products with the state and with each other are
 * small matrix products; FEW tokens take the recurrence as it stands, which is what decoding does.
 *
 * The decay from one token to another is always the product of the exp(g) between them, built up step by step from
 * one of the two: with g <= 0 nothing grows, and gates that forget everything (exp(g) = 0) need no care. Longer chunks
 * would only add work between the tokens of a chunk, as the state stays in the cache from one to the next. */
#include <string.h>

#include "../../attention_span.h"
#include "../cpu.h"
#include "../exp_weight.h"
#include "tile_names.h"

enum {
  CHUNK = 16,
  FEW = 3,  /* tokens at the end of a sequence, or all of them, that are taken one by one */
  SPAN = 16 /* chunks after which the sums in the gradient of g begin anew */
};

typedef struct plan {
  const ty_view *q, *k, *v, *g, *state; /* state: NULL: zeros */
  int64_t sequences, heads, length, dk, dv;
  int64_t room_k, room_v; /* dk and dv as multiples of CHUNK, which are multiples of vectors and of rows of a product */
  double scale;
  ty_reach packed; /* begins: NULL, or sequences are parts of row 0 */
} plan;

static int64_t room_of(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

static plan plan_of(const ty_view *const *in, const ty_p_attention *p) {
  const ty_view *q = in[0], *v = in[2], *begins = in[5];
  return (plan){ .q = q,
                 .k = in[1],
                 .v = v,
                 .g = in[3],
                 .state = in[4],
                 .sequences = begins ? begins->size[0] - 1 : q->size[0],
                 .heads = q->size[1],
                 .length = q->size[2],
                 .dk = q->size[3],
                 .dv = v->size[3],
                 .room_k = room_of(q->size[3]),
                 .room_v = room_of(v->size[3]),
                 .scale = p->scale,
                 .packed = ty_reach_of(q->size[2], q->size[2], p, begins) };
}

/* One head of one sequence: tokens [begin, end) of a row. */
typedef struct line {
  int64_t sequence, row, head, begin, end;
} line;

static line line_of(const plan *p, int64_t task) {
  line l = { .sequence = task / p->heads, .head = task % p->heads, .end = p->length };
  l.row = l.sequence;
  if (!p->packed.begins) return l;
  l.row = 0;
  l.begin = p->packed.begins[l.sequence * p->packed.step];
  l.end = p->packed.begins[(l.sequence + 1) * p->packed.step];
  return l;
}

/* Tokens that belong to no sequence get zeros. */
static void clear_outside(const plan *p, const ty_view *out) {
  if (p->packed.begins && out->count) memset(out->data, 0, (size_t)out->count * ty_dtype_size[out->dtype]);
}

typedef struct context {
  const plan *plan;
  const ty_view *go, *dstate;            /* backward: gradients of the result and (or NULL) of the last state */
  const ty_view *out, *last;             /* forward */
  const ty_view *dq, *dk, *dv, *dg, *ds; /* backward */
  bool failed;
} context;

#define REAL float
#define REAL_INT int32_t
#define LANES LANES_F32
#define FN(name) name##_f32
#include "tile.h"
#include "gated_linear_real.h"
#include "gated_linear_backward.h"
#undef REAL
#undef REAL_INT
#undef LANES
#undef FN

#define REAL double
#define REAL_INT int64_t
#define LANES LANES_F64
#define FN(name) name##_f64
#include "tile.h"
#include "gated_linear_real.h"
#include "gated_linear_backward.h"

static bool run(const plan *p, ty_range_fn *piece, context *c) {
  int64_t lines = p->sequences * p->heads,
          products = p->length * p->dk * p->dv; /* of all sequences, when they are packed */
  if (p->packed.begins && lines) products /= p->sequences;
  ty_parallel_for(lines, 1 + 200000 / (products + 1), piece, c);
  return !c->failed || ty_fail(TY_ENOMEM, "out of memory for the chunks of gated linear attention");
}

/* in: q, k, v, g, state, begins; out: o, last state. */
bool TY_KERNEL(gated_linear_attention)(const ty_kernel_args *k) {
  plan p = plan_of(k->in, k->params);
  if (!ty_reach_check(&p.packed)) return false;
  clear_outside(&p, k->out[0]);
  context c = { .plan = &p, .out = k->out[0], .last = k->out[1] };
  return run(&p, p.q->dtype == TY_F64 ? forward_f64 : forward_f32, &c);
}

/* in: as above, then the gradients of o and of the last state; out: the gradients of q, k, v, g and of the state. */
bool TY_KERNEL(gated_linear_attention_backward)(const ty_kernel_args *k) {
  plan p = plan_of(k->in, k->params);
  if (!ty_reach_check(&p.packed)) return false;
  for (int i = 0; i < 4; i++) clear_outside(&p, k->out[i]);
  context c = { .plan = &p,
                .go = k->in[6],
                .dstate = k->in[7],
                .dq = k->out[0],
                .dk = k->out[1],
                .dv = k->out[2],
                .dg = k->out[3],
                .ds = k->out[4] };
  return run(&p, p.q->dtype == TY_F64 ? backward_f64 : backward_f32, &c);
}
