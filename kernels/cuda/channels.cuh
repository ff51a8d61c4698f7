/* Two sums for each row of a tensor whose rows may lie in pieces (the channels of a batch): in parts by many blocks,
 * each in a fixed order, then the parts in order. */
#ifndef TY_KERNELS_CUDA_CHANNELS_CUH
#define TY_KERNELS_CUDA_CHANNELS_CUH

#include "elementwise.cuh"

enum { CH_THREADS = 256, CH_TILE = 32, CH_DEEP = CH_THREADS / CH_TILE, CH_SHORT = 1024 };

/* x / n for 0 <= x < limit. */
struct ch_divisor {
  int64_t n;
  ew_divisor fast;
  bool small;
  ch_divisor(int64_t divisor, int64_t limit) : n(divisor), small(limit < int64_t{ 1 } << 31 && divisor <= limit) {
    fast.set(small && n > 0 ? static_cast<uint32_t>(n) : 1);
  }
};
TY_DEVICE int64_t ch_divide(int64_t x, const ch_divisor &d) {
  return d.small ? static_cast<int64_t>(ew_divide(static_cast<uint32_t>(x), d.fast)) : x / d.n;
}

/* Element e of row r lies at r * row_step + e / run * jump + e % run; a row is summed in `parts` parts. */
struct ch_rows {
  int64_t rows, width, run, jump, row_step, parts;
  ch_divisor by_run;
  ch_rows(int64_t rows_, int64_t width_, int64_t run_, int64_t jump_, int64_t row_step_)
      : rows(rows_), width(width_), run(run_), jump(jump_), row_step(row_step_), by_run(run_, width_) {
    const int64_t busy = int64_t{ ty_cuda_processors() } * 8, blocks = turned() ? (rows + CH_TILE - 1) / CH_TILE : rows;
    const int64_t wanted = (busy + blocks - 1) / (blocks ? blocks : 1), most = (width + 4095) / 4096;
    parts = wanted < most ? wanted : most;
    if (parts < 1) parts = 1;
  }
  /* Neighbours are of different rows: a block takes 32 of them. */
  bool turned() const { return run == 1 && jump != 1; }
};
TY_DEVICE int64_t ch_place(const ch_rows &c, int64_t row, int64_t e) {
  if (c.run == c.width) return row * c.row_step + e;
  const int64_t piece = ch_divide(e, c.by_run);
  return row * c.row_step + piece * c.jump + (e - piece * c.run);
}

struct ch_sums {
  double a, b;
};

/* f.begin(row, place of its first element) gives what add<V>(place, sum a, sum b) of that row is called on. */
template <int V, bool BLOCK, class F>
__global__ void __launch_bounds__(CH_THREADS, 1) ch_sum_rows(ch_sums *to, const ch_rows c, const F f) {
  TY_SHARED(double, room, TY_WARP);
  const int team = BLOCK ? int{ CH_THREADS } : int{ TY_WARP }, lane = threadIdx.x % team, teams = CH_THREADS / team;
  const int64_t units = c.rows * c.parts, part_width = (c.width / V + c.parts - 1) / c.parts * V;
  for (int64_t unit = int64_t{ blockIdx.x } * teams + threadIdx.x / team; unit < units;
       unit += int64_t{ gridDim.x } * teams) {
    const int64_t row = unit / c.parts, begin = (unit - row * c.parts) * part_width;
    const int64_t end = begin + part_width < c.width ? begin + part_width : c.width;
    const auto of_row = f.begin(row, row * c.row_step);
    double a = 0, b = 0;
    for (int64_t e = begin + lane * V; e < end; e += team * V) of_row.template add<V>(ch_place(c, row, e), a, b);
    if constexpr (BLOCK) {
      a = ty_block_reduce(a, ty_plus<double>{}, room);
      b = ty_block_reduce(b, ty_plus<double>{}, room);
    } else {
      a = ty_warp_reduce(a, ty_plus<double>{});
      b = ty_warp_reduce(b, ty_plus<double>{});
    }
    if (lane == 0) to[unit] = ch_sums{ a, b };
  }
}

template <class F>
__global__ void __launch_bounds__(CH_THREADS) ch_sum_columns(ch_sums *to, const ch_rows c, const F f) {
  TY_SHARED(double, room, 2 * CH_THREADS);
  const int64_t row = int64_t{ blockIdx.x } * CH_TILE + threadIdx.x, part_width = (c.width + c.parts - 1) / c.parts;
  const int64_t begin = blockIdx.y * part_width, end = begin + part_width < c.width ? begin + part_width : c.width;
  double a = 0, b = 0;
  if (row < c.rows) {
    const auto of_row = f.begin(row, row * c.row_step);
    for (int64_t e = begin + threadIdx.y; e < end; e += CH_DEEP)
      of_row.template add<1>(row * c.row_step + e * c.jump, a, b);
  }
  const int at = threadIdx.y * CH_TILE + threadIdx.x;
  room[at] = a, room[CH_THREADS + at] = b;
  __syncthreads();
  if (threadIdx.y || row >= c.rows) return;
  for (int y = 1; y < CH_DEEP; y++) {
    a += room[y * CH_TILE + threadIdx.x];
    b += room[CH_THREADS + y * CH_TILE + threadIdx.x];
  }
  to[row * c.parts + blockIdx.y] = ch_sums{ a, b };
}

/* sums[rows][parts]. V: how many neighbours can be moved at once, where rows are whole packs. */
template <int V, class F> static bool ch_sum(ch_sums *to, const ch_rows &c, const F &f, bool packs) {
  if (c.turned()) {
    const dim3 grid(static_cast<unsigned>((c.rows + CH_TILE - 1) / CH_TILE), static_cast<unsigned>(c.parts)),
        block(CH_TILE, CH_DEEP);
    return TY_LAUNCH(ch_sum_columns<F>, grid, block, 0, to, c, f);
  }
  packs = packs && c.run % V == 0;
  const bool wide = c.width > CH_SHORT;
  const unsigned blocks = ty_cuda_blocks(c.rows * c.parts, wide ? 1 : CH_THREADS / TY_WARP, 16);
  if (packs && wide) return TY_LAUNCH((ch_sum_rows<V, true, F>), blocks, CH_THREADS, 0, to, c, f);
  if (packs) return TY_LAUNCH((ch_sum_rows<V, false, F>), blocks, CH_THREADS, 0, to, c, f);
  if (wide) return TY_LAUNCH((ch_sum_rows<1, true, F>), blocks, CH_THREADS, 0, to, c, f);
  return TY_LAUNCH((ch_sum_rows<1, false, F>), blocks, CH_THREADS, 0, to, c, f);
}

/* fn<V>(place, segment) for all elements: segments are the runs of `spatial` neighbours. */
struct ch_map {
  int64_t count;
  ch_divisor by_spatial;
  ch_map(int64_t count_, int64_t spatial) : count(count_), by_spatial(spatial, count_) {}
};
template <int V, class F> __global__ void __launch_bounds__(CH_THREADS) ch_apply(const ch_map m, const F f) {
  const int64_t step = int64_t{ gridDim.x } * CH_THREADS * V;
  for (int64_t i = (int64_t{ blockIdx.x } * CH_THREADS + threadIdx.x) * V; i < m.count; i += step)
    f.template put<V>(i, ch_divide(i, m.by_spatial));
}
template <int V, class F> static bool ch_run(int64_t count, int64_t spatial, const F &f, bool packs) {
  const ch_map m(count, spatial);
  if (packs && spatial % V == 0)
    return TY_LAUNCH((ch_apply<V, F>), ty_cuda_blocks(count / V, CH_THREADS), CH_THREADS, 0, m, f);
  return TY_LAUNCH((ch_apply<1, F>), ty_cuda_blocks(count, CH_THREADS), CH_THREADS, 0, m, f);
}

#endif
