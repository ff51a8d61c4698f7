/* Ids to text: the tokens' strings go through the decoders, each of which makes a list of strings of another. */
#define _GNU_SOURCE /* memmem */
#include <stdlib.h>

#include "internal.h"

typedef struct list {
  ty_bytes text;
  size_t *end; /* of each string */
  size_t count, capacity;
} list;

static bool close_string(list *l) {
  if (!ty_grow(&l->end, &l->capacity, l->count, 1, sizeof *l->end)) return false;
  l->end[l->count++] = l->text.size;
  return true;
}

static void clear(list *l) { l->text.size = l->count = 0; }

static ty_str at(const list *l, size_t i) {
  size_t begin = i ? l->end[i - 1] : 0;
  return (ty_str){ l->text.data ? (const char *)l->text.data + begin : "", l->end[i] - begin };
}

/* Appends s with every `from` in it replaced. */
static bool put_replaced(ty_bytes *out, ty_str s, ty_str from, ty_str to) {
  const char *p = s.text, *end = s.text + s.size;
  while (from.size && p < end) {
    const char *hit = memmem(p, (size_t)(end - p), from.text, from.size);
    if (!hit) break;
    if (!ty_bytes_put(out, p, (size_t)(hit - p)) || !ty_bytes_put(out, to.text, to.size)) return false;
    p = hit + from.size;
  }
  return ty_bytes_put(out, p, (size_t)(end - p));
}

/* What the last string of the list is made nicer by: blanks before punctuation and in contractions go. */
static bool clean_up(list *l, size_t begin) {
  static const char *const rules[][2] = {
    { " .", "." },   { " ?", "?" },           { " !", "!" },   { " ,", "," },     { " ' ", "'" },    { " n't", "n't" },
    { " 'm", "'m" }, { " do not", " don't" }, { " 's", "'s" }, { " 've", "'ve" }, { " 're", "'re" },
  };
  ty_bytes text = { 0 };
  bool ok = true;
  for (size_t i = 0; ok && i < sizeof rules / sizeof *rules; i++) {
    ty_str s = { (const char *)l->text.data + begin, l->text.size - begin };
    if (!s.size || !memmem(s.text, s.size, rules[i][0], strlen(rules[i][0]))) continue;
    text.size = 0;
    ok = put_replaced(&text, s, (ty_str){ rules[i][0], strlen(rules[i][0]) },
                      (ty_str){ rules[i][1], strlen(rules[i][1]) });
    l->text.size = begin;
    ok = ok && ty_bytes_put(&l->text, text.data, text.size);
  }
  ty_bytes_free(&text);
  return ok;
}

/* ---- the decoders ---- */

static bool byte_level(const list *in, list *out) {
  ty_bytes bytes = { 0 };
  bool ok = true;
  for (size_t i = 0; ok && i < in->count; i++) {
    ty_str s = at(in, i);
    const uint8_t *p = (const uint8_t *)s.text, *end = p + s.size;
    size_t start = bytes.size;
    for (unsigned n; ok && p < end; p += n) {
      int byte = ty_char_byte(ty_char_at(p, &n));
      if (byte < 0) { /* one strange character, and the token stands for itself */
        bytes.size = start;
        ok = ty_bytes_put(&bytes, s.text, s.size);
        break;
      }
      uint8_t b = (uint8_t)byte;
      ok = ty_bytes_put(&bytes, &b, 1);
    }
  }
  ok = ok && ty_utf8_repair(bytes.data, bytes.size, &out->text) && close_string(out);
  ty_bytes_free(&bytes);
  return ok;
}

static bool wordpiece(const ty_component *d, const list *in, list *out) {
  for (size_t i = 0; i < in->count; i++) {
    ty_str s = at(in, i);
    size_t begin = out->text.size;
    if (i) {
      if (s.size >= d->content.size && memcmp(s.text, d->content.text, d->content.size) == 0)
        s.text += d->content.size, s.size -= d->content.size;
      else if (!ty_bytes_put(&out->text, " ", 1)) return false;
    }
    if (!ty_bytes_put(&out->text, s.text, s.size) || (d->cleanup && !clean_up(out, begin)) || !close_string(out))
      return false;
  }
  return true;
}

static bool metaspace(const ty_component *d, const list *in, list *out) {
  for (size_t i = 0; i < in->count; i++) {
    bool drop = i == 0 && d->prepend != TY_PREPEND_NEVER;
    if (!put_replaced(&out->text, at(in, i), d->content, (ty_str){ " ", drop ? 0 : 1 }) || !close_string(out))
      return false;
  }
  return true;
}

static bool bpe(const ty_component *d, const list *in, list *out) {
  for (size_t i = 0; i < in->count; i++)
    if (!put_replaced(&out->text, at(in, i), d->content, (ty_str){ " ", i + 1 < in->count }) || !close_string(out))
      return false;
  return true;
}

static int hex(char c) {
  return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

static bool end_bytes(ty_bytes *bytes, list *out) {
  if (!bytes->size) return true;
  size_t n = bytes->size;
  bytes->size = 0;
  if (ty_valid_utf8(bytes->data, n)) return ty_bytes_put(&out->text, bytes->data, n) && close_string(out);
  for (size_t i = 0; i < n; i++)
    if (!ty_bytes_put(&out->text, "\xef\xbf\xbd", 3) || !close_string(out)) return false;
  return true;
}

static bool byte_fallback(const list *in, list *out) {
  ty_bytes bytes = { 0 };
  bool ok = true;
  for (size_t i = 0; ok && i < in->count; i++) {
    ty_str s = at(in, i);
    bool named = s.size == 6 && memcmp(s.text, "<0x", 3) == 0 && s.text[5] == '>' && hex(s.text[3]) >= 0 &&
                 hex(s.text[4]) >= 0;
    if (named) {
      uint8_t b = (uint8_t)(hex(s.text[3]) * 16 + hex(s.text[4]));
      ok = ty_bytes_put(&bytes, &b, 1);
    } else {
      ok = end_bytes(&bytes, out) && ty_bytes_put(&out->text, s.text, s.size) && close_string(out);
    }
  }
  ok = ok && end_bytes(&bytes, out);
  ty_bytes_free(&bytes);
  return ok;
}

static bool strip(const ty_component *d, const list *in, list *out) {
  for (size_t i = 0; i < in->count; i++) {
    ty_str s = at(in, i);
    size_t n = d->content.size;
    for (uint64_t k = 0; k < d->start && s.size >= n && memcmp(s.text, d->content.text, n) == 0; k++)
      s.text += n, s.size -= n;
    for (uint64_t k = 0; k < d->stop && s.size >= n && memcmp(s.text + s.size - n, d->content.text, n) == 0; k++)
      s.size -= n;
    if (!ty_bytes_put(&out->text, s.text, s.size) || !close_string(out)) return false;
  }
  return true;
}

static bool ctc(const ty_component *d, const list *in, list *out) {
  for (size_t i = 0; i < in->count; i++) {
    ty_str s = at(in, i);
    if (i) {
      ty_str before = at(in, i - 1);
      if (before.size == s.size && memcmp(before.text, s.text, s.size) == 0) continue;
    }
    size_t begin = out->text.size;
    if (!put_replaced(&out->text, s, d->content, (ty_str){ "", 0 })) return false;
    if (d->cleanup) {
      if (!clean_up(out, begin)) return false;
      ty_bytes text = { 0 };
      bool ok = put_replaced(&text, (ty_str){ (const char *)out->text.data + begin, out->text.size - begin },
                             d->delimiter, (ty_str){ " ", 1 });
      out->text.size = begin;
      ok = ok && ty_bytes_put(&out->text, text.data, text.size);
      ty_bytes_free(&text);
      if (!ok) return false;
    }
    if (out->text.size > begin && !close_string(out)) return false;
  }
  return true;
}

static bool replace(const ty_component *d, ty_work *w, const list *in, list *out) {
  for (size_t i = 0; i < in->count; i++) {
    ty_str s = at(in, i);
    size_t from = 0, done = 0, last = SIZE_MAX, begin, end;
    while (from <= s.size) {
      if (!ty_pattern_next(&d->pattern, &w->matcher, (const uint8_t *)s.text, s.size, from, last, &begin, &end))
        return false;
      if (begin == SIZE_MAX) break;
      if (!ty_bytes_put(&out->text, s.text + done, begin - done) ||
          !ty_bytes_put(&out->text, d->content.text, d->content.size))
        return false;
      from = done = last = end;
    }
    if (!ty_bytes_put(&out->text, s.text + done, s.size - done) || !close_string(out)) return false;
  }
  return true;
}

static bool decode(const ty_component *d, ty_work *w, const list *in, list *out) {
  switch (d->kind) {
    case TY_BYTE_LEVEL: return byte_level(in, out);
    case TY_WORDPIECE_DECODER: return wordpiece(d, in, out);
    case TY_METASPACE: return metaspace(d, in, out);
    case TY_BPE_DECODER: return bpe(d, in, out);
    case TY_BYTE_FALLBACK: return byte_fallback(in, out);
    case TY_STRIP: return strip(d, in, out);
    case TY_CTC: return ctc(d, in, out);
    case TY_REPLACE: return replace(d, w, in, out);
    default: return ty_bytes_put(&out->text, in->text.data, in->text.size) && close_string(out); /* Fuse */
  }
}

static bool gather(const ty_tokenizer *t, const uint32_t *ids, size_t count, bool skip_special, list *out) {
  for (size_t i = 0; i < count; i++) {
    const ty_added *a = ty_added_find(t, ids[i]);
    ty_str s = a ? a->normal : ids[i] < t->vocab.size ? t->vocab.token[ids[i]] : (ty_str){ 0 };
    if (!s.text) return ty_fail(TY_EINVAL, "tokenizer: decode: there is no token %u", ids[i]);
    if (a && a->skipped && skip_special) continue;
    if (!ty_bytes_put(&out->text, s.text, s.size) || !close_string(out)) return false;
  }
  return true;
}

bool ty_tokenizer_decode(ty_tokenizer *t, const uint32_t *ids, size_t count, bool skip_special, ty_bytes *out) {
  list lists[2] = { 0 };
  int now = 0;
  ty_work *w = ty_work_take(t);
  if (!w) return false;
  bool ok = gather(t, ids, count, skip_special, &lists[0]);
  for (size_t i = 0; ok && i < t->decoders.count; i++, now ^= 1) {
    clear(&lists[now ^ 1]);
    ok = decode(&t->decoders.item[i], w, &lists[now], &lists[now ^ 1]);
  }
  for (size_t i = 0; ok && i < lists[now].count; i++) {
    ty_str s = at(&lists[now], i);
    ok = (i == 0 || t->decoders.count || ty_bytes_put(out, " ", 1)) && ty_bytes_put(out, s.text, s.size);
  }
  ty_work_give(t, w);
  for (int i = 0; i < 2; i++) {
    ty_bytes_free(&lists[i].text);
    free(lists[i].end);
  }
  return ok;
}

/* ---- streams ---- */

static bool ends_in_half(const ty_bytes *b) {
  return b->size >= 3 && memcmp(b->data + b->size - 3, "\xef\xbf\xbd", 3) == 0;
}

/* The text of all ids less that of those already put out: what decoders do at the start of a text stays out of it. */
static bool advance(ty_tokenizer *t, ty_stream *s, bool last, ty_bytes *out) {
  ty_bytes before = { 0 }, all = { 0 };
  bool ok = ty_tokenizer_decode(t, s->ids, s->said, s->skip_special, &before) &&
            ty_tokenizer_decode(t, s->ids, s->count, s->skip_special, &all);
  if (ok && all.size > before.size && (last || !ends_in_half(&all))) {
    size_t from = before.size; /* a decoder that changes what was last may shift it into a character */
    while (from < all.size && (all.data[from] & 0xc0) == 0x80) from++;
    ok = ty_bytes_put(out, all.data + from, all.size - from);
    memmove(s->ids, s->ids + s->said, (s->count - s->said) * sizeof *s->ids);
    s->count -= s->said;
    s->said = s->count;
  }
  ty_bytes_free(&before);
  ty_bytes_free(&all);
  return ok;
}

bool ty_stream_put(ty_tokenizer *t, ty_stream *s, const uint32_t *ids, size_t count, ty_bytes *out) {
  for (size_t i = 0; i < count; i++) {
    if (!ty_grow(&s->ids, &s->capacity, s->count, 1, sizeof *s->ids)) return false;
    s->ids[s->count++] = ids[i];
    if (!advance(t, s, false, out)) {
      s->count--; /* an id that is none leaves the stream as it was */
      return false;
    }
  }
  return true;
}

bool ty_stream_finish(ty_tokenizer *t, ty_stream *s, ty_bytes *out) {
  bool ok = s->count == s->said || advance(t, s, true, out);
  s->count = s->said = 0;
  return ok;
}

void ty_stream_free(ty_stream *s) {
  free(s->ids);
  *s = (ty_stream){ 0 };
}
