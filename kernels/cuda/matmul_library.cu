/* Matrix products by cuBLASLt. It counts columns first: what is computed is the transpose of everything, out' = b' a', so
 * that its bias, one number for each row, is ours for each column. */
#include "matmul.cuh"

#include <cublasLt.h>
#include <pthread.h>

#include <optional>

#include "activation.cuh"
#include "elementwise.cuh"
#include "library.cuh"

extern "C" ty_kernel ty_cuda_copy;

namespace {

/* ---- the library ---- */

#define EACH_FUNCTION(X)       \
  X(Create);                   \
  X(Matmul);                   \
  X(MatmulAlgoGetHeuristic);   \
  X(MatmulDescCreate);         \
  X(MatmulDescDestroy);        \
  X(MatmulDescSetAttribute);   \
  X(MatrixLayoutCreate);       \
  X(MatrixLayoutDestroy);      \
  X(MatrixLayoutSetAttribute); \
  X(MatmulPreferenceCreate);   \
  X(MatmulPreferenceDestroy);  \
  X(MatmulPreferenceSetAttribute);

struct functions {
#define MEMBER(name) decltype(&cublasLt##name) name
  EACH_FUNCTION(MEMBER)
#undef MEMBER
} lt;
bool have;
pthread_once_t once = PTHREAD_ONCE_INIT;

void load() {
  void *library = ty_cuda_library(TY_CUBLASLT);
  have = library != nullptr;
#define RESOLVE(name) have = have && ty_cuda_function(library, "cublasLt" #name, &lt.name)
  EACH_FUNCTION(RESOLVE)
#undef RESOLVE
}

/* ---- plans ---- */

/* What the choice of an algorithm depends on. x is our b, y our a, as the library sees them. */
struct plan_key {
  int64_t rows, columns, depth, x_lead, y_lead, x_step, y_step, out_step, count;
  int dtype, out_dtype, epilogue, filler; /* no padding: keys are compared as bytes */
  uint8_t x_turned, y_turned, adds, tf32, x_align, y_align, c_align, out_align;
};

struct plan {
  plan_key key;
  enum { EMPTY, READY, REFUSED } state;
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t x, y, out;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

enum { PLANS = 512 };

struct gpu {
  pthread_mutex_t lock; /* plans are changed by their use: the bias is written into them */
  cublasLtHandle_t handle;
  size_t workspace; /* what an algorithm may take */
  bool refused;
  plan plans[PLANS];
} gpus[TY_MAX_GPUS];

pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

/* Of this thread's GPU; NULL when there is no library for it. */
gpu *current_gpu() {
  pthread_once(&once, load);
  if (!have || ty_cuda_gpu() >= TY_MAX_GPUS) return nullptr;
  gpu *g = &gpus[ty_cuda_gpu()];
  pthread_mutex_lock(&starting);
  if (!g->handle && !g->refused) {
    int major = 0;
    pthread_mutex_init(&g->lock, nullptr);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ty_cuda_gpu());
    g->workspace = (major >= 9 ? size_t{ 32 } : size_t{ 8 }) << 20;
    g->refused = lt.Create(&g->handle) != CUBLAS_STATUS_SUCCESS;
  }
  pthread_mutex_unlock(&starting);
  return g->refused ? nullptr : g;
}

uint64_t hash(const plan_key &key) { /* FNV-1a over words */
  uint64_t words[sizeof key / 8], h = 14695981039346656037u;
  static_assert(sizeof key % 8 == 0, "whole words");
  memcpy(words, &key, sizeof key);
  for (uint64_t w : words) h = (h ^ w) * 1099511628211u;
  return h ^ h >> 32;
}

cudaDataType_t data_type(int dtype) {
  if (dtype == TY_I8 || dtype == TY_I32) return dtype == TY_I8 ? CUDA_R_8I : CUDA_R_32I;
  return dtype == TY_F64 ? CUDA_R_64F : dtype == TY_F16 ? CUDA_R_16F : dtype == TY_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

template <class T> bool set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t name, T value) {
  return lt.MatmulDescSetAttribute(d, name, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}
template <class T> bool set(cublasLtMatrixLayout_t d, cublasLtMatrixLayoutAttribute_t name, T value) {
  return lt.MatrixLayoutSetAttribute(d, name, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}
template <class T> bool set(cublasLtMatmulPreference_t d, cublasLtMatmulPreferenceAttributes_t name, T value) {
  return lt.MatmulPreferenceSetAttribute(d, name, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}

bool make_layout(cublasLtMatrixLayout_t *layout, int dtype, const plan_key &key, int64_t rows, int64_t columns,
                 int64_t lead, int64_t step) {
  return lt.MatrixLayoutCreate(layout, data_type(dtype), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                               lead) == CUBLAS_STATUS_SUCCESS &&
         set(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(key.count)) &&
         set(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, step);
}

bool describe(plan *p, const plan_key &key) {
  cublasComputeType_t compute = key.dtype == TY_I8    ? CUBLAS_COMPUTE_32I
                                : key.dtype == TY_F64 ? CUBLAS_COMPUTE_64F
                                : key.tf32            ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                      : CUBLAS_COMPUTE_32F;
  cudaDataType_t scale = key.dtype == TY_I8 ? CUDA_R_32I : key.dtype == TY_F64 ? CUDA_R_64F : CUDA_R_32F;
  int64_t n = key.rows, m = key.columns, k = key.depth;
  return lt.MatmulDescCreate(&p->product, compute, scale) == CUBLAS_STATUS_SUCCESS &&
         set(p->product, CUBLASLT_MATMUL_DESC_TRANSA, key.x_turned ? CUBLAS_OP_T : CUBLAS_OP_N) &&
         set(p->product, CUBLASLT_MATMUL_DESC_TRANSB, key.y_turned ? CUBLAS_OP_T : CUBLAS_OP_N) &&
         set(p->product, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(key.epilogue)) &&
         make_layout(&p->x, key.dtype, key, key.x_turned ? k : n, key.x_turned ? n : k, key.x_lead, key.x_step) &&
         make_layout(&p->y, key.dtype, key, key.y_turned ? m : k, key.y_turned ? k : m, key.y_lead, key.y_step) &&
         make_layout(&p->out, key.out_dtype, key, n, m, n, key.out_step);
}

bool choose(gpu *g, plan *p, const plan_key &key) {
  cublasLtMatmulPreference_t wish = nullptr;
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  bool ok = lt.MatmulPreferenceCreate(&wish) == CUBLAS_STATUS_SUCCESS &&
            set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(g->workspace)) &&
            set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{ 1 } << key.x_align) &&
            set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{ 1 } << key.y_align) &&
            set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{ 1 } << key.c_align) &&
            set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{ 1 } << key.out_align) &&
            lt.MatmulAlgoGetHeuristic(g->handle, p->product, p->x, p->y, p->out, p->out, wish, 1, &result, &found) ==
                CUBLAS_STATUS_SUCCESS &&
            found == 1 && result.state == CUBLAS_STATUS_SUCCESS;
  if (wish) lt.MatmulPreferenceDestroy(wish);
  if (ok) p->algorithm = result.algo;
  if (ok) p->workspace = result.workspaceSize;
  return ok;
}

/* The plan for a key, made when it is new; NULL when the library does not do it. A plan whose place another wants goes. */
plan *plan_for(gpu *g, const plan_key &key) {
  plan *p = &g->plans[hash(key) % PLANS];
  if (p->state == plan::EMPTY || memcmp(&p->key, &key, sizeof key) != 0) {
    if (p->product) lt.MatmulDescDestroy(p->product);
    if (p->x) lt.MatrixLayoutDestroy(p->x);
    if (p->y) lt.MatrixLayoutDestroy(p->y);
    if (p->out) lt.MatrixLayoutDestroy(p->out);
    memset(p, 0, sizeof *p);
    p->key = key;
    p->state = describe(p, key) && choose(g, p, key) ? plan::READY : plan::REFUSED;
  }
  return p->state == plan::READY ? p : nullptr;
}

/* ---- operands ---- */

uint8_t alignment(const void *p) { /* as a power of two, up to 256 bytes */
  uint8_t log = 0;
  while (log < 8 && !(reinterpret_cast<uintptr_t>(p) >> log & 1)) log++;
  return log;
}

/* A matrix as the library addresses it: runs of neighbours that begin `lead` elements apart. `turned`: its columns are
 * the runs. step: of each dimension of the batch. */
struct operand {
  const char *data;
  int64_t lead, step[MM_BATCH_DIMS];
  bool turned;
  std::optional<ty_cuda_scratch> copy;
};

bool addressable(operand *x, int64_t rows, int64_t columns, int64_t row, int64_t column) {
  x->turned = false;
  x->lead = rows == 1 ? columns : row;
  if ((column == 1 || columns == 1) && x->lead >= columns) return true;
  x->turned = true;
  x->lead = columns == 1 ? rows : column;
  return (row == 1 || rows == 1) && x->lead >= rows;
}

/* Any other layout is copied first. */
bool set_operand(operand *x, const mm_task &t, const void *data, int64_t rows, int64_t columns, int64_t row,
                 int64_t column, const int64_t *step) {
  memcpy(x->step, step, sizeof x->step);
  x->data = static_cast<const char *>(data);
  if (addressable(x, rows, columns, row, column)) return true;
  ty_view from = {}, to = {};
  from.data = const_cast<void *>(data);
  from.dtype = static_cast<int16_t>(t.dtype);
  from.count = rows * columns;
  int64_t *size = from.size, next = rows * columns;
  for (int d = t.batch_dims - 1; d >= 0; d--) {
    size[from.ndim] = step[d] ? t.size[d] : 1;
    from.stride[from.ndim] = step[d];
    from.count *= size[from.ndim++];
  }
  for (int d = 0; d < t.batch_dims; d++) {
    x->step[d] = step[d] ? next : 0;
    if (step[d]) next *= t.size[d];
  }
  size[from.ndim] = rows, from.stride[from.ndim++] = row;
  size[from.ndim] = columns, from.stride[from.ndim++] = column;
  to = from;
  for (int d = to.ndim - 1; d >= 0; d--) to.stride[d] = d == to.ndim - 1 ? 1 : to.stride[d + 1] * to.size[d + 1];
  to.contiguous = true;
  x->copy.emplace(static_cast<size_t>(to.count) * ty_dtype_size[t.dtype]);
  to.data = x->copy->data;
  if (!to.data) return false;
  const ty_view *out = &to, *in = &from;
  ty_kernel_args args = { 1, 1, &out, &in, nullptr, nullptr };
  x->data = static_cast<const char *>(to.data);
  x->turned = false;
  x->lead = columns;
  return ty_cuda_copy(&args);
}

/* ---- what the library has no epilogue for: the activation, and in f64 the bias ---- */

template <int V, class T>
__global__ void __launch_bounds__(EW_THREADS)
    mm_finish(T *out, const ty_compute<T> *bias, int64_t count, int64_t n, ty_activation activation) {
  int64_t stride = int64_t{ gridDim.x } * EW_THREADS;
  ty_pack<T, V> *packs = reinterpret_cast<ty_pack<T, V> *>(out);
  for (int64_t i = int64_t{ blockIdx.x } * EW_THREADS + threadIdx.x; i < count / V; i += stride) {
    ty_pack<T, V> x = packs[i];
    int64_t column = bias ? i * V % n : 0;
    for (int j = 0; j < V; j++) {
      ty_compute<T> y = ty_widen(x.v[j]);
      if (bias) y += bias[column + j];
      x.v[j] = ty_narrow<T>(ty_activate(activation, y));
    }
    packs[i] = x;
  }
}

bool finish(const mm_task &t, const void *bias, ty_activation activation) {
  return ty_for_floats(t.dtype, "matmul", [&](auto x) {
    typedef decltype(x) T;
    enum { V = 16 / sizeof(T) };
    T *out = static_cast<T *>(t.out);
    const ty_compute<T> *numbers = static_cast<const ty_compute<T> *>(bias);
    int64_t count = t.count * t.m * t.n, n = t.n;
    if (n % V == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0)
      return TY_LAUNCH((mm_finish<V, T>), ty_cuda_blocks(count / V, EW_THREADS), EW_THREADS, 0, out, numbers, count, n,
                       activation);
    return TY_LAUNCH((mm_finish<1, T>), ty_cuda_blocks(count, EW_THREADS), EW_THREADS, 0, out, numbers, count, n,
                     activation);
  });
}

/* The library wants a bias of the result's type, well aligned: for halves it is rounded, as the result is. */
const void *aligned_bias(const mm_task &t, std::optional<ty_cuda_scratch> *copy) {
  if (t.dtype == TY_F32 && alignment(t.bias) >= 4) return t.bias;
  copy->emplace(static_cast<size_t>(t.n) * ty_dtype_size[t.dtype]);
  ty_view from = {};
  from.data = const_cast<void *>(t.bias);
  from.dtype = TY_F32;
  from.ndim = 1;
  from.contiguous = true;
  from.count = from.size[0] = t.n;
  from.stride[0] = 1;
  ty_view to = from;
  to.data = (*copy)->data;
  to.dtype = static_cast<int16_t>(t.dtype);
  const ty_view *out = &to, *in = &from;
  ty_kernel_args args = { 1, 1, &out, &in, nullptr, nullptr };
  return to.data && ty_cuda_copy(&args) ? to.data : nullptr;
}

/* ---- products ---- */

/* One call for `count` products whose matrices are the given steps apart. */
mm_outcome run(gpu *g, const mm_task &t, plan_key key, const char *x, const char *y, const void *bias, const char *c,
               char *out) {
  key.x_align = alignment(x), key.y_align = alignment(y), key.c_align = alignment(c), key.out_align = alignment(out);
  ty_cuda_locked use(&g->lock);
  plan *p = plan_for(g, key);
  if (!p) return MM_NOT_THERE;
  if (bias && !set(p->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)) return MM_NOT_THERE;
  std::optional<ty_cuda_scratch> workspace;
  if (p->workspace) workspace.emplace(p->workspace);
  if (workspace && !workspace->data) return MM_FAILED;
  static const double f64[] = { 0, 1 }; /* the factors have the type of the sums */
  static const float f32[] = { 0, 1 };
  static const int32_t i32[] = { 0, 1 };
  auto factor = [&](int one) -> const void * {
    if (t.dtype == TY_I8) return i32 + one;
    return t.dtype == TY_F64 ? static_cast<const void *>(f64 + one) : f32 + one;
  };
  const void *alpha = factor(1), *beta = factor(key.adds);
  cublasStatus_t status = lt.Matmul(g->handle, p->product, alpha, x, p->x, y, p->y, beta, c, p->out, out, p->out,
                                    &p->algorithm, workspace ? workspace->data : nullptr, p->workspace,
                                    ty_cuda_stream());
  if (status == CUBLAS_STATUS_SUCCESS) return MM_DONE;
  ty_fail(TY_EUNSUPPORTED, "matmul on cuda: cuBLASLt reports status %d", static_cast<int>(status));
  return MM_FAILED;
}

cublasLtEpilogue_t epilogue(bool bias, ty_activation activation) {
  switch (activation) {
    case TY_RELU: return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case TY_GELU_TANH: return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default: return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

/* The longest dimension of the batch goes in one call; the others are counted through. */
mm_outcome run_batch(gpu *g, const mm_task &t, plan_key key, const operand &x, const operand &y, const void *bias) {
  int one = 0;
  int64_t out_step[MM_BATCH_DIMS], calls = 1, next = t.m * t.n;
  const int64_t bytes = ty_dtype_size[t.dtype], out_bytes = ty_dtype_size[t.out_dtype];
  for (int d = 0; d < t.batch_dims; d++) {
    out_step[d] = next;
    next *= t.size[d];
    if (t.size[d] > t.size[one]) one = d;
  }
  key.count = 1;
  if (t.batch_dims) {
    key.count = t.size[one];
    key.x_step = x.step[one], key.y_step = y.step[one], key.out_step = out_step[one];
    calls = t.count / key.count;
  }
  if (key.count > INT32_MAX) return MM_NOT_THERE;
  for (int64_t i = 0; i < calls; i++) {
    int64_t rest = i, x_at = 0, y_at = 0, out_at = 0;
    for (int d = 0; d < t.batch_dims; d++) {
      if (d == one) continue;
      x_at += rest % t.size[d] * x.step[d];
      y_at += rest % t.size[d] * y.step[d];
      out_at += rest % t.size[d] * out_step[d];
      rest /= t.size[d];
    }
    char *out = static_cast<char *>(t.out) + out_at * out_bytes;
    const char *c = t.residual ? static_cast<const char *>(t.residual) + out_at * out_bytes : out;
    mm_outcome outcome = run(g, t, key, x.data + x_at * bytes, y.data + y_at * bytes, bias, c, out);
    if (outcome != MM_DONE) return outcome;
  }
  return MM_DONE;
}

} // namespace

mm_outcome mm_by_library(const mm_task &t) {
  const bool bytes = t.dtype == TY_I8 && t.out_dtype == TY_I32, f64 = t.dtype == TY_F64;
  if ((!ty_is_float(static_cast<ty_dtype>(t.dtype)) && !bytes) || t.k == 0) return MM_NOT_THERE;
  gpu *g = current_gpu();
  if (!g) return MM_NOT_THERE;
  operand x, y;
  if (!set_operand(&x, t, t.b, t.k, t.n, t.b_row, t.b_col, t.b_step) ||
      !set_operand(&y, t, t.a, t.m, t.k, t.a_row, t.a_col, t.a_step))
    return MM_FAILED;
  bool takes_activation = !f64 && (t.activation == TY_RELU || t.activation == TY_GELU_TANH);
  std::optional<ty_cuda_scratch> bias_copy;
  const void *bias = t.bias && !f64 ? aligned_bias(t, &bias_copy) : nullptr;
  if (t.bias && !f64 && !bias) return MM_FAILED;
  plan_key key;
  memset(&key, 0, sizeof key);
  key.rows = t.n, key.columns = t.m, key.depth = t.k;
  key.dtype = t.dtype, key.out_dtype = t.out_dtype;
  key.epilogue = epilogue(bias != nullptr, takes_activation ? t.activation : TY_NO_ACTIVATION);
  key.tf32 = t.dtype == TY_F32 && ty_cuda_tf32();
  key.adds = t.residual != nullptr;
  key.x_lead = x.lead, key.x_turned = x.turned;
  key.y_lead = y.lead, key.y_turned = y.turned;
  mm_outcome outcome = run_batch(g, t, key, x, y, bias);
  if (outcome == MM_NOT_THERE && key.epilogue != CUBLASLT_EPILOGUE_DEFAULT) { /* some layouts have none */
    key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    bias = nullptr, takes_activation = false;
    outcome = run_batch(g, t, key, x, y, bias);
  }
  if (outcome != MM_DONE) return outcome;
  const void *left_bias = bias ? nullptr : t.bias;
  ty_activation left = takes_activation ? TY_NO_ACTIVATION : t.activation;
  return (!left_bias && left == TY_NO_ACTIVATION) || finish(t, left_bias, left) ? MM_DONE : MM_FAILED;
}
