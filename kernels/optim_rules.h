/* The rules of adaptive_ and the numbers of a step that are the same for all elements, for every backend. */
#ifndef TY_KERNELS_OPTIM_RULES_H
#define TY_KERNELS_OPTIM_RULES_H

#include <math.h>

#include "params.h"
#include "scalar.h"

/* What the fields of ty_p_optim are to a rule besides lr, eps and weight_decay, and its states (first, second, third):
 *   RMSPROP   beta1: momentum, beta2; mean square, momentum buffer, mean (centered)
 *   ADAGRAD   low: decay of the rate; sum of squares
 *   ADADELTA  beta2; mean square, mean square of the updates
 *   ADAMAX    beta1, beta2; mean, largest magnitude
 *   NADAM     beta1, beta2, low: decay of the momentum; mean, mean square
 *   RADAM     beta1, beta2; mean, mean square
 *   RPROP     beta1, beta2: factors of a step size, low, high: its limits; last gradient, step sizes
 *   ASGD      low: decay term, beta1: power of the rate, high: steps before the average; average */
enum { TY_RMSPROP, TY_ADAGRAD, TY_ADADELTA, TY_ADAMAX, TY_NADAM, TY_RADAM, TY_RPROP, TY_ASGD };

typedef struct ty_optim_factors {
  double rate, other; /* of the direction; nadam: of the gradient; asgd: of the average */
  double widen;       /* the factor of a root, which corrects its bias */
  bool rooted;        /* radam: the variance is known well enough to be divided by */
} ty_optim_factors;

/* The momentum of step t, which grows towards beta1. Dozat 2016. */
TY_INLINE double ty_nadam_momentum(const ty_p_optim *p, double t) {
  return p->beta1 * (1 - 0.5 * pow(0.96, t * p->low));
}

TY_INLINE ty_optim_factors ty_optim_factors_at(const ty_p_optim *p, double step) {
  ty_optim_factors f = { p->lr, 0, 1, true };
  if (p->rule == TY_ADAGRAD) {
    f.rate = p->lr / (1 + (step - 1) * p->low);
  } else if (p->rule == TY_ADAMAX) {
    f.rate = p->lr / (1 - pow(p->beta1, step));
  } else if (p->rule == TY_NADAM) {
    double product = 1;
    for (double t = 1; t <= step && product > 1e-20; t++) product *= ty_nadam_momentum(p, t);
    const double now = ty_nadam_momentum(p, step), next = ty_nadam_momentum(p, step + 1);
    f.rate = p->lr * next / (1 - product * next);
    f.other = p->lr * (1 - now) / (1 - product);
    f.widen = 1 / sqrt(1 - pow(p->beta2, step));
  } else if (p->rule == TY_RADAM) { /* Liu et al. 2020, algorithm 2 */
    const double unbias = 1 - pow(p->beta2, step), longest = 2 / (1 - p->beta2) - 1;
    const double length = longest - 2 * step * pow(p->beta2, step) / unbias;
    f.rate = p->lr / (1 - pow(p->beta1, step));
    f.rooted = length > 5;
    if (f.rooted)
      f.rate *= sqrt(unbias * (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
  } else if (p->rule == TY_ASGD) { /* the rate and the weight that the step before has left */
    f.rate = p->lr / pow(1 + p->low * p->lr * (step - 1), p->beta1);
    f.other = 1 / (step - 1 - p->high > 1 ? step - 1 - p->high : 1);
  }
  return f;
}

#endif
