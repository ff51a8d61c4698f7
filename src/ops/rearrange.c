/* Einops' rearrange: "b (h d) t -> b h t d". Left: how the dimensions split into named axes; right: their new order and
 * groups. Rogozhnikov 2022. */
#include <stdio.h>
#include <string.h>

#include "op.h"

enum { MAX_AXES = 24 };

typedef struct axis {
  const char *name; /* NULL: one of the dimensions under "..." */
  int length;
  int64_t size; /* -1: not known yet */
} axis;

/* One side of the arrow: dimension d is made of the axes item[first[d]] .. item[first[d + 1] - 1]. */
typedef struct side {
  int dims, items;
  int first[MAX_AXES + 1], item[MAX_AXES];
} side;

typedef struct rearrangement {
  ty_call *c;
  const char *pattern;
  axis axes[MAX_AXES];
  int count;     /* axes in all */
  int dots, dot; /* dimensions under "..." (-1: none written) and the first of their axes */
} rearrangement;

static bool fail(const rearrangement *r, const char *text) {
  return ty_op_fail(r->c, TY_EINVAL, "pattern: \"%s\": %s", r->pattern, text);
}

static bool fail_axis(const rearrangement *r, const axis *a, const char *text) {
  return ty_op_fail(r->c, TY_EINVAL, "pattern: \"%s\": axis %.*s %s", r->pattern, a->length, a->name, text);
}

static bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= '0' && c <= '9');
}

static int find(const rearrangement *r, const char *name, int length) {
  for (int i = 0; i < r->count; i++)
    if (r->axes[i].name && r->axes[i].length == length && memcmp(r->axes[i].name, name, (size_t)length) == 0) return i;
  return -1;
}

/* The axis of a name: a new one on the left, a known one on the right. */
static bool take_name(rearrangement *r, const char *name, int length, bool left, int *index) {
  axis a = { name, length, -1 };
  *index = find(r, name, length);
  if (name[0] >= '0' && name[0] <= '9') return fail_axis(r, &a, "is a number; only 1 may stand for a dimension");
  if (!left) return *index >= 0 || fail_axis(r, &a, "is not on the left side");
  if (*index >= 0) return fail_axis(r, &a, "is named twice on the left side");
  if (r->count == MAX_AXES) return fail(r, "too many axes");
  *index = r->count;
  r->axes[r->count++] = a;
  return true;
}

static bool add_item(const rearrangement *r, side *s, int index) {
  if (s->items == MAX_AXES) return fail(r, "too many axes");
  s->item[s->items++] = index;
  return true;
}

static bool begin_dim(const rearrangement *r, side *s) {
  if (s->dims == MAX_AXES) return fail(r, "too many dimensions");
  s->first[s->dims++] = s->items;
  return true;
}

/* "...": on the left it is given axes for what the other dimensions leave of x, once their number is known. */
static bool take_dots(rearrangement *r, side *s, bool left, bool group) {
  if (left) {
    if (group) return fail(r, "\"...\" cannot stand in parentheses on the left side");
    if (r->dots >= 0) return fail(r, "\"...\" is written twice on the left side");
    r->dots = 0;
    r->dot = s->dims; /* for now: the place where they go */
    return true;
  }
  if (r->dots < 0) return fail(r, "\"...\" is not on the left side");
  for (int i = 0; i < r->dots; i++) {
    if (!group && !begin_dim(r, s)) return false;
    if (!add_item(r, s, r->dot + i)) return false;
  }
  return true;
}

/* Reads one side up to `end`. */
static bool read_side(rearrangement *r, const char *at, const char *end, bool left, side *s) {
  bool group = false;
  *s = (side){ .dims = 0 };
  while (at < end) {
    char ch = *at;
    if (ch == ' ') {
      at++;
    } else if (ch == '(') {
      if (group) return fail(r, "parentheses inside parentheses");
      if (!begin_dim(r, s)) return false;
      group = true;
      at++;
    } else if (ch == ')') {
      if (!group) return fail(r, "\")\" without \"(\"");
      group = false;
      at++;
    } else if (ch == '.') {
      if (end - at < 3 || memcmp(at, "...", 3) != 0) return fail(r, "expected \"...\"");
      if (!take_dots(r, s, left, group)) return false;
      at += 3;
    } else if (is_name(ch)) {
      const char *name = at;
      while (at < end && is_name(*at)) at++;
      int index, length = (int)(at - name);
      if (!group && !begin_dim(r, s)) return false;
      if (length == 1 && *name == '1') continue; /* a dimension without axes has size 1 */
      if (!take_name(r, name, length, left, &index) || !add_item(r, s, index)) return false;
    } else {
      char text[48];
      snprintf(text, sizeof text, "unexpected character '%c'", ch);
      return fail(r, text);
    }
  }
  s->first[s->dims] = s->items;
  return !group || fail(r, "\"(\" without \")\"");
}

/* "h=4 d=8" */
static bool read_sizes(rearrangement *r, const char *at) {
  while (at && *at) {
    if (*at == ' ' || *at == ',') {
      at++;
      continue;
    }
    const char *name = at;
    while (is_name(*at)) at++;
    int length = (int)(at - name);
    long long size = 0;
    int used = 0;
    if (length == 0 || sscanf(at, " = %18lld%n", &size, &used) != 1)
      return ty_op_fail(r->c, TY_EINVAL, "sizes: expected name=size pairs, got \"%s\"", name);
    int i = find(r, name, length);
    axis a = { name, length, size };
    if (i < 0) return fail_axis(r, &a, "has a size but is not in the pattern");
    if (size < 0) return fail_axis(r, &a, "has a negative size");
    r->axes[i].size = size;
    at += used;
  }
  return true;
}

/* Gives "..." its axes, on the left side. */
static bool place_dots(rearrangement *r, side *left, const ty_tensor *x) {
  if (r->dots < 0) return true;
  int n = x->v.ndim - left->dims, at = r->dot;
  if (n < 0) return true; /* reported by the caller */
  if (r->count + n > MAX_AXES || left->items + n > MAX_AXES || left->dims + n > MAX_AXES)
    return fail(r, "too many axes");
  r->dots = n;
  r->dot = r->count;
  int item = left->first[at];
  memmove(left->item + item + n, left->item + item, sizeof *left->item * (size_t)(left->items - item));
  memmove(left->first + at + n, left->first + at, sizeof *left->first * (size_t)(left->dims - at + 1));
  for (int i = 0; i < n; i++) {
    r->axes[r->count] = (axis){ .name = NULL, .size = -1 };
    left->item[item + i] = r->count++;
    left->first[at + i] = item + i;
  }
  left->items += n;
  left->dims += n;
  for (int d = at + n; d <= left->dims; d++) left->first[d] += n;
  return true;
}

/* Finds the one size of a dimension that was not given. */
static bool solve(rearrangement *r, const side *left, const ty_tensor *x) {
  for (int d = 0; d < left->dims; d++) {
    int64_t size = x->v.size[d], known = 1;
    axis *unknown = NULL;
    for (int i = left->first[d]; i < left->first[d + 1]; i++) {
      axis *a = &r->axes[left->item[i]];
      if (a->size < 0) {
        if (unknown) return fail_axis(r, a, "and another of its group have no size; give one as an option");
        unknown = a;
      } else if (__builtin_mul_overflow(known, a->size, &known)) {
        return fail_axis(r, a, "is too large");
      }
    }
    if (unknown && known > 0 && size % known == 0) unknown->size = size / known;
    else if (unknown && known == 0 && size == 0)
      return fail_axis(r, unknown, "cannot be found from a size of 0; give it as an option");
    else if (unknown || known != size)
      return ty_op_fail(r->c, TY_EINVAL, "pattern: \"%s\": dimension %d of x %s, size %lld, does not fit %s %lld",
                        r->pattern, d, ty_describe(x), (long long)size, unknown ? "a multiple of" : "the size",
                        (long long)known);
  }
  return true;
}

static bool check_same_axes(const rearrangement *r, const side *right) {
  int seen[MAX_AXES] = { 0 };
  for (int i = 0; i < right->items; i++) {
    const axis *a = &r->axes[right->item[i]];
    if (!seen[right->item[i]]++) continue;
    return a->name ? fail_axis(r, a, "is named twice on the right side")
                   : fail(r, "\"...\" is written twice on the right side");
  }
  for (int i = 0; i < r->count; i++) {
    const axis *a = &r->axes[i];
    if (!seen[i])
      return a->name ? fail_axis(r, a, "is missing on the right side")
                     : fail(r, "\"...\" is missing on the right side");
  }
  return true;
}

bool fwd_rearrange(ty_call *c) {
  const ty_rearrange_args *a = TY_ARGS(rearrange, c);
  ty_tensor *x = a->x.t;
  rearrangement r = { .c = c, .pattern = a->pattern.s, .dots = -1 };
  const char *arrow = strstr(r.pattern, "->");
  side left, right;
  if (!arrow) return fail(&r, "expected \"left -> right\"");
  if (!read_side(&r, r.pattern, arrow, true, &left) || !read_sizes(&r, a->sizes.s)) return false;
  if (!place_dots(&r, &left, x)) return false;
  if (left.dims != x->v.ndim)
    return ty_op_fail(c, TY_EINVAL, "pattern: \"%s\" has %d dimensions on the left side, x is %s", r.pattern, left.dims,
                      ty_describe(x));
  if (!solve(&r, &left, x)) return false;
  if (!read_side(&r, arrow + 2, r.pattern + strlen(r.pattern), false, &right) || !check_same_axes(&r, &right))
    return false;
  if (left.items > TY_MAX_DIMS || right.dims > TY_MAX_DIMS) return fail(&r, "more than 8 axes");

  int64_t split[TY_MAX_DIMS], order[TY_MAX_DIMS], merged[TY_MAX_DIMS];
  for (int i = 0; i < left.items; i++) {
    split[i] = r.axes[left.item[i]].size;
    for (int j = 0; j < right.items; j++)
      if (right.item[j] == left.item[i]) order[j] = i;
  }
  for (int d = 0; d < right.dims; d++) {
    merged[d] = 1;
    for (int i = right.first[d]; i < right.first[d + 1]; i++) merged[d] *= r.axes[right.item[i]].size;
  }
  ty_tensor *y = ty_permute(ty_reshape(x, (ty_ints){ split, left.items }), (ty_ints){ order, left.items });
  return ty_out_set(c, 0, ty_reshape(y, (ty_ints){ merged, right.dims }));
}
