/* What optimizer steps share: many tensors in one launch, elements of any float dtype, and the arithmetic of Adam. */
#ifndef TY_KERNELS_CUDA_OPTIM_CUH
#define TY_KERNELS_CUDA_OPTIM_CUH

#include "../optim_round.h"
#include "cuda.cuh"

/* The lists of a step by what they are to it. */
enum { P, G, FIRST, SECOND, THIRD, AVERAGE, ROLES };
enum { OPTIM_TENSORS = 44, OPTIM_THREADS = 256, OPTIM_CHUNK = 4096 };

/* The tensors of one launch, which are a parameter of the kernel: at most 4 KB. */
struct optim_tensor {
  void *data[ROLES]; /* NULL: the step does without */
  float *scales;     /* of moments of 8 bits */
  int64_t count;
  int32_t first; /* block */
  uint8_t dtype[ROLES];
  bool packs; /* four neighbours are moved at once */
};
struct optim_table {
  int n;
  optim_tensor tensor[OPTIM_TENSORS];
};

/* The tensor that this block works on. */
TY_DEVICE const optim_tensor &optim_find(const optim_table &t) {
  int low = 0, high = t.n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (t.tensor[middle].first <= static_cast<int32_t>(blockIdx.x)) low = middle;
    else high = middle;
  }
  return t.tensor[low];
}

/* Up to four neighbours. */
template <class T, class X> TY_DEVICE void optim_load_as(const void *data, int64_t i, int n, bool packs, X *x) {
  enum { V = sizeof(T) < 8 ? 4 : 2 };
  const T *from = static_cast<const T *>(data) + i;
  if (packs && n == 4) {
    for (int j = 0; j < 4; j += V) {
      const ty_pack<T, V> pack = *reinterpret_cast<const ty_pack<T, V> *>(from + j);
      for (int k = 0; k < V; k++) x[j + k] = static_cast<X>(ty_widen(pack.v[k]));
    }
  } else {
    for (int j = 0; j < 4; j++) x[j] = j < n ? static_cast<X>(ty_widen(from[j])) : X(0);
  }
}
template <class T, class X> TY_DEVICE void optim_store_as(void *data, int64_t i, int n, bool packs, const X *x) {
  enum { V = sizeof(T) < 8 ? 4 : 2 };
  T *to = static_cast<T *>(data) + i;
  if (packs && n == 4) {
    for (int j = 0; j < 4; j += V) {
      ty_pack<T, V> pack;
      for (int k = 0; k < V; k++) pack.v[k] = ty_narrow<T>(static_cast<ty_compute<T>>(x[j + k]));
      *reinterpret_cast<ty_pack<T, V> *>(to + j) = pack;
    }
  } else {
    for (int j = 0; j < 4; j++)
      if (j < n) to[j] = ty_narrow<T>(static_cast<ty_compute<T>>(x[j]));
  }
}
template <class X> TY_DEVICE void optim_load(const optim_tensor &t, int role, int64_t i, int n, X *x) {
  switch (t.dtype[role]) {
    case TY_F32: return optim_load_as<float>(t.data[role], i, n, t.packs, x);
    case TY_F64: return optim_load_as<double>(t.data[role], i, n, t.packs, x);
    case TY_F16: return optim_load_as<ty_f16>(t.data[role], i, n, t.packs, x);
    default: return optim_load_as<ty_bf16>(t.data[role], i, n, t.packs, x);
  }
}
template <class X> TY_DEVICE void optim_store(const optim_tensor &t, int role, int64_t i, int n, const X *x) {
  switch (t.dtype[role]) {
    case TY_F32: return optim_store_as<float>(t.data[role], i, n, t.packs, x);
    case TY_F64: return optim_store_as<double>(t.data[role], i, n, t.packs, x);
    case TY_F16: return optim_store_as<ty_f16>(t.data[role], i, n, t.packs, x);
    default: return optim_store_as<ty_bf16>(t.data[role], i, n, t.packs, x);
  }
}

/* The numbers of a step in the type of its arithmetic. */
template <class X> struct optim_numbers {
  X lr, eps, l2, decay; /* weight decay: added to the gradient, or the share that parameters lose */
  X beta1, fresh1, beta2, fresh2;
  X rate, widen;                   /* adam: the step size and the factor of sqrt(v), corrected for the bias */
  X keep, fresh, direct, averaged; /* sgd: of the momentum; what the parameter takes of gradient and momentum */
  X limit, scale, average_weight;
  bool forget;           /* sgd: the momentum holds nothing yet */
  const double *control; /* see ty_p_optim; NULL: none. What follows is what it changes numbers with. */
  double plain_lr, plain_beta1, plain_beta2, plain_momentum, plain_dampening, steps;
  bool stochastic; /* optim_round.h */
  uint32_t number; /* of the step */

  optim_numbers(const ty_kernel_args *k, const ty_p_optim &p, bool decouples) {
    const bool decoupled = decouples || p.decoupled;
    lr = X(p.lr), eps = X(p.eps);
    l2 = decoupled ? X(0) : X(p.weight_decay);
    decay = decoupled ? X(p.lr * p.weight_decay) : X(0);
    beta1 = X(p.beta1), fresh1 = X(1 - p.beta1), beta2 = X(p.beta2), fresh2 = X(1 - p.beta2);
    plain_lr = p.lr, plain_beta1 = p.beta1, plain_beta2 = p.beta2;
    stochastic = p.stochastic;
    plain_momentum = p.momentum, plain_dampening = p.dampening, steps = static_cast<double>(p.step);
    control = p.controlled ? static_cast<const double *>(k->in[k->nin - 1]->data) : nullptr;
    count_to(steps);
    direct = p.nesterov ? X(1) : X(0), averaged = p.nesterov ? X(p.momentum) : X(1);
    limit = X(p.grad_limit), scale = X(p.grad_scale), average_weight = X(p.average_weight);
  }

  /* What depends on the number of the step. */
  __host__ __device__ void count_to(double step) {
    rate = X(plain_lr / (1 - pow(plain_beta1, step))), widen = X(1 / sqrt(1 - pow(plain_beta2, step)));
    forget = step == 1;
    number = static_cast<uint32_t>(static_cast<int64_t>(step));
    keep = forget ? X(0) : X(plain_momentum), fresh = forget ? X(1) : X(1 - plain_dampening);
  }

  /* In a kernel: takes over what the control says; false: the step is left out. */
  TY_DEVICE_MEMBER bool take_control() {
    if (!control) return true;
    const double factor = control[0], left_out = control[1];
    if (!(factor - factor == 0)) return false; /* not finite */
    scale = X(static_cast<double>(scale) * factor);
    if (left_out > 0) count_to(steps - left_out < 1 ? 1.0 : steps - left_out);
    return true;
  }

  /* The gradient as the step takes it: cut to [-limit, limit], scaled, with the decay of the classic form. */
  TY_DEVICE_MEMBER X gradient(X p, X g) const {
    X x = g > limit ? limit : g;
    x = x < -limit ? -limit : x;
    return x * scale + l2 * p;
  }
};

/* A new parameter as its dtype will have it. */
TY_DEVICE void optim_round(uint8_t dtype, float &p, float g, int64_t i, uint32_t number) {
  const uint32_t random = ty_rounding_bits(p, g, static_cast<uint32_t>(i), number);
  if (dtype == TY_BF16) p = ty_bf16_neighbour(p, random);
  else if (dtype == TY_F16) p = ty_f16_neighbour(p, random);
}
TY_DEVICE void optim_round(uint8_t, double &, double, int64_t, uint32_t) {}

TY_DEVICE float optim_root(float x) { return sqrtf(x); }
TY_DEVICE double optim_root(double x) { return sqrt(x); }

/* Adam: Kingma and Ba 2015, algorithm 1; AdamW: Loshchilov and Hutter 2019, algorithm 2. */
struct optim_adam {
  template <class X> TY_DEVICE_MEMBER static void step(const optim_numbers<X> &c, bool, X &p, X g, X &m, X &v) {
    const X d = c.gradient(p, g);
    v = c.beta2 * v + c.fresh2 * d * d;
    m = c.beta1 * m + c.fresh1 * d;
    p -= c.rate * (m / (optim_root(v) * c.widen + c.eps)) + c.decay * p;
  }
};

/* Adds tensor i of the lists to the table; list[role] -1: none. */
static inline optim_tensor *optim_add(optim_table *t, const ty_kernel_args *k, const int *list, int64_t n, int64_t i,
                                      int32_t first) {
  optim_tensor *x = &t->tensor[t->n++];
  *x = optim_tensor{};
  x->count = k->in[i]->count;
  x->first = first;
  x->packs = true;
  for (int r = 0; r < ROLES; r++) {
    if (list[r] < 0) continue;
    const ty_view *v = k->in[list[r] * n + i];
    const size_t bytes = 4 * static_cast<size_t>(ty_dtype_size[v->dtype]);
    x->data[r] = v->data;
    x->dtype[r] = static_cast<uint8_t>(v->dtype);
    x->packs = x->packs && ty_aligned(v->data, bytes < 16 ? bytes : 16);
  }
  return x;
}

/* Calls launch(table, blocks) for the tensors whose arithmetic is in X, double when anything that is updated is, as many
 * at a time as the table holds. A block does OPTIM_CHUNK elements. */
template <class X, class Launch>
static bool optim_each(const ty_kernel_args *k, const int *list, int64_t n, const Launch &launch) {
  const bool wide = sizeof(X) == sizeof(double);
  optim_table table;
  int64_t blocks = 0;
  table.n = 0;
  const auto flush = [&]() {
    const bool ok = table.n == 0 || launch(table, static_cast<unsigned>(blocks));
    table.n = 0, blocks = 0;
    return ok;
  };
  for (int64_t i = 0; i < n; i++) {
    bool any_wide = false;
    for (int r = 0; r < ROLES; r++)
      if (list[r] >= 0 && r != G && (r != P || list[G] >= 0)) any_wide |= k->in[list[r] * n + i]->dtype == TY_F64;
    if (any_wide != wide || k->in[i]->count == 0) continue;
    const int64_t more = (k->in[i]->count + OPTIM_CHUNK - 1) / OPTIM_CHUNK;
    if ((table.n == OPTIM_TENSORS || blocks + more > INT32_MAX) && !flush()) return false;
    optim_add(&table, k, list, n, i, static_cast<int32_t>(blocks));
    blocks += more;
  }
  return flush();
}

#endif
