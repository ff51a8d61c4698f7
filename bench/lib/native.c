/* What the benchmarks need from below Lua: clocks, the physical limits of this machine, and the cheapest call that makes
 * a userdata. A Lua module that lib/native.lua compiles for the CPU at hand when a benchmark first runs. */
#define _GNU_SOURCE
#include <lauxlib.h>
#include <lua.h>

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { CHAINS = 12, STREAMS = 4, MOST_THREADS = 256 };

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));

static double seconds_of(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double now(void) { return seconds_of(CLOCK_MONOTONIC); }

/* ---- arithmetic: independent chains, more than the units' latency times their number ---- */

static volatile float sink;

static double fma_f32(long rounds) {
  vec acc[CHAINS], m, a;
  for (int l = 0; l < LANES; l++) m[l] = 0.999f, a[l] = 1e-3f;
  for (int i = 0; i < CHAINS; i++)
    for (int l = 0; l < LANES; l++) acc[i][l] = (float)i;
  __asm__ volatile("" : "+m"(m), "+m"(a));
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) acc[i] = acc[i] * m + a;
  }
  vec sum = acc[0];
  for (int i = 1; i < CHAINS; i++) sum += acc[i];
  sink = sum[0];
  return 2.0 * LANES * CHAINS * (double)rounds;
}

static double dot_bf16(long rounds) {
#ifdef __AVX512BF16__
  __m512 acc[CHAINS];
  __m512i bits = _mm512_set1_epi16(0x3f80); /* 1.0 */
  __asm__ volatile("" : "+v"(bits));
  for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_setzero_ps();
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)bits, (__m512bh)bits);
  }
  __m512 sum = acc[0];
  for (int i = 1; i < CHAINS; i++) sum = _mm512_add_ps(sum, acc[i]);
  sink = _mm512_cvtss_f32(sum);
  return 64.0 * CHAINS * (double)rounds;
#else
  (void)rounds;
  return 0;
#endif
}

static double dot_int8(long rounds) {
#ifdef __AVX512VNNI__
  __m512i acc[CHAINS], a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
  __asm__ volatile("" : "+v"(a), "+v"(b));
  for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_setzero_si512();
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) acc[i] = _mm512_dpbusd_epi32(acc[i], a, b);
  }
  __m512i sum = acc[0];
  for (int i = 1; i < CHAINS; i++) sum = _mm512_add_epi32(sum, acc[i]);
  sink = (float)_mm_cvtsi128_si32(_mm512_castsi512_si128(sum));
  return 128.0 * CHAINS * (double)rounds;
#else
  (void)rounds;
  return 0;
#endif
}

/* ---- arithmetic on tiles of 16 x 16 sums: four of them, since each waits for itself ---- */

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
/* The operands are numbers as they come: of zeros and ones the unit makes more than of these. */
static bool open_tiles(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  static const struct {
    uint8_t palette, start, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } all = { 1, 0, { 0 }, { 64, 64, 64, 64, 64, 64, 64, 64 }, { 16, 16, 16, 16, 16, 16, 16, 16 } };
  uint16_t numbers[4][512];
  uint32_t state = 1;
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return false;
  for (int i = 0; i < 4 * 512; i++) {
    state = state * 1664525u + 1013904223u;
    numbers[i / 512][i % 512] = (uint16_t)((state >> 16 & 0x80ff) | 0x3f00); /* bf16 from 0.5 to 2, of either sign */
  }
  __asm__ volatile("" : : "r"(numbers) : "memory");
  _tile_loadconfig(&all);
  _tile_loadd(4, numbers[0], 64);
  _tile_loadd(5, numbers[1], 64);
  _tile_loadd(6, numbers[2], 64);
  _tile_loadd(7, numbers[3], 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  return true;
}
#define ON_TILES(multiply, each)          \
  if (!open_tiles()) return 0;            \
  for (long r = 0; r < rounds / 8; r++) { \
    multiply(0, 4, 6);                    \
    multiply(1, 4, 7);                    \
    multiply(2, 5, 6);                    \
    multiply(3, 5, 7);                    \
  }                                       \
  _tile_release();                        \
  return each * 4.0 * (double)(rounds / 8);
static double tiles_bf16(long rounds) { ON_TILES(_tile_dpbf16ps, 16384) }
static double tiles_int8(long rounds) { ON_TILES(_tile_dpbssd, 32768) }
#else
static double tiles_bf16(long rounds) { return (void)rounds, 0; }
static double tiles_int8(long rounds) { return (void)rounds, 0; }
#endif

/* ---- memory: every pass takes a part of the buffer that has not been touched for longest ---- */

static void store(vec *to, vec value, bool past_the_cache) {
  if (past_the_cache) {
#if defined(__AVX512F__)
    _mm512_stream_ps((float *)to, (__m512)value);
    return;
#endif
  }
  *to = value;
}

static double read_streams(const vec *x, size_t n) {
  size_t part = n / STREAMS;
  vec s[STREAMS] = { { 0 } };
  for (size_t i = 0; i < part; i++) {
    for (int k = 0; k < STREAMS; k++) {
      __builtin_prefetch(&x[k * part + i + 64]);
      s[k] += x[k * part + i];
    }
  }
  sink = (s[0] + s[1] + s[2] + s[3])[0];
  return (double)(part * STREAMS * sizeof(vec));
}

static double copy_half(vec *x, size_t n, bool past_the_cache) {
  size_t half = n / 2;
  for (size_t i = 0; i < half; i++) store(&x[half + i], x[i], past_the_cache);
  return (double)(2 * half * sizeof(vec));
}

static double triad(vec *x, size_t n, bool past_the_cache) {
  size_t third = n / 3;
  for (size_t i = 0; i < third; i++) store(&x[2 * third + i], x[i] + 0.5f * x[third + i], past_the_cache);
  return (double)(3 * third * sizeof(vec));
}

/* Four arrays in lock step, three of them written: the traffic of an Adam step. */
static double update(vec *x, size_t n) {
  size_t part = n / 4;
  vec *p = x, *m = x + part, *v = x + 2 * part, *g = x + 3 * part;
  for (size_t i = 0; i < part; i++) {
    m[i] = m[i] * 0.5f + g[i];
    v[i] = v[i] * 0.5f + g[i];
    p[i] -= m[i] + v[i];
  }
  return (double)(7 * part * sizeof(vec));
}

static double scale(vec *x, size_t n) {
  for (size_t i = 0; i < n; i++) x[i] *= 0.999f;
  return (double)(2 * n * sizeof(vec));
}

typedef enum {
  F32,
  BF16,
  INT8,
  TILES_BF16,
  TILES_INT8,
  READ,
  COPY,
  COPY_NT,
  TRIAD,
  TRIAD_NT,
  SCALE,
  UPDATE,
  KINDS
} kind;
static const char *const kind_names[] = { "f32",     "bf16",  "int8",     "tiles_bf16", "tiles_int8", "read", "copy",
                                          "copy_nt", "triad", "triad_nt", "scale",      "update",     NULL };

typedef struct {
  pthread_t id;
  int cpu;
  kind kind;
  long rounds;
  vec *data;
  size_t count;
  pthread_barrier_t *start;
  double work, began, ended;
} job;

static double work_of(const job *j) {
  switch (j->kind) {
    case F32: return fma_f32(j->rounds);
    case BF16: return dot_bf16(j->rounds);
    case INT8: return dot_int8(j->rounds);
    case TILES_BF16: return tiles_bf16(j->rounds);
    case TILES_INT8: return tiles_int8(j->rounds);
    case READ: return read_streams(j->data, j->count);
    case COPY:
    case COPY_NT: return copy_half(j->data, j->count, j->kind == COPY_NT);
    case TRIAD:
    case TRIAD_NT: return triad(j->data, j->count, j->kind == TRIAD_NT);
    case SCALE: return scale(j->data, j->count);
    default: return update(j->data, j->count);
  }
}

/* A limit is not to depend on where the scheduler puts short-lived threads: each has a processor of its own. */
static void stay_on(int number) {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof all, &all)) return;
  int left = number % CPU_COUNT(&all);
  for (int i = 0; i < CPU_SETSIZE; i++) {
    if (!CPU_ISSET(i, &all) || left-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(i, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
}

static void *run_job(void *p) {
  job *j = p;
  stay_on(j->cpu);
  fma_f32(100000); /* the clock falls before it settles when wide units wake up */
  pthread_barrier_wait(j->start);
  j->began = now();
  j->work = work_of(j);
  j->ended = now();
  return NULL;
}

static struct {
  char *bytes;
  size_t size, next;
} memory;

/* The next `bytes` of a buffer that is several times the last cache; NULL when there is no such memory. */
static char *next_part(size_t bytes, size_t total) {
  if (memory.size < total) {
    if (memory.bytes) munmap(memory.bytes, memory.size);
    memory.size = 0;
    memory.bytes = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory.bytes == MAP_FAILED) return memory.bytes = NULL;
    madvise(memory.bytes, total, MADV_HUGEPAGE);
    memset(memory.bytes, 0, total);
    memory.size = total;
  }
  if (memory.next + bytes > memory.size) memory.next = 0;
  char *result = memory.bytes + memory.next;
  memory.next += bytes;
  return result;
}

/* limit(kind, threads, bytes, total): the rate in 1e9 operations or bytes a second; nil where the CPU lacks it.
 * `bytes` is the part of the buffer of `total` that a memory kind goes over. */
static int limit(lua_State *L) {
  kind k = (kind)luaL_checkoption(L, 1, NULL, kind_names);
  int threads = (int)luaL_checkinteger(L, 2);
  luaL_argcheck(L, threads >= 1 && threads <= MOST_THREADS, 2, "1 to 256");
  size_t share = 0;
  char *data = NULL;
  if (k >= READ) {
    size_t bytes = (size_t)luaL_checkinteger(L, 3), total = (size_t)luaL_checkinteger(L, 4);
    luaL_argcheck(L, bytes > 0 && bytes <= total, 3, "between 1 and the total");
    share = bytes / (size_t)threads / (12 * sizeof(vec)) * (12 * sizeof(vec));
    data = next_part(bytes, total);
    if (!data) return luaL_error(L, "no memory for %d MB", (int)(total >> 20));
  }
  static job jobs[MOST_THREADS];
  pthread_barrier_t start;
  pthread_barrier_init(&start, NULL, (unsigned)threads);
  for (int i = 0; i < threads; i++) {
    jobs[i] = (job){ .cpu = i,
                     .kind = k,
                     .rounds = 3000000,
                     .data = (vec *)(data + (size_t)i * share),
                     .count = share / sizeof(vec),
                     .start = &start };
    if (pthread_create(&jobs[i].id, NULL, run_job, &jobs[i])) return luaL_error(L, "no thread");
  }
  double work = 0, began = 0, ended = 0;
  for (int i = 0; i < threads; i++) {
    pthread_join(jobs[i].id, NULL);
    work += jobs[i].work;
    if (i == 0 || jobs[i].began < began) began = jobs[i].began;
    if (i == 0 || jobs[i].ended > ended) ended = jobs[i].ended;
  }
  pthread_barrier_destroy(&start);
  if (work == 0) return 0;
  lua_pushnumber(L, work / (ended - began) * 1e-9);
  return 1;
}

/* ---- clocks ---- */

static int wall(lua_State *L) {
  lua_pushnumber(L, now());
  return 1;
}

/* cpu([pid]): processor seconds that a process has used, with all its threads; nil when it is gone. */
static int cpu(lua_State *L) {
  clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
  if (!lua_isnoneornil(L, 1) && clock_getcpuclockid((pid_t)luaL_checkinteger(L, 1), &clock)) return 0;
  lua_pushnumber(L, seconds_of(clock));
  return 1;
}

static int nap(lua_State *L) {
  double s = luaL_checknumber(L, 1);
  struct timespec t = { .tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9) };
  nanosleep(&t, NULL);
  return 0;
}

/* ---- the bare call: a userdata whose + makes another one ---- */

static int bare(lua_State *L) {
  memset(lua_newuserdatauv(L, 64, 0), 0, 64);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_setmetatable(L, -2);
  return 1;
}

__attribute__((visibility("default"))) int luaopen_bench_native(lua_State *L) {
  static const luaL_Reg functions[] = {
    { "limit", limit }, { "wall", wall }, { "cpu", cpu }, { "sleep", nap }, { NULL, NULL }
  };
  luaL_newlib(L, functions);
  lua_newtable(L);
  lua_pushvalue(L, -1);
  lua_pushcclosure(L, bare, 1);
  lua_pushvalue(L, -1);
  lua_setfield(L, -3, "__add");
  lua_setfield(L, -3, "bare");
  lua_pop(L, 1);
  return 1;
}
