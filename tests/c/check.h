/* A small test library for the tests of this folder. A failed check is printed and counted, and the test goes on. */
#ifndef TY_TEST_CHECK_H
#define TY_TEST_CHECK_H

#include <stdbool.h>

#include "tycho.h"

extern int checks_passed, checks_failed;

void check_that(bool ok, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* That the last failure had this code and a text that contains all parts ("|" between them). */
void check_error(const char *file, int line, ty_code code, const char *parts);

#define CHECK(condition) check_that(condition, __FILE__, __LINE__, "%s", #condition)
#define CHECK_THAT(condition, ...) check_that(condition, __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_INT(got, want)                                                                       \
  do {                                                                                             \
    long long got_ = (long long)(got), want_ = (long long)(want);                                  \
    check_that(got_ == want_, __FILE__, __LINE__, "%s is %lld, expected %lld", #got, got_, want_); \
  } while (0)
#define CHECK_NEAR(got, want, tolerance)                                                                         \
  do {                                                                                                           \
    double got_ = (got), want_ = (want);                                                                         \
    check_that(fabs(got_ - want_) <= (tolerance), __FILE__, __LINE__, "%s is %.17g, expected %.17g", #got, got_, \
               want_);                                                                                           \
  } while (0)
/* The call gives NULL or false, with this code and these parts in its text. */
#define CHECK_FAILS(call, code, parts)                                         \
  do {                                                                         \
    ty_error_clear();                                                          \
    if (call) check_that(false, __FILE__, __LINE__, "%s did not fail", #call); \
    else check_error(__FILE__, __LINE__, code, parts);                         \
  } while (0)

/* ---- what several tests need ---- */

ty_tensor *vector(int n, const double *values); /* f64, scoped */
ty_tensor *counting(ty_ints size);              /* 0, 1, 2 ... in f64, scoped */
double value_at(ty_tensor *t, int64_t flat);    /* of a contiguous tensor of any dtype; NAN when there is none */
int64_t live_bytes(void);

/* ---- the tests: each leaves as many live bytes as it found ---- */

/* clang-format off */
#define TESTS(X) \
  X(scopes) X(nested_scopes) X(null_passes_through) X(foreign_memory) \
  X(views_share_memory) X(view_layout) X(writes_are_noticed) X(meta_tensors) \
  X(error_texts) X(errors_stand) X(index_errors) X(wrong_arguments) \
  X(memory_counters) X(memory_cache_is_bounded) X(memory_cache_learns) X(memory_larger_blocks) \
  X(memory_larger_blocks_when_short) \
  X(memory_budget) X(memory_reclaim) \
  X(gradients) X(second_gradients) X(training) X(allocation_failures) \
  X(threads_compute) X(threads_keep_weights) X(threads_share_storage) X(threads_have_their_own_state) X(threads_hand_over) \
  X(threads_share_the_pool) X(threads_after_fork) \
  X(f16_conversion) X(bf16_conversion) X(philox)
/* clang-format on */

#define X(name) void test_##name(void);
TESTS(X)
#undef X

#endif
