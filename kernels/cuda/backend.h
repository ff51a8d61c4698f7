/* What the library of CUDA kernels offers the core. GPUs are counted from 0; -1 is the host. */
#ifndef TY_KERNELS_CUDA_BACKEND_H
#define TY_KERNELS_CUDA_BACKEND_H

#include "../base.h"

enum { TY_CUDA_BACKEND_VERSION = 2 };

/* A library of NVIDIA's, or the driver. */
typedef struct ty_cuda_found {
  const char *name;
  const char *version; /* NULL: not used */
  const char *path;    /* of the file, where that is known */
  const char *problem; /* why what lies there is not used; NULL when nothing was found */
  const char *without; /* what is done without it */
} ty_cuda_found;

typedef struct ty_cuda_backend {
  int version, ops; /* ops: entries of `kernels` */
  int count;        /* GPUs */
  bool caches;      /* freed memory is worth keeping; false: every tensor is given back at once (the emulated device) */
  ty_kernel *const *kernels;
  const char *(*describe)(int gpu);
  bool (*enter)(int gpu, const char *op); /* this thread's kernels, of that op, run there from now on */
  void *(*alloc)(int gpu, size_t bytes);
  void (*free)(int gpu, void *p);
  int64_t (*memory)(int gpu);
  bool (*copy)(int to, void *dst, int from, const void *src, size_t bytes);
  bool (*synchronize)(int gpu);
  bool (*capture)(int gpu); /* graphs: see src/device/device.h */
  void *(*captured)(int gpu);
  bool (*graph_launch)(int gpu, void *graph);
  void (*graph_free)(int gpu, void *graph);
  void (*allow_tf32)(bool on);
  bool (*library)(int index, ty_cuda_found *found); /* false after the last; loads it */
} ty_cuda_backend;

/* The library's one entry: NULL when there is no GPU to use, with the reason in `why`. */
typedef const ty_cuda_backend *ty_cuda_open_fn(char *why, size_t room);

#endif
