/* What the two halves of the stand-in for cuDNN share: descriptors (cudnn.cc), which describe graphs, and their
 * computation (cudnn_compute.cc). */
#ifndef TY_CUDA_EMU_CUDNN_H
#define TY_CUDA_EMU_CUDNN_H

#include <cstdint>
#include <map>
#include <vector>

#include "../runtime.h"

#include "../../../kernels/cuda/dnn_names.h"

namespace dnn_emu {

/* What a real library would answer with wrong results, or not at all: it ends the tests. */
[[noreturn]] void wrong(const char *what);

struct descriptor;

struct attribute {
  int type;
  std::vector<int64_t> words; /* integers of any kind */
  std::vector<double> numbers;
  std::vector<void *> pointers; /* descriptors and others */
};

struct descriptor {
  int kind;
  bool finalized;
  std::map<int, attribute> attributes;
  int engine; /* of engines and configurations */

  bool has(int name) const { return attributes.count(name) != 0; }
  const std::vector<int64_t> &words(int name) const { return attributes.at(name).words; }
  int64_t word(int name) const { return words(name).at(0); }
  const descriptor *other(int name) const {
    return has(name) ? static_cast<const descriptor *>(attributes.at(name).pointers.at(0)) : nullptr;
  }
};

/* Whether the engines do such a graph; wrong() for one that has no meaning. */
bool supported(const descriptor *graph);

/* Computes it; the data of tensors in memory, and of values, which are read at once. */
typedef std::map<int64_t, void *> data_map;
typedef std::map<int64_t, double> value_map;
value_map read_values(const descriptor *graph, const data_map &data);
void compute(const descriptor *graph, const data_map &data, const value_map &values, bool tf32);

} // namespace dnn_emu

#endif
