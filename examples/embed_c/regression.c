/* Tycho inside a C program, without Lua: fits y = sin(3x) with a small network and prints what it learned.
 *
 *   cc regression.c $(pkg-config --cflags --libs tycho) -lm -o regression       with Tycho installed
 *   cc regression.c -I../../src -L../../build -ltycho -Wl,-rpath,../../build -lm -o regression     from a build folder
 *
 * Three rules are all there is to memory. What a ty_ function returns lives until the innermost scope closes. What must
 * live longer is taken out with ty_keep() and given back with ty_release(). NULL goes through: a nested expression is
 * checked once, at its end. */
#include <stdio.h>
#include <stdlib.h>
#include <tycho.h>

enum { WIDTH = 32, POINTS = 128, STEPS = 2000, PARAMS = 4 };

static void die(const char *doing) {
  fprintf(stderr, "%s: %s\n", doing, ty_error());
  exit(1);
}

/* Two linear layers with tanh between; param: weight [1, WIDTH], bias, weight [WIDTH, 1], bias. */
static ty_tensor *network(ty_tensor *const *param, ty_tensor *x) {
  ty_tensor *hidden = ty_tanh(ty_add(ty_matmul(x, param[0]), param[1]));
  return ty_add(ty_matmul(hidden, param[2]), param[3]);
}

int main(void) {
  ty_default_generator()->seed = 1;
  ty_scope program;
  ty_scope_open(&program);

  ty_tensor *x = ty_reshape(ty_linspace(-1, 1, POINTS, TY_F32, TY_CPU), TY_INTS(POINTS, 1));
  ty_tensor *y = ty_sin(ty_mul(x, 3));
  ty_tensor *param[PARAMS] = {
    ty_mul(ty_randn(TY_INTS(1, WIDTH), TY_F32, TY_CPU), 2),
    ty_randn(TY_INTS(WIDTH), TY_F32, TY_CPU),
    ty_mul(ty_randn(TY_INTS(WIDTH, 1), TY_F32, TY_CPU), 0.2),
    ty_zeros(TY_INTS(1), TY_F32, TY_CPU),
  };
  ty_tensor *mean[PARAMS], *square[PARAMS]; /* what AdamW remembers of the gradients */
  for (int i = 0; i < PARAMS; i++) {
    mean[i] = ty_zeros_like(param[i], TY_F32);
    square[i] = ty_zeros_like(param[i], TY_F32);
    if (!square[i]) die("parameters");
    ty_set_requires_grad(param[i], true);
  }

  for (int step = 1; step <= STEPS; step++) {
    ty_scope scope; /* a step leaves nothing behind but the gradients */
    ty_scope_open(&scope);
    ty_tensor *loss = ty_mean(ty_square(ty_sub(network(param, x), y)), TY_NO_INTS, false);
    if (!loss || !ty_backward(loss)) die("step");

    ty_tensor *grad[PARAMS];
    for (int i = 0; i < PARAMS; i++) grad[i] = ty_grad_of(param[i]);
    if (!ty_adam_((ty_tensors){ param, PARAMS }, (ty_tensors){ grad, PARAMS }, (ty_tensors){ mean, PARAMS },
                  (ty_tensors){ square, PARAMS }, (ty_tensors){ NULL, 0 }, 0.02, 0.9, 0.999, 1e-8, 0.0, true, 1.0,
                  INFINITY, 0, step, false, NULL))
      die("optimizer");
    for (int i = 0; i < PARAMS; i++) ty_clear_grad(param[i]); /* gradients add up until they are cleared */

    bool ok;
    if (step % 500 == 0) printf("step %4d  loss %.6f\n", step, ty_item(loss, &ok));
    ty_scope_close(&scope);
  }

  ty_set_grad_enabled(false);
  ty_tensor *at = ty_reshape(ty_linspace(-1, 1, 5, TY_F32, TY_CPU), TY_INTS(5, 1));
  ty_tensor *predicted = ty_contiguous(network(param, at));
  if (!predicted) die("prediction");
  const float *in = at->v.data, *out = predicted->v.data;
  float worst = 0;
  for (int i = 0; i < 5; i++) {
    printf("x %+.2f  sin(3x) %+.4f  network %+.4f\n", in[i], sinf(3 * in[i]), out[i]);
    worst = fmaxf(worst, fabsf(out[i] - sinf(3 * in[i])));
  }

  ty_scope_close(&program);
  return worst < 0.05f ? 0 : 1;
}
