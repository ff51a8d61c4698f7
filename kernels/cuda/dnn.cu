/* cuDNN: finding it, describing graphs, choosing engines, keeping plans. */
#include "dnn.cuh"

#include <pthread.h>
#include <string.h>

#include <optional>

#include "library.cuh"

#if !defined TY_CUDA_EMULATED && __has_include(<cudnn.h>)
#include <cudnn.h>
#define SAME(name, value) static_assert(static_cast<int>(CUDNN_##name) == (value), #name);
TY_EACH_CUDNN_NAME(SAME)
#undef SAME
static_assert(sizeof(cudnnStatus_t) == sizeof(int) && sizeof(cudnnBackendAttributeName_t) == sizeof(int) &&
                  sizeof(cudnnBackendAttributeType_t) == sizeof(int) && sizeof(cudnnDataType_t) == sizeof(int) &&
                  sizeof(cudnnBackendDescriptorType_t) == sizeof(int) && sizeof(cudnnHandle_t) == sizeof(dnn_handle) &&
                  sizeof(cudnnBackendDescriptor_t) == sizeof(dnn_descriptor),
              "enumerations are ints, handles are pointers");
#endif

namespace {

/* ---- the library ---- */

struct functions {
#define MEMBER(name, result, arguments) result(*name) arguments;
  TY_EACH_CUDNN_FUNCTION(MEMBER)
#undef MEMBER
} dnn;
bool have;
pthread_once_t once = PTHREAD_ONCE_INIT;

void load() {
  ty_cuda_library(TY_CUBLASLT); /* cuDNN looks for it by name */
  void *library = ty_cuda_library(TY_CUDNN);
  have = library != nullptr;
#define RESOLVE(name, result, arguments) have = have && ty_cuda_function(library, "cudnn" #name, &dnn.name);
  TY_EACH_CUDNN_FUNCTION(RESOLVE)
#undef RESOLVE
}

/* ---- plans ---- */

struct plan {
  dnn_key key;
  int flags;
  enum { EMPTY, READY, REFUSED } state;
  bool captured; /* a graph of CUDA's holds its kernels, which must stay */
  dnn_descriptor plan;
  int64_t workspace;
  std::vector<dnn_descriptor> all;
};

enum { PLANS = 1024, NEIGHBOURS = 8, MOST_CONFIGURATIONS = 64, MOST_COMPILED = 32 };
const int64_t MOST_WORKSPACE = int64_t{ 1 } << 30;

struct gpu {
  pthread_mutex_t lock;
  dnn_handle handle;
  bool refused;
  int compiled; /* plans that were */
  plan *plans;  /* PLANS, kept to the end: each stands at one of NEIGHBOURS places from that of its hash */
} gpus[TY_MAX_GPUS];
pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

bool capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(ty_cuda_stream(), &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

/* Of this thread's GPU; NULL when there is no library for it. While kernels are captured nothing is started. */
gpu *current_gpu() {
  pthread_once(&once, load);
  if (!have || ty_cuda_gpu() >= TY_MAX_GPUS) return nullptr;
  gpu *g = &gpus[ty_cuda_gpu()];
  pthread_mutex_lock(&starting);
  if (!g->handle && !g->refused && !capturing()) {
    pthread_mutex_init(&g->lock, nullptr);
    g->plans = new plan[PLANS]();
    g->refused = dnn.Create(&g->handle) != DNN_STATUS_SUCCESS;
  }
  pthread_mutex_unlock(&starting);
  return g->handle && !g->refused ? g : nullptr;
}

void destroy(std::vector<dnn_descriptor> *all) {
  while (!all->empty()) { /* the users before the used */
    dnn.BackendDestroyDescriptor(all->back());
    all->pop_back();
  }
}

uint64_t hash(const dnn_key &key) { /* FNV-1a over words */
  uint64_t h = 14695981039346656037u;
  for (int i = 0; i < key.used; i++) h = (h ^ static_cast<uint64_t>(key.words[i])) * 1099511628211u;
  return h ^ h >> 32;
}

bool same(const plan &p, const dnn_key &key, int flags) {
  return p.state != plan::EMPTY && p.flags == flags && p.key.used == key.used &&
         memcmp(p.key.words, key.words, static_cast<size_t>(key.used) * sizeof *key.words) == 0;
}

bool get(dnn_descriptor d, int name, int type, int64_t room, int64_t *count, void *value) {
  return dnn.BackendGetAttribute(d, name, type, room, count, value) == DNN_STATUS_SUCCESS;
}

/* Whether an engine keeps to what we promise: results that depend on nothing but the arguments, sums in f32, f32 that is
 * not rounded. Fourier transforms are left out as well: an infinity in one place would spread to all others. */
bool acceptable(dnn_descriptor configuration, bool narrow) {
  dnn_descriptor engine = nullptr;
  int notes[64];
  int64_t count = 0;
  if (dnn.BackendCreateDescriptor(DNN_BACKEND_ENGINE_DESCRIPTOR, &engine) != DNN_STATUS_SUCCESS) return false;
  bool ok = get(configuration, DNN_ATTR_ENGINECFG_ENGINE, DNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine) &&
            get(engine, DNN_ATTR_ENGINE_NUMERICAL_NOTE, DNN_TYPE_NUMERICAL_NOTE, 64, &count, notes);
  dnn.BackendDestroyDescriptor(engine);
  for (int64_t i = 0; ok && i < count && i < 64; i++) switch (notes[i]) {
      case DNN_NUMERICAL_NOTE_NONDETERMINISTIC:
      case DNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
      case DNN_NUMERICAL_NOTE_FFT:
      case DNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: ok = false; break;
      case DNN_NUMERICAL_NOTE_TENSOR_CORE:
      case DNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS: ok = narrow; break;
      default: break;
    }
  return ok;
}

/* The plan of one configuration; false when it cannot be had. */
bool try_configuration(gpu *g, plan *p, dnn_descriptor configuration) {
  dnn_descriptor made = nullptr;
  int64_t count = 0, bytes = 0;
  if (dnn.BackendCreateDescriptor(DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &made) != DNN_STATUS_SUCCESS) return false;
  bool ok = dnn.BackendSetAttribute(made, DNN_ATTR_EXECUTION_PLAN_HANDLE, DNN_TYPE_HANDLE, 1, &g->handle) ==
                DNN_STATUS_SUCCESS &&
            dnn.BackendSetAttribute(made, DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, DNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                    &configuration) == DNN_STATUS_SUCCESS &&
            dnn.BackendFinalize(made) == DNN_STATUS_SUCCESS &&
            get(made, DNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, DNN_TYPE_INT64, 1, &count, &bytes) &&
            bytes <= MOST_WORKSPACE;
  if (!ok) {
    dnn.BackendDestroyDescriptor(made);
    return false;
  }
  p->all.push_back(configuration);
  p->all.push_back(made);
  p->plan = made;
  p->workspace = bytes;
  return true;
}

/* The first acceptable configuration that one way of guessing, best guess first, proposes. */
bool choose(gpu *g, plan *p, dnn_descriptor graph, int mode) {
  dnn_descriptor guess = nullptr, proposed[MOST_CONFIGURATIONS] = {};
  int64_t count = 0;
  int made = 0;
  bool found = false;
  if (dnn.BackendCreateDescriptor(DNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &guess) != DNN_STATUS_SUCCESS) return false;
  bool ok = dnn.BackendSetAttribute(guess, DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, DNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                    &graph) == DNN_STATUS_SUCCESS &&
            dnn.BackendSetAttribute(guess, DNN_ATTR_ENGINEHEUR_MODE, DNN_TYPE_HEUR_MODE, 1, &mode) ==
                DNN_STATUS_SUCCESS &&
            dnn.BackendFinalize(guess) == DNN_STATUS_SUCCESS &&
            get(guess, DNN_ATTR_ENGINEHEUR_RESULTS, DNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr);
  if (count > MOST_CONFIGURATIONS) count = MOST_CONFIGURATIONS;
  for (; ok && made < count; made++)
    ok = dnn.BackendCreateDescriptor(DNN_BACKEND_ENGINECFG_DESCRIPTOR, &proposed[made]) == DNN_STATUS_SUCCESS;
  int64_t given = 0;
  if (ok && made) ok = get(guess, DNN_ATTR_ENGINEHEUR_RESULTS, DNN_TYPE_BACKEND_DESCRIPTOR, made, &given, proposed);
  for (int i = 0; ok && i < given && i < made && !found; i++) {
    found = acceptable(proposed[i], p->flags & DNN_NARROW) && try_configuration(g, p, proposed[i]);
    if (found) proposed[i] = nullptr; /* the plan's now */
  }
  for (int i = 0; i < made; i++)
    if (proposed[i]) dnn.BackendDestroyDescriptor(proposed[i]);
  dnn.BackendDestroyDescriptor(guess);
  return found;
}

void build(gpu *g, plan *p, const std::function<void(dnn_graph *)> &describe) {
  dnn_graph graph;
  describe(&graph);
  bool ok = graph.finish(g->handle);
  p->all.swap(graph.all);
  ok = ok && (choose(g, p, graph.graph, DNN_HEUR_MODE_A) || choose(g, p, graph.graph, DNN_HEUR_MODE_B) ||
              choose(g, p, graph.graph, DNN_HEUR_MODE_FALLBACK));
  p->state = ok ? plan::READY : plan::REFUSED;
  if (!ok) destroy(&p->all);
}

/* The plan for a key, made when it is new; NULL when there can be none. When all places for it are taken, one that no
 * graph of CUDA's holds goes, after its last use. */
plan *plan_for(gpu *g, const dnn_key &key, int flags, const std::function<void(dnn_graph *)> &describe) {
  uint64_t first = hash(key);
  plan *empty = nullptr, *other = nullptr;
  for (int i = 0; i < NEIGHBOURS; i++) {
    plan *p = &g->plans[(first + static_cast<uint64_t>(i)) % PLANS];
    if (same(*p, key, flags)) return p->state == plan::READY ? p : nullptr;
    if (p->state == plan::EMPTY && !empty) empty = p;
    if (p->state != plan::EMPTY && !p->captured && (!other || p->state == plan::REFUSED)) other = p;
  }
  plan *p = empty ? empty : other;
  if (!p || capturing() || (flags & DNN_COMPILES && g->compiled >= MOST_COMPILED)) return nullptr;
  if (!empty && cudaDeviceSynchronize() != cudaSuccess) return nullptr; /* any stream may run it */
  destroy(&p->all);
  p->key = key;
  p->flags = flags;
  g->compiled += (flags & DNN_COMPILES) != 0;
  p->captured = false;
  build(g, p, describe);
  return p->state == plan::READY ? p : nullptr;
}

int execute(gpu *g, plan *p, void *workspace, const std::vector<dnn_data> &data) {
  int64_t numbers[32];
  void *pointers[32];
  int64_t count = 0;
  for (const dnn_data &d : data) {
    numbers[count] = d.number;
    pointers[count++] = d.p;
  }
  dnn_descriptor pack = nullptr;
  int status = dnn.BackendCreateDescriptor(DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
  if (status != DNN_STATUS_SUCCESS) return status;
  status = dnn.BackendSetAttribute(pack, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS, DNN_TYPE_INT64, count, numbers);
  if (status == DNN_STATUS_SUCCESS)
    status = dnn.BackendSetAttribute(pack, DNN_ATTR_VARIANT_PACK_DATA_POINTERS, DNN_TYPE_VOID_PTR, count, pointers);
  if (status == DNN_STATUS_SUCCESS)
    status = dnn.BackendSetAttribute(pack, DNN_ATTR_VARIANT_PACK_WORKSPACE, DNN_TYPE_VOID_PTR, 1, &workspace);
  if (status == DNN_STATUS_SUCCESS) status = dnn.BackendFinalize(pack);
  if (status == DNN_STATUS_SUCCESS) status = dnn.BackendExecute(g->handle, p->plan, pack);
  dnn.BackendDestroyDescriptor(pack);
  return status;
}

} // namespace

int64_t dnn_version(void) { return current_gpu() ? ty_cuda_library_version(TY_CUDNN) : 0; }

int dnn_type(int dtype) {
  return dtype == TY_F64    ? DNN_DATA_DOUBLE
         : dtype == TY_F16  ? DNN_DATA_HALF
         : dtype == TY_BF16 ? DNN_DATA_BFLOAT16
                            : DNN_DATA_FLOAT;
}

int dnn_alignment(const void *p) {
  int bytes = 1;
  while (bytes < 16 && reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(2 * bytes) == 0) bytes *= 2;
  return bytes;
}

dnn_shape dnn_packed(int64_t a, int64_t b, int64_t c, int64_t d) {
  return dnn_shape{ { a, b, c, d }, { b * c * d, c * d, d, 1 } };
}

dnn_outcome dnn_run(const char *op, const dnn_key &key, int flags, const std::function<void(dnn_graph *)> &describe,
                    const std::vector<dnn_data> &data) {
  gpu *g = current_gpu();
  if (!g) return DNN_NOT_THERE;
  ty_cuda_locked use(&g->lock);
  plan *p = plan_for(g, key, flags, describe);
  if (!p) return DNN_NOT_THERE;
  std::optional<ty_cuda_scratch> workspace;
  if (p->workspace > 0) workspace.emplace(static_cast<size_t>(p->workspace));
  if (workspace && !workspace->data) return DNN_FAILED;
  p->captured = p->captured || capturing();
  int status = dnn.SetStream(g->handle, ty_cuda_stream());
  if (status == DNN_STATUS_SUCCESS) status = execute(g, p, workspace ? workspace->data : nullptr, data);
  if (status == DNN_STATUS_SUCCESS) return DNN_DONE;
  ty_fail(TY_EUNSUPPORTED, "%s on cuda: cuDNN reports %s", op, dnn.GetErrorString(status));
  return DNN_FAILED;
}

/* ---- descriptions ---- */

dnn_descriptor dnn_graph::make(int kind) {
  dnn_descriptor d = nullptr;
  ok_ = ok_ && dnn.BackendCreateDescriptor(kind, &d) == DNN_STATUS_SUCCESS;
  if (d) all.push_back(d);
  return d;
}

void dnn_graph::set(dnn_descriptor d, int name, int type, int64_t count, const void *value) {
  ok_ = ok_ && dnn.BackendSetAttribute(d, name, type, count, value) == DNN_STATUS_SUCCESS;
}
void dnn_graph::set(dnn_descriptor d, int name, dnn_descriptor other) {
  if (other) set(d, name, DNN_TYPE_BACKEND_DESCRIPTOR, 1, &other);
}

void dnn_graph::seal(dnn_descriptor d) { ok_ = ok_ && dnn.BackendFinalize(d) == DNN_STATUS_SUCCESS; }

dnn_graph::tensor_t dnn_graph::describe(int64_t number, int type, const dnn_shape &shape, int64_t alignment,
                                        bool is_virtual, bool by_value) {
  dnn_descriptor d = make(DNN_BACKEND_TENSOR_DESCRIPTOR);
  set(d, DNN_ATTR_TENSOR_UNIQUE_ID, DNN_TYPE_INT64, 1, &number);
  set(d, DNN_ATTR_TENSOR_DATA_TYPE, DNN_TYPE_DATA_TYPE, type);
  set(d, DNN_ATTR_TENSOR_BYTE_ALIGNMENT, DNN_TYPE_INT64, 1, &alignment);
  set(d, DNN_ATTR_TENSOR_DIMENSIONS, DNN_TYPE_INT64, 4, shape.size);
  set(d, DNN_ATTR_TENSOR_STRIDES, DNN_TYPE_INT64, 4, shape.stride);
  if (is_virtual) set(d, DNN_ATTR_TENSOR_IS_VIRTUAL, DNN_TYPE_BOOLEAN, 1, &is_virtual);
  if (by_value) set(d, DNN_ATTR_TENSOR_IS_BY_VALUE, DNN_TYPE_BOOLEAN, 1, &by_value);
  seal(d);
  return d;
}

void dnn_graph::convolution(direction which, int type, tensor_t x, tensor_t weight, tensor_t y,
                            const ty_p_conv &options) {
  static const struct {
    int kind, alpha, beta, options, x, weight, y;
  } names[] = {
    { DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
      DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
      DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
      DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y },
    { DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
      DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
      DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
      DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY },
    { DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
      DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
      DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
      DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY },
  };
  const auto &n = names[which];
  const int64_t dims = 2;
  dnn_descriptor c = make(DNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  set(c, DNN_ATTR_CONVOLUTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, type);
  set(c, DNN_ATTR_CONVOLUTION_CONV_MODE, DNN_TYPE_CONVOLUTION_MODE, DNN_CROSS_CORRELATION);
  set(c, DNN_ATTR_CONVOLUTION_SPATIAL_DIMS, DNN_TYPE_INT64, 1, &dims);
  set(c, DNN_ATTR_CONVOLUTION_DILATIONS, DNN_TYPE_INT64, dims, options.dilation);
  set(c, DNN_ATTR_CONVOLUTION_FILTER_STRIDES, DNN_TYPE_INT64, dims, options.stride);
  set(c, DNN_ATTR_CONVOLUTION_PRE_PADDINGS, DNN_TYPE_INT64, dims, options.padding);
  set(c, DNN_ATTR_CONVOLUTION_POST_PADDINGS, DNN_TYPE_INT64, dims, options.padding);
  seal(c);
  const double one_f64 = 1, zero_f64 = 0;
  const float one = 1, zero = 0;
  const bool f64 = type == DNN_DATA_DOUBLE;
  dnn_descriptor d = make(n.kind);
  set(d, n.alpha, f64 ? DNN_TYPE_DOUBLE : DNN_TYPE_FLOAT, 1, f64 ? static_cast<const void *>(&one_f64) : &one);
  set(d, n.beta, f64 ? DNN_TYPE_DOUBLE : DNN_TYPE_FLOAT, 1, f64 ? static_cast<const void *>(&zero_f64) : &zero);
  set(d, n.options, c);
  set(d, n.x, x);
  set(d, n.weight, weight);
  set(d, n.y, y);
  seal(d);
  operations_.push_back(d);
}

void dnn_graph::matmul(tensor_t a, tensor_t b, tensor_t out) {
  dnn_descriptor options = make(DNN_BACKEND_MATMUL_DESCRIPTOR), d;
  set(options, DNN_ATTR_MATMUL_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
  seal(options);
  d = make(DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  set(d, DNN_ATTR_OPERATION_MATMUL_ADESC, a);
  set(d, DNN_ATTR_OPERATION_MATMUL_BDESC, b);
  set(d, DNN_ATTR_OPERATION_MATMUL_CDESC, out);
  set(d, DNN_ATTR_OPERATION_MATMUL_DESC, options);
  seal(d);
  operations_.push_back(d);
}

void dnn_graph::reduce(int op, tensor_t x, tensor_t out) {
  dnn_descriptor options = make(DNN_BACKEND_REDUCTION_DESCRIPTOR), d;
  set(options, DNN_ATTR_REDUCTION_OPERATOR, DNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
  set(options, DNN_ATTR_REDUCTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, DNN_DATA_FLOAT);
  seal(options);
  d = make(DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  set(d, DNN_ATTR_OPERATION_REDUCTION_XDESC, x);
  set(d, DNN_ATTR_OPERATION_REDUCTION_YDESC, out);
  set(d, DNN_ATTR_OPERATION_REDUCTION_DESC, options);
  seal(d);
  operations_.push_back(d);
}

void dnn_graph::reshape(tensor_t x, tensor_t out) {
  dnn_descriptor d = make(DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  set(d, DNN_ATTR_OPERATION_RESHAPE_XDESC, x);
  set(d, DNN_ATTR_OPERATION_RESHAPE_YDESC, out);
  seal(d);
  operations_.push_back(d);
}

void dnn_graph::pointwise(int mode, int type, tensor_t x, tensor_t b, tensor_t out, int axis, tensor_t mask) {
  const int64_t along = axis;
  dnn_descriptor options = make(DNN_BACKEND_POINTWISE_DESCRIPTOR), d;
  set(options, DNN_ATTR_POINTWISE_MODE, DNN_TYPE_POINTWISE_MODE, mode);
  set(options, DNN_ATTR_POINTWISE_MATH_PREC, DNN_TYPE_DATA_TYPE, type);
  if (axis >= 0) set(options, DNN_ATTR_POINTWISE_AXIS, DNN_TYPE_INT64, 1, &along);
  seal(options);
  d = make(DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  set(d, DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, options);
  set(d, DNN_ATTR_OPERATION_POINTWISE_XDESC, x);
  set(d, DNN_ATTR_OPERATION_POINTWISE_BDESC, b);
  set(d, DNN_ATTR_OPERATION_POINTWISE_TDESC, mask);
  set(d, DNN_ATTR_OPERATION_POINTWISE_YDESC, out);
  seal(d);
  operations_.push_back(d);
}

bool dnn_graph::finish(dnn_handle handle) {
  graph = make(DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set(graph, DNN_ATTR_OPERATIONGRAPH_HANDLE, DNN_TYPE_HANDLE, 1, &handle);
  set(graph, DNN_ATTR_OPERATIONGRAPH_OPS, DNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(operations_.size()),
      operations_.data());
  seal(graph);
  return ok_;
}
