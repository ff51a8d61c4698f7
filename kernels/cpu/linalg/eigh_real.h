/* Eigenvalues and eigenvectors of the symmetric matrices [begin, end) of a job, for one type: REAL, FN(name),
 * TYPE, SAFE, SMALL and EPSILON. */

#include "conquer_real.h"
#include "finite_real.h"
#include "reflections_real.h"
#include "tridiagonal_real.h"
#include "turn_real.h"

/* What the matrix x is multiplied by before and its values are divided by after, so that nothing leaves the type. */
static REAL FN(scale_of)(const REAL *x, int64_t n) {
  REAL most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) {
    const REAL size = x[i] < 0 ? -x[i] : x[i];
    most = size > most ? size : most;
  }
  return most == 0 || (most >= SMALL && most <= 1 / SMALL) ? 1 : most < SMALL ? SMALL / most : 1 / SMALL / most;
}

/* Turns the vectors, the rows of z [n, n], whose largest element is negative. */
static void FN(turn_signs)(REAL *z, int64_t n) {
  for (int64_t r = 0; r < n; r++) {
    REAL most = 0, sign = 1;
    for (int64_t c = 0; c < n; c++) {
      const REAL v = z[r * n + c], size = v < 0 ? -v : v;
      if (size <= most) continue;
      most = size;
      sign = v < 0 ? -1 : 1;
    }
    for (int64_t c = 0; c < n && sign < 0; c++) z[r * n + c] = -z[r * n + c];
  }
}

/* The same where they are columns. room [2 n] */
static void FN(turn_column_signs)(REAL *restrict v, int64_t n, REAL *restrict room) {
  REAL *restrict most = room, *restrict sign = room + n;
  for (int64_t c = 0; c < n; c++) most[c] = 0, sign[c] = 1;
  for (int64_t r = 0; r < n; r++) {
    const REAL *restrict row = v + r * n;
#pragma omp simd
    for (int64_t c = 0; c < n; c++) {
      const REAL x = row[c], size = x < 0 ? -x : x;
      sign[c] = size > most[c] ? (x < 0 ? (REAL)-1 : (REAL)1) : sign[c];
      most[c] = size > most[c] ? size : most[c];
    }
  }
  for (int64_t r = 0; r < n; r++) {
    REAL *restrict row = v + r * n;
#pragma omp simd
    for (int64_t c = 0; c < n; c++) row[c] *= sign[c];
  }
}

/* The product q of the reflections that row c of a holds from its element c + 1 on, the first of which counts as 1,
 * and what it is multiplied with: columns of vectors [n, n]. */
typedef struct FN(reflections) {
  const REAL *a, *triangles; /* a triangle [PANEL, PANEL] for each panel */
  REAL *vectors, *room;      /* 2 * PANEL numbers for a column */
  int64_t n;
  bool out_of_memory;
} FN(reflections);

enum { FN(WIDTH) = 128 }; /* columns of vectors that a thread takes */

static inline int64_t FN(width_of)(const FN(reflections) * r, int64_t first) {
  return r->n - first < FN(WIDTH) ? r->n - first : FN(WIDTH);
}

static void FN(reflect_columns)(void *context, int64_t begin, int64_t end) {
  FN(reflections) *r = context;
  const int64_t n = r->n;
  for (int64_t first = begin * FN(WIDTH); first < n && first < end * FN(WIDTH); first += FN(WIDTH)) {
    for (int64_t at = (n - 2) / PANEL * PANEL; at >= 0; at -= PANEL) {
      const int64_t count = n - 1 - at < PANEL ? n - 1 - at : PANEL;
      if (!FN(apply_panel)(r->a + at * n + at + 1, count, n - 1 - at, n, r->triangles + at * PANEL, false,
                           r->vectors + (at + 1) * n + first, n, FN(width_of)(r, first), r->room + 2 * PANEL * first))
        __atomic_store_n(&r->out_of_memory, true, __ATOMIC_RELAXED);
    }
  }
}

/* vectors = q z, where row k of z [n, n] is vector k of the tridiagonal matrix, and lost. room [3 * PANEL * (n +
 * PANEL)] may be where z is, which has been turned by then. */
static bool FN(reflect_vectors)(REAL *a, int64_t n, const REAL *tau, REAL *z, REAL *vectors, REAL *room) {
  if (n <= FEW) {
    for (int64_t c = n - 2; c >= 0; c--) FN(reflect)(a + c * n + c + 1, tau[c], z + c + 1, n, n, n - c - 1);
    FN(turn_signs)(z, n);
    FN(turn)(vectors, z, n, n);
    return true;
  }
  FN(turn)(vectors, z, n, n);
  FN(reflections) r = { .a = a, .triangles = room, .vectors = vectors, .room = room + PANEL * (n + PANEL), .n = n };
  for (int64_t at = 0; at < n - 1; at += PANEL) {
    const int64_t count = n - 1 - at < PANEL ? n - 1 - at : PANEL;
    REAL *v = a + at * n + at + 1;
    for (int64_t c = 0; c < count; c++)
      for (int64_t i = 0; i <= c; i++) v[c * n + i] = i == c;
    FN(panel_triangle)(v, count, n - 1 - at, n, tau + at, room + at * PANEL);
  }
  ty_parallel_for_all((n + FN(WIDTH) - 1) / FN(WIDTH), 1, FN(reflect_columns), &r);
  if (r.out_of_memory) return false;
  FN(turn_column_signs)(vectors, n, room);
  return true;
}

static void FN(eigh)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const int64_t n = j->n, square = n * n, products = 3 * PANEL * (n + PANEL);
  int64_t need = CONQUER_ROOM(n);
  if (need < TRIDIAGONAL_ROOM(n)) need = TRIDIAGONAL_ROOM(n);
  if (need < products) need = products;
  const size_t reals = (size_t)(2 * square + 2 * n + need), integers = 5 * (size_t)n;
  const size_t bytes = sizeof(REAL) * reals + sizeof(int) * integers;
  REAL *a = ty_scratch_alloc(bytes);
  if (!a) {
    j->out_of_memory = true;
    return;
  }
  REAL *z = a + square, *e = z + square, *tau = e + n, *work = tau + n;
  int *numbers = (int *)(void *)(a + reals);
  for (int64_t i = begin; i < end; i++) {
    const REAL *x = (const REAL *)j->k->in[0]->data + i * square;
    REAL *values = (REAL *)j->k->out[0]->data + i * n, *vectors = (REAL *)j->k->out[1]->data + i * square;
    if (!FN(finite)(x, square)) {
      note(j, i, NOT_FINITE);
      continue;
    }
    const REAL scale = FN(scale_of)(x, square);
    for (int64_t l = 0; l < square; l++) a[l] = scale * x[l];
    if (!FN(tridiagonal)(a, n, values, e, tau, work)) {
      j->out_of_memory = true;
      break;
    }
    if (ty_interrupted) break;
    const int failed = FN(conquer)(n, values, e, z, work, numbers);
    if (failed == DIVERGED) {
      note(j, i, 1);
      continue;
    }
    for (int64_t r = 0; r < n && scale != 1; r++) values[r] /= scale;
    if (failed == NO_MEMORY || !FN(reflect_vectors)(a, n, tau, work, vectors, work)) {
      j->out_of_memory = true;
      break;
    }
  }
  ty_scratch_free(a, bytes);
}
