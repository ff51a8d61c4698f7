/* Attention and its gradients by cuDNN, for f16 and bf16. Its engines know them as graphs of a fixed form: products,
 * the steps of the softmax, and masks made of positions. What they give besides, "stats", is our lse: the maximum of the
 * scaled scores plus the natural logarithm of the sum.
 *
 * The gradient of q is written as it is, not summed up in f32 by atomic additions (the other form that the engines know):
 * so the results do not depend on timing. */
#include "attention_library.cuh"

#include <optional>

extern "C" ty_kernel ty_cuda_copy;

namespace {

enum { Q = 1, K, V, Y, STATS, G, DQ, DK, DV, DELTA, SCALE, HIDDEN, ONE }; /* numbers of tensors in the graphs */

struct task {
  int type;
  int64_t b, h, hk, t, s, d, dv;
  bool causal;
  float scale;
  dnn_shape q, k, v; /* as they lie, rows of any distance */
};

bool takes_rows(const ty_view *v, dnn_shape *shape) {
  for (int i = 0; i < 4; i++) {
    shape->size[i] = v->size[i];
    shape->stride[i] = v->stride[i];
    if (i < 3 && v->size[i] == 1) shape->stride[i] = v->size[3]; /* of no account, but it has to be positive */
    if (i < 3 && (shape->stride[i] <= 0 || shape->stride[i] % 8)) return false;
  }
  return v->stride[3] == 1 && ty_aligned(v->data, 16);
}

/* What the engines of all 9.x do, and do well: halves, heads of at most 128 in steps of 8, no mask but the causal one of
 * as many keys as queries, no packed sequences, no cap of scores. A plan takes about a second to make (0.6 to 1.2 s each on 9.19), which little work does not pay
 * back, and few queries (decoding) are better served by our own kernels anyway, which split the keys. */
bool set_task(task *x, const ty_view *q, const ty_view *k, const ty_view *v, const ty_view *mask, const ty_view *begins,
              const ty_p_attention *params) {
  const int64_t t = q->size[2], s = k->size[2], d = q->size[3], dv = v->size[3];
  if (!ty_is_half(static_cast<ty_dtype>(q->dtype)) || mask || begins || params->window >= 0 || params->softcap > 0)
    return false;
  if (d > 128 || dv > 128 || d % 8 || dv % 8 || t < 64 || s < 64 || (params->causal && t != s)) return false;
  if (q->count == 0 || k->count == 0 || v->count == 0 || t > INT32_MAX || s > INT32_MAX) return false;
  *x = { dnn_type(q->dtype),
         q->size[0],
         q->size[1],
         k->size[1],
         t,
         s,
         d,
         dv,
         params->causal,
         static_cast<float>(params->scale),
         {},
         {},
         {} };
  return takes_rows(q, &x->q) && takes_rows(k, &x->k) && takes_rows(v, &x->v);
}

dnn_key key_of(const task &x, bool backward) {
  dnn_key key = {};
  key.add(100 + backward); /* convolutions have lower first words */
  key.add(x.type);
  key.add(x.causal);
  key.add(x.q);
  key.add(x.k);
  key.add(x.v);
  return key;
}

dnn_shape turned(dnn_shape s) { /* [.., rows, columns] seen as [.., columns, rows] */
  std::swap(s.size[2], s.size[3]);
  std::swap(s.stride[2], s.stride[3]);
  return s;
}

/* The scores below the diagonal, and what hides the others. */
dnn_graph::tensor_t causal(dnn_graph *g, dnn_graph::tensor_t scores, const dnn_shape &all) {
  auto row = g->between(DNN_DATA_INT32, all), column = g->between(DNN_DATA_INT32, all);
  auto seen = g->between(DNN_DATA_BOOLEAN, all), result = g->between(DNN_DATA_FLOAT, all);
  g->pointwise(DNN_POINTWISE_GEN_INDEX, DNN_DATA_INT32, scores, nullptr, row, 2);
  g->pointwise(DNN_POINTWISE_GEN_INDEX, DNN_DATA_INT32, scores, nullptr, column, 3);
  g->pointwise(DNN_POINTWISE_CMP_GE, DNN_DATA_BOOLEAN, row, column, seen);
  g->pointwise(DNN_POINTWISE_BINARY_SELECT, DNN_DATA_FLOAT, scores, g->value(HIDDEN, DNN_DATA_FLOAT), result, -1, seen);
  return result;
}

void describe_forward(dnn_graph *g, const task &x) {
  const dnn_shape all = dnn_packed(x.b, x.h, x.t, x.s), rows = dnn_packed(x.b, x.h, x.t, 1);
  const int f32 = DNN_DATA_FLOAT;
  auto between = [&](const dnn_shape &s) { return g->between(f32, s); };
  auto q = g->tensor(Q, x.type, x.q, 16), k = g->tensor(K, x.type, turned(x.k), 16), v = g->tensor(V, x.type, x.v, 16);
  auto y = g->tensor(Y, x.type, dnn_packed(x.b, x.h, x.t, x.dv), 16), stats = g->tensor(STATS, f32, rows, 16);
  auto product = between(all), scores = between(all), top = between(rows), shifted = between(all);
  auto powers = between(all), total = between(rows), log_total = between(rows), weights = g->between(x.type, all);
  g->matmul(q, k, product);
  g->pointwise(DNN_POINTWISE_MUL, f32, product, g->value(SCALE, f32), scores);
  if (x.causal) scores = causal(g, scores, all);
  g->reduce(DNN_REDUCE_TENSOR_MAX, scores, top);
  g->pointwise(DNN_POINTWISE_SUB, f32, scores, top, shifted);
  g->pointwise(DNN_POINTWISE_EXP, f32, shifted, nullptr, powers);
  g->reduce(DNN_REDUCE_TENSOR_ADD, powers, total);
  g->pointwise(DNN_POINTWISE_LOG, f32, total, nullptr, log_total);
  g->pointwise(DNN_POINTWISE_ADD, f32, top, log_total, stats);
  g->pointwise(DNN_POINTWISE_DIV, f32, powers, total, weights);
  g->matmul(weights, v, y);
}

/* Products of the turned weights (or slopes) with x, summed over the heads that share a key. */
void onto_keys(dnn_graph *g, const task &t, dnn_graph::tensor_t weights, dnn_graph::tensor_t x, int64_t width,
               dnn_graph::tensor_t out) {
  const dnn_shape all = dnn_packed(t.b, t.h, t.t, t.s);
  auto by_key = g->between(t.type, turned(all));
  g->reshape(weights, by_key);
  if (t.h == t.hk) return g->matmul(by_key, x, out);
  auto each = g->between(t.type, dnn_packed(t.b, t.h, t.s, width));
  g->matmul(by_key, x, each);
  g->reduce(DNN_REDUCE_TENSOR_ADD, each, out);
}

void describe_backward(dnn_graph *g, const task &x) {
  const dnn_shape all = dnn_packed(x.b, x.h, x.t, x.s), rows = dnn_packed(x.b, x.h, x.t, 1);
  const dnn_shape results = dnn_packed(x.b, x.h, x.t, x.dv);
  const int f32 = DNN_DATA_FLOAT;
  auto between = [&](const dnn_shape &s) { return g->between(f32, s); };
  auto q = g->tensor(Q, x.type, x.q, 16), kt = g->tensor(K, x.type, turned(x.k), 16);
  auto vt = g->tensor(V, x.type, turned(x.v), 16), y = g->tensor(Y, x.type, results, 16);
  auto dy = g->tensor(G, x.type, results, 16), stats = g->tensor(STATS, f32, rows, 16);
  auto delta = g->tensor(DELTA, f32, rows, 16), scale = g->value(SCALE, f32);

  auto products = between(results), sums = between(rows); /* delta: g y, summed over each row */
  g->pointwise(DNN_POINTWISE_MUL, f32, dy, y, products);
  g->reduce(DNN_REDUCE_TENSOR_ADD, products, sums);
  g->pointwise(DNN_POINTWISE_MUL, f32, sums, g->value(ONE, f32), delta);

  auto product = between(all), scores = between(all), shifted = between(all), weights = between(all);
  g->matmul(q, kt, product);
  g->pointwise(DNN_POINTWISE_MUL, f32, product, scale, scores);
  g->pointwise(DNN_POINTWISE_SUB, f32, scores, stats, shifted);
  if (x.causal) shifted = causal(g, shifted, all);
  g->pointwise(DNN_POINTWISE_EXP, f32, shifted, nullptr, weights);
  onto_keys(g, x, weights, dy, x.dv, g->tensor(DV, x.type, dnn_packed(x.b, x.hk, x.s, x.dv), 16));

  auto slopes = between(all), apart = between(all), weighed = between(all), scaled = g->between(x.type, all);
  g->matmul(dy, vt, slopes);
  g->pointwise(DNN_POINTWISE_SUB, f32, slopes, delta, apart);
  g->pointwise(DNN_POINTWISE_MUL, f32, apart, weights, weighed);
  g->pointwise(DNN_POINTWISE_MUL, f32, weighed, scale, scaled);
  onto_keys(g, x, scaled, q, x.d, g->tensor(DK, x.type, dnn_packed(x.b, x.hk, x.s, x.d), 16));

  auto k = g->between(x.type, x.k);
  g->reshape(kt, k);
  g->matmul(scaled, k, g->tensor(DQ, x.type, dnn_packed(x.b, x.h, x.t, x.d), 16));
}

/* What hides a score. Versions before 9.10 want a number (so says NVIDIA's cudnn-frontend, attn_score_modifiers.h). */
float hidden() {
  return dnn_version() < 91000 ? std::numeric_limits<float>::lowest() : -std::numeric_limits<float>::infinity();
}

/* v, contiguous and in the dtype of the computation: as it is, or copied into memory. */
const void *in_dtype(const ty_view *v, int dtype, std::optional<ty_cuda_scratch> *memory) {
  if (v->dtype == dtype && v->contiguous && ty_aligned(v->data, 16)) return v->data;
  ty_view to = *v;
  for (int d = v->ndim - 1; d >= 0; d--) to.stride[d] = d == v->ndim - 1 ? 1 : to.stride[d + 1] * to.size[d + 1];
  to.contiguous = true;
  to.dtype = static_cast<int16_t>(dtype);
  memory->emplace(static_cast<size_t>(v->count) * ty_dtype_size[dtype]);
  to.data = (*memory)->data;
  const ty_view *out = &to, *in = v;
  ty_kernel_args args = { 1, 1, &out, &in, nullptr, nullptr };
  return to.data && ty_cuda_copy(&args) ? to.data : nullptr;
}

} // namespace

dnn_outcome ty_attention_by_library(const ty_kernel_args *k) {
  const ty_view *q = k->in[0], *y = k->out[0], *lse = k->out[1];
  task x;
  if (!set_task(&x, q, k->in[1], k->in[2], k->in[3], k->in[4], static_cast<const ty_p_attention *>(k->params)) ||
      !ty_aligned(y->data, 16) || !ty_aligned(lse->data, 16) || dnn_version() < 90000)
    return DNN_NOT_THERE;
  float scale = x.scale, cover = hidden();
  std::vector<dnn_data> data = { { Q, q->data }, { K, k->in[1]->data }, { V, k->in[2]->data },
                                 { Y, y->data }, { STATS, lse->data },  { SCALE, &scale } };
  if (x.causal) data.push_back({ HIDDEN, &cover });
  return dnn_run(
      "attention", key_of(x, false), DNN_NARROW | DNN_COMPILES, [&](dnn_graph *g) { describe_forward(g, x); }, data);
}

/* in: g, q, k, v, y, lse, mask, begins; out: dq, dk, dv, the gradient of the mask. */
dnn_outcome ty_attention_backward_by_library(const ty_kernel_args *k) {
  const ty_view *q = k->in[1];
  const int64_t version = dnn_version();
  task x;
  if (!set_task(&x, q, k->in[2], k->in[3], k->in[6], k->in[7], static_cast<const ty_p_attention *>(k->params)))
    return DNN_NOT_THERE;
  /* Known faults of versions, after the checks of NVIDIA's cudnn-frontend: 9.10.0 and 9.10.1 are wrong, and up to 9.15
   * keys beyond the last full 128 count. */
  if (version < 90000 || version == 91000 || version == 91001 || (version <= 91500 && x.s % 128 != 0))
    return DNN_NOT_THERE;
  for (int i = 0; i < 3; i++)
    if (!ty_aligned(k->out[i]->data, 16)) return DNN_NOT_THERE;
  std::optional<ty_cuda_scratch> memory[3];
  const void *g = in_dtype(k->in[0], q->dtype, &memory[0]), *y = in_dtype(k->in[4], q->dtype, &memory[1]);
  const void *lse = in_dtype(k->in[5], TY_F32, &memory[2]);
  ty_cuda_scratch delta(static_cast<size_t>(x.b * x.h * x.t) * sizeof(float));
  if (!g || !y || !lse || !delta.data) return DNN_FAILED;
  float scale = x.scale, cover = hidden(), one = 1;
  std::vector<dnn_data> data = { { Q, q->data },
                                 { K, k->in[2]->data },
                                 { V, k->in[3]->data },
                                 { Y, const_cast<void *>(y) },
                                 { G, const_cast<void *>(g) },
                                 { STATS, const_cast<void *>(lse) },
                                 { DELTA, delta.data },
                                 { DQ, k->out[0]->data },
                                 { DK, k->out[1]->data },
                                 { DV, k->out[2]->data },
                                 { SCALE, &scale },
                                 { ONE, &one } };
  if (x.causal) data.push_back({ HIDDEN, &cover });
  return dnn_run(
      "attention_backward", key_of(x, true), DNN_NARROW | DNN_COMPILES,
      [&](dnn_graph *graph) { describe_backward(graph, x); }, data);
}
