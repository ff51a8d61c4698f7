/* The activations that other ops take by name. */
#include <string.h>

#include "op.h"

#define NAME(enumerator, f) , #f
static const char *const names[] = { "none" TY_EACH_ACTIVATION(NAME), NULL };
#undef NAME

bool ty_check_activation(ty_call *c, int arg, ty_activation *kind) {
  int choice = ty_check_choice(c, arg, names);
  *kind = choice < 0 ? TY_NO_ACTIVATION : (ty_activation)choice;
  return choice >= 0;
}

ty_activation ty_activation_named(const char *name) {
  int i = 0;
  while (names[i] && strcmp(names[i], name) != 0) i++;
  return names[i] ? (ty_activation)i : TY_NO_ACTIVATION;
}

ty_tensor *ty_activate(ty_tensor *x, ty_activation kind) {
  switch (kind) {
    case TY_RELU: return ty_relu(x);
    case TY_GELU: return ty_gelu(x, "none");
    case TY_GELU_TANH: return ty_gelu(x, "tanh");
    case TY_SILU: return ty_silu(x);
    case TY_SIGMOID: return ty_sigmoid(x);
    default: return x;
  }
}

ty_tensor *ty_activation_slope(ty_tensor *x, ty_activation kind) {
  ty_tensor *s;
  switch (kind) {
    case TY_RELU: return x ? ty_to(ty_gt(x, 0), ty_dtype_of(x)) : NULL;
    case TY_GELU: return ty_gelu_slope(x, false);
    case TY_GELU_TANH: return ty_gelu_slope(x, true);
    case TY_SILU: return ty_silu_slope(x);
    case TY_SIGMOID: s = ty_sigmoid(x); return ty_mul(s, ty_sub(1.0, s));
    default: return ty_ones_like(x, TY_DTYPE_DEFAULT);
  }
}
