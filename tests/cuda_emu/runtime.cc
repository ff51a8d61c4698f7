/* CUDA's runtime on the host. Fresh device memory holds bytes that are NaN as floats and out of range as indices; with the
 * address sanitizer every allocation is watched to the byte.
 *
 * Everything is done at once, unless TYCHO_EMULATED_STREAMS is "lazy". Then each stream keeps its work until somebody
 * waits for it, and nothing but what he waits for is done, at the latest moment that the rules of streams and events
 * allow: who forgets to wait reads what is not there yet, or memory that another stream has got meanwhile. */
#include "runtime.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {
enum { DEVICES = 2, MEGABYTES = 4096 };
thread_local cudaError_t last;
thread_local int device;
cudaError_t note(cudaError_t error) { return error == cudaSuccess ? error : last = error; }
typedef std::vector<std::function<bool()>> list;
} // namespace

struct ty_emu_graph {
  list work;
  bool broken; /* something was asked for that no graph can hold */
};

namespace {

struct moment { /* a place in a stream that an event was recorded at */
  cudaStream_t stream;
  bool reached = false;
  int asked = 0; /* how often it was not */
  std::chrono::steady_clock::time_point time;
};
typedef std::shared_ptr<moment> place;

struct item { /* one of the three */
  std::function<bool()> work;
  place wait, record;
};

} // namespace

struct ty_emu_stream {
  unsigned flags;
  int device;
  ty_emu_graph *capturing;
  bool strict; /* no allocations while it is captured */
  bool failed;
  std::deque<item> queue;
};
struct ty_emu_event {
  unsigned flags;
  place at;
};

namespace {

thread_local int strict_captures;
std::recursive_mutex hold;          /* of all below */
std::vector<cudaStream_t> streams;  /* those that there are */
std::map<uintptr_t, size_t> locked; /* page-locked memory of the host */
std::map<uintptr_t, size_t> devices_memory;

void reach(const place &p);

void do_first(cudaStream_t s) {
  item i = std::move(s->queue.front());
  s->queue.pop_front();
  if (i.wait) {
    reach(i.wait);
  } else if (i.record) {
    i.record->reached = true;
    i.record->time = std::chrono::steady_clock::now();
  } else if (!i.work()) {
    s->failed = true;
  }
}

void reach(const place &p) {
  while (p && !p->reached) do_first(p->stream);
}

bool drain(cudaStream_t s) {
  while (!s->queue.empty()) do_first(s);
  bool ok = !s->failed;
  s->failed = false;
  return ok;
}

/* The last made first: the first one is the one that does not wait for the others. */
void drain_device(int of) {
  for (size_t i = streams.size(); i-- > 0;)
    if (of < 0 || streams[i]->device == of) drain(streams[i]);
}

void put(cudaStream_t s, const item &i) {
  s->queue.push_back(i);
  if (!ty_emu::lazy()) drain(s);
}

bool holds(const std::map<uintptr_t, size_t> &map, const void *p) {
  auto at = map.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (at == map.begin()) return false;
  --at;
  return reinterpret_cast<uintptr_t>(p) < at->first + at->second;
}
bool ordinary(const void *p) { return !holds(locked, p) && !holds(devices_memory, p); }

cudaError_t allocate(void **p, size_t bytes, std::map<uintptr_t, size_t> *map) {
  *p = nullptr;
  if (strict_captures) return note(cudaErrorStreamCaptureUnsupported);
  if (bytes > size_t{ MEGABYTES } << 20 || posix_memalign(p, 256, bytes ? bytes : 1) != 0)
    return note(cudaErrorMemoryAllocation);
  memset(*p, 0xff, bytes);
  std::lock_guard<std::recursive_mutex> guard(hold);
  (*map)[reinterpret_cast<uintptr_t>(*p)] = bytes;
  return cudaSuccess;
}

/* Waits for whatever may use it, as the driver does. */
void give_back(void *p, std::map<uintptr_t, size_t> *map) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  drain_device(-1);
  map->erase(reinterpret_cast<uintptr_t>(p));
  free(p);
}

cudaError_t refuse(cudaStream_t captured) {
  captured->capturing->broken = true;
  return note(cudaErrorStreamCaptureUnsupported);
}

} // namespace

bool ty_emu::lazy() {
  static const char *wish = getenv("TYCHO_EMULATED_STREAMS");
  static const bool is = wish && strcmp(wish, "lazy") == 0;
  return is;
}

bool ty_emu::enqueue(cudaStream_t stream, const std::function<bool()> &work) {
  if (!stream->capturing) {
    if (!lazy()) return work();
    std::lock_guard<std::recursive_mutex> guard(hold);
    put(stream, { work, nullptr, nullptr });
    return true;
  }
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
    case cudaErrorNotReady: return "cudaErrorNotReady";
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

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? properties.major : int(properties.sharedMemPerBlock);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int wanted) {
  if (wanted < 0 || wanted >= DEVICES) return note(cudaErrorInvalidDevice);
  device = wanted;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate(p, bytes, &devices_memory); }
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned) { return allocate(p, bytes, &devices_memory); }
cudaError_t cudaFree(void *p) {
  give_back(p, &devices_memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return allocate(p, bytes, &locked); }
cudaError_t cudaFreeHost(void *p) {
  give_back(p, &locked);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  *stream = new ty_emu_stream{ flags, device, nullptr, false, false, {} };
  streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream->capturing) return refuse(stream);
  std::lock_guard<std::recursive_mutex> guard(hold);
  return drain(stream) ? cudaSuccess : note(cudaErrorLaunchFailure);
}
cudaError_t cudaDeviceSynchronize() {
  std::lock_guard<std::recursive_mutex> guard(hold);
  for (cudaStream_t stream : streams)
    if (stream->device == device && !drain(stream)) return note(cudaErrorLaunchFailure);
  return cudaSuccess;
}
/* Who asks again and again gets an end of it. */
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  if (stream->queue.empty()) return cudaSuccess;
  do_first(stream);
  return note(stream->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = new ty_emu_event{ flags, nullptr };
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream->capturing) return refuse(stream);
  std::lock_guard<std::recursive_mutex> guard(hold);
  event->at = std::make_shared<moment>();
  event->at->stream = stream;
  put(stream, { nullptr, nullptr, event->at });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (stream->capturing) return refuse(stream);
  std::lock_guard<std::recursive_mutex> guard(hold);
  if (event->at) put(stream, { nullptr, event->at, nullptr });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  if (!event->at || event->at->reached) return cudaSuccess;
  if (event->at->asked++ > 0) reach(event->at);
  return note(event->at->reached ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  reach(event->at);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  if (!from->at || !to->at || (from->flags | to->flags) & cudaEventDisableTiming) return note(cudaErrorInvalidValue);
  if (!from->at->reached || !to->at->reached) return note(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(to->at->time - from->at->time).count();
  return cudaSuccess;
}

/* Ordinary memory of the host is read at the call, through a copy, and written before it returns. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> guard(hold);
  std::shared_ptr<char> staged;
  if (ty_emu::lazy() && !stream->capturing && ordinary(src)) {
    staged.reset(new char[bytes], std::default_delete<char[]>());
    memcpy(staged.get(), src, bytes);
    src = staged.get();
  }
  const bool now = ordinary(dst);
  ty_emu::enqueue(stream, [staged, dst, src, bytes] { return memmove(dst, src, bytes) == dst; });
  if (now && !stream->capturing) drain(stream);
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
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  const list all = graph->work;
  bool ok = ty_emu::enqueue(stream, [all] {
    for (const auto &work : all)
      if (!work()) return false;
    return true;
  });
  return ok ? cudaSuccess : note(cudaErrorLaunchFailure);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
