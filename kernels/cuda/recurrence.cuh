/* The gates of recurrent layers, one unit at a time: the arithmetic of kernels/cpu/recurrence/recurrence_cells.h. */
#ifndef TY_KERNELS_CUDA_RECURRENCE_CUH
#define TY_KERNELS_CUDA_RECURRENCE_CUH

#include "../recurrence.h"
#include "cuda.cuh"

TY_DEVICE float rnn_sigmoid(float x) { return ty_sigmoid_f32(x); }
TY_DEVICE double rnn_sigmoid(double x) { return ty_sigmoid_f64(x); }
TY_DEVICE float rnn_tanh(float x) { return ty_tanh_f32(x); }
TY_DEVICE double rnn_tanh(double x) { return ty_tanh_f64(x); }
TY_DEVICE float rnn_exp(float x) { return ty_exp_f32(x); }
TY_DEVICE double rnn_exp(double x) { return ty_exp_f64(x); }
TY_DEVICE float rnn_log_sigmoid(float x) { return ty_log_sigmoid_f32(x); }
TY_DEVICE double rnn_log_sigmoid(double x) { return ty_log_sigmoid_f64(x); }

/* G gates: u is the recurrent product with its bias, x the input's part. h before the step; state: from c on, `plane`
 * apart. Gives h; kept and saved: NULL when not wanted. */
template <int G, class C>
TY_DEVICE C rnn_forward_unit(ty_cell cell, const C (&x)[G], const C (&u)[G], C h, C *state, C *kept, C *saved,
                             int64_t plane, int64_t d) {
  C four[TY_SAVED_GATES];
  if constexpr (G == 3) {
    C r = rnn_sigmoid(u[0] + x[0]), z = rnn_sigmoid(u[1] + x[1]), n = rnn_tanh(x[2] + r * u[2]);
    four[0] = r, four[1] = z, four[2] = n, four[3] = u[2];
    h = n + z * (h - n);
  } else if (cell == TY_LSTM) {
    C i = rnn_sigmoid(u[0] + x[0]), f = rnn_sigmoid(u[1] + x[1]), g = rnn_tanh(u[2] + x[2]);
    C o = rnn_sigmoid(u[3] + x[3]), c = f * state[0] + i * g;
    four[0] = i, four[1] = f, four[2] = g, four[3] = o;
    state[0] = c;
    if (kept) kept[0] = c;
    h = o * rnn_tanh(c);
  } else {
    C i = u[0] + x[0], f = u[1] + x[1], z = rnn_tanh(u[2] + x[2]), o = rnn_sigmoid(u[3] + x[3]);
    C before = (cell == TY_SLSTM_EXP ? f : rnn_log_sigmoid(f)) + state[2 * plane];
    C m = i > before ? i : before, in = rnn_exp(i - m), forget = rnn_exp(before - m);
    C c = forget * state[0] + in * z, norm = forget * state[plane] + in;
    four[0] = i, four[1] = f, four[2] = z, four[3] = o;
    state[0] = c, state[plane] = norm, state[2 * plane] = m;
    if (kept) kept[0] = c, kept[plane] = norm, kept[2 * plane] = m;
    h = o * (c / norm);
  }
  if (saved) {
#pragma unroll
    for (int g = 0; g < TY_SAVED_GATES; g++) saved[g * d] = four[g];
  }
  return h;
}

/* dh: of h after the step. h and before: h and the states before it; after: the states after it. dstate: their
 * gradients, from c on. Puts the gradients of x and u, and gives what of that of h before the step does not go through
 * the recurrent product. */
template <int G, class C>
TY_DEVICE C rnn_backward_unit(ty_cell cell, C dh, C h, const C *before, const C *after, const C *saved, C *dstate,
                              int64_t plane, int64_t d, C (&dx)[G], C (&du)[G]) {
  C a = saved[0], b = saved[d], c = saved[2 * d], o = saved[3 * d];
  if constexpr (G == 3) { /* r, z, n and the recurrent part of n */
    C dn = dh * (1 - b) * (1 - c * c);
    dx[0] = dn * o * (a * (1 - a)), dx[1] = dh * (h - c) * (b * (1 - b)), dx[2] = dn;
    du[0] = dx[0], du[1] = dx[1], du[2] = dn * a;
    return dh * b;
  } else {
    if (cell == TY_LSTM) { /* i, f, g, o */
      C q = rnn_tanh(after[0]), dc = dstate[0] + dh * o * (1 - q * q);
      dx[0] = dc * c * (a * (1 - a)), dx[1] = dc * before[0] * (b * (1 - b));
      dx[2] = dc * a * (1 - c * c), dx[3] = dh * q * (o * (1 - o));
      dstate[0] = dc * b;
    } else { /* i and f before their exponentials, z, o */
      const bool exponential = cell == TY_SLSTM_EXP;
      C norm = after[plane], m = after[2 * plane], last = (exponential ? b : rnn_log_sigmoid(b)) + before[2 * plane];
      C in = rnn_exp(a - m), forget = rnn_exp(last - m), ratio = after[0] / norm, dr = dh * o / norm;
      C dc = dstate[0] + dr, dn = dstate[plane] - dr * ratio;
      C di = (dc * c + dn) * in, df = (dc * before[0] + dn * before[plane]) * forget;
      C dm = dstate[2 * plane] - di - df, share = a > last ? C(1) : a < last ? C(0) : C(0.5);
      df += dm * (1 - share);
      dx[0] = di + dm * share, dx[1] = exponential ? df : df * rnn_sigmoid(-b);
      dx[2] = dc * in * (1 - c * c), dx[3] = dh * ratio * (o * (1 - o));
      dstate[0] = dc * forget, dstate[plane] = dn * forget, dstate[2 * plane] = df;
    }
#pragma unroll
    for (int g = 0; g < G; g++) du[g] = dx[g];
    return C(0);
  }
}

#endif
