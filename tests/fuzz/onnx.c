#include "../../src/io/onnx.h"
#include "fuzz.h"

static void touch_text(const char *s) {
  if (s) touch_bytes(s, strlen(s));
}

static void touch_tensor(ty_onnx *o, TyOnnx__Tensor *t) {
  ty_tensor *made = ty_onnx_tensor(o, t);
  touch(made);
  ty_release(made);
}

static void touch_graph(ty_onnx *o, const TyOnnx__Graph *g) {
  for (size_t i = 0; i < g->n_initializer; i++) touch_tensor(o, g->initializer[i]);
  for (size_t i = 0; i < g->n_input; i++) touch_text(g->input[i]->name);
  for (size_t i = 0; i < g->n_output; i++) touch_text(g->output[i]->name);
  for (size_t i = 0; i < g->n_node; i++) {
    const TyOnnx__Node *n = g->node[i];
    touch_text(n->op_type), touch_text(n->name), touch_text(n->domain);
    for (size_t j = 0; j < n->n_input; j++) touch_text(n->input[j]);
    for (size_t j = 0; j < n->n_output; j++) touch_text(n->output[j]);
    for (size_t j = 0; j < n->n_attribute; j++) {
      const TyOnnx__Attribute *a = n->attribute[j];
      touch_text(a->name);
      touch_bytes(a->s.data, a->s.len);
      if (a->t) touch_tensor(o, a->t);
      if (a->g) touch_graph(o, a->g);
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ty_onnx o;
  if (ty_onnx_parse(data, size, "fuzz", &o)) touch_graph(&o, o.model->graph);
  ty_onnx_close(&o);
  return 0;
}
