/* Multi-resolution hash grids, for every backend: Müller et al. 2022, "Instant Neural Graphics Primitives with a
 * Multiresolution Hash Encoding". A level divides [0, 1]^dims into `resolution` cells a side. Its corners have rows of a
 * table: one each where these are no more than `entries`, else they share `entries` rows by a hash. A position gets the
 * linear interpolation of its cell's corners. Rows of a level follow those of the level before. */
#ifndef TY_KERNELS_HASH_GRID_H
#define TY_KERNELS_HASH_GRID_H

#include "base.h"
#include "scalar.h"

enum {
  TY_HASH_BLOCK = 64,           /* points of which hash_field keeps lines of features and units for its gradient */
  TY_HASH_LEVELS = 32,          /* at most */
  TY_HASH_DIMS = 3,             /* at most */
  TY_HASH_CORNERS = 8,          /* of a cell, at most */
  TY_HASH_RESOLUTION = 1 << 20, /* at most */
  TY_HASH_ENTRIES = 1 << 28     /* at most */
};

typedef struct ty_p_hash_grid {
  int levels, dims;
  int64_t entries;                    /* a power of two */
  int32_t resolution[TY_HASH_LEVELS]; /* cells a side */
} ty_p_hash_grid;

/* by: what a corner's coordinates are multiplied by before they are added up, or, with a mask, joined by exclusive or. */
typedef struct ty_hash_level {
  int64_t first; /* row of the table */
  int32_t resolution;
  uint32_t by[TY_HASH_DIMS], mask; /* 0: a row for each corner */
} ty_hash_level;

TY_INLINE int64_t ty_hash_rows(const ty_p_hash_grid *p, int level) {
  const int64_t side = p->resolution[level] + 1, corners = p->dims == 2 ? side * side : side * side * side;
  return corners < p->entries ? corners : p->entries;
}

TY_INLINE ty_hash_level ty_hash_level_of(const ty_p_hash_grid *p, int level) {
  ty_hash_level l;
  const int64_t side = p->resolution[level] + 1, corners = p->dims == 2 ? side * side : side * side * side;
  l.first = 0;
  for (int i = 0; i < level; i++) l.first += ty_hash_rows(p, i);
  l.resolution = p->resolution[level];
  l.mask = corners <= p->entries ? 0 : (uint32_t)(p->entries - 1);
  /* the factors of the paper */
  l.by[0] = 1;
  l.by[1] = l.mask ? 2654435761u : (uint32_t)side;
  l.by[2] = l.mask ? 805459861u : (uint32_t)side * (uint32_t)side;
  return l;
}

/* Corner k of the cell, whose coordinate along dimension j is one more where bit j of k is set. */
TY_INLINE uint32_t ty_hash_row(const ty_hash_level *l, int dims, const int32_t *cell, int k) {
  uint32_t sum = 0, joined = 0;
  for (int j = 0; j < dims; j++) {
    const uint32_t part = ((uint32_t)cell[j] + ((uint32_t)k >> j & 1)) * l->by[j];
    sum += part;
    joined ^= part;
  }
  return l->mask ? joined & l->mask : sum;
}

/* Where a coordinate lies: its cell, the last one at 1, and how far into it, NaN for NaN. Outside it counts as the
 * nearer end. */
#define TY_HASH_PLACE(REAL, suffix)                                                    \
  TY_INLINE REAL ty_hash_inside_##suffix(REAL x) { return x < 0 ? 0 : x > 1 ? 1 : x; } \
  TY_INLINE REAL ty_hash_place_##suffix(REAL x, int32_t resolution, int32_t *cell) {   \
    const REAL at = ty_hash_inside_##suffix(x) * (REAL)resolution;                     \
    const int32_t whole = (int32_t)(at >= 0 ? at : 0), last = resolution - 1;          \
    *cell = whole < last ? whole : last;                                               \
    return at - (REAL)*cell;                                                           \
  }
TY_HASH_PLACE(float, f32)
TY_HASH_PLACE(double, f64)
#undef TY_HASH_PLACE

#endif
