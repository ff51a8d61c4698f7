/* Stores past the caches. A result far larger than they are would push out what is still needed, and a plain store
 * reads each line before it is overwritten; what the next op reads of such a result comes from memory in any case.
 * Kernels compute a piece of STREAM_BLOCK bytes in the first-level cache and hand it on. */
#ifndef TY_KERNELS_CPU_STREAM_H
#define TY_KERNELS_CPU_STREAM_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum {
  STREAM_BLOCK = 1024,     /* bytes: larger ones leave the memory idle while they are computed */
  STREAM_LEAST = 32 << 20, /* bytes of a result from which on writing and then reading it is faster this way */
  STREAM_AHEAD = 16384,    /* bytes: nearer than that, memory does not answer in time */
  STREAM_LINE = 64
};

/* Asks for a block that will be read `ahead` bytes after the one at x. */
static inline __attribute__((unused)) void stream_expect(const void *x, int64_t ahead) {
  for (int i = 0; i < STREAM_BLOCK; i += STREAM_LINE) __builtin_prefetch((const char *)x + ahead + i, 0, 2);
}

/* How far ahead where rows of so many bytes are read several times each: the next one, or some more of short ones. */
static inline __attribute__((unused)) int64_t stream_ahead(int64_t row) {
  return row > STREAM_AHEAD ? row : STREAM_AHEAD;
}

static inline bool stream_pays(int64_t bytes) { return bytes > STREAM_LEAST; }

/* memcpy() for such results. */
static inline __attribute__((unused)) void stream_copy(void *to, const void *from, size_t bytes) {
#if defined(__SSE2__)
  char *t = to;
  const char *f = from;
  size_t head = -(uintptr_t)t % STREAM_LINE;
  if (bytes < head + STREAM_LINE) head = bytes;
  if (head) memcpy(t, f, head);
  t += head, f += head, bytes -= head;
  for (; bytes >= STREAM_LINE; bytes -= STREAM_LINE, t += STREAM_LINE, f += STREAM_LINE) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)t, _mm512_loadu_si512(f));
#elif defined(__AVX__)
    for (int i = 0; i < STREAM_LINE; i += 32)
      _mm256_stream_si256((__m256i *)(void *)(t + i), _mm256_loadu_si256((const __m256i *)(const void *)(f + i)));
#else
    for (int i = 0; i < STREAM_LINE; i += 16)
      _mm_stream_si128((__m128i *)(void *)(t + i), _mm_loadu_si128((const __m128i *)(const void *)(f + i)));
#endif
  }
  if (bytes) memcpy(t, f, bytes);
#else
  memcpy(to, from, bytes);
#endif
}

/* After the last stream_copy() of a range: other threads may read it then. */
static inline __attribute__((unused)) void stream_end(void) {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

#endif
