/* Decoding of block-quantized tensors: dequantize, and rows of them by index (embedding_quantized). */
#include "dequantize.h"

#include "../../quant_blocks.h"
#include "../indexing/indexing.h"

/* Each decodes 32 elements from a multiple of 32 in its block. */

static void decode_q8_0(const ty_q8_0 *b, float *restrict out) {
  float d = ty_block_f16(b->d);
  for (int i = 0; i < 32; i++) out[i] = d * b->q[i];
}

static void decode_q4_0(const ty_q4_0 *b, float *restrict out) {
  float d = ty_block_f16(b->d);
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)((b->q[i] & 15) - 8);
    out[i + 16] = d * (float)((b->q[i] >> 4) - 8);
  }
}

static void decode_q2_k(const ty_q2_k *b, int part, float *restrict out) {
  const uint8_t *q = b->q + part / 4 * 32;
  float d = ty_block_f16(b->d), dmin = ty_block_f16(b->dmin);
  for (int j = 0; j < 2; j++) {
    uint8_t s = b->scale[part * 2 + j];
    float scaled = d * (float)(s & 15), m = dmin * (float)(s >> 4);
    for (int i = 16 * j; i < 16 * j + 16; i++) out[i] = scaled * (float)(q[i] >> part % 4 * 2 & 3) - m;
  }
}

static void decode_q3_k(const ty_q3_k *b, int part, float *restrict out) {
  const uint8_t *q = b->q + part / 4 * 32;
  float d = ty_block_f16(b->d);
  for (int j = 0; j < 2; j++) {
    float scaled = d * (float)ty_q3_k_scale(b->scale, part * 2 + j);
    for (int i = 16 * j; i < 16 * j + 16; i++) {
      int code = (q[i] >> part % 4 * 2 & 3) | (b->high[i] >> part & 1) << 2;
      out[i] = scaled * (float)(code - 4);
    }
  }
}

static void decode_q4_k(const ty_q4_k *b, int part, float *restrict out) {
  int scale, min, shift = part & 1 ? 4 : 0;
  ty_q4_k_part(b->scale, part, &scale, &min);
  float d = ty_block_f16(b->d) * (float)scale, m = ty_block_f16(b->dmin) * (float)min;
  const uint8_t *q = b->q + part / 2 * 32;
  for (int i = 0; i < 32; i++) out[i] = d * (float)(q[i] >> shift & 15) - m;
}

static void decode_q6_k(const ty_q6_k *b, int part, float *restrict out) {
  int half = part / 4, quarter = part % 4, shift = quarter < 2 ? 0 : 4;
  const uint8_t *low = b->low + half * 64 + quarter % 2 * 32, *high = b->high + half * 32;
  float d = ty_block_f16(b->d);
  for (int j = 0; j < 2; j++) {
    float scaled = d * b->scale[part * 2 + j];
    for (int i = 16 * j; i < 16 * j + 16; i++) {
      int q = (low[i] >> shift & 15) | (high[i] >> 2 * quarter & 3) << 4;
      out[i] = scaled * (float)(q - 32);
    }
  }
}

static void decode_nf4(const ty_nf4 *b, float absmax, int half, float *restrict out) {
  static const float level[16] = { TY_NF4_LEVELS };
#if defined(__AVX512F__)
  const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(level), _mm512_set1_ps(absmax));
  for (int i = 0; i < 32; i += 16) { /* only the low four bits of an index count */
    __m128i q = _mm_loadu_si128((const __m128i *)(b->q + i));
    if (half) q = _mm_srli_epi16(q, 4);
    _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(q), scaled));
  }
#elif defined(__AVX2__)
  const __m256 unit = _mm256_set1_ps(absmax);
  const __m256 low = _mm256_mul_ps(_mm256_loadu_ps(level), unit),
               high = _mm256_mul_ps(_mm256_loadu_ps(level + 8), unit);
  for (int i = 0; i < 32;
       i += 8) { /* bit 3 of an index chooses the table, and is moved to where a blend looks for it */
    __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(b->q + i)));
    if (half) q = _mm256_srli_epi32(q, 4);
    __m256 first = _mm256_permutevar8x32_ps(low, q), second = _mm256_permutevar8x32_ps(high, q);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(q, 28));
    _mm256_storeu_ps(out + i, _mm256_blendv_ps(first, second, upper));
  }
#else
  float scaled[16];
  for (int i = 0; i < 16; i++) scaled[i] = absmax * level[i];
  int shift = half ? 4 : 0;
  for (int i = 0; i < 32; i++) out[i] = scaled[b->q[i] >> shift & 15];
#endif
}

static const int8_t e2m1_twice[16] = { TY_E2M1_TWICE };

static void decode_mxfp4(const ty_mxfp4 *b, float *restrict out) {
  float d = ty_e8m0_half(b->e);
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)e2m1_twice[b->q[i] & 15];
    out[i + 16] = d * (float)e2m1_twice[b->q[i] >> 4];
  }
}

static void decode_nvfp4(const ty_nvfp4 *b, float factor, int half, float *restrict out) {
  for (int j = 2 * half; j < 2 * half + 2; j++, out += 16) {
    float d = ty_nvfp4_half(factor, b, j);
    for (int i = 0; i < 8; i++) {
      out[i] = d * (float)e2m1_twice[b->q[8 * j + i] & 15];
      out[i + 8] = d * (float)e2m1_twice[b->q[8 * j + i] >> 4];
    }
  }
}

void TY_KERNEL(decode_row)(ty_dtype dtype, const void *row, int64_t columns, int64_t begin, int64_t end, float *out) {
  if (dtype == TY_NF4) {
    const ty_nf4 *blocks = (const ty_nf4 *)(const void *)((const char *)row + ty_nf4_head(columns));
    for (int64_t at = begin; at < end; at += 32, out += 32) {
      const ty_nf4 *b = blocks + at / 64;
      decode_nf4(b, ty_nf4_absmax(row, at / 64, b), at / 32 % 2, out);
    }
    return;
  }
  if (dtype == TY_NVFP4) {
    const ty_nvfp4 *blocks = (const ty_nvfp4 *)(const void *)((const char *)row + TY_NVFP4_HEAD);
    for (int64_t at = begin; at < end; at += 32, out += 32)
      decode_nvfp4(blocks + at / 64, ty_nvfp4_factor(row), at / 32 % 2, out);
    return;
  }
  for (int64_t at = begin; at < end; at += 32, out += 32) {
    switch (dtype) {
      case TY_MXFP4: decode_mxfp4((const ty_mxfp4 *)row + at / 32, out); break;
      case TY_Q8_0: decode_q8_0((const ty_q8_0 *)row + at / 32, out); break;
      case TY_Q4_0: decode_q4_0((const ty_q4_0 *)row + at / 32, out); break;
      case TY_Q2_K: decode_q2_k((const ty_q2_k *)row + at / 256, at / 32 % 8, out); break;
      case TY_Q3_K: decode_q3_k((const ty_q3_k *)row + at / 256, at / 32 % 8, out); break;
      case TY_Q4_K: decode_q4_k((const ty_q4_k *)row + at / 256, at / 32 % 8, out); break;
      default: decode_q6_k((const ty_q6_k *)row + at / 256, at / 32 % 8, out);
    }
  }
}

/* ---- whole tensors ---- */

typedef struct job {
  ty_dtype dtype;
  const char *from;
  float *to;
  int64_t columns, row_bytes;
  const ty_view *index;
} job;

enum { PIECE = 4096 }; /* elements decoded at a time */

static void decode_pieces(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  int64_t pieces = (j->columns + PIECE - 1) / PIECE;
  for (int64_t i = begin; i < end; i++) {
    int64_t row = i / pieces, at = i % pieces * PIECE, stop = at + PIECE < j->columns ? at + PIECE : j->columns,
            from = row;
    if (j->index) { from = ty_index_at(j->index->data, row, j->index->dtype == TY_I64); }
    TY_KERNEL(decode_row)(j->dtype, j->from + from * j->row_bytes, j->columns, at, stop, j->to + row * j->columns + at);
  }
}

static void decode_rows(const ty_view *x, const ty_view *index, const ty_view *out) {
  if (!out->count) return;
  int64_t columns = x->size[x->ndim - 1];
  job j = { .dtype = (ty_dtype)x->dtype,
            .from = x->data,
            .to = out->data,
            .columns = columns,
            .row_bytes = ty_row_bytes((ty_dtype)x->dtype, columns),
            .index = index };
  int64_t rows = out->count / columns;
  ty_parallel_for(rows * ((columns + PIECE - 1) / PIECE), 1 + 16384 / columns, decode_pieces, &j);
}

bool TY_KERNEL(dequantize)(const ty_kernel_args *k) {
  decode_rows(k->in[0], NULL, k->out[0]);
  return true;
}

bool TY_KERNEL(embedding_quantized)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *index = k->in[1];
  if (!ty_index_check(index, x->size[0])) return false;
  decode_rows(x, index, k->out[0]);
  return true;
}
