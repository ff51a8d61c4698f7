/* Convolutions and sums of bytes with scales and zero points, and gradients of them; without scratch memory, so that
 * what a step takes is what its plan says. */
#include "../cpu.h"

#include <math.h>

#include "../../int8.h"

ty_kernel TY_KERNEL(conv2d_int8);
ty_kernel TY_KERNEL(conv2d_int8_backward_input);
ty_kernel TY_KERNEL(conv2d_int8_backward_weight);
ty_kernel TY_KERNEL(add_int8);
ty_kernel TY_KERNEL(inside_int8);

enum { PIECE = 256 }; /* results of a row that are summed at a time */

typedef struct job {
  int64_t n, c, h, w, o, oh, ow, kh, kw, cg, og, sh, sw, ph, pw;
  int32_t x_zero, y_zero, low;
  const int8_t *x, *y, *weight;
  const float *g, *bias, *scale;
  int8_t *result;
  float *dx, *dw, *db;
} job;

static job job_of(const ty_view *x, const ty_view *weight, const ty_view *y, const ty_p_conv_int8 *p) {
  job j = { .n = x->size[0],
            .c = x->size[1],
            .h = x->size[2],
            .w = x->size[3],
            .o = weight->size[0],
            .oh = y->size[2],
            .ow = y->size[3],
            .kh = weight->size[2],
            .kw = weight->size[3],
            .cg = weight->size[1],
            .og = weight->size[0] / p->groups,
            .sh = p->stride[0],
            .sw = p->stride[1],
            .ph = p->padding[0],
            .pw = p->padding[1],
            .x_zero = p->x_zero,
            .y_zero = p->y_zero,
            .low = p->low };
  if (j.kh == 1 && j.kw == 1 && j.sh == 1 && j.sw == 1 && !j.ph && !j.pw) { /* one long row */
    j.w *= j.h, j.ow *= j.oh;
    j.h = j.oh = 1;
  }
  return j;
}

/* Results [*from, *to) of a row's [0, count) to which tap kj of the kernel comes from inside of x. */
static void inside(const job *j, int64_t kj, int64_t count, int64_t *from, int64_t *to) {
  int64_t first = j->pw - kj, last = j->w - 1 + first;
  *from = first > 0 ? (first + j->sw - 1) / j->sw : 0;
  *to = last < 0 ? 0 : last / j->sw + 1;
  if (*to > count) *to = count;
}

/* The part of results [at, at + count) of a row that tap kj reads from inside of x: from there on, so many. */
static inline int64_t part(const job *j, int64_t kj, int64_t at, int64_t count, int64_t *from) {
  int64_t to;
  inside(j, kj, at + count, from, &to);
  if (*from < at) *from = at;
  return to - *from;
}

/* Without the pragma short loops are not vectorised. */
#define EACH(i, n) _Pragma("omp simd") for (int64_t i = 0; i < (n); i++)

static inline int8_t code(double value, int32_t zero, int32_t low) {
  double v = rint(value) + zero;
  v = v < low ? low : v;
  return (int8_t)(int32_t)(v > 127 ? 127 : v);
}

/* ---- forward: units are channels of an image ---- */

static inline void add_tap(int32_t *restrict sum, const int8_t *restrict x, int64_t step, int32_t zero, int32_t weight,
                           int64_t n) {
  if (step == 1) {
    EACH(i, n) sum[i] += (x[i] - zero) * weight;
  } else {
    EACH(i, n) sum[i] += (x[i * step] - zero) * weight;
  }
}

static void forward(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t n = u / j->o, o = u % j->o;
    const int8_t *x = j->x + (n * j->c + o / j->og * j->cg) * j->h * j->w;
    for (int64_t row = 0; row < j->oh; row++)
      for (int64_t at = 0; at < j->ow; at += PIECE) {
        int64_t count = j->ow - at < PIECE ? j->ow - at : PIECE;
        int32_t sum[PIECE] = { 0 };
        for (int64_t ki = 0; ki < j->kh; ki++)
          for (int64_t kj = 0; kj < j->kw; kj++) {
            int64_t i = row * j->sh + ki - j->ph, from, many = part(j, kj, at, count, &from);
            if (i < 0 || i >= j->h || many <= 0) continue;
            const int8_t *first = x + i * j->w + from * j->sw + kj - j->pw;
            const int8_t *weight = j->weight + (o * j->cg * j->kh + ki) * j->kw + kj;
            for (int64_t c = 0; c < j->cg; c++)
              add_tap(sum + from - at, first + c * j->h * j->w, j->sw, j->x_zero, weight[c * j->kh * j->kw], many);
          }
        int8_t *y = j->result + (u * j->oh + row) * j->ow + at;
        const double bias = (double)j->bias[o], scale = (double)j->scale[o];
        EACH(k, count) y[k] = code(((double)sum[k] + bias) * scale, j->y_zero, j->low);
      }
  }
}

bool TY_KERNEL(conv2d_int8)(const ty_kernel_args *k) {
  job j = job_of(k->in[0], k->in[1], k->out[0], k->params);
  j.x = k->in[0]->data, j.weight = k->in[1]->data, j.bias = k->in[2]->data, j.scale = k->in[3]->data;
  j.result = k->out[0]->data;
  if (k->out[0]->count) ty_parallel_for(j.n * j.o, 1 + 65536 / (1 + j.oh * j.ow * j.cg * j.kh * j.kw), forward, &j);
  return true;
}

/* ---- gradients ---- */

static inline float masked(float g, int32_t y, int32_t low) { return y > low && y < 127 ? g : 0; }

/* `count` numbers of g from `at` on, those that count, times a factor. */
static inline void take(const job *j, int64_t at, int64_t count, float factor, float *restrict to) {
  const float *restrict g = j->g + at;
  const int8_t *restrict y = j->y + at;
  const int32_t low = j->low;
  EACH(i, count) to[i] = factor * masked(g[i], y[i], low);
}

static inline void spread_tap(float *restrict dx, int64_t step, const float *restrict g, float weight, int64_t n) {
  if (step == 1) {
    EACH(i, n) dx[i] += weight * g[i];
  } else {
    EACH(i, n) dx[i * step] += weight * g[i];
  }
}

/* Units are groups of an image. */
static void input_gradient(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const int64_t groups = j->c / j->cg;
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t n = u / groups, group = u % groups;
    float *dx = j->dx + (n * j->c + group * j->cg) * j->h * j->w, g[PIECE];
    for (int64_t i = 0; i < j->cg * j->h * j->w; i++) dx[i] = 0;
    for (int64_t o = group * j->og; o < (group + 1) * j->og; o++)
      for (int64_t row = 0; row < j->oh; row++)
        for (int64_t at = 0; at < j->ow; at += PIECE) {
          int64_t count = j->ow - at < PIECE ? j->ow - at : PIECE, from;
          take(j, ((n * j->o + o) * j->oh + row) * j->ow + at, count, j->scale[o], g);
          for (int64_t ki = 0; ki < j->kh; ki++)
            for (int64_t kj = 0; kj < j->kw; kj++) {
              int64_t i = row * j->sh + ki - j->ph, many = part(j, kj, at, count, &from);
              if (i < 0 || i >= j->h || many <= 0) continue;
              const int8_t *weight = j->weight + (o * j->cg * j->kh + ki) * j->kw + kj;
              float *first = dx + i * j->w + from * j->sw + kj - j->pw;
              for (int64_t c = 0; c < j->cg; c++)
                spread_tap(first + c * j->h * j->w, j->sw, g + from - at, weight[c * j->kh * j->kw], many);
            }
        }
  }
}

bool TY_KERNEL(conv2d_int8_backward_input)(const ty_kernel_args *k) {
  job j = job_of(k->out[0], k->in[2], k->in[0], k->params);
  j.g = k->in[0]->data, j.y = k->in[1]->data, j.weight = k->in[2]->data, j.scale = k->in[3]->data;
  j.dx = k->out[0]->data;
  if (!k->out[0]->count) return true;
  int64_t work = 1 + j.oh * j.ow * j.og * j.cg * j.kh * j.kw;
  ty_parallel_for(j.n * (j.c / j.cg), 1 + 65536 / work, input_gradient, &j);
  return true;
}

static inline float dot(const float *restrict g, const int8_t *restrict x, int64_t step, int32_t zero, int64_t n) {
  float s = 0;
  if (step == 1) {
    _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++) s += g[i] * (float)(x[i] - zero);
  } else {
    _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++) s += g[i] * (float)(x[i * step] - zero);
  }
  return s;
}

/* Units are output channels. */
static void weight_gradient(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const int64_t taps = j->cg * j->kh * j->kw;
  for (int64_t o = begin; o < end && !ty_interrupted; o++) {
    float *dw = j->dw + o * taps, sum = 0, g[PIECE];
    for (int64_t i = 0; i < taps; i++) dw[i] = 0;
    for (int64_t n = 0; n < j->n; n++)
      for (int64_t row = 0; row < j->oh; row++)
        for (int64_t at = 0; at < j->ow; at += PIECE) {
          int64_t count = j->ow - at < PIECE ? j->ow - at : PIECE, from;
          take(j, ((n * j->o + o) * j->oh + row) * j->ow + at, count, 1, g);
          for (int64_t i = 0; i < count; i++) sum += g[i];
          const int8_t *x = j->x + (n * j->c + o / j->og * j->cg) * j->h * j->w;
          for (int64_t ki = 0; ki < j->kh; ki++)
            for (int64_t kj = 0; kj < j->kw; kj++) {
              int64_t i = row * j->sh + ki - j->ph, many = part(j, kj, at, count, &from);
              if (i < 0 || i >= j->h || many <= 0) continue;
              const int8_t *first = x + i * j->w + from * j->sw + kj - j->pw;
              float *d = dw + ki * j->kw + kj;
              for (int64_t c = 0; c < j->cg; c++, d += j->kh * j->kw)
                *d += dot(g + from - at, first + c * j->h * j->w, j->sw, j->x_zero, many);
            }
        }
    for (int64_t i = 0; i < taps; i++) dw[i] *= j->scale[o];
    j->db[o] = j->scale[o] * sum;
  }
}

bool TY_KERNEL(conv2d_int8_backward_weight)(const ty_kernel_args *k) {
  job j = job_of(k->in[2], k->out[0], k->in[0], k->params);
  j.g = k->in[0]->data, j.y = k->in[1]->data, j.x = k->in[2]->data, j.scale = k->in[3]->data;
  j.dw = k->out[0]->data, j.db = k->out[1]->data;
  if (j.o) ty_parallel_for(j.o, 1 + 65536 / (1 + j.n * j.oh * j.ow * j.cg * j.kh * j.kw), weight_gradient, &j);
  return true;
}

/* ---- element by element ---- */

typedef struct each {
  const ty_p_int8 *p;
  const int8_t *a, *b;
  const float *g;
  int8_t *y;
  float *dx;
} each;

static void add_range(void *context, int64_t begin, int64_t end) {
  const each *e = context;
  const ty_p_int8 *p = e->p;
  const int8_t *restrict a = e->a + begin, *restrict b = e->b + begin;
  int8_t *restrict y = e->y + begin;
  const double a_scale = p->a_scale, b_scale = p->b_scale;
  const int32_t a_zero = p->a_zero, b_zero = p->b_zero, y_zero = p->y_zero, low = p->low;
  EACH(i, end - begin) y[i] = code((a[i] - a_zero) * a_scale + (b[i] - b_zero) * b_scale, y_zero, low);
}

bool TY_KERNEL(add_int8)(const ty_kernel_args *k) {
  each e = { .p = k->params, .a = k->in[0]->data, .b = k->in[1]->data, .y = k->out[0]->data };
  ty_parallel_for(k->out[0]->count, 32768, add_range, &e);
  return true;
}

static void inside_range(void *context, int64_t begin, int64_t end) {
  const each *e = context;
  const float scale = (float)e->p->a_scale, *restrict g = e->g + begin;
  const int8_t *restrict y = e->b + begin;
  const int32_t low = e->p->low;
  float *restrict dx = e->dx + begin;
  EACH(i, end - begin) dx[i] = scale * masked(g[i], y[i], low);
}

bool TY_KERNEL(inside_int8)(const ty_kernel_args *k) {
  each e = { .p = k->params, .g = k->in[0]->data, .b = k->in[1]->data, .dx = k->out[0]->data };
  ty_parallel_for(k->out[0]->count, 32768, inside_range, &e);
  return true;
}
