# SPDX-License-Identifier: Apache-2.0
"""A continuous-batching engine in small: requests come and go, and each step batches chunks of prompts with decoding sequences.

The model is a toy with random weights. The tokens of every request must be those of a loop that serves it alone, with plain attention
in float64 and no cache. docs/engine.md explains the parts.
usage: continuous_batching.py [cpu | cuda]
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import attune

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, HIDDEN, LAYERS, HEADS_Q, HEADS_KV, DIM, THETA = 97, 64, 2, 4, 2, 32, 10000.0
PAGE_SIZE, PAGES, MAX_PAGES = 16, 12, 6  # the pool of a layer, and the most pages of one sequence
SLOTS, BUDGET = 4, 24  # most sequences of a step, and most new tokens

torch.manual_seed(0)
WEIGHTS = (torch.randn(VOCAB, HIDDEN), torch.randn(LAYERS, HIDDEN, (HEADS_Q + 2 * HEADS_KV) * DIM) / HIDDEN**0.5 * 2,
           torch.randn(LAYERS, HEADS_Q * DIM, HIDDEN) / (HEADS_Q * DIM) ** 0.5, torch.randn(HIDDEN, VOCAB))

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def forward(weights: tuple[torch.Tensor, ...], tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Logits [tokens, VOCAB]. attend(layer, q, k, v) takes and gives [tokens, heads, DIM]."""
    embedding, qkv, out, head = weights
    x = embedding[tokens]
    for layer in range(LAYERS):
        heads = torch.unflatten(torch.nn.functional.rms_norm(x, (HIDDEN,)) @ qkv[layer], -1, (-1, DIM))
        q, k, v = torch.split(heads, [HEADS_Q, HEADS_KV, HEADS_KV], dim=1)  # views of one buffer
        x = x + attend(layer, q, k, v).flatten(1) @ out[layer]
    return torch.nn.functional.rms_norm(x, (HIDDEN,)) @ head


@dataclass
class Request:
    arrives: int  # the step
    prompt: list[int]
    max_new: int
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    cached: int = 0  # how many of them are in the cache
    pages: list[int] = field(default_factory=list)


class Engine:
    def __init__(self) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        self.weights = tuple(w.to(DEVICE) for w in WEIGHTS)
        self.free = list(range(PAGES))
        self.slots: list[Request | None] = [None] * SLOTS
        # What a step reads. Shapes and addresses never change; the engine writes contents only.
        self.tokens = zeros(BUDGET, dtype=torch.int64)
        self.starts = zeros(SLOTS + 1, dtype=torch.int32)
        self.lengths = zeros(SLOTS, dtype=torch.int32)
        self.table = zeros(SLOTS, MAX_PAGES, dtype=torch.int32)
        self.caches = [attune.KVCache(zeros(PAGES, PAGE_SIZE, HEADS_KV, DIM), zeros(PAGES, PAGE_SIZE, HEADS_KV, DIM), page_table=self.table)
                       for _ in range(LAYERS)]
        self.out = zeros(BUDGET, HEADS_Q, DIM)
        # One plan for the largest step: it takes smaller ones, and every layer.
        q, k = zeros(BUDGET, HEADS_Q, DIM), zeros(BUDGET, HEADS_KV, DIM)
        rope = attune.rope_table(MAX_PAGES * PAGE_SIZE, DIM, theta=THETA, like=q)
        self.plan = attune.Plan(q, k, k, cache=self.caches[0], cu_seqlens_q=self.starts, seqused_kv=self.lengths, causal=True,
                                max_seqlen_q=BUDGET, prologue=attune.Prologue(rope_cos_sin=rope, append=True), out=self.out)

    def admit(self, waiting: list[Request]) -> None:
        """Requests get a slot and all pages that they may need; others wait."""
        for i in range(SLOTS):
            if self.slots[i] is None and waiting:
                pages = -(-(len(waiting[0].prompt) + waiting[0].max_new) // PAGE_SIZE)
                if pages > len(self.free):
                    return
                request = self.slots[i] = waiting.pop(0)
                request.pages = [self.free.pop() for _ in range(pages)]
                request.tokens = list(request.prompt)
                self.table[i, :pages] = torch.tensor(request.pages, dtype=torch.int32)

    def step(self) -> list[int]:
        """One pass of the model. Returns how many new tokens each slot had: 1 where it decodes, more for a chunk of a prompt."""
        counts, left = [0] * SLOTS, BUDGET
        in_turn = sorted(range(SLOTS), key=lambda i: len(r.tokens) - r.cached if (r := self.slots[i]) else 0)
        for i in in_turn:  # decoding sequences first, prompts share what is left
            if (request := self.slots[i]) is not None:
                counts[i] = min(left, len(request.tokens) - request.cached)
                left -= counts[i]
        new = [token for i, r in enumerate(self.slots) if r for token in r.tokens[r.cached : r.cached + counts[i]]]
        self.tokens[: len(new)] = torch.tensor(new)
        self.starts[1:] = torch.tensor(counts).cumsum(0)
        self.lengths[:] = torch.tensor([r.cached if r else 0 for r in self.slots])

        self.plan.schedule()  # once a step: all layers have these lengths
        logits = forward(self.weights, self.tokens, self.attend)
        best = logits[(self.starts[1:] - 1).clamp(min=0).long()].argmax(-1).tolist()  # of each slot's last row

        for i, request in enumerate(self.slots):
            if request is None:
                continue
            request.cached += counts[i]
            if request.cached == len(request.tokens):  # the prompt is in, or this was a decode step
                request.tokens.append(best[i])
            if len(request.tokens) == len(request.prompt) + request.max_new:
                self.free += request.pages
                self.slots[i] = None
        return counts

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """RoPE, append to the cache, and attention over it: one call."""
        self.plan.run_scheduled(q=q, k=k, v=v, cache=self.caches[layer])
        return self.out


def alone(request: Request) -> list[int]:
    """The same tokens one at a time, everything computed again for each, in float64."""
    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        c, s, (a, b) = angles.cos()[:, None], angles.sin()[:, None], x.chunk(2, dim=-1)
        return torch.cat([c * a - s * b, c * b + s * a], dim=-1)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, dim=1) for x in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", turned(q), k) / DIM**0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    weights = tuple(w.double() for w in WEIGHTS)
    tokens = list(request.prompt)
    for _ in range(request.max_new):
        logits = forward(weights, torch.tensor(tokens), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def main() -> None:
    shapes = [(0, 5, 20), (0, 40, 6), (2, 1, 30), (3, 33, 9), (3, 17, 1), (9, 60, 12), (10, 8, 25), (25, 30, 3)]  # arrives, prompt, new
    requests = [Request(at, torch.randint(VOCAB, (n,)).tolist(), new) for at, n, new in shapes]
    engine, waiting, steps, mixed = Engine(), list(requests), 0, 0
    print(engine.plan.describe().strip())
    while waiting or any(engine.slots):
        here = [request for request in waiting if request.arrives <= steps]
        waiting = [request for request in waiting if request.arrives > steps]
        engine.admit(here)
        waiting = here + waiting
        counts = engine.step()
        mixed += 1 in counts and max(counts) > 1
        steps += 1
    for request in requests:
        assert request.tokens == alone(request), request
    assert mixed > 3 and sorted(engine.free) == list(range(PAGES))
    print(f"{len(requests)} requests in {steps} steps on {DEVICE}, {mixed} of them with prompts and decoding side by side: the tokens of each alone")


if __name__ == "__main__":
    main()
