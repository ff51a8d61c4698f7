/* Optimizer steps over lists of tensors in one pass over memory: sgd, adam, lion, adaptive, adam_8bit, lerp_list; norm_list,
 * finite_list.
 * The lists are walked as if all tensors were one; elements of other dtypes than that of the arithmetic go through small buffers. */
#include "../cpu.h"

#include <math.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "../../half.h"
#include "../../optim_round.h"
#include "../../optim_rules.h"

#define GRAIN 32768
#define BLOCK 1024
#define FEW 30
#define NORM_CHUNK 16384
#define STRIP 16  /* elements done at a time */
#define AHEAD 384 /* bytes */
/* Without the pragma short loops are unrolled before they are vectorised. */
#define FOR_STRIP _Pragma("omp simd") for (int j = 0; j < STRIP; j++)

/* ---- walking over many tensors ---- */

typedef struct multi {
  const ty_view *const *in;
  int64_t n;
  int64_t *start; /* [n + 1]: units before each tensor; a unit is an element or a chunk */
  int64_t few[FEW + 1];
} multi;

static bool multi_init(multi *m, const ty_kernel_args *k, int64_t n, int64_t unit) {
  m->in = k->in;
  m->n = n;
  m->start = n <= FEW ? m->few : ty_scratch_alloc((size_t)(n + 1) * sizeof(int64_t));
  if (!m->start) return false;
  m->start[0] = 0;
  for (int64_t i = 0; i < n; i++) m->start[i + 1] = m->start[i] + (k->in[i]->count + unit - 1) / unit;
  return true;
}

static void multi_free(multi *m) {
  if (m->start != m->few) ty_scratch_free(m->start, (size_t)(m->n + 1) * sizeof(int64_t));
}

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

/* The lists of a step by what they are to it. */
enum { P, G, FIRST, SECOND, THIRD, AVERAGE, ROLES };

typedef struct step_ctx step_ctx;
struct step_ctx {
  multi m;
  const ty_p_optim *p;
  double l2, decay;   /* weight decay: added to the gradient, or the share that parameters lose: 1 - decay as a factor
                         would round to a share that is up to 1 % off */
  double rate, widen; /* adam: the step size and the factor of sqrt(v), corrected for the bias */
  ty_optim_factors factors; /* adaptive */
  int list[ROLES];          /* which list of the inputs plays the role; -1: none */
  unsigned written;         /* mask of roles */
  void (*f32)(float *const *x, int64_t n, const step_ctx *c);
  void (*f64)(double *const *x, int64_t n, const step_ctx *c);
};

/* ---- x / (sqrt(s) * widen + eps) for a strip ---- */

static inline void f64_by_root(double *restrict x, const double *restrict s, double widen, double eps) {
  FOR_STRIP x[j] /= sqrt(s[j]) * widen + eps;
}

static inline void f32_by_root(float *restrict x, const float *restrict s, float widen, float eps) {
#if defined(__AVX512F__)
  /* The root and the division keep a unit of their own busy while the others go on: faster than estimates with a Newton
   * step each. As intrinsics, since sqrtf() may set errno. */
  const __m512 root = _mm512_sqrt_ps(_mm512_loadu_ps(s));
  const __m512 divisor = _mm512_fmadd_ps(root, _mm512_set1_ps(widen), _mm512_set1_ps(eps));
  _mm512_storeu_ps(x, _mm512_div_ps(_mm512_loadu_ps(x), divisor));
#else
  FOR_STRIP x[j] /= sqrtf(s[j]) * widen + eps;
#endif
}

#define REAL float
#define NAME(name) f32_##name
#define MAGNITUDE fabsf
#define ROOT sqrtf
#include "optim_real.h"
#include "optim_rules_real.h"
#undef REAL
#undef NAME
#undef MAGNITUDE
#undef ROOT
#define REAL double
#define NAME(name) f64_##name
#define MAGNITUDE fabs
#define ROOT sqrt
#include "optim_real.h"
#include "optim_rules_real.h"
#undef REAL
#undef NAME
#undef MAGNITUDE
#undef ROOT

/* ---- walking ---- */

/* Elements [from, from + n) of tensor i. */
static void step_f64(const step_ctx *c, const ty_view *const *v, int64_t from, int64_t n) {
  double buffer[ROLES][BLOCK], *x[ROLES];
  for (int r = 0; r < ROLES; r++) x[r] = v[r] ? load_f64(v[r], from, n, buffer[r]) : NULL;
  f64_run(c->f64, x, n, c);
  for (int r = 0; r < ROLES; r++)
    if (v[r] && c->written >> r & 1) store_f64(v[r], from, n, x[r]);
}

/* New parameters as their dtype will have them. */
static void round_half(ty_dtype dtype, float *restrict p, const float *restrict g, int64_t from, int64_t n,
                       int64_t step) {
  const uint32_t first = (uint32_t)from, number = (uint32_t)step;
  if (dtype == TY_BF16) {
    _Pragma("omp simd") for (int i = 0; i < (int)n; i++)
        p[i] = ty_bf16_neighbour(p[i], ty_rounding_bits(p[i], g[i], first + (uint32_t)i, number));
  } else {
    _Pragma("omp simd") for (int i = 0; i < (int)n; i++)
        p[i] = ty_f16_neighbour(p[i], ty_rounding_bits(p[i], g[i], first + (uint32_t)i, number));
  }
}

static void step_f32(const step_ctx *c, const ty_view *const *v, int64_t from, int64_t n) {
  float buffer[ROLES][BLOCK], *x[ROLES];
  for (int r = 0; r < ROLES; r++) x[r] = v[r] ? load_f32(v[r], from, n, buffer[r]) : NULL;
  f32_run(c->f32, x, n, c);
  if (c->p->stochastic && v[P] && (v[P]->dtype == TY_BF16 || v[P]->dtype == TY_F16))
    round_half((ty_dtype)v[P]->dtype, x[P], x[G], from, n, c->p->step);
  for (int r = 0; r < ROLES; r++)
    if (v[r] && c->written >> r & 1) store_f32(v[r], from, n, x[r]);
}

static void step_range(void *context, int64_t begin, int64_t end) {
  const step_ctx *c = context;
  const multi *m = &c->m;
  for (int64_t i = multi_find(m, begin), u = begin; u < end; i++) {
    const ty_view *v[ROLES];
    bool wide = false, direct = true;
    for (int r = 0; r < ROLES; r++) {
      v[r] = c->list[r] < 0 ? NULL : m->in[c->list[r] * m->n + i];
      /* the arithmetic is f64 when anything that is updated is */
      if (v[r] && c->written >> r & 1) wide |= v[r]->dtype == TY_F64;
    }
    for (int r = 0; r < ROLES; r++) direct &= !v[r] || v[r]->dtype == (wide ? TY_F64 : TY_F32);
    int64_t stop = m->start[i + 1] < end ? m->start[i + 1] : end;
    for (int64_t n; u < stop; u += n) {
      n = direct || stop - u < BLOCK ? stop - u : BLOCK;
      (wide ? step_f64 : step_f32)(c, v, u - m->start[i], n);
    }
  }
}

static bool run(step_ctx *c, const ty_kernel_args *k) {
  int lists = 0;
  for (int r = 0; r < ROLES; r++) lists += c->list[r] >= 0;
  if (!multi_init(&c->m, k, k->nin / lists, 1)) return false;
  ty_parallel_for_all(c->m.start[c->m.n], GRAIN, step_range, c);
  multi_free(&c->m);
  return true;
}

/* The numbers of a step, after what its control says; false: the step is left out. */
static bool step_numbers(const ty_kernel_args *k, ty_p_optim *p) {
  *p = *(const ty_p_optim *)k->params;
  if (!p->controlled) return true;
  const double *control = k->in[k->nin - 1]->data;
  if (!isfinite(control[0])) return false;
  p->grad_scale *= control[0];
  p->step -= (int64_t)control[1];
  if (p->step < 1) p->step = 1;
  return true;
}

enum { WRITES_ALL = ~(1 << G) };

/* in: n parameters, n gradients, with momentum n buffers, with averaged n averages. */
bool TY_KERNEL(sgd)(const ty_kernel_args *k) {
  ty_p_optim p;
  if (!step_numbers(k, &p)) return true;
  const bool momentum = p.momentum != 0;
  return run(&(step_ctx){ .p = &p,
                          .l2 = p.weight_decay,
                          .list = { 0, 1, momentum ? 2 : -1, -1, -1, p.averaged ? 2 + momentum : -1 },
                          .written = WRITES_ALL,
                          .f32 = f32_sgd,
                          .f64 = f64_sgd },
             k);
}

/* Adam: Kingma and Ba 2015, algorithm 1; AdamW: Loshchilov and Hutter 2019, algorithm 2. */
static void adam_factors(step_ctx *c) {
  const ty_p_optim *p = c->p;
  c->l2 = p->decoupled ? 0 : p->weight_decay;
  c->decay = p->decoupled ? p->lr * p->weight_decay : 0;
  c->rate = p->lr / (1 - pow(p->beta1, (double)p->step));
  c->widen = 1 / sqrt(1 - pow(p->beta2, (double)p->step));
}

/* in: n parameters, n gradients, n first moments, n second moments, with averaged n averages. */
bool TY_KERNEL(adam)(const ty_kernel_args *k) {
  ty_p_optim p;
  if (!step_numbers(k, &p)) return true;
  step_ctx c = {
    .p = &p, .list = { 0, 1, 2, 3, -1, p.averaged ? 4 : -1 }, .written = WRITES_ALL, .f32 = f32_adam, .f64 = f64_adam
  };
  adam_factors(&c);
  return run(&c, k);
}

/* Lion: Chen et al. 2023, algorithm 2. in: n parameters, n gradients, n moments, with averaged n averages. */
bool TY_KERNEL(lion)(const ty_kernel_args *k) {
  ty_p_optim p;
  if (!step_numbers(k, &p)) return true;
  return run(&(step_ctx){ .p = &p,
                          .decay = p.lr * p.weight_decay,
                          .list = { 0, 1, 2, -1, -1, p.averaged ? 3 : -1 },
                          .written = WRITES_ALL,
                          .f32 = f32_lion,
                          .f64 = f64_lion },
             k);
}

/* in: n parameters, n gradients, n of each state that the rule has, with averaged n averages. */
bool TY_KERNEL(adaptive)(const ty_kernel_args *k) {
  static void (*const f32[])(float *const *, int64_t, const step_ctx *) = { f32_rmsprop, f32_adagrad, f32_adadelta,
                                                                            f32_adamax,  f32_nadam,   f32_radam,
                                                                            f32_rprop,   f32_asgd };
  static void (*const f64[])(double *const *, int64_t, const step_ctx *) = { f64_rmsprop, f64_adagrad, f64_adadelta,
                                                                             f64_adamax,  f64_nadam,   f64_radam,
                                                                             f64_rprop,   f64_asgd };
  ty_p_optim p;
  if (!step_numbers(k, &p)) return true;
  step_ctx c = { .p = &p, .list = { 0, 1 }, .written = WRITES_ALL, .f32 = f32[p.rule], .f64 = f64[p.rule] };
  c.l2 = p.decoupled ? 0 : p.weight_decay;
  c.decay = p.decoupled ? p.lr * p.weight_decay : 0;
  c.factors = ty_optim_factors_at(&p, (double)p.step);
  int lists = 2;
  for (int r = FIRST; r <= THIRD; r++) c.list[r] = p.lists >> (r - FIRST) & 1 ? lists++ : -1;
  c.list[AVERAGE] = p.averaged ? lists : -1;
  return run(&c, k);
}

#include "optim_8bit.h"

/* in: n tensors that move, n tensors they move to; params: ty_p_scalars, a: the weight. */
bool TY_KERNEL(lerp_list)(const ty_kernel_args *k) {
  return run(&(step_ctx){ .p = &(ty_p_optim){ .average_weight = ((const ty_p_scalars *)k->params)->a },
                          .list = { 1, -1, -1, -1, -1, 0 },
                          .written = 1 << AVERAGE,
                          .f32 = f32_lerp,
                          .f64 = f64_lerp },
             k);
}

/* ---- norms, in f64: chunks of fixed length, added in order, whatever the threads ---- */

typedef struct norm_ctx {
  multi m;
  double p, limit;
  double *part; /* per chunk */
} norm_ctx;

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
      c->part[u] = f64_norm(at(x, from), n, c->p, c->limit);
      continue;
    }
    double s = isinf(c->p) && c->p < 0 ? INFINITY : 0;
    for (int64_t done = 0; done < n; done += BLOCK) {
      float buffer[BLOCK];
      int64_t len = n - done < BLOCK ? n - done : BLOCK;
      s = norm_join(s, f32_norm(load_f32(x, from + done, len, buffer), len, c->p, c->limit), c->p);
    }
    c->part[u] = s;
  }
}

/* in: n tensors; out: one f64; params: ty_p_scalars, a: p, b: elements count as at most this in magnitude. */
bool TY_KERNEL(norm_list)(const ty_kernel_args *k) {
  const ty_p_scalars *p = k->params;
  norm_ctx c = { .p = p->a, .limit = p->b };
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

/* ---- whether all are finite: the exponent of one that is not has all its bits ---- */

typedef struct finite_ctx {
  multi m;
  bool bad;
} finite_ctx;

#define SOME_BAD(name, type, ones)                                                                         \
  static bool name(const void *p, int64_t n) {                                                             \
    const type *x = p;                                                                                     \
    unsigned bad = 0;                                                                                      \
    _Pragma("omp simd reduction(|:bad)") for (int64_t i = 0; i < n; i++) bad |= (x[i] & (ones)) == (ones); \
    return bad;                                                                                            \
  }
SOME_BAD(some_bad_f64, uint64_t, UINT64_C(0x7ff0000000000000))
SOME_BAD(some_bad_f32, uint32_t, UINT32_C(0x7f800000))
SOME_BAD(some_bad_f16, uint16_t, UINT16_C(0x7c00))
SOME_BAD(some_bad_bf16, uint16_t, UINT16_C(0x7f80))

static void finite_range(void *context, int64_t begin, int64_t end) {
  finite_ctx *c = context;
  int64_t i = multi_find(&c->m, begin);
  for (int64_t u = begin; u < end && !__atomic_load_n(&c->bad, __ATOMIC_RELAXED); u++) {
    while (c->m.start[i + 1] <= u) i++;
    const ty_view *x = c->m.in[i];
    int64_t from = (u - c->m.start[i]) * NORM_CHUNK, n = x->count - from < NORM_CHUNK ? x->count - from : NORM_CHUNK;
    const void *p = at(x, from);
    bool bad = x->dtype == TY_F64   ? some_bad_f64(p, n)
               : x->dtype == TY_F32 ? some_bad_f32(p, n)
               : x->dtype == TY_F16 ? some_bad_f16(p, n)
                                    : some_bad_bf16(p, n);
    if (bad) __atomic_store_n(&c->bad, true, __ATOMIC_RELAXED);
  }
}

/* in: n tensors; out: one bool. */
bool TY_KERNEL(finite_list)(const ty_kernel_args *k) {
  finite_ctx c = { .bad = false };
  if (!multi_init(&c.m, k, k->nin, NORM_CHUNK)) return false;
  ty_parallel_for(c.m.start[c.m.n], 1, finite_range, &c);
  multi_free(&c.m);
  *(bool *)k->out[0]->data = !c.bad;
  return true;
}
