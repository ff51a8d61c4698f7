/* Kernels with planted faults, and the same without: the emulator must find each, and nothing where there is none. */
#include <stdio.h>
#include <string>
#include <vector>

#include "../../../kernels/cuda/backend.h"
#include "../../../kernels/cuda/cuda.cuh"
#include "../../../kernels/cuda/mma.cuh"

extern "C" {
const char *ty_error(void); /* src/tensor/error.c */
ty_cuda_open_fn ty_cuda_open;
}

enum { THREADS = 64, ROUNDS = 2 };

/* Each thread hands its number to its neighbour. */
static __global__ void hand_on(int *out, bool barrier, int room, bool all_write) {
  TY_SHARED(int, line, THREADS);
  int i = static_cast<int>(threadIdx.x);
  if (all_write || i != 5) line[i] = i;
  if (barrier) __syncthreads();
  out[i] = line[(i + 1) % room];
}

/* The second round writes while others may still read the first. */
static __global__ void hand_on_twice(int *out, bool barrier_between) {
  TY_SHARED(int, line, THREADS);
  int i = static_cast<int>(threadIdx.x), sum = 0;
  for (int round = 0; round < ROUNDS; round++) {
    line[i] = i + round;
    __syncthreads();
    sum += line[(i + 1) % THREADS];
    if (barrier_between) __syncthreads();
  }
  out[i] = sum;
}

static __global__ void sum_warps(float *out, unsigned mask, bool early_end) {
  int i = static_cast<int>(threadIdx.x);
  if (early_end && i == 3) return;
  float x = static_cast<float>(i);
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(mask, x, step);
  out[i] = x;
}

static __global__ void sum_block(float *out) {
  TY_SHARED(float, room, TY_WARP);
  out[threadIdx.x] = ty_block_reduce(static_cast<float>(threadIdx.x), ty_plus<float>{}, room);
}

static __global__ void count_into(int *out, bool atomically) {
  TY_SHARED(int, sum, 1);
  if (threadIdx.x == 0) sum[0] = 0;
  __syncthreads();
  if (atomically) atomicAdd(sum + 0, 1);
  else sum[0] += 1;
  __syncthreads();
  out[threadIdx.x] = sum[0];
}

static __global__ void dynamic_last(int *out, int past) {
  TY_SHARED_DYNAMIC(int, line);
  line[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = line[THREADS - 1 + past];
}

/* Each thread brings 16 bytes, in one of two groups, and reads its neighbour's. */
static __global__ void bring(const int *from, int *out, int waits, bool barrier, int shift) {
  TY_SHARED_DYNAMIC(ty_chunk, line);
  const ty_chunks to = line;
  int i = static_cast<int>(threadIdx.x);
  if (i % 2) ty_commit_copies();
  ty_copy_async(to + i, i == 7 ? nullptr : from + 4 * i + shift);
  ty_commit_copies();
  if (i % 2 == 0) ty_commit_copies();
  if (waits == 1) ty_wait_for_copies<1>();
  if (waits == 2) ty_wait_for_copies<0>();
  if (barrier) __syncthreads();
  const ty_chunk x = to[(i + 1) % THREADS];
  out[i] = static_cast<int>(x.v[2]);
}

/* A times the transpose of B, 16 x 16 and 8 x 16, which stand one below the other. */
static __global__ void multiply(const ty_chunk *from, float *out, bool transposed) {
  TY_SHARED(ty_chunk, tiles, 48);
  const int lane = static_cast<int>(threadIdx.x);
  tiles[lane] = from[lane];
  if (lane < 16) tiles[32 + lane] = from[32 + lane];
  __syncwarp();
  uint32_t a[4], b[4];
  float c[4] = {};
  const ty_chunks all = tiles;
  ty_load_matrices(a, all + (lane % 16 * 2 + lane / 16));
  if (transposed) ty_load_matrices_transposed(b, all + (32 + lane % 16));
  else ty_load_matrices(b, all + (32 + lane % 8 * 2 + lane / 8 % 2));
  ty_multiply<ty_f16>(c, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

static int failures;

static void expect(const char *what, bool ok, const char *fault) {
  const char *said = ok ? "" : ty_error();
  bool right = fault ? !ok && std::string(said).find(fault) != std::string::npos : ok;
  printf("%s %s%s%s\n", right ? "ok  " : "FAIL", what, ok ? "" : ": ", said);
  failures += !right;
}

static void expect_values(const char *what, bool ok) {
  printf("%s %s\n", ok ? "ok  " : "FAIL", what);
  failures += !ok;
}

int main() {
  char why[256];
  const ty_cuda_backend *backend = ty_cuda_open(why, sizeof why);
  if (!backend || !backend->enter(0, "planted")) return 1;
  std::vector<int> out(THREADS);
  std::vector<float> sums(THREADS);
  int *o = out.data();
  float *s = sums.data();
  expect("neighbours", TY_LAUNCH(hand_on, 1, THREADS, 0, o, true, THREADS, true), nullptr);
  expect_values("neighbours' values", out[0] == 1 && out[THREADS - 1] == 0);
  expect("a missing barrier", TY_LAUNCH(hand_on, 1, THREADS, 0, o, false, THREADS, true), "reads line[");
  expect("a missing second barrier", TY_LAUNCH(hand_on_twice, 1, THREADS, 0, o, false), "without a barrier between");
  expect("two rounds", TY_LAUNCH(hand_on_twice, 3, THREADS, 0, o, true), nullptr);
  expect("a shared index out of bounds", TY_LAUNCH(hand_on, 1, THREADS, 0, o, true, THREADS + 1, true),
         "has 64 elements");
  expect("a read of what nobody wrote", TY_LAUNCH(hand_on, 1, THREADS, 0, o, true, THREADS, false),
         "nobody has written");
  expect("warps", TY_LAUNCH(sum_warps, 1, THREADS, 0, s, 0xffffffffu, false), nullptr);
  expect_values("sums of warps", sums[0] == 496 && sums[THREADS - 1] == 1520);
  expect("a thread that ended before its warp", TY_LAUNCH(sum_warps, 1, THREADS, 0, s, 0xffffffffu, true),
         "stands still");
  expect("a mask without the thread", TY_LAUNCH(sum_warps, 1, THREADS, 0, s, 0xfffffffeu, false), "not in the mask");
  expect("a block", TY_LAUNCH(sum_block, 2, THREADS, 0, s), nullptr);
  expect_values("the sum of a block", sums[0] == 2016 && sums[THREADS - 1] == 2016);
  expect("atomics", TY_LAUNCH(count_into, 1, THREADS, 0, o, true), nullptr);
  expect_values("a count by atomics", out[0] == THREADS);
  expect("a count without atomics", TY_LAUNCH(count_into, 1, THREADS, 0, o, false), "without a barrier between");
  expect("dynamic shared memory", TY_LAUNCH(dynamic_last, 1, THREADS, THREADS * sizeof(int), o, 0), nullptr);
  expect("dynamic shared memory, past its end", TY_LAUNCH(dynamic_last, 1, THREADS, THREADS * sizeof(int), o, 1),
         "has 64");
  std::vector<int> numbers(4 * THREADS + 4);
  for (int i = 0; i < 4 * THREADS + 4; i++) numbers[static_cast<size_t>(i)] = i;
  const int *n = numbers.data();
  while (reinterpret_cast<uintptr_t>(n) % 16) n++;
  const size_t room = THREADS * sizeof(ty_chunk);
  expect("copies", TY_LAUNCH(bring, 2, THREADS, room, n, o, 2, true, 0), nullptr);
  expect_values("copies' values", out[0] == n[6] && out[6] == 0 && out[THREADS - 1] == n[2]);
  expect("copies that nobody waits for", TY_LAUNCH(bring, 1, THREADS, room, n, o, 0, true, 0),
         "has not been waited for");
  expect("copies whose last group nobody waits for", TY_LAUNCH(bring, 1, THREADS, room, n, o, 1, true, 0),
         "has not been waited for");
  expect("copies without a barrier", TY_LAUNCH(bring, 1, THREADS, room, n, o, 2, false, 0), "thread");
  expect("copies from an odd address", TY_LAUNCH(bring, 1, THREADS, room, n, o, 2, true, 1), "16 does not divide");
  std::vector<uint16_t> factors(48 * 8 + 8);
  uint16_t *f = factors.data();
  while (reinterpret_cast<uintptr_t>(f) % 16) f++;
  for (int transposed = 0; transposed < 2; transposed++) {
    auto a_at = [](int i, int k) { return static_cast<float>((i * 7 + k * 3) % 11 - 5); };
    auto b_at = [](int j, int k) { return static_cast<float>((j * 5 + k * 2) % 13 - 6); };
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++) f[i * 16 + k] = ty_f32_to_f16(a_at(i, k));
    for (int j = 0; j < 8; j++)
      for (int k = 0; k < 16; k++) f[256 + (transposed ? k * 8 + j : j * 16 + k)] = ty_f32_to_f16(b_at(j, k));
    std::vector<float> product(128);
    float *to = product.data();
    const ty_chunk *tiles = reinterpret_cast<const ty_chunk *>(f);
    expect("a product on tensor cores", TY_LAUNCH(multiply, 1, TY_WARP, 0, tiles, to, transposed != 0), nullptr);
    bool right = true;
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 8; j++) {
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += a_at(i, k) * b_at(j, k);
        right &= product[static_cast<size_t>(i * 8 + j)] == sum;
      }
    expect_values("its values", right);
  }
  expect("too many threads", TY_LAUNCH(sum_block, 1, 2048, 0, s), "launching");
  printf("%s\n", failures ? "the emulator misses faults" : "every planted fault was found");
  return failures != 0;
}
