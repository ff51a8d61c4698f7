/* What the stand-in for cuDNN computes: the operations of a graph one after the other, by plain loops over elements that
 * stand in memory as their tensors' strides say, rounded to the tensors' types. */
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "../../../kernels/half.h"
#include "cudnn.h"

using namespace dnn_emu;

namespace {

struct tensor {
  const descriptor *d;
  const int64_t *size, *stride;
  int type;
  explicit tensor(const descriptor *of)
      : d(of), size(of->words(DNN_ATTR_TENSOR_DIMENSIONS).data()), stride(of->words(DNN_ATTR_TENSOR_STRIDES).data()),
        type(static_cast<int>(of->word(DNN_ATTR_TENSOR_DATA_TYPE))) {}
  int64_t number() const { return d->word(DNN_ATTR_TENSOR_UNIQUE_ID); }
  bool flag(int name) const { return d->has(name) && d->word(name); }
  bool is_virtual() const { return flag(DNN_ATTR_TENSOR_IS_VIRTUAL); }
  bool by_value() const { return flag(DNN_ATTR_TENSOR_IS_BY_VALUE); }
  int64_t extent() const {
    int64_t n = 1;
    for (int i = 0; i < 4; i++) n += (size[i] - 1) * stride[i];
    return n;
  }
};

double load(int type, const void *p, int64_t i) {
  switch (type) {
    case DNN_DATA_DOUBLE: return static_cast<const double *>(p)[i];
    case DNN_DATA_HALF: return ty_f16_to_f32(static_cast<const uint16_t *>(p)[i]);
    case DNN_DATA_BFLOAT16: return ty_bf16_to_f32(static_cast<const uint16_t *>(p)[i]);
    case DNN_DATA_INT32: return static_cast<const int32_t *>(p)[i];
    default: return static_cast<const float *>(p)[i];
  }
}
void store(int type, void *p, int64_t i, double x) {
  switch (type) {
    case DNN_DATA_DOUBLE: static_cast<double *>(p)[i] = x; break;
    case DNN_DATA_HALF: static_cast<uint16_t *>(p)[i] = ty_f32_to_f16(static_cast<float>(x)); break;
    case DNN_DATA_BFLOAT16: static_cast<uint16_t *>(p)[i] = ty_f32_to_bf16(static_cast<float>(x)); break;
    default: static_cast<float *>(p)[i] = static_cast<float>(x);
  }
}
double rounded(int type, double x) {
  switch (type) {
    case DNN_DATA_DOUBLE: return x;
    case DNN_DATA_HALF: return ty_f16_to_f32(ty_f32_to_f16(static_cast<float>(x)));
    case DNN_DATA_BFLOAT16: return ty_bf16_to_f32(ty_f32_to_bf16(static_cast<float>(x)));
    default: return static_cast<float>(x);
  }
}
double to_tf32(double x) {
  float f = static_cast<float>(x);
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu;
  memcpy(&f, &bits, 4);
  return f;
}

/* fn(index) over all positions. */
template <class Fn> void each(const int64_t *size, Fn fn) {
  int64_t i[4];
  for (i[0] = 0; i[0] < size[0]; i[0]++)
    for (i[1] = 0; i[1] < size[1]; i[1]++)
      for (i[2] = 0; i[2] < size[2]; i[2]++)
        for (i[3] = 0; i[3] < size[3]; i[3]++) fn(i);
}
int64_t at(const tensor &t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
}
int64_t broadcast(const tensor &t, const int64_t *i) {
  int64_t offset = 0;
  for (int d = 0; d < 4; d++) offset += t.size[d] == 1 ? 0 : i[d] * t.stride[d];
  return offset;
}

/* ---- the names of an operation's tensors ---- */

struct operation {
  int kind, inputs[3], output, options;
};
const operation operations[] = {
  { DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
    { DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, 0 },
    DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
    DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC },
  { DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
    { DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, 0 },
    DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
    DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC },
  { DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
    { DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, 0 },
    DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
    DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC },
  { DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
    { DNN_ATTR_OPERATION_POINTWISE_XDESC, DNN_ATTR_OPERATION_POINTWISE_BDESC, DNN_ATTR_OPERATION_POINTWISE_TDESC },
    DNN_ATTR_OPERATION_POINTWISE_YDESC,
    DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR },
  { DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
    { DNN_ATTR_OPERATION_MATMUL_ADESC, DNN_ATTR_OPERATION_MATMUL_BDESC, 0 },
    DNN_ATTR_OPERATION_MATMUL_CDESC,
    DNN_ATTR_OPERATION_MATMUL_DESC },
  { DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
    { DNN_ATTR_OPERATION_REDUCTION_XDESC, 0, 0 },
    DNN_ATTR_OPERATION_REDUCTION_YDESC,
    DNN_ATTR_OPERATION_REDUCTION_DESC },
  { DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
    { DNN_ATTR_OPERATION_RESHAPE_XDESC, 0, 0 },
    DNN_ATTR_OPERATION_RESHAPE_YDESC,
    0 },
};
const operation &names_of(const descriptor *node) {
  for (const operation &o : operations)
    if (o.kind == node->kind) return o;
  wrong("an operation that graphs do not have");
}

std::vector<const descriptor *> nodes_of(const descriptor *graph) {
  std::vector<const descriptor *> nodes;
  for (void *p : graph->attributes.at(DNN_ATTR_OPERATIONGRAPH_OPS).pointers)
    nodes.push_back(static_cast<const descriptor *>(p));
  return nodes;
}

bool is_convolution(const descriptor *node) {
  return node->kind >= DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR &&
         node->kind <= DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
}

/* x, w, y of the formula. */
void roles(const descriptor *node, const descriptor **x, const descriptor **w, const descriptor **y) {
  const operation &o = names_of(node);
  const descriptor *first = node->other(o.inputs[0]), *second = node->other(o.inputs[1]), *out = node->other(o.output);
  const bool forward = node->kind == DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR;
  const bool data = node->kind == DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
  *x = forward ? first : data ? out : second;
  *w = forward || data ? second : out;
  *y = forward ? out : first;
}

/* ---- checks ---- */

void check_convolution(const descriptor *node) {
  const descriptor *dx, *dw, *dy, *o = node->other(names_of(node).options);
  roles(node, &dx, &dw, &dy);
  const tensor x(dx), w(dw), y(dy);
  if (o->kind != DNN_BACKEND_CONVOLUTION_DESCRIPTOR ||
      o->word(DNN_ATTR_CONVOLUTION_CONV_MODE) != DNN_CROSS_CORRELATION ||
      o->word(DNN_ATTR_CONVOLUTION_SPATIAL_DIMS) != 2)
    wrong("a convolution's options");
  if (x.size[0] != y.size[0] || w.size[0] != y.size[1] || x.size[1] % w.size[1] || w.size[0] % (x.size[1] / w.size[1]))
    wrong("a convolution's channels");
  for (int d = 0; d < 2; d++) {
    auto option = [&](int name) { return o->words(name)[static_cast<size_t>(d)]; };
    int64_t span = option(DNN_ATTR_CONVOLUTION_DILATIONS) * (w.size[2 + d] - 1) + 1;
    int64_t room = x.size[2 + d] + option(DNN_ATTR_CONVOLUTION_PRE_PADDINGS) +
                   option(DNN_ATTR_CONVOLUTION_POST_PADDINGS);
    if ((room - span) / option(DNN_ATTR_CONVOLUTION_FILTER_STRIDES) + 1 != y.size[2 + d])
      wrong("a convolution's sizes");
  }
  const int compute_type = static_cast<int>(o->word(DNN_ATTR_CONVOLUTION_COMP_TYPE));
  for (const tensor *t : { &x, &w, &y })
    if ((t->type == DNN_DATA_DOUBLE) != (compute_type == DNN_DATA_DOUBLE)) wrong("a convolution's types");
}

void check_pointwise(const descriptor *node) {
  const descriptor *o = node->other(DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
  const int64_t mode = o->word(DNN_ATTR_POINTWISE_MODE);
  const bool two = mode == DNN_POINTWISE_ADD || mode == DNN_POINTWISE_MUL || mode == DNN_POINTWISE_SUB ||
                   mode == DNN_POINTWISE_DIV || mode == DNN_POINTWISE_CMP_GE || mode == DNN_POINTWISE_BINARY_SELECT;
  if (node->has(DNN_ATTR_OPERATION_POINTWISE_BDESC) != two) wrong("the operands of a pointwise operation");
  if (node->has(DNN_ATTR_OPERATION_POINTWISE_TDESC) != (mode == DNN_POINTWISE_BINARY_SELECT))
    wrong("a selection's mask");
  if (o->has(DNN_ATTR_POINTWISE_AXIS) != (mode == DNN_POINTWISE_GEN_INDEX)) wrong("an axis");
  const tensor x(node->other(DNN_ATTR_OPERATION_POINTWISE_XDESC)), y(node->other(DNN_ATTR_OPERATION_POINTWISE_YDESC));
  for (int d = 0; d < 4; d++) {
    if (x.size[d] != y.size[d]) wrong("the size of a pointwise result");
    if (!two) continue;
    const tensor b(node->other(DNN_ATTR_OPERATION_POINTWISE_BDESC));
    if (b.size[d] != y.size[d] && b.size[d] != 1) wrong("the size of a pointwise operand");
  }
}

void check_matmul(const descriptor *node) {
  const tensor a(node->other(DNN_ATTR_OPERATION_MATMUL_ADESC)), b(node->other(DNN_ATTR_OPERATION_MATMUL_BDESC)),
      c(node->other(DNN_ATTR_OPERATION_MATMUL_CDESC));
  if (a.size[0] != c.size[0] || b.size[0] != c.size[0] || a.size[1] != c.size[1] || c.size[1] % b.size[1] ||
      a.size[2] != c.size[2] || b.size[3] != c.size[3] || a.size[3] != b.size[2])
    wrong("the sizes of a product");
}

/* Each tensor is written once, before it is read; numbers are unique; what is virtual is written. */
void check_flow(const descriptor *graph) {
  std::map<int64_t, const descriptor *> known;
  std::set<int64_t> written;
  for (const descriptor *node : nodes_of(graph)) {
    const operation &o = names_of(node);
    if (o.options && !node->other(o.options)) wrong("an operation without options");
    for (int name : { o.inputs[0], o.inputs[1], o.inputs[2], o.output }) {
      const descriptor *d = name ? node->other(name) : nullptr;
      if (!d) continue;
      if (d->kind != DNN_BACKEND_TENSOR_DESCRIPTOR) wrong("a tensor is something else");
      const tensor t(d);
      const descriptor *&one = known[t.number()];
      if (one && one != d) wrong("two tensors have one number");
      one = d;
      if (name == o.output) {
        if (t.by_value() || !written.insert(t.number()).second) wrong("a tensor is written twice, or a value is");
      } else if (t.is_virtual() && !written.count(t.number())) {
        wrong("a virtual tensor is read before it is written");
      }
    }
    if (is_convolution(node)) check_convolution(node);
    if (node->kind == DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) check_pointwise(node);
    if (node->kind == DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) check_matmul(node);
  }
}

/* After the convolution: an addition of the result's size, at most, one of a bias, and ReLU, at most. */
bool supported_after(const std::vector<const descriptor *> &nodes) {
  size_t i = 1;
  auto mode = [&](size_t n) {
    return n < nodes.size() && nodes[n]->kind == DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR
               ? nodes[n]->other(DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)->word(DNN_ATTR_POINTWISE_MODE)
               : int64_t{ -1 };
  };
  auto is_bias = [&](size_t n) {
    const tensor b(nodes[n]->other(DNN_ATTR_OPERATION_POINTWISE_BDESC));
    return b.size[0] == 1 && b.size[2] == 1 && b.size[3] == 1;
  };
  if (nodes.size() == 1) return true;
  if (nodes[0]->kind != DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR) return false;
  if (mode(i) == DNN_POINTWISE_ADD && mode(i + 1) == DNN_POINTWISE_ADD) i++;
  if (mode(i) != DNN_POINTWISE_ADD || !is_bias(i++)) return false;
  if (mode(i) == DNN_POINTWISE_RELU_FWD) i++;
  return i == nodes.size();
}

/* ---- computation ---- */

typedef std::map<int64_t, std::vector<double>> buffers;

/* to[i] += of[i] * by, at strides. */
void add_products(double *to, int64_t to_stride, const double *of, int64_t stride, double by, int64_t n) {
  if (to_stride == 1 && stride == 1)
    for (int64_t i = 0; i < n; i++) to[i] += of[i] * by;
  else
    for (int64_t i = 0; i < n; i++) to[i * to_stride] += of[i * stride] * by;
}

void convolve(const descriptor *node, buffers *memory, bool tf32) {
  const descriptor *dx, *dw, *dy, *o = node->other(names_of(node).options), *out = node->other(names_of(node).output);
  roles(node, &dx, &dw, &dy);
  const tensor x(dx), w(dw), y(dy), result(out);
  std::vector<double> &to = (*memory)[result.number()];
  to.assign(static_cast<size_t>(result.extent()), 0);
  const int64_t group = x.size[1] / w.size[1], rows = w.size[0] / group; /* groups, channels of y in each */
  const int64_t *stride = o->words(DNN_ATTR_CONVOLUTION_FILTER_STRIDES).data();
  const int64_t *padding = o->words(DNN_ATTR_CONVOLUTION_PRE_PADDINGS).data();
  const int64_t *dilation = o->words(DNN_ATTR_CONVOLUTION_DILATIONS).data();
  auto operand = [&](const tensor &t) {
    std::vector<double> v = (*memory)[t.number()];
    if (tf32 && result.type == DNN_DATA_FLOAT && x.type == DNN_DATA_FLOAT)
      for (double &f : v) f = to_tf32(f);
    return v;
  };
  std::vector<double> vx, vw, vy;
  if (out != dx) vx = operand(x);
  if (out != dw) vw = operand(w);
  if (out != dy) vy = operand(y);
  /* The positions of y along an axis whose window has place `a` of it on x. */
  auto inside = [&](int d, int64_t a, int64_t *first, int64_t *last) {
    const int64_t from = padding[d] - a * dilation[d];
    *first = from > 0 ? (from + stride[d] - 1) / stride[d] : 0;
    *last = std::min(y.size[2 + d], from + x.size[2 + d] <= 0 ? 0 : (from + x.size[2 + d] - 1) / stride[d] + 1);
  };
  const int64_t window[] = { y.size[0], w.size[0], w.size[1], w.size[2] * w.size[3] };
  each(window, [&](const int64_t *i) {
    const int64_t a = i[3] / w.size[3], b = i[3] % w.size[3];
    int64_t top, bottom, left, right;
    inside(0, a, &top, &bottom);
    inside(1, b, &left, &right);
    const size_t pw = static_cast<size_t>(at(w, i[1], i[2], a, b));
    for (int64_t r = top; r < bottom && left < right; r++) {
      const int64_t row = r * stride[0] - padding[0] + a * dilation[0];
      const int64_t column = left * stride[1] - padding[1] + b * dilation[1];
      const int64_t px = at(x, i[0], i[1] / rows * w.size[1] + i[2], row, column), py = at(y, i[0], i[1], r, left);
      const int64_t sx = stride[1] * x.stride[3], sy = y.stride[3], n = right - left;
      if (out == dy) add_products(&to[static_cast<size_t>(py)], sy, &vx[static_cast<size_t>(px)], sx, vw[pw], n);
      if (out == dx) add_products(&to[static_cast<size_t>(px)], sx, &vy[static_cast<size_t>(py)], sy, vw[pw], n);
      if (out == dw)
        for (int64_t k = 0; k < n; k++)
          to[pw] += vy[static_cast<size_t>(py + k * sy)] * vx[static_cast<size_t>(px + k * sx)];
    }
  });
}

double pointwise(int64_t mode, double x, double b, double t) {
  switch (mode) {
    case DNN_POINTWISE_ADD: return x + b;
    case DNN_POINTWISE_SUB: return x - b;
    case DNN_POINTWISE_MUL: return x * b;
    case DNN_POINTWISE_DIV: return x / b;
    case DNN_POINTWISE_EXP: return std::exp(x);
    case DNN_POINTWISE_LOG: return std::log(x);
    case DNN_POINTWISE_IDENTITY: return x;
    case DNN_POINTWISE_RELU_FWD: return x < 0 ? 0 : x;
    case DNN_POINTWISE_CMP_GE: return x >= b;
    case DNN_POINTWISE_BINARY_SELECT: return t != 0 ? x : b;
    default: wrong("an unknown pointwise operation");
  }
}

void compute_node(const descriptor *node, buffers *memory, bool tf32) {
  if (is_convolution(node)) return convolve(node, memory, tf32);
  const operation &o = names_of(node);
  const descriptor *options = o.options ? node->other(o.options) : nullptr;
  const tensor x(node->other(o.inputs[0])), y(node->other(o.output));
  const std::vector<double> &vx = (*memory)[x.number()];
  std::vector<double> result(static_cast<size_t>(y.extent()));
  auto value = [](const std::vector<double> &v, int64_t i) { return v[static_cast<size_t>(i)]; };
  if (node->kind == DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) { /* the same memory, seen otherwise */
    if (x.extent() != y.extent()) wrong("a view of more or less than there is");
    result = vx;
  } else if (node->kind == DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
    const tensor b(node->other(o.inputs[1]));
    const std::vector<double> &vb = (*memory)[b.number()];
    const int64_t heads = y.size[1] / b.size[1];
    const int64_t lines[] = { y.size[0], y.size[1], y.size[2], x.size[3] }; /* the last is what is summed over */
    each(lines, [&](const int64_t *i) {
      add_products(&result[static_cast<size_t>(at(y, i[0], i[1], i[2], 0))], y.stride[3],
                   &vb[static_cast<size_t>(at(b, i[0], i[1] / heads, i[3], 0))], b.stride[3],
                   value(vx, at(x, i[0], i[1], i[2], i[3])), y.size[3]);
    });
  } else if (node->kind == DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
    const bool add = options->word(DNN_ATTR_REDUCTION_OPERATOR) == DNN_REDUCE_TENSOR_ADD;
    for (double &v : result) v = add ? 0 : -INFINITY;
    each(x.size, [&](const int64_t *i) {
      int64_t j[4];
      for (int d = 0; d < 4; d++) j[d] = i[d] / (x.size[d] / y.size[d]);
      double &to = result[static_cast<size_t>(at(y, j[0], j[1], j[2], j[3]))];
      double v = value(vx, at(x, i[0], i[1], i[2], i[3]));
      to = add ? to + v : v > to || v != v ? v : to;
    });
  } else {
    const int64_t mode = options->word(DNN_ATTR_POINTWISE_MODE);
    const descriptor *db = node->other(o.inputs[1]), *dt = node->other(o.inputs[2]);
    const std::vector<double> none;
    const std::vector<double> &vb = db ? (*memory)[tensor(db).number()] : none;
    const std::vector<double> &vt = dt ? (*memory)[tensor(dt).number()] : none;
    each(y.size, [&](const int64_t *i) {
      double b = db ? value(vb, broadcast(tensor(db), i)) : 0, t = dt ? value(vt, broadcast(tensor(dt), i)) : 0;
      double v = mode == DNN_POINTWISE_GEN_INDEX ? static_cast<double>(i[options->word(DNN_ATTR_POINTWISE_AXIS)])
                                                 : pointwise(mode, value(vx, broadcast(x, i)), b, t);
      result[static_cast<size_t>(at(y, i[0], i[1], i[2], i[3]))] = v;
    });
  }
  for (double &v : result) v = rounded(y.type, v);
  (*memory)[y.number()] = result;
}

template <class Fn> void each_tensor(const descriptor *graph, Fn fn) { /* fn(tensor, whether it is a result) */
  std::set<int64_t> met;
  for (const descriptor *node : nodes_of(graph)) {
    const operation &o = names_of(node);
    for (int name : { o.inputs[0], o.inputs[1], o.inputs[2], o.output })
      if (name && node->has(name) && (name == o.output || met.insert(tensor(node->other(name)).number()).second))
        fn(tensor(node->other(name)), name == o.output);
  }
}

} // namespace

bool dnn_emu::supported(const descriptor *graph) {
  const std::vector<const descriptor *> nodes = nodes_of(graph);
  check_flow(graph);
  if (!is_convolution(nodes[0])) return true;
  const descriptor *x, *w, *y;
  roles(nodes[0], &x, &w, &y);
  /* Some are left to others, so that the tests see that too. */
  return supported_after(nodes) && tensor(w).size[2] * tensor(w).size[3] <= 12;
}

value_map dnn_emu::read_values(const descriptor *graph, const data_map &data) {
  value_map values;
  std::set<int64_t> needed;
  each_tensor(graph, [&](const tensor &t, bool) {
    if (t.is_virtual()) return;
    needed.insert(t.number());
    auto found = data.find(t.number());
    if (found == data.end() || !found->second) wrong("a tensor has no data");
    if (t.by_value()) {
      values[t.number()] = load(t.type, found->second, 0);
    } else if (reinterpret_cast<uint64_t>(found->second) %
               static_cast<uint64_t>(t.d->word(DNN_ATTR_TENSOR_BYTE_ALIGNMENT))) {
      wrong("a tensor is less aligned than agreed");
    }
  });
  if (needed.size() != data.size()) wrong("data for a tensor that the graph does not have");
  return values;
}

void dnn_emu::compute(const descriptor *graph, const data_map &data, const value_map &values, bool tf32) {
  buffers memory;
  each_tensor(graph, [&](const tensor &t, bool is_result) {
    if (t.is_virtual() || is_result) return;
    std::vector<double> &v = memory[t.number()];
    v.assign(static_cast<size_t>(t.extent()), 0);
    if (t.by_value()) {
      v[0] = values.at(t.number());
    } else {
      each(t.size, [&](const int64_t *i) {
        int64_t p = at(t, i[0], i[1], i[2], i[3]);
        v[static_cast<size_t>(p)] = load(t.type, data.at(t.number()), p);
      });
    }
  });
  for (const descriptor *node : nodes_of(graph)) compute_node(node, &memory, tf32);
  each_tensor(graph, [&](const tensor &t, bool is_result) {
    if (t.is_virtual() || !is_result) return;
    const std::vector<double> &v = memory[t.number()];
    each(t.size, [&](const int64_t *i) {
      int64_t p = at(t, i[0], i[1], i[2], i[3]);
      store(t.type, data.at(t.number()), p, v[static_cast<size_t>(p)]);
    });
  });
}
