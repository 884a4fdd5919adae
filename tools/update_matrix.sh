#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts what `attune info` prints from the kernel registry between the markers of README.md (--features: each type of device)
# and docs/support.md (--matrix: each kernel).
# usage: tools/update_matrix.sh [--check]   (--check: changes nothing, fails when one is out of date)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cli=${ATTUNE_CLI:-build/release/cli/attune}
if [[ ! -x $cli ]]; then
  echo "skipped: $cli is not built (./dev build)"
  exit 77
fi
printed=$(mktemp)
updated=$(mktemp)
trap 'rm -f "$printed" "$updated"' EXIT

update() { # FILE NAME [--check]: what `attune info --NAME` prints, between the markers of FILE
  "$cli" info "--$2" >"$printed"
  [[ -s $printed ]] || {
    echo "$cli info --$2 printed nothing"
    exit 1
  }
  for marker in begin end; do
    [[ $(grep -c "^<!-- $2:$marker -->\$" "$1") == 1 ]] || {
      echo "$1 must have one line <!-- $2:$marker -->"
      exit 1
    }
  done
  awk -v printed="$printed" -v begin="<!-- $2:begin -->" -v end="<!-- $2:end -->" '
    $0 == end { skip = 0 }
    !skip { print }
    $0 == begin { skip = 1; while ((getline line < printed) > 0) print line }
  ' "$1" >"$updated"
  if [[ ${3:-} == --check ]]; then
    diff -u "$1" "$updated" || {
      echo "the table of $1 is out of date: tools/update_matrix.sh"
      exit 1
    }
  else
    cat "$updated" >"$1"
  fi
}
update README.md features "$@"
update docs/support.md matrix "$@"
