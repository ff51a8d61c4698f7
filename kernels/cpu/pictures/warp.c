/* Pictures at other sizes and places: crop_resize and warp. A plane, or some rows of it, is the work of one thread. */
#include "../../warp.h"

#include "../cpu.h"

#include <stdatomic.h>

/* ---- crop_resize ---- */

typedef struct resize_ctx {
  const ty_kernel_args *k;
  int64_t channels, h, w, out_h, out_w;
  int mode;
  atomic_bool failed;
} resize_ctx;

/* How the n result pixels of a side are made: of count[i] pixels from first[i] on, at most `most`, with weights[k * n + i],
 * which are 0 beyond the count. at: the first of `most` pixels that all are there, the weights being moved to fit. */
typedef struct taps {
  int64_t *first, *count, most;
  int32_t *weight, *at;
  size_t bytes;
} taps;

static bool make_taps(taps *t, const ty_taps_side *s, int64_t n, int64_t size) {
  t->most = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t first, count = ty_taps_of(s, i, n, &first);
    if (count > t->most) t->most = count;
  }
  t->bytes = (size_t)n * (2 * sizeof(int64_t) + (size_t)(t->most + 1) * sizeof(int32_t)) +
             (size_t)t->most * sizeof(int32_t);
  if (!(t->first = ty_scratch_alloc(t->bytes))) return false;
  t->count = t->first + n;
  t->at = (int32_t *)(void *)(t->count + n);
  t->weight = t->at + n;
  int32_t *own = t->weight + n * t->most;
  for (int64_t i = 0; i < n; i++) {
    t->count[i] = ty_taps_of(s, i, n, &t->first[i]);
    ty_taps_weights(s, i, n, t->first[i], t->count[i], own);
    const int64_t at = t->first[i] + t->most > size ? size - t->most : t->first[i], moved = t->first[i] - at;
    t->at[i] = (int32_t)at;
    for (int64_t k = 0; k < t->most; k++)
      t->weight[k * n + i] = k >= moved && k < moved + t->count[i] ? own[k - moved] : 0;
  }
  return true;
}

/* A plane: of each row of the result first the sums along columns, for the columns that are looked at, then those along
 * the row, a tap of all pixels at a time. Pixels with fewer taps than others have taps of weight 0. */
#define RESIZE_PLANE(name, T, SUM, SCALE, BETWEEN, PUT)                                                              \
  static void name(const resize_ctx *c, const void *plane, void *result, const taps *rows, const taps *columns,      \
                   int64_t lo, int64_t hi, void *room) {                                                             \
    SUM *restrict line = room, *restrict sum = line + c->w;                                                          \
    for (int64_t y = 0; y < c->out_h; y++) {                                                                         \
      const T *in = (const T *)plane + (int64_t)rows->at[y] * c->w;                                                  \
      for (int64_t x = lo; x < hi; x++) line[x] = 0;                                                                 \
      for (int64_t k = 0; k < rows->most; k++, in += c->w) {                                                         \
        const SUM share = (SUM)rows->weight[k * c->out_h + y] * SCALE;                                               \
        if (share == 0) continue;                                                                                    \
        _Pragma("omp simd") for (int64_t x = lo; x < hi; x++) line[x] += share * (SUM)in[x];                         \
      }                                                                                                              \
      _Pragma("omp simd") for (int64_t x = lo; x < hi; x++) line[x] = BETWEEN(line[x]);                              \
      for (int64_t x = 0; x < c->out_w; x++) sum[x] = 0;                                                             \
      for (int64_t k = 0; k < columns->most; k++) {                                                                  \
        const int32_t *restrict weight = columns->weight + k * c->out_w, *restrict at = columns->at;                 \
        const SUM *restrict from = line + k;                                                                         \
        _Pragma("omp simd") for (int64_t x = 0; x < c->out_w; x++) sum[x] += from[at[x]] * ((SUM)weight[x] * SCALE); \
      }                                                                                                              \
      T *restrict out = (T *)result + y * c->out_w;                                                                  \
      _Pragma("omp simd") for (int64_t x = 0; x < c->out_w; x++) out[x] = PUT(sum[x]);                               \
    }                                                                                                                \
  }
#define AS_IT_IS(x) (x)
RESIZE_PLANE(resize_u8, uint8_t, int32_t, 1, ty_taps_between, ty_taps_byte)
RESIZE_PLANE(resize_f32, float, float, (1.0f / TY_WEIGHT_ONE), AS_IT_IS, AS_IT_IS)
RESIZE_PLANE(resize_f64, double, double, (1.0 / TY_WEIGHT_ONE), AS_IT_IS, AS_IT_IS)

static void resize_pictures(void *context, int64_t begin, int64_t end) {
  resize_ctx *c = context;
  const ty_view *x = c->k->in[0], *y = c->k->out[0];
  const double *boxes = c->k->in[1]->data;
  const int64_t width = (int64_t)ty_dtype_size[x->dtype];
  const size_t bytes = (size_t)(c->w + c->out_w) * sizeof(double);
  void *room = ty_scratch_alloc(bytes);
  bool ok = room != NULL;
  for (int64_t i = begin; i < end && ok; i++) {
    const double *box = boxes + 4 * i;
    const ty_taps_side down = ty_taps_side_of(box[0], box[2], c->h, c->out_h, c->mode);
    const ty_taps_side across = ty_taps_side_of(box[1], box[3], c->w, c->out_w, c->mode);
    taps rows, columns;
    if (!(ok = make_taps(&rows, &down, c->out_h, c->h))) break;
    if ((ok = make_taps(&columns, &across, c->out_w, c->w))) {
      int64_t lo = c->w, hi = 0;
      for (int64_t j = 0; j < c->out_w; j++) {
        if (columns.at[j] < lo) lo = columns.at[j];
        if (columns.at[j] + columns.most > hi) hi = columns.at[j] + columns.most;
      }
      for (int64_t p = i * c->channels; p < (i + 1) * c->channels; p++) {
        const char *plane = (const char *)x->data + p * c->h * c->w * width;
        char *result = (char *)y->data + p * c->out_h * c->out_w * width;
        (x->dtype == TY_U8    ? resize_u8
         : x->dtype == TY_F64 ? resize_f64
                              : resize_f32)(c, plane, result, &rows, &columns, lo, hi, room);
      }
      ty_scratch_free(columns.first, columns.bytes);
    }
    ty_scratch_free(rows.first, rows.bytes);
  }
  if (room) ty_scratch_free(room, bytes);
  if (!ok) atomic_store(&c->failed, true);
}

/* in: pictures, boxes f64; warp. */
bool TY_KERNEL(crop_resize)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->out[0];
  if (y->count == 0) return true;
  resize_ctx c = {
    k, x->size[1], x->size[2], x->size[3], y->size[2], y->size[3], ((const ty_p_warp *)k->params)->mode, false
  };
  ty_parallel_for(x->size[0], 1, resize_pictures, &c);
  return !atomic_load(&c.failed) || ty_fail(TY_ENOMEM, "not enough memory for a row of a picture");
}

/* ---- warp ---- */

typedef struct warp_ctx {
  const ty_kernel_args *k;
  int64_t channels, h, w, out_h, out_w;
  int mode;
  double fill;
} warp_ctx;

/* What lies beyond the picture is `fill`. */
#define WARP_ROWS(name, T, mix)                                                                                     \
  static void name(const warp_ctx *c, const void *picture, void *result, const double *m, int64_t y0, int64_t y1) { \
    const int64_t plane = c->h * c->w, out_plane = c->out_h * c->out_w;                                             \
    const T fill = (T)c->fill;                                                                                      \
    for (int64_t y = y0; y < y1; y++)                                                                               \
      for (int64_t x = 0; x < c->out_w; x++) {                                                                      \
        const ty_warp_place p = ty_warp_place_of(m, x, y, c->mode);                                                 \
        const int has = ty_warp_has(&p, c->h, c->w);                                                                \
        int64_t at = p.row * c->w + p.column;                                                                       \
        T *out = (T *)result + y * c->out_w + x;                                                                    \
        for (int64_t channel = 0; channel < c->channels; channel++, at += plane, out += out_plane) {                \
          const T *in = (const T *)picture;                                                                         \
          *out = mix(has & 1 ? in[at] : fill, has & 2 ? in[at + 1] : fill, has & 4 ? in[at + c->w] : fill,          \
                     has & 8 ? in[at + c->w + 1] : fill, &p);                                                       \
        }                                                                                                           \
      }                                                                                                             \
  }
WARP_ROWS(warp_u8, uint8_t, ty_warp_byte)
WARP_ROWS(warp_f32, float, ty_warp_real_f32)
WARP_ROWS(warp_f64, double, ty_warp_real_f64)

static void warp_rows(void *context, int64_t begin, int64_t end) {
  const warp_ctx *c = context;
  const ty_view *x = c->k->in[0], *y = c->k->out[0];
  const int64_t width = (int64_t)ty_dtype_size[x->dtype];
  for (int64_t row = begin; row < end;) {
    const int64_t i = row / c->out_h, y0 = row % c->out_h;
    const int64_t rows = c->out_h - y0 < end - row ? c->out_h - y0 : end - row;
    const char *picture = (const char *)x->data + i * c->channels * c->h * c->w * width;
    char *result = (char *)y->data + i * c->channels * c->out_h * c->out_w * width;
    const double *m = (const double *)c->k->in[1]->data + 9 * i;
    (x->dtype == TY_U8 ? warp_u8 : x->dtype == TY_F64 ? warp_f64 : warp_f32)(c, picture, result, m, y0, y0 + rows);
    row += rows;
  }
}

/* in: pictures, matrices f64; warp. */
bool TY_KERNEL(warp)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->out[0];
  const ty_p_warp *p = k->params;
  if (y->count == 0) return true;
  const double fill = x->dtype == TY_U8 ? ty_warp_fill_byte(p->fill) : p->fill;
  warp_ctx c = { k, x->size[1], x->size[2], x->size[3], y->size[2], y->size[3], p->mode, fill };
  ty_parallel_for(x->size[0] * c.out_h, 1 + 16384 / (c.out_w * c.channels + 1), warp_rows, &c);
  return true;
}
