#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the backward of attention beside a bias: with the bias's gradient, and without.

Needs the attune package and PyTorch. Both are asked through torch.autograd.grad, forward not counted. One head's dbias is compared
with float64, and "bits" says whether a second run gave the same.

usage: bench/backward_bias.py [--tokens N] [--batch N] [--heads N] [--head-dim N] [--dtype NAME] [--device NAME]
                              [--t5] [--shared] [--full]
"""

import argparse

import attune
import torch
from tensors import DTYPES
from timing import seconds_of


def exact_of_head(q, k, v, dout, bias, causal, head):
    """dbias of a head in float64, sequence by sequence and 512 queries at a time; [tokens, tokens]."""
    tokens = q.shape[1]
    total = torch.zeros(tokens, tokens, dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        x, y, z, w = (t[b, :, head].detach().double() for t in (q, k, v, dout))
        for first in range(0, tokens, 512):
            rows = slice(first, first + 512)
            s = x[rows] @ y.T / q.shape[-1] ** 0.5 + bias[rows].double()
            if causal:
                place = torch.arange(first, min(first + 512, tokens), device=q.device)[:, None]
                s.masked_fill_(torch.arange(tokens, device=q.device) > place, -torch.inf)
            p = s.softmax(-1)
            dp = w[rows] @ z.T
            total[rows] += p * (dp - (p * dp).sum(-1, keepdim=True))
    return total


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1])
    for name, value in (("tokens", 8192), ("batch", 2), ("heads", 16), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda")
    for name in ("t5", "shared", "full"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (args.batch, args.tokens, args.heads, args.head_dim)
    q, k, v = (torch.randn(shape, device=args.device).to(DTYPES[args.dtype]).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    if args.t5:
        fields = {"t5_bias": torch.randn(args.heads, 32, device=args.device), "t5_max_distance": 128}
        table = fields["t5_bias"]
    else:
        table = torch.randn(1 if args.shared else args.heads, args.tokens, args.tokens, device=args.device)
        fields = {"bias": table}
    causal = not args.full
    for with_table in (False, True):
        table.requires_grad_(with_table)
        inputs = (q, k, v, table) if with_table else (q, k, v)
        out = attune.attention(q, k, v, causal=causal, **fields)
        call = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)  # noqa: E731
        got = call()
        seconds = seconds_of(call, args.device, 0.1)
        note = ""
        if with_table:
            same = all(torch.equal(x, y) for x, y in zip(got, call()))
            note = f", bits {'repeat' if same else 'DIFFER'}"
            if not args.t5 and not args.shared:
                want = exact_of_head(q, k, v, dout, table[0].detach(), causal, 0)
                note += f", error of dbias {((got[3][0].double() - want).norm() / want.norm()).item():.2e}"
        print(f"{'with' if with_table else 'without'} the table's gradient: {seconds * 1e3:.2f} ms{note}", flush=True)
        del got, out


if __name__ == "__main__":
    main()
