/* Tycho's C library as installed: cc program.c $(pkg-config --cflags --libs tycho) */
#include "src/tycho.h"
