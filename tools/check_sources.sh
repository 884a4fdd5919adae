#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the form of the sources: SPDX line, length, white space, words that must not be left behind, size of files; that
# no folder of src/, src/cuda/ or kernels/ includes one above or beside it; and the length of README.md, of the entries of
# CHANGELOG.md and of the pages of docs/kernels.
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
MAX_README_LINES, MAX_ENTRY_LINES = 180, 2  # of README.md, and of an entry of CHANGELOG.md
SOURCE = re.compile(r"\.(c|cc|cpp|h|hpp|cu|cuh|py|sh|cmake|map)$|CMakeLists\.txt$|^dev$|^\.ci/run$")
TEXT = re.compile(r"\.(md|json|in|yaml|yml)$|(^|/)\.clang-[^/]*$|(^|/)\.gitignore$")
# Who may be included by whom: nobody includes upward, nor a neighbour. src/cuda/ includes headers of kernels/ too.
OPERATIONS = {"backward": 3, "decode": 3, "prefill": 3, "mla": 3, "indexer": 3}
LAYERS = {
    "src": {"core": 0, "cpu": 1, "cuda": 1, "dispatch": 2, "api": 3},
    "src/cuda": {"jit": 0, "rows": 0, "ops": 1, "attention": 2, **OPERATIONS, "mixed": 4},
    "kernels": {"ptx": 0, "common": 1, "scheduler": 2, **OPERATIONS, "rows": 3, "check": 3, "selftest": 3},
}
INCLUDE = re.compile(r"^\s*#\s*include \"([\w/]+)/[^/\n]+\"", re.M)
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
    if path == "README.md" and len(lines) - 1 > MAX_README_LINES:
        fault(path, f"{len(lines) - 1} lines; at most {MAX_README_LINES}")
    if path == "CHANGELOG.md":
        entry = 0  # lines of the one that is read
        for number, line in enumerate(lines, 1):
            entry = 1 if line.startswith("* ") else entry + 1 if entry and line.startswith("  ") else 0
            if len(line) > MAX_COLUMNS or entry > MAX_ENTRY_LINES:
                fault(path, f"an entry has at most {MAX_ENTRY_LINES} lines of {MAX_COLUMNS} columns: {number}: {line}")
    if not is_source:
        continue
    folders = INCLUDE.findall(text)
    for root, ranks in LAYERS.items():
        own = re.match(root + r"/(\w+)/", path)
        if own is None:
            continue
        for folder in folders:
            layer = (folder.removeprefix("cuda/") if root == "src/cuda" else folder).split("/")[0]
            if layer != own.group(1) and ranks.get(layer, -1) >= ranks.get(own.group(1), 0):
                fault(path, f"{root}/{own.group(1)} includes {folder}/")
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
        fault(path, "no SPDX line at the top")
    if text and not text.endswith("\n"):
        fault(path, "no newline at the end")
    if len(lines) - 1 > MAX_LINES:
        fault(path, f"{len(lines) - 1} lines; at most {MAX_LINES}")
if faults:
    sys.exit(f"{faults} faults")
'
}

list_files | check_files
