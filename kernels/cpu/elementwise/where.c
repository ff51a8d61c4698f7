/* where: elements of x or y as a condition of any dtype is nonzero. Only the width of the elements matters. */
#include "elementwise.h"

#define LOOP(type)                                                                                          \
  static bool where_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    type##_t *o = out;                                                                                      \
    const uint8_t *c = in[0];                                                                               \
    const type##_t *p = in[1], *q = in[2];                                                                  \
    if (!(repeated & 6)) {                                                                                  \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                 \
        type##_t x = p[i], y = q[i];                                                                        \
        o[i] = c[i] ? x : y;                                                                                \
      }                                                                                                     \
    } else if ((repeated & 6) == 2) {                                                                       \
      const type##_t x = *p;                                                                                \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                 \
        type##_t y = q[i];                                                                                  \
        o[i] = c[i] ? x : y;                                                                                \
      }                                                                                                     \
    } else if ((repeated & 6) == 4) {                                                                       \
      const type##_t y = *q;                                                                                \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                 \
        type##_t x = p[i];                                                                                  \
        o[i] = c[i] ? x : y;                                                                                \
      }                                                                                                     \
    } else {                                                                                                \
      const type##_t x = *p, y = *q;                                                                        \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) o[i] = c[i] ? x : y;                              \
    }                                                                                                       \
    return true;                                                                                            \
  }

LOOP(uint8)
LOOP(uint16)
LOOP(uint32)
LOOP(uint64)

bool TY_KERNEL(where)(const ty_kernel_args *k);
bool TY_KERNEL(where)(const ty_kernel_args *k) {
  uint8_t condition = (uint8_t)k->in[0]->dtype, d = (uint8_t)k->out[0]->dtype;
  int bytes = ty_dtype_size[d];
  ew_op op = { .loop = bytes == 1   ? where_uint8
                       : bytes == 2 ? where_uint16
                       : bytes == 4 ? where_uint32
                                    : where_uint64,
               .nin = 3,
               .repeats = 6,
               .dtype = { d, condition, d, d } };
  op.how[1] = condition == TY_BOOL ? EW_PLAIN : EW_TRUTH;
  return ew_run(&op, k);
}
