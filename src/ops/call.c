/* The path of every op: check, shape rule, allocation, kernel, record. */
#include <string.h>

#include "../autograd/autograd.h"
#include "../device/device.h"
#include "../program/program.h"
#include "../tier/tier.h"
#include "autocast.h"
#include "profile.h"
#include "trace.h"
#include "vmap.h"

static _Thread_local bool grad_enabled = true;

bool ty_grad_enabled(void) { return grad_enabled; }

bool ty_set_grad_enabled(bool on) {
  bool was = grad_enabled;
  grad_enabled = on;
  return was;
}

/* ---- checks every op gets ---- */

static bool fail_interrupted(const ty_op *op) { return ty_op_fail_(op, TY_EINTR, "interrupted"); }

static const char *class_text(uint32_t flags) {
  if (flags & ANY) return "a tensor that is not block-quantized (:to \"f32\" decodes)";
  if (flags & FLOATS) return "a float tensor (f64 f32 f16 bf16)";
  if (flags & INTS) return "an integer or bool tensor";
  return "a number tensor (not bool)";
}

static bool in_class(ty_dtype d, uint32_t flags) {
  if (ty_is_quantized(d)) return flags & QUANTIZED;
  if (flags & ANY) return true;
  if (flags & FLOATS) return ty_is_float(d);
  if (flags & INTS) return !ty_is_float(d);
  return d != TY_BOOL;
}

static bool fail_class(const ty_op *op, const char *name, const ty_tensor *t) {
  return ty_op_fail_(op, TY_EINVAL, "%s: expected %s, got %s", name, class_text(op->flags), ty_describe(t));
}

static bool fail_quantized(const ty_op *op, const char *name, const ty_tensor *t) {
  return ty_op_fail_(op, TY_EINVAL, "%s: expected %s, got %s", name, class_text(ANY), ty_describe(t));
}

static bool fail_devices(const ty_op *op, const char *name, const ty_tensor *first, const ty_tensor *t) {
  return ty_op_fail_(op, TY_EINVAL, "%s: expected a tensor on %s like the first argument, got %s", name,
                     ty_device_name(ty_device_of(first)), ty_describe(t));
}

/* A tensor without dimensions on the CPU among operands on a GPU acts as the number that it holds. */
static bool is_number(const ty_op *op, const ty_value *arg, int i) {
  return op->args[i].kind == TY_ARG_OPERAND && arg[i].kind == TY_TENSOR && ty_device_of(arg[i].t) == TY_CPU &&
         arg[i].t->v.ndim == 0;
}

/* The GPU on which an op has to run because such a number stands beside tensors of that GPU; TY_CPU, the usual case,
 * when there is no such pair. */
static int gpu_for_numbers(const ty_op *op, const ty_value *arg) {
  bool any = false;
  int device = TY_CPU;
  for (int i = 0; i < op->nargs; i++) {
    if (arg[i].kind != TY_TENSOR) continue;
    if (ty_device_of(arg[i].t) >= TY_CUDA) device = ty_device_of(arg[i].t);
    else any |= is_number(op, arg, i);
  }
  return any ? device : TY_CPU;
}

/* Replaces each such number by its value. One that requires a gradient is copied to the GPU instead: the copy is recorded,
 * and the gradient comes back through it. */
static bool replace_numbers(const ty_op *op, ty_value *arg, int device) {
  for (int i = 0; i < op->nargs; i++) {
    if (!is_number(op, arg, i)) continue;
    ty_tensor *t = arg[i].t;
    if (ty_is_recording() && !ty_recorded_host_read(t, op->name)) return false;
    if (grad_enabled && t->requires_grad) {
      if (!(arg[i].t = ty_to_device(t, device, false))) return false;
    } else if (!ty_read_value(t, &arg[i])) {
      return false;
    }
  }
  return true;
}

/* Dtype class of the first tensor, one device for all but a copy. */
static bool check_inputs(const ty_op *op, const ty_value *arg) {
  const ty_tensor *first = NULL;
  for (int i = 0; i < op->nargs; i++) {
    if (arg[i].kind == TY_TENSOR) {
      const ty_tensor *t = arg[i].t;
      if (__builtin_expect(ty_device_of(t) == TY_META, 0) && ty_bring_back && !ty_bring_back(arg[i].t)) return false;
      if (!first) {
        first = t;
        if (__builtin_expect(!in_class(ty_dtype_of(t), op->flags), 0)) return fail_class(op, op->args[i].name, t);
      } else if (__builtin_expect(ty_device_of(t) != ty_device_of(first), 0) && op->id != TY_OP_copy_) {
        return fail_devices(op, op->args[i].name, first, t);
      } else if (__builtin_expect(ty_is_quantized(ty_dtype_of(t)), 0) && !(op->flags & QUANTIZED)) {
        return fail_quantized(op, op->args[i].name, t);
      }
    } else if (arg[i].kind == TY_TENSORS) {
      for (int j = 0; j < arg[i].ts.n; j++) {
        const ty_tensor *t = arg[i].ts.v[j];
        if (__builtin_expect(ty_device_of(t) == TY_META, 0) && ty_bring_back && !ty_bring_back(arg[i].ts.v[j]))
          return false;
        if (!first) first = t;
        if (!in_class(ty_dtype_of(t), op->flags)) return fail_class(op, op->args[i].name, t);
        if (ty_device_of(t) != ty_device_of(first)) return fail_devices(op, op->args[i].name, first, t);
      }
    } else if (op->args[i].kind == TY_ARG_DTYPE && arg[i].i > TY_F64 && !(op->flags & QUANTIZED)) {
      return ty_op_fail_(op, TY_EINVAL, "%s: expected a dtype that is not block-quantized, got %s", op->args[i].name,
                         ty_dtype_name[arg[i].i]);
    } else if (op->args[i].kind == TY_ARG_OPERAND && !first &&
               (op->nargs == i + 1 || op->args[i + 1].kind == TY_ARG_NUMBER)) {
      return ty_op_fail_(op, TY_EINVAL, "%s: expected at least one tensor, got numbers only", op->args[i].name);
    }
  }
  return true;
}

/* May `t` be written in place? `recorded`: the write becomes part of a graph. */
static bool check_writable(const ty_op *op, ty_tensor *t, bool recorded) {
  const char *name = op->args[0].name;
  if (ty_view_repeats(&t->v))
    return ty_op_fail_(op, TY_EINVAL, "%s: cannot write in place to an expanded view %s; call :clone() first", name,
                       ty_describe(t));
  if (!grad_enabled) return true;
  if (t->requires_grad && !t->node)
    return ty_op_fail_(op, TY_EINVAL,
                       "%s: %s is a leaf that requires a gradient and cannot be changed in place while gradients are "
                       "recorded; use ty.no_grad",
                       name, ty_describe(t));
  if (recorded && t->is_view)
    return ty_op_fail_(op, TY_EINVAL,
                       "%s: an in-place write through the view %s cannot be recorded for gradients; use ty.where, "
                       "ty.scatter or ty.concat, or :clone() first",
                       name, ty_describe(t));
  return true;
}

static void wrote(ty_tensor *t) {
  ty_storage_wrote(t->storage);
  t->version = t->storage->version;
}

/* ---- calling ---- */

/* Is the text's name, its first `n` letters, that of an op that nobody calls by itself, or of `op` in place? */
static bool names_a_part(const ty_op *op, const char *text, size_t n) {
  char name[64];
  const size_t whole = strlen(op->name);
  if (n == whole + 1 && text[whole] == '_' && strncmp(text, op->name, whole) == 0) return true;
  if (n >= sizeof name) return false;
  memcpy(name, text, n);
  name[n] = '\0';
  const ty_op *part = ty_op_find(name);
  return part && part->flags & INTERNAL;
}

/* Whatever failed inside, the text begins with the op that the user called: an op that serves as part of it, "add: ..."
 * in addcmul, stands behind it; a part that has no name of its own to the user, cholesky_factor in cholesky, is left
 * out. "cross_entropy: ..." may come from cross_entropy_rows, which is such a part. */
static bool fail_as(const ty_op *op) {
  const char *text = ty_error();
  size_t n = strlen(op->name), named = strcspn(text, ":");
  if (named <= n && strncmp(text, op->name, named) == 0 && (named == n || op->name[named] == '_')) return false;
  bool part = strncmp(text + named, ": ", 2) == 0 && names_a_part(op, text, named);
  return ty_op_fail_(op, ty_error_code(), "%s", part ? text + named + 2 : text);
}

static _Thread_local bool recorded;            /* the op that runs is part of one that is being recorded */
static _Thread_local bool weights_rest = true; /* outside of a backward pass */

static bool run_forward(const ty_op *op, const ty_value *arg, ty_tensor **out, bool *record) {
  ty_call c = { op, arg, out, *record };
  ty_scope scope;
  ty_scope_open(&scope);
  bool was = grad_enabled, within = recorded, cast = op->composed && !(op->flags & AUTO_FULL);
  int casting = cast ? ty_autocast_dtype : ty_autocast_set(TY_DTYPE_DEFAULT);
  grad_enabled = was && op->composed;
  recorded |= *record;
  bool ok = op->forward(&c);
  *record = c.record;
  grad_enabled = was;
  recorded = within;
  ty_autocast_dtype = casting;
  ty_scope_close(&scope);
  if (__builtin_expect(ty_interrupted != 0, 0)) return fail_interrupted(op);
  return ok || fail_as(op);
}

static void drop_outputs(const ty_op *op, ty_tensor **out) {
  for (int i = 0; i < op->nout; i++) {
    ty_release(out[i]);
    out[i] = NULL;
  }
}

static bool call(const ty_op *op, const ty_value *arg, ty_tensor **out) {
  if (!check_inputs(op, arg)) return false;
  ty_level *level = ty_mapped_call(op, arg);
  if (ty_is_recording() && !level && !ty_recorded_inputs(op, arg)) return false;
  bool record = grad_enabled && op->differentiable && !op->composed && ty_inputs_want_grad(op, arg);
  bool writes = (op->flags & WRITES) && op->args[0].kind == TY_ARG_TENSOR;
  if (writes && !check_writable(op, arg[0].t, record)) return false;
  bool ok = level && (!op->composed || ty_has_map_rule(op)) ? ty_call_mapped(level, op, arg, out, &record)
                                                            : run_forward(op, arg, out, &record);
  if (writes && ok) wrote(arg[0].t);
  if (ok && record) {
    ok = ty_record(op, arg, out);
  } else if (ok && writes && arg[0].t->node) { /* overwritten by something without a gradient */
    ty_node_release(arg[0].t->node);
    arg[0].t->node = NULL;
    arg[0].t->requires_grad = false;
  }
  if (!ok) drop_outputs(op, out);
  return ok;
}

/* Integers or bool for an op that makes f32 of them. */
static bool wants_floats(const ty_op *op, const ty_value *arg) {
  return (op->flags & PROMOTED) && arg[0].kind == TY_TENSOR && !ty_is_float(ty_dtype_of(arg[0].t)) &&
         !ty_is_quantized(ty_dtype_of(arg[0].t));
}

/* Whether some arguments are to be replaced before the call; *device: see gpu_for_numbers(). */
static bool wants_others(const ty_op *op, const ty_value *arg, int *device) {
  bool casts = ty_autocast_dtype != TY_DTYPE_DEFAULT && (op->flags & (AUTO_HALF | AUTO_FULL));
  bool operand = op->args[0].kind == TY_ARG_OPERAND || op->id == TY_OP_where;
  *device = operand ? gpu_for_numbers(op, arg) : TY_CPU;
  return casts || *device != TY_CPU || wants_floats(op, arg);
}

static bool call_plain(const ty_op *op, const ty_value *arg, ty_tensor **out) {
  int device;
  if (__builtin_expect(!wants_others(op, arg, &device), 1)) return call(op, arg, out);
  ty_value others[TY_MAX_ARGS];
  memcpy(others, arg, sizeof *arg * op->nargs);
  ty_scope scope;
  ty_scope_open(&scope);
  bool ok = (device == TY_CPU || replace_numbers(op, others, device)) &&
            (!wants_floats(op, others) || (others[0].t = ty_to(others[0].t, TY_F32)) != NULL) &&
            (ty_autocast_dtype == TY_DTYPE_DEFAULT || !(op->flags & (AUTO_HALF | AUTO_FULL)) ||
             ty_autocast(op, others)) &&
            call(op, others, out);
  ty_scope_close(&scope);
  return ok;
}

bool ty_call_op(ty_op_id id, const ty_value *arg, ty_tensor **out) {
  const ty_op *op = &ty_ops[id];
  for (int i = 0; i < op->nout; i++) out[i] = NULL;
  if (__builtin_expect(ty_interrupted != 0, 0)) return fail_interrupted(op);
  if (__builtin_expect(!ty_tracing, 1)) return call_plain(op, arg, out);
  int64_t event = ty_trace_begin(op, arg, false);
  if (event < 0) return false;
  bool ok = call_plain(op, arg, out);
  ty_trace_end(event, ok, out);
  return ok;
}

/* Takes over the history of `from`. */
static void rebase(ty_tensor *t, ty_tensor *from) {
  ty_node *old = t->node;
  t->node = from->node;
  t->node_output = from->node_output;
  t->requires_grad = from->requires_grad;
  from->node = NULL;
  if (old) ty_node_release(old);
}

static bool shares_storage(const ty_op *op, const ty_value *arg, const ty_tensor *t) {
  for (int i = 1; i < op->nargs; i++)
    if (arg[i].kind == TY_TENSOR && arg[i].t->storage == t->storage) return true;
  return false;
}

static bool call_inplace(const ty_op *op, const ty_value *arg) {
  if (!check_inputs(op, arg)) return false;
  const ty_level *level = ty_mapped_call(op, arg);
  if (ty_is_recording() && !level && !ty_recorded_inputs(op, arg)) return false;
  ty_tensor *t = arg[0].t;
  bool record = grad_enabled && op->differentiable && ty_inputs_want_grad(op, arg);
  if (!check_writable(op, t, record)) return false;

  if (!level && !record && !op->composed && !shares_storage(op, arg, t)) { /* the kernel writes into t itself */
    ty_tensor *out[1] = { ty_retain(t) };
    bool ok = run_forward(op, arg, out, &record);
    if (ok) wrote(t);
    ty_release(out[0]);
    return ok;
  }
  ty_scope scope;
  ty_scope_open(&scope);
  ty_value args[TY_MAX_ARGS];
  memcpy(args, arg, sizeof *arg * op->nargs);
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  bool ok = true;
  if (record && op->args[0].kept)
    ok = (args[0].t = ty_clone(t)) != NULL; /* the rule needs what is about to be overwritten */
  ok = ok && ty_call_op((ty_op_id)op->id, args, out);
  ty_scope_close(&scope);
  if (!ok) return false;
  ty_tensor *r = out[0];
  if (ty_dtype_of(r) != ty_dtype_of(t) || !ty_same_shape(&r->v, &t->v))
    ok = ty_op_fail_(op, TY_EINVAL, "%s: the result %s does not fit into %s in place", op->args[0].name, ty_describe(r),
                     ty_describe(t));
  else ok = ty_copy_into(t, r);
  if (ok) {
    wrote(t);
    if (record) rebase(t, r);
  }
  ty_release(r);
  return ok;
}

bool ty_call_inplace(ty_op_id id, const ty_value *arg) {
  const ty_op *op = &ty_ops[id];
  if (__builtin_expect(ty_interrupted != 0, 0)) return fail_interrupted(op);
  if (arg[0].kind != TY_TENSOR)
    return ty_op_fail_(op, TY_EINVAL, "%s: expected a tensor to write into", op->args[0].name);
  int64_t event = ty_tracing ? ty_trace_begin(op, arg, true) : 0;
  if (event < 0) return false;
  int device = gpu_for_numbers(op, arg), casting = ty_autocast_set(TY_DTYPE_DEFAULT);
  bool ok;
  if (device == TY_CPU || is_number(op, arg, 0)) {
    ok = call_inplace(op, arg);
  } else {
    ty_value others[TY_MAX_ARGS];
    memcpy(others, arg, sizeof *arg * op->nargs);
    ty_scope scope;
    ty_scope_open(&scope);
    ok = replace_numbers(op, others, device) && call_inplace(op, others);
    ty_scope_close(&scope);
  }
  ty_autocast_dtype = casting;
  if (ty_tracing) ty_trace_end(event, ok, &arg[0].t);
  return ok;
}

/* ---- outputs ---- */

/* An op that has no rule, or a composition that looks at memory itself. */
static bool fail_mapped(const ty_op *op) {
  return ty_op_fail_(op, TY_EUNSUPPORTED, "ty.vmap has no rule for this op; call it outside of the mapped function");
}

bool ty_out(ty_call *c, int i, int device, ty_dtype dtype, int ndim, const int64_t *size) {
  ty_tensor *t = c->out[i];
  if (__builtin_expect(!t, 1)) return (c->out[i] = ty_tensor_new(device, dtype, ndim, size)) != NULL;
  if (ty_dtype_of(t) == dtype && t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0)
    return true;
  return ty_op_fail(c, TY_EINVAL, "%s: the result %s %s does not fit into %s in place", c->op->args[0].name,
                    ty_shape_text(ndim, size), ty_dtype_name[dtype], ty_describe(t));
}

bool ty_out_view(ty_call *c, int i, ty_tensor *t, int ndim, const int64_t *size, const int64_t *stride,
                 int64_t offset) {
  if (t->batch) return fail_mapped(c->op);
  return (c->out[i] = ty_tensor_view(t, ndim, size, stride, offset)) != NULL;
}

bool ty_out_set(ty_call *c, int i, ty_tensor *scoped) {
  if (!scoped) return false;
  if (!c->out[i]) {
    c->out[i] = ty_retain(scoped);
    return true;
  }
  ty_tensor *t = c->out[i];
  if (ty_dtype_of(t) != ty_dtype_of(scoped) || !ty_same_shape(&t->v, &scoped->v))
    return ty_op_fail(c, TY_EINVAL, "%s: the result %s does not fit into %s in place", c->op->args[0].name,
                      ty_describe(scoped), ty_describe(t));
  return ty_copy_into(t, scoped);
}

/* ---- kernels ---- */

ty_storage *ty_weights_at_rest(const ty_tensor *weight) {
  bool rests = weights_rest && !(recorded && weight->requires_grad);
  return rests && weight->storage->settled ? weight->storage : NULL;
}

bool ty_set_weights_at_rest(bool on) {
  bool was = weights_rest;
  weights_rest = on;
  return was;
}

bool ty_run_kernel(ty_op_id id, int device, const ty_view *const *out, int nout, const ty_view *const *in, int nin,
                   const void *params) {
  return ty_run_kernel_on(id, device, out, nout, in, nin, params, NULL);
}

bool ty_run_kernel_on(ty_op_id id, int device, const ty_view *const *out, int nout, const ty_view *const *in, int nin,
                      const void *params, ty_storage *weights) {
  if (device == TY_META) {
    if (__builtin_expect(ty_profiling != NULL, 0))
      ty_profile_note(id, device, &(ty_kernel_args){ nout, nin, out, in, params, weights }, ty_profile_now(), false,
                      false);
    return true;
  }
  ty_kernel *kernel = ty_device_kernel(device, id);
  if (!kernel) return ty_fail(TY_EUNSUPPORTED, "%s: no kernel for %s", ty_ops[id].name, ty_device_name(device));
  if (device >= TY_CUDA && !ty_device_enter(device, ty_ops[id].name)) return false;
  ty_kernel_args k = { nout, nin, out, in, params, weights };
  return ty_profile_kernel(id, device, kernel, &k) &&
         (!ty_is_recording() || ty_recorded_launch(id, device, kernel, &k));
}

static bool is_half(const ty_tensor *t) { return t && ty_is_half(ty_dtype_of(t)); }

/* Contiguous, and f32 where the kernel knows no halves: x itself when it already is. Scoped. */
static ty_tensor *prepare(ty_tensor *x, bool strided, bool half) {
  if (!x) return NULL;
  if (!half && is_half(x)) return ty_to(x, TY_F32);
  if (!strided && !x->v.contiguous) return ty_contiguous(x);
  return x;
}

bool ty_launch_kernel(ty_op_id id, ty_tensor *const *out, int nout, ty_tensor *const *in, int nin, const void *params) {
  ty_storage *weights = NULL;
  uint32_t flags = ty_ops[id].flags;
  const ty_view *outs[TY_MAX_OUTPUTS + 1], *ins[nin + 1];
  outs[0] = ins[0] = NULL;
  ty_tensor *target[TY_MAX_OUTPUTS] = { NULL };
  int device = nout ? ty_device_of(out[0]) : TY_CPU;
  for (int i = 0; i < nin && !nout; i++)
    if (in[i]) device = ty_device_of(in[i]);
  bool strided = flags & STRIDED, half = flags & (device >= TY_CUDA ? HALF | HALF_ON_GPU : HALF);
  for (int i = 0; i < nin; i++) {
    if (__builtin_expect(in[i] && in[i]->batch, 0)) return fail_mapped(&ty_ops[id]);
    ty_tensor *x = strided && half ? in[i] : prepare(in[i], strided, half);
    if (in[i] && !x) return false;
    ins[i] = x ? &x->v : NULL;
    if (i == 1 && (flags & RESTS)) weights = ty_weights_at_rest(x);
  }
  for (int i = 0; i < nout; i++) {
    ty_tensor *y = out[i];
    if (__builtin_expect(y->batch != NULL, 0)) return fail_mapped(&ty_ops[id]);
    bool convert = !half && is_half(y), gather = !strided && !y->v.contiguous;
    if (convert || gather) {
      y = target[i] = ty_scope_add(ty_tensor_new(device, convert ? TY_F32 : ty_dtype_of(y), y->v.ndim, y->v.size));
      if (!y) return false;
    }
    outs[i] = &y->v;
  }
  if (!ty_run_kernel_on(id, device, outs, nout, ins, nin, params, weights)) return false;
  for (int i = 0; i < nout; i++)
    if (target[i] && !ty_copy_into(out[i], target[i])) return false;
  return true;
}

bool ty_launch(ty_call *c, ty_tensor *const *in, int nin, const void *params) {
  return ty_launch_kernel((ty_op_id)c->op->id, c->out, c->op->nout, in, nin, params);
}
