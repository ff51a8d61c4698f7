/* Where NVIDIA's libraries may lie. */
#include "library.cuh"

#ifndef TY_CUDA_EMULATED
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* With patterns of the shell in the folder. */
static void *open_in(const char *folder, const char *name) {
  char pattern[4096];
  if (static_cast<size_t>(snprintf(pattern, sizeof pattern, "%s/%s", folder, name)) >= sizeof pattern) return nullptr;
  glob_t found;
  void *library = nullptr;
  if (glob(pattern, GLOB_BRACE, nullptr, &found) == 0)
    for (size_t i = found.gl_pathc; i-- > 0 && !library;) library = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
  globfree(&found);
  return library;
}

/* Below a folder that an environment variable names. */
static void *open_below(const char *variable, const char *inside, const char *name) {
  char folder[4096];
  const char *root = getenv(variable);
  if (!root || !*root) return nullptr;
  if (static_cast<size_t>(snprintf(folder, sizeof folder, "%s%s", root, inside)) >= sizeof folder) return nullptr;
  return open_in(folder, name);
}

/* In one of the folders of a list that colons separate, or where a toolkit there would have it. */
static void *open_listed(const char *list, const char *name) {
  char folder[4096];
  void *library = nullptr;
  for (; list && *list && !library; list += *list == ':') {
    size_t n = strcspn(list, ":");
    if (static_cast<size_t>(snprintf(folder, sizeof folder, "%.*s{,/lib64,/lib}", static_cast<int>(n), list)) <
        sizeof folder)
      library = open_in(folder, name);
    list += n;
  }
  return library;
}

#define PACKAGES "/lib/python3*/{site,dist}-packages/nvidia/*/lib"

static void *open_anywhere(const char *name) {
  void *library = open_listed(getenv("TYCHO_CUDA_PATH"), name);
  if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) library = open_below("CUDA_HOME", "/{lib64,lib}", name);
  if (!library) library = open_in("/usr/local/cuda*/lib64", name);
  if (!library) library = open_below("VIRTUAL_ENV", PACKAGES, name);
  if (!library) library = open_below("CONDA_PREFIX", "{/lib," PACKAGES "}", name);
  if (!library) library = open_below("HOME", "/.local" PACKAGES, name);
  return library ? library : open_in("/usr{/local,}" PACKAGES, name);
}

void *ty_cuda_library(const char *const *names) {
  void *library = nullptr;
  for (; *names && !library; names++) library = open_anywhere(*names);
  return library;
}
#endif
