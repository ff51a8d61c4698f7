/* Sampling for one element type; included by grid_sample.c with REAL and NAME(x) set. */

/* Of a block of positions: where the neighbours are, whether they are in the image (else at is any pixel and the weight
 * 0), and what they weigh. */
typedef struct NAME(neighbours) {
  int32_t at[NEIGHBOURS][BLOCK], there[NEIGHBOURS][BLOCK];
  REAL weight[NEIGHBOURS][BLOCK];
} NAME(neighbours);

/* ---- any number of dimensions, any mode: position by position ---- */

/* The factor of a neighbour along dimension d: its weight, or, along `by`, the slope of that. */
static inline REAL NAME(factor)(const NAME(ty_grid_axis) * a, int d, int tap, int by) {
  return d == by ? a[d].slope[tap] : a[d].weight[tap];
}

/* The neighbours of positions begin .. begin + count - 1 of image i. slopes: NULL, or what the weights become by each
 * coordinate. */
static void NAME(find_each)(const sampling *s, int64_t i, int64_t begin, int64_t count, NAME(neighbours) * found,
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
          found->at[k][b] = inside ? (int32_t)(line + column) : 0;
          found->there[k][b] = inside;
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

/* ---- images, bilinear and nearest: loops over the block that vectorise, with the same results ---- */

/* Where the grid's coordinates g, every second number, lie in a dimension of `size`, and the slopes of that. */
static void NAME(coordinates)(const ty_p_grid_sample *p, const REAL *restrict g, int64_t count, int64_t size,
                              REAL *restrict u, REAL *restrict slope) {
  const REAL by_grid = (REAL)(p->align_corners ? size - 1 : size) / 2, last = (REAL)(size - 1), all = (REAL)size;
  for (int64_t b = 0; b < count; b++) {
    const REAL here = g[2 * b] == g[2 * b] ? g[2 * b] : -1;
    u[b] = p->align_corners ? (here + 1) * by_grid : ((here + 1) * all - 1) / 2;
    slope[b] = by_grid;
  }
  if (p->padding == TY_GRID_ZEROS) return;
  const REAL low = p->align_corners ? 0 : (REAL)-0.5, high = last - low, span = high - low;
  if (p->padding == TY_GRID_REFLECTION)
    for (int64_t b = 0; b < count; b++) {
      const REAL from = u[b] - low, a = from < 0 ? -from : from;
      const REAL turns = span > 0 ? FLOOR(a / span) : 0, rest = span > 0 ? a - turns * span : 0;
      const bool odd = turns - 2 * FLOOR(turns / 2) >= (REAL)0.5;
      u[b] = odd ? high - rest : rest + low;
      slope[b] = odd != (from < 0) ? -slope[b] : slope[b];
    }
  for (int64_t b = 0; b < count; b++) {
    const bool inside = (u[b] > 0) & (u[b] < last);
    slope[b] = inside ? slope[b] : 0;
    u[b] = inside ? u[b] : u[b] > 0 ? last : 0;
  }
}

/* A coordinate that is an integer, in the image. */
static inline int32_t NAME(clipped)(REAL u, REAL last) { return (int32_t)(u > 0 ? u < last ? u : last : 0); }

static void NAME(find_images)(const sampling *s, int64_t i, int64_t begin, int64_t count, NAME(neighbours) * found,
                              REAL (*slopes)[NEIGHBOURS][BLOCK]) {
  const REAL *grid = (const REAL *)s->grid + (i * s->places + begin) * 2;
  REAL x[BLOCK], y[BLOCK], by_x[BLOCK], by_y[BLOCK];
  const REAL right = (REAL)(s->size[1] - 1), bottom = (REAL)(s->size[0] - 1);
  const int32_t width = (int32_t)s->size[1];
  NAME(coordinates)(s->p, grid, count, s->size[1], x, by_x);
  NAME(coordinates)(s->p, grid + 1, count, s->size[0], y, by_y);
  if (s->p->mode == TY_GRID_NEAREST) {
    for (int64_t b = 0; b < count; b++) {
      const REAL column = RINT(x[b]), row = RINT(y[b]);
      const bool there = (column >= 0) & (column <= right) & (row >= 0) & (row <= bottom);
      found->at[0][b] = NAME(clipped)(row, bottom) * width + NAME(clipped)(column, right);
      found->there[0][b] = there;
      found->weight[0][b] = there ? 1 : 0;
    }
    for (int e = 0; slopes && e < 2; e++)
      for (int64_t b = 0; b < count; b++) slopes[e][0][b] = 0;
    return;
  }
  for (int k = 0; k < 4; k++) {
    const REAL down = (REAL)(k / 2), along = (REAL)(k % 2);
    int32_t *restrict at = found->at[k], *restrict keep = found->there[k];
    REAL *restrict weight = found->weight[k];
    for (int64_t b = 0; b < count; b++) {
      const REAL left = FLOOR(x[b]), top = FLOOR(y[b]), t = x[b] - left, v = y[b] - top;
      const REAL column = left + along, row = top + down;
      const bool there = (column >= 0) & (column <= right) & (row >= 0) & (row <= bottom);
      at[b] = NAME(clipped)(row, bottom) * width + NAME(clipped)(column, right);
      keep[b] = there;
      const REAL product = (k / 2 ? v : 1 - v) * (k % 2 ? t : 1 - t);
      weight[b] = there ? product : 0;
    }
    if (!slopes) continue;
    REAL *restrict down_slope = slopes[0][k], *restrict along_slope = slopes[1][k];
    for (int64_t b = 0; b < count; b++) {
      const REAL t = x[b] - FLOOR(x[b]), v = y[b] - FLOOR(y[b]);
      const REAL by_row = (k / 2 ? by_y[b] : -by_y[b]) * (k % 2 ? t : 1 - t);
      const REAL by_column = (k / 2 ? v : 1 - v) * (k % 2 ? by_x[b] : -by_x[b]);
      down_slope[b] = keep[b] ? by_row : 0;
      along_slope[b] = keep[b] ? by_column : 0;
    }
  }
}

static void NAME(find)(const sampling *s, int64_t i, int64_t begin, int64_t count, NAME(neighbours) * found,
                       REAL (*slopes)[NEIGHBOURS][BLOCK]) {
  if (s->dims == 2 && s->p->mode != TY_GRID_BICUBIC) NAME(find_images)(s, i, begin, count, found, slopes);
  else NAME(find_each)(s, i, begin, count, found, slopes);
}

/* ---- sampling and its gradients ---- */

/* Loads one by one, which need no more than that, so that the arithmetic after them vectorises. */
static void NAME(take)(const REAL *restrict x, const int32_t *restrict at, int64_t count, REAL *restrict to) {
  int64_t b = 0;
  for (; b + 4 <= count; b += 4) {
    const REAL p = x[at[b]], q = x[at[b + 1]], r = x[at[b + 2]], t = x[at[b + 3]];
    to[b] = p, to[b + 1] = q, to[b + 2] = r, to[b + 3] = t;
  }
  for (; b < count; b++) to[b] = x[at[b]];
}

static void NAME(sample_blocks)(void *context, int64_t begin, int64_t end) {
  const sampling *s = context;
  const int64_t blocks = (s->places + BLOCK - 1) / BLOCK;
  NAME(neighbours) found;
  REAL values[BLOCK];
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t i = unit / blocks, at = (unit - i * blocks) * BLOCK;
    const int64_t count = s->places - at < BLOCK ? s->places - at : BLOCK;
    NAME(find)(s, i, at, count, &found, NULL);
    if (NAME(gathered)(s, (const REAL *)s->x + i * s->channels * s->pixels, count, found.at[0], found.there[0],
                       found.weight[0], (REAL *)s->to + i * s->channels * s->places + at))
      continue;
    for (int64_t c = 0; c < s->channels; c++) {
      const REAL *restrict x = (const REAL *)s->x + (i * s->channels + c) * s->pixels;
      REAL *restrict y = (REAL *)s->to + (i * s->channels + c) * s->places + at;
      for (int64_t b = 0; b < count; b++) y[b] = 0;
      for (int k = 0; k < s->all; k++) {
        NAME(take)(x, found.at[k], count, values);
        const int32_t *restrict there = found.there[k];
        const REAL *restrict weight = found.weight[k];
        for (int64_t b = 0; b < count; b++) y[b] += weight[b] * (there[b] ? values[b] : 0);
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
            if (found.there[k][b]) to[found.at[k][b]] += found.weight[k][b] * g[b];
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
        const int32_t *restrict there = found.there[k];
        REAL values[BLOCK];
        NAME(take)(x, found.at[k], count, values);
        for (int64_t b = 0; b < count; b++) values[b] = there[b] ? g[b] * values[b] : 0;
        for (int d = 0; d < s->dims; d++)
          for (int64_t b = 0; b < count; b++) sum[d][b] += slopes[d][k][b] * values[b];
      }
    }
    REAL *to = (REAL *)s->to + (i * s->places + at) * s->dims;
    for (int64_t b = 0; b < count; b++)
      for (int d = 0; d < s->dims; d++) to[b * s->dims + s->dims - 1 - d] = sum[d][b];
  }
}
