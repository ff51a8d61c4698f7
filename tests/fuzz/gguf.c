#include "../../src/io/gguf.h"
#include "fuzz.h"

static void touch_value(const ty_gguf *g, const uint8_t **at, ty_gguf_type type) {
  ty_gguf_value v;
  if (!ty_gguf_read_value(at, g->map->data + g->map->size, type, &v)) abort(); /* it was checked */
  if (type == TY_GGUF_STRING) touch_bytes(v.text, v.size);
  for (uint64_t i = 0; type == TY_GGUF_ARRAY && i < v.count; i++) touch_value(g, at, v.of);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  for (int copy = 0; copy < 2; copy++) {
    ty_gguf g;
    ty_mapping *m = ty_mapping_copy(data, size);
    if (m && ty_gguf_open(m, "fuzz", &g)) {
      for (size_t i = 0; i < g.entry_count; i++) {
        const uint8_t *at = g.entries[i].value;
        touch_bytes(g.entries[i].key, g.entries[i].key_size);
        touch_value(&g, &at, g.entries[i].type);
      }
      for (size_t i = 0; i < g.tensor_count; i++) {
        touch_bytes(g.tensors[i].name, g.tensors[i].name_size);
        ty_tensor *t = ty_gguf_get(&g, i, copy);
        touch(t);
        ty_release(t);
      }
      ty_gguf_close(&g);
    }
    ty_mapping_release(m);
  }
  return 0;
}
