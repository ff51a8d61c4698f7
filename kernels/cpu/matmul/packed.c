/* Products with weights that are stored without their zeros, and such weights as dense ones: kernels/packed.h. A row is
 * spread out in registers as it is read, so that memory gives few bytes and the multiplications of zeros are done. */
#include <string.h>

#include "../../half.h"
#include "../../packed.h"
#include "../cpu.h"

enum {
  LANES = TY_VECTOR_BYTES / 4,
  GROUP = 64,     /* columns whose bits are one word */
  TALL = 4,       /* rows that are spread out together */
  CHUNK = 512,    /* columns of them that stay in the first cache */
  WORK = 1 << 15, /* products that are worth a thread */
  MOST = 64       /* rows of x */
};

typedef float lanes __attribute__((vector_size(TY_VECTOR_BYTES), aligned(4)));

typedef struct task {
  const float *x; /* [n, padded], zeros behind the columns */
  const uint16_t *values;
  const uint32_t *words;
  const uint8_t *bits;
  const int64_t *starts;
  void *y; /* [n, rows] f32, or the dense weight f16 */
  int64_t n, rows, columns, padded, count;
  int64_t at; /* of which row of x on */
  int wrong;  /* what is stored does not fit together */
} task;

static float sum_of(lanes v) {
  float all = 0;
  for (int i = 0; i < LANES; i++) all += v[i];
  return all;
}

/* ---- bitmap ---- */

/* 64 bits of a row from column c on. */
static inline uint64_t bits_at(const uint8_t *bits, int64_t bytes, int64_t c) {
  uint64_t mask = 0;
  int64_t left = bytes - c / 8;
  if (left >= 8) memcpy(&mask, bits + c / 8, 8);
  else
    for (int64_t i = 0; i < left; i++) mask |= (uint64_t)bits[c / 8 + i] << 8 * i;
  return mask;
}

/* Whether the values of row r are as many as its bits, none behind its columns, and lie within all. */
static bool row_fits(task *t, int64_t r) {
  const int64_t begin = t->starts[r], end = t->starts[r + 1], bytes = (t->columns + 7) / 8;
  const uint8_t *bits = t->bits + r * bytes;
  int64_t set = 0;
  for (int64_t c = 0; c < t->columns; c += GROUP) set += __builtin_popcountll(bits_at(bits, bytes, c));
  const int beyond = t->columns % 8 ? bits[bytes - 1] >> t->columns % 8 : 0;
  if (begin >= 0 && begin <= end && end <= t->count && end - begin == set && !beyond) return true;
  __atomic_store_n(&t->wrong, 1, __ATOMIC_RELAXED);
  return false;
}

/* The sixteen columns (with AVX-512), or eight, of the low bits of a mask, whose values begin at p. `left`: values from
 * p to the end of all. */
#if defined(__AVX512F__)
#define STEP 16
static inline __m512 spread(const uint16_t *p, uint32_t mask, int64_t left) {
  __m256i h;
  if (left >= STEP) h = _mm256_loadu_si256((const __m256i *)(const void *)p);
  else h = _mm256_maskz_loadu_epi16((__mmask16)((1u << (left > 0 ? left : 0)) - 1), p);
  /* Some processors wait for the register that the result goes to, whatever the mask: it is given a new one. */
  __m512 zero = _mm512_setzero_ps();
  __asm__("" : "+v"(zero));
  return _mm512_mask_expand_ps(zero, (__mmask16)mask, _mm512_cvtph_ps(h));
}
typedef __m512 vector;
#define ZERO() _mm512_setzero_ps()
#define FMA(a, x, c) _mm512_fmadd_ps(a, _mm512_loadu_ps(x), c)
#define STORE(to, v) _mm512_storeu_ps(to, v)
#elif defined(__AVX2__) && defined(__F16C__)
#define STEP 8
/* Which bytes of eight values in f16 go to each of eight columns, by the bits of these; 128, which makes zeros, where
 * there is none. */
#define HALF_AT(m, i) ((m) >> (i)&1 ? 2 * __builtin_popcount((m) & ((1 << (i)) - 1)) : 128)
#define COLUMN_AT(m, i) HALF_AT(m, i), HALF_AT(m, i) + 1
#define PLACES(m)                                                       \
  { COLUMN_AT(m, 0), COLUMN_AT(m, 1), COLUMN_AT(m, 2), COLUMN_AT(m, 3), \
    COLUMN_AT(m, 4), COLUMN_AT(m, 5), COLUMN_AT(m, 6), COLUMN_AT(m, 7) },
#define PLACES_4(m) PLACES(m) PLACES((m) + 1) PLACES((m) + 2) PLACES((m) + 3)
#define PLACES_16(m) PLACES_4(m) PLACES_4((m) + 4) PLACES_4((m) + 8) PLACES_4((m) + 12)
#define PLACES_64(m) PLACES_16(m) PLACES_16((m) + 16) PLACES_16((m) + 32) PLACES_16((m) + 48)
static const uint8_t places[256][16]
    __attribute__((aligned(64))) = { PLACES_64(0) PLACES_64(64) PLACES_64(128) PLACES_64(192) };

static inline __m256 spread(const uint16_t *p, uint32_t mask, int64_t left) {
  __m128i h;
  if (left >= STEP) h = _mm_loadu_si128((const __m128i *)(const void *)p);
  else {
    uint16_t few[STEP] = { 0 };
    for (int64_t i = 0; i < left; i++) few[i] = p[i];
    h = _mm_loadu_si128((const __m128i *)(const void *)few);
  }
  return _mm256_cvtph_ps(_mm_shuffle_epi8(h, _mm_load_si128((const __m128i *)(const void *)places[mask & 255])));
}
typedef __m256 vector;
#define ZERO() _mm256_setzero_ps()
#define FMA(a, x, c) _mm256_fmadd_ps(a, _mm256_loadu_ps(x), c)
#define STORE(to, v) _mm256_storeu_ps(to, v)
#endif

/* Columns [from, from + n) of a row as f32, n a multiple of 64; p: its first value there. Returns that of what
 * follows. */
static const uint16_t *decode(const task *t, const uint16_t *p, const uint8_t *bits, int64_t from, int64_t n,
                              float *to) {
  const int64_t bytes = (t->columns + 7) / 8;
  const uint16_t *end = t->values + t->count;
  for (int64_t c = 0; c < n; c += GROUP) {
    uint64_t mask = bits_at(bits, bytes, from + c);
#ifdef STEP
    for (int i = 0; i < GROUP; i += STEP) {
      const uint32_t part = (uint32_t)(mask >> i) & ((1u << STEP) - 1);
      STORE(to + c + i, spread(p, part, end - p));
      p += __builtin_popcount(part);
    }
#else
    (void)end;
    for (int i = 0; i < GROUP; i++) to[c + i] = mask >> i & 1 ? ty_f16_to_f32(*p++) : 0.0f;
#endif
  }
  return p;
}

/* A group of 64 columns as vectors w[0] to w[GROUP / STEP - 1], of values that are followed by 64 more. */
#ifdef STEP
#define SPREAD_GROUP(w, p, mask)                                               \
  for (int i = 0; i < GROUP / STEP; i++) {                                     \
    const uint32_t part = (uint32_t)((mask) >> i * STEP) & ((1u << STEP) - 1); \
    w[i] = spread(p, part, STEP);                                              \
    p += __builtin_popcount(part);                                             \
  }

/* The sum of all lanes of 1, 2 or 4 vectors. */
static inline float summed(const vector *s, int count) {
  vector all = s[0];
  if (count == 2) all = s[0] + s[1];
  if (count == 4) all = (s[0] + s[1]) + (s[2] + s[3]);
#if STEP == 16
  return _mm512_reduce_add_ps(all);
#else
  float lane[STEP], sum = 0;
  STORE(lane, all);
  for (int j = 0; j < STEP; j++) sum += lane[j];
  return sum;
#endif
}

/* N rows of x, with a row that is spread out once: a range_fn for rows of the weight. A sum is kept in A parts. The
 * values are read within all that there are whatever the bits say; whether they were as many as starts says is seen
 * afterwards. */
#define FUSED(name, N, A)                                                                                        \
  static void name(void *context, int64_t begin, int64_t end) {                                                  \
    task *t = context;                                                                                           \
    const int64_t bytes = (t->columns + 7) / 8;                                                                  \
    const uint16_t *last = t->values + t->count;                                                                 \
    for (int64_t r = begin; r < end; r++) {                                                                      \
      if (t->starts[r] < 0 || t->starts[r] > t->starts[r + 1] || t->starts[r + 1] > t->count) {                  \
        row_fits(t, r);                                                                                          \
        continue;                                                                                                \
      }                                                                                                          \
      const uint8_t *bits = t->bits + r * bytes;                                                                 \
      const uint16_t *first = t->values + t->starts[r], *p = first;                                              \
      vector sums[N][A];                                                                                         \
      for (int b = 0; b < N; b++)                                                                                \
        for (int i = 0; i < A; i++) sums[b][i] = ZERO();                                                         \
      int64_t c = 0;                                                                                             \
      for (; c + GROUP <= t->columns && last - p >= GROUP; c += GROUP) {                                         \
        uint64_t mask;                                                                                           \
        memcpy(&mask, bits + c / 8, sizeof mask);                                                                \
        vector w[GROUP / STEP];                                                                                  \
        SPREAD_GROUP(w, p, mask)                                                                                 \
        for (int b = 0; b < N; b++)                                                                              \
          for (int i = 0; i < GROUP / STEP; i++)                                                                 \
            sums[b][i % A] = FMA(w[i], t->x + (t->at + b) * t->padded + c + i * STEP, sums[b][i % A]);           \
      }                                                                                                          \
      for (; c < t->columns; c += GROUP) {                                                                       \
        const uint64_t mask = bits_at(bits, bytes, c);                                                           \
        for (int i = 0; i < GROUP / STEP; i++) {                                                                 \
          const uint32_t part = (uint32_t)(mask >> i * STEP) & ((1u << STEP) - 1);                               \
          const vector w = spread(p, part, last - p);                                                            \
          for (int b = 0; b < N; b++)                                                                            \
            sums[b][i % A] = FMA(w, t->x + (t->at + b) * t->padded + c + i * STEP, sums[b][i % A]);              \
          p = last - p > __builtin_popcount(part) ? p + __builtin_popcount(part) : last;                         \
        }                                                                                                        \
      }                                                                                                          \
      if (p - first != t->starts[r + 1] - t->starts[r] || (t->columns % 8 && bits[bytes - 1] >> t->columns % 8)) \
        row_fits(t, r);                                                                                          \
      for (int b = 0; b < N; b++) ((float *)t->y)[(t->at + b) * t->rows + r] = summed(sums[b], A);               \
    }                                                                                                            \
  }
FUSED(fused_1, 1, 4)
FUSED(fused_2, 2, 2)
FUSED(fused_4, 4, 1)

/* AHEAD: values; what comes next of the weight is asked for early. MUCH: numbers of x. */
enum { AHEAD = 1024, MUCH = 4096 };

#if STEP == 8
/* One row of x: each byte of bits is a step, and loads of bytes are cheaper than shifts. A second row of the weight
 * would save loads of x and cost registers. False as above. */
static bool one_row(const task *t, int64_t r) {
  const int64_t *starts = t->starts + r;
  if (starts[0] < 0 || starts[0] > starts[1] || starts[1] > t->count) return false;
  const uint8_t *bits = t->bits + r * (t->columns / 8);
  const uint16_t *p = t->values + starts[0], *last = t->values + t->count;
  vector sums[4] = { ZERO(), ZERO(), ZERO(), ZERO() };
  for (int64_t c = 0; c < t->columns; c += GROUP, bits += GROUP / STEP) {
    if (last - p < GROUP) return false;
    __builtin_prefetch(p + AHEAD);
#pragma GCC unroll 8
    for (int i = 0; i < GROUP / STEP; i++) {
      const vector w = spread(p, bits[i], STEP);
      sums[i % 4] = FMA(w, t->x + t->at * t->padded + c + i * STEP, sums[i % 4]);
      p += __builtin_popcountll(bits[i]);
    }
  }
  if (p - t->values != starts[1]) return false;
  ((float *)t->y)[t->at * t->rows + r] = summed(sums, 4);
  return true;
}

static void rows_1(void *context, int64_t begin, int64_t end) {
  const task *t = context;
  for (int64_t r = begin; r < end; r++)
    if (t->columns % GROUP || !one_row(t, r)) fused_1(context, r, r + 1);
}
#define SPREAD(p, mask) spread(p, mask, STEP)
#define EACH(name) name
#include "packed_rows.h"
static ty_range_fn *fused_for(int64_t n) { return n == 4 ? pairs_4 : n == 2 ? pairs_2 : rows_1; }
#else
#define SPREAD(p, mask) spread(p, mask, STEP)
#define EACH(name) name
#include "packed_rows.h"

/* With VBMI2 halves are spread out before they are widened, 32 bytes of them in place of 64 of floats. */
#pragma GCC push_options
#pragma GCC target("avx512vbmi2")
static inline __m512 spread_words(const uint16_t *p, uint16_t mask) {
  __m256i zero = _mm256_setzero_si256();
  __asm__("" : "+v"(zero)); /* as in spread() */
  return _mm512_cvtph_ps(_mm256_mask_expand_epi16(zero, mask, _mm256_loadu_si256((const __m256i *)(const void *)p)));
}
#define SPREAD(p, mask) spread_words(p, mask)
#define EACH(name) name##_words
#include "packed_rows.h"
#pragma GCC pop_options

static ty_range_fn *fused_for(int64_t n) {
  if (__builtin_cpu_supports("avx512vbmi2")) return n == 4 ? pairs_4_words : n == 2 ? rows_2_words : rows_1_words;
  return n == 4 ? pairs_4 : n == 2 ? rows_2 : rows_1;
}
#endif
#endif

/* sums[r][b] of TALL decoded rows and B rows of x, over n columns. */
#define BLOCK(B)                                                                                                       \
  static inline void block##B(lanes(*sums)[MOST], const float(*w)[CHUNK], const float *x, int64_t stride, int64_t n) { \
    lanes s[TALL][B];                                                                                                  \
    for (int r = 0; r < TALL; r++)                                                                                     \
      for (int b = 0; b < B; b++) s[r][b] = sums[r][b];                                                                \
    for (int64_t c = 0; c < n; c += LANES)                                                                             \
      for (int b = 0; b < B; b++) {                                                                                    \
        const lanes xs = *(const lanes *)(const void *)(x + b * stride + c);                                           \
        for (int r = 0; r < TALL; r++) s[r][b] += *(const lanes *)(const void *)(w[r] + c) * xs;                       \
      }                                                                                                                \
    for (int r = 0; r < TALL; r++)                                                                                     \
      for (int b = 0; b < B; b++) sums[r][b] = s[r][b];                                                                \
  }
BLOCK(1)
BLOCK(2)

/* Several rows of x: TALL rows are spread out, a chunk at a time, and multiplied as dense ones. */
static void bitmap_rows(void *context, int64_t begin, int64_t end) {
  task *t = context;
  const int64_t bytes = (t->columns + 7) / 8;
  float w[TALL][CHUNK] __attribute__((aligned(64)));
  lanes sums[TALL][MOST];
  for (int64_t r0 = begin * TALL; r0 < end * TALL && r0 < t->rows; r0 += TALL) {
    const int tall = t->rows - r0 < TALL ? (int)(t->rows - r0) : TALL;
    const uint16_t *p[TALL] = { NULL };
    for (int r = 0; r < tall; r++)
      if (row_fits(t, r0 + r)) p[r] = t->values + t->starts[r0 + r];
    memset(sums, 0, sizeof sums);
    for (int64_t c = 0; c < t->padded; c += CHUNK) {
      const int64_t n = t->padded - c < CHUNK ? t->padded - c : CHUNK;
      for (int r = 0; r < TALL; r++) {
        if (r < tall && p[r]) p[r] = decode(t, p[r], t->bits + (r0 + r) * bytes, c, n, w[r]);
        else memset(w[r], 0, sizeof w[r]);
      }
      int64_t b = 0;
      for (; b + 2 <= t->n; b += 2) {
        lanes part[TALL][MOST];
        for (int r = 0; r < TALL; r++) part[r][0] = sums[r][b], part[r][1] = sums[r][b + 1];
        block2(part, w, t->x + b * t->padded + c, t->padded, n);
        for (int r = 0; r < TALL; r++) sums[r][b] = part[r][0], sums[r][b + 1] = part[r][1];
      }
      if (b < t->n) {
        lanes part[TALL][MOST];
        for (int r = 0; r < TALL; r++) part[r][0] = sums[r][b];
        block1(part, w, t->x + b * t->padded + c, t->padded, n);
        for (int r = 0; r < TALL; r++) sums[r][b] = part[r][0];
      }
    }
    for (int r = 0; r < tall; r++)
      for (int64_t b = 0; b < t->n; b++) ((float *)t->y)[b * t->rows + r0 + r] = sum_of(sums[r][b]);
  }
}

static void bitmap_dense(void *context, int64_t begin, int64_t end) {
  task *t = context;
  const int64_t bytes = (t->columns + 7) / 8;
  for (int64_t r = begin; r < end; r++) {
    uint16_t *y = (uint16_t *)t->y + r * t->columns;
    memset(y, 0, (size_t)t->columns * sizeof *y);
    if (!row_fits(t, r)) continue;
    const uint16_t *p = t->values + t->starts[r];
    for (int64_t c = 0; c < t->columns; c++)
      if (t->bits[r * bytes + c / 8] >> c % 8 & 1) y[c] = *p++;
  }
}

/* ---- tiled CSL ---- */

/* Whether the words of a tile lie within all, and `last` words of it may be read. */
static bool tile_fits(task *t, int64_t tile) {
  const int64_t begin = t->starts[tile], end = t->starts[tile + 1];
  if (begin >= 0 && begin <= end && end <= t->count) return true;
  __atomic_store_n(&t->wrong, 1, __ATOMIC_RELAXED);
  return false;
}

/* A tile's words in a zeroed tile. Places beyond the matrix are noted, and go nowhere that matters. */
static void scatter(task *t, int64_t tile, int64_t row, int64_t column, float *to) {
  enum { SOME = 256 };
  memset(to, 0, TY_CSL_TILE * sizeof *to);
  uint32_t all = 0;
  uint16_t halves[SOME];
  float values[SOME];
  for (int64_t i = t->starts[tile]; i < t->starts[tile + 1]; i += SOME) {
    const int64_t left = t->starts[tile + 1] - i, n = left < SOME ? left : SOME;
    const uint32_t *words = t->words + i;
    for (int64_t k = 0; k < n; k++) halves[k] = (uint16_t)words[k];
    ty_f16_load(values, halves, n);
    for (int64_t k = 0; k < n; k++) all |= words[k];
    for (int64_t k = 0; k < n; k++) to[words[k] >> 16 & (TY_CSL_TILE - 1)] = values[k];
  }
  all >>= 16;
  bool fits = all < TY_CSL_TILE;
  const bool edge = row + TY_CSL_TALL > t->rows || column + TY_CSL_WIDE > t->columns;
  for (int64_t i = t->starts[tile]; fits && edge && i < t->starts[tile + 1]; i++) {
    const int64_t place = t->words[i] >> 16;
    fits = row + place % TY_CSL_TALL < t->rows && column + place / TY_CSL_TALL < t->columns;
  }
  if (!fits) __atomic_store_n(&t->wrong, 1, __ATOMIC_RELAXED);
}

/* Rows of tiles. A tile is spread out in the first cache and multiplied as a dense one. */
static void csl_rows(void *context, int64_t begin, int64_t end) {
  task *t = context;
  enum { PARTS = TY_CSL_TALL / LANES };
  const int64_t across = ty_csl_count(t->columns, TY_CSL_WIDE);
  float w[TY_CSL_TILE] __attribute__((aligned(64)));
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i * TY_CSL_TALL, tall = t->rows - row < TY_CSL_TALL ? t->rows - row : TY_CSL_TALL;
    float *y = (float *)t->y + row;
    for (int64_t b = 0; b < t->n; b++) memset(y + b * t->rows, 0, (size_t)tall * sizeof *y);
    for (int64_t j = 0; j < across; j++) {
      const int64_t tile = i * across + j, column = j * TY_CSL_WIDE;
      if (!tile_fits(t, tile)) continue;
      if (t->starts[tile] == t->starts[tile + 1]) continue;
      scatter(t, tile, row, column, w);
      for (int64_t b = 0; b < t->n; b++) {
        const float *x = t->x + b * t->padded + column;
        lanes sums[PARTS];
        memset(sums, 0, sizeof sums);
        for (int c = 0; c < TY_CSL_WIDE; c++)
          for (int p = 0; p < PARTS; p++)
            sums[p] += *(const lanes *)(const void *)(w + c * TY_CSL_TALL + p * LANES) * x[c];
        const float *flat = (const float *)(const void *)sums;
        for (int64_t r = 0; r < tall; r++) y[b * t->rows + r] += flat[r];
      }
    }
  }
}

static void csl_dense(void *context, int64_t begin, int64_t end) {
  task *t = context;
  const int64_t across = ty_csl_count(t->columns, TY_CSL_WIDE);
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i * TY_CSL_TALL, tall = t->rows - row < TY_CSL_TALL ? t->rows - row : TY_CSL_TALL;
    uint16_t *y = (uint16_t *)t->y + row * t->columns;
    memset(y, 0, (size_t)(tall * t->columns) * sizeof *y);
    for (int64_t j = 0; j < across; j++) {
      if (!tile_fits(t, i * across + j)) continue;
      for (int64_t k = t->starts[i * across + j]; k < t->starts[i * across + j + 1]; k++) {
        const int64_t place = t->words[k] >> 16, r = place % TY_CSL_TALL, c = j * TY_CSL_WIDE + place / TY_CSL_TALL;
        if (place < TY_CSL_TILE && r < tall && c < t->columns) y[r * t->columns + c] = (uint16_t)t->words[k];
        else __atomic_store_n(&t->wrong, 1, __ATOMIC_RELAXED);
      }
    }
  }
}

/* ---- entries ---- */

/* Rows of x with zeros behind them, to whole groups of columns; x itself where there is nothing to add. */
static const float *padded_x(const ty_view *x, task *t, float **room, size_t *bytes) {
  t->padded = (t->columns + GROUP - 1) / GROUP * GROUP;
  *room = NULL;
  if (t->padded == t->columns) return x->data;
  *bytes = (size_t)(t->n * t->padded) * sizeof(float);
  if (!(*room = ty_scratch_alloc(*bytes))) return NULL;
  memset(*room, 0, *bytes);
  for (int64_t b = 0; b < t->n; b++)
    memcpy(*room + b * t->padded, (const float *)x->data + b * t->columns, (size_t)t->columns * sizeof(float));
  return *room;
}

static bool finished(const task *t, const char *name) {
  if (!t->wrong) return true;
  return ty_fail(TY_EINDEX, "%s: starts: expected those of the values that are stored, got others", name);
}

/* in: x f32 [..., columns], values f16, bitmap u8 [rows, (columns + 7) / 8], starts i64 [rows + 1]. */
bool TY_KERNEL(linear_bitmap)(const ty_kernel_args *k) {
  if (k->out[0]->count == 0) return true;
  const ty_view *x = k->in[0], *bitmap = k->in[2];
  task t = { .values = k->in[1]->data,
             .bits = bitmap->data,
             .starts = k->in[3]->data,
             .y = k->out[0]->data,
             .rows = bitmap->size[0],
             .columns = x->size[x->ndim - 1],
             .count = k->in[1]->count };
  t.n = k->out[0]->count / t.rows;
  float *room;
  size_t bytes = 0;
  if (!(t.x = padded_x(x, &t, &room, &bytes)) && t.columns) return false;
  const int64_t grain = 1 + WORK / (t.columns + 1);
#ifdef STEP
  enum { FUSED_ROWS = STEP == 16 ? MOST : 16 }; /* up to so many are multiplied as a row is spread out */
  if (t.n <= FUSED_ROWS) {
    for (int64_t each; t.at < t.n; t.at += each) {
      each = t.n - t.at >= 4 ? 4 : t.n - t.at >= 2 ? 2 : 1;
      ty_parallel_for(t.rows, grain, fused_for(each), &t);
    }
  } else
#endif
    ty_parallel_for((t.rows + TALL - 1) / TALL, 1 + grain / TALL / t.n, bitmap_rows, &t);
  if (room) ty_scratch_free(room, bytes);
  return finished(&t, "linear_bitmap");
}

/* in: values f16, bitmap u8 [rows, (columns + 7) / 8], starts i64 [rows + 1]. */
bool TY_KERNEL(dense_bitmap)(const ty_kernel_args *k) {
  if (k->out[0]->count == 0) return true;
  task t = { .values = k->in[0]->data,
             .bits = k->in[1]->data,
             .starts = k->in[2]->data,
             .y = k->out[0]->data,
             .rows = k->out[0]->size[0],
             .columns = k->out[0]->size[1],
             .count = k->in[0]->count };
  ty_parallel_for(t.rows, 1 + WORK / (t.columns + 1), bitmap_dense, &t);
  return finished(&t, "dense_bitmap");
}

/* in: x f32 [..., columns], words i32, starts i64 [tiles + 1]. */
bool TY_KERNEL(linear_csl)(const ty_kernel_args *k) {
  if (k->out[0]->count == 0) return true;
  const ty_view *x = k->in[0], *out = k->out[0];
  task t = { .words = k->in[1]->data,
             .starts = k->in[2]->data,
             .y = out->data,
             .rows = out->size[out->ndim - 1],
             .columns = x->size[x->ndim - 1],
             .count = k->in[1]->count };
  t.n = out->count / t.rows;
  float *room;
  size_t bytes = 0;
  if (!(t.x = padded_x(x, &t, &room, &bytes)) && t.columns) return false;
  ty_parallel_for(ty_csl_count(t.rows, TY_CSL_TALL), 1, csl_rows, &t);
  if (room) ty_scratch_free(room, bytes);
  return finished(&t, "linear_csl");
}

/* in: words i32, starts i64 [tiles + 1]. */
bool TY_KERNEL(dense_csl)(const ty_kernel_args *k) {
  if (k->out[0]->count == 0) return true;
  task t = { .words = k->in[0]->data,
             .starts = k->in[1]->data,
             .y = k->out[0]->data,
             .rows = k->out[0]->size[0],
             .columns = k->out[0]->size[1],
             .count = k->in[0]->count };
  ty_parallel_for(ty_csl_count(t.rows, TY_CSL_TALL), 1, csl_dense, &t);
  return finished(&t, "dense_csl");
}
