/* Where NVIDIA's libraries may lie, and which versions of them are used. */
#include "library.cuh"

#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.cuh"

namespace {

/* ---- what is looked for ---- */

struct wanted {
  const char *name, *files[5], *version; /* file names, the best first; the function that tells the version */
  bool wide;                             /* that function returns a size_t; others write an int and return a status */
  int64_t major, minor;                  /* what one of them counts in the version */
  int first, last;                       /* the major versions that the kernels know */
  const char *without;                   /* what is done where it is missing */
} const list[TY_CUDA_LIBRARIES] = {
  { "cuBLASLt",
    { "libcublasLt.so.13", "libcublasLt.so.12" },
    "cublasLtGetVersion",
    true,
    10000,
    100,
    12,
    13,
    "our own kernels multiply matrices" },
  { "cuDNN",
    { "libcudnn.so.9" },
    "cudnnGetVersion",
    true,
    10000,
    100,
    9,
    9,
    "our own kernels compute convolutions and attention" },
  { "cuSOLVER",
    { "libcusolver.so.12", "libcusolver.so.11" },
    "cusolverGetVersion",
    false,
    1000,
    100,
    11,
    12,
    "cholesky, solve, slogdet, qr, svd and eigh cannot be computed on cuda" },
  { "NCCL", { "libnccl.so.2" }, "ncclGetVersion", false, 10000, 100, 2, 2, "nothing uses it yet" },
};

struct state {
  bool tried;
  void *library;
  int64_t version;
  char text[64], path[512], problem[768];
} states[TY_CUDA_LIBRARIES];
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- finding files ---- */

/* What a search has met: the library, or why the last file of its name could not be loaded. */
struct search {
  void *library;
  char *problem;
  size_t room;
};

void *load(search *s, const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const char *why = library ? nullptr : dlerror();
  if (why && strchr(path, '/')) snprintf(s->problem, s->room, "%s", why); /* a mere name is not there, mostly */
  return library;
}

/* With patterns of the shell in the folder. */
void *open_in(search *s, const char *folder, const char *name) {
  char pattern[4096];
  if (static_cast<size_t>(snprintf(pattern, sizeof pattern, "%s/%s", folder, name)) >= sizeof pattern) return nullptr;
  glob_t found;
  void *library = nullptr;
  if (glob(pattern, GLOB_BRACE, nullptr, &found) == 0)
    for (size_t i = found.gl_pathc; i-- > 0 && !library;) library = load(s, found.gl_pathv[i]);
  globfree(&found);
  return library;
}

/* In one of the folders of a list that colons separate, or where a toolkit there would have it. */
void *open_listed(search *s, const char *folders, const char *name) {
  char folder[4096];
  void *library = nullptr;
  for (; folders && *folders && !library; folders += *folders == ':') {
    size_t n = strcspn(folders, ":");
    if (static_cast<size_t>(snprintf(folder, sizeof folder, "%.*s{,/lib64,/lib}", static_cast<int>(n), folders)) <
        sizeof folder)
      library = open_in(s, folder, name);
    folders += n;
  }
  return library;
}

#ifdef TY_CUDA_EMULATED
/* What is installed wants a GPU; the stand-ins of tests/cuda_emu are named by the variable. */
void *open_anywhere(search *s, const char *name) { return open_listed(s, getenv("TYCHO_CUDA_PATH"), name); }
#else
/* Below a folder that an environment variable names. */
void *open_below(search *s, const char *variable, const char *inside, const char *name) {
  char folder[4096];
  const char *root = getenv(variable);
  if (!root || !*root) return nullptr;
  if (static_cast<size_t>(snprintf(folder, sizeof folder, "%s%s", root, inside)) >= sizeof folder) return nullptr;
  return open_in(s, folder, name);
}

#define PACKAGES "/lib/python3*/{site,dist}-packages/nvidia/*/lib"

void *open_anywhere(search *s, const char *name) {
  void *library = open_listed(s, getenv("TYCHO_CUDA_PATH"), name);
  if (!library) library = load(s, name);
  if (!library) library = open_below(s, "CUDA_HOME", "/{lib64,lib}", name);
  if (!library) library = open_in(s, "/usr/local/cuda*/lib64", name);
  if (!library) library = open_below(s, "VIRTUAL_ENV", PACKAGES, name);
  if (!library) library = open_below(s, "CONDA_PREFIX", "{/lib," PACKAGES "}", name);
  if (!library) library = open_below(s, "HOME", "/.local" PACKAGES, name);
  return library ? library : open_in(s, "/usr{/local,}" PACKAGES, name);
}
#endif

/* ---- versions ---- */

/* What the library says of itself, and where it lies; -1 when it does not say. */
int64_t ask_version(void *library, const wanted &w, state *s) {
  void *function = dlsym(library, w.version);
  Dl_info info;
  if (!function) return -1;
  if (dladdr(function, &info) && info.dli_fname) snprintf(s->path, sizeof s->path, "%s", info.dli_fname);
  if (w.wide) return static_cast<int64_t>(reinterpret_cast<size_t (*)()>(function)());
  int version = 0;
  return reinterpret_cast<int (*)(int *)>(function)(&version) == 0 ? version : -1;
}

void find(const wanted &w, state *s) {
  search search = { nullptr, s->problem, sizeof s->problem };
  for (const char *const *name = w.files; *name && !search.library; name++)
    search.library = open_anywhere(&search, *name);
  if (!search.library) return;
  s->problem[0] = 0;
  int64_t version = ask_version(search.library, w, s);
  if (version < 0) {
    snprintf(s->problem, sizeof s->problem, "%s: has no %s", w.files[0], w.version);
    return;
  }
  int64_t major = version / w.major, minor = version % w.major / w.minor, patch = version % w.minor;
  if (strcmp(w.name, "cuDNN") == 0 && version < 10000) /* as it counted before version 9 */
    major = version / 1000, minor = version % 1000 / 100;
  char text[sizeof s->text], known[32], path[sizeof s->path];
  snprintf(text, sizeof text, "%lld.%lld.%lld", static_cast<long long>(major), static_cast<long long>(minor),
           static_cast<long long>(patch));
  if (major >= w.first && major <= w.last) {
    s->library = search.library;
    s->version = version;
    memcpy(s->text, text, sizeof text);
    return;
  }
  snprintf(known, sizeof known, w.first == w.last ? "%d" : "%d to %d", w.first, w.last);
  memcpy(path, s->path, sizeof path);
  snprintf(s->problem, sizeof s->problem, "%s is version %s, wanted is %s", path, text, known);
}

const state *look(ty_cuda_library_id id) {
  pthread_mutex_lock(&lock);
  if (!states[id].tried) {
    states[id].tried = true;
    find(list[id], &states[id]);
  }
  pthread_mutex_unlock(&lock);
  return &states[id];
}

} // namespace

void *ty_cuda_library(ty_cuda_library_id id) { return look(id)->library; }
int64_t ty_cuda_library_version(ty_cuda_library_id id) { return look(id)->version; }

bool ty_cuda_library_describe(int index, ty_cuda_found *found) {
  static char driver[32];
  *found = {};
  if (index == 0) {
    int version = 0;
    found->name = "driver";
    found->without = "there are no GPUs";
    if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return true;
    snprintf(driver, sizeof driver, "CUDA %d.%d", version / 1000, version % 1000 / 10);
    found->version = driver;
    return true;
  }
  if (index < 1 || index > TY_CUDA_LIBRARIES) return false;
  const state *s = look(static_cast<ty_cuda_library_id>(index - 1));
  found->name = list[index - 1].name;
  found->version = s->library ? s->text : nullptr;
  found->path = s->library && s->path[0] ? s->path : nullptr;
  found->problem = s->problem[0] ? s->problem : nullptr;
  found->without = list[index - 1].without;
  return true;
}
