# SPDX-License-Identifier: Apache-2.0
"""Tiny models of random weights, for whole engines: what they generate greedily hangs on attention."""

import torch

VOCABULARY = 512
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16, "max_position_embeddings": 2048,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=1024, num_key_value_heads=4, head_dim=64))


def gemma2():
    """Softcap, and a sliding window in every other layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(
        **{**SIZES, "tie_word_embeddings": True}, intermediate_size=1024, num_key_value_heads=4, head_dim=64, query_pre_attn_scalar=64, sliding_window=32,
        attn_logit_softcapping=5.0, final_logit_softcapping=None, hidden_activation="gelu_pytorch_tanh",
        hidden_act="gelu_pytorch_tanh"))  # which SGLang reads, as published checkpoints have both


def gpt_oss():
    """Sinks, and a sliding window in every other layer. Each token goes to all experts: a choice would turn what rounding makes of two
    near router logits into another expert, and so into logits that are far apart."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(
        **SIZES, intermediate_size=512, num_key_value_heads=4, head_dim=64, sliding_window=32, num_local_experts=4, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"] * 2))


def deepseek_v2(**fields):
    """Latent attention; no experts. fields: others of the configuration."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(DeepseekV2Config(
        **SIZES, intermediate_size=1024, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        n_shared_experts=1, n_group=1, topk_group=1, **fields))


def deepseek_v2_yarn():
    """As published ones have it."""
    return deepseek_v2(moe_layer_freq=1, rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707})


def make(model):
    """model: a function above. In float32; the same weights each time."""
    torch.manual_seed(0)
    made = model().float().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(-1, 2)
            elif parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)  # so that attention and logits are far from uniform
        if made.config.tie_word_embeddings:
            made.get_input_embeddings().weight *= 0.05  # else a token's successor is itself
    return made
