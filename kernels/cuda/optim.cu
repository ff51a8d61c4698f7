/* Optimizer steps over lists of tensors in one pass over memory: sgd, adam, lion, lerp_list. A launch takes as many
 * tensors as its parameters hold; a block works on a chunk of one of them. */
#include "optim.cuh"

struct sgd {
  template <class X> TY_DEVICE_MEMBER static void step(const optim_numbers<X> &c, bool momentum, X &p, X g, X &m, X &) {
    const X d = c.gradient(p, g);
    if (momentum) { /* at the first step, whatever it holds, NaN too */
      m = c.forget ? c.fresh * d : c.keep * m + c.fresh * d;
      p -= c.lr * (c.direct * d + c.averaged * m);
    } else {
      p -= c.lr * d;
    }
  }
};

/* Chen et al. 2023, algorithm 2. */
struct lion {
  template <class X> TY_DEVICE_MEMBER static void step(const optim_numbers<X> &c, bool, X &p, X g, X &m, X &) {
    const X d = c.gradient(p, g), mean = c.beta1 * m + c.fresh1 * d;
    m = c.beta2 * m + c.fresh2 * d;
    const X sign = mean > 0 ? X(1) : mean < 0 ? X(-1) : mean; /* NaN stays */
    p -= c.lr * sign + c.decay * p;
  }
};

/* The averages alone move. */
struct standing {
  template <class X> TY_DEVICE_MEMBER static void step(const optim_numbers<X> &, bool, X &, X, X &, X &) {}
};

template <class Step, class X>
__global__ void __launch_bounds__(OPTIM_THREADS) step_many(const optim_table table, const optim_numbers<X> numbers) {
  optim_numbers<X> c = numbers;
  if (!c.take_control()) return;
  const optim_tensor &t = optim_find(table);
  const int64_t begin = int64_t{ static_cast<int32_t>(blockIdx.x) - t.first } * OPTIM_CHUNK;
  const int64_t end = begin + OPTIM_CHUNK < t.count ? begin + OPTIM_CHUNK : t.count;
  for (int64_t i = begin + 4 * static_cast<int>(threadIdx.x); i < end; i += 4 * OPTIM_THREADS) {
    const int n = end - i < 4 ? static_cast<int>(end - i) : 4;
    X p[4], g[4] = {}, m[4] = {}, v[4] = {}, a[4];
    optim_load(t, P, i, n, p);
    if (t.data[G]) optim_load(t, G, i, n, g);
    if (t.data[FIRST]) optim_load(t, FIRST, i, n, m);
    if (t.data[SECOND]) optim_load(t, SECOND, i, n, v);
    if (t.data[AVERAGE]) optim_load(t, AVERAGE, i, n, a);
    for (int j = 0; j < 4; j++) Step::step(c, t.data[FIRST] != nullptr, p[j], g[j], m[j], v[j]);
    if (c.stochastic)
      for (int j = 0; j < n; j++) optim_round(t.dtype[P], p[j], g[j], i + j, c.number);
    if (t.data[G]) optim_store(t, P, i, n, p);
    if (t.data[FIRST]) optim_store(t, FIRST, i, n, m);
    if (t.data[SECOND]) optim_store(t, SECOND, i, n, v);
    if (!t.data[AVERAGE]) continue;
    for (int j = 0; j < 4; j++) a[j] += c.average_weight * (p[j] - a[j]);
    optim_store(t, AVERAGE, i, n, a);
  }
}

template <class Step, class X>
static bool run_in(const ty_kernel_args *k, const ty_p_optim &p, const int *list, int64_t n, bool decouples) {
  const optim_numbers<X> numbers(k, p, decouples);
  return optim_each<X>(k, list, n, [&](const optim_table &table, unsigned blocks) {
    return TY_LAUNCH((step_many<Step, X>), blocks, OPTIM_THREADS, 0, table, numbers);
  });
}

template <class Step>
static bool run(const ty_kernel_args *k, const ty_p_optim &p, const int (&list)[ROLES], bool decouples) {
  int lists = 0;
  for (int r = 0; r < ROLES; r++) lists += list[r] >= 0;
  const int64_t n = k->nin / lists;
  return run_in<Step, float>(k, p, list, n, decouples) && run_in<Step, double>(k, p, list, n, decouples);
}

static const ty_p_optim &numbers_of(const ty_kernel_args *k) { return *static_cast<const ty_p_optim *>(k->params); }

/* in: n parameters, n gradients, with momentum n buffers, with averaged n averages. */
TY_CUDA_KERNEL(sgd) {
  const ty_p_optim &p = numbers_of(k);
  const int momentum = p.momentum != 0;
  return run<sgd>(k, p, { 0, 1, momentum ? 2 : -1, -1, -1, p.averaged ? 2 + momentum : -1 }, false);
}

/* in: n parameters, n gradients, n first moments, n second moments, with averaged n averages. */
TY_CUDA_KERNEL(adam) {
  const ty_p_optim &p = numbers_of(k);
  return run<optim_adam>(k, p, { 0, 1, 2, 3, -1, p.averaged ? 4 : -1 }, false);
}

/* in: n parameters, n gradients, n moments, with averaged n averages. */
TY_CUDA_KERNEL(lion) {
  const ty_p_optim &p = numbers_of(k);
  return run<lion>(k, p, { 0, 1, 2, -1, -1, p.averaged ? 3 : -1 }, true);
}

/* in: n tensors that move, n tensors they move to; params: ty_p_scalars, a: the weight. */
TY_CUDA_KERNEL(lerp_list) {
  ty_p_optim p = {};
  p.average_weight = static_cast<const ty_p_scalars *>(k->params)->a;
  return run<standing>(k, p, { 1, -1, -1, -1, -1, 0 }, false);
}
