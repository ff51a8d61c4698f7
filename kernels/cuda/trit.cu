/* matmul_trit: a block has a row of x and some rows of the weight, one a thread. The signed sums of five neighbours in x
 * are made by additions in shared memory, CHUNK bytes of trits at a time; a byte of trits is the place of its sum. */
#include "cuda.cuh"

namespace {

enum { TRITS = 5, SUMS = 256, SIGN = 128, LARGEST = 121, CHUNK = 8, BLOCK = 64, THREADS = 128, PLANES = 4 };

template <class T> struct trits_of {
  const T *x, *scale;
  const uint8_t *code;
  T *y;
  int64_t lines, columns, group, groups, rows, blocks, bytes, planes, tiles;
};

/* The sum of at most n numbers that a byte stands for: its sign, and a magnitude whose digits in base 3, once LARGEST is
 * added, are the trits plus 1. */
template <class T> TY_DEVICE T sum_of(const T *x, int64_t n, int code) {
  const int size = code % SIGN < LARGEST ? code % SIGN : int{ LARGEST };
  int s = code < SIGN ? LARGEST + size : LARGEST - size;
  T sum = 0;
  for (int i = 0; i < TRITS; i++, s /= 3) {
    const int trit = s % 3;
    if (i < n) sum = trit == 0 ? sum - x[i] : trit == 2 ? sum + x[i] : sum;
  }
  return sum;
}

template <class T> __global__ void __launch_bounds__(THREADS) product(const trits_of<T> p) {
  TY_SHARED(T, sum, CHUNK * SUMS);
  for (int64_t tile = blockIdx.x; tile < p.lines * p.tiles; tile += gridDim.x) {
    const int64_t line = tile / p.tiles, n = tile % p.tiles * THREADS + threadIdx.x;
    const T *x = p.x + line * p.columns;
    T y = 0;
    for (int64_t g = 0; g < p.groups; g++) {
      const int64_t from = g * p.group, to = from + p.group < p.columns ? from + p.group : p.columns;
      for (int64_t plane = 0; plane < p.planes; plane += PLANES) {
        T part[PLANES] = {};
        const int64_t few = p.planes - plane < int64_t{ PLANES } ? p.planes - plane : int64_t{ PLANES };
        for (int64_t b = 0; b < p.bytes; b += CHUNK) {
          const int64_t chunk = p.bytes - b < int64_t{ CHUNK } ? p.bytes - b : int64_t{ CHUNK };
          __syncthreads();
          for (int i = threadIdx.x; i < chunk * SUMS; i += THREADS) {
            const int64_t at = from + (b + i / SUMS) * TRITS;
            sum[i] = sum_of(x + at, to - at, i % SUMS);
          }
          __syncthreads();
          if (n < p.rows)
            for (int64_t q = 0; q < few; q++) {
              const int64_t first = ((g * p.blocks + n / BLOCK) * p.bytes + b) * p.planes + plane + q;
              const uint8_t *code = p.code + first * BLOCK + n % BLOCK;
              for (int64_t i = 0; i < chunk; i++) part[q] += sum[i * SUMS + code[i * p.planes * BLOCK]];
            }
        }
        if (n < p.rows)
          for (int64_t q = 0; q < few; q++) y += p.scale[(g * p.rows + n) * p.planes + plane + q] * part[q];
      }
    }
    if (n < p.rows) p.y[line * p.rows + n] = y;
  }
}

template <class T> bool run(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *code = k->in[1];
  const int64_t columns = x->size[x->ndim - 1], lines = x->count / columns, rows = k->in[2]->size[1];
  const int64_t tiles = (rows + THREADS - 1) / THREADS;
  const trits_of<T> p = { static_cast<const T *>(x->data),
                          static_cast<const T *>(k->in[2]->data),
                          static_cast<const uint8_t *>(code->data),
                          static_cast<T *>(k->out[0]->data),
                          lines,
                          columns,
                          static_cast<const ty_p_dim *>(k->params)->k,
                          code->size[0],
                          rows,
                          code->size[1],
                          code->size[2],
                          code->size[3],
                          tiles };
  return TY_LAUNCH((product<T>), ty_cuda_blocks(lines * tiles, 1), THREADS, 0, p);
}

} // namespace

TY_CUDA_KERNEL(matmul_trit) {
  if (!k->out[0]->count) return true;
  return k->in[0]->dtype == TY_F64 ? run<double>(k) : run<float>(k);
}
