/* The graph: nodes are made by ty_call_op() while gradients are enabled, walked by the engine. A tensor holds its node,
 * a node holds the nodes of its inputs (and the leaves) and the memory of what the op's row keeps. What is kept is held
 * without history and gets it back when the rule runs, so there is no cycle. */
#ifndef TY_AUTOGRAD_H
#define TY_AUTOGRAD_H

#include "../ops/op.h"

/* A kept tensor: its memory, not the tensor. */
typedef struct ty_saved {
  ty_storage *storage; /* NULL: not kept, or packed */
  void *data;
  void *packed; /* what the pack hook made of it */
  ty_batch *batch;
  uint32_t version;
  int8_t dtype, ndim;
  int64_t size[TY_MAX_DIMS];
  int64_t stride[TY_MAX_DIMS];
} ty_saved;

/* What a node knows of one tensor input. Shape and dtype are there whether or not the tensor is kept. */
typedef struct ty_edge {
  ty_node *node;   /* producer of the input, or NULL */
  ty_tensor *leaf; /* the input itself when it is a leaf that wants a gradient */
  uint16_t output; /* of `node` */
  bool present;    /* a tensor, not a number or nil */
  int8_t dtype, ndim, device;
  const int64_t *size; /* saved.size */
  ty_saved saved;
} ty_edge;

/* A node whose backward is not an op's: Lua functions. g: gradients per output (NULL: none came); dx: slots per input for
 * new references. */
typedef struct ty_custom {
  const char *name;
  bool (*backward)(void *owner, ty_tensor *const *g, int nout, ty_tensor **dx, int nin);
  void (*release)(void *owner);
  void *owner;
} ty_custom;

/* Saved-tensor hooks: while set, every tensor a node keeps goes through pack() and comes back through unpack(). */
typedef struct ty_saved_hooks {
  /* NULL after ty_fail(); op: the name of the op that keeps t; what: of its argument, or "output" */
  void *(*pack)(void *owner, ty_tensor *t, const char *op, const char *what);
  ty_tensor *(*unpack)(void *owner, void *packed); /* a new reference, NULL after ty_fail() */
  void (*drop)(void *owner, void *packed);
  void (*retain)(void *owner); /* one count per node that uses the hooks */
  void (*release)(void *owner);
  void *owner;
} ty_saved_hooks;

struct ty_node {
  uint32_t refs;
  uint16_t nin, nout;
  bool spent;      /* what was kept is gone after a backward without keep_graph */
  bool needed;     /* engine: leads to one of the inputs asked for */
  uint32_t scope;  /* of the profile in which it was made, see ops/profile.h */
  uint64_t seq;    /* inputs have lower numbers than what is computed from them */
  uint64_t pass;   /* engine: the last backward that reached this node */
  const ty_op *op; /* NULL: custom */
  ty_custom custom;
  ty_saved_hooks *hooks; /* owned copy, NULL without hooks */
  ty_hook *grad_hooks;   /* on the gradients of outputs; id's low 16 bits: the output */
  ty_tensor **retained;  /* per output, for retain_grad; NULL until asked for */
  ty_edge *in;
  ty_value *arg;
  ty_saved *out;                 /* kept outputs, NULL unless SAVE_OUT */
  ty_tensor **grad;              /* engine: gradients per output, summed so far */
  struct ty_node_levels *levels; /* of ty.vmap, see ops/vmap.h; NULL: none */
  struct ty_node *next;          /* in the list of nodes to be freed */
  size_t bytes;
};

/* Installs hooks for this thread (NULL: none); returns those before. Nodes copy the struct and count the owner. */
const ty_saved_hooks *ty_set_saved_hooks(const ty_saved_hooks *hooks);

/* Records `op` with its outputs; called by ty_call_op when an input wants a gradient. */
bool ty_record(const ty_op *op, const ty_value *arg, ty_tensor *const *out);
/* Takes over custom.owner, also on failure. */
bool ty_record_custom(ty_custom custom, ty_tensor *const *in, int nin, ty_tensor *const *out, int nout);
bool ty_inputs_want_grad(const ty_op *op, const ty_value *arg);

/* What was kept, with its history: a new reference. */
ty_tensor *ty_node_input(ty_node *n, int i);
ty_tensor *ty_node_output(ty_node *n, int i);
const char *ty_node_name(const ty_node *n);
void ty_node_spend(ty_node *n); /* releases what it keeps */

typedef struct ty_backward_options {
  bool keep_graph, create_graph, allow_unused;
} ty_backward_options;

/* Gradients of sum_i <outputs[i], grads[i]> (grads or an entry NULL: ones, for one-element outputs). With inputs:
 * results[i] get new references (NULL where unused and allowed) and nothing is accumulated. Without: leaves' .grad grow. */
bool ty_run_backward(ty_tensor *const *outputs, ty_tensor *const *grads, int noutputs, ty_tensor *const *inputs,
                     ty_tensor **results, int ninputs, ty_backward_options options);

/* Hook on the gradient of a tensor; takes over `hook` (malloc'ed) and sets its id. */
bool ty_add_hook(ty_tensor *t, ty_hook *hook);
void ty_remove_hook(ty_tensor *t, uint64_t id);
/* The gradient of a computed tensor is wanted in .grad too. */
bool ty_retain_grad(ty_tensor *t);

#endif
