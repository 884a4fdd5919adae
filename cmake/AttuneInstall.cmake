# SPDX-License-Identifier: Apache-2.0
# The installed package: headers, library, find_package(attune) and pkg-config files. All of it may be moved afterwards.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/attune)
set(generated_dir ${PROJECT_BINARY_DIR}/package)

install(DIRECTORY include/attune DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(TARGETS attune EXPORT attune-targets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
if(TARGET attune_cli)
  install(TARGETS attune_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
endif()
install(EXPORT attune-targets NAMESPACE attune:: DESTINATION ${package_dir} COMPONENT development)

configure_package_config_file(cmake/attune-config.cmake.in ${generated_dir}/attune-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break the ABI.
write_basic_package_version_file(${generated_dir}/attune-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${generated_dir}/attune-config.cmake ${generated_dir}/attune-config-version.cmake cmake/AttuneDependencies.cmake
        DESTINATION ${package_dir} COMPONENT development)

# pkg-config: the prefix is relative to the file's own place.
file(RELATIVE_PATH PC_PREFIX_FROM_HERE /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" PC_PREFIX_FROM_HERE "${PC_PREFIX_FROM_HERE}")
if(ATTUNE_STATIC)
  # A static library hands its own dependencies on: pkg-config --static --libs attune.
  set(PC_CFLAGS "-DATTUNE_STATIC")
  set(PC_REQUIRES_PRIVATE "libhwy")
  set(PC_LIBS_PRIVATE "-pthread -ldl -lstdc++ -lm")
endif()
configure_file(cmake/attune.pc.in ${generated_dir}/attune.pc @ONLY)
install(FILES ${generated_dir}/attune.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
