/* Cross entropy of logits [n, classes] or [n, classes, places] with class positions, and its gradient, without a tensor
 * of probabilities between them. A row's loss is sum_c t_c (lse - x_c), where t is the target smoothed over the classes
 * (Szegedy et al. 2016) and weighted: t_c = (1 - e) w_y [c = y] + e w_c / classes. With log_probs, lse counts as 0. */
#include "../cpu.h"
#include "../exp_rows.h"
#include "narrow.h"
#include "../stream.h"

enum {
  WORK = 16384, /* elements that are worth a thread */
  BLOCK = 1024, /* that are read once, from memory, and then again from the first cache */
  SHORT = 64,   /* of a row, that make vectors with too much left over */
  LINE = 1024   /* of such rows, beside each other */
};

typedef struct job {
  const void *x, *target, *weight, *g, *lse;
  void *loss, *lse_out, *row_weight, *dx;
  bool narrow;             /* targets are i32 */
  bool stream;             /* the gradient goes past the caches */
  int64_t classes, places; /* 1: rows */
  ty_p_cross_entropy p;
  double weight_sum; /* of all classes */
} job;

static inline int64_t target_at(const job *j, int64_t i) {
  return j->narrow ? ((const int32_t *)j->target)[i] : ((const int64_t *)j->target)[i];
}

static bool check_targets(const job *j, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    int64_t y = target_at(j, i);
    if (y != j->p.ignore_index && (y < 0 || y >= j->classes))
      return ty_fail(TY_EINDEX, "target %lld at position %lld is out of range for %lld classes", (long long)y,
                     (long long)i, (long long)j->classes);
  }
  return true;
}

#define REAL float
#define FN(name) name##_f32
#include "losses_real.h"
#include "losses_places_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "losses_real.h"
#include "losses_places_real.h"

#if defined(__AVX512F__)
/* Rows of at most NARROW_WIDTH f32. */
NARROW_INLINE void narrow_loss(const job *c, int64_t begin, int64_t end, int v, __mmask16 last) {
  const int64_t n = c->classes;
  float top[NARROW_LANES], sum[NARROW_LANES];
  for (int64_t row = begin; row < end; row += NARROW_LANES) {
    int rows = end - row < NARROW_LANES ? (int)(end - row) : NARROW_LANES;
    if (!c->p.log_probs) narrow_log_sums((const float *)c->x + row * n, n, rows, top, sum, v, last);
    for (int r = 0; r < rows; r++) finish_f32(c, row + r, c->p.log_probs ? 0 : top[r] + sum[r]);
  }
}

static void narrow_rows(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  NARROW_CALL(narrow_loss, c->classes, c, begin, end);
}
#endif

static job job_of(const ty_kernel_args *k, const ty_view *x, const ty_view *target, const ty_view *weight) {
  job j = { .x = x->data,
            .target = target->data,
            .narrow = target->dtype == TY_I32,
            .classes = x->size[1],
            .places = 1,
            .weight = weight ? weight->data : NULL,
            .p = *(const ty_p_cross_entropy *)k->params };
  for (int d = 2; d < x->ndim; d++) j.places *= x->size[d];
  j.weight_sum = (double)j.classes;
  if (weight) {
    j.weight_sum = 0;
    for (int64_t i = 0; i < j.classes; i++)
      j.weight_sum += x->dtype == TY_F64 ? ((const double *)j.weight)[i] : (double)((const float *)j.weight)[i];
  }
  return j;
}

/* The ways of a kernel: by rows, or by blocks of places. */
typedef struct ways {
  ty_range_fn *rows_f32, *rows_f64, *places_f32, *places_f64;
} ways;

/* Does x, logits [n, classes, ...], with targets checked before; false after ty_fail(). */
static bool run(job *j, const ty_view *x, const ty_view *target, const ways *w) {
  const bool wide = x->dtype == TY_F64;
  if (!check_targets(j, target->count)) return false;
  if (target->count == 0) return true;
  if (j->places > 1) {
    const int64_t step = wide ? block_f64 : block_f32, pieces = (j->places + step - 1) / step;
    ty_parallel_for(x->size[0] * pieces, 1 + WORK / (step * j->classes + 1), wide ? w->places_f64 : w->places_f32, j);
  } else {
    ty_parallel_for(x->size[0], 1 + WORK / (j->classes + 1), wide ? w->rows_f64 : w->rows_f32, j);
  }
  return true;
}

/* in: logits [n, classes, ...], target [n, ...], weight; out: loss, lse, weight of each. */
bool TY_KERNEL(cross_entropy_rows)(const ty_kernel_args *k) {
  job j = job_of(k, k->in[0], k->in[1], k->in[2]);
  j.loss = k->out[0]->data, j.lse_out = k->out[1]->data, j.row_weight = k->out[2]->data;
  ways w = { rows_f32, rows_f64, places_f32, places_f64 };
#if defined(__AVX512F__)
  if (j.classes > 0 && j.classes <= NARROW_WIDTH) w.rows_f32 = narrow_rows;
#endif
  return run(&j, k->in[0], k->in[1], &w);
}

/* in: g [n, ...], logits, target, lse [n, ...], weight; out: gradient of the logits. */
bool TY_KERNEL(cross_entropy_backward)(const ty_kernel_args *k) {
  const ty_view *x = k->in[1];
  job j = job_of(k, x, k->in[2], k->in[4]);
  j.g = k->in[0]->data, j.lse = k->in[3]->data, j.dx = k->out[0]->data;
  j.stream = stream_pays(x->count * ty_dtype_size[x->dtype]);
  const ways w = { rows_backward_f32, rows_backward_f64, places_backward_f32, places_backward_f64 };
  return run(&j, x, k->in[2], &w);
}
