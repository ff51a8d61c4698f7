/* The `tycho` program: what its files share. */
#ifndef TY_CLI_H
#define TY_CLI_H

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdbool.h>

int luaopen_tycho_core(lua_State *L); /* src/lua */

/* ---- main.c ---- */

/* Set to true in Lua's registry by what recipes share (lua/tycho/recipe): errors that checks raise have no traceback. */
#define TY_CLI_BRIEF_ERRORS "tycho.brief_errors"

/* lua_pcall with a traceback. */
int ty_cli_call(lua_State *L, int nargs, int nresults);
/* Prints the error on the stack's top (and removes it) when status is one. Returns status. */
int ty_cli_report(lua_State *L, int status);

/* ---- state.c ---- */

lua_State *ty_cli_new_state(void); /* NULL when memory is out */

/* ---- interrupt.c: Ctrl-C ---- */

/* From now on Ctrl-C stops Lua code and native ops with the error "interrupted". */
void ty_cli_interrupt_open(lua_State *L);
/* True when Ctrl-C was pressed since the last call. Forgets it, so that what follows runs. */
bool ty_cli_interrupt_take(lua_State *L);

/* ---- program.c: where the program's files are, and the Lua module tycho.program ---- */

/* Finds the Lua library beside the executable and makes `require "tycho..."` find it and the core linked in. */
void ty_cli_program_open(lua_State *L);
/* `name`, or where the program's own folder has it when there is no such file here. Pushes the path and returns it. */
const char *ty_cli_find_script(lua_State *L, const char *name);

/* ---- prompt.c ---- */

int ty_cli_prompt(lua_State *L); /* 0, or 1 when it could not start */

/* ---- edit.c: lines from a terminal, with history and completion where libedit is installed ---- */

/* Called at Tab with the text before the cursor. Pushes nothing; fills `insert` with what to put in at the cursor and
 * prints the candidates itself, returning true, when there are several. */
typedef struct ty_cli_completion {
  const char *insert; /* valid until the next call */
  bool printed;
} ty_cli_completion;
typedef ty_cli_completion ty_cli_complete_fn(void *context, const char *text, size_t length);

typedef enum ty_cli_input { TY_CLI_LINE, TY_CLI_END, TY_CLI_INTERRUPTED } ty_cli_input;

void ty_cli_edit_open(ty_cli_complete_fn *complete, void *context);
void ty_cli_edit_close(void);
/* Reads one line; *line is malloc'ed and has no newline at its end. */
ty_cli_input ty_cli_edit_read(const char *prompt, char **line);
/* Adds one entry (may hold newlines) to the history and its file. */
void ty_cli_edit_remember(const char *entry);

#endif
