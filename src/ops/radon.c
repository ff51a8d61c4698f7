/* Parallel projections of pictures, and the adjoint. Each is the gradient of the other. */
#include "op.h"

static bool check_geometry(ty_call *c, const char *layout, double spacing, int spacing_arg) {
  const ty_tensor *angles = c->arg[1].t;
  if (!ty_check_ndim(c, 0, 3, 3, layout)) return false;
  if (!ty_is_float(ty_dtype_of(angles)) || angles->v.ndim != 1)
    return ty_op_fail(c, TY_EINVAL, "angles: expected floats [a], got %s", ty_describe(angles));
  if (!(spacing > 0) || isinf(spacing))
    return ty_op_fail(c, TY_EINVAL, "%s: expected a positive number, got %g", c->op->args[spacing_arg].name, spacing);
  return true;
}

/* Sides beyond this are not what pictures have: places are then exact in the kernels. */
enum { MOST = 1 << 20 };

bool fwd_radon(ty_call *c) {
  const ty_radon_args *a = TY_ARGS(radon, c);
  ty_tensor *x = a->x.t;
  if (!check_geometry(c, "[n, h, w]", a->spacing.f, 3)) return false;
  int64_t h = x->v.size[1], w = x->v.size[2], detectors = a->detectors.i;
  if (h > MOST || w > MOST)
    return ty_op_fail(c, TY_EINVAL, "x: expected at most %d pixels a side, got %s", MOST, ty_describe(x));
  if (detectors < 0 || detectors > MOST)
    return ty_op_fail(c, TY_EINVAL, "detectors: expected 0 to %d, got %lld", MOST, (long long)detectors);
  if (detectors == 0) {
    const double covered = ceil(hypot((double)h, (double)w) / a->spacing.f);
    if (covered > MOST)
      return ty_op_fail(c, TY_EINVAL, "spacing: %g takes %g detectors, more than %d", a->spacing.f, covered, MOST);
    detectors = (int64_t)covered;
  }
  int64_t size[] = { x->v.size[0], a->angles.t->v.size[0], detectors };
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 3, size) &&
         ty_launch(c, (ty_tensor *[]){ x, a->angles.t }, 2, &(ty_p_radon){ .spacing = a->spacing.f });
}

bool vjp_radon(ty_vjp *c) {
  const ty_radon_args *a = TY_ARGS(radon, c);
  c->dx[0] = ty_backproject(c->g[0], a->angles.t, (ty_ints){ ty_vjp_size(c, 0).v + 1, 2 }, a->spacing.f);
  return true;
}

bool fwd_backproject(ty_call *c) {
  const ty_backproject_args *a = TY_ARGS(backproject, c);
  ty_tensor *x = a->x.t;
  int64_t side[2];
  if (!check_geometry(c, "[n, angles, detectors]", a->spacing.f, 3) || !ty_check_pair(c, 2, 0, side)) return false;
  if (side[0] > MOST || side[1] > MOST)
    return ty_op_fail(c, TY_EINVAL, "size: expected at most %d pixels a side, got [%lld, %lld]", MOST,
                      (long long)side[0], (long long)side[1]);
  if (x->v.size[2] > MOST)
    return ty_op_fail(c, TY_EINVAL, "x: expected at most %d detectors, got %s", MOST, ty_describe(x));
  if (x->v.size[1] != a->angles.t->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "angles: expected [%lld] for x %s, got [%lld]", (long long)x->v.size[1],
                      ty_describe(x), (long long)a->angles.t->v.size[0]);
  int64_t size[] = { x->v.size[0], side[0], side[1] };
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 3, size) &&
         ty_launch(c, (ty_tensor *[]){ x, a->angles.t }, 2, &(ty_p_radon){ .spacing = a->spacing.f });
}

bool vjp_backproject(ty_vjp *c) {
  const ty_backproject_args *a = TY_ARGS(backproject, c);
  if (ty_vjp_size(c, 0).v[2] == 0) {
    c->dx[0] = ty_zeros(ty_vjp_size(c, 0), ty_vjp_dtype(c, 0), ty_vjp_device(c, 0));
    return true;
  }
  c->dx[0] = ty_radon(c->g[0], a->angles.t, ty_vjp_size(c, 0).v[2], a->spacing.f);
  return true;
}
