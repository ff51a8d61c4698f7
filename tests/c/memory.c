/* The allocator: counters, the budget, and asking the host program for memory back. */
#include <string.h>

#include "../../kernels/base.h"
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

/* Tensors of so many bytes each, all at once; then none of them. `blocks` gets where they were. */
static void take_and_give(const int64_t *bytes, int n, void **blocks) {
  ty_tensor *held[16];
  for (int i = 0; i < n; i++) {
    held[i] = ty_tensor_new(TY_CPU, TY_U8, 1, bytes + i);
    CHECK(held[i] != NULL);
    blocks[i] = held[i]->v.data;
  }
  for (int i = 0; i < n; i++) ty_release(held[i]);
}

void test_memory_cache_is_bounded(void) {
  ty_memory_empty_cache(TY_CPU);
  int64_t before = live_bytes(), largest = 0;
  void *blocks[16], *again[16];
  for (int64_t i = 0; i < 300; i++) { /* each at least a class above the last one, or far below all before */
    int64_t n = i % 3 == 2 ? (int64_t)((300 - i) * 4000 + 5000) : (int64_t)((1 + i % 40) * (3 + i % 7) * MIB / 8);
    if (n > largest) largest = n;
    take_and_give(&n, 1, blocks);
    CHECK(ty_memory_stats_of(TY_CPU).cached <= largest / 2 * 3 / 8 * 9 + 64 * MIB); /* half: what may be learnt */
  }
  CHECK_INT(live_bytes(), before);

  /* What recurs is there again, however many sizes it has: none of the blocks is a new one. */
  int64_t bytes[16];
  for (int i = 0; i < 16; i++) bytes[i] = (int64_t)(i + 9) * (MIB + 100);
  take_and_give(bytes, 16, blocks);
  int64_t cached = ty_memory_stats_of(TY_CPU).cached, most = 0;
  for (int i = 0; i < 16; i++) most += bytes[i] / 8 * 9;
  CHECK(cached <= most / 16 * 17 + 64 * MIB);
  for (int round = 0; round < 3; round++) {
    take_and_give(bytes, 16, again);
    for (int i = 0; i < 16; i++) { /* blocks of one class change places */
      bool known = false;
      for (int j = 0; j < 16; j++) known |= again[i] == blocks[j];
      CHECK(known);
    }
    CHECK_INT(ty_memory_stats_of(TY_CPU).cached, cached);
  }
  ty_memory_empty_cache(TY_CPU);
}

/* Sizes that come one after the other, again and again, are all held in the end, though together they are more than
 * what is live at once. */
void test_memory_cache_learns(void) {
  enum { SIZES = 5 };
  ty_memory_empty_cache(TY_CPU);
  void *block;
  int64_t all = 0, held = 0;
  for (int round = 0; round < 8; round++) {
    all = 0;
    for (int i = 0; i < SIZES; i++) { /* none is large enough for the next, nor may stand for the one before */
      static const int sizes[SIZES] = { 4, 10, 26, 64, 160 };
      int64_t bytes = sizes[i] * (int64_t)MIB;
      take_and_give(&bytes, 1, &block);
      all += bytes;
    }
    if (round == 0) held = ty_memory_stats_of(TY_CPU).cached;
  }
  CHECK(held < all);
  CHECK_INT(ty_memory_stats_of(TY_CPU).cached, all);
  ty_memory_empty_cache(TY_CPU);
}

/* A smaller tensor may get a larger block, and then counts as what it is; scratch memory as well. */
void test_memory_larger_blocks(void) {
  ty_memory_empty_cache(TY_CPU);
  int64_t before = live_bytes(), large = 16 * MIB, small = 9 * MIB;
  void *first, *second;
  take_and_give(&large, 1, &first);
  ty_memory_reset_peak(TY_CPU);
  take_and_give(&small, 1, &second);
  CHECK(first == second);
  CHECK_INT(ty_memory_stats_of(TY_CPU).peak, before + small);
  CHECK_INT(ty_memory_stats_of(TY_CPU).cached, large);
  void *scratch = ty_scratch_alloc((size_t)small);
  CHECK(scratch == first && live_bytes() == before + small);
  ty_scratch_free(scratch, (size_t)small);
  CHECK_INT(live_bytes(), before);
  CHECK_INT(ty_memory_stats_of(TY_CPU).cached, large);
  take_and_give(&large, 1, &second);
  CHECK(first == second);
  ty_memory_empty_cache(TY_CPU);
  CHECK_INT(ty_memory_stats_of(TY_CPU).cached, 0);
}

/* When memory is short, what a larger block has beyond would be missing: the block is of the tensor's size. */
void test_memory_larger_blocks_when_short(void) {
  ty_memory_empty_cache(TY_CPU);
  const int64_t budget = ty_memory_stats_of(TY_CPU).budget, beyond = ty_memory_stats_of(TY_CPU).beyond;
  int64_t large = 16 * MIB, small = 9 * MIB, most = 40 * MIB;
  void *at;
  for (int i = 0; i < 2; i++) {
    void *held = i ? ty_scratch_alloc((size_t)most) : NULL;
    take_and_give(&large, 1, &at);
    ty_memory_set_budget(TY_CPU, live_bytes() + beyond + 20 * MIB);
    if (!i) ty_memory_set_budget(TY_CPU, budget);
    void *scratch = ty_scratch_alloc((size_t)small);
    CHECK(scratch != NULL);
    CHECK_INT(ty_memory_stats_of(TY_CPU).beyond, beyond + (i ? 0 : large - small));
    ty_scratch_free(scratch, (size_t)small);
    ty_scratch_free(held, (size_t)most);
    ty_memory_set_budget(TY_CPU, budget);
  }
  ty_memory_empty_cache(TY_CPU);
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
