/* The error of each thread: a fixed buffer, so that reporting never allocates. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../ops/op.h"

volatile sig_atomic_t ty_interrupted = 0;

static _Thread_local char text[2048];
static _Thread_local ty_code code;

static void set(ty_code c, const char *prefix, const char *format, va_list args) {
  char buffer[sizeof text]; /* the arguments may point into `text` */
  size_t n = 0;
  if (prefix) n = (size_t)snprintf(buffer, sizeof buffer, "%s: ", prefix);
  vsnprintf(buffer + n, sizeof buffer - n, format, args);
  memcpy(text, buffer, sizeof text);
  code = c;
}

bool ty_fail(ty_code c, const char *format, ...) {
  va_list args;
  va_start(args, format);
  set(c, NULL, format, args);
  va_end(args);
  return false;
}

bool ty_op_fail_(const ty_op *op, ty_code c, const char *format, ...) {
  va_list args;
  va_start(args, format);
  set(c, op->name, format, args);
  va_end(args);
  return false;
}

const char *ty_error(void) { return text; }
ty_code ty_error_code(void) { return code; }
void ty_error_clear(void) {
  text[0] = '\0';
  code = TY_OK;
}
