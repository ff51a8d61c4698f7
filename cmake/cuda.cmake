# The CUDA backend: libtycho_cuda.so, loaded beside libtycho.so when the first GPU is asked for.
#   AUTO      part of the build when nvcc and a GPU are there     ON        part of the build, or the configuration fails
#   OFF       no nvcc                                             EMULATED  the emulated device of tests/cuda_emu in its place
# Where nvcc is there, AUTO and ON have these targets, whether the build has them or not:
#   cuda           libtycho_cuda.so for the GPUs of this machine, or for all where it has none
#   cuda_release   the same for all GPUs, for the bundle
#   cuda_check     shows that the kernels compile, without optimization and for one generation: a quarter of the time
set(TYCHO_CUDA AUTO CACHE STRING "GPU kernels: AUTO, ON, OFF or EMULATED")
set_property(CACHE TYCHO_CUDA PROPERTY STRINGS AUTO ON OFF EMULATED)
if(NOT TYCHO_CUDA MATCHES "^(AUTO|ON|OFF|EMULATED)$")
  message(FATAL_ERROR "TYCHO_CUDA is \"${TYCHO_CUDA}\"; it can be AUTO, ON, OFF or EMULATED")
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cu)

include(CheckLanguage)
include(cmake/gpu.cmake)
set(have_cuda OFF)  # there is an nvcc
set(build_cuda OFF) # the kernels are part of the build
if(TYCHO_CUDA MATCHES "^(AUTO|ON)$" AND NOT TYCHO_SANITIZE)
  find_gpus(gpus)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(have_cuda ON)
    if(TYCHO_CUDA STREQUAL ON OR gpus)
      set(build_cuda ON)
    endif()
  elseif(TYCHO_CUDA STREQUAL ON)
    message(FATAL_ERROR "TYCHO_CUDA=ON, but no nvcc was found; CUDACXX names one")
  endif()
endif()

function(add_cuda_library name)
  add_library(${name} SHARED ${ARGN} ${cuda_sources} src/device/cuda_table.c)
  set_target_properties(${name} PROPERTIES OUTPUT_NAME tycho_cuda CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                        INSTALL_RPATH "$ORIGIN")
  target_compile_options(${name} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size;--expt-relaxed-constexpr;--Werror=all-warnings>")
  target_link_libraries(${name} PRIVATE tycho_shared)
endfunction()

if(have_cuda)
  # Machine code for the A100's and the H100's generation; of the former also the form that other GPUs translate. The
  # variable CUDAARCHS of the environment chooses others.
  set(all_architectures 80 90a-real)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    gpu_architectures(architectures "${gpus}")
    if(architectures STREQUAL "")
      set(architectures ${all_architectures})
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${architectures} CACHE STRING "GPU generations")
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # the driver is found at run time, by it
  enable_language(CUDA)
  set(excluded EXCLUDE_FROM_ALL)
  if(build_cuda)
    set(excluded "")
    message(STATUS "GPU kernels: for ${CMAKE_CUDA_ARCHITECTURES}")
  else()
    message(STATUS "GPU kernels: no GPU here, so not part of the build; -DTYCHO_CUDA=ON (./run build --cuda) builds them")
  endif()
  add_cuda_library(cuda ${excluded})
  add_cuda_library(cuda_release EXCLUDE_FROM_ALL)
  set_target_properties(cuda_release PROPERTIES CUDA_ARCHITECTURES "${all_architectures}" BUILD_WITH_INSTALL_RPATH ON
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/cuda_release)

  file(GLOB lab_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/lab/*.cu) # programs of their own
  set(checked "")
  foreach(source ${cuda_sources} ${lab_sources})
    get_filename_component(name ${source} NAME_WE)
    set(output ${CMAKE_BINARY_DIR}/cuda_check/${name}.cubin)
    add_custom_command(OUTPUT ${output}
      COMMAND ${CMAKE_CUDA_COMPILER} -std=c++17 -arch=sm_90a -cubin -Xcicc -O0 -Xptxas -O0 --expt-relaxed-constexpr
              --Werror=all-warnings -MD -MF ${output}.d -MT ${output} -o ${output} ${source}
      DEPENDS ${source} DEPFILE ${output}.d COMMENT "Checking ${name}.cu" VERBATIM)
    list(APPEND checked ${output})
  endforeach()
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/cuda_check)
  add_custom_target(cuda_check DEPENDS ${checked})
endif()

check_language(CXX)
if(CMAKE_CXX_COMPILER)
  enable_language(CXX)
  add_subdirectory(tests/cuda_emu)
  if(have_cuda)
    add_library(cuda_headers OBJECT EXCLUDE_FROM_ALL tests/cuda_emu/check/headers.cc) # only compiled
    target_include_directories(cuda_headers PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    add_dependencies(cuda_check cuda_headers)
    add_dependencies(cuda cuda_headers)
  endif()
elseif(TYCHO_CUDA STREQUAL EMULATED)
  message(FATAL_ERROR "TYCHO_CUDA=EMULATED takes a C++ compiler")
endif()
