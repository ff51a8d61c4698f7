/* The file tier: a file without a name to which storages go and from which they come back while the program goes on.
 * Reads and writes are asynchronous: each gives a ticket that has to be waited for once. A tier belongs to one thread;
 * what it does besides is done by the kernel (io_uring) or by threads of its own.
 *
 * Transfers that touch the same bytes of the file are done in the order in which they were asked for. A storage is held
 * until its transfer is over; a write of a storage that was changed meanwhile is an error, not a wrong file. */
#ifndef TY_TIER_H
#define TY_TIER_H

#include "../tensor/tensor.h"

typedef struct ty_tier ty_tier;

typedef enum ty_tier_backend { TY_TIER_AUTO, TY_TIER_URING, TY_TIER_THREADS } ty_tier_backend;

/* What tests let happen to transfers of pieces: half of them done, a signal, a disk that fails, one that is full. */
typedef enum ty_tier_fault { TY_TIER_SHORT, TY_TIER_INTERRUPT, TY_TIER_ERROR, TY_TIER_FULL } ty_tier_fault;

typedef struct ty_tier_stats {
  int64_t read, written;      /* bytes, as asked for */
  int64_t reads, writes;      /* transfers */
  int64_t copied;             /* bytes that went through a buffer, because their memory did not suit the disk */
  int64_t held;               /* bytes of storages that are held now */
  double waited;              /* seconds that ty_tier_wait() stood still */
  int64_t room;               /* bytes that the file system still has for the file; -1: it does not say */
  bool direct, uring, memory; /* memory: the file system is one of memory, no disk */
} ty_tier_stats;

/* A file in `folder`; NULL: in memory, outside of all budgets. direct: past the page cache where the file system can.
 * NULL after ty_fail(). */
ty_tier *ty_tier_open(const char *folder, ty_tier_backend backend, bool direct);
/* Waits for all transfers; the file is gone. */
void ty_tier_close(ty_tier *t);

/* Begins a transfer of a contiguous tensor of the CPU to or from the file at `at`, a multiple of TY_TIER_BLOCK; it takes
 * whole blocks there. A ticket, 0 after ty_fail(). */
enum { TY_TIER_BLOCK = 4096 };
int64_t ty_tier_write(ty_tier *t, ty_tensor *x, int64_t at);
int64_t ty_tier_read(ty_tier *t, ty_tensor *x, int64_t at);
/* Waits for a ticket, which is then no more; begin, end (may be NULL): seconds of CLOCK_MONOTONIC. False after
 * ty_fail(): the transfer failed, and the tier goes on. */
bool ty_tier_wait(ty_tier *t, int64_t ticket, double *begin, double *end);
bool ty_tier_done(ty_tier *t, int64_t ticket); /* whether wait() would stand still no more */
bool ty_tier_knows(const ty_tier *t, int64_t ticket);
ty_tier_stats ty_tier_stats_of(ty_tier *t);
/* Bytes of the file that the kernel has in memory, of a file that is not direct; -1 after ty_fail(). */
int64_t ty_tier_cached(ty_tier *t);
/* Tests: of the pieces from the nth on, `count` fail so; count 0: none. */
void ty_tier_inject(ty_tier *t, ty_tier_fault fault, int64_t nth, int64_t count);

/* Asked by ops for an input on the meta device, whose storage may be away on a tier: brings it back into the tensor, or
 * leaves it as it is; false after ty_fail(). NULL: nobody has anything away. */
extern _Thread_local bool (*ty_bring_back)(ty_tensor *t);
/* The two tensors, of one shape and dtype, change their memory; other views of it stay where they are. False after
 * ty_fail(). */
bool ty_exchange_memory(ty_tensor *a, ty_tensor *b);

#endif
