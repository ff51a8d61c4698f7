/* matmul_trit in f32 with AVX2. Numbers of x become integers of three bytes, times a power of two for each group: as
 * many bits as those of f32 have beside the largest of the group. The digits of 32 bytes of trits are found in tables
 * of 16 bytes, and their products with bytes of x are added up as words. Included by trit.c. */

enum {
  CHUNK = 32,      /* bytes of trits */
  PARTS = 3,       /* bytes of a number */
  LINES = 4,       /* rows of x that meet the digits once these are found */
  TALL = 256,      /* rows of the weight */
  FEWEST = 16,     /* bytes of a group: of fewer most of a chunk would be for nothing */
  MOST = 8 * CHUNK /* of more the sums would not fit into 32 bits */
};

/* What a chunk is multiplied with: of the number that belongs to trit j of byte i, q[j][part][i], the lowest part
 * first. A trit is its digit less 1: less[part] is what sums begin with therefore. */
typedef struct turned {
  int8_t q[TRITS][PARTS][CHUNK];
  int16_t less[PARTS][CHUNK / 2];
} turned;

typedef struct byte_job {
  const job *j;
  int64_t lines, chunks, tall; /* rows of x, chunks of a group, pieces of TALL rows */
  bool half;                   /* scales are f16 */
  turned *x;                   /* [lines][groups][chunks] */
  float *scale;                /* [lines][groups] */
  bool odd;                    /* x has numbers that do not become integers so */
  bool failed;
} byte_job;

static void turn(byte_job *b, int64_t line, int64_t g) {
  const job *j = b->j;
  const int64_t from = g * j->group, n = j->columns - from < j->group ? j->columns - from : j->group;
  const float *x = (const float *)j->k->in[0]->data + line * j->columns + from;
  turned *to = b->x + (line * j->groups + g) * b->chunks;
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; i++) {
    const float size = fabsf(x[i]);
    most = size > most ? size : most;
    finite &= size <= FLT_MAX;
  }
  if (!finite || most > 0x1p100f || (most > 0 && most < 0x1p-90f)) {
    __atomic_store_n(&b->odd, true, __ATOMIC_RELAXED);
    return;
  }
  int exponent = 0;
  frexpf(most / (127 << 16), &exponent);
  const float scale = most > 0 ? ldexpf(1, exponent) : 1, inverse = 1 / scale;
  b->scale[line * j->groups + g] = scale;
  memset(to, 0, sizeof *to * (size_t)b->chunks);
  for (int64_t i = 0; i < n; i++) {
    turned *t = to + i / TRITS / CHUNK;
    const int64_t at = i / TRITS % CHUNK, trit = i % TRITS;
    int32_t q = (int32_t)lrintf(x[i] * inverse);
    for (int part = 0; part < PARTS; part++) {
      const int8_t low = (int8_t)q;
      t->q[trit][part][at] = low;
      t->less[part][at / 2] = (int16_t)(t->less[part][at / 2] - low);
      q = (q - low) >> 8;
    }
  }
}

static void turn_groups(void *context, int64_t begin, int64_t end) {
  byte_job *b = context;
  for (int64_t i = begin; i < end; i++) turn(b, i / b->j->groups, i % b->j->groups);
}

static inline __m256i table(const int8_t *of) {
  return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(const void *)of));
}

/* The five digits, in base 3, of 32 bytes: two are those of the rest of a division by nine, three of its result, which
 * is below 29. _mm256_shuffle_epi8 gives 0 where an index has its highest bit. */
static inline __attribute__((always_inline)) void digits(__m256i v, __m256i digit[TRITS]) {
  static const int8_t first[16] __attribute__((aligned(16))) = { 0, 1, 2, 0, 1, 2, 0, 1, 2 };
  static const int8_t second[16] __attribute__((aligned(16))) = { 0, 0, 0, 1, 1, 1, 2, 2, 2 };
  static const int8_t low[3][16] __attribute__((aligned(16))) = { { 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0 },
                                                                  { 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 1, 1, 1, 2 },
                                                                  { 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1 } };
  static const int8_t high[3][16] __attribute__((aligned(16))) = { { 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1 },
                                                                   { 2, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0 },
                                                                   { 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0 } };
  const __m256i ninth = _mm256_set1_epi16(7282); /* 2^16 / 9, rounded up: exact below 2^8 */
  const __m256i even = _mm256_mulhi_epu16(_mm256_and_si256(v, _mm256_set1_epi16(255)), ninth);
  const __m256i odd = _mm256_mulhi_epu16(_mm256_srli_epi16(v, 8), ninth);
  const __m256i h = _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
  const __m256i rest = _mm256_sub_epi8(v, _mm256_add_epi8(h, _mm256_slli_epi16(h, 3)));
  const __m256i below = _mm256_add_epi8(h, _mm256_set1_epi8(0x70)), above = _mm256_sub_epi8(h, _mm256_set1_epi8(16));
  digit[0] = _mm256_shuffle_epi8(table(first), rest);
  digit[1] = _mm256_shuffle_epi8(table(second), rest);
#pragma GCC unroll 3
  for (int i = 0; i < 3; i++)
    digit[2 + i] = _mm256_or_si256(_mm256_shuffle_epi8(table(low[i]), below),
                                   _mm256_shuffle_epi8(table(high[i]), above));
}

/* Adds the products of a chunk with numbers of x, as integers. */
static inline __attribute__((always_inline)) __m256i add_chunk(const __m256i digit[TRITS], const turned *x,
                                                               __m256i sum) {
  __m256i part[PARTS];
#pragma GCC unroll 3
  for (int i = 0; i < PARTS; i++) {
    part[i] = _mm256_loadu_si256((const __m256i *)(const void *)x->less[i]);
#pragma GCC unroll 5
    for (int t = 0; t < TRITS; t++) {
      const __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)x->q[t][i]);
      part[i] = _mm256_add_epi16(part[i], _mm256_maddubs_epi16(digit[t], q));
    }
  }
  const __m256i byte = _mm256_set1_epi16(256);
  const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(part[0], _mm256_set1_epi16(1)),
                                       _mm256_madd_epi16(part[1], byte));
  return _mm256_add_epi32(sum, _mm256_add_epi32(low, _mm256_slli_epi32(_mm256_madd_epi16(part[2], byte), 8)));
}

/* 32 bytes; zeros where there are fewer before `stop`. */
static inline __m256i bytes_at(const uint8_t *code, const uint8_t *stop) {
  if (stop - code >= CHUNK) return _mm256_loadu_si256((const __m256i *)(const void *)code);
  uint8_t rest[CHUNK] = { 0 };
  if (stop > code) memcpy(rest, code, (size_t)(stop - code));
  return _mm256_loadu_si256((const __m256i *)(const void *)rest);
}

/* Adds the products of `rows` rows of the weight, in one group, with `lines` (a constant) rows of x: y [lines][y_row].
 * x and factor of the next row of x are x_row chunks and factor_row numbers further on. `one`: a group is a chunk. */
static inline __attribute__((always_inline)) void group_of(const byte_job *b, const int lines, const bool one,
                                                           const uint8_t *code, const float *scale, int64_t rows,
                                                           const turned *x, const float *factor, float *y) {
  enum { AHEAD = 1024 };
  const job *j = b->j;
  const uint8_t *stop = (const uint8_t *)j->k->in[1]->data + j->groups * j->rows * j->planes * j->bytes;
  const int64_t bytes = j->bytes, planes = j->planes, chunks = b->chunks, x_row = j->groups * chunks, y_row = j->rows;
  const int64_t factor_row = j->groups;
  __m256 total[LINES];
#pragma GCC unroll 4
  for (int l = 0; l < lines; l++) total[l] = _mm256_setzero_ps();
  /* One loop over all lists of bytes: of several, the inner one would make all constants anew for each row. */
  for (int64_t i = 0, p = 0; i < rows * planes; i++, code += bytes) {
    __m256i sum[LINES], digit[TRITS];
#pragma GCC unroll 4
    for (int l = 0; l < lines; l++) sum[l] = _mm256_setzero_si256();
    __builtin_prefetch(code + AHEAD);
    for (int64_t c = 0; c < (one ? 1 : chunks); c++) {
      digits(bytes_at(code + c * CHUNK, stop), digit);
#pragma GCC unroll 4
      for (int l = 0; l < lines; l++) sum[l] = add_chunk(digit, x + l * x_row + c, sum[l]);
    }
    const __m256 s = _mm256_broadcast_ss(scale + i);
#pragma GCC unroll 4
    for (int l = 0; l < lines; l++) total[l] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[l]), s, total[l]);
    if (++p < planes) continue;
#pragma GCC unroll 4
    for (int l = 0; l < lines; l++) {
      y[l * y_row] += factor[l * factor_row] * sum_of_eight(total[l]);
      total[l] = _mm256_setzero_ps();
    }
    p = 0, y++;
  }
}

/* Rows [first, last) of the weight and rows [line, line + lines) of x. room: for scales as f32, if they are not. */
static void products_of(const byte_job *b, int64_t line, int64_t lines, int64_t first, int64_t last, float *room) {
  const job *j = b->j;
  float *y = (float *)j->k->out[0]->data + line * j->rows + first;
  const int64_t rows = last - first;
  for (int64_t l = 0; l < lines; l++) memset(y + l * j->rows, 0, sizeof(float) * (size_t)rows);
  for (int64_t g = 0; g < j->groups; g++) {
    const int64_t at = (g * j->rows + first) * j->planes;
    const uint8_t *code = (const uint8_t *)j->k->in[1]->data + at * j->bytes;
    const float *scale = room;
    if (room) ty_f16_load(room, (const uint16_t *)j->k->in[2]->data + at, rows * j->planes);
    else scale = (const float *)j->k->in[2]->data + at;
    const turned *x = b->x + (line * j->groups + g) * b->chunks;
    const float *factor = b->scale + line * j->groups + g;
    if (b->chunks == 1 && lines == LINES) {
      group_of(b, LINES, true, code, scale, rows, x, factor, y);
      continue;
    }
    for (int64_t l = 0; l < lines; l++, x += j->groups * b->chunks, factor += j->groups) {
      if (b->chunks == 1) group_of(b, 1, true, code, scale, rows, x, factor, y + l * j->rows);
      else group_of(b, 1, false, code, scale, rows, x, factor, y + l * j->rows);
    }
  }
}

static void products(void *context, int64_t begin, int64_t end) {
  byte_job *b = context;
  const size_t bytes = sizeof(float) * TALL * (size_t)b->j->planes;
  float *room = NULL;
  if (b->half && !(room = ty_scratch_alloc(bytes))) {
    __atomic_store_n(&b->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    const int64_t line = i / b->tall * LINES, first = i % b->tall * TALL;
    const int64_t last = first + TALL < b->j->rows ? first + TALL : b->j->rows;
    products_of(b, line, b->lines - line < LINES ? b->lines - line : LINES, first, last, room);
  }
  if (room) ty_scratch_free(room, bytes);
}

/* Whether it was done so. *ok: false where an error is set. */
static bool by_bytes(const job *j, bool *ok) {
  const ty_view *x = j->k->in[0];
  if (x->dtype != TY_F32 || j->bytes < FEWEST || j->bytes > MOST) return false;
  byte_job b = { .j = j,
                 .lines = x->count / j->columns,
                 .chunks = (j->bytes + CHUNK - 1) / CHUNK,
                 .tall = (j->rows + TALL - 1) / TALL,
                 .half = j->k->in[2]->dtype == TY_F16 };
  const size_t count = (size_t)(b.lines * j->groups);
  const size_t bytes = count * ((size_t)b.chunks * sizeof *b.x + sizeof *b.scale);
  b.x = ty_scratch_alloc(bytes);
  if (!b.x) {
    *ok = ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
    return true;
  }
  b.scale = (float *)(void *)(b.x + count * (size_t)b.chunks);
  ty_parallel_for((int64_t)count, 4, turn_groups, &b);
  if (!b.odd) ty_parallel_for((b.lines + LINES - 1) / LINES * b.tall, 1, products, &b);
  ty_scratch_free(b.x, bytes);
  *ok = !b.failed || ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
  return !b.odd;
}
