/* The engine: walks the graph from the outputs back in the order of creation, one node at a time, without recursion. */
#include "autograd.h"
#include "../ops/autocast.h"
#include "../ops/profile.h"
#include "../ops/vmap.h"
#include "../program/recording.h"

#include <stdlib.h>
#include <string.h>

static atomic_uint_fast64_t passes;

typedef struct walk {
  ty_node **nodes, *few[64];
  int count, capacity; /* of nodes[], which is few[] as long as they fit */
  uint64_t pass;
  ty_tensor *const *inputs; /* gradients asked for; NULL: accumulate into leaves */
  ty_tensor **results;
  int ninputs;
  ty_backward_options options;
  struct hooked {
    ty_tensor *leaf, *sum;
    int pending; /* uses of the leaf in nodes that are still to come */
  } * hooked;    /* leaves whose hooks wait for the whole gradient */
  int nhooked;
} walk;

/* ---- finding the graph ---- */

static bool push(walk *w, ty_node *n) {
  if (n->pass == w->pass) return true;
  if (w->count == w->capacity) {
    bool were_few = w->nodes == w->few;
    int capacity = 4 * w->capacity;
    ty_node **nodes = realloc(were_few ? NULL : w->nodes, sizeof *nodes * (size_t)capacity);
    if (nodes && were_few) memcpy(nodes, w->few, sizeof w->few);
    if (!nodes) return ty_fail(TY_ENOMEM, "backward: out of memory for %d nodes", capacity);
    w->nodes = nodes;
    w->capacity = capacity;
  }
  n->pass = w->pass;
  n->needed = false;
  n->refs++;
  w->nodes[w->count++] = n;
  return true;
}

static struct hooked *hooked_of(const walk *w, const ty_tensor *leaf) {
  for (int i = w->nhooked - 1; i >= 0; i--)
    if (w->hooked[i].leaf == leaf) return &w->hooked[i];
  return NULL;
}

/* The entry of a leaf with hooks; a new one when there is none. */
static struct hooked *note_hooked(walk *w, ty_tensor *leaf) {
  struct hooked *known = hooked_of(w, leaf);
  if (known) return known;
  struct hooked *list = realloc(w->hooked, sizeof *list * (size_t)(w->nhooked + 1));
  if (!list) return ty_fail(TY_ENOMEM, "backward: out of memory"), NULL;
  w->hooked = list;
  list[w->nhooked] = (struct hooked){ ty_retain(leaf), NULL, 0 };
  return &list[w->nhooked++];
}

/* Every node in reach. The array is its own queue. */
static bool find(walk *w) {
  for (int i = 0; i < w->count; i++) {
    for (int j = 0; j < w->nodes[i]->nin; j++) {
      const ty_edge *e = &w->nodes[i]->in[j];
      if (e->node && !push(w, e->node)) return false;
      if (!e->leaf || !e->leaf->hooks) continue;
      struct hooked *h = note_hooked(w, e->leaf);
      if (!h) return false;
      h->pending++;
    }
  }
  return true;
}

static int newest_first(const void *a, const void *b) {
  uint64_t p = (*(ty_node *const *)a)->seq, q = (*(ty_node *const *)b)->seq;
  return p < q ? 1 : p > q ? -1 : 0;
}

/* In the order of the walk. A chain is found in it. */
static void sort(walk *w) {
  int i = 1;
  while (i < w->count && w->nodes[i - 1]->seq > w->nodes[i]->seq) i++;
  if (i < w->count) qsort(w->nodes, (size_t)w->count, sizeof *w->nodes, newest_first);
}

static int index_of(const walk *w, const ty_node *node, int output, const ty_tensor *leaf) {
  for (int i = 0; i < w->ninputs; i++) {
    const ty_tensor *t = w->inputs[i];
    if (leaf ? t == leaf : t->node == node && t->node_output == output && node) return i;
  }
  return -1;
}

/* With inputs given: a node is needed when a path leads from it to one of them. Oldest first, so inputs come before. */
static void mark_needed(walk *w) {
  for (int i = w->count - 1; i >= 0; i--) {
    ty_node *n = w->nodes[i];
    for (int j = 0; j < n->nin && !n->needed; j++) {
      const ty_edge *e = &n->in[j];
      if (e->leaf) n->needed = index_of(w, NULL, 0, e->leaf) >= 0;
      else if (e->node) n->needed = e->node->needed || index_of(w, e->node, e->output, NULL) >= 0;
    }
  }
}

static bool edge_needed(const walk *w, const ty_edge *e) {
  if (!w->inputs) return e->leaf || e->node;
  if (e->leaf) return index_of(w, NULL, 0, e->leaf) >= 0;
  return e->node && (e->node->needed || index_of(w, e->node, e->output, NULL) >= 0);
}

/* ---- summing ---- */

/* Whether nobody else sees the memory of a sum. */
static bool is_own(const ty_tensor *s) {
  return s->refs == 1 && !s->is_view && atomic_load(&s->storage->refs) == 1 && !s->requires_grad;
}

/* *sum += g; takes its own reference of g. */
static bool accumulate(ty_tensor **sum, ty_tensor *g, bool create_graph) {
  if (!*sum) {
    *sum = ty_retain(g);
    return true;
  }
  ty_tensor *s = *sum;
  if (is_own(s) && !create_graph && !g->batch) {
    ty_value arg[] = { ty_value_of_tensor(s), ty_value_of_tensor(g), TY_NO_NUMBER };
    return ty_call_inplace(TY_OP_add, arg);
  }
  ty_tensor *total = ty_add(s, g);
  if (!total) return false;
  ty_release(s);
  *sum = ty_retain(total);
  return true;
}

static _Thread_local int hooks_running; /* a hook may remove hooks: their structs stay until none runs */

static ty_tensor *run_hooks(ty_hook *hooks, int output, ty_tensor *g) {
  for (ty_hook *h = hooks; h; h = h->next) {
    if (!h->call || (output >= 0 && (int)(h->id & 0xffff) != output)) continue;
    bool failed = false;
    hooks_running++;
    ty_tensor *r = h->call(h->owner, g, &failed);
    hooks_running--;
    if (failed) return NULL;
    if (!r) continue;
    r = ty_scope_add(r);
    if (!r) return NULL;
    if (!ty_same_shape(&r->v, &g->v)) {
      ty_fail(TY_EINVAL, "backward: a gradient hook returned %s for a gradient %s", ty_describe(r), ty_describe(g));
      return NULL;
    }
    g = r;
  }
  return g;
}

/* The gradient with memory that is nobody else's; `counts`: references of g that are known of. */
static ty_tensor *own(ty_tensor *g, uint32_t counts) {
  bool steal = g->refs == counts && g->v.contiguous && atomic_load(&g->storage->refs) == 1;
  if (steal && g->is_view) { /* what is left of a tensor turned to and fro, if it is all of it */
    steal = !ty_is_recording() && g->v.data == g->storage->bytes &&
            g->v.count * ty_dtype_size[g->v.dtype] == (int64_t)g->storage->nbytes;
    if (steal) g->is_view = false;
  }
  return steal ? g : ty_clone(g);
}

/* A leaf's own gradient: its memory must be nobody else's, since optimizers and later passes write to it. */
static bool accumulate_leaf(ty_tensor *leaf, ty_tensor *g, bool create_graph) {
  if (g->batch)
    return ty_fail(TY_EUNSUPPORTED,
                   "backward: inside ty.vmap the gradient of %s differs by sample and cannot be added to its grad; "
                   "use ty.grad",
                   ty_describe(leaf));
  if (ty_is_recording()) ty_recorded_grad(leaf, true);
  if (leaf->grad) return accumulate(&leaf->grad, g, create_graph);
  if (!create_graph && !(g = own(g, 2))) return false; /* the scope's and the caller's */
  leaf->grad = ty_retain(g);
  return true;
}

/* Brings a rule's result to the shape and dtype of the input: sums what was broadcast, undoes promotion. */
static ty_tensor *fit(ty_node *n, int i, ty_tensor *g) {
  const ty_edge *e = &n->in[i];
  if (n->levels && !(g = ty_map_sum_over(n->levels, i, g))) return NULL;
  if (g->v.ndim != e->ndim || memcmp(g->v.size, e->size, sizeof *e->size * (size_t)e->ndim) != 0)
    g = ty_sum_to(g, (ty_ints){ e->size, e->ndim });
  return g ? ty_to(g, (ty_dtype)e->dtype) : NULL;
}

static bool deliver_leaf(walk *w, ty_tensor *leaf, ty_tensor *g) {
  if (!w->inputs) {
    ty_retain(g);
    bool ok = accumulate_leaf(leaf, g, w->options.create_graph);
    ty_release(g);
    return ok;
  }
  int i = index_of(w, NULL, 0, leaf);
  return i < 0 || accumulate(&w->results[i], g, w->options.create_graph);
}

/* Hooks see a leaf's gradient once, when all parts have come. */
static bool collect_hooked(walk *w, ty_tensor *leaf, ty_tensor *g) {
  struct hooked *h = note_hooked(w, leaf);
  if (!h) return false;
  if (!h->sum && !w->options.create_graph && !g->batch && !(g = own(g, 1))) return false; /* the scope's */
  return accumulate(&h->sum, g, w->options.create_graph);
}

static bool deliver_hooked(walk *w, struct hooked *h) {
  ty_scope scope;
  ty_scope_open(&scope);
  ty_tensor *g = ty_scope_add(ty_retain(h->sum));
  g = g ? run_hooks(h->leaf->hooks, -1, g) : NULL;
  ty_release(h->sum);
  h->sum = NULL;
  bool ok = g && deliver_leaf(w, h->leaf, g);
  ty_scope_close(&scope);
  return ok;
}

/* After a node: leaves of which it was the last use have their gradient, and nobody has to wait for the others'. */
static bool deliver_complete(walk *w, const ty_node *n) {
  for (int i = 0; i < n->nin; i++) {
    const ty_edge *e = &n->in[i];
    struct hooked *h = e->leaf ? hooked_of(w, e->leaf) : NULL;
    if (!h || !h->pending || --h->pending || !h->sum) continue;
    if (!deliver_hooked(w, h)) return false;
  }
  return true;
}

static bool deliver(walk *w, const ty_edge *e, ty_tensor *g) {
  if (e->leaf) return e->leaf->hooks ? collect_hooked(w, e->leaf, g) : deliver_leaf(w, e->leaf, g);
  return accumulate(&e->node->grad[e->output], g, w->options.create_graph);
}

/* The sum so far of the gradients for an input, when a rule may add to it in place. */
static ty_tensor *open_sum(const walk *w, const ty_edge *e) {
  ty_tensor *s = NULL;
  if (w->options.create_graph) return NULL;
  if (e->node) {
    s = e->node->grad[e->output];
  } else if (e->leaf->hooks) {
    const struct hooked *h = hooked_of(w, e->leaf);
    s = h ? h->sum : NULL;
  } else {
    int i = w->inputs ? index_of(w, NULL, 0, e->leaf) : -1;
    s = w->inputs ? w->results[i] : e->leaf->grad;
  }
  bool fits = s && is_own(s) && s->v.contiguous && s->v.dtype == e->dtype && s->v.ndim == e->ndim &&
              memcmp(s->v.size, e->size, sizeof *e->size * (size_t)e->ndim) == 0;
  return fits ? s : NULL;
}

/* ---- one node ---- */

enum { INLINE = 16 };

static bool is_mapped(const ty_node *n) {
  for (int i = 0; i < n->nout; i++)
    if (n->grad[i] && n->grad[i]->batch) return true;
  return false;
}

/* For tensors of ty.vmap: by a composition where the fused kernel cannot be mapped. */
static bool run_mapped(const ty_node *n, ty_vjp *c) {
  ty_tensor *g[TY_MAX_OUTPUTS];
  if (n->levels && n->op->id == TY_OP_dropout_apply) { /* what it draws goes by the place among all samples */
    if (!(g[0] = ty_map_spread(n->levels, c->g[0]))) return false;
    c->g = g;
  }
  bool was = ty_vjp_mapped;
  ty_vjp_mapped = !ty_map_plain_backward(c);
  bool ok = n->op->backward(c) && ty_error_code() == TY_OK;
  ty_vjp_mapped = was;
  return ok;
}

static bool run_rule_itself(walk *w, ty_node *n, const bool *need, ty_tensor *const *sum, ty_tensor **dx) {
  if (!n->op) return n->custom.backward(n->custom.owner, n->grad, n->nout, dx, n->nin);
  const ty_op *op = n->op;
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *out[TY_MAX_OUTPUTS] = { NULL };
  int k = 0;
  memcpy(arg, n->arg, sizeof *arg * op->nargs);
  for (int i = 0; i < op->nargs; i++) {
    const ty_arg *a = &op->args[i];
    if (a->kind == TY_ARG_TENSOR || a->kind == TY_ARG_OPTIONAL || a->kind == TY_ARG_OPERAND) {
      if (n->in[k].present) {
        bool kept = n->in[k].saved.storage || n->in[k].saved.packed;
        arg[i].t = kept ? ty_scope_add(ty_node_input(n, k)) : NULL;
        if (kept && !arg[i].t) return false;
      }
      k++;
    } else if (a->kind == TY_ARG_LIST) {
      for (int j = 0; j < arg[i].ts.n; j++, k++) {
        bool kept = n->in[k].saved.storage || n->in[k].saved.packed;
        ty_tensor *t = kept ? ty_scope_add(ty_node_input(n, k)) : NULL;
        if (kept && !t) return false;
        ((ty_tensor **)(uintptr_t)arg[i].ts.v)[j] = t; /* room in the node, see ty_record() */
      }
    }
  }
  for (int i = 0; n->out && i < n->nout; i++) {
    bool kept = n->out[i].storage || n->out[i].packed;
    if (kept && !(out[i] = ty_scope_add(ty_node_output(n, i)))) return false;
  }
  ty_vjp c = { op, arg, n->in, n->nin, out, n->grad, sum, dx, need };
  ty_error_clear();
  if (__builtin_expect(n->levels || is_mapped(n), 0)) return run_mapped(n, &c);
  return op->backward(&c) && ty_error_code() == TY_OK;
}

/* The rule's kernels count for the part of the model that ran the op. */
static bool run_rule(walk *w, ty_node *n, const bool *need, ty_tensor *const *sum, ty_tensor **dx) {
  ty_profile *p = ty_profiling;
  if (!p) return run_rule_itself(w, n, need, sum, dx);
  uint32_t scope = p->scope;
  bool backward = p->backward;
  p->scope = n->scope;
  p->backward = true;
  bool ok = run_rule_itself(w, n, need, sum, dx);
  if (p == ty_profiling) p->scope = scope, p->backward = backward;
  return ok;
}

static bool step(walk *w, ty_node *n) {
  bool any = false;
  for (int i = 0; i < n->nout; i++) {
    if (!n->grad[i]) continue;
    any = true;
    if (n->grad_hooks) {
      ty_tensor *g = run_hooks(n->grad_hooks, i, n->grad[i]);
      if (!g) return false;
      ty_retain(g);
      ty_release(n->grad[i]);
      n->grad[i] = g;
    }
    if (n->retained && n->retained[i] != n->grad[i] && !w->inputs) {
      ty_retain(n->grad[i]);
      ty_release(n->retained[i]);
      n->retained[i] = n->grad[i];
    }
    int at = w->inputs ? index_of(w, n, i, NULL) : -1;
    if (at >= 0 && !accumulate(&w->results[at], n->grad[i], w->options.create_graph)) return false;
  }
  if (!any || (w->inputs && !n->needed)) return true;
  if (n->spent && !(n->op && n->op->id == TY_OP_cast)) /* casts keep nothing; those of autocast serve several passes */
    return ty_fail(TY_EINVAL,
                   "backward: the tensors that %s kept are gone since the first backward; pass keep_graph = true to it",
                   ty_node_name(n));

  bool need_inline[INLINE], *need = need_inline;
  ty_tensor *dx_inline[INLINE], **dx = dx_inline, *sum_inline[INLINE], **sum = sum_inline;
  if (n->nin > INLINE) {
    need = malloc((size_t)n->nin);
    dx = malloc(sizeof *dx * n->nin);
    sum = malloc(sizeof *sum * n->nin);
  }
  bool ok = need && dx && sum, wanted = false, mapped = n->levels || is_mapped(n);
  if (!ok) ty_fail(TY_ENOMEM, "backward: out of memory");
  for (int i = 0; i < n->nin && ok; i++) {
    need[i] = edge_needed(w, &n->in[i]);
    wanted |= need[i];
    dx[i] = NULL;
    sum[i] = need[i] && !mapped ? open_sum(w, &n->in[i]) : NULL;
  }
  if (ok && wanted) {
    ok = run_rule(w, n, need, sum, dx);
    if (!n->op) /* a custom rule returns references of its own */
      for (int i = 0; i < n->nin; i++)
        if (dx[i] && !(dx[i] = ty_scope_add(dx[i]))) ok = false;
    for (int j = 0; j < n->nout && ok && n->op; j++) { /* dx may be the last view of its memory */
      bool passed_on = false;
      for (int i = 0; i < n->nin; i++) passed_on |= dx[i] && dx[i] == n->grad[j];
      if (passed_on) continue;
      ty_release(n->grad[j]);
      n->grad[j] = NULL;
    }
    for (int i = 0; i < n->nin && ok; i++) {
      if (!need[i] || !dx[i] || dx[i] == sum[i]) continue;
      ty_tensor *g = fit(n, i, dx[i]);
      ok = g && deliver(w, &n->in[i], g);
    }
  }
  if (need != need_inline) free(need);
  if (dx != dx_inline) free(dx);
  if (sum != sum_inline) free(sum);
  if (ok && !w->options.keep_graph) ty_node_spend(n);
  return ok;
}

/* ---- the whole ---- */

static bool seed(walk *w, ty_tensor *t, ty_tensor *g, int i) {
  if (!t->requires_grad)
    return ty_fail(TY_EINVAL,
                   "backward: output %d, %s, does not require a gradient: nothing it was computed from does, or it was "
                   "made under no_grad",
                   i, ty_describe(t));
  if (!g) {
    if (t->v.count != 1)
      return ty_fail(TY_EINVAL, "backward: expected one element or a gradient for output %d, got %s", i,
                     ty_describe(t));
    g = ty_ones_like(t, TY_DTYPE_DEFAULT);
  } else if (!ty_same_shape(&g->v, &t->v)) {
    return ty_fail(TY_EINVAL, "backward: the gradient %s does not have the shape of output %d, %s", ty_describe(g), i,
                   ty_describe(t));
  } else {
    g = ty_to(g, ty_dtype_of(t));
  }
  if (!g) return false;
  ty_edge root = { .node = t->node, .leaf = t->node ? NULL : t, .output = t->node_output };
  return (!t->node || push(w, t->node)) && deliver(w, &root, g);
}

bool ty_run_backward(ty_tensor *const *outputs, ty_tensor *const *grads, int noutputs, ty_tensor *const *inputs,
                     ty_tensor **results, int ninputs, ty_backward_options options) {
  walk w;
  w.pass = atomic_fetch_add(&passes, 1) + 1;
  w.nodes = w.few;
  w.capacity = sizeof w.few / sizeof *w.few;
  w.count = w.nhooked = 0;
  w.hooked = NULL;
  w.inputs = inputs;
  w.results = results;
  w.ninputs = ninputs;
  w.options = options;
  w.options.keep_graph |= options.create_graph;
  bool was = ty_set_grad_enabled(options.create_graph), ok = true;
  bool resting = ty_set_weights_at_rest(false);
  int casting = ty_autocast_set(TY_DTYPE_DEFAULT);
  ty_scope scope;
  ty_scope_open(&scope);
  for (int i = 0; i < ninputs; i++) {
    results[i] = NULL;
    if (!inputs[i]->requires_grad)
      ok = ok && ty_fail(TY_EINVAL, "grad: input %d, %s, does not require a gradient", i, ty_describe(inputs[i]));
  }
  for (int i = 0; i < noutputs && ok; i++) ok = seed(&w, outputs[i], grads ? grads[i] : NULL, i);
  ok = ok && find(&w);
  if (ok) {
    sort(&w);
    if (inputs) mark_needed(&w);
  }
  for (int i = 0; i < w.count; i++) {
    ty_node *n = w.nodes[i];
    if (ok) {
      ty_scope inner;
      ty_scope_open(&inner);
      ok = step(&w, n);
      ty_scope_close(&inner);
      ok = ok && (!w.nhooked || deliver_complete(&w, n));
    }
    for (int j = 0; j < n->nout; j++) {
      ty_release(n->grad[j]);
      n->grad[j] = NULL;
    }
    ty_node_release(n);
  }
  for (int i = 0; i < w.nhooked; i++) {
    ok = ok && (!w.hooked[i].sum || deliver_hooked(&w, &w.hooked[i]));
    ty_release(w.hooked[i].sum);
    ty_release(w.hooked[i].leaf);
  }
  free(w.hooked);
  if (w.nodes != w.few) free(w.nodes);
  ty_scope_close(&scope);
  ty_set_grad_enabled(was);
  ty_set_weights_at_rest(resting);
  ty_autocast_dtype = casting;
  for (int i = 0; i < ninputs && ok; i++)
    if (!results[i] && !options.allow_unused)
      ok = ty_fail(TY_EINVAL,
                   "grad: input %d, %s, was not used to compute the outputs; pass allow_unused = true to get nil", i,
                   ty_describe(inputs[i]));
  for (int i = 0; i < ninputs && !ok; i++) {
    ty_release(results[i]);
    results[i] = NULL;
  }
  return ok;
}

bool ty_backward(ty_tensor *loss) {
  return loss && ty_run_backward(&loss, NULL, 1, NULL, NULL, 0, (ty_backward_options){ 0 });
}

ty_tensor *ty_grad_of(ty_tensor *t) {
  return t->node ? (t->node->retained ? t->node->retained[t->node_output] : NULL) : t->grad;
}

void ty_clear_grad(ty_tensor *t) {
  if (ty_is_recording()) ty_recorded_grad(t, false);
  ty_release(t->grad);
  t->grad = NULL;
}

void ty_set_requires_grad(ty_tensor *t, bool on) {
  if (!t->node) t->requires_grad = on;
}

/* ---- hooks ---- */

bool ty_add_hook(ty_tensor *t, ty_hook *hook) {
  static atomic_uint_fast64_t ids;
  if (!t->requires_grad) {
    hook->release(hook->owner);
    free(hook);
    return ty_fail(TY_EINVAL, "register_hook: %s does not require a gradient", ty_describe(t));
  }
  hook->id = (atomic_fetch_add(&ids, 1) + 1) << 16 | (t->node ? t->node_output : 0);
  hook->next = NULL;
  ty_hook **at = t->node ? &t->node->grad_hooks : &t->hooks;
  while (*at) at = &(*at)->next; /* in the order they were added */
  *at = hook;
  return true;
}

static void release_nothing(void *owner) {}

void ty_remove_hook(ty_tensor *t, uint64_t id) {
  for (ty_hook **at = t->node ? &t->node->grad_hooks : &t->hooks; *at;) {
    ty_hook *h = *at;
    if (h->id == id && h->call) {
      h->call = NULL;
      h->release(h->owner);
      h->release = release_nothing;
    }
    if (h->call || hooks_running) {
      at = &h->next;
      continue;
    }
    *at = h->next;
    free(h);
  }
}

bool ty_retain_grad(ty_tensor *t) {
  if (!t->requires_grad) return ty_fail(TY_EINVAL, "retain_grad: %s does not require a gradient", ty_describe(t));
  if (!t->node || t->node->retained) return true;
  t->node->retained = calloc(t->node->nout, sizeof *t->node->retained);
  return t->node->retained || ty_fail(TY_ENOMEM, "retain_grad: out of memory");
}

/* ---- what rules ask about their inputs ---- */

ty_ints ty_vjp_size(const ty_vjp *c, int i) { return (ty_ints){ c->in[i].size, c->in[i].ndim }; }
ty_dtype ty_vjp_dtype(const ty_vjp *c, int i) { return (ty_dtype)c->in[i].dtype; }
int ty_vjp_device(const ty_vjp *c, int i) { return c->in[i].device; }
