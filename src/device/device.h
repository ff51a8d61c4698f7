/* What a device is to the dispatcher: a table of kernels, and for the doctor a description. */
#ifndef TY_DEVICE_H
#define TY_DEVICE_H

#include "../ops/op.h"

/* The kernel of an op on a device, or NULL when it has none there. */
ty_kernel *ty_device_kernel(int device, ty_op_id id);
bool ty_device_parse(const char *name, int *device); /* "cpu", "meta", "cuda:1" */
const char *ty_device_name(int device);

const char *ty_cpu_isa(void);                      /* of the kernels in use: "avx512" */
int ty_cpu_features(const char **names, int most); /* what the CPU offers that matters here */

#endif
