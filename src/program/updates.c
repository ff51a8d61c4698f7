/* The steps of optimizers in a recording, tensor by tensor. Those of tensors that are to stay as they are are left out,
 * and what only they needed is dead (plan.c); the others run as soon as their gradient is there, whose memory then
 * serves others. Zhu et al. 2023, "PockEngine: Sparse and Efficient Fine-tuning in a Pocket". */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ---- a launch for each tensor ---- */

/* How many lists of tensors a step has: parameters, gradients, states, averages. */
static int lists_of(const ty_program *p, const launch *l) {
  const ty_p_optim *o = ty_launch_params(p, l);
  int states = l->id == TY_OP_sgd_         ? o->momentum != 0
               : l->id == TY_OP_lion_      ? 1
               : l->id == TY_OP_adam_      ? 2
               : l->id == TY_OP_adam_8bit_ ? 3
                                           : __builtin_popcount(o->lists);
  return 2 + states + o->averaged;
}

/* Part i of n of a step: its operands are the tensors i of all lists, its numbers those of the whole, which a hook
 * changes once for all parts. */
static bool add_part(ty_program *p, launch part, int lists, int i, int n) {
  const ty_p_optim *o = ty_launch_params(p, &part);
  int from = part.first;
  if (!ROOM(p->operands, lists + o->controlled)) return false;
  part.first = p->operands.n;
  part.nin = lists + o->controlled;
  part.part = true;
  for (int j = 0; j < lists; j++) p->operands.v[p->operands.n++] = p->operands.v[from + j * n + i];
  if (o->controlled) p->operands.v[p->operands.n++] = p->operands.v[from + lists * n];
  p->launches.v[p->launches.n++] = part;
  return true;
}

/* Once for a recording. */
static bool split(ty_program *p) {
  launch *whole = p->launches.v;
  int n = p->launches.n, *at = malloc(sizeof *at * (size_t)(n + 1));
  if (!at) return ty_fail(TY_ENOMEM, "compile: out of memory for a program");
  p->launches.v = NULL;
  p->launches.n = p->launches.room = 0;
  bool ok = true;
  for (int i = 0; i < n && ok; i++) {
    launch l = whole[i];
    bool steps = l.hook < 0 && l.params == PARAMS_OPTIM;
    int lists = steps ? lists_of(p, &l) : 0, parts = steps ? l.nin / lists : 1;
    at[i] = p->launches.n;
    ok = ROOM(p->launches, parts);
    if (ok && !steps) p->launches.v[p->launches.n++] = l;
    for (int k = 0; k < parts && steps && ok; k++) ok = add_part(p, l, lists, k, parts);
  }
  for (int i = 0; i < p->launches.n && ok; i++)
    if (p->launches.v[i].hook >= 0 && p->launches.v[i].hooked >= 0)
      p->launches.v[i].hooked = at[p->launches.v[i].hooked];
  free(at);
  free(whole);
  p->split = ok;
  return ok;
}

void ty_program_options(ty_program *p, bool early, int64_t arena) {
  p->early = early;
  p->arena_most = arena;
}

bool ty_program_split(ty_program *p) { return p->split || split(p); }

/* ---- updates early ---- */

static const operand *operand_of(const ty_program *p, const launch *l, int i) {
  return &p->operands.v[i < l->nout + l->nin ? l->first + i : l->clip];
}

/* May `update` not run before `l`? */
static bool must_follow(const ty_program *p, const launch *update, const launch *l) {
  if (l->hook >= 0) return true;
  int n = l->nout + l->nin, m = update->nout + update->nin;
  for (int i = 0; i < n + (l->clip >= 0); i++)
    for (int j = 0; j < m + (update->clip >= 0); j++) {
      const operand *a = operand_of(p, l, i), *b = operand_of(p, update, j);
      bool writes = (i < n && ty_launch_writes(l, i)) || (j < m && ty_launch_writes(update, j));
      if (writes && a->slot >= 0 && b->slot >= 0 && ty_program_may_alias(p, a, b)) return true;
    }
  return false;
}

static void move(ty_program *p, int from, int to) {
  int at = p->order.v[from];
  memmove(p->order.v + to + 1, p->order.v + to, sizeof *p->order.v * (size_t)(from - to));
  p->order.v[to] = at;
}

/* Hooks count steps and give rates, which is as right at the beginning: those that come first among all hooks and belong
 * to steps go there, in their order. A hook of another kind, which may look at anything, ends this. */
static int advance_hooks(ty_program *p) {
  int front = 0;
  for (int k = 0; k < p->order.n; k++) {
    const launch *l = &p->launches.v[p->order.v[k]];
    if (l->hook < 0) continue;
    if (l->hooked < 0 || !p->launches.v[l->hooked].part) break;
    move(p, k, front++);
  }
  return front;
}

void ty_program_hasten(ty_program *p) {
  int front = advance_hooks(p);
  p->hastened = 0;
  for (int k = front; k < p->order.n; k++) {
    const launch *l = &p->launches.v[p->order.v[k]];
    int to = k;
    if (!l->part) continue;
    while (to > front && !must_follow(p, l, &p->launches.v[p->order.v[to - 1]])) to--;
    while (to < k && p->launches.v[p->order.v[to]].part) to++; /* they stay in order */
    if (to == k) continue;
    move(p, k, to);
    p->hastened++;
  }
}

/* ---- sparse schemes ---- */

/* Marks the steps on these tensors; false after ty_fail() when there is none on one of them. */
static bool mark(ty_program *p, ty_tensor *const *frozen, int n) {
  for (int i = 0; i < n; i++) {
    bool found = false;
    for (int k = 0; k < p->launches.n; k++) {
      launch *l = &p->launches.v[k];
      if (!l->part) continue;
      const operand *o = &p->operands.v[l->first];
      if (o->slot < 0 || p->slots.v[o->slot].kind != SLOT_HELD || o->view.data != frozen[i]->v.data) continue;
      l->left_out = found = true;
    }
    if (!found)
      return ty_fail(TY_EINVAL, "compile: tensor %d to leave out, %s, is none that a recorded optimizer's step changes",
                     i + 1, ty_describe(frozen[i]));
  }
  return true;
}

/* What no launch needs any more is given back: moments of tensors that are left out. */
static void shed(ty_program *p) {
  for (int i = 0; i < p->slots.n; i++) {
    slot *s = &p->slots.v[i];
    bool returned = false;
    for (int j = 0; j < p->nresults; j++) returned |= p->results[j].slot == i;
    if (s->kind != SLOT_HELD || !s->owned || s->first >= 0 || returned) continue;
    ty_storage_release(s->storage);
    s->owned = false;
    s->storage = NULL;
  }
}

bool ty_program_restrict(ty_program *p, ty_tensor *const *frozen, int n) {
  if (!ty_program_split(p) || !mark(p, frozen, n) || !ty_program_plan(p)) return false;
  shed(p);
  return true;
}

bool ty_program_foresee(ty_program *p, ty_tensor *const *frozen, int n, ty_program_stats *stats) {
  if (!ty_program_split(p)) return false;
  bool *before = malloc((size_t)p->launches.n + 1);
  if (!before) return ty_fail(TY_ENOMEM, "compile: out of memory for a program");
  int64_t most = p->arena_most;
  for (int i = 0; i < p->launches.n; i++) before[i] = p->launches.v[i].left_out;
  p->arena_most = 0;
  bool ok = mark(p, frozen, n) && ty_program_plan(p);
  if (ok) *stats = ty_program_stats_of(p);
  for (int i = 0; i < p->launches.n; i++) p->launches.v[i].left_out = before[i];
  bool again = ty_program_plan(p);
  p->arena_most = most;
  free(before);
  return ok && again;
}
