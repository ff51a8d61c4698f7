/* Adapters of low rank, one for each segment of rows. The rows of a segment share what is read of its adapter, a few
 * pairs of which are taken at a time: their products with all rows of x, then these times the rows of B. */
#include <string.h>

#include "../../half.h"
#include "../cpu.h"
#include "../indexing/segments.h"

enum {
  TOGETHER = 8, /* pairs */
  TOKENS = 48,  /* rows of x in a task */
  BLOCK = 6     /* rows of x that share what is loaded */
};

typedef struct job {
  const void *y, *x;
  void *out;
  const ty_view *a, *b;
  const int64_t *a_rows, *b_rows, *begins, *ranks, *tasks; /* tasks: before each segment, and at the end in all */
  int64_t segments, in, width, failed;
} job;

static bool check_rows(const ty_view *rows, int64_t slots, const char *name) {
  const int64_t *at = rows->data;
  for (int64_t i = 0; i < rows->count; i++)
    if (at[i] < 0 || at[i] >= slots)
      return ty_fail(TY_EINDEX, "%s: index %lld is out of range for size %lld", name, (long long)at[i],
                     (long long)slots);
  return true;
}

#define FN(x) x##_f32
#define REAL float
#define HALVES 1
#include "lora_segments_real.h"
#undef FN
#undef REAL
#undef HALVES
#define FN(x) x##_f64
#define REAL double
#define HALVES 0
#include "lora_segments_real.h"

/* in: y, x, a, b, a_rows, b_rows, begins, ranks; out: [n, out]. */
bool TY_KERNEL(lora_segments)(const ty_kernel_args *k) {
  const ty_view *y = k->in[0], *x = k->in[1], *a = k->in[2], *b = k->in[3], *begins = k->in[6], *ranks = k->in[7];
  if (!ty_offsets_check(begins, x->size[0]) || !ty_offsets_check(ranks, k->in[4]->size[0]) ||
      !check_rows(k->in[4], a->size[0], "a_rows") || !check_rows(k->in[5], b->size[0], "b_rows"))
    return false;
  const int64_t segments = begins->count - 1;
  const size_t bytes = sizeof(int64_t) * (size_t)(segments + 1);
  int64_t *tasks = ty_scratch_alloc(bytes);
  if (!tasks) return false;
  job j = { .y = y->data,
            .x = x->data,
            .out = k->out[0]->data,
            .a = a,
            .b = b,
            .a_rows = k->in[4]->data,
            .b_rows = k->in[5]->data,
            .begins = begins->data,
            .ranks = ranks->data,
            .tasks = tasks,
            .segments = segments,
            .in = x->size[1],
            .width = y->size[1] };
  tasks[0] = 0;
  for (int64_t s = 0; s < segments; s++)
    tasks[s + 1] = tasks[s] + (j.begins[s + 1] - j.begins[s] + TOKENS - 1) / TOKENS;
  const int64_t work = 1 + (j.in + j.width) * (1 + k->in[4]->size[0]) * (1 + x->size[0] / (segments + 1)) /
                               (tasks[segments] + 1);
  if (tasks[segments])
    ty_parallel_for(tasks[segments], 1 + 100000 / work, x->dtype == TY_F64 ? piece_f64 : piece_f32, &j);
  ty_scratch_free(tasks, bytes);
  return !j.failed || ty_fail(TY_ENOMEM, "out of memory for rows of adapters");
}
