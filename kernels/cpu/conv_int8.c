/* Convolutions and sums of bytes with scales and zero points, and gradients of them; without scratch memory, so that
 * what a step takes is what its plan says. */
#include "cpu.h"

#include <math.h>

#include "../int8.h"

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

static int8_t code(double value, int32_t zero, int32_t low) {
  double v = rint(value) + zero;
  return (int8_t)(v < low ? low : v > 127 ? 127 : v);
}

/* ---- forward: units are channels of an image ---- */

static void add_tap(int32_t *restrict sum, const int8_t *restrict x, int64_t step, int32_t zero, int32_t weight,
                    int64_t n) {
  if (step == 1)
    for (int64_t i = 0; i < n; i++) sum[i] += (x[i] - zero) * weight;
  else
    for (int64_t i = 0; i < n; i++) sum[i] += (x[i * step] - zero) * weight;
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
        for (int64_t c = 0; c < j->cg; c++)
          for (int64_t ki = 0; ki < j->kh; ki++) {
            int64_t i = row * j->sh + ki - j->ph;
            if (i < 0 || i >= j->h) continue;
            for (int64_t kj = 0; kj < j->kw; kj++) {
              int64_t from, to;
              inside(j, kj, at + count, &from, &to);
              if (from < at) from = at;
              if (from >= to) continue;
              add_tap(sum + from - at, x + (c * j->h + i) * j->w + from * j->sw + kj - j->pw, j->sw, j->x_zero,
                      j->weight[((o * j->cg + c) * j->kh + ki) * j->kw + kj], to - from);
            }
          }
        int8_t *y = j->result + (u * j->oh + row) * j->ow + at;
        for (int64_t k = 0; k < count; k++)
          y[k] = code(((double)sum[k] + (double)j->bias[o]) * (double)j->scale[o], j->y_zero, j->low);
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

static void spread_tap(float *restrict dx, int64_t step, const float *restrict g, const int8_t *restrict y, int32_t low,
                       float weight, int64_t n) {
  if (step == 1)
    for (int64_t i = 0; i < n; i++) dx[i] += weight * masked(g[i], y[i], low);
  else
    for (int64_t i = 0; i < n; i++) dx[i * step] += weight * masked(g[i], y[i], low);
}

/* Units are channels of an image of dx. */
static void input_gradient(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t n = u / j->c, c = u % j->c, first = c / j->cg * j->og;
    float *dx = j->dx + u * j->h * j->w;
    for (int64_t i = 0; i < j->h * j->w; i++) dx[i] = 0;
    for (int64_t o = first; o < first + j->og; o++)
      for (int64_t row = 0; row < j->oh; row++)
        for (int64_t ki = 0; ki < j->kh; ki++) {
          int64_t i = row * j->sh + ki - j->ph, at = ((n * j->o + o) * j->oh + row) * j->ow;
          if (i < 0 || i >= j->h) continue;
          for (int64_t kj = 0; kj < j->kw; kj++) {
            int64_t from, to;
            inside(j, kj, j->ow, &from, &to);
            float weight = j->scale[o] * j->weight[((o * j->cg + c % j->cg) * j->kh + ki) * j->kw + kj];
            if (from < to)
              spread_tap(dx + i * j->w + from * j->sw + kj - j->pw, j->sw, j->g + at + from, j->y + at + from, j->low,
                         weight, to - from);
          }
        }
  }
}

bool TY_KERNEL(conv2d_int8_backward_input)(const ty_kernel_args *k) {
  job j = job_of(k->out[0], k->in[2], k->in[0], k->params);
  j.g = k->in[0]->data, j.y = k->in[1]->data, j.weight = k->in[2]->data, j.scale = k->in[3]->data;
  j.dx = k->out[0]->data;
  if (k->out[0]->count)
    ty_parallel_for(j.n * j.c, 1 + 65536 / (1 + j.oh * j.ow * j.og * j.kh * j.kw), input_gradient, &j);
  return true;
}

static float dot(const float *restrict g, const int8_t *restrict y, const int8_t *restrict x, int64_t step, int32_t low,
                 int32_t zero, int64_t n) {
  float s = 0;
  if (step == 1) {
    _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++)
        s += masked(g[i], y[i], low) * (float)(x[i] - zero);
  } else {
    _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++)
        s += masked(g[i], y[i], low) * (float)(x[i * step] - zero);
  }
  return s;
}

static float weight_sum(const job *j, int64_t o, int64_t channel, int64_t ki, int64_t kj) {
  int64_t from, to;
  float s = 0;
  inside(j, kj, j->ow, &from, &to);
  for (int64_t n = 0; n < j->n && from < to; n++)
    for (int64_t row = 0; row < j->oh; row++) {
      int64_t i = row * j->sh + ki - j->ph, at = ((n * j->o + o) * j->oh + row) * j->ow + from;
      if (i < 0 || i >= j->h) continue;
      s += dot(j->g + at, j->y + at, j->x + ((n * j->c + channel) * j->h + i) * j->w + from * j->sw + kj - j->pw, j->sw,
               j->low, j->x_zero, to - from);
    }
  return s;
}

/* Units are output channels. */
static void weight_gradient(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  for (int64_t o = begin; o < end && !ty_interrupted; o++) {
    float *dw = j->dw + o * j->cg * j->kh * j->kw, sum = 0;
    for (int64_t c = 0; c < j->cg; c++)
      for (int64_t ki = 0; ki < j->kh; ki++)
        for (int64_t kj = 0; kj < j->kw; kj++) *dw++ = j->scale[o] * weight_sum(j, o, o / j->og * j->cg + c, ki, kj);
    for (int64_t n = 0; n < j->n; n++) {
      int64_t at = (n * j->o + o) * j->oh * j->ow;
      for (int64_t i = 0; i < j->oh * j->ow; i++) sum += masked(j->g[at + i], j->y[at + i], j->low);
    }
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
  for (int64_t i = begin; i < end; i++)
    e->y[i] = code((e->a[i] - p->a_zero) * p->a_scale + (e->b[i] - p->b_zero) * p->b_scale, p->y_zero, p->low);
}

bool TY_KERNEL(add_int8)(const ty_kernel_args *k) {
  each e = { .p = k->params, .a = k->in[0]->data, .b = k->in[1]->data, .y = k->out[0]->data };
  ty_parallel_for(k->out[0]->count, 32768, add_range, &e);
  return true;
}

static void inside_range(void *context, int64_t begin, int64_t end) {
  const each *e = context;
  const float scale = (float)e->p->a_scale;
  for (int64_t i = begin; i < end; i++) e->dx[i] = scale * masked(e->g[i], e->b[i], e->p->low);
}

bool TY_KERNEL(inside_int8)(const ty_kernel_args *k) {
  each e = { .p = k->params, .g = k->in[0]->data, .b = k->in[1]->data, .dx = k->out[0]->data };
  ty_parallel_for(k->out[0]->count, 32768, inside_range, &e);
  return true;
}
