/* Tycho's C library. A program that uses it includes this header alone.
 *
 * Ownership: every ty_<op>() function returns a tensor that belongs to the innermost ty_scope of the calling thread and
 * lives until that scope closes; ty_keep() takes a tensor out of its scope, then ty_release() is the caller's duty.
 * Errors: functions return NULL or false and ty_error() tells why. A NULL argument where a tensor is required returns
 * NULL at once and leaves the first error standing, so calls can be nested and checked once:
 *
 *     ty_scope scope;
 *     ty_scope_open(&scope);
 *     ty_tensor *y = ty_relu(ty_add(ty_matmul(x, w), b));
 *     if (!y) puts(ty_error());
 *     ty_scope_close(&scope);
 */
#ifndef TYCHO_H
#define TYCHO_H

#include <math.h>

#pragma GCC visibility push(default) /* the library is built with hidden symbols; these are its face */
#include "tensor/memory.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TY_VERSION "0.1.0"

const char *ty_error(void); /* text of this thread's last failure */
ty_code ty_error_code(void);
void ty_error_clear(void);

typedef struct ty_scope {
  int mark;
} ty_scope;
bool ty_scope_open(ty_scope *scope);
void ty_scope_close(ty_scope *scope);
/* Gives a new reference to the innermost scope; returns t, and NULL for NULL. */
ty_tensor *ty_scope_add(ty_tensor *t);
ty_tensor *ty_keep(ty_tensor *t); /* a reference of the caller's own */

/* ---- values ---- */

ty_tensor *ty_from_data(const void *data, ty_dtype dtype, int ndim, const int64_t *size); /* copies; scoped */
/* Of a tensor with one element, any dtype. *ok says whether there was one; where ok is NULL a failure is NAN. */
double ty_item(ty_tensor *t, bool *ok);
bool ty_dtype_parse(const char *name, ty_dtype *out);
ty_dtype ty_promote(ty_dtype a, ty_dtype b);

typedef enum ty_kind { TY_NONE, TY_TENSOR, TY_INT, TY_FLOAT, TY_INTS, TY_TENSORS, TY_STRING } ty_kind;

typedef struct ty_ints {
  const int64_t *v;
  int n;
} ty_ints;
typedef struct ty_tensors {
  ty_tensor *const *v;
  int n;
} ty_tensors;

/* One argument of an op. dtypes, devices and booleans are TY_INT. */
typedef struct ty_value {
  union {
    ty_tensor *t;
    int64_t i;
    double f;
    const char *s;
    ty_ints is;
    ty_tensors ts;
  };
  uint8_t kind; /* ty_kind */
} ty_value;

/* A tensor or a number, for arguments that take both. */
static inline ty_value ty_value_of_tensor(ty_tensor *t) {
  ty_value v;
  v.t = t;
  v.kind = TY_TENSOR;
  return v;
}
static inline ty_value ty_value_of_int(int64_t i) {
  ty_value v;
  v.i = i;
  v.kind = TY_INT;
  return v;
}
static inline ty_value ty_value_of_float(double f) {
  ty_value v;
  v.f = f;
  v.kind = TY_FLOAT;
  return v;
}
static inline ty_value ty_value_of_value(ty_value v) { return v; }
#define TY_NO_NUMBER ((ty_value){ .kind = TY_NONE })
#define ty_operand(x)                   \
  _Generic((x), ty_tensor *             \
           : ty_value_of_tensor, double \
           : ty_value_of_float, float   \
           : ty_value_of_float, int     \
           : ty_value_of_int, long      \
           : ty_value_of_int, long long \
           : ty_value_of_int, ty_value  \
           : ty_value_of_value)(x)

#define TY_INTS(...) \
  ((ty_ints){ (const int64_t[]){ __VA_ARGS__ }, sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t) })
#define TY_NO_INTS ((ty_ints){ NULL, 0 })
#define TY_LIST(...) \
  ((ty_tensors){ (ty_tensor *[]){ __VA_ARGS__ }, sizeof((ty_tensor *[]){ __VA_ARGS__ }) / sizeof(ty_tensor *) })

/* ---- the ops: one function each, from the table ----
 * ty_tensor *ty_NAME(arguments) for ops with one output; those with several take a last parameter `out` that receives
 * them all as scoped tensors (NULL: not wanted) and return the first; those with none return whether they succeeded.
 * Tensor-or-number arguments take either, thanks to the macros below. */
#define T(n) , ty_tensor *n
#define K(n) , ty_tensor *n
#define O(n) , ty_tensor *n
#define OK(n) , ty_tensor *n
#define N(n) , ty_value n
#define NK(n) , ty_value n
#define ONK(n) , ty_value n
#define L(n) , ty_tensors n
#define LK(n) , ty_tensors n
#define I(n, d) , int64_t n
#define IR(n) , int64_t n
#define F(n, d) , double n
#define FR(n) , double n
#define B(n, d) , bool n
#define S(n, d) , const char *n
#define SR(n) , const char *n
#define IS(n, d) , ty_ints n
#define IV(n) , ty_ints n
#define D(n) , int n
#define V(n) , int n
#define VR(n) , int n
#define X(n) , ty_value n
#define XR(n) , ty_value n
#define M(n) , const char *n
#define TY_PARAMS_0
#define TY_PARAMS_1
#define TY_PARAMS_2 , ty_tensor **out
#define TY_PARAMS_3 , ty_tensor **out
#define TY_PARAMS_4 , ty_tensor **out
#define TY_PARAMS_5 , ty_tensor **out
#define TY_PARAMS_6 , ty_tensor **out
#define TY_RESULT_0 bool
#define TY_RESULT_1 ty_tensor *
#define TY_RESULT_2 ty_tensor *
#define TY_RESULT_3 ty_tensor *
#define TY_RESULT_4 ty_tensor *
#define TY_RESULT_5 ty_tensor *
#define TY_RESULT_6 ty_tensor *
#define TY_WITHOUT_FIRST(first, ...) __VA_ARGS__
#define TY_PARAMETERS(...) TY_WITHOUT_FIRST(__VA_ARGS__)
#define OP(name, outs, args, ...) TY_RESULT_##outs ty_##name(TY_PARAMETERS(args TY_PARAMS_##outs));
#include "ops/ops.def"
#undef OP
#include "ops/undef_args.h"

#define ty_add(x, y) ty_add(ty_operand(x), ty_operand(y), ty_operand(TY_NO_NUMBER)) /* without alpha */
#define ty_sub(x, y) ty_sub(ty_operand(x), ty_operand(y), ty_operand(TY_NO_NUMBER))
#define ty_searchsorted(sorted, values, right) ty_searchsorted(sorted, ty_operand(values), right)
#define ty_mul(x, y) ty_mul(ty_operand(x), ty_operand(y))
#define ty_div(x, y) ty_div(ty_operand(x), ty_operand(y))
#define ty_pow(x, y) ty_pow(ty_operand(x), ty_operand(y))
#define ty_maximum(x, y) ty_maximum(ty_operand(x), ty_operand(y))
#define ty_minimum(x, y) ty_minimum(ty_operand(x), ty_operand(y))
#define ty_eq(x, y) ty_eq(ty_operand(x), ty_operand(y))
#define ty_ne(x, y) ty_ne(ty_operand(x), ty_operand(y))
#define ty_lt(x, y) ty_lt(ty_operand(x), ty_operand(y))
#define ty_le(x, y) ty_le(ty_operand(x), ty_operand(y))
#define ty_gt(x, y) ty_gt(ty_operand(x), ty_operand(y))
#define ty_ge(x, y) ty_ge(ty_operand(x), ty_operand(y))
#define ty_where(c, x, y) ty_where(c, ty_operand(x), ty_operand(y))
/* Inside an argument of a macro, (ty_ints){ v, n } needs parentheses of its own; TY_INTS(...) has them. */
#define ty_full(size, value, dtype, device) ty_full(size, ty_operand(value), dtype, device)
#define ty_full_like(x, value, dtype) ty_full_like(x, ty_operand(value), dtype)
#define ty_fill_(x, value) ty_fill_(x, ty_operand(value))
#define ty_masked_fill(x, mask, value) ty_masked_fill(x, mask, ty_operand(value))
#define ty_pad(x, pads, mode, value) ty_pad(x, pads, mode, ty_operand(value))
#define ty_clamp(x, min, max) ty_clamp(x, ty_operand(min), ty_operand(max)) /* TY_NO_NUMBER: no bound */
#define ty_arange(start, stop, step, dtype, device) \
  ty_arange(ty_operand(start), ty_operand(stop), ty_operand(step), dtype, device)

/* ---- gradients: see autograd/autograd.h ---- */

void ty_set_requires_grad(ty_tensor *t, bool on); /* of a leaf */
bool ty_grad_enabled(void);
bool ty_set_grad_enabled(bool on);      /* returns what it was */
bool ty_backward(ty_tensor *loss);      /* adds to the .grad of every leaf that wants one */
ty_tensor *ty_grad_of(ty_tensor *leaf); /* borrowed; NULL when there is none */
void ty_clear_grad(ty_tensor *leaf);

/* ---- random numbers: one generator per thread ---- */

typedef struct ty_generator {
  uint64_t seed, offset;
} ty_generator;
ty_generator *ty_default_generator(void);

/* ---- threads of the CPU kernels ---- */

int ty_num_threads(void);
void ty_set_num_threads(int n); /* 0: as many as the machine or OMP_NUM_THREADS says */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
