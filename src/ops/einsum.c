/* Einstein summation: diagonals and sums per operand, then pairs contracted from left to right as matrix products. */
#include <stdio.h>
#include <string.h>

#include "op.h"

/* Labels: 0-25 a-z, 26-51 A-Z, then the dimensions under "...", counted from the last. */
enum { LETTERS = 52, LABELS = LETTERS + TY_MAX_DIMS };
typedef uint64_t label_set;
#define BIT(label) ((label_set)1 << (label))

typedef struct term {
  ty_tensor *t;
  int n;
  int label[LABELS];
} term;

typedef struct sum {
  ty_call *c;
  const char *equation;
  int64_t size[LABELS];
  int dots; /* most dimensions under "..." */
} sum;

static label_set labels_of(const term *x) {
  label_set s = 0;
  for (int i = 0; i < x->n; i++) s |= BIT(x->label[i]);
  return s;
}

static bool fail(const sum *s, const char *text) {
  return ty_op_fail(s->c, TY_EINVAL, "equation: \"%s\": %s", s->equation, text);
}

static int letter(char ch) { return ch >= 'a' && ch <= 'z' ? ch - 'a' : ch >= 'A' && ch <= 'Z' ? ch - 'A' + 26 : -1; }
static const char *label_name(int label) {
  static const char names[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  static _Thread_local char text[4];
  if (label >= LETTERS) return "...";
  snprintf(text, sizeof text, "%c", names[label]);
  return text;
}

/* Reads one term up to ',', '-' or the end; `dots` dimensions stand for "...". */
static bool read_term(const sum *s, const char **at, int dots, term *x, bool *has_dots) {
  x->n = 0;
  *has_dots = false;
  for (;; (*at)++) {
    char ch = **at;
    if (ch == ' ') continue;
    if (ch == '\0' || ch == ',' || ch == '-') return true;
    if (x->n + (dots > 0 ? dots : 1) > LABELS) return fail(s, "too many labels in one term");
    if (ch == '.') {
      if (strncmp(*at, "...", 3) != 0 || *has_dots) return fail(s, "expected \"...\" at most once per term");
      *has_dots = true;
      *at += 2;
      for (int i = 0; i < dots; i++) x->label[x->n++] = LETTERS + dots - 1 - i;
    } else if (letter(ch) >= 0) {
      x->label[x->n++] = letter(ch);
    } else {
      char text[64];
      snprintf(text, sizeof text, "unexpected character '%c'", ch);
      return fail(s, text);
    }
  }
}

/* Takes diagonals where a label repeats, and drops sizes of 1 where another operand is wider. */
static bool simplify(const sum *s, term *x) {
  for (int i = 0; i < x->n; i++) {
    for (int j = i + 1; j < x->n; j++) {
      if (x->label[j] != x->label[i]) continue;
      int label = x->label[i];
      x->t = ty_diagonal(x->t, 0, i, j);
      if (!x->t) return false;
      memmove(x->label + j, x->label + j + 1, sizeof *x->label * (size_t)(x->n - j - 1));
      memmove(x->label + i, x->label + i + 1, sizeof *x->label * (size_t)(x->n - i - 2));
      x->label[x->n - 2] = label;
      x->n--;
      i = -1;
      break;
    }
  }
  for (int i = x->n - 1; i >= 0; i--) {
    if (x->t->v.size[i] != 1 || s->size[x->label[i]] == 1) continue;
    x->t = ty_squeeze(x->t, TY_INTS(i));
    if (!x->t) return false;
    memmove(x->label + i, x->label + i + 1, sizeof *x->label * (size_t)(x->n - i - 1));
    x->n--;
  }
  return true;
}

/* Sums over the labels of x outside `keep`. */
static bool sum_out(term *x, label_set keep) {
  int64_t dims[TY_MAX_DIMS];
  int n = 0, left = 0;
  for (int i = 0; i < x->n; i++) {
    if (keep & BIT(x->label[i])) x->label[left++] = x->label[i];
    else dims[n++] = i;
  }
  x->n = left;
  if (n) x->t = ty_sum(x->t, (ty_ints){ dims, n }, false, ty_dtype_of(x->t));
  return x->t != NULL;
}

/* x with the dimensions `order` (labels, each of x once). */
static ty_tensor *ordered(const term *x, const int *order, int n) {
  int64_t dims[TY_MAX_DIMS];
  bool same = true;
  for (int i = 0; i < n; i++) {
    for (int d = 0; d < n; d++)
      if (x->label[d] == order[i]) dims[i] = d;
    same = same && dims[i] == i;
  }
  return same ? x->t : ty_permute(x->t, (ty_ints){ dims, n });
}

/* Product of two terms without a common label to sum over: broadcast to the labels of both. */
static bool multiply(const sum *s, term *x, const term *y) {
  term r = { .n = 0 };
  for (int i = 0; i < x->n; i++) r.label[r.n++] = x->label[i];
  label_set have = labels_of(x);
  for (int i = 0; i < y->n; i++)
    if (!(have & BIT(y->label[i]))) r.label[r.n++] = y->label[i];
  if (r.n > TY_MAX_DIMS) return fail(s, "an intermediate product has more than 8 dimensions");
  ty_tensor *part[2];
  for (int p = 0; p < 2; p++) {
    const term *t = p ? y : x;
    label_set in = labels_of(t);
    int order[TY_MAX_DIMS], n = 0;
    int64_t size[TY_MAX_DIMS];
    for (int i = 0; i < r.n; i++) {
      bool has = in & BIT(r.label[i]);
      size[i] = has ? s->size[r.label[i]] : 1;
      if (has) order[n++] = r.label[i];
    }
    part[p] = ty_reshape(ordered(t, order, n), (ty_ints){ size, r.n });
  }
  r.t = ty_mul(part[0], part[1]);
  *x = r;
  return r.t != NULL;
}

/* x = x times y summed over the labels outside `keep`: [batch, rows, summed] x [batch, summed, columns]. */
static bool contract(const sum *s, term *x, const term *y, label_set keep) {
  label_set in_x = labels_of(x), in_y = labels_of(y), both = in_x & in_y;
  if (!(both & ~keep)) return multiply(s, x, y);
  int batch[LABELS], rows[LABELS], columns[LABELS], summed[LABELS], b = 0, m = 0, n = 0, k = 0;
  int64_t nb = 1, nm = 1, nn = 1, nk = 1;
  for (int i = 0; i < x->n; i++) {
    int label = x->label[i];
    int64_t size = s->size[label];
    if (!(in_y & BIT(label))) rows[m++] = label, nm *= size;
    else if (keep & BIT(label)) batch[b++] = label, nb *= size;
    else summed[k++] = label, nk *= size;
  }
  for (int i = 0; i < y->n; i++)
    if (!(in_x & BIT(y->label[i]))) columns[n++] = y->label[i], nn *= s->size[y->label[i]];
  term r = { .n = b + m + n };
  if (r.n > TY_MAX_DIMS) return fail(s, "an intermediate product has more than 8 dimensions");
  int order[LABELS];
  memcpy(order, batch, sizeof *order * (size_t)b);
  memcpy(order + b, rows, sizeof *order * (size_t)m);
  memcpy(order + b + m, summed, sizeof *order * (size_t)k);
  ty_tensor *left = ty_reshape(ordered(x, order, b + m + k), TY_INTS(nb, nm, nk));
  memcpy(order + b, summed, sizeof *order * (size_t)k);
  memcpy(order + b + k, columns, sizeof *order * (size_t)n);
  ty_tensor *right = ty_reshape(ordered(y, order, b + k + n), TY_INTS(nb, nk, nn));
  memcpy(r.label, batch, sizeof *order * (size_t)b);
  memcpy(r.label + b, rows, sizeof *order * (size_t)m);
  memcpy(r.label + b + m, columns, sizeof *order * (size_t)n);
  int64_t size[TY_MAX_DIMS];
  for (int i = 0; i < r.n; i++) size[i] = s->size[r.label[i]];
  r.t = ty_reshape(ty_matmul(left, right), (ty_ints){ size, r.n });
  *x = r;
  return r.t != NULL;
}

static bool set_sizes(sum *s, const term *x, int operand) {
  for (int i = 0; i < x->n; i++) {
    int64_t have = s->size[x->label[i]], size = x->t->v.size[i];
    if (have >= 0 && size != have && size != 1 && have != 1)
      return ty_op_fail(s->c, TY_EINVAL, "equation: \"%s\": label %s has size %lld before and %lld in operand %d %s",
                        s->equation, label_name(x->label[i]), (long long)have, (long long)size, operand,
                        ty_describe(x->t));
    if (have < 0 || have == 1) s->size[x->label[i]] = size;
  }
  /* a label that repeats within one operand names a diagonal: its sizes must be equal */
  for (int i = 0; i < x->n; i++)
    for (int j = i + 1; j < x->n; j++)
      if (x->label[i] == x->label[j] && x->t->v.size[i] != x->t->v.size[j])
        return ty_op_fail(s->c, TY_EINVAL,
                          "equation: \"%s\": label %s repeats with sizes %lld and %lld in operand %d %s", s->equation,
                          label_name(x->label[i]), (long long)x->t->v.size[i], (long long)x->t->v.size[j], operand,
                          ty_describe(x->t));
  return true;
}

/* "...", then the labels that occur once: capitals, then small letters, as in ASCII. */
static void implicit_output(const sum *s, const term *terms, int n, term *out) {
  int seen[LABELS] = { 0 };
  for (int i = 0; i < n; i++)
    for (int j = 0; j < terms[i].n; j++) seen[terms[i].label[j]]++;
  out->n = 0;
  for (int i = 0; i < s->dots; i++) out->label[out->n++] = LETTERS + s->dots - 1 - i;
  for (int i = 26; i < 52; i++)
    if (seen[i] == 1) out->label[out->n++] = i;
  for (int i = 0; i < 26; i++)
    if (seen[i] == 1) out->label[out->n++] = i;
}

static bool check_output(const sum *s, const term *out, label_set inputs) {
  label_set have = 0;
  for (int i = 0; i < out->n; i++) {
    label_set bit = BIT(out->label[i]);
    char text[80];
    if (have & bit) {
      snprintf(text, sizeof text, "label %s is named twice in the output", label_name(out->label[i]));
      return fail(s, text);
    }
    if (!(inputs & bit)) {
      snprintf(text, sizeof text, "output label %s is in no operand", label_name(out->label[i]));
      return fail(s, text);
    }
    have |= bit;
  }
  return out->n <= TY_MAX_DIMS || fail(s, "the output has more than 8 dimensions");
}

enum { MAX_OPERANDS = 32 };

static bool read_equation(sum *s, ty_tensors xs, term *terms, term *out) {
  const char *at = s->equation;
  bool dots;
  for (int i = 0; i < xs.n; i++) { /* first for the dimensions under "..." */
    if (i && *at++ != ',') return fail(s, "fewer terms than operands");
    if (!read_term(s, &at, 0, &terms[i], &dots)) return false;
    int under = xs.v[i]->v.ndim - terms[i].n;
    if (under < 0 || (under > 0 && !dots))
      return ty_op_fail(s->c, TY_EINVAL, "equation: \"%s\": term %d names %d dimensions, operand %d is %s", s->equation,
                        i, terms[i].n, i, ty_describe(xs.v[i]));
    if (under > s->dots) s->dots = under;
  }
  if (*at == ',') return fail(s, "more terms than operands");
  at = s->equation;
  label_set inputs = 0;
  for (int i = 0; i < xs.n; i++) {
    const char *start = at += i > 0;
    read_term(s, &at, 0, &terms[i], &dots);
    at = start;
    if (!read_term(s, &at, xs.v[i]->v.ndim - terms[i].n, &terms[i], &dots)) return false;
    terms[i].t = xs.v[i];
    inputs |= labels_of(&terms[i]);
    if (!set_sizes(s, &terms[i], i)) return false;
  }
  if (*at == '\0') {
    implicit_output(s, terms, xs.n, out);
    return out->n <= TY_MAX_DIMS || fail(s, "the output has more than 8 dimensions");
  }
  if (strncmp(at, "->", 2) != 0) return fail(s, "expected \"->\"");
  at += 2;
  if (!read_term(s, &at, s->dots, out, &dots)) return false;
  if (*at) return fail(s, "unexpected text after the output");
  return check_output(s, out, inputs);
}

bool fwd_einsum(ty_call *c) {
  const ty_einsum_args *a = TY_ARGS(einsum, c);
  ty_tensors xs = a->xs.ts;
  sum s = { .c = c, .equation = a->equation.s };
  term terms[MAX_OPERANDS], out = { .n = 0 };
  for (int i = 0; i < LABELS; i++) s.size[i] = -1;
  if (xs.n < 1 || xs.n > MAX_OPERANDS)
    return ty_op_fail(c, TY_EINVAL, "xs: expected 1 to %d operands, got %d", MAX_OPERANDS, xs.n);
  if (!read_equation(&s, xs, terms, &out)) return false;
  label_set final = labels_of(&out);
  for (int i = 0; i < xs.n; i++) {
    if (!simplify(&s, &terms[i])) return false;
  }
  for (int i = 0; i < xs.n; i++) { /* sums that concern one operand alone */
    label_set others = final;
    for (int j = 0; j < xs.n; j++)
      if (j != i) others |= labels_of(&terms[j]);
    if (!sum_out(&terms[i], others)) return false;
  }
  term x = terms[0];
  for (int i = 1; i < xs.n; i++) {
    label_set keep = final;
    for (int j = i + 1; j < xs.n; j++) keep |= labels_of(&terms[j]);
    if (!contract(&s, &x, &terms[i], keep)) return false;
  }
  if (!sum_out(&x, final)) return false;
  return ty_out_set(c, 0, ordered(&x, out.label, out.n));
}
