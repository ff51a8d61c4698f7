/* dropout(x) + residual, normalised, in one pass each way: what a block of a transformer does between its layers. The
 * sum is written once and read again while its row is in the cache; the mask is drawn again for the gradient. */
#include <math.h>

#include "../cpu.h"
#include "../random_words.h"
#include "../stream.h"

enum {
  BLOCK = 1024, /* elements summed in the element type before the sum goes on in double */
  CHUNKS = 64,  /* at most, of rows whose parameter gradients are summed together */
  LEAST_ROWS = 8,
  COLUMNS = 128,
  WORK = 16384 /* elements that are worth a thread */
};

typedef struct job {
  const void *x, *residual, *weight, *bias;    /* forward */
  const void *g, *g_sum, *total, *mean, *rstd; /* backward; g or g_sum may be absent */
  void *sum, *y, *mean_out, *rstd_out;         /* forward */
  void *dsum, *dx, *dweight, *dbias, *partial; /* backward; dx only where dropout makes it differ from dsum */
  int64_t rows, width, chunk, chunks;
  ty_p_add_norm p;
  uint32_t least; /* of the random word of an element that stays */
} job;

/* What dropout multiplies elements [first, first + n) by, n at most MASKED. */
enum { MASKED = RANDOM_WORDS - 4 };
#define MASK(suffix, type)                                                                        \
  static inline void mask_##suffix(const job *c, int64_t first, int64_t n, type *restrict mask) { \
    uint32_t word[RANDOM_WORDS];                                                                  \
    const int64_t skip = first % 4;                                                               \
    const type scale = (type)(1 / (1 - c->p.random.a));                                           \
    random_words(&c->p.random, first - skip, word);                                               \
    for (int64_t i = 0; i < n; i++) mask[i] = word[skip + i] >= c->least ? scale : 0;             \
  }
MASK(f32, float)
MASK(f64, double)

#define REAL float
#define FN(name) name##_f32
#include "norm_sums.h"
#include "norm_add_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "norm_sums.h"
#include "norm_add_real.h"

static inline void *data_of(const ty_view *v) { return v && v->count ? v->data : NULL; }

static job job_of(const ty_kernel_args *k, const ty_view *x, const ty_view *rstd) {
  job j = { .p = *(const ty_p_add_norm *)k->params, .rows = rstd->count };
  j.width = j.rows ? x->count / j.rows : 0;
  j.least = (uint32_t)(j.p.random.a * 0x1p32);
  return j;
}

/* in: x, residual, weight, bias; out: sum, y, mean, rstd. */
bool TY_KERNEL(add_norm)(const ty_kernel_args *k) {
  job j = job_of(k, k->in[0], k->out[3]);
  j.x = k->in[0]->data, j.residual = k->in[1]->data, j.weight = data_of(k->in[2]), j.bias = data_of(k->in[3]);
  j.sum = k->out[0]->data, j.y = k->out[1]->data, j.mean_out = k->out[2]->data, j.rstd_out = k->out[3]->data;
  ty_parallel_for(j.rows, 1 + WORK / (j.width + 1), k->in[0]->dtype == TY_F64 ? rows_f64 : rows_f32, &j);
  return true;
}

/* in: g, g_sum, sum, mean, rstd, weight; out: dsum, dx, dweight and dbias, the last three empty where not wanted. */
bool TY_KERNEL(add_norm_backward)(const ty_kernel_args *k) {
  bool wide = k->in[2]->dtype == TY_F64;
  size_t size = wide ? sizeof(double) : sizeof(float);
  job j = job_of(k, k->in[2], k->in[4]);
  j.g = k->in[0]->data, j.g_sum = data_of(k->in[1]), j.total = k->in[2]->data, j.mean = k->in[3]->data;
  j.rstd = k->in[4]->data, j.weight = data_of(k->in[5]);
  j.dsum = k->out[0]->data, j.dx = data_of(k->out[1]), j.dweight = data_of(k->out[2]), j.dbias = data_of(k->out[3]);
  if (!j.rows) j.width = k->out[2]->count;
  j.chunk = (j.rows + CHUNKS - 1) / CHUNKS;
  if (j.chunk < LEAST_ROWS) j.chunk = LEAST_ROWS;
  j.chunks = (j.rows + j.chunk - 1) / j.chunk;
  size_t bytes = (size_t)(j.chunks * j.width * 2) * size;
  if (j.dweight && bytes && !(j.partial = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(j.chunks, 1 + WORK / (j.chunk * (j.width + 1)), wide ? rows_backward_f64 : rows_backward_f32, &j);
  if (j.dweight) ty_parallel_for((j.width + COLUMNS - 1) / COLUMNS, 1, wide ? sum_chunks_f64 : sum_chunks_f32, &j);
  if (j.partial) ty_scratch_free(j.partial, bytes);
  return true;
}
