/* linear_codebook for few rows of x: a code is the place of its entry, which is multiplied as it is looked up, so that the
 * weight is never written anywhere. The codebook stays in the first cache. Sums of the entries with x made once and
 * looked up instead would save the multiplications, but their tables, a number for each code and place in k, do not stay
 * there, and with entries of 4 or 8 elements the loads, of which there are as many, are what takes the time: it pays
 * where one instruction looks up 64 bytes, codebook_lookup.h. */
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "../cpu.h"

enum { FEW = 8, AHEAD = 1024 };

typedef struct job {
  const float *x, *codebook;
  const uint8_t *codes;
  float *y;
  int64_t rows, n, k, d, places; /* places: codes of a row */
} job;

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

static inline float sum_of(const eight *v) {
  float sum[4];
  for (int i = 0; i < 4; i++) sum[i] = (*v)[i] + (*v)[i + 4];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Elements 8 i to 8 i + 7 of eight codes, d of 1, 2, 4 or 8, in a word. */
static inline __attribute__((always_inline)) void entries_of(const float *codebook, uint64_t word, const int d, int i,
                                                             eight *to) {
  eight v;
  if (d == 8) {
    *to = *(const eight *)(codebook + 8 * (word >> 8 * i & 255));
    return;
  }
  if (d == 4) {
    four low = *(const four *)(codebook + 4 * (word >> 16 * i & 255));
    four high = *(const four *)(codebook + 4 * (word >> (16 * i + 8) & 255));
#if defined(__AVX__)
    *to = (eight)_mm256_set_m128((__m128)high, (__m128)low);
#else
    for (int j = 0; j < 4; j++) v[j] = low[j], v[j + 4] = high[j];
    *to = v;
#endif
    return;
  }
  for (int j = 0; j < 8 / d; j++)
    for (int e = 0; e < d; e++) v[j * d + e] = codebook[d * (int)(word >> 8 * (8 / d * i + j) & 255) + e];
  *to = v;
}

/* Rows [begin, end) of the weight with `rows` rows of x. */
static inline __attribute__((always_inline)) void rows_by(const job *t, int64_t begin, int64_t end, const int rows,
                                                          const int d) {
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const uint8_t *code = t->codes + j * t->places;
    eight sum[FEW], more = { 0 };
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = (eight){ 0 };
    int64_t p = 0;
    for (; p + 8 <= t->places; p += 8) {
      uint64_t word;
      memcpy(&word, code + p, sizeof word);
      __builtin_prefetch(code + p + AHEAD);
      const float *x = t->x + p * d;
#pragma GCC unroll 8
      for (int i = 0; i < d; i++) {
        eight w;
        entries_of(t->codebook, word, d, i, &w);
        if (rows == 1 && i % 2) { /* one chain would wait for itself */
          more += w * *(const eight *)(x + 8 * i);
          continue;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] += w * *(const eight *)(x + r * t->k + 8 * i);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      float rest = 0;
      for (int64_t q = p; q < t->places; q++)
        for (int e = 0; e < d; e++) rest += t->codebook[code[q] * d + e] * t->x[r * t->k + q * d + e];
      if (r == 0) sum[0] += more;
      t->y[r * t->n + j] = sum_of(&sum[r]) + rest;
    }
  }
}

/* For entries of any length. */
static void rows_any(const job *t, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end && !ty_interrupted; j++)
    for (int64_t r = 0; r < t->rows; r++) {
      const uint8_t *code = t->codes + j * t->places;
      const float *x = t->x + r * t->k;
      float sum = 0;
      for (int64_t p = 0; p < t->places; p++, x += t->d) {
        const float *entry = t->codebook + code[p] * t->d;
        float part = 0;
        for (int64_t e = 0; e < t->d; e++) part += entry[e] * x[e];
        sum += part;
      }
      t->y[r * t->n + j] = sum;
    }
}

static void some_rows(void *context, int64_t begin, int64_t end) {
  const job *t = context;
#define ROWS(count, d)                \
  case count:                         \
    rows_by(t, begin, end, count, d); \
    return;
#define SIZE(d)                                                                                                  \
  case d:                                                                                                        \
    switch (t->rows) { ROWS(1, d) ROWS(2, d) ROWS(3, d) ROWS(4, d) ROWS(5, d) ROWS(6, d) ROWS(7, d) ROWS(8, d) } \
    break;
  switch (t->d) { SIZE(2) SIZE(4) SIZE(8) }
#undef SIZE
#undef ROWS
  rows_any(t, begin, end);
}

#if defined(__AVX512F__)
#include "codebook_lookup.h"
#endif

/* in: x f32 [..., k], codes u8 [n, k / d], codebook f32 [entries, d]; at most FEW rows of x. */
bool TY_KERNEL(linear_codebook)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *codes = k->in[1], *codebook = k->in[2], *out = k->out[0];
  if (!out->count) return true;
  job t = { .x = x->data,
            .codebook = codebook->data,
            .codes = codes->data,
            .y = out->data,
            .n = codes->size[0],
            .k = x->size[x->ndim - 1],
            .d = codebook->size[1],
            .places = codes->size[1] };
  t.rows = out->count / t.n;
  if (codebook->size[0] < 256) {
    uint8_t most = 0;
    for (int64_t i = 0; i < codes->count; i++) most = t.codes[i] > most ? t.codes[i] : most;
    if (codes->count && most >= codebook->size[0])
      return ty_fail(TY_EINDEX, "linear_codebook: codes: code %d is out of range for a codebook of %lld", (int)most,
                     (long long)codebook->size[0]);
  }
#if defined(__AVX512F__)
  bool ok;
  if (by_lookup(&t, codebook->size[0], &ok)) return ok;
#endif
  ty_parallel_for(t.n, 1 + 65536 / (t.k + 1) / t.rows, some_rows, &t);
  return true;
}
