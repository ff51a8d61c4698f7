/* Rules of ty.vmap for segments and sparse matrices: structures that differ by sample become one that has those of all
 * samples behind each other. */
#include <string.h>

#include "map_rules.h"

/* t [k], plus `step` more for each sample before: [batch * k]. */
static ty_tensor *behind_each_other(ty_mapped *m, ty_tensor *t, int64_t step) {
  ty_tensor *whole = ty_to(ty_whole(m, t), TY_I64);
  ty_tensor *start = ty_mul(ty_arange(0, m->level->size, 1, TY_I64, ty_device_of(t)), step);
  return whole && start ? ty_merged_dims(ty_add(whole, ty_unsqueeze(start, 1)), 0, 2) : NULL;
}

/* The offsets [k + 1] of all samples, which each rise from 0 to n: [batch * k + 1]. Where one's do not begin or end
 * there, the last of all is made wrong, so that the kernel finds it. */
static ty_tensor *offsets_of_all(ty_mapped *m, ty_tensor *offsets, int64_t n) {
  const int64_t k = offsets->v.size[0] - 1;
  ty_tensor *whole = ty_to(ty_whole(m, offsets), TY_I64);
  if (!whole) return NULL;
  ty_tensor *first = ty_narrow(whole, 1, 0, k), *last = ty_narrow(whole, 1, k, 1);
  ty_tensor *start = ty_mul(ty_arange(0, m->level->size, 1, TY_I64, ty_device_of(offsets)), n);
  if (!first || !last || !start) return NULL;
  start = ty_unsqueeze(start, 1);
  ty_tensor *wrong = ty_to(ty_ne(last, n), TY_I64), *begins = ty_to(ty_ne(ty_narrow(whole, 1, 0, 1), 0), TY_I64);
  ty_tensor *bad = wrong && begins ? ty_sum(ty_add(wrong, begins), TY_NO_INTS, false, TY_DTYPE_DEFAULT) : NULL;
  first = ty_merged_dims(ty_add(first, start), 0, 2);
  ty_tensor *end = bad ? ty_add(ty_mul(bad, -2), m->level->size * n) : NULL;
  return first && end ? ty_concat(TY_LIST(first, ty_reshape(end, TY_INTS(1))), 0) : NULL;
}

static bool dim_of(ty_mapped *m, int at, const ty_tensor *x, int *dim) {
  const int64_t d = m->arg[at].i, n = x->v.ndim;
  if (d < -n || d >= n)
    return ty_op_fail(m, TY_EINVAL, "dim: expected a dimension in [%lld, %lld], got %lld", (long long)-n,
                      (long long)n - 1, (long long)d);
  *dim = (int)(d < 0 ? d + n : d);
  return true;
}

/* x or g, [y,] offsets, order, ... dim ...: found by their names. */
static int place_of(const ty_mapped *m, const char *name) {
  for (int i = 0; i < m->op->nargs; i++)
    if (!strcmp(m->op->args[i].name, name)) return i;
  return -1;
}

bool map_segments(ty_mapped *m) {
  const int offsets = place_of(m, "offsets"), order = offsets + 1, at = place_of(m, "dim"), size = place_of(m, "size");
  const int64_t batch = m->level->size;
  ty_value arg[TY_MAX_ARGS];
  ty_tensor *whole[1];
  int dim = 0;
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (!dim_of(m, at, arg[0].t, &dim)) return false;
  const bool differs = ty_differs(m, arg[offsets].t) || (arg[order].t && ty_differs(m, arg[order].t));
  const ty_tensor *o = arg[offsets].t, *p = arg[order].t;
  if (differs && (o->v.ndim != 1 || o->v.size[0] < 1 || (p && p->v.ndim != 1))) return map_forward(m);
  const int64_t n = size < 0 ? arg[0].t->v.size[dim] : arg[size].i;
  if (n < 0 || (p && p->v.size[0] != n)) return map_forward(m);
  for (int i = 0; i < offsets; i++) {
    arg[i].t = ty_whole(m, arg[i].t);
    if (differs) arg[i].t = ty_merged_dims(ty_moved_dim(arg[i].t, dim + 1, 1), 0, 2);
    if (!arg[i].t) return false;
  }
  arg[at].i = differs ? 0 : dim + 1;
  if (differs) {
    if (!(arg[offsets].t = offsets_of_all(m, arg[offsets].t, n))) return false;
    if (p && !(arg[order].t = behind_each_other(m, arg[order].t, n))) return false;
    if (size >= 0) arg[size].i *= batch;
  }
  if (!ty_map_outputs(m, arg, whole)) return false;
  return ty_map_give(m, 0, differs ? ty_moved_dim(ty_split_dim(whole[0], 0, batch), 1, dim + 1) : whole[0]);
}

/* The elements of all samples, counted on from sample to sample. */
bool map_segments_of(ty_mapped *m) {
  const ty_segments_of_args *a = TY_ARGS(segments_of, m);
  ty_tensor *index = a->index.t, *out[2];
  const int64_t batch = m->level->size, n = index->v.ndim == 1 ? index->v.size[0] : -1, count = a->count.i;
  if (n < 0 || count < 0 || batch * (count + 1) >= INT32_MAX) return map_forward(m);
  /* One that is out of range becomes one that is so for all. */
  ty_tensor *whole = ty_to(ty_whole(m, index), TY_I64), *all = behind_each_other(m, index, count);
  if (!whole || !all) return false;
  ty_tensor *inside = ty_logical_and(ty_operand(ty_ge(whole, 0)), ty_operand(ty_lt(whole, count)));
  all = inside ? ty_where(ty_merged_dims(inside, 0, 2), all, batch * count) : NULL;
  if (!all || !ty_segments_of(all, batch * count, out)) return false;
  ty_tensor *start = ty_unsqueeze(ty_mul(ty_arange(0, batch, 1, TY_I64, ty_device_of(index)), n), 1);
  ty_tensor *order = ty_sub(ty_reshape(out[0], TY_INTS(batch, n)), start);
  ty_tensor *first = ty_sub(ty_reshape(ty_narrow(out[1], 0, 0, batch * count), TY_INTS(batch, count)), start);
  ty_tensor *last = ty_full(TY_INTS(batch, 1), n, TY_I64, ty_device_of(index));
  return order && first && last && ty_map_give(m, 0, order) && ty_map_give(m, 1, ty_concat(TY_LIST(first, last), 1));
}

/* ---- sparse matrices ---- */

/* The structures from argument 2 on, of m rows, n columns and k entries, as those of one matrix with the samples'
 * along its diagonal. */
static bool along_diagonal(ty_mapped *m, ty_value *arg, int64_t rows, int64_t columns, int64_t k) {
  const int64_t steps[] = { k, columns, k, k, rows, k };
  for (int i = 0; i < 6; i++) {
    ty_tensor *t = arg[2 + i].t;
    if (!t) continue;
    const bool offsets = i == 0 || i == 3;
    const int64_t limit = i == 1 ? columns : i == 4 ? rows : k;
    if (offsets) {
      t = offsets_of_all(m, t, k);
    } else { /* one that is out of range becomes one that is so for all */
      ty_tensor *whole = ty_to(ty_whole(m, t), TY_I64), *all = behind_each_other(m, t, steps[i]);
      if (!whole || !all) return false;
      ty_tensor *inside = ty_logical_and(ty_operand(ty_ge(whole, 0)), ty_operand(ty_lt(whole, limit)));
      t = inside ? ty_where(ty_merged_dims(inside, 0, 2), all, limit * m->level->size) : NULL;
    }
    if (!(arg[2 + i].t = t)) return false;
  }
  return true;
}

static bool are_vectors(const ty_mapped *m) {
  for (int i = 2; i < m->op->nargs; i++)
    if (m->arg[i].t && m->arg[i].t->v.ndim != 1) return false;
  return m->arg[2].t->v.size[0] > 0;
}

bool map_sparse_mm(ty_mapped *m) {
  ty_tensor *values = m->arg[0].t, *x = m->arg[1].t, *whole[1];
  const int64_t batch = m->level->size;
  ty_value arg[TY_MAX_ARGS];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (values->v.ndim != 1 || x->v.ndim != 2 || !are_vectors(m)) return map_forward(m);
  const int64_t k = values->v.size[0], rows = arg[2].t->v.size[0] - 1, n = x->v.size[0];
  if (ty_map_same_from(m, 2) && !ty_differs(m, values)) { /* the samples' columns side by side */
    arg[1].t = ty_merged_dims(ty_moved_dim(ty_whole(m, x), 0, 1), 1, 2);
    if (!arg[1].t || !ty_map_outputs(m, arg, whole)) return false;
    return ty_map_give(m, 0, ty_moved_dim(ty_reshape(whole[0], TY_INTS(rows, batch, x->v.size[1])), 1, 0));
  }
  if (arg[3].t->v.size[0] != k) return map_forward(m);
  arg[0].t = ty_merged_dims(ty_whole(m, values), 0, 2);
  arg[1].t = ty_merged_dims(ty_whole(m, x), 0, 2);
  if (!arg[0].t || !arg[1].t || !along_diagonal(m, arg, rows, n, k) || !ty_map_outputs(m, arg, whole)) return false;
  return ty_map_give(m, 0, ty_reshape(whole[0], TY_INTS(batch, rows, x->v.size[1])));
}

bool map_sddmm(ty_mapped *m) {
  ty_tensor *a = m->arg[0].t, *b = m->arg[1].t, *whole[1];
  ty_value arg[TY_MAX_ARGS];
  memcpy(arg, m->arg, sizeof *arg * m->op->nargs);
  if (a->v.ndim != 2 || b->v.ndim != 2 || !are_vectors(m) || arg[2].t->v.size[0] != a->v.size[0] + 1)
    return map_forward(m);
  const int64_t k = arg[3].t->v.size[0];
  arg[0].t = ty_merged_dims(ty_whole(m, a), 0, 2);
  arg[1].t = ty_merged_dims(ty_whole(m, b), 0, 2);
  if (!arg[0].t || !arg[1].t || !along_diagonal(m, arg, a->v.size[0], b->v.size[0], k) ||
      !ty_map_outputs(m, arg, whole))
    return false;
  return ty_map_give(m, 0, ty_reshape(whole[0], TY_INTS(m->level->size, k)));
}
