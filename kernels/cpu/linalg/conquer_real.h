/* Eigenvalues and eigenvectors of a symmetric tridiagonal matrix, for one type: REAL, FN(name), TYPE, SAFE, EPSILON
 * (half a unit of the last place). Small blocks on the diagonal by implicit QL steps; two neighbours become one by
 * what joins them, a matrix of rank one (Cuppen 1981), whose equation secular_real.h solves and whose weights are
 * taken anew from the roots, so that vectors are orthogonal however near two roots lie (Gu and Eisenstat 1995, "A
 * divide-and-conquer algorithm for the symmetric tridiagonal eigenproblem"). Blocks are independent of each other,
 * and so are the roots of one: all of it runs in threads, and what comes out does not depend on them. A vector is a
 * row here. */

static inline REAL FN(absolute)(REAL x) { return x < 0 ? -x : x; }
static inline REAL FN(square_root)(REAL x) {
  return sizeof x == sizeof(float) ? (REAL)sqrtf((float)x) : (REAL)sqrt((double)x);
}

#include "secular_real.h"

typedef struct FN(conquest) {
  int64_t n, blocks; /* rows; of this level */
  REAL *d, *e, *z;   /* [n], [n - 1], [n, n] */
  REAL *room;        /* [2 n (n + LANES) + ROWS n] */
  int *order;        /* [n]: of each block its rows by their values, counted from the block's first */
  int *numbers;      /* [4 n] */
  int failed;        /* DIVERGED, NO_MEMORY or 0 */
} FN(conquest);

enum { FN(ROWS) = 4 };

static inline int64_t FN(block_row)(const FN(conquest) * c, int64_t block) { return c->n * block / c->blocks; }

/* ---- small blocks ---- */

static inline REAL FN(hypotenuse)(REAL a, REAL b) {
  const REAL sum = a * a + b * b;
  return SAFE(sum) ? FN(square_root)(sum) : (REAL)hypot((double)a, (double)b);
}

/* Rows x and y, of n, become c x - s y and s x + c y. */
static inline void FN(rotate)(REAL *restrict x, REAL *restrict y, REAL c, REAL s, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const REAL a = x[i], b = y[i];
    x[i] = c * a - s * b;
    y[i] = s * a + c * b;
  }
}

/* One implicit QL step of rows [first, last], from the last row up, with the shift that the first two give. */
static void FN(ql_step)(REAL *d, REAL *e, int64_t first, int64_t last, REAL *z, int64_t row, int64_t n) {
  const REAL half = (d[first + 1] - d[first]) / (2 * e[first]), size = FN(hypotenuse)(half, 1);
  REAL s = 1, c = 1, lost = 0, g = d[last] - d[first] + e[first] / (half < 0 ? half - size : half + size);
  for (int64_t i = last - 1; i >= first; i--) {
    const REAL f = s * e[i], b = c * e[i], r = FN(hypotenuse)(f, g);
    e[i + 1] = r;
    if (r == 0) { /* it has fallen apart */
      d[i + 1] -= lost;
      e[last] = 0;
      return;
    }
    s = f / r, c = g / r;
    g = d[i + 1] - lost;
    const REAL t = (d[i] - g) * s + 2 * c * b;
    lost = s * t;
    d[i + 1] = g + lost;
    g = c * t - b;
    FN(rotate)(z + i * row, z + (i + 1) * row, c, s, n);
  }
  d[first] -= lost;
  e[first] = g;
  e[last] = 0;
}

/* d [n] to its eigenvalues and zeros in z to their vectors, both ascending; false when it does not end. The largest
 * number of the whole matrix is about 1, so that what is below EPSILON^2 counts as 0, and no step works on rounding
 * alone. */
static bool FN(ql)(REAL *d, const REAL *beside, REAL *z, int64_t row, int64_t n) {
  REAL e[MOST_ROWS] = { 0 };
  memcpy(e, beside, sizeof *e * (size_t)(n - 1));
  for (int64_t i = 0; i < n; i++) z[i * row + i] = 1;
  for (int64_t first = 0; first < n; first++) {
    for (int step = 0;; step++) {
      int64_t last = first;
      while (last < n - 1 &&
             FN(absolute)(e[last]) > EPSILON * (FN(absolute)(d[last]) + FN(absolute)(d[last + 1]) + EPSILON))
        last++;
      if (last == first) break;
      if (step == MOST_STEPS) return false;
      FN(ql_step)(d, e, first, last, z, row, n);
    }
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t least = i;
    for (int64_t k = i + 1; k < n; k++)
      if (d[k] < d[least]) least = k;
    if (least == i) continue;
    const REAL value = d[i];
    d[i] = d[least], d[least] = value;
    for (int64_t k = 0; k < n; k++) {
      const REAL x = z[i * row + k];
      z[i * row + k] = z[least * row + k], z[least * row + k] = x;
    }
  }
  return true;
}

static void FN(ql_blocks)(void *context, int64_t begin, int64_t end) {
  FN(conquest) *c = context;
  for (int64_t block = begin; block < end; block++) {
    const int64_t first = FN(block_row)(c, block), rows = FN(block_row)(c, block + 1) - first;
    if (!FN(ql)(c->d + first, c->e + first, c->z + first * (c->n + 1), c->n, rows))
      __atomic_store_n(&c->failed, DIVERGED, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < rows; i++) c->order[first + i] = (int)i;
  }
}

/* ---- two neighbours become one ---- */

/* Two neighbours: rows [0, cut) and [cut, m). Vectors whose part in the matrix of rank one is too small to count, or
 * has been turned into that of a vector of nearly the same value, are done; the others become vectors of the whole. */
typedef struct FN(pair) {
  int64_t n, m, cut;
  REAL *d, *z;          /* [m], [m, m] with rows of n */
  REAL *kept;           /* [m, m]: rows of z: those that count by their kind, then the done ones */
  REAL *part;           /* [m] of each vector in the matrix of rank one */
  REAL *square, *pole;  /* [m] of those that count: the square of their part, later a new part; their value */
  REAL *value;          /* [m] new */
  int *order;           /* [m] rows by value */
  int *sorted, *done;   /* [m] */
  int *kind, *place;    /* [m] of each row; among the kept rows, of those that count */
  int64_t dones;        /* how many */
  int64_t kinds[KINDS]; /* how many of each count */
  FN(secular) secular;
} FN(pair);

/* `into` [a + b]: the rows of two lists in the order of their values. */
static void FN(merge_orders)(const REAL *value, const int *x, int64_t a, const int *y, int64_t b, int from, int *into) {
  for (int64_t i = 0, j = 0; i + j < a + b;) {
    const bool first = j == b || (i < a && value[x[i]] <= value[y[j] + from]);
    if (first) into[i + j] = x[i], i++;
    else into[i + j] = y[j] + from, j++;
  }
}

static void FN(finish)(FN(pair) * p, int row) {
  int64_t i = p->dones++;
  for (; i > 0 && p->d[p->done[i - 1]] > p->d[row]; i--) p->done[i] = p->done[i - 1];
  p->done[i] = row;
}

static void FN(count_in)(FN(pair) * p, int row) {
  const int64_t i = p->secular.count++;
  p->pole[i] = p->d[row];
  p->sorted[i] = row; /* which has been read */
  p->kinds[p->kind[row]]++;
}

/* Parts the rows, by value, into those that count and those that are done. */
static void FN(deflate)(FN(pair) * p, REAL rho, REAL least) {
  int last = -1; /* may still be turned into the next */
  for (int64_t k = 0; k < p->m; k++) {
    const int row = p->sorted[k];
    if (rho * FN(absolute)(p->part[row]) <= least) {
      FN(finish)(p, row);
      continue;
    }
    if (last >= 0) {
      REAL s = p->part[last], c = p->part[row];
      const REAL size = FN(hypotenuse)(s, c);
      s /= size, c /= size;
      if (FN(absolute)((p->d[row] - p->d[last]) * c * s) > least) {
        FN(count_in)(p, last);
      } else {
        const REAL x = p->d[last], y = p->d[row];
        FN(rotate)(p->z + last * p->n, p->z + row * p->n, c, s, p->m);
        p->d[last] = x * c * c + y * s * s, p->d[row] = x * s * s + y * c * c;
        p->part[row] = size;
        if (p->kind[row] != p->kind[last]) p->kind[row] = BOTH;
        FN(finish)(p, last);
      }
    }
    last = row;
  }
  if (last >= 0) FN(count_in)(p, last);
}

/* Copies the rows of z to where products find those of a kind together. */
static void FN(gather)(FN(pair) * p) {
  const FN(secular) *s = &p->secular;
  int64_t next[KINDS] = { 0, p->kinds[UPPER], p->kinds[UPPER] + p->kinds[BOTH] };
  for (int64_t i = 0; i < s->count; i++) {
    const int row = p->sorted[i], kind = p->kind[row];
    p->place[i] = (int)next[kind]++;
    const int64_t first = kind == LOWER ? p->cut : 0, end = kind == UPPER ? p->cut : p->m;
    memcpy(p->kept + p->place[i] * p->m + first, p->z + row * p->n + first, sizeof *p->z * (size_t)(end - first));
    p->square[i] = p->part[row] * p->part[row];
  }
  for (int64_t i = 0; i < p->dones; i++) {
    memcpy(p->kept + (s->count + i) * p->m, p->z + p->done[i] * p->n, sizeof *p->z * (size_t)p->m);
    p->value[s->count + i] = p->d[p->done[i]];
  }
  for (int64_t i = 0; i < p->dones; i++)
    memcpy(p->z + (s->count + i) * p->n, p->kept + (s->count + i) * p->m, sizeof *p->z * (size_t)p->m);
}

static void FN(find_roots)(void *context, int64_t begin, int64_t end) {
  const FN(pair) *p = context;
  for (int64_t group = begin; group < end; group++) FN(secular_lanes)(&p->secular, group * FN(LANES));
}

/* The parts that a matrix of rank one would have whose roots are exactly those that were found. */
static void FN(part_again)(void *context, int64_t begin, int64_t end) {
  const FN(pair) *p = context;
  const FN(secular) *s = &p->secular;
  const REAL *restrict pole = p->pole;
  for (int64_t i = begin; i < end; i++) {
    const REAL *restrict gap = s->gaps + s->place[i] * s->step, at = pole[i];
    REAL product = 1;
#pragma omp simd reduction(* : product)
    for (int64_t j = 0; j < s->count; j++) product *= gap[j] / (j == i ? -1 : at - pole[j]);
    const REAL size = FN(square_root)(product);
    p->square[i] = p->part[p->sorted[i]] < 0 ? -size : size;
  }
}

/* Gaps to the parts of new vectors, a column for each. */
static void FN(weigh)(void *context, int64_t begin, int64_t end) {
  const FN(pair) *p = context;
  const FN(secular) *s = &p->secular;
  for (int64_t group = begin; group < end; group++) {
    REAL *gaps = s->gaps + group * FN(LANES);
    FN(lanes) sum = { 0 };
    for (int64_t from = 0; from < s->count; from += 32) { /* sums of sums, which round less */
      FN(lanes) part = { 0 };
      for (int64_t i = from; i < s->count && i < from + 32; i++) {
        FN(lanes) *gap = (FN(lanes) *)(gaps + s->place[i] * s->step);
        const FN(lanes) x = p->square[i] / *gap;
        *gap = x;
        part += x * x;
      }
      sum += part;
    }
    REAL scale[FN(LANES)];
    *(FN(lanes) *)scale = sum;
    for (int l = 0; l < FN(LANES); l++) scale[l] = 1 / FN(square_root)(scale[l]);
    for (int64_t i = 0; i < s->count; i++) *(FN(lanes) *)(gaps + i * s->step) *= *(FN(lanes) *)scale;
  }
}

/* Columns [first, first + width) of the new vectors, of the kept rows [begin, end). */
static bool FN(combine)(const FN(pair) * p, int64_t begin, int64_t end, int64_t first, int64_t width) {
  const FN(secular) *s = &p->secular;
  if (begin == end) {
    for (int64_t i = 0; i < s->count; i++) memset(p->z + i * p->n + first, 0, sizeof *p->z * (size_t)width);
    return true;
  }
  ty_gemm g = { .m = s->count,
                .n = width,
                .k = end - begin,
                .a = s->gaps + begin * s->step,
                .a_row = 1,
                .a_col = s->step,
                .b = p->kept + begin * p->m + first,
                .b_row = p->m,
                .b_col = 1,
                .c = p->z + first,
                .c_row = p->n };
  return ty_gemm_run(TYPE, &g);
}

/* beside: the element of the tridiagonal matrix that joins the two. */
static bool FN(join)(FN(pair) * p, REAL beside) {
  const REAL rho = 2 * FN(absolute)(beside), root_half = (REAL)0.70710678118654752440;
  REAL most = 0, most_part = 0;
  for (int64_t i = 0; i < p->m; i++) {
    p->kind[i] = i < p->cut ? UPPER : LOWER;
    const REAL x = root_half * p->z[i * p->n + (i < p->cut ? p->cut - 1 : p->cut)];
    p->part[i] = i >= p->cut && beside < 0 ? -x : x;
    most = FN(absolute)(p->d[i]) > most ? FN(absolute)(p->d[i]) : most;
    most_part = FN(absolute)(x) > most_part ? FN(absolute)(x) : most_part;
  }
  const REAL least = 8 * EPSILON * (most > most_part ? most : most_part);
  FN(merge_orders)(p->d, p->order, p->cut, p->order + p->cut, p->m - p->cut, (int)p->cut, p->sorted);
  if (rho * most_part <= least) {
    memcpy(p->order, p->sorted, sizeof *p->order * (size_t)p->m);
    return true;
  }
  FN(secular) *s = &p->secular;
  FN(deflate)(p, rho, least);
  s->step = (s->count + FN(LANES) - 1) / FN(LANES) * FN(LANES);
  s->rho = rho;
  FN(gather)(p);
  const int64_t upper = p->kinds[UPPER];
  if (s->count == 1) {
    s->root[0] = p->pole[0] + rho * p->square[0];
    s->gaps[0] = 1;
  } else {
    s->last = 0;
    for (int64_t i = 0; i < s->count; i++) s->last += p->square[i];
    s->last *= rho * (1 + 16 * EPSILON);
    const int64_t groups = s->step / FN(LANES);
    ty_parallel_for_all(groups, 1 + 2000 / s->count, FN(find_roots), p);
    ty_parallel_for_all(s->count, 1 + 20000 / s->count, FN(part_again), p);
    ty_parallel_for_all(groups, 1 + 5000 / s->count, FN(weigh), p);
  }
  if (!FN(combine)(p, 0, upper + p->kinds[BOTH], 0, p->cut)) return false;
  if (!FN(combine)(p, upper, s->count, p->cut, p->m - p->cut)) return false;
  memcpy(p->d, p->value, sizeof *p->d * (size_t)p->m);
  for (int64_t i = 0; i < p->m; i++) p->done[i] = (int)i;
  FN(merge_orders)(p->d, p->done, s->count, p->done, p->dones, (int)s->count, p->order);
  return true;
}

static void FN(join_blocks)(void *context, int64_t begin, int64_t end) {
  FN(conquest) *c = context;
  for (int64_t block = begin; block < end; block++) {
    const int64_t n = c->n, first = FN(block_row)(c, block), m = FN(block_row)(c, block + 1) - first;
    const int64_t cut = n * (2 * block + 1) / (2 * c->blocks) - first;
    REAL *room = c->room + 2 * (n + FN(LANES)) * first, *rows = c->room + 2 * (n + FN(LANES)) * n + FN(ROWS) * first;
    int *numbers = c->numbers + 4 * first;
    FN(pair)
    p = { .n = n,
          .m = m,
          .cut = cut,
          .d = c->d + first,
          .z = c->z + first * (n + 1),
          .kept = room,
          .part = rows,
          .square = rows + m,
          .pole = rows + 2 * m,
          .value = rows + 3 * m,
          .order = c->order + first,
          .sorted = numbers,
          .done = numbers + m,
          .kind = numbers + 2 * m,
          .place = numbers + 3 * m,
          .secular = { .pole = rows + 2 * m,
                       .weight = rows + m,
                       .place = numbers + 3 * m,
                       .root = rows + 3 * m,
                       .gaps = room + m * m } };
    if (!FN(join)(&p, c->e[first + cut - 1])) __atomic_store_n(&c->failed, NO_MEMORY, __ATOMIC_RELAXED);
  }
}

/* d [n] and e [n], of which n - 1 count, to values, ascending, in d, and vectors, the first n rows of room
 * [CONQUER_ROOM]; e and z [n, n] are lost. numbers [5 n]. 0, or DIVERGED or NO_MEMORY. */
static int FN(conquer)(int64_t n, REAL *d, REAL *e, REAL *z, REAL *room, int *numbers) {
  REAL most = 0;
  for (int64_t i = 0; i < n; i++) {
    most = FN(absolute)(d[i]) > most ? FN(absolute)(d[i]) : most;
    most = i < n - 1 && FN(absolute)(e[i]) > most ? FN(absolute)(e[i]) : most;
  }
  int exponent;
  (void)frexp((double)most, &exponent);
  const REAL scale = most == 0 ? 1 : (REAL)ldexp(1, -exponent); /* a power of two, which rounds nothing */
  for (int64_t i = 0; i < n; i++) d[i] *= scale;
  for (int64_t i = 0; i < n - 1; i++) e[i] *= scale;
  memset(z, 0, sizeof *z * (size_t)(n * n));
  FN(conquest)
  c = { .n = n, .blocks = 1, .d = d, .e = e, .z = z, .room = room, .order = numbers, .numbers = numbers + n };
  while ((n + c.blocks - 1) / c.blocks > MOST_ROWS) c.blocks *= 2;
  for (int64_t block = 1; block < c.blocks; block++) {
    const int64_t row = FN(block_row)(&c, block);
    d[row - 1] -= FN(absolute)(e[row - 1]), d[row] -= FN(absolute)(e[row - 1]);
  }
  ty_parallel_for_all(c.blocks, n < FEW_TO_SHARE ? c.blocks : 1, FN(ql_blocks), &c);
  while (c.blocks > 1 && !c.failed) {
    c.blocks /= 2;
    if (n >= FEW_TO_SHARE && c.blocks >= ty_parallel_threads()) ty_parallel_for_all(c.blocks, 1, FN(join_blocks), &c);
    else FN(join_blocks)(&c, 0, c.blocks); /* whose roots and products are shared */
  }
  if (c.failed) return c.failed;
  for (int64_t i = 0; i < n; i++) e[i] = d[c.order[i]] / scale;
  memcpy(d, e, sizeof *d * (size_t)n);
  for (int64_t i = 0; i < n; i++) memcpy(room + i * n, z + c.order[i] * n, sizeof *z * (size_t)n);
  return 0;
}
