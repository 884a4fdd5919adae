# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA as in DeepSeek V3.2: an indexer scores every key cheaply, attention reads the best of them only.

One decode step: append to both caches, quantise the index queries, choose, attend.
"""

import torch

import attune

BATCH, HEADS, PAGE_SIZE, MAX_PAGES, TOPK = 2, 16, 64, 6, 64
INDEX_HEADS, INDEX_DIM = 8, 128
torch.manual_seed(0)
lengths = torch.tensor([300, 50], dtype=torch.int32)  # with the token of this step
table = torch.randperm(BATCH * MAX_PAGES).to(torch.int32).view(BATCH, MAX_PAGES)
pages = BATCH * MAX_PAGES
cu_tokens = torch.tensor([0, 300, 350], dtype=torch.int32)
from_zero = torch.zeros(BATCH, dtype=torch.int32)

# Two caches on the same pages: latent vectors (packed), index keys (float8 with a scale a token, a power of two).
latent = attune.KVCache(torch.zeros(pages, PAGE_SIZE, 656, dtype=torch.uint8), format="mla_656", layout="bytes", page_table=table)
index = attune.KVCache(torch.zeros(pages, PAGE_SIZE, 1, INDEX_DIM).to(torch.float8_e4m3fn),
                       k_scale=torch.ones(pages, PAGE_SIZE, 1), page_table=table)
latent_rows, index_rows = torch.randn(350, 1, 576) / 3, torch.randn(350, 1, INDEX_DIM)
attune.cache_append(latent, latent_rows, cu_seqlens=cu_tokens, seqused_kv=from_zero)
attune.cache_append(index, index_rows, cu_seqlens=cu_tokens, seqused_kv=from_zero, power_of_two_scales=True)

# Index queries are quantised by the same operation: a contiguous "cache" of one row for each query and head.
index_q = torch.randn(BATCH, INDEX_HEADS, INDEX_DIM)
codes = attune.KVCache(torch.zeros(1, BATCH, INDEX_HEADS, INDEX_DIM).to(torch.float8_e4m3fn),
                       k_scale=torch.ones(1, BATCH, INDEX_HEADS))
attune.cache_quantize(codes, index_q)
weights = torch.rand(BATCH, INDEX_HEADS)

indices, count = attune.indexer_topk(codes.k[0], weights, index, q_scale=codes.k_scale[0], seqused_kv=lengths, topk=TOPK)

q = torch.randn(BATCH, HEADS, 576).bfloat16()
slots = attune.KVCache(latent.k, format="mla_656", layout="bytes")  # indices are slots: no page table
out = attune.attention(q, cache=slots, indices=indices, topk_length=count, head_dim_v=512, softmax_scale=0.1)

# The same with plain torch: scores in float, the best 64, softmax over them.
worst, agreed = 0.0, []
of_sequences = (torch.split(rows.squeeze(1), lengths.tolist()) for rows in (index_rows, latent_rows))
for b, (keys, rows) in enumerate(zip(*of_sequences)):
    scores = (weights[b][:, None] * (index_q[b] @ keys.T).clamp(min=0)).sum(0)
    best = set(scores.topk(min(TOPK, len(keys))).indices.tolist())
    chosen = indices[b, : int(count[b])]
    token_of_slot = {int(table[b, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE: t for t in range(len(keys))}
    tokens = [token_of_slot[slot] for slot in chosen.tolist()]
    agreed.append(len(best & set(tokens)) / len(best))  # float8 moves the scores a little
    logits = torch.einsum("hd,nd->hn", q[b].float(), rows[tokens]) * 0.1
    worst = max(worst, (out[b].float() - logits.softmax(-1) @ rows[tokens, :512]).abs().max().item())
print(f"{count.tolist()} of {lengths.tolist()} keys read; choice agrees with float scores to {min(agreed):.0%}; "
      f"largest difference {worst:.4f}")
assert count.tolist() == [64, 50] and min(agreed) > 0.9 and worst < 0.05
