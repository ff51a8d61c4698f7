/* oneDNN's convolutions, when its library is there. Loaded at first use, never at start-up; TYCHO_ONEDNN=0 turns
 * it off. (Its matrix products are not used: gemm.c is as fast but for a few per cent, gives the same
 * bits for every number of threads, and can be interrupted.) */
#ifndef TY_KERNELS_CPU_ONEDNN_H
#define TY_KERNELS_CPU_ONEDNN_H

#include "../base.h"

/* "2.6.3", or NULL when it is not used. */
const char *ty_onednn_version(void);

typedef enum ty_onednn_pass { TY_ONEDNN_FORWARD, TY_ONEDNN_INPUT, TY_ONEDNN_WEIGHT } ty_onednn_pass;

/* One f32 convolution: x [n, c, h, w], weight [o, c/groups, kh, kw], y [n, o, oh, ow]; images lie x_image and y_image
 * elements apart, channels, rows and columns as usual. */
typedef struct ty_onednn_conv {
  int64_t pass, threads; /* ty_onednn_pass; 1 or as many as oneDNN may use */
  int64_t n, c, h, w, o, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw, groups, bias, x_image, y_image;
} ty_onednn_conv;

/* FORWARD writes y; INPUT writes x and WEIGHT writes weight from the gradient in y. bias [o] or NULL (bias == 0).
 * False, having done nothing, where our own kernels must do the work; else *ok tells whether it worked. */
bool ty_onednn_convolve(const ty_onednn_conv *conv, float *x, float *weight, const float *bias, float *y, bool *ok);

#endif
