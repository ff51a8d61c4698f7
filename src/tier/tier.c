/* Transfers between storages and a file: their pieces, their buffers, their order, their errors. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "../tensor/memory.h"
#include "../tycho.h"
#include "internal.h"

enum { PIECE = 4 << 20, STALLS = 64 };
enum { TMPFS = 0x01021994 }; /* file systems of memory by their magic numbers, linux/magic.h */
static const unsigned long RAMFS = 0x858458f6;

_Thread_local bool (*ty_bring_back)(ty_tensor *t);

double ty_tier_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- one piece ---- */

ssize_t ty_tier_result(ty_tier *t, const piece *p, ssize_t n) {
  int64_t number = atomic_fetch_add(&t->pieces, 1);
  if (number < atomic_load(&t->fault_from) || number >= atomic_load(&t->fault_to) || n <= 0) return n;
  switch ((ty_tier_fault)atomic_load(&t->fault)) {
    case TY_TIER_SHORT: return n / 2;
    case TY_TIER_INTERRUPT: return -EINTR;
    case TY_TIER_FULL: return p->of->write ? -ENOSPC : n;
    default: return -EIO;
  }
}

bool ty_tier_advance(ty_tier *t, piece *p, ssize_t n, int *error) {
  if (n == -EINTR || n == -EAGAIN) n = 0;
  else if (n == 0 && !p->of->write) n = -ENODATA; /* the file ends here */
  if (n < 0) {
    *error = (int)-n;
    return true;
  }
  /* The disk takes whole blocks: what was done of the last one is done again. */
  size_t moved = (size_t)n == p->length ? p->length : (size_t)n / TY_TIER_BLOCK * TY_TIER_BLOCK;
  p->stalls = moved ? 0 : p->stalls + 1;
  p->bytes += moved;
  p->at += (off_t)moved;
  p->length -= moved;
  if (p->stalls == STALLS) *error = EIO;
  return !p->length || *error;
}

/* ---- a transfer ---- */

static bool overlaps(const transfer *r, int64_t at, int64_t length) {
  return r->at < at + length && at < r->at + r->length;
}

/* What is over gives back its storage. */
static void settle(ty_tier *t, transfer *r) {
  if (r->done) return;
  r->done = true;
  if (r->end == 0) r->end = ty_tier_clock();
  if (!r->write && !r->error) {
    if (r->buffer) memcpy(r->target, r->buffer, r->nbytes);
    ty_storage_wrote(r->storage);
  } else if (r->write && !r->error && r->storage->version != r->version && !r->buffer) {
    r->error = ESTALE;
  }
  t->stats.held -= (int64_t)r->storage->nbytes;
  ty_storage_release(r->storage);
  r->storage = NULL;
  free(r->buffer);
  r->buffer = NULL;
}

static bool look(ty_tier *t, transfer *r, bool wait) {
  if (r->done) return true;
  bool done = t->ring ? ty_tier_ring_done(t->ring, r, wait) : ty_tier_threads_done(t->threads, r, wait);
  if (done) settle(t, r);
  return done;
}

static bool fail_transfer(const ty_tier *t, bool write, int64_t at, int64_t bytes, int code) {
  const char *why = code == ESTALE    ? "the tensor was changed before it was written"
                    : code == ENODATA ? "nothing was written there"
                                      : strerror(code);
  return ty_fail(TY_EIO, "tier: %s %lld bytes at %lld of a file in %s: %s", write ? "writing" : "reading",
                 (long long)bytes, (long long)at, t->folder, why);
}

static transfer *transfer_new(ty_tier *t, ty_tensor *x, int64_t at, bool write) {
  size_t nbytes = (size_t)x->v.count * ty_dtype_size[x->v.dtype];
  size_t length = (nbytes + TY_TIER_BLOCK - 1) / TY_TIER_BLOCK * TY_TIER_BLOCK;
  int n = (int)((length + PIECE - 1) / PIECE);
  transfer *r = calloc(1, sizeof *r + sizeof *r->pieces * (size_t)n);
  const char *start = x->storage->bytes;
  /* What is not ours has no capacity, but for what was made for this. */
  bool suits = (uintptr_t)x->v.data % TY_TIER_BLOCK == 0 && (x->storage->foreign || x->storage->live) &&
               (size_t)((const char *)x->v.data - start) + length <= x->storage->capacity;
  if (r && length && !suits) r->buffer = aligned_alloc(TY_TIER_BLOCK, length);
  if (!r || (length && !suits && !r->buffer)) {
    free(r);
    ty_fail(TY_ENOMEM, "tier: out of memory for a buffer of %zu bytes", length);
    return NULL;
  }
  if (r->buffer) t->stats.copied += (int64_t)nbytes;
  if (r->buffer && write) {
    memcpy(r->buffer, x->v.data, nbytes);
    memset((char *)r->buffer + nbytes, 0, length - nbytes);
  }
  r->at = at;
  r->length = (int64_t)length;
  r->storage = x->storage;
  r->version = x->storage->version;
  r->target = x->v.data;
  r->nbytes = nbytes;
  r->write = write;
  r->left = n;
  r->begin = ty_tier_clock();
  char *bytes = r->buffer ? r->buffer : x->v.data;
  for (int i = 0; i < n; i++) {
    size_t from = (size_t)i * PIECE, part = length - from < PIECE ? length - from : PIECE;
    r->pieces[i] = (piece){ .of = r, .bytes = bytes + from, .length = part, .at = at + (off_t)from };
  }
  ty_storage_retain(x->storage);
  t->stats.held += (int64_t)x->storage->nbytes;
  return r;
}

static int64_t begin(ty_tier *t, ty_tensor *x, int64_t at, bool write) {
  const char *name = write ? "write" : "read";
  if (ty_device_of(x) != TY_CPU || !x->v.contiguous || ty_is_quantized(ty_dtype_of(x)))
    return ty_fail(TY_EINVAL, "tier:%s: expected a contiguous tensor on the CPU, got %s", name, ty_describe(x)), 0;
  if (at < 0 || at % TY_TIER_BLOCK)
    return ty_fail(TY_EINVAL, "tier:%s: at: expected a multiple of %d, got %lld", name, TY_TIER_BLOCK, (long long)at),
           0;
  for (transfer *r = t->transfers; r; r = r->next)
    look(t, r, false); /* storages are not held for longer than it takes */
  transfer *r = transfer_new(t, x, at, write);
  if (!r) return 0;
  for (transfer *other = t->transfers; other; other = other->next)
    if (!other->done && (write || other->write) && overlaps(other, at, r->length)) look(t, other, true);
  r->ticket = ++t->tickets;
  r->next = t->transfers;
  t->transfers = r;
  int64_t *bytes = write ? &t->stats.written : &t->stats.read;
  *bytes += (int64_t)r->nbytes;
  ++*(write ? &t->stats.writes : &t->stats.reads);
  if (!r->left) settle(t, r);
  else if (t->ring) ty_tier_ring_give(t->ring, r, r->left);
  else ty_tier_threads_give(t->threads, r, r->left);
  return r->ticket;
}

int64_t ty_tier_write(ty_tier *t, ty_tensor *x, int64_t at) { return begin(t, x, at, true); }
int64_t ty_tier_read(ty_tier *t, ty_tensor *x, int64_t at) { return begin(t, x, at, false); }

static transfer **find(ty_tier *t, int64_t ticket) {
  transfer **at = &t->transfers;
  while (*at && (*at)->ticket != ticket) at = &(*at)->next;
  return at;
}

bool ty_tier_knows(const ty_tier *t, int64_t ticket) { return *find((ty_tier *)(uintptr_t)t, ticket) != NULL; }

bool ty_tier_done(ty_tier *t, int64_t ticket) {
  transfer *r = *find(t, ticket);
  return !r || look(t, r, false);
}

bool ty_tier_wait(ty_tier *t, int64_t ticket, double *from, double *to) {
  transfer **at = find(t, ticket), *r = *at;
  if (!r) return ty_fail(TY_EINVAL, "tier:wait: there is no transfer %lld, or it was waited for", (long long)ticket);
  if (!look(t, r, false)) {
    double since = ty_tier_clock();
    look(t, r, true);
    t->stats.waited += ty_tier_clock() - since;
  }
  *at = r->next;
  if (from) *from = r->begin;
  if (to) *to = r->end;
  bool ok = !r->error || fail_transfer(t, r->write, r->at, (int64_t)r->nbytes, r->error);
  free(r);
  return ok;
}

ty_tier_stats ty_tier_stats_of(ty_tier *t) {
  for (transfer *r = t->transfers; r; r = r->next) look(t, r, false);
  struct statfs fs;
  bool known = fstatfs(t->fd, &fs) == 0;
  t->stats.memory = known && (fs.f_type == TMPFS || fs.f_type == RAMFS);
  t->stats.room = known && fs.f_blocks ? (int64_t)fs.f_bavail * (int64_t)fs.f_bsize : -1;
  return t->stats;
}

int64_t ty_tier_cached(ty_tier *t) {
  off_t length = lseek(t->fd, 0, SEEK_END);
  if (length <= 0) return length;
  long page = sysconf(_SC_PAGESIZE);
  size_t n = ((size_t)length + (size_t)page - 1) / (size_t)page;
  unsigned char *there = malloc(n);
  void *map = there ? mmap(NULL, (size_t)length, PROT_READ, MAP_SHARED, t->fd, 0) : MAP_FAILED;
  bool ok = map != MAP_FAILED && mincore(map, (size_t)length, there) == 0;
  int64_t bytes = 0;
  for (size_t i = 0; ok && i < n; i++) bytes += there[i] & 1 ? page : 0;
  if (map != MAP_FAILED) munmap(map, (size_t)length);
  free(there);
  return ok ? bytes
            : (ty_fail(TY_EIO, "tier: what the kernel has of a file in %s: %s", t->folder, strerror(errno)), -1);
}

void ty_tier_inject(ty_tier *t, ty_tier_fault fault, int64_t nth, int64_t count) {
  int64_t from = atomic_load(&t->pieces) + nth - 1;
  atomic_store(&t->fault_to, 0);
  atomic_store(&t->fault, (int)fault);
  atomic_store(&t->fault_from, from);
  atomic_store(&t->fault_to, count ? from + count : 0);
}

/* ---- the file ---- */

/* No name is left behind, however the program ends; and two programs in one folder do not meet. */
static int open_file(const char *folder, bool *direct) {
  char path[4096];
  int fd = -1;
  if (!folder) {
    *direct = false;
    return memfd_create("tycho-tier", MFD_CLOEXEC);
  }
  if (*direct) fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
  if (fd >= 0) return fd;
  fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
    if (snprintf(path, sizeof path, "%s/tycho-tier-XXXXXX", folder) >= (int)sizeof path)
      return errno = ENAMETOOLONG, -1;
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) unlink(path);
  }
  if (fd >= 0 && *direct) *direct = fcntl(fd, F_SETFL, O_DIRECT) == 0;
  return fd;
}

ty_tier *ty_tier_open(const char *folder, ty_tier_backend backend, bool direct) {
  ty_tier *t = calloc(1, sizeof *t);
  if (!t) return ty_fail(TY_ENOMEM, "tier: out of memory"), NULL;
  t->direct = direct;
  snprintf(t->folder, sizeof t->folder, "%s", folder ? folder : "memory");
  if ((t->fd = open_file(folder, &t->direct)) < 0) {
    ty_fail(TY_EIO, "tier: no file in %s: %s", t->folder, strerror(errno));
    free(t);
    return NULL;
  }
  if (backend != TY_TIER_THREADS) t->ring = ty_tier_ring_open(t);
  if (!t->ring && backend == TY_TIER_URING) ty_fail(TY_EUNSUPPORTED, "tier: no io_uring: %s", strerror(errno));
  else if (!t->ring) t->threads = ty_tier_threads_open(t);
  if (!t->ring && !t->threads) {
    close(t->fd);
    free(t);
    return NULL;
  }
  t->stats.direct = t->direct;
  t->stats.uring = t->ring != NULL;
  return t;
}

void ty_tier_close(ty_tier *t) {
  if (!t) return;
  while (t->transfers) {
    transfer *r = t->transfers;
    look(t, r, true);
    t->transfers = r->next;
    free(r);
  }
  if (t->ring) ty_tier_ring_close(t->ring);
  if (t->threads) ty_tier_threads_close(t->threads);
  close(t->fd);
  free(t);
}

/* ---- memory of tensors ---- */

bool ty_exchange_memory(ty_tensor *a, ty_tensor *b) {
  if (!ty_same_shape(&a->v, &b->v) || a->v.dtype != b->v.dtype || a->node || b->node)
    return ty_fail(TY_EINVAL, "exchange: expected two leaves of one shape and dtype, got %s and %s", ty_describe(a),
                   ty_describe(b));
  ty_view v = a->v;
  ty_storage *s = a->storage;
  a->v = b->v;
  a->storage = b->storage;
  b->v = v;
  b->storage = s;
  a->version = a->storage->version;
  b->version = b->storage->version;
  return true;
}
