/* x * scale + shift per channel of [n, channels, spatial]: batch_norm by running statistics. One pass each way. */
#include "../cpu.h"
#include "../stream.h"

enum {
  BLOCK = 1024,  /* elements summed in the element type before the sum goes on in double */
  COLUMNS = 128, /* taken together where channels are neighbours */
  WORK = 16384   /* elements that are worth a thread */
};

typedef struct job {
  const void *g, *x, *scale, *shift;
  void *y, *dscale, *dshift; /* y: also dx */
  int64_t n, channels, spatial;
  bool stream;
} job;

#define KERNELS(suffix, type)                                                                                \
  /* Runs of one channel; shift NULL counts as 0. */                                                         \
  static inline void apply_##suffix(const job *c, const type *restrict x, type *y, type scale, type shift) { \
    type block[STREAM_BLOCK / sizeof(type)];                                                                 \
    const int64_t step = c->stream ? (int64_t)(STREAM_BLOCK / sizeof(type)) : c->spatial;                    \
    for (int64_t at = 0; at < c->spatial; at += step) {                                                      \
      const int64_t k = c->spatial - at < step ? c->spatial - at : step;                                     \
      type *restrict to = c->stream ? block : y + at;                                                        \
      _Pragma("omp simd") for (int64_t i = 0; i < k; i++) to[i] = x[at + i] * scale + shift;                 \
      if (c->stream) stream_copy(y + at, block, (size_t)k * sizeof(type));                                   \
    }                                                                                                        \
  }                                                                                                          \
  static void segments_##suffix(void *context, int64_t begin, int64_t end) {                                 \
    const job *c = context;                                                                                  \
    for (int64_t s = begin; s < end; s++)                                                                    \
      apply_##suffix(c, (const type *)c->x + s * c->spatial, (type *)c->y + s * c->spatial,                  \
                     ((const type *)c->scale)[s % c->channels], ((const type *)c->shift)[s % c->channels]);  \
    if (c->stream) stream_end();                                                                             \
  }                                                                                                          \
  static void rows_##suffix(void *context, int64_t begin, int64_t end) {                                     \
    const job *c = context;                                                                                  \
    const int64_t n = c->channels;                                                                           \
    const type *restrict scale = c->scale, *restrict shift = c->shift;                                       \
    for (int64_t row = begin; row < end; row++) {                                                            \
      const type *restrict x = (const type *)c->x + row * n;                                                 \
      type *restrict y = (type *)c->y + row * n;                                                             \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale[i] + shift[i];                 \
    }                                                                                                        \
  }                                                                                                          \
  /* begin and end count channels: one thread sums what belongs to one. */                                   \
  static void channels_##suffix(void *context, int64_t begin, int64_t end) {                                 \
    const job *c = context;                                                                                  \
    for (int64_t channel = begin; channel < end; channel++) {                                                \
      double sum = 0, sum_x = 0;                                                                             \
      for (int64_t i = 0; i < c->n; i++) {                                                                   \
        const int64_t first = (i * c->channels + channel) * c->spatial;                                      \
        const type *restrict g = (const type *)c->g + first, *restrict x = (const type *)c->x + first;       \
        for (int64_t at = 0; at < c->spatial; at += BLOCK) {                                                 \
          const int64_t stop = at + BLOCK < c->spatial ? at + BLOCK : c->spatial;                            \
          type part = 0, part_x = 0;                                                                         \
          _Pragma("omp simd reduction(+ : part, part_x)") for (int64_t j = at; j < stop; j++) {              \
            part += g[j];                                                                                    \
            part_x += g[j] * x[j];                                                                           \
          }                                                                                                  \
          sum += (double)part, sum_x += (double)part_x;                                                      \
        }                                                                                                    \
        apply_##suffix(c, g, (type *)c->y + first, ((const type *)c->scale)[channel], 0);                    \
      }                                                                                                      \
      ((type *)c->dscale)[channel] = (type)sum_x;                                                            \
      ((type *)c->dshift)[channel] = (type)sum;                                                              \
    }                                                                                                        \
    if (c->stream) stream_end();                                                                             \
  }                                                                                                          \
  /* begin and end count blocks of COLUMNS, for one position. */                                             \
  static void columns_##suffix(void *context, int64_t begin, int64_t end) {                                  \
    const job *c = context;                                                                                  \
    const int64_t all = c->channels;                                                                         \
    for (int64_t block = begin; block < end; block++) {                                                      \
      const int64_t first = block * COLUMNS, width = all - first < COLUMNS ? all - first : COLUMNS;          \
      const type *restrict scale = (const type *)c->scale + first;                                           \
      double sum[COLUMNS] = { 0 }, sum_x[COLUMNS] = { 0 };                                                   \
      for (int64_t i = 0; i < c->n; i++) {                                                                   \
        const int64_t at = i * all + first;                                                                  \
        const type *restrict g = (const type *)c->g + at, *restrict x = (const type *)c->x + at;             \
        type *restrict dx = (type *)c->y + at;                                                               \
        _Pragma("omp simd") for (int64_t j = 0; j < width; j++) {                                            \
          dx[j] = g[j] * scale[j];                                                                           \
          sum[j] += (double)g[j];                                                                            \
          sum_x[j] += (double)(g[j] * x[j]);                                                                 \
        }                                                                                                    \
      }                                                                                                      \
      for (int64_t j = 0; j < width; j++) {                                                                  \
        ((type *)c->dscale)[first + j] = (type)sum_x[j];                                                     \
        ((type *)c->dshift)[first + j] = (type)sum[j];                                                       \
      }                                                                                                      \
    }                                                                                                        \
  }
KERNELS(f32, float)
KERNELS(f64, double)

static job job_of(const ty_view *x, const ty_view *y) {
  job j = { .x = x->data, .y = y->data, .n = x->size[0], .channels = x->size[1], .spatial = 1 };
  for (int d = 2; d < x->ndim; d++) j.spatial *= x->size[d];
  j.stream = stream_pays(y->count * ty_dtype_size[y->dtype]);
  return j;
}

/* in: x, scale, shift. */
bool TY_KERNEL(channel_affine)(const ty_kernel_args *k) {
  job j = job_of(k->in[0], k->out[0]);
  bool wide = k->in[0]->dtype == TY_F64;
  j.scale = k->in[1]->data, j.shift = k->in[2]->data;
  if (k->out[0]->count == 0) return true;
  if (j.spatial == 1) ty_parallel_for(j.n, 1 + WORK / j.channels, wide ? rows_f64 : rows_f32, &j);
  else ty_parallel_for(j.n * j.channels, 1 + WORK / j.spatial, wide ? segments_f64 : segments_f32, &j);
  return true;
}

/* in: g, x, scale; out: dx, dscale, dshift. */
bool TY_KERNEL(channel_affine_backward)(const ty_kernel_args *k) {
  job j = job_of(k->in[1], k->out[0]);
  bool wide = k->in[1]->dtype == TY_F64;
  j.g = k->in[0]->data, j.scale = k->in[2]->data, j.dscale = k->out[1]->data, j.dshift = k->out[2]->data;
  if (j.spatial == 1)
    ty_parallel_for((j.channels + COLUMNS - 1) / COLUMNS, 1 + WORK / (COLUMNS * (j.n + 1)),
                    wide ? columns_f64 : columns_f32, &j);
  else ty_parallel_for(j.channels, 1 + WORK / (j.n * j.spatial + 1), wide ? channels_f64 : channels_f32, &j);
  return true;
}
