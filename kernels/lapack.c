#include "lapack.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static ty_lapack lapack;
static bool found;

typedef struct wanted {
  const char *name;
  void *member;
} wanted;

#define MEMBER_F32(name, parameters) { "s" #name "_", &lapack.s##name },
#define MEMBER_F64(name, parameters) { "d" #name "_", &lapack.d##name },
static const wanted members[] = { TY_EACH_LAPACK(MEMBER_F32, , , , ) TY_EACH_LAPACK(MEMBER_F64, , , , ) };

static bool take(void *library) {
  for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
    void *function = dlsym(library, members[i].name);
    if (!function) return false;
    memcpy(members[i].member, &function, sizeof function); /* C has no cast from data to functions */
  }
  void *function = dlsym(library, "openblas_set_num_threads");
  memcpy(&lapack.set_threads, &function, sizeof function);
  return true;
}

/* OpenBLAS takes an Intel CPU that is newer than itself for one with SSE3 and nothing more: unless the user says what to
 * take, it is told while it is loaded. */
static const char *core_of_this_cpu(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("intel") && !getenv("OPENBLAS_CORETYPE")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
      return "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
  }
#endif
  return NULL;
}

static void load(void) {
  const char *core = core_of_this_cpu();
  if (core) setenv("OPENBLAS_CORETYPE", core, 1);
  static const char *const names[] = { "libopenblas.so.0", "liblapack.so.3", "libopenblas.so", "liblapack.so" };
  for (size_t i = 0; i < sizeof names / sizeof *names && !found; i++) {
    void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) continue;
    found = take(library);
    if (found) snprintf(lapack.name, sizeof lapack.name, "%s", names[i]);
    else dlclose(library);
  }
  if (core) unsetenv("OPENBLAS_CORETYPE"); /* programs that are started from here choose for themselves */
}

const ty_lapack *ty_lapack_open(void) {
  pthread_once(&once, load);
  if (found) return &lapack;
  ty_fail(TY_EUNSUPPORTED, "needs LAPACK, and neither libopenblas.so.0 nor liblapack.so.3 is here (Debian: "
                           "libopenblas0-pthread)");
  return NULL;
}
