/* NVIDIA's libraries, used where they are installed: found when they are first wanted, never linked. */
#ifndef TY_KERNELS_CUDA_LIBRARY_CUH
#define TY_KERNELS_CUDA_LIBRARY_CUH

#include <dlfcn.h>
#include <pthread.h>

#include "backend.h"

enum ty_cuda_library_id { TY_CUBLASLT, TY_CUDNN, TY_CUSOLVER, TY_NCCL, TY_CUDA_LIBRARIES };

/* The library, of a version that the kernels know: in the folders of TYCHO_CUDA_PATH, where the loader looks, in the
 * toolkit, in Python packages; or NULL. It stays loaded. */
void *ty_cuda_library(ty_cuda_library_id id);

/* A library's version in its own count, 0 where there is none. */
int64_t ty_cuda_library_version(ty_cuda_library_id id);

/* What is to be said about library `index`; false after the last. */
bool ty_cuda_library_describe(int index, ty_cuda_found *found);

/* Sets *function; false when the library has none of that name. */
template <class Function> static inline bool ty_cuda_function(void *library, const char *name, Function *function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

/* Holds a lock to the end of a block: plans and handles of a library serve one thread at a time. */
class ty_cuda_locked {
public:
  explicit ty_cuda_locked(pthread_mutex_t *lock) : lock_(lock) { pthread_mutex_lock(lock_); }
  ~ty_cuda_locked() { pthread_mutex_unlock(lock_); }
  ty_cuda_locked(const ty_cuda_locked &) = delete;
  ty_cuda_locked &operator=(const ty_cuda_locked &) = delete;

private:
  pthread_mutex_t *lock_;
};

#endif
