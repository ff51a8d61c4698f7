/* Fourier and cosine transforms. Complex numbers are pairs, in a last dimension of 2 that no `dim` counts. All are made
 * of four ops along one dimension, each of which is the gradient of another: kernels/fft.h. */
#include <string.h>

#include "../../kernels/fft.h"
#include "../autograd/autograd.h"

/* Longer ones are mistakes. */
static const int64_t MOST = (int64_t)1 << 30;

/* ---- along one dimension ---- */

/* x: complex or real; its dimensions that may be named. */
static bool signal_dims(ty_call *c, bool complex, int *ndim) {
  const ty_tensor *x = c->arg[0].t;
  const int n = x->v.ndim;
  if (complex && (n < 2 || x->v.size[n - 1] != 2))
    return ty_op_fail(c, TY_EINVAL,
                      "x: expected complex numbers, [..., n, 2] with the real and imaginary parts last, got %s",
                      ty_describe(x));
  if (n < 1) return ty_op_fail(c, TY_EINVAL, "x: expected a signal [..., n], got %s", ty_describe(x));
  *ndim = n - complex;
  return true;
}

static bool transform_line(ty_call *c, bool from_complex, bool to_complex, int64_t n, int64_t dim, int64_t length,
                           ty_p_fft p) {
  ty_tensor *x = c->arg[0].t;
  int ndim;
  if (!signal_dims(c, from_complex, &ndim)) return false;
  if (dim < -ndim || dim >= ndim)
    return ty_op_fail(c, TY_EINVAL, "dim: expected a dimension in [%d, %d], got %lld for %s", -ndim, ndim - 1,
                      (long long)dim, ty_describe(x));
  if (n < 1 || n > MOST)
    return ty_op_fail(c, TY_EINVAL, "n: expected 1 to %lld positions, got %lld", (long long)MOST, (long long)n);
  if (length < 0)
    return ty_op_fail(c, TY_EINVAL, "length: expected a number of at least 0, got %lld", (long long)length);
  if (ndim + to_complex > TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "x: expected at most %d dimensions, as the result has one more, got %s",
                      TY_MAX_DIMS - 1, ty_describe(x));
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  p.n = n;
  p.dim = (int)(dim < 0 ? dim + ndim : dim);
  size[p.dim] = length;
  if (to_complex) size[ndim] = 2;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), ndim + to_complex, size) && ty_launch(c, &x, 1, &p);
}

static int64_t length_before(const ty_vjp *c, int64_t dim, bool complex) {
  ty_ints size = ty_vjp_size(c, 0);
  return size.v[dim < 0 ? dim + size.n - complex : dim];
}

bool fwd_fft_line(ty_call *c) {
  const ty_fft_line_args *a = TY_ARGS(fft_line, c);
  return transform_line(c, true, true, a->n.i, a->dim.i, a->length.i,
                        (ty_p_fft){ .inverse = a->inverse.i, .scale = a->scale.f });
}

bool vjp_fft_line(ty_vjp *c) {
  const ty_fft_line_args *a = TY_ARGS(fft_line, c);
  c->dx[0] = ty_fft_line(c->g[0], a->n.i, a->dim.i, length_before(c, a->dim.i, true), !a->inverse.i, a->scale.f);
  return true;
}

bool fwd_rfft_line(ty_call *c) {
  const ty_rfft_line_args *a = TY_ARGS(rfft_line, c);
  return transform_line(c, false, true, a->n.i, a->dim.i, a->length.i,
                        (ty_p_fft){ .inverse = a->inverse.i, .doubled = a->doubled.i, .scale = a->scale.f });
}

bool vjp_rfft_line(ty_vjp *c) {
  const ty_rfft_line_args *a = TY_ARGS(rfft_line, c);
  c->dx[0] = ty_irfft_line(c->g[0], a->n.i, a->dim.i, length_before(c, a->dim.i, false), a->inverse.i, a->doubled.i,
                           a->scale.f);
  return true;
}

bool fwd_irfft_line(ty_call *c) {
  const ty_irfft_line_args *a = TY_ARGS(irfft_line, c);
  return transform_line(c, true, false, a->n.i, a->dim.i, a->length.i,
                        (ty_p_fft){ .inverse = a->inverse.i, .doubled = a->doubled.i, .scale = a->scale.f });
}

bool vjp_irfft_line(ty_vjp *c) {
  const ty_irfft_line_args *a = TY_ARGS(irfft_line, c);
  c->dx[0] = ty_rfft_line(c->g[0], a->n.i, a->dim.i, length_before(c, a->dim.i, true), a->inverse.i, a->doubled.i,
                          a->scale.f);
  return true;
}

bool fwd_dct_line(ty_call *c) {
  const ty_dct_line_args *a = TY_ARGS(dct_line, c);
  return transform_line(c, false, false, a->n.i, a->dim.i, a->length.i,
                        (ty_p_fft){ .inverse = a->inverse.i, .scale = a->scale.f, .first = a->first.f });
}

bool vjp_dct_line(ty_vjp *c) {
  const ty_dct_line_args *a = TY_ARGS(dct_line, c);
  c->dx[0] = ty_dct_line(c->g[0], a->n.i, a->dim.i, length_before(c, a->dim.i, false), !a->inverse.i, a->scale.f,
                         a->first.f);
  return true;
}

/* ---- along two dimensions at once ---- */

bool fwd_fft_plane(ty_call *c) {
  const ty_fft_plane_args *a = TY_ARGS(fft_plane, c);
  ty_tensor *x = a->x.t;
  const bool real = a->real.i;
  int ndim;
  if (!signal_dims(c, !real, &ndim)) return false;
  if (ndim < 2 || x->v.size[ndim - 2] < 1 || x->v.size[ndim - 1] < 2 || ndim >= TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "x: expected planes with rows and at least two columns, got %s", ty_describe(x));
  if (real && a->inverse.i) return ty_op_fail(c, TY_EINVAL, "inverse: expected false for a real x, got true");
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  if (real) size[ndim - 1] = size[ndim - 1] / 2 + 1;
  size[ndim] = 2;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), ndim + 1, size) &&
         ty_launch(c, &x, 1, &(ty_p_fft){ .inverse = a->inverse.i, .scale = a->scale.f });
}

bool vjp_fft_plane(ty_vjp *c) {
  const ty_fft_plane_args *a = TY_ARGS(fft_plane, c);
  if (!a->real.i) {
    c->dx[0] = ty_fft_plane(c->g[0], false, !a->inverse.i, a->scale.f);
    return true;
  }
  const int64_t h = length_before(c, -2, false), w = length_before(c, -1, false);
  c->dx[0] = ty_irfft_line(ty_fft_line(c->g[0], h, -2, h, true, 1), w, -1, w, false, false, a->scale.f);
  return true;
}

/* ---- what PyTorch calls them ---- */

/* The factor of a transform of n positions; `back`: of one that is an inverse by its name. */
static bool factor(ty_call *c, int arg, int64_t n, bool back, double *scale) {
  static const char *const norms[] = { "backward", "ortho", "forward", NULL };
  const int norm = ty_check_choice(c, arg, norms);
  if (norm < 0) return false;
  *scale = norm == 1 ? 1 / sqrt((double)n) : (norm == 0) == back ? 1 / (double)n : 1;
  return true;
}

/* The dimension and the number of positions of a transform along one dimension: those there are where `n` is -1;
 * `halved`: of a spectrum of which only half is there. */
static bool one_dim(ty_call *c, int arg_n, int arg_dim, bool complex, bool halved, int *dim, int64_t *n) {
  int ndim;
  if (!signal_dims(c, complex, &ndim) || !ty_check_dim(c, arg_dim, ndim, dim)) return false;
  const ty_tensor *x = c->arg[0].t;
  const bool given = c->arg[arg_n].i != -1;
  *n = given ? c->arg[arg_n].i : halved ? 2 * (x->v.size[*dim] - 1) : x->v.size[*dim];
  if (*n >= 1 && *n <= MOST) return true;
  if (given)
    return ty_op_fail(c, TY_EINVAL, "n: expected 1 to %lld positions, or -1, got %lld", (long long)MOST, (long long)*n);
  return ty_op_fail(c, TY_EINVAL, "x: expected at least %d positions along dim %d, got %s; n says how many", 1 + halved,
                    *dim, ty_describe(x));
}

static bool complex_fft(ty_call *c, bool inverse) {
  int dim;
  int64_t n;
  double scale;
  return one_dim(c, 1, 2, true, false, &dim, &n) && factor(c, 3, n, inverse, &scale) &&
         ty_out_set(c, 0, ty_fft_line(c->arg[0].t, n, dim, n, inverse, scale));
}

bool fwd_fft(ty_call *c) { return complex_fft(c, false); }
bool fwd_ifft(ty_call *c) { return complex_fft(c, true); }

/* inverse: conjugated and scaled like an inverse transform, which makes rfft ihfft. */
static bool to_half(ty_call *c, bool inverse) {
  int dim;
  int64_t n;
  double scale;
  return one_dim(c, 1, 2, false, false, &dim, &n) && factor(c, 3, n, inverse, &scale) &&
         ty_out_set(c, 0, ty_rfft_line(c->arg[0].t, n, dim, n / 2 + 1, inverse, false, scale));
}

/* The same, which makes irfft hfft. */
static bool from_half(ty_call *c, bool forward) {
  int dim;
  int64_t n;
  double scale;
  return one_dim(c, 1, 2, true, true, &dim, &n) && factor(c, 3, n, !forward, &scale) &&
         ty_out_set(c, 0, ty_irfft_line(c->arg[0].t, n, dim, n, forward, true, scale));
}

bool fwd_rfft(ty_call *c) { return to_half(c, false); }
bool fwd_ihfft(ty_call *c) { return to_half(c, true); }
bool fwd_irfft(ty_call *c) { return from_half(c, false); }
bool fwd_hfft(ty_call *c) { return from_half(c, true); }

/* ---- along several dimensions ---- */

typedef struct several {
  int count;
  int dim[TY_MAX_DIMS];
  int64_t n[TY_MAX_DIMS];
  double scale;
} several;

/* Of arguments x, size, dims and norm. */
static bool several_dims(ty_call *c, bool two, bool complex, bool halved, bool inverse, several *s) {
  const ty_ints size = c->arg[1].is, dims = c->arg[2].is;
  const ty_tensor *x = c->arg[0].t;
  int ndim;
  uint32_t mask;
  if (!signal_dims(c, complex, &ndim) || !ty_check_dims(c, 2, ndim, &mask)) return false;
  s->count = dims.n ? dims.n : size.n ? size.n : two ? 2 : ndim;
  if (two && s->count != 2)
    return ty_op_fail(c, TY_EINVAL, "%s: expected two integers, got %s", dims.n ? "dims" : "size",
                      dims.n ? ty_shape_text(dims.n, dims.v) : ty_shape_text(size.n, size.v));
  if (size.n && size.n != s->count)
    return ty_op_fail(c, TY_EINVAL, "size: expected a number for each of the dims %s, got %s",
                      ty_shape_text(dims.n, dims.v), ty_shape_text(size.n, size.v));
  if (s->count > ndim)
    return ty_op_fail(c, TY_EINVAL, "x: expected at least %d dimensions of the signal, got %s", s->count,
                      ty_describe(x));
  double scale = 1;
  for (int i = 0; i < s->count; i++) {
    const int64_t d = dims.n ? dims.v[i] : i - s->count;
    const bool half = halved && i == s->count - 1;
    s->dim[i] = (int)(d < 0 ? d + ndim : d);
    const bool given = size.n && size.v[i] != -1;
    s->n[i] = given ? size.v[i] : half ? 2 * (x->v.size[s->dim[i]] - 1) : x->v.size[s->dim[i]];
    if (s->n[i] < 1 || s->n[i] > MOST) {
      if (given)
        return ty_op_fail(c, TY_EINVAL, "size: expected 1 to %lld positions, or -1, got %s", (long long)MOST,
                          ty_shape_text(size.n, size.v));
      return ty_op_fail(c, TY_EINVAL, "x: expected at least %d positions along dim %d, got %s; size says how many",
                        1 + half, s->dim[i], ty_describe(x));
    }
    double f;
    if (!factor(c, 3, s->n[i], inverse, &f)) return false;
    scale *= f;
  }
  s->scale = scale;
  return true;
}

/* The last dimension comes first, as lines along it lie together; the factor goes with it. */
static ty_tensor *along_rest(ty_tensor *x, const several *s, int from, bool inverse, double scale) {
  for (int i = from; i >= 0 && x; i--) {
    x = ty_fft_line(x, s->n[i], s->dim[i], s->n[i], inverse, scale);
    scale = 1;
  }
  return x;
}

/* Whether the transforms are those of whole planes, which have an op for the CPU. */
static bool is_plane(const ty_tensor *x, const several *s, bool complex) {
  const int ndim = x->v.ndim - complex, device = ty_device_of(x);
  return s->count == 2 && s->dim[0] == ndim - 2 && s->dim[1] == ndim - 1 && s->n[0] == x->v.size[ndim - 2] &&
         s->n[1] == x->v.size[ndim - 1] && s->n[1] >= 2 && ndim < TY_MAX_DIMS &&
         (device == TY_CPU || device == TY_META);
}

static bool complex_several(ty_call *c, bool two, bool inverse) {
  several s;
  if (!several_dims(c, two, true, false, inverse, &s)) return false;
  ty_tensor *x = c->arg[0].t;
  if (is_plane(x, &s, true)) return ty_out_set(c, 0, ty_fft_plane(x, false, inverse, s.scale));
  return ty_out_set(c, 0, along_rest(x, &s, s.count - 1, inverse, s.scale));
}

static bool half_several(ty_call *c, bool two) {
  several s;
  if (!several_dims(c, two, false, false, false, &s)) return false;
  const int last = s.count - 1;
  if (is_plane(c->arg[0].t, &s, false)) return ty_out_set(c, 0, ty_fft_plane(c->arg[0].t, true, false, s.scale));
  ty_tensor *y = ty_rfft_line(c->arg[0].t, s.n[last], s.dim[last], s.n[last] / 2 + 1, false, false, s.scale);
  return ty_out_set(c, 0, along_rest(y, &s, last - 1, false, 1));
}

static bool half_several_back(ty_call *c, bool two) {
  several s;
  if (!several_dims(c, two, true, true, true, &s)) return false;
  const int last = s.count - 1;
  ty_tensor *y = along_rest(c->arg[0].t, &s, last - 1, true, 1);
  return y && ty_out_set(c, 0, ty_irfft_line(y, s.n[last], s.dim[last], s.n[last], false, true, s.scale));
}

bool fwd_fft2(ty_call *c) { return complex_several(c, true, false); }
bool fwd_ifft2(ty_call *c) { return complex_several(c, true, true); }
bool fwd_fftn(ty_call *c) { return complex_several(c, false, false); }
bool fwd_ifftn(ty_call *c) { return complex_several(c, false, true); }
bool fwd_rfft2(ty_call *c) { return half_several(c, true); }
bool fwd_rfftn(ty_call *c) { return half_several(c, false); }
bool fwd_irfft2(ty_call *c) { return half_several_back(c, true); }
bool fwd_irfftn(ty_call *c) { return half_several_back(c, false); }

/* ---- frequencies ---- */

static bool frequencies(ty_call *c, bool half) {
  const ty_fftfreq_args *a = TY_ARGS(fftfreq, c); /* rfftfreq has the same */
  const int64_t n = a->n.i;
  const int device = a->device.i == TY_DEVICE_DEFAULT ? TY_CPU : (int)a->device.i;
  const ty_dtype dtype = a->dtype.i == TY_DTYPE_DEFAULT ? TY_F32 : (ty_dtype)a->dtype.i;
  if (n < 1 || n > MOST)
    return ty_op_fail(c, TY_EINVAL, "n: expected 1 to %lld positions, got %lld", (long long)MOST, (long long)n);
  if (a->d.f == 0) return ty_op_fail(c, TY_EINVAL, "d: expected a distance that is not 0, got 0");
  if (!ty_is_float(dtype))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected a float dtype (f64 f32 f16 bf16), got %s", ty_dtype_name[dtype]);
  ty_tensor *k = ty_arange(0, half ? n / 2 + 1 : (n + 1) / 2, 1, TY_F64, device);
  if (!half && k) k = ty_concat(TY_LIST(k, ty_arange(-(n / 2), 0, 1, TY_F64, device)), 0);
  return ty_out_set(c, 0, ty_to(ty_mul(k, 1 / ((double)n * a->d.f)), dtype));
}

bool fwd_fftfreq(ty_call *c) { return frequencies(c, false); }
bool fwd_rfftfreq(ty_call *c) { return frequencies(c, true); }

static bool shift(ty_call *c, bool back) {
  const ty_fftshift_args *a = TY_ARGS(fftshift, c); /* ifftshift has the same */
  ty_tensor *x = a->x.t;
  int ndim = x->v.ndim, count = 0;
  uint32_t mask;
  if (a->complex.i && !signal_dims(c, true, &ndim)) return false;
  if (!ty_check_dims(c, 1, ndim, &mask)) return false;
  int64_t by[TY_MAX_DIMS], dims[TY_MAX_DIMS];
  for (int d = 0; d < ndim; d++) {
    if (!(mask >> d & 1)) continue;
    dims[count] = d;
    by[count++] = back ? (x->v.size[d] + 1) / 2 : x->v.size[d] / 2;
  }
  return ty_out_set(c, 0, count ? ty_roll(x, (ty_ints){ by, count }, (ty_ints){ dims, count }) : ty_clone(x));
}

bool fwd_fftshift(ty_call *c) { return shift(c, false); }
bool fwd_ifftshift(ty_call *c) { return shift(c, true); }

/* ---- cosine transforms ---- */

/* Of type 2: 2 sum x cos; of type 3, its inverse but for 2 n: x[0] + 2 sum x cos. */
static bool cosine(ty_call *c, bool back) {
  const ty_dct_args *a = TY_ARGS(dct, c); /* idct has the same */
  static const char *const norms[] = { "backward", "ortho", "forward", NULL };
  int dim;
  int64_t n;
  if (a->type.i != 2 && a->type.i != 3)
    return ty_op_fail(c, TY_EINVAL, "type: expected 2 or 3, got %lld", (long long)a->type.i);
  if (!one_dim(c, 2, 3, false, false, &dim, &n)) return false;
  const int norm = ty_check_choice(c, 4, norms);
  if (norm < 0) return false;
  const bool third = (a->type.i == 3) != back;
  double scale = norm == 1 ? sqrt(2 / (double)n) : (norm == 0) == back ? 1 / (double)n : 2;
  double first = norm == 1 ? sqrt(0.5) : third ? 0.5 : 1;
  return ty_out_set(c, 0, ty_dct_line(a->x.t, n, dim, n, third, scale, first));
}

bool fwd_dct(ty_call *c) { return cosine(c, false); }
bool fwd_idct(ty_call *c) { return cosine(c, true); }
