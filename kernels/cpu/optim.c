/* Optimizer steps over lists of tensors in one pass over memory: sgd, adam, lerp_list, norm_list. The lists are walked
 * as if all tensors were one; elements of other dtypes than that of the arithmetic go through small buffers. */
#include "cpu.h"

#include <math.h>
#include <string.h>

#include "../half.h"

#define GRAIN 32768
#define BLOCK 1024
#define NORM_CHUNK 16384

/* ---- walking over many tensors ---- */

typedef struct multi {
  const ty_view *const *in;
  int64_t n;
  int64_t *start; /* [n + 1]: units before each tensor; a unit is an element or a chunk */
} multi;

static bool multi_init(multi *m, const ty_kernel_args *k, int64_t n, int64_t unit) {
  m->in = k->in;
  m->n = n;
  m->start = ty_scratch_alloc((size_t)(n + 1) * sizeof(int64_t));
  if (!m->start) return false;
  m->start[0] = 0;
  for (int64_t i = 0; i < n; i++) m->start[i + 1] = m->start[i] + (k->in[i]->count + unit - 1) / unit;
  return true;
}

static void multi_free(multi *m) { ty_scratch_free(m->start, (size_t)(m->n + 1) * sizeof(int64_t)); }

/* The tensor that holds unit u. */
static int64_t multi_find(const multi *m, int64_t u) {
  int64_t lo = 0, hi = m->n;
  while (hi - lo > 1) {
    int64_t mid = lo + (hi - lo) / 2;
    if (m->start[mid] <= u) lo = mid;
    else hi = mid;
  }
  while (m->start[lo + 1] <= u) lo++; /* past empty tensors */
  return lo;
}

/* ---- blocks of n elements in the dtype of the arithmetic: the tensor's memory itself, or a converted copy ---- */

static void *at(const ty_view *v, int64_t i) { return (char *)v->data + i * ty_dtype_size[v->dtype]; }

static float *load_f32(const ty_view *v, int64_t from, int64_t n, float *buffer) {
  void *p = at(v, from);
  if (v->dtype == TY_F32) return p;
  if (v->dtype == TY_F64)
    for (int64_t i = 0; i < n; i++) buffer[i] = (float)((const double *)p)[i];
  else ty_half_load((ty_dtype)v->dtype, buffer, p, n);
  return buffer;
}

static double *load_f64(const ty_view *v, int64_t from, int64_t n, double *buffer) {
  void *p = at(v, from);
  if (v->dtype == TY_F64) return p;
  float half[BLOCK];
  const float *x = p;
  if (v->dtype != TY_F32) {
    ty_half_load((ty_dtype)v->dtype, half, p, n);
    x = half;
  }
  for (int64_t i = 0; i < n; i++) buffer[i] = (double)x[i];
  return buffer;
}

static void store_f32(const ty_view *v, int64_t from, int64_t n, const float *x) {
  void *p = at(v, from);
  if (p == (const void *)x) return;
  if (v->dtype == TY_F64)
    for (int64_t i = 0; i < n; i++) ((double *)p)[i] = (double)x[i];
  else ty_half_store((ty_dtype)v->dtype, p, x, n);
}

static void store_f64(const ty_view *v, int64_t from, int64_t n, const double *x) {
  void *p = at(v, from);
  if (p == (const void *)x) return;
  float narrow[BLOCK];
  float *to = v->dtype == TY_F32 ? p : narrow;
  for (int64_t i = 0; i < n; i++) to[i] = (float)x[i];
  if (v->dtype != TY_F32) ty_half_store((ty_dtype)v->dtype, p, to, n);
}

/* The arithmetic is f64 when anything that is updated is. */
static bool wants_f64(const multi *m, int64_t i, int nupdated, const int *updated) {
  for (int j = 0; j < nupdated; j++)
    if (m->in[updated[j] * m->n + i]->dtype == TY_F64) return true;
  return false;
}

typedef struct step_ctx {
  multi m;
  const ty_p_optim *p;
  double rate, widen; /* adam: the step size and the factor of sqrt(v), corrected for the bias */
  double weight;      /* lerp_list */
} step_ctx;

/* Runs BODY for segments [from, from + n) of tensor i, at most BLOCK long where buffers are needed. */
#define FOR_BLOCKS(m, begin, end, i, from, n)                                       \
  for (int64_t i = multi_find(m, begin), u = begin; u < end; i++)                   \
    for (int64_t stop = (m)->start[i + 1] < end ? (m)->start[i + 1] : end, from, n; \
         u < stop && (from = u - (m)->start[i], n = stop - u < BLOCK ? stop - u : BLOCK, true); u += n)

/* ---- SGD ---- */

#define SGD(name, T)                                                                                        \
  static void name(T *restrict p, const T *restrict g, T *restrict b, int64_t n, const ty_p_optim *o) {     \
    const T scale = (T)o->grad_scale, decay = (T)o->weight_decay, lr = (T)o->lr, momentum = (T)o->momentum; \
    if (!b) {                                                                                               \
      for (int64_t i = 0; i < n; i++) p[i] -= lr * (g[i] * scale + decay * p[i]);                           \
      return;                                                                                               \
    }                                                                                                       \
    /* the first step starts the average with the gradient itself */                                        \
    const T keep = o->step == 1 ? 0 : momentum, fresh = o->step == 1 ? 1 : (T)(1 - o->dampening);           \
    const T direct = o->nesterov ? 1 : 0, averaged = o->nesterov ? momentum : 1;                            \
    if (o->step == 1) memset(b, 0, (size_t)n * sizeof(T));                                                  \
    for (int64_t i = 0; i < n; i++) {                                                                       \
      T d = g[i] * scale + decay * p[i];                                                                    \
      T average = keep * b[i] + fresh * d;                                                                  \
      b[i] = average;                                                                                       \
      p[i] -= lr * (direct * d + averaged * average);                                                       \
    }                                                                                                       \
  }
SGD(sgd_f32, float)
SGD(sgd_f64, double)

static void sgd_range(void *context, int64_t begin, int64_t end) {
  const step_ctx *c = context;
  const multi *m = &c->m;
  const bool averaged = c->p->momentum != 0;
  FOR_BLOCKS(m, begin, end, i, from, n) {
    const ty_view *p = m->in[i], *g = m->in[m->n + i], *b = averaged ? m->in[2 * m->n + i] : NULL;
    if (wants_f64(m, i, averaged ? 2 : 1, (int[]){ 0, 2 })) {
      double pb[BLOCK], gb[BLOCK], bb[BLOCK];
      double *pp = load_f64(p, from, n, pb), *bp = b ? load_f64(b, from, n, bb) : NULL;
      sgd_f64(pp, load_f64(g, from, n, gb), bp, n, c->p);
      store_f64(p, from, n, pp);
      if (b) store_f64(b, from, n, bp);
    } else {
      float pb[BLOCK], gb[BLOCK], bb[BLOCK];
      float *pp = load_f32(p, from, n, pb), *bp = b ? load_f32(b, from, n, bb) : NULL;
      sgd_f32(pp, load_f32(g, from, n, gb), bp, n, c->p);
      store_f32(p, from, n, pp);
      if (b) store_f32(b, from, n, bp);
    }
  }
}

/* in: n parameters, n gradients and, with momentum, n averages. */
bool TY_KERNEL(sgd)(const ty_kernel_args *k) {
  step_ctx c = { .p = k->params };
  if (!multi_init(&c.m, k, k->nin / (c.p->momentum != 0 ? 3 : 2), 1)) return false;
  ty_parallel_for_all(c.m.start[c.m.n], GRAIN, sgd_range, &c);
  multi_free(&c.m);
  return true;
}

/* ---- Adam: Kingma and Ba 2015, algorithm 1; AdamW: Loshchilov and Hutter 2019, algorithm 2 ---- */

#define ADAM(name, T, SQRT)                                                                                          \
  static void name(T *restrict p, const T *restrict g, T *restrict m, T *restrict v, int64_t n, const step_ctx *c) { \
    const ty_p_optim *o = c->p;                                                                                      \
    const T scale = (T)o->grad_scale, l2 = (T)(o->decoupled ? 0 : o->weight_decay);                                  \
    const T shrink = (T)(o->decoupled ? 1 - o->lr * o->weight_decay : 1);                                            \
    const T beta1 = (T)o->beta1, fresh1 = (T)(1 - o->beta1), beta2 = (T)o->beta2, fresh2 = (T)(1 - o->beta2);        \
    const T rate = (T)c->rate, widen = (T)c->widen, eps = (T)o->eps;                                                 \
    for (int64_t i = 0; i < n; i++) {                                                                                \
      T d = g[i] * scale + l2 * p[i];                                                                                \
      T first = beta1 * m[i] + fresh1 * d, second = beta2 * v[i] + fresh2 * d * d;                                   \
      m[i] = first;                                                                                                  \
      v[i] = second;                                                                                                 \
      p[i] = p[i] * shrink - rate * first / (SQRT(second) * widen + eps);                                            \
    }                                                                                                                \
  }
ADAM(adam_f32, float, sqrtf)
ADAM(adam_f64, double, sqrt)

static void adam_range(void *context, int64_t begin, int64_t end) {
  const step_ctx *c = context;
  const multi *m = &c->m;
  FOR_BLOCKS(m, begin, end, i, from, n) {
    const ty_view *p = m->in[i], *g = m->in[m->n + i], *first = m->in[2 * m->n + i], *second = m->in[3 * m->n + i];
    if (wants_f64(m, i, 3, (int[]){ 0, 2, 3 })) {
      double pb[BLOCK], gb[BLOCK], fb[BLOCK], sb[BLOCK];
      double *pp = load_f64(p, from, n, pb), *fp = load_f64(first, from, n, fb), *sp = load_f64(second, from, n, sb);
      adam_f64(pp, load_f64(g, from, n, gb), fp, sp, n, c);
      store_f64(p, from, n, pp);
      store_f64(first, from, n, fp);
      store_f64(second, from, n, sp);
    } else {
      float pb[BLOCK], gb[BLOCK], fb[BLOCK], sb[BLOCK];
      float *pp = load_f32(p, from, n, pb), *fp = load_f32(first, from, n, fb), *sp = load_f32(second, from, n, sb);
      adam_f32(pp, load_f32(g, from, n, gb), fp, sp, n, c);
      store_f32(p, from, n, pp);
      store_f32(first, from, n, fp);
      store_f32(second, from, n, sp);
    }
  }
}

/* in: n parameters, n gradients, n first moments, n second moments. */
bool TY_KERNEL(adam)(const ty_kernel_args *k) {
  const ty_p_optim *p = k->params;
  step_ctx c = { .p = p,
                 .rate = p->lr / (1 - pow(p->beta1, (double)p->step)),
                 .widen = 1 / sqrt(1 - pow(p->beta2, (double)p->step)) };
  if (!multi_init(&c.m, k, k->nin / 4, 1)) return false;
  ty_parallel_for_all(c.m.start[c.m.n], GRAIN, adam_range, &c);
  multi_free(&c.m);
  return true;
}

/* ---- x += weight (y - x) ---- */

#define LERP(name, T)                                                    \
  static void name(T *restrict x, const T *restrict y, int64_t n, T w) { \
    for (int64_t i = 0; i < n; i++) x[i] += w * (y[i] - x[i]);           \
  }
LERP(lerp_f32, float)
LERP(lerp_f64, double)

static void lerp_range(void *context, int64_t begin, int64_t end) {
  const step_ctx *c = context;
  const multi *m = &c->m;
  FOR_BLOCKS(m, begin, end, i, from, n) {
    const ty_view *x = m->in[i], *y = m->in[m->n + i];
    if (x->dtype == TY_F64) {
      double yb[BLOCK];
      lerp_f64(at(x, from), load_f64(y, from, n, yb), n, c->weight);
    } else {
      float xb[BLOCK], yb[BLOCK];
      float *xp = load_f32(x, from, n, xb);
      lerp_f32(xp, load_f32(y, from, n, yb), n, (float)c->weight);
      store_f32(x, from, n, xp);
    }
  }
}

/* in: n tensors that move, n tensors they move to; params: ty_p_scalars, a: the weight. */
bool TY_KERNEL(lerp_list)(const ty_kernel_args *k) {
  step_ctx c = { .weight = ((const ty_p_scalars *)k->params)->a };
  if (!multi_init(&c.m, k, k->nin / 2, 1)) return false;
  ty_parallel_for_all(c.m.start[c.m.n], GRAIN, lerp_range, &c);
  multi_free(&c.m);
  return true;
}

/* ---- norms, in f64: chunks of fixed length, added in order, whatever the threads ---- */

typedef struct norm_ctx {
  multi m;
  double p;
  double *part; /* per chunk */
} norm_ctx;

#define NORM(name, T)                                                                                        \
  static double name(const T *restrict x, int64_t n, double p) {                                             \
    double s = 0;                                                                                            \
    if (p == 2) {                                                                                            \
      _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++) s += (double)x[i] * (double)x[i]; \
    } else if (p == 1) {                                                                                     \
      _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++) s += fabs((double)x[i]);          \
    } else if (isinf(p)) {                                                                                   \
      double nan = 0;                                                                                        \
      s = p > 0 ? 0 : INFINITY;                                                                              \
      for (int64_t i = 0; i < n; i++) {                                                                      \
        double a = fabs((double)x[i]);                                                                       \
        if (a != a) nan = a;                                                                                 \
        if (p > 0 ? a > s : a < s) s = a;                                                                    \
      }                                                                                                      \
      if (nan != 0) s = nan;                                                                                 \
    } else if (p == 0) {                                                                                     \
      for (int64_t i = 0; i < n; i++) s += x[i] != 0;                                                        \
    } else {                                                                                                 \
      for (int64_t i = 0; i < n; i++) s += pow(fabs((double)x[i]), p);                                       \
    }                                                                                                        \
    return s;                                                                                                \
  }
NORM(norm_f32, float)
NORM(norm_f64, double)

static double norm_join(double a, double b, double p) {
  if (!isinf(p)) return a + b;
  if (a != a || b != b) return NAN;
  return p > 0 ? (a > b ? a : b) : (a < b ? a : b);
}

static void norm_range(void *context, int64_t begin, int64_t end) {
  const norm_ctx *c = context;
  int64_t i = multi_find(&c->m, begin);
  for (int64_t u = begin; u < end; u++) {
    while (c->m.start[i + 1] <= u) i++;
    const ty_view *x = c->m.in[i];
    int64_t from = (u - c->m.start[i]) * NORM_CHUNK, n = x->count - from < NORM_CHUNK ? x->count - from : NORM_CHUNK;
    if (x->dtype == TY_F64) {
      c->part[u] = norm_f64(at(x, from), n, c->p);
      continue;
    }
    double s = isinf(c->p) && c->p < 0 ? INFINITY : 0;
    for (int64_t done = 0; done < n; done += BLOCK) {
      float buffer[BLOCK];
      int64_t len = n - done < BLOCK ? n - done : BLOCK;
      s = norm_join(s, norm_f32(load_f32(x, from + done, len, buffer), len, c->p), c->p);
    }
    c->part[u] = s;
  }
}

/* in: n tensors; out: one f64; params: ty_p_scalars, a: p. */
bool TY_KERNEL(norm_list)(const ty_kernel_args *k) {
  norm_ctx c = { .p = ((const ty_p_scalars *)k->params)->a };
  if (!multi_init(&c.m, k, k->nin, NORM_CHUNK)) return false;
  int64_t chunks = c.m.start[c.m.n];
  double s = c.p < 0 && isinf(c.p) ? INFINITY : 0;
  bool ok = true;
  if (chunks) {
    c.part = ty_scratch_alloc((size_t)chunks * sizeof(double));
    ok = c.part != NULL;
  }
  if (ok && chunks) {
    ty_parallel_for(chunks, 1, norm_range, &c);
    for (int64_t i = 0; i < chunks && !ty_interrupted; i++) s = norm_join(s, c.part[i], c.p);
    ty_scratch_free(c.part, (size_t)chunks * sizeof(double));
  }
  multi_free(&c.m);
  if (ok) *(double *)k->out[0]->data = c.p == 2 ? sqrt(s) : c.p == 1 || c.p == 0 || isinf(c.p) ? s : pow(s, 1 / c.p);
  return ok;
}
