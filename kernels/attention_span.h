/* Which keys a query of attention may see, masks aside, for every backend. */
#ifndef TY_KERNELS_ATTENTION_SPAN_H
#define TY_KERNELS_ATTENTION_SPAN_H

#include "base.h"
#include "params.h"
#include "scalar.h"

typedef struct ty_reach {
  int64_t s, shift, window, sinks; /* shift: the key at which query 0 stands; window < 0: none */
  bool causal;
  const int64_t *begins; /* NULL, or where packed sequences begin and the last one ends */
  int64_t step, count;
} ty_reach;

/* Keys [low, high) without [gap_low, gap_high). */
typedef struct ty_span {
  int64_t low, high, gap_low, gap_high;
} ty_span;

static inline ty_reach ty_reach_of(int64_t t, int64_t s, const ty_p_attention *p, const ty_view *begins) {
  ty_reach r = { .s = s,
                 .shift = p->upper_left ? 0 : s - t,
                 .window = p->window < s + t ? p->window : -1,
                 .sinks = p->sinks < s ? p->sinks : s,
                 .causal = p->causal,
                 .begins = NULL,
                 .step = 0,
                 .count = 0 };
  if (!begins) return r;
  r.begins = (const int64_t *)begins->data;
  r.step = begins->stride[0];
  r.count = begins->size[0];
  return r;
}

/* Bounds never fall from one position to the next. A span may be empty, with low >= high. */
TY_INLINE ty_span ty_span_of(const ty_reach *r, int64_t pos) {
  int64_t here = pos + r->shift; /* the key that stands at the query's own position */
  int64_t from = 0, to = r->s;
  if (r->begins) {
    int64_t before = 0, after = r->count; /* how many sequences begin up to here */
    while (before < after) {
      int64_t middle = (before + after) / 2;
      if (r->begins[middle * r->step] <= here) before = middle + 1;
      else after = middle;
    }
    from = r->begins[(before ? before - 1 : 0) * r->step];
    to = before && before < r->count ? r->begins[before * r->step] : from;
    from = from < 0 ? 0 : from < r->s ? from : r->s;
    to = to < 0 ? 0 : to < r->s ? to : r->s;
  }
  if (r->causal && here + 1 < to) to = here + 1;
  ty_span x = { from, to, 0, 0 };
  if (r->window < 0) return x;
  if (here - r->window > from) x.low = here - r->window;
  if (here + r->window + 1 < to) x.high = here + r->window + 1;
  if (r->sinks <= 0) return x;
  int64_t sunk = from + r->sinks < to ? from + r->sinks : to;
  if (sunk < x.low) x.gap_low = sunk, x.gap_high = x.low;
  x.low = from;
  if (x.high < sunk) x.high = sunk;
  return x;
}

/* Whether begins[i] is what it may be: no less than the one before, at most s. */
TY_INLINE bool ty_reach_rises(const ty_reach *r, int64_t i) {
  int64_t x = r->begins[i * r->step];
  return x >= (i ? r->begins[(i - 1) * r->step] : 0) && x <= r->s;
}

/* Packed sequences begin where they can: false after ty_fail(). */
static inline bool ty_reach_check(const ty_reach *r) {
  for (int64_t i = 0; r->begins && i < r->count; i++)
    if (!ty_reach_rises(r, i))
      return ty_fail(TY_EINDEX, "cu_seqlens: index %lld is out of range for size %lld, or less than the one before",
                     (long long)r->begins[i * r->step], (long long)r->s + 1);
  return true;
}

#endif
