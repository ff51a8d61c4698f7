/* Libraries of our own that a program loads when it first needs them: they lie beside libtycho.so. */
#ifndef TY_BESIDE_H
#define TY_BESIDE_H

#include <stddef.h>

/* Loads `name` from there, or what the environment variable names; flags as dlopen()'s. NULL, with a text in `problem`:
 * the library is not there, which `missing` says, or it cannot be loaded, which `broken` says. *path, which stays until the thread's next call:
 * where it was looked for. */
void *ty_open_beside(const char *name, const char *variable, int flags, const char *missing, const char *broken,
                     const char **path, char *problem, size_t room);

#endif
