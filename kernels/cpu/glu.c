/* Gated linear units: x times an activation of a gate, and both gradients in one pass. Dauphin et al. 2017, Shazeer
 * 2020. */
#include "../scalar.h"
#include "cpu.h"
#include "stream.h"

enum { WORK = 16384 }; /* elements that are worth a thread */

/* Rows of `width` elements; those of x and gate (and of their gradients) begin `step` apart: 2 width for the halves of
 * one tensor. */
typedef struct job {
  const void *g, *x, *gate;
  void *y, *dx, *dgate;
  int64_t width, step;
  bool stream;
} job;

/* Two tensors are one long row. */
static job job_of(const ty_view *x, const ty_view *gate, const ty_view *y, int64_t *rows) {
  bool halves = !gate || gate->count == 0;
  int64_t width = halves ? x->size[x->ndim - 1] / 2 : x->count;
  *rows = halves ? (width ? y->count / width : 0) : 1;
  return (job){ .x = x->data,
                .gate = halves ? (const char *)x->data + width * ty_dtype_size[x->dtype] : gate->data,
                .width = width,
                .step = halves ? 2 * width : width };
}

enum { RUN = STREAM_BLOCK / sizeof(float) }; /* elements at once, within a row */

/* The run at element `at` of all rows together: where it begins in x; *n elements. */
static inline int64_t run_at(const job *c, int64_t at, int64_t end, int64_t *n) {
  int64_t row = at / c->width, i = at % c->width;
  *n = c->width - i < end - at ? c->width - i : end - at;
  if (*n > RUN) *n = RUN;
  return row * c->step + i;
}

#define FORWARD(name, type, e)                                           \
  static void name##_##type(void *context, int64_t begin, int64_t end) { \
    const job *c = context;                                              \
    X block[RUN];                                                        \
    for (int64_t at = begin, n; at < end; at += n) {                     \
      const int64_t first = run_at(c, at, end, &n);                      \
      const X *restrict p = (const X *)c->x + first;                     \
      const X *restrict q = (const X *)c->gate + first;                  \
      X *to = (X *)c->y + at, *restrict y = c->stream ? block : to;      \
      _Pragma("omp simd") for (int64_t j = 0; j < n; j++) {              \
        const X v = q[j];                                                \
        y[j] = p[j] * (e);                                               \
      }                                                                  \
      if (c->stream) stream_copy(to, block, (size_t)n * sizeof(X));      \
    }                                                                    \
    if (c->stream) stream_end();                                         \
  }

#define BACKWARD(name, type, e, slope)                                                     \
  static void name##_backward_##type(void *context, int64_t begin, int64_t end) {          \
    const job *c = context;                                                                \
    X block[RUN], block2[RUN];                                                             \
    for (int64_t at = begin, n; at < end; at += n) {                                       \
      const int64_t first = run_at(c, at, end, &n);                                        \
      const X *restrict g = (const X *)c->g + at, *restrict p = (const X *)c->x + first;   \
      const X *restrict q = (const X *)c->gate + first;                                    \
      X *to = (X *)c->dx + first, *to2 = (X *)c->dgate + first;                            \
      X *restrict dx = c->stream ? block : to, *restrict dgate = c->stream ? block2 : to2; \
      _Pragma("omp simd") for (int64_t j = 0; j < n; j++) {                                \
        const X v = q[j];                                                                  \
        const X d = g[j] * p[j] * (slope);                                                 \
        dx[j] = g[j] * (e);                                                                \
        dgate[j] = d;                                                                      \
      }                                                                                    \
      if (c->stream) {                                                                     \
        stream_copy(to, block, (size_t)n * sizeof(X));                                     \
        stream_copy(to2, block2, (size_t)n * sizeof(X));                                   \
      }                                                                                    \
    }                                                                                      \
    if (c->stream) stream_end();                                                           \
  }

#define GATE(name, type, e, slope) FORWARD(name, type, e) BACKWARD(name, type, e, slope)
#define GATES(type)                                                       \
  GATE(sigmoid, type, F(sigmoid)(v), F(sigmoid)(v) * (1 - F(sigmoid)(v))) \
  GATE(silu, type, F(silu)(v), F(silu_slope)(v))                          \
  GATE(gelu, type, F(gelu)(v), F(gelu_slope)(v))                          \
  GATE(gelu_tanh, type, F(gelu_tanh)(v), F(gelu_tanh_slope)(v))           \
  GATE(relu, type, v<0 ? 0 : v, v> 0 ? 1 : v == v ? 0 : v)                \
  GATE(none, type, v, 1)

#define X float
#define F(f) ty_##f##_f32
GATES(f32)
#undef X
#undef F
#define X double
#define F(f) ty_##f##_f64
GATES(f64)

#define LOOPS(suffix) \
  { sigmoid_##suffix, silu_##suffix, gelu_##suffix, gelu_tanh_##suffix, relu_##suffix, none_##suffix }

/* in: x, gate (NULL: x is both halves). */
bool TY_KERNEL(glu)(const ty_kernel_args *k) {
  static ty_range_fn *const loops[2][TY_GATES] = { LOOPS(f32), LOOPS(f64) };
  const ty_view *y = k->out[0];
  int64_t rows;
  job j = job_of(k->in[0], k->in[1], y, &rows);
  j.y = y->data, j.stream = stream_pays(y->count * ty_dtype_size[y->dtype]);
  if (y->count == 0) return true;
  ty_parallel_for(rows * j.width, WORK, loops[y->dtype == TY_F64][((const ty_p_dim *)k->params)->k], &j);
  return true;
}

/* in: g, x, gate (NULL: x is both halves); out: dx and, for a gate, dgate. */
bool TY_KERNEL(glu_backward)(const ty_kernel_args *k) {
  static ty_range_fn *const loops[2][TY_GATES] = { LOOPS(backward_f32), LOOPS(backward_f64) };
  const ty_view *g = k->in[0], *dx = k->out[0];
  int64_t rows;
  job j = job_of(k->in[1], k->in[2], g, &rows);
  if (g->count == 0) return true;
  j.g = g->data, j.dx = dx->data;
  j.dgate = k->in[2] ? k->out[1]->data : (char *)dx->data + j.width * ty_dtype_size[dx->dtype];
  j.stream = stream_pays(dx->count * ty_dtype_size[dx->dtype]);
  ty_parallel_for(rows * j.width, WORK, loops[g->dtype == TY_F64][((const ty_p_dim *)k->params)->k], &j);
  return true;
}
