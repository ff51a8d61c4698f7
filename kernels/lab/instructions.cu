/* What instructions cost on a GPU: cycles from one to the next that waits for it (latency), and cycles of a
 * multiprocessor for one of a warp's when many warps run independent ones (rate). After "Analyzing Modern NVIDIA GPU
 * cores", 2025, arXiv:2503.20481. A program of its own:
 *
 *     nvcc -O2 -arch=native kernels/lab/instructions.cu -o instructions && ./instructions
 *
 * It prints a line for each kind: name, latency, rate. modules/estimate/instructions.lua has the same for CPUs. */
#include <cstdio>
#include <cuda_runtime.h>

namespace {

constexpr int LENGTH = 256, ROUNDS = 16, CHAINS = 8;

/* A kind of instruction: what one does to a value, written so that the compiler keeps every one of them. */
#define KIND(name, type, text, constraint)                                                                   \
  struct name {                                                                                              \
    typedef type value;                                                                                      \
    static __device__ void step(type &x, type y) { asm volatile(text : "+" constraint(x) : constraint(y)); } \
  };
KIND(fma_f32, float, "fma.rn.f32 %0, %0, %1, %1;", "f")
KIND(add_f32, float, "add.rn.f32 %0, %0, %1;", "f")
KIND(multiply_f32, float, "mul.rn.f32 %0, %0, %1;", "f")
KIND(fma_f64, double, "fma.rn.f64 %0, %0, %1, %1;", "d")
KIND(fma_f16x2, unsigned, "fma.rn.f16x2 %0, %0, %1, %1;", "r")
KIND(add_i32, int, "add.s32 %0, %0, %1;", "r")
KIND(multiply_i32, int, "mad.lo.s32 %0, %0, %1, %1;", "r")
KIND(logic, int, "lop3.b32 %0, %0, %1, %1, 0x96;", "r")
KIND(shift, int, "shf.l.wrap.b32 %0, %0, %1, 5;", "r")
KIND(exponential, float, "ex2.approx.f32 %0, %0;", "f")
KIND(root, float, "rsqrt.approx.f32 %0, %0;", "f")
KIND(shuffle, int, "shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;", "r")
KIND(convert, int, "{ .reg .f32 t; cvt.rn.f32.s32 t, %0; cvt.rzi.s32.f32 %0, t; }", "r")
#undef KIND

template <typename Kind> __global__ void chain(long long *cycles, typename Kind::value *sink, typename Kind::value y) {
  typename Kind::value x = y;
  long long begin = 0;
  for (int r = 0; r <= ROUNDS; r++) {
    if (r == 1) begin = clock64(); /* the first round fills the instruction cache */
#pragma unroll
    for (int i = 0; i < LENGTH; i++) Kind::step(x, y);
  }
  *cycles = clock64() - begin;
  *sink = x;
}

template <typename Kind> __global__ void many(long long *cycles, typename Kind::value *sink, typename Kind::value y) {
  typename Kind::value x[CHAINS];
  for (int c = 0; c < CHAINS; c++) x[c] = y;
  __syncthreads();
  long long begin = clock64();
  for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
    for (int i = 0; i < LENGTH / CHAINS; i++)
#pragma unroll
      for (int c = 0; c < CHAINS; c++) Kind::step(x[c], y);
  }
  __syncthreads();
  if (threadIdx.x == 0) *cycles = clock64() - begin;
  for (int c = 0; c < CHAINS; c++) sink[threadIdx.x] = x[c];
}

/* Loads that wait for each other: the next place is what is read. */
__global__ void chase(long long *cycles, const unsigned *next, int count, unsigned *sink) {
  unsigned at = 0;
  for (int i = 0; i < count; i++) at = next[at]; /* once through, to bring it near */
  long long begin = clock64();
  for (int i = 0; i < count; i++) at = next[at];
  *cycles = (clock64() - begin) / count;
  *sink = at;
}

bool failed(const char *what) {
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return false;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  return true;
}

template <typename Kind> bool measure(const char *name, long long *cycles, void *sink) {
  typedef typename Kind::value value;
  const int threads = 1024;
  chain<Kind><<<1, 1>>>(cycles, static_cast<value *>(sink), value(1));
  if (failed(name)) return false;
  double latency = double(*cycles) / (double(LENGTH) * ROUNDS);
  many<Kind><<<1, threads>>>(cycles, static_cast<value *>(sink), value(1));
  if (failed(name)) return false;
  double rate = double(*cycles) / (double(LENGTH) * ROUNDS * threads / 32);
  std::printf("%-16s latency %7.2f rate %7.3f\n", name, latency, rate);
  return true;
}

bool measure_loads(long long *cycles, unsigned *next) {
  for (int bytes = 1 << 13; bytes <= 1 << 28; bytes *= 4) {
    int stride = 32, count = bytes / 4 / stride; /* a line of 128 bytes each */
    for (int i = 0; i < count; i++) next[i * stride] = unsigned((i * 7919LL + 1) % count) * stride;
    int steps = count < 4096 ? count : 4096;
    chase<<<1, 1>>>(cycles, next, steps, next + bytes / 4);
    if (failed("loads")) return false;
    std::printf("load of %10d bytes: %lld cycles\n", bytes, *cycles);
  }
  return true;
}

} // namespace

int main() {
  long long *cycles = nullptr;
  void *sink = nullptr;
  unsigned *next = nullptr;
  if (cudaMallocManaged(&cycles, sizeof *cycles) != cudaSuccess ||
      cudaMalloc(&sink, 1024 * sizeof(double)) != cudaSuccess ||
      cudaMallocManaged(&next, (size_t(1) << 28) + 64) != cudaSuccess) {
    std::fprintf(stderr, "no GPU, or no memory on it: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
#define MEASURE(kind) measure<kind>(#kind, cycles, sink)
  bool ok = MEASURE(fma_f32) && MEASURE(add_f32) && MEASURE(multiply_f32) && MEASURE(fma_f64) && MEASURE(fma_f16x2) &&
            MEASURE(add_i32) && MEASURE(multiply_i32) && MEASURE(logic) && MEASURE(shift) && MEASURE(exponential) &&
            MEASURE(root) && MEASURE(shuffle) && MEASURE(convert) && measure_loads(cycles, next);
  cudaFree(cycles);
  cudaFree(sink);
  cudaFree(next);
  return ok ? 0 : 1;
}
