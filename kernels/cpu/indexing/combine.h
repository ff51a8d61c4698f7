/* What elements that meet become: to and from of one type. Of NaN and a number, the NaN. */
#ifndef TY_KERNELS_CPU_COMBINE_H
#define TY_KERNELS_CPU_COMBINE_H

#include "../cpu.h"

#define ADD(to, from) (to) += (from)
#define LARGER(to, from) (to) = (from) > (to) ? (from) : (to)
#define SMALLER(to, from) (to) = (from) < (to) ? (from) : (to)
/* Without branches, which would be guessed wrong: a comparison that chooses, then whether `from` is NaN. */
#define EXTREME_OR_NAN(to, from, than)                  \
  do {                                                  \
    const __typeof__(to) was = (to), is = (from);       \
    const __typeof__(to) most = is than was ? is : was; \
    (to) = is != is ? is : most;                        \
  } while (0)
#define LARGER_OR_NAN(to, from) EXTREME_OR_NAN(to, from, >)
#define SMALLER_OR_NAN(to, from) EXTREME_OR_NAN(to, from, <)
/* Integers add and multiply as unsigned: they wrap. Those of 16 bits are multiplied in int, which they do not leave
 * when unsigned. */
#define TIMES(to, from) (to) *= (from)
#define TIMES_16(to, from) (to) = (uint16_t)((unsigned)(to) * (from))

/* The same of vectors. */
#define SELECT(to, from, where) \
  (to) = (__typeof__(to))(((where) & (__typeof__(where))(from)) | (~(where) & (__typeof__(where))(to)))
#define LARGER_ALL(to, from) SELECT(to, from, (from) > (to))
#define SMALLER_ALL(to, from) SELECT(to, from, (from) < (to))
#define LARGER_OR_NAN_ALL(to, from) SELECT(to, from, ((from) > (to)) | ((from) != (from)))
#define SMALLER_OR_NAN_ALL(to, from) SELECT(to, from, ((from) < (to)) | ((from) != (from)))

/* EACH(name, type, combination, the same of vectors): how each dtype is added or multiplied, by its size alone; and
 * compared. */
#define TY_EACH_SUM(EACH)           \
  EACH(add_u8, uint8_t, ADD, ADD)   \
  EACH(add_u16, uint16_t, ADD, ADD) \
  EACH(add_u32, uint32_t, ADD, ADD) \
  EACH(add_u64, uint64_t, ADD, ADD) \
  EACH(add_f32, float, ADD, ADD)    \
  EACH(add_f64, double, ADD, ADD)
#define TY_EACH_PRODUCT(EACH)                \
  EACH(times_u8, uint8_t, TIMES, TIMES)      \
  EACH(times_u16, uint16_t, TIMES_16, TIMES) \
  EACH(times_u32, uint32_t, TIMES, TIMES)    \
  EACH(times_u64, uint64_t, TIMES, TIMES)    \
  EACH(times_f32, float, TIMES, TIMES)       \
  EACH(times_f64, double, TIMES, TIMES)
#define TY_EACH_EXTREME(EACH)                                  \
  EACH(larger_u8, uint8_t, LARGER, LARGER_ALL)                 \
  EACH(larger_i8, int8_t, LARGER, LARGER_ALL)                  \
  EACH(larger_i16, int16_t, LARGER, LARGER_ALL)                \
  EACH(larger_i32, int32_t, LARGER, LARGER_ALL)                \
  EACH(larger_i64, int64_t, LARGER, LARGER_ALL)                \
  EACH(larger_f32, float, LARGER_OR_NAN, LARGER_OR_NAN_ALL)    \
  EACH(larger_f64, double, LARGER_OR_NAN, LARGER_OR_NAN_ALL)   \
  EACH(smaller_u8, uint8_t, SMALLER, SMALLER_ALL)              \
  EACH(smaller_i8, int8_t, SMALLER, SMALLER_ALL)               \
  EACH(smaller_i16, int16_t, SMALLER, SMALLER_ALL)             \
  EACH(smaller_i32, int32_t, SMALLER, SMALLER_ALL)             \
  EACH(smaller_i64, int64_t, SMALLER, SMALLER_ALL)             \
  EACH(smaller_f32, float, SMALLER_OR_NAN, SMALLER_OR_NAN_ALL) \
  EACH(smaller_f64, double, SMALLER_OR_NAN, SMALLER_OR_NAN_ALL)

#define TY_BY_SIZE(d, name)               \
  ((d) == TY_F32             ? name##_f32 \
   : (d) == TY_F64           ? name##_f64 \
   : ty_dtype_size[(d)] == 1 ? name##_u8  \
   : ty_dtype_size[(d)] == 2 ? name##_u16 \
   : ty_dtype_size[(d)] == 4 ? name##_u32 \
                             : name##_u64)
#define TY_BY_DTYPE(d, name)    \
  ((d) == TY_F32   ? name##_f32 \
   : (d) == TY_F64 ? name##_f64 \
   : (d) == TY_U8  ? name##_u8  \
   : (d) == TY_I8  ? name##_i8  \
   : (d) == TY_I16 ? name##_i16 \
   : (d) == TY_I32 ? name##_i32 \
                   : name##_i64)

#endif
