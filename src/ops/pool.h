/* The windows of pools, in one to three dimensions. */
#ifndef TY_OPS_POOL_H
#define TY_OPS_POOL_H

#include "op.h"

typedef struct ty_windows {
  int64_t kernel[3], stride[3], padding[3], dilation[3];
  int64_t out[3]; /* how many windows there are */
  bool ceil_mode; /* set before ty_read_windows(), as is the dilation */
} ty_windows;

/* kernel, stride (the kernel when empty) and padding from position `first` of the arguments, for n dimensions of sizes
 * `in`, and how many windows that makes. */
bool ty_read_windows(ty_call *c, int first, int n, const int64_t *in, ty_windows *w);
/* The same without padding: kernel and stride alone. */
bool ty_read_kernel(ty_call *c, int first, int n, const int64_t *in, ty_windows *w);
/* With dilation a window can lie so that all its positions are padding: there is no largest, which is an error. */
bool ty_windows_see_something(ty_call *c, int n, const int64_t *in, const ty_windows *w);
bool ty_check_divisor(ty_call *c, int arg);

#endif
