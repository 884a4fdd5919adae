# SPDX-License-Identifier: Apache-2.0
"""The binding has every field of the C structs and nothing else; names, docs, stubs and types agree."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import attune
from attune import _attention, _core, _tables

ROOT = pathlib.Path(__file__).parents[2]
DECLARED = "".join(path.read_text() for path in sorted((ROOT / "include/attune").glob("*.h")))


def fields_of_header(struct):
    body = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", DECLARED, re.S).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    names = []
    for declaration in filter(str.strip, body.split(";")):
        names += [name.split("[")[0].strip() for name in declaration.strip().split(None, 1)[1].split(",")]
    return [name for name in names if name not in ("struct_size", "kind")]


@pytest.mark.parametrize("struct", list(_core.fields))
def test_tables_hold_the_structs(struct):
    assert sorted(_core.fields[struct]) == sorted(fields_of_header(struct))


@pytest.mark.parametrize("function, struct, beside", [
    (attune.qkv_prepare, "attune_qkv_prepare", {"out_dtype", "stream"}),
    (attune.merge, "attune_merge", {"out_dtype", "return_lse", "stream"}),
    (attune.KVCache, "attune_kv_cache", set()),
    (attune.Prologue, "attune_prologue", set()),
])
def test_signatures(function, struct, beside):
    assert set(inspect.signature(function).parameters) == set(_core.fields[struct]) | beside


def test_signatures_of_the_indexer():
    functions = (attune.indexer_topk, attune.indexer_scores, attune.indexer_select)
    parameters = set().union(*(inspect.signature(function).parameters for function in functions))
    assert parameters == set(_core.fields["attune_indexer"]) | {"topk", "workspace", "stream"}


def test_keyword_arguments_are_typed_and_documented():
    fields = set(_core.fields["attune_attention"])
    assert set(_attention.AttentionFields.__annotations__) == fields - {"q", "k", "v"}
    assert set(_tables.RopeFields.__annotations__) == set(_core.fields["attune_rope"]) - {"style", "dim"}
    words = set(re.findall(r"\w+", attune.attention.__doc__))
    assert fields <= words, fields - words
    for record, struct in ((attune.KVCache, "attune_kv_cache"), (attune.Prologue, "attune_prologue")):
        assert set(_core.fields[struct]) <= set(re.findall(r"\w+", record.__doc__))
    for name in attune.__all__:
        assert getattr(attune, name).__doc__, name


def test_type_file_names_what_the_module_has():
    types = (pathlib.Path(attune.__file__).parent / "_core.pyi").read_text()
    named = set(re.findall(r"^(?:def |class )?(\w+)[(:]", types, re.M)) - {"from", "import"}
    assert named == {name for name in dir(_core) if not name.startswith("__") or name == "__version__"}


def test_types():
    pytest.importorskip("mypy", reason="mypy is not installed: types are not checked")
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", os.devnull],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


EXAMPLES = sorted((ROOT / "examples/python").glob("*.py"))


def test_calls_and_examples_are_typed():
    """typed_calls.py has results and mistakes, the examples must be clean."""
    pytest.importorskip("mypy", reason="mypy is not installed: types are not checked")
    files = [ROOT / "python/tests/typed_calls.py", *EXAMPLES]
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--config-file", ROOT / "pyproject.toml",
                           "--cache-dir", os.devnull, *files], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"in {len(files)} source files" in done.stdout


def test_examples_are_typed_elsewhere(tmp_path):
    """As a user's own files are checked: without the options of this repository, and with the types that torch has."""
    for module in ("mypy", "torch", "matplotlib"):
        pytest.importorskip(module, reason=f"{module} is not installed: types are not checked")
    names = [pathlib.Path(shutil.copy(path, tmp_path)).name for path in EXAMPLES]
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, *names], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"in {len(EXAMPLES)} source files" in done.stdout


def test_every_c_function_is_reached():
    source = "".join(path.read_text() for path in (ROOT / "python/src").glob("*.*"))
    functions = set(re.findall(r"ATTUNE_API \w+[ *]+\w*?(attune_\w+)\(", DECLARED))
    assert len(functions) > 30
    unused = {name for name in functions if name not in source}
    assert not unused - {"attune_dtype_name"}, unused


def test_import_is_quick_and_lonely():
    code = ("import sys, time; there = set(sys.modules)\n"  # an environment's own start-up may have imported some
            "start = time.process_time(); import attune; spent = time.process_time() - start\n"
            "loud = {'numpy', 'torch', 'inspect', 'dataclasses', 'logging', 'ctypes'} & (set(sys.modules) - there)\n"
            "print(spent, sorted(loud))")
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(None, 1)
            for _ in range(3)]
    assert runs[0][1].strip() == "[]"
    assert min(float(run[0]) for run in runs) < 0.1


@pytest.mark.skipif("ATTUNE_WHEEL" not in os.environ, reason="ATTUNE_WHEEL is not set: no wheel to look at")
def test_wheel():
    import zipfile

    wheel = pathlib.Path(os.environ["ATTUNE_WHEEL"])
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < 15e6
    for name in ("attune/py.typed", "attune/_core.pyi", "attune/attune_kernels.bundle", "attune/libattune.so.0"):
        assert name in names, name
    assert not [name for name in names if "/test" in name or name.endswith((".cpp", ".h", ".a"))]
