# SPDX-License-Identifier: Apache-2.0
"""A decode loop of four layers over a paged cache: one plan, no allocation in the loop, one CUDA graph where there is a GPU.

A toy engine: sequences grow by a token a step and take pages from a free list. The last step is checked with plain attention.
usage: paged_decode.py [cpu | cuda]
"""

import sys

import torch

import attune

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, BATCH, HEADS_Q, HEADS_KV, DIM, PAGE_SIZE, PAGES, STEPS = 4, 3, 8, 2, 64, 16, 32, 40
DTYPE = torch.bfloat16

torch.manual_seed(0)
lengths = torch.tensor([5, 30, 17], dtype=torch.int32)  # tokens in the cache, on the host: the engine knows them
table = torch.zeros(BATCH, PAGES, dtype=torch.int32)
free = list(torch.randperm(PAGES).tolist())


def grow() -> None:
    """Pages for one more token of every sequence."""
    for b in range(BATCH):
        if int(lengths[b]) % PAGE_SIZE == 0:
            table[b, int(lengths[b]) // PAGE_SIZE] = free.pop()


for b in range(BATCH):
    for page in range(-(-int(lengths[b]) // PAGE_SIZE)):
        table[b, page] = free.pop()

# What the device sees. The loop copies into these and never replaces them: that is what a graph needs.
used, pages = lengths.to(DEVICE, copy=True), table.to(DEVICE, copy=True)
caches = [attune.KVCache(*(torch.randn(PAGES, PAGE_SIZE, HEADS_KV, DIM, device=DEVICE).to(DTYPE) for _ in range(2)), page_table=pages)
          for _ in range(LAYERS)]
q, k, v = (torch.empty(LAYERS, BATCH, heads, DIM, device=DEVICE, dtype=DTYPE) for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
out = torch.empty_like(q)
# RoPE, and the new key and value go to the cache, all in the same call.
prologue = attune.Prologue(rope_cos_sin=attune.rope_table(PAGE_SIZE * PAGES, DIM, like=q), append=True)

plan = attune.Plan(q[0], k[0], v[0], cache=caches[0], seqused_kv=used, prologue=prologue, out=out[0])
print(plan.describe().strip())


def step() -> None:
    for layer in range(LAYERS):
        plan.run(q=q[layer], k=k[layer], v=v[layer], cache=caches[layer], out=out[layer])


graph = None
for i in range(STEPS):
    grow()
    used.copy_(lengths)
    pages.copy_(table)
    for x in (q, k, v):  # a model would write them
        x.normal_()
    if DEVICE == "cpu" or i == 0:
        step()
    elif graph is None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()  # a capture records and does not run
    else:
        graph.replay()
    lengths += 1

# The last step again, with plain attention over the keys that the cache holds now.
error = 0.0
turned = attune.qkv_prepare(q[-1], prologue=attune.Prologue(rope_cos_sin=prologue.rope_cos_sin), seqused_kv=used,
                            cu_seqlens_q=torch.arange(BATCH + 1, dtype=torch.int32, device=DEVICE))[0]
for b in range(BATCH):
    n = int(lengths[b])
    keys, values = (x[table[b].long().to(DEVICE)].flatten(0, 1)[:n].repeat_interleave(HEADS_Q // HEADS_KV, dim=1)
                    for x in (caches[-1].k, caches[-1].v))
    scores = torch.einsum("hd,nhd->hn", turned[b].float(), keys.float()) / DIM**0.5
    want = torch.einsum("hn,nhd->hd", scores.softmax(-1), values.float())
    error = max(error, (out[-1, b].float() - want).abs().max().item())
print(f"{STEPS} steps of {LAYERS} layers on {DEVICE}, lengths {lengths.tolist()}, largest error {error:.4f}")
assert error < 0.03
