/* Sampling for one element type; included by grid_sample.c with REAL and NAME(x) set. */

/* Of a block of positions: where the neighbours are (-1: outside) and what they weigh. */
typedef struct NAME(neighbours) {
  int32_t at[NEIGHBOURS][BLOCK];
  REAL weight[NEIGHBOURS][BLOCK];
} NAME(neighbours);

/* The factor of a neighbour along dimension d: its weight, or, along `by`, the slope of that. */
static inline REAL NAME(factor)(const NAME(ty_grid_axis) * a, int d, int tap, int by) {
  return d == by ? a[d].slope[tap] : a[d].weight[tap];
}

/* The neighbours of positions begin .. begin + count - 1 of image i. slopes: NULL, or what the weights become by each
 * coordinate. */
static void NAME(find)(const sampling *s, int64_t i, int64_t begin, int64_t count, NAME(neighbours) * found,
                       REAL (*slopes)[NEIGHBOURS][BLOCK]) {
  const int dims = s->dims, taps = s->taps, last = dims - 1;
  const REAL *grid = (const REAL *)s->grid + (i * s->places + begin) * dims;
  for (int64_t b = 0; b < count; b++, grid += dims) {
    NAME(ty_grid_axis) axis[3]; /* in the order of the image's dimensions, which the grid has the other way round */
    for (int d = 0; d < dims; d++) NAME(ty_grid_axis_of)(s->p, grid[last - d], s->size[d], axis + d);
    const int outer = dims == 3 ? taps : 1;
    int k = 0;
    for (int z = 0; z < outer; z++) {
      const bool there = dims == 2 || axis[0].at[z] >= 0;
      const int64_t plane = dims == 3 && there ? axis[0].at[z] * s->size[1] : 0;
      const REAL w = dims == 3 ? axis[0].weight[z] : 1;
      for (int y = 0; y < taps; y++) {
        const int32_t row = axis[last - 1].at[y];
        const int64_t line = (plane + row) * s->size[last];
        const REAL v = w * axis[last - 1].weight[y];
        for (int x = 0; x < taps; x++, k++) {
          const int32_t column = axis[last].at[x];
          const bool inside = there && row >= 0 && column >= 0;
          found->at[k][b] = inside ? (int32_t)(line + column) : -1;
          found->weight[k][b] = inside ? v * axis[last].weight[x] : 0; /* at infinity it is no number */
          if (!slopes) continue;
          for (int e = 0; e < dims; e++) {
            REAL product = NAME(factor)(axis, last, x, e) * NAME(factor)(axis, last - 1, y, e);
            if (dims == 3) product *= NAME(factor)(axis, 0, z, e);
            slopes[e][k][b] = inside ? product : 0;
          }
        }
      }
    }
  }
}

static void NAME(sample_blocks)(void *context, int64_t begin, int64_t end) {
  const sampling *s = context;
  const int64_t blocks = (s->places + BLOCK - 1) / BLOCK;
  NAME(neighbours) found;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t i = unit / blocks, at = (unit - i * blocks) * BLOCK;
    const int64_t count = s->places - at < BLOCK ? s->places - at : BLOCK;
    NAME(find)(s, i, at, count, &found, NULL);
    for (int64_t c = 0; c < s->channels; c++) {
      const REAL *restrict x = (const REAL *)s->x + (i * s->channels + c) * s->pixels;
      REAL *restrict y = (REAL *)s->to + (i * s->channels + c) * s->places + at;
      for (int64_t b = 0; b < count; b++) y[b] = 0;
      for (int k = 0; k < s->all; k++) {
        const int32_t *restrict where = found.at[k];
        const REAL *restrict weight = found.weight[k];
        for (int64_t b = 0; b < count; b++) {
          const REAL value = where[b] >= 0 ? x[where[b]] : 0;
          y[b] += weight[b] * value;
        }
      }
    }
  }
}

/* Each channel adds up its own gradient, position after position. */
static void NAME(spread_channels)(void *context, int64_t begin, int64_t end) {
  const sampling *s = context;
  const int64_t groups = (s->channels + CHANNELS - 1) / CHANNELS;
  NAME(neighbours) found;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t i = unit / groups, first = (unit - i * groups) * CHANNELS;
    const int64_t last = first + CHANNELS < s->channels ? first + CHANNELS : s->channels;
    REAL *dx = (REAL *)s->to + i * s->channels * s->pixels;
    for (int64_t j = first * s->pixels; j < last * s->pixels; j++) dx[j] = 0;
    for (int64_t at = 0; at < s->places; at += BLOCK) {
      const int64_t count = s->places - at < BLOCK ? s->places - at : BLOCK;
      NAME(find)(s, i, at, count, &found, NULL);
      for (int64_t c = first; c < last; c++) {
        const REAL *g = (const REAL *)s->g + (i * s->channels + c) * s->places + at;
        REAL *to = dx + c * s->pixels;
        for (int64_t b = 0; b < count; b++)
          for (int k = 0; k < s->all; k++)
            if (found.at[k][b] >= 0) to[found.at[k][b]] += found.weight[k][b] * g[b];
      }
    }
  }
}

static void NAME(slope_blocks)(void *context, int64_t begin, int64_t end) {
  const sampling *s = context;
  const int64_t blocks = (s->places + BLOCK - 1) / BLOCK;
  NAME(neighbours) found;
  REAL slopes[3][NEIGHBOURS][BLOCK], sum[3][BLOCK];
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t i = unit / blocks, at = (unit - i * blocks) * BLOCK;
    const int64_t count = s->places - at < BLOCK ? s->places - at : BLOCK;
    NAME(find)(s, i, at, count, &found, slopes);
    for (int d = 0; d < s->dims; d++)
      for (int64_t b = 0; b < count; b++) sum[d][b] = 0;
    for (int64_t c = 0; c < s->channels; c++) {
      const REAL *restrict x = (const REAL *)s->x + (i * s->channels + c) * s->pixels;
      const REAL *restrict g = (const REAL *)s->g + (i * s->channels + c) * s->places + at;
      for (int k = 0; k < s->all; k++) {
        const int32_t *restrict where = found.at[k];
        REAL values[BLOCK];
        for (int64_t b = 0; b < count; b++) values[b] = where[b] >= 0 ? g[b] * x[where[b]] : 0;
        for (int d = 0; d < s->dims; d++)
          for (int64_t b = 0; b < count; b++) sum[d][b] += slopes[d][k][b] * values[b];
      }
    }
    REAL *to = (REAL *)s->to + (i * s->places + at) * s->dims;
    for (int64_t b = 0; b < count; b++)
      for (int d = 0; d < s->dims; d++) to[b * s->dims + s->dims - 1 - d] = sum[d][b];
  }
}
