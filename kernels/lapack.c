#include "lapack.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
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

static void load(void) {
  static const char *const names[] = { "libopenblas.so.0", "liblapack.so.3", "libopenblas.so", "liblapack.so" };
  for (size_t i = 0; i < sizeof names / sizeof *names && !found; i++) {
    void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) continue;
    found = take(library);
    if (found) snprintf(lapack.name, sizeof lapack.name, "%s", names[i]);
    else dlclose(library);
  }
}

const ty_lapack *ty_lapack_open(void) {
  pthread_once(&once, load);
  if (found) return &lapack;
  ty_fail(TY_EUNSUPPORTED, "needs LAPACK, and neither libopenblas.so.0 nor liblapack.so.3 is here (Debian: "
                           "libopenblas0-pthread)");
  return NULL;
}
