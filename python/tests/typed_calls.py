# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of calls: read by mypy --strict (test_surface.py), never run. A "type: ignore" that nothing needs is an
error there, so each of them says that the line is one."""

from typing_extensions import assert_type

import attune


class Tensor:
    """Of some framework."""

    shape: tuple[int, ...]
    dtype: str


def results(q: Tensor, k: Tensor, flag: bool) -> None:
    assert_type(attune.attention(q, k, k, causal=True), Tensor)
    assert_type(attune.attention(q, k, k, out=q, softmax_scale=0.5), Tensor)
    assert_type(attune.attention(q, k, k, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attune.attention(q, k, k, return_lse=True, return_max_logits=True), tuple[Tensor, Tensor, Tensor])
    assert_type(attune.attention(q, k, k, return_lse=flag), Tensor | tuple[Tensor, ...])
    assert_type(attune.attention(q, k, k, lse=k), Tensor | tuple[Tensor, ...])
    assert_type(attune.merge(q, k), Tensor)
    assert_type(attune.merge(q, k, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attune.indexer_topk(q, k, attune.KVCache(k), topk=4), tuple[Tensor, Tensor])
    assert_type(bool(attune.supported(attune.Spec((3, 2, 64), "bfloat16"), k, k)), bool)
    assert_type(attune.rope_frequencies(64, theta=5e5), list[float])


def mistakes(q: Tensor) -> None:
    attune.attention([1.0], q, q)  # type: ignore[call-overload]
    attune.attention(q, q, q, attn_mask=q)  # type: ignore[call-overload]
    attune.attention(q, q, q, window_left="4")  # type: ignore[call-overload]
    attune.KVCache(q, q, layout="nhdd")  # type: ignore[arg-type]
    attune.KVCache(q, q, format="mla_657")  # type: ignore[arg-type]
    attune.Spec((3, 2, 64), "bf16")  # type: ignore[arg-type]
    attune.rope_table(8, 64, style="llama")  # type: ignore[arg-type]
    attune.indexer_select(q, topk=4, form="slot")  # type: ignore[arg-type]
    attune.sdpa(q, q, q, is_casual=True)  # type: ignore[call-arg]
    attune.attention(q, q, q).nothing  # type: ignore[attr-defined]
