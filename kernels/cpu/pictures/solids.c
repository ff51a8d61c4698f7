/* Solids drawn into volumes, in integers: draw_solids. A slice is the work of one thread. */
#include <string.h>

#include "../../solids.h"
#include "../cpu.h"

typedef struct solids_ctx {
  int64_t n, k, tasks;
  int64_t size[3]; /* x, y, z */
  const int32_t *list;
  int16_t *values;
  uint8_t *labels;
  int32_t *planes; /* of each task, the slice it draws, with TY_SOLID_BITS bits after the point; and a line */
} solids_ctx;

/* The span adds to what the line's voxels are covered by; `change` is how that differs from voxel to voxel. */
static void add_span(int32_t *change, int64_t from, int64_t to) {
  const int64_t first = from / TY_SOLID_VOXEL, last = to / TY_SOLID_VOXEL;
  const int32_t begin = (int32_t)(from % TY_SOLID_VOXEL), end = (int32_t)(to % TY_SOLID_VOXEL);
  change[first] += TY_SOLID_VOXEL - begin;
  change[first + 1] += begin;
  change[last] += end - TY_SOLID_VOXEL;
  change[last + 1] -= end;
}

/* The texture of a solid along a line, an octave of it. */
typedef struct octave {
  int64_t rest, at, inverse, first, second;
  ty_solid_step y, z;
  uint32_t seed;
  int times;
} octave;

static octave octave_at(const ty_solid *s, int which, int64_t x, int64_t y, int64_t z) {
  octave o = { .seed = s->seed + (uint32_t)which, .times = which, .inverse = ((int64_t)1 << 32) / s->period };
  const int64_t place = ((2 * x + 1) * (TY_DRAW_ONE / 2)) << which;
  o.at = place / s->period;
  o.rest = place - o.at * s->period;
  o.y = ty_solid_step_of(s, y, which);
  o.z = ty_solid_step_of(s, z, which);
  o.first = ty_solid_lattice(o.seed, o.at, o.y, o.z);
  o.second = ty_solid_lattice(o.seed, o.at + 1, o.y, o.z);
  return o;
}

static int64_t octave_next(octave *o, int64_t period) {
  const int64_t result = ty_solid_between(o->first, o->second, ty_solid_ease(o->rest, o->inverse));
  for (o->rest += (int64_t)TY_DRAW_ONE << o->times; o->rest >= period; o->rest -= period) {
    o->first = o->second;
    o->second = ty_solid_lattice(o->seed, ++o->at + 1, o->y, o->z);
  }
  return result;
}

/* One line of voxels; `change` is all 0, and is left so. */
static void draw_line(const ty_solid *s, int64_t y, int64_t z, int32_t *change, int32_t *values, uint8_t *labels) {
  int64_t least = INT64_MAX, most = -1, from, to;
  for (int j = 0; j < TY_SOLID_LINES; j++)
    for (int i = 0; i < TY_SOLID_LINES; i++)
      if (ty_solid_span(s, 8 * y + 2 * i + 1, 8 * z + 2 * j + 1, &from, &to)) {
        add_span(change, from, to);
        if (from < least) least = from;
        if (to > most) most = to;
      }
  if (most < 0) return;
  const int64_t begin = least / TY_SOLID_VOXEL, end = (most + TY_SOLID_VOXEL - 1) / TY_SOLID_VOXEL;
  octave coarse, fine;
  if (s->amplitude) coarse = octave_at(s, 0, begin, y, z), fine = octave_at(s, 1, begin, y, z);
  const int32_t plain = s->value << TY_SOLID_BITS;
  int32_t cover = 0;
  for (int64_t x = begin; x < end; x++) {
    int32_t value = plain;
    if (s->amplitude) {
      const int64_t one = octave_next(&coarse, s->period);
      value = ty_solid_shade(s, one, octave_next(&fine, s->period));
    }
    cover += change[x];
    values[x] = cover == TY_SOLID_WHOLE ? value : ty_solid_over(values[x], value, cover);
    if (2 * cover >= TY_SOLID_WHOLE) labels[x] = (uint8_t)s->label;
  }
  memset(change + begin, 0, (size_t)(end - begin + 2) * sizeof *change);
}

static void draw_slice(const solids_ctx *c, int64_t slice, int32_t *plane) {
  const int64_t w = c->size[0], h = c->size[1], n = slice / c->size[2], z = slice % c->size[2];
  int32_t *change = plane + h * w;
  uint8_t *labels = c->labels + slice * h * w;
  memset(plane, 0, (size_t)(h * w + w + 2) * sizeof *plane);
  memset(labels, 0, (size_t)(h * w));
  for (int64_t i = 0; i < c->k; i++) {
    const int32_t *row = c->list + (n * c->k + i) * TY_SOLID_FIELDS;
    if (row[0] < 0) continue;
    const ty_solid s = ty_solid_read(row, c->size);
    if (z < s.box[4] || z >= s.box[5]) continue;
    for (int64_t y = s.box[2]; y < s.box[3]; y++) draw_line(&s, y, z, change, plane + y * w, labels + y * w);
  }
  int16_t *values = c->values + slice * h * w;
  for (int64_t i = 0; i < h * w; i++) values[i] = ty_solid_value(plane[i]);
}

static void draw_slices(void *context, int64_t begin, int64_t end) {
  const solids_ctx *c = context;
  const int64_t slices = c->n * c->size[2], each = c->size[1] * c->size[0] + c->size[0] + 2;
  const int64_t share = (slices + c->tasks - 1) / c->tasks;
  for (int64_t task = begin; task < end; task++)
    for (int64_t i = task * share; i < (task + 1) * share && i < slices && !ty_interrupted; i++)
      draw_slice(c, i, c->planes + task * each);
}

/* in: list; out: values, labels. */
bool TY_KERNEL(draw_solids)(const ty_kernel_args *k) {
  const ty_view *list = k->in[0], *values = k->out[0];
  solids_ctx c = { .n = values->size[0],
                   .k = list->size[1],
                   .size = { values->size[3], values->size[2], values->size[1] },
                   .list = list->data,
                   .values = values->data,
                   .labels = k->out[1]->data };
  if (!values->count) return true;
  for (int64_t i = 0; i < c.n * c.k; i++)
    if (c.list[i * TY_SOLID_FIELDS] < -1 || c.list[i * TY_SOLID_FIELDS] > UINT8_MAX)
      return ty_fail(TY_EINDEX, "draw_solids: list: expected labels from -1 to 255, got %d in volume %lld",
                     c.list[i * TY_SOLID_FIELDS], (long long)(i / c.k));
  const int64_t slices = c.n * c.size[2];
  c.tasks = ty_parallel_threads() * 8;
  if (c.tasks > slices) c.tasks = slices;
  const size_t bytes = (size_t)(c.tasks * (c.size[1] * c.size[0] + c.size[0] + 2)) * sizeof(int32_t);
  if (!(c.planes = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(c.tasks, 1, draw_slices, &c);
  ty_scratch_free(c.planes, bytes);
  return true;
}
