/* Many texts at once, on all threads. Every text is encoded for itself, so the threads change nothing. */
#include <stdio.h>

#include "../../kernels/cpu/parallel.h"
#include "../tycho.h"
#include "internal.h"

typedef struct batch {
  ty_tokenizer *t;
  const char *const *texts;
  const size_t *sizes;
  const ty_encode_options *options;
  ty_encoding *out;
  pthread_mutex_t lock;
  int64_t failed; /* the first text that failed, or -1 */
  char error[512];
} batch;

static void encode_some(void *context, int64_t begin, int64_t end) {
  batch *b = context;
  for (int64_t i = begin; i < end; i++) {
    if (ty_tokenizer_encode(b->t, b->texts[i], b->sizes[i], NULL, 0, b->options, &b->out[i])) continue;
    pthread_mutex_lock(&b->lock);
    if (b->failed < 0 || i < b->failed) {
      b->failed = i;
      snprintf(b->error, sizeof b->error, "%s", ty_error());
    }
    pthread_mutex_unlock(&b->lock);
    return;
  }
}

bool ty_tokenizer_encode_batch(ty_tokenizer *t, const char *const *texts, const size_t *sizes, size_t count,
                               const ty_encode_options *options, ty_encoding *out) {
  batch b = { .t = t, .texts = texts, .sizes = sizes, .options = options, .out = out, .failed = -1 };
  size_t total = 0;
  for (size_t i = 0; i < count; i++) total += sizes[i];
  int64_t grain = 1; /* at least some 16 KiB for a thread */
  if (count && total / count < 16384) grain = (int64_t)(16384 / (total / count + 1)) + 1;
  pthread_mutex_init(&b.lock, NULL);
  ty_parallel_for((int64_t)count, grain, encode_some, &b);
  pthread_mutex_destroy(&b.lock);
  if (b.failed >= 0) return ty_fail(TY_EINVAL, "%s", b.error);
  return !ty_interrupted || ty_fail(TY_EINTR, "interrupted");
}
