/* softmax and log_softmax along one dimension, and their gradients. A line is read until it is in the cache: once
 * for the largest element, once for exponentials and sum, once to scale. */
#include "../cpu.h"
#include "../exp_rows.h"
#include "../lines.h"
#include "halves.h"
#include "narrow.h"
#include "../stream.h"

enum {
  COLUMNS =
      64, /* lines taken together when their elements are apart: whole vectors, and the sums stay in the first cache */
  WORK = 16384, /* elements that are worth a thread */
  ROOM = 4096,  /* elements of a line that are kept in the first cache until they are scaled */
  LONG = 131072 /* those of a longer one in the second */
};

typedef struct job {
  const void *x; /* forward: the input; backward: the result */
  const void *g;
  void *out;
  int64_t n, inner, blocks; /* blocks of COLUMNS lines in `inner` */
  bool log;
  bool stream; /* the result goes past the caches */
  /* x, g and out are halves: */
  ty_dtype dtype;
  ty_range_fn *wide; /* what takes them widened */
  bool *failed;
} job;

#define REAL float
#define FN(name) name##_f32
#include "softmax_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "softmax_real.h"

#if defined(__AVX512F__)
#include "softmax_narrow.h"
#endif

/* `n` elements at `at`, or `rows` pieces of them that are `step` apart, by c->wide as `lines` lines or one block. */
static void half_piece(const job *c, job *part, float *room, int64_t at, int64_t rows, int64_t n, int64_t step,
                       int64_t lines) {
  const uint16_t *x = (const uint16_t *)c->x + at, *g = c->g ? (const uint16_t *)c->g + at : NULL;
  uint16_t *out = (uint16_t *)c->out + at;
  const int64_t all = rows * n;
  part->x = room, part->g = room + all, part->out = room + 2 * all;
  for (int64_t i = 0; i < rows; i++) {
    ty_half_load(c->dtype, room + i * n, x + i * step, n);
    if (g) ty_half_load(c->dtype, room + all + i * n, g + i * step, n);
  }
  c->wide(part, 0, lines);
  for (int64_t i = 0; i < rows; i++)
    halves_put(c->dtype, out + i * step, room + 2 * all + i * n, room, n, c->stream && n * 2 >= STREAM_BLOCK);
}

static void half_lines(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n, most = halves_rows(n);
  const size_t bytes = 3 * (size_t)(most * n) * sizeof(float);
  float *room = ty_scratch_alloc(bytes);
  if (!room) {
    __atomic_store_n(c->failed, true, __ATOMIC_RELAXED);
    return;
  }
  job part = *c;
  part.stream = false;
  for (int64_t line = begin; line < end; line += most) {
    const int64_t lines = end - line < most ? end - line : most;
    half_piece(c, &part, room, line * n, 1, lines * n, 0, lines);
  }
  if (c->stream) stream_end();
  ty_scratch_free(room, bytes);
}

static void half_columns(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n, inner = c->inner, most = inner < COLUMNS ? inner : COLUMNS;
  const size_t bytes = 3 * (size_t)(most * n) * sizeof(float);
  float *room = ty_scratch_alloc(bytes);
  if (!room) {
    __atomic_store_n(c->failed, true, __ATOMIC_RELAXED);
    return;
  }
  job part = *c;
  part.blocks = 1;
  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block % c->blocks * COLUMNS, at = block / c->blocks * n * inner + first;
    part.inner = inner - first < COLUMNS ? inner - first : COLUMNS;
    if (part.inner == inner) half_piece(c, &part, room, at, 1, n * inner, 0, 1);
    else half_piece(c, &part, room, at, n, part.inner, inner, 1);
  }
  ty_scratch_free(room, bytes);
}

static bool run(const ty_kernel_args *k, ty_range_fn *lines, ty_range_fn *columns, const void *x, const void *g,
                bool log) {
  ty_lines l = ty_lines_of(k->out[0], ((const ty_p_dim *)k->params)->dim);
  if (k->out[0]->count == 0) return true;
  bool failed = false;
  job j = { .x = x,
            .g = g,
            .out = k->out[0]->data,
            .n = l.size,
            .inner = l.inner,
            .log = log,
            .stream = stream_pays(k->out[0]->count * ty_dtype_size[k->out[0]->dtype]),
            .blocks = (l.inner + COLUMNS - 1) / COLUMNS,
            .dtype = k->out[0]->dtype,
            .wide = l.inner == 1 ? lines : columns,
            .failed = &failed };
  if (halves_are(k->out[0])) lines = half_lines, columns = half_columns;
  int64_t per_block = l.size * (l.inner < COLUMNS ? l.inner : COLUMNS);
  if (l.inner == 1) ty_parallel_for(l.outer, 1 + WORK / l.size, lines, &j);
  else ty_parallel_for(l.outer * j.blocks, 1 + WORK / per_block, columns, &j);
  return !failed;
}

static bool forward(const ty_kernel_args *k, bool log) {
  bool wide = k->in[0]->dtype == TY_F64;
#if defined(__AVX512F__)
  if (!wide && ty_lines_of(k->out[0], ((const ty_p_dim *)k->params)->dim).size <= NARROW_WIDTH)
    return run(k, narrow_lines, columns_f32, k->in[0]->data, NULL, log);
#endif
  return run(k, wide ? lines_f64 : lines_f32, wide ? columns_f64 : columns_f32, k->in[0]->data, NULL, log);
}

static bool backward(const ty_kernel_args *k, bool log) {
  bool wide = k->in[0]->dtype == TY_F64;
#if defined(__AVX512F__)
  if (!wide && ty_lines_of(k->out[0], ((const ty_p_dim *)k->params)->dim).size <= NARROW_WIDTH)
    return run(k, narrow_lines_backward, columns_backward_f32, k->in[1]->data, k->in[0]->data, log);
#endif
  return run(k, wide ? lines_backward_f64 : lines_backward_f32, wide ? columns_backward_f64 : columns_backward_f32,
             k->in[1]->data, k->in[0]->data, log);
}

bool TY_KERNEL(softmax)(const ty_kernel_args *k) { return forward(k, false); }
bool TY_KERNEL(log_softmax)(const ty_kernel_args *k) { return forward(k, true); }
bool TY_KERNEL(softmax_backward)(const ty_kernel_args *k) { return backward(k, false); }
bool TY_KERNEL(log_softmax_backward)(const ty_kernel_args *k) { return backward(k, true); }
