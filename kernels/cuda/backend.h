/* What the library of CUDA kernels offers the core. GPUs are counted from 0; -1 is the host. */
#ifndef TY_KERNELS_CUDA_BACKEND_H
#define TY_KERNELS_CUDA_BACKEND_H

#include "../base.h"

enum { TY_CUDA_BACKEND_VERSION = 4 };

/* A library of NVIDIA's, or the driver. */
typedef struct ty_cuda_found {
  const char *name;
  const char *version; /* NULL: not used */
  const char *path;    /* of the file, where that is known */
  const char *problem; /* why what lies there is not used; NULL when nothing was found */
  const char *without; /* what is done without it */
} ty_cuda_found;

/* The host's end of a copy: ordinary memory, which may be used again when copy() returns; memory from host_alloc(), for
 * which the caller waits or does not. */
typedef enum ty_copy_mode { TY_COPY_ORDINARY, TY_COPY_WAIT, TY_COPY_ASYNC } ty_copy_mode;

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
  void *(*host_alloc)(size_t bytes); /* page-locked memory of the host; NULL without ty_fail() */
  void (*host_free)(void *p);
  void *(*paged_alloc)(size_t bytes); /* unified memory, which every GPU reaches; NULL without ty_fail() */
  void (*paged_free)(void *p);
  bool (*copy)(int to, void *dst, int from, const void *src, size_t bytes, ty_copy_mode mode);
  bool (*synchronize)(int gpu, int stream); /* -1: all; false after ty_fail() also for what went wrong in kernels */

  /* Streams and events: see src/device/stream.h. */
  int (*stream_new)(int gpu);
  int (*stream)(int gpu);
  void (*stream_use)(int gpu, int stream);
  bool (*stream_done)(int gpu, int stream);
  bool (*stream_order)(int gpu, int stream, int after_gpu, int after_stream);
  void *(*event_new)(int gpu, bool timing);
  void (*event_free)(int gpu, void *event);
  bool (*event_record)(int gpu, int stream, void *event);
  bool (*event_wait)(int gpu, int stream, void *event);
  bool (*event_done)(void *event);
  bool (*event_synchronize)(void *event);
  bool (*event_elapsed)(void *from, void *to, float *milliseconds);

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
