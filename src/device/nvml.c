/* The energy counter of a GPU, by libnvidia-ml, which comes with the driver. */
#include "nvml.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

/* Of nvml.h: 0 is success, a device is a pointer that only the library looks into. */
typedef int call0(void);
typedef int by_index(unsigned index, void **device);
typedef int energy_of(void *device, unsigned long long *millijoules);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static by_index *handle_of;
static energy_of *total_energy;
static const char *problem;

static void load(void) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    problem = "libnvidia-ml.so.1 is not there";
    return;
  }
  call0 *init = (call0 *)(uintptr_t)dlsym(library, "nvmlInit_v2");
  handle_of = (by_index *)(uintptr_t)dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  total_energy = (energy_of *)(uintptr_t)dlsym(library, "nvmlDeviceGetTotalEnergyConsumption");
  if (!init || !handle_of || !total_energy) problem = "libnvidia-ml.so.1 has no counter of energy";
  else if (init() != 0) problem = "libnvidia-ml.so.1 finds no driver";
}

bool ty_nvml_energy(int index, double *joules, const char **why) {
  pthread_once(&once, load);
  void *device;
  unsigned long long millijoules;
  *why = problem;
  if (problem) return false;
  *why = "NVML knows no such GPU";
  if (index < 0 || handle_of((unsigned)index, &device) != 0) return false;
  *why = "this GPU counts no energy";
  if (total_energy(device, &millijoules) != 0) return false;
  *joules = 1e-3 * (double)millijoules;
  return true;
}
