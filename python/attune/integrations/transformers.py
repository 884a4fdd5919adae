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
from transformers.masking_utils import (AttentionMaskInterface, bidirectional_mask_function, causal_mask_function, prepare_padding_mask,
                                        sdpa_mask)

from . import torch_masks


def register(name: str = "attune") -> None:
    """Adds `name` to the attention and mask functions of transformers."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask_function)


def attention_mask_function(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
                            mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
                            local_size: int | None = None, allow_is_causal_skip: bool = True,
                            **kwargs: Any) -> torch.Tensor | None:
    """None where causality and the window that the module passes say it all; else bool [batch, 1, q_length, kv_length].

    Padding behind a sequence needs no mask then: only its own rows see it, which nobody reads but generate(), with a
    warning of transformers. Causality here is aligned to the last
    key, so a cache with room after it needs a mask. A window is known to the module, a chunk is not.
    """
    _require_interface(kwargs.get("config"))
    chunked = local_size is not None and local_size == getattr(kwargs.get("config"), "attention_chunk_size", None)
    plain = allow_is_causal_skip and not chunked and isinstance(q_offset, int) and (
        q_offset + q_length == kv_offset + kv_length)
    if plain and (attention_mask is None or (
            not torch_masks.recorded(attention_mask) and torch_masks.begins(attention_mask[:, kv_offset : kv_offset + kv_length]))):
        return None
    if mask_function is bidirectional_mask_function and attention_mask is not None:  # padding alone: a view says it
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
        if kwargs.get("allow_is_bidirectional_skip") and not torch_masks.recorded(padding) and bool(padding.all()):
            return None
        return padding[:, None, None].expand(-1, -1, q_length, -1)
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                     allow_is_causal_skip=False, **kwargs)
    if allow_is_causal_skip and not chunked and q_length > 1:
        mask = mask.contiguous()  # as generate() would make it, without the note
        _note_causality(mask, q_offset, q_length, kv_offset, attention_mask)
    elif local_size is not None and kwargs.get("allow_is_bidirectional_skip") and mask is not None:
        mask = mask.contiguous()
        _note_window(mask, q_offset, kv_offset, local_size, mask_function, attention_mask)
    return mask


def _note_causality(mask: torch.Tensor, q_offset: Any, q_length: int, kv_offset: Any, attention_mask: torch.Tensor | None) -> None:
    """Notes on a mask the fields that say the same, the module's window aside: half of the products are then not computed.

    Whoever makes another mask of this one makes one without the note.
    """
    if torch_masks.recorded(mask) or mask.is_inference() or not isinstance(kv_offset, int):
        return
    if isinstance(q_offset, torch.Tensor):
        if q_offset.is_cuda:
            return  # to read it is to wait
        q_offset = int(q_offset)
    batch, _, _, keys = mask.shape
    used = q_offset + q_length - kv_offset
    if used > keys:
        return
    fields: dict[str, Any] = {"causal": True}
    if used < keys:  # room in a static cache
        fields["seqused_kv"] = torch.full((batch,), used, dtype=torch.int32, device=mask.device)
    padding = prepare_padding_mask(attention_mask, keys, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys]
        if padding.is_cuda or not torch_masks.begins(padding[:, :used]):  # to look is to wait there
            fields["mask_bits"] = torch_masks.bits(padding[:, None, None], q_length, keys, batch)
    mask._attune_fields = (mask._version, keys, fields)


def _note_window(mask: torch.Tensor, q_offset: Any, kv_offset: Any, size: int, mask_function: Any,
                 attention_mask: torch.Tensor | None) -> None:
    """As _note_causality, where tokens see others on both sides (ModernBERT): those up to `size` away, if the mask says so."""
    batch, _, rows, keys = mask.shape
    if torch_masks.recorded(mask) or mask.is_inference() or not isinstance(q_offset, int) or q_offset + rows != kv_offset + keys:
        return
    first, near, far = torch.tensor(0), torch.tensor(size), torch.tensor(size + 1)
    seen = [bool(mask_function(first, first, *pair)) for pair in ((near, first), (far, first), (first, near), (first, far))]
    if seen != [True, False, True, False]:
        return
    fields: dict[str, Any] = {"causal": False, "window_left": size, "window_right": size}
    padding = prepare_padding_mask(attention_mask, keys, kv_offset)
    if padding is not None:  # bits: lengths would move the window
        fields["mask_bits"] = torch_masks.bits(padding[:, None, None, kv_offset : kv_offset + keys], rows, keys, batch)
    mask._attune_fields = (mask._version, keys, fields)


def _noted(mask: torch.Tensor, keys: int) -> dict[str, Any] | None:
    version, of_keys, fields = getattr(mask, "_attune_fields", (None, 0, None))
    return fields if version is not None and version == mask._version and of_keys == keys else None


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
    noted = None if attention_mask is None or position_bias is not None else _noted(attention_mask, k.shape[1])
    if attention_mask is None or noted is not None:
        fields.update(noted or {"causal": getattr(module, "is_causal", True) if is_causal is None else is_causal})
        if sliding_window is not None and "window_left" not in fields:
            fields["window_left"] = sliding_window - 1
            if not fields["causal"]:
                fields["window_right"] = sliding_window - 1
    elif attention_mask.dtype == torch.bool:
        # A bias belongs to positions, which lengths would move.
        fields.update(torch_masks.hiding(attention_mask, q.shape[1], k.shape[1], q.shape[0], position_bias is None))
    else:
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
    if position_bias is not None:
        q, k, v = torch_masks.with_bias(q, k, v, position_bias[..., : k.shape[1]], fields)
    return torch_masks.attend(q, k, v, fields), None
