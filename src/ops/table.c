/* What ops.def becomes in C: argument descriptions, the array of ops, and the typed functions of tycho.h. */
#include <string.h>

#include "../tycho.h"
#include "op.h"

#undef ty_add
#undef ty_sub
#undef ty_mul
#undef ty_div
#undef ty_pow
#undef ty_maximum
#undef ty_minimum
#undef ty_eq
#undef ty_ne
#undef ty_lt
#undef ty_le
#undef ty_gt
#undef ty_ge
#undef ty_where
#undef ty_searchsorted
#undef ty_full
#undef ty_full_like
#undef ty_fill_
#undef ty_masked_fill
#undef ty_clamp
#undef ty_pad
#undef ty_arange

/* ---- arguments ---- */
#define T(n) { .name = #n, .kind = TY_ARG_TENSOR, .required = true },
#define K(n) { .name = #n, .kind = TY_ARG_TENSOR, .required = true, .kept = true },
#define O(n) { .name = #n, .kind = TY_ARG_OPTIONAL },
#define OK(n) { .name = #n, .kind = TY_ARG_OPTIONAL, .kept = true },
#define N(n) { .name = #n, .kind = TY_ARG_OPERAND, .required = true },
#define NK(n) { .name = #n, .kind = TY_ARG_OPERAND, .required = true, .kept = true },
#define ONK(n) { .name = #n, .kind = TY_ARG_OPERAND, .kept = true },
#define L(n) { .name = #n, .kind = TY_ARG_LIST, .required = true },
#define LK(n) { .name = #n, .kind = TY_ARG_LIST, .required = true, .kept = true },
#define I(n, d) { .name = #n, .kind = TY_ARG_INT, .integer = d },
#define IR(n) { .name = #n, .kind = TY_ARG_INT, .required = true },
#define F(n, d) { .name = #n, .kind = TY_ARG_FLOAT, .number = d },
#define FR(n) { .name = #n, .kind = TY_ARG_FLOAT, .required = true },
#define B(n, d) { .name = #n, .kind = TY_ARG_BOOL, .integer = d },
#define S(n, d) { .name = #n, .kind = TY_ARG_STRING, .text = d },
#define SR(n) { .name = #n, .kind = TY_ARG_STRING, .required = true },
#define IS(n, d) { .name = #n, .kind = TY_ARG_INTS, .text = d },
#define IV(n) { .name = #n, .kind = TY_ARG_VARINTS, .text = "" },
#define D(n) { .name = #n, .kind = TY_ARG_DTYPE, .integer = TY_DTYPE_DEFAULT },
#define V(n) { .name = #n, .kind = TY_ARG_DEVICE, .integer = TY_DEVICE_DEFAULT },
#define VR(n) { .name = #n, .kind = TY_ARG_DEVICE, .integer = TY_DEVICE_DEFAULT, .required = true },
#define X(n) { .name = #n, .kind = TY_ARG_NUMBER },
#define XR(n) { .name = #n, .kind = TY_ARG_NUMBER, .required = true },
#define M(n) { .name = #n, .kind = TY_ARG_NAMED_INTS, .text = "" },
#define OP(name, outs, args, ...) static const ty_arg args_of_##name[] = { args };
#include "ops.def"
#undef OP
#include "undef_args.h"

#define T(n) +1
#define K(n) +1
#define O(n) +1
#define OK(n) +1
#define N(n) +1
#define NK(n) +1
#define ONK(n) +1
#define L(n) +1
#define LK(n) +1
#define I(n, d)
#define IR(n)
#define F(n, d)
#define FR(n)
#define B(n, d)
#define S(n, d)
#define SR(n)
#define IS(n, d)
#define IV(n)
#define D(n)
#define V(n)
#define VR(n)
#define X(n)
#define XR(n)
#define M(n)
enum {
#define OP(name, outs, args, ...) inputs_of_##name = 0 args,
#include "ops.def"
#undef OP
};
#include "undef_args.h"

/* ---- ops ---- */

/* Never called: their addresses say what a row means by `none` and `composed`. */
bool vjp_none(ty_vjp *c) { return ty_op_fail(c, TY_EUNSUPPORTED, "not differentiable"); }
bool vjp_composed(ty_vjp *c) { return ty_op_fail(c, TY_EUNSUPPORTED, "is made of other ops"); }

const ty_op ty_ops[TY_OP_COUNT] = {
#define OP(op, outs, arguments, fwd, bwd, kernel, flag_set, text)                                       \
  { .name = #op,                                                                                        \
    .id = TY_OP_##op,                                                                                   \
    .nout = outs,                                                                                       \
    .nargs = sizeof args_of_##op / sizeof *args_of_##op,                                                \
    .ninputs = inputs_of_##op,                                                                          \
    .flags = flag_set,                                                                                  \
    .args = args_of_##op,                                                                               \
    .forward = fwd_##fwd,                                                                               \
    .backward = vjp_##bwd,                                                                              \
    .composed = sizeof #bwd == sizeof "composed" && #bwd[0] == 'c' && #bwd[1] == 'o' && #bwd[2] == 'm', \
    .differentiable = !(#bwd[0] == 'n' && #bwd[1] == 'o' && #bwd[2] == 'n'),                            \
    .doc = text },
#include "ops.def"
#undef OP
};

const ty_op *ty_op_find(const char *name) {
  for (int i = 0; i < TY_OP_COUNT; i++)
    if (strcmp(ty_ops[i].name, name) == 0) return &ty_ops[i];
  return NULL;
}

/* ---- the typed functions ----
 * Each argument is a (KIND, name) pair here, so that one list makes both the parameters and the array of values. */
#define T(n) , (TENSOR, n)
#define K(n) , (TENSOR, n)
#define O(n) , (TENSOR, n)
#define OK(n) , (TENSOR, n)
#define N(n) , (VALUE, n)
#define NK(n) , (VALUE, n)
#define ONK(n) , (VALUE, n)
#define L(n) , (TENSORS, n)
#define LK(n) , (TENSORS, n)
#define I(n, d) , (INT, n)
#define IR(n) , (INT, n)
#define F(n, d) , (FLOAT, n)
#define FR(n) , (FLOAT, n)
#define B(n, d) , (BOOL, n)
#define S(n, d) , (STRING, n)
#define SR(n) , (STRING, n)
#define IS(n, d) , (INTS, n)
#define IV(n) , (INTS, n)
#define D(n) , (ENUM, n)
#define V(n) , (ENUM, n)
#define VR(n) , (ENUM, n)
#define X(n) , (VALUE, n)
#define XR(n) , (VALUE, n)
#define M(n) , (STRING, n)

#define PARAM_TENSOR(n) ty_tensor *n
#define PARAM_VALUE(n) ty_value n
#define PARAM_TENSORS(n) ty_tensors n
#define PARAM_INT(n) int64_t n
#define PARAM_FLOAT(n) double n
#define PARAM_BOOL(n) bool n
#define PARAM_STRING(n) const char *n
#define PARAM_INTS(n) ty_ints n
#define PARAM_ENUM(n) int n
#define ARG_TENSOR(n) \
  { .t = n, .kind = n ? TY_TENSOR : TY_NONE }
#define ARG_VALUE(n) n
#define ARG_TENSORS(n) \
  { .ts = n, .kind = TY_TENSORS }
#define ARG_INT(n) \
  { .i = n, .kind = TY_INT }
#define ARG_FLOAT(n) \
  { .f = n, .kind = TY_FLOAT }
#define ARG_BOOL(n) \
  { .i = n, .kind = TY_INT }
#define ARG_STRING(n) \
  { .s = n, .kind = TY_STRING }
#define ARG_INTS(n) \
  { .is = n, .kind = TY_INTS }
#define ARG_ENUM(n) \
  { .i = n, .kind = TY_INT }
#define PARAM_(kind, n) PARAM_##kind(n)
#define ARG_(kind, n) ARG_##kind(n)

#define EACH1(f, x) f x
#define EACH2(f, x, ...) f x, EACH1(f, __VA_ARGS__)
#define EACH3(f, x, ...) f x, EACH2(f, __VA_ARGS__)
#define EACH4(f, x, ...) f x, EACH3(f, __VA_ARGS__)
#define EACH5(f, x, ...) f x, EACH4(f, __VA_ARGS__)
#define EACH6(f, x, ...) f x, EACH5(f, __VA_ARGS__)
#define EACH7(f, x, ...) f x, EACH6(f, __VA_ARGS__)
#define EACH8(f, x, ...) f x, EACH7(f, __VA_ARGS__)
#define EACH9(f, x, ...) f x, EACH8(f, __VA_ARGS__)
#define EACH10(f, x, ...) f x, EACH9(f, __VA_ARGS__)
#define EACH11(f, x, ...) f x, EACH10(f, __VA_ARGS__)
#define EACH12(f, x, ...) f x, EACH11(f, __VA_ARGS__)
#define EACH13(f, x, ...) f x, EACH12(f, __VA_ARGS__)
#define EACH14(f, x, ...) f x, EACH13(f, __VA_ARGS__)
#define EACH15(f, x, ...) f x, EACH14(f, __VA_ARGS__)
#define EACH16(f, x, ...) f x, EACH15(f, __VA_ARGS__)
#define EACH17(f, x, ...) f x, EACH16(f, __VA_ARGS__)
#define EACH18(f, x, ...) f x, EACH17(f, __VA_ARGS__)
#define EACH19(f, x, ...) f x, EACH18(f, __VA_ARGS__)
#define PICK(a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, each, ...) each
#define EACH(f, ...)                                                                                              \
  PICK(__VA_ARGS__, EACH19, EACH18, EACH17, EACH16, EACH15, EACH14, EACH13, EACH12, EACH11, EACH10, EACH9, EACH8, \
       EACH7, EACH6, EACH5, EACH4, EACH3, EACH2, EACH1, )                                                         \
  (f, __VA_ARGS__)

#define OUT_0 NULL
#define OUT_1 NULL
#define OUT_2 out
#define OUT_3 out
#define OUT_4 out
#define OUT_5 out
#define OUT_6 out
#define FINISH_0(call) return call != &failed
#define FINISH_1(call) return scoped_result(call)
#define FINISH_2(call) return scoped_result(call)
#define FINISH_3(call) return scoped_result(call)
#define FINISH_4(call) return scoped_result(call)
#define FINISH_5(call) return scoped_result(call)
#define FINISH_6(call) return scoped_result(call)

static ty_tensor failed; /* told apart from the NULL result of an op without outputs */
static inline ty_tensor *scoped_result(ty_tensor *t) { return t == &failed ? NULL : t; }

static bool fail_value(const ty_op *op, int i, const char *expected) {
  return ty_op_fail_(op, TY_EINVAL, "%s: expected %s, got NULL", op->args[i].name, expected);
}

/* Where a tensor is NULL, the call that should have made it has failed: its error stands. */
static bool fail_tensor(const ty_op *op, int i, const char *expected) {
  return ty_error_code() == TY_OK && fail_value(op, i, expected);
}

static bool check_code(const ty_op *op, int i, int64_t code, int64_t least, int64_t end, const char *expected) {
  if (code >= least && code < end) return true;
  return ty_op_fail_(op, TY_EINVAL, "%s: expected %s, got %lld", op->args[i].name, expected, (long long)code);
}

/* What the types of C leave open: NULL, and numbers that stand for nothing. */
static bool check_value(const ty_op *op, int i, const ty_value *v) {
  const ty_arg *a = &op->args[i];
  switch (a->kind) {
    case TY_ARG_TENSOR: return v->t || fail_tensor(op, i, "a tensor");
    case TY_ARG_OPERAND:
      if (v->kind == TY_TENSOR) return v->t || fail_tensor(op, i, "a tensor or a number");
      if (v->kind == TY_NONE && !a->required) return true;
      return v->kind == TY_INT || v->kind == TY_FLOAT || fail_value(op, i, "a tensor or a number");
    case TY_ARG_NUMBER:
      if (v->kind == TY_NONE) return !a->required || fail_value(op, i, "a number");
      return v->kind == TY_INT || v->kind == TY_FLOAT ||
             ty_op_fail_(op, TY_EINVAL, "%s: expected a number, got a value of another kind", a->name);
    case TY_ARG_LIST:
      if (v->ts.n < 0 || (v->ts.n && !v->ts.v)) return fail_value(op, i, "a list of tensors");
      for (int j = 0; j < v->ts.n; j++)
        if (!v->ts.v[j]) return fail_tensor(op, i, "tensors");
      return true;
    case TY_ARG_INTS:
    case TY_ARG_VARINTS: return (v->is.n >= 0 && (!v->is.n || v->is.v)) || fail_value(op, i, "a list of integers");
    case TY_ARG_STRING: return v->s || fail_value(op, i, "a string");
    case TY_ARG_DTYPE: return check_code(op, i, v->i, TY_DTYPE_DEFAULT, TY_DTYPES, "a dtype");
    case TY_ARG_DEVICE: return check_code(op, i, v->i, a->required ? TY_CPU : TY_DEVICE_DEFAULT, TY_PINNED, "a device");
    default: return true;
  }
}

/* Calls, hands the outputs to the scope and returns the first. */
static ty_tensor *call_scoped(ty_op_id id, const ty_value *arg, ty_tensor **user_out) {
  const ty_op *op = &ty_ops[id];
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  for (int i = 0; i < op->nargs; i++)
    if (!check_value(op, i, &arg[i])) return &failed;
  if (!ty_call_op(id, arg, out)) return &failed;
  bool ok = true;
  for (int i = 0; i < op->nout; i++) ok = (out[i] = ty_scope_add(out[i])) && ok;
  if (!ok) return &failed;
  if (user_out) memcpy(user_out, out, sizeof *out * op->nout);
  return out[0];
}

#define DEFINE(op, outs, ...)                                            \
  TY_RESULT_##outs ty_##op(EACH(PARAM_, __VA_ARGS__) TY_PARAMS_##outs) { \
    ty_value argv[] = { EACH(ARG_, __VA_ARGS__) };                       \
    FINISH_##outs(call_scoped(TY_OP_##op, argv, OUT_##outs));            \
  }
#define OP(op, outs, args, ...) DEFINE(op, outs args)
#include "ops.def"
#undef OP
#include "undef_args.h"
