# SPDX-License-Identifier: Apache-2.0
# The kernel bundle: attune_kernels.bundle beside the library, made from kernels/manifest.json with NVRTC, no GPU needed.
# ATTUNE_BUNDLE AUTO (default): where NVRTC is found and the build is a plain one. ON: or fail. OFF: kernels compile on
# first use. SAMPLE, for tests without a GPU: one module of each source, and those whose code is not the ledger's.
set(ATTUNE_BUNDLE AUTO CACHE STRING "Compile the kernels of kernels/manifest.json: AUTO, ON, OFF or SAMPLE")
set_property(CACHE ATTUNE_BUNDLE PROPERTY STRINGS AUTO ON OFF SAMPLE)
option(ATTUNE_PORTABLE_BUNDLE "Also the PTX of kernels/manifest_portable.json, for GPUs other than Hopper without a compiler" OFF)

# The newest first, of PyPI's package under build/nvrtc, then of a toolkit.
if(NOT ATTUNE_NVRTC_LIBRARY)
  set(nvrtc_found)
  file(GLOB toolkits /usr/local/cuda*/lib64)
  foreach(directory ${PROJECT_SOURCE_DIR}/build/nvrtc/nvidia/cu13/lib ${PROJECT_SOURCE_DIR}/build/nvrtc/nvidia/cuda_nvrtc/lib
                    $ENV{CUDA_HOME}/lib64 $ENV{CUDA_PATH}/lib64 ${toolkits})
    file(GLOB found ${directory}/libnvrtc.so.1[2-9])
    list(SORT found ORDER DESCENDING)
    list(APPEND nvrtc_found ${found})
  endforeach()
  if(nvrtc_found)
    list(GET nvrtc_found 0 nvrtc_first)
    set(ATTUNE_NVRTC_LIBRARY ${nvrtc_first} CACHE FILEPATH "NVRTC for the bundle" FORCE)
  endif()
endif()
find_package(nlohmann_json QUIET)
find_package(fmt QUIET)
if(NOT ATTUNE_BUNDLE STREQUAL "AUTO")
  set(make_bundle ${ATTUNE_BUNDLE})
elseif(ATTUNE_NVRTC_LIBRARY AND nlohmann_json_FOUND AND fmt_FOUND AND NOT CMAKE_CROSSCOMPILING AND NOT ATTUNE_SANITIZE AND NOT ATTUNE_FUZZ
       AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(make_bundle ON)
else()
  set(make_bundle OFF)
endif()
if(NOT make_bundle)
  message(STATUS "No kernel bundle: CUDA kernels compile on first use. -DATTUNE_BUNDLE=ON makes it, with pip "
                 "-Ccmake.define.ATTUNE_BUNDLE=ON (ATTUNE_BUNDLE is ${ATTUNE_BUNDLE}, NVRTC: ${ATTUNE_NVRTC_LIBRARY})")
  return()
endif()
if(NOT ATTUNE_NVRTC_LIBRARY)
  message(FATAL_ERROR "ATTUNE_BUNDLE is ON and NVRTC was not found: python3 -m pip install --target build/nvrtc nvidia-cuda-nvrtc==13.0.*, "
                      "or set ATTUNE_NVRTC_LIBRARY to a libnvrtc.so.13")
endif()

find_package(nlohmann_json REQUIRED)
find_package(fmt REQUIRED)
add_subdirectory(tools/bundle)

set(manifest ${PROJECT_SOURCE_DIR}/kernels/manifest.json)
set(portable ${PROJECT_SOURCE_DIR}/kernels/manifest_portable.json)
set(manifests ${manifest})
if(ATTUNE_PORTABLE_BUNDLE)
  list(APPEND manifests ${portable})
endif()
set(bundler_verb build)
set(ledger)
if(ATTUNE_BUNDLE STREQUAL "SAMPLE")
  set(ledger ${PROJECT_SOURCE_DIR}/kernels/ledger.json)
  set(bundler_verb sample ${ledger})
endif()
set(bundle $<TARGET_FILE_DIR:attune>/attune_kernels.bundle)
set(report ${PROJECT_BINARY_DIR}/kernel_report.json)
# The stamp: TARGET_FILE_DIR cannot name an output. The bundler itself sees which modules changed.
set(stamp ${PROJECT_BINARY_DIR}/attune_kernels.stamp)
add_custom_command(OUTPUT ${stamp}
                   COMMAND ${CMAKE_COMMAND} -E env ATTUNE_NVRTC=${ATTUNE_NVRTC_LIBRARY} $<TARGET_FILE:attune_bundler> ${bundler_verb} ${bundle} ${report}
                           ${manifests}
                   COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
                   DEPENDS attune_bundler attune ${manifests} ${ledger}
                   COMMENT "Compiling the kernels of ${manifests}" USES_TERMINAL VERBATIM)
add_custom_target(attune_kernel_bundle ALL DEPENDS ${stamp})
install(FILES $<TARGET_FILE_DIR:attune>/attune_kernels.bundle DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime)

if(ATTUNE_BUILD_TESTS)
  # What src/cuda asks for at the shapes of cli/models, and what the bundle holds, must be one list.
  add_test(NAME kernels.manifest COMMAND attune_bundler popular check ${PROJECT_SOURCE_DIR}/cli/models ${manifest} ${portable})
  add_test(NAME kernels.ledger COMMAND attune_bundler check ${report} ${PROJECT_SOURCE_DIR}/kernels/ledger.json)
  add_test(NAME kernels.bundle COMMAND attune_bundler verify ${manifest} ${bundle} ${report})
  # Without a GPU, what other GPUs compile: what the ledger does not have of this code.
  add_test(NAME kernels.portable COMMAND ${CMAKE_COMMAND} -E env ATTUNE_NVRTC=${ATTUNE_NVRTC_LIBRARY}
                                         $<TARGET_FILE:attune_bundler> portable check ${PROJECT_SOURCE_DIR}/kernels/ledger_portable.json)
  set_tests_properties(kernels.manifest kernels.ledger kernels.bundle PROPERTIES LABELS repo TIMEOUT 60)
  set_tests_properties(kernels.portable PROPERTIES LABELS repo TIMEOUT 600)
endif()
