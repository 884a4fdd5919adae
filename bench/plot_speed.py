#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/speed.svg from the table of prompts in docs/speed.md: TFLOP/s beside PyTorch's backends. Needs matplotlib."""
import pathlib
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
HEAD = "| sequences x tokens, heads, d | attune | cuDNN | flash |"


def rows():
    """(case, [TFLOP/s of attune, cuDNN, flash]) where a peer was timed."""
    text = (DOCS / "speed.md").read_text()
    assert HEAD in text, f"docs/speed.md has no table with the head {HEAD}"
    for line in text[text.index(HEAD) :].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4:
            return
        numbers = [float(cell) if re.fullmatch(r"[\d.]+", cell) else None for cell in cells[1:]]
        if numbers[0] is not None and numbers[1] is not None:
            yield cells[0], numbers


def main():
    cases = list(rows())
    assert cases, "docs/speed.md has no row with a peer's figure"
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attune", "font.size": 9})
    figure, axes = plt.subplots(figsize=(8, 0.75 * len(cases) + 0.9))
    for i, (name, color) in enumerate((("Attune", "#1b6ca8"), ("cuDNN", "#9aa5b1"), ("FlashAttention 2", "#d0d5db"))):
        for row, (_, numbers) in enumerate(cases):
            value = numbers[i]
            at = row + (i - 1) * 0.27
            axes.barh(at, value or 0, 0.25, color=color, label=name if row == 0 else None)
            axes.text((value or 0) + 5, at, f"{value:.0f}" if value is not None else "not covered", va="center")
    axes.set_yticks(range(len(cases)), [case for case, _ in cases])
    axes.invert_yaxis()
    axes.set_xlabel("prompts on an H200, TFLOP/s, bf16 (PyTorch 2.11)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    axes.set_xlim(right=1.1 * max(x for _, numbers in cases for x in numbers if x is not None))
    figure.tight_layout()
    figure.savefig(DOCS / "speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
