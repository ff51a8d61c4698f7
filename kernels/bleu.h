/* BLEU, for every backend: its parameters, and the score of counted n-grams. Papineni et al. 2002; smoothing: Chen and Cherry 2014. */
#ifndef TY_KERNELS_BLEU_H
#define TY_KERNELS_BLEU_H

#include <float.h>

#include "base.h"
#include "scalar.h"

typedef enum ty_bleu_smoothing {
  TY_BLEU_NONE,
  TY_BLEU_EPSILON,
  TY_BLEU_ADD_ONE,
  TY_BLEU_GEOMETRIC,
  TY_BLEU_LENGTH
} ty_bleu_smoothing;

typedef struct ty_p_bleu {
  int64_t order, padding; /* the longest n-grams; the id that ends a row without a length */
  ty_bleu_smoothing smoothing;
  bool corpus; /* one score, of the counts of all sentences */
  double epsilon, k;
} ty_p_bleu;

/* A row of counts: matches of each order, n-grams of each order, the candidate's length and that of the reference
 * which is closest to it. */
static inline int64_t ty_bleu_width(const ty_p_bleu *p) { return 2 * p->order + 2; }

/* Whether a reference of `length` goes before one of `closest`; of two that are equally close the shorter one does. */
TY_INLINE bool ty_bleu_closer(int64_t length, int64_t closest, int64_t candidate) {
  int64_t a = length < candidate ? candidate - length : length - candidate;
  int64_t b = closest < candidate ? candidate - closest : closest - candidate;
  return a < b || (a == b && length < closest);
}

/* weights: of each order, or NULL for equal ones. An order whose precision stays 0 is left out of the mean, as NLTK
 * does, and one without smoothing counts as the smallest number, which makes the score 0 for all purposes. */
TY_INLINE double ty_bleu_score(const int64_t *counts, const double *weights, const ty_p_bleu *p) {
  int64_t order = p->order, length = counts[2 * order], closest = counts[2 * order + 1];
  if (counts[0] == 0) return 0; /* no longer n-gram matches either */
  double sum = 0, share = 1;    /* share: halved for each order without a match */
  for (int64_t n = 0; n < order; n++) {
    double matches = (double)counts[n], total = counts[order + n] > 1 ? (double)counts[order + n] : 1;
    double precision = matches / total;
    if (p->smoothing == TY_BLEU_ADD_ONE && n > 0) {
      precision = (matches + 1) / (total + 1);
    } else if (matches == 0) {
      share /= 2;
      if (p->smoothing == TY_BLEU_NONE) precision = DBL_MIN;
      if (p->smoothing == TY_BLEU_EPSILON) precision = p->epsilon / total;
      if (p->smoothing == TY_BLEU_GEOMETRIC) precision = share / total;
      if (p->smoothing == TY_BLEU_LENGTH && length > 1) precision = share * log((double)length) / p->k / total;
    }
    if (precision > 0) sum += (weights ? weights[n] : 1 / (double)order) * log(precision);
  }
  return (length > closest ? 1 : exp(1 - (double)closest / (double)length)) * exp(sum);
}

#endif
