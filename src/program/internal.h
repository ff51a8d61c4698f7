/* How a program is laid out; for the files of this folder. */
#ifndef TY_PROGRAM_INTERNAL_H
#define TY_PROGRAM_INTERNAL_H

#include "program.h"

enum { SLOT_TEMPORARY, SLOT_RESULT, SLOT_HELD, SLOT_ARGUMENT, SLOT_GRADIENT, SLOT_INNER };

typedef struct slot {
  uint8_t kind;
  bool made;           /* during the recording */
  bool gone;           /* freed during the recording */
  bool host;           /* filled by the host: a constant */
  bool written;        /* by a launch */
  bool seen;           /* the host has looked at it */
  bool owned;          /* `storage` is counted */
  int number;          /* of the argument, leaf or result */
  ty_storage *storage; /* of held ones; while recording of all, during a replay of arguments */
  char *base;          /* where its bytes are: while recording, and during a replay */
  size_t bytes;
  int first, last; /* steps between which a temporary is alive */
  size_t offset;   /* in the arena */
} slot;

/* One view of a launch. */
typedef struct operand {
  ty_view view;
  int slot;       /* -1: none (absent, empty, or a number) */
  int64_t offset; /* of view.data in its slot, bytes */
  int64_t number; /* the bits of a number operand, which view.data points to */
  bool is_number, absent;
} operand;

/* What replays may change in them. RANDOM ones begin with a ty_p_random; so do those with DROPOUT, which draw nothing
 * when its probability is 0. */
enum { PARAMS_NONE, PARAMS_PLAIN, PARAMS_SCALARS, PARAMS_RANDOM, PARAMS_DROPOUT, PARAMS_OPTIM };

typedef struct launch {
  ty_op_id id;
  ty_kernel *kernel;
  int nout, nin, first; /* operands: outputs, then inputs */
  bool dead;
  bool part;          /* of an optimizer's step: one tensor's, with the numbers of the whole */
  bool left_out;      /* a part that a scheme does without */
  bool writes_inputs; /* ops over lists, without outputs */
  bool rests;         /* ty_kernel_args.weights was set: input 1 */
  uint8_t params;     /* PARAMS_ */
  size_t params_at;   /* in program.params */
  int hook;           /* -1: none; those without a kernel are a hook and nothing else */
  int hooked;         /* for a hook: the launch that gets its numbers, or -1 */
  int clip;           /* operand that holds the norm, or -1 */
  double limit;
} launch;

/* What runs: launches [begin, end) of `order`, as one loop when fused. */
typedef struct step {
  int begin, end;
  struct fused *fused;
} step;

/* A pointer to be set at each replay. */
typedef struct patch {
  int slot, operand;
} patch;

typedef struct leaf {
  ty_tensor *tensor; /* counted; NULL: argument number `argument` */
  int argument;
  bool read;        /* the first that happened to .grad was a look at it: it must be there again, or not */
  bool had;         /* it was there */
  int slot;         /* GRADIENT slot of it, or -1 */
  ty_view view;     /* its form */
  ty_tensor *after; /* .grad at the end, counted; NULL: none */
  bool kept;        /* .grad at the end is the one of the beginning */
} leaf;

typedef struct result {
  ty_view view;
  int slot;
  int64_t offset;
  ty_tensor *fixed; /* of held slots: the tensor itself, counted */
  int root;         /* of fresh memory: the first result in it */
  bool whole;       /* all of it, in C order */
} result;

#define LIST(type) \
  struct {         \
    type *v;       \
    int n, room;   \
  }

struct ty_program {
  LIST(slot) slots;
  LIST(operand) operands;
  LIST(launch) launches;
  LIST(char) params;
  LIST(leaf) leaves;
  LIST(int) order; /* of the launches that live */
  LIST(step) steps;
  LIST(patch) patches;
  ty_argument *arguments;
  int narguments;
  result *results;
  int nresults;
  const ty_view **views; /* per operand: what kernels are given */
  LIST(int) written;     /* slots whose storages get a new version, so that graphs which kept them notice */
  ty_storage *arena;
  size_t arena_bytes, temporary_bytes;
  ty_generator random; /* at the beginning; afterwards .offset is how far it went */
  uint64_t drawn;
  int recorded, hooks;
  bool grad_enabled;
  int autocast;  /* its dtype */
  int device;    /* of all launches */
  int stream;    /* of a GPU: that of the last replay */
  bool wandered; /* replays were on several */
  int replays;
  bool early, split;     /* updates as soon as their gradients are there; steps are in parts */
  int hastened;          /* updates that run earlier than they were recorded */
  int64_t arena_most;    /* 0: any number of bytes */
  struct graphs *graphs; /* on a GPU, from the second replay on; NULL: without */
};

/* Makes room for `more` entries; false after ty_fail(). */
bool ty_program_room(void *list, size_t size, int more);
#define ROOM(list, more) ty_program_room(&(list), sizeof *(list).v, more)

typedef struct ty_params_row {
  uint8_t kind, size; /* PARAMS_; 0: not known */
} ty_params_row;
extern const ty_params_row ty_program_params[TY_OP_COUNT];
extern const bool ty_program_elementwise[TY_OP_COUNT];

static inline void *ty_launch_params(const ty_program *p, const launch *l) {
  return l->params ? p->params.v + l->params_at : NULL;
}
/* Operand i of l is written: an output, or any argument of an op over lists. */
static inline bool ty_launch_writes(const launch *l, int i) { return i < l->nout || l->writes_inputs; }

bool ty_program_plan(ty_program *p); /* liveness, steps, arena; again where what is left out has changed */

/* ---- updates (updates.c) ---- */

bool ty_program_split(ty_program *p);  /* steps of optimizers become a launch for each tensor; false after ty_fail() */
void ty_program_hasten(ty_program *p); /* in p->order */
/* Might the two be the same memory? */
bool ty_program_may_alias(const ty_program *p, const operand *a, const operand *b);

/* Sets the pointers that change with the slots' bases; runs steps [begin, end), false after ty_fail(). */
void ty_program_patch(ty_program *p);
bool ty_program_run(ty_program *p, int begin, int end, ty_program_hook *hook, void *owner);

/* ---- graphs of a GPU ---- */

struct graphs *ty_graphs_new(const ty_program *p); /* NULL: not for this program */
bool ty_graphs_replay(ty_program *p, struct graphs *g, ty_program_hook *hook, void *owner);
void ty_graphs_free(const ty_program *p, struct graphs *g);

/* ---- fused steps ---- */

/* Ends of the run of launches that begins at order[begin] and can be one loop; begin + 1 when there is none. */
int ty_fused_run(ty_program *p, int begin);
struct fused *ty_fused_new(ty_program *p, int begin, int end); /* after the slots that became INNER are known */
bool ty_fused_replay(ty_program *p, const struct fused *f);
void ty_fused_free(struct fused *f);

#endif
