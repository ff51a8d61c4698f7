/* cuDNN's graphs of operations. A graph is described once for each shape and becomes a plan, which is kept; later calls
 * run the plan. Where cuDNN is missing, or has nothing for a graph, our own kernels do it. */
#ifndef TY_KERNELS_CUDA_DNN_CUH
#define TY_KERNELS_CUDA_DNN_CUH

#include <functional>
#include <vector>

#include "cuda.cuh"
#include "dnn_names.h"

enum dnn_outcome { DNN_DONE, DNN_FAILED /* after ty_fail() */, DNN_NOT_THERE /* no library, or it does not do this */ };

int64_t dnn_version(void);        /* 9 19 0 is 91900; 0: there is none for this thread's GPU */
int dnn_type(int dtype);          /* cuDNN's name of a floating-point dtype */
int dnn_alignment(const void *p); /* in bytes, a power of two, at most 16 */

struct dnn_shape {
  int64_t size[4], stride[4];
};
dnn_shape dnn_packed(int64_t a, int64_t b, int64_t c, int64_t d); /* row after row */

/* Everything that a plan depends on, in words. */
struct dnn_key {
  enum { WORDS = 48 };
  int64_t words[WORDS];
  int used;
  void add(int64_t word) { words[used++] = word; }
  void add(const dnn_shape &s) {
    for (int64_t n : s.size) add(n);
    for (int64_t n : s.stride) add(n);
  }
};

/* A graph while it is described. Tensors in memory have numbers of 1 to 99, by which dnn_run() is given their data. What
 * goes wrong is seen at the end. */
class dnn_graph {
public:
  typedef dnn_descriptor tensor_t;
  tensor_t tensor(int number, int type, const dnn_shape &shape, int64_t alignment) {
    return describe(number, type, shape, alignment, false, false);
  }
  tensor_t between(int type, const dnn_shape &shape) { return describe(next_++, type, shape, 16, true, false); }
  tensor_t value(int number, int type) { return describe(number, type, dnn_packed(1, 1, 1, 1), 16, false, true); }

  enum direction { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT };
  void convolution(direction d, int type, tensor_t x, tensor_t weight, tensor_t y, const ty_p_conv &options);
  void matmul(tensor_t a, tensor_t b, tensor_t out);
  void reduce(int op, tensor_t x, tensor_t out);
  void reshape(tensor_t x, tensor_t out);
  void pointwise(int mode, int type, tensor_t x, tensor_t b, tensor_t out, int axis = -1, tensor_t mask = nullptr);

  bool finish(dnn_handle handle);
  dnn_descriptor graph = nullptr;
  std::vector<dnn_descriptor> all; /* whoever takes them destroys them */

private:
  dnn_descriptor make(int kind);
  void set(dnn_descriptor d, int name, int type, int64_t count, const void *value);
  void set(dnn_descriptor d, int name, int type, int value) { set(d, name, type, 1, &value); }
  void set(dnn_descriptor d, int name, dnn_descriptor other);
  void seal(dnn_descriptor d);
  tensor_t describe(int64_t number, int type, const dnn_shape &shape, int64_t alignment, bool is_virtual,
                    bool by_value);
  std::vector<dnn_descriptor> operations_;
  int64_t next_ = 100;
  bool ok_ = true;
};

struct dnn_data {
  int number;
  void *p; /* on the GPU; of a value, on the host */
};

enum {
  DNN_NARROW = 1,  /* f32 may be rounded to TF32 */
  DNN_COMPILES = 2 /* plans are compiled when they are made, which takes about a second: there are only a few of them */
};

/* Runs the plan for the key, which `describe` describes when it is new. flags: of those above. */
dnn_outcome dnn_run(const char *op, const dnn_key &key, int flags, const std::function<void(dnn_graph *)> &describe,
                    const std::vector<dnn_data> &data);

#endif
