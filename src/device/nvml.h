/* What NVIDIA's management library tells of a GPU; found at run time, and its absence is no error. */
#ifndef TY_DEVICE_NVML_H
#define TY_DEVICE_NVML_H

#include <stdbool.h>

/* Joules that the GPU has taken since its driver was loaded; `index` as NVML counts, which knows nothing of
 * CUDA_VISIBLE_DEVICES. False, with a reason, where there is no library or the GPU does not count (before Volta). */
bool ty_nvml_energy(int index, double *joules, const char **why);

#endif
