/* The typed function of every op, called with arguments that are left out or wrong: NULL, no dimensions, other dtypes and
 * shapes, extreme numbers. Each call returns; one that fails says why and leaves nothing behind. The calls are made from
 * the table of ops and drawn from a seed; TYCHO_TEST_CALLS says how many there are in all (2,000 by default). */
#include <stdlib.h>
#include <string.h>

#include "check.h"

#undef ty_add
#undef ty_sub
#undef ty_searchsorted
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
#undef ty_full
#undef ty_full_like
#undef ty_fill_
#undef ty_masked_fill
#undef ty_clamp
#undef ty_pad
#undef ty_arange

static uint64_t state;
static bool leave_out; /* every argument of the call is what stands for nothing */

static int below(int n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (int)((state >> 33) % (uint64_t)n);
}

static int64_t any_int(void) {
  static const int64_t edge[] = { INT64_MIN, INT64_MAX, INT32_MIN, (int64_t)INT32_MAX + 1, (int64_t)1 << 53 };
  return leave_out ? 0 : below(5) ? below(7) - 2 : edge[below(5)];
}

static double any_float(void) {
  static const double edge[] = { NAN, INFINITY, -INFINITY, 1e300, -1e-300 };
  return leave_out ? 0 : below(4) ? (below(41) - 20) / 8.0 : edge[below(5)];
}

static bool any_bool(void) { return !leave_out && below(2); }

static const char *any_string(void) {
  static const char *const words[] = { "",       "none",       "mean",      "sum",      "lstm",    "relu", "tanh",
                                       "a -> a", "b c -> c b", "ij,jk->ik", "constant", "nearest", "->" };
  int n = (int)(sizeof words / sizeof *words), i = below(n + 2);
  return leave_out || i >= n ? NULL : words[i];
}

static ty_ints any_ints(void) {
  static int64_t values[64][4]; /* more than an op has lists; they live until the call is over */
  static int next;
  int64_t *v = values[next++ % 64];
  for (int i = 0; i < 4; i++) v[i] = any_int();
  if (leave_out) return TY_NO_INTS;
  switch (below(8)) {
    case 0: return (ty_ints){ NULL, 2 };
    case 1: return (ty_ints){ v, -1 };
    default: return (ty_ints){ v, below(5) };
  }
}

static int any_dtype(void) {
  int d = below(3) ? TY_DTYPE_DEFAULT : below(TY_F64 + 1);
  return leave_out ? TY_DTYPE_DEFAULT : below(12) ? d : below(2) ? TY_DTYPES : -7;
}

static int any_device(void) {
  static const int devices[] = { TY_DEVICE_DEFAULT, TY_CPU, TY_CPU, TY_META, TY_PINNED, TY_PAGED, 99, -5 };
  return leave_out ? TY_DEVICE_DEFAULT : devices[below(8)];
}

static ty_tensor *any_tensor(void) {
  static const ty_dtype dtypes[] = { TY_F32, TY_F32, TY_F32, TY_F64, TY_BF16, TY_I64, TY_I64, TY_I32, TY_U8, TY_BOOL };
  int64_t size[4];
  int ndim = below(5);
  if (leave_out || !below(6)) return NULL;
  for (int i = 0; i < ndim; i++) size[i] = below(8) ? 1 + below(3) : 0;
  ty_tensor *t = ty_zeros((ty_ints){ size, ndim }, dtypes[below(10)], below(10) ? TY_CPU : TY_META);
  return t && below(2) ? ty_ones_like(t, TY_DTYPE_DEFAULT) : t;
}

static ty_value any_number(void) {
  ty_value v = { .kind = (uint8_t)(below(8) ? TY_NONE : TY_STRING) };
  return leave_out || !below(4) ? v : below(2) ? ty_value_of_int(any_int()) : ty_value_of_float(any_float());
}

static ty_value any_operand(void) {
  return leave_out ? (ty_value){ .kind = TY_NONE } : below(3) ? ty_value_of_tensor(any_tensor()) : any_number();
}

static ty_tensors any_list(void) {
  static ty_tensor *lists[64][3];
  static int next;
  ty_tensor **list = lists[next++ % 64];
  if (leave_out) return (ty_tensors){ NULL, 0 };
  for (int i = 0; i < 3; i++) list[i] = any_tensor();
  return below(8) ? (ty_tensors){ list, below(4) } : (ty_tensors){ NULL, 3 };
}

#define T(n) , any_tensor()
#define K(n) , any_tensor()
#define O(n) , any_tensor()
#define OK(n) , any_tensor()
#define N(n) , any_operand()
#define NK(n) , any_operand()
#define ONK(n) , any_operand()
#define L(n) , any_list()
#define LK(n) , any_list()
#define I(n, d) , any_int()
#define IR(n) , any_int()
#define F(n, d) , any_float()
#define FR(n) , any_float()
#define B(n, d) , any_bool()
#define S(n, d) , any_string()
#define SR(n) , any_string()
#define IS(n, d) , any_ints()
#define IV(n) , any_ints()
#define D(n) , any_dtype()
#define V(n) , any_device()
#define VR(n) , any_device()
#define X(n) , any_number()
#define XR(n) , any_number()
#define M(n) , any_string()
#define OUT_0
#define OUT_1
#define OUT_2 , NULL
#define OUT_3 , NULL
#define OUT_4 , NULL
#define OUT_5 , NULL
#define OUT_6 , NULL
#define WITHOUT_FIRST(first, ...) __VA_ARGS__
#define CALL(name, ...) ty_##name(WITHOUT_FIRST(__VA_ARGS__))
#define OP(name, outs, args, ...) \
  static bool call_##name(void) { return CALL(name, 0 args OUT_##outs) != 0; }
#include "ops/ops.def"
#undef OP

static const struct {
  const char *name;
  bool (*call)(void);
} ops[] = {
#define OP(op, ...) { #op, call_##op },
#include "ops/ops.def"
#undef OP
};
#include "ops/undef_args.h"

/* Of an op whose arguments were wrong: the text names it, or the op that it is made of. */
static void check_text(const char *name) {
  const char *text = ty_error();
  size_t n = strcspn(text, ":_");
  CHECK_THAT(ty_error_code() != TY_OK && text[0], "%s: failed without an error", name);
  CHECK_THAT(strncmp(text, name, n) == 0 || strstr(text, "out of memory"), "%s: its error does not name it: %s", name,
             text);
}

static void run_one(int op) {
  ty_scope scope;
  int64_t before = live_bytes();
  ty_scope_open(&scope);
  ty_error_clear();
  bool ok = ops[op].call();
  if (!ok) check_text(ops[op].name);
  ty_scope_close(&scope);
  CHECK_THAT(live_bytes() == before, "%s: %lld bytes live after the call, %lld before", ops[op].name,
             (long long)live_bytes(), (long long)before);
}

void test_wrong_arguments(void) {
  const char *wanted = getenv("TYCHO_TEST_CALLS");
  int n = (int)(sizeof ops / sizeof *ops);
  long calls = wanted ? atol(wanted) : 2000;
  ty_memory_set_budget(TY_CPU, 256 << 20);
  state = 20;
  leave_out = true;
  for (int op = 0; op < n; op++) run_one(op);
  leave_out = false;
  for (long i = 0; i < calls; i++) run_one((int)(i % n));
  ty_memory_set_budget(TY_CPU, 0);
  ty_error_clear();
}
