/* A hostile tokenizer.json, up to a NUL; a text follows, which it encodes and decodes again. */
#include "../../src/tokenizer/tokenizer.h"

#include "fuzz.h"

static void check_tokens(ty_tokenizer *t) {
  for (uint32_t id = 0; id < ty_tokenizer_size(t) && id < 1000; id++) {
    ty_token_info info;
    uint32_t back;
    if (!ty_tokenizer_token(t, id, &info)) continue;
    touch_bytes(info.text, info.size);
    if (!ty_tokenizer_id(t, info.text, info.size, &back) || back >= ty_tokenizer_size(t)) abort();
  }
}

static void use(ty_tokenizer *t, const char *text, size_t size) {
  ty_encoding plain = { 0 }, spans = { 0 };
  ty_encode_options o = { .special = true };
  bool ok = ty_tokenizer_encode(t, text, size, NULL, 0, &o, &plain);
  o.spans = true;
  if (ty_tokenizer_encode(t, text, size, text, size, &o, &spans)) {
    for (size_t i = 0; i < spans.count; i++)
      if (spans.spans[i].begin > spans.spans[i].end || spans.spans[i].end > size) abort();
  }
  if (ok) {
    ty_encoding again = { 0 };
    o.spans = true; /* the way without remembered words */
    if (!ty_tokenizer_encode(t, text, size, NULL, 0, &o, &again) || again.count != plain.count ||
        (again.count && memcmp(again.ids, plain.ids, again.count * sizeof *again.ids) != 0))
      abort();
    ty_encoding_free(&again);
    ty_bytes out = { 0 };
    ty_stream stream = { 0 };
    if (ty_tokenizer_decode(t, plain.ids, plain.count, true, &out)) touch_bytes(out.data, out.size);
    out.size = 0;
    ty_stream_put(t, &stream, plain.ids, plain.count < 100 ? plain.count : 100, &out);
    ty_stream_finish(t, &stream, &out);
    ty_stream_free(&stream);
    ty_bytes_free(&out);
  }
  ty_encoding_free(&plain);
  ty_encoding_free(&spans);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const uint8_t *end = size ? memchr(data, 0, size) : NULL;
  size_t json = end ? (size_t)(end - data) : size, text = end ? size - json - 1 : 0;
  ty_tokenizer *t = ty_tokenizer_read("fuzz", (const char *)data, json);
  if (!t) return 0;
  char *copy = malloc(text + !text);
  if (text) memcpy(copy, end + 1, text);
  check_tokens(t);
  use(t, copy, text);
  static const char sample[] = "The  quick (brown) f\xc3\xb6x's 123\n\xe4\xbd\xa0\xe5\xa5\xbd \xff<s>e\xcc\x81";
  use(t, sample, sizeof sample - 1);
  free(copy);
  ty_tokenizer_free(t);
  return 0;
}
