# SPDX-License-Identifier: Apache-2.0
"""Modules with the names and conventions of other libraries, served by Attune: one import changes, or `sys.modules` does.

    from attune.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
    sys.modules["flash_attn"] = attune.compat.flash_attn

    flash_mla            FlashMLA of April 2026; takes the calls of September 2025 too
    flash_mla_2025_09    the same with September 2025's results (sparse prefill in base 2)
    flash_attn           flash-attn 2
    flash_attn_interface FlashAttention-3
    vllm.prefix_prefill            context_attention_fwd
    vllm.triton_unified_attention  unified_attention

Arrays are torch tensors. What a function cannot do raises NotImplementedError naming the argument. Tuning arguments (splits,
scheduler buffers) are accepted and have no effect. docs/python.md lists what differs.
"""
