/* Replays on a GPU: the launches between two steps whose numbers differ from call to call (a hook, an optimizer's step, a
 * draw of random numbers) are captured once into a graph that the driver starts as a whole. A graph keeps the addresses
 * that it was captured with: arguments are copied to where it reads them, results from where it leaves them, and what its
 * kernels need for themselves comes from a pool of its own. */
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "internal.h"

typedef struct segment {
  int begin, end; /* steps */
  void *graph;    /* NULL: run one by one */
} segment;

struct graphs {
  ty_pool *pool;
  ty_storage **fixed; /* per slot: of arguments and results, where the graphs find them */
  char **found;       /* per slot: where a gradient was at the capture */
  segment *segments;
  int n;
  bool captured;
};

static bool *find_hooked(const ty_program *p) {
  bool *hooked = calloc((size_t)p->launches.n + 1, sizeof *hooked);
  for (int i = 0; i < p->launches.n && hooked; i++)
    if (p->launches.v[i].hook >= 0 && p->launches.v[i].hooked >= 0) hooked[p->launches.v[i].hooked] = true;
  return hooked;
}

/* Runs of steps that are the same at every replay become one segment, each of the others one of its own. */
static bool cut(const ty_program *p, struct graphs *g) {
  bool *hooked = find_hooked(p);
  g->segments = malloc(sizeof *g->segments * (size_t)(p->steps.n + 1));
  for (int i = 0; i < p->steps.n && hooked && g->segments; i++) {
    int at = p->order.v[p->steps.v[i].begin];
    const launch *l = &p->launches.v[at];
    bool differs = l->hook >= 0 || l->clip >= 0 || l->part || l->params == PARAMS_RANDOM || hooked[at];
    bool joins = !differs && g->n && g->segments[g->n - 1].graph == g;
    if (joins) g->segments[g->n - 1].end = i + 1;
    else g->segments[g->n++] = (segment){ i, i + 1, differs ? NULL : g }; /* g: to be captured */
  }
  bool ok = hooked && g->segments;
  free(hooked);
  return ok;
}

static bool written_arguments(const ty_program *p) {
  for (int i = 0; i < p->written.n; i++)
    if (p->slots.v[p->written.v[i]].kind == SLOT_ARGUMENT) return true;
  return false;
}

struct graphs *ty_graphs_new(const ty_program *p) {
  if (p->device < TY_CUDA || written_arguments(p)) return NULL;
  struct graphs *g = calloc(1, sizeof *g);
  if (!g) return NULL;
  g->fixed = calloc((size_t)p->slots.n + 1, sizeof *g->fixed);
  g->found = calloc((size_t)p->slots.n + 1, sizeof *g->found);
  g->pool = ty_pool_new(p->device);
  bool ok = g->fixed && g->found && g->pool && cut(p, g);
  for (int i = 0; i < p->slots.n && ok; i++) {
    const slot *s = &p->slots.v[i];
    if (s->kind != SLOT_ARGUMENT && s->kind != SLOT_RESULT) continue;
    int64_t bytes = (int64_t)s->bytes;
    ok = (g->fixed[i] = ty_storage_new(p->device, s->bytes, TY_U8, 1, &bytes)) != NULL;
  }
  if (ok) return g;
  ty_graphs_free(p, g);
  return NULL; /* replays go on without */
}

static void drop_graphs(const ty_program *p, struct graphs *g) {
  for (int i = 0; i < g->n; i++) {
    void *graph = g->segments[i].graph;
    if (graph && graph != g) ty_device_graph_free(p->device, graph);
    if (graph) g->segments[i].graph = g;
  }
  g->captured = false;
}

void ty_graphs_free(const ty_program *p, struct graphs *g) {
  if (!g) return;
  drop_graphs(p, g);
  for (int i = 0; i < p->slots.n && g->fixed; i++)
    if (g->fixed[i]) ty_storage_release(g->fixed[i]);
  ty_pool_free(g->pool);
  free(g->fixed), free(g->found), free(g->segments);
  free(g);
}

/* Gradients on leaves must be where they were; what the user put elsewhere is captured anew. */
static bool moved(const ty_program *p, const struct graphs *g) {
  for (int i = 0; i < p->slots.n; i++)
    if (p->slots.v[i].kind == SLOT_GRADIENT && p->slots.v[i].base != g->found[i]) return true;
  return false;
}

static bool capture(ty_program *p, struct graphs *g) {
  bool ok = true;
  ty_pool_use(g->pool);
  for (int i = 0; i < g->n && ok; i++) {
    segment *s = &g->segments[i];
    if (!s->graph) continue;
    ok = ty_device_capture(p->device) && ty_program_run(p, s->begin, s->end, NULL, NULL);
    void *graph = ty_device_captured(p->device);
    ok = ok && graph;
    if (ok) s->graph = graph;
    else if (graph) ty_device_graph_free(p->device, graph);
  }
  ty_pool_use(NULL);
  for (int i = 0; i < p->slots.n; i++) g->found[i] = p->slots.v[i].base;
  g->captured = true;
  if (ok) return true;
  drop_graphs(p, g);
  if (ty_error_code() == TY_EINTR) return false;
  for (int i = 0; i < g->n; i++) g->segments[i].graph = NULL; /* what cannot be captured runs one by one */
  return g->captured = true;
}

bool ty_graphs_replay(ty_program *p, struct graphs *g, ty_program_hook *hook, void *owner) {
  size_t bytes = sizeof(char *) * (size_t)(p->slots.n + 1);
  char **base = malloc(bytes);
  bool ok = base || ty_fail(TY_ENOMEM, "compile: out of memory");
  for (int i = 0; i < p->slots.n && ok; i++) {
    slot *s = &p->slots.v[i];
    base[i] = s->base;
    if (!g->fixed[i] || !s->bytes) continue;
    if (s->kind == SLOT_ARGUMENT) ok = ty_device_copy(p->device, g->fixed[i]->bytes, p->device, s->base, s->bytes);
    s->base = g->fixed[i]->bytes;
  }
  if (ok) ty_program_patch(p);
  if (ok && g->captured && moved(p, g)) drop_graphs(p, g);
  if (ok && !g->captured) ok = capture(p, g);
  for (int i = 0; i < g->n && ok; i++) {
    const segment *s = &g->segments[i];
    ok = s->graph ? ty_device_graph_launch(p->device, s->graph) : ty_program_run(p, s->begin, s->end, hook, owner);
  }
  for (int i = 0; i < p->slots.n && base; i++) {
    slot *s = &p->slots.v[i];
    if (ok && g->fixed[i] && s->kind == SLOT_RESULT && s->bytes)
      ok = ty_device_copy(p->device, base[i], p->device, g->fixed[i]->bytes, s->bytes);
    s->base = base[i];
  }
  free(base);
  return ok;
}
