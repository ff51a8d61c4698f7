/* Pictures drawn in integers. */
#include "../../kernels/draw.h"
#include "op.h"

/* Argument `arg` is a tensor of this dtype and layout, whose sizes are at most `most`. */
static bool check_pictures(ty_call *c, int arg, ty_dtype dtype, int ndim, const char *layout, int64_t most) {
  const ty_tensor *t = c->arg[arg].t;
  const char *name = c->op->args[arg].name;
  if (ty_dtype_of(t) != dtype || t->v.ndim != ndim)
    return ty_op_fail(c, TY_EINVAL, "%s: expected %s %s, got %s", name, ty_dtype_name[dtype], layout, ty_describe(t));
  for (int i = 2; i < ndim; i++)
    if (t->v.size[i] > most)
      return ty_op_fail(c, TY_EINVAL, "%s: expected at most %lld pixels a side, got %s", name, (long long)most,
                        ty_describe(t));
  return true;
}

bool fwd_draw_sprites(ty_call *c) {
  const ty_draw_sprites_args *a = TY_ARGS(draw_sprites, c);
  const ty_tensor *canvas = a->canvas.t, *atlas = a->atlas.t, *list = a->list.t;
  if (!check_pictures(c, 0, TY_U8, 4, "[n, 3, h, w]", TY_DRAW_SIDE) ||
      !check_pictures(c, 1, TY_U8, 4, "[m, 4, s, s]", TY_SPRITE_SIDE) ||
      !check_pictures(c, 2, TY_I32, 3, "[n, k, 12]", INT64_MAX))
    return false;
  if (canvas->v.size[1] != 3)
    return ty_op_fail(c, TY_EINVAL, "canvas: expected u8 [n, 3, h, w], got %s", ty_describe(canvas));
  if (atlas->v.size[1] != 4 || atlas->v.size[2] != atlas->v.size[3] || atlas->v.size[2] == 0)
    return ty_op_fail(c, TY_EINVAL, "atlas: expected u8 [m, 4, s, s], got %s", ty_describe(atlas));
  int64_t n = canvas->v.size[0], k = list->v.size[1];
  if (list->v.size[0] != n || list->v.size[2] != TY_SPRITE_FIELDS)
    return ty_op_fail(c, TY_EINVAL, "list: expected i32 [%lld, k, %d] for canvas %s, got %s", (long long)n,
                      TY_SPRITE_FIELDS, ty_describe(canvas), ty_describe(list));
  if (k > TY_SPRITE_MOST)
    return ty_op_fail(c, TY_EINVAL, "list: expected at most %d sprites a picture, got %s", TY_SPRITE_MOST,
                      ty_describe(list));
  int device = ty_device_of(canvas);
  int64_t owner[] = { n, canvas->v.size[2], canvas->v.size[3] }, boxes[] = { n, k, 5 }, overlap[] = { n, k, k };
  return ty_out_like(c, 0, canvas, TY_U8) && ty_out(c, 1, device, TY_I8, 3, owner) &&
         ty_out(c, 2, device, TY_I32, 3, boxes) && ty_out(c, 3, device, TY_I32, 3, overlap) &&
         ty_launch(c, (ty_tensor *[]){ a->canvas.t, a->atlas.t, a->list.t }, 3, NULL);
}

bool fwd_draw_background(ty_call *c) {
  const ty_draw_background_args *a = TY_ARGS(draw_background, c);
  const ty_tensor *list = a->list.t;
  if (!check_pictures(c, 0, TY_I32, 2, "[n, 12]", INT64_MAX)) return false;
  if (list->v.size[1] != TY_BACKGROUND_FIELDS)
    return ty_op_fail(c, TY_EINVAL, "list: expected i32 [n, %d], got %s", TY_BACKGROUND_FIELDS, ty_describe(list));
  const int64_t side[] = { a->height.i, a->width.i };
  for (int i = 0; i < 2; i++)
    if (side[i] < 0 || side[i] > TY_DRAW_SIDE)
      return ty_op_fail(c, TY_EINVAL, "%s: expected 0 to %d, got %lld", c->op->args[1 + i].name, TY_DRAW_SIDE,
                        (long long)side[i]);
  int64_t size[] = { list->v.size[0], 3, side[0], side[1] };
  return ty_out(c, 0, ty_device_of(list), TY_U8, 4, size) && ty_launch(c, (ty_tensor *[]){ a->list.t }, 1, NULL);
}

bool fwd_pixel_noise(ty_call *c) {
  const ty_pixel_noise_args *a = TY_ARGS(pixel_noise, c);
  const ty_tensor *x = a->x.t, *list = a->list.t;
  if (ty_dtype_of(x) != TY_U8 || x->v.ndim < 1)
    return ty_op_fail(c, TY_EINVAL, "x: expected u8 [n, ...], got %s", ty_describe(x));
  if (ty_dtype_of(list) != TY_I32 || list->v.ndim != 2 || list->v.size[0] != x->v.size[0] ||
      list->v.size[1] != TY_NOISE_FIELDS)
    return ty_op_fail(c, TY_EINVAL, "list: expected i32 [%lld, %d] for x %s, got %s", (long long)x->v.size[0],
                      TY_NOISE_FIELDS, ty_describe(x), ty_describe(list));
  return ty_out_like(c, 0, x, TY_U8) && ty_launch(c, (ty_tensor *[]){ a->x.t, a->list.t }, 2, NULL);
}
