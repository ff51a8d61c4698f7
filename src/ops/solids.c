/* Volumes drawn in integers. */
#include "../../kernels/solids.h"
#include "op.h"

_Static_assert(sizeof(ty_solid) == TY_SOLID_FIELDS * sizeof(int32_t), "a row is read as one piece");

bool fwd_draw_solids(ty_call *c) {
  const ty_draw_solids_args *a = TY_ARGS(draw_solids, c);
  const ty_tensor *list = a->list.t;
  if (ty_dtype_of(list) != TY_I32 || list->v.ndim != 3 || list->v.size[2] != TY_SOLID_FIELDS)
    return ty_op_fail(c, TY_EINVAL, "list: expected i32 [n, k, %d], got %s", TY_SOLID_FIELDS, ty_describe(list));
  const int64_t size[] = { list->v.size[0], a->depth.i, a->height.i, a->width.i };
  for (int i = 1; i < 4; i++)
    if (size[i] < 0 || size[i] > TY_SOLID_SIDE)
      return ty_op_fail(c, TY_EINVAL, "%s: expected 0 to %d, got %lld", c->op->args[i].name, TY_SOLID_SIDE,
                        (long long)size[i]);
  const int device = ty_device_of(list);
  return ty_out(c, 0, device, TY_I16, 4, size) && ty_out(c, 1, device, TY_U8, 4, size) &&
         ty_launch(c, (ty_tensor *[]){ a->list.t }, 1, NULL);
}
