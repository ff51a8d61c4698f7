/* oneDNN, loaded when first needed: version 2.x (3.x has another interface), where its headers were there at build
 * time. */
#include "onednn.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef TY_HAVE_DNNL
#include <oneapi/dnnl/dnnl.h>
#define USE_ONEDNN (DNNL_VERSION_MAJOR == 2)
#endif

#if USE_ONEDNN

/* ---- the library ---- */

static char version_text[32]; /* empty: not used */

/* clang-format off */
#define FUNCTIONS(X) \
  X(version) X(engine_create) X(stream_create) X(memory_create) X(memory_destroy) \
  X(memory_desc_init_by_strides) X(memory_desc_init_by_tag) X(memory_desc_equal) X(memory_desc_get_size) \
  X(primitive_attr_create) X(primitive_attr_destroy) X(primitive_attr_set_scratchpad_mode) \
  X(dilated_convolution_forward_desc_init) X(dilated_convolution_backward_data_desc_init) \
  X(dilated_convolution_backward_weights_desc_init) X(primitive_desc_create) X(primitive_desc_destroy) \
  X(primitive_desc_query) X(primitive_desc_query_md) X(reorder_primitive_desc_create) X(primitive_create) \
  X(primitive_destroy) X(primitive_execute)
/* clang-format on */

static struct {
#define X(name) __typeof__(&dnnl_##name) name;
  FUNCTIONS(X)
#undef X
} dnnl;
static dnnl_engine_t engine;

static bool load_functions(void *handle) {
#define X(name) \
  if (!(dnnl.name = (__typeof__(dnnl.name))dlsym(handle, "dnnl_" #name))) return false;
  FUNCTIONS(X)
#undef X
  return dnnl.version()->major == 2 && dnnl.engine_create(&engine, dnnl_cpu, 0) == dnnl_success;
}

static void load(void) {
  const char *off = getenv("TYCHO_ONEDNN");
  if (off && strcmp(off, "0") == 0) return;
  void *handle = dlopen("libdnnl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return;
  if (!load_functions(handle)) {
    dlclose(handle);
    return;
  }
  const dnnl_version_t *v = dnnl.version();
  snprintf(version_text, sizeof version_text, "%d.%d.%d", v->major, v->minor, v->patch);
}

const char *ty_onednn_version(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load);
  return version_text[0] ? version_text : NULL;
}

/* ---- convolution ---- */

/* A convolution and the copies between our plain layout and the one that oneDNN prefers for it; NULL: the same. */
typedef struct plan {
  ty_onednn_conv key;
  bool usable;
  int users;
  uint64_t used; /* when, for finding the one to give up */
  dnnl_primitive_t run, copy[3];
  dnnl_memory_desc_t plain[3], inner[3], bias, scratch; /* x, weight, y */
} plan;

/* oneDNN takes as many threads as OpenMP would give it. */
static int limit_threads(int threads) {
  int most = omp_get_max_threads();
  if (threads != most) omp_set_num_threads(threads);
  return most;
}

enum { X_TENSOR, WEIGHT_TENSOR, Y_TENSOR, PLANS = 96 };

static plan *plans[PLANS];
static uint64_t clock_of_plans;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Which of the three tensors the pass computes. */
static int result_of(const ty_onednn_conv *c) {
  return c->pass == TY_ONEDNN_FORWARD ? Y_TENSOR : c->pass == TY_ONEDNN_INPUT ? X_TENSOR : WEIGHT_TENSOR;
}

static void plan_free(plan *p) {
  if (p->run) dnnl.primitive_destroy(p->run);
  for (int i = 0; i < 3; i++)
    if (p->copy[i]) dnnl.primitive_destroy(p->copy[i]);
  free(p);
}

static bool describe_plain(plan *p) {
  const ty_onednn_conv *c = &p->key;
  const dnnl_dims_t x = { c->n, c->c, c->h, c->w }, x_strides = { c->x_image, c->h * c->w, c->w, 1 };
  const dnnl_dims_t y = { c->n, c->o, c->oh, c->ow }, y_strides = { c->y_image, c->oh * c->ow, c->ow, 1 };
  const dnnl_dims_t weight = { c->o, c->c, c->kh, c->kw };
  const dnnl_dims_t grouped = { c->groups, c->o / c->groups, c->c / c->groups, c->kh, c->kw };
  const dnnl_dims_t bias = { c->o };
  return dnnl.memory_desc_init_by_strides(&p->plain[X_TENSOR], 4, x, dnnl_f32, x_strides) == dnnl_success &&
         dnnl.memory_desc_init_by_strides(&p->plain[Y_TENSOR], 4, y, dnnl_f32, y_strides) == dnnl_success &&
         (c->groups > 1 ? dnnl.memory_desc_init_by_tag(&p->plain[WEIGHT_TENSOR], 5, grouped, dnnl_f32, dnnl_goihw)
                        : dnnl.memory_desc_init_by_tag(&p->plain[WEIGHT_TENSOR], 4, weight, dnnl_f32, dnnl_oihw)) ==
             dnnl_success &&
         dnnl.memory_desc_init_by_tag(&p->bias, 1, bias, dnnl_f32, dnnl_a) == dnnl_success;
}

/* The primitive descriptor of the pass, with every layout left to oneDNN. */
static dnnl_primitive_desc_t describe_convolution(plan *p, const_dnnl_primitive_attr_t attr) {
  const ty_onednn_conv *c = &p->key;
  const dnnl_dims_t strides = { c->sh, c->sw }, dilates = { c->dh - 1, c->dw - 1 }, padding = { c->ph, c->pw };
  dnnl_memory_desc_t any[3];
  for (int i = 0; i < 3; i++)
    if (dnnl.memory_desc_init_by_tag(&any[i], p->plain[i].ndims, p->plain[i].dims, dnnl_f32, dnnl_format_tag_any) !=
        dnnl_success)
      return NULL;
  const dnnl_memory_desc_t *bias = c->bias ? &p->bias : NULL;
  dnnl_convolution_desc_t d;
  dnnl_primitive_desc_t forward = NULL, pd = NULL;
  if (dnnl.dilated_convolution_forward_desc_init(&d, dnnl_forward_training, dnnl_convolution_direct, &any[X_TENSOR],
                                                 &any[WEIGHT_TENSOR], bias, &any[Y_TENSOR], strides, dilates, padding,
                                                 padding) != dnnl_success ||
      dnnl.primitive_desc_create(&forward, &d, attr, engine, NULL) != dnnl_success)
    return NULL;
  if (c->pass == TY_ONEDNN_FORWARD) return forward;
  dnnl_status_t status = c->pass == TY_ONEDNN_INPUT
                             ? dnnl.dilated_convolution_backward_data_desc_init(
                                   &d, dnnl_convolution_direct, &any[X_TENSOR], &any[WEIGHT_TENSOR], &any[Y_TENSOR],
                                   strides, dilates, padding, padding)
                             : dnnl.dilated_convolution_backward_weights_desc_init(
                                   &d, dnnl_convolution_direct, &any[X_TENSOR], &any[WEIGHT_TENSOR], NULL,
                                   &any[Y_TENSOR], strides, dilates, padding, padding);
  if (status != dnnl_success || dnnl.primitive_desc_create(&pd, &d, attr, engine, forward) != dnnl_success) pd = NULL;
  dnnl.primitive_desc_destroy(forward);
  return pd;
}

/* Fallback implementations are slower than our own kernels. */
static bool is_fast(dnnl_primitive_desc_t pd) {
  const char *name = NULL;
  return dnnl.primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name) == dnnl_success && name &&
         (strncmp(name, "jit", 3) == 0 || strncmp(name, "brg", 3) == 0);
}

static bool make_copy(plan *p, int i) {
  if (dnnl.memory_desc_equal(&p->plain[i], &p->inner[i])) return true;
  bool out = result_of(&p->key) == i;
  dnnl_primitive_desc_t pd = NULL;
  bool ok = dnnl.reorder_primitive_desc_create(&pd, out ? &p->inner[i] : &p->plain[i], engine,
                                               out ? &p->plain[i] : &p->inner[i], engine, NULL) == dnnl_success &&
            dnnl.primitive_create(&p->copy[i], pd) == dnnl_success;
  if (pd) dnnl.primitive_desc_destroy(pd);
  return ok;
}

static bool build(plan *p) {
  dnnl_primitive_attr_t attr = NULL;
  dnnl_primitive_desc_t pd = NULL;
  bool ok = describe_plain(p) && dnnl.primitive_attr_create(&attr) == dnnl_success &&
            dnnl.primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user) == dnnl_success &&
            (pd = describe_convolution(p, attr)) && is_fast(pd);
  if (ok) {
    static const dnnl_query_t forward[] = { dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md };
    static const dnnl_query_t input[] = { dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md };
    static const dnnl_query_t weight[] = { dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md };
    const dnnl_query_t *what = p->key.pass == TY_ONEDNN_FORWARD ? forward
                               : p->key.pass == TY_ONEDNN_INPUT ? input
                                                                : weight;
    for (int i = 0; i < 3 && ok; i++) {
      p->inner[i] = *dnnl.primitive_desc_query_md(pd, what[i], 0);
      ok = make_copy(p, i);
    }
    p->scratch = *dnnl.primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    ok = ok && dnnl.primitive_create(&p->run, pd) == dnnl_success;
  }
  if (pd) dnnl.primitive_desc_destroy(pd);
  if (attr) dnnl.primitive_attr_destroy(attr);
  return ok;
}

/* The plan for `key`, made when there is none; the caller gives it back. NULL: cannot be used. */
static plan *take_plan(const ty_onednn_conv *key) {
  pthread_mutex_lock(&lock);
  plan *found = NULL;
  int free_slot = -1, oldest = -1;
  for (int i = 0; i < PLANS && !found; i++) {
    plan *p = plans[i];
    if (!p) free_slot = free_slot < 0 ? i : free_slot;
    else if (memcmp(&p->key, key, sizeof *key) == 0) found = p;
    else if (!p->users && (oldest < 0 || p->used < plans[oldest]->used)) oldest = i;
  }
  if (!found && (free_slot >= 0 || oldest >= 0)) {
    int slot = free_slot >= 0 ? free_slot : oldest;
    found = calloc(1, sizeof *found);
    if (found) {
      found->key = *key;
      int most = limit_threads((int)key->threads);
      found->usable = build(found);
      limit_threads(most);
      if (plans[slot]) plan_free(plans[slot]);
      plans[slot] = found;
    }
  }
  if (found) {
    found->used = ++clock_of_plans;
    if (found->usable) found->users++;
    else found = NULL;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static void give_back(plan *p) {
  pthread_mutex_lock(&lock);
  p->users--;
  pthread_mutex_unlock(&lock);
}

static dnnl_stream_t stream_of_thread(void) {
  static _Thread_local dnnl_stream_t stream;
  if (!stream && dnnl.stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success) stream = NULL;
  return stream;
}

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

typedef struct buffers {
  dnnl_memory_t plain[3], inner[3], bias, scratch;
} buffers;

static bool wrap(dnnl_memory_t *m, const dnnl_memory_desc_t *desc, void *data) {
  return dnnl.memory_create(m, desc, engine, data) == dnnl_success;
}

static bool execute(plan *p, dnnl_stream_t stream, const buffers *b) {
  int result = result_of(&p->key);
  for (int i = 0; i < 3; i++) {
    dnnl_exec_arg_t args[] = { { DNNL_ARG_FROM, b->plain[i] }, { DNNL_ARG_TO, b->inner[i] } };
    if (p->copy[i] && i != result && dnnl.primitive_execute(p->copy[i], stream, 2, args) != dnnl_success) return false;
  }
  int64_t pass = p->key.pass;
  dnnl_exec_arg_t args[5] = {
    { pass == TY_ONEDNN_INPUT ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, b->inner[X_TENSOR] },
    { pass == TY_ONEDNN_WEIGHT ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, b->inner[WEIGHT_TENSOR] },
    { pass == TY_ONEDNN_FORWARD ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, b->inner[Y_TENSOR] },
    { DNNL_ARG_SCRATCHPAD, b->scratch },
    { DNNL_ARG_BIAS, b->bias },
  };
  if (dnnl.primitive_execute(p->run, stream, b->bias ? 5 : 4, args) != dnnl_success) return false;
  if (!p->copy[result]) return true;
  dnnl_exec_arg_t back[] = { { DNNL_ARG_FROM, b->inner[result] }, { DNNL_ARG_TO, b->plain[result] } };
  return dnnl.primitive_execute(p->copy[result], stream, 2, back) == dnnl_success;
}

static bool run(plan *p, float *const tensors[3], const float *bias) {
  dnnl_stream_t stream = stream_of_thread();
  size_t bytes[4], total = 0;
  for (int i = 0; i < 3; i++) total += bytes[i] = p->copy[i] ? rounded(dnnl.memory_desc_get_size(&p->inner[i])) : 0;
  total += bytes[3] = rounded(dnnl.memory_desc_get_size(&p->scratch));
  char *scratch = total ? ty_scratch_alloc(total) : NULL, *at = scratch;
  if (!stream || (total && !scratch)) return false;
  buffers b = { .bias = NULL };
  bool ok = true;
  for (int i = 0; i < 3; i++) {
    ok = ok && wrap(&b.plain[i], &p->plain[i], tensors[i]);
    ok = ok && (p->copy[i] ? wrap(&b.inner[i], &p->inner[i], at) : (b.inner[i] = b.plain[i], true));
    at += bytes[i];
  }
  ok = ok && wrap(&b.scratch, &p->scratch, bytes[3] ? at : NULL);
  if (ok && bias) ok = wrap(&b.bias, &p->bias, (void *)(uintptr_t)bias);
  ok = ok && execute(p, stream, &b);
  for (int i = 0; i < 3; i++) {
    if (b.inner[i] && b.inner[i] != b.plain[i]) dnnl.memory_destroy(b.inner[i]);
    if (b.plain[i]) dnnl.memory_destroy(b.plain[i]);
  }
  if (b.scratch) dnnl.memory_destroy(b.scratch);
  if (b.bias) dnnl.memory_destroy(b.bias);
  if (scratch) ty_scratch_free(scratch, total);
  return ok;
}

bool ty_onednn_convolve(const ty_onednn_conv *conv, float *x, float *weight, const float *bias, float *y, bool *ok) {
  if (!ty_onednn_version()) return false;
  plan *p = take_plan(conv);
  if (!p) return false;
  int most = limit_threads((int)conv->threads);
  *ok = run(p, (float *[]){ x, weight, y }, bias);
  limit_threads(most);
  give_back(p);
  return true;
}

#else

const char *ty_onednn_version(void) { return NULL; }

bool ty_onednn_convolve(const ty_onednn_conv *conv, float *x, float *weight, const float *bias, float *y, bool *ok) {
  (void)conv, (void)x, (void)weight, (void)bias, (void)y, (void)ok;
  return false;
}

#endif
