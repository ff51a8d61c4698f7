/* What is asked for of the tiles of products. */
#include "tiling.h"

static ty_tiling asked;

void ty_tiling_ask(ty_tiling wanted) {
  __atomic_store_n(&asked.rows, wanted.rows, __ATOMIC_RELAXED);
  __atomic_store_n(&asked.columns, wanted.columns, __ATOMIC_RELAXED);
  __atomic_store_n(&asked.pack, wanted.pack, __ATOMIC_RELAXED);
}

ty_tiling ty_tiling_asked(void) {
  return (ty_tiling){ .rows = __atomic_load_n(&asked.rows, __ATOMIC_RELAXED),
                      .columns = __atomic_load_n(&asked.columns, __ATOMIC_RELAXED),
                      .pack = __atomic_load_n(&asked.pack, __ATOMIC_RELAXED) };
}
