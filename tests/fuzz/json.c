#include "../../src/io/json.h"

#include "../../src/io/number.h"
#include "fuzz.h"

/* Walks the whole text; strings and numbers are written and must read back as they were. */
static bool walk(ty_json *j) {
  const char *s;
  size_t n;
  bool more;
  ty_json_value v;
  switch (ty_json_peek(j)) {
    case TY_JSON_BAD: return false;
    case TY_JSON_STRING: {
      if (!ty_json_string(j, &s, &n)) return false;
      ty_bytes out = { 0 };
      ty_json again;
      const char *back;
      size_t size;
      if (!ty_json_put_string(&out, s, n)) abort();
      ty_json_open(&again, "fuzz", out.data, out.size);
      if (!ty_json_string(&again, &back, &size) || size != n || memcmp(back, s, n) != 0 || !ty_json_finish(&again))
        abort();
      ty_json_close(&again);
      ty_bytes_free(&out);
      return true;
    }
    case TY_JSON_NUMBER: {
      char text[32];
      double back;
      if (!ty_json_number(j, &v)) return false;
      int size = ty_format_number(text, v.number);
      if (ty_parse_number(text, text + size, &back) != text + size || back != v.number) abort();
      return true;
    }
    case TY_JSON_ARRAY:
    case TY_JSON_OBJECT: {
      bool object = ty_json_peek(j) == TY_JSON_OBJECT;
      if (!ty_json_enter(j, object ? '{' : '[')) return false;
      while (ty_json_next(j, &more)) {
        if (!more) return true;
        if (object && !ty_json_key(j, &s, &n)) return false;
        if (!walk(j)) return false;
      }
      return false;
    }
    default: return ty_json_word(j);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + !size);
  memcpy(text, data, size);
  ty_json walked, skipped;
  ty_json_open(&walked, "fuzz", text, size);
  ty_json_open(&skipped, "fuzz", text, size);
  bool a = walk(&walked) && ty_json_finish(&walked), b = ty_json_skip(&skipped) && ty_json_finish(&skipped);
  if (a != b) abort();
  ty_json_close(&walked);
  ty_json_close(&skipped);
  free(text);
  return 0;
}
