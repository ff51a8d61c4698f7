/* A panel's part in a tile of gemm_blocked.h for quant_tiles_parts.h; included there. */

static void NAME(panel_of_tile)(const ty_gemm *g, NAME(place) * at) {
  float space[PANEL * PANEL] __attribute__((aligned(64)));
  const ty_quant_product *p = g->a;
  for (int64_t i = at->i0; i < at->i1; i += PANEL) {
    int64_t mr = MIN2(PANEL, at->i1 - i), rows = (at->i1 - at->i0 + PANEL - 1) / PANEL * PANEL;
    float *c = at->sums ? at->sums + (at->j - at->j0) * rows + (i - at->i0) * PANEL : space;
    uint32_t *w = (at->packed_a + (i - at->i0) * at->kc)->room;
    if (at->j == at->j0) NAME(pack_rows)(p, i, mr, at->k0, at->kc, w);
    (ty_tiles() == TY_NATIVE_TILES ? NAME(native) : NAME(plain))(at->kc / TY_TILE, w, at->b->room, c, at->k0 > 0);
    if (at->last) put_turned(p, i, mr, at->j, at->nc, c);
  }
}
