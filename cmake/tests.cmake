# What ctest runs: the op tests, each file of tests/lua, tests/modules and tests/c, the program's own tests, luacheck.
enable_testing()
set(test_folder WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})

if(TARGET tycho)
  if(EXISTS ${CMAKE_SOURCE_DIR}/tests/run_ops.lua)
    foreach(part 1 2 3 4) # several entries for the ops, which cores share
      add_test(NAME ops_${part} COMMAND tycho tests/run_ops.lua --part ${part}/4
               "$<$<BOOL:${TYCHO_SANITIZE}>:--quick;--moved;2>" ${test_folder} COMMAND_EXPAND_LISTS)
      list(APPEND parts_of_ops ops_${part})
      list(APPEND parts_of_cuda_ops cuda_ops_${part})
    endforeach()
  endif()
  file(GLOB lua_tests RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS tests/lua/*_test.lua)
  foreach(file ${lua_tests})
    string(REGEX REPLACE "tests/lua/(.*)_test.lua" "lua_\\1" name ${file})
    add_test(NAME ${name} COMMAND tycho ${file} ${test_folder})
  endforeach()
  # Each recipe's quick run, an entry of its own: they run side by side, on a thread each.
  file(GLOB recipes RELATIVE ${CMAKE_SOURCE_DIR}/recipes CONFIGURE_DEPENDS recipes/*/*.lua)
  foreach(file ${recipes})
    string(REGEX REPLACE "\\.lua$" "" recipe ${file})
    string(REPLACE "/" "_" name recipe_${recipe})
    add_test(NAME ${name} COMMAND tycho tests/recipes/quick.lua ${recipe} ${test_folder})
  endforeach()
  # Each tutorial: its blocks are run, and print what the page shows.
  file(GLOB tutorials RELATIVE ${CMAKE_SOURCE_DIR}/docs/tutorials CONFIGURE_DEPENDS docs/tutorials/*.md)
  foreach(file ${tutorials})
    string(REGEX REPLACE "^([0-9]+)-(.*)\\.md$" "tutorial_\\1_\\2" name ${file})
    add_test(NAME ${name} COMMAND tycho tests/docs/tutorial.lua docs/tutorials/${file} ${test_folder})
  endforeach()
  add_test(NAME recipe_page COMMAND tycho tests/recipes/page.lua ${test_folder})
  # Those of modules by family: tests/modules/peft/lora_test.lua is peft_lora.
  file(GLOB module_tests RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS tests/modules/*/*_test.lua)
  foreach(file ${module_tests})
    string(REGEX REPLACE "tests/modules/(.*)/(.*)_test.lua" "\\1_\\2" name ${file})
    add_test(NAME ${name} COMMAND tycho ${file} ${test_folder})
  endforeach()
  add_test(NAME program COMMAND tycho tests/cli/program_test.lua $<$<BOOL:${TYCHO_SANITIZE}>:--slow> ${test_folder}
           COMMAND_EXPAND_LISTS)
  add_test(NAME run COMMAND tycho tests/cli/run_test.lua ${test_folder})
endif()

# The same tests on the emulated device, whose library they build. TYCHO_CUDA_LIBRARY is how the program finds it.
if(TARGET cuda_emulated AND TARGET tycho)
  add_test(NAME cuda_build COMMAND ${CMAKE_COMMAND} --build ${CMAKE_BINARY_DIR} --target cuda_emulated cuda_stand_ins cuda_planted)
  set_tests_properties(cuda_build PROPERTIES FIXTURES_SETUP cuda_built RESOURCE_LOCK build_folder)
  foreach(part 1 2 3 4)
    add_test(NAME cuda_ops_${part} COMMAND tycho tests/run_ops.lua --device cuda --quick --part ${part}/4
             $<$<BOOL:${TYCHO_SANITIZE}>:--no-grad> ${test_folder} COMMAND_EXPAND_LISTS)
  endforeach()
  # And with stand-ins for NVIDIA's libraries, the ops that ask them.
  foreach(op matmul linear conv1d conv2d conv2d_backward_input conv2d_backward_weight conv_transpose2d
             scaled_dot_product_attention attention_backward)
    list(APPEND library_ops --op ${op})
  endforeach()
  add_test(NAME cuda_libraries COMMAND tycho tests/run_ops.lua --device cuda --quick
           $<$<BOOL:${TYCHO_SANITIZE}>:--no-grad> ${library_ops} ${test_folder} COMMAND_EXPAND_LISTS)
  add_test(NAME cuda_versions COMMAND tycho tests/lua/cuda_library_test.lua ${test_folder})
  add_test(NAME cuda_whole COMMAND tycho tests/lua/cuda_test.lua ${test_folder})
  add_test(NAME cuda_autocast COMMAND tycho tests/lua/autocast_test.lua ${test_folder})
  add_test(NAME cuda_kinks COMMAND tycho tests/lua/kinks_test.lua ${test_folder})
  add_test(NAME cuda_optimizers COMMAND tycho tests/lua/optim_step_test.lua ${test_folder})
  add_test(NAME cuda_grad_scaler COMMAND tycho tests/lua/grad_scaler_test.lua ${test_folder})
  # Streams at once and lazily, see tests/cuda_emu/runtime.cc.
  add_test(NAME cuda_streams COMMAND tycho tests/lua/cuda_streams_test.lua ${test_folder})
  add_test(NAME cuda_whole_lazy COMMAND tycho tests/lua/cuda_test.lua ${test_folder})
  add_test(NAME cuda_streams_lazy COMMAND tycho tests/lua/cuda_streams_test.lua ${test_folder})
  add_test(NAME cuda_paged COMMAND tycho tests/lua/paged_test.lua ${test_folder})
  add_test(NAME cuda_paged_lazy COMMAND tycho tests/lua/paged_test.lua ${test_folder})
  add_test(NAME cuda_deep_opt_states COMMAND tycho tests/modules/offload/deep_opt_states_test.lua ${test_folder})
  add_test(NAME cuda_deep_opt_states_lazy COMMAND tycho tests/modules/offload/deep_opt_states_test.lua ${test_folder})
  add_test(NAME cuda_offload COMMAND tycho tests/modules/offload/link_test.lua ${test_folder})
  add_test(NAME cuda_offload_lazy COMMAND tycho tests/modules/offload/link_test.lua ${test_folder})
  add_test(NAME cuda_feature_draft COMMAND tycho tests/modules/llm/feature_draft_test.lua ${test_folder})
  # Of recipes one that goes all of the way: words, steps, pictures.
  add_test(NAME cuda_recipe_diffusion COMMAND tycho tests/recipes/quick.lua diffusion/generate cuda ${test_folder})
  add_test(NAME cuda_planted COMMAND cuda_planted)
  set(with_libraries cuda_libraries cuda_versions cuda_whole cuda_autocast cuda_kinks cuda_optimizers cuda_grad_scaler cuda_streams
      cuda_whole_lazy cuda_streams_lazy cuda_paged cuda_paged_lazy cuda_deep_opt_states
      cuda_deep_opt_states_lazy cuda_offload cuda_offload_lazy cuda_feature_draft cuda_recipe_diffusion) # stand-ins, below
  if(NOT TYCHO_SANITIZE)
    add_test(NAME cuda_bench COMMAND tycho bench/gpu.lua --tiny --no-peer ${test_folder})
    add_test(NAME cuda_zoo COMMAND tycho tests/modules/zoo/shipped_test.lua ${test_folder})
    list(APPEND with_libraries cuda_bench cuda_zoo)
  endif()
  set_tests_properties(${parts_of_cuda_ops} ${with_libraries} cuda_planted PROPERTIES FIXTURES_REQUIRED cuda_built)
endif()

file(GLOB c_tests CONFIGURE_DEPENDS tests/c/*.c)
if(c_tests)
  # Linked with the objects, not the shared library: they test inner functions too.
  add_executable(c_test EXCLUDE_FROM_ALL ${c_tests} $<TARGET_OBJECTS:core> ${kernel_objects})
  target_include_directories(c_test PRIVATE src)
  target_link_libraries(c_test PRIVATE ${core_libraries})
  add_test(NAME c_build COMMAND ${CMAKE_COMMAND} --build ${CMAKE_BINARY_DIR} --target c_test)
  set_tests_properties(c_build PROPERTIES FIXTURES_SETUP c_built RESOURCE_LOCK build_folder)
  add_test(NAME c COMMAND c_test ${test_folder})
  set_tests_properties(c PROPERTIES FIXTURES_REQUIRED c_built)
endif()

find_program(LUACHECK luacheck)
if(LUACHECK)
  add_test(NAME luacheck COMMAND ${LUACHECK} --quiet --no-color . ${test_folder})
endif()

if(TARGET cuda_emulated AND TARGET tycho)
  set(emulated ${CMAKE_BINARY_DIR}/emulated)
  set(named TYCHO_CUDA_LIBRARY=$<TARGET_FILE:cuda_emulated>)
  set_tests_properties(${parts_of_cuda_ops} PROPERTIES ENVIRONMENT "${named};TYCHO_CUDA_PATH=${emulated}/solver")
  set_tests_properties(${with_libraries} PROPERTIES ENVIRONMENT
    "${named};TYCHO_CUDA_PATH=${emulated}/libraries:${emulated}/solver")
  set_property(TEST cuda_whole_lazy cuda_streams_lazy cuda_paged_lazy cuda_deep_opt_states_lazy cuda_offload_lazy
    APPEND PROPERTY
    ENVIRONMENT TYCHO_EMULATED_STREAMS=lazy)
endif()
# What takes long begins first where no run has shown it yet, so that no core waits for another one in the end: about the
# seconds of a core. The build of the emulated device is before all that need it.
function(takes seconds)
  foreach(name ${ARGN})
    if(TEST ${name})
      set_tests_properties(${name} PROPERTIES COST ${seconds})
    endif()
  endforeach()
endfunction()
takes(400 cuda_build)
takes(80 ${parts_of_cuda_ops} ${parts_of_ops})
takes(40 cuda_whole cuda_bench cuda_libraries program lua_arguments)
takes(20 lua_tokenizer_characters lua_docs lua_watch hub_chat luacheck cuda_whole_lazy cuda_zoo)
takes(10 lua_spectral lua_tokenizer hub_load datasets_scenes offload_kill tutorial_4_diffusion tutorial_5_fine-tune)

if(TYCHO_SANITIZE)
  get_property(names DIRECTORY PROPERTY TESTS)
  set_property(TEST ${names} APPEND PROPERTY ENVIRONMENT
    "LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/leaks.txt:print_suppressions=0;UBSAN_OPTIONS=print_stacktrace=1")
endif()
