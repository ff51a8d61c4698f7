/* Convolutions and sums of bytes with scales and zero points, and gradients of them: a thread for each number. */
#include "cuda.cuh"

#include "../int8.h"

namespace {

enum { THREADS = 128 };

struct job {
  int64_t n, c, h, w, o, oh, ow, kh, kw, cg, og, sh, sw, ph, pw, count;
  int32_t x_zero, y_zero, low;
  const int8_t *x, *y, *weight;
  const float *g, *bias, *scale;
};

job job_of(const ty_view *x, const ty_view *weight, const ty_view *y, const void *params) {
  const ty_p_conv_int8 *p = static_cast<const ty_p_conv_int8 *>(params);
  job j = {};
  j.n = x->size[0], j.c = x->size[1], j.h = x->size[2], j.w = x->size[3];
  j.o = weight->size[0], j.cg = weight->size[1], j.kh = weight->size[2], j.kw = weight->size[3];
  j.oh = y->size[2], j.ow = y->size[3], j.og = weight->size[0] / p->groups;
  j.sh = p->stride[0], j.sw = p->stride[1], j.ph = p->padding[0], j.pw = p->padding[1];
  j.x_zero = p->x_zero, j.y_zero = p->y_zero, j.low = p->low;
  return j;
}

template <class T> const T *data(const ty_view *v) { return static_cast<const T *>(v->data); }

TY_DEVICE int8_t code(double value, int32_t zero, int32_t low) {
  const double v = rint(value) + zero;
  return static_cast<int8_t>(v < low ? low : v > 127 ? 127 : v);
}

TY_DEVICE float masked(float g, int32_t y, int32_t low) { return y > low && y < 127 ? g : 0.0f; }

__global__ void __launch_bounds__(THREADS) forward(const job j, int8_t *result) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t u = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; u < j.count; u += step) {
    const int64_t column = u % j.ow, row = u / j.ow % j.oh, o = u / (j.ow * j.oh) % j.o, n = u / (j.ow * j.oh * j.o);
    int32_t sum = 0;
    for (int64_t c = 0; c < j.cg; c++) {
      const int8_t *x = j.x + (n * j.c + o / j.og * j.cg + c) * j.h * j.w;
      const int8_t *weight = j.weight + (o * j.cg + c) * j.kh * j.kw;
      for (int64_t ki = 0; ki < j.kh; ki++) {
        const int64_t r = row * j.sh + ki - j.ph;
        if (r < 0 || r >= j.h) continue;
        for (int64_t kj = 0; kj < j.kw; kj++) {
          const int64_t s = column * j.sw + kj - j.pw;
          if (s >= 0 && s < j.w) sum += (x[r * j.w + s] - j.x_zero) * weight[ki * j.kw + kj];
        }
      }
    }
    result[u] = code((static_cast<double>(sum) + static_cast<double>(j.bias[o])) * static_cast<double>(j.scale[o]),
                     j.y_zero, j.low);
  }
}

__global__ void __launch_bounds__(THREADS) input_gradient(const job j, float *dx) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t u = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; u < j.count; u += step) {
    const int64_t s = u % j.w, r = u / j.w % j.h, c = u / (j.w * j.h) % j.c, n = u / (j.w * j.h * j.c);
    const int64_t first = c / j.cg * j.og;
    float sum = 0;
    for (int64_t o = first; o < first + j.og; o++) {
      const int8_t *weight = j.weight + (o * j.cg + c % j.cg) * j.kh * j.kw;
      for (int64_t ki = 0; ki < j.kh; ki++) {
        const int64_t row = r + j.ph - ki;
        if (row < 0 || row % j.sh || row / j.sh >= j.oh) continue;
        for (int64_t kj = 0; kj < j.kw; kj++) {
          const int64_t column = s + j.pw - kj;
          if (column < 0 || column % j.sw || column / j.sw >= j.ow) continue;
          const int64_t at = ((n * j.o + o) * j.oh + row / j.sh) * j.ow + column / j.sw;
          sum += j.scale[o] * weight[ki * j.kw + kj] * masked(j.g[at], j.y[at], j.low);
        }
      }
    }
    dx[u] = sum;
  }
}

/* Threads from `count` on sum for the bias. */
__global__ void __launch_bounds__(THREADS) weight_gradient(const job j, float *dw, float *db) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t u = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; u < j.count + j.o; u += step) {
    const bool bias = u >= j.count;
    const int64_t kj = bias ? 0 : u % j.kw, ki = bias ? 0 : u / j.kw % j.kh, c = bias ? 0 : u / (j.kw * j.kh) % j.cg;
    const int64_t o = bias ? u - j.count : u / (j.kw * j.kh * j.cg);
    float sum = 0;
    for (int64_t n = 0; n < j.n; n++) {
      const int8_t *x = j.x + (n * j.c + o / j.og * j.cg + c) * j.h * j.w;
      for (int64_t row = 0; row < j.oh; row++) {
        const int64_t r = row * j.sh + ki - j.ph;
        if (!bias && (r < 0 || r >= j.h)) continue;
        for (int64_t column = 0; column < j.ow; column++) {
          const int64_t s = column * j.sw + kj - j.pw, at = ((n * j.o + o) * j.oh + row) * j.ow + column;
          if (!bias && (s < 0 || s >= j.w)) continue;
          sum += masked(j.g[at], j.y[at], j.low) * (bias ? 1.0f : static_cast<float>(x[r * j.w + s] - j.x_zero));
        }
      }
    }
    (bias ? db[o] : dw[u]) = j.scale[o] * sum;
  }
}

__global__ void __launch_bounds__(THREADS)
    add(const ty_p_int8 p, const int8_t *a, const int8_t *b, int8_t *y, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step)
    y[i] = code((a[i] - p.a_zero) * p.a_scale + (b[i] - p.b_zero) * p.b_scale, p.y_zero, p.low);
}

__global__ void __launch_bounds__(THREADS)
    inside(float scale, int32_t low, const float *g, const int8_t *y, float *dx, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step)
    dx[i] = scale * masked(g[i], y[i], low);
}

} // namespace

TY_CUDA_KERNEL(conv2d_int8) {
  job j = job_of(k->in[0], k->in[1], k->out[0], k->params);
  j.x = data<int8_t>(k->in[0]), j.weight = data<int8_t>(k->in[1]);
  j.bias = data<float>(k->in[2]), j.scale = data<float>(k->in[3]);
  j.count = k->out[0]->count;
  int8_t *result = static_cast<int8_t *>(k->out[0]->data);
  if (!j.count) return true;
  return TY_LAUNCH(forward, ty_cuda_blocks(j.count, THREADS), THREADS, 0, j, result);
}

TY_CUDA_KERNEL(conv2d_int8_backward_input) {
  job j = job_of(k->out[0], k->in[2], k->in[0], k->params);
  j.g = data<float>(k->in[0]), j.y = data<int8_t>(k->in[1]);
  j.weight = data<int8_t>(k->in[2]), j.scale = data<float>(k->in[3]);
  j.count = k->out[0]->count;
  float *dx = static_cast<float *>(k->out[0]->data);
  if (!j.count) return true;
  return TY_LAUNCH(input_gradient, ty_cuda_blocks(j.count, THREADS), THREADS, 0, j, dx);
}

TY_CUDA_KERNEL(conv2d_int8_backward_weight) {
  job j = job_of(k->in[2], k->out[0], k->in[0], k->params);
  j.g = data<float>(k->in[0]), j.y = data<int8_t>(k->in[1]);
  j.x = data<int8_t>(k->in[2]), j.scale = data<float>(k->in[3]);
  j.count = k->out[0]->count;
  float *dw = static_cast<float *>(k->out[0]->data), *db = static_cast<float *>(k->out[1]->data);
  if (!j.o) return true;
  return TY_LAUNCH(weight_gradient, ty_cuda_blocks(j.count + j.o, THREADS), THREADS, 0, j, dw, db);
}

TY_CUDA_KERNEL(add_int8) {
  const int64_t count = k->out[0]->count;
  const ty_p_int8 p = *static_cast<const ty_p_int8 *>(k->params);
  const int8_t *a = data<int8_t>(k->in[0]), *b = data<int8_t>(k->in[1]);
  int8_t *y = static_cast<int8_t *>(k->out[0]->data);
  if (!count) return true;
  return TY_LAUNCH(add, ty_cuda_blocks(count, THREADS), THREADS, 0, p, a, b, y, count);
}

TY_CUDA_KERNEL(inside_int8) {
  const int64_t count = k->out[0]->count;
  const ty_p_int8 *p = static_cast<const ty_p_int8 *>(k->params);
  const float scale = static_cast<float>(p->a_scale), *g = data<float>(k->in[0]);
  const int32_t low = p->low;
  const int8_t *y = data<int8_t>(k->in[1]);
  float *dx = static_cast<float *>(k->out[0]->data);
  if (!count) return true;
  return TY_LAUNCH(inside, ty_cuda_blocks(count, THREADS), THREADS, 0, scale, low, g, y, dx, count);
}
