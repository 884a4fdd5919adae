# SPDX-License-Identifier: Apache-2.0
"""bench/benchmarks_page.py: what --check finds, and the plot."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MADE = ["docs/benchmarks.md", "docs/benchmarks.svg"]


@pytest.fixture
def tree(tmp_path):
    """A copy of what the script reads and writes."""
    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    for name in ("tools/check_links.py", *MADE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree, *options):
    return subprocess.run([sys.executable, tree / "bench/benchmarks_page.py", *options], capture_output=True, text=True)


@pytest.mark.parametrize("name", MADE)
def test_check_finds_a_stale_file(tree, name):
    assert run(tree, "--check").returncode == 0
    first = (tree / name).read_text()
    (tree / name).write_text(first.replace("0.64", "1.64"))
    done = run(tree, "--check")
    assert done.returncode == 1 and f"{name} is not what bench/results give" in done.stderr
    (tree / name).unlink()
    assert run(tree, "--check").returncode == 1
    assert run(tree).returncode == 0 and (tree / name).read_text() == first


def test_a_new_result_changes_both(tree):
    results = tree / "bench/results/h200.md"
    results.write_text(results.read_text().replace("| 2x8192_32_32_d64_causal |", "| renamed |"))
    assert run(tree).returncode == 0
    assert all("renamed" in (tree / name).read_text() for name in MADE)


def test_the_plot_has_every_case():
    page, plot = ((ROOT / name).read_text() for name in MADE)
    lost, rest = (page.split(f"## {heading}\n")[1].split("\n## ")[0] for heading in ("Where Attune is slower", "The other cases"))
    dots = plot.split("</circle>")[:-1]
    assert len(dots) == len(re.findall(r"^\| ", lost + rest, re.M)) - 2 > 100  # two heads
    assert sum("#c8321e" in dot[dot.rindex("<circle") :] for dot in dots) == len(re.findall(r"^\| ", lost, re.M)) - 1
    assert "(benchmarks.svg)" in page


def test_dots_cover_no_other(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from ratio_plot import RADIUS, strip_plot

    cases = [(f"case {i}", 1 + i % 7 * 0.004) for i in range(30)]
    plot = strip_plot("title", 0.03, [("a <label>", cases), ("other", [("slow", 0.3)])])
    assert plot == strip_plot("title", 0.03, [("a <label>", cases[::-1]), ("other", [("slow", 0.3)])])
    assert "a &lt;label&gt;" in plot and ">0.25</text>" in plot  # the scale begins below the slowest
    places = [complex(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>', plot)]
    assert len(places) == 31
    assert min(abs(a - b) for i, a in enumerate(places) for b in places[:i]) >= 2 * RADIUS
