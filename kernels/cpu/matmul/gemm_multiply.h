/* A panel's part in a tile of gemm_blocked.h by the micro-kernels of gemm_micro.h; included there. */

_Static_assert(KC / TY_AHEAD_STEP * TY_AHEAD_FAR <= TY_AHEAD_MOST, "a panel asks for more far lines than there are");

/* The source of the panel of A that follows the one at row i, which is packed next, for the micro-kernel to ask for. */
static void NAME(ahead_a)(const ty_gemm *g, ty_ahead *ahead, int64_t i, int64_t i0, int64_t k0) {
  int64_t size = ELEMENT(g), at = k0 * GROUP * g->a_col;
  if (g->a_row == 1) { /* a line has rows of several panels: each asks for its share of the lines of the next ones */
    int64_t panels = 64 / (MR * size), index = (i - i0) / MR;
    if (panels < 1) panels = 1;
    int64_t row = i0 + (index / panels + 1) * panels * MR, step = panels > 2 * GROUP ? panels : 2 * GROUP;
    ahead->a = (const char *)g->a + (at + row + index % panels * g->a_col) * size;
    ahead->a_row = step * g->a_col * size;
    ahead->a_next = 0;
  } else {
    ahead->a = (const char *)g->a + (at + (i + MR) * g->a_row) * size;
    ahead->a_row = g->a_row * size;
    ahead->a_next = TY_AHEAD_STEP * GROUP * size - TY_AHEAD_STEP / 2 * ahead->a_row;
  }
}

#ifdef STRIDED
/* The rows of a tile of A that is read where it lies, one panel ahead. */
static void NAME(fetch_a)(const UNIT *a, int64_t a_row, int64_t k) {
  for (int64_t r = 0; r < MR; r++)
    for (int64_t p = 0; p < k; p += 64 / (int64_t)sizeof(UNIT)) __builtin_prefetch(a + r * a_row + p, 0, 2);
}
#endif

/* Puts sums of a panel that is no whole number of vectors wide to C. */
static void NAME(put_edge)(const ty_gemm *g, const REAL *edge, int64_t mr, int64_t nc, bool add, REAL *to) {
  for (int64_t r = 0; r < mr; r++)
    for (int64_t s = 0; s < nc; s++)
      to[r * g->c_row + s] = add ? to[r * g->c_row + s] + edge[r * NR + s] : edge[r * NR + s];
}

/* Up to MR rows of A, from row i on, times the panel, to c. */
static inline void NAME(multiply)(const ty_gemm *g, NAME(place) * at, int64_t i, int64_t mr, REAL *c, int64_t c_row,
                                  bool onto, ty_ahead *ahead) {
  bool wide = at->nc > VL;
#ifdef STRIDED
  if (!at->packed_a) {
    const int64_t a_row = g->a_row / GROUP, a_col = GROUP > 1 ? 1 : g->a_col; /* units are neighbours */
    const UNIT *a = (const UNIT *)g->a + i * a_row + at->k0 * a_col;
    for (int r = 0; r < mr; r++) {
      __builtin_prefetch(c + r * c_row);
      __builtin_prefetch(c + r * c_row + NR - 1);
    }
    if (at->j == at->j0 && i + 2 * MR <= at->i1) NAME(fetch_a)(a + MR * a_row, a_row, at->kc);
    NAME(micro)[wide][mr - 1](at->kc, a, a_row, a_col, at->b, at->b_row, c, c_row, onto);
    return;
  }
#endif
  UNIT *a = at->packed_a + (i - at->i0) * at->kc;
  ahead->a = NULL;
  if (at->j == at->j0) {
    NAME(pack_a)(g, i, mr, at->k0, at->kc, a);
    if (i + MR < at->i1) NAME(ahead_a)(g, ahead, i, at->i0, at->k0);
  }
  ty_ahead_far(ahead, &at->next, at->share, at->kc, c);
  NAME(panels)[wide][mr - 1](at->kc, a, at->b, c, c_row, onto, ahead);
}

/* All rows of the tile times one panel of B. */
static void NAME(panel_of_tile)(const ty_gemm *g, NAME(place) * at) {
  REAL edge[MR * NR] __attribute__((aligned(64)));
  ty_ahead ahead;
  bool direct = at->nc == NR || at->nc == VL, finishes = at->last && NAME(finishes)(g);
  for (int64_t i = at->i0; i < at->i1; i += MR) {
    int64_t mr = MIN2(MR, at->i1 - i), c_row = g->c_row;
    REAL *to = (REAL *)g->c + i * c_row + at->j, *c = to;
    if (at->sums) {
      c = at->sums + (at->j - at->j0) * (at->i1 - at->i0) + (i - at->i0) * NR;
      c_row = NR;
    } else if (!direct || g->c_half) {
      c = edge;
      c_row = NR;
    }
    for (int64_t r = 0; g->c_half && finishes && r < mr; r++) /* the results come in while their sums are computed */
      __builtin_prefetch((const uint16_t *)g->c + (i + r) * g->c_row + at->j, 1);
    NAME(multiply)(g, at, i, mr, c, c_row, c != edge && at->add, &ahead);
    if (c == edge && !g->c_half) {
      NAME(put_edge)(g, edge, mr, at->nc, at->add, to);
      c = to;
      c_row = g->c_row;
    }
    if (finishes) NAME(finish)(g, i, mr, at->j, at->nc, c, c_row);
  }
}
