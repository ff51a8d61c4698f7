/* layer_norm, rms_norm, group_norm and batch_norm, and their gradients in one pass over the data: what a row or a
 * group needs of itself is taken while it is in the cache. Weight and bias gradients are summed over fixed chunks of
 * rows, then over the chunks in order, so that they do not depend on the number of threads. */
#include <math.h>

#include "../../scalar.h"
#include "../activation.h"
#include "../cpu.h"
#include "halves.h"
#include "narrow.h"
#include "../stream.h"

enum {
  BLOCK = 1024,   /* elements summed in the element type before the sum goes on in double */
  CHUNKS = 64,    /* at most, of rows */
  LEAST_ROWS = 8, /* of a chunk */
  COLUMNS = 128,  /* taken together where neighbours are summed apart */
  ROWS = 32,      /* of them that are in the first cache together */
  TOGETHER = 4,   /* rows whose weight gradients are added at once */
  WIDEST = 16384, /* of which so many elements stay in the second cache */
  WORK = 16384    /* elements that are worth a thread */
};

/* Rows of `width` (layer and rms norm), or rows of `segments` of `spatial` elements: the channels of a group, [n,
 * groups, segments, spatial], or a channel's parts in the batch, [segments, channels, spatial]. */
typedef struct job {
  const void *x, *g, *weight, *bias, *mean, *rstd;
  void *y, *dx, *dweight, *dbias, *mean_out, *rstd_out, *var_out;
  void *partial;
  int64_t rows, width, chunk, chunks;
  int64_t groups, segments, spatial, row_step, segment_step;
  bool by_row; /* one weight for a row (batch norm), not for a segment */
  double eps;
  bool centred;             /* layer norm, not rms norm */
  bool stream;              /* y or dx goes past the caches */
  ty_activation activation; /* of what group norm gives */
  ty_dtype dtype;           /* of x, y, g and dx where they are halves, which half_rows() and its kin take */
  bool *failed;
} job;

static inline void *data_of(const ty_view *v) { return v && v->count ? v->data : NULL; }

#define REAL float
#define FN(name) name##_f32
#define F(name) ty_##name##_f32
#include "norm_activation.h"
#include "norm_sums.h"
#include "norm_real.h"
#undef REAL
#undef FN
#undef F

#define REAL double
#define FN(name) name##_f64
#define F(name) ty_##name##_f64
#include "norm_activation.h"
#include "norm_sums.h"
#include "norm_real.h"

#if defined(__AVX512F__)
#include "norm_narrow.h"
#endif

#include "norm_halves.h"

static int64_t blocks_of_columns(int64_t n) { return (n + COLUMNS - 1) / COLUMNS; }

static bool streams(const ty_view *out) { return stream_pays(out->count * ty_dtype_size[out->dtype]); }

static double eps_of(const ty_kernel_args *k) { return ((const ty_p_norm *)k->params)->eps; }

static bool rows_forward(const ty_kernel_args *k, job *j, const ty_view *rstd) {
  j->x = k->in[0]->data, j->y = k->out[0]->data, j->weight = data_of(k->in[1]), j->eps = eps_of(k);
  j->rows = rstd->count, j->rstd_out = rstd->data, j->stream = streams(k->out[0]);
  if (j->rows == 0) return true;
  j->width = k->in[0]->count / j->rows;
  ty_range_fn *rows = k->in[0]->dtype == TY_F64 ? rows_f64 : rows_f32;
#if defined(__AVX512F__)
  if (rows == rows_f32 && j->width > 0 && j->width <= NARROW_WIDTH) rows = narrow_rows;
#endif
  bool failed = false;
  if (halves_are(k->in[0]) && j->width > 0) j->dtype = k->in[0]->dtype, j->failed = &failed, rows = half_rows;
  ty_parallel_for(j->rows, 1 + WORK / (j->width + 1), rows, j);
  return !failed;
}

bool TY_KERNEL(layer_norm)(const ty_kernel_args *k) {
  job j = { .centred = true, .bias = data_of(k->in[2]), .mean_out = k->out[1]->data };
  return rows_forward(k, &j, k->out[2]);
}

bool TY_KERNEL(rms_norm)(const ty_kernel_args *k) {
  job j = { .centred = false };
  return rows_forward(k, &j, k->out[1]);
}

static bool rows_backward(const ty_kernel_args *k, job *j, const ty_view *rstd, const ty_view *weight) {
  bool wide = k->in[0]->dtype == TY_F64;
  size_t size = wide ? sizeof(double) : sizeof(float);
  j->g = k->in[0]->data, j->x = k->in[1]->data, j->rstd = rstd->data, j->weight = data_of(weight);
  j->stream = streams(k->out[0]);
  j->dx = k->out[0]->data, j->dweight = data_of(k->out[1]);
  j->rows = rstd->count;
  j->width = j->rows ? k->in[1]->count / j->rows : k->out[1]->count;
  j->chunk = (j->rows + CHUNKS - 1) / CHUNKS;
  if (j->chunk < LEAST_ROWS) j->chunk = LEAST_ROWS;
  j->chunks = (j->rows + j->chunk - 1) / j->chunk;
  size_t bytes = (size_t)(j->chunks * j->width * 2) * size;
  if (j->dweight && !(j->partial = ty_scratch_alloc(bytes))) return false;
  ty_range_fn *rows = wide ? rows_backward_f64 : rows_backward_f32;
#if defined(__AVX512F__)
  if (!wide && j->width > 0 && j->width <= NARROW_WIDTH) rows = narrow_rows_backward;
#endif
  bool failed = false;
  if (halves_are(k->in[1]) && j->width > 0) j->dtype = k->in[1]->dtype, j->failed = &failed, rows = half_rows_backward;
  ty_parallel_for(j->chunks, 1 + WORK / (j->chunk * (j->width + 1)), rows, j);
  if (j->dweight) {
    ty_parallel_for(blocks_of_columns(j->width), 1, wide ? sum_chunks_f64 : sum_chunks_f32, j);
    ty_scratch_free(j->partial, bytes);
  }
  return !failed;
}

/* in: g, x, mean, rstd, weight; out: dx, and dweight and dbias unless they are empty. */
bool TY_KERNEL(layer_norm_backward)(const ty_kernel_args *k) {
  job j = { .centred = true, .mean = k->in[2]->data, .dbias = data_of(k->out[2]) };
  return rows_backward(k, &j, k->in[3], k->in[4]);
}

/* in: g, x, rstd, weight; out: dx, and dweight unless it is empty. */
bool TY_KERNEL(rms_norm_backward)(const ty_kernel_args *k) {
  job j = { .centred = false };
  return rows_backward(k, &j, k->in[2], k->in[3]);
}

static int64_t positions(const ty_view *x) {
  int64_t n = 1;
  for (int d = 2; d < x->ndim; d++) n *= x->size[d];
  return n;
}

static job group_job(const ty_view *x, const ty_p_norm *p) {
  const int64_t groups = p->groups, spatial = positions(x), channels = x->size[1] / groups;
  return (job){ .rows = x->size[0] * groups,
                .groups = groups,
                .segments = channels,
                .spatial = spatial,
                .width = channels * spatial,
                .row_step = channels * spatial,
                .segment_step = spatial,
                .activation = p->activation };
}

static job batch_job(const ty_view *x) {
  int64_t spatial = positions(x);
  return (job){ .rows = x->size[1],
                .segments = x->size[0],
                .spatial = spatial,
                .width = x->size[0] * spatial,
                .row_step = spatial,
                .segment_step = x->size[1] * spatial,
                .by_row = true };
}

static bool segments_forward(const ty_kernel_args *k, job j) {
  j.x = k->in[0]->data, j.weight = data_of(k->in[1]), j.bias = data_of(k->in[2]), j.eps = eps_of(k);
  j.stream = streams(k->out[0]);
  j.y = k->out[0]->data, j.mean_out = k->out[1]->data;
  *(j.by_row ? &j.var_out : &j.rstd_out) = k->out[2]->data;
  bool wide = k->in[0]->dtype == TY_F64;
  if (j.by_row && j.spatial == 1)
    ty_parallel_for(blocks_of_columns(j.rows), 1 + WORK / (COLUMNS * (j.segments + 1)),
                    wide ? columns_f64 : columns_f32, &j);
  else ty_parallel_for(j.rows, 1 + WORK / (j.width + 1), wide ? segments_f64 : segments_f32, &j);
  return true;
}

bool TY_KERNEL(group_norm)(const ty_kernel_args *k) { return segments_forward(k, group_job(k->in[0], k->params)); }

/* out: y, mean, variance. */
bool TY_KERNEL(batch_norm_fused)(const ty_kernel_args *k) { return segments_forward(k, batch_job(k->in[0])); }

/* in: g, x, mean, rstd, weight; out: dx, and dweight and dbias unless they are empty. */
static bool segments_backward(const ty_kernel_args *k, job j) {
  bool wide = k->in[0]->dtype == TY_F64;
  j.g = k->in[0]->data, j.x = k->in[1]->data, j.mean = k->in[2]->data, j.rstd = k->in[3]->data;
  j.weight = data_of(k->in[4]);
  j.stream = !j.activation && streams(k->out[0]); /* dx first takes the gradient through the activation */
  j.dx = k->out[0]->data, j.dweight = data_of(k->out[1]), j.dbias = data_of(k->out[2]);
  if (j.by_row && j.spatial == 1) {
    ty_parallel_for(blocks_of_columns(j.rows), 1 + WORK / (COLUMNS * (j.segments + 1)),
                    wide ? columns_backward_f64 : columns_backward_f32, &j);
    return true;
  }
  size_t bytes = (size_t)(j.rows * j.segments * 2) * (wide ? sizeof(double) : sizeof(float));
  if (!(j.partial = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(j.rows, 1 + WORK / (j.width + 1), wide ? segments_backward_f64 : segments_backward_f32, &j);
  int64_t channels = j.by_row ? j.rows : j.groups * j.segments;
  if (j.dweight) ty_parallel_for(channels, COLUMNS, wide ? sum_segments_f64 : sum_segments_f32, &j);
  ty_scratch_free(j.partial, bytes);
  return true;
}

/* in: also bias, which matters to an activation. */
bool TY_KERNEL(group_norm_backward)(const ty_kernel_args *k) {
  job j = group_job(k->in[1], k->params);
  j.bias = data_of(k->in[5]);
  return segments_backward(k, j);
}

bool TY_KERNEL(batch_norm_backward)(const ty_kernel_args *k) { return segments_backward(k, batch_job(k->in[1])); }
