/* conv2d and its gradients: by cuDNN where it has an engine for them, else by our own kernels (conv.cu, conv_weight.cu).
 *
 * Images are handed over as they lie, [n, c, h, w]. Tensor cores want the channels innermost; cuDNN's engines for them
 * turn the operands over by themselves, into the workspace, and its heuristics count that in. To do it here would move the
 * same bytes again. */
#include <optional>

#include "activation.cuh"
#include "conv.cuh"
#include "dnn.cuh"

extern "C" ty_kernel ty_cuda_copy;

namespace {

enum { X = 1, WEIGHT, Y, BIAS, RESIDUAL }; /* numbers of tensors in graphs */

dnn_shape shape_of(const ty_view *v) { return dnn_packed(v->size[0], v->size[1], v->size[2], v->size[3]); }

/* A convolution as both the library and the key of its plan take it; x, weight and y by their places in the formula. */
struct task {
  dnn_graph::direction direction;
  const ty_view *x, *weight, *y, *bias, *residual; /* the last two, or NULL */
  ty_p_conv options;
  bool relu;
};

dnn_outcome run(const char *op, const task &t) {
  const int type = dnn_type(t.y->dtype), sums = t.y->dtype == TY_F64 ? DNN_DATA_DOUBLE : DNN_DATA_FLOAT;
  const ty_view *const views[] = { t.x, t.weight, t.y, t.bias, t.residual };
  /* For a channel each, images as they lie have none but cuDNN's reference kernels (of 9.19; on GPUs of 9.0). */
  if (t.weight->size[1] == 1 && t.x->size[1] > 1) return DNN_NOT_THERE;
  dnn_key key = {};
  key.add(t.direction);
  key.add(type);
  key.add(t.relu);
  for (int d = 0; d < 2; d++) {
    key.add(t.options.stride[d]);
    key.add(t.options.padding[d]);
    key.add(t.options.dilation[d]);
  }
  std::vector<dnn_data> data;
  int64_t aligned[6] = {};
  for (int i = 0; i < 5; i++) {
    if (views[i] && (views[i]->count == 0 || views[i]->count > INT32_MAX)) return DNN_NOT_THERE;
    aligned[X + i] = views[i] ? dnn_alignment(views[i]->data) : 0;
    key.add(aligned[X + i]);
    if (views[i]) data.push_back({ X + i, views[i]->data });
  }
  for (int i = 0; i < 3; i++)
    for (int d = 0; d < 4; d++) key.add(views[i]->size[d]);
  auto describe = [&](dnn_graph *g) {
    const dnn_shape size = shape_of(t.y);
    auto x = g->tensor(X, type, shape_of(t.x), aligned[X]), y = g->tensor(Y, type, size, aligned[Y]);
    auto weight = g->tensor(WEIGHT, type, shape_of(t.weight), aligned[WEIGHT]);
    if (!t.bias) return g->convolution(t.direction, sums, x, weight, y, t.options);
    auto now = g->between(sums, size);
    g->convolution(t.direction, sums, x, weight, now, t.options);
    if (t.residual) {
      auto next = g->between(sums, size);
      g->pointwise(DNN_POINTWISE_ADD, sums, now, g->tensor(RESIDUAL, type, size, aligned[RESIDUAL]), next);
      now = next;
    }
    auto next = t.relu ? g->between(sums, size) : y;
    auto bias = g->tensor(BIAS, type, dnn_packed(1, t.bias->count, 1, 1), aligned[BIAS]);
    g->pointwise(DNN_POINTWISE_ADD, sums, now, bias, next);
    if (t.relu) g->pointwise(DNN_POINTWISE_RELU_FWD, sums, next, nullptr, y);
  };
  const bool narrow = t.y->dtype != TY_F32 || ty_cuda_tf32();
  return dnn_run(op, key, narrow ? DNN_NARROW : 0, describe, data);
}

/* ---- what no engine does for images: other activations, a residual without a bias ---- */

/* y = activation(y + bias + residual); blocks over runs of one plane. */
template <int V, class T>
__global__ void __launch_bounds__(EW_THREADS) conv_finish(T *y, const T *bias, const T *residual, int64_t planes,
                                                          int64_t area, int channels, ty_activation activation) {
  typedef ty_compute<T> C;
  const int64_t chunks = (area / V + EW_THREADS - 1) / EW_THREADS;
  for (int64_t block = blockIdx.x; block < planes * chunks; block += gridDim.x) {
    const int64_t plane = block / chunks, i = (block - plane * chunks) * EW_THREADS + threadIdx.x;
    if (i >= area / V) continue;
    const int64_t at = plane * area + i * V;
    const C shift = bias ? ty_widen(bias[plane % channels]) : C{};
    C v[V], more[V];
    ty_load<V>(y + at, v);
    if (residual) ty_load<V>(residual + at, more);
#pragma unroll
    for (int j = 0; j < V; j++) {
      v[j] += shift;
      if (residual) v[j] += more[j];
      v[j] = ty_activate(activation, v[j]);
    }
    ty_store<V>(y + at, v);
  }
}

bool finish(const ty_view *y, const ty_view *bias, const ty_view *residual, ty_activation activation) {
  return ty_for_floats(y->dtype, "conv2d", [&](auto type) {
    typedef decltype(type) T;
    enum { V = 16 / sizeof(T) };
    T *to = static_cast<T *>(y->data);
    const T *shift = ty_data_of<const T>(bias), *more = ty_data_of<const T>(residual);
    const int64_t planes = y->size[0] * y->size[1], area = y->size[2] * y->size[3];
    const int channels = static_cast<int>(y->size[1]);
    const bool wide = area % V == 0 && ty_aligned(to, 16) && ty_aligned(more, 16);
    const unsigned blocks = ty_cuda_blocks(planes * ((area / (wide ? V : 1) + EW_THREADS - 1) / EW_THREADS), 1);
    return wide ? TY_LAUNCH((conv_finish<V, T>), blocks, EW_THREADS, 0, to, shift, more, planes, area, channels,
                            activation)
                : TY_LAUNCH((conv_finish<1, T>), blocks, EW_THREADS, 0, to, shift, more, planes, area, channels,
                            activation);
  });
}

/* ---- our own kernels, which compute in f32 and f64, for halves ---- */

bool convert(const ty_view *from, const ty_view *to) {
  ty_kernel_args args = { 1, 1, &to, &from, nullptr, nullptr };
  return from->count == 0 || ty_cuda_copy(&args);
}

class as_f32 {
public:
  explicit as_f32(const ty_view *v) : view(*v) {
    view.dtype = TY_F32;
    memory_.emplace(static_cast<size_t>(v->count ? v->count : 1) * sizeof(float));
    view.data = memory_->data;
  }
  ty_view view;

private:
  std::optional<ty_cuda_scratch> memory_;
};

bool own(bool (*kernel)(const ty_kernel_args *), const ty_kernel_args *k) {
  if (!ty_is_half(static_cast<ty_dtype>(k->out[0]->dtype))) return kernel(k);
  const ty_view *in[4] = {}, *out[1];
  std::optional<as_f32> inputs[4], result;
  for (int i = 0; i < k->nin; i++) {
    if (!k->in[i]) continue;
    inputs[i].emplace(k->in[i]);
    in[i] = &inputs[i]->view;
    if (!in[i]->data || !convert(k->in[i], in[i])) return false;
  }
  result.emplace(k->out[0]);
  out[0] = &result->view;
  if (!out[0]->data) return false;
  ty_kernel_args args = { 1, k->nin, out, in, k->params, nullptr };
  return kernel(&args) && convert(out[0], k->out[0]);
}

} // namespace

TY_CUDA_KERNEL(conv2d) {
  const ty_p_conv &options = *static_cast<const ty_p_conv *>(k->params);
  const ty_view *y = k->out[0], *bias = k->nin > 2 ? k->in[2] : nullptr, *residual = k->nin > 3 ? k->in[3] : nullptr;
  task t = { dnn_graph::FORWARD, k->in[0], k->in[1], y, bias, residual, options, options.activation == TY_RELU };
  dnn_outcome outcome = bias ? run("conv2d", t) : DNN_NOT_THERE;
  ty_activation left = t.relu ? TY_NO_ACTIVATION : options.activation;
  if (outcome == DNN_NOT_THERE) {
    t.bias = t.residual = nullptr;
    t.relu = false;
    left = options.activation;
    outcome = run("conv2d", t);
  }
  if (outcome == DNN_NOT_THERE) return own(ty_conv_forward, k);
  const ty_view *left_bias = t.bias ? nullptr : bias, *left_residual = t.residual ? nullptr : residual;
  if (outcome == DNN_FAILED) return false;
  return (!left_bias && !left_residual && left == TY_NO_ACTIVATION) || finish(y, left_bias, left_residual, left);
}

TY_CUDA_KERNEL(conv2d_backward_input) {
  const ty_p_conv &options = *static_cast<const ty_p_conv *>(k->params);
  const task t = { dnn_graph::INPUT_GRADIENT, k->out[0], k->in[1], k->in[0], nullptr, nullptr, options, false };
  dnn_outcome outcome = run("conv2d_backward_input", t);
  return outcome == DNN_NOT_THERE ? own(ty_conv_backward_input, k) : outcome == DNN_DONE;
}

TY_CUDA_KERNEL(conv2d_backward_weight) {
  const ty_p_conv &options = *static_cast<const ty_p_conv *>(k->params);
  const task t = { dnn_graph::WEIGHT_GRADIENT, k->in[1], k->out[0], k->in[0], nullptr, nullptr, options, false };
  dnn_outcome outcome = run("conv2d_backward_weight", t);
  return outcome == DNN_NOT_THERE ? own(ty_conv_backward_weight, k) : outcome == DNN_DONE;
}
