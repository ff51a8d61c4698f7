/* Solids drawn into volumes, in integers: draw_solids, with the numbers of kernels/cpu/pictures/solids.c. A thread draws a voxel,
 * through all rows of the list. */
#include "../solids.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 128 };

struct solids_job {
  int64_t n, k, size[3]; /* x, y, z */
  const int32_t *list;
  int16_t *values;
  uint8_t *labels;
  ty_cuda_watch watch;
};

TY_DEVICE int64_t noise_at(const ty_solid &s, const int64_t *at, int octave) {
  const ty_solid_step x = ty_solid_step_of(&s, at[0], octave), y = ty_solid_step_of(&s, at[1], octave),
                      z = ty_solid_step_of(&s, at[2], octave);
  const uint32_t seed = s.seed + static_cast<uint32_t>(octave);
  return ty_solid_between(ty_solid_lattice(seed, x.at, y, z), ty_solid_lattice(seed, x.at + 1, y, z), x.share);
}

/* How much of the voxel the solid covers, of TY_SOLID_WHOLE. */
TY_DEVICE int32_t cover_of(const ty_solid &s, const int64_t *at) {
  const int64_t left = at[0] * TY_SOLID_VOXEL, right = left + TY_SOLID_VOXEL;
  int32_t cover = 0;
  for (int j = 0; j < TY_SOLID_LINES; j++)
    for (int i = 0; i < TY_SOLID_LINES; i++) {
      int64_t from, to;
      if (!ty_solid_span(&s, 8 * at[1] + 2 * i + 1, 8 * at[2] + 2 * j + 1, &from, &to)) continue;
      from = from > left ? from : left;
      to = to < right ? to : right;
      if (to > from) cover += static_cast<int32_t>(to - from);
    }
  return cover;
}

__global__ void __launch_bounds__(THREADS) solids_draw(solids_job j) {
  const int64_t each = j.size[0] * j.size[1] * j.size[2], step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < j.n * each; i += step) {
    const int64_t line = i / j.size[0];
    const int64_t at[3] = { i % j.size[0], line % j.size[1], line / j.size[1] % j.size[2] };
    const int32_t *rows = j.list + i / each * j.k * TY_SOLID_FIELDS;
    int32_t value = 0;
    uint8_t label = 0;
    for (int64_t k = 0; k < j.k; k++) {
      const int32_t *row = rows + k * TY_SOLID_FIELDS;
      if (row[0] == -1 || !ty_in_range(j.watch, row[0], UINT8_MAX + 1)) continue;
      const ty_solid s = ty_solid_read(row, j.size);
      if (at[0] < s.box[0] || at[0] >= s.box[1] || at[1] < s.box[2] || at[1] >= s.box[3] || at[2] < s.box[4] ||
          at[2] >= s.box[5])
        continue;
      const int32_t cover = cover_of(s, at);
      if (!cover) continue;
      const int32_t colour = s.amplitude ? ty_solid_shade(&s, noise_at(s, at, 0), noise_at(s, at, 1))
                                         : s.value << TY_SOLID_BITS;
      value = cover == TY_SOLID_WHOLE ? colour : ty_solid_over(value, colour, cover);
      if (2 * cover >= TY_SOLID_WHOLE) label = static_cast<uint8_t>(s.label);
    }
    j.values[i] = ty_solid_value(value);
    j.labels[i] = label;
  }
}

} // namespace

TY_CUDA_KERNEL(draw_solids) {
  const ty_view *list = k->in[0], *values = k->out[0];
  solids_job j = {};
  j.n = values->size[0];
  j.k = list->size[1];
  for (int i = 0; i < 3; i++) j.size[i] = values->size[3 - i];
  j.list = ty_data_of<const int32_t>(list);
  j.values = ty_data_of<int16_t>(values);
  j.labels = ty_data_of<uint8_t>(k->out[1]);
  j.watch = ty_cuda_watched();
  return !values->count || TY_LAUNCH(solids_draw, ty_cuda_blocks(values->count, THREADS), THREADS, 0, j);
}
