/* The random generator of each thread: a Philox key and how many blocks have been drawn under it. */
#include "../ops/op.h"

static _Thread_local ty_generator generator = { .seed = 0, .offset = 0 };

ty_generator *ty_default_generator(void) { return &generator; }

ty_p_random ty_draw(int64_t n, double a, double b) {
  ty_p_random p = { generator.seed, generator.offset, a, b };
  generator.offset += ((uint64_t)n + 3) / 4;
  return p;
}
