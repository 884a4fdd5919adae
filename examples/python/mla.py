# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in its absorbed form: 576 numbers a token, of which 512 are the value too.

The cache is packed (656 bytes a token, float8 with a scale for every 128 channels), read by attune.attention and, with the same
result, through FlashMLA's own calls.
"""

import torch

import attune
from attune.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

BATCH, SEQLEN_Q, HEADS, PAGE_SIZE, PAGES = 2, 2, 16, 64, 8
torch.manual_seed(0)
lengths = torch.tensor([200, 37], dtype=torch.int32)
table = torch.tensor([[5, 0, 3, 6], [1, 0, 0, 0]], dtype=torch.int32)

# Write the latent vectors of each token: append quantises.
latent = torch.randn(int(lengths.sum()), 1, 576) / 3
cache = attune.KVCache(torch.zeros(PAGES, PAGE_SIZE, 656, dtype=torch.uint8), format="mla_656", page_table=table)
attune.cache_append(cache, latent, cu_seqlens=torch.tensor([0, 200, 237], dtype=torch.int32), seqused_kv=torch.zeros_like(lengths))

q = torch.randn(BATCH, SEQLEN_Q, HEADS, 576).bfloat16()  # two queries a sequence: speculative decoding
out, lse = attune.attention(q, cache=cache, seqused_kv=lengths, causal=True, head_dim_v=512, softmax_scale=0.1, return_lse=True)

metadata, _ = get_mla_metadata()
theirs, their_lse = flash_mla_with_kvcache(q, cache.k[:, :, None].view(torch.float8_e4m3fn), table, lengths, 512, metadata, None,
                                           softmax_scale=0.1, causal=True, is_fp8_kvcache=True)
assert torch.equal(out, theirs) and torch.equal(lse, their_lse.transpose(1, 2))

worst = 0.0
for b, rows in enumerate(torch.split(latent.squeeze(1), lengths.tolist())):
    scores = torch.einsum("qhd,nd->qhn", q[b].float(), rows) * 0.1
    n = len(rows)
    scores[0, :, n - 1] = float("-inf")  # the first query does not see the second's token
    want = torch.einsum("qhn,nd->qhd", scores.softmax(-1), rows[:, :512])
    worst = max(worst, (out[b].float() - want).abs().max().item())
stored = cache.k.numel() / (PAGES * PAGE_SIZE)
print(f"{stored:.0f} bytes a token instead of {576 * 2}; largest difference to unquantised attention {worst:.4f}")
assert worst < 0.05
