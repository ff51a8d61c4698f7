/* The border between the core and Lua. Lua holds handles: userdata with one reference of a tensor. Order of every
 * border function: check all arguments (may raise), call the core without the Lua API, push or raise. */
#ifndef TY_LUA_HANDLE_H
#define TY_LUA_HANDLE_H

#include <lauxlib.h>
#include <lua.h>

#include "../autograd/autograd.h"

/* A scope collects the handles that its coroutine makes while it is open. */
typedef struct ty_lua_scope {
  struct ty_lua_scope *prev; /* opened before, in any coroutine */
  lua_State *L;
  struct ty_handle *handles;
  bool open;
} ty_lua_scope;

typedef struct ty_handle {
  const void *magic;
  ty_tensor *t;                   /* NULL once released */
  struct ty_handle *next, **link; /* in its scope's list; link NULL: in none */
  ty_lua_scope *scope;            /* whose list that is */
} ty_handle;

/* What the border knows of one Lua universe. */
typedef struct ty_lua_state {
  lua_State *main;
  ty_lua_scope *scope;  /* opened last */
  int64_t soft_limit;   /* live bytes at which the collector runs */
  int64_t growth_limit; /* live bytes, no more than these, at which a young collection may run */
  int64_t tidied;       /* live bytes after the last collection */
  int64_t handles;      /* made and not collected */
  int64_t handle_limit; /* of these, likewise */
  int64_t young_limit;  /* of these, at which a young collection may run */
  int64_t young_bytes;  /* live bytes when that was set */
} ty_lua_state;

extern const char ty_handle_magic;

ty_lua_state *ty_lua_state_of(lua_State *L);

/* The handle at `index`, or NULL when something else is there. */
static inline ty_handle *ty_lua_handle_at(lua_State *L, int index) {
  ty_handle *h = lua_touserdata(L, index);
  return h && lua_rawlen(L, index) == sizeof *h && h->magic == &ty_handle_magic ? h
                                                                                : NULL; /* light ones have no length */
}

/* Pushes a handle that takes over the reference; with NULL raises the core's error. */
void ty_lua_push(lua_State *L, ty_tensor *t);
/* Pushes an empty handle to be filled after the core call: memory errors of Lua come before it, not after. */
ty_handle *ty_lua_push_empty(lua_State *L);
/* Makes h, new, a member of the innermost scope of this coroutine, if there is one. */
void ty_lua_enter_scope(lua_State *L, ty_lua_state *s, ty_handle *h);
/* ---- arguments of native functions (arguments.c) ---- */

/* The tensor of an argument, borrowed; raises when it is something else or was released. */
ty_tensor *ty_lua_check(lua_State *L, int index);
/* The same, or NULL when it is no tensor at all. */
ty_tensor *ty_lua_to(lua_State *L, int index);

/* Raises unless the host can read the values of `t`, for `function`. */
void ty_lua_need_values(lua_State *L, const ty_tensor *t, const char *function);
/* As those of lauxlib, but strict (a text is no number) and with the errors of this library. */
lua_Integer ty_lua_check_integer(lua_State *L, int index);
lua_Integer ty_lua_opt_integer(lua_State *L, int index, lua_Integer otherwise);
lua_Number ty_lua_check_number(lua_State *L, int index);
const char *ty_lua_check_string(lua_State *L, int index);
const char *ty_lua_check_lstring(lua_State *L, int index, size_t *size);
const char *ty_lua_opt_string(lua_State *L, int index, const char *otherwise);
void ty_lua_check_type(lua_State *L, int index, int type);
void ty_lua_check_callable(lua_State *L, int index);
/* Raises "FUNCTION: argument N: expected ..., got ...". */
int ty_lua_refuse(lua_State *L, int index, const char *expected);
/* The name of the running C function, for errors: "io.load_npz"; it stays on the stack. */
const char *ty_lua_function_name(lua_State *L);
/* The table in which errors look for the names of functions. */
void ty_lua_remember_core(lua_State *L, int table);

/* Raises ty_error() with the position of the caller. */
int ty_lua_error(lua_State *L);
/* What luaL_typename says, "tensor" for tensors. */
const char *ty_lua_typename(lua_State *L, int index);

/* Runs the collector when tensors, by bytes or by number, have grown past the soft limits. Called before allocating. */
void ty_lua_poll(lua_State *L);

/* The young that nobody has any more go now, and those that stay are not looked at again until as many have come. */
void ty_lua_sweep(lua_State *L);

/* Before a backward pass: what the forward pass has computed and no variable holds any more, much of all that is alive,
 * is not to stay until the pass is over. */
void ty_lua_tidy(lua_State *L);
/* The collector minds tensors of the meta device too, until it is called with false. */
void ty_lua_count_meta(lua_State *L, bool on);

/* The Lua thread that callbacks from the core (hooks, custom ops) run on; set at entry of functions that may call back. */
extern _Thread_local lua_State *ty_lua_current;

/* Calls the function below its `nargs` arguments on the stack; on failure the error becomes the core's. */
bool ty_lua_call(lua_State *L, int nargs, int nresults);

/* Calls the function at 1 with the arguments after it between set(value, of) and set(before, of), however it ends;
 * returns what it returns. */
int ty_lua_call_guarded(lua_State *L, void (*set)(int64_t value, int64_t of), int64_t value, int64_t before,
                        int64_t of);

void ty_lua_open_handles(lua_State *L, int table);  /* metatable, memory, scopes */
void ty_lua_open_ops(lua_State *L, int table);      /* every op of the table, as functions and methods */
int ty_lua_list_ops(lua_State *L);                  /* that table as a list: ty.ops() */
void ty_lua_open_values(lua_State *L, int table);   /* ty.tensor, tolist, item, to, printing */
void ty_lua_open_streams(lua_State *L, int table);  /* into ty.cuda, and methods of tensors */
void ty_lua_open_index(lua_State *L, int table);    /* slices */
void ty_lua_open_nearest(lua_State *L, int table);  /* nearest names */
void ty_lua_open_autograd(lua_State *L, int table); /* backward, grad, hooks, custom ops */
int ty_lua_open_program(lua_State *L);              /* leaves a table of what ty.compile is made of */
int ty_lua_trace(lua_State *L);                     /* one of them: trace.c */
int ty_lua_open_io(lua_State *L);                   /* leaves a table of readers and writers on the stack */
int ty_lua_open_tokenizer(lua_State *L);            /* leaves a table of what tokenizers are made of on the stack */
int ty_lua_open_cuda(lua_State *L);                 /* leaves a table of what concerns GPUs on the stack */
int ty_lua_open_thread(lua_State *L);               /* leaves a table of native threads on the stack */
int ty_lua_open_tier(lua_State *L);                 /* leaves a table of what modules/offload is made of on the stack */
int ty_lua_open_comm(lua_State *L);                 /* leaves a table of what modules/dist is made of on the stack */
int ty_lua_open_vmap(lua_State *L);                 /* leaves a table of what ty.vmap is made of on the stack */
int ty_lua_open_profile(lua_State *L);              /* leaves a table of what profiles are made of on the stack */
int ty_lua_open_http(lua_State *L);                 /* leaves a table of what servers of HTTP are made of */
int ty_lua_open_probe(lua_State *L);                /* leaves a table of what modules/estimate measures with */
int ty_lua_open_system(lua_State *L);               /* leaves a table of clocks and the terminal on the stack */

/* Pushes "; did you mean softmax?" with up to three of the table's keys and of the names in `more` (ended by NULL, or
 * NULL) that are nearest to `wanted`; "" where none is near. */
void ty_lua_push_nearest(lua_State *L, const char *wanted, int table, const char *const *more);
/* Pushes the sizes of t as a list. */
void ty_lua_push_shape(lua_State *L, const ty_tensor *t);
/* Pushes the table of tensor methods. */
void ty_lua_push_methods(lua_State *L);

#endif
