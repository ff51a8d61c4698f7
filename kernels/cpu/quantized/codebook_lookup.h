/* linear_codebook with the permutations of bytes of AVX-512 VBMI. The products of all entries with the numbers of x
 * that a code stands beside are made once; those of LINE places become integers of 24 bits, times a power of two by
 * the largest of them, and are looked up 64 rows at a time. Included by codebook.c. */
#include <math.h>

#include "../../half.h"

#pragma GCC push_options
#pragma GCC target("avx512vbmi")
#include "byte_lookup.h"

enum {
  ENTRIES = 256,
  LINE = 64,                    /* codes of a row that are read at once */
  TABLE = BYTE_PARTS * ENTRIES, /* bytes of a place */
  TALL = 2,                     /* blocks of 64 rows that share the loads of tables */
  PIECE = 4 * TALL,             /* blocks for which a table stays in the second cache */
  ENOUGH = 512,                 /* rows of the weight: tables are as much work as half of so many */
  LIMIT = 127 << 16             /* of an integer */
};

typedef struct lookup {
  const job *t;
  int64_t lines, blocks; /* of places, of rows */
  float *book;           /* [d][ENTRIES], zeros where there are fewer */
  uint8_t *table;        /* [rows of x][places][TABLE] */
  float *factor;         /* [rows of x][lines] */
  bool odd;              /* products that do not become integers so */
  bool failed;
} lookup;

/* Tables of a line of places for a row of x. products: room for [LINE][ENTRIES]. */
static void tables_of(lookup *u, int64_t r, int64_t line, float *products) {
  const job *t = u->t;
  const int64_t first = line * LINE, places = t->places - first < LINE ? t->places - first : LINE;
  const __m512i size_bits = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t p = 0; p < places; p++) {
    const float *x = t->x + r * t->k + (first + p) * t->d;
    for (int e = 0; e < ENTRIES; e += 64) {
      __m512 sum[4];
      for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
      for (int64_t k = 0; k < t->d; k++)
        for (int i = 0; i < 4; i++)
          sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(x[k]), _mm512_loadu_ps(u->book + k * ENTRIES + e + 16 * i), sum[i]);
      for (int i = 0; i < 4; i++) {
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(sum[i]), size_bits));
        _mm512_storeu_ps(products + p * ENTRIES + e + 16 * i, sum[i]);
      }
    }
  }
  /* Sizes have the order of their bits; NaN and infinity come out largest. */
  const float largest = ty_from_bits_f32((uint32_t)_mm512_reduce_max_epi32(most));
  if (!(largest <= 0x1p100f) || (largest > 0 && largest < 0x1p-90f)) {
    __atomic_store_n(&u->odd, true, __ATOMIC_RELAXED);
    return;
  }
  int exponent = 0;
  frexpf(largest / LIMIT, &exponent);
  const float factor = largest > 0 ? ldexpf(1, exponent) : 1;
  u->factor[r * u->lines + line] = factor;
  const __m512 inverse = _mm512_set1_ps(1 / factor);
  uint8_t *to = u->table + (r * t->places + first) * TABLE;
  for (int64_t p = 0; p < places; p++, to += TABLE)
    for (int e = 0; e < ENTRIES; e += 64) {
      __m512i q[4];
      for (int i = 0; i < 4; i++)
        q[i] = _mm512_add_epi32(
            _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(products + p * ENTRIES + e + 16 * i), inverse)),
            _mm512_set1_epi32(1 << 23));
      split_integers(q, to + e, ENTRIES);
    }
}

static void make_tables(void *context, int64_t begin, int64_t end) {
  lookup *u = context;
  const size_t bytes = sizeof(float) * LINE * ENTRIES;
  float *products = ty_scratch_alloc(bytes);
  if (!products) {
    __atomic_store_n(&u->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t i = begin; i < end && !ty_interrupted; i++) tables_of(u, i / u->lines, i % u->lines, products);
  ty_scratch_free(products, bytes);
}

/* Brings two halves of sixteen rows together; four times it turns them round. Lanes of 16 bytes stay 16 places. */
static inline __attribute__((always_inline)) void interleave(const __m512i v[16], __m512i w[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    w[2 * i] = _mm512_unpacklo_epi8(v[i], v[i + 8]);
    w[2 * i + 1] = _mm512_unpackhi_epi8(v[i], v[i + 8]);
  }
}

/* Codes of 64 rows by places: to [LINE][64]; zeros behind the last place, the last row once more behind it. */
static void turn_codes(const job *t, int64_t row, int64_t first, uint8_t (*to)[BYTE_ROWS]) {
  const __mmask64 there = t->places - first >= LINE ? ~(__mmask64)0 : ((__mmask64)1 << (t->places - first)) - 1;
  for (int64_t from = 0; from < BYTE_ROWS; from += 16) {
    __m512i v[16], w[16];
    for (int i = 0; i < 16; i++) {
      const int64_t at = row + from + i < t->n ? row + from + i : t->n - 1;
      v[i] = _mm512_maskz_loadu_epi8(there, t->codes + at * t->places + first);
    }
    interleave(v, w);
    interleave(w, v);
    interleave(v, w);
    interleave(w, v);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      _mm_storeu_si128((__m128i *)(void *)(to[i] + from), _mm512_castsi512_si128(v[i]));
      _mm_storeu_si128((__m128i *)(void *)(to[16 + i] + from), _mm512_extracti32x4_epi32(v[i], 1));
      _mm_storeu_si128((__m128i *)(void *)(to[32 + i] + from), _mm512_extracti32x4_epi32(v[i], 2));
      _mm_storeu_si128((__m128i *)(void *)(to[48 + i] + from), _mm512_extracti32x4_epi32(v[i], 3));
    }
  }
}

/* Adds the sums of TALL blocks over a line of places to y [TALL][64]. */
static void add_line(const uint8_t (*codes)[LINE][BYTE_ROWS], const uint8_t *table, int64_t places, float factor,
                     float *y) {
  byte_sums s[TALL];
#pragma GCC unroll 2
  for (int k = 0; k < TALL; k++)
#pragma GCC unroll 3
    for (int part = 0; part < BYTE_PARTS; part++) s[k].both[part] = s[k].odd[part] = _mm512_setzero_si512();
  for (int64_t p = 0; p < places; p++, table += TABLE) {
    const __m512i code[TALL] = { load(codes[0][p]), load(codes[1][p]) };
    const __mmask64 high[TALL] = { _mm512_movepi8_mask(code[0]), _mm512_movepi8_mask(code[1]) };
#pragma GCC unroll 3
    for (int part = 0; part < BYTE_PARTS; part++) {
      const uint8_t *at = table + part * ENTRIES;
      __m512i a = load(at), b = load(at + 64), c = load(at + 128), d = load(at + 192);
      __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d)); /* kept for both blocks */
#pragma GCC unroll 2
      for (int k = 0; k < TALL; k++)
        add_part(s + k, part,
                 _mm512_mask_blend_epi8(high[k], _mm512_permutex2var_epi8(a, code[k], b),
                                        _mm512_permutex2var_epi8(c, code[k], d)));
    }
  }
  for (int k = 0; k < TALL; k++) {
    __m512 sum[4];
    in_order(s + k, (int32_t)places << 23, sum);
    for (int i = 0; i < 4; i++, y += 16)
      _mm512_storeu_ps(y, _mm512_fmadd_ps(sum[i], _mm512_set1_ps(factor), _mm512_loadu_ps(y)));
  }
}

static void look_up(void *context, int64_t begin, int64_t end) {
  const lookup *u = context;
  const job *t = u->t;
  uint8_t codes[TALL][LINE][BYTE_ROWS] __attribute__((aligned(64)));
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    const int64_t begins = i * PIECE * BYTE_ROWS,
                  rows = t->n - begins < PIECE * BYTE_ROWS ? t->n - begins : PIECE * BYTE_ROWS;
    float y[FEW][PIECE * BYTE_ROWS];
    memset(y, 0, sizeof *y * (size_t)t->rows);
    for (int64_t line = 0; line < u->lines; line++) {
      const int64_t first = line * LINE, places = t->places - first < LINE ? t->places - first : LINE;
      for (int64_t row = 0; row < rows; row += TALL * BYTE_ROWS) {
        for (int k = 0; k < TALL; k++) {
          /* Rows lie apart: their next lines are asked for one by one. */
          for (int64_t ahead = 0; line + 1 < u->lines && ahead < BYTE_ROWS; ahead++)
            if (row + k * BYTE_ROWS + ahead < rows)
              __builtin_prefetch(t->codes + (begins + row + k * BYTE_ROWS + ahead) * t->places + first + LINE, 0, 2);
          turn_codes(t, begins + row + k * BYTE_ROWS, first, codes[k]);
        }
        for (int64_t r = 0; r < t->rows; r++)
          add_line((const uint8_t(*)[LINE][BYTE_ROWS])codes, u->table + (r * t->places + first) * TABLE, places,
                   u->factor[r * u->lines + line], y[r] + row);
      }
    }
    for (int64_t r = 0; r < t->rows; r++) memcpy(t->y + r * t->n + begins, y[r], sizeof(float) * (size_t)rows);
  }
}
#pragma GCC pop_options

/* Whether it was done so. *ok: false where an error is set. entries: of the codebook. */
static bool by_lookup(const job *t, int64_t entries, bool *ok) {
  if (!__builtin_cpu_supports("avx512vbmi") || t->n < ENOUGH || !t->places) return false;
  lookup u = { .t = t, .lines = (t->places + LINE - 1) / LINE };
  const size_t book = sizeof(float) * ENTRIES * (size_t)t->d, factor = sizeof(float) * (size_t)(t->rows * u.lines);
  const size_t table = (size_t)(t->rows * t->places) * TABLE, bytes = book + table + factor;
  u.table = ty_scratch_alloc(bytes);
  if (!u.table) {
    *ok = false;
    return true;
  }
  u.book = (float *)(void *)(u.table + table);
  u.factor = u.book + ENTRIES * t->d;
  for (int64_t k = 0; k < t->d; k++)
    for (int64_t e = 0; e < ENTRIES; e++) u.book[k * ENTRIES + e] = e < entries ? t->codebook[e * t->d + k] : 0;
  ty_parallel_for(t->rows * u.lines, 1, make_tables, &u);
  if (!u.odd && !u.failed) ty_parallel_for((t->n + PIECE * BYTE_ROWS - 1) / (PIECE * BYTE_ROWS), 1, look_up, &u);
  ty_scratch_free(u.table, bytes);
  *ok = !u.failed;
  return !u.odd;
}
