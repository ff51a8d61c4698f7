/* ty.cuda.Stream, ty.cuda.Event, what runs on them, and page-locked memory. */
#include <string.h>

#include "../device/device.h"
#include "../device/stream.h"
#include "../program/recording.h"
#include "handle.h"

static const char stream_name[] = "cuda stream", event_name[] = "cuda event";

typedef struct stream {
  int device, number;
} stream;

typedef struct event {
  int device; /* TY_CPU: not recorded yet */
  bool timing;
  void *handle;
} event;

/* A stream or an event. */
static void *check_class(lua_State *L, int index, const char *name) {
  void *object = luaL_testudata(L, index, name);
  if (!object) ty_lua_refuse(L, index, lua_pushfstring(L, "a %s", name));
  return object;
}

static int check_gpu(lua_State *L, int index, const char *who) {
  int device;
  if (!ty_device_parse(ty_lua_opt_string(L, index, "cuda"), &device)) luaL_error(L, "%s: %s", who, ty_error());
  if (device < TY_CUDA) luaL_error(L, "%s: expected a GPU, got %s", who, ty_device_name(device));
  return device;
}

static void push_stream(lua_State *L, int device, int number) {
  stream *s = lua_newuserdatauv(L, sizeof *s, 0);
  *s = (stream){ device, number };
  luaL_setmetatable(L, stream_name);
}

/* ---- streams ---- */

static int new_stream(lua_State *L) {
  int device = check_gpu(L, 1, "Stream"), number = ty_stream_new(device);
  if (number < 0) return ty_lua_error(L);
  push_stream(L, device, number);
  return 1;
}

static int current_stream(lua_State *L) {
  int device = check_gpu(L, 1, "current_stream");
  push_stream(L, device, ty_stream_current(device));
  return 1;
}

static int default_stream(lua_State *L) {
  push_stream(L, check_gpu(L, 1, "default_stream"), 0);
  return 1;
}

static void refuse_recording(lua_State *L, const char *who) {
  if (ty_is_recording())
    luaL_error(L, "%s: a function of ty.compile runs on one stream; choose it around the call", who);
}

static void use(int64_t number, int64_t device) { ty_stream_use((int)device, (int)number); }

/* stream(s, fn, ...): fn(...) with s as the current stream of its GPU */
static int with_stream(lua_State *L) {
  const stream *s = check_class(L, 1, stream_name);
  int device = s->device, number = s->number;
  refuse_recording(L, "stream");
  ty_lua_check_callable(L, 2);
  lua_remove(L, 1);
  return ty_lua_call_guarded(L, use, number, ty_stream_current(device), device);
}

static int stream_synchronize(lua_State *L) {
  const stream *s = check_class(L, 1, stream_name);
  return ty_stream_synchronize(s->device, s->number) ? 0 : ty_lua_error(L);
}

static int stream_query(lua_State *L) {
  const stream *s = check_class(L, 1, stream_name);
  lua_pushboolean(L, ty_stream_done(s->device, s->number));
  return 1;
}

static int stream_wait_stream(lua_State *L) {
  const stream *s = check_class(L, 1, stream_name), *other = check_class(L, 2, stream_name);
  return ty_stream_wait(s->device, s->number, other->device, other->number) ? 0 : ty_lua_error(L);
}

static bool wait_event(const stream *s, const event *e) {
  return e->device == TY_CPU || ty_event_wait(s->device, e->handle, s->number);
}

static int stream_wait_event(lua_State *L) {
  const stream *s = check_class(L, 1, stream_name);
  return wait_event(s, check_class(L, 2, event_name)) ? 0 : ty_lua_error(L);
}

static int stream_equals(lua_State *L) {
  const stream *a = check_class(L, 1, stream_name), *b = check_class(L, 2, stream_name);
  lua_pushboolean(L, a->device == b->device && a->number == b->number);
  return 1;
}

static int stream_tostring(lua_State *L) {
  const stream *s = check_class(L, 1, stream_name);
  lua_pushfstring(L, "cuda stream %d of %s", s->number, ty_device_name(s->device));
  return 1;
}

/* ---- events ---- */

static int new_event(lua_State *L) {
  bool timing = false;
  const char *why;
  if (ty_cuda_count(&why) == 0) return luaL_error(L, "Event: %s", why);
  if (!lua_isnoneornil(L, 1)) {
    ty_lua_check_type(L, 1, LUA_TTABLE);
    lua_getfield(L, 1, "timing");
    timing = lua_toboolean(L, -1);
  }
  event *e = lua_newuserdatauv(L, sizeof *e, 0);
  *e = (event){ TY_CPU, timing, NULL };
  luaL_setmetatable(L, event_name);
  return 1;
}

static void drop(event *e) {
  if (e->handle) ty_event_free(e->device, e->handle);
  e->handle = NULL;
  e->device = TY_CPU;
}

static int event_gc(lua_State *L) {
  drop(check_class(L, 1, event_name));
  return 0;
}

/* The stream at `index`, or the current one of the GPU. */
static stream stream_at(lua_State *L, int index, int device) {
  if (lua_isnoneornil(L, index)) return (stream){ device, ty_stream_current(device) };
  return *(stream *)check_class(L, index, stream_name);
}

static int event_record(lua_State *L) {
  event *e = check_class(L, 1, event_name);
  stream s = stream_at(L, 2, e->device == TY_CPU ? TY_CUDA : e->device);
  refuse_recording(L, "record");
  if (e->device != s.device) drop(e); /* an event belongs to a GPU */
  if (!e->handle && !(e->handle = ty_event_new(s.device, e->timing))) return ty_lua_error(L);
  e->device = s.device;
  if (!ty_event_record(s.device, e->handle, s.number)) return ty_lua_error(L);
  lua_settop(L, 1);
  return 1;
}

static int event_wait(lua_State *L) {
  const event *e = check_class(L, 1, event_name);
  stream s = stream_at(L, 2, e->device == TY_CPU ? TY_CUDA : e->device);
  return wait_event(&s, e) ? 0 : ty_lua_error(L);
}

static int event_synchronize(lua_State *L) {
  const event *e = check_class(L, 1, event_name);
  return e->device == TY_CPU || ty_event_synchronize(e->device, e->handle) ? 0 : ty_lua_error(L);
}

static int event_query(lua_State *L) {
  const event *e = check_class(L, 1, event_name);
  lua_pushboolean(L, e->device == TY_CPU || ty_event_done(e->device, e->handle));
  return 1;
}

static int event_elapsed(lua_State *L) {
  const event *from = check_class(L, 1, event_name), *to = check_class(L, 2, event_name);
  const event *both[] = { from, to };
  double ms;
  for (int i = 0; i < 2; i++) {
    if (both[i]->device == TY_CPU) return luaL_error(L, "elapsed_time: event %d was not recorded", i + 1);
    if (!both[i]->timing) return luaL_error(L, "elapsed_time: event %d was made without { timing = true }", i + 1);
  }
  if (from->device != to->device) return luaL_error(L, "elapsed_time: the events are on two GPUs");
  for (int i = 0; i < 2; i++)
    if (!ty_event_done(both[i]->device, both[i]->handle))
      return luaL_error(L, "elapsed_time: event %d has not happened yet; :synchronize() waits for it", i + 1);
  if (!ty_event_elapsed(from->device, from->handle, to->handle, &ms)) return ty_lua_error(L);
  lua_pushnumber(L, ms);
  return 1;
}

/* ---- tensors ---- */

static int record_stream(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  const stream *s = check_class(L, 2, stream_name);
  if (ty_device_of(t) < TY_CUDA && !t->storage->pinned)
    return luaL_error(L, "record_stream: expected a tensor on a GPU or in pinned memory, got %s", ty_describe(t));
  if (!ty_storage_used(t->storage, s->device, s->number)) return ty_lua_error(L);
  lua_settop(L, 1);
  return 1;
}

static int is_pinned(lua_State *L) {
  lua_pushboolean(L, ty_lua_check(L, 1)->storage->pinned);
  return 1;
}

static int pin_memory(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  const char *why;
  if (t->storage->pinned) {
    lua_settop(L, 1);
    return 1;
  }
  if (ty_device_of(t) != TY_CPU)
    return luaL_error(L, "pin_memory: expected a tensor on the CPU, got %s", ty_describe(t));
  if (ty_cuda_count(&why) == 0) return luaL_error(L, "pin_memory: %s", why);
  if (ty_is_recording()) return luaL_error(L, "pin_memory: not inside ty.compile; pin the argument");
  ty_lua_poll(L);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_new(TY_PINNED, ty_dtype_of(t), t->v.ndim, t->v.size);
  return h->t && ty_copy_into(h->t, t) ? 1 : ty_lua_error(L);
}

static int is_paged(lua_State *L) {
  lua_pushboolean(L, ty_lua_check(L, 1)->storage->paged);
  return 1;
}

static int page_memory(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  if (t->storage->paged || ty_device_of(t) == TY_META) {
    lua_settop(L, 1);
    return 1;
  }
  if (ty_is_recording()) return luaL_error(L, "page_memory: not inside ty.compile; page the argument");
  ty_lua_poll(L);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_new_paged(ty_device_of(t), ty_dtype_of(t), t->v.ndim, t->v.size);
  return h->t && ty_copy_into(h->t, t) ? 1 : ty_lua_error(L);
}

/* ---- opening ---- */

static void new_class(lua_State *L, const char *name, const luaL_Reg *methods, const luaL_Reg *events) {
  luaL_newmetatable(L, name);
  luaL_setfuncs(L, events, 0);
  lua_newtable(L);
  luaL_setfuncs(L, methods, 0);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

void ty_lua_open_streams(lua_State *L, int table) {
  new_class(L, stream_name,
            (const luaL_Reg[]){ { "synchronize", stream_synchronize },
                                { "query", stream_query },
                                { "wait_stream", stream_wait_stream },
                                { "wait_event", stream_wait_event },
                                { NULL, NULL } },
            (const luaL_Reg[]){ { "__eq", stream_equals }, { "__tostring", stream_tostring }, { NULL, NULL } });
  new_class(L, event_name,
            (const luaL_Reg[]){ { "record", event_record },
                                { "wait", event_wait },
                                { "synchronize", event_synchronize },
                                { "query", event_query },
                                { "elapsed_time", event_elapsed },
                                { NULL, NULL } },
            (const luaL_Reg[]){ { "__gc", event_gc }, { NULL, NULL } });
  lua_pushvalue(L, table);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "Stream", new_stream },
                                    { "Event", new_event },
                                    { "stream", with_stream },
                                    { "current_stream", current_stream },
                                    { "default_stream", default_stream },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
  ty_lua_push_methods(L);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "record_stream", record_stream },
                                    { "is_pinned", is_pinned },
                                    { "pin_memory", pin_memory },
                                    { "is_paged", is_paged },
                                    { "page_memory", page_memory },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
}
