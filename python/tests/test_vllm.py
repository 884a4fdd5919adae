# SPDX-License-Identifier: Apache-2.0
"""The contracts in vllm_contract/ under each version of vLLM that tools/fetch_vllm.py has fetched. vLLM is large and there is one of it in
a process, so each has its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: attune.integrations.vllm is not tested")
pytest.importorskip("transformers", reason="transformers is not installed: attune.integrations.vllm is not tested")

TESTS = pathlib.Path(__file__).parent
FETCHED = pathlib.Path(os.environ.get("ATTUNE_VLLM", TESTS.parents[1] / "build/python/vllm"))
VERSIONS = re.findall(r"^vllm==(\S+)", (TESTS / "vllm_contract/versions.txt").read_text(), re.M)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """version -> (process, its output), all at once: most of each is the import of vLLM."""
    started = {}
    for version in VERSIONS:
        if not (FETCHED / version).is_dir():
            continue
        path = [*filter(None, [os.environ.get("PYTHONPATH")]), FETCHED / version, TESTS, FETCHED / "site"]
        output = tmp_path_factory.mktemp(version) / "output"
        started[version] = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", TESTS,
             *sorted((TESTS / "vllm_contract").glob("contract*.py"))], stdout=output.open("w"), stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}), output
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("version", VERSIONS)
def test_contract(version, runs):
    if version not in runs:
        pytest.skip(f"vLLM {version} is not in {FETCHED}: python/tests/tools/fetch_vllm.py fetches it")
    process, output = runs[version]
    status = process.wait()
    said = output.read_text()
    assert status == 0, said[-8000:]
    assert re.search(r"\b\d\d+ passed", said), said


def test_versions_are_those_that_are_known():
    from attune.integrations.vllm import KNOWN_VERSIONS

    assert [version.rpartition(".")[0] for version in VERSIONS] == list(KNOWN_VERSIONS)
