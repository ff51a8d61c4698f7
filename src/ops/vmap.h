/* Functions mapped over a batch dimension: ty.vmap.
 *
 * Inside a mapped function a tensor that differs by sample is shown without its batch dimension: a ty_tensor whose
 * `batch` holds the whole, `full`, with that dimension in front, and the level, which is one call of a mapped
 * function. Levels nest: `full` may itself be one of a level further out, which has a lower id. ty_call_op() asks
 * for the rule of the op (vmap_rules.c, vmap.def) where an argument is such a tensor; it calls the op, or a few
 * others, on the whole. Ops that are compositions need no rule: what they call has one.
 *
 * This stands below Lua and beside autograd, not above it, for two reasons. All compositions, modules and backward
 * rules call ops through ty_call_op(), so that one hook serves them all. And there is one graph: a node that is
 * recorded for such tensors keeps them as they are, and its backward rule runs mapped. Entering and leaving a level
 * are nodes of that graph. What comes back to an input that was the same for all samples is summed over them where
 * the level is over, as the gradient of a sum of all samples is; while it is still running, a gradient stays one for
 * each sample, as in a loop that calls ty.grad. The `full` tensors have no history.
 *
 * While nobody maps anything all of it costs one look at ty_mapped_tensors. */
#ifndef TY_OPS_VMAP_H
#define TY_OPS_VMAP_H

#include "op.h"

enum { TY_RANDOM_ERROR, TY_RANDOM_DIFFERENT, TY_RANDOM_SAME };

typedef struct ty_level {
  uint32_t refs;
  uint64_t id; /* rises */
  int64_t size;
  bool running;
  int randomness;
  struct ty_level *outer; /* the level that was running before, of this thread */
} ty_level;

struct ty_batch {
  uint32_t refs;
  ty_tensor *full;
  ty_level *level;
};

/* How many tensors with a batch and running levels there are, on all threads. */
extern atomic_int ty_mapped_tensors;

/* A rule as op.h wants it runs for mapped tensors: it takes the composition of differentiable ops. */
extern _Thread_local bool ty_vjp_mapped;

/* The level whose rule a call needs: the innermost among its arguments; of random ops the running one. NULL: none. */
ty_level *ty_level_of_call(const ty_op *op, const ty_value *arg);
static inline ty_level *ty_mapped_call(const ty_op *op, const ty_value *arg) {
  return __builtin_expect(atomic_load_explicit(&ty_mapped_tensors, memory_order_relaxed) != 0, 0)
             ? ty_level_of_call(op, arg)
             : NULL;
}

/* Whether the op has a rule of its own; of composed ops few have. */
bool ty_has_map_rule(const ty_op *op);
/* Runs the rule. *record as in ty_call. */
bool ty_call_mapped(ty_level *level, const ty_op *op, const ty_value *arg, ty_tensor **out, bool *record);
/* Whether the op's fused backward has rules for what is needed. */
bool ty_map_plain_backward(const ty_vjp *c);

/* ---- levels ---- */

ty_level *ty_level_open(int64_t size, int randomness); /* the caller's reference */
void ty_level_close(ty_level *level);                  /* no longer running; the reference is given back */
ty_level *ty_level_running(void);
ty_level *ty_level_set_running(ty_level *level); /* returns what it was */
void ty_level_release(ty_level *level);

/* x [size, ...] as the tensor of one sample, and back: [size, ...], expanded where x is the same for all.
 * Differentiable; scoped. */
ty_tensor *ty_map_enter(ty_tensor *x, ty_level *level);
ty_tensor *ty_map_leave(ty_tensor *x, ty_level *level);
/* x, the same for all samples, as each sample's own. Differentiable; scoped. */
ty_tensor *ty_map_each(ty_tensor *x, ty_level *level);
/* The sample's tensor of `full`, which has no history. A new reference. */
ty_tensor *ty_map_of_full(ty_tensor *full, ty_level *level);
/* How the nodes of both give their level back, by which they are known. */
void ty_map_release_level(void *owner);
/* Fails where t differs by sample: `who` wants a value. */
bool ty_map_check_value(const ty_tensor *t, const char *who);
/* ty_copy_into() where one of the two has a batch. */
bool ty_map_copy_into(ty_tensor *dst, ty_tensor *src);

/* ---- what a node knows ---- */

enum { TY_MAX_LEVELS = 8 };
typedef struct ty_node_levels {
  int count;
  ty_level *level[TY_MAX_LEVELS]; /* those of the outputs */
  uint8_t has[];                  /* by input: which of them it has */
} ty_node_levels;

bool ty_node_note_levels(ty_node *n, ty_tensor *const *in, ty_tensor *const *out, int nout);
void ty_node_forget_levels(ty_node_levels *levels);
/* The gradient for input i, summed over the samples of levels that are over and that the input does not have.
 * Scoped. */
ty_tensor *ty_map_sum_over(const ty_node_levels *levels, int i, ty_tensor *g);
/* g with the batch of every level of the outputs. Scoped. */
ty_tensor *ty_map_spread(const ty_node_levels *levels, ty_tensor *g);

#endif
