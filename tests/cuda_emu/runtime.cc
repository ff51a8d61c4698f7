/* CUDA's runtime on the host: everything is done at once. Fresh device memory holds bytes that are NaN as floats and out
 * of range as indices; with the address sanitizer every allocation is watched to the byte. */
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {
enum { DEVICES = 2, MEGABYTES = 4096 };
thread_local cudaError_t last;
cudaError_t note(cudaError_t error) { return error == cudaSuccess ? error : last = error; }
} // namespace

struct ty_emu_graph {
  std::vector<std::function<bool()>> work;
  bool broken; /* something was asked for that no graph can hold */
};
struct ty_emu_stream {
  unsigned flags;
  ty_emu_graph *capturing;
  bool strict; /* no allocations while it is captured */
};
namespace {
thread_local int strict_captures;
}

bool ty_emu::enqueue(cudaStream_t stream, const std::function<bool()> &work) {
  if (!stream->capturing) return work();
  stream->capturing->work.push_back(work);
  return true;
}

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorInvalidDevice";
  }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

cudaError_t cudaGetDeviceCount(int *count) {
  const char *wish = getenv("TYCHO_EMULATED_GPUS"); /* 0: a machine without */
  *count = wish ? atoi(wish) : DEVICES;
  return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "emulated GPU %d", device);
  p->totalGlobalMem = size_t{ MEGABYTES } << 20;
  p->sharedMemPerBlock = 48 << 10;
  p->major = 9;
  p->multiProcessorCount = 2;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  *value = properties.major;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return note(device >= 0 && device < DEVICES ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  *p = nullptr;
  if (strict_captures) return note(cudaErrorStreamCaptureUnsupported);
  if (bytes > size_t{ MEGABYTES } << 20 || posix_memalign(p, 256, bytes ? bytes : 1) != 0)
    return note(cudaErrorMemoryAllocation);
  memset(*p, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
  free(p);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  *stream = new ty_emu_stream{ flags, nullptr, false };
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!stream->capturing) return cudaSuccess;
  stream->capturing->broken = true;
  return note(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  ty_emu::enqueue(stream, [=] { return memmove(dst, src, bytes) == dst; });
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *dst, int, const void *src, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
  ty_emu::enqueue(stream, [=] { return memset(p, value, bytes) == p; });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream->capturing) return note(cudaErrorStreamCaptureUnsupported);
  stream->capturing = new ty_emu_graph{};
  stream->strict = mode != cudaStreamCaptureModeRelaxed;
  strict_captures += stream->strict;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = stream->capturing;
  if (*graph) strict_captures -= stream->strict;
  if (*graph && (*graph)->broken) {
    delete *graph;
    *graph = nullptr;
  }
  stream->capturing = nullptr;
  return note(*graph ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *runnable, cudaGraph_t graph, unsigned long long) {
  *runnable = new ty_emu_graph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const auto &work : graph->work)
    if (!work()) return note(cudaErrorLaunchFailure);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
