/* Decimal numbers: see number.h. */
#define _GNU_SOURCE
#include "number.h"
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { LONGEST = 1024 }; /* characters of a number; exact halves between doubles have up to 770 */

static locale_t plain;
static void make_plain(void) { plain = newlocale(LC_ALL_MASK, "C", (locale_t)0); }

/* What the fast path below cannot do, by the C library, which rounds correctly. */
static double slow(const char *p, size_t size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  char text[LONGEST];
  pthread_once(&once, make_plain);
  memcpy(text, p, size);
  text[size] = 0;
  return plain ? strtod_l(text, NULL, plain) : strtod(text, NULL);
}

static const char *word(const char *p, const char *end, const char *text) {
  size_t n = strlen(text);
  return (size_t)(end - p) >= n && strncasecmp(p, text, n) == 0 ? p + n : NULL;
}

const char *ty_parse_number(const char *start, const char *end, double *out) {
  static const double power[] = { 1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                  1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22 };
  const char *p = start;
  bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) p++;
  uint64_t mantissa = 0;
  int digits = 0, scale = 0, seen = 0;
  for (bool point = false; p < end; p++) {
    if (*p == '.' && !point) {
      point = true;
      continue;
    }
    unsigned d = (unsigned)*p - '0';
    if (d > 9) break;
    if (++seen == LONGEST) return NULL;
    if (mantissa || d) digits++; /* significant; past 19 the mantissa is not used */
    if (digits <= 19) mantissa = mantissa * 10 + d;
    scale -= point;
  }
  if (!seen) {
    const char *after;
    if ((after = word(p, end, "infinity")) || (after = word(p, end, "inf"))) *out = INFINITY;
    else if ((after = word(p, end, "nan"))) *out = NAN;
    else return NULL;
    if (negative) *out = -*out;
    return after;
  }
  int exponent = 0;
  if (p < end && (*p == 'e' || *p == 'E')) {
    const char *q = p + 1;
    bool down = q < end && *q == '-';
    if (q < end && (*q == '-' || *q == '+')) q++;
    if (q < end && *q >= '0' && *q <= '9') {
      for (; q < end && *q >= '0' && *q <= '9'; q++)
        if (exponent < 100000) exponent = exponent * 10 + (*q - '0');
      if (down) exponent = -exponent;
      p = q;
    }
  }
  exponent += scale;
  /* A mantissa and a power of ten that are both exact doubles: one correctly rounded operation. Clinger, How to read
   * floating point numbers accurately, 1990. */
  if (digits <= 19 && mantissa <= (1ull << 53) && exponent >= -22 && exponent <= 22) {
    double m = (double)mantissa;
    *out = exponent < 0 ? m / power[-exponent] : m * power[exponent];
    if (negative) *out = -*out;
    return p;
  }
  if (p - start >= LONGEST) return NULL;
  *out = slow(start, (size_t)(p - start));
  return p;
}

bool ty_parse_integer(const char *p, const char *end, int64_t *out) {
  bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) p++;
  if (p == end) return false;
  uint64_t n = 0, most = (uint64_t)INT64_MAX + negative;
  for (; p < end; p++) {
    unsigned d = (unsigned)*p - '0';
    if (d > 9 || n > (most - d) / 10) return false;
    n = n * 10 + d;
  }
  *out = negative ? (int64_t)(0 - n) : (int64_t)n;
  return true;
}

int ty_format_number(char *out, double value) {
  int n = 0;
  for (int precision = 15; precision <= 17; precision++) {
    n = snprintf(out, 32, "%.*g", precision, value);
    for (char *p = out; *p; p++)
      if (!strchr("0123456789+-e", *p)) *p = '.'; /* the locale's comma */
    double back;
    if (ty_parse_number(out, out + n, &back) && back == value) break;
  }
  if (!strpbrk(out, ".e")) n += snprintf(out + n, 3, ".0");
  return n;
}
