# SPDX-License-Identifier: Apache-2.0
"""vLLM's LLM class over a tiny model of random weights: what it generates greedily. Run by test_vllm_engine.py, on a GPU.

usage: whole_engine.py FOLDER, which writes the models there; whole_engine.py FOLDER MODEL BACKEND eager|graphs|dcp2, which writes the
tokens and the gaps between the two best logits to FOLDER/MODEL-BACKEND-eager.json. An engine in a process of its own each time. dcp2: two
GPUs, each with half of the heads and every second token of the cache (decode context parallelism). Exits with 77 where vLLM cannot do that
here.
"""

import importlib.util
import json
import os
import pathlib
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process: what fails there is said here
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # greedy needs none, and FlashInfer may not be there
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))
import tiny_models  # noqa: E402

NEW_TOKENS = 24
PROMPTS = (1, 5, 40, 200, 333, 64, 17, 128)  # tokens; those of a step are at most 256, so the long ones are in chunks beside decode
MODELS = {"llama": tiny_models.llama, "gpt_oss": tiny_models.gpt_oss, "deepseek": tiny_models.deepseek_v2}


def write(model, folder):
    tiny_models.make(MODELS[model]).to(torch.bfloat16).save_pretrained(folder / model)


def find_nccl():
    """Where vLLM cannot load NCCL by itself, its reduce_scatter returns what was in the memory, and says nothing (0.33)."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    places = [None]
    for package in ("nvidia.nccl", "torch"):
        found = importlib.util.find_spec(package)
        for folder in found.submodule_search_locations if found else ():
            places.append(os.path.join(folder, "lib/libnccl.so.2"))
    for place in places:
        try:
            NCCLLibrary(place)
        except Exception as error:
            print(f"whole_engine: NCCL at {place or 'its usual place'}: {error!r}")
            continue
        if place is not None:
            os.environ["VLLM_NCCL_SO_PATH"] = place
        return
    print("whole_engine: vLLM finds no NCCL that it can load, so it cannot combine ranks")
    sys.stdout.flush()
    os._exit(77)


def generate(folder, model, backend, way):
    from vllm import LLM, SamplingParams

    how = {"enforce_eager": True}
    if way == "dcp2":
        find_nccl()
        how |= {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "disable_custom_all_reduce": True}
    if way == "graphs":  # full graphs without a compiler
        how = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8]},
               "kernel_config": {"enable_jit_warmup": False}}
    llm = LLM(model=str(folder / model), skip_tokenizer_init=True, dtype="bfloat16", attention_backend=backend, max_model_len=1024,
              max_num_seqs=len(PROMPTS), max_num_batched_tokens=256, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, seed=0, **how)
    generator = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(3, tiny_models.VOCABULARY, (length,), generator=generator).tolist()} for length in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    requests = []
    for request in llm.generate(prompts, sampling, use_tqdm=False):
        (output,) = request.outputs
        best = [sorted((found.logprob for found in step.values()), reverse=True) for step in output.logprobs]
        requests.append({"tokens": list(output.token_ids), "gaps": [first - second for first, second, *_ in best]})
    return requests


def main(folder, *run):
    folder = pathlib.Path(folder)
    if not run:
        for model in MODELS:
            write(model, folder)
        return
    model, backend, how = run
    requests = generate(folder, model, backend, how)
    (folder / f"{'-'.join(run)}.json").write_text(json.dumps(requests))
    sys.stdout.flush()
    os._exit(0)  # what is left is only to be torn down


if __name__ == "__main__":
    main(*sys.argv[1:])
