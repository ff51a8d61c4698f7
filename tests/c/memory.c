/* The allocator: counters, the budget, and asking the host program for memory back. */
#include <string.h>

#include "check.h"

enum { MIB = 1 << 20 };

void test_memory_counters(void) {
  ty_memory_empty_cache(TY_CPU);
  ty_memory_reset_peak(TY_CPU);
  ty_memory_stats before = ty_memory_stats_of(TY_CPU);
  CHECK_INT(before.cached, 0);
  CHECK_INT(before.peak, before.live);
  ty_tensor *x = ty_tensor_new(TY_CPU, TY_U8, 1, (int64_t[]){ 8 * MIB });
  CHECK(x != NULL && ((uintptr_t)x->v.data & 63) == 0);
  ty_memory_stats during = ty_memory_stats_of(TY_CPU);
  CHECK(during.live >= before.live + 8 * MIB && during.live <= before.live + 9 * MIB);
  CHECK(during.allocations > before.allocations);
  CHECK_INT(ty_memory_live(TY_CPU), during.live);
  void *bytes = x->v.data;
  ty_release(x);
  ty_memory_stats after = ty_memory_stats_of(TY_CPU);
  CHECK_INT(after.live, before.live);
  CHECK_INT(after.cached, during.live - before.live);
  CHECK_INT(after.peak, during.live);
  x = ty_tensor_new(TY_CPU, TY_F32, 1, (int64_t[]){ 2 * MIB }); /* as many bytes: from the cache */
  CHECK(x && x->v.data == bytes);
  CHECK_INT(ty_memory_stats_of(TY_CPU).cached, 0);
  ty_release(x);
  ty_memory_empty_cache(TY_CPU);
  CHECK_INT(ty_memory_stats_of(TY_CPU).cached, 0);

  for (int64_t n = 0; n < 700; n += 23) { /* small and not so small */
    x = ty_tensor_new(TY_CPU, TY_U8, 1, &n);
    CHECK(x && (((uintptr_t)x->v.data & 63) == 0 || n == 0));
    if (x && n) memset(x->v.data, 1, (size_t)n);
    ty_release(x);
  }
  CHECK_INT(live_bytes(), before.live);
}

void test_memory_budget(void) {
  int64_t budget = ty_memory_stats_of(TY_CPU).budget;
  ty_tensor *x = ty_ones(TY_INTS(512, 1024), TY_F32, TY_CPU);
  int64_t before = live_bytes();
  ty_memory_set_budget(TY_CPU, before + 4 * MIB);
  CHECK_FAILS(ty_zeros(TY_INTS(16, 1 << 20), TY_F32, TY_CPU), TY_ENOMEM,
              "out of memory on cpu|64.0 MiB|[16, 1048576] f32|largest|[512, 1024] f32");
  CHECK(ty_add(x, 1) != NULL); /* 2 MiB fit */
  ty_memory_set_budget(TY_CPU, 0);
  CHECK_INT(ty_memory_stats_of(TY_CPU).budget, budget);
  CHECK(ty_zeros(TY_INTS(16, 1 << 20), TY_F32, TY_CPU) != NULL);
}

static bool give_up(void *context) {
  ty_tensor **held = context;
  bool any = *held != NULL;
  ty_release(*held);
  *held = NULL;
  return any;
}

void test_memory_reclaim(void) {
  ty_tensor *held = ty_tensor_new(TY_CPU, TY_U8, 1, (int64_t[]){ 6 * MIB });
  ty_memory_reclaim = give_up;
  ty_memory_reclaim_context = &held;
  ty_memory_empty_cache(TY_CPU);
  ty_memory_set_budget(TY_CPU, live_bytes() + MIB);
  CHECK(ty_zeros(TY_INTS(5 * MIB), TY_U8, TY_CPU) != NULL);
  CHECK(held == NULL);
  CHECK_FAILS(ty_zeros(TY_INTS(5 * MIB), TY_U8, TY_CPU), TY_ENOMEM, "out of memory");
  ty_memory_reclaim = NULL;
  ty_memory_set_budget(TY_CPU, 0);
}
