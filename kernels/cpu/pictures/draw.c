/* Pictures drawn in integers: draw_sprites, draw_background and pixel_noise. A picture is the work of one thread. The sprites that
 * the list names are first made into pyramids of texels times alpha, which a pixel samples four times, bilinearly. */
#include "../cpu.h"

#include <string.h>

#include "../../draw.h"

typedef uint16_t texel __attribute__((vector_size(8)));   /* red, green, blue times alpha, 255 alpha */
typedef uint32_t sample __attribute__((vector_size(16))); /* the same while it is computed */

typedef struct draw_ctx {
  int64_t n, k, h, w, m, side;
  const uint8_t *atlas;
  const int32_t *list;
  uint8_t *picture;
  int8_t *owner;
  int32_t *boxes, *overlap;
  int64_t tasks;
  uint64_t *covers; /* of a task: which rows of the list cover a pixel */
  int32_t *slot;    /* of a sprite: its place among the pyramids, -1 for one that is not used */
  int32_t *used;    /* the sprite of a slot */
  texel *texels;    /* the pyramids, one after another */
  ty_tint *tints;   /* of a slot; red, green and blue are the list's */
  int64_t each;     /* texels of a pyramid */
} draw_ctx;

/* ---- pyramids ---- */

static sample wide(texel t) { return __builtin_convertvector(t, sample); }

static void halve(const texel *from, int64_t side, texel *to) {
  int64_t half = (side + 1) / 2, pitch = side + 2;
  for (int64_t y = 0; y < half; y++)
    for (int64_t x = 0; x < half; x++) { /* an odd side's last pair reaches into the rim, which is empty */
      const texel *t = from + (1 + 2 * y) * pitch + 1 + 2 * x;
      sample sum = wide(t[0]) + wide(t[1]) + wide(t[pitch]) + wide(t[pitch + 1]);
      to[(1 + y) * (half + 2) + 1 + x] = __builtin_convertvector((sum + 2) >> 2, texel);
    }
}

static void make_pyramid(const draw_ctx *c, int64_t slot) {
  const int64_t side = c->side, plane = side * side, pitch = side + 2;
  const uint8_t *rgba = c->atlas + c->used[slot] * 4 * plane;
  texel *level = c->texels + slot * c->each;
  int64_t weight = 0, bright = 0;
  memset(level, 0, (size_t)c->each * sizeof *level);
  for (int64_t y = 0; y < side; y++)
    for (int64_t x = 0; x < side; x++) {
      const uint8_t *p = rgba + y * side + x;
      uint32_t alpha = p[3 * plane];
      if (!alpha) continue;
      weight += alpha;
      bright += (int64_t)alpha * (77 * p[0] + 150 * p[plane] + 29 * p[2 * plane]);
      sample t = { p[0], p[plane], p[2 * plane], 255 };
      level[(1 + y) * pitch + 1 + x] = __builtin_convertvector(t * alpha, texel);
    }
  c->tints[slot] = ty_tint_of(weight ? (int32_t)(bright / (weight * 256)) : 128);
  for (int64_t s = side; s > 1; s = (s + 1) / 2) {
    texel *next = level + (s + 2) * (s + 2);
    halve(level, s, next);
    level = next;
  }
}

static void make_pyramids(void *context, int64_t begin, int64_t end) {
  for (int64_t slot = begin; slot < end; slot++) make_pyramid(context, slot);
}

/* ---- drawing ---- */

/* The range of x in which from + x * step lies within [low, high], cut to [*begin, *end); not smaller than it is. */
static void clip(int64_t from, int64_t step, int64_t low, int64_t high, int64_t *begin, int64_t *end) {
  if (step == 0) {
    if (from < low || from > high) *end = *begin;
    return;
  }
  int64_t first = (step > 0 ? low - from : high - from) / step, last = (step > 0 ? high - from : low - from) / step;
  if (first - 1 > *begin) *begin = first - 1; /* the quotients are cut towards 0 */
  if (last + 2 < *end) *end = last + 2;
}

typedef struct sprite_ctx {
  ty_sprite s;
  const texel *texels; /* of the level */
  int level;
  int64_t side, pitch;
} sprite_ctx;

/* Added to *sum, the texels around (u, v), bilinearly. */
static inline void add_sample(const sprite_ctx *c, int64_t u, int64_t v, sample *sum) {
  u = (u >> c->level) - TY_DRAW_ONE / 2;
  v = (v >> c->level) - TY_DRAW_ONE / 2;
  int64_t x = (u >> 16) + 1, y = (v >> 16) + 1;
  if ((uint64_t)x > (uint64_t)c->side || (uint64_t)y > (uint64_t)c->side) return;
  uint32_t s = (uint32_t)(u >> 8) & 255, t = (uint32_t)(v >> 8) & 255;
  const texel *p = c->texels + y * c->pitch + x;
  *sum += (wide(p[0]) * ((256 - s) * (256 - t)) + wide(p[1]) * (s * (256 - t)) + wide(p[c->pitch]) * ((256 - s) * t) +
           wide(p[c->pitch + 1]) * (s * t) + 32768) >>
          16;
}

static void draw_one(const draw_ctx *c, int64_t picture, int64_t j, uint64_t *covers) {
  const int64_t plane = c->h * c->w, k = c->k;
  const ty_sprite s = ty_sprite_read(c->list + (picture * k + j) * TY_SPRITE_FIELDS);
  int32_t *box = c->boxes + (picture * k + j) * 5, *overlap = c->overlap + picture * k * k;
  if (s.index < 0) return;
  const int64_t slot = c->slot[s.index];
  sprite_ctx p = { .s = s, .level = ty_sprite_level(&s, c->side), .side = c->side };
  p.texels = c->texels + slot * c->each + ty_pyramid_level(c->side, p.level);
  for (int i = 0; i < p.level; i++) p.side = (p.side + 1) / 2;
  p.pitch = p.side + 2;

  const int64_t a = s.a, b = s.b, d = s.d, e = s.e, low = -((int64_t)TY_DRAW_ONE << p.level) / 2;
  const int64_t high = ((p.side << 16) + TY_DRAW_ONE / 2) << p.level;
  const int64_t reach_u = ((a < 0 ? -a : a) + (b < 0 ? -b : b)) / 4 + 1;
  const int64_t reach_v = ((d < 0 ? -d : d) + (e < 0 ? -e : e)) / 4 + 1;
  for (int64_t y = 0; y < c->h; y++) {
    int64_t u = s.c + ((a + b) >> 1) + b * y, v = s.f + ((d + e) >> 1) + e * y, begin = 0, end = c->w;
    clip(u, a, low - reach_u, high + reach_u, &begin, &end);
    clip(v, d, low - reach_v, high + reach_v, &begin, &end);
    for (int64_t x = begin; x < end; x++) {
      const int64_t ux = u + a * x, vx = v + d * x;
      sample sum = { 0 };
      add_sample(&p, ux + ((a + b) >> 2), vx + ((d + e) >> 2), &sum);
      add_sample(&p, ux - ((a + b) >> 2), vx - ((d + e) >> 2), &sum);
      add_sample(&p, ux + ((a - b) >> 2), vx + ((d - e) >> 2), &sum);
      add_sample(&p, ux - ((a - b) >> 2), vx - ((d - e) >> 2), &sum);
      sum = (sum + 2) >> 2;
      if (!sum[3]) continue;
      uint32_t rgba[4] = { sum[0], sum[1], sum[2], sum[3] };
      if (s.strength) ty_tint_apply(&s, c->tints + slot, rgba);

      const int64_t at = y * c->w + x;
      uint8_t *out = c->picture + picture * 3 * plane + at;
      const uint32_t opacity = (uint32_t)s.opacity, alpha = rgba[3] * opacity >> 8;
      for (int i = 0; i < 3; i++) out[i * plane] = ty_draw_over(out[i * plane], rgba[i] * opacity >> 8, alpha);

      if (rgba[3] < TY_DRAW_COVERED) continue;
      if (x < box[0]) box[0] = (int32_t)x;
      if (y < box[1]) box[1] = (int32_t)y;
      if (x >= box[2]) box[2] = (int32_t)x + 1;
      box[3] = (int32_t)y + 1;
      for (uint64_t others = covers[at]; others; others &= others - 1) overlap[j * k + __builtin_ctzll(others)]++;
      covers[at] |= (uint64_t)1 << j;
      overlap[j * k + j]++;
      c->owner[picture * plane + at] = (int8_t)j;
    }
  }
}

static void draw_picture(const draw_ctx *c, int64_t picture, uint64_t *covers) {
  const int64_t plane = c->h * c->w, k = c->k;
  int32_t *boxes = c->boxes + picture * k * 5, *overlap = c->overlap + picture * k * k;
  int8_t *owner = c->owner + picture * plane;
  if (plane) {
    memset(owner, TY_DRAW_NOBODY, (size_t)plane);
    memset(covers, 0, (size_t)plane * sizeof *covers);
  }
  if (k) memset(overlap, 0, (size_t)(k * k) * sizeof *overlap);
  for (int64_t j = 0; j < k; j++) {
    int32_t nothing[5] = { (int32_t)c->w, (int32_t)c->h, 0, 0, 0 };
    memcpy(boxes + j * 5, nothing, sizeof nothing);
    draw_one(c, picture, j, covers);
    if (!overlap[j * k + j]) memset(boxes + j * 5, 0, sizeof nothing);
  }
  for (int64_t j = 0; j < k; j++)
    for (int64_t i = 0; i < j; i++) overlap[i * k + j] = overlap[j * k + i];
  for (int64_t at = 0; at < plane; at++)
    if (owner[at] >= 0) boxes[owner[at] * 5 + 4]++;
}

static void draw_pictures(void *context, int64_t begin, int64_t end) {
  const draw_ctx *c = context;
  const int64_t share = (c->n + c->tasks - 1) / c->tasks;
  for (int64_t task = begin; task < end; task++)
    for (int64_t i = task * share; i < (task + 1) * share && i < c->n && !ty_interrupted; i++)
      draw_picture(c, i, c->covers + task * c->h * c->w);
}

/* Which sprites the list names; false after ty_fail() for one that the atlas does not have. */
static bool find_used(draw_ctx *c, int64_t *count) {
  for (int64_t i = 0; i < c->m; i++) c->slot[i] = -1;
  *count = 0;
  for (int64_t i = 0; i < c->n * c->k; i++) {
    int32_t index = c->list[i * TY_SPRITE_FIELDS];
    if (index < -1 || index >= c->m)
      return ty_fail(TY_EINDEX, "draw_sprites: list: sprite %d of picture %lld is not one of the atlas's %lld", index,
                     (long long)(i / c->k), (long long)c->m);
    if (index < 0 || c->slot[index] >= 0) continue;
    c->used[*count] = index;
    c->slot[index] = (int32_t)(*count)++;
  }
  return true;
}

/* in: canvas, atlas, list; out: picture, owner, boxes, overlap. */
bool TY_KERNEL(draw_sprites)(const ty_kernel_args *k) {
  const ty_view *canvas = k->in[0], *atlas = k->in[1], *list = k->in[2];
  draw_ctx c = { .n = canvas->size[0],
                 .k = list->size[1],
                 .h = canvas->size[2],
                 .w = canvas->size[3],
                 .m = atlas->size[0],
                 .side = atlas->size[2],
                 .atlas = atlas->data,
                 .list = list->data,
                 .picture = k->out[0]->data,
                 .owner = k->out[1]->data,
                 .boxes = k->out[2]->data,
                 .overlap = k->out[3]->data };
  if (canvas->count) memcpy(c.picture, canvas->data, (size_t)canvas->count);
  if (!c.n) return true;
  c.tasks = ty_parallel_threads() * 4;
  if (c.tasks > c.n) c.tasks = c.n;
  c.each = ty_pyramid_level(c.side, TY_SPRITE_LEVELS);
  const size_t numbers = (size_t)c.m * 2 * sizeof(int32_t), pixels = (size_t)(c.tasks * c.h * c.w) * sizeof(uint64_t);
  int64_t used;
  size_t texels = 0;
  bool ok = (c.slot = ty_scratch_alloc(numbers)) != NULL;
  c.used = c.slot + c.m;
  if (ok && (ok = find_used(&c, &used))) {
    texels = (size_t)used * ((size_t)c.each * sizeof(texel) + sizeof(ty_tint));
    ok = (c.texels = ty_scratch_alloc(texels)) && (c.covers = ty_scratch_alloc(pixels));
    c.tints = (ty_tint *)(void *)(c.texels + used * c.each);
  }
  if (ok) {
    ty_parallel_for(used, 4, make_pyramids, &c);
    ty_parallel_for(c.tasks, 1, draw_pictures, &c);
  }
  if (c.covers) ty_scratch_free(c.covers, pixels);
  if (c.texels) ty_scratch_free(c.texels, texels);
  if (c.slot) ty_scratch_free(c.slot, numbers);
  return ok;
}

/* ---- backgrounds ---- */

typedef struct background_ctx {
  int64_t h, w;
  const int32_t *list;
  uint8_t *picture;
} background_ctx;

static void draw_backgrounds(void *context, int64_t begin, int64_t end) {
  const background_ctx *c = context;
  const int64_t plane = c->h * c->w;
  for (int64_t i = begin; i < end; i++) {
    const ty_background_job j = ty_background_read(c->list + i * TY_BACKGROUND_FIELDS);
    uint8_t *out = c->picture + i * 3 * plane;
    if (j.b.kind == TY_BACKGROUND_PLAIN) {
      for (int channel = 0; channel < 3; channel++)
        memset(out + channel * plane, ty_background_mix(&j.b, channel, 0), (size_t)plane);
      continue;
    }
    for (int64_t y = 0; y < c->h; y++)
      for (int64_t x = 0; x < c->w; x++, out++) {
        int64_t share = ty_background_share(&j, (2 * x + 1 - c->w) * (TY_DRAW_ONE / 2),
                                            (2 * y + 1 - c->h) * (TY_DRAW_ONE / 2));
        for (int channel = 0; channel < 3; channel++) out[channel * plane] = ty_background_mix(&j.b, channel, share);
      }
  }
}

bool TY_KERNEL(draw_background)(const ty_kernel_args *k) {
  const ty_view *picture = k->out[0];
  background_ctx c = { .h = picture->size[2], .w = picture->size[3], .list = k->in[0]->data, .picture = picture->data };
  for (int64_t i = 0; i < picture->size[0]; i++) {
    int32_t kind = c.list[i * TY_BACKGROUND_FIELDS];
    if (kind < 0 || kind >= TY_BACKGROUND_KINDS)
      return ty_fail(TY_EINDEX, "draw_background: list: kind %d of picture %lld is not one of the %d", kind,
                     (long long)i, TY_BACKGROUND_KINDS);
  }
  if (picture->count) ty_parallel_for(picture->size[0], 1, draw_backgrounds, &c);
  return true;
}

/* ---- noise ---- */

typedef struct noise_ctx {
  int64_t each; /* bytes of a picture */
  const int32_t *list;
  const uint8_t *x;
  uint8_t *y;
} noise_ctx;

static void add_noise(void *context, int64_t begin, int64_t end) {
  const noise_ctx *c = context;
  for (int64_t i = begin; i < end; i++) {
    const int32_t *row = c->list + i * TY_NOISE_FIELDS;
    const uint64_t seed = ty_noise_seed(row);
    const int64_t sigma = ty_noise_sigma(row);
    const uint8_t *x = c->x + i * c->each;
    uint8_t *y = c->y + i * c->each;
    for (int64_t at = 0; at < c->each; at += 4) {
      const ty_philox random = ty_philox_block(seed, (uint64_t)at / 4);
      for (int64_t k = 0; k < 4 && at + k < c->each; k++) y[at + k] = ty_noisy(x[at + k], random.w[k], sigma);
    }
  }
}

bool TY_KERNEL(pixel_noise)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0];
  if (!x->count) return true;
  noise_ctx c = { .each = x->count / x->size[0], .list = k->in[1]->data, .x = x->data, .y = k->out[0]->data };
  ty_parallel_for(x->size[0], 1, add_noise, &c);
  return true;
}
