#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks in tools/ must find what they are for: each fault alone, in a small tree that is clean without it.
set -euo pipefail
tools=${ATTUNE_SOURCE_DIR:?}/tools
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failed=0

clean_tree() {
  rm -rf "$tree"
  mkdir -p "$tree/src" "$tree/docs" "$tree/include/attune"
  printf '// SPDX-License-Identifier: Apache-2.0\nint x;\n' >"$tree/src/a.cpp"
  printf '/* SPDX-License-Identifier: Apache-2.0\n * See docs/page.md. */\n' >"$tree/include/attune/attune.h"
  # shellcheck disable=SC2016  # the backquotes are Markdown
  printf '# Title\nSee `src/a.cpp`, `src/*.cpp` and [page](docs/page.md#a-part-twice). `a/b` is a ratio.\n' >"$tree/README.md"
  printf '# Page\n[up](../README.md), [out](https://example.org)\n## A part, twice\n' >"$tree/docs/page.md"
  mkdir -p "$tree/tools/docs"
  printf 'site_name: A\nnav:\n  - A: README.md\n  - Inside:\n      - Page: docs/page.md\n      - All: docs/all/index.md\n' >"$tree/tools/docs/mkdocs.yml"
}

# expect pass|fail NAME CHECK
expect() {
  local outcome=pass
  "$tools/$3" "$tree" >/dev/null 2>&1 || outcome=fail
  if [[ $outcome != "$1" ]]; then
    echo "$2: $3 should $1"
    failed=1
  fi
}

clean_tree
expect pass "clean tree" check_sources.sh
expect pass "clean tree" check_paths.sh
expect pass "clean tree" check_links.py

clean_tree && printf 'int x;\n' >"$tree/src/b.cpp"
expect fail "no SPDX line" check_sources.sh
clean_tree && for _ in {1..500}; do echo >>"$tree/src/a.cpp"; done
expect fail "too long" check_sources.sh
clean_tree && printf '// TO%s: later\n' DO >>"$tree/src/a.cpp"
expect fail "left behind in a source" check_sources.sh
clean_tree && printf 'see ../sha%s/x\n' red >>"$tree/README.md"
expect fail "left behind in a document" check_sources.sh
clean_tree && printf 'int y; \n' >>"$tree/src/a.cpp"
expect fail "trailing space" check_sources.sh
clean_tree && printf 'int y;' >>"$tree/src/a.cpp"
expect fail "no newline at the end" check_sources.sh
clean_tree && head -c 600000 /dev/zero >"$tree/docs/picture.png"
expect fail "large file" check_sources.sh
clean_tree && mkdir "$tree/src/core" && printf '// SPDX-License-Identifier: Apache-2.0\n#include "core/b.h"\n' >"$tree/src/core/a.cpp"
expect pass "includes its own layer" check_sources.sh
printf '#include "dispatch/registry.h"\n' >>"$tree/src/core/a.cpp"
expect fail "includes upward" check_sources.sh
# includes pass|fail FILE INCLUDED: as the only include of a file
includes() {
  clean_tree && mkdir -p "$tree/${2%/*}"
  printf '// SPDX-License-Identifier: Apache-2.0\n#include "%s"\n' "$3" >"$tree/$2"
  expect "$1" "$2 includes $3" check_sources.sh
}
includes fail src/core/a.cpp cuda/decode/decode.h
includes pass kernels/mla/m64/mask.cuh mla/config.cuh
includes pass kernels/mla/mla.cu scheduler/tile_scheduler.cuh
includes fail kernels/mla/mla.cu prefill/tiles.cuh
includes fail kernels/prefill/tiles.cuh decode/config.cuh
includes fail kernels/common/stamp.cuh scheduler/work_tiles.cuh
includes fail kernels/ptx/barrier.cuh common/run.cuh
includes pass src/cuda/prefill/config.cpp cuda/attention/params.h
includes fail src/cuda/mla/config.cpp cuda/prefill/config.h
includes fail src/cuda/mla/config.cpp prefill/prefill_params.h
includes fail src/cuda/attention/params.cpp cuda/decode/config.h
includes pass src/cuda/mixed/mixed.cpp cuda/decode/config.h

kernel_page() { # LINES COLUMNS [FIRST]: a page of that many lines, the last one that wide, beginning with FIRST
  clean_tree && mkdir "$tree/docs/kernels" && page=$tree/docs/kernels/page.md
  for ((i = 1; i < $1; ++i)); do echo >>"$page"; done
  printf '%s%*s\n' "${3:-x}" $(($2 - 1)) x >>"$page"
}
kernel_page 150 120
expect pass "a kernel's page of 150 lines" check_sources.sh
kernel_page 151 120
expect fail "a kernel's page of 151 lines" check_sources.sh
kernel_page 150 121
expect fail "a kernel's page of long lines" check_sources.sh
kernel_page 150 300 '|'
expect pass "a kernel's page with a wide table" check_sources.sh

clean_tree && for _ in {1..178}; do echo >>"$tree/README.md"; done
expect pass "README of 180 lines" check_sources.sh
echo >>"$tree/README.md"
expect fail "README of 181 lines" check_sources.sh
changes() { # pass|fail NAME TEXT: of CHANGELOG.md
  clean_tree && printf '%b\n' "$3" >"$tree/CHANGELOG.md"
  expect "$1" "$2" check_sources.sh
}
changes pass "entries of two lines" '# Changes\n\ntext\n\n* a\n  b\n* c\n  d\n\n* e'
changes fail "entry of three lines" '* a\n  b\n  c'
changes pass "entry of 120 columns" "* $(printf '%118s' x)"
changes fail "entry of 121 columns" "* $(printf '%119s' x)"

# shellcheck disable=SC2016
clean_tree && printf '`src/missing.cpp`\n' >>"$tree/README.md"
expect fail "missing file in a span" check_paths.sh
# shellcheck disable=SC2016
clean_tree && printf '`src/*_test.cpp`\n' >>"$tree/README.md"
expect fail "glob that matches nothing" check_paths.sh
# shellcheck disable=SC2016
clean_tree && printf '`srcs/a.cpp`\n' >>"$tree/README.md"
expect fail "missing folder in a span" check_paths.sh
# link pass|fail NAME MARKDOWN: added to a page
link() {
  clean_tree && printf '%b\n' "$3" >>"$tree/docs/page.md"
  expect "$1" "$2" check_links.py
}
link fail "missing target of a link" '[x](missing.md)'
link fail "missing target of a reference" '[x]: missing.md'
link fail "missing heading of the page" '[x](#part)'
link fail "missing heading of another page" '[x](../README.md#page)'
link fail "line of a source" '[x](../src/a.cpp#L1)'
link fail "link out of the repository" '[x](../../README.md)'
link fail "link from the root" '[x](/README.md)'
# shellcheck disable=SC2016
link fail "heading in a code block" '[x](#y)\n```\n# y\n```'
link pass "heading of the page" '[x](#page) and [y](../README.md#title)'
# shellcheck disable=SC2016
link pass "link in a code block" '```\n[x](missing.md)\n```'
clean_tree && printf '# Other\n' >"$tree/docs/other.md"
expect fail "page that the navigation omits" check_links.py
clean_tree && mkdir "$tree/docs/all" && printf '# Other\n' >"$tree/docs/all/other.md"
expect pass "page of a folder whose list the navigation has" check_links.py
clean_tree && mkdir -p "$tree/tests/cases" && printf '# Cases\n' >"$tree/tests/cases/README.md"
expect pass "page beside tests" check_links.py
clean_tree && rm "$tree/docs/page.md"
expect fail "page that the header names" check_paths.sh
exit $failed
