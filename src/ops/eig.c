/* Eigenvalues and eigenvectors of general real matrices: complex numbers, as pairs. */
#include <string.h>

#include "../autograd/autograd.h"

/* A complex tensor by its parts. */
typedef struct parts {
  ty_tensor *re, *im;
} parts;

static parts parts_of(ty_tensor *x) { return (parts){ ty_select(x, -1, 0), ty_select(x, -1, 1) }; }
static ty_tensor *turned(ty_tensor *x) { return ty_transpose(x, -2, -1); }
static ty_tensor *times(ty_tensor *a, ty_tensor *b) { return ty_matmul(a, b); }

static bool check_square(ty_call *c) {
  const ty_tensor *x = c->arg[0].t;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS - 1, "[..., n, n]")) return false;
  return x->v.size[x->v.ndim - 1] == x->v.size[x->v.ndim - 2] ||
         ty_op_fail(c, TY_EINVAL, "x: expected square matrices [..., n, n], got %s", ty_describe(x));
}

/* On the CPU, as there is no library for GPUs that all of them have. */
static ty_tensor *on_host(ty_tensor *x) { return ty_device_of(x) >= TY_CUDA ? ty_to_device(x, TY_CPU, false) : x; }
static ty_tensor *where_it_was(ty_tensor *y, const ty_tensor *x) {
  return y && ty_device_of(y) != ty_device_of(x) ? ty_to_device(y, ty_device_of(x), false) : y;
}

bool fwd_eig(ty_call *c) {
  ty_tensor *x = TY_ARGS(eig, c)->x.t, *f[3];
  if (!check_square(c) || !ty_eig_factor(on_host(x), f)) return false;
  return ty_out_set(c, 0, where_it_was(f[0], x)) && ty_out_set(c, 1, where_it_was(f[1], x));
}

bool fwd_eigvals(ty_call *c) {
  ty_tensor *x = TY_ARGS(eigvals, c)->x.t, *f[3];
  if (!check_square(c)) return false;
  if (!ty_grad_enabled() || !x->requires_grad) return ty_out_set(c, 0, where_it_was(ty_eig_values(on_host(x)), x));
  return ty_eig_factor(on_host(x), f) && ty_out_set(c, 0, where_it_was(f[0], x));
}

bool fwd_eig_factor(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  if (!check_square(c)) return false;
  int64_t size[TY_MAX_DIMS + 1];
  const int n = x->v.ndim;
  memcpy(size, x->v.size, sizeof x->v.size);
  size[n] = size[n - 1] = 2;
  if (!ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), n, size)) return false;
  if (c->op->nout == 1) return ty_launch(c, &x, 1, NULL);
  size[n - 1] = size[n - 2];
  return ty_out(c, 1, ty_device_of(x), ty_dtype_of(x), n + 1, size) &&
         ty_out(c, 2, ty_device_of(x), TY_I64, n - 1, size) && ty_launch(c, &x, 1, NULL);
}

/* Of x v = v diag(l): dv = v c, where c[i][j] = (v^-1 dx v)[i][j] / (l[j] - l[i]) off the diagonal, and c[j][j] keeps the
 * length of the vector and its real element real. The rule is the adjoint of that (Boeddeker et al. 2017, "On the
 * Computation of Complex-valued Gradients with Application to Statistically Optimum Beamforming"; for the free phase,
 * derived here). */
bool vjp_eig_factor(ty_vjp *c) {
  if (!c->g[0] && !c->g[1]) return true;
  const parts l = parts_of(c->out[0]), v = parts_of(c->out[1]);
  if (!l.re || !v.re || !v.im) return true;
  const int64_t n = v.re->v.size[v.re->v.ndim - 1];
  if (v.re->v.count == 0) return true;
  ty_tensor *one = ty_eye(n, -1, ty_dtype_of(v.re), ty_device_of(v.re));
  parts h = { NULL, NULL };
  if (c->g[1]) {
    parts g = parts_of(c->g[1]);
    /* s = sum over elements of conj(g) v; g without its part along v, and with what keeps the phase */
    ty_tensor *sr = ty_sum(ty_add(ty_mul(g.re, v.re), ty_mul(g.im, v.im)), TY_INTS(-2), true, TY_DTYPE_DEFAULT);
    ty_tensor *si = ty_sum(ty_sub(ty_mul(g.re, v.im), ty_mul(g.im, v.re)), TY_INTS(-2), true, TY_DTYPE_DEFAULT);
    ty_tensor *real = turned(ty_to(ty_one_hot(c->out[2], n), ty_dtype_of(v.re)));
    ty_tensor *element = ty_sum(ty_mul(real, v.re), TY_INTS(-2), true, TY_DTYPE_DEFAULT);
    g.re = ty_sub(g.re, ty_mul(sr, v.re));
    g.im = ty_add(ty_sub(g.im, ty_mul(sr, v.im)), ty_mul(real, ty_div(si, element)));
    /* v^H g, over the conjugates of the gaps */
    ty_tensor *vr = turned(v.re), *vi = turned(v.im);
    ty_tensor *pr = ty_add(times(vr, g.re), times(vi, g.im)), *pi = ty_sub(times(vr, g.im), times(vi, g.re));
    ty_tensor *dr = ty_sub(ty_unsqueeze(l.re, -2), ty_unsqueeze(l.re, -1));
    ty_tensor *di = ty_sub(ty_unsqueeze(l.im, -2), ty_unsqueeze(l.im, -1));
    ty_tensor *size = ty_add(ty_add(ty_square(dr), ty_square(di)), one);
    h.re = ty_div(ty_sub(ty_mul(pr, dr), ty_mul(pi, di)), size);
    h.im = ty_div(ty_add(ty_mul(pr, di), ty_mul(pi, dr)), size);
  }
  if (c->g[0]) {
    const parts g = parts_of(c->g[0]);
    ty_tensor *dr = ty_mul(one, ty_unsqueeze(g.re, -1)), *di = ty_mul(one, ty_unsqueeze(g.im, -1));
    h.re = h.re ? ty_add(h.re, dr) : dr;
    h.im = h.im ? ty_add(h.im, di) : di;
  }
  /* the real part of v^-H h v^H, by a real system of twice the size */
  ty_tensor *vr = turned(v.re), *vi = turned(v.im);
  ty_tensor *kr = ty_add(times(h.re, vr), times(h.im, vi)), *ki = ty_sub(times(h.im, vr), times(h.re, vi));
  ty_tensor *upper = ty_concat(TY_LIST(vr, vi), -1), *lower = ty_concat(TY_LIST(ty_neg(vi), vr), -1);
  ty_tensor *both = upper && lower ? ty_concat(TY_LIST(upper, lower), -2) : NULL;
  ty_tensor *right = kr && ki ? ty_concat(TY_LIST(kr, ki), -2) : NULL;
  c->dx[0] = both && right ? ty_narrow(ty_solve(both, right), -2, 0, n) : NULL;
  return true;
}
