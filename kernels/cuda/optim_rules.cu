/* The rules of adaptive_ over lists of tensors in one pass over memory: the formulas of kernels/cpu/optimizer/optim_rules_real.h. */
#include "../optim_rules.h"
#include "optim.cuh"

/* The numbers of a step in the type of its arithmetic. */
template <class X> struct rule_numbers {
  X rate, other, widen, beta1, fresh1, beta2, fresh2, eps, low, high, l2, decay, limit, scale, average_weight;
  bool rooted;

  TY_DEVICE_MEMBER void count_to(const ty_p_optim &p, double step) {
    const ty_optim_factors f = ty_optim_factors_at(&p, step);
    rate = X(f.rate), other = X(f.other), widen = X(f.widen), rooted = f.rooted;
  }

  __host__ explicit rule_numbers(const ty_p_optim &p) {
    const ty_optim_factors f = ty_optim_factors_at(&p, static_cast<double>(p.step));
    rate = X(f.rate), other = X(f.other), widen = X(f.widen), rooted = f.rooted;
    beta1 = X(p.beta1), fresh1 = X(1 - p.beta1), beta2 = X(p.beta2), fresh2 = X(1 - p.beta2), eps = X(p.eps);
    low = X(p.low), high = X(p.high), limit = X(p.grad_limit), scale = X(p.grad_scale);
    l2 = p.decoupled ? X(0) : X(p.weight_decay), decay = p.decoupled ? X(p.lr * p.weight_decay) : X(0);
    average_weight = X(p.average_weight);
  }
};

struct state {
  bool second, third;
};

template <int RULE, class X>
TY_DEVICE void rule_step(const rule_numbers<X> &c, const state &has, X &p, X g, X &s, X &t, X &u) {
  X d = g > c.limit ? c.limit : g;
  d = d < -c.limit ? -c.limit : d;
  d = d * c.scale + c.l2 * p;
  if constexpr (RULE == TY_RMSPROP) {
    s = c.beta2 * s + c.fresh2 * d * d;
    X r = s;
    if (has.third) {
      u += c.fresh2 * (d - u);
      r -= u * u;
    }
    d /= optim_root(r) + c.eps;
    if (has.second) d = t = c.beta1 * t + d;
    p -= c.rate * d;
  } else if constexpr (RULE == TY_ADAGRAD) {
    s += d * d;
    p -= c.rate * (d / (optim_root(s) + c.eps));
  } else if constexpr (RULE == TY_ADADELTA) {
    s = c.beta2 * s + c.fresh2 * d * d;
    d *= optim_root(t + c.eps) / optim_root(s + c.eps);
    t = c.beta2 * t + c.fresh2 * d * d;
    p -= c.rate * d;
  } else if constexpr (RULE == TY_ADAMAX) {
    s = c.beta1 * s + c.fresh1 * d;
    const X old = c.beta2 * t, now = (d < 0 ? -d : d) + c.eps;
    t = old > now ? old : now; /* NaN of the gradient stays */
    p -= c.rate * (s / t);
  } else if constexpr (RULE == TY_NADAM) {
    s = c.beta1 * s + c.fresh1 * d;
    t = c.beta2 * t + c.fresh2 * d * d;
    p -= (c.rate * s + c.other * d) / (optim_root(t) * c.widen + c.eps) + c.decay * p;
  } else if constexpr (RULE == TY_RADAM) {
    s = c.beta1 * s + c.fresh1 * d;
    t = c.beta2 * t + c.fresh2 * d * d;
    p -= c.rate * (c.rooted ? s / (optim_root(t) + c.eps) : s) + c.decay * p;
  } else if constexpr (RULE == TY_RPROP) {
    const X turn = d * s;
    X size = t * (turn > 0 ? c.beta2 : turn < 0 ? c.beta1 : X(1));
    size = size < c.low ? c.low : size;
    t = size > c.high ? c.high : size;
    s = turn < 0 ? X(0) : d;
    p -= t * (s > 0 ? X(1) : s < 0 ? X(-1) : s);
  } else {
    p -= c.rate * (d + c.low * p);
    s = c.other == 1 ? p : s + c.other * (p - s);
  }
}

template <int RULE, class X>
__global__ void __launch_bounds__(OPTIM_THREADS)
    rule_many(const optim_table table, const rule_numbers<X> numbers, const ty_p_optim p, const double *control) {
  rule_numbers<X> c = numbers;
  if (control) {
    const double factor = control[0], left_out = control[1], steps = static_cast<double>(p.step);
    if (!(factor - factor == 0)) return; /* not finite: the step is left out */
    c.scale = X(static_cast<double>(c.scale) * factor);
    if (left_out > 0) c.count_to(p, steps - left_out < 1 ? 1.0 : steps - left_out);
  }
  const optim_tensor &t = optim_find(table);
  const state has = { t.data[SECOND] != nullptr, t.data[THIRD] != nullptr };
  const int64_t begin = int64_t{ static_cast<int32_t>(blockIdx.x) - t.first } * OPTIM_CHUNK;
  const int64_t end = begin + OPTIM_CHUNK < t.count ? begin + OPTIM_CHUNK : t.count;
  for (int64_t i = begin + 4 * static_cast<int>(threadIdx.x); i < end; i += 4 * OPTIM_THREADS) {
    const int n = end - i < 4 ? static_cast<int>(end - i) : 4;
    X x[4], g[4], s[4], r[4] = {}, u[4] = {}, a[4];
    optim_load(t, P, i, n, x);
    optim_load(t, G, i, n, g);
    optim_load(t, FIRST, i, n, s);
    if (has.second) optim_load(t, SECOND, i, n, r);
    if (has.third) optim_load(t, THIRD, i, n, u);
    if (t.data[AVERAGE]) optim_load(t, AVERAGE, i, n, a);
    for (int j = 0; j < 4; j++) rule_step<RULE>(c, has, x[j], g[j], s[j], r[j], u[j]);
    optim_store(t, P, i, n, x);
    optim_store(t, FIRST, i, n, s);
    if (has.second) optim_store(t, SECOND, i, n, r);
    if (has.third) optim_store(t, THIRD, i, n, u);
    if (!t.data[AVERAGE]) continue;
    for (int j = 0; j < 4; j++) a[j] += c.average_weight * (x[j] - a[j]);
    optim_store(t, AVERAGE, i, n, a);
  }
}

template <int RULE, class X>
static bool run_in(const ty_kernel_args *k, const ty_p_optim &p, const int *list, int64_t n) {
  const rule_numbers<X> numbers(p);
  const double *control = p.controlled ? static_cast<const double *>(k->in[k->nin - 1]->data) : nullptr;
  return optim_each<X>(k, list, n, [&](const optim_table &table, unsigned blocks) {
    return TY_LAUNCH((rule_many<RULE, X>), blocks, OPTIM_THREADS, 0, table, numbers, p, control);
  });
}

template <int RULE> static bool run(const ty_kernel_args *k, const ty_p_optim &p) {
  int lists = 2, list[ROLES] = { 0, 1, -1, -1, -1, -1 };
  for (int r = FIRST; r <= THIRD; r++)
    if (p.lists >> (r - FIRST) & 1) list[r] = lists++;
  if (p.averaged) list[AVERAGE] = lists++;
  const int64_t n = k->nin / lists;
  return run_in<RULE, float>(k, p, list, n) && run_in<RULE, double>(k, p, list, n);
}

/* in: n parameters, n gradients, n of each state that the rule has, with averaged n averages. */
TY_CUDA_KERNEL(adaptive) {
  const ty_p_optim &p = *static_cast<const ty_p_optim *>(k->params);
  switch (p.rule) {
    case TY_RMSPROP: return run<TY_RMSPROP>(k, p);
    case TY_ADAGRAD: return run<TY_ADAGRAD>(k, p);
    case TY_ADADELTA: return run<TY_ADADELTA>(k, p);
    case TY_ADAMAX: return run<TY_ADAMAX>(k, p);
    case TY_NADAM: return run<TY_NADAM>(k, p);
    case TY_RADAM: return run<TY_RADAM>(k, p);
    case TY_RPROP: return run<TY_RPROP>(k, p);
    default: return run<TY_ASGD>(k, p);
  }
}
