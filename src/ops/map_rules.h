/* What the rules of ty.vmap are given and share: see vmap.h and vmap.def. */
#ifndef TY_OPS_MAP_RULES_H
#define TY_OPS_MAP_RULES_H

#include "vmap.h"

/* A call in which some tensors differ by sample at `level`. A rule runs without recording, within a scope; of composed ops
 * as the user's code does. */
typedef struct ty_mapped {
  const ty_op *op;
  const ty_value *arg;
  ty_tensor **out; /* new references */
  ty_level *level;
  bool *record;
} ty_mapped;

#define MAP(op, rule) bool map_##rule(ty_mapped *m);
#include "vmap.def"
#undef MAP
bool map_each(ty_mapped *m);
bool map_alike(ty_mapped *m);

static inline bool ty_differs(const ty_mapped *m, const ty_tensor *t) {
  return t && t->batch && t->batch->level == m->level;
}
static inline bool ty_has_tensor(const ty_value *v) { return v->kind == TY_TENSOR && v->t; }

/* [batch, ...] of t, expanded where it is the same for all samples. Scoped; NULL after an error. */
ty_tensor *ty_whole(ty_mapped *m, ty_tensor *t);
/* The same with sizes of 1 behind the batch, so that a sample has `rank` dimensions. */
ty_tensor *ty_whole_of_rank(ty_mapped *m, ty_tensor *t, int rank);
/* Dimension `from` at place `to`. */
ty_tensor *ty_moved_dim(ty_tensor *t, int from, int to);
/* t with the dimensions from `at` to `at` + n as one, and that of dimension `at` split in two, of which the first is n. */
ty_tensor *ty_merged_dims(ty_tensor *t, int at, int n);
ty_tensor *ty_split_dim(ty_tensor *t, int at, int64_t n);

/* Calls the op with these arguments; outputs i with a batch in front become the results. */
bool ty_map_call(ty_mapped *m, const ty_value *arg);
/* The same, and hands the whole outputs out, scoped. */
bool ty_map_outputs(ty_mapped *m, const ty_value *arg, ty_tensor **whole);
/* Result i: of `whole`, [batch, ...], or a tensor as the mapped function sees it. False when NULL. */
bool ty_map_give(ty_mapped *m, int i, ty_tensor *whole);
bool ty_map_give_sample(ty_mapped *m, int i, ty_tensor *t);
/* Fails because argument i differs by sample, which this rule cannot. */
bool ty_map_refuse(ty_mapped *m, int i);
/* Whether tensors from argument `first` on are the same for all samples. */
bool ty_map_same_from(const ty_mapped *m, int first);

#endif
