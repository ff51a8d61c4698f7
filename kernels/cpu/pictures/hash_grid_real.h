/* Template (no guard: hash_grid.c includes it once per element type). Lines are PIECE points of one coordinate,
 * feature or unit; points that a piece lacks lie at 0 and have no gradient. */

#define LANES ((int64_t)(TY_VECTOR_BYTES / sizeof(REAL)))
#define TILE (2 * LANES)
#define INLINED static inline __attribute__((always_inline))

typedef REAL FN(vec) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL FN(pair) __attribute__((vector_size(2 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#define VEC FN(vec)

#define NAME(x) FN(x)
#include "../transpose_real.h"
#undef NAME

/* ---- cells ---- */

typedef struct FN(cells) {
  REAL far[TY_HASH_DIMS][LINE], weight[TY_HASH_CORNERS][LINE];
  int32_t row[TY_HASH_CORNERS][LINE]; /* of the level */
  REAL x[TY_HASH_DIMS][LINE];
} FN(cells);

static void FN(fetch_points)(const context *c, int64_t begin, FN(cells) * s) {
  const int dims = c->p->dims;
  const int64_t count = c->n - begin < PIECE ? c->n - begin : PIECE;
  const REAL *x = (const REAL *)c->x + begin * dims;
  if (count < PIECE) memset(s->x, 0, sizeof s->x);
  for (int64_t i = 0; i < count; i++)
    for (int j = 0; j < dims; j++) s->x[j][i] = x[i * dims + j];
}

/* Finds the cells of a level, the rows of their corners and, where asked for, what they weigh. */
INLINED void FN(find_by)(const ty_hash_level *l, const int dims, FN(cells) * s, const bool hashed) {
  uint32_t part[TY_HASH_DIMS][2][LINE];
  for (int j = 0; j < dims; j++) {
    for (int i = 0; i < PIECE; i++) {
      int32_t cell;
      s->far[j][i] = FN(ty_hash_place)(s->x[j][i], l->resolution, &cell);
      part[j][0][i] = (uint32_t)cell * l->by[j];
      part[j][1][i] = (uint32_t)cell * l->by[j] + l->by[j];
    }
  }
  for (int k = 0; k < 1 << dims; k++) {
    const uint32_t *a = part[0][k & 1], *b = part[1][k >> 1 & 1], *d = part[dims - 1][k >> (dims - 1) & 1];
    for (int i = 0; i < PIECE; i++) {
      const uint32_t two = hashed ? a[i] ^ b[i] : a[i] + b[i], three = hashed ? two ^ d[i] : two + d[i];
      s->row[k][i] = (int32_t)(hashed ? (dims == 3 ? three : two) & l->mask : dims == 3 ? three : two);
    }
  }
}

static void FN(find)(const ty_hash_level *l, int dims, FN(cells) * s) {
  if (dims == 2) {
    if (l->mask) FN(find_by)(l, 2, s, true);
    else FN(find_by)(l, 2, s, false);
  } else {
    if (l->mask) FN(find_by)(l, 3, s, true);
    else FN(find_by)(l, 3, s, false);
  }
}

/* Of all corners, but for dimension `without`. */
static void FN(weigh)(int dims, FN(cells) * s, int without) {
  for (int k = 0; k < 1 << dims; k++) {
    REAL *restrict w = s->weight[k];
    for (int i = 0; i < PIECE; i++) w[i] = 1;
    for (int j = 0; j < dims; j++) {
      const REAL *restrict far = s->far[j];
      if (j == without) continue;
      if (k >> j & 1)
        for (int i = 0; i < PIECE; i++) w[i] *= far[i];
      else
        for (int i = 0; i < PIECE; i++) w[i] *= 1 - far[i];
    }
  }
}

/* to[f][i] = sum over corners of their weights times their rows. */
INLINED void FN(gather_by)(const FN(cells) * s, const REAL *table, const int64_t features, const int corners,
                           REAL *to) {
  for (int64_t f = 0; f < features; f++) {
    for (int i = 0; i < PIECE; i++) {
      REAL sum = 0;
      for (int k = 0; k < corners; k++) sum += s->weight[k][i] * table[s->row[k][i] * features + f];
      to[f * LINE + i] = sum;
    }
  }
}

/* The same of an even number, two at a time. */
INLINED void FN(gather_pairs)(const FN(cells) * s, const REAL *table, const int64_t features, const int corners,
                              REAL *to) {
  for (int64_t f = 0; f < features; f += 2) {
    for (int i = 0; i < PIECE; i++) {
      FN(pair) sum = { 0, 0 };
      for (int k = 0; k < corners; k++)
        sum += s->weight[k][i] * *(const FN(pair) *)(table + s->row[k][i] * features + f);
      to[f * LINE + i] = sum[0], to[(f + 1) * LINE + i] = sum[1];
    }
  }
}

static void FN(gather)(const FN(cells) * s, const REAL *table, int64_t features, int dims, REAL *to) {
  if (features == 2 && dims == 2) FN(gather_pairs)(s, table, 2, 4, to);
  else if (features == 2) FN(gather_pairs)(s, table, 2, 8, to);
  else if (features % 2 == 0) FN(gather_pairs)(s, table, features, 1 << dims, to);
  else FN(gather_by)(s, table, features, 1 << dims, to);
}

/* The features [all][LINE] of the points from `begin` on. */
static void FN(encode)(const context *c, int64_t begin, FN(cells) * s, REAL *to) {
  const int dims = c->p->dims;
  FN(fetch_points)(c, begin, s);
  for (int l = 0; l < c->p->levels; l++) {
    FN(find)(&c->level[l], dims, s);
    FN(weigh)(dims, s, -1);
    FN(gather)
    (s, (const REAL *)c->table + c->level[l].first * c->features, c->features, dims, to + l * c->features * LINE);
  }
}

/* Lines [rows][stride], of which `count` points, to rows of a tensor, and back, where lacking points become 0. */
static void FN(to_rows)(const REAL *lines, int64_t stride, int64_t rows, int64_t count, REAL *to) {
  FN(transpose)(lines, stride, rows, count, to, rows);
}

static void FN(to_lines)(const REAL *from, int64_t rows, int64_t count, REAL *lines, int64_t stride) {
  for (int64_t f = 0; f < rows; f++)
    for (int64_t i = count; i < stride; i++) lines[f * stride + i] = 0;
  FN(transpose)(from, rows, count, rows, lines, stride);
}

static void FN(encode_pieces)(void *context_, int64_t begin, int64_t end) {
  context *c = context_;
  const size_t bytes = sizeof(FN(cells)) + (size_t)(c->all * LINE) * sizeof(REAL);
  FN(cells) *s = room(c, bytes);
  REAL *features = (REAL *)(s + 1);
  if (!s) return;
  for (int64_t i = begin * PIECE; i < end * PIECE && i < c->n && !ty_interrupted; i += PIECE) {
    FN(encode)(c, i, s, features);
    FN(to_rows)(features, LINE, c->all, c->n - i < PIECE ? c->n - i : PIECE, (REAL *)c->to + i * c->all);
  }
  ty_scratch_free(s, bytes);
}

static void FN(corners_of)(const context *c, int64_t i, int level, int32_t *row, REAL *weight) {
  const ty_hash_level *l = &c->level[level];
  const int dims = c->p->dims;
  int32_t cell[TY_HASH_DIMS];
  REAL far[TY_HASH_DIMS];
  for (int j = 0; j < dims; j++)
    far[j] = FN(ty_hash_place)(((const REAL *)c->x)[i * dims + j], l->resolution, cell + j);
  for (int k = 0; k < 1 << dims; k++) {
    row[k] = (int32_t)(l->first + ty_hash_row(l, dims, cell, k));
    weight[k] = 1;
    for (int j = 0; j < dims; j++) weight[k] *= k >> j & 1 ? far[j] : 1 - far[j];
  }
}

/* ---- gradients of the grid ---- */

/* g: of a feature of the first point, from one point to the next `all` apart. */
INLINED void FN(spread_by)(const FN(cells) * s, const REAL *g, int64_t all, int64_t count, REAL *table,
                           const int64_t features, const int corners) {
  for (int64_t i = 0; i < count; i++) {
    for (int k = 0; k < corners; k++) {
      const REAL w = s->weight[k][i];
      REAL *row = table + s->row[k][i] * features;
      if (features % 2) {
        for (int64_t f = 0; f < features; f++) row[f] += w * g[i * all + f];
      } else {
        for (int64_t f = 0; f < features; f += 2) *(FN(pair) *)(row + f) += w * *(const FN(pair) *)(g + i * all + f);
      }
    }
  }
}

static void FN(spread_levels)(void *context_, int64_t begin, int64_t end) {
  context *c = context_;
  const int dims = c->p->dims;
  FN(cells) *s = room(c, sizeof *s);
  if (!s) return;
  for (int64_t l = begin; l < end && !c->added; l++)
    memset((REAL *)c->to + c->level[l].first * c->features, 0,
           (size_t)(ty_hash_rows(c->p, (int)l) * c->features) * sizeof(REAL));
  for (int64_t i = 0; i < c->n && !ty_interrupted; i += PIECE) {
    const int64_t count = c->n - i < PIECE ? c->n - i : PIECE;
    FN(fetch_points)(c, i, s);
    for (int64_t l = begin; l < end; l++) {
      FN(find)(&c->level[l], dims, s);
      FN(weigh)(dims, s, -1);
      const REAL *g = (const REAL *)c->g + i * c->all + l * c->features;
      REAL *table = (REAL *)c->to + c->level[l].first * c->features;
      if (c->features == 2 && dims == 2) FN(spread_by)(s, g, c->all, count, table, 2, 4);
      else if (c->features == 2) FN(spread_by)(s, g, c->all, count, table, 2, 8);
      else FN(spread_by)(s, g, c->all, count, table, c->features, 1 << dims);
    }
  }
  ty_scratch_free(s, sizeof *s);
}

/* The slopes of a level's features, times their gradients g, are added to dx [dims][LINE]. */
static void FN(slopes)(const context *c, int level, FN(cells) * s, const REAL *g, int64_t count, REAL *dx) {
  const int dims = c->p->dims, corners = 1 << dims;
  const REAL *table = (const REAL *)c->table + c->level[level].first * c->features;
  REAL value[TY_HASH_CORNERS][LINE];
  for (int k = 0; k < corners; k++) {
    for (int64_t i = 0; i < count; i++) {
      const REAL *row = table + s->row[k][i] * c->features;
      REAL sum = 0;
      for (int64_t f = 0; f < c->features; f++) sum += g[i * c->all + f] * row[f];
      value[k][i] = sum;
    }
  }
  for (int j = 0; j < dims; j++) {
    REAL *to = dx + j * LINE;
    FN(weigh)(dims, s, j);
    for (int k = 0; k < corners; k++) {
      const REAL by = (REAL)(k >> j & 1 ? c->level[level].resolution : -c->level[level].resolution);
      for (int64_t i = 0; i < count; i++)
        to[i] += s->x[j][i] >= 0 && s->x[j][i] <= 1 ? by * s->weight[k][i] * value[k][i] : 0;
    }
  }
}

static void FN(slope_pieces)(void *context_, int64_t begin, int64_t end) {
  context *c = context_;
  const int dims = c->p->dims;
  REAL dx[TY_HASH_DIMS * LINE];
  FN(cells) *s = room(c, sizeof *s);
  if (!s) return;
  for (int64_t i = begin * PIECE; i < end * PIECE && i < c->n && !ty_interrupted; i += PIECE) {
    const int64_t count = c->n - i < PIECE ? c->n - i : PIECE;
    memset(dx, 0, sizeof dx);
    FN(fetch_points)(c, i, s);
    for (int l = 0; l < c->p->levels; l++) {
      FN(find)(&c->level[l], dims, s);
      FN(slopes)(c, l, s, (const REAL *)c->g + i * c->all + l * c->features, count, dx);
    }
    FN(to_rows)(dx, LINE, dims, count, (REAL *)c->to + i * dims);
  }
  ty_scratch_free(s, sizeof *s);
}

/* ---- products ---- */

typedef enum FN(finish) { FN(STORED), FN(RECTIFIED), FN(ADDED), FN(GATED) } FN(finish);

/* A product C = A B: A's elements lie a_row and a_col apart, B's rows of n, whole tiles, b_row. */
typedef struct FN(product) {
  int64_t m, n, k;
  const REAL *a;
  int64_t a_row, a_col;
  const REAL *b;
  int64_t b_row;
  REAL *c;
  int64_t c_row;
  FN(finish) finish;
  const REAL *gate; /* GATED: like C; what is not above 0 there becomes 0 */
} FN(product);

INLINED void FN(tile)(const FN(product) * p, int64_t i, int64_t j, const int rows) {
  VEC sum[ROWS][2];
  const REAL *a = p->a + i * p->a_row, *b = p->b + j;
  for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (VEC){ 0 };
  for (int64_t k = 0; k < p->k; k++) {
    const VEC b0 = *(const VEC *)(b + k * p->b_row), b1 = *(const VEC *)(b + k * p->b_row + LANES);
    for (int r = 0; r < rows; r++) {
      const REAL by = a[r * p->a_row + k * p->a_col];
      sum[r][0] += by * b0, sum[r][1] += by * b1;
    }
  }
  for (int r = 0; r < rows; r++) {
    REAL *to = p->c + (i + r) * p->c_row + j;
    for (int v = 0; v < 2; v++) {
      VEC *at = (VEC *)(to + v * LANES);
      if (p->finish == FN(ADDED)) *at += sum[r][v];
      else *at = sum[r][v];
    }
    if (p->finish == FN(RECTIFIED)) {
      _Pragma("omp simd") for (int64_t e = 0; e < TILE; e++) to[e] = to[e] < 0 ? 0 : to[e];
    } else if (p->finish == FN(GATED)) {
      const REAL *gate = p->gate + (i + r) * p->c_row + j;
      _Pragma("omp simd") for (int64_t e = 0; e < TILE; e++) to[e] = gate[e] > 0 ? to[e] : 0;
    }
  }
}

static void FN(multiply)(const FN(product) * p) {
  int64_t i = 0;
  for (; i + ROWS <= p->m; i += ROWS)
    for (int64_t j = 0; j < p->n; j += TILE) FN(tile)(p, i, j, ROWS);
  for (; i + 2 <= p->m; i += 2)
    for (int64_t j = 0; j < p->n; j += TILE) FN(tile)(p, i, j, 2);
  for (; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j += TILE) FN(tile)(p, i, j, 1);
}

/* ---- the network, a block of points ---- */

/* Layer i of a network's weights, and what it takes: features, or units of the layer before. */
static const REAL *FN(layer)(const context *c, int64_t i) {
  return i == 0 ? c->first : (const REAL *)c->hidden + (i - 1) * c->width * c->width;
}
static int64_t FN(inputs)(const context *c, int64_t i) { return i == 0 ? c->all : c->width; }

/* Layer i's units [width][BLOCK] from what it takes, lines `stride` apart. */
static void FN(forward_layer)(const context *c, int64_t i, const REAL *from, int64_t stride, REAL *to) {
  const FN(product)
      p = { c->width,      BLOCK, FN(inputs)(c, i), FN(layer)(c, i), FN(inputs)(c, i), 1, from, stride, to, BLOCK,
            FN(RECTIFIED), NULL };
  FN(multiply)(&p);
}

/* Lines of the block that begins with a point: features, then the units of all layers. */
static REAL *FN(kept)(const context *c, int64_t point) {
  return (REAL *)c->kept + point / BLOCK * (c->all + (c->layers + 1) * c->width) * BLOCK;
}

static void FN(field_pieces)(void *context_, int64_t begin, int64_t end) {
  context *c = context_;
  const int64_t lines = c->all * LINE + (2 * c->width + c->out) * BLOCK;
  const size_t bytes = sizeof(FN(cells)) + (size_t)lines * sizeof(REAL);
  FN(cells) *s = room(c, bytes);
  if (!s) return;
  REAL *features = (REAL *)(s + 1), *h[2] = { features + c->all * LINE, features + c->all * LINE + c->width * BLOCK };
  REAL *y = h[1] + c->width * BLOCK;
  for (int64_t i = begin * PIECE; i < end * PIECE && i < c->n && !ty_interrupted; i += PIECE) {
    FN(encode)(c, i, s, features);
    for (int64_t b = 0; b < PIECE && i + b < c->n; b += BLOCK) {
      REAL *kept = c->kept ? FN(kept)(c, i + b) : NULL, *units = kept ? kept + c->all * BLOCK : h[0], *from;
      for (int64_t f = 0; kept && f < c->all; f++)
        memcpy(kept + f * BLOCK, features + f * LINE + b, BLOCK * sizeof *kept);
      FN(forward_layer)(c, 0, features + b, LINE, units);
      for (int64_t l = 1; l <= c->layers; l++) {
        from = units, units = kept ? units + c->width * BLOCK : h[l % 2];
        FN(forward_layer)(c, l, from, BLOCK, units);
      }
      const FN(product) p = { c->out, BLOCK, c->width, c->last, c->width, 1, units, BLOCK, y, BLOCK, FN(STORED), NULL };
      FN(multiply)(&p);
      const int64_t count = c->n - i - b < BLOCK ? c->n - i - b : BLOCK;
      FN(to_rows)(y, BLOCK, c->out, count, (REAL *)c->to + (i + b) * c->out);
    }
  }
  ty_scratch_free(s, bytes);
}

/* What a thread needs of the backward pass. */
typedef struct FN(bench) {
  REAL *features, *h, *g[2], *turned, *dy; /* h: of all layers */
} FN(bench);

/* sums += g x^T: lines of g, of `rows` units, and of x, which is turned first. */
static void FN(add_weights)(const FN(bench) * d, const REAL *g, int64_t rows, const REAL *x, int64_t stride,
                            int64_t columns, REAL *sums) {
  const int64_t row = filled(columns, TILE);
  FN(transpose)(x, stride, columns, BLOCK, d->turned, row);
  for (int64_t i = 0; i < BLOCK && columns < row; i++)
    for (int64_t f = columns; f < row; f++) d->turned[i * row + f] = 0;
  const FN(product) p = { rows, row, BLOCK, g, BLOCK, 1, d->turned, row, sums, row, FN(ADDED), NULL };
  FN(multiply)(&p);
}

/* A block of the points, with its lines of features, `stride` apart, and of all units: gradients of weights are added to
 * `sums`, those of features go to `to`, rows of a tensor. */
static void FN(backward_block)(const context *c, const FN(bench) * d, const REAL *features, int64_t stride,
                               const REAL *all_units, const REAL *g, int64_t count, REAL *sums, REAL *to) {
  const int64_t units = c->width * BLOCK, side = filled(c->width, TILE);
  REAL *hidden = sums + c->width * filled(c->all, TILE), *last = hidden + c->layers * c->width * side;
  const REAL *h = all_units + c->layers * units;
  FN(to_lines)(g, c->out, count, d->dy, BLOCK);
  FN(add_weights)(d, d->dy, c->out, h, BLOCK, c->width, last);
  REAL *at = d->g[0], *next = d->g[1];
  FN(product) p = { c->width, BLOCK, c->out, c->last, 1, c->width, d->dy, BLOCK, at, BLOCK, FN(GATED), h };
  FN(multiply)(&p);
  for (int64_t l = c->layers; l > 0; l--) {
    const REAL *below = all_units + (l - 1) * units;
    FN(add_weights)(d, at, c->width, below, BLOCK, c->width, hidden + (l - 1) * c->width * side);
    p = (FN(
        product)){ c->width, BLOCK, c->width, FN(layer)(c, l), 1, c->width, at, BLOCK, next, BLOCK, FN(GATED), below };
    FN(multiply)(&p);
    REAL *was = at;
    at = next, next = was;
  }
  FN(add_weights)(d, at, c->width, features, stride, c->all, sums);
  p = (FN(product)){ c->all, BLOCK, c->width, c->first, 1, c->all, at, BLOCK, d->turned, BLOCK, FN(STORED), NULL };
  FN(multiply)(&p);
  FN(to_rows)(d->turned, BLOCK, c->all, count, to);
}

static void FN(field_parts)(void *context_, int64_t begin, int64_t end) {
  context *c = context_;
  const int64_t widest = filled(c->width > c->all ? c->width : c->all, TILE);
  const int64_t lines = c->all * LINE + ((c->layers + 3) * c->width + widest + c->out) * BLOCK;
  const size_t bytes = sizeof(FN(cells)) + (size_t)lines * sizeof(REAL);
  FN(cells) *s = room(c, bytes);
  if (!s) return;
  FN(bench) d = { .features = (REAL *)(s + 1) };
  d.h = d.features + c->all * LINE;
  d.g[0] = d.h + (c->layers + 1) * c->width * BLOCK;
  d.g[1] = d.g[0] + c->width * BLOCK;
  d.turned = d.g[1] + c->width * BLOCK;
  d.dy = d.turned + widest * BLOCK;
  REAL *to = c->to;
  const int64_t gone = c->past * c->part;
  for (int64_t part = c->past + begin; part < c->past + end; part++) {
    REAL *sums = (REAL *)c->sums + part * c->size;
    memset(sums, 0, (size_t)c->size * sizeof(REAL));
    const int64_t stop = (part + 1) * c->part < c->n ? (part + 1) * c->part : c->n;
    for (int64_t i = part * c->part; i < stop && !ty_interrupted; i += PIECE) {
      if (!c->kept) FN(encode)(c, i, s, d.features);
      for (int64_t b = 0; b < PIECE && i + b < stop; b += BLOCK) {
        const int64_t count = stop - i - b < BLOCK ? stop - i - b : BLOCK, units = c->width * BLOCK;
        const REAL *g = (const REAL *)c->g + (i + b) * c->out, *features = d.features + b, *h = d.h;
        if (c->kept) features = FN(kept)(c, i + b), h = features + c->all * BLOCK;
        for (int64_t l = 0; !c->kept && l <= c->layers; l++)
          FN(forward_layer)(c, l, l ? d.h + (l - 1) * units : features, l ? BLOCK : LINE, d.h + l * units);
        FN(backward_block)(c, &d, features, c->kept ? BLOCK : LINE, h, g, count, sums, to + (i + b - gone) * c->all);
      }
    }
  }
  ty_scratch_free(s, bytes);
}

/* Rows of `columns` out of those of whole tiles, summed over the parts in their order. */
static void FN(add_rows)(const context *c, int64_t parts, int64_t at, int64_t rows, int64_t columns, REAL *to) {
  const int64_t row = filled(columns, TILE);
  memset(to, 0, (size_t)(rows * columns) * sizeof *to);
  for (int64_t part = 0; part < parts; part++) {
    const REAL *from = (const REAL *)c->sums + part * c->size + at;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < columns; i++) to[r * columns + i] += from[r * row + i];
  }
}

static void FN(add_parts)(const context *c, int64_t parts) {
  const int64_t side = filled(c->width, TILE), hidden = c->width * filled(c->all, TILE);
  FN(add_rows)(c, parts, 0, c->width, c->all, c->weights[0]);
  if (c->layers) FN(add_rows)(c, parts, hidden, c->layers * c->width, c->width, c->weights[2]);
  FN(add_rows)(c, parts, hidden + c->layers * c->width * side, c->out, c->width, c->weights[1]);
}

#undef LANES
#undef TILE
#undef VEC
#undef INLINED
