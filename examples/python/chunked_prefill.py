# SPDX-License-Identifier: Apache-2.0
"""A long prompt in chunks beside running sequences: ragged queries, one call a step, the same bits however it is cut.

Each chunk brings its own keys and values; what came before is in a float8 cache with a scale for each token and head.
"""

from typing import Any

import numpy as np

import attune

HEADS_Q, HEADS_KV, DIM, PAGE_SIZE, PAGES = 8, 2, 64, 16, 64
rng = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def empty_cache() -> attune.KVCache:
    """A bf16-free cache: numpy has no float8, so a View says what the bytes are."""
    codes = [attune.View(np.zeros((PAGES, PAGE_SIZE, HEADS_KV, DIM), np.uint8), "float8_e4m3fn") for _ in range(2)]
    scales: list[Any] = [np.ones((PAGES, PAGE_SIZE, HEADS_KV), np.float32) for _ in range(2)]
    return attune.KVCache(*codes, k_scale=scales[0], v_scale=scales[1])


prompt = {"q": floats(300, HEADS_Q, DIM), "k": floats(300, HEADS_KV, DIM), "v": floats(300, HEADS_KV, DIM)}
table = rng.permutation(PAGES).astype(np.int32).reshape(2, PAGES // 2)  # of the prompt, and of a sequence that decodes
prologue = attune.Prologue(rope_cos_sin=attune.rope_table(1024, DIM), append=True)


def prefill(chunks: list[int]) -> Any:
    """The prompt in chunks of these sizes; in every step the other sequence decodes a token. Returns the prompt's output."""
    cache = empty_cache()
    cache.page_table = table
    done, decoded, outputs = 0, 0, []
    for size in chunks:
        rows = slice(done, done + size)
        one = {name: floats(1, x.shape[1], DIM) for name, x in prompt.items()}
        q, k, v = (np.concatenate([prompt[name][rows], one[name]]) for name in "qkv")
        out = attune.attention(q, k, v, cache=cache, prologue=prologue, causal=True,
                               cu_seqlens_q=np.array([0, size, size + 1], np.int32),
                               seqused_kv=np.array([done, decoded], np.int32), batch_invariant=True)
        outputs.append(out[:size])
        done, decoded = done + size, decoded + 1
    return np.concatenate(outputs)


whole = prefill([300])
for chunks in ([128, 128, 44], [1, 299], [100] * 3):
    cut = prefill(chunks)
    # A token is exact in its own chunk and rounded to float8 afterwards; nothing else differs.
    error = np.abs(cut - whole).max()
    print(f"chunks {chunks}: largest difference {error:.3f}")
    assert error < 0.2

turned = attune.qkv_prepare(prompt["q"], prompt["k"], prologue=attune.Prologue(rope_cos_sin=prologue.rope_cos_sin))
keys, values = (np.repeat(x, HEADS_Q // HEADS_KV, axis=1).astype(np.float64) for x in (turned[1], prompt["v"]))
scores = np.einsum("qhd,khd->hqk", turned[0].astype(np.float64), keys) / np.sqrt(DIM)
scores[:, ~np.tri(300, dtype=bool)] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
want = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
print(f"whole prompt against numpy: {np.abs(whole - want).max():.1e}")
assert np.abs(whole - want).max() < 1e-4
