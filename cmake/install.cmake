# Where things go. A LuaRocks build gives folders of its own, and moves what it finds there: programs and libraries
# find libtycho.so relative to where they are.
include(GNUInstallDirs)
set(INSTALL_BINDIR ${CMAKE_INSTALL_BINDIR} CACHE STRING "the tycho program")
set(INSTALL_LUADIR share/lua/5.4 CACHE STRING "Lua files")
set(INSTALL_LIBDIR lib/lua/5.4 CACHE STRING "the C module of plain Lua")
set(INSTALL_DATADIR share/tycho CACHE STRING "recipes, their records and data sets")
set(INSTALL_CLIBDIR ${CMAKE_INSTALL_LIBDIR} CACHE STRING "libtycho.so")
option(TYCHO_INSTALL_HEADERS "Install the headers of the C library" ON)

if(CMAKE_BUILD_TYPE STREQUAL "Release")
  install(CODE "set(CMAKE_INSTALL_DO_STRIP TRUE)")
endif()
if(TYCHO_INSTALL_HEADERS)
  install(TARGETS tycho_shared LIBRARY DESTINATION ${INSTALL_CLIBDIR})
else()
  install(TARGETS tycho_shared LIBRARY DESTINATION ${INSTALL_CLIBDIR} NAMELINK_SKIP)
endif()

set_target_properties(tycho_shared PROPERTIES INSTALL_RPATH "$ORIGIN") # what a bundle puts beside it
if(build_cuda) # beside libtycho.so, which looks for it there
  install(TARGETS cuda LIBRARY DESTINATION ${INSTALL_CLIBDIR})
endif()

# How `from` reaches libtycho.so.
function(set_rpath target from)
  if(IS_ABSOLUTE ${from} OR IS_ABSOLUTE ${INSTALL_CLIBDIR})
    set(path "$ORIGIN:$ORIGIN/../lib/lua/5.4/tycho") # LuaRocks: beside the module
  else()
    file(RELATIVE_PATH way /prefix/${from} /prefix/${INSTALL_CLIBDIR})
    set(path "$ORIGIN/${way}")
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${path}")
endfunction()

if(TARGET tycho)
  install(TARGETS tycho RUNTIME DESTINATION ${INSTALL_BINDIR})
  set_rpath(tycho ${INSTALL_BINDIR})
endif()
install(TARGETS lua_module LIBRARY DESTINATION ${INSTALL_LIBDIR}/tycho)
set_rpath(lua_module ${INSTALL_LIBDIR}/tycho)

# modules/X becomes tycho.X: beside the library, where require looks.
install(DIRECTORY lua/tycho/ modules/ DESTINATION ${INSTALL_LUADIR}/tycho FILES_MATCHING PATTERN "*.lua"
        PATTERN "*.html" PATTERN "*.css" PATTERN "*.js")
if(TARGET meta)
  install(FILES ${CMAKE_BINARY_DIR}/meta/ops.lua DESTINATION ${INSTALL_LUADIR}/tycho/meta)
endif()
install(DIRECTORY recipes records datasets DESTINATION ${INSTALL_DATADIR} PATTERN "__pycache__" EXCLUDE)

if(TYCHO_INSTALL_HEADERS)
  # The headers include one another by the paths of the source tree; tycho/tycho.h leads there.
  set(headers ${CMAKE_INSTALL_INCLUDEDIR}/tycho)
  install(FILES cmake/tycho.h src/tycho_lua.h DESTINATION ${headers})
  install(FILES src/tycho.h DESTINATION ${headers}/src)
  install(FILES src/tensor/tensor.h src/tensor/memory.h src/tensor/kept.h DESTINATION ${headers}/src/tensor)
  install(FILES src/ops/ops.def src/ops/undef_args.h DESTINATION ${headers}/src/ops)
  install(FILES kernels/base.h kernels/kept.h DESTINATION ${headers}/kernels)
  file(RELATIVE_PATH pc_up /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  configure_file(cmake/tycho.pc.in ${CMAKE_BINARY_DIR}/tycho.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/tycho.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
