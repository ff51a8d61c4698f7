/* Adam with moments of 8 bits, for optim.c: the values of the codes are in moment_codes.h. */
#include "../../moment_codes.h"

#define QBLOCK TY_CODED_TOGETHER

typedef ty_moment_codes codes;

/* out = table[index], index in [0, 8). */
static inline void lookup8(float *restrict out, const float *restrict table, const int32_t *restrict index) {
#if defined(__AVX512F__)
  __m512 t = _mm512_broadcast_f32x8(_mm256_loadu_ps(table));
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(_mm512_loadu_si512(index), t));
#else
  FOR_STRIP out[j] = table[index[j]];
#endif
}

static inline void decode(float *restrict x, const uint8_t *restrict q, const codes *c, float most) {
#if defined(__AVX512F__)
  __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)q));
  _mm512_storeu_ps(x, _mm512_mul_ps(_mm512_i32gather_ps(code, c->value, 4), _mm512_set1_ps(most)));
#else
  FOR_STRIP x[j] = c->value[q[j]] * most;
#endif
}

/* The nearest codes of x * inverse. */
static inline void encode(uint8_t *restrict q, const float *restrict x, const codes *c, float inverse) {
  float y[STRIP], t[STRIP], factor[STRIP], offset[STRIP], last[STRIP];
  int32_t k[STRIP];
  FOR_STRIP {
    y[j] = fabsf(x[j] * inverse);
    /* log10 by the bits, less than 0.03 too small and 0.28 taken off: the decade, or the one below it */
    float l = (float)(int32_t)ty_bits_f32(y[j]) * (0.30103f / 8388608) + (7 - 0.30103f * 127 - 0.28f);
    k[j] = l < 0 ? 0 : l < 7 ? (int32_t)l : 7;
  }
  FOR_STRIP k[j] = k[j] < 7 ? k[j] : 6;
  lookup8(t, c->least + 1, k);
  FOR_STRIP k[j] += y[j] >= t[j];
  lookup8(factor, c->factor, k);
  lookup8(offset, c->offset, k);
  lookup8(last, c->last, k);
  const int32_t middle = c->has_sign ? 127 : 0;
  FOR_STRIP {
    float code = y[j] * factor[j] + offset[j];
    code = code < last[j] ? code : last[j]; /* NaN too */
    code = y[j] < c->zero ? 0 : code;
    int32_t magnitude = (int32_t)code;
    if (c->has_sign && x[j] < 0) magnitude = magnitude > 127 ? -127 : -magnitude;
    q[j] = (uint8_t)(middle + magnitude);
  }
}

/* The largest magnitude; NaN when there is one. */
static inline float largest(const float *x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = ty_bits_f32(x[i]) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return ty_from_bits_f32(most);
}

/* Denormal blocks become 0: their inverse would be infinite. */
static inline float inverse(float most) { return most < 0x1p-126f ? 0 : 1 / most; }

typedef struct ctx_8bit {
  step_ctx step;
  codes first, second;
} ctx_8bit;

/* One block of n elements; n a multiple of STRIP but for the rest of the tensor, which is padded. */
static void step_8bit(const ctx_8bit *c, const ty_view *const *v, const ty_view *scales, int64_t from, int64_t n) {
  float pb[QBLOCK], gb[QBLOCK], ab[QBLOCK], first[QBLOCK], second[QBLOCK], *x[ROLES] = { NULL };
  uint8_t q1[QBLOCK] = { 0 }, q2[QBLOCK] = { 0 };
  int64_t blocks = scales->count / 2, block = from / QBLOCK, strips = (n + STRIP - 1) / STRIP * STRIP;
  float *most = scales->data;
  memcpy(q1, at(v[FIRST], from), (size_t)n);
  memcpy(q2, at(v[SECOND], from), (size_t)n);
  for (int64_t i = 0; i < strips; i += STRIP) {
    decode(first + i, q1 + i, &c->first, most[block]);
    decode(second + i, q2 + i, &c->second, most[blocks + block]);
  }
  x[P] = load_f32(v[P], from, n, pb);
  x[G] = load_f32(v[G], from, n, gb);
  x[FIRST] = first;
  x[SECOND] = second;
  x[AVERAGE] = v[AVERAGE] ? load_f32(v[AVERAGE], from, n, ab) : NULL;
  f32_run(f32_adam, x, n, &c->step);
  store_f32(v[P], from, n, x[P]);
  if (v[AVERAGE]) store_f32(v[AVERAGE], from, n, x[AVERAGE]);

  most[block] = largest(first, n);
  most[blocks + block] = largest(second, n);
  float by1 = inverse(most[block]), by2 = inverse(most[blocks + block]);
  for (int64_t i = 0; i < strips; i += STRIP) {
    encode(q1 + i, first + i, &c->first, by1);
    encode(q2 + i, second + i, &c->second, by2);
    /* A second moment of 0 beside a first one that is not would make the next step huge. */
    FOR_STRIP q2[i + j] = second[i + j] > 0 && q2[i + j] == 0 ? 1 : q2[i + j];
  }
  memcpy(at(v[FIRST], from), q1, (size_t)n);
  memcpy(at(v[SECOND], from), q2, (size_t)n);
}

static void range_8bit(void *context, int64_t begin, int64_t end) {
  const ctx_8bit *c = context;
  const multi *m = &c->step.m;
  for (int64_t i = multi_find(m, begin), u = begin; u < end; i++) {
    const ty_view *const *in = m->in + i;
    const ty_view *v[ROLES] = { in[0],        in[m->n], in[2 * m->n],
                                in[3 * m->n], NULL,     c->step.p->averaged ? in[5 * m->n] : NULL };
    for (; u < end && u < m->start[i + 1]; u++) {
      int64_t from = (u - m->start[i]) * QBLOCK, left = v[P]->count - from;
      step_8bit(c, v, in[4 * m->n], from, left < QBLOCK ? left : QBLOCK);
    }
  }
}

/* in: n parameters, n gradients, n first moments (u8), n second moments (u8), n scales (f32 [2, blocks]), with averaged
 * n averages. */
bool TY_KERNEL(adam_8bit)(const ty_kernel_args *k) {
  ty_p_optim p;
  if (!step_numbers(k, &p)) return true;
  ctx_8bit c = { .step = { .p = &p } };
  adam_factors(&c.step);
  ty_make_moment_codes(&c.first, true);
  ty_make_moment_codes(&c.second, false);
  if (!multi_init(&c.step.m, k, k->nin / (p.averaged ? 6 : 5), QBLOCK)) return false;
  ty_parallel_for_all(c.step.m.start[c.step.m.n], GRAIN / QBLOCK, range_8bit, &c);
  multi_free(&c.step.m);
  return true;
}

#undef QBLOCK
