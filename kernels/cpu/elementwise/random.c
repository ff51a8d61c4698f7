/* Random numbers. Element i takes word i % 4 of block offset + i / 4, so the result does not depend on how the work is
 * split. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "../../half.h"
#include "../random_words.h"

enum { BLOCK = RANDOM_WORDS, GRAIN = 16384 };

typedef struct job {
  const ty_view *out, *in;
  const ty_p_random *p;
} job;

static int64_t element_offset(const ty_view *v, int64_t i) {
  if (v->contiguous) return i;
  int64_t offset = 0;
  for (int d = v->ndim - 1; d >= 0; d--) {
    offset += i % v->size[d] * v->stride[d];
    i /= v->size[d];
  }
  return offset;
}

static void put(const ty_view *v, int64_t i, double x) {
  int64_t at = element_offset(v, i);
  switch (v->dtype) {
    case TY_F64: ((double *)v->data)[at] = x; break;
    case TY_F32: ((float *)v->data)[at] = (float)x; break;
    case TY_F16: ((uint16_t *)v->data)[at] = ty_f32_to_f16((float)x); break;
    case TY_BF16: ((uint16_t *)v->data)[at] = ty_f32_to_bf16((float)x); break;
    case TY_I64: ((int64_t *)v->data)[at] = (int64_t)x; break;
    case TY_I32: ((int32_t *)v->data)[at] = (int32_t)x; break;
    case TY_I16: ((int16_t *)v->data)[at] = (int16_t)x; break;
    case TY_I8: ((int8_t *)v->data)[at] = (int8_t)x; break;
    default: ((uint8_t *)v->data)[at] = (uint8_t)x; break;
  }
}

/* A block of values, computed in f32 so that a seed gives the same numbers in every dtype. */
typedef void block_fn(const job *j, const uint32_t *w, float *x);

/* The largest value of the dtype below x, for x above 0. */
static float below(ty_dtype dtype, double x) {
  if (dtype == TY_F16 || dtype == TY_BF16) {
    uint16_t h = dtype == TY_F16 ? ty_f32_to_f16((float)x) : ty_f32_to_bf16((float)x);
    float y = dtype == TY_F16 ? ty_f16_to_f32(h) : ty_bf16_to_f32(h);
    if ((double)y < x) return y;
    h = (uint16_t)(y > 0 ? h - 1 : y < 0 ? h + 1 : 0x8001);
    return dtype == TY_F16 ? ty_f16_to_f32(h) : ty_bf16_to_f32(h);
  }
  return (double)(float)x < x ? (float)x : nextafterf((float)x, -INFINITY);
}

static void uniform_block(const job *j, const uint32_t *w, float *x) {
  float low = (float)j->p->a, width = (float)(j->p->b - j->p->a);
  float most = width > 0 ? below((ty_dtype)j->out->dtype, j->p->b) : low; /* rounding must not reach the open end */
  for (int i = 0; i < BLOCK; i++) {
    float u = low + width * ty_uniform_f32(w[i]);
    x[i] = u < most ? u : most;
  }
}

/* Box and Muller 1958, on words 0, 1 and words 2, 3 of each block. */
static void normal_block(const job *j, const uint32_t *w, float *x) {
  float mean = (float)j->p->a, std = (float)j->p->b;
#pragma omp simd
  for (int i = 0; i < BLOCK / 2; i++) {
    float r = std * sqrtf(-2.0f * ty_log_f32(ty_uniform_positive_f32(w[2 * i])));
    float turn = 6.28318531f * ty_uniform_f32(w[2 * i + 1]);
    x[2 * i] = mean + r * ty_cos_f32(turn);
    x[2 * i + 1] = mean + r * ty_sin_f32(turn);
  }
}

static void fill(const job *j, block_fn *f, int64_t begin, int64_t end) {
  uint32_t w[BLOCK];
  float x[BLOCK];
  const ty_view *v = j->out;
  ty_dtype dtype = (ty_dtype)v->dtype;
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    random_words(j->p, i, w);
    f(j, w, x);
    if (!v->contiguous) {
      for (int64_t k = 0; k < n; k++) put(v, i + k, x[k]);
    } else if (dtype == TY_F32) {
      memcpy((float *)v->data + i, x, (size_t)n * sizeof *x);
    } else if (dtype == TY_F64) {
      for (int64_t k = 0; k < n; k++) ((double *)v->data)[i + k] = x[k];
    } else {
      ty_half_store(dtype, (uint16_t *)v->data + i, x, n);
    }
  }
}

static void uniform_range(void *context, int64_t begin, int64_t end) { fill(context, uniform_block, begin, end); }
static void normal_range(void *context, int64_t begin, int64_t end) { fill(context, normal_block, begin, end); }

static bool run(const ty_kernel_args *k, ty_range_fn *f) {
  job j = { k->out[0], k->nin ? k->in[0] : NULL, k->params };
  ty_parallel_for(j.out->count, GRAIN, f, &j);
  return true;
}

bool TY_KERNEL(uniform)(const ty_kernel_args *k) { return run(k, uniform_range); }
bool TY_KERNEL(normal)(const ty_kernel_args *k) { return run(k, normal_range); }

/* low + floor(word * range / 2^32); ranges above 2^32 take a second word from a block of their own. */
static void randint_range(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  int64_t low = (int64_t)j->p->a;
  uint64_t range = (uint64_t)ty_f64_to_i64(j->p->b, INT64_MIN, INT64_MAX) - (uint64_t)low;
  uint32_t w[BLOCK];
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    random_words(j->p, i, w);
    for (int64_t k = 0; k < n; k++) {
      uint64_t pick;
      if (range <= 0xffffffffu) {
        pick = (uint64_t)w[k] * range >> 32;
      } else {
        uint64_t wide = (uint64_t)w[k] << 32 |
                        ty_philox_block(~j->p->seed, j->p->offset + (uint64_t)(i + k) / 4).w[(i + k) % 4];
        pick = (uint64_t)((unsigned __int128)wide * range >> 64);
      }
      int64_t value = (int64_t)((uint64_t)low + pick);
      if (j->out->dtype == TY_I64) ((int64_t *)j->out->data)[element_offset(j->out, i + k)] = value;
      else put(j->out, i + k, (double)value);
    }
  }
}

bool TY_KERNEL(randint)(const ty_kernel_args *k) { return run(k, randint_range); }

static double get(const ty_view *v, int64_t i) {
  return v->dtype == TY_F64 ? ((const double *)v->data)[i] : ((const float *)v->data)[i];
}

static void bernoulli_range(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  uint32_t w[BLOCK];
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    random_words(j->p, i, w);
    if (j->out->dtype == TY_F64)
      for (int64_t k = 0; k < n; k++)
        ((double *)j->out->data)[i + k] = ty_uniform_f32(w[k]) < ((const double *)j->in->data)[i + k];
    else
      for (int64_t k = 0; k < n; k++)
        ((float *)j->out->data)[i + k] = ty_uniform_f32(w[k]) < ((const float *)j->in->data)[i + k];
  }
}

bool TY_KERNEL(bernoulli)(const ty_kernel_args *k) { return run(k, bernoulli_range); }

/* ---- orders ---- */

typedef struct keyed {
  double key;
  int64_t index;
} keyed;

static void sort_keys(keyed *x, keyed *spare, int64_t n) { /* merge sort: equal keys stay in order */
  if (n < 2) return;
  int64_t half = n / 2, i = 0, j = half, k = 0;
  sort_keys(x, spare, half);
  sort_keys(x + half, spare, n - half);
  memcpy(spare, x, (size_t)n * sizeof *x);
  while (i < half && j < n) x[k++] = spare[j].key < spare[i].key ? spare[j++] : spare[i++];
  while (i < half) x[k++] = spare[i++];
  while (j < n) x[k++] = spare[j++];
}

/* The order that sorts random keys of 53 bits, two words an element; equal ones by index. An element is the upper 32
 * bits of its key over its index. Keys spread evenly: they are dealt by their first bits into parts that fit a
 * cache, and these once more, after which almost all are in order and an insertion sort ends it. Where 32 bits are
 * equal, the words are drawn once more for the rest. */
enum {
  PART_BITS = 12,
  INNER_BITS = 14,
  PART = 2048 /* elements of a part, as far as PART_BITS allow */,
  MOST_CHUNKS = 64
};

typedef struct order {
  const ty_p_random *p;
  const ty_view *out;
  int64_t n, chunk, chunks;
  int bits; /* parts: 2^bits */
  uint64_t *dealt;
  int64_t *starts; /* of parts by chunk: [chunks][parts], then [parts + 1] of all */
  atomic_bool failed;
} order;

static inline uint32_t upper_bits(const uint32_t *w) { return (w[0] >> 5) << 5 | w[1] >> 27; }

static uint64_t whole_key(const ty_p_random *p, int64_t i) {
  ty_philox b = ty_philox_block(p->seed, p->offset + (uint64_t)i / 2);
  const uint32_t *w = b.w + i % 2 * 2;
  return (uint64_t)(w[0] >> 5) << 26 | w[1] >> 6;
}

static __attribute__((noinline)) bool comes_after_by_all(const ty_p_random *p, uint64_t a, uint64_t b) {
  uint64_t x = whole_key(p, (int64_t)(a & 0xffffffffu)), y = whole_key(p, (int64_t)(b & 0xffffffffu));
  return x != y ? x > y : a > b;
}

static inline bool comes_after(const ty_p_random *p, uint64_t a, uint64_t b) {
  return __builtin_expect(a >> 32 != b >> 32, 1) ? a > b : comes_after_by_all(p, a, b);
}

static inline int64_t part_of(const order *o, uint32_t upper) { return o->bits ? upper >> (32 - o->bits) : 0; }

/* Elements of a chunk by part. Their keys are left in the result, whose elements have room for them. */
static void count_tasks(void *context, int64_t begin, int64_t end) {
  const order *o = context;
  uint32_t w[RANDOM_WORDS], *upper = o->out->data;
  for (int64_t c = begin; c < end; c++) {
    int64_t *count = o->starts + (c << o->bits), to = (c + 1) * o->chunk < o->n ? (c + 1) * o->chunk : o->n;
    for (int64_t i = c * o->chunk; i < to; i += RANDOM_WORDS / 2) {
      int64_t m = to - i < RANDOM_WORDS / 2 ? to - i : RANDOM_WORDS / 2;
      random_words(o->p, 2 * i, w);
      for (int64_t k = 0; k < m; k++) count[part_of(o, upper[i + k] = upper_bits(w + 2 * k))]++;
    }
  }
}

static void deal_tasks(void *context, int64_t begin, int64_t end) {
  const order *o = context;
  const uint32_t *upper = o->out->data;
  for (int64_t c = begin; c < end; c++) {
    int64_t *at = o->starts + (c << o->bits), to = (c + 1) * o->chunk < o->n ? (c + 1) * o->chunk : o->n;
    for (int64_t i = c * o->chunk; i < to; i++)
      o->dealt[at[part_of(o, upper[i])]++] = (uint64_t)upper[i] << 32 | (uint64_t)i;
  }
}

/* Parts in order, into the result. */
static void order_tasks(void *context, int64_t begin, int64_t end) {
  order *o = context;
  const int64_t *first = o->starts + (o->chunks << o->bits);
  int64_t largest = 0;
  for (int64_t b = begin; b < end; b++)
    if (first[b + 1] - first[b] > largest) largest = first[b + 1] - first[b];
  size_t bytes = (size_t)largest * sizeof(uint64_t) + (sizeof(uint32_t) << INNER_BITS);
  char *room = ty_scratch_alloc(bytes);
  if (!room) {
    atomic_store(&o->failed, true);
    return;
  }
  uint64_t *x = (uint64_t *)(void *)room;
  uint32_t *at = (uint32_t *)(void *)(room + (size_t)largest * sizeof *x);
  for (int64_t b = begin; b < end; b++) {
    const uint64_t *in = o->dealt + first[b];
    const int64_t m = first[b + 1] - first[b];
    int inner = 0;
    while (inner < INNER_BITS && inner < 32 - o->bits && (int64_t)1 << inner < m) inner++;
    const int shift = 63 - o->bits - inner; /* and one more: 64 in one go is undefined */
    const uint64_t mask = ((uint64_t)1 << inner) - 1;
    memset(at, 0, sizeof *at << inner);
    for (int64_t i = 0; i < m; i++) at[in[i] >> shift >> 1 & mask]++;
    uint32_t sum = 0;
    for (uint64_t i = 0; i <= mask; i++) {
      uint32_t here = at[i];
      at[i] = sum;
      sum += here;
    }
    for (int64_t i = 0; i < m; i++) x[at[in[i] >> shift >> 1 & mask]++] = in[i];
    for (int64_t i = 1; i < m; i++) {
      const uint64_t e = x[i];
      int64_t k = i;
      for (; k > 0 && comes_after(o->p, x[k - 1], e); k--) x[k] = x[k - 1];
      x[k] = e;
    }
    if (o->out->dtype == TY_I64) {
      int64_t *to = (int64_t *)o->out->data + first[b];
      for (int64_t i = 0; i < m; i++) to[i] = (int64_t)(x[i] & 0xffffffffu);
    } else {
      int32_t *to = (int32_t *)o->out->data + first[b];
      for (int64_t i = 0; i < m; i++) to[i] = (int32_t)(x[i] & 0xffffffffu);
    }
  }
  ty_scratch_free(room, bytes);
}

bool TY_KERNEL(randperm)(const ty_kernel_args *k) {
  order o = { .p = k->params, .out = k->out[0], .n = k->out[0]->count };
  if (o.n == 0) return true;
  if (o.n > UINT32_MAX) return ty_fail(TY_EUNSUPPORTED, "randperm: n: at most 4294967295, got %lld", (long long)o.n);
  while (o.bits < PART_BITS && o.n >> o.bits > PART) o.bits++;
  o.chunk = (o.n + MOST_CHUNKS - 1) / MOST_CHUNKS;
  if (o.chunk < GRAIN) o.chunk = GRAIN;
  o.chunk = (o.chunk + RANDOM_WORDS - 1) / RANDOM_WORDS * RANDOM_WORDS;
  o.chunks = (o.n + o.chunk - 1) / o.chunk;
  const int64_t parts = (int64_t)1 << o.bits;
  size_t count = (size_t)((o.chunks + 1) * parts + 1), bytes = (size_t)o.n * sizeof *o.dealt + count * sizeof *o.starts;
  char *room = ty_scratch_alloc(bytes);
  if (!room) return false;
  o.dealt = (uint64_t *)(void *)room;
  o.starts = (int64_t *)(void *)(room + (size_t)o.n * sizeof *o.dealt);
  memset(o.starts, 0, count * sizeof *o.starts);
  ty_parallel_for(o.chunks, 1, count_tasks, &o);
  int64_t sum = 0, *first = o.starts + (o.chunks << o.bits);
  for (int64_t b = 0; b < parts; b++) {
    first[b] = sum;
    for (int64_t c = 0; c < o.chunks; c++) {
      int64_t here = o.starts[(c << o.bits) + b];
      o.starts[(c << o.bits) + b] = sum;
      sum += here;
    }
  }
  first[parts] = sum;
  ty_parallel_for(o.chunks, 1, deal_tasks, &o);
  ty_parallel_for(parts, 64, order_tasks, &o);
  ty_scratch_free(room, bytes);
  return !atomic_load(&o.failed) || ty_fail(TY_ENOMEM, "randperm: out of memory for %lld elements", (long long)o.n);
}

/* ---- multinomial: a = draws per row, b = with replacement ---- */

static bool check_row(const ty_view *v, int64_t row, int64_t n, double *total, int64_t *positive) {
  *total = 0;
  *positive = 0;
  for (int64_t i = 0; i < n; i++) {
    double p = get(v, row * n + i);
    if (!(p >= 0) || isinf(p))
      return ty_fail(TY_EINVAL, "multinomial: probs: expected finite numbers of at least 0, got %g in row %lld", p,
                     (long long)row);
    *total += p;
    *positive += p > 0;
  }
  return *positive > 0 || ty_fail(TY_EINVAL, "multinomial: probs: row %lld has no positive entry", (long long)row);
}

enum { STRETCH = 256 }; /* entries of a row whose sum is kept */

/* The same of a row of f32, by stretches: sums[i] is what all up to the i-th of them come to. The slow way says what is
 * wrong. */
static bool check_row_f32(const ty_view *v, int64_t row, int64_t n, double *sums) {
  const float *x = (const float *)v->data + row * n;
  double total = 0;
  int wrong = 0;
  for (int64_t at = 0; at < n; at += STRETCH) {
    const int64_t end = at + STRETCH < n ? at + STRETCH : n;
    double sum = 0;
#pragma omp simd reduction(+ : sum) reduction(| : wrong)
    for (int64_t i = at; i < end; i++) {
      wrong |= !(x[i] >= 0) | (x[i] > 3.402823466e38f);
      sum += (double)x[i];
    }
    sums[at / STRETCH] = total += sum;
  }
  int64_t positive;
  return (!wrong && total > 0) || check_row(v, row, n, &total, &positive);
}

/* Smallest i whose running sum exceeds u. */
static int64_t pick(const double *sums, int64_t n, double u) {
  int64_t low = 0, high = n - 1;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (sums[middle] > u) high = middle;
    else low = middle + 1;
  }
  return low;
}

static double uniform_at(const ty_p_random *p, int64_t i) {
  return ((double)ty_philox_block(p->seed, p->offset + (uint64_t)i / 4).w[i % 4] + 0.5) * 0x1p-32;
}

/* The same from the sums of stretches. */
static int64_t pick_f32(const float *x, const double *sums, int64_t n, double u) {
  const int64_t stretch = pick(sums, (n + STRETCH - 1) / STRETCH, u), end = (stretch + 1) * STRETCH;
  double sum = stretch ? sums[stretch - 1] : 0;
  for (int64_t i = stretch * STRETCH; i < n && i < end; i++)
    if ((sum += (double)x[i]) > u) return i;
  return end < n ? end - 1 : n - 1; /* rounding */
}

enum { FEW = 16 }; /* up to this part of a row, those drawn are kept in a heap */

static double uniform_of(uint32_t w) { return ((double)w + 0.5) * 0x1p-32; }

static void all_arrivals(const ty_p_random *p, const ty_view *in, int64_t row, int64_t n, keyed *x) {
  for (int64_t i = 0; i < n; i++) {
    double rate = get(in, row * n + i);
    x[i] = (keyed){ rate > 0 ? -log(uniform_at(p, row * n + i)) / rate : INFINITY, i };
  }
}

static bool later(keyed a, keyed b) { return a.key != b.key ? a.key > b.key : a.index > b.index; }

static void sink(keyed *heap, int64_t n, int64_t at) { /* the latest on top */
  keyed e = heap[at];
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && later(heap[child + 1], heap[child])) child++;
    if (!later(heap[child], e)) break;
    heap[at] = heap[child];
  }
  heap[at] = e;
}

/* The `count` first of them, in any order. As -log(u) >= 1 - u, most are known to be later without a logarithm. */
static void first_arrivals(const ty_p_random *p, const ty_view *in, int64_t row, int64_t n, keyed *x, int64_t count) {
  uint32_t w[RANDOM_WORDS];
  int64_t have = 0;
  for (int64_t i = 0; i < n;) {
    const int64_t begin = (row * n + i) / 4 * 4, skip = row * n + i - begin, left = RANDOM_WORDS - skip;
    const int64_t m = n - i < left ? n - i : left;
    random_words(p, begin, w);
    for (int64_t k = 0; k < m; k++) {
      const double rate = get(in, row * n + i + k), u = uniform_of(w[skip + k]);
      if (!(rate > 0)) continue;
      if (have < count) {
        x[have++] = (keyed){ -log(u) / rate, i + k };
        if (have == count)
          for (int64_t h = count / 2; h-- > 0;) sink(x, count, h);
      } else if ((1 - u) * (1 - 1e-12) <= x[0].key * rate) {
        const keyed e = { -log(u) / rate, i + k };
        if (!later(x[0], e)) continue;
        x[0] = e;
        sink(x, count, 0);
      }
    }
    i += m;
  }
}

bool TY_KERNEL(multinomial)(const ty_kernel_args *k) {
  const ty_p_random *p = k->params;
  const ty_view *in = k->in[0], *out = k->out[0];
  int64_t n = in->size[in->ndim - 1], count = (int64_t)p->a, rows = out->count / count, *to = out->data;
  size_t bytes = (size_t)n * sizeof(keyed);
  keyed *x = ty_scratch_alloc(bytes), *spare = ty_scratch_alloc(bytes);
  bool ok = x && spare;
  for (int64_t row = 0; row < rows && ok; row++) {
    double total;
    int64_t positive;
    if (p->b != 0 && in->dtype != TY_F64 && count <= n / STRETCH) {
      double *sums = (double *)x;
      const float *probs = (const float *)in->data + row * n;
      if (!(ok = check_row_f32(in, row, n, sums))) break;
      const double all = sums[(n - 1) / STRETCH];
      for (int64_t i = 0; i < count; i++) {
        int64_t at = pick_f32(probs, sums, n, uniform_at(p, row * count + i) * all);
        while (probs[at] == 0) at--;
        to[row * count + i] = at;
      }
      continue;
    }
    if (!(ok = check_row(in, row, n, &total, &positive))) break;
    if (p->b != 0) {
      double *sums = (double *)x, sum = 0;
      for (int64_t i = 0; i < n; i++) sums[i] = sum += get(in, row * n + i);
      for (int64_t i = 0; i < count; i++) {
        int64_t at = pick(sums, n, uniform_at(p, row * count + i) * sum);
        while (get(in, row * n + at) == 0) at--; /* rounding at the very end */
        to[row * count + i] = at;
      }
    } else { /* the smallest of exponential arrival times with rates probs (Efraimidis and Spirakis 2006) */
      if (positive < count) {
        ok = ty_fail(
            TY_EINVAL,
            "multinomial: probs: row %lld has %lld positive entries, fewer than the %lld to draw without replacement",
            (long long)row, (long long)positive, (long long)count);
        break;
      }
      if (count <= n / FEW) first_arrivals(p, in, row, n, x, count);
      else all_arrivals(p, in, row, n, x);
      sort_keys(x, spare, count <= n / FEW ? count : n);
      for (int64_t i = 0; i < count; i++) to[row * count + i] = x[i].index;
    }
  }
  ty_scratch_free(x, bytes);
  ty_scratch_free(spare, bytes);
  return ok;
}
