/* Reading pickles as data: see pickle.h. The subset is that of PyTorch's own weights-only reader, protocol 2. Nothing
 * is ever looked up or called: a global name is one of a short list, and "calling" it makes one of our values. */
#include "pickle.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VALUES_MOST = 1 << 24, GLOBAL_NAME_MOST = 200 };

static bool __attribute__((format(printf, 2, 3))) fail(const ty_pickle *p, const char *format, ...) {
  char what[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "torch %s: %s", ty_quote_text(p->file), what);
}

/* ---- values, by position because the arrays move while they grow ---- */

static ty_pickle_value *at(const ty_pickle *p, uint32_t i) { return &((ty_pickle_value *)(void *)p->values.data)[i]; }
static size_t stack_size(const ty_pickle *p) { return p->stack.size / sizeof(uint32_t); }
static uint32_t *stack(const ty_pickle *p) { return (uint32_t *)(void *)p->stack.data; }

const ty_pickle_value *ty_pickle_at(const ty_pickle *p, uint32_t i) { return at(p, i); }

uint32_t ty_pickle_item(const ty_pickle *p, const ty_pickle_value *list, uint32_t i) {
  return ((const uint32_t *)(const void *)p->items.data)[list->first + i];
}

static bool push_index(ty_pickle *p, uint32_t i) { return ty_bytes_put(&p->stack, &i, sizeof i); }

static bool push(ty_pickle *p, ty_pickle_value v) {
  size_t i = p->values.size / sizeof v;
  if (i >= VALUES_MOST) return fail(p, "data.pkl holds more than %d values", VALUES_MOST);
  return ty_bytes_put(&p->values, &v, sizeof v) && push_index(p, (uint32_t)i);
}

static bool push_kind(ty_pickle *p, ty_pickle_kind kind) { return push(p, (ty_pickle_value){ .kind = (uint8_t)kind }); }
static bool push_int(ty_pickle *p, int64_t n) { return push(p, (ty_pickle_value){ .kind = TY_PICKLE_INT, .i = n }); }

/* Above the last mark (or the bottom) something must be left to take. */
static bool pop(ty_pickle *p, uint32_t *out) {
  size_t n = stack_size(p);
  if (n == 0 || at(p, stack(p)[n - 1])->kind == TY_PICKLE_MARK) return fail(p, "data.pkl takes from an empty stack");
  *out = stack(p)[n - 1];
  p->stack.size -= sizeof(uint32_t);
  return true;
}

static bool top(const ty_pickle *p, uint32_t *out) {
  size_t n = stack_size(p);
  if (n == 0) return fail(p, "data.pkl takes from an empty stack");
  *out = stack(p)[n - 1];
  return true;
}

/* The position of the last mark. A mark is found by going down the stack, which is paid for by what is then taken. */
static bool find_mark(const ty_pickle *p, size_t *out) {
  for (size_t n = stack_size(p); n > 0; n--)
    if (at(p, stack(p)[n - 1])->kind == TY_PICKLE_MARK) {
      *out = n - 1;
      return true;
    }
  return fail(p, "data.pkl has no mark where one is needed");
}

/* The `count` values on top of the stack as a tuple in their place, and the mark below them when `marked`. */
static bool make_tuple(ty_pickle *p, size_t count, bool marked) {
  size_t n = stack_size(p);
  if (count > n) return fail(p, "data.pkl takes from an empty stack");
  for (size_t i = n - count; i < n; i++)
    if (at(p, stack(p)[i])->kind == TY_PICKLE_MARK) return fail(p, "data.pkl has a mark inside a tuple");
  ty_pickle_value v = { .kind = TY_PICKLE_TUPLE,
                        .first = (uint32_t)(p->items.size / sizeof(uint32_t)),
                        .count = (uint32_t)count };
  if (count && !ty_bytes_put(&p->items, stack(p) + n - count, count * sizeof(uint32_t))) return false;
  p->stack.size = (n - count - marked) * sizeof(uint32_t);
  return push(p, v);
}

/* One more entry of a list, or of a dictionary under `key`. */
static bool add_entry(ty_pickle *p, uint32_t owner, uint32_t key, uint32_t value) {
  uint32_t index = (uint32_t)(p->entries.size / sizeof(ty_pickle_entry));
  if (index >= VALUES_MOST) return fail(p, "data.pkl holds more than %d entries", VALUES_MOST);
  if (!ty_bytes_put(&p->entries, &(ty_pickle_entry){ key, value, UINT32_MAX }, sizeof(ty_pickle_entry))) return false;
  ty_pickle_value *v = at(p, owner);
  if (v->count) ((ty_pickle_entry *)(void *)p->entries.data)[v->last].next = index;
  else v->first = index;
  v->last = index;
  v->count++;
  return true;
}

const ty_pickle_entry *ty_pickle_entry_at(const ty_pickle *p, uint32_t i) {
  return i == UINT32_MAX ? NULL : &((const ty_pickle_entry *)(const void *)p->entries.data)[i];
}

/* ---- bytes ---- */

static bool take(ty_pickle *p, size_t size, const uint8_t **out) {
  if (size > p->size - p->cursor) return fail(p, "data.pkl ends in the middle of a value");
  *out = p->data + p->cursor;
  p->cursor += size;
  return true;
}

static bool take_number(ty_pickle *p, int bytes, uint64_t *out) {
  const uint8_t *b = NULL;
  if (!take(p, (size_t)bytes, &b)) return false;
  *out = 0;
  for (int i = bytes - 1; i >= 0; i--) *out = *out << 8 | b[i];
  return true;
}

static bool take_line(ty_pickle *p, const char **out, size_t *size) {
  const uint8_t *begin = p->data + p->cursor, *end = memchr(begin, '\n', p->size - p->cursor);
  if (!end || end - begin > GLOBAL_NAME_MOST) return fail(p, "data.pkl has a name without an end");
  *out = (const char *)begin;
  *size = (size_t)(end - begin);
  p->cursor += *size + 1;
  return true;
}

static bool push_text(ty_pickle *p, size_t size) {
  const uint8_t *b = NULL;
  if (!take(p, size, &b)) return false;
  if (!ty_valid_utf8(b, size)) return fail(p, "data.pkl has text that is not UTF-8: %s", ty_quote(b, size));
  return push(p, (ty_pickle_value){ .kind = TY_PICKLE_TEXT, .text = (const char *)b, .count = (uint32_t)size });
}

/* ---- what has a name ---- */

static const struct {
  const char *module, *name;
  ty_pickle_global global;
  ty_dtype dtype;
} known[] = {
  { "collections", "OrderedDict", TY_PICKLE_ORDERED_DICT, TY_F32 },
  { "torch", "Size", TY_PICKLE_SIZE, TY_F32 },
  { "torch._utils", "_rebuild_tensor_v2", TY_PICKLE_TENSOR, TY_F32 },
  { "torch._utils", "_rebuild_parameter", TY_PICKLE_PARAMETER, TY_F32 },
  { "torch", "FloatStorage", TY_PICKLE_STORAGE_TYPE, TY_F32 },
  { "torch", "DoubleStorage", TY_PICKLE_STORAGE_TYPE, TY_F64 },
  { "torch", "HalfStorage", TY_PICKLE_STORAGE_TYPE, TY_F16 },
  { "torch", "BFloat16Storage", TY_PICKLE_STORAGE_TYPE, TY_BF16 },
  { "torch", "LongStorage", TY_PICKLE_STORAGE_TYPE, TY_I64 },
  { "torch", "IntStorage", TY_PICKLE_STORAGE_TYPE, TY_I32 },
  { "torch", "ShortStorage", TY_PICKLE_STORAGE_TYPE, TY_I16 },
  { "torch", "CharStorage", TY_PICKLE_STORAGE_TYPE, TY_I8 },
  { "torch", "ByteStorage", TY_PICKLE_STORAGE_TYPE, TY_U8 },
  { "torch", "BoolStorage", TY_PICKLE_STORAGE_TYPE, TY_BOOL },
};

static bool same(const char *text, size_t size, const char *word) {
  return strlen(word) == size && memcmp(text, word, size) == 0;
}

static bool push_global(ty_pickle *p) {
  const char *module, *name;
  size_t module_size, name_size;
  if (!take_line(p, &module, &module_size) || !take_line(p, &name, &name_size)) return false;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (same(module, module_size, known[i].module) && same(name, name_size, known[i].name))
      return push(p, (ty_pickle_value){ .kind = TY_PICKLE_GLOBAL,
                                        .global = (uint8_t)known[i].global,
                                        .dtype = (uint8_t)known[i].dtype });
  return fail(p,
              "data.pkl asks for %s of module %s. Only tensors, numbers, text, lists and dictionaries are read, and no "
              "code is ever run; save the state_dict() alone, or as safetensors",
              ty_quote(name, name_size), ty_quote(module, module_size));
}

/* Element `i` of a tuple where it is of that kind, else NULL; NULL as well of what is no tuple. */
static const ty_pickle_value *argument(const ty_pickle *p, const ty_pickle_value *tuple, uint32_t i,
                                       ty_pickle_kind kind) {
  if (tuple->kind != TY_PICKLE_TUPLE || i >= tuple->count) return NULL;
  const ty_pickle_value *v = at(p, ty_pickle_item(p, tuple, i));
  return v->kind == kind ? v : NULL;
}

static bool call(ty_pickle *p) {
  uint32_t tuple = 0, function = 0;
  if (!pop(p, &tuple) || !pop(p, &function)) return false;
  const ty_pickle_value *args = at(p, tuple), *f = at(p, function);
  if (f->kind != TY_PICKLE_GLOBAL || args->kind != TY_PICKLE_TUPLE)
    return fail(p, "data.pkl calls what is not a function of the list");
  switch (f->global) {
    case TY_PICKLE_ORDERED_DICT:
      if (args->count) break; /* PyTorch fills it afterwards */
      return push_kind(p, TY_PICKLE_DICT);
    case TY_PICKLE_SIZE:
      if (args->count != 1 || !argument(p, args, 0, TY_PICKLE_TUPLE)) break;
      return push_index(p, ty_pickle_item(p, args, 0));
    case TY_PICKLE_PARAMETER:
      if (!argument(p, args, 0, TY_PICKLE_TENSOR_VALUE)) break;
      return push_index(p, ty_pickle_item(p, args, 0));
    case TY_PICKLE_TENSOR:
      if (!argument(p, args, 0, TY_PICKLE_STORAGE) || !argument(p, args, 1, TY_PICKLE_INT) ||
          !argument(p, args, 2, TY_PICKLE_TUPLE) || !argument(p, args, 3, TY_PICKLE_TUPLE))
        break;
      return push(p, (ty_pickle_value){ .kind = TY_PICKLE_TENSOR_VALUE, .first = args->first, .count = args->count });
  }
  return fail(p, "data.pkl calls a function with arguments that do not fit it");
}

/* ('storage', type, key, device, count): where the bytes of a tensor are. */
static bool push_storage(ty_pickle *p) {
  uint32_t id;
  if (!pop(p, &id)) return false;
  const ty_pickle_value *tuple = at(p, id), *word = argument(p, tuple, 0, TY_PICKLE_TEXT);
  if (tuple->count != 5 || !word || !same(word->text, word->count, "storage"))
    return fail(p, "data.pkl refers to something that is no storage");
  const ty_pickle_value *type = argument(p, tuple, 1, TY_PICKLE_GLOBAL), *key = argument(p, tuple, 2, TY_PICKLE_TEXT),
                        *count = argument(p, tuple, 4, TY_PICKLE_INT);
  if (!type || type->global != TY_PICKLE_STORAGE_TYPE || !key || !count || count->i < 0)
    return fail(p, "data.pkl describes a storage wrongly");
  return push(
      p, (ty_pickle_value){
             .kind = TY_PICKLE_STORAGE, .dtype = type->dtype, .text = key->text, .count = key->count, .i = count->i });
}

/* ---- the machine ---- */

/* Everything from `from` on becomes entries of the container at `owner_at` of the stack. */
static bool set_items(ty_pickle *p, size_t owner_at, size_t from, ty_pickle_kind kind) {
  size_t n = stack_size(p), step = kind == TY_PICKLE_DICT ? 2 : 1;
  uint32_t owner = stack(p)[owner_at];
  if (at(p, owner)->kind != kind || (n - from) % step)
    return fail(p, "data.pkl adds entries to what does not take them");
  for (size_t i = from; i < n; i += step)
    if (!add_entry(p, owner, stack(p)[i], stack(p)[i + step - 1])) return false;
  p->stack.size = (owner_at + 1) * sizeof(uint32_t);
  return true;
}

static bool set_marked(ty_pickle *p, ty_pickle_kind kind) {
  size_t mark;
  if (!find_mark(p, &mark)) return false;
  if (mark == 0) return fail(p, "data.pkl takes from an empty stack");
  return set_items(p, mark - 1, mark + 1, kind);
}

static bool set_one(ty_pickle *p, ty_pickle_kind kind) {
  size_t n = stack_size(p), step = kind == TY_PICKLE_DICT ? 2 : 1;
  if (n < step + 1) return fail(p, "data.pkl takes from an empty stack");
  for (size_t i = n - step; i < n; i++)
    if (at(p, stack(p)[i])->kind == TY_PICKLE_MARK) return fail(p, "data.pkl: expected a value, got a mark");
  return set_items(p, n - step - 1, n - step, kind);
}

static bool remember(ty_pickle *p, uint64_t slot) {
  uint32_t value = 0, none = UINT32_MAX;
  if (!top(p, &value)) return false;
  if (slot >= VALUES_MOST || slot > p->size)
    return fail(p, "data.pkl remembers under the number %llu, which is too large", (unsigned long long)slot);
  while (p->memo.size / sizeof value <= slot)
    if (!ty_bytes_put(&p->memo, &none, sizeof none)) return false;
  ((uint32_t *)(void *)p->memo.data)[slot] = value;
  return true;
}

static bool recall(ty_pickle *p, uint64_t slot) {
  if (slot >= p->memo.size / sizeof(uint32_t) || ((uint32_t *)(void *)p->memo.data)[slot] == UINT32_MAX)
    return fail(p, "data.pkl recalls what it has not remembered");
  return push_index(p, ((uint32_t *)(void *)p->memo.data)[slot]);
}

static bool push_long(ty_pickle *p) {
  uint64_t size = 0, n = 0;
  if (!take_number(p, 1, &size)) return false;
  if (size > 8) return fail(p, "data.pkl has an integer of %llu bytes", (unsigned long long)size);
  if (size && !take_number(p, (int)size, &n)) return false;
  int shift = 64 - 8 * (int)size;
  return push_int(p, size ? (int64_t)(n << shift) >> shift : 0);
}

static bool push_float(ty_pickle *p) {
  const uint8_t *b = NULL;
  uint64_t bits = 0;
  ty_pickle_value v = { .kind = TY_PICKLE_FLOAT };
  if (!take(p, 8, &b)) return false;
  for (int i = 0; i < 8; i++) bits = bits << 8 | b[i];
  memcpy(&v.f, &bits, sizeof v.f);
  return push(p, v);
}

static bool step(ty_pickle *p, uint8_t code, bool *done) {
  uint64_t n = 0;
  size_t mark;
  uint32_t value = 0;
  switch (code) {
    case 0x80: /* PROTO */
      if (!take_number(p, 1, &n)) return false;
      return n == 2 ||
             fail(p, "data.pkl is of protocol %llu; 2, the default of torch.save, is read", (unsigned long long)n);
    case 'c': return push_global(p);
    case 'R':                  /* REDUCE */
    case 0x81: return call(p); /* NEWOBJ */
    case 'b':                  /* BUILD: attributes of a dictionary, such as _metadata, are not kept */
      if (!pop(p, &value) || !top(p, &value)) return false;
      return at(p, value)->kind == TY_PICKLE_DICT || fail(p, "data.pkl sets attributes of what has none");
    case 'q': return take_number(p, 1, &n) && remember(p, n);
    case 'r': return take_number(p, 4, &n) && remember(p, n);
    case 'h': return take_number(p, 1, &n) && recall(p, n);
    case 'j': return take_number(p, 4, &n) && recall(p, n);
    case 'J': return take_number(p, 4, &n) && push_int(p, (int32_t)(uint32_t)n);
    case 'K': return take_number(p, 1, &n) && push_int(p, (int64_t)n);
    case 'M': return take_number(p, 2, &n) && push_int(p, (int64_t)n);
    case 0x8a: return push_long(p);
    case 'G': return push_float(p);
    case 'X': return take_number(p, 4, &n) && push_text(p, (size_t)n);
    case 'U': return take_number(p, 1, &n) && push_text(p, (size_t)n);
    case 'Q': return push_storage(p);
    case '}': return push_kind(p, TY_PICKLE_DICT);
    case ']': return push_kind(p, TY_PICKLE_LIST);
    case ')': return push_kind(p, TY_PICKLE_TUPLE);
    case '(': return push_kind(p, TY_PICKLE_MARK);
    case 't': return find_mark(p, &mark) && make_tuple(p, stack_size(p) - mark - 1, true);
    case 0x85: return make_tuple(p, 1, false);
    case 0x86: return make_tuple(p, 2, false);
    case 0x87: return make_tuple(p, 3, false);
    case 'a': return set_one(p, TY_PICKLE_LIST);
    case 'e': return set_marked(p, TY_PICKLE_LIST);
    case 's': return set_one(p, TY_PICKLE_DICT);
    case 'u': return set_marked(p, TY_PICKLE_DICT);
    case 'N': return push_kind(p, TY_PICKLE_NONE);
    case 0x88: return push(p, (ty_pickle_value){ .kind = TY_PICKLE_BOOL, .i = 1 });
    case 0x89: return push(p, (ty_pickle_value){ .kind = TY_PICKLE_BOOL, .i = 0 });
    case '.': *done = true; return pop(p, &p->result);
  }
  return fail(p, "data.pkl has the instruction 0x%02x, which no file of tensors needs", code);
}

bool ty_pickle_read(ty_pickle *p, const void *data, size_t size, const char *file) {
  *p = (ty_pickle){ .file = file, .data = data, .size = size };
  bool done = false;
  const uint8_t *code = NULL;
  while (!done)
    if (!take(p, 1, &code) || !step(p, *code, &done)) return false;
  return true;
}

void ty_pickle_free(ty_pickle *p) {
  ty_bytes_free(&p->values);
  ty_bytes_free(&p->items);
  ty_bytes_free(&p->entries);
  ty_bytes_free(&p->stack);
  ty_bytes_free(&p->memo);
}
