/* Devices by number and by name. What differs between a CPU and a GPU is in cpu.c and cuda.c. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "cuda.h"

ty_kernel *ty_device_kernel(int device, ty_op_id id) {
  if (device == TY_CPU) return ty_cpu_kernel(id);
  return device >= TY_CUDA ? ty_cuda()->kernels[id] : NULL;
}

bool ty_device_parse(const char *name, int *device) {
  const char *why;
  if (strcmp(name, "cpu") == 0) return *device = TY_CPU, true;
  if (strcmp(name, "meta") == 0) return *device = TY_META, true;
  char *end = NULL;
  long index = strncmp(name, "cuda:", 5) == 0 && name[5] >= '0' && name[5] <= '9' ? strtol(name + 5, &end, 10) : -1;
  if (strcmp(name, "cuda") == 0) index = 0;
  else if (index < 0 || *end)
    return ty_fail(TY_EINVAL, "unknown device \"%s\"; devices are cpu, meta, cuda and cuda:1 ...", name);
  int count = ty_cuda_count(&why);
  if (count == 0) return ty_fail(TY_EUNSUPPORTED, "device \"%s\": %s", name, why);
  if (index >= count)
    return ty_fail(TY_EINVAL, "device \"%s\": no such GPU; the last one here is cuda:%d", name, count - 1);
  *device = TY_CUDA + (int)index;
  return true;
}

const char *ty_device_name(int device) {
  static const char names[TY_PAGED + 1][8] = {
    "cpu",    "meta",   "cuda:0",  "cuda:1",  "cuda:2",  "cuda:3",  "cuda:4",  "cuda:5",  "cuda:6", "cuda:7",
    "cuda:8", "cuda:9", "cuda:10", "cuda:11", "cuda:12", "cuda:13", "cuda:14", "cuda:15", "pinned", "paged",
  };
  return names[device];
}

void *ty_device_alloc(int device, size_t bytes) { return ty_cuda()->alloc(device - TY_CUDA, bytes); }
void ty_device_free(int device, void *p) { ty_cuda()->free(device - TY_CUDA, p); }
void *ty_device_host_alloc(size_t bytes) { return ty_cuda()->host_alloc(bytes); }
void ty_device_host_free(void *p) { ty_cuda()->host_free(p); }
void *ty_device_paged_alloc(size_t bytes) { return ty_cuda()->paged_alloc(bytes); }
void ty_device_paged_free(void *p) { ty_cuda()->paged_free(p); }
int64_t ty_device_memory(int device) { return ty_cuda()->memory(device - TY_CUDA); }

bool ty_device_caches(int device) { return ty_cuda() && ty_cuda()->caches; }

bool ty_device_enter(int device, const char *op) { return device < TY_CUDA || ty_cuda()->enter(device - TY_CUDA, op); }

bool ty_device_capture(int device) { return ty_cuda()->capture(device - TY_CUDA); }
void *ty_device_captured(int device) { return ty_cuda()->captured(device - TY_CUDA); }
bool ty_device_graph_launch(int device, void *graph) { return ty_cuda()->graph_launch(device - TY_CUDA, graph); }
void ty_device_graph_free(int device, void *graph) { ty_cuda()->graph_free(device - TY_CUDA, graph); }

bool ty_device_synchronize(int device) { return device < TY_CUDA || ty_cuda()->synchronize(device - TY_CUDA, -1); }

static bool copy(int to, void *dst, int from, const void *src, size_t bytes, ty_copy_mode mode) {
  if (bytes == 0) return true;
  if (to >= TY_CUDA || from >= TY_CUDA)
    return ty_cuda()->copy(to >= TY_CUDA ? to - TY_CUDA : -1, dst, from >= TY_CUDA ? from - TY_CUDA : -1, src, bytes,
                           mode);
  memcpy(dst, src, bytes);
  return true;
}

bool ty_device_copy(int to, void *dst, int from, const void *src, size_t bytes) {
  return copy(to, dst, from, src, bytes, TY_COPY_ORDINARY);
}

bool ty_device_copy_locked(int to, void *dst, int from, const void *src, size_t bytes, bool wait) {
  return copy(to, dst, from, src, bytes, wait ? TY_COPY_WAIT : TY_COPY_ASYNC);
}
