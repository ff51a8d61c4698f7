/* Rows of x as numbers of bf16 for quant_tiles.c: bytes times scales, or, of formats whose few rows are multiplied in
 * f32 as well, the numbers themselves. */

INLINE bool rounds_to_bytes(ty_dtype dtype) { return dtype != TY_Q2_K && dtype != TY_Q3_K; }
INLINE bool to_powers(ty_dtype dtype) { return dtype == TY_Q4_0 || dtype == TY_Q4_K; }

/* Of sixteen rows, `there` of which exist, elements [k, k + 32 n): unit u of row r of step s goes to
 * to[s * step + u * PANEL + r]. True: some are too far from 1. */
INLINE bool put_rows(const ty_quant_product *p, const int parts, int64_t row, int64_t there, int64_t k, int64_t n,
                     uint32_t *to, int64_t step) {
  const bool bytes = rounds_to_bytes(p->dtype), power = to_powers(p->dtype);
  uint32_t units[GROUPS_AT_ONCE][2][TY_TILE][TY_TILE] __attribute__((aligned(64)));
  bool far = false;
  for (int64_t r = 0; r < TY_TILE; r++) {
    if (r >= there) {
      for (int64_t s = 0; s < n; s++)
        for (int i = 0; i < parts; i++) _mm512_store_si512(units[s][i][r], _mm512_setzero_si512());
      continue;
    }
    const float *x = p->x + (row + r) * p->k + k;
    float part[32 * GROUPS_AT_ONCE] = { 0 };
    if (n < GROUPS_AT_ONCE) x = memcpy(part, x, sizeof *x * (size_t)(32 * n));
    coded_groups c;
    if (bytes) code_groups(x, power, &c);
    for (int64_t s = 0; s < n; s++, x += 32) {
      __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
      if (bytes) {
        __m512 scale = _mm512_set1_ps(c.scale[s]);
        far |= c.scale[s] > FAR_X;
        x0 = _mm512_mul_ps(bytes_to_f32(c.q[s], true), scale);
        x1 = _mm512_mul_ps(bytes_to_f32(c.q[s] + 16, true), scale);
      } else {
        __m512 most = _mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1));
        far |= _mm512_cmp_ps_mask(most, _mm512_set1_ps(FAR_X), _CMP_GT_OQ) != 0;
      }
      put_units(parts, x0, x1, units[s][0][r], TY_TILE * TY_TILE);
    }
  }
  for (int64_t s = 0; s < n; s++)
    for (int i = 0; i < parts; i++)
      ty_tile_turn((const __m512i *)(const void *)units[s][i], to + s * step + i * STEP, PANEL);
  return far;
}
