#define _GNU_SOURCE
#include "beside.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *ty_open_beside(const char *name, const char *variable, int flags, const char *missing, const char *broken,
                     const char **path, char *problem, size_t room) {
  static _Thread_local char where[4096];
  const char *named = getenv(variable);
  Dl_info here;
  *path = where;
  if (named) {
    snprintf(where, sizeof where, "%s", named);
  } else {
    if (!dladdr((void *)ty_open_beside, &here) || !here.dli_fname) here.dli_fname = "";
    const char *slash = strrchr(here.dli_fname, '/');
    snprintf(where, sizeof where, "%.*s%s", slash ? (int)(slash - here.dli_fname + 1) : 0, here.dli_fname, name);
    FILE *f = fopen(where, "rb");
    if (!f) {
      snprintf(problem, room, "%s", missing);
      return NULL;
    }
    fclose(f);
  }
  void *library = dlopen(where, flags);
  if (!library) snprintf(problem, room, "%s: %s", broken, dlerror());
  return library;
}
