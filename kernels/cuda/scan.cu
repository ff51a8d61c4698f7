/* Running sums, products and first-order linear recurrences along one dimension; f32 accumulates in f64. Every thread
 * of a team takes EACH neighbours of a line: their states are joined over the team, and each thread goes on from what
 * precedes it. A line of few that are long is cut into chunks, whose totals are found first. */
#include "../cpu/lines.h"
#include "teams.cuh"

enum { THREADS = 256, EACH = 8, LONG = 16384 };

struct scan_job {
  int64_t size, lines, inner;
  bool reverse; /* from the end of the dimension */
  bool vectors; /* packs of 16 bytes may be read and written */
  int team;
  int64_t chunks, chunk; /* chunk: a multiple of what a block does in one step */
};

/* Where the element lies that is the t-th to be seen. */
TY_DEVICE int64_t place(const scan_job &j, int64_t t) { return (j.reverse ? j.size - 1 - t : t) * j.inner; }
TY_DEVICE int64_t start_of(const scan_job &j, int64_t line) {
  return j.inner == 1 ? line * j.size : line / j.inner * j.size * j.inner + line % j.inner;
}

/* The elements t .. t + EACH - 1 of a line as far as they are before `end`, in the order in which they are seen. */
template <class T> TY_DEVICE void fetch(const scan_job &j, const T *x, int64_t t, int64_t end, ty_compute<T> *e) {
  enum { V = 16 / sizeof(T) };
  if (j.vectors) {
#pragma unroll
    for (int i = 0; i < EACH; i += V) {
      if (t + i >= end) continue;
      ty_compute<T> pack[V];
      ty_load<V>(x + (j.reverse ? j.size - V - t - i : t + i), pack);
#pragma unroll
      for (int v = 0; v < V; v++) e[i + v] = j.reverse ? pack[V - 1 - v] : pack[v];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (t + i < end) e[i] = ty_widen(x[place(j, t + i)]);
}

template <class T> TY_DEVICE void deliver(const scan_job &j, T *y, int64_t t, int64_t end, const ty_compute<T> *e) {
  enum { V = 16 / sizeof(T) };
  if (j.vectors) {
#pragma unroll
    for (int i = 0; i < EACH; i += V) {
      if (t + i >= end) continue;
      ty_compute<T> pack[V];
#pragma unroll
      for (int v = 0; v < V; v++) pack[j.reverse ? V - 1 - v : v] = e[i + v];
      ty_store<V>(y + (j.reverse ? j.size - V - t - i : t + i), pack);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (t + i < end) y[place(j, t + i)] = ty_narrow<T>(e[i]);
}

/* ---- what is scanned ----
 * S: the state of a run of elements, with none() and join(earlier, later); A: what a thread carries from element to
 * element once it knows the state before its own. load() reads, add() extends a state by an element, begin() makes an
 * A, step() goes on by one element, and store() writes what the steps left in the place of the elements. */

template <class T> struct run_of_one { /* one input, one result */
  const T *x;
  T *y;
  typedef ty_compute<T> element;
  TY_DEVICE_MEMBER void load(const scan_job &j, int64_t base, int64_t t, int64_t end, element *e) const {
    fetch(j, x + base, t, end, e);
  }
  TY_DEVICE_MEMBER void store(const scan_job &j, int64_t base, int64_t t, int64_t end, const element *e) const {
    deliver(j, y + base, t, end, e);
  }
};

template <class T> struct running_sum : run_of_one<T> {
  typedef ty_compute<T> C;
  typedef std::conditional_t<std::is_floating_point<C>::value, double, uint64_t> S;
  typedef S A;
  TY_DEVICE_MEMBER static S none() { return 0; }
  TY_DEVICE_MEMBER static S join(const S &a, const S &b) { return a + b; }
  TY_DEVICE_MEMBER static void add(S &s, C e) { s += static_cast<S>(e); }
  TY_DEVICE_MEMBER static A begin(const S &s) { return s; }
  TY_DEVICE_MEMBER static void step(A &a, C &e) { e = static_cast<C>(a += static_cast<S>(e)); }
};

template <class T> struct running_integer_product : run_of_one<T> {
  typedef uint64_t S;
  typedef S A;
  TY_DEVICE_MEMBER static S none() { return 1; }
  TY_DEVICE_MEMBER static S join(const S &a, const S &b) { return a * b; }
  TY_DEVICE_MEMBER static void add(S &s, T e) { s *= static_cast<S>(e); }
  TY_DEVICE_MEMBER static A begin(const S &s) { return s; }
  TY_DEVICE_MEMBER static void step(A &a, T &e) { e = static_cast<T>(a *= static_cast<S>(e)); }
};

/* The product of a run may be out of range where no running product is: its exponent is kept apart. */
struct scaled { /* m * 2^(512 e) */
  double m;
  int64_t e;
};
TY_DEVICE scaled in_scale(double m, int64_t e) {
  double size = m < 0 ? -m : m;
  if (size > 0x1p256 && size <= std::numeric_limits<double>::max()) return { m * 0x1p-512, e + 1 };
  if (size < 0x1p-256 && size > 0) {
    m *= 0x1p512;
    if (m < 0x1p-256 && m > -0x1p-256) return { m * 0x1p512, e - 2 };
    return { m, e - 1 };
  }
  return { m, e };
}
template <class T> struct running_product : run_of_one<T> {
  typedef ty_compute<T> C;
  typedef scaled S;
  typedef double A;
  TY_DEVICE_MEMBER static S none() { return { 1, 0 }; }
  TY_DEVICE_MEMBER static S join(const S &a, const S &b) { return in_scale(a.m * b.m, a.e + b.e); }
  TY_DEVICE_MEMBER static void add(S &s, C e) { s = join(s, in_scale(static_cast<double>(e), 0)); }
  TY_DEVICE_MEMBER static A begin(const S &s) {
    double y = s.m;
    for (int i = 0; i < 5 && i < s.e; i++) y *= 0x1p512; /* five: from one end of the range to beyond the other */
    for (int i = 0; i < 5 && i < -s.e; i++) y *= 0x1p-512;
    return y;
  }
  TY_DEVICE_MEMBER static void step(A &a, C &e) { e = static_cast<C>(a *= static_cast<double>(e)); }
};

/* h[t] = a[t] h[t-1] + b[t]: a run takes h to a h + b. */
struct affine {
  double a, b;
};
template <class T> struct recurrence {
  const T *a, *b;
  T *h;
  typedef affine S;
  typedef double A;
  typedef ty_compute<T> C;
  struct element {
    C a, b;
  };
  TY_DEVICE_MEMBER static S none() { return { 1, 0 }; }
  TY_DEVICE_MEMBER static S join(const S &l, const S &r) { /* a product of many a may overflow before there is an h */
    return { l.a * r.a, l.b == 0 ? r.b : r.a * l.b + r.b };
  }
  TY_DEVICE_MEMBER static void add(S &s, element e) {
    s = join(s, { static_cast<double>(e.a), static_cast<double>(e.b) });
  }
  TY_DEVICE_MEMBER static A begin(const S &s) { return s.b; } /* h is 0 before all */
  TY_DEVICE_MEMBER static void step(A &h, element &e) {
    e.b = static_cast<C>(h = static_cast<double>(e.a) * h + static_cast<double>(e.b));
  }
  TY_DEVICE_MEMBER void load(const scan_job &j, int64_t base, int64_t t, int64_t end, element *e) const {
    C p[EACH] = {}, q[EACH] = {};
    fetch(j, a + base, t, end, p);
    fetch(j, b + base, t, end, q);
#pragma unroll
    for (int i = 0; i < EACH; i++) e[i] = { p[i], q[i] };
  }
  TY_DEVICE_MEMBER void store(const scan_job &j, int64_t base, int64_t t, int64_t end, const element *e) const {
    C y[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) y[i] = e[i].b;
    deliver(j, h + base, t, end, y);
  }
};

/* s[t] = g[t] + a[t+1] s[t+1], seen from the other end: the gradient of b[t] is s[t] and that of a[t] is
 * s[t] h[t-1]. */
template <class T> struct recurrence_backward : recurrence<T> { /* a, b: the factors and g; h: the gradient of b */
  const T *y;
  T *da;
  typedef typename recurrence<T>::element element;
  typedef ty_compute<T> C;
  TY_DEVICE_MEMBER void load(const scan_job &j, int64_t base, int64_t t, int64_t end, element *e) const {
    C q[EACH] = {};
    fetch(j, this->b + base, t, end, q);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      bool inside = t + i > 0 && t + i < end;
      e[i] = { inside ? ty_widen(this->a[base + place(j, t + i - 1)]) : C(0), q[i] };
    }
  }
  TY_DEVICE_MEMBER void store(const scan_job &j, int64_t base, int64_t t, int64_t end, const element *e) const {
    recurrence<T>::store(j, base, t, end, e);
    C d[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (t + i < end && t + i + 1 < j.size) d[i] = e[i].b * ty_widen(y[base + place(j, t + i + 1)]);
    deliver(j, da + base, t, end, d);
  }
};

/* ---- states over threads ---- */

/* s becomes the state of all before this lane; the state of the whole warp is returned. */
template <class R, class S> TY_DEVICE S before_in_warp(S &s) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  for (int step = 1; step < TY_WARP; step *= 2) {
    S t = ty_state_of(s, lane < step ? lane : lane - step);
    if (lane >= step) s = R::join(t, s);
  }
  S all = ty_state_of(s, TY_WARP - 1);
  s = ty_state_of(s, lane > 0 ? lane - 1 : 0);
  if (lane == 0) s = R::none();
  return all;
}

/* Scans the elements of one thread from the state before them. */
template <class R>
TY_DEVICE void scan_own(const scan_job &j, const R &r, int64_t base, int64_t t, int64_t end,
                        const typename R::S &before, typename R::element *e) {
  if (t >= end) return;
  typename R::A a = R::begin(before);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (t + i < end) R::step(a, e[i]);
  r.store(j, base, t, end, e);
}

template <class R> TY_DEVICE typename R::S state_of(const typename R::element *e, int64_t t, int64_t end) {
  typename R::S s = R::none();
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (t + i < end) R::add(s, e[i]);
  return s;
}

/* ---- lines, a warp or a block for each chunk ---- */

/* carries: NULL, or the state before each chunk. totals: NULL, or where the states of the chunks go, and nothing
 * else. */
template <class R>
__global__ void __launch_bounds__(THREADS, 1)
    scan_lines(const scan_job j, const R r, const typename R::S *carries, typename R::S *totals) {
  typedef typename R::S S;
  TY_SHARED(S, room, THREADS / TY_WARP);
  const int lane = static_cast<int>(threadIdx.x) % j.team, warp = static_cast<int>(threadIdx.x) / TY_WARP;
  const int64_t per_block = THREADS / j.team, units = j.lines * j.chunks;
  for (int64_t first = blockIdx.x * per_block; first < units; first += gridDim.x * per_block) {
    const int64_t u = first + static_cast<int>(threadIdx.x) / j.team, line = u / j.chunks;
    if (u >= units) continue; /* a whole warp, when teams are warps */
    const int64_t base = start_of(j, line), begin = (u - line * j.chunks) * j.chunk;
    const int64_t end = begin + j.chunk < j.size ? begin + j.chunk : j.size;
    S carry = carries ? carries[u] : R::none();
    for (int64_t at = begin; at < end; at += static_cast<int64_t>(j.team) * EACH) {
      const int64_t t = at + lane * EACH;
      typename R::element e[EACH];
      r.load(j, base, t, end, e);
      S s = state_of<R>(e, t, end), all = before_in_warp<R>(s), before = carry;
      if (j.team == TY_WARP) {
        carry = R::join(carry, all);
      } else {
        if (lane % TY_WARP == 0) room[warp] = all;
        __syncthreads();
        for (int w = 0; w < THREADS / TY_WARP; w++) {
          if (w == warp) before = carry;
          carry = R::join(carry, room[w]);
        }
        __syncthreads();
      }
      if (!totals) scan_own(j, r, base, t, end, R::join(before, s), e);
    }
    if (totals && lane == 0) totals[u] = carry;
  }
}

/* Totals of the chunks of each line to what precedes them; a warp for each line. */
template <class R> __global__ void __launch_bounds__(TY_WARP) scan_totals(typename R::S *totals, int64_t chunks) {
  typedef typename R::S S;
  S carry = R::none();
  S *line = totals + blockIdx.x * chunks;
  for (int64_t first = 0; first < chunks; first += TY_WARP) {
    const int64_t i = first + threadIdx.x;
    S s = i < chunks ? line[i] : R::none(), all = before_in_warp<R>(s);
    if (i < chunks) line[i] = R::join(carry, s);
    carry = R::join(carry, all);
  }
}

/* ---- lines whose elements lie apart: neighbouring threads take neighbouring lines, `team` threads each ---- */

template <class R> __global__ void __launch_bounds__(THREADS, 1) scan_columns(const scan_job j, const R r) {
  typedef typename R::S S;
  TY_SHARED(S, room, THREADS);
  const int width = THREADS / j.team, column = static_cast<int>(threadIdx.x) % width;
  const int own = static_cast<int>(threadIdx.x) / width;
  for (int64_t first = int64_t{ blockIdx.x } * width; first < j.lines; first += int64_t{ gridDim.x } * width) {
    const int64_t line = first + column, base = start_of(j, line);
    S carry = R::none();
    for (int64_t at = 0; at < j.size; at += static_cast<int64_t>(j.team) * EACH) {
      const int64_t t = at + own * EACH, end = line < j.lines ? j.size : 0;
      typename R::element e[EACH];
      r.load(j, base, t, end, e);
      S before = carry;
      room[threadIdx.x] = state_of<R>(e, t, end);
      __syncthreads();
      for (int k = 0; k < j.team; k++) {
        if (k == own) before = carry;
        carry = R::join(carry, room[k * width + column]);
      }
      __syncthreads();
      scan_own(j, r, base, t, end, before, e);
    }
  }
}

/* ---- entries ---- */

template <class R> static bool run(scan_job j, const R &r) {
  typedef typename R::S S;
  const S *no_carries = nullptr;
  S *no_totals = nullptr;
  if (j.inner > 1 && j.lines >= TY_WARP) {
    j.team = ty_power_of_two((j.size + EACH - 1) / EACH, THREADS / TY_WARP);
    return TY_LAUNCH((scan_columns<R>), ty_cuda_blocks(j.lines, THREADS / j.team), THREADS, 0, j, r);
  }
  const int64_t step = THREADS * EACH, fill = int64_t{ ty_cuda_processors() } * 4;
  j.chunks = 1;
  j.chunk = (j.size + step - 1) / step * step;
  j.team = j.size <= step && j.lines > 1 ? int{ TY_WARP } : int{ THREADS };
  if (j.lines * 2 > fill || j.size <= LONG)
    return TY_LAUNCH((scan_lines<R>), ty_cuda_blocks(j.lines, THREADS / j.team), THREADS, 0, j, r, no_carries,
                     no_totals);
  j.chunks = (j.size + step - 1) / step;
  if (j.chunks > fill / j.lines) j.chunks = fill / j.lines;
  j.chunk = ((j.size + j.chunks - 1) / j.chunks + step - 1) / step * step;
  j.chunks = (j.size + j.chunk - 1) / j.chunk;
  const int64_t units = j.lines * j.chunks, chunks = j.chunks;
  ty_cuda_scratch scratch(static_cast<size_t>(units) * sizeof(S));
  if (!scratch.data) return false;
  S *totals = scratch.as<S>();
  const S *carries = totals;
  unsigned grid = ty_cuda_blocks(units, 1);
  return TY_LAUNCH((scan_lines<R>), grid, THREADS, 0, j, r, no_carries, totals) &&
         TY_LAUNCH((scan_totals<R>), static_cast<unsigned>(j.lines), TY_WARP, 0, totals, chunks) &&
         TY_LAUNCH((scan_lines<R>), grid, THREADS, 0, j, r, carries, no_totals);
}

static scan_job job_of(const ty_kernel_args *k, bool reverse) {
  const ty_view *out = k->out[0];
  ty_lines l = ty_lines_of(out, static_cast<const ty_p_dim *>(k->params)->dim);
  scan_job j = {};
  j.size = l.size;
  j.lines = l.outer * l.inner;
  j.inner = l.inner;
  j.reverse = reverse;
  j.vectors = l.inner == 1 && l.size * ty_dtype_size[out->dtype] % 16 == 0;
  for (int i = 0; i < k->nin; i++) j.vectors = j.vectors && ty_aligned(k->in[i]->data);
  for (int i = 0; i < k->nout; i++) j.vectors = j.vectors && ty_aligned(k->out[i]->data);
  return j;
}
static bool flag_of(const ty_kernel_args *k) { return static_cast<const ty_p_dim *>(k->params)->flag; }

template <class R, class T> static R with_data(const ty_kernel_args *k) {
  R r;
  r.x = static_cast<const T *>(k->in[0]->data);
  r.y = static_cast<T *>(k->out[0]->data);
  return r;
}

/* in: x; dim, flag: from the end. Integers are i64. */
TY_CUDA_KERNEL(cumsum) {
  if (k->out[0]->count == 0) return true;
  scan_job j = job_of(k, flag_of(k));
  if (k->in[0]->dtype == TY_I64) return run(j, with_data<running_sum<int64_t>, int64_t>(k));
  return ty_for_floats(k->in[0]->dtype, "cumsum", [&](auto x) {
    typedef decltype(x) T;
    return run(j, with_data<running_sum<T>, T>(k));
  });
}

TY_CUDA_KERNEL(cumprod) {
  if (k->out[0]->count == 0) return true;
  scan_job j = job_of(k, false);
  if (k->in[0]->dtype == TY_I64) return run(j, with_data<running_integer_product<int64_t>, int64_t>(k));
  return ty_for_floats(k->in[0]->dtype, "cumprod", [&](auto x) {
    typedef decltype(x) T;
    return run(j, with_data<running_product<T>, T>(k));
  });
}

/* in: a, b; dim, flag: from the end. */
TY_CUDA_KERNEL(linear_scan) {
  if (k->out[0]->count == 0) return true;
  scan_job j = job_of(k, flag_of(k));
  return ty_for_floats(k->out[0]->dtype, "linear_scan", [&](auto x) {
    typedef decltype(x) T;
    recurrence<T> r;
    r.a = static_cast<const T *>(k->in[0]->data);
    r.b = static_cast<const T *>(k->in[1]->data);
    r.h = static_cast<T *>(k->out[0]->data);
    return run(j, r);
  });
}

/* in: g, a, h; out: the gradients of a and b; dim, flag as in the forward. */
TY_CUDA_KERNEL(linear_scan_backward) {
  if (k->out[0]->count == 0) return true;
  scan_job j = job_of(k, !flag_of(k));
  return ty_for_floats(k->out[0]->dtype, "linear_scan_backward", [&](auto x) {
    typedef decltype(x) T;
    recurrence_backward<T> r;
    r.b = static_cast<const T *>(k->in[0]->data);
    r.a = static_cast<const T *>(k->in[1]->data);
    r.y = static_cast<const T *>(k->in[2]->data);
    r.da = static_cast<T *>(k->out[0]->data);
    r.h = static_cast<T *>(k->out[1]->data);
    return run(j, r);
  });
}
