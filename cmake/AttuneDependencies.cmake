# SPDX-License-Identifier: Apache-2.0
# What the library links: Highway and threads, as attune::highway and Threads::Threads. The installed package includes this
# file too, for static builds.
if(NOT TARGET attune::highway)
  # Distributions ship a CMake package, a pkg-config file, or both.
  find_package(hwy CONFIG QUIET)
  if(TARGET hwy::hwy)
    set(attune_highway_target hwy::hwy)
  else()
    find_package(PkgConfig REQUIRED)
    pkg_check_modules(ATTUNE_HWY REQUIRED IMPORTED_TARGET libhwy>=1.0.3)
    set(attune_highway_target PkgConfig::ATTUNE_HWY)
  endif()
  add_library(attune::highway INTERFACE IMPORTED)
  set_target_properties(attune::highway PROPERTIES INTERFACE_LINK_LIBRARIES ${attune_highway_target})
  unset(attune_highway_target)
endif()
if(NOT TARGET Threads::Threads)
  set(THREADS_PREFER_PTHREAD_FLAG ON)
  find_package(Threads REQUIRED)
endif()
