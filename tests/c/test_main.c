/* Runs the tests of the C library: c_test [name]... */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

int checks_passed, checks_failed;

static const char *current = "";

void check_that(bool ok, const char *file, int line, const char *format, ...) {
  if (ok) {
    __atomic_fetch_add(&checks_passed, 1, __ATOMIC_RELAXED);
    return;
  }
  if (__atomic_fetch_add(&checks_failed, 1, __ATOMIC_RELAXED) >= 100) return; /* enough to read */
  char text[600];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  const char *name = strrchr(file, '/');
  printf("FAIL %s:%d: %s: %s\n", name ? name + 1 : file, line, current, text);
}

void check_error(const char *file, int line, ty_code code, const char *parts) {
  check_that(ty_error_code() == code, file, line, "error code %d, expected %d: %s", (int)ty_error_code(), (int)code,
             ty_error());
  while (*parts) {
    char part[100];
    size_t n = strcspn(parts, "|");
    snprintf(part, sizeof part, "%.*s", (int)n, parts);
    check_that(strstr(ty_error(), part) != NULL, file, line, "the error should contain \"%s\": %s", part, ty_error());
    parts += n + (parts[n] == '|');
  }
}

ty_tensor *vector(int n, const double *values) { return ty_from_data(values, TY_F64, 1, (int64_t[]){ n }); }

ty_tensor *counting(ty_ints size) {
  ty_tensor *t = ty_empty(size, TY_F64, TY_CPU);
  for (int64_t i = 0; t && i < t->v.count; i++) ((double *)t->v.data)[i] = (double)i;
  return t;
}

double value_at(ty_tensor *t, int64_t flat) {
  ty_scope scope;
  ty_scope_open(&scope);
  ty_tensor *f = ty_contiguous(ty_cast(t, TY_F64));
  double v = f && flat < f->v.count ? ((const double *)f->v.data)[flat] : NAN;
  ty_scope_close(&scope);
  return v;
}

int64_t live_bytes(void) { return ty_memory_stats_of(TY_CPU).live; }

static void run(const char *name, void (*test)(void)) {
  current = name;
  ty_scope scope;
  int64_t before = live_bytes();
  ty_scope_open(&scope);
  test();
  ty_scope_close(&scope);
  CHECK_THAT(live_bytes() == before, "%lld bytes live after the test, %lld before", (long long)live_bytes(),
             (long long)before);
}

int main(int argc, char **argv) {
#define X(name)                                                           \
  {                                                                       \
    bool wanted = argc == 1;                                              \
    for (int i = 1; i < argc; i++) wanted |= strcmp(argv[i], #name) == 0; \
    if (wanted) run(#name, test_##name);                                  \
  }
  TESTS(X)
#undef X
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed != 0;
}
