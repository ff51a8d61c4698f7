/* Kernels over images [n, c, h, w] that compute each element of the result by itself: a thread goes through elements in
 * steps of the whole grid, with positions of 32 bits; tensors of 2^30 elements and more come in parts of whole planes.
 * */
#ifndef TY_KERNELS_CUDA_PLANES_CUH
#define TY_KERNELS_CUDA_PLANES_CUH

#include "elementwise.cuh"

enum { PLANES_THREADS = 256 };

struct planes_shape {
  uint32_t count; /* elements */
  ew_divisor row, column;
};
struct planes_at {
  uint32_t plane, row, column;
};

TY_DEVICE planes_at planes_of(const planes_shape &s, uint32_t i) {
  uint32_t rows = ew_divide(i, s.column), plane = ew_divide(rows, s.row);
  return planes_at{ plane, rows - plane * s.row.d, i - rows * s.column.d };
}
TY_DEVICE uint32_t planes_first() { return blockIdx.x * PLANES_THREADS + threadIdx.x; }
TY_DEVICE uint32_t planes_step() { return gridDim.x * PLANES_THREADS; }

static inline unsigned planes_blocks(int64_t threads) { return ty_cuda_blocks(threads, PLANES_THREADS); }

/* fn(from, to, elements of the result before it, shape of the result) for the planes of a result. */
template <class T, class Fn> static inline bool planes_in_parts(const ty_view *from, const ty_view *to, const Fn &fn) {
  if (to->count == 0) return true;
  int64_t planes = to->size[0] * to->size[1], area = to->size[2] * to->size[3];
  int64_t from_area = from->size[2] * from->size[3];
  if (area >= 1 << 30 || from_area >= INT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "images of 2^30 pixels and more are not supported on cuda");
  int64_t most = ((1 << 30) - 1) / area;
  for (int64_t begin = 0; begin < planes; begin += most) {
    int64_t n = most < planes - begin ? most : planes - begin;
    planes_shape shape;
    shape.count = static_cast<uint32_t>(n * area);
    shape.row.set(static_cast<uint32_t>(to->size[2]));
    shape.column.set(static_cast<uint32_t>(to->size[3]));
    if (!fn(static_cast<const T *>(from->data) + begin * from_area, static_cast<T *>(to->data) + begin * area,
            begin * area, shape))
      return false;
  }
  return true;
}

#endif
