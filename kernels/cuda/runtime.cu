/* GPUs: finding them, their memory, copies, streams and events, graphs, and what went wrong on them. */
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
  cudaStream_t streams[TY_MAX_STREAMS]; /* the first is made when the GPU is first entered, others when asked for */
  int handed_out;
  cudaEvent_t order; /* for one stream that waits for another; behind the lock */
  ty_cuda_trouble *trouble;
  cudaDeviceProp properties;
  char text[384];
} gpus[TY_MAX_GPUS];

thread_local int current = -1;
thread_local uint8_t chosen[TY_MAX_GPUS]; /* the stream of each GPU that this thread gives work to */
thread_local const char *running;         /* the op */
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
    if (!g->streams[0]) error = cudaStreamCreateWithFlags(&g->streams[0], cudaStreamNonBlocking);
    if (error == cudaSuccess && !g->order) error = cudaEventCreateWithFlags(&g->order, cudaEventDisableTiming);
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
  explicit visit(int i) : ok(enter_from(i)), gpu(i) {}
  ~visit() {
    if (before_ >= 0) enter(before_, running);
  }
  const bool ok;
  const int gpu;

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

cudaStream_t stream_of(int i) { return gpus[i].streams[chosen[i]]; }

/* What kernels of any stream have reported so far: false after ty_fail(). */
bool report(int i) {
  ty_cuda_trouble *trouble = gpus[i].trouble;
  if (__atomic_load_n(&trouble->kind, __ATOMIC_ACQUIRE) == TY_NO_TROUBLE) return true;
  ty_cuda_trouble t = *trouble;
  trouble->kind = TY_NO_TROUBLE;
  __atomic_store_n(&trouble->claimed, 0, __ATOMIC_RELEASE);
  const long long index = t.index, size = t.size, more = t.more;
  switch (t.kind) {
    case TY_DIVISION_BY_ZERO: return ty_fail(TY_EINVAL, "%s: integer division by zero (on cuda:%d)", t.op, i);
    case TY_NOT_RISING:
      return ty_fail(TY_EINDEX, "%s: offsets do not rise from 0 to %lld: %lld stands at %lld (on cuda:%d)", t.op, size,
                     index, more, i);
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

bool synchronize(int i, int stream) {
  visit v(i);
  if (!v.ok) return false;
  cudaError_t error = cudaSuccess;
  for (int s = 0; s < TY_MAX_STREAMS && error == cudaSuccess; s++)
    if (gpus[i].streams[s] && (stream < 0 || s == stream)) error = cudaStreamSynchronize(gpus[i].streams[s]);
  return error == cudaSuccess ? report(i) : fail("waiting", error);
}

/* What `stream` is given from now on waits for what `after` has been given until now. */
cudaError_t put_in_order(cudaStream_t stream, int after_gpu, cudaStream_t after) {
  gpu *g = &gpus[after_gpu];
  pthread_mutex_lock(&g->lock); /* another thread would move the event */
  cudaError_t error = cudaEventRecord(g->order, after);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, g->order, 0);
  pthread_mutex_unlock(&g->lock);
  return error;
}

bool copy(int to, void *dst, int from, const void *src, size_t bytes, ty_copy_mode mode) {
  visit v(from >= 0 ? from : to);
  if (!v.ok) return false;
  cudaStream_t stream = ty_cuda_stream();
  if (to >= 0 && from >= 0 && to != from) { /* when the other GPU is done with dst; and it goes on with the copy */
    if (!prepare(&gpus[to])) return false;
    cudaError_t error = put_in_order(stream, to, stream_of(to));
    if (error == cudaSuccess) error = cudaMemcpyPeerAsync(dst, to, src, from, bytes, stream);
    if (error == cudaSuccess) error = put_in_order(stream_of(to), from, stream);
    return error == cudaSuccess || fail("copying", error);
  }
  cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream);
  if (error != cudaSuccess) return fail("copying", error);
  if (mode == TY_COPY_ASYNC || (to >= 0 && (from >= 0 || mode == TY_COPY_ORDINARY))) return true;
  return synchronize(v.gpu, chosen[v.gpu]);
}

void *host_alloc(size_t bytes) {
  visit v(current < 0 ? 0 : current);
  void *p = nullptr;
  if (!v.ok || cudaHostAlloc(&p, bytes, cudaHostAllocPortable) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return p;
}

void host_free(void *p) { cudaFreeHost(p); }

void *paged_alloc(size_t bytes) {
  visit v(current < 0 ? 0 : current);
  void *p = nullptr;
  if (!v.ok || cudaMallocManaged(&p, bytes, cudaMemAttachGlobal) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return p;
}

/* Whichever GPU it is that still uses it. */
void paged_free(void *p) {
  for (int i = 0; i < TY_MAX_GPUS; i++) {
    if (!gpus[i].trouble) continue;
    visit v(i);
    cudaDeviceSynchronize();
  }
  visit v(current < 0 ? 0 : current);
  if (v.ok) cudaFree(p);
}

/* ---- streams and events ---- */

/* Numbers go round: there are as many streams as the driver can tell apart with profit, whatever the program makes. */
int stream_new(int i) {
  visit v(i);
  if (!v.ok) return -1;
  gpu *g = &gpus[i];
  pthread_mutex_lock(&g->lock);
  const int number = 1 + g->handed_out % (TY_MAX_STREAMS - 1);
  cudaStream_t *stream = &g->streams[number];
  cudaError_t error = *stream ? cudaSuccess : cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) g->handed_out++;
  pthread_mutex_unlock(&g->lock);
  return error == cudaSuccess || fail("making a stream", error) ? number : -1;
}

int stream_number(int i) { return chosen[i]; }
void stream_use(int i, int stream) { chosen[i] = static_cast<uint8_t>(stream); }

bool stream_done(int i, int stream) {
  visit v(i);
  const bool done = v.ok && cudaStreamQuery(gpus[i].streams[stream]) != cudaErrorNotReady;
  cudaGetLastError();
  return done;
}

bool stream_order(int i, int stream, int after_gpu, int after_stream) {
  visit v(i);
  if (!v.ok || !prepare(&gpus[after_gpu])) return false;
  cudaError_t error = put_in_order(gpus[i].streams[stream], after_gpu, gpus[after_gpu].streams[after_stream]);
  return error == cudaSuccess || fail("waiting for a stream", error);
}

void *event_new(int i, bool timing) {
  visit v(i);
  cudaEvent_t event = nullptr;
  cudaError_t error = v.ok ? cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming)
                           : cudaErrorInvalidDevice;
  if (error != cudaSuccess && v.ok) fail("making an event", error);
  return event;
}

void event_free(int i, void *event) {
  visit v(i);
  if (v.ok) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

bool event_record(int i, int stream, void *event) {
  visit v(i);
  cudaError_t error = v.ok ? cudaEventRecord(static_cast<cudaEvent_t>(event), gpus[i].streams[stream]) : cudaSuccess;
  return v.ok && (error == cudaSuccess || fail("recording an event", error));
}

bool event_wait(int i, int stream, void *event) {
  visit v(i);
  cudaError_t error = v.ok ? cudaStreamWaitEvent(gpus[i].streams[stream], static_cast<cudaEvent_t>(event), 0)
                           : cudaSuccess;
  return v.ok && (error == cudaSuccess || fail("waiting for an event", error));
}

bool event_done(void *event) {
  const bool done = cudaEventQuery(static_cast<cudaEvent_t>(event)) != cudaErrorNotReady;
  cudaGetLastError();
  return done;
}

bool event_synchronize(void *event) {
  cudaError_t error = cudaEventSynchronize(static_cast<cudaEvent_t>(event));
  return error == cudaSuccess || fail("waiting for an event", error);
}

bool event_elapsed(void *from, void *to, float *milliseconds) {
  cudaError_t error = cudaEventElapsedTime(milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to));
  return error == cudaSuccess || fail("reading events", error);
}

/* ---- graphs ---- */

bool capture(int i) {
  if (!enter(i, running)) return false;
  /* Relaxed: scratch memory may be allocated meanwhile, which is no part of the graph. */
  cudaError_t error = cudaStreamBeginCapture(stream_of(i), cudaStreamCaptureModeRelaxed);
  return error == cudaSuccess || fail("capturing", error);
}

void *captured(int i) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  cudaError_t error = enter(i, running) ? cudaStreamEndCapture(stream_of(i), &graph) : cudaErrorInvalidDevice;
  if (error == cudaSuccess) error = cudaGraphInstantiate(&runnable, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
  if (error != cudaSuccess) fail("capturing", error);
  return runnable;
}

bool graph_launch(int i, void *graph) {
  if (!enter(i, running)) return false;
  cudaError_t error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(i));
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

cudaStream_t ty_cuda_stream(void) { return stream_of(current); }
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
#ifdef TY_CUDA_EMULATED
  backend.caches = ty_emu::lazy(); /* tensors that are given back at once cannot be taken too early */
#else
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
  backend.host_alloc = host_alloc;
  backend.host_free = host_free;
  backend.paged_alloc = paged_alloc;
  backend.paged_free = paged_free;
  backend.stream_new = stream_new;
  backend.stream = stream_number;
  backend.stream_use = stream_use;
  backend.stream_done = stream_done;
  backend.stream_order = stream_order;
  backend.event_new = event_new;
  backend.event_free = event_free;
  backend.event_record = event_record;
  backend.event_wait = event_wait;
  backend.event_done = event_done;
  backend.event_synchronize = event_synchronize;
  backend.event_elapsed = event_elapsed;
  backend.capture = capture;
  backend.captured = captured;
  backend.graph_launch = graph_launch;
  backend.graph_free = graph_free;
  backend.allow_tf32 = allow_tf32;
  backend.library = ty_cuda_library_describe;
  return &backend;
}
