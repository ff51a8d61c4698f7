/* Tables of numbers as text: comma-separated values and their relatives, to one tensor. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "formats.h"
#include "number.h"

enum { CELL_MOST = 1023 }; /* characters; a number of more has no value that it could not say in fewer */

typedef struct csv {
  const char *name;
  const ty_csv_options *options;
  const char *p, *end;
  int64_t line;
  int64_t columns; /* -1 until the first row */
} csv;

static bool __attribute__((format(printf, 3, 4))) fail(const csv *c, int64_t column, const char *format, ...) {
  char what[320];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "csv %s: line %lld, column %lld: %s", ty_quote_text(c->name), (long long)c->line,
                 (long long)column, what);
}

/* One line without its end; false at the end of the text. */
static bool next_line(csv *c, const char **start, const char **end) {
  if (c->p == c->end) return false;
  const char *newline = memchr(c->p, '\n', (size_t)(c->end - c->p));
  *start = c->p;
  *end = newline ? newline : c->end;
  c->p = newline ? newline + 1 : c->end;
  if (*end > *start && (*end)[-1] == '\r') --*end;
  c->line++;
  return true;
}

static bool fail_long(const csv *c, int64_t column, ptrdiff_t size) {
  return fail(c, column, "a cell of %lld characters; %d are the most", (long long)size, CELL_MOST);
}

static bool is_blank(const csv *c, char x) { return x == ' ' || (x == '\t' && c->options->delimiter != '\t'); }

/* The cell at *p: its text without blanks and outer quotes, *p past the delimiter, NULL after the last cell. Quotes
 * matter for names with delimiters in them. */
static bool next_cell(const csv *c, int64_t column, const char **p, const char *end, const char **from,
                      const char **to) {
  const char *s = *p, *stop;
  while (s < end && is_blank(c, *s)) s++;
  if (s < end && *s == '"') {
    const char *close = ++s;
    while (close < end && !(*close == '"' && !(close + 1 < end && close[1] == '"'))) close += *close == '"' ? 2 : 1;
    if (close >= end) return fail(c, column, "a quote is not closed");
    *from = s;
    *to = close;
    for (stop = close + 1; stop < end && is_blank(c, *stop); stop++) {}
    if (stop < end && *stop != c->options->delimiter) return fail(c, column, "text after the closing quote");
  } else if (c->options->delimiter == ' ') {
    for (stop = s; stop < end && !is_blank(c, *stop); stop++) {}
    *from = s;
    *to = stop;
    while (stop < end && is_blank(c, *stop)) stop++; /* several blanks separate like one */
    *p = stop < end ? stop : NULL;
    return *to - *from <= CELL_MOST || fail_long(c, column, *to - *from);
  } else {
    stop = memchr(s, c->options->delimiter, (size_t)(end - s));
    if (!stop) stop = end;
    *from = s;
    *to = stop;
    while (*to > s && is_blank(c, (*to)[-1])) --*to;
  }
  *p = stop < end ? stop + 1 : NULL;
  return *to - *from <= CELL_MOST || fail_long(c, column, *to - *from);
}

static bool read_number(const csv *c, int64_t column, const char *from, const char *to, double *out) {
  if (from == to) {
    *out = NAN;
    return c->options->missing_nan ||
           fail(c, column, "the cell is empty; { missing = \"nan\" } reads empty cells as NaN");
  }
  return ty_parse_number(from, to, out) == to ||
         fail(c, column, "%s is not a number", ty_quote(from, (size_t)(to - from)));
}

static bool read_names(csv *c, const char *p, const char *end, ty_bytes *names) {
  c->columns = 0;
  while (p) {
    const char *from, *to;
    if (!next_cell(c, c->columns + 1, &p, end, &from, &to)) return false;
    if (memchr(from, 0, (size_t)(to - from))) return fail(c, c->columns + 1, "a NUL character in a name");
    for (; from<to; from += to - from> 1 && from[0] == '"' && from[1] == '"' ? 2 : 1) /* "" stands for one quote */
      if (!ty_bytes_put(names, from, 1)) return false;
    if (!ty_bytes_put(names, "", 1)) return false;
    c->columns++;
  }
  return true;
}

static bool read_row(csv *c, const char *p, const char *end, ty_bytes *out) {
  int64_t column = 0;
  while (p) {
    const char *from, *to;
    double value;
    if (!next_cell(c, column + 1, &p, end, &from, &to) || !read_number(c, column + 1, from, to, &value)) return false;
    float single = (float)value;
    bool ok = c->options->dtype == TY_F32 ? ty_bytes_put(out, &single, sizeof single)
                                          : ty_bytes_put(out, &value, sizeof value);
    if (!ok) return false;
    column++;
  }
  if (c->columns < 0) c->columns = column;
  return column == c->columns ||
         fail(c, column, "the row has %lld cells, the rows before have %lld", (long long)column, (long long)c->columns);
}

/* Whether the line is a header by itself: some cell is text. */
static bool looks_like_names(const csv *c, const char *p, const char *end) {
  while (p) {
    const char *from, *to;
    double value;
    if (!next_cell(c, 1, &p, end, &from, &to)) return false; /* read_row() says what is wrong */
    if (from < to && ty_parse_number(from, to, &value) != to) return true;
  }
  return false;
}

static bool parse(csv *c, ty_bytes *names, ty_bytes *values, int64_t *rows) {
  const char *start, *end;
  bool first = true;
  while (next_line(c, &start, &end)) {
    if ((c->line & 4095) == 0 && ty_interrupted)
      return ty_fail(TY_EINTR, "interrupted while reading %s", ty_quote_text(c->name));
    if (c->line <= c->options->skip) continue;
    const char *p = start;
    while (p < end && is_blank(c, *p)) p++;
    if (p == end) continue;           /* an empty line */
    if (c->options->delimiter == ' ') /* blanks at the end separate nothing */
      while (end > start && is_blank(c, end[-1])) end--;
    if (first && (c->options->header > 0 || (c->options->header < 0 && looks_like_names(c, start, end)))) {
      if (!read_names(c, start, end, names)) return false;
    } else {
      if (!read_row(c, start, end, values)) return false;
      ++*rows;
    }
    first = false;
  }
  return true;
}

ty_tensor *ty_csv_parse(const char *text, size_t size, const char *name, const ty_csv_options *options,
                        ty_bytes *names) {
  csv c = { .name = name, .options = options, .p = text, .end = text + size, .columns = -1 };
  if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) c.p += 3; /* the mark that some spreadsheets put first */
  ty_bytes values = { 0 };
  int64_t rows = 0;
  ty_tensor *t = NULL;
  if (parse(&c, names, &values, &rows)) {
    t = ty_tensor_new(TY_CPU, options->dtype, 2, (const int64_t[]){ rows, c.columns < 0 ? 0 : c.columns });
    if (t && values.size) memcpy(t->v.data, values.data, values.size);
  }
  ty_bytes_free(&values);
  return t;
}
