# The CUDA backend: libtycho_cuda.so, loaded beside libtycho.so when the first GPU is asked for.
#   AUTO      built when nvcc is there        ON        built, or the configuration fails
#   OFF       not built                       EMULATED  the emulated device of tests/cuda_emu in its place
set(TYCHO_CUDA AUTO CACHE STRING "GPU kernels: AUTO, ON, OFF or EMULATED")
set_property(CACHE TYCHO_CUDA PROPERTY STRINGS AUTO ON OFF EMULATED)
if(NOT TYCHO_CUDA MATCHES "^(AUTO|ON|OFF|EMULATED)$")
  message(FATAL_ERROR "TYCHO_CUDA is \"${TYCHO_CUDA}\"; it can be AUTO, ON, OFF or EMULATED")
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cu)

include(CheckLanguage)
set(build_cuda OFF)
if(TYCHO_CUDA MATCHES "^(AUTO|ON)$" AND NOT TYCHO_SANITIZE)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(build_cuda ON)
  elseif(TYCHO_CUDA STREQUAL ON)
    message(FATAL_ERROR "TYCHO_CUDA=ON, but no nvcc was found; CUDACXX names one")
  endif()
endif()

if(build_cuda)
  # Machine code for the A100's and the H100's generation; of the former also the form that other GPUs translate. The
  # variable CUDAARCHS of the environment chooses others, such as 90a-real alone, which takes half the time.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80 90a-real CACHE STRING "GPU generations")
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # the driver is found at run time, by it
  enable_language(CUDA)
  add_library(cuda SHARED ${cuda_sources} src/device/cuda_table.c)
  set_target_properties(cuda PROPERTIES OUTPUT_NAME tycho_cuda CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)
  target_compile_options(cuda PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size;--expt-relaxed-constexpr;--Werror=all-warnings>")
  target_link_libraries(cuda PRIVATE tycho_shared)
  set_target_properties(cuda PROPERTIES INSTALL_RPATH "$ORIGIN")
endif()

check_language(CXX)
if(CMAKE_CXX_COMPILER)
  enable_language(CXX)
  add_subdirectory(tests/cuda_emu)
  if(build_cuda)
    add_library(cuda_headers OBJECT tests/cuda_emu/check/headers.cc) # only compiled
    target_include_directories(cuda_headers PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  endif()
elseif(TYCHO_CUDA STREQUAL EMULATED)
  message(FATAL_ERROR "TYCHO_CUDA=EMULATED takes a C++ compiler")
endif()
