# SPDX-License-Identifier: Apache-2.0
"""The plans of an engine's attention layers: one for each kind of layer and size of batch, made once and run in every later step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import attune

if TYPE_CHECKING:
    from ._step import Attending

# Decode has a kernel for keys up to this bound that needs no schedule (docs/kernels/decode.md).
SHORT_SEQLEN_KV = 16384
_SHORT_SEQLENS_Q = (1, 2, 4, 8, 16, 32)
_ALIGNMENT = 256


def spec(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> attune.Spec:
    """As attune.Spec, of torch's dtype."""
    name: Any = str(dtype).removeprefix("torch.")
    return attune.Spec(shape, name, device)


def query_specs(impl: Attending, rows: int, device: torch.device) -> dict[str, attune.Spec]:
    """The arguments q and q_rope of attune.attention, as that layer has them."""
    apart, heads = impl.rope_apart, impl.num_heads
    made = {"q": spec((rows, heads, impl.head_size - apart), impl.dtype, str(device))}
    if apart:
        made["q_rope"] = spec((rows, heads, apart), impl.dtype, str(device))
    return made


class Plans:
    """Sizes are rounded up, so that a server settles on a few dozen plans. Those of one kind of layer share a workspace: of
    them, a step runs one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plans: dict[tuple[Any, ...], attune.Plan] = {}
        self._workspaces: dict[str, torch.Tensor] = {}

    def find(self, impl: Attending, cache: attune.KVCache | None, decode: bool, num_tokens: int, num_reqs: int, max_query_len: int,
             max_seq_len: int, pages: int, mask_bytes: int = 0) -> attune.Plan:
        """cache None: the new tokens attend among themselves. decode: each request has one query. mask_bytes: of a query's mask_bits.
        The other sizes are the most that any run has."""
        rows, batch = _power_of_two(num_tokens), _power_of_two(num_reqs)
        seqlen_q = next((n for n in _SHORT_SEQLENS_Q if max_query_len <= n), rows)
        seqlen_kv = SHORT_SEQLEN_KV if max_seq_len <= SHORT_SEQLEN_KV else None
        key = (impl.kind, decode, rows, batch, seqlen_q, seqlen_kv, pages, mask_bytes)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        fields: dict[str, Any] = {"cu_seqlens_q": None if decode else self._made(batch + 1), "max_seqlen_q": min(seqlen_q, rows)}
        if mask_bytes:
            fields.update(mask_bits=self._made(rows, mask_bytes, dtype=torch.uint8), mask_start=self._made(batch))
        if cache is None:
            fields["k"] = self._made(rows, impl.num_kv_heads, impl.head_size, dtype=impl.dtype)
            fields["v"] = self._made(rows, impl.num_kv_heads, impl.head_size_v, dtype=impl.dtype)
        else:
            fields["cache"] = attune.KVCache(cache.k, cache.v, layout=cache.layout, k_scale=cache.k_scale, v_scale=cache.v_scale,
                                             page_table=self._made(batch, pages))
            fields["seqused_kv"], fields["max_seqlen_kv"] = self._made(batch), seqlen_kv
        return self._make(key, impl, rows, fields)

    def find_sparse(self, impl: Attending, cache: attune.KVCache, num_tokens: int, topk: int) -> attune.Plan:
        """Of tokens that each have a list of slots in the cache, at most topk."""
        rows = _power_of_two(num_tokens)
        key = (impl.kind, rows, topk)
        return self._plans.get(key) or self._make(key, impl, rows, {
            "cache": cache, "indices": self._made(rows, topk), "topk_length": self._made(rows)})

    def _make(self, key: tuple[Any, ...], impl: Attending, rows: int, fields: dict[str, Any]) -> attune.Plan:
        fields = {**query_specs(impl, rows, self._device),
                  "out": self._made(rows, impl.num_heads, impl.head_size_v, dtype=impl.out_dtype), **impl.arrays, **impl.fields, **fields}
        if impl.out_dtype == torch.float8_e4m3fn:
            fields["out_scale"] = self._made(1, dtype=torch.float32)
        if impl.returns_lse:
            fields["lse"] = self._made(rows, impl.num_heads, dtype=torch.float32)
        size = attune.Plan(**fields).workspace_size
        plan = self._plans[key] = attune.Plan(**fields, workspace=self._workspace(impl.kind, size))
        return plan

    def _made(self, *shape: int, dtype: torch.dtype = torch.int32) -> attune.Spec:
        return spec(shape, dtype, str(self._device))

    def _workspace(self, kind: str, size: int) -> torch.Tensor:
        """The workspace of that kind of layer, grown where it is too small: plans that are there keep the one they have."""
        workspace = self._workspaces.get(kind)
        if workspace is None or workspace.numel() < size:
            memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=self._device)
            start = -memory.data_ptr() % _ALIGNMENT
            workspace = self._workspaces[kind] = memory[start : start + size]
        return workspace


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
