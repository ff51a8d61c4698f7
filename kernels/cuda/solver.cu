#include "solver.cuh"

#include <pthread.h>

#include "library.cuh"

namespace {

struct {
  int (*create)(solver_handle *);
  int (*set_stream)(solver_handle, cudaStream_t);
  solver_functions<float> f32;
  solver_functions<double> f64;
} functions;
bool have;
pthread_once_t once = PTHREAD_ONCE_INIT;

void load() {
  void *library = ty_cuda_library(TY_CUSOLVER);
  have = library && ty_cuda_function(library, "cusolverDnCreate", &functions.create) &&
         ty_cuda_function(library, "cusolverDnSetStream", &functions.set_stream);
#define RESOLVE(name, parameters)                                                       \
  have = have && ty_cuda_function(library, "cusolverDnS" #name, &functions.f32.name) && \
         ty_cuda_function(library, "cusolverDnD" #name, &functions.f64.name);
  TY_EACH_SOLVER(RESOLVE)
#undef RESOLVE
}

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* handles are for one thread at a time */
solver_handle handles[TY_MAX_GPUS];

} // namespace

solver::solver() : handle(nullptr) {
  pthread_once(&once, load);
  pthread_mutex_lock(&lock);
  if (!have) {
    ty_fail(TY_EUNSUPPORTED, "needs NVIDIA's library cuSOLVER, which was not found (see tycho doctor)");
    return;
  }
  solver_handle *mine = &handles[ty_cuda_gpu()];
  if (!*mine && !ok(functions.create(mine), "Create")) return;
  if (ok(functions.set_stream(*mine, ty_cuda_stream()), "SetStream")) handle = *mine;
}

solver::~solver() { pthread_mutex_unlock(&lock); }

template <> const solver_functions<float> &solver::of<float>() const { return functions.f32; }
template <> const solver_functions<double> &solver::of<double>() const { return functions.f64; }

bool solver::ok(int status, const char *name) const {
  return status == 0 || ty_fail(TY_EUNSUPPORTED, "cuSOLVER's %s failed (status %d)", name, status);
}
