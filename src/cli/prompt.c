/* The prompt: reads, lets lua/tycho/prompt.lua compile and show, runs. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../tycho.h"

/* The functions of prompt.lua, at fixed places of the prompt's Lua stack. */
enum { COMPILE = 1, SHOW, COMPLETE };

static ty_cli_completion complete(void *context, const char *text, size_t length) {
  static char insert[512];
  lua_State *L = context;
  ty_cli_completion c = { insert, false };
  insert[0] = '\0';
  lua_pushvalue(L, COMPLETE);
  lua_pushlstring(L, text, length);
  if (lua_pcall(L, 1, 2, 0) == LUA_OK) {
    const char *word = lua_tostring(L, -2), *list = lua_tostring(L, -1);
    if (word && strlen(word) < sizeof insert) strcpy(insert, word);
    if (list) {
      printf("\n%s\n", list);
      fflush(stdout);
      c.printed = true;
    }
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  return c;
}

static const char *prompt_text(lua_State *L, bool first) {
  static char text[64]; /* the editor keeps the pointer while it reads */
  bool set = lua_getglobal(L, first ? "_PROMPT" : "_PROMPT2") != LUA_TNIL;
  snprintf(text, sizeof text, "%s", set ? luaL_tolstring(L, -1, NULL) : first ? "> " : ">> ");
  lua_pop(L, set ? 2 : 1);
  return text;
}

/* Reads until the text is complete. Leaves it and its function, or it, nil and the error, on the stack. */
static ty_cli_input read_chunk(lua_State *L) {
  char *line;
  ty_cli_input input = ty_cli_edit_read(prompt_text(L, true), &line);
  if (input != TY_CLI_LINE) return input;
  lua_pushstring(L, line);
  free(line);
  for (;;) {
    lua_pushvalue(L, COMPILE);
    lua_pushvalue(L, COMPLETE + 1);
    lua_call(L, 1, 2);
    const char *problem = lua_tostring(L, -1);
    if (lua_isnil(L, -2) && problem && strcmp(problem, "leave") == 0) return TY_CLI_END;
    if (lua_toboolean(L, -2) || !problem || strcmp(problem, "incomplete") != 0) return TY_CLI_LINE;
    lua_settop(L, COMPLETE + 1);
    input = ty_cli_edit_read(prompt_text(L, false), &line);
    if (input == TY_CLI_END) {
      lua_pushnil(L);
      lua_pushliteral(L, "stdin: the input ends in the middle of a statement");
      return TY_CLI_LINE;
    }
    if (input != TY_CLI_LINE) return input;
    lua_pushfstring(L, "%s\n%s", lua_tostring(L, -1), line);
    free(line);
    lua_replace(L, COMPLETE + 1);
  }
}

/* Reports an error without the frames of the prompt itself, which say nothing. */
static void report(lua_State *L, int status) {
  static const char own[] = "\n\t[C]: in ?";
  size_t length, tail = sizeof own - 1;
  const char *text = status != LUA_OK ? lua_tolstring(L, -1, &length) : NULL;
  if (text) {
    while (length > tail && memcmp(text + length - tail, own, tail) == 0) length -= tail;
    lua_pushlstring(L, text, length);
  }
  ty_cli_report(L, status);
}

static void run_chunk(lua_State *L) {
  lua_replace(L, COMPLETE + 1);
  lua_settop(L, COMPLETE + 1); /* the function alone */
  int status = ty_cli_call(L, 0, LUA_MULTRET);
  if (status == LUA_OK && lua_gettop(L) > COMPLETE) {
    lua_pushvalue(L, SHOW);
    lua_insert(L, COMPLETE + 1);
    status = ty_cli_call(L, lua_gettop(L) - COMPLETE - 1, 0);
  }
  report(L, status);
}

static int loop(lua_State *L) {
  lua_settop(L, COMPLETE);
  for (;;) {
    ty_cli_interrupt_take(L);
    lua_settop(L, COMPLETE);
    ty_cli_input input = read_chunk(L);
    if (input == TY_CLI_END) return 0;
    if (input == TY_CLI_INTERRUPTED) {
      ty_cli_interrupt_take(L);
      puts("^C");
      continue;
    }
    ty_cli_edit_remember(lua_tostring(L, COMPLETE + 1));
    if (lua_isnil(L, COMPLETE + 2)) {
      lua_settop(L, COMPLETE + 3);
      ty_cli_report(L, LUA_ERRSYNTAX);
    } else {
      lua_settop(L, COMPLETE + 2);
      run_chunk(L);
    }
  }
}

static int open_library(lua_State *L) {
  static const char *const functions[] = { "compile", "show", "complete" };
  if (lua_getglobal(L, "ty") == LUA_TNIL) {
    lua_getglobal(L, "require");
    lua_pushliteral(L, "tycho");
    lua_call(L, 1, 1);
    lua_setglobal(L, "ty");
  }
  lua_settop(L, 0);
  lua_getglobal(L, "require");
  lua_pushliteral(L, "tycho.prompt");
  lua_call(L, 1, 1);
  for (int i = 0; i < COMPLETE; i++) lua_getfield(L, 1, functions[i]);
  lua_remove(L, 1);
  return COMPLETE;
}

int ty_cli_prompt(lua_State *L) {
  lua_settop(L, 0);
  lua_pushcfunction(L, open_library);
  int status = ty_cli_call(L, 0, COMPLETE);
  if (status != LUA_OK) {
    ty_cli_report(L, status);
    return 1;
  }
  if (isatty(STDIN_FILENO)) {
    printf("Tycho %s, Lua %s.%s.%s: ?name explains, Tab completes, Ctrl-C stops, exit or Ctrl-D leaves\n", TY_VERSION,
           LUA_VERSION_MAJOR, LUA_VERSION_MINOR, LUA_VERSION_RELEASE);
  }
  ty_cli_edit_open(complete, L);
  do { /* an error that reaches us here is the prompt's own (memory, a Ctrl-C while compiling): report and go on */
    lua_settop(L, COMPLETE);
    lua_pushcfunction(L, loop);
    for (int i = 1; i <= COMPLETE; i++) lua_pushvalue(L, i);
    status = lua_pcall(L, COMPLETE, 0, 0);
    ty_cli_report(L, status);
  } while (status != LUA_OK);
  ty_cli_edit_close();
  return 0;
}
