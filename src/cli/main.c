/* The `tycho` program: options as those of `lua`, and a few words of its own (recipes, serve, doctor, help, version). */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../tycho.h"

static const char usage[] =
    "usage: tycho [options] [FILE.lua [arguments]]\n"
    "       tycho recipes [WORD]     the runnable recipes, or those that mention WORD\n"
    "       tycho watch [DIR]        a page, on this machine, of the training runs below DIR (runs): --help\n"
    "       tycho serve MODEL        a language model behind OpenAI's API, on this machine: --help\n"
    "       tycho doctor             this machine, what Tycho found on it and what is missing\n"
    "       tycho help [NAME]        this text, or the documentation of an op or function\n"
    "       tycho version\n"
    "\n"
    "Without FILE and options: the prompt (`ty` is loaded, Tab completes, ?name explains).\n"
    "A FILE that is not here is looked for in Tycho's own folder: tycho recipes/diffusion/digits.lua --quick\n"
    "\n"
    "  -e CODE     run CODE\n"
    "  -l MODULE   require MODULE into the global of its name (-l g=MODULE: into g)\n"
    "  -i          the prompt, after FILE or CODE\n"
    "  -v          print the version\n"
    "  -E          ignore LUA_INIT and the path variables\n"
    "  -W          show warnings\n"
    "  -           run standard input\n"
    "  --          end of the options\n";

/* Of a recipe, whoever runs it sees what a check found wrong with what he gave, in a line. Where he has to look is in
 * that line; a traceback, which is for errors of the program itself, would bury it. Below the handler stands what raised
 * the error: a C function (`error`, or an op) when it was meant, the Lua function when Lua stopped it. */
static bool is_brief(lua_State *L, const char *text) {
  lua_Debug raiser;
  bool wanted = lua_getfield(L, LUA_REGISTRYINDEX, TY_CLI_BRIEF_ERRORS) == LUA_TBOOLEAN && lua_toboolean(L, -1);
  lua_pop(L, 1);
  if (!wanted || getenv("TYCHO_TRACEBACK") || !lua_getstack(L, 1, &raiser) || !lua_getinfo(L, "S", &raiser))
    return false;
  return raiser.what[0] == 'C' && !strstr(text, "attempt to ") && !strstr(text, "bad argument #");
}

static int message_handler(lua_State *L) {
  const char *text = lua_tostring(L, 1);
  if (!text) {
    if (luaL_callmeta(L, 1, "__tostring") && lua_type(L, -1) == LUA_TSTRING) return 1;
    text = lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1));
  }
  if (is_brief(L, text)) return 1;
  luaL_traceback(L, L, text, 1);
  return 1;
}

int ty_cli_call(lua_State *L, int nargs, int nresults) {
  int base = lua_gettop(L) - nargs;
  lua_pushcfunction(L, message_handler);
  lua_insert(L, base);
  int status = lua_pcall(L, nargs, nresults, base);
  lua_remove(L, base);
  return status;
}

int ty_cli_report(lua_State *L, int status) {
  if (status != LUA_OK) {
    const char *text = lua_tostring(L, -1);
    fflush(stdout);
    fprintf(stderr, "tycho: %s\n", text ? text : "(error message is not a string)");
    fflush(stderr);
    lua_pop(L, 1);
  }
  return status;
}

static void print_version(void) {
  printf("Tycho %s, Lua %s.%s.%s\n", TY_VERSION, LUA_VERSION_MAJOR, LUA_VERSION_MINOR, LUA_VERSION_RELEASE);
}

typedef struct options {
  int script; /* index in argv of the first word that is no option; argc when there is none */
  bool prompt, version, ignore_environment, code, standard_input;
} options;

/* The index of the faulty option, or 0. */
static int parse_options(int argc, char **argv, options *o) {
  *o = (options){ .script = argc };
  for (int i = 1; i < argc; i++) {
    const char *a = argv[i];
    if (a[0] != '-') {
      o->script = i;
      return 0;
    }
    switch (a[1]) {
      case '\0':
        o->script = i;
        o->standard_input = true;
        return 0;
      case '-':
        if (a[2]) return i;
        o->script = i + 1;
        return 0;
      case 'E':
        if (a[2]) return i;
        o->ignore_environment = true;
        break;
      case 'i':
        if (a[2]) return i;
        o->prompt = o->version = true;
        break;
      case 'v':
        if (a[2]) return i;
        o->version = true;
        break;
      case 'W':
        if (a[2]) return i;
        break;
      case 'e': o->code = true; /* fall through */
      case 'l':
        if (!a[2] && (++i >= argc || argv[i][0] == '-')) return i - 1;
        break;
      default: return i;
    }
  }
  return 0;
}

static int run_text(lua_State *L, const char *text, const char *name) {
  int status = luaL_loadbuffer(L, text, strlen(text), name);
  if (status == LUA_OK) status = ty_cli_call(L, 0, 0);
  return status;
}

static int run_library(lua_State *L, const char *word) {
  const char *module = strchr(word, '=');
  if (module) {
    lua_pushlstring(L, word, (size_t)(module - word));
    module++;
  } else {
    const char *dash = strchr(word, '-'); /* a version suffix, as require treats it */
    lua_pushlstring(L, word, dash ? (size_t)(dash - word) : strlen(word));
    module = word;
  }
  lua_getglobal(L, "require");
  lua_pushstring(L, module);
  int status = ty_cli_call(L, 1, 1);
  if (status != LUA_OK) {
    lua_remove(L, -2);
    return status;
  }
  lua_pushglobaltable(L);
  lua_insert(L, -3);
  lua_settable(L, -3);
  lua_pop(L, 1);
  return LUA_OK;
}

/* -e, -l and -W in their order. */
static int run_options(lua_State *L, char **argv, int end) {
  for (int i = 1; i < end; i++) {
    if (argv[i][0] != '-') continue;
    char kind = argv[i][1];
    if (kind == 'W') lua_warning(L, "@on", 0);
    if (kind != 'e' && kind != 'l') continue;
    const char *word = argv[i][2] ? argv[i] + 2 : argv[++i];
    int status = kind == 'e' ? run_text(L, word, "=(command line)") : run_library(L, word);
    if (status != LUA_OK) return status;
  }
  return LUA_OK;
}

static int run_init(lua_State *L) {
  const char *name = "=LUA_INIT_5_4", *init = getenv(name + 1);
  if (!init) init = getenv((name = "=LUA_INIT") + 1);
  if (!init) return LUA_OK;
  if (init[0] != '@') return run_text(L, init, name);
  int status = luaL_loadfile(L, init + 1);
  return status == LUA_OK ? ty_cli_call(L, 0, 0) : status;
}

/* `arg`: the script at 0, what follows it from 1, what precedes it below 0. */
static void set_arg(lua_State *L, int argc, char **argv, int script) {
  if (script == argc) script = 0;
  lua_createtable(L, argc - script - 1 > 0 ? argc - script - 1 : 0, script + 1);
  for (int i = 0; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - script);
  }
  lua_setglobal(L, "arg");
}

static int run_script(lua_State *L, int argc, char **argv, const options *o) {
  const char *file = NULL; /* standard input */
  if (!o->standard_input) {
    file = ty_cli_find_script(L, argv[o->script]);
    lua_getglobal(L, "arg");
    lua_pushstring(L, file);
    lua_rawseti(L, -2, 0);
    lua_pop(L, 1);
  }
  int status = luaL_loadfile(L, file);
  if (status != LUA_OK) return status;
  int nargs = o->script < argc ? argc - o->script - 1 : 0;
  luaL_checkstack(L, nargs + 3, "too many arguments to script");
  for (int i = 0; i < nargs; i++) lua_pushstring(L, argv[o->script + 1 + i]);
  return ty_cli_call(L, nargs, 0);
}

/* A word of the program's own: the function `command` of a Lua module takes the words after it and returns the exit
 * status. */
static int run_command(lua_State *L, const char *module, int argc, char **argv, int first, int *exit_status) {
  lua_getglobal(L, "require");
  lua_pushstring(L, module);
  int status = ty_cli_call(L, 1, 1);
  if (status != LUA_OK) return status;
  lua_getfield(L, -1, "command");
  lua_createtable(L, argc - first, 0);
  for (int i = first; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - first + 1);
  }
  status = ty_cli_call(L, 1, 1);
  if (status == LUA_OK) *exit_status = lua_isinteger(L, -1) ? (int)lua_tointeger(L, -1) : 0;
  return status;
}

/* Returns whether the word was one of ours; then *status says how it went. */
static bool run_word(lua_State *L, int argc, char **argv, const options *o, int *status, int *exit_status) {
  static const char *const modules[][2] = { { "recipes", "tycho.recipes" },
                                            { "watch", "tycho.watch" },
                                            { "serve", "tycho.serve.command" },
                                            { "doctor", "tycho.doctor" } };
  const char *word = argv[o->script];
  if (o->standard_input || strcmp(argv[o->script - 1], "--") == 0) return false;
  for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
    if (strcmp(word, modules[i][0]) == 0) {
      *status = run_command(L, modules[i][1], argc, argv, o->script + 1, exit_status);
      return true;
    }
  }
  if (strcmp(word, "version") == 0) {
    print_version();
    return true;
  }
  if (strcmp(word, "help") == 0) {
    if (o->script + 1 < argc) *status = run_command(L, "tycho.help", argc, argv, o->script + 1, exit_status);
    else fputs(usage, stdout);
    return true;
  }
  return false;
}

typedef struct program {
  int argc;
  char **argv;
  int exit_status;
} program;

static int protected_main(lua_State *L) {
  program *p = lua_touserdata(L, 1);
  int argc = p->argc;
  char **argv = p->argv;
  p->exit_status = 1;
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    fputs(usage, stdout);
    p->exit_status = 0;
    return 0;
  }
  if (argc > 1 && strcmp(argv[1], "--version") == 0) {
    print_version();
    p->exit_status = 0;
    return 0;
  }
  options o;
  int bad = parse_options(argc, argv, &o);
  if (bad) {
    if (argv[bad][1] == 'e' || argv[bad][1] == 'l') fprintf(stderr, "tycho: '%s' needs an argument\n", argv[bad]);
    else fprintf(stderr, "tycho: unrecognized option '%s'\n", argv[bad]);
    fputs(usage, stderr);
    return 0;
  }
  if (o.version && !o.prompt) print_version();
  luaL_checkversion(L);
  if (o.ignore_environment) {
    lua_pushboolean(L, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, "LUA_NOENV");
  }
  luaL_openlibs(L);
  lua_gc(L, LUA_GCGEN, 0, 0); /* as the lua program does; most tensors die young */
  ty_cli_program_open(L);
  ty_cli_interrupt_open(L);
  set_arg(L, argc, argv, o.script);

  int status = o.ignore_environment ? LUA_OK : run_init(L);
  if (status == LUA_OK) status = run_options(L, argv, o.script < argc ? o.script : argc);
  int exit_status = 0;
  bool prompt = o.prompt;
  if (status == LUA_OK && o.script < argc) {
    if (!run_word(L, argc, argv, &o, &status, &exit_status)) status = run_script(L, argc, argv, &o);
  } else if (status == LUA_OK && !o.code && !o.version) {
    if (isatty(STDIN_FILENO)) prompt = true;
    else {
      o.standard_input = true;
      status = run_script(L, argc, argv, &o);
    }
  }
  if (status != LUA_OK) {
    const char *text = lua_tostring(L, -1);
    bool interrupted = ty_cli_interrupt_take(L) && text && strstr(text, "interrupted");
    exit_status = interrupted ? 130 : 1; /* 130: what shells make of Ctrl-C */
    ty_cli_report(L, status);
    prompt = false;
  }
  if (prompt) exit_status = ty_cli_prompt(L);
  p->exit_status = exit_status;
  return 0;
}

int main(int argc, char **argv) {
  lua_State *L = ty_cli_new_state();
  if (!L) {
    fputs("tycho: not enough memory for a Lua state\n", stderr);
    return 1;
  }
  program p = { argc, argv, 1 };
  lua_pushcfunction(L, protected_main);
  lua_pushlightuserdata(L, &p);
  int status = lua_pcall(L, 1, 0, 0);
  ty_cli_report(L, status);
  lua_close(L);
  if (status == LUA_OK && (fflush(stdout) != 0 || ferror(stdout))) { /* a full disk is a failed run */
    fputs("tycho: cannot write standard output\n", stderr);
    return p.exit_status ? p.exit_status : 1;
  }
  return status == LUA_OK ? p.exit_status : 1;
}
