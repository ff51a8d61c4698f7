/* Attention of f16 and bf16: on tiles where the CPU has them, and otherwise of f32 copies. Included by attention.c. */

typedef struct half_rows {
  const ty_view *x;
  float *wide;
} half_rows;

static void widen_rows(void *context, int64_t begin, int64_t end) {
  const half_rows *w = context;
  const ty_view *x = w->x;
  int64_t n = x->size[3];
  for (int64_t r = begin; r < end; r++) {
    int64_t head = r / x->size[2], b = head / x->size[1];
    const uint16_t *from = (const uint16_t *)(const void *)element(x, b, head % x->size[1], r % x->size[2], 0);
    float *to = w->wide + r * n;
    if (x->stride[3] == 1) ty_half_load((ty_dtype)x->dtype, to, from, n);
    else
      for (int64_t k = 0; k < n; k++) ty_half_load((ty_dtype)x->dtype, to + k, from + k * x->stride[3], 1);
  }
}

static void narrow_rows(void *context, int64_t begin, int64_t end) {
  const half_rows *w = context;
  int64_t n = w->x->size[3];
  ty_half_store((ty_dtype)w->x->dtype, (uint16_t *)w->x->data + begin * n, w->wide + begin * n, (end - begin) * n);
}

static void each_row(const ty_view *x, float *wide, ty_range_fn *fn) {
  half_rows w = { x, wide };
  if (x->count) ty_parallel_for(x->count / x->size[3], 1 + 16384 / x->size[3], fn, &w);
}

/* A contiguous view of f32 at `to` with the elements of x. */
static ty_view wide_copy(const ty_view *x, float *to) {
  ty_view y = *x;
  y.dtype = TY_F32, y.data = to;
  y.stride[3] = 1;
  for (int i = 2; i >= 0; i--) y.stride[i] = y.stride[i + 1] * x->size[i + 1];
  each_row(x, to, widen_rows);
  return y;
}

/* k->in: q, k and v of half precision, and what else forward wants; out: y of the same, and lse. */
static bool forward_half(const ty_kernel_args *k) {
  ty_view in[3], out = *k->out[0];
  size_t bytes = sizeof(float) * (size_t)out.count + 1;
  for (int i = 0; i < 3; i++) bytes += sizeof(float) * (size_t)k->in[i]->count;
  float *memory = ty_scratch_alloc(bytes), *at = memory;
  if (!memory) return false;
  for (int i = 0; i < 3; i++) {
    in[i] = wide_copy(k->in[i], at);
    at += k->in[i]->count;
  }
  out.dtype = TY_F32, out.data = at;
  plan p = plan_of(&in[0], &in[1], &in[2], k->in[3], k->in[4], k->params);
  bool ok = forward_f32(&p, &out, k->out[1]);
  if (ok) each_row(k->out[0], at, narrow_rows);
  ty_scratch_free(memory, bytes);
  return ok;
}

/* The same of attention_backward; `a` are its gradients. */
static bool backward_half(const ty_kernel_args *k, const gradients *a) {
  ty_view in[5], out[3];
  size_t bytes = 1;
  for (int i = 0; i < 5; i++) bytes += sizeof(float) * (size_t)k->in[i]->count;
  for (int i = 0; i < 3; i++) bytes += sizeof(float) * (size_t)k->out[i]->count;
  float *memory = ty_scratch_alloc(bytes), *at = memory;
  if (!memory) return false;
  for (int i = 0; i < 5; i++) {
    in[i] = wide_copy(k->in[i], at);
    at += k->in[i]->count;
  }
  for (int i = 0; i < 3; i++) {
    out[i] = *k->out[i];
    out[i].dtype = TY_F32, out[i].data = at;
    at += k->out[i]->count;
  }
  plan p = plan_of(&in[1], &in[2], &in[3], k->in[6], k->in[7], k->params);
  gradients wide = *a;
  wide.g = &in[0], wide.y = &in[4], wide.dq = &out[0], wide.dk = &out[1], wide.dv = &out[2];
  bool ok = backward_f32(&p, &wide);
  for (int i = 0; i < 3 && ok; i++) each_row(k->out[i], out[i].data, narrow_rows);
  ty_scratch_free(memory, bytes);
  return ok;
}
