/* Lua values on their way from one Lua state to another. */
#ifndef TY_LUA_MESSAGE_H
#define TY_LUA_MESSAGE_H

#include "handle.h"

typedef struct ty_message {
  struct ty_message *next; /* in a queue */
  char *data;
  size_t length, capacity;
  ty_tensor **tensors; /* each with a reference of the message's own, made for it alone */
  int count, room;
} ty_message;

/* Packs the values at stack indices first to last. Raises when one cannot be sent; nothing leaks then. */
ty_message *ty_message_pack(lua_State *L, int first, int last);
/* A message of one text; NULL without memory. Needs no Lua. */
ty_message *ty_message_of_text(const char *text);
/* Pushes the values and frees the message; returns their number. Frees it when it raises, too. */
int ty_message_unpack(lua_State *L, ty_message *m);
void ty_message_free(ty_message *m);

#endif
