/* Panels of A and B in units of GROUP elements, neighbours in k (two of bf16 or four bytes), in a uint32_t; what is
 * missing past the end of k is 0. Included with PIECE, the type of an element, and FLIP_A(g), a mask of the top bits of
 * a unit that change in A. */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE_UNITS(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE_UNITS(x, y, ...) __builtin_shuffle(x, y, (__typeof__(x)){ __VA_ARGS__ })
#endif

typedef uint32_t NAME(four) __attribute__((vector_size(16), aligned(1), may_alias));
enum { NAME(bits) = 8 * sizeof(PIECE) };

/* A row of units from GROUP rows of elements side by side. */
#if GROUP == 2
static inline void NAME(weave)(const PIECE *restrict s, int64_t row, int64_t columns, uint32_t flip,
                               uint32_t *restrict d) {
  for (int64_t j = 0; j < columns; j++) d[j] = ((uint32_t)s[j] | (uint32_t)s[row + j] << 16) ^ flip;
}
#else
typedef uint8_t NAME(bytes) __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t NAME(shorts) __attribute__((vector_size(16)));
static inline NAME(shorts) NAME(interleaved)(NAME(bytes) a, NAME(bytes) b, int half) {
  return (NAME(shorts))(half ? SHUFFLE_UNITS(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                             : SHUFFLE_UNITS(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
}

static inline void NAME(weave)(const PIECE *restrict s, int64_t row, int64_t columns, uint32_t flip,
                               uint32_t *restrict d) {
  int64_t j = 0;
  for (; j + 16 <= columns; j += 16) {
    NAME(bytes) r[4];
    for (int q = 0; q < 4; q++) r[q] = *(const NAME(bytes) *)(s + q * row + j);
    for (int half = 0; half < 2; half++) {
      NAME(shorts) x = NAME(interleaved)(r[0], r[1], half), y = NAME(interleaved)(r[2], r[3], half);
      *(NAME(four) *)(d + j + 8 * half) = (NAME(four))SHUFFLE_UNITS(x, y, 0, 8, 1, 9, 2, 10, 3, 11) ^ flip;
      *(NAME(four) *)(d + j + 8 * half + 4) = (NAME(four))SHUFFLE_UNITS(x, y, 4, 12, 5, 13, 6, 14, 7, 15) ^ flip;
    }
  }
  for (; j < columns; j++)
    d[j] = ((uint32_t)s[j] | (uint32_t)s[row + j] << 8 | (uint32_t)s[2 * row + j] << 16 |
            (uint32_t)s[3 * row + j] << 24) ^
           flip;
}
#endif

/* dst[u * stride + j] = the unit of elements src[(GROUP u + q) * row + j * column], q < GROUP, of which `elements` exist
 * down a column. */
static void NAME(pack)(const PIECE *restrict src, int64_t row, int64_t column, int64_t elements, int64_t columns,
                       uint32_t flip, uint32_t *restrict dst, int64_t stride) {
  int64_t whole = elements / GROUP, u = 0;
  if (column == 1) {
    for (; u < whole; u++) NAME(weave)(src + u * GROUP * row, row, columns, flip, dst + u * stride);
  } else if (row == 1) {
    NAME(transpose_rows)(src, column * (int64_t)sizeof(PIECE), columns, whole, (NAME(loose) *)dst, stride);
    u = whole;
    for (int64_t i = 0; flip && i < whole * columns; i++) dst[i] ^= flip; /* of A alone, whose panels have no gaps */
  }
  for (; u * GROUP < elements; u++)
    for (int64_t j = 0; j < columns; j++) {
      uint32_t unit = 0;
      for (int q = 0; q < GROUP && u * GROUP + q < elements; q++)
        unit |= ((uint32_t)src[(u * GROUP + q) * row + j * column] << (q * NAME(bits))) ^
                (flip & (((uint32_t)1 << (NAME(bits) - 1)) << (q * NAME(bits))));
      dst[u * stride + j] = unit;
    }
}

/* Columns j0 .. j0+nc of B, units k0 .. k0+kc, as a panel [kc][NR] with zeros past nc. */
static void NAME(pack_b)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j0, int64_t nc, uint32_t *restrict dst) {
  int64_t first = k0 * GROUP, elements = MIN2(kc * GROUP, g->k - first);
  NAME(pack)
  ((const PIECE *)g->b + first * g->b_row + j0 * g->b_col, g->b_row, g->b_col, elements, nc, 0, dst, NR);
  if (nc < NR)
    for (int64_t i = 0; i < kc; i++)
      for (int64_t j = nc; j < NR; j++) dst[i * NR + j] = 0;
}

/* Rows i .. i+mr of A, units k0 .. k0+kc, as a panel [kc][mr]. */
static void NAME(pack_a)(const ty_gemm *g, int64_t i, int64_t mr, int64_t k0, int64_t kc, uint32_t *restrict dst) {
  int64_t first = k0 * GROUP, elements = MIN2(kc * GROUP, g->k - first);
  NAME(pack)
  ((const PIECE *)g->a + i * g->a_row + first * g->a_col, g->a_col, g->a_row, elements, mr, FLIP_A(g), dst, mr);
}
