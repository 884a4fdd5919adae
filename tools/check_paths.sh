#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every path that the documents name in `code spans` must exist (globs are allowed), and so must pages that the public headers name. Links are
# those of check_links.py.
# usage: tools/check_paths.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"

readonly directories='bench|cli|cmake|docs|examples|include|kernels|python|reference|src|tests|tools|\.ci'
readonly suffixes='md|h|hpp|c|cpp|cu|cuh|py|sh|cmake|json|csv'
faults=0
checked=0

# exists DOCUMENT PATH: relative to the root or to the document.
exists() {
  compgen -G "$2" >/dev/null || compgen -G "$(dirname "$1")/$2" >/dev/null
}

shopt -s nullglob
for document in *.md docs/*.md docs/*/*.md include/attune/*.h; do
  # Code blocks hold commands and programs: only spans are read.
  text=$(awk '/^ *```/ { inside = !inside; next } !inside' "$document")
  # shellcheck disable=SC2016  # the backquotes are Markdown
  spans=$(grep -oE '`[^`[:space:]]+`' <<<"$text" | tr -d '`' |
    grep -E "^(\./)?(($directories)/[A-Za-z0-9_./*-]*|[A-Za-z0-9_.*-]+/[A-Za-z0-9_./*-]*\.($suffixes))$" || true)
  named=""
  [[ $document == *.h ]] && named=$(grep -oE 'docs/[A-Za-z0-9_./-]+\.md' "$document" || true)
  while IFS= read -r path; do
    [[ -n $path ]] || continue
    checked=$((checked + 1))
    if ! exists "$document" "$path"; then
      echo "$document names $path, which does not exist"
      faults=$((faults + 1))
    fi
  done < <(printf '%s\n' "$spans" "$named" | sort -u)
done
shopt -u nullglob

echo "$checked paths, $faults missing"
[[ $faults == 0 && $checked -gt 0 ]]
