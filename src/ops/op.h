/* Inside an op: what forward functions and backward rules are given and what they may call. */
#ifndef TY_OPS_OP_H
#define TY_OPS_OP_H

#include "../../kernels/params.h"
#include "../tycho.h"

#define TY_MAX_OUTPUTS 6
#define TY_MAX_ARGS 20

typedef enum ty_op_id {
#define OP(name, ...) TY_OP_##name,
#include "ops.def"
#undef OP
  TY_OP_COUNT
} ty_op_id;

enum { /* the flags of ops.def */
       FLOATS = 1 << 0,
       NUMBERS = 1 << 1,
       INTS = 1 << 2,
       ANY = 1 << 3,
       SAVE_OUT = 1 << 4,
       VIEW = 1 << 5,
       INPLACE = 1 << 6,
       STRIDED = 1 << 7,
       HALF = 1 << 8,
       INTERNAL = 1 << 9,
       RANDOM = 1 << 10,
       WRITES = 1 << 11,
       FIRST = 1 << 12,
       X_FOR_Y = 1 << 13,
       Y_FOR_X = 1 << 14,
       HALF_ON_GPU = 1 << 15,
       AUTO_HALF = 1 << 16,
       AUTO_FULL = 1 << 17,
       QUANTIZED = 1 << 18,
       RESTS = 1 << 19,
       PROMOTED = 1 << 20,
       NOT_OUT_0 = 1 << 21,
       NOT_OUT_1 = 1 << 22
};

typedef enum ty_arg_kind {
  TY_ARG_TENSOR,
  TY_ARG_OPTIONAL,
  TY_ARG_OPERAND,
  TY_ARG_LIST,
  TY_ARG_INT,
  TY_ARG_FLOAT,
  TY_ARG_BOOL,
  TY_ARG_STRING,
  TY_ARG_INTS,
  TY_ARG_VARINTS,
  TY_ARG_DTYPE,
  TY_ARG_DEVICE,
  TY_ARG_NUMBER, /* TY_INT, TY_FLOAT or TY_NONE */
  TY_ARG_NAMED_INTS
} ty_arg_kind;

typedef struct ty_arg {
  const char *name;
  uint8_t kind; /* ty_arg_kind */
  bool kept;    /* saved for the backward rule */
  bool required;
  double number;    /* default of TY_ARG_FLOAT */
  int64_t integer;  /* default of TY_ARG_INT, TY_ARG_BOOL */
  const char *text; /* default of TY_ARG_STRING and, as one number or "", of TY_ARG_INTS */
} ty_arg;

/* One call: `arg` has op->nargs values in the order of the table, `out` op->nout slots, NULL on entry (or the tensor to
 * write into, for in-place calls: ty_out() handles both). Results are new references. */
typedef struct ty_call {
  const struct ty_op *op;
  const ty_value *arg;
  ty_tensor **out;
  bool record; /* a node is made of this call; a forward that records a graph of its own (as if composed) clears it */
} ty_call;

/* What a backward rule gets. Tensor inputs are numbered in schema order with list elements in place (an absent optional
 * or a number counts, as NULL). arg[i].t and lists hold the kept tensors, NULL for those not kept, whose shape is
 * still in `in`. The rule puts dx[i] = gradient for input i, a tensor of the current scope, where need[i]; shapes that
 * were broadcast and dtypes that were promoted are brought back by the engine. g[j] is NULL when output j got no gradient.
 * sum[i], where not NULL, is what other uses of input i have given so far, contiguous and in the input's shape and
 * dtype: a rule that can adds to it in place and hands it back as dx[i], which spares a pass over memory. */
typedef struct ty_vjp {
  const struct ty_op *op;
  const ty_value *arg;
  const struct ty_edge *in;
  int nin;
  ty_tensor *const *out; /* outputs, when SAVE_OUT; NULL: not kept */
  ty_tensor *const *g;
  ty_tensor *const *sum;
  ty_tensor **dx;
  const bool *need;
} ty_vjp;

typedef struct ty_op {
  const char *name;
  uint16_t id;
  uint8_t nout, nargs, ninputs; /* ninputs: tensor arguments, a list counting as one */
  uint32_t flags;
  const ty_arg *args;
  bool (*forward)(ty_call *c);
  bool (*backward)(ty_vjp *c);
  bool composed;       /* the forward function records its own graph */
  bool differentiable; /* directly or composed */
  const char *doc;
} ty_op;

_Static_assert(TY_OP_COUNT <= 1024, "ty_op_id fits its fields");

extern const ty_op ty_ops[TY_OP_COUNT];
const ty_op *ty_op_find(const char *name); /* NULL when there is none */

/* Named access to the arguments of a call or rule: `const ty_softmax_args *a = TY_ARGS(softmax, c); a->dim.i` */
#define T(n) ty_value n;
#define K(n) ty_value n;
#define O(n) ty_value n;
#define OK(n) ty_value n;
#define N(n) ty_value n;
#define NK(n) ty_value n;
#define ONK(n) ty_value n;
#define L(n) ty_value n;
#define LK(n) ty_value n;
#define I(n, d) ty_value n;
#define IR(n) ty_value n;
#define F(n, d) ty_value n;
#define FR(n) ty_value n;
#define B(n, d) ty_value n;
#define S(n, d) ty_value n;
#define SR(n) ty_value n;
#define IS(n, d) ty_value n;
#define IV(n) ty_value n;
#define D(n) ty_value n;
#define V(n) ty_value n;
#define VR(n) ty_value n;
#define X(n) ty_value n;
#define XR(n) ty_value n;
#define M(n) ty_value n;
#define OP(name, outs, args, ...)   \
  typedef struct ty_##name##_args { \
    args                            \
  } ty_##name##_args;
#include "ops.def"
#undef OP
#include "undef_args.h"
#define TY_ARGS(name, c) ((const ty_##name##_args *)(const void *)(c)->arg)

/* Every forward function and backward rule of the table. */
#define OP(name, outs, args, fwd, bwd, ...) \
  bool fwd_##fwd(ty_call *c);               \
  bool vjp_##bwd(ty_vjp *c);
#include "ops.def"
#undef OP

/* ---- calling ----
 * Runs an op and records it. Arguments are checked against the schema's kinds by the caller (the Lua border, the C
 * functions); values are checked here and by the op. out: op->nout slots that receive new references. */
bool ty_call_op(ty_op_id id, const ty_value *arg, ty_tensor **out);
/* The same, writing the (single) result into the first argument, which must have its shape and dtype. */
bool ty_call_inplace(ty_op_id id, const ty_value *arg);

/* ---- for forward functions ---- */

/* Fails with "op: " before the text. `c` may be a ty_call or ty_vjp. */
#define ty_op_fail(c, code, ...) ty_op_fail_((c)->op, code, __VA_ARGS__)
bool ty_op_fail_(const ty_op *op, ty_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Makes output i (contiguous, undefined contents), or checks that the in-place target fits. */
bool ty_out(ty_call *c, int i, int device, ty_dtype dtype, int ndim, const int64_t *size);
static inline bool ty_out_like(ty_call *c, int i, const ty_tensor *t, ty_dtype dtype) {
  return ty_out(c, i, ty_device_of(t), dtype, t->v.ndim, t->v.size);
}
/* Sets output i to a new view of t, or to a tensor of the current scope (composed forwards). */
bool ty_out_view(ty_call *c, int i, ty_tensor *t, int ndim, const int64_t *size, const int64_t *stride, int64_t offset);
bool ty_out_set(ty_call *c, int i, ty_tensor *scoped); /* false when NULL; takes its own reference */

/* Runs the kernel of c->op (or of `kernel`) for the device of the outputs with c->out and `in` (entries may be NULL).
 * Inputs are made contiguous and half precision goes through f32 where the row's flags say so. Does nothing on meta. */
bool ty_launch(ty_call *c, ty_tensor *const *in, int nin, const void *params);
bool ty_run_kernel(ty_op_id kernel, int device, const ty_view *const *out, int nout, const ty_view *const *in, int nin,
                   const void *params);
/* The same, with the storage of in[1] that ty_kernel_args.weights is to be. */
bool ty_run_kernel_on(ty_op_id kernel, int device, const ty_view *const *out, int nout, const ty_view *const *in,
                      int nin, const void *params, ty_storage *weights);
/* The storage of a weight; NULL in a backward pass and when gradients are being recorded for it, after which it
 * changes. */
ty_storage *ty_weights_at_rest(const ty_tensor *weight);
bool ty_set_weights_at_rest(bool on); /* on this thread; returns what it was */
bool ty_launch_kernel(ty_op_id kernel, ty_tensor *const *out, int nout, ty_tensor *const *in, int nin,
                      const void *params);

/* Argument checks: each fails with the op, the argument, what came and what was wanted. `arg` is the position. */
bool ty_check_floats(ty_call *c, int arg);                                   /* dtype class */
bool ty_check_ndim(ty_call *c, int arg, int lo, int hi, const char *layout); /* layout: "[n, c, h, w]" */
bool ty_check_index_dtype(ty_call *c, int arg);                              /* i64 or i32 */
bool ty_check_dim(ty_call *c, int arg, int ndim, int *dim); /* negative counts from the end; 0-d takes 0 and -1 */
/* A list of dims as a mask; empty means all. Fails on repeats. */
bool ty_check_dims(ty_call *c, int arg, int ndim, uint32_t *mask);
/* One or two integers to two: stride, padding ... ; each at least lo. */
bool ty_check_pair(ty_call *c, int arg, int64_t lo, int64_t out[2]);
/* One integer, or n of them (1 to 3), to n. */
bool ty_check_each(ty_call *c, int arg, int n, int64_t lo, int64_t *out);
/* "{1, 2}"; each text lives until the sixth after it. */
const char *ty_ints_text(int n, const int64_t *v);
bool ty_broadcast(const ty_op *op, const ty_view *a, const ty_view *b, int *ndim, int64_t *size);
/* Index of `text` in the NULL-ended list, or fails listing them. */
int ty_check_choice(ty_call *c, int arg, const char *const *choices);

/* An activation by its name: of an argument, checked, and in a rule (checked already). */
bool ty_check_activation(ty_call *c, int arg, ty_activation *kind);
ty_activation ty_activation_named(const char *name);
/* An activation and its derivative, as differentiable ops. */
ty_tensor *ty_activate(ty_tensor *x, ty_activation kind);
ty_tensor *ty_activation_slope(ty_tensor *x, ty_activation kind);

/* x in `dtype` (x itself when it has it), a scoped tensor, recorded. */
ty_tensor *ty_to(ty_tensor *x, ty_dtype dtype);
/* `v` seen with another shape it broadcasts to: strides 0 where it repeats. The caller has checked with ty_broadcast(). */
void ty_view_expand(ty_view *out, const ty_view *v, int ndim, const int64_t *size);
/* One value between C and an element: offset in elements; no checks. */
double ty_load_scalar(const ty_tensor *t, int64_t offset);
/* The first element, wherever it is; waits for a GPU. Integers as integers. False after ty_fail(). */
bool ty_read_value(const ty_tensor *t, ty_value *value);
void ty_store_scalar(void *p, ty_dtype dtype, ty_value value);
/* Copies src into dst's elements (broadcasting, converting); not recorded; any devices. */
bool ty_copy_into(ty_tensor *dst, ty_tensor *src);
ty_tensor *ty_scalar_of(ty_value value, ty_dtype dtype, int device); /* 0-d, scoped */
#define ty_scalar(value, dtype, device) ty_scalar_of(ty_operand(value), dtype, device)
/* A TY_INT or TY_FLOAT as kernels take it; fractions are cut off in i, and what is beyond all integers is the last. */
ty_number ty_number_of(ty_value value);
/* The part of x that steps lead to, four integers each: what, and its numbers. Scoped; recorded. */
enum {
  TY_SLICE_SKIP,     /* so many dimensions, which stay as they are */
  TY_SLICE_NEW_DIM,  /* none */
  TY_SLICE_POSITION, /* the position */
  TY_SLICE_RANGE     /* start, stop, step */
};
ty_tensor *ty_apply_slices(ty_tensor *x, ty_ints items);
/* t moved one position on along dim; `value` comes in at the free end. Recorded. */
ty_tensor *ty_shifted(ty_tensor *t, int dim, bool backwards, double value);
/* The scale of attention over keys of width d, where the user gives 0 for the usual one. */
static inline double ty_attention_scale(double scale, int64_t d) {
  return scale != 0 ? scale : d > 0 ? 1 / sqrt((double)d) : 1;
}
/* Heads of keys and values [b, hkv, s, d] repeated for their groups of queries, and the sum over each group. */
ty_tensor *ty_repeat_heads(ty_tensor *x, int64_t heads);
ty_tensor *ty_sum_heads(ty_tensor *x, ty_ints size);

/* Philox block counter for n elements drawn, from this thread's generator. */
ty_p_random ty_draw(int64_t n, double a, double b);

/* Derivatives of silu and gelu as differentiable ops. */
ty_tensor *ty_silu_slope(ty_tensor *x);
ty_tensor *ty_gelu_slope(ty_tensor *x, bool tanh_form);

/* x over `dims`, with mean 0 (when centred) and mean square 1, and what it was multiplied by; the gradient of that. */
ty_tensor *ty_normalized(ty_tensor *x, ty_ints dims, bool centred, double eps, ty_tensor **rstd);
ty_tensor *ty_normalized_gradient(ty_tensor *gh, ty_tensor *h, ty_tensor *rstd, ty_ints dims, bool centred);

/* Gradient mode off while a fused backward may run: true when the rule's results need no graph of their own. */
extern _Thread_local bool ty_vjp_mapped; /* see vmap.h */
static inline bool ty_vjp_plain(void) { return !ty_grad_enabled() && !ty_vjp_mapped; }
/* Of tensor input i of a rule. */
ty_ints ty_vjp_size(const ty_vjp *c, int i);
ty_dtype ty_vjp_dtype(const ty_vjp *c, int i);
int ty_vjp_device(const ty_vjp *c, int i);

#endif
