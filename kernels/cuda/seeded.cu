/* Random numbers by a seed and a position: seeded_noise. */
#include "../seeded.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 256 };

template <class T>
__global__ void __launch_bounds__(THREADS) seeded_fill(ty_p_seeded_noise p, const T *x, T *y, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * THREADS) {
    const uint64_t at = static_cast<uint64_t>(i);
    if (p.kind == 0) y[i] = static_cast<T>(ty_seeded_normal(p.seed, at));
    else if (p.kind == 1) y[i] = static_cast<T>(ty_uniform_f32(ty_seeded_words(p.seed, at, 0).w[0]));
    else y[i] = static_cast<T>(ty_seeded_poisson(p.seed, at, static_cast<double>(x[i])));
  }
}

} // namespace

TY_CUDA_KERNEL(seeded_noise) {
  const ty_p_seeded_noise p = *static_cast<const ty_p_seeded_noise *>(k->params);
  const int64_t count = k->out[0]->count;
  if (!count) return true;
  return ty_for_reals(k->out[0]->dtype, "seeded_noise", [&](auto type) {
    typedef decltype(type) T;
    const T *x = ty_data_of<const T>(k->in[0]);
    T *y = ty_data_of<T>(k->out[0]);
    return TY_LAUNCH(seeded_fill<T>, ty_cuda_blocks(count, THREADS), THREADS, 0, p, x, y, count);
  });
}
