/* Complex numbers as pairs: products and absolute values. */
#include <math.h>

#include "../cpu.h"

#define GRAIN 8192

typedef struct job {
  const void *a, *b;
  void *y;
  int64_t na, nb; /* pairs of a and b, which begin again where they end */
  double sign;    /* of the imaginary part of b */
} job;

#define PRODUCT(T)                                                                                         \
  static void product_##T(const T *restrict a, const T *restrict b, T *restrict y, int64_t n, T sign) {    \
    for (int64_t i = 0; i < n; i++) {                                                                      \
      const T ar = a[2 * i], ai = a[2 * i + 1], br = b[2 * i], bi = sign * b[2 * i + 1];                   \
      y[2 * i] = ar * br - ai * bi;                                                                        \
      y[2 * i + 1] = ar * bi + ai * br;                                                                    \
    }                                                                                                      \
  }                                                                                                        \
  static void products_##T(void *context, int64_t begin, int64_t end) {                                    \
    const job *j = context;                                                                                \
    while (begin < end) {                                                                                  \
      const int64_t a = begin % j->na, b = begin % j->nb;                                                  \
      int64_t n = end - begin;                                                                             \
      n = n < j->na - a ? n : j->na - a;                                                                   \
      n = n < j->nb - b ? n : j->nb - b;                                                                   \
      product_##T((const T *)j->a + 2 * a, (const T *)j->b + 2 * b, (T *)j->y + 2 * begin, n, (T)j->sign); \
      begin += n;                                                                                          \
    }                                                                                                      \
  }
PRODUCT(float)
PRODUCT(double)

/* in: a and b, each of the shape of the result or of its last dimensions; flag: of the conjugate of b. */
bool TY_KERNEL(complex_mul)(const ty_kernel_args *k) {
  const ty_view *y = k->out[0];
  if (!y->count) return true;
  job j = { k->in[0]->data,      k->in[1]->data,      y->data,
            k->in[0]->count / 2, k->in[1]->count / 2, ((const ty_p_dim *)k->params)->flag ? -1.0 : 1.0 };
  ty_parallel_for(y->count / 2, GRAIN, y->dtype == TY_F64 ? products_double : products_float, &j);
  return true;
}

/* In double, which neither overflows nor vanishes. */
static void sizes_float(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const float *restrict a = j->a;
  float *restrict y = j->y;
  for (int64_t i = begin; i < end; i++) {
    const double re = (double)a[2 * i], im = (double)a[2 * i + 1];
    y[i] = (float)sqrt(re * re + im * im);
  }
}

static void sizes_double(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const double *restrict a = j->a;
  double *restrict y = j->y;
  int extreme = 0;
  for (int64_t i = begin; i < end; i++) {
    const double s = a[2 * i] * a[2 * i] + a[2 * i + 1] * a[2 * i + 1];
    y[i] = sqrt(s);
    extreme |= !(s > 1e-280 && s < 1e300);
  }
  for (int64_t i = begin; extreme && i < end; i++) y[i] = hypot(a[2 * i], a[2 * i + 1]);
}

bool TY_KERNEL(complex_abs)(const ty_kernel_args *k) {
  const ty_view *y = k->out[0];
  job j = { .a = k->in[0]->data, .y = y->data };
  ty_parallel_for(y->count, GRAIN, y->dtype == TY_F64 ? sizes_double : sizes_float, &j);
  return true;
}
