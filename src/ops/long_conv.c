/* Convolutions with kernels as long as the signal, by Fourier transforms. On the CPU they are two ops, whose gradients
 * they are themselves; elsewhere products of spectra. */
#include <string.h>

#include "../autograd/autograd.h"
#include "../../kernels/fft.h"

/* Longer ones are mistakes. */
static const int64_t MOST = (int64_t)1 << 29;

/* Shorter transforms go several at once through the lanes of vectors, which lines of their own do not. */
enum { LINE = 1024 };

/* Positions of a transform: where positions from `low` up to `high` have anything, those from `start` on are all read
 * once around. Even, and cut well into matrices. */
static int64_t circle(int64_t low, int64_t high, int64_t start, int64_t length) {
  if (start < low) low = start;
  if (start + length > high) high = start + length;
  int64_t n = 64;
  while (n < high - low) n *= 2;
  if (n > 64 && n / 8 * 5 >= high - low) return n / 8 * 5;
  if (n > 64 && n / 4 * 3 >= high - low) return n / 4 * 3;
  return n;
}

static bool check_lines(ty_call *c) { return ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[..., c, t]"); }

static bool check_span(ty_call *c, int arg, int64_t start, int64_t length) {
  if (start > -MOST && start < MOST && length >= 0 && length < MOST) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected fewer than %lld positions, got start %lld and length %lld",
                    c->op->args[arg].name, (long long)MOST, (long long)start, (long long)length);
}

static int64_t last(const ty_tensor *x) { return x->v.size[x->v.ndim - 1]; }

/* The channels and taps of a kernel for x. */
static bool check_kernel(ty_call *c, const ty_tensor *x, const ty_tensor *kernel) {
  if (kernel->v.ndim == 2 && kernel->v.size[0] == x->v.size[x->v.ndim - 2] && last(kernel) > 0 &&
      ty_dtype_of(kernel) == ty_dtype_of(x))
    return true;
  return ty_op_fail(c, TY_EINVAL, "kernel: expected [%lld, taps], as many as x %s has channels, of its dtype, got %s",
                    (long long)x->v.size[x->v.ndim - 2], ty_describe(x), ty_describe(kernel));
}

bool fwd_fft_conv_lines(ty_call *c) {
  const ty_fft_conv_lines_args *a = TY_ARGS(fft_conv_lines, c);
  ty_tensor *x = a->x.t, *kernel = a->kernel.t;
  const int64_t length = a->length.i, start = a->start.i;
  if (!check_lines(c) || !check_kernel(c, x, kernel) || !check_span(c, 2, start, length)) return false;
  const int64_t t = last(x), taps = last(kernel);
  const int64_t n = a->turned.i ? circle(1 - taps, t, start, length) : circle(0, t + taps - 1, start, length);
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[x->v.ndim - 1] = length;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ x, kernel }, 2,
                   &(ty_p_fft_conv){ .n = n, .start = start, .turned = a->turned.i });
}

bool vjp_fft_conv_lines(ty_vjp *c) {
  const ty_fft_conv_lines_args *a = TY_ARGS(fft_conv_lines, c);
  const int64_t start = a->start.i, t = last(a->x.t), taps = last(a->kernel.t);
  if (c->need[0]) c->dx[0] = ty_fft_conv_lines(c->g[0], a->kernel.t, t, -start, !a->turned.i);
  if (!c->need[1]) return true;
  c->dx[1] = a->turned.i ? ty_fft_conv_kernel(c->g[0], a->x.t, taps, start)
                         : ty_fft_conv_kernel(a->x.t, c->g[0], taps, -start);
  return true;
}

bool fwd_fft_conv_kernel(ty_call *c) {
  const ty_fft_conv_kernel_args *a = TY_ARGS(fft_conv_kernel, c);
  ty_tensor *x = a->x.t, *g = a->g.t;
  const int64_t taps = a->taps.i, start = a->start.i;
  const int nd = x->v.ndim;
  if (!check_lines(c) || !check_span(c, 2, start, taps)) return false;
  if (g->v.ndim != nd || memcmp(g->v.size, x->v.size, sizeof *x->v.size * (size_t)(nd - 1)) ||
      ty_dtype_of(g) != ty_dtype_of(x))
    return ty_op_fail(c, TY_EINVAL, "g: expected the dtype of x %s and its shape but for the last dimension, got %s",
                      ty_describe(x), ty_describe(g));
  const int64_t n = circle(1 - last(x), last(g), start, taps);
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 2, (int64_t[]){ x->v.size[nd - 2], taps }) &&
         ty_launch(c, (ty_tensor *[]){ x, g }, 2, &(ty_p_fft_conv){ .n = n, .start = start });
}

bool vjp_fft_conv_kernel(ty_vjp *c) {
  const ty_fft_conv_kernel_args *a = TY_ARGS(fft_conv_kernel, c);
  const int64_t start = a->start.i;
  if (c->need[0]) c->dx[0] = ty_fft_conv_lines(a->g.t, c->g[0], last(a->x.t), start, true);
  if (c->need[1]) c->dx[1] = ty_fft_conv_lines(a->x.t, c->g[0], last(a->g.t), -start, false);
  return true;
}

bool fwd_long_conv(ty_call *c) {
  const ty_long_conv_args *a = TY_ARGS(long_conv, c);
  ty_tensor *x = a->x.t, *kernel = a->kernel.t;
  if (!check_lines(c) || !check_kernel(c, x, kernel)) return false;
  const int64_t t = last(x), taps = last(kernel), ahead = a->ahead.i;
  if (ahead < 0 || ahead >= taps)
    return ty_op_fail(c, TY_EINVAL, "ahead: expected 0 to %lld, as the kernel has %lld taps, got %lld",
                      (long long)taps - 1, (long long)taps, (long long)ahead);
  if (!check_span(c, 0, 0, t + taps)) return false;
  const int64_t n = circle(0, t + taps - 1, ahead, t);
  const int device = ty_device_of(x);
  if ((device == TY_CPU || device == TY_META) && n >= LINE)
    return ty_out_set(c, 0, ty_fft_conv_lines(x, kernel, t, ahead, false));
  ty_tensor *spectrum = ty_rfft_line(x, n, -1, n / 2 + 1, false, false, 1);
  spectrum = ty_complex_mul(spectrum, ty_rfft_line(kernel, n, -1, n / 2 + 1, false, false, 1), false);
  ty_tensor *y = ty_irfft_line(spectrum, n, -1, ahead + t, false, true, 1 / (double)n);
  return ty_out_set(c, 0, ahead ? ty_narrow(y, -1, ahead, t) : y);
}
