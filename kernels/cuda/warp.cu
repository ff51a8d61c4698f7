/* Pictures at other sizes and places: crop_resize and warp, with the bytes of kernels/cpu/pictures/warp.c. A thread makes a
 * pixel of one plane. */
#include "../warp.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 256 };

struct shape {
  int64_t channels, h, w, out_h, out_w, all; /* all: pixels of the result, of all planes */
  int mode;
  double fill;
};

shape shape_of(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->out[0];
  const ty_p_warp *p = static_cast<const ty_p_warp *>(k->params);
  return shape{ x->size[1], x->size[2], x->size[3], y->size[2],
                y->size[3], y->count,   p->mode,    x->dtype == TY_U8 ? ty_warp_fill_byte(p->fill) : p->fill };
}

template <class T> struct sums {
  typedef T C;
  static TY_DEVICE_MEMBER C share(int32_t weight) { return static_cast<C>(weight) * (C{ 1 } / TY_WEIGHT_ONE); }
  static TY_DEVICE_MEMBER C between(C sum) { return sum; }
  static TY_DEVICE_MEMBER T put(C sum) { return sum; }
};
template <> struct sums<uint8_t> {
  typedef int32_t C;
  static TY_DEVICE_MEMBER C share(int32_t weight) { return weight; }
  static TY_DEVICE_MEMBER C between(C sum) { return ty_taps_between(sum); }
  static TY_DEVICE_MEMBER uint8_t put(C sum) { return ty_taps_byte(sum); }
};

/* Weights of the taps one after the other: what ty_taps_weights() makes, without a place to keep them. */
struct tap_weights {
  ty_taps_side side;
  int64_t centre, total, rest, best, first, n;
  TY_DEVICE_MEMBER int64_t raw(int64_t k) const { return ty_taps_filter(&side, centre, first + k); }
  TY_DEVICE_MEMBER int64_t rounded(int64_t k) const {
    return total > 0 ? (raw(k) * 2 * TY_WEIGHT_ONE + total) / (2 * total) : 0;
  }
  TY_DEVICE_MEMBER tap_weights(const ty_taps_side &s, int64_t i, int64_t count) : side(s) {
    centre = s.start + (2 * i + 1) * s.length / (2 * count);
    n = ty_taps_of(&s, i, count, &first);
    total = best = 0;
    rest = TY_WEIGHT_ONE;
    for (int64_t k = 0; k < n; k++) total += raw(k);
    for (int64_t k = 0; k < n; k++) {
      if (raw(k) > raw(best)) best = k;
      rest -= rounded(k);
    }
  }
  TY_DEVICE_MEMBER int32_t operator[](int64_t k) const {
    return static_cast<int32_t>(rounded(k) + (k == best ? rest : 0));
  }
};

template <class T>
__global__ void __launch_bounds__(THREADS) resize_pixels(shape s, const T *x, const double *boxes, T *y) {
  typedef sums<T> S;
  typedef typename S::C C;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < s.all; i += (int64_t)gridDim.x * THREADS) {
    const int64_t column = i % s.out_w, row = i / s.out_w % s.out_h, plane = i / s.out_w / s.out_h;
    const double *box = boxes + 4 * (plane / s.channels);
    const tap_weights down(ty_taps_side_of(box[0], box[2], s.h, s.out_h, s.mode), row, s.out_h);
    const tap_weights across(ty_taps_side_of(box[1], box[3], s.w, s.out_w, s.mode), column, s.out_w);
    C sum = 0;
    for (int64_t k = 0; k < across.n; k++) {
      const T *from = x + (plane * s.h + down.first) * s.w + across.first + k;
      C line = 0;
      for (int64_t l = 0; l < down.n; l++) line += S::share(down[l]) * static_cast<C>(from[l * s.w]);
      sum += S::between(line) * S::share(across[k]);
    }
    y[i] = S::put(sum);
  }
}

TY_DEVICE uint8_t mix(uint8_t a, uint8_t b, uint8_t c, uint8_t d, const ty_warp_place *p) {
  return ty_warp_byte(a, b, c, d, p);
}
TY_DEVICE float mix(float a, float b, float c, float d, const ty_warp_place *p) {
  return ty_warp_real_f32(a, b, c, d, p);
}
TY_DEVICE double mix(double a, double b, double c, double d, const ty_warp_place *p) {
  return ty_warp_real_f64(a, b, c, d, p);
}

template <class T>
__global__ void __launch_bounds__(THREADS) warp_pixels(shape s, const T *x, const double *matrices, T *y) {
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < s.all; i += (int64_t)gridDim.x * THREADS) {
    const int64_t column = i % s.out_w, row = i / s.out_w % s.out_h, plane = i / s.out_w / s.out_h;
    const ty_warp_place p = ty_warp_place_of(matrices + 9 * (plane / s.channels), column, row, s.mode);
    const int has = ty_warp_has(&p, s.h, s.w);
    const T *in = x + plane * s.h * s.w, fill = static_cast<T>(s.fill);
    const int64_t at = p.row * s.w + p.column;
    y[i] = mix(has & 1 ? in[at] : fill, has & 2 ? in[at + 1] : fill, has & 4 ? in[at + s.w] : fill,
               has & 8 ? in[at + s.w + 1] : fill, &p);
  }
}

/* fn(T{}) for the types of pictures. */
template <class Fn> bool for_pictures(int dtype, Fn fn) {
  return dtype == TY_U8 ? fn(uint8_t{}) : dtype == TY_F64 ? fn(double{}) : fn(float{});
}

} // namespace

/* in: pictures, boxes f64; warp. */
TY_CUDA_KERNEL(crop_resize) {
  const shape s = shape_of(k);
  if (s.all == 0) return true;
  return for_pictures(k->out[0]->dtype, [&](auto t) {
    typedef decltype(t) T;
    const T *x = static_cast<const T *>(k->in[0]->data);
    const double *boxes = static_cast<const double *>(k->in[1]->data);
    T *y = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH(resize_pixels<T>, ty_cuda_blocks(s.all, THREADS), THREADS, 0, s, x, boxes, y);
  });
}

/* in: pictures, matrices f64; warp. */
TY_CUDA_KERNEL(warp) {
  const shape s = shape_of(k);
  if (s.all == 0) return true;
  return for_pictures(k->out[0]->dtype, [&](auto t) {
    typedef decltype(t) T;
    const T *x = static_cast<const T *>(k->in[0]->data);
    const double *matrices = static_cast<const double *>(k->in[1]->data);
    T *y = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH(warp_pixels<T>, ty_cuda_blocks(s.all, THREADS), THREADS, 0, s, x, matrices, y);
  });
}
