/* The report when memory is out. */
#include "live.h"

#include <stdio.h>
#include <string.h>

#include "../device/device.h"

enum { REPORTED = 8 };

static const char *bytes_text(char *buffer, size_t n, double bytes) {
  const char *units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
  int u = 0;
  while (bytes >= 1024 && u < 6) bytes /= 1024, u++;
  snprintf(buffer, n, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
  return buffer;
}

/* The largest, in order; returns how many there are in all. */
static int find_largest(const ty_live *ring, const ty_live *largest[REPORTED]) {
  int count = 0;
  for (const ty_live *l = ring->next; l != ring; l = l->next, count++) {
    for (int i = 0; i < REPORTED; i++) {
      if (!largest[i] || l->nbytes > largest[i]->nbytes) {
        memmove(largest + i + 1, largest + i, sizeof *largest * (size_t)(REPORTED - 1 - i));
        largest[i] = l;
        break;
      }
    }
  }
  return count;
}

bool ty_fail_out_of_memory(const ty_shortage *s, const ty_live *ring) {
  char text[1500], a[32], b[32], c[32], d[32], e[32];
  const ty_live *largest[REPORTED] = { NULL };
  int count = find_largest(ring, largest);
  int n = snprintf(text, sizeof text,
                   "out of memory on %s: wanted %s for %s %s; live %s in blocks of %s, cached %s, budget %s",
                   ty_device_name(s->device), bytes_text(a, sizeof a, (double)s->wanted),
                   ty_shape_text(s->ndim, s->size), ty_dtype_name[s->dtype], bytes_text(b, sizeof b, (double)s->live),
                   bytes_text(e, sizeof e, (double)(s->live + s->beyond)), bytes_text(c, sizeof c, (double)s->cached),
                   bytes_text(d, sizeof d, (double)s->budget));
  if (count) n += snprintf(text + n, sizeof text - (size_t)n, "\nlargest of %d live tensors:", count);
  for (int i = 0; i < REPORTED && largest[i]; i++)
    n += snprintf(text + n, sizeof text - (size_t)n, "\n  %10s  %s %s",
                  bytes_text(a, sizeof a, (double)largest[i]->nbytes),
                  ty_shape_text(largest[i]->ndim, largest[i]->size), ty_dtype_name[largest[i]->dtype]);
  return ty_fail(TY_ENOMEM, "%s", text);
}
