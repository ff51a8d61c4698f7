/* Pictures at other sizes and places: crop_resize, warp. */
#include "../../kernels/warp.h"

#include "op.h"

/* x: bytes or floats [n, c, h, w]; size: of the result, whose other sizes are those of x. */
static bool check_picture(ty_call *c, const ty_tensor *x, ty_ints size) {
  if (x->v.ndim != 4 || (ty_dtype_of(x) != TY_U8 && !ty_is_float(ty_dtype_of(x))))
    return ty_op_fail(c, TY_EINVAL, "x: expected u8 or floats [n, c, h, w], got %s", ty_describe(x));
  if (x->v.size[2] < 1 || x->v.size[3] < 1 || x->v.size[2] > TY_TAPS_SIDE || x->v.size[3] > TY_TAPS_SIDE)
    return ty_op_fail(c, TY_EINVAL, "x: expected sides of 1 to %d pixels, got %s", TY_TAPS_SIDE, ty_describe(x));
  bool ok = size.n == 2;
  for (int i = 0; i < size.n; i++) ok = ok && size.v[i] >= 1 && size.v[i] <= TY_TAPS_SIDE;
  if (!ok)
    return ty_op_fail(c, TY_EINVAL, "size: expected { height, width } of 1 to %d, got %s", TY_TAPS_SIDE,
                      ty_shape_text(size.n, size.v));
  return true;
}

static bool launch(ty_call *c, ty_tensor *x, ty_tensor *places, ty_ints size, int mode, double fill) {
  const int64_t out[] = { x->v.size[0], x->v.size[1], size.v[0], size.v[1] };
  places = ty_to(places, TY_F64);
  return places && ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 4, out) &&
         ty_launch(c, (ty_tensor *[]){ x, places }, 2, &(ty_p_warp){ .mode = mode, .fill = fill });
}

bool fwd_crop_resize(ty_call *c) {
  const ty_crop_resize_args *a = TY_ARGS(crop_resize, c);
  ty_tensor *x = a->x.t, *boxes = a->boxes.t;
  static const char *const modes[] = { "nearest", "bilinear", "bicubic", NULL };
  int mode = ty_check_choice(c, 3, modes);
  if (mode < 0 || !check_picture(c, x, a->size.is)) return false;
  if (boxes->v.ndim != 2 || boxes->v.size[0] != x->v.size[0] || boxes->v.size[1] != 4)
    return ty_op_fail(c, TY_EINVAL, "boxes: expected [%lld, 4], top, left, height and width for each picture, got %s",
                      (long long)x->v.size[0], ty_describe(boxes));
  return launch(c, x, boxes, a->size.is, mode, 0);
}

bool fwd_warp(ty_call *c) {
  const ty_warp_args *a = TY_ARGS(warp, c);
  ty_tensor *x = a->x.t, *matrix = a->matrix.t;
  static const char *const modes[] = { "nearest", "bilinear", NULL };
  int mode = ty_check_choice(c, 3, modes);
  if (mode < 0 || !check_picture(c, x, a->size.is)) return false;
  if (matrix->v.ndim != 3 || matrix->v.size[0] != x->v.size[0] || matrix->v.size[1] != 3 || matrix->v.size[2] != 3 ||
      !ty_is_float(ty_dtype_of(matrix)))
    return ty_op_fail(c, TY_EINVAL, "matrix: expected floats [%lld, 3, 3], one for each picture, got %s",
                      (long long)x->v.size[0], ty_describe(matrix));
  return launch(c, x, matrix, a->size.is, mode, a->fill.f);
}
