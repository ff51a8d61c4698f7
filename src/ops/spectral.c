/* Spectra of short pieces of signals, and back; windows; banks of filters on the mel scale. */
#include <string.h>

#include "../autograd/autograd.h"

/* Longer ones are mistakes. */
static const int64_t MOST = (int64_t)1 << 30;

/* ---- frames ---- */

static bool fits(ty_call *c, int64_t size, int64_t hop, int64_t count) {
  const ty_tensor *x = c->arg[0].t;
  const int64_t t = x->v.size[x->v.ndim - 1];
  if (size < 1 || hop < 1 || count < 0)
    return ty_op_fail(c, TY_EINVAL,
                      "size: expected a size and a hop of at least 1 and a count of at least 0, got %lld, "
                      "%lld and %lld",
                      (long long)size, (long long)hop, (long long)count);
  if (count && (size > t || (count - 1 > (t - size) / hop)))
    return ty_op_fail(c, TY_EINVAL, "count: %lld frames of %lld, %lld apart, do not fit x %s", (long long)count,
                      (long long)size, (long long)hop, ty_describe(x));
  return true;
}

bool fwd_frames(ty_call *c) {
  const ty_frames_args *a = TY_ARGS(frames, c);
  ty_tensor *x = a->x.t;
  const int n = x->v.ndim;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS - 1, "[..., t]")) return false;
  const int64_t size = a->size.i, hop = a->hop.i, count = a->count.i;
  if (!fits(c, size, hop, count)) return false;
  int64_t sizes[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  memcpy(sizes, x->v.size, sizeof sizes);
  memcpy(stride, x->v.stride, sizeof stride);
  sizes[n - 1] = count, sizes[n] = size;
  stride[n - 1] = x->v.stride[n - 1] * (count ? hop : 1), stride[n] = x->v.stride[n - 1];
  return ty_out_view(c, 0, x, n + 1, sizes, stride, 0);
}

bool vjp_frames(ty_vjp *c) {
  const ty_frames_args *a = TY_ARGS(frames, c);
  c->dx[0] = ty_overlap_add(c->g[0], a->hop.i, ty_vjp_size(c, 0).v[c->in[0].ndim - 1]);
  return true;
}

bool fwd_rfft_frames(ty_call *c) {
  const ty_rfft_frames_args *a = TY_ARGS(rfft_frames, c);
  ty_tensor *x = a->x.t, *window = a->window.t;
  const int nd = x->v.ndim;
  const int64_t n = a->n.i;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS - 2, "[..., t]") || !fits(c, n, a->hop.i, a->count.i)) return false;
  if (window && (window->v.ndim != 1 || window->v.size[0] != n || ty_dtype_of(window) != ty_dtype_of(x)))
    return ty_op_fail(c, TY_EINVAL, "window: expected [%lld] of x's dtype, got %s", (long long)n, ty_describe(window));
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[nd - 1] = a->count.i, size[nd] = n / 2 + 1, size[nd + 1] = 2;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), nd + 2, size) &&
         ty_launch(c, (ty_tensor *[]){ x, window }, window ? 2 : 1,
                   &(ty_p_fft){ .n = n, .hop = a->hop.i, .scale = a->scale.f });
}

bool vjp_rfft_frames(ty_vjp *c) {
  const ty_rfft_frames_args *a = TY_ARGS(rfft_frames, c);
  const int64_t n = a->n.i, hop = a->hop.i, count = a->count.i;
  ty_tensor *d = ty_irfft_line(c->g[0], n, -1, n, false, false, a->scale.f), *window = a->window.t;
  if (c->need[0]) {
    const ty_ints size = ty_vjp_size(c, 0);
    ty_tensor *pieces = window ? ty_mul(d, window) : d;
    c->dx[0] = count ? ty_overlap_add(pieces, hop, size.v[size.n - 1])
                     : ty_zeros(size, ty_vjp_dtype(c, 0), ty_vjp_device(c, 0));
  }
  if (window && c->need[1]) c->dx[1] = ty_sum_to(ty_mul(d, ty_frames(a->x.t, n, hop, count)), ty_vjp_size(c, 1));
  return true;
}

bool fwd_overlap_add(ty_call *c) {
  const ty_overlap_add_args *a = TY_ARGS(overlap_add, c);
  ty_tensor *x = a->x.t;
  const int n = x->v.ndim;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[..., count, size]")) return false;
  const int64_t count = x->v.size[n - 2], size = x->v.size[n - 1], hop = a->hop.i, length = a->length.i;
  if (hop < 1) return ty_op_fail(c, TY_EINVAL, "hop: expected at least 1, got %lld", (long long)hop);
  if (length < 0 || length > MOST || (count && (size > length || count - 1 > (length - size) / hop)))
    return ty_op_fail(c, TY_EINVAL,
                      "length: expected at least the %lld frames of x %s, %lld apart, and at most %lld, got "
                      "%lld",
                      (long long)count, ty_describe(x), (long long)hop, (long long)MOST, (long long)length);
  int64_t sizes[TY_MAX_DIMS];
  memcpy(sizes, x->v.size, sizeof sizes);
  sizes[n - 2] = length;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), n - 1, sizes) && ty_launch(c, &x, 1, &(ty_p_dim){ .k = hop });
}

bool vjp_overlap_add(ty_vjp *c) {
  const ty_overlap_add_args *a = TY_ARGS(overlap_add, c);
  const ty_ints size = ty_vjp_size(c, 0);
  if (size.v[size.n - 1] == 0) c->dx[0] = ty_zeros(size, ty_vjp_dtype(c, 0), ty_vjp_device(c, 0));
  else c->dx[0] = ty_frames(c->g[0], size.v[size.n - 1], a->hop.i, size.v[size.n - 2]);
  return true;
}

/* ---- short-time Fourier transforms ---- */

typedef struct pieces {
  int64_t n, hop;
  ty_tensor *window; /* [n], or NULL: ones */
  double scale;      /* of the transform */
} pieces;

/* Of arguments n_fft, hop_length, win_length and window. */
static bool pieces_of(ty_call *c, bool normalized, pieces *p) {
  const int64_t n = c->arg[1].i, hop = c->arg[2].i, given = c->arg[3].i;
  const ty_tensor *x = c->arg[0].t;
  ty_tensor *w = c->arg[4].t;
  if (n < 1 || n > MOST)
    return ty_op_fail(c, TY_EINVAL, "n_fft: expected 1 to %lld positions, got %lld", (long long)MOST, (long long)n);
  if (hop < 0 || hop > MOST)
    return ty_op_fail(c, TY_EINVAL, "hop_length: expected a number of at least 1, or 0 for n_fft / 4, got %lld",
                      (long long)hop);
  if (given < 0 || given > n)
    return ty_op_fail(c, TY_EINVAL, "win_length: expected 1 to n_fft, %lld, or 0 for that, got %lld", (long long)n,
                      (long long)given);
  const int64_t width = given ? given : n;
  if (w && (w->v.ndim != 1 || w->v.size[0] != width || !ty_is_float(ty_dtype_of(w))))
    return ty_op_fail(c, TY_EINVAL, "window: expected floats [%lld], as win_length says, got %s", (long long)width,
                      ty_describe(w));
  *p = (pieces){ n, hop ? hop : n / 4 ? n / 4 : 1, w, normalized ? 1 / sqrt((double)n) : 1 };
  if (width == n) return true;
  if (!w && !(w = ty_ones(TY_INTS(width), ty_dtype_of(x), ty_device_of(x)))) return false;
  const int64_t before = (n - width) / 2;
  p->window = ty_pad(w, TY_INTS(before, n - width - before), "constant", 0);
  return p->window != NULL;
}

bool fwd_stft(ty_call *c) {
  const ty_stft_args *a = TY_ARGS(stft, c);
  ty_tensor *x = a->x.t;
  pieces p;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS - 2, "[..., t]") || !pieces_of(c, a->normalized.i, &p)) return false;
  static const char *const modes[] = { "reflect", "constant", "replicate", "circular", NULL };
  const int mode = ty_check_choice(c, 6, modes), last = x->v.ndim - 1;
  if (mode < 0) return false;
  const int64_t half = p.n / 2, t = x->v.size[last];
  if (a->center.i) {
    if (mode != 1 && t < (mode == 0 ? half + 1 : mode == 2 ? 1 : half))
      return ty_op_fail(c, TY_EINVAL,
                        "x: expected more samples to fill up n_fft / 2 = %lld on both sides in mode \"%s\", "
                        "got %s",
                        (long long)half, a->pad_mode.s, ty_describe(x));
    x = ty_pad(x, TY_INTS(half, half), a->pad_mode.s, TY_NO_NUMBER);
    if (!x) return false;
  }
  if (x->v.size[last] < p.n)
    return ty_op_fail(c, TY_EINVAL, "x: expected at least n_fft = %lld samples, got %s", (long long)p.n,
                      ty_describe(a->x.t));
  const int64_t count = (x->v.size[last] - p.n) / p.hop + 1;
  const ty_dtype dtype = ty_dtype_of(x);
  const int device = ty_device_of(x);
  const bool alike = !p.window ||
                     (ty_dtype_of(p.window) == dtype && ty_device_of(p.window) == device && !p.window->batch);
  if (a->onesided.i && alike && !ty_is_half(dtype) && (device == TY_CPU || device == TY_META))
    return ty_out_set(c, 0, ty_transpose(ty_rfft_frames(x, p.window, p.n, p.hop, count, p.scale), -3, -2));
  ty_tensor *y = ty_frames(x, p.n, p.hop, count);
  if (p.window) y = ty_mul(y, p.window);
  if (a->onesided.i) {
    y = ty_rfft_line(y, p.n, -1, p.n / 2 + 1, false, false, p.scale);
  } else {
    y = y ? ty_complex(y, NULL) : NULL;
    y = ty_fft_line(y, p.n, -1, p.n, false, p.scale);
  }
  return ty_out_set(c, 0, ty_transpose(y, -3, -2));
}

/* Griffin and Lim 1984: the signal whose windowed pieces are closest to those of x. */
bool fwd_istft(ty_call *c) {
  const ty_istft_args *a = TY_ARGS(istft, c);
  ty_tensor *x = a->x.t;
  pieces p;
  if (!ty_check_ndim(c, 0, 3, TY_MAX_DIMS, "[..., frequencies, frames, 2]") || !pieces_of(c, a->normalized.i, &p))
    return false;
  const int nd = x->v.ndim;
  const int64_t bins = a->onesided.i ? p.n / 2 + 1 : p.n, count = x->v.size[nd - 2];
  if (x->v.size[nd - 1] != 2 || x->v.size[nd - 3] != bins || count < 1)
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., %lld, frames, 2] for n_fft %lld, got %s", (long long)bins,
                      (long long)p.n, ty_describe(x));
  if (a->length.i < -1 || a->length.i > MOST)
    return ty_op_fail(c, TY_EINVAL, "length: expected a number of samples, or -1, got %lld", (long long)a->length.i);
  if (count - 1 > (MOST - p.n) / p.hop)
    return ty_op_fail(c, TY_EINVAL, "x: expected at most %lld samples, got %s", (long long)MOST, ty_describe(x));
  const int64_t all = p.n + (count - 1) * p.hop, start = a->center.i ? p.n / 2 : 0;
  const int64_t stop = a->length.i < 0 ? all - start : start + a->length.i;
  x = ty_transpose(x, -3, -2);
  ty_tensor *y;
  if (a->onesided.i) {
    y = ty_irfft_line(x, p.n, -1, p.n, false, true, 1 / ((double)p.n * p.scale));
  } else {
    y = ty_fft_line(x, p.n, -1, p.n, true, 1 / ((double)p.n * p.scale));
    y = ty_select(y, -1, 0);
  }
  ty_tensor *w = p.window ? p.window : ty_ones(TY_INTS(p.n), ty_dtype_of(a->x.t), ty_device_of(a->x.t));
  if (p.window) y = ty_mul(y, p.window);
  const ty_dtype dtype = y ? ty_dtype_of(y) : TY_F32;
  if (ty_is_half(dtype)) w = ty_to(w, TY_F32); /* which knows 1e-11 */
  y = ty_overlap_add(y, p.hop, all);
  w = w ? ty_overlap_add(ty_expand(ty_square(w), TY_INTS(count, p.n)), p.hop, all) : NULL;
  if (!y || !w) return false;
  const int64_t end = stop < all ? stop : all;
  y = ty_slice(y, -1, start, end > start ? end : start, 1);
  w = ty_slice(w, -1, start, end > start ? end : start, 1);
  ty_tensor *none = w ? ty_lt(w, 1e-11) : NULL;
  y = none ? ty_div(ty_masked_fill(y, none, 0.0), ty_masked_fill(w, none, 1.0)) : NULL;
  if (stop > all) y = ty_pad(y, TY_INTS(0, stop - (all > start ? all : start)), "constant", 0);
  return y && ty_out_set(c, 0, ty_to(y, dtype));
}

/* ---- windows ---- */

/* Arguments n, periodic, and the dtype and device at `at`: 0, 1 ... n - 1 times step over n, or over n - 1 of a window
 * that is symmetric. f64. */
static ty_tensor *window_positions(ty_call *c, int at, double step) {
  const int64_t n = c->arg[0].i;
  const bool periodic = c->arg[1].i;
  const ty_value *dtype = &c->arg[at], *device = &c->arg[at + 1];
  if (n < 0 || n > MOST) {
    ty_op_fail(c, TY_EINVAL, "n: expected 0 to %lld positions, got %lld", (long long)MOST, (long long)n);
    return NULL;
  }
  if (dtype->i != TY_DTYPE_DEFAULT && !ty_is_float((ty_dtype)dtype->i)) {
    ty_op_fail(c, TY_EINVAL, "dtype: expected a float dtype (f64 f32 f16 bf16), got %s", ty_dtype_name[dtype->i]);
    return NULL;
  }
  const int where = device->i == TY_DEVICE_DEFAULT ? TY_CPU : (int)device->i;
  ty_tensor *k = ty_arange(0, n, 1, TY_F64, where);
  return ty_mul(k, step / (double)(periodic ? n : n - 1));
}

static bool window_done(ty_call *c, int at, ty_tensor *w) {
  const ty_value *dtype = &c->arg[at];
  if (w && w->v.count == 1) w = ty_ones_like(w, TY_DTYPE_DEFAULT);
  return w && ty_out_set(c, 0, ty_to(w, dtype->i == TY_DTYPE_DEFAULT ? TY_F32 : (ty_dtype)dtype->i));
}

static const double TURN = 6.283185307179586476925;

/* a - b cos(2 pi k / n) + d cos(4 pi k / n) */
static bool cosine_window(ty_call *c, int at, double a, double b, double d) {
  ty_tensor *k = window_positions(c, at, TURN);
  ty_tensor *w = ty_add(ty_mul(ty_cos(k), -b), a);
  if (d != 0) w = ty_add(w, ty_mul(ty_cos(ty_mul(k, 2)), d));
  return window_done(c, at, w);
}

bool fwd_hann_window(ty_call *c) { return cosine_window(c, 2, 0.5, 0.5, 0); }
bool fwd_blackman_window(ty_call *c) { return cosine_window(c, 2, 0.42, 0.5, 0.08); }
bool fwd_hamming_window(ty_call *c) {
  const ty_hamming_window_args *a = TY_ARGS(hamming_window, c);
  return cosine_window(c, 4, a->alpha.f, a->beta.f, 0);
}

bool fwd_bartlett_window(ty_call *c) {
  ty_tensor *k = window_positions(c, 2, 2);
  return window_done(c, 2, ty_sub(1.0, ty_abs(ty_sub(k, 1.0))));
}

/* The Bessel function I0 of beta sqrt(1 - k^2), over that of beta: sum of (x^2 / 4)^i / i!^2, from its last terms. */
bool fwd_kaiser_window(ty_call *c) {
  const ty_kaiser_window_args *a = TY_ARGS(kaiser_window, c);
  const double beta = fabs(a->beta.f), quarter = beta * beta / 4;
  if (!(beta <= 700)) return ty_op_fail(c, TY_EINVAL, "beta: expected at most 700, got %g", a->beta.f);
  ty_tensor *k = window_positions(c, 3, 2);
  k = ty_sub(k, 1.0);
  ty_tensor *x = ty_relu(ty_mul(ty_sub(1.0, ty_square(k)), quarter)), *y = ty_ones_like(x, TY_DTYPE_DEFAULT);
  double whole = 1, terms = 0;
  for (double term = 1; term > 1e-18 * whole; whole += term) terms++, term *= quarter / (terms * terms);
  for (double n = terms; n >= 1 && y; n--) y = ty_add(ty_mul(ty_mul(x, y), 1 / (n * n)), 1.0);
  return window_done(c, 3, ty_mul(y, 1 / whole));
}

/* ---- mel scale ---- */

/* Slaney's scale is linear to 1000 Hz, 15 mel, and logarithmic from there, 27 mel for a factor of 6.4. */
static const double BREAK_HZ = 1000, BREAK_MEL = 15, HZ_OF_MEL = 200.0 / 3;
static double slaney_step(void) { return log(6.4) / 27; }

static double mel_of(double f, bool slaney) {
  if (!slaney) return 2595 * log10(1 + f / 700);
  return f < BREAK_HZ ? f / HZ_OF_MEL : BREAK_MEL + log(f / BREAK_HZ) / slaney_step();
}

static ty_tensor *hz_of(ty_tensor *mel, bool slaney) {
  if (!slaney) return ty_mul(ty_expm1(ty_mul(mel, log(10.0) / 2595)), 700.0);
  ty_tensor *low = ty_mul(mel, HZ_OF_MEL);
  ty_tensor *high = ty_mul(ty_exp(ty_mul(ty_sub(mel, BREAK_MEL), slaney_step())), BREAK_HZ);
  ty_tensor *which = mel ? ty_lt(mel, BREAK_MEL) : NULL;
  return which && low && high ? ty_where(which, low, high) : NULL;
}

bool fwd_mel_filter_bank(ty_call *c) {
  const ty_mel_filter_bank_args *a = TY_ARGS(mel_filter_bank, c);
  static const char *const scales[] = { "htk", "slaney", NULL }, *const norms[] = { "none", "slaney", NULL };
  const int scale = ty_check_choice(c, 5, scales), norm = scale < 0 ? -1 : ty_check_choice(c, 6, norms);
  if (norm < 0) return false;
  const double nyquist = a->sample_rate.f / 2, from = a->f_min.f, to = a->f_max.f > 0 ? a->f_max.f : nyquist;
  if (a->n_mels.i < 1 || a->n_mels.i > 1 << 20)
    return ty_op_fail(c, TY_EINVAL, "n_mels: expected 1 to %d filters, got %lld", 1 << 20, (long long)a->n_mels.i);
  if (a->n_freqs.i < 2 || a->n_freqs.i > MOST)
    return ty_op_fail(c, TY_EINVAL, "n_freqs: expected 2 to %lld frequencies, n_fft / 2 + 1, got %lld", (long long)MOST,
                      (long long)a->n_freqs.i);
  if (!(nyquist > 0) || isinf(nyquist))
    return ty_op_fail(c, TY_EINVAL, "sample_rate: expected a positive number, got %g", a->sample_rate.f);
  if (!(from >= 0 && from < to) || isinf(to))
    return ty_op_fail(c, TY_EINVAL, "f_min: expected 0 <= f_min < f_max, got %g and %g", from, to);
  const ty_dtype dtype = a->dtype.i == TY_DTYPE_DEFAULT ? TY_F32 : (ty_dtype)a->dtype.i;
  if (!ty_is_float(dtype))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected a float dtype (f64 f32 f16 bf16), got %s", ty_dtype_name[dtype]);
  const int device = a->device.i == TY_DEVICE_DEFAULT ? TY_CPU : (int)a->device.i;
  const int64_t n = a->n_mels.i;
  ty_tensor *f = ty_linspace(0, nyquist, a->n_freqs.i, TY_F64, device);
  ty_tensor *edge = ty_linspace(mel_of(from, scale), mel_of(to, scale), n + 2, TY_F64, device);
  edge = ty_unsqueeze(hz_of(edge, scale), 1);
  ty_tensor *low = ty_slice(edge, 0, 0, n, 1), *middle = ty_slice(edge, 0, 1, n + 1, 1);
  ty_tensor *high = ty_slice(edge, 0, 2, n + 2, 1);
  ty_tensor *up = ty_div(ty_sub(f, low), ty_sub(middle, low));
  ty_tensor *down = ty_div(ty_sub(high, f), ty_sub(high, middle));
  ty_tensor *bank = ty_relu(ty_minimum(up, down));
  if (norm) bank = ty_div(ty_mul(bank, 2.0), ty_sub(high, low)); /* of the same area */
  return ty_out_set(c, 0, ty_to(bank, dtype));
}
