# SPDX-License-Identifier: Apache-2.0
# attune_embed_kernels(TARGET): puts the sources of kernels/ into the library, for the run-time compiler, and lets host code
# include the headers that it shares with the kernels by the same names.
# Run with cmake -P, it writes the generated file: -DROOT=kernels -DOUTPUT=embedded_kernels.cpp -DFILES=list
if(CMAKE_SCRIPT_MODE_FILE)
  string(REPLACE "|" ";" FILES "${FILES}")
  set(count 0)
  foreach(path ${FILES})
    file(READ ${ROOT}/${path} body)
    string(APPEND entries "    {\"${path}\", kFile${count}, sizeof(kFile${count}) - 1},\n")
    string(APPEND bodies "constexpr char kFile${count}[] = R\"kernel_source(${body})kernel_source\";\n")
    math(EXPR count "${count} + 1")
  endforeach()
  set(text "// Generated from kernels/ by cmake/Kernels.cmake.\n#include \"cuda/jit/sources.h\"\n\n")
  string(APPEND text "namespace attune::cuda {\nnamespace {\n${bodies}}  // namespace\n")
  # The last entry is there because an array has at least one.
  string(APPEND text "extern const EmbeddedFile kEmbeddedKernels[] = {\n${entries}    {\"\", \"\", 0}};\n")
  string(APPEND text "extern const size_t kNumEmbeddedKernels = ${count};\n}  // namespace attune::cuda\n")
  file(WRITE ${OUTPUT} "${text}")
  return()
endif()

function(attune_embed_kernels target)
  set(root ${PROJECT_SOURCE_DIR}/kernels)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${root} ${root}/*.cu ${root}/*.cuh ${root}/*.h)
  list(SORT files)
  set(depends ${files})
  list(TRANSFORM depends PREPEND ${root}/)
  list(JOIN files "|" joined)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded_kernels.cpp)
  add_custom_command(OUTPUT ${output}
                     COMMAND ${CMAKE_COMMAND} "-DROOT=${root}" "-DOUTPUT=${output}" "-DFILES=${joined}" -P
                             ${PROJECT_SOURCE_DIR}/cmake/Kernels.cmake
                     DEPENDS ${depends} ${PROJECT_SOURCE_DIR}/cmake/Kernels.cmake
                     COMMENT "Embedding the kernels' sources" VERBATIM)
  target_sources(${target} PRIVATE ${output})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${root}>)
endfunction()
