/* Copies and dtype conversions. */
#include <string.h>

#include "../autograd/autograd.h"
#include "../device/device.h"
#include "../device/stream.h"
#include "../program/recording.h"
#include "vmap.h"

void ty_view_expand(ty_view *out, const ty_view *v, int ndim, const int64_t *size) {
  out->data = v->data;
  out->number = v->number;
  out->dtype = v->dtype;
  out->ndim = (int16_t)ndim;
  for (int i = 1; i <= ndim; i++) {
    int d = ndim - i, from = v->ndim - i;
    out->size[d] = size[d];
    out->stride[d] = from < 0 || (v->size[from] == 1 && size[d] != 1) ? 0 : v->stride[from];
  }
  ty_view_update(out);
}

/* The bytes of a contiguous tensor into another one, between a GPU and page-locked memory without waiting if so wanted.
 * That memory is not given out again before the GPU is done with it. */
static bool move_bytes(ty_tensor *dst, const ty_tensor *src, bool non_blocking) {
  int to = ty_device_of(dst), from = ty_device_of(src), gpu = from >= TY_CUDA ? from : to;
  size_t bytes = (size_t)ty_view_bytes(&src->v);
  ty_storage *locked = src->storage->pinned ? src->storage : dst->storage->pinned ? dst->storage : NULL;
  if (!locked || gpu < TY_CUDA) return ty_device_copy(to, dst->v.data, from, src->v.data, bytes);
  non_blocking = non_blocking && ty_storage_used(locked, gpu, ty_stream_current(gpu));
  return ty_device_copy_locked(to, dst->v.data, from, src->v.data, bytes, !non_blocking);
}

/* From one device to another: through a contiguous copy here and there where either is not contiguous. What converts
 * runs where it leaves fewer bytes to move. */
static bool copy_across(ty_tensor *dst, ty_tensor *src, bool non_blocking) {
  ty_dtype dtype = ty_dtype_of(dst);
  if (ty_device_of(dst) == TY_META) return true;
  if (ty_device_of(src) == TY_META)
    return ty_op_fail_(&ty_ops[TY_OP_copy_], TY_EINVAL, "a meta tensor has no values to move: %s", ty_describe(src));
  /* Under ty.compile: what the host has is a constant of the program, what a GPU computes cannot be looked at. */
  if (ty_is_recording() && !ty_recorded_host_read(src, "to")) return false;
  ty_scope scope;
  ty_scope_open(&scope);
  if (ty_dtype_size[dtype] < ty_dtype_size[src->v.dtype]) src = ty_to(src, dtype);
  src = src ? ty_contiguous(src) : NULL;
  bool plain = src && dst->v.contiguous && ty_dtype_of(src) == dtype && ty_same_shape(&src->v, &dst->v);
  ty_tensor *landing = plain ? dst : NULL;
  if (src && !plain)
    landing = ty_scope_add(ty_tensor_new(ty_device_of(dst), ty_dtype_of(src), src->v.ndim, src->v.size));
  bool ok = landing && move_bytes(landing, src, non_blocking) && (plain || ty_copy_into(dst, landing));
  if (ok && ty_is_recording()) ty_recorded_host_write(dst);
  ty_scope_close(&scope);
  return ok;
}

/* Blocks are copied as the bytes that they are. */
static bool copy_blocks(ty_tensor *dst, ty_tensor *src) {
  ty_view out = { .data = dst->v.data, .dtype = TY_U8 }, in = { .data = src->v.data, .dtype = TY_U8 };
  int64_t bytes = ty_view_bytes(&dst->v);
  ty_view_set_contiguous(&out, 1, &bytes);
  ty_view_set_contiguous(&in, 1, &bytes);
  const ty_view *outs[] = { &out }, *ins[] = { &in };
  return ty_run_kernel(TY_OP_cast, ty_device_of(dst), outs, 1, ins, 1, NULL);
}

static bool copy_into(ty_tensor *dst, ty_tensor *src, bool non_blocking) {
  int ndim;
  bool blocks = ty_is_quantized(ty_dtype_of(dst)) || ty_is_quantized(ty_dtype_of(src));
  if (blocks && (ty_dtype_of(dst) != ty_dtype_of(src) || !ty_same_shape(&dst->v, &src->v)))
    return ty_op_fail_(&ty_ops[TY_OP_copy_], TY_EINVAL,
                       "source: a block-quantized tensor is copied only to or from one of its dtype and shape, got %s "
                       "into %s",
                       ty_describe(src), ty_describe(dst));
  int64_t size[TY_MAX_DIMS];
  if (!ty_broadcast(&ty_ops[TY_OP_copy_], &dst->v, &src->v, &ndim, size)) return false;
  if (ndim != dst->v.ndim || memcmp(size, dst->v.size, sizeof *size * (size_t)ndim) != 0)
    return ty_op_fail_(&ty_ops[TY_OP_copy_], TY_EINVAL, "source: %s does not broadcast to %s", ty_describe(src),
                       ty_describe(dst));
  if (dst->storage->kept) ty_kept_drop(dst->storage);
  if (ty_device_of(dst) != ty_device_of(src)) return copy_across(dst, src, non_blocking);
  if (blocks) return copy_blocks(dst, src);
  ty_view expanded;
  ty_view_expand(&expanded, &src->v, ndim, size);
  const ty_view *out = &dst->v, *in = &expanded;
  return ty_run_kernel(TY_OP_cast, ty_device_of(dst), &out, 1, &in, 1, NULL);
}

bool ty_copy_into(ty_tensor *dst, ty_tensor *src) {
  return dst->batch || (src && src->batch) ? ty_map_copy_into(dst, src) : copy_into(dst, src, false);
}

/* Does a write to `a` change what is read through `b`? */
static bool overlap(const ty_tensor *a, const ty_tensor *b) { return a->storage == b->storage && a->v.data != NULL; }

bool fwd_copy_(ty_call *c) {
  const ty_copy__args *a = TY_ARGS(copy_, c);
  ty_tensor *source = a->source.t;
  if (ty_is_recording() && ty_device_of(source) != ty_device_of(a->x.t))
    return ty_op_fail(
        c, TY_EUNSUPPORTED,
        "source: inside ty.compile nothing is copied from %s into a tensor on %s; pass an argument that is "
        "there already",
        ty_device_name(ty_device_of(source)), ty_device_name(ty_device_of(a->x.t)));
  if (overlap(a->x.t, source) && !(source = ty_clone(source))) return false;
  if (!copy_into(a->x.t, source, a->non_blocking.i)) return false;
  c->out[0] = ty_retain(a->x.t);
  return true;
}

bool vjp_copy_(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_zeros_like(c->g[0], TY_DTYPE_DEFAULT);
  if (c->need[1])
    c->dx[1] = ty_vjp_device(c, 1) == ty_device_of(c->g[0]) ? c->g[0]
                                                            : ty_to_device(c->g[0], ty_vjp_device(c, 1), false);
  return true;
}

bool fwd_to_device(ty_call *c) {
  const ty_to_device_args *a = TY_ARGS(to_device, c);
  return ty_out(c, 0, (int)a->device.i, ty_dtype_of(a->x.t), a->x.t->v.ndim, a->x.t->v.size) &&
         copy_into(c->out[0], a->x.t, a->non_blocking.i);
}

bool vjp_to_device(ty_vjp *c) {
  c->dx[0] = ty_to_device(c->g[0], ty_vjp_device(c, 0), false);
  return true;
}

bool fwd_clone(ty_call *c) {
  ty_tensor *x = TY_ARGS(clone, c)->x.t;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_copy_into(c->out[0], x);
}

bool vjp_clone(ty_vjp *c) {
  c->dx[0] = c->g[0];
  return true;
}

bool fwd_contiguous(ty_call *c) {
  ty_tensor *x = TY_ARGS(contiguous, c)->x.t;
  if (!x->v.contiguous) return fwd_clone(c);
  return ty_out_view(c, 0, x, x->v.ndim, x->v.size, x->v.stride, 0);
}

bool fwd_cast(ty_call *c) {
  const ty_cast_args *a = TY_ARGS(cast, c);
  ty_tensor *x = a->x.t;
  ty_dtype dtype = a->dtype.i == TY_DTYPE_DEFAULT ? ty_dtype_of(x) : (ty_dtype)a->dtype.i;
  if (dtype == ty_dtype_of(x)) return ty_out_view(c, 0, x, x->v.ndim, x->v.size, x->v.stride, 0);
  if (ty_is_quantized(dtype) || ty_is_quantized(ty_dtype_of(x))) { /* no gradient flows through codes */
    c->record = false;
    x = ty_is_quantized(ty_dtype_of(x)) ? ty_dequantize(x, ty_is_quantized(dtype) ? TY_F32 : dtype) : x;
    return ty_out_set(c, 0, ty_is_quantized(dtype) && x ? ty_quantize(x, dtype, NULL) : x);
  }
  return ty_out_like(c, 0, x, dtype) && ty_launch(c, &x, 1, NULL);
}

bool vjp_cast(ty_vjp *c) {
  c->dx[0] = c->g[0]; /* the engine brings it to the input's dtype */
  return true;
}

ty_tensor *ty_to(ty_tensor *x, ty_dtype dtype) { return !x || ty_dtype_of(x) == dtype ? x : ty_cast(x, dtype); }

bool fwd_detach(ty_call *c) {
  ty_tensor *x = TY_ARGS(detach, c)->x.t;
  return ty_out_view(c, 0, x, x->v.ndim, x->v.size, x->v.stride, 0);
}

ty_tensor *ty_scalar_of(ty_value value, ty_dtype dtype, int device) {
  if (device >= TY_CUDA) return ty_full(TY_NO_INTS, value, dtype, device);
  ty_tensor *t = ty_tensor_new(device, dtype, 0, NULL);
  if (t && t->v.data) ty_store_scalar(t->v.data, dtype, value);
  if (ty_is_recording() && t) ty_recorded_host_write(t);
  return ty_scope_add(t);
}
