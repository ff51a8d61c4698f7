/* Adam with moments of 8 bits (moment_codes.h). A warp takes the elements that share a scale. */
#include "../moment_codes.h"
#include "optim.cuh"

enum { WARPS = OPTIM_THREADS / TY_WARP, EACH = TY_CODED_TOGETHER / TY_WARP, REPEATED = 4 };
static_assert(EACH == 8, "a lane has two packs of four");

/* The tables of one kind of moment in shared memory: values, then the decades' least, factor, offset and last. */
enum { TABLE = 256 + 4 * TY_CODE_DECADES };

TY_DEVICE void read_table(ty_shared_ptr<float> table, const ty_moment_codes *c) {
  for (int i = threadIdx.x; i < 256; i += OPTIM_THREADS) table[i] = c->value[i];
  const int i = threadIdx.x, k = i % TY_CODE_DECADES;
  if (i >= 4 * TY_CODE_DECADES) return;
  table[256 + i] = i / TY_CODE_DECADES == 0   ? c->least[k]
                   : i / TY_CODE_DECADES == 1 ? c->factor[k]
                   : i / TY_CODE_DECADES == 2 ? c->offset[k]
                                              : c->last[k];
}

/* The nearest code of x * inverse. */
TY_DEVICE uint8_t encode(ty_shared_ptr<float> table, bool has_sign, float x, float inverse) {
  const ty_shared_ptr<float> least = table + 256, factor = least + TY_CODE_DECADES, offset = factor + TY_CODE_DECADES,
                             last = offset + TY_CODE_DECADES;
  const float y = fabsf(x * inverse);
  /* log10 by the bits, less than 0.03 too small and 0.28 taken off: the decade, or the one below it */
  const float l = static_cast<float>(static_cast<int32_t>(ty_bits_f32(y))) * (0.30103f / 8388608) +
                  (7 - 0.30103f * 127 - 0.28f);
  int k = l < 0 ? 0 : l < 6 ? static_cast<int>(l) : 6;
  if (y >= least[k + 1]) k++;
  float code = y * factor[k] + offset[k];
  const float most = last[k];
  code = code < most ? code : most; /* NaN too */
  if (y < least[0]) code = 0;
  int magnitude = static_cast<int>(code);
  if (has_sign && x < 0) magnitude = magnitude > 127 ? -127 : -magnitude;
  return static_cast<uint8_t>((has_sign ? 127 : 0) + magnitude);
}

/* The largest magnitude of a warp; NaN when there is one. */
TY_DEVICE float largest(const float *x) {
  uint32_t most = 0;
  for (int j = 0; j < EACH; j++) {
    const uint32_t bits = ty_bits_f32(x[j]) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return ty_from_bits_f32(ty_warp_reduce(most, ty_larger<uint32_t>{}));
}

/* Denormal blocks become 0: their inverse would be infinite. */
TY_DEVICE float inverse_of(float most) { return most < 0x1p-126f ? 0 : 1 / most; }

/* A lane's elements i .. i + 3 of the block of 256 and those 128 further, of `left`. */
TY_DEVICE int here(int64_t left, int lane, int pack) {
  const int64_t n = left - 4 * lane - 128 * pack;
  return n < 0 ? 0 : n < 4 ? static_cast<int>(n) : 4;
}

__global__ void __launch_bounds__(OPTIM_THREADS)
    adam_coded(const optim_table tensors, const optim_numbers<float> numbers, const ty_moment_codes *codes) {
  optim_numbers<float> c = numbers;
  if (!c.take_control()) return; /* the whole launch */
  TY_SHARED(float, first_table, TABLE);
  TY_SHARED(float, second_table, TABLE);
  read_table(first_table, codes);
  read_table(second_table, codes + 1);
  __syncthreads();
  const optim_tensor &t = optim_find(tensors);
  const int lane = threadIdx.x % TY_WARP, warp = threadIdx.x / TY_WARP;
  const int64_t blocks = (t.count + TY_CODED_TOGETHER - 1) / TY_CODED_TOGETHER;
  const int64_t first_block = int64_t{ static_cast<int32_t>(blockIdx.x) - t.first } * (WARPS * REPEATED);
  uint8_t *codes1 = static_cast<uint8_t *>(t.data[FIRST]), *codes2 = static_cast<uint8_t *>(t.data[SECOND]);
  for (int repeat = 0; repeat < REPEATED; repeat++) {
    const int64_t block = first_block + repeat * WARPS + warp;
    if (block >= blocks) return; /* the whole warp */
    const int64_t from = block * TY_CODED_TOGETHER + 4 * lane, left = t.count - block * TY_CODED_TOGETHER;
    const float most1 = t.scales[block], most2 = t.scales[blocks + block];
    float m[EACH], v[EACH];
    for (int pack = 0; pack < 2; pack++) {
      const int n = here(left, lane, pack);
      const int64_t i = from + 128 * pack;
      uint8_t q1[4] = {}, q2[4] = {};
      float p[4], g[4], a[4];
      if (t.packs && n == 4) {
        memcpy(q1, __builtin_assume_aligned(codes1 + i, 4), 4);
        memcpy(q2, __builtin_assume_aligned(codes2 + i, 4), 4);
      } else {
        for (int j = 0; j < 4; j++)
          if (j < n) q1[j] = codes1[i + j], q2[j] = codes2[i + j];
      }
      optim_load(t, P, i, n, p);
      optim_load(t, G, i, n, g);
      for (int j = 0; j < 4; j++) {
        float *m_at = &m[4 * pack + j], *v_at = &v[4 * pack + j];
        *m_at = first_table[q1[j]] * most1;
        *v_at = second_table[q2[j]] * most2;
        optim_adam::step(c, true, p[j], g[j], *m_at, *v_at);
        if (j >= n) *m_at = *v_at = 0;
      }
      optim_store(t, P, i, n, p);
      if (!t.data[AVERAGE]) continue;
      optim_load(t, AVERAGE, i, n, a);
      for (int j = 0; j < 4; j++) a[j] += c.average_weight * (p[j] - a[j]);
      optim_store(t, AVERAGE, i, n, a);
    }
    const float new1 = largest(m), new2 = largest(v), by1 = inverse_of(new1), by2 = inverse_of(new2);
    for (int pack = 0; pack < 2; pack++) {
      const int n = here(left, lane, pack);
      const int64_t i = from + 128 * pack;
      uint8_t q1[4], q2[4];
      for (int j = 0; j < 4; j++) {
        const float second = v[4 * pack + j];
        q1[j] = encode(first_table, true, m[4 * pack + j], by1);
        q2[j] = encode(second_table, false, second, by2);
        /* A second moment of 0 beside a first one that is not would make the next step huge. */
        if (second > 0 && q2[j] == 0) q2[j] = 1;
      }
      if (t.packs && n == 4) {
        memcpy(__builtin_assume_aligned(codes1 + i, 4), q1, 4);
        memcpy(__builtin_assume_aligned(codes2 + i, 4), q2, 4);
      } else {
        for (int j = 0; j < 4; j++)
          if (j < n) codes1[i + j] = q1[j], codes2[i + j] = q2[j];
      }
    }
    if (lane == 0) t.scales[block] = new1, t.scales[blocks + block] = new2;
  }
}

/* As a parameter of a launch, since a graph would come back to where a copy read it on the host. */
struct both_codes {
  ty_moment_codes v[2];
};
__global__ void put_codes(const both_codes codes, both_codes *there) {
  if (threadIdx.x == 0) *there = codes;
}

/* in: n parameters, n gradients, n first moments (u8), n second moments (u8), n scales (f32 [2, blocks]), with averaged
 * n averages. */
TY_CUDA_KERNEL(adam_8bit) {
  const ty_p_optim &p = *static_cast<const ty_p_optim *>(k->params);
  const int list[ROLES] = { 0, 1, 2, 3, -1, p.averaged ? 5 : -1 };
  const int64_t n = k->nin / (p.averaged ? 6 : 5), together = int64_t{ TY_CODED_TOGETHER } * WARPS * REPEATED;
  const optim_numbers<float> numbers(k, p, false);
  both_codes codes;
  ty_make_moment_codes(&codes.v[0], true);
  ty_make_moment_codes(&codes.v[1], false);
  ty_cuda_scratch room(sizeof codes);
  both_codes *const put = room.as<both_codes>();
  if (!put || !TY_LAUNCH(put_codes, 1, TY_WARP, 0, codes, put)) return false;
  const ty_moment_codes *there = put->v;
  optim_table table;
  int64_t blocks = 0;
  table.n = 0;
  const auto launch = [&]() {
    const bool ok = table.n == 0 ||
                    TY_LAUNCH(adam_coded, static_cast<unsigned>(blocks), OPTIM_THREADS, 0, table, numbers, there);
    table.n = 0, blocks = 0;
    return ok;
  };
  for (int64_t i = 0; i < n; i++) {
    if (k->in[i]->count == 0) continue;
    const int64_t more = (k->in[i]->count + together - 1) / together;
    if ((table.n == OPTIM_TENSORS || blocks + more > INT32_MAX) && !launch()) return false;
    optim_add(&table, k, list, n, i, static_cast<int32_t>(blocks))->scales = static_cast<float *>(
        k->in[4 * n + i]->data);
    blocks += more;
  }
  return launch();
}
