/* Multi-resolution hash grids (kernels/hash_grid.h), with a small network behind them, and their gradients. Points go
 * through all of it PIECE by PIECE, as lines of coordinates, features and units with points side by side: what one step
 * gives the next stays in the cache. For the backward pass these lines may be kept, block by block; else it makes them
 * anew.
 *
 * Rows of a table are added to by their level's task alone, point by point; gradients of weights are sums over parts of
 * the points, whose number depends on n alone, in their order. So the threads' number does not show. */
#include <string.h>

#include "../../hash_grid.h"
#include "../cpu.h"

enum {
  PIECE = 512,           /* points whose features are found together */
  LINE = PIECE + 16,     /* elements between lines of such: at powers of two they would share few places of the cache */
  BLOCK = TY_HASH_BLOCK, /* points of a piece that go through the layers together */
  LEAST_PART = 1024,     /* points whose gradients of weights are summed by one task, and how many such sums at most */
  MOST_PARTS = 64,
  ROWS = 6 /* of a tile of products, which is two vectors wide */
};

typedef struct context {
  const ty_p_hash_grid *p;
  ty_hash_level level[TY_HASH_LEVELS];
  int64_t n, features, all; /* features: of a level, and of all */
  const void *x, *table, *g;
  void *to;
  /* of the network */
  int64_t width, layers, out, part; /* layers: hidden ones; part: points of a task */
  int64_t past;                     /* parts that are done, whose points `to` has no more */
  const void *first, *hidden, *last;
  void *kept;   /* of each block, lines of features and of all units; or NULL */
  void *sums;   /* of each part: gradients of first, hidden and last, whose rows are filled up to whole tiles */
  int64_t size; /* elements of such */
  void *weights[3];
  bool added; /* the gradient of a table is added to it */
  bool failed;
} context;

static context context_of(const ty_kernel_args *k, const ty_view *x, int64_t all) {
  context c = { .p = k->params, .n = x->size[0], .all = all, .x = x->data };
  c.features = all / c.p->levels;
  for (int l = 0; l < c.p->levels; l++) c.level[l] = ty_hash_level_of(c.p, l);
  return c;
}

static void *room(context *c, size_t bytes) {
  void *memory = ty_scratch_alloc(bytes);
  if (!memory) __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
  return memory;
}

static int64_t filled(int64_t n, int64_t tile) { return (n + tile - 1) / tile * tile; }

#define REAL float
#define FN(name) name##_f32
#include "hash_grid_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "hash_grid_real.h"

static bool done(const context *c) { return !c->failed || ty_fail(TY_ENOMEM, "out of memory for a hash grid"); }

/* ---- the grid ---- */

/* in: x, table; out: features. */
bool TY_KERNEL(hash_grid)(const ty_kernel_args *k) {
  context c = context_of(k, k->in[0], k->out[0]->size[1]);
  c.table = k->in[1]->data, c.to = k->out[0]->data;
  ty_parallel_for((c.n + PIECE - 1) / PIECE, 1, k->in[0]->dtype == TY_F64 ? encode_pieces_f64 : encode_pieces_f32, &c);
  return done(&c);
}

/* in: g, x; out: the gradient of the table. */
bool TY_KERNEL(hash_grid_backward_table)(const ty_kernel_args *k) {
  context c = context_of(k, k->in[1], k->in[0]->size[1]);
  c.g = k->in[0]->data, c.to = k->out[0]->data;
  ty_parallel_for(c.p->levels, 1, k->in[0]->dtype == TY_F64 ? spread_levels_f64 : spread_levels_f32, &c);
  return done(&c);
}

/* in: g, x, table; out: the gradient of x. */
bool TY_KERNEL(hash_grid_backward_input)(const ty_kernel_args *k) {
  context c = context_of(k, k->in[1], k->in[0]->size[1]);
  c.g = k->in[0]->data, c.table = k->in[2]->data, c.to = k->out[0]->data;
  ty_parallel_for((c.n + PIECE - 1) / PIECE, 1, k->in[0]->dtype == TY_F64 ? slope_pieces_f64 : slope_pieces_f32, &c);
  return done(&c);
}

/* in: x; out: rows, weights. */
bool TY_KERNEL(hash_corners)(const ty_kernel_args *k) {
  context c = context_of(k, k->in[0], ((const ty_p_hash_grid *)k->params)->levels);
  int32_t *row = k->out[0]->data;
  for (int64_t i = 0; i < c.n; i++) {
    for (int l = 0; l < c.p->levels; l++, row += (int64_t)1 << c.p->dims) {
      const int64_t at = (i * c.p->levels + l) << c.p->dims;
      if (k->in[0]->dtype == TY_F64) corners_of_f64(&c, i, l, row, (double *)k->out[1]->data + at);
      else corners_of_f32(&c, i, l, row, (float *)k->out[1]->data + at);
    }
  }
  return true;
}

/* ---- the network ---- */

static void take_network(context *c, const ty_view *first, const ty_view *last, const ty_view *hidden) {
  c->width = first->size[0], c->out = last->size[0], c->layers = hidden ? hidden->size[0] : 0;
  c->first = first->data, c->last = last->data, c->hidden = hidden ? hidden->data : NULL;
}

/* in: x, table, first, last, hidden or NULL; out: y, and what is kept, or nothing. */
bool TY_KERNEL(hash_field)(const ty_kernel_args *k) {
  context c = context_of(k, k->in[0], k->in[2]->size[1]);
  take_network(&c, k->in[2], k->in[3], k->in[4]);
  c.table = k->in[1]->data, c.to = k->out[0]->data, c.kept = k->out[1]->count ? k->out[1]->data : NULL;
  ty_parallel_for((c.n + PIECE - 1) / PIECE, 1, k->in[0]->dtype == TY_F64 ? field_pieces_f64 : field_pieces_f32, &c);
  return done(&c);
}

/* The gradient of the table is made from that of the features some parts at a time, which stays in the cache. */
static void field_and_table(context *c, bool wide, int64_t parts, void *table) {
  const int64_t once = ty_parallel_threads() > 4 ? 2 * ty_parallel_threads() : 8, room_of = once * c->part;
  const size_t size = wide ? 8 : 4, bytes = ((size_t)(room_of < c->n ? room_of : c->n) * (size_t)c->all + 1) * size;
  if (!(c->to = room(c, bytes))) return;
  for (int l = 0; l < c->p->levels; l++) {
    const size_t row = (size_t)c->features * size;
    memset((char *)table + (size_t)c->level[l].first * row, 0, (size_t)ty_hash_rows(c->p, l) * row);
  }
  for (c->past = 0; c->past < parts && !c->failed && !ty_interrupted; c->past += once) {
    const int64_t some = once < parts - c->past ? once : parts - c->past, begin = c->past * c->part;
    ty_parallel_for(some, 1, wide ? field_parts_f64 : field_parts_f32, c);
    context rest = *c;
    rest.added = true, rest.g = c->to, rest.to = table;
    rest.n = some * c->part < c->n - begin ? some * c->part : c->n - begin;
    rest.x = (const char *)c->x + (size_t)(begin * c->p->dims) * size;
    ty_parallel_for(c->p->levels, 1, wide ? spread_levels_f64 : spread_levels_f32, &rest);
    c->failed = c->failed || rest.failed;
  }
  ty_scratch_free(c->to, bytes);
}

/* in: g, then as above, and what was kept or NULL; out: gradients of the features, or none, of first, last and hidden, and of the table where there
 * is none of the features. */
bool TY_KERNEL(hash_field_backward)(const ty_kernel_args *k) {
  const bool wide = k->in[0]->dtype == TY_F64;
  context c = context_of(k, k->in[1], k->in[3]->size[1]);
  take_network(&c, k->in[3], k->in[4], k->in[5]);
  c.g = k->in[0]->data, c.table = k->in[2]->data, c.to = k->out[0]->data;
  c.kept = k->in[6] ? k->in[6]->data : NULL;
  for (int i = 0; i < 3; i++) c.weights[i] = k->out[1 + i]->data;
  const int64_t tile = 2 * TY_VECTOR_BYTES / (wide ? 8 : 4), each = filled((c.n + MOST_PARTS - 1) / MOST_PARTS, PIECE);
  c.part = each > LEAST_PART ? each : LEAST_PART;
  c.size = c.width * filled(c.all, tile) + (c.layers * c.width + c.out) * filled(c.width, tile);
  const int64_t parts = (c.n + c.part - 1) / c.part;
  const size_t bytes = (size_t)(parts * c.size + 1) * (wide ? 8 : 4);
  if (!(c.sums = ty_scratch_alloc(bytes))) return false;
  if (k->out[4]->count) field_and_table(&c, wide, parts, k->out[4]->data);
  else ty_parallel_for(parts, 1, wide ? field_parts_f64 : field_parts_f32, &c);
  if (!c.failed && !ty_interrupted) {
    if (wide) add_parts_f64(&c, parts);
    else add_parts_f32(&c, parts);
  }
  ty_scratch_free(c.sums, bytes);
  return done(&c);
}
