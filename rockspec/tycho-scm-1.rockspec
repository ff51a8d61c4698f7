-- luarocks --lua-version 5.4 make rockspec/tycho-scm-1.rockspec
-- CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) in the environment uses all cores; LUA_INCDIR=... says where lua.h is.
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
build = {
  type = "cmake",
  variables = {
    CMAKE_BUILD_TYPE = "Release",
    CMAKE_INSTALL_PREFIX = "$(PREFIX)",
    LUA_INCLUDE_DIR = "$(LUA_INCDIR)",
    INSTALL_LUADIR = "$(LUADIR)",
    INSTALL_LIBDIR = "$(LIBDIR)",
    INSTALL_BINDIR = "$(BINDIR)",
    INSTALL_DATADIR = "$(LUADIR)/tycho",
    INSTALL_CLIBDIR = "$(LIBDIR)/tycho",
    TYCHO_INSTALL_HEADERS = "OFF",
  },
}
test = { type = "command", command = "./run test" }
