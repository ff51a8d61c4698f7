/* sort, topk and single order statistics along one dimension. Values become unsigned keys whose order is the wanted one
 * (NaN largest, -0 equal to 0), paired with their position, so that equal values keep their order. */
#include "../cpu.h"

#include <string.h>

#include "../lines.h"

#define RADIX_FROM 512 /* shorter lines are merge-sorted */
#define LONG 65536     /* lines from here on are shared out */

/* ---- keys ---- */

static inline uint64_t float_key(uint64_t bits, uint64_t sign, uint64_t infinity) {
  if ((bits & ~sign) > infinity) return sign | (sign - 1); /* NaN */
  if (bits == sign) bits = 0;
  return bits & sign ? ~bits & (sign | (sign - 1)) : bits | sign;
}

static inline __attribute__((always_inline)) uint64_t key_at(const void *x, int64_t i, const int dtype) {
  switch (dtype) {
    case TY_BOOL:
    case TY_U8: return ((const uint8_t *)x)[i];
    case TY_I8: return ((const uint8_t *)x)[i] ^ 0x80u;
    case TY_I16: return ((const uint16_t *)x)[i] ^ 0x8000u;
    case TY_I32: return ((const uint32_t *)x)[i] ^ 0x80000000u;
    case TY_I64: return ((const uint64_t *)x)[i] ^ 0x8000000000000000u;
    case TY_F16: return float_key(((const uint16_t *)x)[i], 0x8000u, 0x7c00u);
    case TY_BF16: return float_key(((const uint16_t *)x)[i], 0x8000u, 0x7f80u);
    case TY_F32: return float_key(((const uint32_t *)x)[i], 0x80000000u, 0x7f800000u);
    default: return float_key(((const uint64_t *)x)[i], 0x8000000000000000u, 0x7ff0000000000000u);
  }
}

static inline uint64_t key_mask(int dtype) { return UINT64_MAX >> (64 - 8 * ty_dtype_size[dtype]); }

/* ---- pairs of key and position: 8 bytes when both have 32 bits, else 16 ---- */

typedef struct wide {
  uint64_t key, at;
} wide;
#define NARROW_LESS(a, b) ((a) < (b))
#define WIDE_LESS(a, b) ((a).key < (b).key || ((a).key == (b).key && (a).at < (b).at))
#define NARROW_DIGIT(a, shift) ((a) >> (32 + (shift)) & 255)
#define WIDE_DIGIT(a, shift) ((a).key >> (shift)&255)

/* name_sort: stable; `bytes` of the key count. The result lies in a; b is as long and holds rubbish. */
#define SORT(name, P, LESS, DIGIT)                                                                                    \
  static inline void name##_merge(P *to, const P *u, int64_t m, const P *v, int64_t n) {                              \
    int64_t i = 0, j = 0;                                                                                             \
    while (i < m && j < n) {                                                                                          \
      const bool right = LESS(v[j], u[i]);                                                                            \
      *to++ = right ? v[j] : u[i];                                                                                    \
      j += right;                                                                                                     \
      i += !right;                                                                                                    \
    }                                                                                                                 \
    memcpy(to, u + i, (size_t)(m - i) * sizeof(P));                                                                   \
    memcpy(to + (m - i), v + j, (size_t)(n - j) * sizeof(P));                                                         \
  }                                                                                                                   \
  static void name##_merge_sort(P *a, P *b, int64_t n) {                                                              \
    const int64_t run = 16;                                                                                           \
    for (int64_t start = 0; start < n; start += run) {                                                                \
      int64_t stop = start + run < n ? start + run : n;                                                               \
      for (int64_t i = start + 1; i < stop; i++) {                                                                    \
        P v = a[i];                                                                                                   \
        int64_t j = i;                                                                                                \
        for (; j > start && LESS(v, a[j - 1]); j--) a[j] = a[j - 1];                                                  \
        a[j] = v;                                                                                                     \
      }                                                                                                               \
    }                                                                                                                 \
    P *from = a, *to = b;                                                                                             \
    for (int64_t width = run; width < n; width *= 2) {                                                                \
      for (int64_t start = 0; start < n; start += 2 * width) {                                                        \
        const int64_t mid = start + width < n ? start + width : n, stop = mid + width < n ? mid + width : n;          \
        name##_merge(to + start, from + start, mid - start, from + mid, stop - mid);                                  \
      }                                                                                                               \
      P *other = from;                                                                                                \
      from = to;                                                                                                      \
      to = other;                                                                                                     \
    }                                                                                                                 \
    if (from != a) memcpy(a, from, (size_t)n * sizeof(P));                                                            \
  }                                                                                                                   \
  static void name##_sort(P *a, P *b, int64_t n, int bytes, int unused) {                                             \
    (void)unused;                                                                                                     \
    if (n < RADIX_FROM) {                                                                                             \
      name##_merge_sort(a, b, n);                                                                                     \
      return;                                                                                                         \
    }                                                                                                                 \
    int64_t counts[8][256] = { { 0 } };                                                                               \
    for (int64_t i = 0; i < n; i++)                                                                                   \
      for (int d = 0; d < bytes; d++) counts[d][DIGIT(a[i], 8 * d)]++;                                                \
    P *from = a, *to = b;                                                                                             \
    for (int d = 0; d < bytes; d++) {                                                                                 \
      if (counts[d][DIGIT(from[0], 8 * d)] == n) continue; /* all share this digit */                                 \
      int64_t at[256], sum = 0;                                                                                       \
      for (int v = 0; v < 256; v++) {                                                                                 \
        at[v] = sum;                                                                                                  \
        sum += counts[d][v];                                                                                          \
      }                                                                                                               \
      for (int64_t i = 0; i < n; i++) to[at[DIGIT(from[i], 8 * d)]++] = from[i];                                      \
      P *other = from;                                                                                                \
      from = to;                                                                                                      \
      to = other;                                                                                                     \
    }                                                                                                                 \
    if (from != a) memcpy(a, from, (size_t)n * sizeof(P));                                                            \
  }                                                                                                                   \
  /* A long line, sorted in parts by threads, none of which Ctrl-C leaves out: positions are looked up afterwards. */ \
  typedef struct name##_parts {                                                                                       \
    P *a, *b;                                                                                                         \
    int64_t n, parts, width; /* width: parts that are in order together */                                            \
    void (*sort)(P * a, P *b, int64_t n, int first, int second);                                                      \
    int first, second;                                                                                                \
  } name##_parts;                                                                                                     \
  static void name##_sort_parts(void *context, int64_t begin, int64_t end) {                                          \
    const name##_parts *s = context;                                                                                  \
    for (int64_t p = begin; p < end; p++) {                                                                           \
      const int64_t at = s->n * p / s->parts, to = s->n * (p + 1) / s->parts;                                         \
      s->sort(s->a + at, s->b + at, to - at, s->first, s->second);                                                    \
    }                                                                                                                 \
  }                                                                                                                   \
  /* How many of the first k of u and v together are of u; no two are equal. */                                       \
  static int64_t name##_of_first(const P *u, int64_t m, const P *v, int64_t n, int64_t k) {                           \
    int64_t low = k > n ? k - n : 0, high = k < m ? k : m;                                                            \
    while (low < high) {                                                                                              \
      const int64_t i = (low + high) / 2;                                                                             \
      if (LESS(u[i], v[k - i - 1])) low = i + 1;                                                                      \
      else high = i;                                                                                                  \
    }                                                                                                                 \
    return low;                                                                                                       \
  }                                                                                                                   \
  /* Each part of the result from its two runs. */                                                                    \
  static void name##_merge_parts(void *context, int64_t begin, int64_t end) {                                         \
    const name##_parts *s = context;                                                                                  \
    for (int64_t p = begin; p < end; p++) {                                                                           \
      const int64_t run = p / (2 * s->width) * 2 * s->width, half = run + s->width, last = half + s->width;           \
      const int64_t from = s->n * run / s->parts;                                                                     \
      const int64_t mid = s->n * (half < s->parts ? half : s->parts) / s->parts;                                      \
      const int64_t stop = s->n * (last < s->parts ? last : s->parts) / s->parts;                                     \
      const P *u = s->a + from, *v = s->a + mid;                                                                      \
      const int64_t k = s->n * p / s->parts - from, end_k = s->n * (p + 1) / s->parts - from;                         \
      int64_t i = name##_of_first(u, mid - from, v, stop - mid, k), j = k - i;                                        \
      const int64_t end_i = name##_of_first(u, mid - from, v, stop - mid, end_k), end_j = end_k - end_i;              \
      name##_merge(s->b + from + k, u + i, end_i - i, v + j, end_j - j);                                              \
    }                                                                                                                 \
  }                                                                                                                   \
  /* Sorts by sort(a, b, n, first, second), which leaves its result in a; returns where the result lies. */           \
  static P *name##_sort_long(P *a, P *b, int64_t n, void (*sort)(P *, P *, int64_t, int, int), int first,             \
                             int second) {                                                                            \
    name##_parts s = { a, b, n, ty_parallel_threads(), 1, sort, first, second };                                      \
    if (n < LONG || s.parts < 2) {                                                                                    \
      sort(a, b, n, first, second);                                                                                   \
      return a;                                                                                                       \
    }                                                                                                                 \
    ty_parallel_for_all(s.parts, 1, name##_sort_parts, &s);                                                           \
    for (; s.width < s.parts; s.width *= 2) {                                                                         \
      ty_parallel_for_all(s.parts, 1, name##_merge_parts, &s);                                                        \
      P *other = s.a;                                                                                                 \
      s.a = s.b;                                                                                                      \
      s.b = other;                                                                                                    \
    }                                                                                                                 \
    return s.a;                                                                                                       \
  }                                                                                                                   \
  /* Moves a[i] down a heap of n whose root is the greatest. */                                                       \
  static void name##_sift(P *a, int64_t i, int64_t n) {                                                               \
    P v = a[i];                                                                                                       \
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {                                                         \
      if (child + 1 < n && LESS(a[child], a[child + 1])) child++;                                                     \
      if (!LESS(v, a[child])) break;                                                                                  \
      a[i] = a[child];                                                                                                \
    }                                                                                                                 \
    a[i] = v;                                                                                                         \
  }
SORT(narrow, uint64_t, NARROW_LESS, NARROW_DIGIT)
SORT(wide, wide, WIDE_LESS, WIDE_DIGIT)

/* ---- the lines ---- */

typedef struct sort_ctx {
  ty_lines l;
  int dtype;
  uint64_t flip; /* all ones of a key for descending order: ties still stay in order */
  int64_t k;     /* how many come out; l.size for sort */
  const void *x;
  void *values; /* NULL: positions alone are wanted */
  int64_t *positions;
  char *scratch; /* 2 * l.size pairs per piece of work */
  int64_t tasks; /* pieces of work */
  bool fits;     /* narrow pairs do */
} sort_ctx;

#define MAKE_NARROW(key, i) ((uint64_t)(key) << 32 | (uint64_t)(i))
#define MAKE_WIDE(key, i) ((wide){ (key), (uint64_t)(i) })
#define NARROW_AT(p) ((int64_t)((p)&UINT32_MAX))
#define WIDE_AT(p) ((int64_t)(p).at)

/* The pairs in order, in a or b; the first k count. With few wanted a heap keeps the best k seen so far. */
#define ORDER(name, P, MAKE, LESS)                                                               \
  static inline __attribute__((always_inline))                                                   \
  P *name##_order(const sort_ctx *c, int64_t base, P *a, P *b, const int dtype) {                \
    int64_t n = c->l.size, step = c->l.inner, k = c->k;                                          \
    const char *x = (const char *)c->x + base * ty_dtype_size[dtype];                            \
    if (k > n / 8) {                                                                             \
      for (int64_t i = 0; i < n; i++) a[i] = MAKE(key_at(x, i * step, dtype) ^ c->flip, i);      \
      return name##_sort_long(a, b, n, name##_sort, ty_dtype_size[dtype], 0);                    \
    }                                                                                            \
    for (int64_t i = 0; i < k; i++) a[i] = MAKE(key_at(x, i * step, dtype) ^ c->flip, i);        \
    for (int64_t i = k / 2 - 1; i >= 0; i--) name##_sift(a, i, k);                               \
    for (int64_t i = k; i < n && k > 0; i++) {                                                   \
      P v = MAKE(key_at(x, i * step, dtype) ^ c->flip, i);                                       \
      if (!LESS(v, a[0])) continue;                                                              \
      a[0] = v;                                                                                  \
      name##_sift(a, 0, k);                                                                      \
    }                                                                                            \
    name##_merge_sort(a, b, k); /* looks at positions too: a heap does not keep them in order */ \
    return a;                                                                                    \
  }
ORDER(narrow, uint64_t, MAKE_NARROW, NARROW_LESS)
ORDER(wide, wide, MAKE_WIDE, WIDE_LESS)

static inline __attribute__((always_inline)) void move(void *to, int64_t i, const void *from, int64_t j, size_t bytes) {
  memcpy((char *)to + (size_t)i * bytes, (const char *)from + (size_t)j * bytes, bytes);
}

static void emit(const sort_ctx *c, int64_t from, int64_t to, int64_t at) {
  c->positions[to] = at;
  if (!c->values) return;
  switch (ty_dtype_size[c->dtype]) {
    case 1: move(c->values, to, c->x, from + at * c->l.inner, 1); break;
    case 2: move(c->values, to, c->x, from + at * c->l.inner, 2); break;
    case 4: move(c->values, to, c->x, from + at * c->l.inner, 4); break;
    default: move(c->values, to, c->x, from + at * c->l.inner, 8);
  }
}

static int bits_of(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

enum { PACKED_DIGIT = 9 };

/* Sorts numbers by `bits` bits from `low` on, those below in order already; the result lies in a. */
static void packed_sort(uint64_t *a, uint64_t *b, int64_t n, int low, int bits) {
  const int passes = (bits + PACKED_DIGIT - 1) / PACKED_DIGIT, width = passes ? (bits + passes - 1) / passes : 0;
  const uint64_t mask = ((uint64_t)1 << width) - 1;
  uint64_t *from = a, *to = b;
  for (int pass = 0; pass < passes; pass++) {
    const int shift = low + pass * width;
    int64_t at[1 << PACKED_DIGIT] = { 0 }, sum = 0;
    for (int64_t i = 0; i < n; i++) at[from[i] >> shift & mask]++;
    for (uint64_t v = 0; v <= mask; v++) {
      const int64_t count = at[v];
      at[v] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; i++) to[at[from[i] >> shift & mask]++] = from[i];
    uint64_t *other = from;
    from = to;
    to = other;
  }
  if (from != a) memcpy(a, from, (size_t)n * sizeof *a);
}

/* A line of i64 as numbers: their distance from the first in order above their position. */
typedef struct close_integers {
  const sort_ctx *c;
  const int64_t *x;
  uint64_t *a, first, sign;
  int64_t to;
  int low; /* bits of a position */
} close_integers;

static void pack_integers(void *context, int64_t begin, int64_t end) {
  const close_integers *q = context;
  const int64_t step = q->c->l.inner;
  for (int64_t i = begin; i < end; i++)
    q->a[i] = (((uint64_t)q->x[i * step] - q->first) * q->sign) << q->low | (uint64_t)i;
}

static void unpack_integers(void *context, int64_t begin, int64_t end) {
  const close_integers *q = context;
  const int64_t step = q->c->l.inner;
  const uint64_t position = ((uint64_t)1 << q->low) - 1;
  int64_t *positions = q->c->positions + q->to, *values = q->c->values ? (int64_t *)q->c->values + q->to : NULL;
  for (int64_t j = begin; j < end; j++) positions[j * step] = (int64_t)(q->a[j] & position);
  for (int64_t j = begin; values && j < end; j++)
    values[j * step] = (int64_t)((q->a[j] >> q->low) * q->sign + q->first);
}

/* A line of i64 that lie so close to each other that what is between them and a position have room in 64 bits, as counts
 * and ids do: numbers of 8 bytes, from which the values are made again without looking them up. False where they do not
 * lie so. */
static bool sort_close_integers(const sort_ctx *c, int64_t from, int64_t to, uint64_t *a) {
  int64_t n = c->l.size, step = c->l.inner;
  if (c->dtype != TY_I64 || n < RADIX_FROM || c->k <= n / 8) return false;
  const int64_t *x = (const int64_t *)c->x + from;
  int64_t least = x[0], most = x[0];
  for (int64_t i = 1; i < n; i++) {
    int64_t v = x[i * step];
    least = v < least ? v : least;
    most = v > most ? v : most;
  }
  const int low = bits_of((uint64_t)n - 1), bits = bits_of((uint64_t)most - (uint64_t)least);
  if (low + bits > 64) return false;
  close_integers q = { .c = c, .x = x, .a = a, .to = to, .low = low };
  q.first = (uint64_t)(c->flip ? most : least);
  q.sign = c->flip ? UINT64_MAX : 1; /* descending: from above */
  ty_parallel_for_all(n, LONG / 4, pack_integers, &q);
  q.a = narrow_sort_long(a, a + n, n, packed_sort, low, bits);
  ty_parallel_for_all(c->k, LONG / 4, unpack_integers, &q);
  return true;
}

/* Pairs in order, to be told apart into values and positions. */
typedef struct emission {
  const sort_ctx *c;
  const void *pairs;
  int64_t from, to;
} emission;

static void emit_narrow(void *context, int64_t begin, int64_t end) {
  const emission *e = context;
  for (int64_t j = begin; j < end; j++)
    emit(e->c, e->from, e->to + j * e->c->l.inner, NARROW_AT(((const uint64_t *)e->pairs)[j]));
}

static void emit_wide(void *context, int64_t begin, int64_t end) {
  const emission *e = context;
  for (int64_t j = begin; j < end; j++)
    emit(e->c, e->from, e->to + j * e->c->l.inner, WIDE_AT(((const wide *)e->pairs)[j]));
}

static void sort_line(const sort_ctx *c, int64_t line, void *scratch) {
  int64_t o = line / c->l.inner, i = line % c->l.inner;
  int64_t from = o * c->l.size * c->l.inner + i, to = o * c->k * c->l.inner + i;
  uint64_t *a = scratch, *b = a + c->l.size;
  if (sort_close_integers(c, from, to, a)) return;
  wide *wa = scratch, *wb = wa + c->l.size;
  emission e = { c, NULL, from, to };
  if (c->fits) {
    switch (c->dtype) {
      case TY_BOOL:
      case TY_U8: e.pairs = narrow_order(c, from, a, b, TY_U8); break;
      case TY_I8: e.pairs = narrow_order(c, from, a, b, TY_I8); break;
      case TY_I16: e.pairs = narrow_order(c, from, a, b, TY_I16); break;
      case TY_I32: e.pairs = narrow_order(c, from, a, b, TY_I32); break;
      case TY_F16: e.pairs = narrow_order(c, from, a, b, TY_F16); break;
      case TY_BF16: e.pairs = narrow_order(c, from, a, b, TY_BF16); break;
      default: e.pairs = narrow_order(c, from, a, b, TY_F32);
    }
    ty_parallel_for_all(c->k, LONG / 4, emit_narrow, &e);
  } else {
    switch (c->dtype) {
      case TY_I64: e.pairs = wide_order(c, from, wa, wb, TY_I64); break;
      case TY_F64: e.pairs = wide_order(c, from, wa, wb, TY_F64); break;
      default: e.pairs = wide_order(c, from, wa, wb, c->dtype);
    }
    ty_parallel_for_all(c->k, LONG / 4, emit_wide, &e);
  }
}

static void sort_tasks(void *context, int64_t begin, int64_t end) {
  const sort_ctx *c = context;
  int64_t lines = c->l.outer * c->l.inner;
  size_t each = (size_t)c->l.size * 2 * (c->fits ? sizeof(uint64_t) : sizeof(wide));
  int64_t share = (lines + c->tasks - 1) / c->tasks;
  for (int64_t t = begin; t < end; t++)
    for (int64_t line = t * share; line < (t + 1) * share && line < lines && !ty_interrupted; line++)
      sort_line(c, line, c->scratch + (size_t)t * each);
}

static bool sort_lines(const ty_kernel_args *k, int64_t count) {
  const ty_view *x = k->in[0];
  const ty_p_dim *p = k->params;
  sort_ctx c = { .l = ty_lines_of(x, p->dim),
                 .dtype = x->dtype,
                 .flip = p->flag ? key_mask(x->dtype) : 0,
                 .x = x->data,
                 .values = k->nout > 1 ? k->out[0]->data : NULL,
                 .positions = k->out[k->nout - 1]->data };
  c.k = count < 0 ? c.l.size : count;
  int64_t lines = c.l.outer * c.l.inner;
  if (lines == 0 || c.k == 0) return true;
  c.fits = ty_dtype_size[x->dtype] <= 4 && c.l.size <= UINT32_MAX;
  /* Small work is one task; scratch grows with the tasks, not with the lines. */
  c.tasks = x->count < 4096 ? 1 : ty_parallel_threads() * 4;
  if (c.tasks > lines) c.tasks = lines;
  size_t bytes = (size_t)c.tasks * (size_t)c.l.size * 2 * (c.fits ? sizeof(uint64_t) : sizeof(wide));
  c.scratch = ty_scratch_alloc(bytes);
  if (!c.scratch) return false;
  ty_parallel_for(c.tasks, 1, sort_tasks, &c);
  ty_scratch_free(c.scratch, bytes);
  return true;
}

/* in: x; out: values (left out: positions alone), positions; dim, flag: descending. */
bool TY_KERNEL(sort)(const ty_kernel_args *k) { return sort_lines(k, -1); }

/* The same for the k first in order; flag: the largest. */
bool TY_KERNEL(topk)(const ty_kernel_args *k) { return sort_lines(k, ((const ty_p_dim *)k->params)->k); }

/* ---- one element of the order ---- */

typedef struct select_ctx {
  sort_ctx s;
  int64_t rank;
  bool median, skip; /* skip: the median of what is no NaN; else a NaN is the median where there is one */
} select_ctx;

/* The byte of a key at `shift`; the same of all elements that are left leaves those whose byte has the rank. */
#define SELECT(name, P, MAKE, DIGIT, AT)                                                  \
  static inline __attribute__((always_inline))                                            \
  int64_t name##_select(const select_ctx *c, int64_t base, P *a, P *b, const int dtype) { \
    int64_t n = c->s.l.size, step = c->s.l.inner, rank = c->rank;                         \
    const char *x = (const char *)c->s.x + base * ty_dtype_size[dtype];                   \
    const uint64_t nan = key_mask(dtype);                                                 \
    int64_t numbers = 0;                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                     \
      uint64_t key = key_at(x, i * step, dtype);                                          \
      numbers += key != nan;                                                              \
      a[i] = MAKE(key, i);                                                                \
    }                                                                                     \
    if (!ty_is_float((ty_dtype)dtype)) numbers = n;                                       \
    if (c->median) rank = numbers < n ? numbers : (n - 1) / 2;                            \
    if (c->skip) rank = numbers > 0 ? (numbers - 1) / 2 : 0;                              \
    for (int shift = 8 * ty_dtype_size[dtype] - 8; shift >= 0 && n > 1; shift -= 8) {     \
      int64_t counts[256] = { 0 }, left = 0;                                              \
      for (int64_t i = 0; i < n; i++) counts[DIGIT(a[i], shift)]++;                       \
      uint64_t digit = 0;                                                                 \
      while (rank >= counts[digit]) rank -= counts[digit++];                              \
      if (counts[digit] == n) continue;                                                   \
      for (int64_t i = 0; i < n; i++) {                                                   \
        b[left] = a[i];                                                                   \
        left += DIGIT(a[i], shift) == digit;                                              \
      }                                                                                   \
      P *other = a;                                                                       \
      a = b;                                                                              \
      b = other;                                                                          \
      n = left;                                                                           \
    }                                                                                     \
    return AT(a[rank]); /* equal ones are in order */                                     \
  }
SELECT(narrow, uint64_t, MAKE_NARROW, NARROW_DIGIT, NARROW_AT)
SELECT(wide, wide, MAKE_WIDE, WIDE_DIGIT, WIDE_AT)

static int64_t select_in_line(const select_ctx *c, int64_t from, void *scratch) {
  uint64_t *a = scratch, *b = a + c->s.l.size;
  wide *wa = scratch, *wb = wa + c->s.l.size;
  if (!c->s.fits) {
    switch (c->s.dtype) {
      case TY_I64: return wide_select(c, from, wa, wb, TY_I64);
      case TY_F64: return wide_select(c, from, wa, wb, TY_F64);
      default: return wide_select(c, from, wa, wb, c->s.dtype);
    }
  }
  switch (c->s.dtype) {
    case TY_F16: return narrow_select(c, from, a, b, TY_F16);
    case TY_BF16: return narrow_select(c, from, a, b, TY_BF16);
    case TY_F32: return narrow_select(c, from, a, b, TY_F32);
    default: return narrow_select(c, from, a, b, c->s.dtype);
  }
}

static void select_tasks(void *context, int64_t begin, int64_t end) {
  const select_ctx *c = context;
  int64_t lines = c->s.l.outer * c->s.l.inner;
  size_t each = (size_t)c->s.l.size * 2 * (c->s.fits ? sizeof(uint64_t) : sizeof(wide));
  int64_t share = (lines + c->s.tasks - 1) / c->s.tasks;
  for (int64_t t = begin; t < end; t++)
    for (int64_t line = t * share; line < (t + 1) * share && line < lines && !ty_interrupted; line++) {
      int64_t from = line / c->s.l.inner * c->s.l.size * c->s.l.inner + line % c->s.l.inner;
      emit(&c->s, from, line, select_in_line(c, from, c->s.scratch + (size_t)t * each));
    }
}

/* in: x; out: values and positions with one element in the dimension; k: the rank; flag: the median, the lower of two;
 * flag2: that of what is no NaN. */
bool TY_KERNEL(order_statistic)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0];
  const ty_p_dim *p = k->params;
  select_ctx c = { .s = { .l = ty_lines_of(x, p->dim),
                          .dtype = x->dtype,
                          .k = 1,
                          .x = x->data,
                          .values = k->out[0]->data,
                          .positions = k->out[1]->data },
                   .rank = p->k,
                   .median = p->flag,
                   .skip = p->flag2 };
  int64_t lines = c.s.l.outer * c.s.l.inner;
  if (lines == 0) return true;
  c.s.fits = ty_dtype_size[x->dtype] <= 4 && c.s.l.size <= UINT32_MAX;
  c.s.tasks = x->count < 4096 ? 1 : ty_parallel_threads() * 4;
  if (c.s.tasks > lines) c.s.tasks = lines;
  size_t bytes = (size_t)c.s.tasks * (size_t)c.s.l.size * 2 * (c.s.fits ? sizeof(uint64_t) : sizeof(wide));
  if (!(c.s.scratch = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(c.s.tasks, 1, select_tasks, &c);
  ty_scratch_free(c.s.scratch, bytes);
  return true;
}
