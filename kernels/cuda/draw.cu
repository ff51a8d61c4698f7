/* Pictures drawn in integers: draw_sprites, draw_background and pixel_noise, with the bytes of kernels/cpu/pictures/draw.c. A block makes the
 * pyramid of a sprite; a thread draws a pixel, through all rows of the list, and counts with integer atomics. */
#include "../draw.h"
#include "cuda.cuh"

enum { THREADS = 256 };

struct alignas(8) texel {
  uint16_t v[4];
};

struct sprites_job {
  int64_t n, k, h, w, m, side, each; /* each: texels of a pyramid */
  const uint8_t *canvas, *atlas;
  const int32_t *list;
  uint8_t *picture;
  int8_t *owner;
  int32_t *boxes, *overlap;
  texel *texels;
  ty_tint *tints;
  int *used; /* of a sprite: whether the list names it */
  ty_cuda_watch watch;
};

__global__ void __launch_bounds__(THREADS) sprites_used(sprites_job j) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < j.n * j.k; i += step) {
    const int32_t index = j.list[i * TY_SPRITE_FIELDS];
    if (index != -1 && ty_in_range(j.watch, index, j.m)) j.used[index] = 1;
    int32_t *box = j.boxes + i * 5;
    box[0] = static_cast<int32_t>(j.w);
    box[1] = static_cast<int32_t>(j.h);
    box[2] = box[3] = box[4] = 0;
  }
}

__global__ void __launch_bounds__(THREADS) sprites_pyramids(sprites_job j) {
  TY_SHARED(int64_t, room, TY_WARP);
  for (int64_t m = blockIdx.x; m < j.m; m += gridDim.x) {
    if (!j.used[m]) continue; /* the same in all threads of the block */
    const int64_t plane = j.side * j.side;
    const uint8_t *rgba = j.atlas + m * 4 * plane;
    texel *level = j.texels + m * j.each;
    for (int64_t i = threadIdx.x; i < j.each; i += THREADS) level[i] = texel{};
    __syncthreads();
    int64_t weight = 0, bright = 0;
    for (int64_t i = threadIdx.x; i < plane; i += THREADS) {
      const uint32_t alpha = rgba[3 * plane + i], rgb[3] = { rgba[i], rgba[plane + i], rgba[2 * plane + i] };
      weight += alpha;
      bright += static_cast<int64_t>(alpha) * (77 * rgb[0] + 150 * rgb[1] + 29 * rgb[2]);
      texel t;
      for (int c = 0; c < 3; c++) t.v[c] = static_cast<uint16_t>(rgb[c] * alpha);
      t.v[3] = static_cast<uint16_t>(255 * alpha);
      level[(1 + i / j.side) * (j.side + 2) + 1 + i % j.side] = t;
    }
    weight = ty_block_reduce(weight, ty_plus<int64_t>{}, room);
    bright = ty_block_reduce(bright, ty_plus<int64_t>{}, room);
    if (threadIdx.x == 0) j.tints[m] = ty_tint_of(weight ? static_cast<int32_t>(bright / (weight * 256)) : 128);
    for (int64_t side = j.side; side > 1; side = (side + 1) / 2) {
      const int64_t half = (side + 1) / 2, pitch = side + 2;
      texel *next = level + pitch * pitch;
      __syncthreads();
      for (int64_t i = threadIdx.x; i < half * half; i += THREADS) {
        const texel *from = level + (1 + 2 * (i / half)) * pitch + 1 + 2 * (i % half);
        texel t;
        for (int c = 0; c < 4; c++)
          t.v[c] = static_cast<uint16_t>((from[0].v[c] + from[1].v[c] + from[pitch].v[c] + from[pitch + 1].v[c] + 2) >>
                                         2);
        next[(1 + i / half) * (half + 2) + 1 + i % half] = t;
      }
      level = next;
    }
  }
}

/* Added to sum, the texels around (u, v), bilinearly. */
TY_DEVICE void add_sample(const texel *texels, int level, int64_t side, int64_t u, int64_t v, uint32_t *sum) {
  u = (u >> level) - TY_DRAW_ONE / 2;
  v = (v >> level) - TY_DRAW_ONE / 2;
  const int64_t x = (u >> 16) + 1, y = (v >> 16) + 1;
  if (x < 0 || y < 0 || x > side || y > side) return;
  const uint32_t s = static_cast<uint32_t>(u >> 8) & 255, t = static_cast<uint32_t>(v >> 8) & 255;
  const texel *p = texels + y * (side + 2) + x, *q = p + side + 2;
  for (int c = 0; c < 4; c++)
    sum[c] += (p[0].v[c] * ((256 - s) * (256 - t)) + p[1].v[c] * (s * (256 - t)) + q[0].v[c] * ((256 - s) * t) +
               q[1].v[c] * (s * t) + 32768) >>
              16;
}

__global__ void __launch_bounds__(THREADS) sprites_draw(sprites_job j) {
  const int64_t plane = j.h * j.w, step = (int64_t)gridDim.x * THREADS;
  for (int64_t at = blockIdx.x * (int64_t)THREADS + threadIdx.x; at < j.n * plane; at += step) {
    const int64_t picture = at / plane, pixel = at % plane, x = pixel % j.w, y = pixel / j.w;
    const int64_t first = picture * 3 * plane + pixel;
    uint32_t below[3] = { j.canvas[first], j.canvas[first + plane], j.canvas[first + 2 * plane] };
    int owner = TY_DRAW_NOBODY;
    uint64_t covers = 0;
    for (int64_t i = 0; i < j.k; i++) {
      const ty_sprite s = ty_sprite_read(j.list + (picture * j.k + i) * TY_SPRITE_FIELDS);
      if (s.index < 0 || s.index >= j.m) continue;
      const int level = ty_sprite_level(&s, j.side);
      const texel *texels = j.texels + s.index * j.each + ty_pyramid_level(j.side, level);
      int64_t side = j.side;
      for (int l = 0; l < level; l++) side = (side + 1) / 2;
      const int64_t a = s.a, b = s.b, d = s.d, e = s.e;
      const int64_t u = s.c + ((a + b) >> 1) + b * y + a * x, v = s.f + ((d + e) >> 1) + e * y + d * x;
      uint32_t rgba[4] = { 0, 0, 0, 0 };
      add_sample(texels, level, side, u + ((a + b) >> 2), v + ((d + e) >> 2), rgba);
      add_sample(texels, level, side, u - ((a + b) >> 2), v - ((d + e) >> 2), rgba);
      add_sample(texels, level, side, u + ((a - b) >> 2), v + ((d - e) >> 2), rgba);
      add_sample(texels, level, side, u - ((a - b) >> 2), v - ((d - e) >> 2), rgba);
      for (int c = 0; c < 4; c++) rgba[c] = (rgba[c] + 2) >> 2;
      if (!rgba[3]) continue;
      if (s.strength) ty_tint_apply(&s, j.tints + s.index, rgba);
      const uint32_t opacity = static_cast<uint32_t>(s.opacity), alpha = rgba[3] * opacity >> 8;
      for (int c = 0; c < 3; c++) below[c] = ty_draw_over(below[c], rgba[c] * opacity >> 8, alpha);

      if (rgba[3] < TY_DRAW_COVERED) continue;
      int32_t *box = j.boxes + (picture * j.k + i) * 5, *overlap = j.overlap + picture * j.k * j.k;
      atomicMin(box, static_cast<int32_t>(x));
      atomicMin(box + 1, static_cast<int32_t>(y));
      atomicMax(box + 2, static_cast<int32_t>(x) + 1);
      atomicMax(box + 3, static_cast<int32_t>(y) + 1);
      for (int64_t other = 0; other < i; other++)
        if (covers >> other & 1) {
          atomicAdd(overlap + i * j.k + other, 1);
          atomicAdd(overlap + other * j.k + i, 1);
        }
      covers |= uint64_t{ 1 } << i;
      atomicAdd(overlap + i * j.k + i, 1);
      owner = static_cast<int>(i);
    }
    for (int c = 0; c < 3; c++) j.picture[first + c * plane] = static_cast<uint8_t>(below[c]);
    j.owner[at] = static_cast<int8_t>(owner);
    if (owner >= 0) atomicAdd(j.boxes + (picture * j.k + owner) * 5 + 4, 1);
  }
}

/* What covers no pixel has an empty box. */
__global__ void __launch_bounds__(THREADS) sprites_empty(sprites_job j) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < j.n * j.k; i += step)
    if (j.boxes[i * 5 + 2] == 0) j.boxes[i * 5] = j.boxes[i * 5 + 1] = 0;
}

TY_CUDA_KERNEL(draw_sprites) {
  const ty_view *canvas = k->in[0], *atlas = k->in[1], *list = k->in[2];
  sprites_job j = {};
  j.n = canvas->size[0];
  j.k = list->size[1];
  j.h = canvas->size[2];
  j.w = canvas->size[3];
  j.m = atlas->size[0];
  j.side = atlas->size[2];
  j.each = ty_pyramid_level(j.side, TY_SPRITE_LEVELS);
  j.canvas = ty_data_of<const uint8_t>(canvas);
  j.atlas = ty_data_of<const uint8_t>(atlas);
  j.list = ty_data_of<const int32_t>(list);
  j.picture = ty_data_of<uint8_t>(k->out[0]);
  j.owner = ty_data_of<int8_t>(k->out[1]);
  j.boxes = ty_data_of<int32_t>(k->out[2]);
  j.overlap = ty_data_of<int32_t>(k->out[3]);
  j.watch = ty_cuda_watched();
  const size_t texels = static_cast<size_t>(j.m * j.each) * sizeof(texel),
               used = static_cast<size_t>(j.m) * sizeof(int);
  ty_cuda_scratch scratch(texels + static_cast<size_t>(j.m) * sizeof(ty_tint) + used + 1);
  if (!scratch.data) return false;
  j.texels = scratch.as<texel>();
  j.tints = reinterpret_cast<ty_tint *>(j.texels + j.m * j.each);
  j.used = reinterpret_cast<int *>(j.tints + j.m);
  const int64_t rows = j.n * j.k, pixels = canvas->count / 3;
  if (rows) {
    if (!ty_cuda_zero(j.overlap, static_cast<size_t>(rows * j.k) * sizeof(int32_t)) ||
        (used && !ty_cuda_zero(j.used, used)) ||
        !TY_LAUNCH(sprites_used, ty_cuda_blocks(rows, THREADS), THREADS, 0, j) ||
        (used && !TY_LAUNCH(sprites_pyramids, ty_cuda_blocks(j.m, 1), THREADS, 0, j)))
      return false;
  }
  if (pixels && !TY_LAUNCH(sprites_draw, ty_cuda_blocks(pixels, THREADS), THREADS, 0, j)) return false;
  return !rows || TY_LAUNCH(sprites_empty, ty_cuda_blocks(rows, THREADS), THREADS, 0, j);
}

/* ---- backgrounds ---- */

struct background_job {
  int64_t n, h, w;
  const int32_t *list;
  uint8_t *picture;
  ty_cuda_watch watch;
};

__global__ void __launch_bounds__(THREADS) background_draw(background_job b) {
  const int64_t plane = b.h * b.w, step = (int64_t)gridDim.x * THREADS;
  for (int64_t at = blockIdx.x * (int64_t)THREADS + threadIdx.x; at < b.n * plane; at += step) {
    const int64_t i = at / plane, pixel = at % plane, x = pixel % b.w, y = pixel / b.w;
    const ty_background_job j = ty_background_read(b.list + i * TY_BACKGROUND_FIELDS);
    int64_t share = 0;
    if (ty_in_range(b.watch, j.b.kind, TY_BACKGROUND_KINDS))
      share = ty_background_share(&j, (2 * x + 1 - b.w) * (TY_DRAW_ONE / 2), (2 * y + 1 - b.h) * (TY_DRAW_ONE / 2));
    for (int c = 0; c < 3; c++) b.picture[(i * 3 + c) * plane + pixel] = ty_background_mix(&j.b, c, share);
  }
}

TY_CUDA_KERNEL(draw_background) {
  const ty_view *picture = k->out[0];
  background_job b = {};
  b.n = picture->size[0];
  b.h = picture->size[2];
  b.w = picture->size[3];
  b.list = ty_data_of<const int32_t>(k->in[0]);
  b.picture = ty_data_of<uint8_t>(picture);
  b.watch = ty_cuda_watched();
  return !picture->count || TY_LAUNCH(background_draw, ty_cuda_blocks(picture->count / 3, THREADS), THREADS, 0, b);
}

/* ---- noise ---- */

struct noise_job {
  int64_t n, each, blocks; /* of a picture: bytes, and blocks of four of them */
  const int32_t *list;
  const uint8_t *x;
  uint8_t *y;
};

__global__ void __launch_bounds__(THREADS) noise_add(noise_job j) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < j.n * j.blocks; i += step) {
    const int64_t picture = i / j.blocks, block = i % j.blocks;
    const int32_t *row = j.list + picture * TY_NOISE_FIELDS;
    const int64_t sigma = ty_noise_sigma(row);
    const ty_philox random = ty_philox_block(ty_noise_seed(row), static_cast<uint64_t>(block));
    for (int64_t k = 0; k < 4 && 4 * block + k < j.each; k++) {
      const int64_t at = picture * j.each + 4 * block + k;
      j.y[at] = ty_noisy(j.x[at], random.w[k], sigma);
    }
  }
}

TY_CUDA_KERNEL(pixel_noise) {
  const ty_view *x = k->in[0];
  if (!x->count) return true;
  noise_job j = {};
  j.n = x->size[0];
  j.each = x->count / j.n;
  j.blocks = (j.each + 3) / 4;
  j.list = ty_data_of<const int32_t>(k->in[1]);
  j.x = ty_data_of<const uint8_t>(x);
  j.y = ty_data_of<uint8_t>(k->out[0]);
  return TY_LAUNCH(noise_add, ty_cuda_blocks(j.n * j.blocks, THREADS), THREADS, 0, j);
}
