/* Rotary position embedding: pairs of elements of each vector turned by the angles of its position. */
#include "../cpu.h"

#define GRAIN 16384

typedef struct job {
  const ty_view *x, *cos, *sin, *out;
  bool interleaved;
} job;

/* Where vector `index` of the result begins in v, in elements. */
static int64_t offset_of(const ty_view *v, const ty_view *shape, int64_t index) {
  int64_t at = 0;
  for (int d = shape->ndim - 2; d >= 0; d--) {
    at += index % shape->size[d] * v->stride[d];
    index /= shape->size[d];
  }
  return at;
}

#define ROTATE(name, T)                                                                           \
  static void name(void *context, int64_t begin, int64_t end) {                                   \
    const job *j = context;                                                                       \
    const int last = j->out->ndim - 1;                                                            \
    const int64_t width = j->out->size[last], pairs = j->cos->size[last];                         \
    const int64_t sx = j->x->stride[last], sc = j->cos->stride[last], ss = j->sin->stride[last];  \
    const int64_t apart = j->interleaved ? 1 : pairs, next = j->interleaved ? 2 : 1;              \
    for (int64_t v = begin; v < end; v++) {                                                       \
      const T *restrict x = (const T *)j->x->data + offset_of(j->x, j->out, v);                   \
      const T *restrict c = (const T *)j->cos->data + offset_of(j->cos, j->out, v);               \
      const T *restrict s = (const T *)j->sin->data + offset_of(j->sin, j->out, v);               \
      T *restrict y = (T *)j->out->data + v * width;                                              \
      if (!j->interleaved && sx == 1 && sc == 1 && ss == 1) {                                     \
        _Pragma("omp simd") for (int64_t i = 0; i < pairs; i++) {                                 \
          const T a = x[i], b = x[pairs + i];                                                     \
          y[i] = a * c[i] - b * s[i];                                                             \
          y[pairs + i] = b * c[i] + a * s[i];                                                     \
        }                                                                                         \
      } else {                                                                                    \
        for (int64_t i = 0; i < pairs; i++) {                                                     \
          const T a = x[i * next * sx], b = x[(i * next + apart) * sx];                           \
          y[i * next] = a * c[i * sc] - b * s[i * ss];                                            \
          y[i * next + apart] = b * c[i * sc] + a * s[i * ss];                                    \
        }                                                                                         \
      }                                                                                           \
      for (int64_t i = 2 * pairs; i < width; i++) y[i] = x[i * sx]; /* what has no angle stays */ \
    }                                                                                             \
  }
ROTATE(rotate_f32, float)
ROTATE(rotate_f64, double)

/* in: x [..., width], cos and sin seen as [..., pairs]; flag: interleaved. */
bool TY_KERNEL(rotary)(const ty_kernel_args *k);
bool TY_KERNEL(rotary)(const ty_kernel_args *k) {
  const ty_view *out = k->out[0];
  if (out->count == 0) return true;
  job j = { k->in[0], k->in[1], k->in[2], out, ((const ty_p_dim *)k->params)->flag };
  int64_t width = out->size[out->ndim - 1];
  ty_parallel_for(out->count / width, 1 + GRAIN / width, out->dtype == TY_F64 ? rotate_f64 : rotate_f32, &j);
  return true;
}
