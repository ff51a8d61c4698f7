/* Windows of images as columns, and columns summed up to images. */
#include <string.h>

#include "../cpu.h"

ty_kernel TY_KERNEL(unfold);
ty_kernel TY_KERNEL(fold);

/* Images [h, w] of `planes` = n * c, windows [oh, ow] of them. */
typedef struct columns {
  const void *from;
  void *to;
  int64_t h, w, oh, ow;
  const ty_p_pool *p;
} columns;

/* The first of windows 0 .. count - 1 whose tap `k` lies in an image of `size`, and the one behind the last. */
static void inside(const ty_p_pool *p, int d, int64_t k, int64_t size, int64_t count, int64_t *first, int64_t *last) {
  int64_t shift = k * p->dilation[d] - p->padding[d], stride = p->stride[d];
  int64_t lo = shift < 0 ? (-shift + stride - 1) / stride : 0, hi = shift < size ? (size - 1 - shift) / stride + 1 : 0;
  *first = lo < count ? lo : count;
  *last = hi < *first ? *first : hi < count ? hi : count;
}

#define REAL float
#define NAME(x) x##_f32
#include "unfold_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "unfold_real.h"

/* `image` [n, c, h, w]; how many windows it has follows from the parameters. */
static bool run(const ty_kernel_args *k, const ty_view *image, bool back) {
  const ty_p_pool *p = k->params;
  int64_t out[2];
  for (int d = 0; d < 2; d++)
    out[d] = (image->size[2 + d] + 2 * p->padding[d] - p->dilation[d] * (p->kernel[d] - 1) - 1) / p->stride[d] + 1;
  columns q = { k->in[0]->data, k->out[0]->data, image->size[2], image->size[3], out[0], out[1], p };
  if (k->out[0]->count == 0) return true;
  int64_t planes = image->size[0] * image->size[1], taps = p->kernel[0] * p->kernel[1], windows = out[0] * out[1];
  bool wide = k->out[0]->dtype == TY_F64;
  if (back) ty_parallel_for(planes, 1 + 16384 / (windows * taps + 1), wide ? fold_planes_f64 : fold_planes_f32, &q);
  else ty_parallel_for(planes * taps, 1 + 16384 / (windows + 1), wide ? unfold_taps_f64 : unfold_taps_f32, &q);
  return true;
}

bool TY_KERNEL(unfold)(const ty_kernel_args *k) { return run(k, k->in[0], false); }
bool TY_KERNEL(fold)(const ty_kernel_args *k) { return run(k, k->out[0], true); }
