/* Drives elementwise functions over any views: dimensions are merged, and every thread computes V neighbours of the
 * last one at a time, moved at once where they lie together. A functor takes the inputs' elements as it computes with
 * them and returns the result. */
#ifndef TY_KERNELS_CUDA_ELEMENTWISE_CUH
#define TY_KERNELS_CUDA_ELEMENTWISE_CUH

#include "cuda.cuh"

enum { EW_OPERANDS = 4, EW_THREADS = 256 };

/* Division by a number that is known when a kernel is launched: x / d for x < 2^31 by a product and a shift
 * (Granlund and Montgomery 1994). */
struct ew_divisor {
  uint32_t d, multiplier, shift;
  void set(uint32_t divisor) {
    d = divisor;
    for (shift = 0; (1ull << shift) < d; shift++) {}
    multiplier = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
  }
};
TY_DEVICE uint32_t ew_divide(uint32_t x, const ew_divisor &v) { return (__umulhi(x, v.multiplier) + x) >> v.shift; }

/* Where the elements are: sizes and strides from the innermost dimension out, operands with the output first. */
struct ew_plan {
  int ndim, nin;
  int64_t count;
  int64_t size[TY_MAX_DIMS];
  int64_t stride[EW_OPERANDS][TY_MAX_DIMS];
  ew_divisor divisor[TY_MAX_DIMS]; /* of size */
  const void *data[EW_OPERANDS];
  bool is_number[EW_OPERANDS];
  uint64_t number[EW_OPERANDS]; /* its bits */
};

/* Fills a plan: dimensions of size 1 go, neighbours that are one dimension in all operands merge. */
static inline void ew_make_plan(ew_plan *p, const ty_view *out, const ty_view *const *in, int nin) {
  const ty_view *v[EW_OPERANDS] = { out };
  for (int i = 0; i < nin; i++) v[i + 1] = in[i];
  p->ndim = 0;
  p->nin = nin;
  p->count = out->count;
  for (int o = 0; o <= nin; o++) {
    p->data[o] = v[o]->data;
    p->is_number[o] = v[o]->number;
    p->number[o] = 0;
    if (v[o]->number) memcpy(&p->number[o], v[o]->data, ty_dtype_size[v[o]->dtype]);
  }
  for (int d = out->ndim - 1; d >= 0; d--) {
    if (out->size[d] == 1) continue;
    int last = p->ndim - 1;
    bool merges = last >= 0;
    for (int o = 0; o <= nin && merges; o++) merges = v[o]->stride[d] == p->stride[o][last] * p->size[last];
    if (merges) {
      p->size[last] *= out->size[d];
      continue;
    }
    p->size[p->ndim] = out->size[d];
    for (int o = 0; o <= nin; o++) p->stride[o][p->ndim] = v[o]->stride[d];
    p->ndim++;
  }
  if (p->ndim == 0) {
    p->size[0] = 1;
    for (int o = 0; o <= nin; o++) p->stride[o][0] = 0;
    p->ndim = 1;
  }
}

/* The offsets of element i in every operand. */
template <int N> TY_DEVICE void ew_offsets(const ew_plan &p, uint32_t i, int64_t *offset) {
  for (int o = 0; o <= N; o++) offset[o] = 0;
  for (int d = 0; d < p.ndim; d++) {
    uint32_t next = d == p.ndim - 1 ? 0 : ew_divide(i, p.divisor[d]);
    int64_t at = i - next * p.divisor[d].d;
    for (int o = 0; o <= N; o++) offset[o] += at * p.stride[o][d];
    i = next;
  }
}

/* V neighbours of an input. */
template <int V, class T> TY_DEVICE void ew_load(const ew_plan &p, int o, int64_t offset, ty_compute<T> *x) {
  if (p.is_number[o]) {
    T number;
    memcpy(&number, &p.number[o], sizeof number);
    for (int k = 0; k < V; k++) x[k] = ty_widen(number);
    return;
  }
  const T *from = static_cast<const T *>(p.data[o]) + offset;
  if (V > 1 && p.stride[o][0] == 1) {
    ty_load<V>(from, x);
  } else {
    for (int k = 0; k < V; k++) x[k] = ty_widen(from[k * p.stride[o][0]]);
  }
}

/* V neighbours of the output. */
template <int V, class T> TY_DEVICE void ew_store(const ew_plan &p, int64_t offset, const ty_compute<T> *x) {
  T *to = static_cast<T *>(const_cast<void *>(p.data[0])) + offset;
  if (V > 1 && p.stride[0][0] == 1) {
    ty_store<V>(to, x);
  } else {
    for (int k = 0; k < V; k++) to[k * p.stride[0][0]] = ty_narrow<T>(x[k]);
  }
}

struct ew_unchanged {
  template <class X> TY_DEVICE_MEMBER X operator()(X x) const { return x; }
};

/* The functor's inputs by position; those it does not have cost nothing. */
template <class F, class R, class A0, class A>
TY_DEVICE R ew_apply(const F &f, A0 a, A, A, std::integral_constant<int, 1>) {
  return f(a);
}
template <class F, class R, class A0, class A>
TY_DEVICE R ew_apply(const F &f, A0 a, A b, A, std::integral_constant<int, 2>) {
  return f(a, b);
}
template <class F, class R, class A0, class A>
TY_DEVICE R ew_apply(const F &f, A0 a, A b, A c, std::integral_constant<int, 3>) {
  return f(a, b, c);
}

/* The first input may be of another type than the others. */
template <int V, int N, class F, class Out, class In, class First>
__global__ void __launch_bounds__(EW_THREADS) ew_kernel(const ew_plan p, const F f) {
  typedef ty_compute<In> X;
  typedef ty_compute<Out> R;
  const uint32_t groups = static_cast<uint32_t>(p.count) / V, step = gridDim.x * EW_THREADS;
  for (uint32_t g = blockIdx.x * EW_THREADS + threadIdx.x; g < groups; g += step) {
    int64_t offset[EW_OPERANDS];
    ew_offsets<N>(p, g * V, offset);
    ty_compute<First> a[V];
    X b[V] = {}, c[V] = {};
    R y[V];
    ew_load<V, First>(p, 1, offset[1], a);
    if (N > 1) ew_load<V, In>(p, N > 1 ? 2 : 1, offset[N > 1 ? 2 : 1], b);
    if (N > 2) ew_load<V, In>(p, N > 2 ? 3 : 1, offset[N > 2 ? 3 : 1], c);
    for (int k = 0; k < V; k++)
      y[k] = ew_apply<F, R, ty_compute<First>, X>(f, a[k], b[k], c[k], std::integral_constant<int, N>{});
    ew_store<V, Out>(p, offset[0], y);
  }
}

/* Whether V neighbours lie in one row everywhere, aligned where they lie together: at 16 bytes at most. */
static inline bool ew_vectors(const ew_plan &p, int v, const int *bytes) {
  if (p.size[0] % v) return false;
  for (int o = 0; o <= p.nin; o++) {
    if (p.is_number[o] || p.stride[o][0] != 1) continue;
    int64_t width = v * bytes[o] < 16 ? v * bytes[o] : 16;
    if (reinterpret_cast<uintptr_t>(p.data[o]) % static_cast<uintptr_t>(width)) return false;
    for (int d = 1; d < p.ndim; d++)
      if (p.stride[o][d] * bytes[o] % width) return false;
  }
  return true;
}

/* fn(plan) for a plan, in parts of less than 2^30 elements each, whose positions fit 32 bits whatever is added. What does
 * not hang on fn is compiled once. */
typedef bool (*ew_part)(const void *fn, const ew_plan &part);
static inline bool ew_each_part(const ew_plan &whole, const int *bytes, ew_part call, const void *fn) {
  ew_plan p = whole;
  if (p.count == 0) return true;
  if (p.count < 1 << 30) {
    for (int d = 0; d < p.ndim; d++) p.divisor[d].set(static_cast<uint32_t>(p.size[d]));
    return call(fn, p);
  }
  int longest = 0;
  for (int d = 1; d < p.ndim; d++)
    if (p.size[d] >= p.size[longest]) longest = d;
  int64_t half = (p.size[longest] / 2 + 15) / 16 * 16; /* keeps vectors whole */
  for (int64_t begin = 0; begin < whole.size[longest]; begin += half) {
    p = whole;
    p.size[longest] = half < whole.size[longest] - begin ? half : whole.size[longest] - begin;
    p.count = whole.count / whole.size[longest] * p.size[longest];
    for (int o = 0; o <= p.nin; o++)
      p.data[o] = static_cast<const char *>(p.data[o]) + begin * p.stride[o][longest] * bytes[o];
    if (!ew_each_part(p, bytes, call, fn)) return false;
  }
  return true;
}
template <class Fn> static inline bool ew_in_parts(const ew_plan &whole, const int *bytes, const Fn &fn) {
  const ew_part call = [](const void *f, const ew_plan &part) { return (*static_cast<const Fn *>(f))(part); };
  return ew_each_part(whole, bytes, call, &fn);
}

/* Computes out = f(in...) of N inputs, all but the first of one dtype. */
template <int N, class Out, class In, class First = In, class F>
static inline bool ew_run(const ty_kernel_args *k, const F &f) {
  enum { WIDEST = sizeof(Out) > sizeof(In) ? sizeof(Out) : sizeof(In), V = 16 / WIDEST };
  static const int bytes[EW_OPERANDS] = { sizeof(Out), sizeof(First), sizeof(In), sizeof(In) };
  ew_plan whole;
  ew_make_plan(&whole, k->out[0], k->in, N);
  return ew_in_parts(whole, bytes, [&](const ew_plan &p) {
    if (ew_vectors(p, V, bytes))
      return TY_LAUNCH((ew_kernel<V, N, F, Out, In, First>), ty_cuda_blocks(p.count / V, EW_THREADS), EW_THREADS, 0, p,
                       f);
    return TY_LAUNCH((ew_kernel<1, N, F, Out, In, First>), ty_cuda_blocks(p.count, EW_THREADS), EW_THREADS, 0, p, f);
  });
}

/* A functor with the numbers of a row, ty_p_scalars, as its type. */
template <class F, class X> static inline F with_scalars(const ty_kernel_args *k, X) {
  const ty_p_scalars *s = static_cast<const ty_p_scalars *>(k->params);
  return s ? F{ static_cast<X>(s->a), static_cast<X>(s->b) } : F{ X(0), X(0) };
}

/* ---- entries for functors name_f32, name_f64, name_u8 ... of elementwise.def ----
 * The file says how one is run: EW_RUN(functor, element, compute). */

/* clang-format off */
#define EW_FLOATS_OF(name)                                    \
  case TY_F32: return EW_RUN(name##_f32, float, float);       \
  case TY_F64: return EW_RUN(name##_f64, double, double);     \
  case TY_F16: return EW_RUN(name##_f32, ty_f16, float);      \
  case TY_BF16: return EW_RUN(name##_f32, ty_bf16, float);
#define EW_INTEGERS_OF(name)                                  \
  case TY_U8: return EW_RUN(name##_u8, uint8_t, uint8_t);     \
  case TY_I8: return EW_RUN(name##_i8, int8_t, int8_t);       \
  case TY_I16: return EW_RUN(name##_i16, int16_t, int16_t);   \
  case TY_I32: return EW_RUN(name##_i32, int32_t, int32_t);   \
  case TY_I64: return EW_RUN(name##_i64, int64_t, int64_t);
#define EW_BOOL_OF(name) \
  case TY_BOOL: return EW_RUN(name##_bool, uint8_t, uint8_t);
#define EW_ENTRY(name, cases)                                 \
  TY_CUDA_KERNEL(name) {                                      \
    int dtype = k->in[0]->dtype;                              \
    switch (dtype) {                                          \
      cases                                                   \
      default: return ty_cuda_no_kernel(#name, dtype);        \
    }                                                         \
  }
/* clang-format on */

#endif
