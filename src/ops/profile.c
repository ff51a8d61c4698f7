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

bool ty_profile_start(int64_t most, ty_profile_watch watch) {
  if (ty_profiling) return ty_fail(TY_EINVAL, "profile: this thread is being profiled already");
  ty_profile *p = calloc(1, sizeof *p);
  if (!p) return ty_fail(TY_ENOMEM, "profile: out of memory");
  p->most = most;
  p->watch = watch;
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

/* ---- numbers that are none ---- */

/* Whether a number with these bits is NaN, or infinite where that counts: all bits of the exponent are set. */
static bool is_bad(uint64_t bits, uint64_t exponent, uint64_t fraction, bool infinite) {
  return (bits & exponent) == exponent && (infinite || (bits & fraction) != 0);
}

static bool row_is_bad(const char *row, int64_t n, int64_t stride, ty_dtype dtype, bool infinite) {
  for (int64_t i = 0; i < n; i++) {
    const char *at = row + i * stride * ty_dtype_size[dtype];
    uint64_t wide;
    uint32_t single;
    uint16_t half;
    bool bad = false;
    switch (dtype) {
      case TY_F64:
        memcpy(&wide, at, sizeof wide);
        bad = is_bad(wide, 0x7ff0000000000000, 0x000fffffffffffff, infinite);
        break;
      case TY_F32:
        memcpy(&single, at, sizeof single);
        bad = is_bad(single, 0x7f800000, 0x007fffff, infinite);
        break;
      case TY_F16:
        memcpy(&half, at, sizeof half);
        bad = is_bad(half, 0x7c00, 0x03ff, infinite);
        break;
      case TY_BF16:
        memcpy(&half, at, sizeof half);
        bad = is_bad(half, 0x7f80, 0x007f, infinite);
        break;
      default: return false;
    }
    if (bad) return true;
  }
  return false;
}

/* Whether a view has such a number. Of a GPU only what is contiguous is looked through, as outputs are. */
static bool view_is_bad(const ty_view *v, int device, bool infinite) {
  if (!v || v->number || !v->count || !ty_is_float((ty_dtype)v->dtype)) return false;
  ty_dtype dtype = (ty_dtype)v->dtype;
  if (device >= TY_CUDA) {
    size_t bytes = (size_t)ty_view_bytes(v);
    char *copy = v->contiguous ? malloc(bytes) : NULL;
    bool bad = copy && ty_device_copy(TY_CPU, copy, device, v->data, bytes) &&
               row_is_bad(copy, v->count, 1, dtype, infinite);
    free(copy);
    return bad;
  }
  if (v->contiguous) return row_is_bad(v->data, v->count, 1, dtype, infinite);
  int last = v->ndim - 1;
  int64_t index[TY_MAX_DIMS] = { 0 }, rows = v->count / v->size[last];
  for (int64_t r = 0; r < rows; r++) {
    int64_t offset = 0;
    for (int d = 0; d < last; d++) offset += index[d] * v->stride[d];
    if (row_is_bad((const char *)v->data + offset * ty_dtype_size[dtype], v->size[last], v->stride[last], dtype,
                   infinite))
      return true;
    for (int d = last - 1; d >= 0 && ++index[d] == v->size[d]; d--) index[d] = 0;
  }
  return false;
}

static bool any_is_bad(const ty_view *const *list, int n, int device, bool infinite) {
  for (int i = 0; i < n; i++)
    if (view_is_bad(list[i], device, infinite)) return true;
  return false;
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

static bool infinite_counts(const ty_profile *p) { return p->watch == TY_WATCH_NAN_OR_INFINITE; }

bool ty_profile_given(int device, const ty_kernel_args *k) {
  const ty_profile *p = ty_profiling;
  return p && p->watch && any_is_bad(k->in, k->nin, device, infinite_counts(p));
}

/* Room for one more event; NULL where there is none. The one that was watched for takes the place of the last. */
static ty_profile_event *next_event(ty_profile *p, bool bad) {
  if (p->count < p->room) return &p->event[p->count++];
  int64_t room = p->room ? 2 * p->room : 1024;
  if (room > p->most) room = p->most;
  ty_profile_event *more = room > p->room ? realloc(p->event, sizeof *more * (size_t)room) : NULL;
  if (more) {
    p->event = more;
    p->room = room;
    return &p->event[p->count++];
  }
  p->lost++;
  return bad && p->count ? &p->event[p->count - 1] : NULL;
}

void ty_profile_note(ty_op_id id, int device, const ty_kernel_args *k, int64_t begin, bool fused, bool given) {
  ty_profile *p = ty_profiling;
  if (!p) return;
  if (device >= TY_CUDA && ty_error_code() == TY_OK) ty_device_synchronize(device);
  int64_t end = ty_profile_now();
  bool bad = p->watch && k && device != TY_META && any_is_bad(k->out, k->nout, device, infinite_counts(p));
  if (bad) p->watch = TY_WATCH_NOTHING;
  ty_profile_event *e = next_event(p, bad);
  if (!e) return;
  *e = (ty_profile_event){ .id = id,
                           .scope = p->scope,
                           .backward = p->backward,
                           .fused = fused,
                           .begin = begin,
                           .end = end,
                           .bad = bad,
                           .given = given };
  if (!k) return;
  e->flops = flops_of(id, k);
  for (int i = 0; i < k->nout; i++) e->bytes += bytes_of(k->out[i]);
  for (int i = 0; i < k->nin; i++) e->bytes += bytes_of(k->in[i]);
  describe(e->shapes, sizeof e->shapes, k);
}
