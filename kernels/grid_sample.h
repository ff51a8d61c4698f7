/* Where a sampled position lies along one dimension of an image, for every backend. */
#ifndef TY_KERNELS_GRID_SAMPLE_H
#define TY_KERNELS_GRID_SAMPLE_H

#include "base.h"
#include "scalar.h"

typedef enum ty_grid_mode { TY_GRID_BILINEAR, TY_GRID_NEAREST, TY_GRID_BICUBIC } ty_grid_mode;
typedef enum ty_grid_padding { TY_GRID_ZEROS, TY_GRID_BORDER, TY_GRID_REFLECTION } ty_grid_padding;

/* Grids hold positions from -1 to 1: from the first centre of a pixel to the last (align_corners), or from edge to edge. */
typedef struct ty_p_grid_sample {
  ty_grid_mode mode;
  ty_grid_padding padding;
  bool align_corners;
} ty_p_grid_sample;

/* Neighbours along one dimension. */
TY_INLINE int ty_grid_taps(ty_grid_mode mode) { return mode == TY_GRID_NEAREST ? 1 : mode == TY_GRID_BILINEAR ? 2 : 4; }

/* Neighbours of one position: where they are (-1: outside), what they weigh, and the slopes of the weights by the
 * position in the grid. */
#define TY_GRID_AXIS(REAL, suffix)                                                                                     \
  typedef struct ty_grid_axis_##suffix {                                                                               \
    int32_t at[4];                                                                                                     \
    REAL weight[4], slope[4];                                                                                          \
  } ty_grid_axis_##suffix;                                                                                             \
  /* u mirrored at low and high as often as it takes; *sign changes with each time. */                                 \
  TY_INLINE REAL ty_grid_reflect_##suffix(REAL u, REAL low, REAL high, REAL *sign) {                                   \
    const REAL span = high - low;                                                                                      \
    if (span <= 0) {                                                                                                   \
      *sign = 0;                                                                                                       \
      return 0;                                                                                                        \
    }                                                                                                                  \
    REAL a = u - low;                                                                                                  \
    if (a < 0) {                                                                                                       \
      a = -a;                                                                                                          \
      *sign = -*sign;                                                                                                  \
    }                                                                                                                  \
    const REAL turns = (REAL)floor(a / span), rest = a - turns * span;                                                 \
    if (turns - 2 * (REAL)floor(turns / 2) < (REAL)0.5) return rest + low;                                             \
    *sign = -*sign;                                                                                                    \
    return high - rest;                                                                                                \
  }                                                                                                                    \
  /* u brought into the image as the padding says. */                                                                  \
  TY_INLINE REAL ty_grid_inside_##suffix(const ty_p_grid_sample *p, REAL u, int64_t size, REAL *sign) {                \
    if (p->padding == TY_GRID_ZEROS) return u;                                                                         \
    const REAL last = (REAL)(size - 1);                                                                                \
    if (p->padding == TY_GRID_REFLECTION)                                                                              \
      u = p->align_corners ? ty_grid_reflect_##suffix(u, 0, last, sign)                                                \
                           : ty_grid_reflect_##suffix(u, (REAL)-0.5, last + (REAL)0.5, sign);                          \
    if (u > 0 && u < last) return u;                                                                                   \
    *sign = 0;                                                                                                         \
    return u > 0 ? last : 0;                                                                                           \
  }                                                                                                                    \
  TY_INLINE int32_t ty_grid_index_##suffix(REAL u, int64_t size) {                                                     \
    return u >= 0 && u < (REAL)size ? (int32_t)u : -1;                                                                 \
  }                                                                                                                    \
  TY_INLINE void ty_grid_axis_of_##suffix(const ty_p_grid_sample *p, REAL g, int64_t size, ty_grid_axis_##suffix *a) { \
    if (g != g) g = -1; /* as PyTorch has it */                                                                        \
    const REAL by_grid = (REAL)(p->align_corners ? size - 1 : size) / 2;                                               \
    REAL sign = 1, u = p->align_corners ? (g + 1) * by_grid : ((g + 1) * (REAL)size - 1) / 2;                          \
    if (p->mode != TY_GRID_BICUBIC) u = ty_grid_inside_##suffix(p, u, size, &sign);                                    \
    if (p->mode == TY_GRID_NEAREST) {                                                                                  \
      a->at[0] = ty_grid_index_##suffix((REAL)rint(u), size);                                                          \
      a->weight[0] = 1;                                                                                                \
      a->slope[0] = 0;                                                                                                 \
      return;                                                                                                          \
    }                                                                                                                  \
    const REAL before = (REAL)floor(u), t = u - before;                                                                \
    if (p->mode == TY_GRID_BILINEAR) {                                                                                 \
      a->at[0] = ty_grid_index_##suffix(before, size);                                                                 \
      a->at[1] = ty_grid_index_##suffix(before + 1, size);                                                             \
      a->weight[0] = 1 - t;                                                                                            \
      a->weight[1] = t;                                                                                                \
      a->slope[0] = -sign * by_grid;                                                                                   \
      a->slope[1] = sign * by_grid;                                                                                    \
      return;                                                                                                          \
    }                                                                                                                  \
    const REAL c = (REAL)-0.75; /* the slope of the cubic kernel at 1 */                                               \
    for (int k = 0; k < 4; k++) {                                                                                      \
      const REAL v = k == 0 ? t + 1 : k == 1 ? t : k == 2 ? 1 - t : 2 - t, side = k < 2 ? by_grid : -by_grid;          \
      const bool near = k == 1 || k == 2;                                                                              \
      REAL unused = 1;                                                                                                 \
      a->at[k] = ty_grid_index_##suffix((REAL)rint(ty_grid_inside_##suffix(p, before + (REAL)(k - 1), size, &unused)), \
                                        size);                                                                         \
      a->weight[k] = near ? ((c + 2) * v - (c + 3)) * v * v + 1 : ((c * v - 5 * c) * v + 8 * c) * v - 4 * c;           \
      a->slope[k] = side * (near ? (3 * (c + 2) * v - 2 * (c + 3)) * v : (3 * c * v - 10 * c) * v + 8 * c);            \
    }                                                                                                                  \
  }

TY_GRID_AXIS(float, f32)
TY_GRID_AXIS(double, f64)
#undef TY_GRID_AXIS

#endif
