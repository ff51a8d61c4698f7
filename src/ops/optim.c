/* Optimizer steps over lists of tensors: sgd_, adam_, adam_8bit_, lion_, adaptive_, lerp_list_, which write into their
 * arguments; norm_list, finite_list. */
#include "../../kernels/optim_rules.h"
#include "op.h"

enum { FEW = 128, BLOCK_8BIT = 256 }; /* tensors handled without scratch memory; elements that share a scale */

static bool check_count(ty_call *c, int arg) {
  ty_tensors first = c->arg[0].ts, list = c->arg[arg].ts;
  return list.n == first.n || ty_op_fail(c, TY_EINVAL, "%s: expected %d tensors, one for each of %s, got %d",
                                         c->op->args[arg].name, first.n, c->op->args[0].name, list.n);
}

/* List `arg` against the first: as long, shaped alike, and writable where it is written. */
static bool check_list(ty_call *c, int arg, bool written) {
  ty_tensors first = c->arg[0].ts, list = c->arg[arg].ts;
  const char *name = c->op->args[arg].name, *first_name = c->op->args[0].name;
  if (!check_count(c, arg)) return false;
  for (int i = 0; i < list.n; i++) {
    const ty_view *v = &list.v[i]->v;
    if (!ty_same_shape(v, &first.v[i]->v))
      return ty_op_fail(c, TY_EINVAL, "%s[%d]: expected the shape of %s[%d] %s, got %s", name, i, first_name, i,
                        ty_describe(first.v[i]), ty_describe(list.v[i]));
    if (written && !v->contiguous && ty_view_repeats(v))
      return ty_op_fail(c, TY_EINVAL, "%s[%d]: cannot write in place to an expanded view %s; call :clone() first", name,
                        i, ty_describe(list.v[i]));
  }
  return true;
}

/* Runs the kernel on the lists of arguments [0, lists), the empty ones left out; those in the mask `written` change.
 * Whatever is not contiguous is replaced by a copy, which is written back. */
static bool run(ty_call *c, int lists, unsigned written, const void *params, ty_tensor *control) {
  int n = c->arg[0].ts.n, all = 0;
  if (n == 0) return true;
  ty_tensor *few[FEW], **in = few;
  size_t bytes = sizeof(ty_tensor *) * (size_t)(n * lists + 1);
  if (n * lists + 1 > FEW && !(in = ty_scratch_alloc(bytes))) return false;
  bool ok = true;
  for (int a = 0; a < lists; a++)
    for (int i = 0; ok && i < c->arg[a].ts.n; i++) {
      ty_tensor *t = c->arg[a].ts.v[i];
      in[all++] = t = t->v.contiguous ? t : ty_contiguous(t);
      ok = t != NULL;
    }
  if (control) in[all++] = control;
  ok = ok && ty_launch(c, in, all, params);
  for (int a = 0, at = 0; ok && a < lists; a++)
    for (int i = 0; ok && i < c->arg[a].ts.n; i++, at++) {
      ty_tensor *t = c->arg[a].ts.v[i];
      if (!(written >> a & 1)) continue;
      if (in[at] != t) ok = ty_copy_into(t, in[at]);
      ty_storage_wrote(t->storage);
      t->version = t->storage->version;
    }
  if (in != few) ty_scratch_free(in, bytes);
  return ok;
}

static bool check_limit(ty_call *c, double limit) {
  return limit >= 0 || ty_op_fail(c, TY_EINVAL, "the limit of the gradients must be at least 0, got %g", limit);
}

/* Of the last argument, on the device of the parameters. */
static bool check_control(ty_call *c, ty_p_optim *p) {
  int last = c->op->nargs - 1;
  const ty_tensor *t = c->arg[last].t;
  p->controlled = t != NULL;
  if (!t || !c->arg[0].ts.n) return true;
  if (ty_dtype_of(t) == TY_F64 && t->v.ndim == 1 && t->v.size[0] == 2 && t->v.contiguous &&
      ty_device_of(t) == ty_device_of(c->arg[0].ts.v[0]))
    return true;
  return ty_op_fail(c, TY_EINVAL, "control: expected two f64 where the parameters are, got %s", ty_describe(t));
}

static bool check_step(ty_call *c, ty_p_optim *p) {
  if (!check_control(c, p)) return false;
  if (p->step < 1) return ty_op_fail(c, TY_EINVAL, "step: counts from 1, got %lld", (long long)p->step);
  return check_limit(c, p->grad_limit);
}

/* What all steps take of their arguments, and each its own. */
#define STEP(a, ...)                                                                                          \
  {                                                                                                           \
    .lr = (a)->lr.f, .weight_decay = (a)->weight_decay.f, .grad_limit = (a)->grad_limit.f,                    \
    .grad_scale = (a)->grad_scale.f, .averaged = (a)->averages.ts.n, .average_weight = (a)->average_weight.f, \
    .step = (a)->step.i, __VA_ARGS__                                                                          \
  }
#define ADAM_STEP(a) \
  STEP(a, .beta1 = (a)->beta1.f, .beta2 = (a)->beta2.f, .eps = (a)->eps.f, .decoupled = (a)->decoupled.i)

/* No averages are none for all. */
static bool check_averages(ty_call *c, int arg) { return c->arg[arg].ts.n == 0 || check_list(c, arg, true); }

bool fwd_sgd_(ty_call *c) {
  const ty_sgd__args *a = TY_ARGS(sgd_, c);
  ty_p_optim p = STEP(a, .momentum = a->momentum.f, .dampening = a->dampening.f, .nesterov = a->nesterov.i,
                      .stochastic = a->stochastic.i);
  bool momentum = a->momentum.f != 0;
  if (!momentum && a->nesterov.i) return ty_op_fail(c, TY_EINVAL, "nesterov: needs a momentum, got 0");
  if (!momentum && a->momenta.ts.n) return ty_op_fail(c, TY_EINVAL, "momenta: expected none without a momentum");
  if (!check_step(c, &p)) return false;
  if (!check_list(c, 0, true) || !check_list(c, 1, false) || (momentum && !check_list(c, 2, true))) return false;
  return check_averages(c, 3) && run(c, 4, 13, &p, a->control.t);
}

bool fwd_adam_(ty_call *c) {
  const ty_adam__args *a = TY_ARGS(adam_, c);
  ty_p_optim p = ADAM_STEP(a);
  p.stochastic = a->stochastic.i;
  if (!check_step(c, &p)) return false;
  for (int i = 0; i < 4; i++)
    if (!check_list(c, i, i != 1)) return false;
  return check_averages(c, 4) && run(c, 5, 29, &p, a->control.t);
}

/* Dtypes of the lists of adam_8bit_, and scales [2, blocks]. */
static bool check_8bit(ty_call *c) {
  for (int a = 0; a < 6; a++) {
    for (int i = 0; i < c->arg[a].ts.n; i++) {
      const ty_tensor *t = c->arg[a].ts.v[i];
      ty_dtype d = ty_dtype_of(t);
      bool moment = a == 2 || a == 3;
      if (moment ? d == TY_U8 : a == 4 ? d == TY_F32 : ty_is_float(d) && (a == 1 || d != TY_F64)) continue;
      return ty_op_fail(c, TY_EINVAL, "%s[%d]: expected %s, got %s", c->op->args[a].name, i,
                        moment   ? "u8"
                        : a == 4 ? "f32"
                        : a == 1 ? "a float tensor (f64 f32 f16 bf16)"
                                 : "f32, f16 or bf16",
                        ty_describe(t));
    }
  }
  ty_tensors params = c->arg[0].ts, scales = c->arg[4].ts;
  for (int i = 0; i < params.n; i++) {
    const ty_view *v = &scales.v[i]->v;
    int64_t blocks = (params.v[i]->v.count + BLOCK_8BIT - 1) / BLOCK_8BIT;
    if (v->ndim != 2 || v->size[0] != 2 || v->size[1] != blocks || ty_view_repeats(v))
      return ty_op_fail(c, TY_EINVAL,
                        "scales[%d]: expected [2, %lld], one for each %d elements of params[%d] %s, got %s", i,
                        (long long)blocks, BLOCK_8BIT, i, ty_describe(params.v[i]), ty_describe(scales.v[i]));
  }
  return true;
}

bool fwd_adam_8bit_(ty_call *c) {
  const ty_adam_8bit__args *a = TY_ARGS(adam_8bit_, c);
  ty_p_optim p = ADAM_STEP(a);
  if (!check_step(c, &p)) return false;
  for (int i = 0; i < 4; i++)
    if (!check_list(c, i, i != 1)) return false;
  if (!check_count(c, 4) || !check_averages(c, 5) || !check_8bit(c)) return false;
  return run(c, 6, 61, &p, a->control.t);
}

bool fwd_lion_(ty_call *c) {
  const ty_lion__args *a = TY_ARGS(lion_, c);
  ty_p_optim p = STEP(a, .beta1 = a->beta1.f, .beta2 = a->beta2.f, .stochastic = a->stochastic.i);
  if (!check_step(c, &p)) return false;
  for (int i = 0; i < 3; i++)
    if (!check_list(c, i, i != 1)) return false;
  return check_averages(c, 3) && run(c, 4, 13, &p, a->control.t);
}

/* The rules in the order of optim_rules.h, and masks of the states that each needs. */
static const char *const rules[] = { "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "radam",
                                     "rprop",   "asgd",    "nadamw",   "radamw", NULL };
static const uint8_t rule_states[] = { 1, 1, 3, 3, 3, 3, 3, 1 };

bool fwd_adaptive_(ty_call *c) {
  const ty_adaptive__args *a = TY_ARGS(adaptive_, c);
  ty_p_optim p = STEP(a, .beta1 = a->beta1.f, .beta2 = a->beta2.f, .eps = a->eps.f, .low = a->low.f, .high = a->high.f);
  int rule = ty_check_choice(c, 6, rules);
  if (rule < 0 || !check_step(c, &p)) return false;
  p.decoupled = rule > TY_ASGD;
  p.rule = (uint8_t)(p.decoupled ? rule - TY_ASGD - 1 + TY_NADAM : rule);
  p.lists = rule_states[p.rule];
  if (rule == TY_RMSPROP) p.lists |= (uint8_t)((p.beta1 != 0 ? 2 : 0) | (a->third.ts.n ? 4 : 0));
  for (int i = 0; i < 5; i++) {
    bool wanted = i < 2 || p.lists >> (i - 2) & 1;
    if (wanted && !check_list(c, i, i != 1)) return false;
    if (!wanted && c->arg[i].ts.n)
      return ty_op_fail(c, TY_EINVAL, "%s: expected none for the rule %s, got %d tensors", c->op->args[i].name,
                        rules[rule], c->arg[i].ts.n);
  }
  return check_averages(c, 5) && run(c, 6, 61, &p, a->control.t);
}

bool fwd_lerp_list_(ty_call *c) {
  return check_list(c, 0, true) && check_list(c, 1, false) &&
         run(c, 2, 1, &(ty_p_scalars){ .a = TY_ARGS(lerp_list_, c)->weight.f }, NULL);
}

bool fwd_norm_list(ty_call *c) {
  const ty_norm_list_args *a = TY_ARGS(norm_list, c);
  int n = a->xs.ts.n;
  if (!ty_out(c, 0, n ? ty_device_of(a->xs.ts.v[0]) : TY_CPU, TY_F64, 0, (int64_t[]){ 0 })) return false;
  ty_p_scalars p = { .a = a->p.f, .b = a->limit.f };
  return check_limit(c, p.b) && (n ? run(c, 1, 0, &p, NULL) : ty_launch(c, NULL, 0, &p));
}

bool fwd_finite_list(ty_call *c) {
  int n = TY_ARGS(finite_list, c)->xs.ts.n;
  if (!ty_out(c, 0, n ? ty_device_of(c->arg[0].ts.v[0]) : TY_CPU, TY_BOOL, 0, (int64_t[]){ 0 })) return false;
  return n ? run(c, 1, 0, NULL, NULL) : ty_launch(c, NULL, 0, NULL);
}
