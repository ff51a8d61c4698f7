/* Gated linear units: x times an activation of a gate, and both gradients in one pass. Dauphin et al. 2017, Shazeer
 * 2020. */
#include "../../scalar.h"
#include "../cpu.h"
#include "../stream.h"

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

#define GATE_F32(kind, f) FORWARD(f, f32, ty_##f##_f32(v)) BACKWARD(f, f32, ty_##f##_f32(v), ty_##f##_slope_f32(v))
#define GATE_F64(kind, f) FORWARD(f, f64, ty_##f##_f64(v)) BACKWARD(f, f64, ty_##f##_f64(v), ty_##f##_slope_f64(v))
#define X float
FORWARD(none, f32, v)
BACKWARD(none, f32, v, 1)
TY_EACH_ACTIVATION(GATE_F32)
#undef X
#define X double
FORWARD(none, f64, v)
BACKWARD(none, f64, v, 1)
TY_EACH_ACTIVATION(GATE_F64)

#define LOOP(kind, f) [kind] = f##_f32,
#define LOOP_F64(kind, f) [kind] = f##_f64,
#define LOOP_BACKWARD(kind, f) [kind] = f##_backward_f32,
#define LOOP_BACKWARD_F64(kind, f) [kind] = f##_backward_f64,

static void launch(const ty_kernel_args *k, ty_range_fn *const loops[2][TY_ACTIVATIONS], ty_dtype dtype, int64_t n,
                   job *j) {
  ty_parallel_for(n, WORK, loops[dtype == TY_F64][((const ty_p_activation *)k->params)->activation], j);
}

/* in: x, gate (NULL: x is both halves). */
bool TY_KERNEL(glu)(const ty_kernel_args *k) {
  static ty_range_fn *const loops[2][TY_ACTIVATIONS] = { { none_f32, TY_EACH_ACTIVATION(LOOP) },
                                                         { none_f64, TY_EACH_ACTIVATION(LOOP_F64) } };
  const ty_view *y = k->out[0];
  int64_t rows;
  job j = job_of(k->in[0], k->in[1], y, &rows);
  j.y = y->data, j.stream = stream_pays(y->count * ty_dtype_size[y->dtype]);
  if (y->count == 0) return true;
  launch(k, loops, (ty_dtype)y->dtype, rows * j.width, &j);
  return true;
}

/* in: g, x, gate (NULL: x is both halves); out: dx and, for a gate, dgate. */
bool TY_KERNEL(glu_backward)(const ty_kernel_args *k) {
  static ty_range_fn *const loops[2][TY_ACTIVATIONS] = { { none_backward_f32, TY_EACH_ACTIVATION(LOOP_BACKWARD) },
                                                         { none_backward_f64, TY_EACH_ACTIVATION(LOOP_BACKWARD_F64) } };
  const ty_view *g = k->in[0], *dx = k->out[0];
  int64_t rows;
  job j = job_of(k->in[1], k->in[2], g, &rows);
  if (g->count == 0) return true;
  j.g = g->data, j.dx = dx->data;
  j.dgate = k->in[2] ? k->out[1]->data : (char *)dx->data + j.width * ty_dtype_size[dx->dtype];
  j.stream = stream_pays(dx->count * ty_dtype_size[dx->dtype]);
  launch(k, loops, (ty_dtype)g->dtype, rows * j.width, &j);
  return true;
}
