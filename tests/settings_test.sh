#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `pip install .` does by itself: it downloads no Highway, and makes no kernel bundle; and it says so.
set -euo pipefail
: "${ATTUNE_SOURCE_DIR:?}" "${CMAKE:?}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { cat "$work/log" && echo "$1" && exit 1; }
says() { tr -s ' \n' ' ' <"$work/log" | grep -qF -- "$1" || fail "not said: $1"; }

# A project of one of the files that decide, which needs no compiler.
mkdir "$work/project" "$work/highway"
cat >"$work/project/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.22)
project(settings LANGUAGES NONE)
add_library(Threads::Threads INTERFACE IMPORTED)
include($ATTUNE_SOURCE_DIR/cmake/\${FILE}.cmake)
if(TARGET attune::highway)
  get_target_property(library attune::highway INTERFACE_LINK_LIBRARIES)
  message(STATUS "library: \${library}")
endif()
END
configure() {
  rm -rf "$work/build"
  "$CMAKE" -S "$work/project" -B "$work/build" "$@" >"$work/log" 2>&1
}
without_system=(-DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON -DCMAKE_DISABLE_FIND_PACKAGE_PkgConfig=ON)

# What pyproject.toml sets, as -D options.
mapfile -t set_by_pip < <(python3 - "$ATTUNE_SOURCE_DIR/pyproject.toml" <<'END'
import re, sys
text = open(sys.argv[1]).read().split("[tool.scikit-build.cmake.define]\n")[1].split("\n[")[0]
print("\n".join("-D%s=%s" % pair for pair in re.findall(r'^(\w+) = "(.*)"$', text, re.M)))
END
)
[[ ${#set_by_pip[@]} -gt 3 ]] || fail "pyproject.toml sets ${#set_by_pip[@]} options"

if configure -DFILE=AttuneDependencies "${set_by_pip[@]}" "${without_system[@]}"; then fail "configured without Highway"; fi
says "Highway 1.0.3 or newer was not found."
says "libhwy-dev on Debian"
says "-Ccmake.define.ATTUNE_FETCH_HIGHWAY=ON"
[[ ! -e $work/build/_deps ]] || fail "something was downloaded"

# A folder of its source comes before the system's, and is named.
echo 'add_library(hwy INTERFACE)' >"$work/highway/CMakeLists.txt"
configure -DFILE=AttuneDependencies "${set_by_pip[@]}" -DATTUNE_HIGHWAY_SOURCE="$work/highway" || fail "ATTUNE_HIGHWAY_SOURCE failed"
says "Highway is built from $work/highway"
says "library: hwy "

[[ " ${set_by_pip[*]} " == *" -DATTUNE_BUNDLE=OFF "* ]] || fail "pip makes a kernel bundle without being asked"
configure -DFILE=Bundle "${set_by_pip[@]}" || fail "a build without a bundle failed"
says "No kernel bundle: CUDA kernels compile on first use."
says "-Ccmake.define.ATTUNE_BUNDLE=ON"
