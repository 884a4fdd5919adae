# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention as a peer of side_by_side.py, in the strongest form of each call.

Its keys are dense: of a paged case it gets a contiguous copy, made before, and is spared the page table. Where each sequence has
one query, the query heads of a KV head are its rows: q.view(batch, num_heads_kv, group, head_dim), which reads every key once.
Otherwise both forms of grouped heads are tried, enable_gqa and keys repeated beforehand, and the faster one is the peer's.
"""

import torch
from timing import elapsed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

NAME = "torch"
BACKENDS = {"cpu": {"torch": None},
            "cuda": {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION,
                     "torch efficient": SDPBackend.EFFICIENT_ATTENTION}}


def contiguous(case):
    """k and v as [batch, num_heads_kv, seqlen, head_dim]."""
    batch, n = len(case.lengths_kv), case.lengths_kv[0]
    if case.kv == "dense":
        return [x.view(batch, n, *x.shape[1:]).transpose(1, 2).contiguous() for x in (case.k, case.v)]
    token = torch.arange(n, device=case.device)
    index = case.page_table.long()[:, token // case.page_size] * case.page_size + token % case.page_size
    return [x.view(-1, *x.shape[2:])[index].transpose(1, 2).contiguous() for x in (case.k, case.v)]


def forms(case, with_lse):
    """Calls without a backend chosen; each gives out as [total_q, num_heads_q, head_dim_v] has it. They return no lse; cuDNN and
    the memory-efficient kernel write one where a gradient may be asked for, flash attention and the CPU always do."""
    attention = torch.nn.functional.scaled_dot_product_attention
    batch, n_q, n_kv = len(case.lengths_q), case.lengths_q[0], case.lengths_kv[0]
    (heads_q, heads_kv), group = case.heads, case.heads[0] // case.heads[1]
    k, v = contiguous(case)
    flat = case.q.detach().requires_grad_(with_lse)
    q = flat.view(batch, n_q, heads_q, -1).transpose(1, 2)
    if n_q == 1:
        rows = flat.view(batch, heads_kv, group, -1)
        return [lambda: (attention(rows, k, v, scale=case.scale), None)]
    masked = {"is_causal": case.causal}
    if case.causal and n_q != n_kv:
        masked = {"attn_mask": causal_lower_right(n_q, n_kv)}
    if group == 1:
        return [lambda: (attention(q, k, v, scale=case.scale, **masked).transpose(1, 2), None)]
    repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    return [lambda: (attention(q, k, v, scale=case.scale, enable_gqa=True, **masked).transpose(1, 2), None),
            lambda: (attention(q, *repeated, scale=case.scale, **masked).transpose(1, 2), None)]


def varlen(case):
    """Ragged prompts on a GPU, by torch's own flash attention over packed sequences."""
    from torch.nn.attention.varlen import varlen_attn  # since PyTorch 2.10
    offsets = torch.tensor([0, *case.lengths_q], device=case.device).cumsum(0).to(torch.int32)
    longest, group = max(case.lengths_q), case.heads[0] // case.heads[1]
    repeated = [x.repeat_interleave(group, dim=1) for x in (case.k, case.v)]
    # The name of the causal argument has changed: is_causal, then a window whose right side is 0.
    for masked in ({"is_causal": True}, {"window_size": (-1, 0)}) if case.causal else ({},):
        for k, v, grouped in ((case.k, case.v, {"enable_gqa": True}), (*repeated, {})):
            def call(k=k, v=v, arguments={**masked, **grouped}):
                return varlen_attn(case.q, k, v, offsets, offsets, longest, longest, **arguments), None
            yield call


def prepare(case):
    if case.kv not in ("dense", "paged") or case.dtype.itemsize == 1:
        return None
    if not case.equal:
        if case.device == "cpu" or case.kv != "dense" or case.lengths_q != case.lengths_kv:
            return None
        try:
            best = fastest(varlen(case), None, case.device)
        except ImportError:
            return None
        return {"torch varlen": best} if best else None
    found = {}
    for name, backend in BACKENDS[case.device].items():
        gradients = backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        found[name] = (gradients and fastest(forms(case, True), backend, case.device, True)) or fastest(forms(case, False), backend,
                                                                                                        case.device)
    return {name: call for name, call in found.items() if call is not None}


def fastest(calls, backend, device, gradients=False):
    """The fastest of the calls that the backend takes, or None."""
    best = None
    for call in calls:
        def one(call=call):
            with torch.inference_mode(not gradients):
                if backend is None:
                    return call()
                with sdpa_kernel(backend):
                    return call()
        try:
            one()
            seconds = min(elapsed(one, 1, device) for _ in range(3))
        except (RuntimeError, TypeError, ValueError):
            continue
        if best is None or seconds < best[0]:
            best = seconds, one
    return best and best[1]
