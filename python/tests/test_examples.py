# SPDX-License-Identifier: Apache-2.0
"""Examples and the Python samples of the documents run, and say what they say they say."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/python").glob("*.py"))


def has(module):
    return importlib.util.find_spec(module) is not None


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT)


def needs(source, where):
    for module in ("jax", "torch", "transformers", "matplotlib"):
        if re.search(rf"^\s*(import|from) {module}\b", source, re.M) and not has(module):
            pytest.skip(f"{module} is not installed: {where} is not run")


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem != "roofline"], ids=lambda path: path.stem)
def test_example(example):
    needs(example.read_text(), example.name)
    done = run(example)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d", done.stdout)


def test_roofline(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the roofline is not drawn")
    results = {"version": "0", "name": "test", "ceilings": {"read_gbps_all": 10.0, "fma_gflops_all": 200.0}, "results": [
        {"name": "bench/decode/x", "flops": 4e6, "bytes": 1e6, "gflops": 30.0},
        {"name": "bench/prefill", "flops": 4e9, "bytes": 1e6, "gflops": 150.0}]}
    for ceilings in (results["ceilings"], {"read_gbps_all": 10.0}):
        (tmp_path / "results.json").write_text(json.dumps({**results, "ceilings": ceilings}))
        done = run(ROOT / "examples/python/roofline.py", tmp_path / "results.json", tmp_path / "plot.png")
        assert done.returncode == 0, done.stderr
        assert "2 cases" in done.stdout and (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    cli = ROOT / "build/release/cli/attune"
    if cli.exists():  # and what the command writes today
        subprocess.run([cli, "bench", "--device", "cpu", "--reps", "1", "--no-check", "--filter", "decode_16k_b1", "--json", tmp_path / "real.json"],
                       check=True, capture_output=True)
        done = run(ROOT / "examples/python/roofline.py", tmp_path / "real.json", tmp_path / "real.png")
        assert done.returncode == 0, done.stderr


def samples():
    """(document:line, program, what it prints or None) of every ```python block; ```python fragment is no whole program."""
    for document in (ROOT / name for name in ("README.md", "docs/python.md", "docs/migration.md", "docs/install.md")):
        text = document.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.M | re.S):
            yield pytest.param(found[1], found[2], id=f"{document.name}:{text[: found.start()].count(chr(10)) + 1}")


@pytest.mark.parametrize("program, printed", list(samples()))
def test_sample(program, printed, tmp_path):
    needs(program, "this sample")
    (tmp_path / "sample.py").write_text(program)
    done = run(tmp_path / "sample.py")
    assert done.returncode == 0, done.stderr
    if printed is not None:
        assert done.stdout == printed


def test_the_tutorial_quotes_the_examples():
    text = (ROOT / "docs/engine.md").read_text()
    sources = {"cpp": ROOT / "examples/continuous_batching.cpp", "python": ROOT / "examples/python/continuous_batching.py"}
    quotes = re.findall(r"^```(cpp|python) fragment\n(.*?)^```", text, re.M | re.S)
    assert len(quotes) > 5
    for language, quote in quotes:
        assert quote in sources[language].read_text(), quote


def test_there_are_samples():
    assert len(list(samples())) >= 6 and len(EXAMPLES) == 6
