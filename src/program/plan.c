/* From a recording to what runs: dead launches out, elementwise runs together, temporaries packed into one arena. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ---- what lives ---- */

static bool outlives(const slot *s) { return s->kind != SLOT_TEMPORARY && s->kind != SLOT_INNER; }

/* A launch lives when it writes what outlives the call or what a later one reads, unless it is left out. Backwards, so
 * one pass is enough. */
static bool find_dead(ty_program *p) {
  bool *wanted = calloc((size_t)p->slots.n + 1, sizeof *wanted);
  if (!wanted || !ROOM(p->order, p->launches.n + 1)) {
    free(wanted);
    return ty_fail(TY_ENOMEM, "compile: out of memory for a program");
  }
  for (int i = p->launches.n - 1; i >= 0; i--) {
    launch *l = &p->launches.v[i];
    const operand *o = p->operands.v + l->first;
    int n = l->nout + l->nin;
    bool lives = l->hook >= 0;
    for (int j = 0; j < n && !lives && !l->left_out; j++)
      lives = o[j].slot >= 0 && ty_launch_writes(l, j) && (outlives(&p->slots.v[o[j].slot]) || wanted[o[j].slot]);
    l->dead = !lives;
    for (int j = 0; j < n && lives; j++)
      if (o[j].slot >= 0) wanted[o[j].slot] = true;
    if (lives && l->clip >= 0 && p->operands.v[l->clip].slot >= 0) wanted[p->operands.v[l->clip].slot] = true;
  }
  free(wanted);
  for (int i = 0; i < p->launches.n; i++)
    if (!p->launches.v[i].dead) p->order.v[p->order.n++] = i;
  return true;
}

/* A tensor that was there before and is gone now was state: the next call would have to read its successor. */
static bool check_state(const ty_program *p) {
  for (int i = 0; i < p->order.n; i++) {
    const launch *l = &p->launches.v[p->order.v[i]];
    for (int j = 0; j < l->nout + l->nin; j++) {
      const operand *o = &p->operands.v[l->first + j];
      if (o->slot < 0) continue;
      const slot *s = &p->slots.v[o->slot];
      if (s->kind == SLOT_HELD && !s->owned)
        return ty_fail(TY_EINVAL,
                       "compile: the function replaced a tensor that it had read, %s %s, by another one; replays would "
                       "go on with the old one: change it in place (:copy_)",
                       ty_shape_text(o->view.ndim, o->view.size), ty_dtype_name[o->view.dtype]);
    }
  }
  return true;
}

/* ---- steps ---- */

static bool make_steps(ty_program *p) {
  for (int i = 0; i < p->order.n;) {
    int end = ty_fused_run(p, i);
    if (!ROOM(p->steps, 1)) return false;
    p->steps.v[p->steps.n++] = (step){ .begin = i, .end = end };
    i = end;
  }
  return true;
}

static void touch(ty_program *p, int operand_at, int at) {
  const operand *o = &p->operands.v[operand_at];
  if (o->slot < 0) return;
  slot *s = &p->slots.v[o->slot];
  if (s->first < 0) s->first = at;
  s->last = at;
}

static void find_lifetimes(ty_program *p) {
  for (int i = 0; i < p->slots.n; i++) p->slots.v[i].first = p->slots.v[i].last = -1;
  for (int i = 0; i < p->steps.n; i++) {
    for (int k = p->steps.v[i].begin; k < p->steps.v[i].end; k++) {
      const launch *l = &p->launches.v[p->order.v[k]];
      for (int j = 0; j < l->nout + l->nin; j++) touch(p, l->first + j, i);
      if (l->clip >= 0) touch(p, l->clip, i);
    }
  }
}

/* Temporaries that a fused step writes and nobody else reads; block by block they fit into the cache. */
static bool make_fused(ty_program *p) {
  for (int i = 0; i < p->steps.n; i++) {
    step *at = &p->steps.v[i];
    if (at->end - at->begin < 2) continue;
    for (int k = at->begin; k < at->end; k++) {
      const launch *l = &p->launches.v[p->order.v[k]];
      const operand *out = &p->operands.v[l->first];
      slot *s = &p->slots.v[out->slot];
      bool whole = out->offset == 0 && (size_t)ty_view_bytes(&out->view) == s->bytes;
      if (s->kind == SLOT_TEMPORARY && s->first == i && s->last == i && whole) s->kind = SLOT_INNER;
    }
    if (!(at->fused = ty_fused_new(p, at->begin, at->end))) return false;
  }
  return true;
}

/* ---- the arena: the largest first, each into the smallest gap between those alive at the same time ---- */

static _Thread_local const ty_program *sorting; /* qsort() has no context */

static int largest_first(const void *a, const void *b) {
  const slot *s = &sorting->slots.v[*(const int *)a], *t = &sorting->slots.v[*(const int *)b];
  if (s->bytes != t->bytes) return s->bytes < t->bytes ? 1 : -1;
  return s->first != t->first ? s->first - t->first : s->last - t->last;
}

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void place(ty_program *p, int *placed, int nplaced, slot *s) {
  size_t end = 0, best = SIZE_MAX, at = 0, need = rounded(s->bytes);
  for (int i = 0; i < nplaced; i++) { /* in order of offset */
    const slot *t = &p->slots.v[placed[i]];
    if (t->last < s->first || t->first > s->last) continue;
    if (t->offset > end && t->offset - end >= need && t->offset - end < best) best = t->offset - end, at = end;
    if (t->offset + rounded(t->bytes) > end) end = t->offset + rounded(t->bytes);
  }
  s->offset = best == SIZE_MAX ? end : at;
  if (s->offset + need > p->arena_bytes) p->arena_bytes = s->offset + need;
}

static bool pack(ty_program *p) {
  int *temporary = malloc(sizeof *temporary * (size_t)(2 * p->slots.n + 1)), n = 0;
  if (!temporary) return ty_fail(TY_ENOMEM, "compile: out of memory for a program");
  int *placed = temporary + p->slots.n;
  for (int i = 0; i < p->slots.n; i++)
    if (p->slots.v[i].kind == SLOT_TEMPORARY && p->slots.v[i].first >= 0) temporary[n++] = i;
  sorting = p;
  qsort(temporary, (size_t)n, sizeof *temporary, largest_first);
  for (int i = 0; i < n; i++) {
    slot *s = &p->slots.v[temporary[i]];
    place(p, placed, i, s);
    p->temporary_bytes += rounded(s->bytes);
    int at = i;
    for (; at > 0 && p->slots.v[placed[at - 1]].offset > s->offset; at--) placed[at] = placed[at - 1];
    placed[at] = temporary[i];
  }
  free(temporary);
  return true;
}

/* ---- pointers ---- */

static bool set_views(ty_program *p) {
  p->views = calloc((size_t)p->operands.n + 1, sizeof *p->views);
  if (!p->views) return ty_fail(TY_ENOMEM, "compile: out of memory for a program");
  for (int i = 0; i < p->operands.n; i++) {
    operand *o = &p->operands.v[i];
    p->views[i] = o->absent ? NULL : &o->view;
    if (o->is_number) o->view.data = &o->number;
  }
  for (int k = 0; k < p->order.n; k++) {
    const launch *l = &p->launches.v[p->order.v[k]];
    for (int j = 0; j < l->nout + l->nin + (l->clip >= 0); j++) {
      int i = j < l->nout + l->nin ? l->first + j : l->clip;
      const operand *o = &p->operands.v[i];
      uint8_t kind = o->slot < 0 ? SLOT_HELD : p->slots.v[o->slot].kind;
      if (kind != SLOT_ARGUMENT && kind != SLOT_GRADIENT && kind != SLOT_RESULT) continue;
      if (!ROOM(p->patches, 1)) return false;
      p->patches.v[p->patches.n++] = (patch){ o->slot, i };
    }
  }
  return true;
}

static bool find_written(ty_program *p) {
  bool *seen = calloc((size_t)p->slots.n + 1, sizeof *seen);
  bool ok = seen || ty_fail(TY_ENOMEM, "compile: out of memory for a program");
  for (int k = 0; k < p->order.n && ok; k++) {
    const launch *l = &p->launches.v[p->order.v[k]];
    for (int j = 0; j < l->nout + l->nin && ok; j++) {
      int s = p->operands.v[l->first + j].slot;
      if (s < 0 || seen[s] || !ty_launch_writes(l, j)) continue;
      seen[s] = true;
      uint8_t kind = p->slots.v[s].kind;
      if (kind != SLOT_HELD && kind != SLOT_ARGUMENT && kind != SLOT_GRADIENT) continue;
      ok = ROOM(p->written, 1);
      if (ok) p->written.v[p->written.n++] = s;
    }
  }
  free(seen);
  return ok;
}

static void prepare_results(ty_program *p) {
  for (int i = 0; i < p->nresults; i++) {
    result *r = &p->results[i];
    r->root = i;
    if (r->slot < 0 || p->slots.v[r->slot].kind != SLOT_RESULT) continue;
    for (int j = i - 1; j >= 0; j--)
      if (p->results[j].slot == r->slot) r->root = j;
    r->whole = r->root == i && r->view.contiguous && r->offset == 0 &&
               (size_t)ty_view_bytes(&r->view) == p->slots.v[r->slot].bytes;
  }
}

/* What an earlier plan has left. */
static void forget(ty_program *p) {
  for (int i = 0; i < p->steps.n; i++) ty_fused_free(p->steps.v[i].fused);
  p->steps.n = p->order.n = p->patches.n = p->written.n = 0;
  for (int i = 0; i < p->slots.n; i++)
    if (p->slots.v[i].kind == SLOT_INNER) p->slots.v[i].kind = SLOT_TEMPORARY;
  ty_graphs_free(p, p->graphs);
  p->graphs = NULL;
  p->replays = 0;
  if (p->arena) ty_storage_release(p->arena);
  p->arena = NULL;
  p->arena_bytes = p->temporary_bytes = 0;
  free(p->views);
  p->views = NULL;
}

static bool check_arena(const ty_program *p) {
  return !p->arena_most || (int64_t)p->arena_bytes <= p->arena_most ||
         ty_fail(TY_ENOMEM,
                 "compile: the temporaries of a call need an arena of %zu bytes, %zu more than the %lld that "
                 "it may have",
                 p->arena_bytes, p->arena_bytes - (size_t)p->arena_most, (long long)p->arena_most);
}

bool ty_program_plan(ty_program *p) {
  forget(p);
  if (p->early && !ty_program_split(p)) return false;
  p->recorded = 0;
  for (int i = 0; i < p->launches.n; i++) p->recorded += p->launches.v[i].hook < 0;
  if (!find_dead(p) || !check_state(p)) return false;
  if (p->early) ty_program_hasten(p);
  if (!make_steps(p)) return false;
  find_lifetimes(p);
  prepare_results(p);
  return make_fused(p) && pack(p) && check_arena(p) && set_views(p) && find_written(p);
}

ty_program_stats ty_program_stats_of(const ty_program *p) {
  ty_program_stats s = { .recorded = p->recorded,
                         .steps = p->steps.n,
                         .hastened = p->hastened,
                         .arena = (int64_t)p->arena_bytes,
                         .temporaries = (int64_t)p->temporary_bytes };
  for (int i = 0; i < p->launches.n; i++) s.dropped += p->launches.v[i].dead;
  for (int i = 0; i < p->order.n; i++) s.runs += p->launches.v[p->order.v[i]].hook < 0;
  for (int i = 0; i < p->steps.n; i++) s.fused += p->steps.v[i].fused != NULL;
  return s;
}

bool ty_program_place_of(const ty_program *p, int i, ty_program_place *place) {
  for (int k = 0; k < p->slots.n; k++) {
    const slot *s = &p->slots.v[k];
    if (s->kind != SLOT_TEMPORARY || s->first < 0 || i-- > 0) continue;
    *place = (ty_program_place){ (int64_t)s->offset, (int64_t)s->bytes, s->first, s->last };
    return true;
  }
  return false;
}

int ty_program_hooks(const ty_program *p) { return p->hooks; }

const char *ty_program_not_elementwise(const ty_program *p) {
  for (int i = 0; i < p->order.n; i++) {
    const launch *l = &p->launches.v[p->order.v[i]];
    if (l->hook >= 0) return "an optimizer's step";
    if (!ty_program_elementwise[l->id]) return ty_ops[l->id].name;
  }
  return NULL;
}
