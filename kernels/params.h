/* Parameters of the kernels that need more than views. One struct per kernel (or per family, where shared). */
#ifndef TY_KERNELS_PARAMS_H
#define TY_KERNELS_PARAMS_H

#include "base.h"

/* Elementwise ops with number parameters: gelu (a = 1: tanh form), leaky_relu, elu, softplus, hardtanh, lerp. */
typedef struct ty_p_scalars {
  double a, b;
} ty_p_scalars;

/* A number for elements of any dtype: floats take f, integers take i, which holds every i64 exactly. */
typedef struct ty_number {
  double f;
  int64_t i;
} ty_number;

/* fill: a. clamp: the bounds a and b; a bound that is not there is NaN in f and beyond all integers in i. */
typedef struct ty_p_numbers {
  ty_number a, b;
} ty_p_numbers;

/* arange and linspace. whole: i64 elements are counted in integers. */
typedef struct ty_p_range {
  ty_number start, step;
  bool whole;
} ty_p_range;

/* What products, convolutions, group_norm and glu apply before they store. X(enumerator, f): ty_f_f32, ty_f_slope_f32 and
 * the same of f64 are in scalar.h; f is also the name in Lua. */
#define TY_EACH_ACTIVATION(X) \
  X(TY_RELU, relu) X(TY_GELU, gelu) X(TY_GELU_TANH, gelu_tanh) X(TY_SILU, silu) X(TY_SIGMOID, sigmoid)
#define TY_ENUMERATOR(enumerator, f) enumerator,
typedef enum ty_activation { TY_NO_ACTIVATION, TY_EACH_ACTIVATION(TY_ENUMERATOR) TY_ACTIVATIONS } ty_activation;
#undef TY_ENUMERATOR

/* Philox4x32-10: element i of a result takes word i%4 of block (offset + i/4) under key `seed`. */
typedef struct ty_p_random {
  uint64_t seed, offset;
  double a, b;
} ty_p_random;

/* Reductions: the view of the input has been permuted so that the last `ndim_reduced` dimensions are reduced. */
typedef struct ty_p_reduce {
  int ndim_reduced;
  double a;
} ty_p_reduce;

/* Ops along one dimension (softmax, cumsum, sort, topk, gather, scatter ...). */
typedef struct ty_p_dim {
  int dim;
  int64_t k;
  bool flag, flag2;
} ty_p_dim;

/* count > 0: how many elements of a row stay; 0: those above the threshold. */
typedef struct ty_p_sparsify {
  int64_t count;
  double threshold;
} ty_p_sparsify;

/* Norms: rows of `width` elements, `groups` for group_norm (then the input is [n, channels, spatial]). */
typedef struct ty_p_norm {
  double eps;
  int64_t groups;
  ty_activation activation; /* of group_norm's result */
} ty_p_norm;

/* add_layer_norm and add_rms_norm: random.a is the probability of dropout. */
typedef struct ty_p_add_norm {
  ty_p_random random;
  double eps;
  bool centred;
} ty_p_add_norm;

/* out[batch, m, n] = activation(a[batch, m, k] . b[batch, k, n] + bias + residual[batch, m, n]), the residual contiguous;
 * transposes are in the views' strides. Inputs a, b, bias (f32 where a is f16 or bf16) and residual. glu: of the gate. */
typedef struct ty_p_activation {
  ty_activation activation;
} ty_p_activation;

/* Convolution over two spatial dimensions; input [n, c, h, w], weight [out, c/groups, kh, kw]. */
typedef struct ty_p_conv {
  int64_t stride[2], padding[2], dilation[2], groups;
  ty_activation activation; /* y = activation(conv + bias + residual) */
} ty_p_conv;

/* Of the matrix of a triangular system. */
typedef struct ty_p_triangular {
  bool upper, unit; /* unit: its diagonal counts as ones */
} ty_p_triangular;

typedef struct ty_p_pool {
  int64_t kernel[2], stride[2], padding[2], dilation[2];
  int64_t divisor; /* of sums, in place of how many positions a window has; 0: none */
  bool count_include_pad;
  bool adaptive; /* windows from floor(i*in/out) to ceil((i+1)*in/out) */
} ty_p_pool;

typedef struct ty_p_interpolate {
  int mode; /* 0 nearest, 1 bilinear */
  bool align_corners;
  double scale[2]; /* in/out, 0: from sizes */
} ty_p_interpolate;

/* Between pictures and their projections: detectors lie `spacing` sides of a pixel apart. */
typedef struct ty_p_radon {
  double spacing;
} ty_p_radon;

/* Fourier and cosine transforms of n positions along a dimension, the dimension of pairs not counted: kernels/fft.h. */
typedef struct ty_p_fft {
  int64_t n;
  int dim;
  bool inverse, doubled;
  double scale, first;
  int64_t hop; /* of frames */
} ty_p_fft;

/* Convolutions by transforms of n positions: kernels/fft.h. */
typedef struct ty_p_fft_conv {
  int64_t n, start;
  bool turned;
} ty_p_fft_conv;

/* Numbers by a seed and the position: kernels/seeded.h. */
typedef struct ty_p_seeded_noise {
  uint64_t seed;
  int kind; /* 0 normal, 1 uniform, 2 poisson */
} ty_p_seeded_noise;

typedef struct ty_p_cross_entropy {
  int64_t ignore_index;
  double label_smoothing;
  bool log_probs;
} ty_p_cross_entropy;

/* q [b, h, t, d], k and v [b, hkv, s, d or dv]. Query i stands at key at(i) = i + s - t, or i where they are aligned at
 * the upper left corner of [t, s]. window < 0: none, else key j is seen by query i when at(i) - j <= window (and, when
 * causal, j <= at(i); otherwise also j - at(i) <= window), or when j is among the first `sinks` keys:
 * kernels/attention_span.h. A score, scaled, becomes softcap * tanh(score / softcap) before the mask; 0: it stays. */
typedef struct ty_p_attention {
  double scale, softcap;
  bool causal, upper_left;
  int64_t window, sinks;
} ty_p_attention;

/* Attention of blocks of queries to listed blocks of keys. */
typedef struct ty_p_blocks {
  double scale;
  int64_t query_block, key_block;
} ty_p_blocks;

/* Attention to keys in pages of so many rows; softcap 0, window < 0: none. */
typedef struct ty_p_paged {
  double scale, softcap;
  int64_t page, window;
} ty_p_paged;

/* Attention of each place of a grid to a window of it, [rows, columns]: kernels/neighbourhood.h. */
typedef struct ty_p_neighbourhood {
  double scale;
  int64_t window[2];
} ty_p_neighbourhood;

/* Recurrent networks. Gates in this order: LSTM input, forget, cell, output; GRU reset, update, new; sLSTM input, forget,
 * cell, output, the forget gate a sigmoid or (TY_SLSTM_EXP) an exponential. */
typedef enum ty_cell { TY_LSTM, TY_GRU, TY_SLSTM, TY_SLSTM_EXP } ty_cell;
typedef struct ty_p_recurrence {
  ty_cell cell;
} ty_p_recurrence;

/* Multi-tensor optimizer steps: inputs are n parameters, n gradients, n first moments, ... in this order; with
 * `averaged` the last n are averages of the parameters, which move by average_weight towards the new values. With
 * `controlled` one more follows, f64 [2] on the device: a factor of the gradients, and how many steps were left out
 * before; a factor that is not finite leaves out this one. */
typedef struct ty_p_optim {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
  double grad_limit, grad_scale; /* gradients are cut to [-limit, limit], then scaled */
  double average_weight;
  int64_t step; /* counts from 1 */
  bool decoupled, nesterov, averaged, controlled;
  bool stochastic;     /* parameters in half precision are rounded as optim_round.h has it */
  uint8_t rule, lists; /* adaptive: what optim_rules.h says of it; a mask of its lists of states */
  double low, high;
} ty_p_optim;

#endif
