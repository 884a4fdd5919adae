#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles and runs every C and C++ sample of the documents. A ```text block right after a sample is what it prints. A block that
# is no whole program says so: ```cpp fragment.
set -euo pipefail
cd "${ATTUNE_SOURCE_DIR:?}"
: "${ATTUNE_LIBRARY:?}" "${CC:?}" "${CXX:?}"
if [[ ${ATTUNE_STATIC:-0} == 1 ]]; then
  echo "skipped: samples are linked with the shared library"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

shopt -s nullglob
for document in README.md HACKING.md docs/*.md; do
  awk -v prefix="$work/${document//\//_}" '
    # last names the sample that a text block may follow; any other block or a blank program ends that.
    /^```/ && open == "" {
      split(substr($0, 4), words, " ")
      if ((words[1] == "cpp" || words[1] == "c") && words[2] != "fragment") {
        open = sprintf("%s.%d.%s", prefix, FNR, words[1]); last = open
      } else if (words[1] == "text" && last != "") {
        open = last ".expected"; last = ""
      } else {
        open = "/dev/null"; last = ""
      }
      next
    }
    /^```/ { close(open); open = ""; next }
    open != "" { print > open }
  ' "$document"
done

count=0
directory=$(dirname "$ATTUNE_LIBRARY")
for sample in "$work"/*.c "$work"/*.cpp; do
  if [[ $sample == *.c ]]; then compile=("$CC" -std=c11); else compile=("$CXX" -std=c++20); fi
  name=$(basename "$sample")
  "${compile[@]}" -Wall -Wextra -Werror -Iinclude "$sample" -o "$sample.out" "$ATTUNE_LIBRARY" -Wl,-rpath,"$directory" -lm ||
    { echo "$name does not compile"; exit 1; }
  "$sample.out" >"$sample.actual" || { echo "$name fails with exit code $?"; exit 1; }
  if [[ -f $sample.expected ]]; then
    diff -u "$sample.expected" "$sample.actual" || { echo "$name prints something else"; exit 1; }
  fi
  count=$((count + 1))
done
echo "$count samples"
[[ $count -ge 2 ]]
