# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention: cheap scores of every key, and the best of each query as `indices` of `attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import InvalidArgument, shape_of, suggesting, whole
from ._ops import call, hand_out, make
from ._records import Array, KVCache

if TYPE_CHECKING:
    from typing import Literal

    from ._records import ArrayT


@suggesting
def indexer_topk(q: ArrayT, weights: Array, cache: KVCache, *, topk: int | None = None, q_scale: Array | None = None,
                 cu_seqlens_q: Array | None = None, seqused_kv: Array | None = None, causal: bool | None = None,
                 key_begin: Array | None = None, key_end: Array | None = None, form: Literal["slots", "positions"] | None = None,
                 slot_table: Array | None = None, slot_page_size: int | None = None, slot_pages: int | None = None,
                 max_seqlen_kv: int | None = None, indices: Array | None = None, topk_length: Array | None = None,
                 workspace: Array | None = None, stream: Any = None) -> tuple[ArrayT, ArrayT]:
    """The topk best keys of each query, by score(row, j) = k_scale(j) * sum_h weights[row, h] * q_scale[row, h] * max(<q, k_j>, 0).

    Args:
        q: [total_q, num_heads, head_dim] or [batch, seqlen_q, num_heads, head_dim], of any dtype that a cache may have.
        weights: [total_q, num_heads] (or [batch, seqlen_q, num_heads]); a softmax scale belongs in here. q_scale: float32, alike.
        cache: index keys, one head, no v. seqused_kv: int32 [batch], keys of each sequence, those of its queries among them.
        cu_seqlens_q: int32 [batch + 1]; None with q of rank 3: one row for each sequence.
        causal: a query sees keys up to its position. key_begin, key_end: int32 [total_q], the range that a row may see.
        topk: entries a row, of an `indices` that is made here. form: "slots" (page * page_size + offset; None too) or "positions".
        slot_table, slot_page_size, slot_pages: the pages of the cache that attention reads, where they are not those of `cache`.
        max_seqlen_kv: most keys of a sequence. indices, topk_length: written instead of new ones.

    Returns:
        indices int32 [total_q, topk] (or [batch, seqlen_q, topk]) in the order of positions, then -1; topk_length int32 [total_q].
        Rows that no sequence owns are not written.
    """
    rows = shape_of("q", q)[:-2]
    indices, topk_length = _outputs(rows, topk, indices, topk_length, q)
    call("indexer_topk", dict(q=q, weights=weights, cache=cache, q_scale=q_scale, cu_seqlens_q=cu_seqlens_q,
                              seqused_kv=seqused_kv, causal=causal, key_begin=key_begin, key_end=key_end, form=form,
                              slot_table=slot_table, slot_page_size=slot_page_size, slot_pages=slot_pages,
                              max_seqlen_kv=max_seqlen_kv, indices=indices, topk_length=topk_length), workspace, stream)
    return hand_out(indices, q), hand_out(topk_length, q)


@suggesting
def indexer_scores(q: ArrayT, weights: Array, cache: KVCache, *, q_scale: Array | None = None, cu_seqlens_q: Array | None = None,
                   seqused_kv: Array | None = None, causal: bool | None = None, key_begin: Array | None = None,
                   key_end: Array | None = None, max_seqlen_kv: int | None = None, scores: Array | None = None,
                   clear_scores: bool | None = None, workspace: Array | None = None, stream: Any = None) -> ArrayT:
    """The scores alone; arguments as of `indexer_topk`.

    Returns:
        scores float32 [total_q, max_seqlen_kv] (or [batch, seqlen_q, max_seqlen_kv]), column j for key j; -inf where a row does not
        see the key, if they are made here or with clear_scores, else what was there.
    """
    if scores is None:
        if max_seqlen_kv is None:
            raise InvalidArgument("max_seqlen_kv and scores are None; one of them must say how many columns the scores have")
        scores = make((*shape_of("q", q)[:-2], whole("max_seqlen_kv", max_seqlen_kv, most=2**31 - 1)), "float32", q)
        clear_scores = True if clear_scores is None else clear_scores
    call("indexer_scores", dict(q=q, weights=weights, cache=cache, q_scale=q_scale, cu_seqlens_q=cu_seqlens_q,
                                seqused_kv=seqused_kv, causal=causal, key_begin=key_begin, key_end=key_end,
                                max_seqlen_kv=max_seqlen_kv, scores=scores, clear_scores=clear_scores), workspace, stream)
    return hand_out(scores, q)


@suggesting
def indexer_select(scores: ArrayT, *, topk: int | None = None, cache: KVCache | None = None, cu_seqlens_q: Array | None = None,
                   seqused_kv: Array | None = None, causal: bool | None = None, key_begin: Array | None = None,
                   key_end: Array | None = None, form: Literal["slots", "positions"] | None = None, slot_table: Array | None = None,
                   slot_page_size: int | None = None, slot_pages: int | None = None, max_seqlen_kv: int | None = None,
                   indices: Array | None = None, topk_length: Array | None = None, workspace: Array | None = None,
                   stream: Any = None) -> tuple[ArrayT, ArrayT]:
    """The choice alone: `indexer_topk` from scores float32 [total_q, columns] or [batch, seqlen_q, columns], bit for bit.

    The cache gives its tables only; it may be None with form "positions" or a slot_table. Returns (indices, topk_length).
    """
    rows = shape_of("scores", scores)[:-1]
    indices, topk_length = _outputs(rows, topk, indices, topk_length, scores)
    call("indexer_select", dict(scores=scores, cache=cache, cu_seqlens_q=cu_seqlens_q, seqused_kv=seqused_kv, causal=causal,
                                key_begin=key_begin, key_end=key_end, form=form, slot_table=slot_table,
                                slot_page_size=slot_page_size, slot_pages=slot_pages, max_seqlen_kv=max_seqlen_kv,
                                indices=indices, topk_length=topk_length), workspace, stream)
    return hand_out(indices, scores), hand_out(topk_length, scores)


def _outputs(rows: tuple[int, ...], topk: int | None, indices: Any, topk_length: Any, like: Any) -> tuple[Any, Any]:
    if indices is None:
        if topk is None:
            raise InvalidArgument("topk and indices are None; one of them must say how many keys are chosen")
        indices = make((*rows, whole("topk", topk, least=1, most=2**31 - 1)), "int32", like)
    elif topk is not None and topk != shape_of("indices", indices)[-1]:
        raise InvalidArgument(f"topk is {topk}, and indices has {indices.shape[-1]} columns")
    if topk_length is None:
        count = 1
        for extent in rows:
            count *= extent
        topk_length = make((count,), "int32", like)
    return indices, topk_length
