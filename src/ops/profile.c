/* The events of ty.profile(): when each kernel ran, and how much work was in it. */
#include "profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../device/device.h"

_Thread_local ty_profile *ty_profiling;

int64_t ty_profile_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

bool ty_profile_start(int64_t most) {
  if (ty_profiling) return ty_fail(TY_EINVAL, "profile: this thread is being profiled already");
  ty_profile *p = calloc(1, sizeof *p);
  if (!p) return ty_fail(TY_ENOMEM, "profile: out of memory");
  p->most = most;
  ty_profiling = p;
  return true;
}

ty_profile *ty_profile_stop(void) {
  ty_profile *p = ty_profiling;
  ty_profiling = NULL;
  return p;
}

void ty_profile_free(ty_profile *p) {
  if (!p) return;
  free(p->event);
  free(p);
}

/* ---- the work in a kernel ---- */

static const ty_view *operand(const ty_view *const *list, int n, int i) { return i < n ? list[i] : NULL; }

static int64_t last_size(const ty_view *v) { return v && v->ndim ? v->size[v->ndim - 1] : 1; }

/* What each output channel of a convolution sums: weight [outputs, inputs / groups, height, width]. */
static double taps(const ty_view *weight) {
  return weight && weight->ndim && weight->size[0] ? (double)weight->count / (double)weight->size[0] : 0;
}

/* Products of queries and keys, and of their weights and values: twice 2 t s d for each head. q, k [..., heads, t, d];
 * heads of k may serve several of q. */
static double attention(const ty_view *q, const ty_view *k) {
  if (!q || !k || q->ndim < 2 || k->ndim < 2) return 0;
  return 4.0 * (double)q->count * (double)k->size[k->ndim - 2];
}

/* Floating-point operations of products, by the usual count of 2 for a multiplication and an addition; of everything
 * else one for each number that comes out. Masks that leave pairs out of attention are not looked at. */
static double flops_of(ty_op_id id, const ty_kernel_args *k) {
  const ty_view *y = operand(k->out, k->nout, 0), *a = operand(k->in, k->nin, 0), *b = operand(k->in, k->nin, 1);
  switch (id) {
    case TY_OP_matmul:
    case TY_OP_matmul_int8: return y && a ? 2.0 * (double)y->count * (double)last_size(a) : 0;
    case TY_OP_conv2d: return y ? 2.0 * (double)y->count * taps(b) : 0;
    case TY_OP_conv2d_backward_input: return a ? 2.0 * (double)a->count * taps(b) : 0;
    case TY_OP_conv2d_backward_weight: return a ? 2.0 * (double)a->count * taps(y) : 0;
    case TY_OP_scaled_dot_product_attention: return attention(a, b);
    case TY_OP_attention_backward: return 2.5 * attention(b, operand(k->in, k->nin, 2)); /* five products, not two */
    default: break;
  }
  double sum = 0;
  for (int i = 0; i < k->nout; i++)
    if (k->out[i]) sum += (double)k->out[i]->count;
  return sum;
}

/* Bytes of a view, those that are repeated by a stride of 0 once. */
static int64_t bytes_of(const ty_view *v) {
  int64_t n = 1;
  if (!v || v->number || v->count == 0) return 0;
  for (int d = 0; d < v->ndim; d++)
    if (v->stride[d] != 0) n *= v->size[d];
  return ty_is_quantized((ty_dtype)v->dtype) ? ty_view_bytes(v) : n * (int64_t)ty_dtype_size[v->dtype];
}

static void describe(char *text, size_t room, const ty_kernel_args *k) {
  size_t at = 0;
  const char *last = "";
  int n = k->nin ? k->nin : k->nout;
  const ty_view *const *list = k->nin ? k->in : k->out;
  text[0] = 0;
  for (int i = 0; i < n && at + 1 < room; i++) {
    const ty_view *v = list[i];
    if (!v || v->number) continue;
    const char *name = ty_dtype_name[v->dtype];
    int wrote = strcmp(name, last) != 0 ? snprintf(text + at, room - at, "%s%s [", at ? " " : "", name)
                                        : snprintf(text + at, room - at, " [");
    at += wrote > 0 ? (size_t)wrote : 0;
    for (int d = 0; d < v->ndim && at < room; d++) {
      wrote = snprintf(text + at, room - at, "%s%lld", d ? ", " : "", (long long)v->size[d]);
      at += wrote > 0 ? (size_t)wrote : 0;
    }
    if (at < room) {
      wrote = snprintf(text + at, room - at, "]");
      at += wrote > 0 ? (size_t)wrote : 0;
    }
    last = name;
  }
  if (at >= room) memcpy(text + room - 4, "...", 4);
}

void ty_profile_note(ty_op_id id, int device, const ty_kernel_args *k, int64_t begin, bool fused) {
  ty_profile *p = ty_profiling;
  if (!p) return;
  if (device >= TY_CUDA && ty_error_code() == TY_OK) ty_device_synchronize(device);
  int64_t end = ty_profile_now();
  if (p->count == p->room) {
    int64_t room = p->room ? 2 * p->room : 1024;
    if (room > p->most) room = p->most;
    ty_profile_event *more = room > p->room ? realloc(p->event, sizeof *more * (size_t)room) : NULL;
    if (!more) {
      p->lost++;
      return;
    }
    p->event = more;
    p->room = room;
  }
  ty_profile_event *e = &p->event[p->count++];
  *e = (ty_profile_event){
    .id = id, .scope = p->scope, .backward = p->backward, .fused = fused, .begin = begin, .end = end
  };
  if (!k) return;
  e->flops = flops_of(id, k);
  for (int i = 0; i < k->nout; i++) e->bytes += bytes_of(k->out[i]);
  for (int i = 0; i < k->nin; i++) e->bytes += bytes_of(k->in[i]);
  describe(e->shapes, sizeof e->shapes, k);
}
