/* Native threads, each with a Lua state of its own: thread.new(setup, ...) runs setup(...) there, which returns a
 * function; thread:send(...) queues a call of it, thread:receive() waits for the results in order. Values are copied
 * (message.c), tensors share their memory. */
#include <lualib.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "message.h"

int luaopen_tycho_core(lua_State *L);

typedef struct queue {
  ty_message *first, *last;
  int length;
} queue;

typedef struct worker {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  queue in, out;       /* `in` begins with the paths and the setup */
  int waiting;         /* sent and not yet received */
  bool started, ended; /* ended: takes no more requests, `problem` says why */
  volatile bool stop;
  char problem[1024];
} worker;

static void queue_add(queue *q, ty_message *m) {
  m->next = NULL;
  if (q->last) q->last->next = m;
  else q->first = m;
  q->last = m;
  q->length++;
}

static ty_message *queue_take(queue *q) {
  ty_message *m = q->first;
  if (!m) return NULL;
  q->first = m->next;
  if (!q->first) q->last = NULL;
  q->length--;
  return m;
}

/* ---- in the worker ---- */

/* Lets a worker that is asked to stop leave its Lua code. */
static void stop_hook(lua_State *L, lua_Debug *ar) {
  (void)ar;
  worker *w = *(worker **)lua_getextraspace(L);
  if (w->stop) luaL_error(L, "the thread was closed");
}

static int add_traceback(lua_State *L) {
  const char *text = luaL_tolstring(L, 1, NULL);
  luaL_traceback(L, L, text, 1);
  return 1;
}

static ty_message *take_request(worker *w) {
  pthread_mutex_lock(&w->lock);
  while (!w->in.first && !w->stop) pthread_cond_wait(&w->changed, &w->lock);
  ty_message *m = w->stop ? NULL : queue_take(&w->in);
  pthread_mutex_unlock(&w->lock);
  return m;
}

static ty_message *take_first(lua_State *L, worker *w) {
  ty_message *m = take_request(w);
  if (!m) luaL_error(L, "the thread was closed");
  return m;
}

/* Leaves the function that answers requests. The paths come as a message of their own: they must be set before names
 * of modules in the second one can be looked up. */
static int worker_setup(lua_State *L) {
  worker *w = lua_touserdata(L, 1);
  lua_settop(L, 0);
  luaL_openlibs(L);
  lua_gc(L, LUA_GCGEN, 0, 0);
  luaL_requiref(L, "tycho.core", luaopen_tycho_core, 0); /* tensors in messages need it */
  lua_settop(L, 0);
  ty_message_unpack(L, take_first(L, w));
  lua_getglobal(L, "package");
  lua_pushvalue(L, 1), lua_setfield(L, -2, "path");
  lua_pushvalue(L, 2), lua_setfield(L, -2, "cpath");
  lua_getfield(L, -1, "searchers");
  for (int i = 1; lua_rawgeti(L, 3, i) == LUA_TFUNCTION; i++) lua_rawseti(L, -2, luaL_len(L, -2) + 1);
  lua_settop(L, 0);
  int n = ty_message_unpack(L, take_first(L, w));
  lua_call(L, n - 1, 1);
  if (!lua_isfunction(L, -1))
    return luaL_error(L, "thread: the setup function must return a function, got %s", luaL_typename(L, -1));
  return 1;
}

/* light userdata of the request, handler -> light userdata of the answer */
static int worker_serve(lua_State *L) {
  ty_message *m = lua_touserdata(L, 1);
  lua_remove(L, 1);
  int n = ty_message_unpack(L, m);
  lua_call(L, n, LUA_MULTRET);
  lua_pushboolean(L, 1);
  lua_insert(L, 1);
  lua_pushlightuserdata(L, ty_message_pack(L, 1, lua_gettop(L)));
  return 1;
}

static ty_message *answer(lua_State *L, ty_message *request) {
  lua_pushcfunction(L, add_traceback);
  lua_pushcfunction(L, worker_serve);
  lua_pushlightuserdata(L, request);
  lua_pushvalue(L, 1); /* the handler */
  ty_message *m;
  if (lua_pcall(L, 2, 1, 2) == LUA_OK) {
    m = lua_touserdata(L, -1);
  } else {
    const char *text = lua_tostring(L, -1);
    m = ty_message_of_text(text ? text : "out of memory");
  }
  lua_settop(L, 1);
  lua_gc(L, LUA_GCSTEP, 256); /* handles of what was sent are garbage now: small for Lua, large in fact */
  return m;
}

static void end_with(worker *w, const char *problem) {
  pthread_mutex_lock(&w->lock);
  w->ended = true;
  size_t n = strnlen(problem, sizeof w->problem - 1);
  memcpy(w->problem, problem, n);
  w->problem[n] = '\0';
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
}

static void serve(worker *w, lua_State *L) {
  for (ty_message *request; (request = take_request(w)) != NULL;) {
    ty_message *reply = answer(L, request);
    if (!reply) {
      end_with(w, "out of memory");
      return;
    }
    pthread_mutex_lock(&w->lock);
    queue_add(&w->out, reply);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
  }
}

static void *worker_main(void *context) {
  worker *w = context;
  ty_set_num_threads(1); /* the workers are the parallelism */
  lua_State *L = luaL_newstate();
  if (!L) {
    end_with(w, "out of memory");
    return NULL;
  }
  *(worker **)lua_getextraspace(L) = w;
  lua_sethook(L, stop_hook, LUA_MASKCOUNT, 10000);
  lua_pushcfunction(L, add_traceback);
  lua_pushcfunction(L, worker_setup);
  lua_pushlightuserdata(L, w);
  if (lua_pcall(L, 1, 1, 1) == LUA_OK) {
    lua_remove(L, 1);
    serve(w, L);
  } else {
    const char *text = lua_tostring(L, -1);
    end_with(w, text ? text : "out of memory");
  }
  lua_close(L);
  ty_memory_stats_of(TY_CPU); /* adds what this thread has not yet counted */
  return NULL;
}

/* ---- in the owner ---- */

static const char worker_key;

static worker **check_box(lua_State *L) {
  worker **box = lua_touserdata(L, 1);
  bool ours = box && lua_getmetatable(L, 1) && lua_rawgetp(L, LUA_REGISTRYINDEX, &worker_key) != LUA_TNIL &&
              lua_rawequal(L, -1, -2);
  if (!ours) ty_lua_refuse(L, 1, "a thread");
  lua_pop(L, 2);
  return box;
}

static worker *check_worker(lua_State *L) {
  worker *w = *check_box(L);
  if (!w) luaL_error(L, "thread: it was closed");
  return w;
}

static void drop(queue *q) {
  for (ty_message *m; (m = queue_take(q)) != NULL;) ty_message_free(m);
}

/* close, __close, __gc: waits until the thread has left what it is doing */
static int worker_close(lua_State *L) {
  worker **box = check_box(L), *w = *box;
  if (!w) return 0;
  *box = NULL;
  if (w->started) {
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
  }
  drop(&w->in);
  drop(&w->out);
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->changed);
  free(w);
  return 0;
}

static ty_message *pack_paths(lua_State *L) {
  int top = lua_gettop(L);
  lua_getglobal(L, "package");
  ty_lua_check_type(L, -1, LUA_TTABLE);
  lua_getfield(L, top + 1, "path");
  lua_getfield(L, top + 1, "cpath");
  lua_newtable(L); /* searchers beyond the four of Lua, when they are Lua functions */
  lua_getfield(L, top + 1, "searchers");
  int count = 0;
  for (lua_Integer i = 5; lua_rawgeti(L, -1, i) != LUA_TNIL; i++) {
    if (lua_isfunction(L, -1) && !lua_iscfunction(L, -1)) lua_rawseti(L, top + 4, ++count);
    else lua_pop(L, 1);
  }
  lua_pop(L, 2);
  ty_message *m = ty_message_pack(L, top + 2, top + 4);
  lua_settop(L, top);
  return m;
}

/* new(setup, ...) */
static int worker_new(lua_State *L) {
  ty_lua_check_type(L, 1, LUA_TFUNCTION);
  int last = lua_gettop(L);
  worker **box = lua_newuserdatauv(L, sizeof *box, 0);
  *box = NULL;
  lua_rawgetp(L, LUA_REGISTRYINDEX, &worker_key);
  lua_setmetatable(L, -2);
  worker *w = calloc(1, sizeof *w);
  if (!w) return luaL_error(L, "thread: out of memory");
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->changed, NULL);
  *box = w; /* from here on the collector frees it should anything raise */
  queue_add(&w->in, pack_paths(L));
  queue_add(&w->in, ty_message_pack(L, 1, last));
  sigset_t all, before; /* signals are for the threads of the program */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int problem = pthread_create(&w->thread, NULL, worker_main, w);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (problem) return luaL_error(L, "thread: could not be started: %s", strerror(problem));
  w->started = true;
  return 1;
}

/* thread:send(...) */
static int worker_send(lua_State *L) {
  worker *w = check_worker(L);
  ty_message *m = ty_message_pack(L, 2, lua_gettop(L));
  pthread_mutex_lock(&w->lock);
  queue_add(&w->in, m);
  w->waiting++;
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
  return 0;
}

/* The next answer, or NULL: the thread has ended, or Ctrl-C was pressed. */
static ty_message *wait_for_answer(worker *w) {
  pthread_mutex_lock(&w->lock);
  while (!w->out.first && !w->ended && !ty_interrupted) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50 * 1000 * 1000;
    if (until.tv_nsec >= 1000 * 1000 * 1000) until.tv_sec++, until.tv_nsec -= 1000 * 1000 * 1000;
    pthread_cond_timedwait(&w->changed, &w->lock, &until);
  }
  ty_message *m = queue_take(&w->out);
  pthread_mutex_unlock(&w->lock);
  return m;
}

/* thread:receive() -> what the function returned for the oldest request not yet answered; raises its error */
static int worker_receive(lua_State *L) {
  worker *w = check_worker(L);
  if (w->waiting == 0) return luaL_error(L, "thread: receive() without a send()");
  ty_message *m = wait_for_answer(w);
  if (!m) {
    if (!w->ended) {
      ty_fail(TY_EINTR, "interrupted");
      return ty_lua_error(L);
    }
    return luaL_error(L, "in a worker thread: %s", w->problem);
  }
  w->waiting--;
  lua_settop(L, 1);
  int n = ty_message_unpack(L, m);
  if (!lua_toboolean(L, 2)) return luaL_error(L, "in a worker thread: %s", lua_tostring(L, 3));
  return n - 1;
}

/* thread:pending() -> requests sent and not yet received */
static int worker_pending(lua_State *L) {
  lua_pushinteger(L, check_worker(L)->waiting);
  return 1;
}

int ty_lua_open_thread(lua_State *L) {
  static const luaL_Reg methods[] = { { "send", worker_send },
                                      { "receive", worker_receive },
                                      { "pending", worker_pending },
                                      { "close", worker_close },
                                      { NULL, NULL } };
  lua_createtable(L, 0, 4);
  lua_pushstring(L, "thread"), lua_setfield(L, -2, "__name");
  luaL_newlib(L, methods), lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, worker_close), lua_setfield(L, -2, "__close");
  lua_pushcfunction(L, worker_close), lua_setfield(L, -2, "__gc");
  lua_rawsetp(L, LUA_REGISTRYINDEX, &worker_key);
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, worker_new), lua_setfield(L, -2, "new");
  return 1;
}
