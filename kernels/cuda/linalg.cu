/* Factorizations, by cuSOLVER; triangular systems by a kernel of our own. A matrix of ours is the transpose of one of the
 * library's. Signs that are free are chosen as on the CPU (kernels/cpu/linalg/linalg.c), and what cannot be done with a matrix
 * is raised when the GPU is waited for. */
#include "solver.cuh"
#include "teams.cuh"

extern "C" ty_kernel ty_cuda_copy;

enum { THREADS = 256 };

/* ---- what the entries share ---- */

struct matrices {
  int m, n;
  int64_t count;
};

static bool matrices_of(const ty_view *x, matrices *s) {
  const int64_t m = x->size[x->ndim - 2], n = x->size[x->ndim - 1];
  if (m > INT32_MAX / 64 || n > INT32_MAX / 64)
    return ty_fail(TY_EINVAL, "matrices have at most %d rows and columns", INT32_MAX / 64);
  *s = { static_cast<int>(m), static_cast<int>(n), 1 };
  for (int d = 0; d < x->ndim - 2; d++) s->count *= x->size[d];
  return true;
}

/* to = from [count, m, n], contiguous, as it is or with each matrix turned. */
template <class T> static bool put(T *to, const T *from, const matrices &s, bool turn) {
  ty_view in = {}, out = {};
  in.dtype = out.dtype = sizeof(T) == 8 ? TY_F64 : TY_F32;
  in.ndim = out.ndim = 3;
  in.data = const_cast<T *>(from);
  out.data = to;
  in.count = out.count = s.count * s.m * s.n;
  in.size[0] = out.size[0] = s.count;
  in.size[1] = out.size[1] = turn ? s.n : s.m;
  in.size[2] = out.size[2] = turn ? s.m : s.n;
  in.stride[0] = out.stride[0] = int64_t{ s.m } * s.n;
  in.stride[1] = turn ? 1 : s.n;
  in.stride[2] = turn ? s.n : 1;
  out.stride[1] = out.size[2];
  out.stride[2] = 1;
  in.contiguous = !turn;
  out.contiguous = true;
  const ty_view *o = &out, *i = &in;
  ty_kernel_args args = { 1, 1, &o, &i, nullptr, nullptr };
  return ty_cuda_copy(&args);
}

__global__ void look(const int *info, int64_t count, ty_cuda_kind kind, const ty_cuda_watch watch) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS)
    if (info[i] != 0) ty_report(watch, kind, i, info[i]);
}
static bool report(const int *info, int64_t count, ty_cuda_kind kind) {
  const ty_cuda_watch watch = ty_cuda_watched();
  return TY_LAUNCH(look, ty_cuda_blocks(count, THREADS), THREADS, 0, info, count, kind, watch);
}

/* Reports the matrices, of `each` elements, that hold what is not finite; iterations would not end with them. */
template <class T> __global__ void look_finite(const T *x, int64_t count, int64_t each, const ty_cuda_watch watch) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS)
    if (!(x[i] - x[i] == 0)) ty_report(watch, TY_NOT_FINITE, i / each, 0);
}
template <class T> static bool check_finite(const T *x, const matrices &s) {
  const int64_t each = int64_t{ s.m } * s.n, count = s.count * each;
  const ty_cuda_watch watch = ty_cuda_watched();
  return TY_LAUNCH((look_finite<T>), ty_cuda_blocks(count, THREADS), THREADS, 0, x, count, each, watch);
}

/* fn(T{}) for f32 and f64, with cuSOLVER. */
template <class Fn> static bool with_solver(const ty_kernel_args *k, const char *op, Fn fn) {
  const solver s;
  return s.handle && ty_for_reals(k->in[0]->dtype, op, [&](auto x) { return fn(s, x); });
}

/* ---- cholesky ---- */

/* Of x or, `averaged`, of (x + x') / 2. */
template <class T> __global__ void lower_of(const T *x, T *y, int64_t n, bool averaged, int64_t count) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) {
    const int64_t row = i / n % n, column = i % n, mirrored = i + (column - row) * (n - 1);
    y[i] = column > row ? T(0) : averaged ? (x[i] + x[mirrored]) * T(0.5) : x[i];
  }
}

TY_CUDA_KERNEL(cholesky_factor) {
  const bool averaged = static_cast<const ty_p_dim *>(k->params)->flag;
  matrices s = {};
  if (k->in[0]->count == 0) return true;
  if (!matrices_of(k->in[0], &s)) return false;
  return with_solver(k, "cholesky_factor", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    const auto &f = library.of<T>();
    const T *x = static_cast<const T *>(k->in[0]->data);
    T *y = static_cast<T *>(k->out[0]->data);
    const int64_t n = s.n, each = n * n, count = s.count * each;
    int lwork = 0;
    if (!library.ok(f.potrf_bufferSize(library.handle, SOLVER_UPPER, s.n, y, s.n, &lwork), "potrf")) return false;
    ty_cuda_scratch work(sizeof(T) * static_cast<size_t>(lwork)), info(sizeof(int) * static_cast<size_t>(s.count));
    if (!work.data || !info.data) return false;
    if (!TY_LAUNCH((lower_of<T>), ty_cuda_blocks(count, THREADS), THREADS, 0, x, y, n, averaged, count)) return false;
    for (int64_t i = 0; i < s.count; i++)
      if (!library.ok(
              f.potrf(library.handle, SOLVER_UPPER, s.n, y + i * each, s.n, work.as<T>(), lwork, info.as<int>() + i),
              "potrf"))
        return false;
    return report(info.as<int>(), s.count, TY_NOT_POSITIVE);
  });
}

/* ---- triangular systems ----
 * A block has a matrix and some columns of its right-hand side, a column for each thread. Rows are solved in panels: what
 * those before the panel give comes first, PANEL rows of x at a time against a tile of a in shared memory. */

enum { PANEL = 16, COLUMNS = 64 };

struct triangle_job {
  int64_t n, m, blocks; /* blocks of columns */
  bool upper, unit;
  TY_DEVICE_MEMBER int64_t row(int64_t i) const { return upper ? n - 1 - i : i; } /* the i-th to be solved */
};

template <class T>
__global__ void __launch_bounds__(COLUMNS) solve_panels(const triangle_job j, const T *as, const T *bs, T *xs) {
  TY_SHARED(T, tile, PANEL * PANEL);
  const int64_t which = blockIdx.x / j.blocks, column = blockIdx.x % j.blocks * COLUMNS + threadIdx.x;
  const T *a = as + which * j.n * j.n;
  const bool mine = column < j.m;
  const int64_t base = which * j.n * j.m + (mine ? column : 0);
  for (int64_t first = 0; first < j.n; first += PANEL) {
    T sum[PANEL];
#pragma unroll
    for (int r = 0; r < PANEL; r++) sum[r] = mine && first + r < j.n ? bs[base + j.row(first + r) * j.m] : T(0);
    for (int64_t before = 0; before <= first; before += PANEL) {
      for (int e = threadIdx.x; e < PANEL * PANEL; e += COLUMNS) {
        const int64_t r = first + e / PANEL, c = before + e % PANEL;
        tile[e] = r < j.n && c < j.n ? a[j.row(r) * j.n + j.row(c)] : T(0);
      }
      __syncthreads();
      if (before < first) {
        for (int c = 0; c < PANEL; c++) {
          const T x = mine ? xs[base + j.row(before + c) * j.m] : T(0);
#pragma unroll
          for (int r = 0; r < PANEL; r++) sum[r] -= tile[r * PANEL + c] * x;
        }
      } else {
#pragma unroll
        for (int r = 0; r < PANEL; r++) {
          if (first + r >= j.n) continue;
          if (!j.unit) sum[r] /= tile[r * PANEL + r];
#pragma unroll
          for (int below = r + 1; below < PANEL; below++) sum[below] -= tile[below * PANEL + r] * sum[r];
          if (mine) xs[base + j.row(first + r) * j.m] = sum[r];
        }
      }
      __syncthreads();
    }
  }
}

TY_CUDA_KERNEL(triangular_solve) {
  const ty_p_triangular &p = *static_cast<const ty_p_triangular *>(k->params);
  matrices s = {};
  if (k->in[1]->count == 0) return true;
  if (!matrices_of(k->in[1], &s)) return false;
  const triangle_job j = { s.m, s.n, (s.n + COLUMNS - 1) / COLUMNS, p.upper, p.unit };
  return ty_for_reals(k->in[0]->dtype, "triangular_solve", [&](auto type) {
    typedef decltype(type) T;
    const T *a = static_cast<const T *>(k->in[0]->data), *b = static_cast<const T *>(k->in[1]->data);
    T *x = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH((solve_panels<T>), static_cast<unsigned>(s.count * j.blocks), COLUMNS, 0, j, a, b, x);
  });
}

/* ---- LU ---- */

/* A thread for each matrix. pivots: `least` of every n, which count from 1. */
__global__ void rows_of_swaps(const int *pivots, int64_t *rows, int64_t count, int m, int n, int least) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) {
    int64_t *const order = rows + i * m;
    for (int r = 0; r < m; r++) order[r] = r;
    for (int r = 0; r < least; r++) {
      const int other = pivots[i * n + r] - 1;
      const int64_t row = order[r];
      order[r] = order[other];
      order[other] = row;
    }
  }
}

/* A copy of matrices [m, n] that LU replaces. */
template <class T> struct lu_of {
  lu_of(const matrices &shape)
      : s(shape), each(int64_t{ s.m } * s.n), lu(sizeof(T) * static_cast<size_t>(s.count * each)),
        pivots(sizeof(int) * static_cast<size_t>(s.count * s.n)), info(sizeof(int) * static_cast<size_t>(s.count)) {}
  /* Of a; or, square and not turned for the library's columns, of the transpose. */
  bool factorize(const solver &library, const T *a, bool turn) {
    const auto &f = library.of<T>();
    int lwork = 0;
    if (!lu.data || !pivots.data || !info.data || !put(lu.template as<T>(), a, s, turn) ||
        !library.ok(f.getrf_bufferSize(library.handle, s.m, s.n, lu.template as<T>(), s.m, &lwork), "getrf"))
      return false;
    ty_cuda_scratch work(sizeof(T) * static_cast<size_t>(lwork));
    if (!work.data) return false;
    for (int64_t i = 0; i < s.count; i++)
      if (!library.ok(f.getrf(library.handle, s.m, s.n, matrix(i), s.m, work.template as<T>(), pivot(i),
                              info.template as<int>() + i),
                      "getrf"))
        return false;
    return true;
  }
  /* The factors by rows, and the row of a that each of their rows is. */
  bool give(T *to, int64_t *rows) const {
    const int least = s.m < s.n ? s.m : s.n, m = s.m, n = s.n;
    const int64_t count = s.count;
    const int *const swaps = pivots.template as<int>();
    return put(to, lu.template as<T>(), { s.n, s.m, s.count }, true) &&
           TY_LAUNCH(rows_of_swaps, ty_cuda_blocks(count, THREADS), THREADS, 0, swaps, rows, count, m, n, least);
  }
  T *matrix(int64_t i) const { return lu.template as<T>() + i * each; }
  int *pivot(int64_t i) const { return pivots.template as<int>() + i * s.n; }
  const matrices s;
  const int64_t each;
  const ty_cuda_scratch lu, pivots, info;
};

__global__ void rows_in_order(int64_t *rows, int64_t count, int64_t m) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) rows[i] = i % m;
}

TY_CUDA_KERNEL(lu_factor) {
  matrices s = {};
  if (k->out[1]->count == 0) return true;
  if (!matrices_of(k->in[0], &s)) return false;
  int64_t *const rows = static_cast<int64_t *>(k->out[1]->data);
  if (s.n == 0) {
    const int64_t count = k->out[1]->count, m = s.m;
    return TY_LAUNCH(rows_in_order, ty_cuda_blocks(count, THREADS), THREADS, 0, rows, count, m);
  }
  return with_solver(k, "lu_factor", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    lu_of<T> lu(s);
    return lu.factorize(library, static_cast<const T *>(k->in[0]->data), true) &&
           lu.give(static_cast<T *>(k->out[0]->data), rows);
  });
}

TY_CUDA_KERNEL(lu_system) {
  matrices square = {}, right = {};
  if (k->in[0]->count == 0) return true;
  if (!matrices_of(k->in[0], &square) || !matrices_of(k->in[1], &right)) return false;
  return with_solver(k, "lu_system", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    const auto &f = library.of<T>();
    lu_of<T> lu(square);
    const int64_t each = int64_t{ right.m } * right.n;
    if (!lu.factorize(library, static_cast<const T *>(k->in[0]->data), true) ||
        !report(lu.info.template as<int>(), square.count, TY_SINGULAR) ||
        !lu.give(static_cast<T *>(k->out[1]->data), static_cast<int64_t *>(k->out[2]->data)))
      return false;
    if (right.n == 0) return true;
    ty_cuda_scratch columns(sizeof(T) * static_cast<size_t>(right.count * each)), info(sizeof(int));
    T *b = columns.as<T>();
    if (!b || !info.data || !put(b, static_cast<const T *>(k->in[1]->data), right, true)) return false;
    for (int64_t i = 0; i < right.count; i++)
      if (!library.ok(f.getrs(library.handle, SOLVER_AS_IT_IS, square.n, right.n, lu.matrix(i), square.n, lu.pivot(i),
                              b + i * each, square.n, info.as<int>()),
                      "getrs"))
        return false;
    return put(static_cast<T *>(k->out[0]->data), b, { right.n, right.m, right.count }, true);
  });
}

/* A warp for each matrix. */
template <class T>
__global__ void __launch_bounds__(TY_WARP) diagonals(const T *lu, const int *pivots, int64_t n, T *signs, T *logs) {
  const T *a = lu + blockIdx.x * n * n;
  const int *pivot = pivots + blockIdx.x * n;
  double sum = 0;
  int turns = 0, zeros = 0;
  for (int64_t i = threadIdx.x; i < n; i += TY_WARP) {
    const double d = static_cast<double>(a[i * n + i]);
    turns += (d < 0) != (pivot[i] != i + 1);
    zeros += d == 0;
    sum += log(d < 0 ? -d : d);
  }
  sum = ty_warp_reduce(sum, ty_plus<double>{});
  turns = ty_warp_reduce(turns, ty_plus<int>{});
  zeros = ty_warp_reduce(zeros, ty_plus<int>{});
  if (threadIdx.x == 0) {
    signs[blockIdx.x] = zeros ? T(0) : turns % 2 ? T(-1) : T(1);
    logs[blockIdx.x] = static_cast<T>(sum);
  }
}

template <class T> __global__ void of_nothing(T *signs, T *logs, int64_t count) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS)
    signs[i] = 1, logs[i] = 0;
}

TY_CUDA_KERNEL(slogdet) {
  matrices s = {};
  if (k->out[0]->count == 0) return true;
  if (!matrices_of(k->in[0], &s)) return false;
  if (s.n == 0)
    return ty_for_reals(k->in[0]->dtype, "slogdet", [&](auto type) {
      typedef decltype(type) T;
      T *signs = static_cast<T *>(k->out[0]->data), *logs = static_cast<T *>(k->out[1]->data);
      const int64_t count = s.count;
      return TY_LAUNCH((of_nothing<T>), ty_cuda_blocks(count, THREADS), THREADS, 0, signs, logs, count);
    });
  return with_solver(k, "slogdet", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    lu_of<T> lu(s);
    const int64_t n = s.n;
    const T *factors = lu.matrix(0);
    const int *pivots = lu.pivot(0);
    T *signs = static_cast<T *>(k->out[0]->data), *logs = static_cast<T *>(k->out[1]->data);
    return lu.factorize(library, static_cast<const T *>(k->in[0]->data), false) &&
           TY_LAUNCH((diagonals<T>), static_cast<unsigned>(s.count), TY_WARP, 0, factors, pivots, n, signs, logs);
  });
}

/* ---- qr ---- */

/* r [rows, n], without negative diagonal, from what geqrf leaves: columns of m. The signs of its first `least` rows. */
template <class T> __global__ void take_r(const T *a, T *r, T *signs, int m, int n, int rows, int least) {
  for (int64_t e = blockIdx.x * THREADS + threadIdx.x; e < int64_t{ rows } * n; e += int64_t{ gridDim.x } * THREADS) {
    const int64_t i = e / n, c = e % n;
    const T sign = i < least && a[i * m + i] < 0 ? T(-1) : T(1);
    r[e] = c >= i ? sign * a[c * m + i] : T(0);
    if (c == i) signs[i] = sign;
  }
}
template <class T> __global__ void take_q(const T *a, T *q, const T *signs, int m, int columns, int least) {
  for (int64_t e = blockIdx.x * THREADS + threadIdx.x; e < int64_t{ m } * columns;
       e += int64_t{ gridDim.x } * THREADS) {
    const int64_t c = e % columns;
    q[e] = (c < least ? signs[c] : T(1)) * a[c * m + e / columns];
  }
}
template <class T> __global__ void unit_columns(T *q, int64_t m, int64_t count) {
  for (int64_t e = blockIdx.x * THREADS + threadIdx.x; e < count; e += int64_t{ gridDim.x } * THREADS)
    q[e] = e / m % m == e % m ? T(1) : T(0);
}

TY_CUDA_KERNEL(qr) {
  matrices s = {};
  const ty_view *const outs[] = { k->out[0], k->out[1] };
  if (outs[0]->count == 0 && outs[1]->count == 0) return true;
  if (!matrices_of(k->in[0], &s)) return false;
  const int columns = static_cast<int>(outs[0]->size[outs[0]->ndim - 1]);
  const int rows = static_cast<int>(outs[1]->size[outs[1]->ndim - 2]);
  if (s.n == 0)
    return ty_for_reals(k->in[0]->dtype, "qr", [&](auto type) {
      typedef decltype(type) T;
      T *const q = static_cast<T *>(outs[0]->data);
      const int64_t m = s.m, count = outs[0]->count;
      return TY_LAUNCH((unit_columns<T>), ty_cuda_blocks(count, THREADS), THREADS, 0, q, m, count);
    });
  return with_solver(k, "qr", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    const auto &f = library.of<T>();
    const int m = s.m, n = s.n, least = m < n ? m : n, widest = n > columns ? n : columns;
    const int64_t each = int64_t{ m } * n;
    /* x of all, and of one what geqrf leaves, with room for the columns of a complete q */
    ty_cuda_scratch whole(sizeof(T) * static_cast<size_t>(s.count * each)),
        wide(sizeof(T) * static_cast<size_t>(m) * static_cast<size_t>(widest)),
        tau(sizeof(T) * static_cast<size_t>(least + rows));
    ty_cuda_scratch info(sizeof(int));
    T *const signs = tau.as<T>() + least;
    int first = 0, second = 0;
    if (!whole.data || !wide.data || !tau.data || !info.data ||
        !put(whole.as<T>(), static_cast<const T *>(k->in[0]->data), s, true) ||
        !library.ok(f.geqrf_bufferSize(library.handle, m, n, whole.as<T>(), m, &first), "geqrf") ||
        (columns &&
         !library.ok(f.orgqr_bufferSize(library.handle, m, columns, least, wide.as<T>(), m, tau.as<T>(), &second),
                     "orgqr")))
      return false;
    const int lwork = first > second ? first : second;
    ty_cuda_scratch work(sizeof(T) * static_cast<size_t>(lwork));
    if (!work.data) return false;
    for (int64_t i = 0; i < s.count; i++) {
      T *const x = whole.as<T>() + i * each, *const a = columns > n ? wide.as<T>() : x;
      T *const q = static_cast<T *>(outs[0]->data) + i * m * columns, *const r = static_cast<T *>(outs[1]->data) +
                                                                                 i * rows * n;
      if (!library.ok(f.geqrf(library.handle, m, n, x, m, tau.as<T>(), work.as<T>(), lwork, info.as<int>()), "geqrf") ||
          !TY_LAUNCH((take_r<T>), ty_cuda_blocks(int64_t{ rows } * n, THREADS), THREADS, 0, x, r, signs, m, n, rows,
                     least))
        return false;
      if (columns == 0) continue;
      if (a != x && !put(a, x, { n, m, 1 }, false)) return false;
      if (!library.ok(
              f.orgqr(library.handle, m, columns, least, a, m, tau.as<T>(), work.as<T>(), lwork, info.as<int>()),
              "orgqr") ||
          !TY_LAUNCH((take_q<T>), ty_cuda_blocks(int64_t{ m } * columns, THREADS), THREADS, 0, a, q, signs, m, columns,
                     least))
        return false;
    }
    return true;
  });
}

/* ---- svd and eigh ---- */

/* Where a factor lies: element (row, vector) at row * row_step + vector * vector_step. */
template <class T> struct factor {
  const T *data;
  int64_t rows, row_step, vector_step;
};

/* A block for each vector: to [rows, vectors] = the first factor, other [vectors, rows] = the second (data NULL: none),
 * with the sign that makes the largest element of the first positive. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    take_vectors(const factor<T> first, const factor<T> second, T *to, T *other) {
  TY_SHARED(double, most, THREADS);
  TY_SHARED(int, negative, THREADS);
  const int64_t v = blockIdx.x, vectors = gridDim.x;
  const int id = static_cast<int>(threadIdx.x);
  double largest = -1;
  int sign = 0;
  for (int64_t i = id; i < first.rows; i += THREADS) {
    const double x = static_cast<double>(first.data[i * first.row_step + v * first.vector_step]);
    if ((x < 0 ? -x : x) > largest) largest = x < 0 ? -x : x, sign = x < 0;
  }
  most[id] = largest;
  negative[id] = sign;
  __syncthreads();
  int best = 0;
  for (int t = 1; t < THREADS; t++)
    if (most[t] > most[best]) best = t;
  const T s = negative[best] ? T(-1) : T(1);
  for (int64_t i = id; i < first.rows; i += THREADS)
    to[i * vectors + v] = s * first.data[i * first.row_step + v * first.vector_step];
  if (!second.data) return;
  for (int64_t i = id; i < second.rows; i += THREADS)
    other[v * second.rows + i] = s * second.data[i * second.row_step + v * second.vector_step];
}

TY_CUDA_KERNEL(svd) {
  matrices s = {};
  if (k->in[0]->count == 0) return true;
  if (!matrices_of(k->in[0], &s)) return false;
  return with_solver(k, "svd", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    const auto &f = library.of<T>();
    /* The library's matrix has no more columns than rows: x itself, turned by a copy, or x' as it lies there. */
    const bool tall = s.m >= s.n;
    const int rows = tall ? s.m : s.n, least = tall ? s.n : s.m;
    const int64_t each = int64_t{ s.m } * s.n;
    const T *x = static_cast<const T *>(k->in[0]->data);
    int lwork = 0;
    if (!library.ok(f.gesvd_bufferSize(library.handle, rows, least, &lwork), "gesvd")) return false;
    const size_t square = static_cast<size_t>(least) * static_cast<size_t>(least);
    ty_cuda_scratch whole(sizeof(T) * static_cast<size_t>(s.count * each)), left(sizeof(T) * static_cast<size_t>(each));
    ty_cuda_scratch right(sizeof(T) * square), work(sizeof(T) * static_cast<size_t>(lwork));
    ty_cuda_scratch rest(sizeof(T) * static_cast<size_t>(least)), info(sizeof(int) * static_cast<size_t>(s.count));
    if (!whole.data || !left.data || !right.data || !work.data || !rest.data || !info.data || !check_finite(x, s) ||
        !put(whole.as<T>(), x, s, tall))
      return false;
    const factor<T> u = { left.as<T>(), rows, 1, rows }, v = { right.as<T>(), least, least, 1 };
    const factor<T> first = tall ? u : v, second = tall ? v : u;
    for (int64_t i = 0; i < s.count; i++) {
      T *us = static_cast<T *>(k->out[0]->data) + i * s.m * least,
        *vh = static_cast<T *>(k->out[2]->data) + i * s.n * least;
      if (!library.ok(f.gesvd(library.handle, 'S', 'S', rows, least, whole.as<T>() + i * each, rows,
                              static_cast<T *>(k->out[1]->data) + i * least, left.as<T>(), rows, right.as<T>(), least,
                              work.as<T>(), lwork, rest.as<T>(), info.as<int>() + i),
                      "gesvd") ||
          !TY_LAUNCH((take_vectors<T>), static_cast<unsigned>(least), THREADS, 0, first, second, us, vh))
        return false;
    }
    return report(info.as<int>(), s.count, TY_NOT_CONVERGED);
  });
}

TY_CUDA_KERNEL(eigh_symmetric) {
  matrices s = {};
  if (k->in[0]->count == 0) return true;
  if (!matrices_of(k->in[0], &s)) return false;
  return with_solver(k, "eigh_symmetric", [&](const solver &library, auto type) {
    typedef decltype(type) T;
    const auto &f = library.of<T>();
    const int n = s.n;
    const int64_t each = int64_t{ n } * n;
    const T *x = static_cast<const T *>(k->in[0]->data);
    T *values = static_cast<T *>(k->out[0]->data), *vectors = static_cast<T *>(k->out[1]->data);
    int lwork = 0;
    if (!library.ok(f.syevd_bufferSize(library.handle, SOLVER_VECTORS, SOLVER_UPPER, n, x, n, values, &lwork), "syevd"))
      return false;
    ty_cuda_scratch whole(sizeof(T) * static_cast<size_t>(s.count * each)),
        work(sizeof(T) * static_cast<size_t>(lwork));
    ty_cuda_scratch info(sizeof(int) * static_cast<size_t>(s.count));
    if (!whole.data || !work.data || !info.data || !check_finite(x, s) || !put(whole.as<T>(), x, s, false))
      return false;
    const factor<T> none = {};
    for (int64_t i = 0; i < s.count; i++) {
      T *const a = whole.as<T>() + i * each, *to = vectors + i * each;
      const factor<T> found = { a, n, 1, n };
      if (!library.ok(f.syevd(library.handle, SOLVER_VECTORS, SOLVER_UPPER, n, a, n, values + i * n, work.as<T>(),
                              lwork, info.as<int>() + i),
                      "syevd") ||
          !TY_LAUNCH((take_vectors<T>), static_cast<unsigned>(n), THREADS, 0, found, none, to, to))
        return false;
    }
    return report(info.as<int>(), s.count, TY_NOT_CONVERGED);
  });
}
