# SPDX-License-Identifier: Apache-2.0
"""SGLang's whole Scheduler on a GPU (sglang_contract/whole_engine.py), without sgl_kernel: every token of tiny models is the one that
transformers' eager attention, in float32, finds most likely behind the prompt and the tokens before it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from engine_processes import wait_all

torch = pytest.importorskip("torch", reason="torch is not installed: SGLang's engine is not run")
for wanted in ("sglang", "transformers"):
    if importlib.util.find_spec(wanted) is None:
        pytest.skip(f"{wanted} is not installed: SGLang's engine is not run", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("there is no GPU: SGLang's engine is not run", allow_module_level=True)

CONTRACT = pathlib.Path(__file__).parent / "sglang_contract"
sys.path.append(str(CONTRACT))
import tiny_models  # noqa: E402
from engine_requests import check_tokens  # noqa: E402

MODELS = {"llama": tiny_models.llama, "gemma2": tiny_models.gemma2, "deepseek_v2": tiny_models.deepseek_v2_yarn}
EAGER = {"attention_backend": "attune", "page_size": 16}
DECODE_GRAPHS = {**EAGER, "disable_cuda_graph": False, "disable_prefill_cuda_graph": True}
ALL_GRAPHS = {**EAGER, "disable_cuda_graph": False, "cuda_graph_backend_prefill": "breakable"}
BFLOAT16 = {"dtype": "bfloat16"}
RUNS = {
    "llama-own": ("llama", {"attention_backend": "torch_native", "page_size": 16}),
    "llama-eager": ("llama", EAGER),
    "llama-mixed": ("llama", {**EAGER, "page_size": 1, "enable_mixed_chunk": True}),
    "llama-graphs": ("llama", DECODE_GRAPHS),
    "llama-all-graphs": ("llama", {**ALL_GRAPHS, **BFLOAT16}),
    "gemma2-eager": ("gemma2", EAGER),
    "gemma2-graphs": ("gemma2", {**DECODE_GRAPHS, **BFLOAT16}),
    "deepseek-eager": ("deepseek_v2", {**EAGER, **BFLOAT16}),
    "deepseek-graphs": ("deepseek_v2", {**DECODE_GRAPHS, **BFLOAT16}),
}
SECONDS = float(os.environ.get("ENGINE_SECONDS", "240"))  # for all engines together, which compile their kernels at once
# Of the logits' deviation: two that are closer may change places.
NEAR = {"float32": 1e-3, "bfloat16": 0.15}


def start(folder, name):
    with open(folder / f"{name}.process.log", "w") as log:
        return subprocess.Popen([sys.executable, "-W", "ignore", CONTRACT / "whole_engine.py", folder, json.dumps({name: RUNS[name]})],
                                stdout=log, stderr=subprocess.STDOUT,
                                env={**os.environ, "ENGINE_DEVICE": "cuda", "ENGINE_SECONDS": str(SECONDS - 5)})


@pytest.fixture(scope="module")
def engines(request, tmp_path_factory):
    """All that are wanted at once. -> a function: name of a run -> what it generated."""
    folder = pathlib.Path(os.environ.get("ATTUNE_SGLANG_LOGS") or tmp_path_factory.mktemp("engines"))
    wanted = {item.callspec.params["name"] for item in request.session.items if item.path == pathlib.Path(__file__)}
    for model in {RUNS[name][0] for name in wanted}:
        tiny_models.make(MODELS[model]).save_pretrained(folder / model)
    running = {name: start(folder, name) for name in RUNS if name in wanted}
    wait_all(running.values(), SECONDS)

    def generated(name):
        if running[name].wait() != 0:
            logs = [folder / f"{name}.process.log", folder / f"{name}.log"]
            pytest.fail(f"{name} ended with {running[name].returncode}:\n"
                        + "".join(log.read_text()[-6000:] for log in logs if log.exists()), pytrace=False)
        return json.loads((folder / f"{name}.json").read_text())

    return generated


@torch.no_grad()
@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_transformers(name, engines):
    made, (model, fields) = engines(name), RUNS[name]
    dtype = fields.get("dtype", "float32")
    reference = tiny_models.make(MODELS[model]).cuda()
    reference.set_attn_implementation("eager")
    for parameter in reference.parameters():
        parameter.copy_(parameter.to(getattr(torch, dtype)))
    others, farthest = check_tokens(reference, made["tokens"], NEAR[dtype])
    print(f"{name}: {others} of 240 tokens are near ties, {farthest:.4f} at most; batches {made['batches']}, graphs {made['graphs']}")
    assert others <= (2 if dtype == "float32" else 48)
    batches = [mode for mode, _ in made["batches"]]
    graphs = {"DECODE": not fields.get("disable_cuda_graph", True), "EXTEND": "cuda_graph_backend_prefill" in fields}
    for mode, captured in graphs.items():
        assert made["graphs"].count(mode) == (batches.count(mode) if captured else 0), f"{mode} by graphs"
    assert any(made["cached"][-2:]), "nothing was found in the cache"
    assert name != "llama-mixed" or "MIXED" in batches
