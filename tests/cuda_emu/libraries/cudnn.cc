/* A stand-in for cuDNN on the emulated device: descriptors, heuristics and plans as kernels/cuda/dnn.cu uses them. Each
 * attribute has to be known, of its type and in time. The first guesses are ones that must not be taken. */
#include "cudnn.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace dnn_emu;

struct dnn_context {
  cudaStream_t stream;
};

namespace {

const int SUCCESS = DNN_STATUS_SUCCESS, NOT_SUPPORTED = 3000;
enum { COMPILES_NOT, NOT_ALWAYS_THE_SAME, TENSOR_CORES, PLAIN, ENGINES }; /* the engines */
enum { WORKSPACE = 640 };

/* Attributes by descriptor: name, type, least and most elements; required unless least is 0 (then at least one if set). */
struct rule {
  int kind, name, type, least, most;
};
#define OTHER DNN_TYPE_BACKEND_DESCRIPTOR
const rule rules[] = {
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_UNIQUE_ID, DNN_TYPE_INT64, 1, 1 },
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_DATA_TYPE, DNN_TYPE_DATA_TYPE, 1, 1 },
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_BYTE_ALIGNMENT, DNN_TYPE_INT64, 1, 1 },
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_DIMENSIONS, DNN_TYPE_INT64, 4, 4 },
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_STRIDES, DNN_TYPE_INT64, 4, 4 },
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_IS_VIRTUAL, DNN_TYPE_BOOLEAN, 0, 1 },
  { DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_IS_BY_VALUE, DNN_TYPE_BOOLEAN, 0, 1 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, 1, 1 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_CONV_MODE, DNN_TYPE_CONVOLUTION_MODE, 1, 1 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_SPATIAL_DIMS, DNN_TYPE_INT64, 1, 1 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_DILATIONS, DNN_TYPE_INT64, 2, 2 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_FILTER_STRIDES, DNN_TYPE_INT64, 2, 2 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_PRE_PADDINGS, DNN_TYPE_INT64, 2, 2 },
  { DNN_BACKEND_CONVOLUTION_DESCRIPTOR, DNN_ATTR_CONVOLUTION_POST_PADDINGS, DNN_TYPE_INT64, 2, 2 },
#define CONVOLUTION(kind, prefix, x, w, y)                                                                            \
  { DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##prefix##_ALPHA,           \
    DNN_TYPE_FLOAT, 1, 1 },                                                                                           \
      { DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##prefix##_BETA,        \
        DNN_TYPE_FLOAT, 1, 1 },                                                                                       \
      { DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##prefix##_CONV_DESC,   \
        OTHER, 1, 1 },                                                                                                \
      { DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##prefix##_##x, OTHER,  \
        1, 1 },                                                                                                       \
      { DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##prefix##_##w, OTHER,  \
        1, 1 },                                                                                                       \
  {                                                                                                                   \
    DNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, DNN_ATTR_OPERATION_CONVOLUTION_##prefix##_##y, OTHER, 1, 1 \
  }
  CONVOLUTION(FORWARD, FORWARD, X, W, Y),
  CONVOLUTION(BACKWARD_DATA, BWD_DATA, DX, W, DY),
  CONVOLUTION(BACKWARD_FILTER, BWD_FILTER, X, DW, DY),
  { DNN_BACKEND_POINTWISE_DESCRIPTOR, DNN_ATTR_POINTWISE_MODE, DNN_TYPE_POINTWISE_MODE, 1, 1 },
  { DNN_BACKEND_POINTWISE_DESCRIPTOR, DNN_ATTR_POINTWISE_MATH_PREC, DNN_TYPE_DATA_TYPE, 1, 1 },
  { DNN_BACKEND_POINTWISE_DESCRIPTOR, DNN_ATTR_POINTWISE_AXIS, DNN_TYPE_INT64, 0, 1 },
  { DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, DNN_ATTR_OPERATION_POINTWISE_XDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, DNN_ATTR_OPERATION_POINTWISE_BDESC, OTHER, 0, 1 },
  { DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, DNN_ATTR_OPERATION_POINTWISE_TDESC, OTHER, 0, 1 },
  { DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, DNN_ATTR_OPERATION_POINTWISE_YDESC, OTHER, 1, 1 },
  { DNN_BACKEND_MATMUL_DESCRIPTOR, DNN_ATTR_MATMUL_COMP_TYPE, DNN_TYPE_DATA_TYPE, 1, 1 },
  { DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, DNN_ATTR_OPERATION_MATMUL_ADESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, DNN_ATTR_OPERATION_MATMUL_BDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, DNN_ATTR_OPERATION_MATMUL_CDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, DNN_ATTR_OPERATION_MATMUL_DESC, OTHER, 1, 1 },
  { DNN_BACKEND_REDUCTION_DESCRIPTOR, DNN_ATTR_REDUCTION_OPERATOR, DNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, 1 },
  { DNN_BACKEND_REDUCTION_DESCRIPTOR, DNN_ATTR_REDUCTION_COMP_TYPE, DNN_TYPE_DATA_TYPE, 1, 1 },
  { DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, DNN_ATTR_OPERATION_REDUCTION_XDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, DNN_ATTR_OPERATION_REDUCTION_YDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, DNN_ATTR_OPERATION_REDUCTION_DESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, DNN_ATTR_OPERATION_RESHAPE_XDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, DNN_ATTR_OPERATION_RESHAPE_YDESC, OTHER, 1, 1 },
  { DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, DNN_ATTR_OPERATIONGRAPH_HANDLE, DNN_TYPE_HANDLE, 1, 1 },
  { DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, DNN_ATTR_OPERATIONGRAPH_OPS, OTHER, 1, 64 },
  { DNN_BACKEND_ENGINEHEUR_DESCRIPTOR, DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, OTHER, 1, 1 },
  { DNN_BACKEND_ENGINEHEUR_DESCRIPTOR, DNN_ATTR_ENGINEHEUR_MODE, DNN_TYPE_HEUR_MODE, 1, 1 },
  { DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, DNN_ATTR_EXECUTION_PLAN_HANDLE, DNN_TYPE_HANDLE, 1, 1 },
  { DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, OTHER, 1, 1 },
  { DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS, DNN_TYPE_INT64, 1, 64 },
  { DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, DNN_ATTR_VARIANT_PACK_DATA_POINTERS, DNN_TYPE_VOID_PTR, 1, 64 },
  { DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, DNN_ATTR_VARIANT_PACK_WORKSPACE, DNN_TYPE_VOID_PTR, 1, 1 },
};

const rule *rule_for(int kind, int name) {
  for (const rule &r : rules)
    if (r.kind == kind && r.name == name) return &r;
  return nullptr;
}

descriptor *of(dnn_descriptor d) {
  if (!d) wrong("no descriptor");
  return static_cast<descriptor *>(d);
}

bool is_f64(const descriptor *d) { /* a convolution's scalars are doubles where it computes in f64 */
  for (const auto &a : d->attributes)
    if (a.second.type == OTHER)
      for (void *p : a.second.pointers) {
        const descriptor *o = static_cast<const descriptor *>(p);
        if (o->kind == DNN_BACKEND_CONVOLUTION_DESCRIPTOR)
          return o->word(DNN_ATTR_CONVOLUTION_COMP_TYPE) == DNN_DATA_DOUBLE;
      }
  return false;
}

/* The engines that a way of guessing proposes; weights' gradients are only known to the last way. */
std::vector<int> guesses(const descriptor *guess) {
  const descriptor *graph = guess->other(DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  int64_t mode = guess->word(DNN_ATTR_ENGINEHEUR_MODE);
  const descriptor *first = graph->other(DNN_ATTR_OPERATIONGRAPH_OPS);
  if (!supported(graph)) return {};
  if (first->kind != DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR)
    return { COMPILES_NOT, NOT_ALWAYS_THE_SAME, TENSOR_CORES, PLAIN };
  if (mode == DNN_HEUR_MODE_A) return { COMPILES_NOT, NOT_ALWAYS_THE_SAME };
  return mode == DNN_HEUR_MODE_FALLBACK ? std::vector<int>{ TENSOR_CORES, PLAIN } : std::vector<int>{};
}

void read(attribute *a, int type, int64_t count, const void *value) {
  for (int64_t i = 0; i < count; i++) switch (type) {
      case DNN_TYPE_INT64: a->words.push_back(static_cast<const int64_t *>(value)[i]); break;
      case DNN_TYPE_BOOLEAN: a->words.push_back(static_cast<const bool *>(value)[i]); break;
      case DNN_TYPE_FLOAT: a->numbers.push_back(static_cast<const float *>(value)[i]); break;
      case DNN_TYPE_DOUBLE: a->numbers.push_back(static_cast<const double *>(value)[i]); break;
      case DNN_TYPE_HANDLE:
      case DNN_TYPE_VOID_PTR:
      case OTHER: a->pointers.push_back(static_cast<void *const *>(value)[i]); break;
      default: a->words.push_back(static_cast<const int *>(value)[i]);
    }
}

void check_tensor(const descriptor *d) {
  for (int64_t n : d->words(DNN_ATTR_TENSOR_DIMENSIONS))
    if (n < 1) wrong("a tensor's size is not positive");
  for (int64_t n : d->words(DNN_ATTR_TENSOR_STRIDES))
    if (n < 1) wrong("a tensor's stride is not positive");
  int type = static_cast<int>(d->word(DNN_ATTR_TENSOR_DATA_TYPE));
  int64_t size = type == DNN_DATA_DOUBLE                              ? 8
                 : type == DNN_DATA_HALF || type == DNN_DATA_BFLOAT16 ? 2
                 : type == DNN_DATA_BOOLEAN                           ? 1
                                                                      : 4;
  if (d->word(DNN_ATTR_TENSOR_BYTE_ALIGNMENT) % size) wrong("a tensor's alignment is not one of its elements");
}

int finalize_plan(descriptor *d) {
  descriptor *configuration = of(d->attributes[DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG].pointers[0]);
  if (configuration->kind != DNN_BACKEND_ENGINECFG_DESCRIPTOR) wrong("a plan of something else");
  d->engine = configuration->engine;
  return d->engine == COMPILES_NOT ? NOT_SUPPORTED : SUCCESS;
}

} // namespace

void dnn_emu::wrong(const char *what) {
  fprintf(stderr, "cuDNN (stand-in): %s\n", what);
  abort();
}

extern "C" {

size_t cudnnGetVersion(void) {
  const char *wish = getenv("TYCHO_EMULATED_CUDNN"); /* another version */
  return wish ? static_cast<size_t>(atoll(wish)) : 91900;
}

const char *cudnnGetErrorString(int status) { return status == SUCCESS ? "SUCCESS" : "NOT_SUPPORTED"; }

int cudnnCreate(dnn_handle *handle) {
  *handle = new dnn_context{ nullptr };
  return SUCCESS;
}
int cudnnSetStream(dnn_handle handle, cudaStream_t stream) {
  handle->stream = stream;
  return SUCCESS;
}

int cudnnBackendCreateDescriptor(int kind, dnn_descriptor *d) {
  bool known = kind == DNN_BACKEND_ENGINE_DESCRIPTOR || kind == DNN_BACKEND_ENGINECFG_DESCRIPTOR;
  for (const rule &r : rules) known = known || r.kind == kind;
  if (!known) wrong("an unknown descriptor");
  *d = new descriptor{ kind, false, {}, -1 };
  return SUCCESS;
}
int cudnnBackendDestroyDescriptor(dnn_descriptor d) {
  delete of(d);
  return SUCCESS;
}

int cudnnBackendSetAttribute(dnn_descriptor handle, int name, int type, int64_t count, const void *value) {
  descriptor *d = of(handle);
  const rule *r = rule_for(d->kind, name);
  if (!r) wrong("an attribute that this descriptor does not have");
  if (d->finalized) wrong("an attribute after the descriptor was finalized");
  if (type != r->type && !(r->type == DNN_TYPE_FLOAT && type == DNN_TYPE_DOUBLE)) wrong("an attribute of another type");
  if (count < (r->least ? r->least : 1) || count > r->most || !value) wrong("an attribute of another count");
  attribute a = { type, {}, {}, {} };
  read(&a, type, count, value);
  if (type == OTHER)
    for (void *p : a.pointers)
      if (!of(p)->finalized) wrong("a descriptor is used before it is finalized");
  d->attributes[name] = a;
  return SUCCESS;
}

int cudnnBackendGetAttribute(dnn_descriptor handle, int name, int type, int64_t room, int64_t *count, void *value) {
  descriptor *d = of(handle);
  if (!d->finalized) wrong("a question to a descriptor that is not finalized");
  if (d->kind == DNN_BACKEND_ENGINEHEUR_DESCRIPTOR && name == DNN_ATTR_ENGINEHEUR_RESULTS && type == OTHER) {
    const std::vector<int> engines = guesses(d);
    *count = static_cast<int64_t>(engines.size());
    for (size_t i = 0; value && i < engines.size() && static_cast<int64_t>(i) < room; i++) {
      descriptor *configuration = of(static_cast<dnn_descriptor *>(value)[i]);
      if (configuration->kind != DNN_BACKEND_ENGINECFG_DESCRIPTOR) wrong("results go into configurations");
      configuration->engine = engines[i];
      configuration->finalized = true;
      configuration->attributes[DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH] =
          d->attributes[DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH];
    }
    return SUCCESS;
  }
  if (d->kind == DNN_BACKEND_ENGINECFG_DESCRIPTOR && name == DNN_ATTR_ENGINECFG_ENGINE && type == OTHER && room == 1) {
    descriptor *engine = of(*static_cast<dnn_descriptor *>(value));
    if (engine->kind != DNN_BACKEND_ENGINE_DESCRIPTOR) wrong("an engine goes into an engine");
    engine->engine = d->engine;
    engine->finalized = true;
    *count = 1;
    return SUCCESS;
  }
  if (d->kind == DNN_BACKEND_ENGINE_DESCRIPTOR && name == DNN_ATTR_ENGINE_NUMERICAL_NOTE &&
      type == DNN_TYPE_NUMERICAL_NOTE) {
    *count = d->engine == NOT_ALWAYS_THE_SAME || d->engine == TENSOR_CORES;
    if (*count > room) wrong("no room for notes");
    if (*count)
      *static_cast<int *>(value) = d->engine == TENSOR_CORES ? DNN_NUMERICAL_NOTE_TENSOR_CORE
                                                             : DNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    return SUCCESS;
  }
  if (d->kind == DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && name == DNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE &&
      type == DNN_TYPE_INT64 && room == 1) {
    *count = 1;
    *static_cast<int64_t *>(value) = d->engine == TENSOR_CORES ? WORKSPACE : 0;
    return SUCCESS;
  }
  wrong("a question that has no answer");
}

int cudnnBackendFinalize(dnn_descriptor handle) {
  descriptor *d = of(handle);
  if (d->finalized) wrong("finalized twice");
  for (const rule &r : rules)
    if (r.kind == d->kind && r.least > 0 && !d->has(r.name)) wrong("an attribute is missing");
  for (const auto &a : d->attributes)
    if (rule_for(d->kind, a.first)->type == DNN_TYPE_FLOAT && (a.second.type == DNN_TYPE_DOUBLE) != is_f64(d))
      wrong("scalars of another type than the convolution's");
  if (d->kind == DNN_BACKEND_TENSOR_DESCRIPTOR) check_tensor(d);
  d->finalized = true;
  if (d->kind == DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) supported(d); /* checks it */
  return d->kind == DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ? finalize_plan(d) : SUCCESS;
}

int cudnnBackendExecute(dnn_handle handle, dnn_descriptor plan_handle, dnn_descriptor pack_handle) {
  const descriptor *plan = of(plan_handle), *pack = of(pack_handle);
  if (!handle || !handle->stream || !plan->finalized || !pack->finalized) wrong("an unfinished plan or pack");
  if (plan->engine != TENSOR_CORES && plan->engine != PLAIN) wrong("an engine that is not always the same");
  const auto &numbers = pack->words(DNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto &pointers = pack->attributes.at(DNN_ATTR_VARIANT_PACK_DATA_POINTERS).pointers;
  if (numbers.size() != pointers.size()) wrong("tensors and pointers differ in number");
  data_map data;
  for (size_t i = 0; i < numbers.size(); i++)
    if (!data.emplace(numbers[i], pointers[i]).second) wrong("a tensor has two pointers");
  void *workspace = pack->attributes.at(DNN_ATTR_VARIANT_PACK_WORKSPACE).pointers[0];
  const bool needs = plan->engine == TENSOR_CORES;
  if (needs && !workspace) wrong("the workspace is missing");
  const descriptor *graph =
      plan->other(DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->other(DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  const value_map values = read_values(graph, data);
  bool ok = ty_emu::enqueue(handle->stream, [=] {
    if (needs) memset(workspace, 0xff, WORKSPACE);
    compute(graph, data, values, needs);
    return true;
  });
  return ok ? SUCCESS : NOT_SUPPORTED;
}
}
