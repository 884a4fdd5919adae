#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What mutants.py breaks: operators on lines of code, how breaks are drawn, and the list of named ones."""

import json
import pathlib
import random
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMED = ROOT / "tools/mutants.json"

SWAPS = ["q k", "k v", "row head", "begin end", "first last", "first end", "low high", "seqlen_q seqlen_kv",
         "heads_q heads_kv", "num_heads_q num_heads_kv", "head_dim_qk head_dim_v", "kHeadDimQk kHeadDimV",
         "kBlocksQk kBlocksV", "k_full v_full", "k_empty v_empty", "k_pipe_ v_pipe_", "row_stride head_stride",
         "true false"]
# What a call may begin with whose absence nobody but a race, a stale value or a bad input shows.
CALLS = r"""sync\w*|fence\w*|arrive\w*|wait\w*|barrier\w*|clamp\w*|require|check\w*|commit\w*|release\w*|
            publish\w*|forget|refresh|clear\w*|note_\w+|store_\w*(?:mask|limits)|
            store_release""".replace("\n", "").replace(" ", "")
# Name, what is sought in a line of code, what takes its place.
OPERATORS = [
    ("comparison", r"(?<= )<(?= )", "<="), ("comparison", r"(?<= )<=(?= )", "<"),
    ("comparison", r"(?<= )>(?= )", ">="), ("comparison", r"(?<= )>=(?= )", ">"),
    ("equality", r"(?<= )==(?= )", "!="), ("equality", r"(?<= )!=(?= )", "=="),
    ("off by one", r" [+-] 1\b(?![.\w])", ""), ("off by one", r"(?<=[-+*/%<>] )k[A-Z]\w*\b(?![(<:])", r"(\g<0> - 1)"),
    ("sign", r"(?<=[\w)\]] )\+(?= )", "-"), ("sign", r"(?<=[\w)\]] )-(?= )", "+"),
    ("assignment", r"^(?!.*\bfor \().*?(?<= )[+|&*-]=(?= )", "="),
    ("min and max", r"\bmin(?=\(|<)", "max"), ("min and max", r"\bmax(?=\(|<)", "min"),
    ("min and max", r"\bfminf\b", "fmaxf"), ("min and max", r"\bfmaxf\b", "fminf"),
    ("and, or", r"&&", "||"), ("and, or", r"\|\|", "&&"),
    ("constant", r"(?<![\w.\[<'])0(?![\w.'])", "1"), ("constant", r"(?<![\w.\[<'])1(?![\w.'])", "0"),
    ("constant", r"-ptx::infinity\(\)|-kInf\b|\bkMinusInf\b", "0.0f"),
    ("term", r" [+-] [A-Za-z_][\w.:]*(?:->\w+)?(?:\([\w., ]*\)|\[\w+\])?(?=[;,)\]])", ""),
    ("guard", r"^\s*if \(.*\) (?:return|continue|break)\b.*;$", ";"), ("guard", r"\bcontinue;", "break;"),
    ("guard", r"\breturn;", ";"),
    ("call", rf"(?:^\s*|(?<=[;{{)] ))(?:[\w.:]+(?:\.|::|->))?(?:\w+_)?(?:{CALLS})(?:<[\w, ]*>)?\(.*\);$", ";"),
] + [("swap", rf"\b{x}\b(?!\()", y) for pair in SWAPS for x, y in (pair.split(), pair.split()[::-1])]
OPERATORS = [(name, re.compile(sought), to) for name, sought, to in OPERATORS]

# The same, within instructions: kernels/ptx, which only a GPU judges.
INSTRUCTIONS = [
    ("memory order", r"(?<=\.)(?:acquire|release|acq_rel)(?=\.(?:gpu|cluster))", "relaxed"),
    ("instruction", r"\basm volatile\(\"(?:fence|wgmma\.(?:fence|commit|wait)|cp\.async\.(?:wait|commit))[^;]*;\".*?\);", ""),
]
INSTRUCTIONS = [(name, re.compile(sought), to) for name, sought, to in INSTRUCTIONS]

# Lines that change no result, or that only the compiler reads.
SKIPPED = re.compile(r"^\s*(#|template|static_assert|using |namespace|extern|case |asm|\}|ATTUNE_|HWY_|private|public|"
                     r"struct |class |enum |__device__.*[{]$|\"|\?)|prefetch|touch_pages|__launch_bounds__|describe|"
                     r"operator|fail\(|hint|__noinline__")


def code_of(text):
    """The lines, as long as before, with comments, static_asserts and what is in strings blanked."""
    def blank(by):
        return lambda m: re.sub(r"[^\n]", by, m.group())
    text = re.sub(r"\"(?:\\.|[^\"\\\n])*\"", blank("_"), text)
    for pattern in (r"//[^\n]*", r"/\*.*?\*/", r"static_assert\(.*?\);"):
        text = re.sub(pattern, blank(" "), text, flags=re.S)
    return [line.rstrip() for line in text.split("\n")]


def condition_at(line):
    """The span of the condition of an `if` that ends in the same line, or None."""
    found = re.search(r"\bif (constexpr )?\(", line)
    depth = 0
    for i in range(found.end() - 1 if found else len(line), len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return found.end(), i
    return None


def candidates(file):
    """All mutants of a file: {operator: [(line number, begin, line with the break)]}."""
    found = {}
    text = (ROOT / file).read_text()
    for number, (line, raw) in enumerate(zip(code_of(text), text.split("\n")), 1):
        def add(name, begin, end, to):
            found.setdefault(name, []).append((number, begin, raw[:begin] + to + raw[end:]))

        for name, sought, to in INSTRUCTIONS if file.startswith("kernels/ptx/") else []:
            for m in sought.finditer(raw):
                add(name, *m.span(), to)
        if not line.strip() or SKIPPED.search(line) or line.endswith("\\") or "asm" in line:
            continue
        for name, sought, to in OPERATORS:
            for m in sought.finditer(line):
                if name == "assignment":  # the pattern has the line's beginning
                    add(name, m.end() - 2, m.end(), to)
                elif m.group().count("(") == m.group().count(")"):
                    add(name, m.start(), m.end(), m.expand(to))
        if span := condition_at(line):
            add("negation", *span, f"!({raw[slice(*span)]})")
    return found


def files_of(folders):
    """What git has or would have below these folders, as paths from the root."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", *folders], cwd=ROOT, check=True,
                            capture_output=True, text=True)
    return sorted(f for f in listed.stdout.split("\n") if f and (ROOT / f).is_file())


def draw(seed, count, prefixes, device):
    """Mutants spread over files by the square root of what they hold, and over operators alike. Headers that both sides
    share are left out: nearly all of the program would be built again for each."""
    # What tests alone run; and what only a GPU does, as the emulator has instructions and launches of its own.
    skipped = ["kernels/selftest/", "kernels/check/"]
    if not device:
        skipped += ["kernels/ptx/"] + [f"src/cuda/{x}.cpp" for x in ("kernel", "driver", "device", "launch", "memory")]
    files = [f for f in files_of(["kernels", "src"]) if f.endswith((".cu", ".cuh", ".cpp", "-inl.h"))]
    files = [f for f in files if f.startswith(tuple(prefixes)) and not f.startswith(tuple(skipped))]
    found = {file: c for file in files if (c := candidates(file))}
    if not found:
        sys.exit(f"--in {' '.join(prefixes)} names no file with code; it takes beginnings of paths, as kernels/mla")
    rng = random.Random(seed)
    files = sorted(found)
    weights = [sum(len(c) for c in found[file].values()) ** 0.5 for file in files]
    drawn = {}
    for _ in range(100 * count):
        file = rng.choices(files, weights)[0]
        operator = rng.choice(sorted(found[file]))
        number, begin, to = rng.choice(found[file][operator])
        line = (ROOT / file).read_text().split("\n")[number - 1]
        name = f"{file}:{number}:{begin + 1}:{operator.replace(' ', '-')}"
        if len(drawn) < count and to != line:
            drawn[name] = {"name": name, "edits": [{"file": file, "text": line, "to": to, "line": number}]}
    return list(drawn.values())


def named(names):
    mutants = json.loads(NAMED.read_text())
    wrong = set(names) - {m["name"] for m in mutants}
    if wrong:
        sys.exit(f"--named {' '.join(sorted(wrong))}: {NAMED.relative_to(ROOT)} has no such name")
    return [m for m in mutants if not names or m["name"] in names]


def check_named():
    """Each text of the list stands once in its file, so that the list is that of today's sources. 0 if so."""
    faults, mutants = [], named([])
    for m in mutants:
        for e in m["edits"]:
            path = ROOT / e["file"]
            count = path.read_text().count(e["text"]) if path.exists() else 0
            if count != 1 or e["text"] == e["to"]:
                faults.append(f"{m['name']}: {e['file']} has its text {count} times, not once: {e['text']!r}")
    if len({m["name"] for m in mutants}) != len(mutants):
        faults.append("two named mutants have one name")
    print("\n".join(faults + [f"{len(mutants)} named mutants, {len(faults)} faults"]))
    return 1 if faults or not mutants else 0
