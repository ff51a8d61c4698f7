/* Memory of the CPU in a temporary file without a name, for what is large and seldom needed: when memory is short, the
 * kernel writes its pages there, as the driver of a GPU moves those of unified memory to the host. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory.h"

typedef struct mapping {
  void *bytes;
  size_t nbytes;
} mapping;

static void unmap(void *owner) {
  mapping *m = owner;
  munmap(m->bytes, m->nbytes);
  ty_small_free(m, sizeof *m);
}

static bool fail(int code, const char *folder, size_t bytes) {
  return ty_fail(TY_ENOMEM, "paged memory: no temporary file of %zu bytes in %s: %s", bytes, folder, strerror(code));
}

static void *map(size_t bytes) {
  char path[4096];
  const char *folder = getenv("TMPDIR");
  if (!folder || !*folder) folder = "/tmp";
  if (snprintf(path, sizeof path, "%s/tycho-paged-XXXXXX", folder) >= (int)sizeof path)
    return fail(ENAMETOOLONG, folder, bytes), NULL;
  int fd = mkostemp(path, O_CLOEXEC);
  if (fd < 0) return fail(errno, folder, bytes), NULL;
  unlink(path);
  int code = posix_fallocate(fd, 0, (off_t)bytes); /* a full disk is an error now, not a signal at some write */
  void *p = code ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) fail(code ? code : errno, folder, bytes);
  close(fd);
  return p == MAP_FAILED ? NULL : p;
}

ty_tensor *ty_tensor_new_paged(int device, ty_dtype dtype, int ndim, const int64_t *size) {
  if (device >= TY_CUDA) return ty_tensor_new(device - TY_CUDA + TY_PAGED, dtype, ndim, size);
  ty_tensor *shape = ty_tensor_new(TY_META, dtype, ndim, size);
  size_t bytes = shape ? shape->storage->nbytes : 0;
  if (device == TY_META || !bytes) {
    if (device == TY_META || !shape) return shape;
    ty_release(shape);
    return ty_tensor_new(device, dtype, ndim, size);
  }
  ty_release(shape);
  mapping *m = ty_small_alloc(sizeof *m);
  if (!m) return NULL;
  *m = (mapping){ map(bytes), bytes };
  if (!m->bytes) {
    ty_small_free(m, sizeof *m);
    return NULL;
  }
  ty_tensor *t = ty_tensor_wrap(m->bytes, dtype, ndim, size, unmap, m);
  if (t) t->storage->paged = true;
  return t;
}
