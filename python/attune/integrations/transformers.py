# SPDX-License-Identifier: Apache-2.0
"""Attune as an attention implementation of Hugging Face transformers (5 or later).

    import attune.integrations.transformers
    attune.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attune")

Training over dense keys; prefill, decode with the model's cache, sliding windows, sinks, softcap, grouped heads, position biases, padding.
Attention weights are not returned.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import MODEL_MAPPING, AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

import attune


def register(name: str = "attune") -> None:
    """Adds `name` to the attention and mask functions of transformers."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask_function)


def attention_mask_function(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
                            mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
                            local_size: int | None = None, allow_is_causal_skip: bool = True,
                            **kwargs: Any) -> torch.Tensor | None:
    """None where causality and the window that the module passes say it all; else bool [batch, 1, q_length, kv_length].

    Causality here is aligned to the last key, so a cache with room after it needs a mask. A window is known to the module, a
    chunk is not.
    """
    _require_interface(kwargs.get("config"))
    chunked = local_size is not None and local_size == getattr(kwargs.get("config"), "attention_chunk_size", None)
    plain = allow_is_causal_skip and not chunked and isinstance(q_offset, int) and (
        q_offset + q_length == kv_offset + kv_length)
    if plain and (attention_mask is None or (
            not _recorded(attention_mask) and bool(attention_mask[:, kv_offset : kv_offset + kv_length].all()))):
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                     allow_is_causal_skip=False, **kwargs)


_known_to_call: set[type] = set()  # configurations of models that call the attention that is registered


def _require_interface(config: Any) -> None:
    """Some models compute attention by themselves whatever the configuration says; without a mask they would see the future."""
    kind = type(config)
    if kind in _known_to_call or torch.compiler.is_compiling():
        return
    model = MODEL_MAPPING.get(kind, None)
    model = model[0] if isinstance(model, tuple) else model
    if model is not None and not hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise NotImplementedError(f"attune: {model.__name__} calls no attention but its own; it needs another attn_implementation")
    _known_to_call.add(kind)


def _recorded(mask: torch.Tensor) -> bool:
    """Whether what is done with the mask is recorded, for other masks too: its values say nothing now."""
    return torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                      sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
                      is_causal: bool | None = None, position_bias: torch.Tensor | None = None,
                      **kwargs: Any) -> tuple[torch.Tensor, None]:
    """query [batch, num_heads_q, seqlen_q, d], key and value [batch, num_heads_kv, seqlen_kv, d] -> [batch, seqlen_q, num_heads_q, d].

    attention_mask: None (then causality and the window count), bool, or float to be added, [batch or 1, heads or 1, seqlen_q,
    seqlen_kv].
    """
    if dropout:
        raise NotImplementedError(f"attune: dropout is {dropout}; the model must be in eval mode")
    if kwargs.get("cache") is not None:
        raise NotImplementedError("attune: cache is given; the paged cache of continuous batching is not supported")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    fields: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux}
    if attention_mask is None:
        fields["causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None:
            fields["window_left"] = sliding_window - 1
            if not fields["causal"]:
                fields["window_right"] = sliding_window - 1
    elif attention_mask.dtype == torch.bool:
        fields["mask_bits"] = _bits(attention_mask, k.shape[1], q.shape[0])
    else:
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
    if position_bias is None:
        return attune.attention(q, k, v, **fields), None
    return _with_bias(q, k, v, position_bias[..., : k.shape[1]], fields), None


def _bits(mask: torch.Tensor, keys: int, batch: int) -> torch.Tensor:
    """bool [batch or 1, heads or 1, rows, keys or more] -> uint8 [batch * rows, bytes] or [batch * rows, heads, bytes].

    The layers of a step share a mask, so its bits are kept with it as long as it does not change.
    """
    keep = not (_recorded(mask) or mask.is_inference())  # tensors of inference mode do not tell of changes
    if keep:
        state, bits = getattr(mask, "_attune_bits", (None, None))
        if state == (mask._version, keys, batch):
            return bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    padded = torch.nn.functional.pad(mask[..., :keys], (0, -keys % 8)).unflatten(-1, (-1, 8))
    packed = (padded * weights).sum(-1, dtype=torch.uint8).expand(batch, -1, -1, -1)
    bits = packed.transpose(1, 2).flatten(0, 1)  # [batch * rows, heads or 1, bytes]
    bits = bits.squeeze(1) if bits.shape[1] == 1 else bits
    if keep:
        mask._attune_bits = ((mask._version, keys, batch), bits)
    return bits


def _with_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """Adds bias [batch or 1, heads or 1, rows, keys]. attune's has no batch, and a row for every position up to the last key."""
    rows, keys = q.shape[1], k.shape[1]
    if rows > keys:  # more queries than keys: keys that nobody sees come first
        front = rows - keys
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, front, 0)) for x in (k, v))
        bias = torch.nn.functional.pad(bias, (front, 0), value=float("-inf"))
        if "mask_bits" in fields:
            fields["mask_start"] = torch.full((q.shape[0],), front, dtype=torch.int32, device=q.device)
    elif rows == 1:
        bias = bias.expand(-1, -1, keys, -1)
    elif rows < keys:
        bias = torch.nn.functional.pad(bias, (0, 0, keys - rows, 0))
    if bias.shape[0] == 1:
        return attune.attention(q, k, v, bias=bias[0], **fields)
    outs = []
    bits, starts = fields.pop("mask_bits", None), fields.pop("mask_start", None)
    for b in range(q.shape[0]):
        one = {} if bits is None else {"mask_bits": bits.unflatten(0, (-1, rows))[b]}
        if starts is not None:
            one["mask_start"] = starts[b : b + 1]
        outs.append(attune.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], bias=bias[b], **one, **fields))
    return torch.cat(outs)
