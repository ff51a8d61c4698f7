/* matmul_trit in f32 with integers. Numbers of x become integers of 24 bits, times a power of two for each group: about
 * as many bits as those of f32 have beside the largest of the group. A `method` makes of them what it multiplies blocks
 * of the weight with. Included by trit.c. */

enum {
  LINES = 8,         /* rows of x that meet a block while it is in the cache */
  FEW = 4,           /* blocks of a piece of work, at least */
  LIMIT = 127 << 16, /* of an integer, or of the sum of five */
  PARTS = 3,         /* bytes of an integer */
  AHEAD = 2,         /* blocks: how early one is asked for */
  LINE = 64,         /* bytes */
  MOST = 120         /* bytes of a group: of more the sums would not fit */
};

typedef struct block_job block_job;

/* What one of the ways to multiply needs of x, and its product with a block. */
typedef struct method {
  int neighbours; /* in x, the sum of whose sizes has to be an integer of 24 bits */
  int64_t most;   /* bytes of a group */
  size_t room;    /* for each byte of a group, and once more */
  void (*turn)(const int32_t *q, int64_t bytes, void *to);
  /* Adds the products of blocks [first, last) in a group to y [lines][last - first][BLOCK]; scale: as scales_of() has
   * them, for each block. */
  void (*multiply)(const block_job *b, int64_t g, int64_t first, int64_t last, const float *scale, float *y);
} method;

struct block_job {
  const job *j;
  const method *how;
  int64_t line, lines, tall, pieces; /* of x, from `line` on; tall: blocks of a piece */
  bool half;                         /* scales are f16 */
  size_t room;                       /* of a group of a row of x */
  char *x;                           /* [lines][groups] */
  float *factor;                     /* [lines][groups] */
  bool odd;                          /* x has numbers that do not become integers so */
  bool failed;
};

/* The largest sum of sizes of `count` neighbours (a constant). `size` ends with zeros. As integers, since these have the
 * same order, and maxima of floats are not vectors: NaN and infinity come out largest. */
static inline __attribute__((always_inline)) int32_t largest(const float *size, int64_t n, const int count) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    float sum = size[i];
    for (int k = 1; k < count; k++) sum += size[i + k];
    const int32_t bits = (int32_t)ty_bits_f32(sum);
    most = bits > most ? bits : most;
  }
  return most;
}

static void turn(block_job *b, int64_t line, int64_t g) {
  const job *j = b->j;
  const int64_t from = g * j->group, n = at_most(j->columns - from, j->group), all = j->bytes * TRITS;
  const float *x = (const float *)j->k->in[0]->data + (b->line + line) * j->columns + from;
  float size[(MOST + 1) * TRITS] = { 0 };
  int32_t q[(MOST + 1) * TRITS];
  for (int64_t i = 0; i < n; i++) size[i] = fabsf(x[i]);
  const int32_t bits = b->how->neighbours == 1 ? largest(size, n, 1) : largest(size, n, TRITS);
  const float most = ty_from_bits_f32((uint32_t)bits);
  if (!(most <= 0x1p100f) || (most > 0 && most < 0x1p-90f)) {
    __atomic_store_n(&b->odd, true, __ATOMIC_RELAXED);
    return;
  }
  int exponent = 0;
  frexpf(most / LIMIT, &exponent);
  const float factor = most > 0 ? ldexpf(1, exponent) : 1, inverse = 1 / factor;
  for (int64_t i = 0; i < n; i++) q[i] = (int32_t)rintf(x[i] * inverse);
  for (int64_t i = n; i < all + TRITS; i++) q[i] = 0;
  b->factor[line * j->groups + g] = factor;
  b->how->turn(q, j->bytes, b->x + (size_t)(line * j->groups + g) * b->room);
}

static void turn_groups(void *context, int64_t begin, int64_t end) {
  block_job *b = context;
  for (int64_t i = begin; i < end; i++) turn(b, i / b->j->groups, i % b->j->groups);
}

/* Those of a block, by planes: [planes][BLOCK], zeros where there are no rows. room: for a block as they lie. */
static void scales_of(const block_job *b, int64_t g, int64_t block, float *scale, float *room) {
  const job *j = b->j;
  const int64_t rows = at_most(j->rows - block * BLOCK, BLOCK), planes = j->planes;
  const int64_t at = (g * j->rows + block * BLOCK) * planes;
  const float *from = (const float *)j->k->in[2]->data + at;
  if (b->half) {
    ty_f16_load(room, (const uint16_t *)j->k->in[2]->data + at, rows * planes);
    from = room;
  }
  if (rows < BLOCK) memset(scale, 0, sizeof *scale * (size_t)(planes * BLOCK));
  if (planes == 2 && rows == BLOCK)
    for (int r = 0; r < BLOCK; r++) scale[r] = from[2 * r], scale[BLOCK + r] = from[2 * r + 1];
  else
    for (int64_t r = 0; r < rows; r++)
      for (int64_t p = 0; p < planes; p++) scale[p * BLOCK + r] = from[r * planes + p];
}

/* Where the block lies that is multiplied AHEAD blocks later by the piece of work that has blocks [first, last). */
static const uint8_t *later_codes(const block_job *b, int64_t g, int64_t block, int64_t first, int64_t last) {
  const job *j = b->j;
  if (block + AHEAD < last) return codes_of(j, g, block + AHEAD);
  return codes_of(j, g + 1 < j->groups ? g + 1 : g, at_most(first + block + AHEAD - last, last - 1));
}

/* Asks for the scales of a piece of work in a group. */
static void ask_for_scales(const block_job *b, int64_t g, int64_t first, int64_t last) {
  const job *j = b->j;
  const int64_t size = (b->half ? 2 : 4) * j->planes, rows = at_most(last * BLOCK, j->rows) - first * BLOCK;
  const char *from = (const char *)j->k->in[2]->data + (g * j->rows + first * BLOCK) * size;
  for (int64_t at = 0; at < rows * size; at += LINE) __builtin_prefetch(from + at, 0, 2);
}

#include "trit_digits.h"
#if defined(__AVX512F__)
#include "trit_lookup.h"
#endif

static void products(void *context, int64_t begin, int64_t end) {
  block_job *b = context;
  const job *j = b->j;
  const int64_t y_row = b->tall * BLOCK, planes = j->planes * BLOCK;
  const size_t bytes = sizeof(float) * (size_t)(b->lines * y_row + (b->tall + 1) * planes);
  float *y = ty_scratch_alloc(bytes), *scale = y + b->lines * y_row;
  if (!y) {
    __atomic_store_n(&b->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    const int64_t first = i * b->tall, last = at_most(first + b->tall, j->blocks);
    const int64_t tall = (last - first) * BLOCK, rows = at_most(last * BLOCK, j->rows) - first * BLOCK;
    memset(y, 0, sizeof *y * (size_t)(b->lines * tall));
    for (int64_t g = 0; g < j->groups; g++) {
      for (int64_t block = first; block < last; block++)
        scales_of(b, g, block, scale + (block - first) * planes, scale + b->tall * planes);
      if (g + 1 < j->groups) ask_for_scales(b, g + 1, first, last);
      b->how->multiply(b, g, first, last, scale, y);
    }
    for (int64_t l = 0; l < b->lines; l++)
      memcpy((float *)j->k->out[0]->data + (b->line + l) * j->rows + first * BLOCK, y + l * tall,
             sizeof *y * (size_t)rows);
  }
  ty_scratch_free(y, bytes);
}

/* Whether it was done so. *ok: false where an error is set. */
static bool by_blocks(const job *j, bool *ok) {
  const ty_view *x = j->k->in[0];
  block_job b = { .j = j, .how = &by_digits, .half = j->k->in[2]->dtype == TY_F16 };
#if defined(__AVX512F__)
  if (__builtin_cpu_supports("avx512vbmi")) b.how = &by_lookup;
#endif
  if (x->dtype != TY_F32 || j->bytes > b.how->most) return false;
  const int64_t lines = x->count / j->columns, runs = j->blocks / (2 * ty_parallel_threads());
  b.tall = runs < FEW ? FEW : at_most(runs, TALL);
  b.pieces = (j->blocks + b.tall - 1) / b.tall;
  b.room = (size_t)(j->bytes + 1) * b.how->room;
  const int64_t count = at_most(lines, LINES) * j->groups;
  const size_t bytes = (size_t)count * (b.room + sizeof *b.factor);
  b.x = ty_scratch_alloc(bytes);
  if (!b.x) {
    *ok = ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
    return true;
  }
  b.factor = (float *)(void *)(b.x + (size_t)count * b.room);
  for (; b.line < lines && !b.odd && !b.failed; b.line += LINES) {
    b.lines = at_most(lines - b.line, LINES);
    ty_parallel_for(b.lines * j->groups, 4, turn_groups, &b);
    if (!b.odd) ty_parallel_for(b.pieces, 1, products, &b);
  }
  ty_scratch_free(b.x, bytes);
  *ok = !b.failed || ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
  return !b.odd;
}
