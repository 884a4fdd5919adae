# SPDX-License-Identifier: Apache-2.0
"""SGLang's whole Scheduler on the CPU (whole_engine.py): every token of tiny models is the one that transformers' eager attention finds
most likely behind the prompt and the tokens before it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny_models
from engine_requests import check_tokens

PROGRAM = pathlib.Path(__file__).parent / "whole_engine.py"
MODELS = {"llama": tiny_models.llama, "gemma2": tiny_models.gemma2, "deepseek_v2": tiny_models.deepseek_v2_yarn}
RUNS = {
    "llama, SGLang's own": ("llama", {"attention_backend": "torch_native", "page_size": 16}),
    "llama": ("llama", {"attention_backend": "attune", "page_size": 16}),
    "llama, mixed batches": ("llama", {"attention_backend": "attune", "enable_mixed_chunk": True}),
    "llama, retracted": ("llama", {"attention_backend": "attune", "page_size": 4, "retract": True}),
    "gemma2": ("gemma2", {"attention_backend": "attune", "page_size": 16}),
    "deepseek": ("deepseek_v2", {"attention_backend": "attune", "page_size": 16}),
}
NEAR = 1e-3  # of the logits' deviation: two that are closer may change places


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """-> (models by name, the folder with what each run wrote)."""
    folder = tmp_path_factory.mktemp("engines")
    models = {name: tiny_models.make(config) for name, config in MODELS.items()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        model.set_attn_implementation("eager")
    paths = [path for path in sys.path if path and os.path.isdir(path)]
    with open(folder / "log", "w") as log:
        subprocess.run([sys.executable, "-W", "ignore", PROGRAM, folder, json.dumps(RUNS)], stdout=log, stderr=subprocess.STDOUT, check=False,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return models, folder


def generated(engines, name):
    _, folder = engines
    found = folder / f"{name}.json"
    assert found.exists(), "".join(log.read_text()[-4000:] for log in (folder / f"{name}.log", folder / "log") if log.exists())
    return json.loads(found.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_transformers(name, engines):
    check_tokens(engines[0][RUNS[name][0]], generated(engines, name)["tokens"], NEAR)


def test_batches_are_of_every_kind(engines):
    """So that the tokens are a proof of all of them."""
    made = generated(engines, "llama")
    assert not any(made["cached"][:6]) and all(made["cached"][-2:]), "tokens found in the cache"
    chunks, decoded = ([count for mode, count in made["batches"] if mode == which] for which in ("EXTEND", "DECODE"))
    assert len(chunks) > 4 and max(chunks) > 1
    assert len(set(decoded)) > 1 and max(decoded) > 5
    assert any(mode == "MIXED" for mode, _ in generated(engines, "llama, mixed batches")["batches"])
    assert generated(engines, "llama, retracted")["retracted"] > 0
