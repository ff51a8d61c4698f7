/* Lines from the terminal. libedit does the editing where it is installed; it is loaded when the prompt starts, so that
 * scripts do not pay for it and its readline names cannot meet those of a C module linked with GNU readline. Without
 * it, and when standard input is no terminal, lines are simply read. */
#define _GNU_SOURCE
#include "cli.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <langinfo.h>
#include <limits.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "../../kernels/base.h"

#ifdef TY_HAVE_EDIT
#include <histedit.h>
#endif

enum { KEEP_ENTRIES = 1000 };

static struct {
  char history_file[PATH_MAX]; /* "" when there is nowhere to keep one */
  ty_cli_complete_fn *complete;
  void *context;
  const char *prompt;
  bool terminal;
} state;

/* ---- the history file: one entry per line, with \n and \\ for newlines and backslashes inside ---- */

static bool make_folders(char *path) {
  for (char *p = path + 1; (p = strchr(p, '/')) != NULL; p++) {
    *p = '\0';
    bool ok = mkdir(path, 0700) == 0 || errno == EEXIST;
    *p = '/';
    if (!ok) return false;
  }
  return true;
}

static void find_history_file(void) {
  const char *base = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
  size_t room = sizeof state.history_file;
  int n = -1;
  if (base && base[0] == '/') n = snprintf(state.history_file, room, "%s/tycho/history", base);
  else if (home && home[0] == '/') n = snprintf(state.history_file, room, "%s/.local/state/tycho/history", home);
  if (n < 0 || (size_t)n >= room || !make_folders(state.history_file)) state.history_file[0] = '\0';
}

static void write_entry(FILE *f, const char *entry) {
  for (; *entry; entry++) {
    if (*entry == '\n') fputs("\\n", f);
    else if (*entry == '\\') fputs("\\\\", f);
    else fputc(*entry, f);
  }
  fputc('\n', f);
}

static void decode_entry(char *line) {
  char *to = line;
  for (const char *from = line; *from && *from != '\n'; from++) {
    if (*from == '\\' && from[1]) *to++ = *++from == 'n' ? '\n' : *from;
    else *to++ = *from;
  }
  *to = '\0';
}

static void append_history(const char *entry) {
  if (!state.history_file[0]) return;
  int fd = open(state.history_file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  FILE *f = fd >= 0 ? fdopen(fd, "a") : NULL;
  if (f) {
    write_entry(f, entry);
    fclose(f);
  } else if (fd >= 0) {
    close(fd);
  }
}

#ifdef TY_HAVE_EDIT

/* ---- libedit ---- */

#define EDIT_FUNCTIONS(X) \
  X(el_init)              \
  X(el_end)               \
  X(el_set) X(el_gets) X(el_line) X(el_insertstr) X(el_resize) X(el_source) X(history) X(history_init) X(history_end)

static struct {
  void *library;
  EditLine *line;
  History *past;
#define X(name) __typeof__(name) *name;
  EDIT_FUNCTIONS(X)
#undef X
} edit;

static volatile sig_atomic_t redraw; /* the window changed size, or the program came back from the background */

static void on_redraw(int sig) { redraw = sig; }

static char *show_prompt(EditLine *line) {
  (void)line;
  return (char *)state.prompt;
}

/* Reads one character. libedit's own reader would swallow the first Ctrl-C. */
static int read_character(EditLine *line, wchar_t *out) {
  mbstate_t decoding;
  memset(&decoding, 0, sizeof decoding);
  for (;;) {
    char byte;
    ssize_t n = read(STDIN_FILENO, &byte, 1);
    if (n == 1) {
      switch (mbrtowc(out, &byte, 1, &decoding)) {
        case (size_t)-2: continue;                                        /* more bytes to come */
        case (size_t)-1: memset(&decoding, 0, sizeof decoding); continue; /* not a character: dropped */
        default: return 1;
      }
    }
    if (n == 0) return 0;
    if (errno != EINTR || ty_interrupted) return -1;
    if (redraw == SIGCONT) edit.el_set(line, EL_PREP_TERM, 1);
    if (redraw) edit.el_resize(line);
    if (redraw) edit.el_set(line, EL_REFRESH);
    redraw = 0;
  }
}

static unsigned char complete_word(EditLine *line, int character) {
  (void)character;
  const LineInfo *info = edit.el_line(line);
  size_t length = (size_t)(info->cursor - info->buffer);
  bool blank = true;
  for (size_t i = 0; i < length; i++) blank = blank && (info->buffer[i] == ' ' || info->buffer[i] == '\n');
  if (blank) return edit.el_insertstr(line, "  ") == 0 ? CC_REFRESH : CC_ERROR;
  char *text = strndup(info->buffer, length);
  if (!text) return CC_ERROR;
  ty_cli_completion c = state.complete(state.context, text, length);
  free(text);
  if (c.insert && c.insert[0] && edit.el_insertstr(line, c.insert) != 0) return CC_ERROR;
  return c.printed ? CC_REDISPLAY : c.insert && c.insert[0] ? CC_REFRESH : CC_ERROR;
}

static void load_history(void) {
  HistEvent event;
  edit.history(edit.past, &event, H_SETSIZE, KEEP_ENTRIES);
  edit.history(edit.past, &event, H_SETUNIQUE, 1);
  FILE *f = state.history_file[0] ? fopen(state.history_file, "r") : NULL;
  if (!f) return;
  char *line = NULL;
  size_t room = 0, entries = 0;
  while (getline(&line, &room, f) > 0) {
    decode_entry(line);
    if (line[0]) edit.history(edit.past, &event, H_ENTER, line);
    entries++;
  }
  free(line);
  fclose(f);
  if (entries < 2 * KEEP_ENTRIES) return;
  /* Long enough to cut: the newest entries go to a file beside it that then takes its name. */
  char beside[PATH_MAX + 8];
  snprintf(beside, sizeof beside, "%s.new", state.history_file);
  int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  f = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (!f) return;
  for (int r = edit.history(edit.past, &event, H_LAST); r >= 0; r = edit.history(edit.past, &event, H_PREV))
    write_entry(f, event.str);
  if (fclose(f) == 0) rename(beside, state.history_file);
}

static bool load_library(void) {
  edit.library = dlopen("libedit.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!edit.library) edit.library = dlopen("libedit.so.0", RTLD_NOW | RTLD_LOCAL);
  if (!edit.library) return false;
  bool ok = true;
#define X(name) ok = (*(void **)&edit.name = dlsym(edit.library, #name)) != NULL && ok;
  EDIT_FUNCTIONS(X)
#undef X
  return ok;
}

static void open_editor(void) {
  if (!load_library()) return;
  setlocale(LC_CTYPE, "");
  if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
  edit.past = edit.history_init();
  edit.line = edit.past ? edit.el_init("tycho", stdin, stdout, stderr) : NULL;
  if (!edit.line) return;
  load_history();
  EditLine *e = edit.line;
  edit.el_set(e, EL_PROMPT, show_prompt);
  edit.el_set(e, EL_EDITOR, "emacs");
  edit.el_set(e, EL_SIGNAL, 0);
  edit.el_set(e, EL_GETCFN, read_character);
  edit.el_set(e, EL_HIST, edit.history, edit.past);
  edit.el_set(e, EL_ADDFN, "tycho-complete", "Complete the word", complete_word);
  static const char *const keys[][2] = {
    { "\t", "tycho-complete" },           { "^R", "em-inc-search-prev" },  { "^W", "ed-delete-prev-word" },
    { "\033[3~", "ed-delete-next-char" }, { "\033[1~", "ed-move-to-beg" }, { "\033[4~", "ed-move-to-end" },
    { "\033[H", "ed-move-to-beg" },       { "\033[F", "ed-move-to-end" },  { "\033[1;5C", "em-next-word" },
    { "\033[1;5D", "ed-prev-word" },
  };
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) edit.el_set(e, EL_BIND, keys[i][0], keys[i][1], NULL);
  edit.el_source(e, NULL); /* ~/.editrc */
  struct sigaction action = { .sa_handler = on_redraw };
  sigemptyset(&action.sa_mask);
  sigaction(SIGWINCH, &action, NULL);
  sigaction(SIGCONT, &action, NULL);
}

static ty_cli_input read_edited(char **line) {
  int count = 0;
  const char *text = edit.el_gets(edit.line, &count);
  if (!text || count <= 0) {
    if (ty_interrupted) return TY_CLI_INTERRUPTED;
    fputc('\n', stdout);
    return TY_CLI_END;
  }
  *line = strndup(text, (size_t)count - (text[count - 1] == '\n'));
  return *line ? TY_CLI_LINE : TY_CLI_END;
}

static bool editing(void) { return edit.line != NULL; }

static void close_editor(void) {
  if (edit.line) edit.el_end(edit.line);
  if (edit.past) edit.history_end(edit.past);
  edit.line = NULL;
  edit.past = NULL;
}

static void remember(const char *entry) {
  HistEvent event;
  edit.history(edit.past, &event, H_ENTER, entry);
}

#else

static void open_editor(void) {}
static void close_editor(void) {}
static bool editing(void) { return false; }
static ty_cli_input read_edited(char **line) { return *line = NULL, TY_CLI_END; }
static void remember(const char *entry) { (void)entry; }

#endif

void ty_cli_edit_open(ty_cli_complete_fn *complete, void *context) {
  state.terminal = isatty(STDIN_FILENO);
  state.complete = complete;
  state.context = context;
  if (!state.terminal) return;
  find_history_file();
  open_editor();
}

void ty_cli_edit_close(void) { close_editor(); }

ty_cli_input ty_cli_edit_read(const char *prompt, char **line) {
  *line = NULL;
  state.prompt = prompt;
  fflush(stdout);
  if (editing()) return read_edited(line);
  if (state.terminal) {
    fputs(prompt, stdout);
    fflush(stdout);
  }
  size_t room = 0;
  errno = 0;
  ssize_t n = getline(line, &room, stdin);
  if (n < 0) {
    free(*line);
    *line = NULL;
    bool interrupted = ty_interrupted;
    clearerr(stdin);
    return interrupted ? TY_CLI_INTERRUPTED : TY_CLI_END;
  }
  if (n > 0 && (*line)[n - 1] == '\n') (*line)[n - 1] = '\0';
  return TY_CLI_LINE;
}

void ty_cli_edit_remember(const char *entry) {
  if (!state.terminal || !entry[0]) return;
  if (editing()) remember(entry);
  append_history(entry);
}
