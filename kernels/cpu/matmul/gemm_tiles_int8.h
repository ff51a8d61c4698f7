/* A panel's part in a tile of gemm_blocked.h for gemm_tiles_int8.c; included there. */

static void NAME(panel_of_tile)(const ty_gemm *g, NAME(place) * at) {
  int32_t space[MR * NR] __attribute__((aligned(64)));
  for (int64_t i = at->i0; i < at->i1; i += MR) {
    int64_t mr = MIN2(MR, at->i1 - i), rows = (at->i1 - at->i0 + MR - 1) / MR * MR;
    int32_t *c = at->sums ? at->sums + (at->j - at->j0) * rows + (i - at->i0) * NR : space;
    uint32_t *a = at->packed_a + (i - at->i0) * at->kc;
    if (at->j == at->j0) pack_rows(g, i, mr, at->k0, at->kc, a);
    (ty_tiles() == TY_NATIVE_TILES ? native : plain)(at->kc / TY_TILE, a, at->b, c, g->signed_bytes, at->k0 > 0);
    if (!at->last) continue;
    int32_t *to = (int32_t *)g->c + i * g->c_row + at->j;
    for (int64_t r = 0; r < mr; r++, to += g->c_row, c += NR)
      for (int64_t half = 0; half < at->nc; half += TY_TILE)
        _mm512_mask_storeu_epi32(to + half, (__mmask16)first_bytes(MIN2(at->nc - half, TY_TILE)),
                                 _mm512_loadu_si512(c + half));
  }
}
