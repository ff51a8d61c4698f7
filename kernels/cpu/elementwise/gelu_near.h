/* gelu where |x| < 3.9375, by tables: Phi(-a), a = |x|, is a polynomial in the distance of a to the nearest eighth, whose
 * terms permutations take out of registers, for 21 operations of a vector in place of 38. Within 2 ulp; for halves, with
 * a shorter one, within 2e-5 of itself. What lies further out is collected and goes through ty_gelu_lanes(), so that an
 * element's result is the same whatever stands beside it. With AVX-512 only. */
#ifndef TY_KERNELS_CPU_GELU_NEAR_H
#define TY_KERNELS_CPU_GELU_NEAR_H

#include "gelu_lanes.h"

#if defined(__AVX512F__)
#include <stdint.h>

enum { GELU_BLOCK = 512 };

/* Terms of Phi(-(i / 8 + d)) for i of 0 to 31, the highest power of d first: interpolation between the zeros of a
 * Chebyshev polynomial on |d| <= 1/16, off by at most 7e-8 and 1.9e-5 of itself. */
static const float ty_gelu_near_terms[][32] = {
  { -0.00996660255f,  -0.00958092138f, -0.00846544933f,  -0.00673917634f,  -0.00458227191f,  -0.00221204106f,
    0.000145030179f,  0.00228077173f,  0.00402834686f,   0.00527777802f,   0.00598245021f,   0.00615663361f,
    0.00586549891f,   0.00521006528f,  0.00430996856f,   0.00328681106f,   0.00225031306f,   0.00128863857f,
    0.000463381031f,  -0.00019110211f, -0.00066490157f,  -0.000967505912f, -0.00112172496f,  -0.00115765538f,
    -0.00110746734f,  -0.00100145664f, -0.000865499664f, -0.000719808158f, -0.000578732055f, -0.000451292464f,
    -0.000342133018f, -0.000252625003f },
  { 0.0f,
    -0.00614677649f,
    -0.0118203359f,
    -0.0165982023f,
    -0.0201524217f,
    -0.0222805869f,
    -0.022920398f,
    -0.0221466757f,
    -0.0201524161f,
    -0.0172176696f,
    -0.013671522f,
    -0.00985283311f,
    -0.00607498642f,
    -0.00259860302f,
    0.000385520863f,
    0.00276275212f,
    0.0044913413f,
    0.00559174409f,
    0.00613135053f,
    0.00620747311f,
    0.00593105052f,
    0.00541286357f,
    0.00475329114f,
    0.0040358915f,
    0.00332453428f,
    0.00266340631f,
    0.00207904796f,
    0.0015835641f,
    0.00117827032f,
    0.000857218343f,
    0.000610243296f,
    0.000425355945f },
  { 0.0664903671f,    0.0649421141f,   0.0604168847f,   0.0532604903f,   0.0440081619f,   0.0333288498f,
    0.0219579414f,    0.0106271533f,   6.58891786e-09f, -0.00937994849f, -0.0171233453f,  -0.0230096262f,
    -0.0269828271f,   -0.0291315541f,  -0.0296578258f,  -0.0288400799f,  -0.0269954838f,  -0.0244458914f,
    -0.0214903913f,   -0.0183860827f,  -0.0153372651f,  -0.012492232f,   -0.00994608551f, -0.00774772512f,
    -0.00590913184f,  -0.00441533048f, -0.00323379552f, -0.00232251058f, -0.00163627986f, -0.00113122584f,
    -0.000767629943f, -0.000511410355f },
  { 0.0f,           0.0247398466f, 0.0483334996f,   0.0697228089f,  0.0880163088f, 0.102550276f,   0.112926513f,
    0.119024038f,   0.120985344f,  0.119180605f,    0.114155672f,   0.106570937f,  0.0971382037f,  0.0865623504f,
    0.0754926652f,  0.0644871444f, 0.0539909787f,   0.0443285555f,  0.0357071161f, 0.0282291379f,  0.0219103806f,
    0.0167004913f,  0.0125036491f, 0.00919729751f,  0.00664777169f, 0.0047222767f, 0.00329720136f, 0.00226313644f,
    0.00152719312f, 0.0010132977f, 0.000661115744f, 0.000424179132f },
  { -0.398942292f,    -0.395837694f,   -0.386668116f,   -0.37185508f,    -0.352065325f,    -0.328160971f,
    -0.301137418f,    -0.272055f,      -0.241970718f,   -0.211876646f,   -0.182649091f,    -0.155012265f,
    -0.1295176f,      -0.106538266f,   -0.086277321f,   -0.0687862784f,  -0.0539909676f,   -0.0417209864f,
    -0.0317396522f,   -0.0237719007f,  -0.0175283011f,  -0.0127241816f,  -0.00909356214f,  -0.00639812043f,
    -0.00443184841f,  -0.00302225794f, -0.00202904805f, -0.00134111883f, -0.000872682722f, -0.000559061533f,
    -0.000352595671f, -0.000218931644f },
  { 0.5f,
    0.450261772f,
    0.401293665f,
    0.353830248f,
    0.308537543f,
    0.265985519f,
    0.22662735f,
    0.190786958f,
    0.158655256f,
    0.130294517f,
    0.105649777f,
    0.0845657215f,
    0.066807203f,
    0.0520812795f,
    0.0400591567f,
    0.0303963609f,
    0.0227501318f,
    0.0167933069f,
    0.0122244731f,
    0.00877447519f,
    0.00620966544f,
    0.00433244836f,
    0.00297976332f,
    0.00202013738f,
    0.00134989806f,
    0.000889025279f,
    0.000577025057f,
    0.000369078451f,
    0.000232629085f,
    0.000144480728f,
    8.84172841e-05f,
    5.33123493e-05f },
};
static const float ty_gelu_near_half_terms[][32] = {
  { 0.0664514378f,    0.0649046823f,  0.0603838153f,   0.0532341637f,   0.0439902619f,   0.0333202071f,
    0.0219585076f,    0.0106360633f,  1.57430495e-05f, -0.0093593318f,  -0.0170999747f,  -0.0229855776f,
    -0.0269599147f,   -0.0291112028f, -0.0296409912f,  -0.0288272407f,  -0.026986694f,   -0.0244408585f,
    -0.0214885809f,   -0.0183868278f, -0.0153398626f,  -0.0124960123f,  -0.00995046739f, -0.00775224715f,
    -0.00591345783f,  -0.0044192425f, -0.00323717622f, -0.00232532225f, -0.00163854053f, -0.0011329886f,
    -0.000768966333f, -0.00051239715f },
  { 0.0f,          0.0247158352f,  0.0482873246f,   0.0696579665f,  0.0879375786f,  0.102463238f,   0.112836972f,
    0.11893753f,   0.120906621f,   0.119113341f,    0.114102267f,   0.106532447f,   0.0971144736f,  0.0865522027f,
    0.0754941702f, 0.0644979402f,  0.0540085249f,   0.0443504006f,  0.0357310697f,  0.0282533877f,  0.0219335482f,
    0.0167216361f, 0.0125222169f,  0.00921306293f,  0.00666075805f, 0.00473268051f, 0.00330532249f, 0.00226932205f,
    0.0015317956f, 0.00101664604f, 0.000663499406f, 0.000425840582f },
  { -0.398942262f,    -0.395837665f,   -0.386668086f,   -0.37185508f,    -0.352065325f,    -0.328160971f,
    -0.301137418f,    -0.272055f,      -0.241970733f,   -0.211876661f,   -0.182649091f,    -0.15501228f,
    -0.1295176f,      -0.106538281f,   -0.0862773284f,  -0.0687862858f,  -0.0539909713f,   -0.0417209864f,
    -0.0317396522f,   -0.0237719007f,  -0.0175282992f,  -0.0127241798f,  -0.00909356028f,  -0.0063981181f,
    -0.00443184609f,  -0.00302225607f, -0.00202904642f, -0.00134111755f, -0.000872681616f, -0.00055906066f,
    -0.000352595031f, -0.000218931149f },
  { 0.5f,           0.450261801f,    0.401293695f,  0.353830278f,   0.308537573f,    0.265985578f,    0.226627395f,
    0.190787002f,   0.158655286f,    0.130294546f,  0.105649799f,   0.0845657438f,   0.0668072104f,   0.0520812832f,
    0.0400591567f,  0.0303963572f,   0.0227501225f, 0.0167932957f,  0.012224461f,    0.00877446309f,  0.0062096538f,
    0.00433243811f, 0.00297975424f,  0.0020201297f, 0.00134989165f, 0.000889020215f, 0.000577021099f, 0.000369075424f,
    0.00023262683f, 0.000144479098f, 8.841612e-05f, 5.33115381e-05f },
};

#define TY_GELU_TERMS(table) ((int)(sizeof(table) / sizeof *(table)))

TY_GELU_INLINE __m512 ty_gelu_near(__m512 x, __m512 a, const float (*terms)[32], const int count) {
  const __m512 magic = _mm512_set1_ps(12582912.0f); /* adding it rounds to an integer, then in the lowest bits */
  const __m512 at = _mm512_fmadd_ps(a, _mm512_set1_ps(8), magic);
  const __m512 d = _mm512_fnmadd_ps(_mm512_sub_ps(at, magic), _mm512_set1_ps(0.125f), a);
  const __m512i i = _mm512_castps_si512(at); /* of which permutations look at five bits */
  __m512 p = _mm512_permutex2var_ps(_mm512_loadu_ps(terms[0]), i, _mm512_loadu_ps(terms[0] + 16));
#pragma GCC unroll 8
  for (int k = 1; k < count; k++)
    p = _mm512_fmadd_ps(p, d, _mm512_permutex2var_ps(_mm512_loadu_ps(terms[k]), i, _mm512_loadu_ps(terms[k] + 16)));
  return _mm512_fnmadd_ps(p, a, _mm512_max_ps(_mm512_setzero_ps(), x));
}

/* Of a vector; what is far goes to the end of `far`, *where says which. */
TY_GELU_INLINE __m512 ty_gelu_collect(__m512 x, float *far, int *count, __mmask16 *where, const bool half) {
  const __m512 a = _mm512_abs_ps(x);
  const __mmask16 m = _mm512_cmp_ps_mask(a, _mm512_set1_ps(3.9375f), _CMP_NLT_UQ); /* NaN too */
  *where = m;
  _mm512_storeu_ps(far + *count, _mm512_maskz_compress_ps(m, x)); /* always: a jump would be guessed wrong */
  *count += __builtin_popcount(m);
  return half ? ty_gelu_near(x, a, ty_gelu_near_half_terms, TY_GELU_TERMS(ty_gelu_near_half_terms))
              : ty_gelu_near(x, a, ty_gelu_near_terms, TY_GELU_TERMS(ty_gelu_near_terms));
}

/* y of n <= GELU_BLOCK elements, which may be x. */
TY_GELU_INLINE void ty_gelu_block(float *y, const float *x, int n, const bool half) {
  float far[GELU_BLOCK + 16];
  __mmask16 where[GELU_BLOCK / 16];
  int count = 0, i = 0;
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(y + i, ty_gelu_collect(_mm512_loadu_ps(x + i), far, &count, &where[i / 16], half));
  if (i < n) {
    const __mmask16 rest = (__mmask16)((1u << (n - i)) - 1);
    const __m512 v = ty_gelu_collect(_mm512_maskz_loadu_ps(rest, x + i), far, &count, &where[i / 16], half);
    _mm512_mask_storeu_ps(y + i, rest, v);
  }
  if (!count) return;
  for (i = 0; i < count; i += 16) _mm512_storeu_ps(far + i, ty_gelu_lanes(_mm512_loadu_ps(far + i), half));
  const float *from = far;
  for (i = 0; i < n; i += 16) {
    const __mmask16 m = where[i / 16];
    _mm512_mask_storeu_ps(y + i, m, _mm512_maskz_expand_ps(m, _mm512_loadu_ps(from)));
    from += __builtin_popcount(m);
  }
}
#endif

#endif
