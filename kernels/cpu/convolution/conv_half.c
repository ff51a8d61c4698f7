/* conv2d and its gradients of f16 and bf16. bf16 is multiplied on the CPU's tiles where it has them (conv_tiles.c);
 * otherwise, with an instruction for it, by matrix products whose operands stay in half precision and whose sums are f32,
 * with windows of the image as columns. What is better done in f32 (kernels by depth, Winograd's) goes through it. */
#include <string.h>

#include "conv.h"
#include "conv_tiles.h"

#include "../../half.h"

ty_kernel TY_KERNEL(conv2d);
ty_kernel TY_KERNEL(conv2d_backward_input);
ty_kernel TY_KERNEL(conv2d_backward_weight);
ty_kernel TY_KERNEL(conv2d_half);
ty_kernel TY_KERNEL(conv2d_half_input);
ty_kernel TY_KERNEL(conv2d_half_weight);

/* conv_half_pointwise.c; turned: weight is [c, o]. */
bool TY_KERNEL(conv_half_pointwise)(const conv_shape *s, const uint16_t *x, const uint16_t *weight, bool turned,
                                    const float *bias, uint16_t *y);

enum { PIECES = 8, MOST_INPUTS = 4 }; /* parts of a batch whose weight gradients are added up in order */

typedef struct job {
  conv_shape s;
  ty_dtype type;
  const uint16_t *x, *weight, *g, *residual;
  const float *bias;
  uint16_t *out;
  float *part;
  ty_activation activation;
  int64_t depth, area, pieces; /* c/groups kh kw; oh ow */
  bool plain, failed;          /* 1x1: x itself is the matrix of windows */
} job;

static job job_of(const ty_view *x, const ty_view *weight, const ty_view *y, const ty_p_conv *p) {
  job j = { .s = conv_shape_of(x, weight, y, p), .type = (ty_dtype)y->dtype };
  const conv_shape *s = &j.s;
  j.depth = s->cg * s->kh * s->kw;
  j.area = s->oh * s->ow;
  j.plain = s->kh == 1 && s->kw == 1 && s->sh == 1 && s->sw == 1 && !s->ph && !s->pw;
  return j;
}

/* Whether products of half precision are the faster way: with an instruction for them, and enough to multiply. */
static bool pays(const job *j) {
  const conv_shape *s = &j->s;
  if (j->type != TY_BF16 || !TY_KERNEL(gemm_has_bf16)() || s->og < 8 || j->depth < 8) return false;
  if (j->plain) return true;
  /* Winograd's transforms need a quarter of the products, and windows of few results cost more than they give. */
  bool square = s->kh == 3 && s->kw == 3 && s->sh == 1 && s->sw == 1 && s->cg >= 12;
  return !square && s->og >= 64;
}

/* ---- windows ---- */

/* Results [*from, *to) of a row for which column kj of the kernel is inside of x. */
static void inside(const conv_shape *s, int64_t kj, int64_t *from, int64_t *to) {
  int64_t first = s->pw - kj * s->dw, last = s->w - 1 + first;
  *from = first > 0 ? (first + s->sw - 1) / s->sw : 0;
  *to = last < 0 ? 0 : last / s->sw + 1;
  if (*to > s->ow) *to = s->ow;
  if (*from > *to) *from = *to;
}

/* to[k] = from[2 k] for k < n. */
static inline void take_even(const uint16_t *restrict from, int64_t n, uint16_t *restrict to) {
  int64_t k = 0;
#if defined(__AVX512BW__)
  for (; k + 16 < n; k += 16) /* so that the odd ones are there as well */
    _mm256_storeu_si256((__m256i *)(void *)(to + k), _mm512_cvtepi32_epi16(_mm512_loadu_si512(from + 2 * k)));
  if (n >= 16) { /* with some once more */
    const __m512i pairs = _mm512_maskz_loadu_epi16(0x7fffffff, from + 2 * (n - 16));
    _mm256_storeu_si256((__m256i *)(void *)(to + n - 16), _mm512_cvtepi32_epi16(pairs));
    return;
  }
#endif
  for (; k < n; k++) to[k] = from[2 * k];
}

/* windows [c/groups kh kw, oh ow] of one image and group, rows `pitch` apart. */
static void gather(const job *j, const uint16_t *restrict x, uint16_t *restrict windows, int64_t pitch) {
  const conv_shape *s = &j->s;
  for (int64_t c = 0; c < s->cg; c++)
    for (int64_t ki = 0; ki < s->kh; ki++)
      for (int64_t kj = 0; kj < s->kw; kj++, windows += pitch - j->area) {
        int64_t from, to;
        inside(s, kj, &from, &to);
        for (int64_t row = 0; row < s->oh; row++, windows += s->ow) {
          int64_t i = row * s->sh + ki * s->dh - s->ph;
          if (i < 0 || i >= s->h) {
            memset(windows, 0, sizeof *windows * (size_t)s->ow);
            continue;
          }
          const uint16_t *line = x + (c * s->h + i) * s->w + kj * s->dw - s->pw;
          for (int64_t k = 0; k < from; k++) windows[k] = 0;
          if (s->sw == 1) memcpy(windows + from, line + from, sizeof *windows * (size_t)(to - from));
          else if (s->sw == 2) take_even(line + 2 * from, to - from, windows + from);
          else
            for (int64_t k = from; k < to; k++) windows[k] = line[k * s->sw];
          for (int64_t k = to; k < s->ow; k++) windows[k] = 0;
        }
      }
}

/* Adds windows to the image that they are of. */
static void scatter(const job *j, const float *restrict windows, float *restrict x) {
  const conv_shape *s = &j->s;
  for (int64_t c = 0; c < s->cg; c++)
    for (int64_t ki = 0; ki < s->kh; ki++)
      for (int64_t kj = 0; kj < s->kw; kj++) {
        int64_t from, to;
        inside(s, kj, &from, &to);
        for (int64_t row = 0; row < s->oh; row++, windows += s->ow) {
          int64_t i = row * s->sh + ki * s->dh - s->ph;
          if (i < 0 || i >= s->h) continue;
          float *line = x + (c * s->h + i) * s->w + kj * s->dw - s->pw;
          if (s->sw == 1)
            for (int64_t k = from; k < to; k++) line[k] += windows[k];
          else
            for (int64_t k = from; k < to; k++) line[k * s->sw] += windows[k];
        }
      }
}

/* The matrix of windows: x itself, or scratch that is filled. */
static const uint16_t *windows_of(const job *j, const uint16_t *x, uint16_t *scratch) {
  if (j->plain) return x;
  gather(j, x, scratch, j->area);
  return scratch;
}

/* ---- units: an image and a group, or a part of the batch and a group ---- */

static void forward(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const conv_shape *s = &j->s;
  size_t bytes = j->plain ? 0 : sizeof(uint16_t) * (size_t)(j->depth * j->area);
  uint16_t *scratch = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !scratch) j->failed = true;
  for (int64_t u = begin; u < end && !j->failed && !ty_interrupted; u++) {
    int64_t n = u / s->groups, group = u % s->groups, at = (n * s->o + group * s->og) * j->area;
    const uint16_t *windows = windows_of(j, j->x + (n * s->c + group * s->cg) * s->h * s->w, scratch);
    ty_gemm g = { .m = s->og,
                  .n = j->area,
                  .k = j->depth,
                  .a = j->weight + group * s->og * j->depth,
                  .a_row = j->depth,
                  .a_col = 1,
                  .b = windows,
                  .b_row = j->area,
                  .b_col = 1,
                  .c = j->out + at,
                  .c_row = j->area,
                  .row_bias = j->bias ? j->bias + group * s->og : NULL,
                  .activation = j->activation,
                  .residual = j->residual ? j->residual + at : NULL,
                  .residual_row = j->area,
                  .half = j->type,
                  .c_half = j->type };
    if (!TY_KERNEL(gemm_f32)(&g)) j->failed = true;
  }
  if (scratch) ty_scratch_free(scratch, bytes);
}

/* ---- all images at once: where one has too few results to fill the vectors of a product ---- */

enum { FEW_RESULTS = 128, TOGETHER_BYTES = 8 << 20 };

static bool suits_together(const job *j) {
  const conv_shape *s = &j->s;
  return s->groups == 1 && s->n > 1 && !j->plain && !j->residual && j->area < FEW_RESULTS && j->area % 64 != 0 &&
         (j->depth + s->og) * s->n * j->area * (int64_t)sizeof(uint16_t) <= TOGETHER_BYTES;
}

typedef struct together {
  const job *j;
  uint16_t *windows, *results; /* [depth, n area], [o, n area] */
  int64_t pitch;
} together;

static void gather_images(void *context, int64_t begin, int64_t end) {
  const together *t = context;
  const conv_shape *s = &t->j->s;
  for (int64_t n = begin; n < end; n++)
    gather(t->j, t->j->x + n * s->c * s->h * s->w, t->windows + n * t->j->area, t->pitch);
}

static void part_images(void *context, int64_t begin, int64_t end) {
  const together *t = context;
  const int64_t o = t->j->s.o, area = t->j->area;
  for (int64_t i = begin * o; i < end * o; i++)
    memcpy(t->j->out + i * area, t->results + i % o * t->pitch + i / o * area, sizeof(uint16_t) * (size_t)area);
}

static void forward_together(job *j) {
  const conv_shape *s = &j->s;
  together t = { .j = j, .pitch = s->n * j->area };
  const size_t bytes = sizeof(uint16_t) * (size_t)((j->depth + s->og) * t.pitch);
  if (!(t.windows = ty_scratch_alloc(bytes))) {
    j->failed = true;
    return;
  }
  t.results = t.windows + j->depth * t.pitch;
  ty_gemm g = { .m = s->og,
                .n = t.pitch,
                .k = j->depth,
                .a = j->weight,
                .a_row = j->depth,
                .a_col = 1,
                .b = t.windows,
                .b_row = t.pitch,
                .b_col = 1,
                .c = t.results,
                .c_row = t.pitch,
                .row_bias = j->bias,
                .activation = j->activation,
                .half = j->type,
                .c_half = j->type };
  ty_parallel_for_all(s->n, 1, gather_images, &t);
  if (!TY_KERNEL(gemm_f32)(&g)) j->failed = true;
  ty_parallel_for_all(s->n, 1 + 32768 / (s->o * j->area), part_images, &t);
  ty_scratch_free(t.windows, bytes);
}

static void input_gradient(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const conv_shape *s = &j->s;
  int64_t image = s->cg * s->h * s->w;
  size_t bytes = j->plain ? 0 : sizeof(float) * (size_t)(j->depth * j->area + image);
  float *scratch = bytes ? ty_scratch_alloc(bytes) : NULL, *dx = scratch ? scratch + j->depth * j->area : NULL;
  if (bytes && !scratch) j->failed = true;
  for (int64_t u = begin; u < end && !j->failed && !ty_interrupted; u++) {
    int64_t n = u / s->groups, group = u % s->groups;
    uint16_t *out = j->out + (n * s->c + group * s->cg) * s->h * s->w;
    ty_gemm g = { .m = j->depth,
                  .n = j->area,
                  .k = s->og,
                  .a = j->weight + group * s->og * j->depth,
                  .a_row = 1,
                  .a_col = j->depth,
                  .b = j->g + (n * s->o + group * s->og) * j->area,
                  .b_row = j->area,
                  .b_col = 1,
                  .c = j->plain ? (void *)out : scratch,
                  .c_row = j->area,
                  .half = j->type,
                  .c_half = j->plain ? j->type : 0 };
    if (!TY_KERNEL(gemm_f32)(&g)) j->failed = true;
    if (j->plain || j->failed) continue;
    memset(dx, 0, sizeof *dx * (size_t)image);
    scatter(j, scratch, dx);
    ty_half_store(j->type, out, dx, image);
  }
  if (scratch) ty_scratch_free(scratch, bytes);
}

static void weight_gradient(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const conv_shape *s = &j->s;
  size_t bytes = j->plain ? 0 : sizeof(uint16_t) * (size_t)(j->depth * j->area);
  uint16_t *scratch = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !scratch) j->failed = true;
  for (int64_t u = begin; u < end; u++) {
    int64_t piece = u / s->groups, group = u % s->groups;
    int64_t first = piece * s->n / j->pieces, stop = (piece + 1) * s->n / j->pieces;
    for (int64_t n = first; n < stop && !j->failed && !ty_interrupted; n++) {
      const uint16_t *windows = windows_of(j, j->x + (n * s->c + group * s->cg) * s->h * s->w, scratch);
      ty_gemm g = { .m = s->og,
                    .n = j->depth,
                    .k = j->area,
                    .a = j->g + (n * s->o + group * s->og) * j->area,
                    .a_row = j->area,
                    .a_col = 1,
                    .b = windows,
                    .b_row = 1,
                    .b_col = j->area,
                    .c = j->part + (piece * s->o + group * s->og) * j->depth,
                    .c_row = j->depth,
                    .add = n > first,
                    .half = j->type };
      if (!TY_KERNEL(gemm_f32)(&g)) j->failed = true;
    }
  }
  if (scratch) ty_scratch_free(scratch, bytes);
}

/* ---- through f32 ---- */

static bool widened(const ty_kernel_args *k, ty_kernel *kernel) {
  ty_view view[MOST_INPUTS + 1];
  const ty_view *in[MOST_INPUTS] = { NULL }, *out[1] = { &view[MOST_INPUTS] };
  size_t bytes = sizeof(float) * (size_t)k->out[0]->count;
  for (int i = 0; i < k->nin; i++) bytes += k->in[i] ? sizeof(float) * (size_t)k->in[i]->count : 0;
  float *scratch = ty_scratch_alloc(bytes + 1), *to = scratch;
  if (!scratch) return false;
  for (int i = 0; i < k->nin; i++) {
    if (!k->in[i]) continue;
    view[i] = *k->in[i];
    view[i].dtype = TY_F32;
    view[i].data = to;
    ty_half_load((ty_dtype)k->in[i]->dtype, to, k->in[i]->data, k->in[i]->count);
    to += k->in[i]->count;
    in[i] = &view[i];
  }
  view[MOST_INPUTS] = *k->out[0];
  view[MOST_INPUTS].dtype = TY_F32;
  view[MOST_INPUTS].data = to;
  bool ok = kernel(&(ty_kernel_args){ 1, k->nin, out, in, k->params, NULL });
  if (ok) ty_half_store((ty_dtype)k->out[0]->dtype, k->out[0]->data, to, k->out[0]->count);
  ty_scratch_free(scratch, bytes + 1);
  return ok;
}

/* ---- the kernels ---- */

/* Whether the CPU's tiles are the faster way: enough of the channels that they take at a time are there. */
static bool fills_tiles(const job *j) {
  const conv_shape *s = &j->s;
  if (j->type != TY_BF16 || j->depth < 16 || s->n * j->area < 32) return false;
  return s->groups == 1 ? s->og >= 3 : s->og >= 8 && s->cg >= 8;
}

static bool empty(const job *j) { return j->s.n * j->area * j->depth * j->s.o == 0; }

bool TY_KERNEL(conv2d_half)(const ty_kernel_args *k) {
  const ty_p_conv *p = k->params;
  job j = job_of(k->in[0], k->in[1], k->out[0], p);
  if (empty(&j) || !(pays(&j) || fills_tiles(&j))) return widened(k, TY_KERNEL(conv2d));
  const ty_view *bias = k->nin > 2 ? k->in[2] : NULL, *residual = k->nin > 3 ? k->in[3] : NULL;
  size_t bytes = bias ? sizeof(float) * (size_t)bias->count : 0;
  float *wide = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !wide) return false;
  if (wide) ty_half_load(j.type, wide, bias->data, bias->count);
  j.x = k->in[0]->data, j.weight = k->in[1]->data, j.out = k->out[0]->data, j.bias = wide;
  j.residual = residual ? residual->data : NULL;
  j.activation = p->activation;
  bool done = false;
  if (fills_tiles(&j)) {
    j.s.weights = k->weights;
    conv_tiles_call call = { .half = j.type,
                             .x = j.x,
                             .weight = j.weight,
                             .residual = j.residual,
                             .bias = wide,
                             .activation = j.activation,
                             .y = j.out };
    if (!TY_KERNEL(conv_tiles)(&j.s, &call, &done)) j.failed = true;
  }
  if (done || j.failed || !pays(&j)) {
    if (wide) ty_scratch_free(wide, bytes);
    return done || (!j.failed && widened(k, TY_KERNEL(conv2d)));
  }
  if (j.plain && j.s.groups == 1 && !j.activation && !j.residual) {
    j.failed = !TY_KERNEL(conv_half_pointwise)(&j.s, j.x, j.weight, false, wide, j.out);
    if (wide) ty_scratch_free(wide, bytes);
    return !j.failed;
  }
  if (suits_together(&j)) forward_together(&j);
  else ty_parallel_for(j.s.n * j.s.groups, 1, forward, &j);
  if (wide) ty_scratch_free(wide, bytes);
  return !j.failed;
}

bool TY_KERNEL(conv2d_half_input)(const ty_kernel_args *k) {
  job j = job_of(k->out[0], k->in[1], k->in[0], k->params);
  bool done = false;
  if (!empty(&j) && fills_tiles(&j)) {
    conv_tiles_call call = {
      .half = j.type, .backward = true, .x = k->in[0]->data, .weight = k->in[1]->data, .y = k->out[0]->data
    };
    if (!TY_KERNEL(conv_tiles)(&j.s, &call, &done)) return false;
  }
  if (done) return true;
  if (!pays(&j) || empty(&j)) return widened(k, TY_KERNEL(conv2d_backward_input));
  j.g = k->in[0]->data, j.weight = k->in[1]->data, j.out = k->out[0]->data;
  if (j.plain && j.s.groups == 1) {
    conv_shape turned = j.s;
    turned.c = j.s.o, turned.o = j.s.c;
    return TY_KERNEL(conv_half_pointwise)(&turned, j.g, j.weight, true, NULL, j.out);
  }
  ty_parallel_for(j.s.n * j.s.groups, 1, input_gradient, &j);
  return !j.failed;
}

bool TY_KERNEL(conv2d_half_weight)(const ty_kernel_args *k) {
  job j = job_of(k->in[1], k->out[0], k->in[0], k->params);
  bool done = false;
  if (!empty(&j) && fills_tiles(&j)) {
    const void *g = k->in[0]->data, *x = k->in[1]->data;
    if (!TY_KERNEL(conv_tiles_weight)(&j.s, j.type, g, x, k->out[0]->data, &done)) return false;
  }
  if (done) return true;
  if (!pays(&j) || empty(&j)) return widened(k, TY_KERNEL(conv2d_backward_weight));
  int64_t count = k->out[0]->count;
  j.g = k->in[0]->data, j.x = k->in[1]->data;
  j.pieces = j.s.n < PIECES ? j.s.n : PIECES;
  size_t bytes = sizeof(float) * (size_t)(j.pieces * count);
  j.part = ty_scratch_alloc(bytes);
  if (!j.part) return false;
  ty_parallel_for(j.pieces * j.s.groups, 1, weight_gradient, &j);
  for (int64_t piece = 1; piece < j.pieces; piece++)
    for (int64_t i = 0; i < count; i++) j.part[i] += j.part[piece * count + i];
  ty_half_store(j.type, k->out[0]->data, j.part, count);
  ty_scratch_free(j.part, bytes);
  return !j.failed;
}
