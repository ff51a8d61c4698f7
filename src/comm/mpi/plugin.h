/* What libtycho_mpi.so offers, a library of its own: it is compiled for the MPI that was there, and loaded when a program
 * first asks for ranks that are processes. Texts that it returns are errors, NULL is none. */
#ifndef TY_MPI_PLUGIN_H
#define TY_MPI_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

typedef enum ty_mpi_kind {
  TY_MPI_ALL_REDUCE,
  TY_MPI_REDUCE_SCATTER,
  TY_MPI_ALL_GATHER,
  TY_MPI_BROADCAST,
  TY_MPI_ALL_TO_ALL,
  TY_MPI_BARRIER
} ty_mpi_kind;

typedef struct ty_mpi_collective {
  int kind, reduction, root; /* reduction: a ty_reduction; a mean is a sum here */
  const void *x;
  void *out;     /* of all_reduce and broadcast: x */
  int64_t count; /* elements of x */
  char type;     /* d f h b: f64 f32 f16 bf16; q i s c B: i64 i32 i16 i8 u8; x: bytes */
} ty_mpi_collective;

enum { TY_MPI_VERSION = 2 };

typedef struct ty_mpi_plugin {
  int version;
  const char *(*library)(void); /* which MPI that is; before init() too */
  const char *(*init)(void **world, int *rank, int *size);
  /* Ends MPI; with a status other than 0 all ranks of the run. */
  void (*finish)(int status);
  const char *(*start)(void *comm, const ty_mpi_collective *what, void **request);
  /* A request that is done is gone, also where it failed. */
  const char *(*test)(void *request, bool *done);
  /* *made: NULL for a color below 0. */
  const char *(*split)(void *comm, int color, int key, void **made, int *rank, int *size);
  void (*free)(void *comm);
  const char *(*send)(void *comm, const void *bytes, int64_t count, int to, int tag, void **request);
  /* Whether a message is there, and how long it is. */
  const char *(*probe)(void *comm, int from, int tag, bool *there, int64_t *count);
  const char *(*receive)(void *comm, void *bytes, int64_t count, int from, int tag);
  int most_tag;
} ty_mpi_plugin;

typedef const ty_mpi_plugin *ty_mpi_open_fn(void);
__attribute__((visibility("default"))) ty_mpi_open_fn ty_mpi_open;

#endif
