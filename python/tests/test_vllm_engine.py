# SPDX-License-Identifier: Apache-2.0
"""A whole engine of vLLM on a GPU: what tiny models generate greedily with Attune's backends is what they do with vLLM's own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from engine_processes import wait_all

torch = pytest.importorskip("torch", reason="torch is not installed: vLLM's engine is not run")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: its engine is not run", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("there is no GPU: vLLM's engine is not run", allow_module_level=True)

PROGRAM = pathlib.Path(__file__).parent / "vllm_contract/whole_engine.py"
OWN = {"llama": "FLASH_ATTN", "gpt_oss": "FLASH_ATTN", "deepseek": "FLASHMLA"}
OURS = [("llama", "ATTUNE", "eager"), ("llama", "ATTUNE", "graphs"), ("gpt_oss", "ATTUNE", "eager"), ("deepseek", "ATTUNE_MLA", "eager"),
        ("deepseek", "ATTUNE_MLA", "graphs")]
if torch.cuda.device_count() > 1:
    OURS.append(("deepseek", "ATTUNE_MLA", "dcp2"))
SECONDS = 300  # for all engines together, which compile their kernels at once
NEAR = 0.15  # in logits: two that are closer may change places, by the rounding of bfloat16


def run(folder, *arguments):
    log = open(folder / f"{'-'.join(arguments) or 'models'}.log", "w")
    return subprocess.Popen([sys.executable, "-W", "ignore", PROGRAM, folder, *arguments], stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """All of them at once; (model, backend, how) -> what was generated."""
    folder = pathlib.Path(os.environ.get("ATTUNE_VLLM_LOGS") or tmp_path_factory.mktemp("engines"))
    assert run(folder).wait() == 0, (folder / "models.log").read_text()[-4000:]
    running = {which: run(folder, *which) for which in [*OURS, *((model, backend, "eager") for model, backend in OWN.items())]}
    wait_all(running.values(), SECONDS)

    def generated(which):
        if running[which].wait() == 77:
            pytest.skip((folder / f"{'-'.join(which)}.log").read_text().splitlines()[-1])
        if running[which].wait() != 0:
            pytest.fail(f"{' '.join(which)} ended with {running[which].returncode}:\n"
                        f"{(folder / f'{chr(45).join(which)}.log').read_text()[-4000:]}")
        return json.loads((folder / f"{'-'.join(which)}.json").read_text())

    return generated


@pytest.mark.parametrize("which", OURS, ids="-".join)
def test_tokens_are_those_of_vllms_own_backend(which, engines):
    ours, own = engines(which), engines((which[0], OWN[which[0]], "eager"))
    assert len(ours) == len(own) == 8
    equal = 0
    for mine, theirs in zip(ours, own):
        assert len(mine["tokens"]) == len(theirs["tokens"]) == 24
        same = [a == b for a, b in zip(mine["tokens"], theirs["tokens"])]
        first = same.index(False) if False in same else len(same)
        equal += first
        if first < len(same):
            assert theirs["gaps"][first] < NEAR, f"token {first} is {mine['tokens'][first]}, {theirs['tokens'][first]} by vLLM's own: {mine} {theirs}"
    distinct = {token for request in own for token in request["tokens"]}
    print(f"{' '.join(which)}: {equal} of {8 * 24} tokens equal before the first near tie; {len(distinct)} distinct")
    assert equal >= 8 * 24 / 3
    assert len(distinct) > 40, "the model says too little for this to be a test"
