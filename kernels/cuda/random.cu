/* Random numbers. Element i takes word i % 4 of block offset + i / 4, as on the CPU; a thread makes the four elements
 * of a block. */
#include "../philox.h"
#include "elementwise.cuh"

/* Where the elements are. */
struct places {
  int64_t count;
  bool contiguous, packs; /* four neighbours are moved at once */
  int ndim;
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
};

static places places_of(const ty_view *out, const ty_view *in) {
  places p;
  const size_t bytes = 4 * static_cast<size_t>(ty_dtype_size[out->dtype]);
  p.count = out->count;
  p.contiguous = out->contiguous;
  p.packs = out->contiguous && ty_aligned(out->data, bytes < 32 ? bytes : 16) && (!in || ty_aligned(in->data));
  p.ndim = out->ndim;
  memcpy(p.size, out->size, sizeof p.size);
  memcpy(p.stride, out->stride, sizeof p.stride);
  return p;
}

TY_DEVICE int64_t place_of(const places &p, int64_t i) {
  if (p.contiguous) return i;
  int64_t at = 0;
  for (int d = p.ndim - 1; d >= 0; d--) {
    const int64_t next = i / p.size[d];
    at += (i - next * p.size[d]) * p.stride[d];
    i = next;
  }
  return at;
}

/* Four elements, moved at once as far as 16 bytes go. */
template <class T> struct four {
  enum { V = sizeof(T) < 8 ? 4 : 2 };
  T v[4];
  TY_DEVICE_MEMBER void load(const T *from) {
    for (int j = 0; j < 4; j += V) {
      const ty_pack<T, V> pack = *reinterpret_cast<const ty_pack<T, V> *>(from + j);
      for (int i = 0; i < V; i++) v[j + i] = pack.v[i];
    }
  }
  TY_DEVICE_MEMBER void store(T *to) const {
    for (int j = 0; j < 4; j += V) {
      ty_pack<T, V> pack;
      for (int i = 0; i < V; i++) pack.v[i] = v[j + i];
      *reinterpret_cast<ty_pack<T, V> *>(to + j) = pack;
    }
  }
};

/* out = f(words, which block, in): four elements of them each. `in`, where there is one, is contiguous. */
template <class T, class F>
__global__ void __launch_bounds__(EW_THREADS)
    draw(T *out, const T *in, const places p, uint64_t seed, uint64_t offset, const F f) {
  const int64_t step = int64_t{ gridDim.x } * EW_THREADS, blocks = (p.count + 3) / 4;
  for (int64_t b = int64_t{ blockIdx.x } * EW_THREADS + threadIdx.x; b < blocks; b += step) {
    const uint64_t block = offset + static_cast<uint64_t>(b);
    const ty_philox words = ty_philox_block(seed, block);
    const int64_t first = 4 * b, n = p.count - first;
    four<T> x = {}, y;
    if (p.packs && n >= 4) {
      if (in) x.load(in + first);
      f(words, block, x.v, y.v);
      y.store(out + first);
      continue;
    }
    for (int j = 0; in && j < 4; j++)
      if (j < n) x.v[j] = in[first + j];
    f(words, block, x.v, y.v);
    for (int j = 0; j < 4; j++)
      if (j < n) out[place_of(p, first + j)] = y.v[j];
  }
}

template <class T, class F> static bool run(const ty_kernel_args *k, const F &f) {
  const ty_p_random *p = static_cast<const ty_p_random *>(k->params);
  const ty_view *out = k->out[0], *in = k->nin ? k->in[0] : nullptr;
  if (out->count == 0) return true;
  T *to = static_cast<T *>(out->data);
  const T *from = in ? static_cast<const T *>(in->data) : nullptr;
  const places where = places_of(out, in);
  const uint64_t seed = p->seed, offset = p->offset;
  return TY_LAUNCH((draw<T, F>), ty_cuda_blocks((out->count + 3) / 4, EW_THREADS), EW_THREADS, 0, to, from, where, seed,
                   offset, f);
}

/* ---- uniform and normal: computed in f32, so that a seed gives the same numbers in every dtype ---- */

/* The largest value of the dtype below x, for x above 0. */
static float below(int dtype, double x) {
  if (dtype == TY_F16 || dtype == TY_BF16) {
    uint16_t h = dtype == TY_F16 ? ty_f32_to_f16(static_cast<float>(x)) : ty_f32_to_bf16(static_cast<float>(x));
    float y = dtype == TY_F16 ? ty_f16_to_f32(h) : ty_bf16_to_f32(h);
    if (static_cast<double>(y) < x) return y;
    h = static_cast<uint16_t>(y > 0 ? h - 1 : y < 0 ? h + 1 : 0x8001);
    return dtype == TY_F16 ? ty_f16_to_f32(h) : ty_bf16_to_f32(h);
  }
  return static_cast<double>(static_cast<float>(x)) < x ? static_cast<float>(x)
                                                        : nextafterf(static_cast<float>(x), -INFINITY);
}

template <class T> struct uniform {
  float low, width, most;
  TY_DEVICE_MEMBER void operator()(const ty_philox &words, uint64_t, const T *, T *y) const {
    for (int j = 0; j < 4; j++) {
      const float u = low + width * ty_uniform_f32(words.w[j]);
      y[j] = ty_narrow<T>(u < most ? u : most);
    }
  }
};

TY_CUDA_KERNEL(uniform) {
  const ty_p_random *p = static_cast<const ty_p_random *>(k->params);
  const int dtype = k->out[0]->dtype;
  const float low = static_cast<float>(p->a), width = static_cast<float>(p->b - p->a);
  const float most = width > 0 ? below(dtype, p->b) : low; /* rounding must not reach the open end */
  return ty_for_floats(dtype, "uniform_", [&](auto x) {
    typedef decltype(x) T;
    return run<T>(k, uniform<T>{ low, width, most });
  });
}

/* Box and Muller 1958, on words 0, 1 and words 2, 3 of each block. */
template <class T> struct normal {
  float mean, std;
  TY_DEVICE_MEMBER void operator()(const ty_philox &words, uint64_t, const T *, T *y) const {
    for (int j = 0; j < 4; j += 2) {
      const float r = std * sqrtf(-2.0f * ty_log_f32(ty_uniform_positive_f32(words.w[j])));
      const float turn = 6.28318531f * ty_uniform_f32(words.w[j + 1]);
      y[j] = ty_narrow<T>(mean + r * ty_cos_f32(turn));
      y[j + 1] = ty_narrow<T>(mean + r * ty_sin_f32(turn));
    }
  }
};

TY_CUDA_KERNEL(normal) {
  const ty_p_random *p = static_cast<const ty_p_random *>(k->params);
  const float mean = static_cast<float>(p->a), std = static_cast<float>(p->b);
  return ty_for_floats(k->out[0]->dtype, "normal_", [&](auto x) {
    typedef decltype(x) T;
    return run<T>(k, normal<T>{ mean, std });
  });
}

/* ---- integers ---- */

/* low + floor(word * range / 2^32); ranges above 2^32 take a second word from a block of their own. */
template <class T> struct integers {
  int64_t low;
  uint64_t range, other_seed;
  TY_DEVICE_MEMBER T value(uint64_t pick) const {
    const int64_t x = static_cast<int64_t>(static_cast<uint64_t>(low) + pick);
    if constexpr (std::is_integral<T>::value) return static_cast<T>(x);
    else return ty_narrow<T>(static_cast<ty_compute<T>>(x));
  }
  TY_DEVICE_MEMBER void operator()(const ty_philox &words, uint64_t block, const T *, T *y) const {
    if (range <= 0xffffffffu) {
      for (int j = 0; j < 4; j++) y[j] = value(words.w[j] * range >> 32);
      return;
    }
    const ty_philox others = ty_philox_block(other_seed, block);
    for (int j = 0; j < 4; j++) {
      const uint64_t wide = static_cast<uint64_t>(words.w[j]) << 32 | others.w[j];
      y[j] = value(static_cast<uint64_t>(static_cast<unsigned __int128>(wide) * range >> 64));
    }
  }
};

TY_CUDA_KERNEL(randint) {
  const ty_p_random *p = static_cast<const ty_p_random *>(k->params);
  const int64_t low = static_cast<int64_t>(p->a);
  const uint64_t range = static_cast<uint64_t>(static_cast<int64_t>(p->b)) - static_cast<uint64_t>(low);
  const uint64_t other_seed = ~p->seed;
  return ty_for_numbers(k->out[0]->dtype, "randint_", [&](auto x) {
    typedef decltype(x) T;
    return run<T>(k, integers<T>{ low, range, other_seed });
  });
}

/* ---- decisions ---- */

template <class T> struct decision {
  typedef ty_compute<T> C;
  TY_DEVICE_MEMBER void operator()(const ty_philox &words, uint64_t, const T *p, T *y) const {
    for (int j = 0; j < 4; j++) y[j] = ty_narrow<T>(ty_uniform_f32(words.w[j]) < ty_widen(p[j]) ? C(1) : C(0));
  }
};

TY_CUDA_KERNEL(bernoulli) {
  return ty_for_floats(k->out[0]->dtype, "bernoulli", [&](auto x) {
    typedef decltype(x) T;
    return run<T>(k, decision<T>{});
  });
}

/* An element stays, scaled by 1/(1-p), when its random word is at least p 2^32. */
template <class T> struct kept {
  typedef ty_compute<T> C;
  uint32_t least;
  C scale;
  TY_DEVICE_MEMBER void operator()(const ty_philox &words, uint64_t, const T *x, T *y) const {
    for (int j = 0; j < 4; j++) y[j] = ty_narrow<T>(words.w[j] >= least ? ty_widen(x[j]) * scale : C(0));
  }
};

TY_CUDA_KERNEL(dropout_apply) {
  const double p = static_cast<const ty_p_random *>(k->params)->a;
  const ty_view *y = k->out[0];
  if (p * 0x1p32 > static_cast<double>(UINT32_MAX)) /* p is 1 or as good as that */
    return ty_cuda_zero(y->data, static_cast<size_t>(y->count) * ty_dtype_size[y->dtype]);
  return ty_for_floats(y->dtype, "dropout_apply", [&](auto x) {
    typedef decltype(x) T;
    return run<T>(k, kept<T>{ static_cast<uint32_t>(p * 0x1p32), static_cast<ty_compute<T>>(1 / (1 - p)) });
  });
}
