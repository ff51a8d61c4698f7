/* Products of bf16 on tiles of 16 by 16 sums (Intel's AMX, from Sapphire Rapids on): whether this CPU has them, and the
 * blocks of memory that they read. TYCHO_TILES=0 turns them off; TYCHO_TILES=plain computes the same in C with any
 * AVX-512, which lets every machine test what lies around them.
 *
 * A step of a product takes 32 elements of k, two neighbours in a unit of 32 bits: A as 16 rows of 16 units, B as 16 units
 * of 16 columns. */
#ifndef TY_KERNELS_CPU_TILES_H
#define TY_KERNELS_CPU_TILES_H

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

#include "../half.h"

#if defined(__linux__) && (__GNUC__ >= 11 || defined(__clang__))
#define TY_TILES
#include <sys/syscall.h>
#include <unistd.h>
#define TY_TILES_TARGET "amx-tile,amx-bf16,amx-int8,avx512bw"
#endif

#define TILE_INLINE static inline __attribute__((always_inline))

enum { TY_TILE = 16, TY_NO_TILES = 1, TY_PLAIN_TILES, TY_NATIVE_TILES };

#if defined(TY_TILES)
/* The kernel gives a process the tiles' registers only when asked. */
static inline bool ty_tiles_granted(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  bool bf16 = d >> 22 & 1, tiles = d >> 24 & 1, int8 = d >> 25 & 1;
  return bf16 && tiles && int8 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static inline bool ty_tiles_granted(void) { return false; }
#endif

/* TY_NO_TILES, TY_PLAIN_TILES or TY_NATIVE_TILES; the same for every thread. */
static inline int ty_tiles(void) {
  static int choice;
  int now = __atomic_load_n(&choice, __ATOMIC_RELAXED);
  if (!now) {
    const char *wish = getenv("TYCHO_TILES");
    if (wish && strcmp(wish, "plain") == 0) now = TY_PLAIN_TILES;
    else now = !(wish && *wish == '0') && ty_tiles_granted() ? TY_NATIVE_TILES : TY_NO_TILES;
    __atomic_store_n(&choice, now, __ATOMIC_RELAXED);
  }
  return now;
}

#if defined(TY_TILES)
/* Sets this thread's eight registers to 16 rows of 64 bytes. Between this and ty_tiles_close() nothing else may use them;
 * a thread that has closed them costs nothing more to switch away from. */
__attribute__((target("amx-tile"))) static inline void ty_tiles_open(void) {
  static const struct {
    uint8_t palette, start, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } all = { .palette = 1,
            .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
            .rows = { TY_TILE, TY_TILE, TY_TILE, TY_TILE, TY_TILE, TY_TILE, TY_TILE, TY_TILE } };
  if (ty_tiles() == TY_NATIVE_TILES) _tile_loadconfig(&all);
}
__attribute__((target("amx-tile"))) static inline void ty_tiles_close(void) {
  if (ty_tiles() == TY_NATIVE_TILES) _tile_release();
}
#else
static inline void ty_tiles_open(void) {}
static inline void ty_tiles_close(void) {}
#endif

/* ---- what kernels with the instructions share: registers 0 to 3 hold 32 x 32 sums, 4 and 5 two tiles of A, 6 and 7 two
 * of B. Compilers do not know what the instructions read and write: only a function that is not inlined keeps them in
 * order with what is around. ---- */

#define TY_TILES_CLEAR() \
  _tile_zero(0);         \
  _tile_zero(1);         \
  _tile_zero(2);         \
  _tile_zero(3);
/* Loads the sums from c, or stores them there; rows of c are `c_row` numbers apart. */
#define TY_TILES_SUMS(move, c, c_row)                     \
  move(0, c, 4 * (c_row));                                \
  move(1, (c) + TY_TILE, 4 * (c_row));                    \
  move(2, (c) + TY_TILE * (int64_t)(c_row), 4 * (c_row)); \
  move(3, (c) + TY_TILE * (int64_t)(c_row) + TY_TILE, 4 * (c_row));
/* Two tiles `apart` units from each other, with rows of `row` units. */
#define TY_TILES_A(a, apart, row) \
  _tile_loadd(4, a, 4 * (row));   \
  _tile_loadd(5, (a) + (apart), 4 * (row));
#define TY_TILES_B(b, apart, row) \
  _tile_loadd(6, b, 4 * (row));   \
  _tile_loadd(7, (b) + (apart), 4 * (row));
#define TY_TILES_MULTIPLY(multiply) \
  multiply(0, 4, 6);                \
  multiply(1, 4, 7);                \
  multiply(2, 5, 6);                \
  multiply(3, 5, 7);

/* Which parts of A and B meet where numbers are sums of numbers of bf16, the largest last, in an order in which one of
 * the two stays: X(part of A, part of B, whether A changes, whether B does). */
#define TY_MEETINGS_1_1(X) X(0, 0, true, true)
#define TY_MEETINGS_1_2(X) X(0, 1, true, true) X(0, 0, false, true)
#define TY_MEETINGS_2_1(X) X(1, 0, true, true) X(0, 0, true, false)
#define TY_MEETINGS_2_2(X) X(0, 1, true, true) X(0, 0, false, true) X(1, 0, true, false)
#define TY_MEETINGS_3_3(X) \
  X(0, 2, true, true)      \
  X(0, 1, false, true) X(1, 1, true, false) X(1, 0, false, true) X(2, 0, true, false) X(0, 0, true, false)

/* What one product of these registers (side 32), or of two of them (side 16), adds to c, whose rows are c_row numbers
 * apart, without the instructions. */
static inline void ty_tiles_plainly(int64_t side, const uint32_t *a, int64_t a_apart, int64_t a_row, const uint32_t *b,
                                    int64_t b_apart, int64_t b_row, float *c, int64_t c_row) {
  for (int64_t i = 0; i < side; i++)
    for (int64_t u = 0; u < TY_TILE; u++) {
      uint32_t x = a[i / TY_TILE * a_apart + i % TY_TILE * a_row + u];
      for (int64_t j = 0; j < side; j++) {
        uint32_t y = b[j / TY_TILE * b_apart + u * b_row + j % TY_TILE];
        float *sum = c + i * c_row + j;
        *sum += ty_bf16_to_f32((uint16_t)x) * ty_bf16_to_f32((uint16_t)y);
        *sum += ty_bf16_to_f32((uint16_t)(x >> 16)) * ty_bf16_to_f32((uint16_t)(y >> 16));
      }
    }
}

/* The number of bf16 nearest to each of 16 numbers, in the upper half; x keeps what is missing. */
TILE_INLINE __m512i ty_bf16_part(__m512i *x) {
  __m512i part = _mm512_and_si512(_mm512_add_epi32(*x, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32((int)0xffff0000));
  *x = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(*x), _mm512_castsi512_ps(part)));
  return part;
}

/* Twice the bits of the sizes between which f32 is the sum of three such numbers, to the last bit: from 2^127 on there
 * is none, and below 2^-89 the instructions take the small ones for 0. */
#define TY_PARTS_LARGE 0xfe000000u
#define TY_PARTS_TINY 0x26000000u

/* to[j * stride] = element j of all 16 rows, for 16 rows of 16 elements of 32 bits. */
static inline void ty_tile_turn(const __m512i *from, uint32_t *to, int64_t stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) { /* b[i + q]: element q of each four, of rows i .. i + 3 */
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    __m512i x = _mm512_shuffle_i32x4(b[q], b[4 + q], 0x88), y = _mm512_shuffle_i32x4(b[8 + q], b[12 + q], 0x88);
    __m512i u = _mm512_shuffle_i32x4(b[q], b[4 + q], 0xdd), v = _mm512_shuffle_i32x4(b[8 + q], b[12 + q], 0xdd);
    _mm512_storeu_si512(to + q * stride, _mm512_shuffle_i32x4(x, y, 0x88));
    _mm512_storeu_si512(to + (q + 4) * stride, _mm512_shuffle_i32x4(u, v, 0x88));
    _mm512_storeu_si512(to + (q + 8) * stride, _mm512_shuffle_i32x4(x, y, 0xdd));
    _mm512_storeu_si512(to + (q + 12) * stride, _mm512_shuffle_i32x4(u, v, 0xdd));
  }
}

#endif
