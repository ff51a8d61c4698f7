/* matmul_shift: x i8 [..., k] with codes i8 [n, k], whose sign is that of a weight and whose size less 1 the power of
 * two; 0 is no weight. Every product is a shift of an integer and a sign, sums are of i32 and wrap around. */
#include "../cpu.h"

typedef struct job {
  const int8_t *x, *codes;
  int32_t *y;
  int64_t rows, columns;
} job;

static void lines(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const int64_t columns = j->columns;
  for (int64_t line = begin; line < end && !ty_interrupted; line++) {
    const int8_t *restrict x = j->x + line * columns;
    for (int64_t n = 0; n < j->rows; n++) {
      const int8_t *restrict code = j->codes + n * columns;
      uint32_t sum = 0;
      for (int64_t k = 0; k < columns; k++) {
        const int32_t c = code[k];
        const uint32_t minus = (uint32_t)(c >> 31), there = c ? ~0u : 0;
        const uint32_t by = (((uint32_t)c ^ minus) - minus - 1) & 31;
        sum += ((((uint32_t)(int32_t)x[k] << by) ^ minus) - minus) & there;
      }
      j->y[line * j->rows + n] = (int32_t)sum;
    }
  }
}

bool TY_KERNEL(matmul_shift)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *codes = k->in[1];
  if (!k->out[0]->count) return true;
  job j = { x->data, codes->data, k->out[0]->data, codes->size[0], codes->size[1] };
  ty_parallel_for(k->out[0]->count / j.rows, 1 + (1 << 14) / (1 + j.rows * j.columns), lines, &j);
  return true;
}
