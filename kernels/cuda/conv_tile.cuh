/* The product of one tile by 256 threads: sums of TM x TN results in the registers of each, while the next piece of
 * depth TILE_K of both factors is on its way to the other half of shared memory. */
#ifndef TY_KERNELS_CUDA_CONV_TILE_CUH
#define TY_KERNELS_CUDA_CONV_TILE_CUH

#include "cuda.cuh"

enum { TILE_THREADS = 256, TILE_K = 8 };

/* A piece in shared memory: A [TILE_K][ROW_A], then B [TILE_K][ROW_B]. The rows' odd ends keep threads that write one
 * column from meeting in a bank. */
template <class T, int TM, int TN> struct conv_tile {
  enum {
    WIDE = 16 / sizeof(T), /* elements that a thread reads at once */
    RUN_M = TM < WIDE ? TM : WIDE,
    RUN_N = TN < WIDE ? TN : WIDE,
    M = 16 * TM,
    N = 16 * TN,
    ROW_A = M + 4,
    ROW_B = N + 4,
    B = TILE_K * ROW_A,
    SIZE = B + TILE_K * ROW_B,
    BYTES = 2 * SIZE * sizeof(T)
  };
  T sum[TM][TN];

  /* Results i of a thread in row `thread` of threads, and j of one in column `thread`. */
  static TY_DEVICE_MEMBER int row_of(int thread, int i) {
    return i / RUN_M * (16 * RUN_M) + thread * RUN_M + i % RUN_M;
  }
  static TY_DEVICE_MEMBER int column_of(int thread, int j) {
    return j / RUN_N * (16 * RUN_N) + thread * RUN_N + j % RUN_N;
  }

  /* Of the tile only the first `rows` and `columns` count: warps beyond them multiply nothing. load(k) fetches the
   * piece at k of both factors into registers, store(half) writes it to shared memory. */
  template <class Load, class Store>
  TY_DEVICE_MEMBER void run(ty_shared_ptr<T> shared, int64_t rows, int64_t columns, int64_t begin, int64_t end,
                            const Load &load, const Store &store) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
      for (int j = 0; j < TN; j++) sum[i][j] = 0;
    if (begin >= end) return;
    const bool busy = row_of(row, 0) < rows && column_of(column, 0) < columns;
    load(begin);
    store(0);
    __syncthreads();
    int half = 0;
    for (int64_t k = begin; k < end; k += TILE_K, half ^= 1) {
      const bool more = k + TILE_K < end;
      if (more) load(k + TILE_K);
      ty_shared_ptr<T> from = shared + half * SIZE;
#pragma unroll
      for (int d = 0; busy && d < TILE_K; d++) {
        T a[TM], b[TN];
#pragma unroll
        for (int i = 0; i < TM; i++) a[i] = from[d * ROW_A + row_of(row, i)];
#pragma unroll
        for (int j = 0; j < TN; j++) b[j] = from[B + d * ROW_B + column_of(column, j)];
#pragma unroll
        for (int i = 0; i < TM; i++)
#pragma unroll
          for (int j = 0; j < TN; j++) sum[i][j] += a[i] * b[j];
      }
      if (more) store(half ^ 1);
      __syncthreads();
    }
  }

  /* For loops over the results that are not unrolled: registers cannot be indexed, so the results move past [0][0]. */
  TY_DEVICE_MEMBER void turn_row() {
    T first = sum[0][0];
#pragma unroll
    for (int j = 1; j < TN; j++) sum[0][j - 1] = sum[0][j];
    sum[0][TN - 1] = first;
  }
  TY_DEVICE_MEMBER void next_row() {
#pragma unroll
    for (int i = 1; i < TM; i++)
#pragma unroll
      for (int j = 0; j < TN; j++) sum[i - 1][j] = sum[i][j];
  }
};

#endif
