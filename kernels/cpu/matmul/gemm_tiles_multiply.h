/* A panel's part in a tile of gemm_blocked.h on the CPU's tiles of sums; included there. Sums stay apart from C until all
 * of k is in them: rows of C that lie 4 KB apart fall into the same few lines of a cache. Asking memory for the panels to
 * come, as the micro-kernels of vectors do, was slower than leaving it to the hardware. */

/* Rows i .. i+mr of A times the panel: c [MR][NR]. */
static void NAME(multiply)(const ty_gemm *g, NAME(place) * at, int64_t i, int64_t mr, float *c, bool add) {
  uint32_t *a = (at->packed_a + (i - at->i0) * at->kc)->plane;
  bool *mark = &at->marks[(i - at->i0) / MR];
  if (at->j == at->j0) *mark = NAME(pack_rows)(g, i, mr, at->k0, at->kc, a);
#if PLANES > 1
  if (*mark || (at->b - NR)->plane[0]) {
    NAME(odd_block)(g, i, mr, at->k0, at->kc, at->j, at->nc, c, add);
    return;
  }
#endif
  (ty_tiles() == TY_NATIVE_TILES ? NAME(native) : NAME(plain))(at->kc / TY_TILE, a, at->b->plane, c, add);
}

/* All rows of the tile times one panel of B. */
static void NAME(panel_of_tile)(const ty_gemm *g, NAME(place) * at) {
  float space[MR * NR] __attribute__((aligned(64)));
  for (int64_t i = at->i0; i < at->i1; i += MR) {
    int64_t mr = MIN2(MR, at->i1 - i), rows = (at->i1 - at->i0 + MR - 1) / MR * MR;
    float *sums = at->sums ? at->sums + (at->j - at->j0) * rows + (i - at->i0) * NR : space;
    /* Several products make one of f32: they are added up for each block of k alone. */
    float *c = PLANES > 1 && at->k0 > 0 ? space : sums;
    NAME(multiply)(g, at, i, mr, c, PLANES == 1 && at->k0 > 0);
    for (int q = 0; c != sums && q < MR * NR; q++) sums[q] += c[q];
    if (!at->last) continue;
    if (!g->add) NAME(finish)(g, i, mr, at->j, at->nc, sums, NR);
    else
      for (int64_t r = 0; r < mr; r++) {
        float *to = (float *)g->c + (i + r) * g->c_row + at->j;
        for (int64_t s = 0; s < at->nc; s++) to[s] += sums[r * NR + s];
      }
  }
}
