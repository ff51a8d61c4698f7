/* GPUs: finding them, their memory, copies, the stream of each, and what went wrong on them. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "cuda.cuh"
#include "library.cuh"

extern "C" {
extern ty_kernel *const ty_cuda_kernels[]; /* src/device/cuda_table.c */
extern const int ty_cuda_kernel_count;
}

namespace {

struct gpu {
  pthread_mutex_t lock;
  cudaStream_t stream; /* made when the GPU is first entered */
  ty_cuda_trouble *trouble;
  cudaDeviceProp properties;
  char text[384];
} gpus[TY_MAX_GPUS];

thread_local int current = -1;
thread_local const char *running; /* the op */
volatile bool tf32;

bool fail(const char *what, cudaError_t error) {
  ty_code code = error == cudaErrorMemoryAllocation ? TY_ENOMEM : TY_EUNSUPPORTED;
  return ty_fail(code, "%s on cuda: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

/* A stream, and the record of troubles where host and kernels both see it. */
bool prepare(gpu *g) {
  pthread_mutex_lock(&g->lock);
  cudaError_t error = cudaSuccess;
  if (!g->trouble) {
    void *p = nullptr;
    if (!g->stream) error = cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
      error = cudaHostAlloc(&p, sizeof *g->trouble, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error == cudaSuccess) {
      memset(p, 0, sizeof *g->trouble);
      g->trouble = static_cast<ty_cuda_trouble *>(p);
    }
  }
  pthread_mutex_unlock(&g->lock);
  return error == cudaSuccess || fail("starting", error);
}

bool enter(int i, const char *op) {
  running = op;
  if (i == current) return true;
  cudaError_t error = cudaSetDevice(i);
  if (error != cudaSuccess) return fail("entering", error);
  if (!prepare(&gpus[i])) return false;
  current = i;
  return true;
}

/* Back to `before` when an allocation or a copy for another GPU is done. */
class visit {
public:
  explicit visit(int i) : ok(enter_from(i)) {}
  ~visit() {
    if (before_ >= 0) enter(before_, running);
  }
  const bool ok;

private:
  bool enter_from(int i) {
    before_ = current == i ? -1 : current;
    return enter(i, running);
  }
  int before_;
};

void *alloc(int i, size_t bytes) {
  visit v(i);
  void *p = nullptr;
  if (!v.ok || cudaMalloc(&p, bytes) != cudaSuccess) {
    cudaGetLastError(); /* a failed allocation leaves nothing broken behind */
    return nullptr;
  }
  return p;
}

void release(int i, void *p) {
  visit v(i);
  if (v.ok) cudaFree(p); /* waits for what still uses it */
}

bool synchronize(int i) {
  visit v(i);
  if (!v.ok) return false;
  cudaError_t error = cudaStreamSynchronize(gpus[i].stream);
  if (error != cudaSuccess) return fail("waiting", error);
  ty_cuda_trouble *trouble = gpus[i].trouble;
  ty_cuda_trouble t = *trouble;
  if (t.kind == TY_NO_TROUBLE) return true;
  memset(trouble, 0, sizeof *trouble);
  const long long index = t.index, size = t.size, more = t.more;
  switch (t.kind) {
    case TY_DIVISION_BY_ZERO: return ty_fail(TY_EINVAL, "%s: integer division by zero (on cuda:%d)", t.op, i);
    case TY_NO_PROBABILITY:
      return ty_fail(TY_EINVAL, "%s: probs: expected finite numbers of at least 0, got %g in row %lld (on cuda:%d)",
                     t.op, ty_from_bits_f64(static_cast<uint64_t>(t.size)), index, i);
    case TY_NOT_POSITIVE:
      return ty_fail(TY_EINVAL,
                     "%s: x: matrix %lld is not positive definite: its leading minor of order %lld is not positive (on "
                     "cuda:%d)",
                     t.op, index, size, i);
    case TY_SINGULAR:
      return ty_fail(TY_EINVAL, "%s: a: matrix %lld is singular: pivot %lld is zero (on cuda:%d)", t.op, index,
                     size - 1, i);
    case TY_NOT_CONVERGED:
      return ty_fail(TY_EINVAL, "%s: x: matrix %lld: the iteration did not converge (on cuda:%d)", t.op, index, i);
    case TY_NOT_FINITE:
      return ty_fail(TY_EINVAL, "%s: x: matrix %lld holds a number that is not finite (on cuda:%d)", t.op, index, i);
    case TY_FEW_PROBABILITIES:
      if (more == 0)
        return ty_fail(TY_EINVAL, "%s: probs: row %lld has no positive entry (on cuda:%d)", t.op, index, i);
      return ty_fail(TY_EINVAL,
                     "%s: probs: row %lld has %lld positive entries, fewer than the %lld to draw without replacement "
                     "(on cuda:%d)",
                     t.op, index, size, more, i);
    default:
      return ty_fail(TY_EINDEX, "%s: index %lld is out of range for size %lld (on cuda:%d)", t.op, index, size, i);
  }
}

bool copy(int to, void *dst, int from, const void *src, size_t bytes) {
  visit v(from >= 0 ? from : to);
  if (!v.ok) return false;
  cudaStream_t stream = ty_cuda_stream();
  if (to >= 0 && from >= 0 && to != from) { /* the other GPU goes on when this one has delivered */
    if (!prepare(&gpus[to])) return false;
    cudaError_t error = cudaMemcpyPeerAsync(dst, to, src, from, bytes, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    return error == cudaSuccess || fail("copying", error);
  }
  cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream);
  if (error != cudaSuccess) return fail("copying", error);
  return to >= 0 ? true : synchronize(from);
}

bool capture(int i) {
  if (!enter(i, running)) return false;
  /* Relaxed: scratch memory may be allocated meanwhile, which is no part of the graph. */
  cudaError_t error = cudaStreamBeginCapture(gpus[i].stream, cudaStreamCaptureModeRelaxed);
  return error == cudaSuccess || fail("capturing", error);
}

void *captured(int i) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  cudaError_t error = enter(i, running) ? cudaStreamEndCapture(gpus[i].stream, &graph) : cudaErrorInvalidDevice;
  if (error == cudaSuccess) error = cudaGraphInstantiate(&runnable, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
  if (error != cudaSuccess) fail("capturing", error);
  return runnable;
}

bool graph_launch(int i, void *graph) {
  if (!enter(i, running)) return false;
  cudaError_t error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), gpus[i].stream);
  return error == cudaSuccess || fail("launching a graph", error);
}

void graph_free(int i, void *graph) {
  visit v(i);
  if (v.ok) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

const char *describe(int i) { return gpus[i].text; }
void allow_tf32(bool on) { tf32 = on; }
int64_t memory(int i) { return static_cast<int64_t>(gpus[i].properties.totalGlobalMem); }

ty_cuda_backend backend = {};

} // namespace

cudaStream_t ty_cuda_stream(void) { return gpus[current].stream; }
int ty_cuda_gpu(void) { return current; }
int ty_cuda_processors(void) { return gpus[current].properties.multiProcessorCount; }
bool ty_cuda_tf32(void) { return tf32; }
ty_cuda_watch ty_cuda_watched(void) { return { gpus[current].trouble, running }; }

bool ty_cuda_no_kernel(const char *op, int dtype) {
  return ty_fail(TY_EUNSUPPORTED, "%s: no kernel for %s on cuda", op, ty_dtype_name[dtype]);
}

bool ty_cuda_launched(const char *name) {
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess || ty_fail(TY_EUNSUPPORTED, "launching %s on cuda: %s (%s)", name,
                                         cudaGetErrorString(error), cudaGetErrorName(error));
}

bool ty_cuda_zero(void *p, size_t bytes) {
  cudaError_t error = bytes ? cudaMemsetAsync(p, 0, bytes, ty_cuda_stream()) : cudaSuccess;
  return error == cudaSuccess || fail("clearing", error);
}

extern "C" __attribute__((visibility("default"))) const ty_cuda_backend *ty_cuda_open(char *why, size_t room);
const ty_cuda_backend *ty_cuda_open(char *why, size_t room) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    snprintf(why, room, "no GPU can be used: %s",
             error == cudaErrorInsufficientDriver ? "there is no NVIDIA driver, or it is older than this build needs"
             : error == cudaSuccess               ? "the driver knows none"
                                                  : cudaGetErrorString(error));
    return nullptr;
  }
  if (count > TY_MAX_GPUS) count = TY_MAX_GPUS;
  for (int i = 0; i < count; i++) {
    gpu *g = &gpus[i];
    pthread_mutex_init(&g->lock, nullptr);
    error = cudaGetDeviceProperties(&g->properties, i);
    if (error != cudaSuccess) {
      snprintf(why, room, "no GPU can be used: %s", cudaGetErrorString(error));
      return nullptr;
    }
    char text[sizeof g->text];
    snprintf(text, sizeof text, "%s, %.0f GiB, compute capability %d.%d", g->properties.name,
             static_cast<double>(g->properties.totalGlobalMem) / (1 << 30), g->properties.major, g->properties.minor);
    memcpy(g->text, text, sizeof text);
  }
  backend.version = TY_CUDA_BACKEND_VERSION;
  backend.ops = ty_cuda_kernel_count;
  backend.count = count;
#ifndef TY_CUDA_EMULATED
  backend.caches = true;
#endif
  backend.kernels = ty_cuda_kernels;
  backend.describe = describe;
  backend.enter = enter;
  backend.alloc = alloc;
  backend.free = release;
  backend.memory = memory;
  backend.copy = copy;
  backend.synchronize = synchronize;
  backend.capture = capture;
  backend.captured = captured;
  backend.graph_launch = graph_launch;
  backend.graph_free = graph_free;
  backend.allow_tf32 = allow_tf32;
  backend.library = ty_cuda_library_describe;
  return &backend;
}
