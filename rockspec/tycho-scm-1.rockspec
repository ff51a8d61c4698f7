-- luarocks --lua-version 5.4 make rockspec/tycho-scm-1.rockspec
-- The build uses all cores. It has kernels for GPUs where nvcc and a GPU are there; TYCHO_CUDA=ON in the environment
-- builds them without one, TYCHO_CUDA=OFF leaves them out. LUA_INCDIR=... says where lua.h is.
rockspec_format = "3.0"
package = "tycho"
version = "scm-1"
source = { url = "git+file://." }
description = {
  summary = "Deep learning for Lua 5.4: tensors, automatic differentiation, fast CPU kernels",
  detailed = "A C tensor and autograd core with its own kernels, and neural network modules, optimizers, data loading "
    .. "and recipes as Lua on top.",
  license = "MIT",
  labels = { "machine-learning", "deep-learning", "tensor", "neural-network" },
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.4, < 5.5" }
external_dependencies = {
  ZLIB = { header = "zlib.h" },
  PNG = { header = "png.h" },
  JPEG = { header = "jpeglib.h" },
  PCRE2 = { header = "pcre2.h" },
  UTF8PROC = { header = "utf8proc.h" },
}
-- Not the type "cmake", which runs one job at a time.
build = {
  type = "command",
  build_command = [[cmake -S . -B build.luarocks -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$(PREFIX)" ]]
    .. [[-DLUA_INCLUDE_DIR="$(LUA_INCDIR)" -DINSTALL_LUADIR="$(LUADIR)" -DINSTALL_LIBDIR="$(LIBDIR)" ]]
    .. [[-DINSTALL_BINDIR="$(BINDIR)" -DINSTALL_DATADIR="$(LUADIR)/tycho" -DINSTALL_CLIBDIR="$(LIBDIR)/tycho" ]]
    .. [[-DTYCHO_INSTALL_HEADERS=OFF -DTYCHO_CUDA="${TYCHO_CUDA:-AUTO}" ]]
    .. [[&& cmake --build build.luarocks --parallel `nproc`]],
  install_command = "cmake --install build.luarocks",
}
test = { type = "command", command = "./run test" }
