/* Attention by cuDNN, which the entries in attention.cu and attention_backward.cu ask first. */
#ifndef TY_KERNELS_CUDA_ATTENTION_LIBRARY_CUH
#define TY_KERNELS_CUDA_ATTENTION_LIBRARY_CUH

#include "dnn.cuh"

/* The arguments are those of the kernels; DNN_NOT_THERE: nothing has been done. */
dnn_outcome ty_attention_by_library(const ty_kernel_args *k);
dnn_outcome ty_attention_backward_by_library(const ty_kernel_args *k);

#endif
