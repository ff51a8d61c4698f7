/* What a device is to the floors above: a table of kernels, memory, a way for bytes from one to another, and for the
 * doctor a description. */
#ifndef TY_DEVICE_H
#define TY_DEVICE_H

#include "../ops/op.h"

/* The kernel of an op on a device, or NULL when it has none there. */
ty_kernel *ty_device_kernel(int device, ty_op_id id);
bool ty_device_parse(const char *name, int *device); /* "cpu", "meta", "cuda:1": false after ty_fail() */
const char *ty_device_name(int device);

/* Memory of a GPU, by the allocator only; NULL without ty_fail(). */
void *ty_device_alloc(int device, size_t bytes);
void ty_device_free(int device, void *p);
void *ty_device_host_alloc(size_t bytes); /* page-locked memory of the host, likewise; only where there is a GPU */
void ty_device_host_free(void *p);
void *ty_device_paged_alloc(size_t bytes); /* unified memory, likewise */
void ty_device_paged_free(void *p);
int64_t ty_device_memory(int device); /* bytes it has */
bool ty_device_caches(int device);    /* is freed memory worth keeping? */

/* Bytes from one device to another, in order with what the current streams of both have been given to do; host memory
 * may be reused or read when it returns, unless it is page-locked and nobody waits. False after ty_fail(). */
bool ty_device_copy(int to, void *dst, int from, const void *src, size_t bytes);
bool ty_device_copy_locked(int to, void *dst, int from, const void *src, size_t bytes, bool wait);
/* Waits for all work of the device; false after ty_fail() with what went wrong in it, such as an index out of range. */
bool ty_device_synchronize(int device);
/* Makes a GPU the one that this thread's kernels, of the op of that name, run on. */
bool ty_device_enter(int device, const char *op);

/* Graphs of a GPU: after capture what this thread gives it to do is kept instead of done, until captured (NULL after
 * ty_fail()) makes it a graph, which can be launched again and again. */
bool ty_device_capture(int device);
void *ty_device_captured(int device);
bool ty_device_graph_launch(int device, void *graph);
void ty_device_graph_free(int device, void *graph);

ty_kernel *ty_cpu_kernel(ty_op_id id);
const char *ty_cpu_isa(void);                      /* of the kernels in use: "avx512" */
int ty_cpu_features(const char **names, int most); /* what the CPU offers that matters here */

/* GPUs that can be used, 0 where there are none; then `why`, if not NULL, tells what is missing. */
int ty_cuda_count(const char **why);
const char *ty_cuda_describe(int index); /* "NVIDIA H100, 80 GB, compute capability 9.0" */
void ty_cuda_allow_tf32(bool on);        /* in products of f32; off at first */

#endif
