/* sum, mean, norm, var, std, prod, max, min, argmax, argmin, any, all, logsumexp. The view comes with the reduced dimensions
 * last. */
#include "reduce.cuh"

#include "exp_sum.cuh"

/* ---- results ---- */

TY_DEVICE void store_real(void *out, int dtype, int64_t i, double y) {
  switch (dtype) {
    case TY_F64: static_cast<double *>(out)[i] = y; break;
    case TY_F32: static_cast<float *>(out)[i] = static_cast<float>(y); break;
    case TY_F16: static_cast<ty_f16 *>(out)[i] = ty_narrow<ty_f16>(static_cast<float>(y)); break;
    default: static_cast<ty_bf16 *>(out)[i] = ty_narrow<ty_bf16>(static_cast<float>(y)); break;
  }
}
TY_DEVICE void store_integer(void *out, int dtype, int64_t i, int64_t y) {
  switch (dtype) {
    case TY_I64: static_cast<int64_t *>(out)[i] = y; break;
    case TY_I32: static_cast<int32_t *>(out)[i] = static_cast<int32_t>(y); break;
    case TY_I16: static_cast<int16_t *>(out)[i] = static_cast<int16_t>(y); break;
    default: static_cast<int8_t *>(out)[i] = static_cast<int8_t>(y); break;
  }
}

/* Neighbours first. */
template <int N, class X, class Join> TY_DEVICE X tree(const X *x, const Join &join) {
  X t[N];
#pragma unroll
  for (int j = 0; j < N; j++) t[j] = x[j];
#pragma unroll
  for (int half = 1; half < N; half *= 2)
#pragma unroll
    for (int j = 0; j + half < N; j += 2 * half) t[j] = join(t[j], t[j + half]);
  return t[0];
}

/* ---- sums and products: in f64 or u64, which wraps around ---- */

template <class From, class Join> struct folded {
  typedef From X;
  static constexpr bool real = std::is_floating_point<From>::value;
  typedef std::conditional_t<real, double, uint64_t> S;
  S first;
  double divisor;
  TY_DEVICE_MEMBER S start() const { return first; }
  template <int N, int V> TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t, int64_t) const {
    typedef std::conditional_t<real, typename Join::template within<X>, uint64_t> W;
    W w[N];
#pragma unroll
    for (int j = 0; j < N; j++) w[j] = static_cast<W>(x[j]);
    s = Join::join(s, static_cast<S>(tree<N>(w, [](W a, W b) { return Join::join(a, b); })));
  }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const { s = Join::join(s, t); }
  TY_DEVICE_MEMBER void store(void *out, int dtype, int64_t i, const S &s) const {
    if constexpr (real) store_real(out, dtype, i, s / divisor);
    else store_integer(out, dtype, i, static_cast<int64_t>(s));
  }
};
struct by_plus { /* a few elements are added in their own type first */
  template <class X> using within = X;
  template <class T> TY_DEVICE_MEMBER static T join(T a, T b) { return a + b; }
};
struct by_times {
  template <class X> using within = double;
  template <class T> TY_DEVICE_MEMBER static T join(T a, T b) { return a * b; }
};

/* ---- the root of the squares, which are taken in f64: those of an f32 may not fit another ---- */

template <class From> struct root_of_squares {
  typedef From X;
  typedef double S;
  TY_DEVICE_MEMBER S start() const { return 0; }
  template <int N, int V> TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t, int64_t) const {
#pragma unroll
    for (int j = 0; j < N; j++) s += static_cast<double>(x[j]) * static_cast<double>(x[j]);
  }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const { s += t; }
  TY_DEVICE_MEMBER void store(void *out, int dtype, int64_t i, const S &s) const { store_real(out, dtype, i, sqrt(s)); }
};

/* ---- extremes: the smallest is the largest of what is turned round ---- */

template <class From> struct turned {
  typedef From X;
  static constexpr bool real = std::is_floating_point<From>::value;
  X turn; /* -1: the smallest is wanted; else 1, or 0 for integers */
  TY_DEVICE_MEMBER X apply(X x) const {
    if constexpr (real) return x * turn;
    else return x ^ turn;
  }
  TY_DEVICE_MEMBER static X lowest() {
    if constexpr (real) return -std::numeric_limits<X>::infinity();
    else return std::numeric_limits<X>::min();
  }
};

template <class From> struct extreme : turned<From> {
  typedef From X;
  typedef From S;
  TY_DEVICE_MEMBER S start() const { return this->lowest(); }
  template <int N, int V> TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t, int64_t) const {
#pragma unroll
    for (int j = 0; j < N; j++) s = ty_larger<X>{}(s, this->apply(x[j]));
  }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const { s = ty_larger<X>{}(s, t); }
  TY_DEVICE_MEMBER void store(void *out, int dtype, int64_t i, const S &s) const {
    if constexpr (this->real) store_real(out, dtype, i, this->apply(s));
    else store_integer(out, dtype, i, this->apply(s));
  }
};

/* Of equal elements the first; a NaN is the extreme. */
template <class From> struct position_of_extreme : turned<From> {
  typedef From X;
  struct S {
    X best;
    int64_t at;
  };
  TY_DEVICE_MEMBER S start() const { return { this->lowest(), INT64_MAX }; }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const {
    bool same = t.best == s.best || (t.best != t.best && s.best != s.best);
    bool above = t.best > s.best || (t.best != t.best && s.best == s.best);
    if (above || (same && t.at < s.at)) s = t;
  }
  template <int N, int V>
  TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t first, int64_t step) const { /* later than what s knows */
    X y[N];
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = this->apply(x[j]);
    const X top = tree<N>(y, ty_larger<X>{});
    if (s.at != INT64_MAX && (top <= s.best || s.best != s.best)) return;
    s.best = top;
#pragma unroll
    for (int j = N - 1; j >= 0; j--)
      if (y[j] == top || y[j] != y[j]) s.at = first + j / V * step + j % V;
  }
  TY_DEVICE_MEMBER void store(void *out, int, int64_t i, const S &s) const { static_cast<int64_t *>(out)[i] = s.at; }
};

/* ---- truth ---- */

struct found {
  typedef uint64_t X;
  typedef uint32_t S;
  bool zero, negated; /* whether zeros are looked for; whether the result is that none was found */
  TY_DEVICE_MEMBER S start() const { return 0; }
  template <int N, int V> TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t, int64_t) const {
#pragma unroll
    for (int j = 0; j < N; j++) s |= (x[j] == 0) == zero;
  }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const { s |= t; }
  TY_DEVICE_MEMBER void store(void *out, int, int64_t i, const S &s) const {
    static_cast<uint8_t *>(out)[i] = (s != 0) != negated;
  }
};

/* ---- log(sum(exp)) ---- */

template <class From> struct log_sum_exp {
  typedef From X;
  typedef ty_exp_sum<X> S;
  TY_DEVICE_MEMBER S start() const { return ty_exp_sum_start<X>(); }
  template <int N, int V> TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t, int64_t) const {
    ty_exp_sum_add<X, N>(s, x);
  }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const { ty_exp_sum_join(s, t); }
  TY_DEVICE_MEMBER void store(void *out, int dtype, int64_t i, const S &s) const {
    store_real(out, dtype, i, ty_exp_sum_log(s));
  }
};

/* ---- variance: Chan, Golub and LeVeque 1979 ---- */

template <class From> struct variance {
  typedef From X;
  struct S {
    double mean, squares, n; /* squares: of the deviations */
  };
  double correction;
  bool root; /* std */
  TY_DEVICE_MEMBER S start() const { return { 0, 0, 0 }; }
  TY_DEVICE_MEMBER void join(S &s, const S &t) const {
    if (t.n == 0) return;
    double n = s.n + t.n, share = t.n / n, d = t.mean - s.mean;
    s.squares += t.squares + d * d * (s.n * share);
    s.mean += d * share;
    s.n = n;
  }
  /* Of floats whose squares do not fit a float. */
  template <int N> TY_DEVICE_MEMBER static S wide_deviations(const X *x) {
    double mean = 0, squares = 0;
    for (int j = 0; j < N; j++) mean += static_cast<double>(x[j]);
    mean /= N;
    for (int j = 0; j < N; j++) {
      const double d = static_cast<double>(x[j]) - mean;
      squares += d * d;
    }
    return { mean, squares, N };
  }
  template <int N, int V> TY_DEVICE_MEMBER void add(S &s, const X *x, int64_t, int64_t) const {
    const X mean = tree<N>(x, ty_plus<X>{}) * static_cast<X>(1.0 / N);
    X squares = 0, rest = 0; /* rest: what rounding left in the mean */
#pragma unroll
    for (int j = 0; j < N; j++) {
      X d = x[j] - mean;
      squares += d * d;
      rest += d;
    }
    if (sizeof(X) == sizeof(float) && !(squares > X(0x1p-100f) && squares < std::numeric_limits<X>::infinity())) {
      join(s, wide_deviations<N>(x));
      return;
    }
    double r = static_cast<double>(rest) / N;
    join(s, { static_cast<double>(mean) + r, static_cast<double>(squares) - r * r * N, N });
  }
  TY_DEVICE_MEMBER void store(void *out, int dtype, int64_t i, const S &s) const {
    const double n = s.n - correction;
    const double y = s.n == 0 ? std::numeric_limits<double>::quiet_NaN() : s.squares / (n > 0 ? n : 0);
    store_real(out, dtype, i, root ? sqrt(y) : y);
  }
};

/* ---- entries ---- */

/* How many elements of T are loaded at once, where they lie together: 16 bytes of the small ones, which gain by it. */
template <class T> constexpr int packed = sizeof(T) < 8 ? 16 / sizeof(T) : 1;

template <template <class> class Reduction, bool PACKS = true, class... Numbers>
static bool reduce_floats(const ty_kernel_args *k, const char *op, Numbers... numbers) {
  return ty_for_floats(k->in[0]->dtype, op, [&](auto x) {
    typedef decltype(x) T;
    return reduce_run < T, PACKS ? packed<T> : 1 > (k, Reduction<ty_compute<T>>{ numbers... });
  });
}
static bool is_float(const ty_kernel_args *k) { return ty_is_float(static_cast<ty_dtype>(k->in[0]->dtype)); }

template <class X> using sum_of = folded<X, by_plus>;
template <class X> using product_of = folded<X, by_times>;

TY_CUDA_KERNEL(sum) {
  return is_float(k) ? reduce_floats<sum_of>(k, "sum", 0.0, 1.0)
                     : reduce_run<reduce_integers, 1>(k, sum_of<int64_t>{ 0, 1 });
}

TY_CUDA_KERNEL(mean) {
  const ty_view *in = k->in[0];
  double n = 1;
  for (int d = in->ndim - static_cast<const ty_p_reduce *>(k->params)->ndim_reduced; d < in->ndim; d++)
    n *= static_cast<double>(in->size[d]);
  return reduce_floats<sum_of>(k, "mean", 0.0, n);
}

TY_CUDA_KERNEL(prod) {
  return is_float(k) ? reduce_floats<product_of, false>(k, "prod", 1.0, 1.0)
                     : reduce_run<reduce_integers, 1>(k, product_of<int64_t>{ 1, 1 });
}

template <template <class> class Reduction>
static bool reduce_extreme(const ty_kernel_args *k, const char *op, bool largest) {
  if (!is_float(k)) return reduce_run<reduce_integers, 1>(k, Reduction<int64_t>{ { largest ? 0 : -1 } });
  return ty_for_floats(k->in[0]->dtype, op, [&](auto x) {
    typedef decltype(x) T;
    typedef ty_compute<T> X;
    return reduce_run<T, packed<T>>(k, Reduction<X>{ { static_cast<X>(largest ? 1 : -1) } });
  });
}

TY_CUDA_KERNEL(max) { return reduce_extreme<extreme>(k, "max", true); }
TY_CUDA_KERNEL(min) { return reduce_extreme<extreme>(k, "min", false); }
TY_CUDA_KERNEL(argmax) { return reduce_extreme<position_of_extreme>(k, "argmax", true); }
TY_CUDA_KERNEL(argmin) { return reduce_extreme<position_of_extreme>(k, "argmin", false); }

TY_CUDA_KERNEL(any) { return reduce_run<reduce_bits, 1>(k, found{ false, false }); }
TY_CUDA_KERNEL(all) { return reduce_run<reduce_bits, 1>(k, found{ true, true }); }

TY_CUDA_KERNEL(logsumexp) { return reduce_floats<log_sum_exp>(k, "logsumexp"); }

static double correction_of(const ty_kernel_args *k) { return static_cast<const ty_p_reduce *>(k->params)->a; }
TY_CUDA_KERNEL(var) { return reduce_floats<variance>(k, "var", correction_of(k), false); }
TY_CUDA_KERNEL(std) { return reduce_floats<variance>(k, "std", correction_of(k), true); }
TY_CUDA_KERNEL(norm) { return reduce_floats<root_of_squares>(k, "norm"); }
