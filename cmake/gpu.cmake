# find_gpus(RESULT [ROOT]): RESULT becomes the compute capabilities of this machine's NVIDIA GPUs ("90;80"), "unknown" when
# there are some whose capability nobody tells, or "" when there are none. A driver's library alone is no GPU: containers
# and images for GPUs have it anywhere. ROOT stands before the paths that are looked at, for tests.
function(find_gpus result)
  set(root "${ARGV1}")
  # The kernel driver's list; devices given to a container, which may lack the list; the device of WSL.
  file(GLOB listed "${root}/proc/driver/nvidia/gpus/*")
  file(GLOB devices "${root}/dev/nvidia[0-9]*")
  if(NOT listed AND NOT devices AND NOT EXISTS "${root}/dev/dxg")
    set(${result} "" PARENT_SCOPE)
    return()
  endif()
  find_program(NVIDIA_SMI nvidia-smi PATHS /usr/lib/wsl/lib)
  mark_as_advanced(NVIDIA_SMI)
  set(capabilities "")
  if(NVIDIA_SMI)
    execute_process(COMMAND ${NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE text ERROR_QUIET
                    RESULT_VARIABLE status TIMEOUT 20)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
      list(REMOVE_DUPLICATES capabilities)
      list(TRANSFORM capabilities REPLACE "\\." "")
    endif()
  endif()
  if(capabilities STREQUAL "" AND (listed OR devices))
    set(capabilities unknown)
  endif()
  set(${result} "${capabilities}" PARENT_SCOPE)
endfunction()

# gpu_architectures(RESULT CAPABILITIES): what CMAKE_CUDA_ARCHITECTURES has to be for them, or "" when one of them is
# unknown or older than what the kernels are written for.
function(gpu_architectures result capabilities)
  set(list "")
  foreach(capability ${capabilities})
    if(NOT capability MATCHES "^[0-9]+$" OR capability LESS 80)
      set(${result} "" PARENT_SCOPE)
      return()
    endif()
    if(capability EQUAL 90)
      set(capability 90a) # the products of H100 and H200 take instructions of this generation alone
    endif()
    list(APPEND list ${capability}-real)
  endforeach()
  set(${result} "${list}" PARENT_SCOPE)
endfunction()
