# ONNX files are protocol buffers: protoc-c makes C of the messages in src/io/onnx.proto, libprotobuf-c reads and writes
# them. Without the two the rest is built, and ty.io.load_onnx says what is missing.
if(PROTOBUF_C_FOUND AND PROTOC_C)
  set(onnx_folder ${CMAKE_BINARY_DIR}/generated)
  file(MAKE_DIRECTORY ${onnx_folder})
  add_custom_command(OUTPUT ${onnx_folder}/onnx.pb-c.c ${onnx_folder}/onnx.pb-c.h
                     COMMAND ${PROTOC_C} --proto_path=${CMAKE_SOURCE_DIR}/src/io --c_out=${onnx_folder} onnx.proto
                     DEPENDS ${CMAKE_SOURCE_DIR}/src/io/onnx.proto VERBATIM)
  add_custom_target(onnx_messages DEPENDS ${onnx_folder}/onnx.pb-c.c ${onnx_folder}/onnx.pb-c.h)
  target_sources(core PRIVATE ${onnx_folder}/onnx.pb-c.c)
  list(APPEND core_libraries PkgConfig::PROTOBUF_C)
else()
  message(STATUS "no libprotobuf-c or protoc-c: ONNX files are not read")
endif()

# What a target that includes src/io/onnx.h needs.
function(with_onnx target)
  if(TARGET onnx_messages)
    target_compile_definitions(${target} PRIVATE TY_HAVE_ONNX)
    target_include_directories(${target} PRIVATE ${onnx_folder} ${PROTOBUF_C_INCLUDE_DIRS})
    add_dependencies(${target} onnx_messages)
  endif()
endfunction()
with_onnx(core)
