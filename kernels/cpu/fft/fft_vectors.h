/* Template: vectors of REAL for transforms, taken apart into real and imaginary parts and put together, and transposed.
 * With REAL, REAL_INT, LANES, PAIRS (complex numbers in 16 bytes) and FN(x) set. */

typedef REAL FN(vec) __attribute__((vector_size(VEC_BYTES), may_alias));
typedef REAL FN(loose) __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));
#define VEC FN(vec)
#define LOOSE FN(loose)

#ifndef TY_FFT_SHUFFLES
#define TY_FFT_SHUFFLES
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define EACH_2(f) f(0), f(1)
#define EACH_4(f) EACH_2(f), f(2), f(3)
#define EACH_8(f) EACH_4(f), f(4), f(5), f(6), f(7)
#define EACH_16(f) EACH_8(f), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#define EACH(f) PASTE(EACH_, LANES)(f)
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, f) __builtin_shufflevector(a, b, EACH(f))
#else
#define SHUFFLE(a, b, f) __builtin_shuffle(a, b, (FN(index)){ EACH(f) })
#endif

/* Lanes of two vectors of pairs that have the real parts, and the imaginary ones, in TY_FFT_ORDER; and back. */
#define SECOND_(l) ((l) % (2 * PAIRS) >= PAIRS)
#define FIRST_PART(l) (2 * ((l) / (2 * PAIRS) * PAIRS + (l) % PAIRS) + (SECOND_(l) ? LANES : 0))
#define SECOND_PART(l) (FIRST_PART(l) + 1)
#define LOW_PAIR(q) ((q) / 2 / PAIRS * 2 * PAIRS + (q) / 2 % PAIRS + ((q) % 2 ? LANES : 0))
#define HIGH_PAIR(q) (LOW_PAIR(q) + PAIRS)
/* From the natural order to that of the lanes, and back. */
#define IN_ORDER(l) TY_FFT_ORDER(l, LANES, PAIRS)
#define NATURAL(e) ((e) % (LANES / 2) / PAIRS * 2 * PAIRS + (e) % (LANES / 2) % PAIRS + ((e) >= LANES / 2 ? PAIRS : 0))
#define BACKWARDS(l) (LANES - 1 - (l))
/* Within each 16 bytes: elements of the lower or upper halves of two vectors in turn, then pairs of them. */
#define SIXTEEN(l) ((l) / (2 * PAIRS) * 2 * PAIRS)
#define LOW_HALVES(l) (SIXTEEN(l) + (l) % (2 * PAIRS) / 2 + ((l) % 2 ? LANES : 0))
#define HIGH_HALVES(l) (LOW_HALVES(l) + PAIRS)
#define LOW_TWOS(l) (SIXTEEN(l) + (l) % 2 + ((l) % 4 >= 2 ? LANES : 0))
#define HIGH_TWOS(l) (LOW_TWOS(l) + 2)
/* Blocks of 16 bytes: of the first vector where bit h of their number is 0, of the second, h before, where it is 1. */
#define BLOCK(l) ((l) / (2 * PAIRS))
#define EVEN_BLOCKS(l, h) ((BLOCK(l) & (h)) ? LANES + (l) - (h)*2 * PAIRS : (l))
#define ODD_BLOCKS(l, h) ((BLOCK(l) & (h)) ? LANES + (l) : (l) + (h)*2 * PAIRS)
#define EVEN_BLOCKS_1(l) EVEN_BLOCKS(l, 1)
#define ODD_BLOCKS_1(l) ODD_BLOCKS(l, 1)
#define EVEN_BLOCKS_2(l) EVEN_BLOCKS(l, 2)
#define ODD_BLOCKS_2(l) ODD_BLOCKS(l, 2)
#define INLINED static inline __attribute__((always_inline))
#endif

typedef REAL_INT FN(index) __attribute__((vector_size(VEC_BYTES)));

/* LANES complex numbers to their parts, which change places when `swap`; in TY_FFT_ORDER. */
INLINED void FN(load_pairs)(const REAL *from, const bool swap, VEC *re, VEC *im) {
  const VEC low = (VEC) * (const LOOSE *)from, high = (VEC) * (const LOOSE *)(from + LANES);
  *(swap ? im : re) = SHUFFLE(low, high, FIRST_PART);
  *(swap ? re : im) = SHUFFLE(low, high, SECOND_PART);
}

INLINED void FN(store_pairs)(REAL *to, const bool swap, VEC re, VEC im) {
  const VEC a = swap ? im : re, b = swap ? re : im;
  *(LOOSE *)to = (LOOSE)SHUFFLE(a, b, LOW_PAIR);
  *(LOOSE *)(to + LANES) = (LOOSE)SHUFFLE(a, b, HIGH_PAIR);
}

/* A square of LANES vectors, in registers: squares within 16 bytes, then blocks of 16 bytes. */
INLINED void FN(transpose)(VEC *r) {
  VEC t[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i += 2) {
    t[i] = SHUFFLE(r[i], r[i + 1], LOW_HALVES);
    t[i + 1] = SHUFFLE(r[i], r[i + 1], HIGH_HALVES);
  }
#if PAIRS == 2
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i += 4) {
    r[i] = SHUFFLE(t[i], t[i + 2], LOW_TWOS);
    r[i + 1] = SHUFFLE(t[i], t[i + 2], HIGH_TWOS);
    r[i + 2] = SHUFFLE(t[i + 1], t[i + 3], LOW_TWOS);
    r[i + 3] = SHUFFLE(t[i + 1], t[i + 3], HIGH_TWOS);
  }
#else
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) r[i] = t[i];
#endif
#if VEC_BYTES > 16
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & (2 * PAIRS))) {
      const VEC a = r[i], b = r[i + 2 * PAIRS];
      r[i] = SHUFFLE(a, b, EVEN_BLOCKS_1);
      r[i + 2 * PAIRS] = SHUFFLE(a, b, ODD_BLOCKS_1);
    }
#endif
#if VEC_BYTES > 32
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & (4 * PAIRS))) {
      const VEC a = r[i], b = r[i + 4 * PAIRS];
      r[i] = SHUFFLE(a, b, EVEN_BLOCKS_2);
      r[i + 4 * PAIRS] = SHUFFLE(a, b, ODD_BLOCKS_2);
    }
#endif
}
