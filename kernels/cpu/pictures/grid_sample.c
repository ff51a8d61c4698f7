/* Images and volumes sampled at the positions of a grid (kernels/grid_sample.h), and the gradients of that. */
#include "../../grid_sample.h"

#include "../cpu.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

ty_kernel TY_KERNEL(grid_sample);
ty_kernel TY_KERNEL(grid_sample_backward_input);
ty_kernel TY_KERNEL(grid_sample_backward_grid);

#define BLOCK 64   /* positions whose neighbours are found together */
#define CHANNELS 4 /* whose gradients go together */
#define NEIGHBOURS 16

/* x [n, channels, pixels], grid [n, places, dims], g or y [n, channels, places]. */
typedef struct sampling {
  const void *x, *grid, *g;
  void *to;
  int64_t channels, pixels, places, size[3];
  int dims, taps, all; /* neighbours along one dimension, and of a position */
  const ty_p_grid_sample *p;
} sampling;

#ifdef __AVX512F__
/* 16 positions of all channels: where their neighbours are, and what they weigh, stays in registers, and what is not
 * there is not read. `lanes`: the positions that there are. */
static inline __attribute__((always_inline)) void gather_lanes(const sampling *s, const float *x, const int32_t *at,
                                                               const int32_t *there, const float *weight, const int all,
                                                               __mmask16 lanes, float *y) {
  __m512i place[NEIGHBOURS];
  __m512 w[NEIGHBOURS];
  __mmask16 mask[NEIGHBOURS];
  for (int k = 0; k < all; k++) {
    const __m512i t = _mm512_maskz_loadu_epi32(lanes, there + k * BLOCK);
    place[k] = _mm512_maskz_loadu_epi32(lanes, at + k * BLOCK);
    w[k] = _mm512_maskz_loadu_ps(lanes, weight + k * BLOCK);
    mask[k] = _mm512_test_epi32_mask(t, t);
  }
  for (int64_t c = 0; c < s->channels; c++, x += s->pixels, y += s->places) {
    __m512 sum = _mm512_setzero_ps();
    for (int k = 0; k < all; k++)
      sum = _mm512_fmadd_ps(w[k], _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask[k], place[k], x, 4), sum);
    _mm512_mask_storeu_ps(y, lanes, sum);
  }
}

static bool gathered_f32(const sampling *s, const float *x, int64_t count, const int32_t *at, const int32_t *there,
                         const float *weight, float *y) {
  for (int64_t b = 0; b < count; b += 16) {
    const __mmask16 lanes = (__mmask16)(count - b < 16 ? (1u << (count - b)) - 1 : 0xffff);
    if (s->all == 4) gather_lanes(s, x, at + b, there + b, weight + b, 4, lanes, y + b);
    else gather_lanes(s, x, at + b, there + b, weight + b, s->all, lanes, y + b);
  }
  return true;
}
#else
static bool gathered_f32(const sampling *s, const float *x, int64_t count, const int32_t *at, const int32_t *there,
                         const float *weight, float *y) {
  return false;
}
#endif

static bool gathered_f64(const sampling *s, const double *x, int64_t count, const int32_t *at, const int32_t *there,
                         const double *weight, double *y) {
  return false;
}

#define REAL float
#define FLOOR floorf
#define RINT rintf
#define NAME(x) x##_f32
#include "grid_sample_real.h"
#undef REAL
#undef FLOOR
#undef RINT
#undef NAME

#define REAL double
#define FLOOR floor
#define RINT rint
#define NAME(x) x##_f64
#include "grid_sample_real.h"

/* `image`: x or its gradient. */
static bool prepare(const ty_kernel_args *k, const ty_view *image, const ty_view *grid, sampling *s) {
  s->p = k->params;
  s->grid = grid->data;
  s->dims = image->ndim - 2;
  s->channels = image->size[1];
  s->taps = ty_grid_taps(s->p->mode);
  s->pixels = s->places = s->all = 1;
  for (int d = 0; d < s->dims; d++) {
    s->size[d] = image->size[2 + d];
    s->pixels *= image->size[2 + d];
    s->places *= grid->size[1 + d];
    s->all *= s->taps;
  }
  return s->pixels <= INT32_MAX || ty_fail(TY_EUNSUPPORTED, "grid_sample: images of 2^31 pixels are not supported");
}

static void run(const ty_view *like, int64_t n, int64_t grain, ty_range_fn *f32, ty_range_fn *f64, sampling *s) {
  ty_parallel_for(n, grain > 1 ? grain : 1, like->dtype == TY_F64 ? f64 : f32, s);
}

static int64_t blocks_of(const sampling *s) { return (s->places + BLOCK - 1) / BLOCK; }

/* in: x, grid. */
bool TY_KERNEL(grid_sample)(const ty_kernel_args *k) {
  sampling s = { .x = k->in[0]->data, .to = k->out[0]->data };
  if (!prepare(k, k->in[0], k->in[1], &s)) return false;
  if (k->out[0]->count == 0) return true;
  run(k->in[0], k->in[0]->size[0] * blocks_of(&s), 256 / (s.channels * s.all + 16), sample_blocks_f32,
      sample_blocks_f64, &s);
  return true;
}

/* in: g, grid. */
bool TY_KERNEL(grid_sample_backward_input)(const ty_kernel_args *k) {
  const ty_view *dx = k->out[0];
  sampling s = { .g = k->in[0]->data, .to = dx->data };
  if (!prepare(k, dx, k->in[1], &s)) return false;
  if (dx->count == 0) return true;
  int64_t groups = (s.channels + CHANNELS - 1) / CHANNELS;
  run(dx, dx->size[0] * groups, 4096 / (s.pixels + s.places * s.all + 1), spread_channels_f32, spread_channels_f64, &s);
  return true;
}

/* in: g, x, grid. */
bool TY_KERNEL(grid_sample_backward_grid)(const ty_kernel_args *k) {
  sampling s = { .g = k->in[0]->data, .x = k->in[1]->data, .to = k->out[0]->data };
  if (!prepare(k, k->in[1], k->in[2], &s)) return false;
  if (k->out[0]->count == 0) return true;
  run(k->in[1], k->in[1]->size[0] * blocks_of(&s), 256 / (s.channels * s.all + 16), slope_blocks_f32, slope_blocks_f64,
      &s);
  return true;
}
