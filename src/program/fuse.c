/* Fused steps: a run of elementwise launches over one shape goes through the data once, a block at a time. Each launch
 * is its kernel called on the block; results that only the run itself reads never leave the cache. */
#include <string.h>

#include "../../kernels/cpu/parallel.h"
#include "internal.h"

enum {
  LEAST = 16384,    /* elements below which the tensors stay in the cache anyway */
  BLOCK = 2048,     /* elements */
  GRAIN = 32768,    /* elements worth a thread */
  MOST = 64,        /* launches of one step */
  SCRATCH = 1 << 18 /* bytes of all inner blocks together: about what the second-level cache leaves */
};

typedef struct fused_operand {
  int operand;
  int inner; /* the block of scratch it is, or -1 */
  int bytes; /* of an element */
  int64_t stride[TY_MAX_DIMS];
} fused_operand;

struct fused {
  int begin, end; /* in program.order */
  int noperands, ninner;
  int ndim, split;            /* blocks are whole in the dimensions after `split` */
  int64_t size[TY_MAX_DIMS];  /* dimensions merged over all operands */
  int64_t rows, units, block; /* rows of `split` in a block, blocks in all, elements of a full one */
  size_t inner_bytes, bytes;  /* of one scratch block; of this struct */
  fused_operand o[];
};

/* ---- what may run together ---- */

static bool walks_forward(const ty_view *v) {
  for (int d = v->ndim - 1; d >= 0; d--)
    if (v->size[d] != 1) return v->stride[d] == 0 || v->stride[d] == 1;
  return true;
}

static bool fits(const ty_program *p, const launch *l, const ty_view *shape) {
  if (p->device != TY_CPU) return false; /* blocks of this size pay by the caches of a CPU only */
  if (l->hook >= 0 || !ty_program_elementwise[l->id] || l->nout != 1) return false;
  const operand *o = p->operands.v + l->first;
  if (!o->view.contiguous || o->view.count < LEAST || o->slot < 0) return false;
  if (shape && !ty_same_shape(&o->view, shape)) return false;
  for (int i = 1; i <= l->nin; i++)
    if (o[i].absent || !ty_same_shape(&o[i].view, &o->view) || !walks_forward(&o[i].view)) return false;
  return true;
}

/* Might the two be the same memory? A gradient found on a leaf may be one that the program itself once put there. */
bool ty_program_may_alias(const ty_program *p, const operand *a, const operand *b) {
  if (a->slot == b->slot) return true;
  uint8_t ka = p->slots.v[a->slot].kind, kb = p->slots.v[b->slot].kind;
  return (ka == SLOT_GRADIENT && (kb == SLOT_HELD || kb == SLOT_GRADIENT)) || (kb == SLOT_GRADIENT && ka == SLOT_HELD);
}

static bool same_elements(const operand *a, const operand *b) {
  return a->slot == b->slot && a->offset == b->offset && a->view.dtype == b->view.dtype &&
         memcmp(a->view.stride, b->view.stride, sizeof *a->view.stride * (size_t)a->view.ndim) == 0;
}

/* What one launch writes, another may read or write only at the same positions: blocks then cannot get ahead of it. */
static bool in_step(const ty_program *p, const launch *l, const launch *earlier) {
  const operand *a = p->operands.v + l->first, *b = p->operands.v + earlier->first;
  for (int i = 0; i <= l->nin; i++)
    for (int j = 0; j <= earlier->nin; j++)
      if ((i == 0 || j == 0) && a[i].slot >= 0 && b[j].slot >= 0 && ty_program_may_alias(p, &a[i], &b[j]) &&
          !same_elements(&a[i], &b[j]))
        return false;
  return true;
}

int ty_fused_run(ty_program *p, int begin) {
  const launch *first = &p->launches.v[p->order.v[begin]];
  if (!fits(p, first, NULL) || !in_step(p, first, first)) return begin + 1;
  int end = begin + 1;
  for (; end < p->order.n && end - begin < MOST; end++) {
    const launch *l = &p->launches.v[p->order.v[end]];
    bool ok = fits(p, l, &p->operands.v[first->first].view);
    for (int k = begin; k <= end && ok; k++) ok = in_step(p, l, &p->launches.v[p->order.v[k]]);
    if (!ok) break;
  }
  return end;
}

/* ---- making ---- */

/* Scratch blocks are given to inner results and back after their last reader. */
static void assign_scratch(const ty_program *p, struct fused *f) {
  int slot_of[MOST], last[MOST];
  for (int i = 0; i < MOST; i++) slot_of[i] = -1;
  int at = 0;
  for (int k = f->begin; k < f->end; k++) {
    const launch *l = &p->launches.v[p->order.v[k]];
    for (int j = 0; j <= l->nin; j++, at++) {
      int s = p->operands.v[l->first + j].slot, b = 0;
      f->o[at].inner = -1;
      if (s < 0 || p->slots.v[s].kind != SLOT_INNER) continue;
      while (b < f->ninner && slot_of[b] != s) b++;
      if (b == f->ninner) { /* its first writer: a block that nobody reads any more */
        for (b = 0; b < f->ninner && last[b] >= k; b++) {}
        if (b == f->ninner) f->ninner++;
        slot_of[b] = s;
        last[b] = k;
        for (int m = k; m < f->end; m++) {
          const launch *reader = &p->launches.v[p->order.v[m]];
          for (int i = 0; i <= reader->nin; i++)
            if (p->operands.v[reader->first + i].slot == s) last[b] = m;
        }
      }
      f->o[at].inner = b;
    }
  }
}

static void merge_dims(const ty_program *p, struct fused *f, const ty_view *shape) {
  for (int d = 0; d < shape->ndim; d++) {
    int64_t size = shape->size[d];
    if (size == 1) continue;
    bool merge = f->ndim > 0;
    for (int i = 0; i < f->noperands && merge; i++)
      merge = f->o[i].stride[f->ndim - 1] == p->operands.v[f->o[i].operand].view.stride[d] * size;
    int to = merge ? f->ndim - 1 : f->ndim++;
    f->size[to] = merge ? f->size[to] * size : size;
    for (int i = 0; i < f->noperands; i++) f->o[i].stride[to] = p->operands.v[f->o[i].operand].view.stride[d];
  }
}

struct fused *ty_fused_new(ty_program *p, int begin, int end) {
  int n = 0;
  for (int k = begin; k < end; k++) n += 1 + p->launches.v[p->order.v[k]].nin;
  size_t bytes = sizeof(struct fused) + sizeof(fused_operand) * (size_t)n;
  struct fused *f = ty_small_alloc(bytes);
  if (!f) return NULL;
  *f = (struct fused){ .begin = begin, .end = end, .noperands = n, .bytes = bytes };
  int at = 0, widest = 1;
  for (int k = begin; k < end; k++) {
    const launch *l = &p->launches.v[p->order.v[k]];
    for (int j = 0; j <= l->nin; j++, at++) {
      int size = ty_dtype_size[p->operands.v[l->first + j].view.dtype];
      f->o[at] = (fused_operand){ .operand = l->first + j, .bytes = size };
      if (size > widest) widest = size;
    }
  }
  merge_dims(p, f, &p->operands.v[f->o[0].operand].view);
  assign_scratch(p, f);
  int64_t most = BLOCK, inside = 1;
  while (f->ninner && most > 1024 && most * widest * f->ninner > SCRATCH) most /= 2;
  f->split = f->ndim - 1;
  while (f->split > 0 && inside * f->size[f->split] <= most) inside *= f->size[f->split--];
  f->rows = inside >= most ? 1 : most / inside;
  if (f->rows > f->size[f->split]) f->rows = f->size[f->split];
  f->block = f->rows * inside;
  f->units = (f->size[f->split] + f->rows - 1) / f->rows;
  for (int d = 0; d < f->split; d++) f->units *= f->size[d];
  f->inner_bytes = ((size_t)f->block * (size_t)widest + 63) / 64 * 64;
  return f;
}

void ty_fused_free(struct fused *f) {
  if (f) ty_small_free(f, f->bytes);
}

/* ---- running ---- */

typedef struct job {
  const ty_program *p;
  const struct fused *f;
  int failed; /* 1: somebody is writing down why; 2: it is written */
  ty_code code;
  char problem[256];
} job;

/* The error of the first thread that fails; the caller's thread repeats it. */
static void fail(job *j) {
  int none = 0;
  if (!__atomic_compare_exchange_n(&j->failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
  j->code = ty_error_code();
  strncpy(j->problem, ty_error(), sizeof j->problem - 1);
  __atomic_store_n(&j->failed, 2, __ATOMIC_RELEASE);
}

static void set_rows(const struct fused *f, ty_view *view, int64_t rows) {
  int64_t size[TY_MAX_DIMS];
  int ndim = f->ndim - f->split;
  memcpy(size, f->size + f->split, sizeof *size * (size_t)ndim);
  size[0] = rows;
  for (int i = 0; i < f->noperands; i++) {
    if (f->o[i].inner >= 0) {
      ty_view_set_contiguous(&view[i], ndim, size);
      continue;
    }
    view[i].ndim = (int16_t)ndim;
    memcpy(view[i].size, size, sizeof *size * (size_t)ndim);
    memcpy(view[i].stride, f->o[i].stride + f->split, sizeof *size * (size_t)ndim);
    ty_view_update(&view[i]);
  }
}

static void run_units(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const struct fused *f = j->f;
  const ty_program *p = j->p;
  size_t at_views = f->inner_bytes * (size_t)f->ninner, at_pointers = at_views + sizeof(ty_view) * (size_t)f->noperands,
         bytes = at_pointers + sizeof(ty_view *) * (size_t)f->noperands;
  char *scratch = ty_scratch_alloc(bytes);
  if (!scratch) {
    fail(j);
    return;
  }
  ty_view *view = (ty_view *)(void *)(scratch + at_views);
  const ty_view **pointer = (const ty_view **)(void *)(scratch + at_pointers);
  for (int i = 0; i < f->noperands; i++) {
    pointer[i] = &view[i];
    view[i].dtype = p->operands.v[f->o[i].operand].view.dtype;
    view[i].data = scratch + f->inner_bytes * (size_t)(f->o[i].inner < 0 ? 0 : f->o[i].inner);
  }
  int64_t per_plane = (f->size[f->split] + f->rows - 1) / f->rows, now = 0;
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t row = unit % per_plane * f->rows, rest = unit / per_plane, index[TY_MAX_DIMS];
    int64_t rows = f->size[f->split] - row < f->rows ? f->size[f->split] - row : f->rows;
    if (rows != now) set_rows(f, view, now = rows);
    for (int d = f->split - 1; d >= 0; d--) index[d] = rest % f->size[d], rest /= f->size[d];
    for (int i = 0; i < f->noperands; i++) {
      const fused_operand *o = &f->o[i];
      if (o->inner >= 0) continue;
      int64_t offset = row * o->stride[f->split];
      for (int d = 0; d < f->split; d++) offset += index[d] * o->stride[d];
      view[i].data = (char *)p->operands.v[o->operand].view.data + offset * o->bytes;
    }
    int at = 0;
    for (int k = f->begin; k < f->end; k++) {
      const launch *l = &p->launches.v[p->order.v[k]];
      ty_kernel_args args = { 1, l->nin, pointer + at, pointer + at + 1, ty_launch_params(p, l), NULL };
      at += 1 + l->nin;
      if (l->kernel(&args)) continue;
      ty_op_fail_(&ty_ops[l->id], ty_error_code(), "%s", ty_error());
      fail(j);
      unit = end;
      break;
    }
  }
  ty_scratch_free(scratch, bytes);
}

bool ty_fused_replay(ty_program *p, const struct fused *f) {
  job j = { .p = p, .f = f };
  int64_t grain = (GRAIN + f->block - 1) / f->block;
  ty_parallel_for(f->units, grain, run_units, &j);
  return !j.failed || ty_fail(j.code, "%s", j.problem);
}
