/* NVIDIA's libraries, used where they are installed: found when they are first wanted, never linked. */
#ifndef TY_KERNELS_CUDA_LIBRARY_CUH
#define TY_KERNELS_CUDA_LIBRARY_CUH

#ifndef TY_CUDA_EMULATED
#include <dlfcn.h>

/* The first of the names (the last is NULL) that is found: in the folders of TYCHO_CUDA_PATH, where the loader looks, in
 * the toolkit, in Python packages; or NULL. It stays loaded. */
void *ty_cuda_library(const char *const *names);

/* Sets *function; false when the library has none of that name. */
template <class Function> static inline bool ty_cuda_function(void *library, const char *name, Function *function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}
#endif

#endif
