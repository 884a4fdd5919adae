#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the form of the sources: SPDX line, length, white space, words that must not be left behind, size of files.
# usage: tools/check_sources.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"

readonly max_lines=500
readonly max_columns=120
readonly max_bytes=$((512 * 1024))
faults=0
fault() {
  echo "$*"
  faults=$((faults + 1))
}

list_files() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -co --exclude-standard
  else
    find . -type f -not -path './build/*' | sed 's|^\./||'
  fi
}

# A word split in two, so that this file does not hold it.
leftovers="\\b(TO""DO|FIX""ME|XX""X)\\b|\.\./sha""red"

while IFS= read -r file; do
  [[ -f $file ]] || continue
  bytes=$(wc -c <"$file")
  [[ $bytes -le $max_bytes ]] || fault "$file: $bytes bytes; at most $max_bytes belong in the repository"

  case $file in
    *.c | *.cc | *.cpp | *.h | *.hpp | *.cu | *.cuh | *.py | *.sh | *.cmake | *.map | *CMakeLists.txt | dev | .ci/run) ;;
    *.md | *.json | *.in | *.yaml | *.yml | .clang-* | .gitignore)
      if found=$(grep -nE "$leftovers" "$file" | head -n 3) && [[ -n $found ]]; then fault "$file: left behind: $found"; fi
      continue
      ;;
    *) continue ;;
  esac

  head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || fault "$file: no SPDX line at the top"
  if found=$(grep -nE "$leftovers" "$file" | head -n 3) && [[ -n $found ]]; then fault "$file: left behind: $found"; fi
  if found=$(grep -nP '[ \t]+$|\t|\r' "$file" | head -n 1) && [[ -n $found ]]; then fault "$file: tab or trailing space: $found"; fi
  # clang-format leaves these out.
  if [[ $file == kernels/* ]] && found=$(LC_ALL=C.UTF-8 grep -nE "^.{$((max_columns + 1)),}" "$file" | head -n 1) && [[ -n $found ]]; then
    fault "$file: more than $max_columns columns: $found"
  fi
  [[ -z $(tail -c 1 "$file") ]] || fault "$file: no newline at the end"
  lines=$(wc -l <"$file")
  if [[ $lines -gt $max_lines && $file != include/attune/attune.h ]]; then
    fault "$file: $lines lines; at most $max_lines"
  fi
done < <(list_files)

[[ $faults == 0 ]] || {
  echo "$faults faults"
  exit 1
}
