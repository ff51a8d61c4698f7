/* Convolutions as one computation, which the forward pass and the gradient of the input share:
 *
 *   y[n, m, i, j] = sum over c, a, b of weight[m, c, a, b] * x[n, c, i * stride + start + a * step, ...]
 *
 * within each group, with strides of its own for the weight and for where i and j lie in y. The forward pass is one of
 * these. The input's gradient is one for each place within a stride: it takes part in the taps that hit it, which lie a
 * fixed number of taps apart, and sees g without stride. */
#ifndef TY_KERNELS_CUDA_CONV_CUH
#define TY_KERNELS_CUDA_CONV_CUH

#include "elementwise.cuh"

/* The three computations without a library: the arguments are those of the kernels of the same names. */
bool ty_conv_forward(const ty_kernel_args *k);
bool ty_conv_backward_input(const ty_kernel_args *k);
bool ty_conv_backward_weight(const ty_kernel_args *k);

/* x [n, c, h, w], weight [o, c/groups, kh, kw], y [n, o, oh, ow]. */
struct conv_shape {
  int64_t n, c, o;
  int h, w, kh, kw, oh, ow, stride[2], padding[2], dilation[2];
  int64_t groups, cg, og; /* channels per group */
};

static inline bool conv_shape_of(const ty_view *x, const ty_view *weight, const ty_view *y, const ty_p_conv *p,
                                 conv_shape *s) {
  int64_t most = 0;
  for (int d = 0; d < 2; d++) {
    int64_t reach = (weight->size[2 + d] - 1) * p->dilation[d] + p->padding[d] + x->size[2 + d];
    int64_t steps = p->stride[d] * y->size[2 + d];
    most = reach > most ? reach : most;
    most = steps > most ? steps : most;
    s->stride[d] = static_cast<int>(p->stride[d]);
    s->padding[d] = static_cast<int>(p->padding[d]);
    s->dilation[d] = static_cast<int>(p->dilation[d]);
  }
  s->n = x->size[0];
  s->c = x->size[1];
  s->o = weight->size[0];
  s->h = static_cast<int>(x->size[2]);
  s->w = static_cast<int>(x->size[3]);
  s->kh = static_cast<int>(weight->size[2]);
  s->kw = static_cast<int>(weight->size[3]);
  s->oh = static_cast<int>(y->size[2]);
  s->ow = static_cast<int>(y->size[3]);
  s->groups = p->groups;
  s->cg = weight->size[1];
  s->og = s->o / s->groups;
  const double limit = 1 << 30;
  bool small = static_cast<double>(most) < limit && static_cast<double>(s->h) * s->w < limit &&
               static_cast<double>(s->oh) * s->ow < limit && static_cast<double>(s->cg) * s->kh * s->kw < limit &&
               static_cast<double>(s->og) * s->kh * s->kw < limit && s->groups < limit;
  return small ||
         ty_fail(TY_EUNSUPPORTED, "convolutions over 2^30 pixels or sums of 2^30 products are not supported on "
                                  "cuda");
}

/* One dimension of the computation. */
struct conv_side {
  int in, taps, out;       /* of x, of the sum, of the part of y */
  int stride, start, step; /* position in x: i * stride + start + tap * step */
  int y_stride, y_start;   /* position in y: i * y_stride + y_start */
  int y_size;
};

struct conv_problem {
  conv_side rows, columns;
  int channels, rows_of_weight; /* c and m of one group */
  int groups;
  int64_t images;
  int64_t weight_group, weight_m, weight_c, weight_a, weight_b, weight_start; /* strides */
  ew_divisor taps, tap_columns;                                               /* a * b, b */
  ty_activation activation;
};

/* Position `at` of images with `area` positions in rows of `columns`. */
struct conv_place {
  int64_t image;
  int row, column;
};
TY_DEVICE conv_place conv_place_of(int64_t at, int area, int columns) {
  int64_t image = at <= INT32_MAX ? static_cast<int32_t>(at) / area : at / area;
  int rest = static_cast<int>(at - image * area), row = rest / columns;
  return conv_place{ image, row, rest - row * columns };
}

static inline void conv_ready(conv_problem *p) {
  p->taps.set(static_cast<uint32_t>(p->rows.taps * p->columns.taps > 0 ? p->rows.taps * p->columns.taps : 1));
  p->tap_columns.set(static_cast<uint32_t>(p->columns.taps > 0 ? p->columns.taps : 1));
}

#endif
