/* A stand-in for cuBLASLt on the emulated device: the calls that kernels/cuda/matmul_library.cu makes, by plain loops. It
 * refuses what the documentation of cuBLASLt does not list, and complains when it is used otherwise than agreed. */
#include <algorithm>
#include <cublasLt.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../../kernels/half.h"

struct cublasLtContext {
  int nothing;
};
struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int turned_a, turned_b;
  int epilogue;
  const void *bias;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t lead, step;
  int32_t count;
};
struct cublasLtMatmulPreferenceOpaque_t {
  uint64_t workspace;
  uint32_t aligned[4];
};

namespace {

typedef cublasLtMatmulDescOpaque_t desc_t;
typedef cublasLtMatrixLayoutOpaque_t layout_t;

/* What a real library would answer with wrong results, or not at all, has to be mended: the tests fail on it. */
cublasStatus_t wrong(const char *what) {
  fprintf(stderr, "cuBLASLt (stand-in): %s\n", what);
  return CUBLAS_STATUS_INVALID_VALUE;
}

size_t bytes_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F: return 8;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 2;
    case CUDA_R_8I: return 1;
    default: return 4;
  }
}

float to_tf32(float x) { /* nearest, 10 bits of fraction */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu;
  memcpy(&x, &bits, 4);
  return x;
}

double load(cudaDataType_t type, const void *p, int64_t i) {
  switch (type) {
    case CUDA_R_64F: return static_cast<const double *>(p)[i];
    case CUDA_R_16F: return ty_f16_to_f32(static_cast<const uint16_t *>(p)[i]);
    case CUDA_R_16BF: return ty_bf16_to_f32(static_cast<const uint16_t *>(p)[i]);
    case CUDA_R_8I: return static_cast<const int8_t *>(p)[i];
    case CUDA_R_32I: return static_cast<const int32_t *>(p)[i];
    default: return static_cast<const float *>(p)[i];
  }
}

void store(cudaDataType_t type, void *p, int64_t i, double x) {
  switch (type) {
    case CUDA_R_64F: static_cast<double *>(p)[i] = x; break;
    case CUDA_R_16F: static_cast<uint16_t *>(p)[i] = ty_f32_to_f16(static_cast<float>(x)); break;
    case CUDA_R_16BF: static_cast<uint16_t *>(p)[i] = ty_f32_to_bf16(static_cast<float>(x)); break;
    case CUDA_R_32I: static_cast<int32_t *>(p)[i] = static_cast<int32_t>(static_cast<int64_t>(x)); break;
    default: static_cast<float *>(p)[i] = static_cast<float>(x);
  }
}

double activate(int epilogue, double x) {
  if (epilogue == CUBLASLT_EPILOGUE_RELU || epilogue == CUBLASLT_EPILOGUE_RELU_BIAS) return x < 0 ? 0 : x;
  if (epilogue == CUBLASLT_EPILOGUE_GELU || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS)
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  return x;
}
bool has_bias(int epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_RELU_BIAS ||
         epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
}

/* The table of types in the documentation of cublasLtMatmul(), as far as we use it. */
bool types_fit(const desc_t *d, cudaDataType_t in, cudaDataType_t out) {
  switch (d->compute) {
    case CUBLAS_COMPUTE_32I: return d->scale == CUDA_R_32I && in == CUDA_R_8I && out == CUDA_R_32I;
    case CUBLAS_COMPUTE_64F: return d->scale == CUDA_R_64F && in == CUDA_R_64F && out == CUDA_R_64F;
    case CUBLAS_COMPUTE_32F_FAST_TF32: return d->scale == CUDA_R_32F && in == CUDA_R_32F && out == CUDA_R_32F;
    case CUBLAS_COMPUTE_32F:
      return d->scale == CUDA_R_32F && in == out && (in == CUDA_R_32F || in == CUDA_R_16F || in == CUDA_R_16BF);
  }
  return false;
}

struct shape {
  int64_t m, n, k;
};
cublasStatus_t shape_of(const desc_t *d, const layout_t *a, const layout_t *b, const layout_t *c, const layout_t *out,
                        shape *s) {
  if (!d || !a || !b || !c || !out) return wrong("a description is missing");
  s->m = static_cast<int64_t>(d->turned_a ? a->columns : a->rows);
  s->k = static_cast<int64_t>(d->turned_a ? a->rows : a->columns);
  s->n = static_cast<int64_t>(d->turned_b ? b->rows : b->columns);
  if (static_cast<int64_t>(d->turned_b ? b->columns : b->rows) != s->k) return wrong("the depths differ");
  for (const layout_t *x : { c, out })
    if (static_cast<int64_t>(x->rows) != s->m || static_cast<int64_t>(x->columns) != s->n)
      return wrong("the result's shape");
  for (const layout_t *x : { a, b, c, out }) {
    if (x->lead < static_cast<int64_t>(x->rows)) return wrong("a leading dimension is less than the rows");
    if (x->count != out->count || x->count < 1) return wrong("the batches differ");
  }
  if (s->m < 1 || s->n < 1 || s->k < 1) return wrong("an empty product");
  if (a->type != b->type || c->type != out->type || !types_fit(d, a->type, out->type)) return wrong("the types");
  if (out->count > 1 && out->step == 0) return wrong("products of a batch overwrite each other");
  return CUBLAS_STATUS_SUCCESS;
}

template <class T> cublasStatus_t read(T *to, const void *value, size_t bytes) {
  if (!value || bytes != sizeof *to) return wrong("an attribute of another size");
  memcpy(to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

enum { WORKSPACE = 512, MAGIC = 0x7479 };

bool multiply(const desc_t &d, const layout_t &la, const layout_t &lb, const layout_t &lc, shape s, const char *a,
              const char *b, double beta, const char *c, char *out) {
  const bool tf32 = d.compute == CUBLAS_COMPUTE_32F_FAST_TF32, exact = d.compute != CUBLAS_COMPUTE_64F;
  auto factor = [&](cudaDataType_t type, const char *p, int64_t at) {
    const double v = load(type, p, at);
    return tf32 ? to_tf32(static_cast<float>(v)) : v;
  };
  std::vector<double> right(static_cast<size_t>(s.k * s.n)), sums(static_cast<size_t>(s.n));
  for (int64_t i = 0; i < lc.count; i++) {
    const char *pa = a + i * la.step * static_cast<int64_t>(bytes_of(la.type));
    const char *pb = b + i * lb.step * static_cast<int64_t>(bytes_of(lb.type));
    const int64_t at = i * lc.step * static_cast<int64_t>(bytes_of(lc.type));
    for (int64_t q = 0; q < s.k; q++) /* [k, n], so that the loop below has neighbours */
      for (int64_t y = 0; y < s.n; y++)
        right[static_cast<size_t>(q * s.n + y)] = factor(lb.type, pb, d.turned_b ? y + q * lb.lead : q + y * lb.lead);
    for (int64_t x = 0; x < s.m; x++) {
      std::fill(sums.begin(), sums.end(), 0);
      for (int64_t q = 0; q < s.k; q++) {
        const double v = factor(la.type, pa, d.turned_a ? q + x * la.lead : x + q * la.lead);
        const double *line = &right[static_cast<size_t>(q * s.n)];
        for (int64_t y = 0; y < s.n; y++) sums[static_cast<size_t>(y)] += v * line[y];
      }
      for (int64_t y = 0; y < s.n; y++) {
        double sum = sums[static_cast<size_t>(y)];
        if (exact && lc.type != CUDA_R_32I) sum = static_cast<float>(sum);
        if (beta != 0) sum += beta * load(lc.type, c + at, x + y * lc.lead);
        if (has_bias(d.epilogue)) sum += load(lc.type, d.bias, x);
        store(lc.type, out + at, x + y * lc.lead, activate(d.epilogue, sum));
      }
    }
  }
  return true;
}

} // namespace

size_t cublasLtGetVersion(void) {
  const char *wish = getenv("TYCHO_EMULATED_CUBLASLT"); /* another version */
  return wish ? static_cast<size_t>(atoll(wish)) : 130000;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  *handle = new cublasLtContext{ 0 };
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale) {
  *desc = new desc_t{ compute, scale, 0, 0, CUBLASLT_EPILOGUE_DEFAULT, nullptr };
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes) {
  switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return read(&desc->turned_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return read(&desc->turned_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return read(&desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return read(&desc->bias, value, bytes);
  }
  return wrong("an unknown attribute of a product");
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t lead) {
  *layout = new layout_t{ type, rows, columns, lead, 0, 1 };
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t name,
                                                const void *value, size_t bytes) {
  switch (name) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return read(&layout->count, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return read(&layout->step, value, bytes);
  }
  return wrong("an unknown attribute of a layout");
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{ 0, { 256, 256, 256, 256 } };
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t name, const void *value,
                                                    size_t bytes) {
  switch (name) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return read(&preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return read(&preference->aligned[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return read(&preference->aligned[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return read(&preference->aligned[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return read(&preference->aligned[3], value, bytes);
  }
  return wrong("an unknown preference");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *found) {
  shape s;
  *found = 0;
  if (!handle || !preference || wanted < 1) return wrong("nothing is asked for");
  cublasStatus_t status = shape_of(desc, a, b, c, d, &s);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (desc->epilogue != CUBLASLT_EPILOGUE_DEFAULT && (a->type == CUDA_R_64F || a->type == CUDA_R_8I))
    return wrong("an epilogue of this type");
  for (int i = 0; i < 4; i++)
    if (preference->aligned[i] < bytes_of((i < 2 ? a : d)->type)) return wrong("less aligned than an element");
  /* Of what may be refused, some is: products of bytes that tensor cores cannot read, and GELU of wide results, so that
   * the ways around both are taken. */
  if (a->type == CUDA_R_8I && (a->lead % 4 || b->lead % 4 || s.k % 4)) return CUBLAS_STATUS_NOT_SUPPORTED;
  bool gelu = desc->epilogue == CUBLASLT_EPILOGUE_GELU || desc->epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
  if (gelu && s.m % 2) return CUBLAS_STATUS_NOT_SUPPORTED;
  *results = {};
  uint64_t least = 8; /* of the alignments, as powers of two: an algorithm is for what it was asked for */
  for (uint32_t aligned : preference->aligned)
    for (; least && (uint64_t{ 1 } << least) > aligned;) least--;
  results->algo.data[0] = MAGIC | least << 32;
  results->algo.data[1] = reinterpret_cast<uint64_t>(desc);
  results->algo.data[2] = reinterpret_cast<uint64_t>(a);
  results->algo.data[3] = reinterpret_cast<uint64_t>(b);
  results->algo.data[4] = reinterpret_cast<uint64_t>(d);
  results->algo.data[5] = static_cast<uint64_t>(desc->epilogue);
  results->workspaceSize = s.k > 64 && preference->workspace >= WORKSPACE ? WORKSPACE : 0;
  results->algo.data[6] = results->workspaceSize;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  shape s;
  if (!handle || !alpha || !beta || !a || !b || !c || !d || !algo || !stream) return wrong("an argument is missing");
  cublasStatus_t status = shape_of(desc, a_layout, b_layout, c_layout, d_layout, &s);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const uint64_t expected[] = { reinterpret_cast<uint64_t>(desc), reinterpret_cast<uint64_t>(a_layout),
                                reinterpret_cast<uint64_t>(b_layout), reinterpret_cast<uint64_t>(d_layout),
                                static_cast<uint64_t>(desc->epilogue) };
  if ((algo->data[0] & 0xffffffffu) != MAGIC || memcmp(algo->data + 1, expected, sizeof expected) != 0)
    return wrong("the algorithm belongs to another product");
  for (const void *p : { a, b, c, static_cast<const void *>(d) })
    if (reinterpret_cast<uint64_t>(p) % (uint64_t{ 1 } << (algo->data[0] >> 32)))
      return wrong("less aligned than agreed");
  if (algo->data[6] > workspace_bytes || (algo->data[6] && !workspace)) return wrong("the workspace is too small");
  if (reinterpret_cast<uint64_t>(workspace) % 256) return wrong("the workspace is not aligned");
  if (has_bias(desc->epilogue) && (!desc->bias || reinterpret_cast<uint64_t>(desc->bias) % 16))
    return wrong("the bias is missing or not aligned");
  if (load(desc->scale, alpha, 0) != 1) return wrong("alpha is 1");
  double factor = load(desc->scale, beta, 0);
  const desc_t product = *desc;
  const layout_t la = *a_layout, lb = *b_layout, lc = *d_layout;
  if (c_layout->lead != d_layout->lead || c_layout->step != d_layout->step) return wrong("c lies otherwise than d");
  const char *pa = static_cast<const char *>(a), *pb = static_cast<const char *>(b), *pc = static_cast<const char *>(c);
  char *pd = static_cast<char *>(d);
  size_t used = algo->data[6];
  bool ok = ty_emu::enqueue(stream, [=] {
    if (used) memset(workspace, 0xff, used);
    return multiply(product, la, lb, lc, s, pa, pb, factor, pc, pd);
  });
  return ok ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
