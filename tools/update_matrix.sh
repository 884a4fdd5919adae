#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the support matrix, as `attune info --matrix` prints it from the kernel registry, between the markers of README.md.
# usage: tools/update_matrix.sh [--check]   (--check: changes nothing, fails when README.md is out of date)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cli=${ATTUNE_CLI:-build/release/cli/attune}
if [[ ! -x $cli ]]; then
  echo "skipped: $cli is not built (./dev build)"
  exit 77
fi
matrix=$(mktemp)
updated=$(mktemp)
trap 'rm -f "$matrix" "$updated"' EXIT
"$cli" info --matrix >"$matrix"
[[ -s $matrix ]] || {
  echo "$cli info --matrix printed nothing"
  exit 1
}
for marker in begin end; do
  [[ $(grep -c "^<!-- matrix:$marker -->\$" README.md) == 1 ]] || {
    echo "README.md must have one line <!-- matrix:$marker -->"
    exit 1
  }
done

awk -v matrix="$matrix" '
  $0 == "<!-- matrix:end -->" { skip = 0 }
  !skip { print }
  $0 == "<!-- matrix:begin -->" { skip = 1; while ((getline line < matrix) > 0) print line }
' README.md >"$updated"
if [[ ${1:-} == --check ]]; then
  diff -u README.md "$updated" || {
    echo "the support matrix of README.md is out of date: tools/update_matrix.sh"
    exit 1
  }
else
  cat "$updated" >README.md
fi
