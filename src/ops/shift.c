/* matmul_shift: products with weights that are powers of two, by shifts and additions of integers. */
#include <string.h>

#include "op.h"

bool fwd_matmul_shift(ty_call *c) {
  const ty_matmul_shift_args *a = TY_ARGS(matmul_shift, c);
  ty_tensor *x = a->x.t, *codes = a->codes.t;
  int n = x->v.ndim;
  if (ty_dtype_of(x) != TY_I8) return ty_op_fail(c, TY_EINVAL, "x: expected i8, got %s", ty_describe(x));
  if (ty_dtype_of(codes) != TY_I8 || codes->v.ndim != 2)
    return ty_op_fail(c, TY_EINVAL, "codes: expected i8 [n, k], got %s", ty_describe(codes));
  if (!n || x->v.size[n - 1] != codes->v.size[1])
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., %lld] for codes %s, got %s", (long long)codes->v.size[1],
                      ty_describe(codes), ty_describe(x));
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[n - 1] = codes->v.size[0];
  return ty_out(c, 0, ty_device_of(x), TY_I32, n, size) && ty_launch(c, (ty_tensor *[]){ x, codes }, 2, NULL);
}
