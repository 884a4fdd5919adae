#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs to a temporary prefix, moves it, and consumes it from C and C++ with find_package and with pkg-config.
set -euo pipefail
: "${ATTUNE_SOURCE_DIR:?}" "${ATTUNE_BUILD_DIR:?}" "${CMAKE:?}" "${CC:?}" "${CXX:?}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "failed: $*"; exit 1; }; }

quietly "$CMAKE" --install "$ATTUNE_BUILD_DIR" --prefix "$work/first"
config=$(find "$work/first" -name attune-config.cmake)
pc=$(find "$work/first" -name attune.pc)
[[ -f $config && -f $pc ]] || { echo "the package files are not installed"; exit 1; }
# Nothing may point back at the build or at the prefix it was installed to.
if grep -rnE "$ATTUNE_BUILD_DIR|$ATTUNE_SOURCE_DIR|$work" "$(dirname "$config")" "$pc"; then
  echo "the package names paths of this machine"
  exit 1
fi

# "0.2" of "0.2.0", as users ask for it.
version=$(sed -n 's/^#define ATTUNE_VERSION_STRING "\([0-9]*\.[0-9]*\)\..*/\1/p' "$ATTUNE_SOURCE_DIR/include/attune/attune.h")
[[ $version =~ ^[0-9]+\.[0-9]+$ ]] || { echo "the header states no version: '$version'"; exit 1; }

mkdir "$work/consumer"
cp "$ATTUNE_SOURCE_DIR/examples/c_api.c" "$ATTUNE_SOURCE_DIR/examples/paged_decode.cpp" "$work/consumer"
cat >"$work/consumer/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES C CXX)
find_package(attune ${WANTED_VERSION} REQUIRED CONFIG)
add_executable(c_api c_api.c)
target_link_libraries(c_api PRIVATE attune::attune m)
add_executable(paged_decode paged_decode.cpp)
target_compile_features(paged_decode PRIVATE cxx_std_20)
target_link_libraries(paged_decode PRIVATE attune::attune)
END

with_cmake() { # PREFIX
  local prefix=$1 build=$work/build
  rm -rf "$build"
  quietly "$CMAKE" -S "$work/consumer" -B "$build" -DCMAKE_PREFIX_PATH="$prefix" -DWANTED_VERSION="$version" \
    -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX"
  quietly "$CMAKE" --build "$build"
  quietly "$build/c_api"
  quietly "$build/paged_decode"
  if "$CMAKE" -S "$work/consumer" -B "$work/other" -DCMAKE_PREFIX_PATH="$prefix" -DWANTED_VERSION=99.0 >/dev/null 2>&1; then
    echo "find_package(attune 99.0) succeeded"
    exit 1
  fi
}

with_pkg_config() { # PREFIX
  local prefix=$1 directory static=() cflags libs
  directory=$(dirname "$(find "$prefix" -name attune.pc)")
  export PKG_CONFIG_PATH=$directory
  if [[ ${ATTUNE_STATIC:-0} == 1 ]]; then static=(--static); fi
  read -ra cflags <<<"$(pkg-config "${static[@]}" --cflags attune)"
  read -ra libs <<<"$(pkg-config "${static[@]}" --libs attune)"
  quietly "$CC" -std=c99 "${cflags[@]}" "$work/consumer/c_api.c" -o "$work/c_api" "${libs[@]}" -lm
  quietly "$CXX" -std=c++20 "${cflags[@]}" "$work/consumer/paged_decode.cpp" -o "$work/paged_decode" "${libs[@]}"
  quietly env LD_LIBRARY_PATH="$(dirname "$directory")" "$work/c_api"
  quietly env LD_LIBRARY_PATH="$(dirname "$directory")" "$work/paged_decode"
}

# prefix moved: what was built against the old place must not be needed.
with_cmake "$work/first"
mv "$work/first" "$work/second"
with_cmake "$work/second"
if command -v pkg-config >/dev/null; then
  with_pkg_config "$work/second"
else
  echo "pkg-config is not installed: that half was not tested"
fi
if [[ -x $work/second/bin/attune ]]; then
  quietly "$work/second/bin/attune" info --no-ceilings --json
  # The kernels that were compiled with the library are installed beside it, and found there.
  if [[ -f $ATTUNE_BUILD_DIR/src/attune_kernels.bundle && ${ATTUNE_STATIC:-0} != 1 ]]; then
    grep -qE "\"bundle\": \"$work/second/.*, [0-9]+ modules" "$work/log" || { cat "$work/log"; echo "no bundle installed"; exit 1; }
  fi
fi
