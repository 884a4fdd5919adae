# SPDX-License-Identifier: Apache-2.0
"""vLLM's LLM class over a tiny model of random weights: what it generates greedily. Run by test_vllm_engine.py, on a GPU.

usage: whole_engine.py FOLDER, which writes the models there; whole_engine.py FOLDER MODEL BACKEND eager|graphs, which writes the tokens
and the gaps between the two best logits to FOLDER/MODEL-BACKEND-eager.json. An engine in a process of its own each time.
"""

import json
import os
import pathlib
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process: what fails there is said here
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # greedy needs none, and FlashInfer may not be there
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

VOCABULARY, NEW_TOKENS = 512, 24
PROMPTS = (1, 5, 40, 200, 333, 64, 17, 128)  # tokens; those of a step are at most 256, so the long ones are in chunks beside decode
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16, "max_position_embeddings": 2048,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=1024, num_key_value_heads=4, head_dim=64))


def gpt_oss():
    """Sinks, and a sliding window in every other layer. Each token goes to all experts: a choice would turn what rounding makes of two
    near router logits into another expert, and so into logits that are far apart."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(
        **SIZES, intermediate_size=512, num_key_value_heads=4, head_dim=64, sliding_window=32, num_local_experts=4, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 2))


def deepseek():
    """Latent attention; no experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(DeepseekV2Config(
        **SIZES, intermediate_size=1024, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        n_shared_experts=1, n_group=1, topk_group=1))


MODELS = {"llama": llama, "gpt_oss": gpt_oss, "deepseek": deepseek}


def write(model, folder):
    torch.manual_seed(0)
    made = MODELS[model]().float()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(-1, 2)
            elif parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)  # so that attention and logits are far from uniform
    made.to(torch.bfloat16).save_pretrained(folder / model)


def generate(folder, model, backend, graphs):
    from vllm import LLM, SamplingParams

    how = {"enforce_eager": True}
    if graphs:  # full graphs without a compiler
        how = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8]},
               "kernel_config": {"enable_jit_warmup": False}}
    llm = LLM(model=str(folder / model), skip_tokenizer_init=True, dtype="bfloat16", attention_backend=backend, max_model_len=1024,
              max_num_seqs=len(PROMPTS), max_num_batched_tokens=256, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, seed=0, **how)
    generator = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in PROMPTS]
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
    requests = generate(folder, model, backend, how == "graphs")
    (folder / f"{'-'.join(run)}.json").write_text(json.dumps(requests))
    sys.stdout.flush()
    os._exit(0)  # what is left is only to be torn down


if __name__ == "__main__":
    main(*sys.argv[1:])
