/* Decimal numbers to and from text, exact in both directions and the same under every locale (strtod and printf are
 * not). */
#ifndef TY_IO_NUMBER_H
#define TY_IO_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* Reads [+-] digits [. digits] [e [+-] digits], or nan, inf, infinity in any case. Returns where it stopped, NULL
 * when there is no number or one of absurd length. Never reads at or past `end`. */
const char *ty_parse_number(const char *p, const char *end, double *out);
/* Digits with an optional sign that fit an int64_t, and nothing else, in [p, end). */
bool ty_parse_integer(const char *p, const char *end, int64_t *out);

/* The shortest text that reads back as the same finite number; it has a point or an exponent. Needs 32 bytes. */
int ty_format_number(char *out, double value);

#endif
