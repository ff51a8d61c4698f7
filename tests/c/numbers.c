/* Numbers bit by bit: half-precision conversions for all 65536 values, Philox against its published vectors. */
#include <string.h>

#include "../../kernels/half.h"
#include "../../kernels/philox.h"
#include "check.h"

/* A 16-bit float by its definition: sign, exponent, mantissa of `digits` bits. */
static double decode(uint32_t h, int digits) {
  int exponents = 15 - digits, bias = (1 << (exponents - 1)) - 1;
  int e = (int)(h >> digits) & ((1 << exponents) - 1);
  double m = (double)(h & ((1u << digits) - 1)), v;
  if (e == (1 << exponents) - 1) v = m != 0 ? NAN : INFINITY;
  else if (e == 0) v = ldexp(m, 1 - bias - digits);
  else v = ldexp(m + ldexp(1, digits), e - bias - digits);
  return h & 0x8000 ? -v : v;
}

static bool same_float(double a, double b) { return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b)); }
static bool same_half(uint32_t a, uint32_t b, uint32_t infinity) {
  bool nan_a = (a & 0x7fff) > infinity, nan_b = (b & 0x7fff) > infinity;
  return nan_a || nan_b ? nan_a && nan_b : a == b;
}

static void check_format(ty_dtype dtype, int digits, uint32_t infinity, float (*up)(uint16_t),
                         uint16_t (*down)(float)) {
  static uint16_t halves[65536], back[65536];
  static float values[65536];
  int wrong_up = 0, wrong_down = 0, wrong_block = 0, wrong_cast = 0;
  for (uint32_t h = 0; h < 65536; h++) halves[h] = (uint16_t)h;
  ty_half_load(dtype, values, halves, 65535); /* an odd length: both the wide and the single loop */
  values[65535] = up(65535);
  ty_half_store(dtype, back, values, 65535);
  for (uint32_t h = 0; h < 65536; h++) {
    double want = decode(h, digits);
    float one = up((uint16_t)h);
    wrong_up += !same_float(one, want);
    wrong_down += !same_half(down(one), h, infinity);
    if (h < 65535) wrong_block += !same_float(values[h], want) || !same_half(back[h], h, infinity);
  }
  CHECK_THAT(wrong_up == 0, "%d of 65536 %s to f32 are wrong", wrong_up, ty_dtype_name[dtype]);
  CHECK_THAT(wrong_down == 0, "%d of 65536 %s come back changed", wrong_down, ty_dtype_name[dtype]);
  CHECK_THAT(wrong_block == 0, "%d of 65536 %s are wrong in blocks", wrong_block, ty_dtype_name[dtype]);

  ty_tensor *t = ty_from_data(halves, dtype, 1, (int64_t[]){ 65536 });
  for (int to = TY_F32; to <= TY_F64; to++) {
    ty_tensor *wide = ty_cast(t, to), *again = ty_cast(wide, dtype);
    CHECK(wide && again);
    for (uint32_t h = 0; again && h < 65536; h++) {
      double v = to == TY_F32 ? (double)((const float *)wide->v.data)[h] : ((const double *)wide->v.data)[h];
      wrong_cast += !same_float(v, decode(h, digits)) || !same_half(((const uint16_t *)again->v.data)[h], h, infinity);
    }
  }
  CHECK_THAT(wrong_cast == 0, "%d of 65536 %s are wrong after cast", wrong_cast, ty_dtype_name[dtype]);

  /* Between neighbours: the middle goes to the even one, the nearest floats around it to their side. */
  int wrong = 0;
  for (uint32_t h = 0; h < infinity; h++) {
    double low = decode(h, digits), high = h + 1 == infinity ? 2 * low - decode(h - 1, digits) : decode(h + 1, digits);
    float middle = (float)(low + (high - low) / 2);
    if ((double)middle != low + (high - low) / 2) continue; /* f32 has no such value */
    uint32_t even = h & 1 ? h + 1 : h;
    for (int sign = 0; sign < 2; sign++) {
      uint32_t s = sign ? 0x8000 : 0;
      float f = sign ? -1.0f : 1.0f;
      wrong += down(f * middle) != (even | s);
      wrong += down(f * nextafterf(middle, 0)) != (h | s);
      wrong += down(f * nextafterf(middle, INFINITY)) != ((h + 1) | s);
    }
  }
  CHECK_THAT(wrong == 0, "%d roundings of f32 to %s are wrong", wrong, ty_dtype_name[dtype]);
  CHECK_INT(down(3e38f) & 0x7fff, dtype == TY_F16 ? infinity : 0x7f62);
  CHECK_INT(down(-INFINITY), infinity | 0x8000);
  CHECK_INT(down(-0.0f), 0x8000);
  CHECK_INT(down(1e-45f), 0);
}

void test_f16_conversion(void) { check_format(TY_F16, 10, 0x7c00, ty_f16_to_f32, ty_f32_to_f16); }
void test_bf16_conversion(void) { check_format(TY_BF16, 7, 0x7f80, ty_bf16_to_f32, ty_f32_to_bf16); }

/* The known answers that come with Random123 (Salmon et al. 2011): counter, key, result. */
void test_philox(void) {
  static const uint32_t known[3][10] = {
    { 0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 },
    { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
      0x6d5451fd },
    { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
      0x24126ea1 },
  };
  for (int i = 0; i < 3; i++) {
    const uint32_t *k = known[i];
    ty_philox r = ty_philox_words((ty_philox){ { k[0], k[1], k[2], k[3] } }, k[4], k[5]);
    for (int j = 0; j < 4; j++) CHECK_INT(r.w[j], k[6 + j]);
  }

  /* Element i of a draw is word i % 4 of block offset + i / 4: the same on every device and for every thread count. */
  ty_generator *generator = ty_default_generator(), before = *generator;
  *generator = (ty_generator){ .seed = 0x123456789abcdef0, .offset = 0xffffffff };
  ty_tensor *x = ty_rand(TY_INTS(3, 7), TY_F32, TY_CPU);
  CHECK_INT(generator->offset, 0xffffffff + 6ll);
  for (int i = 0; i < 21; i++) {
    ty_philox block = ty_philox_block(0x123456789abcdef0, 0xffffffffull + (uint64_t)i / 4);
    CHECK_NEAR(value_at(x, i), ty_uniform_f32(block.w[i % 4]), 0);
  }
  *generator = before;
}
