# cmake --build --preset release --target bundle: one archive with the program, its Lua files, recipes, tests, benchmarks
# and the shared libraries that a plain Linux may lack. It runs where it is unpacked; of the system it takes the C library
# (of this machine's version or newer) and, for GPUs, NVIDIA's driver: where nvcc is there, the bundle has the kernels for
# all GPUs, whatever the build has.
#   tar -xzf tycho-0.1.0-Linux-x86_64.tar.gz && tycho-0.1.0-Linux-x86_64/bin/tycho doctor
# On a machine with a GPU, bin/tycho bench/gpu.lua there runs the tests and the benchmarks, in 8 minutes.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(release_cuda "")
  if(TARGET cuda_release)
    set(release_cuda $<TARGET_FILE:cuda_release>)
  endif()
  set(bundle_name ${PROJECT_NAME}-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
  add_custom_target(bundle
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DBUILD=${CMAKE_BINARY_DIR} -DNAME=${bundle_name}
            -DCUDA=${release_cuda}
            -P ${CMAKE_SOURCE_DIR}/cmake/bundle.cmake
    VERBATIM)
  add_dependencies(bundle tycho lua_module)
  if(TARGET cuda_release)
    add_dependencies(bundle cuda_release)
  endif()
  if(TARGET meta)
    add_dependencies(bundle meta)
  endif()
  return()
endif()

set(tree ${BUILD}/bundle/${NAME})
file(REMOVE_RECURSE ${BUILD}/bundle)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${tree} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(COPY ${SOURCE}/tests ${SOURCE}/bench DESTINATION ${tree} PATTERN "__pycache__" EXCLUDE)
file(COPY ${SOURCE}/README.md ${SOURCE}/LICENSE DESTINATION ${tree})

# Libraries beside libtycho.so, which looks there first.
file(GLOB library ${tree}/lib/libtycho.so.0 ${tree}/lib/*/libtycho.so.0)
get_filename_component(folder ${library} DIRECTORY)
if(CUDA)
  file(COPY ${CUDA} DESTINATION ${folder})
endif()
file(GLOB modules ${folder}/libtycho_cuda.so)
file(GLOB lapack /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0 /usr/lib/libopenblas.so.0) # loaded, not linked
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${tree}/bin/tycho LIBRARIES ${library} ${modules} ${lapack}
     RESOLVED_DEPENDENCIES_VAR needed UNRESOLVED_DEPENDENCIES_VAR missing DIRECTORIES ${folder}
     PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread)\\.so" "^libtycho")
if(missing)
  message(FATAL_ERROR "not found: ${missing}")
endif()
foreach(file ${needed} ${lapack})
  file(COPY ${file} DESTINATION ${folder} FOLLOW_SYMLINK_CHAIN)
endforeach()

execute_process(COMMAND ${CMAKE_COMMAND} -E tar czf ${BUILD}/${NAME}.tar.gz ${NAME} WORKING_DIRECTORY ${BUILD}/bundle
                COMMAND_ERROR_IS_FATAL ANY)
file(SIZE ${BUILD}/${NAME}.tar.gz bytes)
math(EXPR mebibytes "${bytes} / 1048576")
message("${BUILD}/${NAME}.tar.gz: ${mebibytes} MiB")
