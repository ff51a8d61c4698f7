/* MPI as libtycho uses it: collectives and messages that go on by themselves, on raw memory. */
#include "plugin.h"

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../kernels/half.h"

enum { SUM, MEAN, MIN, MAX, PROD };

static char text[MPI_MAX_ERROR_STRING + 64];
static ty_mpi_plugin plugin;
static MPI_Datatype half_type, brain_type;
static MPI_Op half_ops[5], brain_ops[5];

static const char *problem(int code) {
  int n;
  if (code == MPI_SUCCESS) return NULL;
  if (MPI_Error_string(code, text, &n) != MPI_SUCCESS) snprintf(text, sizeof text, "MPI error %d", code);
  return text;
}

/* ---- halves, which MPI does not know ---- */

static float combine(float a, float b, int reduction) {
  switch (reduction) {
    case MIN: return b < a || b != b ? b : a;
    case MAX: return b > a || b != b ? b : a;
    case PROD: return a * b;
    default: return a + b;
  }
}

#define HALF_OP(name, load, store, reduction)                                              \
  static void name(void *in, void *out, int *n, MPI_Datatype *type) {                      \
    (void)type;                                                                            \
    const uint16_t *x = in;                                                                \
    uint16_t *y = out;                                                                     \
    for (int i = 0; i < *n; i++) y[i] = store(combine(load(x[i]), load(y[i]), reduction)); \
  }
#define HALF_OPS(name, load, store)     \
  HALF_OP(name##_sum, load, store, SUM) \
  HALF_OP(name##_min, load, store, MIN) \
  HALF_OP(name##_max, load, store, MAX) \
  HALF_OP(name##_prod, load, store, PROD)
HALF_OPS(half, ty_f16_to_f32, ty_f32_to_f16)
HALF_OPS(brain, ty_bf16_to_f32, ty_f32_to_bf16)

static int make_half(MPI_Datatype *type, MPI_Op *ops, MPI_User_function *const *functions) {
  int code = MPI_Type_contiguous(2, MPI_BYTE, type);
  if (code == MPI_SUCCESS) code = MPI_Type_commit(type);
  for (int i = 0; i < 5 && code == MPI_SUCCESS; i++) code = MPI_Op_create(functions[i], 1, &ops[i]);
  return code;
}

/* ---- life ---- */

static const char *library(void) {
  static char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int n = 0;
  if (MPI_Get_library_version(name, &n) != MPI_SUCCESS) return "an MPI";
  name[strcspn(name, ",\n")] = '\0';
  return name;
}

static const char *init(void **world, int *rank, int *size) {
  static MPI_User_function *const halves[] = { half_sum, half_sum, half_min, half_max, half_prod };
  static MPI_User_function *const brains[] = { brain_sum, brain_sum, brain_min, brain_max, brain_prod };
  int ready = 0, given, *most, found, code = MPI_Initialized(&ready);
  if (code == MPI_SUCCESS && !ready) code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &given);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = make_half(&half_type, half_ops, halves);
  if (code == MPI_SUCCESS) code = make_half(&brain_type, brain_ops, brains);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(MPI_COMM_WORLD, rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(MPI_COMM_WORLD, size);
  if (code == MPI_SUCCESS) code = MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &found);
  MPI_Comm *c = malloc(sizeof *c);
  if (code != MPI_SUCCESS || !c) {
    free(c);
    return c ? problem(code) : "out of memory";
  }
  plugin.most_tag = found ? *most : 32767;
  *c = MPI_COMM_WORLD;
  *world = c;
  return NULL;
}

static void finish(int status) {
  int over = 0;
  MPI_Finalized(&over);
  if (over) return;
  if (status) MPI_Abort(MPI_COMM_WORLD, status);
  else MPI_Finalize();
}

static void comm_free(void *comm) {
  MPI_Comm *c = comm;
  if (*c != MPI_COMM_WORLD) MPI_Comm_free(c);
  free(c);
}

static const char *split(void *comm, int color, int key, void **made, int *rank, int *size) {
  MPI_Comm *c = malloc(sizeof *c);
  if (!c) return "out of memory";
  int code = MPI_Comm_split(*(MPI_Comm *)comm, color < 0 ? MPI_UNDEFINED : color, key, c);
  bool one = code == MPI_SUCCESS && *c != MPI_COMM_NULL;
  if (one) code = MPI_Comm_rank(*c, rank);
  if (one && code == MPI_SUCCESS) code = MPI_Comm_size(*c, size);
  *made = one ? c : NULL;
  if (!one) free(c);
  return problem(code);
}

/* ---- requests ---- */

static const char *begun(int code, MPI_Request *r, void **request) {
  *request = r;
  if (code == MPI_SUCCESS) return NULL;
  free(r);
  *request = NULL;
  return problem(code);
}

static const char *test(void *request, bool *done) {
  MPI_Request *r = request;
  int flag = 0, code = MPI_Test(r, &flag, MPI_STATUS_IGNORE);
  *done = flag || code != MPI_SUCCESS;
  if (*done) free(r);
  return problem(code);
}

static MPI_Datatype type_of(char type) {
  switch (type) {
    case 'd': return MPI_DOUBLE;
    case 'f': return MPI_FLOAT;
    case 'h': return half_type;
    case 'b': return brain_type;
    case 'q': return MPI_INT64_T;
    case 'i': return MPI_INT32_T;
    case 's': return MPI_INT16_T;
    case 'c': return MPI_INT8_T;
    case 'B': return MPI_UINT8_T;
    default: return MPI_BYTE;
  }
}

static MPI_Op op_of(char type, int reduction) {
  static const MPI_Op *const of[] = { half_ops, brain_ops };
  if (type == 'h' || type == 'b') return of[type == 'b'][reduction];
  switch (reduction) {
    case MIN: return MPI_MIN;
    case MAX: return MPI_MAX;
    case PROD: return MPI_PROD;
    default: return MPI_SUM;
  }
}

/* Whether what a rank gives to an all-gather is its own part of the result. */
static bool within(const ty_mpi_collective *what, MPI_Datatype type, MPI_Comm c) {
  int rank = 0, bytes = 0;
  MPI_Comm_rank(c, &rank);
  MPI_Type_size(type, &bytes);
  return what->x == (const char *)what->out + (int64_t)rank * what->count * bytes;
}

static const char *start(void *comm, const ty_mpi_collective *what, void **request) {
  MPI_Comm c = *(MPI_Comm *)comm;
  MPI_Datatype type = type_of(what->type);
  MPI_Op op = op_of(what->type, what->reduction);
  int n = 1, code = MPI_Comm_size(c, &n);
  if (code != MPI_SUCCESS) return problem(code);
  if (what->count > INT_MAX) return "more than 2^31 - 1 elements at once";
  int count = (int)what->count;
  MPI_Request *r = malloc(sizeof *r);
  if (!r) return "out of memory";
  switch (what->kind) {
    case TY_MPI_ALL_REDUCE: code = MPI_Iallreduce(MPI_IN_PLACE, what->out, count, type, op, c, r); break;
    case TY_MPI_REDUCE_SCATTER: code = MPI_Ireduce_scatter_block(what->x, what->out, count / n, type, op, c, r); break;
    case TY_MPI_ALL_GATHER:
      code = MPI_Iallgather(within(what, type, c) ? MPI_IN_PLACE : what->x, count, type, what->out, count, type, c, r);
      break;
    case TY_MPI_BROADCAST: code = MPI_Ibcast(what->out, count, type, what->root, c, r); break;
    case TY_MPI_ALL_TO_ALL: code = MPI_Ialltoall(what->x, count / n, type, what->out, count / n, type, c, r); break;
    default: code = MPI_Ibarrier(c, r);
  }
  return begun(code, r, request);
}

/* ---- messages ---- */

static const char *send(void *comm, const void *bytes, int64_t count, int to, int tag, void **request) {
  if (count > INT_MAX) return "more than 2^31 - 1 bytes at once";
  MPI_Request *r = malloc(sizeof *r);
  if (!r) return "out of memory";
  return begun(MPI_Isend(bytes, (int)count, MPI_BYTE, to, tag, *(MPI_Comm *)comm, r), r, request);
}

static const char *probe(void *comm, int from, int tag, bool *there, int64_t *count) {
  MPI_Status status;
  int flag = 0, n = 0, code = MPI_Iprobe(from, tag, *(MPI_Comm *)comm, &flag, &status);
  if (code == MPI_SUCCESS && flag) code = MPI_Get_count(&status, MPI_BYTE, &n);
  *there = flag;
  *count = n;
  return problem(code);
}

static const char *receive(void *comm, void *bytes, int64_t count, int from, int tag) {
  if (count > INT_MAX) return "more than 2^31 - 1 bytes at once";
  return problem(MPI_Recv(bytes, (int)count, MPI_BYTE, from, tag, *(MPI_Comm *)comm, MPI_STATUS_IGNORE));
}

const ty_mpi_plugin *ty_mpi_open(void) {
  plugin = (ty_mpi_plugin){ TY_MPI_VERSION, library,   init, finish, start,   test,
                            split,          comm_free, send, probe,  receive, 0 };
  return &plugin;
}
