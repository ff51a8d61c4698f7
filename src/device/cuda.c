/* Finds and loads the CUDA backend, libtycho_cuda.so beside libtycho.so (TYCHO_CUDA_LIBRARY names another), once, when the
 * first GPU is asked for: a program that uses none starts as fast as without it. */
#define _GNU_SOURCE
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "beside.h"
#include "device.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const ty_cuda_backend *backend;
static int count;
static char problem[8192];

static void load(void) {
  static const char missing[] = "this build has no CUDA kernels (./run build --cuda builds them where nvcc is)";
  const char *path;
  void *library = ty_open_beside("libtycho_cuda.so", "TYCHO_CUDA_LIBRARY", RTLD_NOW | RTLD_LOCAL, missing,
                                 "the CUDA kernels cannot be loaded", &path, problem, sizeof problem);
  if (!library) return;
  ty_cuda_open_fn *open = (ty_cuda_open_fn *)(uintptr_t)dlsym(library, "ty_cuda_open");
  const ty_cuda_backend *b = open ? open(problem, sizeof problem) : NULL;
  if (!open || (b && (b->version != TY_CUDA_BACKEND_VERSION || b->ops != TY_OP_COUNT))) {
    snprintf(problem, sizeof problem, "%s belongs to another version of Tycho", path);
    b = NULL;
  }
  if (!b) return; /* its threads and its driver outlive us: it stays loaded */
  backend = b;
  count = b->count < TY_MAX_GPUS ? b->count : TY_MAX_GPUS;
}

int ty_cuda_count(const char **why) {
  pthread_once(&once, load);
  if (why) *why = problem;
  return count;
}

const ty_cuda_backend *ty_cuda(void) { return backend; }

const char *ty_cuda_describe(int index) { return backend->describe(index); }

void ty_cuda_allow_tf32(bool on) {
  if (ty_cuda_count(NULL)) backend->allow_tf32(on);
}

bool ty_cuda_found_library(int index, ty_cuda_found *found) {
  return ty_cuda_count(NULL) && backend->library(index, found);
}
