/* Fourier and cosine transforms: kernels/fft.h. All are complex transforms of n positions between a way in and a way out
 * of their own. Lines that fit are transformed in shared memory; longer ones by passes over global memory; lengths with a
 * large prime factor as a convolution with a chirp (Bluestein 1970), by transforms of a power of two. Passes are
 * Stockham's. Roots of unity come from tables that each call fills, computed in double. */
#include "../fft.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 256, PASSES = 40, LARGEST = 61, SHARED_BYTES = 64 << 10 };

template <class T> struct alignas(2 * sizeof(T)) pair_of { T re, im; };

template <class T> TY_DEVICE pair_of<T> times(pair_of<T> a, pair_of<T> b) {
  return pair_of<T>{ a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re };
}
template <class T> TY_DEVICE pair_of<T> plus(pair_of<T> a, pair_of<T> b) {
  return pair_of<T>{ a.re + b.re, a.im + b.im };
}
template <class T> TY_DEVICE pair_of<T> minus(pair_of<T> a, pair_of<T> b) {
  return pair_of<T>{ a.re - b.re, a.im - b.im };
}
template <class T> TY_DEVICE pair_of<T> conjugate(pair_of<T> a) { return pair_of<T>{ a.re, -a.im }; }

/* The passes of a transform of n positions; roots: exp(-2 pi i k / n). */
template <class T> struct plan_of {
  int64_t n;
  int count, radix[PASSES];
  const pair_of<T> *roots;
};

template <class T> struct job_of {
  int kind;
  const T *x;
  T *y;
  int64_t line, lines, inner, length, out, n; /* line: the first of those that are under way */
  bool inverse, doubled, back;                /* back: the transform is one with conjugate roots */
  T scale, first;
  const pair_of<T> *quarter; /* cosine: exp(-i pi k / (2 n)) */
  const pair_of<T> *chirp;   /* exp(-i pi k^2 / n), or NULL */
};

/* ---- tables: exp(-2 pi i a / order), a = k or k^2 ---- */

template <class T>
__global__ void __launch_bounds__(THREADS) fft_roots(pair_of<T> *to, int64_t count, int64_t order, bool squares) {
  for (int64_t k = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; k < count;
       k += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t a = (squares ? k * k : k) % order;
    const int64_t quarter = (8 * a + order) / (2 * order), rest = 4 * a - quarter * order; /* to an eighth of a turn */
    const double angle = 1.57079632679489661923 * static_cast<double>(rest) / static_cast<double>(order);
    const double c = cos(angle), s = sin(angle);
    const int turn = static_cast<int>(quarter % 4);
    const double re = turn == 0 ? c : turn == 1 ? -s : turn == 2 ? -c : s;
    const double im = turn == 0 ? s : turn == 1 ? c : turn == 2 ? -s : -c;
    to[k] = pair_of<T>{ static_cast<T>(re), static_cast<T>(-im) };
  }
}

/* ---- the ways in and out ---- */

template <class T> TY_DEVICE T weight_of(const job_of<T> &j, int64_t k) {
  return j.doubled && k != 0 && 2 * k != j.n ? T(2) : T(1);
}

/* Element k of what is transformed, conjugate when the transform goes back. */
template <class T> TY_DEVICE pair_of<T> way_in(const job_of<T> &j, int64_t line, int64_t k) {
  const int64_t outer = line / j.inner, within = line % j.inner;
  int64_t i = k;
  if (j.kind == TY_FFT_COSINE && !j.inverse) i = k < (j.n + 1) / 2 ? 2 * k : 2 * (j.n - 1 - k) + 1;
  pair_of<T> z{ T(0), T(0) };
  if (i >= j.length || (j.kind == TY_FFT_HALF && k > j.n / 2)) return z;
  const int64_t at = (outer * j.length + i) * j.inner + within;
  if (j.kind == TY_FFT_COMPLEX || j.kind == TY_FFT_HALF) {
    z = pair_of<T>{ j.x[2 * at], j.x[2 * at + 1] };
    if (j.kind == TY_FFT_HALF) {
      const T w = weight_of(j, k);
      z = pair_of<T>{ w * z.re, j.inverse ? -w * z.im : w * z.im };
    }
    if (j.back) z.im = -z.im;
  } else {
    z.re = j.x[at];
    if (j.kind == TY_FFT_COSINE && j.inverse) {
      if (k == 0) z.re *= j.first;
      z = pair_of<T>{ z.re * j.quarter[k].re, z.re * j.quarter[k].im };
    }
  }
  return j.chirp ? times(z, j.chirp[k]) : z;
}

/* Element k of the result, before the conjugation of a transform that goes back. */
template <class T> TY_DEVICE void way_out(const job_of<T> &j, int64_t line, int64_t k, pair_of<T> z) {
  const int64_t outer = line / j.inner, within = line % j.inner;
  int64_t i = k;
  if (j.kind == TY_FFT_COSINE && j.inverse) i = k < (j.n + 1) / 2 ? 2 * k : 2 * (j.n - 1 - k) + 1;
  if (i >= j.out || (j.kind == TY_FFT_REAL && k > j.n / 2)) return;
  if (j.chirp) z = times(z, j.chirp[k]);
  const int64_t at = (outer * j.out + i) * j.inner + within;
  T scale = j.scale;
  if (j.kind == TY_FFT_COMPLEX || j.kind == TY_FFT_REAL) {
    bool flip = j.back;
    if (j.kind == TY_FFT_REAL) {
      scale *= weight_of(j, k);
      flip = j.inverse;
    }
    j.y[2 * at] = scale * z.re;
    j.y[2 * at + 1] = flip ? -scale * z.im : scale * z.im;
    return;
  }
  if (j.kind == TY_FFT_COSINE && !j.inverse) {
    z = times(z, j.quarter[k]);
    if (k == 0) scale *= j.first;
  }
  j.y[at] = scale * z.re;
}

/* ---- passes ---- */

/* Item `item` of n / r (r 2 or 4) or n (others) of a pass with radix r: m is what is left of the length, s the product of
 * the radices before. */
template <class T, class From, class To>
TY_DEVICE void pass_item(const plan_of<T> &p, From x, To y, int r, int64_t m, int64_t s, int64_t item) {
  typedef pair_of<T> C;
  if (r == 4) {
    const int64_t q = item % s, k = item / s;
    const C a = x[q + s * k], b = x[q + s * (k + m)], c = x[q + s * (k + 2 * m)], d = x[q + s * (k + 3 * m)];
    const C e = plus(a, c), f = minus(a, c), g = plus(b, d), h = minus(b, d);
    const C turned{ h.im, -h.re };
    y[q + s * (4 * k)] = plus(e, g);
    y[q + s * (4 * k + 1)] = times(plus(f, turned), p.roots[k * s]);
    y[q + s * (4 * k + 2)] = times(minus(e, g), p.roots[2 * k * s]);
    y[q + s * (4 * k + 3)] = times(minus(f, turned), p.roots[3 * k * s]);
  } else if (r == 2) {
    const int64_t q = item % s, k = item / s;
    const C a = x[q + s * k], b = x[q + s * (k + m)];
    y[q + s * (2 * k)] = plus(a, b);
    y[q + s * (2 * k + 1)] = times(minus(a, b), p.roots[k * s]);
  } else {
    const int64_t q = item % s, k = item / s / r, to = item / s % r, step = p.n / r;
    C sum = x[q + s * k];
    for (int i = 1; i < r; i++) sum = plus(sum, times<T>(x[q + s * (k + m * i)], p.roots[i * to % r * step]));
    y[q + s * (r * k + to)] = times(sum, p.roots[to * k * s]);
  }
}

TY_DEVICE int64_t pass_items(int64_t n, int r) { return r == 2 || r == 4 ? n / r : n; }

/* Blocks of `group` lines, in shared memory from the way in to the way out. */
template <class T>
__global__ void __launch_bounds__(THREADS) fft_shared(job_of<T> j, plan_of<T> p, int group, int64_t blocks) {
  TY_SHARED_DYNAMIC(pair_of<T>, room);
  const int64_t all = group * p.n;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t line = j.line + block * group;
    ty_shared_ptr<pair_of<T>> x = room, y = room + all;
    for (int64_t e = threadIdx.x; e < all; e += THREADS) {
      const int64_t l = j.inner > 1 ? e % group : e / p.n, k = j.inner > 1 ? e / group : e % p.n;
      x[l * p.n + k] = line + l < j.lines ? way_in(j, line + l, k) : pair_of<T>{ T(0), T(0) };
    }
    __syncthreads();
    int64_t m = p.n, s = 1;
    for (int i = 0; i < p.count; i++) {
      const int r = p.radix[i];
      const int64_t items = pass_items(p.n, r);
      m /= r;
      for (int64_t e = threadIdx.x; e < items * group; e += THREADS)
        pass_item<T>(p, x + e / items * p.n, y + e / items * p.n, r, m, s, e % items);
      __syncthreads();
      s *= r;
      ty_shared_ptr<pair_of<T>> t = x;
      x = y;
      y = t;
    }
    for (int64_t e = threadIdx.x; e < all; e += THREADS) {
      const int64_t l = j.inner > 1 ? e % group : e / p.n, k = j.inner > 1 ? e / group : e % p.n;
      const pair_of<T> z = x[l * p.n + k];
      if (line + l < j.lines) way_out(j, line + l, k, z);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    fft_pass(plan_of<T> p, int r, int64_t m, int64_t s, const pair_of<T> *x, pair_of<T> *y, int64_t lines) {
  const int64_t items = pass_items(p.n, r), step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t e = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; e < items * lines; e += step)
    pass_item<T>(p, x + e / items * p.n, y + e / items * p.n, r, m, s, e % items);
}

/* Lines of `room` elements each, with zeros after the n that there are. */
template <class T>
__global__ void __launch_bounds__(THREADS) fft_in(job_of<T> j, pair_of<T> *to, int64_t room, int64_t lines) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t e = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; e < room * lines; e += step)
    to[e] = e % room < j.n ? way_in(j, j.line + e / room, e % room) : pair_of<T>{ T(0), T(0) };
}

template <class T>
__global__ void __launch_bounds__(THREADS) fft_out(job_of<T> j, const pair_of<T> *from, int64_t room, int64_t lines) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t e = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; e < j.n * lines; e += step) {
    const pair_of<T> z = from[e / j.n * room + e % j.n];
    way_out(j, j.line + e / j.n, e % j.n, j.chirp ? conjugate(z) : z); /* a chirp's last transform went back */
  }
}

/* The conjugate chirp, around position 0 of `room`. */
template <class T>
__global__ void __launch_bounds__(THREADS) fft_chirp(const pair_of<T> *chirp, int64_t n, pair_of<T> *to, int64_t room) {
  for (int64_t k = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; k < room;
       k += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t a = k < n ? k : room - k;
    to[k] = a < n ? conjugate(chirp[a]) : pair_of<T>{ T(0), T(0) };
  }
}

/* x = conjugate(x spectrum) / room, which makes the next transform an inverse one. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    fft_convolve(pair_of<T> *x, const pair_of<T> *spectrum, int64_t room, int64_t lines) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  const T part = T(1) / static_cast<T>(room);
  for (int64_t e = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; e < room * lines; e += step) {
    const pair_of<T> z = times(x[e], spectrum[e % room]);
    x[e] = pair_of<T>{ z.re * part, -z.im * part };
  }
}

/* ---- hosts ---- */

/* False where a factor is too large. */
template <class T> bool make_plan(plan_of<T> &p, int64_t n) {
  p.n = n;
  p.count = 0;
  while (n % 4 == 0) p.radix[p.count++] = 4, n /= 4;
  if (n % 2 == 0) p.radix[p.count++] = 2, n /= 2;
  for (int r = 3; r <= LARGEST; r += 2)
    while (n % r == 0) p.radix[p.count++] = r, n /= r;
  return n == 1;
}

template <class T> bool fill_roots(pair_of<T> *to, int64_t count, int64_t order, bool squares) {
  return TY_LAUNCH(fft_roots<T>, ty_cuda_blocks(count, THREADS), THREADS, 0, to, count, order, squares);
}

/* All passes over lines in a; a and b change places, so that the result is in a. */
template <class T> bool run_passes(const plan_of<T> &plan, pair_of<T> *&a, pair_of<T> *&b, int64_t lines) {
  int64_t m = plan.n, s = 1;
  const plan_of<T> p = plan;
  for (int i = 0; i < plan.count; i++) {
    const int r = plan.radix[i];
    m /= r;
    const pair_of<T> *x = a;
    pair_of<T> *y = b;
    const int64_t rest = m, before = s;
    if (!TY_LAUNCH(fft_pass<T>, ty_cuda_blocks(p.n * lines / (r == 2 || r == 4 ? r : 1), THREADS), THREADS, 0, p, r,
                   rest, before, x, y, lines))
      return false;
    b = a;
    a = y;
    s *= r;
  }
  return true;
}

template <class T> bool run_shared(const job_of<T> &job, const plan_of<T> &plan) {
  int group = static_cast<int>(1024 / plan.n);
  group = group < 1 ? 1 : group > 32 ? 32 : group;
  if (group > job.lines) group = static_cast<int>(job.lines);
  const job_of<T> j = job;
  const plan_of<T> p = plan;
  const int64_t blocks = (j.lines + group - 1) / group;
  const size_t bytes = 2 * sizeof(pair_of<T>) * static_cast<size_t>(group * plan.n);
  return TY_LAUNCH(fft_shared<T>, ty_cuda_blocks(blocks, 1, 8), THREADS, bytes, j, p, group, blocks);
}

/* By passes over global memory; `room` is plan.n. Lines in portions, whose scratch memory is bounded. */
template <class T> bool run_global(job_of<T> j, const plan_of<T> &plan) {
  typedef pair_of<T> C;
  const int64_t room = plan.n;
  int64_t portion = (static_cast<int64_t>(1) << 24) / room;
  portion = portion < 1 ? 1 : portion < j.lines ? portion : j.lines;
  ty_cuda_scratch scratch(sizeof(C) * static_cast<size_t>(2 * room * (portion + (j.chirp ? 1 : 0))));
  if (!scratch.data) return false;
  C *a = scratch.as<C>(), *b = a + room * portion, *spectrum = b + room * portion, *spare = spectrum + room;
  if (j.chirp) {
    C *x = spectrum;
    const C *chirp = j.chirp;
    const int64_t n = j.n;
    if (!TY_LAUNCH(fft_chirp<T>, ty_cuda_blocks(room, THREADS), THREADS, 0, chirp, n, x, room) ||
        !run_passes(plan, spectrum, spare, 1))
      return false;
  }
  const C *image = spectrum;
  for (int64_t line = 0; line < j.lines; line += portion) {
    const int64_t lines = j.lines - line < portion ? j.lines - line : portion;
    const unsigned blocks = ty_cuda_blocks(room * lines, THREADS);
    j.line = line;
    C *x = a;
    if (!TY_LAUNCH(fft_in<T>, blocks, THREADS, 0, j, x, room, lines) || !run_passes(plan, a, b, lines)) return false;
    x = a;
    if (j.chirp &&
        (!TY_LAUNCH(fft_convolve<T>, blocks, THREADS, 0, x, image, room, lines) || !run_passes(plan, a, b, lines)))
      return false;
    const C *z = a;
    if (!TY_LAUNCH(fft_out<T>, blocks, THREADS, 0, j, z, room, lines)) return false;
  }
  return true;
}

template <class T> bool run_typed(const ty_kernel_args *k, ty_fft_kind kind) {
  typedef pair_of<T> C;
  const ty_p_fft *p = static_cast<const ty_p_fft *>(k->params);
  const ty_view *x = k->in[0], *y = k->out[0];
  const bool pairs_out = kind == TY_FFT_COMPLEX || kind == TY_FFT_REAL;
  job_of<T> j = {};
  j.kind = kind;
  j.x = ty_data_of<const T>(x);
  j.y = ty_data_of<T>(y);
  j.lines = j.inner = 1;
  for (int d = 0; d < y->ndim - pairs_out; d++)
    if (d != p->dim) j.lines *= y->size[d];
  for (int d = p->dim + 1; d < y->ndim - pairs_out; d++) j.inner *= y->size[d];
  j.n = p->n;
  j.length = x->size[p->dim];
  j.out = y->size[p->dim];
  j.inverse = p->inverse;
  j.doubled = p->doubled;
  j.back = kind == TY_FFT_HALF || (kind == TY_FFT_COMPLEX && p->inverse);
  j.scale = static_cast<T>(p->scale);
  j.first = static_cast<T>(p->first);
  if (j.out > (kind == TY_FFT_REAL ? j.n / 2 + 1 : j.n) &&
      !ty_cuda_zero(y->data, static_cast<size_t>(ty_view_bytes(y))))
    return false;
  plan_of<T> plan;
  const bool smooth = make_plan(plan, j.n);
  int64_t room = j.n;
  if (!smooth) {
    for (room = 1; room < 2 * j.n - 1;) room *= 2;
    make_plan(plan, room);
  }
  const int64_t quarters = kind == TY_FFT_COSINE ? j.n : 0, chirps = smooth ? 0 : j.n;
  ty_cuda_scratch tables(sizeof(C) * static_cast<size_t>(room + quarters + chirps));
  if (!tables.data) return false;
  C *roots = tables.as<C>(), *quarter = roots + room, *chirp = quarter + quarters;
  if (!fill_roots(roots, room, room, false) || (quarters && !fill_roots(quarter, quarters, 4 * j.n, false)) ||
      (chirps && !fill_roots(chirp, chirps, 2 * j.n, true)))
    return false;
  plan.roots = roots;
  if (quarters) j.quarter = quarter;
  if (chirps) j.chirp = chirp;
  if (smooth && 2 * sizeof(C) * static_cast<size_t>(j.n) <= SHARED_BYTES) return run_shared(j, plan);
  return run_global(j, plan);
}

bool run(const ty_kernel_args *k, ty_fft_kind kind) {
  if (!k->out[0]->count) return true;
  return ty_for_reals(k->out[0]->dtype, "fft", [&](auto type) { return run_typed<decltype(type)>(k, kind); });
}

} // namespace

TY_CUDA_KERNEL(fft_line) { return run(k, TY_FFT_COMPLEX); }
TY_CUDA_KERNEL(rfft_line) { return run(k, TY_FFT_REAL); }
TY_CUDA_KERNEL(irfft_line) { return run(k, TY_FFT_HALF); }
TY_CUDA_KERNEL(dct_line) { return run(k, TY_FFT_COSINE); }
