/* Autocast: inside its scope ops whose row says AUTO_HALF compute in a half precision and those with AUTO_FULL in f32,
 * whatever f16, bf16 or f32 they are given; f64 stays. The others take what comes, and promote. Micikevicius et al. 2018,
 * Mixed Precision Training; the lists are PyTorch's. */
#ifndef TY_AUTOCAST_H
#define TY_AUTOCAST_H

#include "op.h"

/* Of this thread: TY_F16 or TY_BF16; TY_DTYPE_DEFAULT: off. */
extern _Thread_local int ty_autocast_dtype;

/* Sets it and returns what it was. Rules of gradients, and what ops do inside, run with it off. */
static inline int ty_autocast_set(int dtype) {
  int was = ty_autocast_dtype;
  ty_autocast_dtype = dtype;
  return was;
}

/* The arguments as the op is to get them: those that have another dtype become casts of the current scope, of weights the
 * same one each time while they do not change. False after ty_fail(). */
bool ty_autocast(const ty_op *op, ty_value *arg);
/* Forgets the casts of weights: at the end of the outermost scope, and where a recording begins or ends. */
void ty_autocast_forget(void);

#endif
