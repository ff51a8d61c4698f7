/* Which struct of kernels/params.h each kernel takes, and which ops are elementwise. A kernel with parameters that is
 * not listed here cannot be recorded; tests/lua/compile_test.lua tries every op. */
#include "../../kernels/bleu.h"
#include "../../kernels/grid_sample.h"
#include "../../kernels/hash_grid.h"
#include "../../kernels/indexing.h"
#include "../../kernels/int8.h"
#include "../../kernels/pad.h"
#include "../../kernels/resample.h"
#include "../../kernels/warp.h"
#include "internal.h"

/* clang-format off */
const ty_params_row ty_program_params[TY_OP_COUNT] = {
#define P(op, kind, type) [TY_OP_##op] = { PARAMS_##kind, sizeof(ty_p_##type) },
  P(fill_, PLAIN, numbers) P(arange, PLAIN, range) P(linspace, PLAIN, range) P(clamp, PLAIN, numbers)
  P(gelu, SCALARS, scalars) P(leaky_relu, SCALARS, scalars) P(elu, SCALARS, scalars) P(softplus, SCALARS, scalars)
  P(hardtanh, SCALARS, scalars) P(polygamma, SCALARS, scalars) P(logit, SCALARS, scalars)
  P(leaky_relu_backward, SCALARS, scalars) P(elu_backward, SCALARS, scalars)
  P(addcmul, SCALARS, scalars) P(addcdiv, SCALARS, scalars)
  P(softplus_backward, SCALARS, scalars) P(hardtanh_backward, SCALARS, scalars)
  P(lerp_list_, SCALARS, scalars) P(norm_list, SCALARS, scalars)

  P(uniform_, RANDOM, random) P(normal_, RANDOM, random) P(randint_, RANDOM, random) P(randperm, RANDOM, random)
  P(bernoulli, RANDOM, random) P(multinomial, RANDOM, random) P(dropout_apply, RANDOM, random)

  P(sum, PLAIN, reduce) P(mean, PLAIN, reduce) P(var, PLAIN, reduce) P(prod, PLAIN, reduce) P(max, PLAIN, reduce)
  P(min, PLAIN, reduce) P(argmax, PLAIN, reduce) P(argmin, PLAIN, reduce) P(any, PLAIN, reduce) P(all, PLAIN, reduce)
  P(logsumexp, PLAIN, reduce) P(std, PLAIN, reduce) P(norm, PLAIN, reduce)

  P(quantize_columns, PLAIN, dim)
  P(matmul_trit, PLAIN, dim)
  P(searchsorted, PLAIN, dim) P(histogram_counts, PLAIN, dim) P(order_statistic, PLAIN, dim)
  P(logcumsumexp, PLAIN, dim) P(cummax, PLAIN, dim) P(cummin, PLAIN, dim)
  P(cdist, PLAIN, scalars) P(cdist_backward, PLAIN, scalars)

  P(glu, PLAIN, activation) P(glu_backward, PLAIN, activation) P(flip, PLAIN, dim) P(roll_line, PLAIN, dim) P(pad_edges, PLAIN, pad) P(tril, PLAIN, dim) P(triu, PLAIN, dim) P(cumsum, PLAIN, dim) P(cumprod, PLAIN, dim)
  P(linear_scan, PLAIN, dim) P(linear_scan_backward, PLAIN, dim) P(sort, PLAIN, dim) P(topk, PLAIN, dim)
  P(softmax, PLAIN, dim) P(log_softmax, PLAIN, dim) P(softmax_backward, PLAIN, dim)
  P(log_softmax_backward, PLAIN, dim) P(embedding, PLAIN, dim) P(embedding_backward, PLAIN, dim)
  P(embedding_add_, PLAIN, dim) P(gather, PLAIN, dim)
  P(gather_backward, PLAIN, dim) P(scatter, PLAIN, dim) P(scatter_add, PLAIN, dim) P(index_select, PLAIN, dim)
  P(index_select_backward, PLAIN, dim) P(index_add, PLAIN, dim) P(one_hot, PLAIN, dim)
  P(index_copy, PLAIN, dim) P(ravel_index, PLAIN, sizes) P(scatter_combine, PLAIN, dim)
  P(segment_sum, PLAIN, segments) P(segment_spread, PLAIN, segments) P(segment_combine, PLAIN, segments)
  P(segment_weights, PLAIN, segments) P(segment_weights_backward, PLAIN, segments)

  P(matmul, PLAIN, activation) P(sparsify, PLAIN, sparsify) P(triangular_solve, PLAIN, triangular) P(conv2d, PLAIN, conv) P(conv2d_im2win, PLAIN, conv)
  P(cholesky_factor, PLAIN, dim)
  P(conv2d_int8, PLAIN, conv_int8) P(conv2d_int8_backward_input, PLAIN, conv_int8)
  P(conv2d_int8_backward_weight, PLAIN, conv_int8) P(add_int8, PLAIN, int8) P(inside_int8, PLAIN, int8)
  P(conv2d_backward_input, PLAIN, conv) P(conv2d_backward_weight, PLAIN, conv)
  P(max_pool2d, PLAIN, pool) P(avg_pool2d, PLAIN, pool) P(adaptive_avg_pool2d, PLAIN, pool)
  P(adaptive_max_pool2d, PLAIN, pool) P(avg_pool2d_backward, PLAIN, pool)
  P(crop_resize, PLAIN, warp) P(warp, PLAIN, warp)
  P(max_pool2d_backward, PLAIN, pool) P(unfold, PLAIN, pool) P(fold, PLAIN, pool)
  P(resample, PLAIN, resample) P(resample_backward, PLAIN, resample)
  P(grid_sample, PLAIN, grid_sample) P(grid_sample_backward_input, PLAIN, grid_sample)
  P(grid_sample_backward_grid, PLAIN, grid_sample)
  P(hash_grid, PLAIN, hash_grid) P(hash_grid_backward_table, PLAIN, hash_grid)
  P(hash_grid_backward_input, PLAIN, hash_grid) P(hash_corners, PLAIN, hash_grid)
  P(hash_field, PLAIN, hash_grid) P(hash_field_backward, PLAIN, hash_grid)
  P(interpolate, PLAIN, interpolate) P(interpolate_backward, PLAIN, interpolate)

  P(add_norm, DROPOUT, add_norm) P(add_norm_backward, DROPOUT, add_norm)
  P(layer_norm, PLAIN, norm) P(rms_norm, PLAIN, norm) P(group_norm, PLAIN, norm) P(batch_norm_fused, PLAIN, norm)
  P(batch_norm_backward, PLAIN, norm) P(layer_norm_backward, PLAIN, norm) P(rms_norm_backward, PLAIN, norm)
  P(group_norm_backward, PLAIN, norm)
  P(cross_entropy_rows, PLAIN, cross_entropy) P(cross_entropy_backward, PLAIN, cross_entropy)
  P(scaled_dot_product_attention, PLAIN, attention) P(attention_backward, PLAIN, attention) P(rotary, PLAIN, dim)
  P(block_sparse_attention, PLAIN, blocks) P(block_sparse_attention_backward, PLAIN, blocks)
  P(paged_attention, PLAIN, paged) P(neighbourhood_attention, PLAIN, neighbourhood) P(neighbourhood_attention_backward, PLAIN, neighbourhood)
  P(bleu, PLAIN, bleu) P(radon, PLAIN, radon) P(backproject, PLAIN, radon) P(seeded_noise, PLAIN, seeded_noise)
  P(fft_line, PLAIN, fft) P(rfft_line, PLAIN, fft) P(irfft_line, PLAIN, fft) P(dct_line, PLAIN, fft)
  P(rfft_frames, PLAIN, fft) P(fft_plane, PLAIN, fft)
  P(fft_conv_lines, PLAIN, fft_conv) P(fft_conv_kernel, PLAIN, fft_conv)
  P(complex_mul, PLAIN, dim) P(overlap_add, PLAIN, dim)
  P(recurrence_steps, PLAIN, recurrence) P(recurrence_backward, PLAIN, recurrence)
  P(gated_linear_attention, PLAIN, attention) P(gated_linear_attention_backward, PLAIN, attention)
  P(sgd_, OPTIM, optim) P(adam_, OPTIM, optim) P(adam_8bit_, OPTIM, optim) P(lion_, OPTIM, optim)
  P(adaptive_, OPTIM, optim)
#undef P
};

/* The rows of kernels/elementwise.def, and what works element by element besides. */
const bool ty_program_elementwise[TY_OP_COUNT] = {
#define ROW(op, ...) [TY_OP_##op] = true,
#define UNARY_FLOAT ROW
#define UNARY_SCALARS ROW
#define UNARY_EITHER ROW
#define UNARY_TRIG ROW
#define UNARY_PARTED ROW
#define UNARY_NUMBER ROW
#define UNARY_NUMBER_SCALARS ROW
#define UNARY_INTEGER ROW
#define TEST ROW
#define BINARY_FLOAT ROW
#define BINARY_SCALARS ROW
#define TERNARY_FLOAT ROW
#define TERNARY_SCALARS ROW
#define BINARY_NUMBER ROW
#define BINARY_ANY ROW
#define BINARY_POWER ROW
#define BINARY_DIVISION ROW
#define BINARY_INTEGER ROW
#define COMPARE ROW
#define LOGICAL ROW
#include "../../kernels/elementwise.def"
  ROW(where) ROW(cast) ROW(fill_)
#undef ROW
};
