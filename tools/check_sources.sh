#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the form of the sources: SPDX line, length, white space, words that must not be left behind, size of files; that
# no layer of src/ includes one above it; and the length of the pages of docs/kernels.
# usage: tools/check_sources.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"

list_files() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -co --exclude-standard
  else
    find . -type f -not -path './build/*' | sed 's|^\./||'
  fi
}

# One process: a shell's tools would be started some ten times a file.
check_files() {
  python3 -c '
import os, re, sys

MAX_LINES, MAX_COLUMNS, MAX_BYTES = 500, 120, 512 * 1024
MAX_PAGE_LINES = 150  # of a kernel: docs/kernels
SOURCE = re.compile(r"\.(c|cc|cpp|h|hpp|cu|cuh|py|sh|cmake|map)$|CMakeLists\.txt$|^dev$|^\.ci/run$")
TEXT = re.compile(r"\.(md|json|in|yaml|yml)$|(^|/)\.clang-[^/]*$|(^|/)\.gitignore$")
# Of src/: who may be included by whom. Nobody includes upward, nor a neighbour.
LAYERS = {"core": 0, "cpu": 1, "cuda": 1, "dispatch": 2, "api": 3}
INCLUDE = re.compile(r"^\s*#\s*include \"(" + "|".join(LAYERS) + r")/", re.M)
# Words split in two, so that this file does not hold them.
LEFTOVERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|\.\./sha" r"red")
faults = 0


def fault(path, what):
    global faults
    faults += 1
    print(f"{path}: {what}")


for path in sys.stdin.read().splitlines():
    if not os.path.isfile(path):
        continue
    size = os.path.getsize(path)
    if size > MAX_BYTES:
        fault(path, f"{size} bytes; at most {MAX_BYTES} belong in the repository")
    is_source = SOURCE.search(path) is not None
    if not is_source and TEXT.search(path) is None:
        continue
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if LEFTOVERS.search(line):
            fault(path, f"left behind: {number}: {line}")
        if is_source and re.search(r"[ \t]$|\t|\r", line):
            fault(path, f"tab or trailing space: {number}: {line}")
        # clang-format leaves these out.
        if is_source and path.startswith("kernels/") and len(line) > MAX_COLUMNS:
            fault(path, f"more than {MAX_COLUMNS} columns: {number}: {line}")
    if path.startswith("docs/kernels/") and path.endswith(".md"):
        if len(lines) - 1 > MAX_PAGE_LINES:
            fault(path, f"{len(lines) - 1} lines; at most {MAX_PAGE_LINES}: what was tried belongs in docs/notes")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS and not line.startswith("|"):  # rows of a table cannot be wrapped
                fault(path, f"more than {MAX_COLUMNS} columns: {number}: {line}")
    if not is_source:
        continue
    place = re.match(r"src/(" + "|".join(LAYERS) + ")/", path)
    for layer in INCLUDE.findall(text) if place else []:
        own = place.group(1)
        if layer != own and LAYERS[layer] >= LAYERS[own]:
            fault(path, f"src/{own} includes src/{layer}")
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
        fault(path, "no SPDX line at the top")
    if text and not text.endswith("\n"):
        fault(path, "no newline at the end")
    if len(lines) - 1 > MAX_LINES and path != "include/attune/attune.h":
        fault(path, f"{len(lines) - 1} lines; at most {MAX_LINES}")
if faults:
    sys.exit(f"{faults} faults")
'
}

list_files | check_files
