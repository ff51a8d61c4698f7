/* Discrete Fourier and cosine transforms along one dimension: what the kernels of all devices compute.
 *
 * Every kernel sees its input as [outer, length, inner] and its output as [outer, out, inner]; complex numbers are
 * pairs. Positions of the input beyond those that the transform takes are ignored, missing ones are zeros; the same goes
 * for the output. In that form each kernel is the transpose of another, with the same parameters but the lengths.
 *
 *   fft_line    y[k] = scale sum over i < n of x[i] w^(i k), w = exp(-2 pi i / n), or its conjugate when `inverse`
 *   rfft_line   the same of real x for k <= n / 2, times weight(k); the conjugate of that when `inverse`
 *   irfft_line  real y[i] = scale sum over k <= n / 2 of Re(weight(k) x[k] w^(-i k)), of conjugates of x when `inverse`
 *   dct_line    y[k] = scale weight(k) sum over i < n of x[i] cos(pi k (2 i + 1) / (2 n)), weight(0) = first, else 1;
 *               `inverse`: y[i] = scale sum over k < n of weight(k) x[k] cos(pi k (2 i + 1) / (2 n))
 *   fft_conv_lines   y[.., c, i] = sum over j of k[c, j] x[.., c, i + start - j], of i + start + j when `turned`
 *   fft_conv_kernel  dk[c, j] = sum over all lines and positions i of g[.., c, i] x[.., c, i - start - j]
 *
 * weight(k) of the real ones is 1, or, when `doubled`, 2 but for k = 0 and k = n / 2: the other half is not there. */
#ifndef TY_KERNELS_FFT_H
#define TY_KERNELS_FFT_H

#include "params.h"

typedef enum ty_fft_kind { TY_FFT_COMPLEX, TY_FFT_REAL, TY_FFT_HALF, TY_FFT_COSINE } ty_fft_kind;

/* Makhoul 1980: even positions in order, then odd ones backwards, turn a cosine into a Fourier transform. */
#define TY_FFT_FOLDED(i, n) ((i) % 2 == 0 ? (i) / 2 : (n)-1 - (i) / 2)

#endif
