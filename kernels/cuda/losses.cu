/* Cross entropy of logits with class positions, and its gradient: the formulas are in kernels/cpu/norm/losses.c. A row of
 * [n, classes] belongs to a warp, or to a block where it is long; a place of [n, classes, places] to a thread. */
#include "exp_sum.cuh"
#include "teams.cuh"

enum { THREADS = 256 };
/* Packs of V elements that a thread loads at once. */
template <int V> constexpr int packs_at_once = V > 4 ? 2 : 4;

/* Logits of T. What there is one of for each row (or place) or class is of what these are computed with. */
template <class T> struct loss_job {
  typedef ty_compute<T> C;
  const T *x;
  const C *weight, *g, *lse;
  const void *target;
  const double *weight_sum; /* of all classes, where it is needed */
  C *loss, *lse_out, *row_weight;
  T *dx;
  bool narrow; /* targets are i32 */
  int team;
  int64_t rows, classes, places; /* places 1: rows */
  ty_p_cross_entropy p;
  ty_cuda_watch watch;
};

/* The class of a row, and whether it counts: not where it is ignored, or out of range, which is reported. */
template <class T> TY_DEVICE int64_t class_of(const loss_job<T> &j, int64_t row, bool *counts) {
  int64_t y = j.narrow ? static_cast<const int32_t *>(j.target)[row] : static_cast<const int64_t *>(j.target)[row];
  *counts = y != j.p.ignore_index && ty_in_range(j.watch, y, j.classes);
  return y;
}

/* Calls fn(at, x, number of elements) for the elements of a row that are this thread's, several packs at once. */
template <int V, class T, class Fn>
TY_DEVICE void each_pack(const T *row, int64_t n, int lane, int team, const Fn &fn) {
  enum { PACKS = packs_at_once<V> };
  const int64_t step = static_cast<int64_t>(team) * V;
  ty_compute<T> x[PACKS * V];
  int64_t at = static_cast<int64_t>(lane) * V;
  for (; at + (PACKS - 1) * step < n; at += PACKS * step) {
#pragma unroll
    for (int i = 0; i < PACKS; i++) ty_load<V>(row + at + i * step, x + i * V);
    fn(at, step, x, std::integral_constant<int, PACKS>{});
  }
  for (; at < n; at += step) {
    ty_load<V>(row + at, x);
    fn(at, step, x, std::integral_constant<int, 1>{});
  }
}

/* What is left of a row, whose logits are `step` apart, once its log-sum-exp and what smoothing adds are known. */
template <class T>
TY_DEVICE void put_loss(const loss_job<T> &j, int64_t row, const T *x, int64_t step, ty_compute<T> lse,
                        ty_compute<T> smoothed) {
  typedef ty_compute<T> C;
  bool counts;
  const int64_t y = class_of(j, row, &counts);
  C loss = 0, of_row = 0;
  if (counts) {
    of_row = j.weight ? j.weight[y] : C(1);
    loss = static_cast<C>(1 - j.p.label_smoothing) * of_row * (lse - ty_widen(x[y * step])) + smoothed;
  }
  j.loss[row] = loss;
  j.lse_out[row] = lse;
  j.row_weight[row] = of_row;
}

template <class T, int V> __global__ void __launch_bounds__(THREADS) loss_rows(const loss_job<T> j) {
  typedef ty_compute<T> C;
  TY_SHARED(ty_exp_sum<C>, room, TY_WARP);
  TY_SHARED(C, sums, TY_WARP);
  const int team = j.team, lane = static_cast<int>(threadIdx.x) % team;
  const int64_t per_block = THREADS / team;
  for (int64_t first = blockIdx.x * per_block; first < j.rows; first += gridDim.x * per_block) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / team, n = row < j.rows ? j.classes : 0;
    const T *x = j.x + row * j.classes;
    C lse = 0;
    if (!j.p.log_probs) {
      ty_exp_sum<C> s = ty_exp_sum_start<C>();
      each_pack<V>(x, n, lane, team, [&](int64_t, int64_t, const C *v, auto packs) {
        ty_exp_sum_add<C, decltype(packs)::value * V>(s, v);
      });
      ty_team_join(
          s, team, [](ty_exp_sum<C> &a, const ty_exp_sum<C> &b) { ty_exp_sum_join(a, b); }, room);
      lse = ty_exp_sum_log(s);
    }
    const C smooth = static_cast<C>(j.p.label_smoothing / static_cast<double>(j.classes));
    C spread = 0;
    if (smooth != 0) { /* from the cache, now that the log-sum-exp is known */
      each_pack<V>(x, n, lane, team, [&](int64_t at, int64_t step, const C *v, auto packs) {
#pragma unroll
        for (int i = 0; i < decltype(packs)::value * V; i++)
          spread += j.weight ? j.weight[at + i / V * step + i % V] * (lse - v[i]) : lse - v[i];
      });
      ty_team_join(
          spread, team, [](C &a, const C &b) { a += b; }, sums);
    }
    if (lane == 0 && row < j.rows) put_loss(j, row, x, 1, lse, smooth * spread);
  }
}

/* ty_store(), by the instruction for 16 bytes: after these branches nvcc would store them word by word. Loops that have
 * none are better off with ty_store(), past which loads can move. */
template <int V, class T> TY_DEVICE void store_whole(T *to, const ty_compute<T> *x) {
#ifdef TY_ON_GPU
  if constexpr (V * sizeof(T) == 16) {
    ty_pack<T, V> pack;
    ty_pack<uint32_t, 4> words;
#pragma unroll
    for (int i = 0; i < V; i++) pack.v[i] = ty_narrow<T>(x[i]);
    memcpy(&words, &pack, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.v[0]),
                 "r"(words.v[1]), "r"(words.v[2]), "r"(words.v[3])
                 : "memory");
    return;
  }
#endif
  ty_store<V>(to, x);
}

template <class T, int V> __global__ void __launch_bounds__(THREADS, 1) loss_backward(const loss_job<T> j) {
  typedef ty_compute<T> C;
  const int team = j.team, lane = static_cast<int>(threadIdx.x) % team;
  const int64_t per_block = THREADS / team;
  const double of_class = j.p.label_smoothing / static_cast<double>(j.classes);
  for (int64_t row = blockIdx.x * per_block + static_cast<int>(threadIdx.x) / team; row < j.rows;
       row += gridDim.x * per_block) {
    const C g = j.g[row], lse = j.lse[row];
    bool counts;
    const int64_t y = class_of(j, row, &counts);
    const double hard = counts ? (1 - j.p.label_smoothing) * (j.weight ? static_cast<double>(j.weight[y]) : 1) : 0;
    const double weights = j.weight_sum ? *j.weight_sum : static_cast<double>(j.classes);
    const C smooth = static_cast<C>(of_class) * g, all = static_cast<C>(hard + of_class * weights) * g;
    const C own = static_cast<C>(hard) * g;
    const bool live = counts && !j.p.log_probs, weighted = counts && of_class != 0 && j.weight;
    const C even = counts && of_class != 0 ? smooth : C(0);
    const int64_t hit = counts ? y : -1;
    T *dx = j.dx + row * j.classes;
    each_pack<V>(j.x + row * j.classes, j.classes, lane, team,
                 [&](int64_t first, int64_t step, const C *x, auto packs) {
#pragma unroll
                   for (int i = 0; i < decltype(packs)::value; i++) {
                     const int64_t at = first + i * step;
                     C d[V];
#pragma unroll
                     for (int v = 0; v < V; v++) {
                       d[v] = live ? ty_exp(x[i * V + v] - lse) * all : C(0);
                       d[v] -= weighted ? smooth * j.weight[at + v] : even;
                       d[v] -= at + v == hit ? own : C(0);
                     }
                     store_whole<V>(dx + at, d);
                   }
                 });
  }
}

/* The places of [n, classes, places]: neighbours' logits lie beside each other. */
template <class T> __global__ void __launch_bounds__(THREADS) loss_places(const loss_job<T> j) {
  typedef ty_compute<T> C;
  enum { AT_ONCE = 4 };
  const C smooth = static_cast<C>(j.p.label_smoothing / static_cast<double>(j.classes));
  const int64_t all = j.rows * j.places, threads = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; at < all; at += threads) {
    const T *x = j.x + at / j.places * j.classes * j.places + at % j.places;
    C lse = 0, spread = 0;
    if (!j.p.log_probs) {
      ty_exp_sum<C> s = ty_exp_sum_start<C>();
      int64_t c = 0;
      for (; c + AT_ONCE <= j.classes; c += AT_ONCE) {
        C v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) v[i] = ty_widen(x[(c + i) * j.places]);
        ty_exp_sum_add<C, AT_ONCE>(s, v);
      }
      for (; c < j.classes; c++) {
        const C v = ty_widen(x[c * j.places]);
        ty_exp_sum_add<C, 1>(s, &v);
      }
      lse = ty_exp_sum_log(s);
    }
    for (int64_t c = 0; c < j.classes && smooth != 0; c++) {
      const C d = lse - ty_widen(x[c * j.places]);
      spread += j.weight ? j.weight[c] * d : d;
    }
    put_loss(j, at, x, j.places, lse, smooth * spread);
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) places_backward(const loss_job<T> j) {
  typedef ty_compute<T> C;
  const double of_class = j.p.label_smoothing / static_cast<double>(j.classes);
  const double weights = j.weight_sum ? *j.weight_sum : static_cast<double>(j.classes);
  const int64_t all = j.rows * j.places, threads = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; at < all; at += threads) {
    const int64_t first = at / j.places * j.classes * j.places + at % j.places;
    const C g = j.g[at], lse = j.lse[at];
    bool counts;
    const int64_t y = class_of(j, at, &counts);
    const double hard = counts ? (1 - j.p.label_smoothing) * (j.weight ? static_cast<double>(j.weight[y]) : 1) : 0;
    const C even = static_cast<C>(of_class) * g, scale = static_cast<C>(hard + of_class * weights) * g;
    const C own = static_cast<C>(hard) * g;
    for (int64_t c = 0; c < j.classes; c++) {
      C d[1] = { C(0) };
      if (counts) {
        if (!j.p.log_probs) d[0] = ty_exp(ty_widen(j.x[first + c * j.places]) - lse) * scale;
        if (of_class != 0) d[0] -= j.weight ? even * j.weight[c] : even;
        if (c == y) d[0] -= own;
      }
      ty_store<1>(j.dx + first + c * j.places, d);
    }
  }
}

/* The sum of n weights, in one block. */
template <class C> __global__ void __launch_bounds__(THREADS) sum_weights(const C *weight, int64_t n, double *sum) {
  TY_SHARED(double, room, TY_WARP);
  double s = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) s += static_cast<double>(weight[i]);
  s = ty_block_reduce(s, ty_plus<double>{}, room);
  if (threadIdx.x == 0) *sum = s;
}

template <class T>
static loss_job<T> job_of(const ty_kernel_args *k, const ty_view *x, const ty_view *target, const ty_view *weight) {
  loss_job<T> j = {};
  j.x = static_cast<const T *>(x->data);
  j.weight = weight ? static_cast<const ty_compute<T> *>(weight->data) : nullptr;
  j.target = target->data;
  j.narrow = target->dtype == TY_I32;
  j.rows = x->size[0];
  j.classes = x->size[1];
  j.places = 1;
  for (int d = 2; d < x->ndim; d++) j.places *= x->size[d];
  j.p = *static_cast<const ty_p_cross_entropy *>(k->params);
  j.watch = ty_cuda_watched();
  return j;
}

template <class T> static int team_of(const loss_job<T> &j, int v) {
  return j.classes > 32 * 4 * 2 * (v < 4 ? v : 4) ? THREADS : ty_power_of_two((j.classes + v - 1) / v, TY_WARP);
}

/* in: logits [n, classes, ...], target [n, ...], weight; out: loss, lse, weight of each. */
TY_CUDA_KERNEL(cross_entropy_rows) {
  const ty_view *x = k->in[0];
  if (k->out[0]->count == 0) return true;
  return ty_for_floats(x->dtype, "cross_entropy", [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    enum { V = 16 / sizeof(T) };
    loss_job<T> j = job_of<T>(k, x, k->in[1], k->in[2]);
    j.watch.op = j.p.log_probs ? "nll_loss" : "cross_entropy"; /* as it was called */
    j.loss = static_cast<C *>(k->out[0]->data);
    j.lse_out = static_cast<C *>(k->out[1]->data);
    j.row_weight = static_cast<C *>(k->out[2]->data);
    if (j.places > 1) return TY_LAUNCH(loss_places<T>, ty_cuda_blocks(j.rows * j.places, THREADS), THREADS, 0, j);
    bool whole = j.classes % V == 0 && ty_aligned(j.x);
    j.team = team_of(j, whole ? V : 1);
    unsigned grid = ty_cuda_blocks(j.rows, THREADS / j.team);
    return whole ? TY_LAUNCH((loss_rows<T, V>), grid, THREADS, 0, j)
                 : TY_LAUNCH((loss_rows<T, 1>), grid, THREADS, 0, j);
  });
}

/* in: g [n, ...], logits, target, lse [n, ...], weight; out: gradient of the logits. */
TY_CUDA_KERNEL(cross_entropy_backward) {
  const ty_view *x = k->in[1];
  if (x->count == 0) return true;
  return ty_for_floats(x->dtype, "cross_entropy_backward", [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    enum { V = 16 / sizeof(T) };
    loss_job<T> j = job_of<T>(k, x, k->in[2], k->in[4]);
    j.g = static_cast<const C *>(k->in[0]->data);
    j.lse = static_cast<const C *>(k->in[3]->data);
    j.dx = static_cast<T *>(k->out[0]->data);
    ty_cuda_scratch weight_sum(sizeof(double));
    if (!weight_sum.data) return false;
    if (j.weight && j.p.label_smoothing != 0) {
      double *sum = weight_sum.as<double>();
      const C *weight = j.weight;
      const int64_t n = j.classes;
      if (!TY_LAUNCH(sum_weights<C>, 1, THREADS, 0, weight, n, sum)) return false;
      j.weight_sum = sum;
    }
    if (j.places > 1) return TY_LAUNCH(places_backward<T>, ty_cuda_blocks(j.rows * j.places, THREADS), THREADS, 0, j);
    bool whole = j.classes % V == 0 && ty_aligned(j.x) && ty_aligned(j.dx);
    j.team = team_of(j, whole ? V : 1);
    unsigned grid = ty_cuda_blocks(j.rows, THREADS / j.team);
    return whole ? TY_LAUNCH((loss_backward<T, V>), grid, THREADS, 0, j)
                 : TY_LAUNCH((loss_backward<T, 1>), grid, THREADS, 0, j);
  });
}
