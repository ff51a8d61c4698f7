# The `tycho` program. Lua is linked in whole, with its C API exported, so that C modules of Lua packages load into it.
find_library(LUA_STATIC_LIBRARY NAMES liblua5.4.a liblua54.a liblua-5.4.a HINTS ${LUA_LIBDIR})
find_library(LUA_SHARED_LIBRARY NAMES lua5.4 lua54 lua-5.4 HINTS ${LUA_LIBDIR})
if(LUA_STATIC_LIBRARY)
  set(program_lua -Wl,--whole-archive ${LUA_STATIC_LIBRARY} -Wl,--no-whole-archive)
else()
  set(program_lua ${LUA_SHARED_LIBRARY})
endif()

if(program_lua)
  file(GLOB program_sources CONFIGURE_DEPENDS src/cli/*.c)
  add_executable(tycho ${program_sources} $<TARGET_OBJECTS:border>)
  set_target_properties(tycho PROPERTIES ENABLE_EXPORTS ON RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
  target_include_directories(tycho PRIVATE ${LUA_INCLUDE_DIR} ${PNG_INCLUDE_DIRS} ${JPEG_INCLUDE_DIRS}
                                           ${ZLIB_INCLUDE_DIRS})
  target_compile_options(tycho PRIVATE -fPIC) # as a PIE it would get its own copy of the library's variables
  target_link_libraries(tycho PRIVATE ${program_lua} tycho_shared ${core_libraries})
  if(MICROHTTPD_INCLUDE_DIR)
    target_compile_definitions(tycho PRIVATE TY_HAVE_MICROHTTPD)
  endif()
  foreach(name WEBP FLAC)
    if(${name}_FOUND)
      target_compile_definitions(tycho PRIVATE TY_HAVE_${name})
    endif()
  endforeach()
  with_onnx(tycho)
  find_path(EDIT_INCLUDE_DIR histedit.h) # headers only: libedit is loaded when the prompt starts
  if(EDIT_INCLUDE_DIR)
    target_compile_definitions(tycho PRIVATE TY_HAVE_EDIT)
    target_include_directories(tycho PRIVATE ${EDIT_INCLUDE_DIR})
  endif()
  # Where the program finds its Lua files while it is in a build folder; never installed.
  file(WRITE ${CMAKE_BINARY_DIR}/source-tree.txt "${CMAKE_SOURCE_DIR}\n")
  if(NOT TYCHO_SANITIZE) # what the editor is told about the ops
    add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/meta/ops.lua
                       COMMAND tycho ${CMAKE_SOURCE_DIR}/cmake/meta.lua ${CMAKE_BINARY_DIR}/meta/ops.lua
                       DEPENDS tycho cmake/meta.lua lua/tycho/meta/init.lua VERBATIM)
    add_custom_target(meta ALL DEPENDS ${CMAKE_BINARY_DIR}/meta/ops.lua)
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/meta)
  endif()
else()
  message(STATUS "no Lua library found: only the modules are built, not the tycho program")
endif()

# `. env.sh` lets plain lua5.4 require "tycho" from this build folder.
configure_file(cmake/env.sh.in ${CMAKE_BINARY_DIR}/env.sh @ONLY)
