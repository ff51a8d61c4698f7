/* Template of lora_segments.c for one REAL. The sums of one row of x with one pair are taken in the same order in every
 * block, so that what a row gets does not depend on its company. */

typedef REAL FN(vector) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define V FN(vector)
#define LANES ((int)(sizeof(V) / sizeof(REAL)))
#define UNROLL _Pragma("GCC unroll 16")

/* The sum of the lanes, always in the same order. */
typedef REAL FN(quarter) __attribute__((vector_size(16), may_alias));
static inline __attribute__((always_inline)) REAL FN(lane_sum)(V v) {
  const union {
    V whole;
    FN(quarter) parts[TY_VECTOR_BYTES / 16];
  } u = { v };
  FN(quarter) sum = u.parts[0];
  UNROLL for (int i = 1; i < TY_VECTOR_BYTES / 16; i++) sum += u.parts[i];
#if HALVES
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
#else
  return sum[0] + sum[1];
#endif
}

/* h[t][j] += x[t] . rows[j] over n elements, of `tokens` rows of x and `pairs` rows (constants). */
static inline __attribute__((always_inline)) void FN(dots)(const REAL *x, int64_t x_row, const REAL *const *rows,
                                                           int64_t n, REAL (*h)[TOGETHER], const int tokens,
                                                           const int pairs) {
  V sums[2 * BLOCK];
  UNROLL for (int e = 0; e < tokens * pairs; e++) sums[e] = (V){ 0 };
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) {
    V left[BLOCK];
    UNROLL for (int t = 0; t < tokens; t++) left[t] = *(const V *)(x + t * x_row + c);
    UNROLL for (int j = 0; j < pairs; j++) {
      const V right = *(const V *)(rows[j] + c);
      UNROLL for (int t = 0; t < tokens; t++) sums[t * pairs + j] += left[t] * right;
    }
  }
  UNROLL for (int t = 0; t < tokens; t++) {
    UNROLL for (int j = 0; j < pairs; j++) {
      REAL sum = FN(lane_sum)(sums[t * pairs + j]);
      for (int64_t i = c; i < n; i++) sum += x[t * x_row + i] * rows[j][i];
      h[t][j] += sum;
    }
  }
}

/* out[t] = from[t] + the sum over `pairs` of h[t][j] rows[j], n elements of `tokens` rows (a constant). */
static inline __attribute__((always_inline)) void FN(add)(const REAL *from, REAL *out, int64_t out_row,
                                                          const REAL *const *rows, int64_t n, REAL (*h)[TOGETHER],
                                                          int pairs, const int tokens) {
  int64_t c = 0;
  for (; c + 2 * LANES <= n; c += 2 * LANES) {
    V sums[2 * BLOCK];
    UNROLL for (int t = 0; t < tokens; t++) {
      sums[2 * t] = *(const V *)(from + t * out_row + c);
      sums[2 * t + 1] = *(const V *)(from + t * out_row + c + LANES);
    }
    for (int j = 0; j < pairs; j++) {
      const V low = *(const V *)(rows[j] + c), high = *(const V *)(rows[j] + c + LANES);
      UNROLL for (int t = 0; t < tokens; t++) {
        sums[2 * t] += h[t][j] * low;
        sums[2 * t + 1] += h[t][j] * high;
      }
    }
    UNROLL for (int t = 0; t < tokens; t++) {
      *(V *)(out + t * out_row + c) = sums[2 * t];
      *(V *)(out + t * out_row + c + LANES) = sums[2 * t + 1];
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int64_t i = c; i < n; i++) {
      REAL sum = from[t * out_row + i];
      for (int j = 0; j < pairs; j++) sum += h[t][j] * rows[j][i];
      out[t * out_row + i] = sum;
    }
}

/* Where `count` rows of a pool are as REAL, n elements of each: in the pool, or widened in `wide`. */
static void FN(find)(const ty_view *pool, const int64_t *numbers, int64_t step, int count, int64_t n, REAL *wide,
                     const REAL **rows) {
  const int64_t width = pool->size[1];
  for (int j = 0; j < count; j++) {
    const int64_t at = numbers[j * step] * width;
    rows[j] = (const REAL *)pool->data + at;
#if HALVES
    if (wide) {
      ty_half_load((ty_dtype)pool->dtype, wide + j * width, (const uint16_t *)pool->data + at, n);
      rows[j] = wide + j * width;
    }
#else
    (void)n, (void)wide;
#endif
  }
}

/* The rows [first, last) of x and one adapter's pairs [pair, end). */
static void FN(rows_of)(const job *p, int64_t first, int64_t last, int64_t pair, int64_t end, REAL *wide) {
  const int64_t in = p->in, width = p->width, wa = p->a->size[1], wb = p->b->size[1], n = last - first;
  const REAL *x = (const REAL *)p->x + first * in;
  REAL *out = (REAL *)p->out + first * width;
  const REAL *from = (const REAL *)p->y + first * width;
  if (pair == end) memcpy(out, from, sizeof(REAL) * (size_t)(n * width));
  const int64_t a_parts = wa ? (in + wa - 1) / wa : 0, b_parts = wb ? (width + wb - 1) / wb : 0;
  for (; pair < end; pair += TOGETHER) {
    const int some = end - pair < TOGETHER ? (int)(end - pair) : TOGETHER;
    REAL h[TOKENS][TOGETHER] = { 0 };
    const REAL *rows[TOGETHER];
    for (int64_t e = 0; e < a_parts; e++) {
      const int64_t c = e * wa, count = in - c < wa ? in - c : wa;
      FN(find)(p->a, p->a_rows + pair * a_parts + e, a_parts, some, count, wide, rows);
      int64_t t = 0;
      for (; t + BLOCK <= n; t += BLOCK) {
        int j = 0;
        for (; j + 2 <= some; j += 2) FN(dots)(x + t * in + c, in, rows + j, count, (void *)&h[t][j], BLOCK, 2);
        if (j < some) FN(dots)(x + t * in + c, in, rows + j, count, (void *)&h[t][j], BLOCK, 1);
      }
      for (; t < n; t++) {
        int j = 0;
        for (; j + 8 <= some; j += 8) FN(dots)(x + t * in + c, in, rows + j, count, (void *)&h[t][j], 1, 8);
        for (; j + 4 <= some; j += 4) FN(dots)(x + t * in + c, in, rows + j, count, (void *)&h[t][j], 1, 4);
        for (; j < some; j++) FN(dots)(x + t * in + c, in, rows + j, count, (void *)&h[t][j], 1, 1);
      }
    }
    for (int64_t e = 0; e < b_parts; e++) {
      const int64_t c = e * wb, count = width - c < wb ? width - c : wb;
      FN(find)(p->b, p->b_rows + pair * b_parts + e, b_parts, some, count, wide, rows);
      int64_t t = 0;
      for (; t + BLOCK <= n; t += BLOCK)
        FN(add)(from + t * width + c, out + t * width + c, width, rows, count, h + t, some, BLOCK);
      for (; t < n; t++) FN(add)(from + t * width + c, out + t * width + c, width, rows, count, h + t, some, 1);
    }
    from = out;
  }
}

static void FN(piece)(void *context, int64_t begin, int64_t end) {
  job *p = context;
  REAL *wide = NULL;
  size_t bytes = 0;
  if (ty_is_half((ty_dtype)p->a->dtype)) {
    const int64_t most = p->a->size[1] > p->b->size[1] ? p->a->size[1] : p->b->size[1];
    bytes = sizeof(REAL) * (size_t)(TOGETHER * most + 1);
    if (!(wide = ty_scratch_alloc(bytes))) {
      __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
      return;
    }
  }
  for (int64_t at = begin; at < end; at++) {
    const int64_t s = ty_segment_at(p->tasks, p->segments, at);
    const int64_t first = p->begins[s] + (at - p->tasks[s]) * TOKENS, left = p->begins[s + 1] - first;
    FN(rows_of)(p, first, first + (left < TOKENS ? left : TOKENS), p->ranks[s], p->ranks[s + 1], wide);
  }
  if (wide) ty_scratch_free(wide, bytes);
}

#undef V
#undef LANES
#undef UNROLL
