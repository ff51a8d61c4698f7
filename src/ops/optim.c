/* Optimizer steps over lists of tensors: sgd_, adam_, lerp_list_, norm_list. They write into their arguments. */
#include "op.h"

/* List `arg` against the first: as long, shaped alike, and writable where it is written. */
static bool check_list(ty_call *c, int arg, bool written) {
  ty_tensors first = c->arg[0].ts, list = c->arg[arg].ts;
  const char *name = c->op->args[arg].name, *first_name = c->op->args[0].name;
  if (list.n != first.n)
    return ty_op_fail(c, TY_EINVAL, "%s: expected %d tensors, one for each of %s, got %d", name, first.n, first_name,
                      list.n);
  for (int i = 0; i < list.n; i++) {
    const ty_view *v = &list.v[i]->v;
    if (!ty_same_shape(v, &first.v[i]->v))
      return ty_op_fail(c, TY_EINVAL, "%s[%d]: expected the shape of %s[%d] %s, got %s", name, i, first_name, i,
                        ty_describe(first.v[i]), ty_describe(list.v[i]));
    for (int d = 0; written && d < v->ndim; d++)
      if (v->stride[d] == 0 && v->size[d] > 1)
        return ty_op_fail(c, TY_EINVAL, "%s[%d]: cannot write in place to an expanded view %s; call :clone() first",
                          name, i, ty_describe(list.v[i]));
  }
  return true;
}

/* Runs the kernel on the first `lists` arguments, of which those in the mask `written` change. Whatever is not
 * contiguous is replaced by a copy, which is written back. */
static bool run(ty_call *c, int lists, unsigned written, const void *params) {
  int n = c->arg[0].ts.n, all = n * lists;
  if (n == 0) return true;
  size_t bytes = sizeof(ty_tensor *) * (size_t)all;
  ty_tensor **in = ty_scratch_alloc(bytes);
  if (!in) return false;
  bool ok = true;
  for (int i = 0; ok && i < all; i++) {
    ty_tensor *t = c->arg[i / n].ts.v[i % n];
    in[i] = t->v.contiguous ? t : ty_contiguous(t);
    ok = in[i] != NULL;
  }
  ok = ok && ty_launch(c, in, all, params);
  for (int i = 0; ok && i < all; i++) {
    ty_tensor *t = c->arg[i / n].ts.v[i % n];
    if (!(written >> i / n & 1)) continue;
    if (in[i] != t) ok = ty_copy_into(t, in[i]);
    t->version = ++t->storage->version;
  }
  ty_scratch_free(in, bytes);
  return ok;
}

bool fwd_sgd_(ty_call *c) {
  const ty_sgd__args *a = TY_ARGS(sgd_, c);
  bool averaged = a->momentum.f != 0;
  if (!averaged && a->nesterov.i) return ty_op_fail(c, TY_EINVAL, "nesterov: needs a momentum, got 0");
  if (a->step.i < 1) return ty_op_fail(c, TY_EINVAL, "step: counts from 1, got %lld", (long long)a->step.i);
  if (!check_list(c, 0, true) || !check_list(c, 1, false) || (averaged && !check_list(c, 2, true))) return false;
  return run(c, averaged ? 3 : 2, averaged ? 5 : 1,
             &(ty_p_optim){ .lr = a->lr.f,
                            .momentum = a->momentum.f,
                            .dampening = a->dampening.f,
                            .weight_decay = a->weight_decay.f,
                            .nesterov = a->nesterov.i,
                            .grad_scale = a->grad_scale.f,
                            .step = a->step.i });
}

bool fwd_adam_(ty_call *c) {
  const ty_adam__args *a = TY_ARGS(adam_, c);
  if (a->step.i < 1) return ty_op_fail(c, TY_EINVAL, "step: counts from 1, got %lld", (long long)a->step.i);
  for (int i = 0; i < 4; i++)
    if (!check_list(c, i, i != 1)) return false;
  return run(c, 4, 13,
             &(ty_p_optim){ .lr = a->lr.f,
                            .beta1 = a->beta1.f,
                            .beta2 = a->beta2.f,
                            .eps = a->eps.f,
                            .weight_decay = a->weight_decay.f,
                            .decoupled = a->decoupled.i,
                            .grad_scale = a->grad_scale.f,
                            .step = a->step.i });
}

bool fwd_lerp_list_(ty_call *c) {
  return check_list(c, 0, true) && check_list(c, 1, false) &&
         run(c, 2, 1, &(ty_p_scalars){ .a = TY_ARGS(lerp_list_, c)->weight.f });
}

bool fwd_norm_list(ty_call *c) {
  const ty_norm_list_args *a = TY_ARGS(norm_list, c);
  int n = a->xs.ts.n;
  if (!ty_out(c, 0, n ? ty_device_of(a->xs.ts.v[0]) : TY_CPU, TY_F64, 0, (int64_t[]){ 0 })) return false;
  return n ? run(c, 1, 0, &(ty_p_scalars){ .a = a->p.f }) : ty_launch(c, NULL, 0, &(ty_p_scalars){ .a = a->p.f });
}
