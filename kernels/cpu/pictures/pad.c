/* Edges around a tensor (kernels/pad.h): every line of the result is written once. A line is the last dimension that
 * has edges, with those after it as blocks of bytes that stay together. */
#include "../../pad.h"

#include <string.h>

#include "../cpu.h"

enum {
  GRAIN = 65536, /* bytes that are worth a thread */
  VECTOR = 32
};

typedef struct pad_job {
  const ty_view *out, *in;
  const ty_p_pad *p;
  const char *value; /* one element */
  char run[VECTOR];  /* of it */
  bool short_ends;   /* the constants at both ends of a line are no longer than that */
  int last;          /* the dimension that lines lie along */
  size_t block;      /* bytes of an element of a line */
  int size;          /* bytes of an element of the tensors */
} pad_job;

static inline __attribute__((always_inline)) void put_constant(char *to, const char *value, size_t bytes, int size) {
  if (size == 4) {
    uint32_t v, *out = (uint32_t *)(void *)to;
    memcpy(&v, value, sizeof v);
    for (size_t i = 0; i < bytes / 4; i++) out[i] = v;
  } else {
    for (size_t i = 0; i < bytes; i += (size_t)size) memcpy(to + i, value, (size_t)size);
  }
}

/* memcpy() of lines that are too short for a call: in vectors, the last of which may overlap. */
static inline __attribute__((always_inline)) void put_line(char *to, const char *from, size_t bytes) {
  enum { FEW = 32 * VECTOR };
  if (bytes < VECTOR || bytes > FEW) {
    memcpy(to, from, bytes);
    return;
  }
  for (size_t i = 0; i < bytes - VECTOR; i += VECTOR) memcpy(to + i, from + i, VECTOR);
  memcpy(to + bytes - VECTOR, from + bytes - VECTOR, VECTOR);
}

/* One line, from the line `from` of the tensor (NULL: it is all constant). */
static inline __attribute__((always_inline)) void pad_line(const pad_job *j, char *to, const char *from,
                                                           const size_t block) {
  const int64_t n = j->in->size[j->last], before = j->p->before[j->last], length = j->out->size[j->last];
  const ty_padding mode = j->p->mode;
  if (!from) {
    put_constant(to, j->value, (size_t)length * block, j->size);
    return;
  }
  if (mode == TY_PAD_CONSTANT && j->short_ends) { /* by one store each, of which the line keeps its part */
    memcpy(to, j->run, VECTOR);
    memcpy(to + (size_t)length * block - VECTOR, j->run, VECTOR);
    put_line(to + (size_t)before * block, from, (size_t)n * block);
    return;
  }
  put_line(to + (size_t)before * block, from, (size_t)n * block);
  if (mode == TY_PAD_CONSTANT) {
    put_constant(to, j->value, (size_t)before * block, j->size);
    put_constant(to + (size_t)(before + n) * block, j->value, (size_t)(length - before - n) * block, j->size);
    return;
  }
  for (int64_t i = 0; i < before; i++)
    memcpy(to + (size_t)i * block, from + (size_t)ty_pad_source(mode, i - before, n) * block, block);
  for (int64_t i = before + n; i < length; i++)
    memcpy(to + (size_t)i * block, from + (size_t)ty_pad_source(mode, i - before, n) * block, block);
}

/* Lines of the result, those of one plane (which lie along the dimension before) after each other. */
static inline __attribute__((always_inline)) void pad_lines(const pad_job *j, int64_t begin, int64_t end,
                                                            const size_t block) {
  const int64_t line_in = j->in->size[j->last] * (int64_t)block, line_out = j->out->size[j->last] * (int64_t)block;
  const int row = j->last - 1;
  const int64_t high = row < 0 ? 1 : j->out->size[row], low = row < 0 ? 1 : j->in->size[row];
  const int64_t above = row < 0 ? 0 : j->p->before[row];
  for (int64_t line = begin, rows; line < end; line += rows) {
    int64_t plane = 0, scale = 1, rest = line / high; /* the plane that it comes from, -1: none */
    for (int d = row - 1; d >= 0 && plane >= 0; d--) {
      const int64_t source = ty_pad_source(j->p->mode, rest % j->out->size[d] - j->p->before[d], j->in->size[d]);
      plane = source < 0 ? -1 : plane + source * scale;
      scale *= j->in->size[d];
      rest /= j->out->size[d];
    }
    const int64_t first = line % high;
    rows = high - first < end - line ? high - first : end - line;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t source = plane < 0 ? -1 : ty_pad_source(j->p->mode, first + r - above, low);
      pad_line(j, (char *)j->out->data + (line + r) * line_out,
               source < 0 ? NULL : (const char *)j->in->data + (plane * low + source) * line_in, block);
    }
  }
}

static void pad_range(void *context, int64_t begin, int64_t end) {
  const pad_job *j = context;
  switch (j->block) {
    case 2: pad_lines(j, begin, end, 2); break;
    case 4: pad_lines(j, begin, end, 4); break;
    default: pad_lines(j, begin, end, j->block);
  }
}

/* in: x, the constant; out is no smaller than x in any dimension. */
bool TY_KERNEL(pad_edges)(const ty_kernel_args *k) {
  const ty_view *out = k->out[0], *in = k->in[0];
  pad_job j = { .out = out, .in = in, .p = k->params, .value = k->in[1]->data, .size = ty_dtype_size[in->dtype] };
  if (out->count == 0) return true;
  j.block = (size_t)j.size;
  for (j.last = out->ndim - 1; j.last > 0 && out->size[j.last] == in->size[j.last]; j.last--)
    j.block *= (size_t)in->size[j.last];
  const int64_t line = out->size[j.last] * (int64_t)j.block, before = j.p->before[j.last] * (int64_t)j.block;
  for (int i = 0; i < VECTOR; i += j.size) memcpy(j.run + i, j.value, (size_t)j.size);
  j.short_ends = before <= VECTOR && line - before - in->size[j.last] * (int64_t)j.block <= VECTOR && line >= VECTOR;
  ty_parallel_for(out->count * j.size / line, GRAIN / line + 1, pad_range, &j);
  return true;
}
