/* What is known of transforms of one length before the first number is seen: factors and tables of roots of unity, which
 * are computed in extended precision. Plans are kept from call to call.
 *
 * Two ways to transform. `lanes`: several lines at once, one in each lane of the vectors, by passes over mixed radices
 * (Stockham). `line`: one line as a matrix [n1, n2], whose columns, then rows, are lines in the lanes of vectors.
 * Lengths with a large prime factor go through a convolution with a chirp (Bluestein 1970), by transforms of a length
 * that has none. */
#ifndef TY_KERNELS_FFT_PLAN_H
#define TY_KERNELS_FFT_PLAN_H

#include "base.h"

enum {
  TY_FFT_PASSES = 40,
  TY_FFT_LARGEST = 61 /* prime factors beyond it are large */
};

typedef struct ty_fft_lanes {
  int64_t n, room; /* room: elements that the buffers must hold */
  int passes;
  int radix[TY_FFT_PASSES];
  const void *twiddle[TY_FFT_PASSES]; /* [n / (radices so far), radix - 1] complex: powers of the root of each p */
  const void *circle[TY_FFT_PASSES];  /* [radix] complex, for radices without a pass of their own */
  struct ty_fft_lanes *inner;         /* a chirp's; NULL: none is needed */
  const void *chirp;                  /* [n] complex: exp(-i pi k^2 / n) */
  const void *spectrum;               /* [inner->n] complex: of the conjugate chirp, over inner->n */
} ty_fft_lanes;

typedef struct ty_fft_line {
  int64_t n, n1, n2;
  ty_fft_lanes *first, *second; /* of n1 and n2 */
  const void *between;          /* [blocks of columns, n1, 2, lanes]: exp(-2 pi i column k / n) */
  struct ty_fft_line *inner;    /* a chirp's, as above */
  const void *chirp, *spectrum;
} ty_fft_line;

typedef struct ty_fft_key {
  int64_t n;    /* positions of the signal */
  int lanes;    /* elements of a vector */
  bool wide;    /* f64 */
  bool by_line; /* or by lanes */
  bool real;    /* the signal, or a cosine transform's */
  bool cosine;
} ty_fft_key;

typedef struct ty_fft_plan {
  ty_fft_key key;
  int64_t length;      /* of the complex transform */
  bool packed;         /* two neighbours of a real signal make one complex number: length = n / 2 */
  ty_fft_lanes *lanes; /* or NULL */
  ty_fft_line *line;   /* or NULL */
  const void *roots;   /* packed: [length / 2 + 1] complex exp(-2 pi i k / n) */
  const void *quarter; /* cosine: [n / 2 + 1] complex exp(-i pi k / (2 n)) */
} ty_fft_plan;

/* NULL after ty_fail(). */
const ty_fft_plan *ty_fft_plan_open(const ty_fft_key *key);
void ty_fft_plan_close(const ty_fft_plan *plan);

/* Whether a line of n complex numbers fills the lanes when it is cut into a matrix. */
bool ty_fft_cuts_well(int64_t n, int lanes);

/* Which of a block of `lanes` neighbouring complex numbers lane l has, when two vectors of pairs are taken apart within
 * each 16 bytes of them, `pairs` of which there are. */
#define TY_FFT_ORDER(l, lanes, pairs) \
  ((l) / (2 * (pairs)) * (pairs) + (l) % (pairs) + ((l) % (2 * (pairs)) < (pairs) ? 0 : (lanes) / 2))

#endif
