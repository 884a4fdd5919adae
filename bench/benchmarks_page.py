#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/benchmarks.md, and the plot on it, from the tables of bench/results: every case that another library was timed beside,
losses first.

usage: bench/benchmarks_page.py           writes the page and the plot
       bench/benchmarks_page.py --check   fails if one is not what the results give
"""

import pathlib
import re
import statistics
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]
from check_links import anchor  # noqa: E402
from ratio_plot import strip_plot  # noqa: E402

PAGE, PLOT = ROOT / "docs/benchmarks.md", ROOT / "docs/benchmarks.svg"
EQUAL = 0.03  # what two runs of one build may differ by on a quiet card; the results have up to 0.09 at the power limit


@dataclass
class Table:
    """A table of a file: our column, and the peers'."""

    file: str
    section: str  # heading, and anchor
    head: str  # the first cell
    unit: str
    ours: int
    peers: dict[str, int]
    figure: int = -1  # of "4028.0, 580"; -1: the median of all
    note: str = ""


CUDNN, FLASH = "cuDNN (PyTorch)", "FlashAttention 2 (PyTorch)"
TABLES = [
    Table("h200.md", "Prompts", "case", "TFLOP/s", 3, {CUDNN: 4, FLASH: 5, "memory-efficient (PyTorch)": 6}, note="prompt"),
    Table("h200.md", "Beside other libraries", "case, us", "us", 1, {"FlashAttention-3": 2, "FlashMLA": 3}, note="schedule outside"),
    Table("h200.md", "The backward", "sequences x tokens, heads, d", "TFLOP/s", 2,
          {CUDNN: 3, FLASH: 4, "memory-efficient (PyTorch)": 5}, note="backward"),
    *[Table("zen5.md", f"Side by side, {isa}", "case", "ms", 1, {f"PyTorch on the CPU, {isa}": 2}, note=f"two cores, {isa}")
      for isa in ("AVX-512", "AVX2")],
    Table("emerald-rapids.md", "Side by side, Intel", "case", "ms", 1,
          {"PyTorch on Intel": 2, "onnxruntime on Intel": 3, "OpenVINO on Intel": 4}, note="two cores, AVX-512"),
    Table("zen5.md", "Busy machine", "case, AVX-512", "ms", 1, {"onnxruntime": 3, "OpenVINO": 4}, note="two busy cores, AVX-512"),
]


@dataclass
class Case:
    name: str
    peer: str
    ours: float
    theirs: float
    unit: str
    table: Table

    @property
    def ratio(self):
        """How many times faster Attune is."""
        return self.ours / self.theirs if self.unit.endswith("/s") else self.theirs / self.ours


def rows(file, section, head):
    """The cells of the rows of one table."""
    text = (ROOT / "bench/results" / file).read_text()
    at = text.find(f"\n## {section}\n")
    assert at >= 0, f"{file} has no section {section}"
    body = text[at + 1 :].split("\n## ")[0]
    start = body.find(f"\n| {head} |")
    assert start >= 0, f"{file}, {section}: no table whose first column is {head}"
    for line in body[start + 1 :].split("\n")[2:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def figures(cell):
    """The numbers of a cell: "558, 561", "1,439,601"; none in "-"."""
    cell = re.sub(r"(?<=\d),(?=\d{3}\b)", "", cell)
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def cases():
    for table in TABLES:
        count = 0
        for cells in rows(table.file, table.section, table.head):
            name, unit = cells[0], table.unit
            names = [name]
            if name.endswith(", us"):  # a row of its own unit, with a figure for each name
                unit, names = "us", name.removesuffix(", us").split(", ")
            for peer, column in table.peers.items():
                ours, theirs = figures(cells[table.ours]), figures(cells[column])
                if not ours or not theirs:
                    continue
                for i, one in enumerate(names):
                    pick = i if len(names) > 1 else table.figure
                    pair = [values[pick] if pick >= 0 else statistics.median(values) for values in (ours, theirs)]
                    yield Case(one, peer, *pair, unit, table)
                    count += 1
        assert count, f"{table.file}, {table.section}: no figure of {', '.join(table.peers)}"


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def groups(found):
    """(label, cases) of each peer and section."""
    for peer, section in dict.fromkeys((case.peer, case.table.section) for case in found):
        yield f"{peer}: {section.split(',')[0]}", [case for case in found if (case.peer, case.table.section) == (peer, section)]


def summary(found):
    yield "| beside | cases | faster | the same | slower | median | from | to |"
    yield "|---|---|---|---|---|---|---|---|"
    for label, members in groups(found):
        ratios, table = [case.ratio for case in members], members[0].table
        faster, slower = sum(r > 1 + EQUAL for r in ratios), sum(r < 1 - EQUAL for r in ratios)
        yield (f"| [{label}](../bench/results/{table.file}#{anchor(table.section)}) | {len(ratios)} | {faster} | {len(ratios) - faster - slower} | {slower} | {statistics.median(ratios):.2f} "
               f"| {min(ratios):.2f} | {max(ratios):.2f} |")


def listing(found):
    yield "| case | | beside | unit | Attune | theirs | times as fast |"
    yield "|---|---|---|---|---|---|---|"
    for case in found:
        yield f"| {case.name} | {case.table.note} | {case.peer} | {case.unit} | {number(case.ours)} | {number(case.theirs)} | {case.ratio:.2f} |"


def slow_decode():
    """Decode cases by their share of what the card reads."""
    shares = [(int(cells[3].rstrip(" %")), cells) for cells in rows("h200.md", "Decode", "case")]
    low = sorted(row for row in shares if row[0] < 80)
    yield (f"Of {len(shares)} cases of decode {len(shares) - len(low)} read their keys at 80 % or more of what the card reads; the best at "
           f"{max(shares)[0]} %. These do not:")
    yield ""
    yield "| case | us | GB/s | share |"
    yield "|---|---|---|---|"
    for _, cells in low:
        yield "| " + " | ".join(cells) + " |"


def plot(found):
    return strip_plot("How many times as fast Attune is, a dot a case", EQUAL,
                      [(label, [(case.name, case.ratio) for case in members]) for label, members in groups(found)])


def page(found):
    lost = sorted((case for case in found if case.ratio < 1 - EQUAL), key=lambda case: case.ratio)
    rest = [case for case in found if case.ratio >= 1 - EQUAL]
    return "\n".join([
        "# Benchmarks",
        "",
        "<!-- Made by bench/benchmarks_page.py from bench/results; do not edit. -->",
        "",
        "Every case in which another library was timed beside Attune, on the same machine in the same session. The results, with shapes,",
        "commits and commands: [bench/results/h200.md](../bench/results/h200.md), [bench/results/zen5.md](../bench/results/zen5.md),",
        "[bench/results/emerald-rapids.md](../bench/results/emerald-rapids.md); a selection: [speed.md](speed.md).",
        "`python3 bench/benchmarks_page.py` makes this page and its plot of them, and a test fails where one is not theirs.",
        "",
        "![How many times as fast Attune is in each case, by the library beside it](benchmarks.svg)",
        "",
        f"\"Times as fast\" is above 1 where Attune is faster. From {1 - EQUAL:.2f} to {1 + EQUAL:.2f} counts as the same: clocks move that much.",
        "Prompts are timed by `run_scheduled()`, as all layers of a step but the first one run. Calls of side_by_side.py are no graphs: one",
        "that takes the GPU less than the library's host shows the host's time.",
        "",
        *summary(found),
        "",
        "## Where Attune is slower",
        "",
        *listing(lost),
        "",
        "## Decode below 80 % of what the card reads",
        "",
        *slow_decode(),
        "",
        "## The other cases",
        "",
        *listing(rest),
        "",
    ])


def main():
    found = list(cases())
    for file, text in ((PAGE, page(found)), (PLOT, plot(found))):
        if sys.argv[1:] != ["--check"]:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{file.relative_to(ROOT)} is not what bench/results give: run bench/benchmarks_page.py")


if __name__ == "__main__":
    main()
