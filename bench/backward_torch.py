#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the backward of attention by attune and by PyTorch's scaled_dot_product_attention, in turns, on one device.

Needs the attune package and PyTorch. The cases are those that `attune bench` times: tests/cases/bench_backward.json on a GPU, the
backward's rows of tests/cases/bench.json on the CPU. On a GPU PyTorch runs with cuDNN and with flash attention, which take 16
bits alone, of fp32 with its memory-efficient kernel and by products ("math"); on the CPU with whatever it chooses; ragged cases are attune's alone. Both are asked through torch.autograd.grad, forward not counted. (T|G)FLOP/s
count five products, 2 (3 head_dim_qk + 2 head_dim_v) operations for every visible pair of a query head and a key. Errors are
|x - exact| / |exact| of the first sequence and KV head against float64: the largest of dq, dk and dv. "bits": whether --repeats
further runs gave the same.

usage: bench/backward_torch.py [--device cuda|cpu] [--rounds N] [--repeats N] [--filter REGEX] [--no-torch] [--json FILE]
"""

import argparse
import copy
import json
import pathlib
import re
import statistics
import sys

import attune
import torch
from tensors import DTYPES
from timing import seconds_of
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = pathlib.Path(__file__).resolve().parent.parent / "tests/cases"
BACKENDS = {"cuda": {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
                     "mem": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}, "cpu": {"torch": None}}
OF_FP32 = {"mem", "math"}
SECONDS = {"cuda": 0.04, "cpu": 0.5}  # of one measurement, about


def rows_of(device):
    """The table's rows of the backward, sweeps of dtype expanded."""
    table = json.loads((CASES / ("bench_backward.json" if device == "cuda" else "bench.json")).read_text())
    for row in table["cases"]:
        if "backward" not in row:
            continue
        for dtype in row.get("sweep", {}).get("dtype", [None]):
            one = copy.deepcopy(row)
            if dtype is not None:
                one["dtype"] = dtype
                one["name"] += f"/dtype={dtype}"
            yield one


class Case:
    """Tensors of one row of the table. Queries are the keys."""

    def __init__(self, row, device):
        lengths = row["seqlens_q"]
        self.lengths = lengths if isinstance(lengths, list) else [lengths] * row["batch"]
        if row.get("seqlens_kv", lengths) != lengths or set(row) & {"window", "softcap", "sinks", "alibi", "bias", "t5_buckets"}:
            sys.exit(f"{row['name']}: PyTorch has no such case")
        self.name, self.causal, self.fixed = row["name"], row.get("causal", False), row.get("queries") == "fixed"
        self.is_fp32 = row["dtype"] == "f32"
        self.heads, self.head_dim = row["heads"], row["head_dim"]
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        self.flops = 2.0 * pairs * self.heads[0] * (3 * self.head_dim[0] + 2 * self.head_dim[1])
        shape = (len(self.lengths), self.lengths[0]) if self.fixed else (sum(self.lengths),)
        (heads_q, heads_kv), (dim_qk, dim_v) = self.heads, self.head_dim

        def normal(*dims):
            return torch.randn(*shape, *dims, device=device).to(DTYPES[row["dtype"]])

        self.inputs = [normal(heads_q, dim_qk), normal(heads_kv, dim_qk), normal(heads_kv, dim_v)]
        self.dout = normal(heads_q, dim_v)
        for x in self.inputs:
            x.requires_grad_()
        self.offsets = torch.tensor([0, *self.lengths], device=device).cumsum(0).to(torch.int32)

    def by_attune(self):
        """A call that gives dq, dk and dv."""
        q, k, v = self.inputs
        ragged = {} if self.fixed else {"cu_seqlens_q": self.offsets, "cu_seqlens_kv": self.offsets,
                                        "max_seqlen_q": max(self.lengths), "max_seqlen_kv": max(self.lengths)}
        out = attune.attention(q, k, v, causal=self.causal, **ragged)
        return lambda: torch.autograd.grad(out, self.inputs, self.dout, retain_graph=True)

    def by_torch(self, backend):
        if not self.fixed:
            raise RuntimeError("ragged")
        q, k, v = (x.transpose(1, 2) for x in self.inputs)
        attention = torch.nn.functional.scaled_dot_product_attention
        grouped = {"enable_gqa": True} if self.heads[0] != self.heads[1] else {}
        if backend is None:
            out = attention(q, k, v, is_causal=self.causal, **grouped)
        else:
            with sdpa_kernel(backend):
                out = attention(q, k, v, is_causal=self.causal, **grouped)
        dout = self.dout.transpose(1, 2)
        return lambda: torch.autograd.grad(out, self.inputs, dout, retain_graph=True)

    def first(self, x):
        """Rows of the first sequence, of the first KV head and its query heads: [rows, heads, dim]."""
        rows = x[0] if self.fixed else x[:self.lengths[0]]
        return rows[:, :rows.shape[1] // self.heads[1]]

    def exact(self):
        """dq, dk, dv of self.first in float64."""
        q, k, v = (self.first(x.detach()).double().requires_grad_() for x in self.inputs)
        dout, gradients, n = self.first(self.dout).double(), [], self.lengths[0]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1) if self.causal else None
        for head in range(q.shape[1]):  # one at a time: the scores of a head are gigabytes
            scores = q[:, head] @ k[:, 0].T * self.head_dim[0]**-0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            gradients.append(torch.autograd.grad(scores.softmax(-1) @ v[:, 0], (q, k, v), dout[:, head]))
        return [sum(of_head) for of_head in zip(*gradients)]


def measure(case, options):
    calls = {"attune": case.by_attune()}
    for name, backend in {} if options.no_torch else BACKENDS[options.device].items():
        if backend is not None and (name in OF_FP32) != case.is_fp32:
            continue
        try:
            call = case.by_torch(backend)
            call()
            calls[name] = call
        except RuntimeError:
            continue  # it has no kernel for the shape
    exact = case.exact()
    errors = {}
    for name, call in calls.items():
        errors[name] = [((case.first(x) - y).norm() / y.norm()).item() for x, y in zip(call(), exact)]
    del exact
    first = calls["attune"]()
    same = all(torch.equal(x, y) for _ in range(options.repeats) for x, y in zip(calls["attune"](), first))
    samples = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            samples[name].append(seconds_of(call, options.device, SECONDS[options.device]))
    return {"name": case.name, "flops": case.flops, "errors": errors, "same_bits": same,
            "seconds": {name: statistics.median(all_of_it) for name, all_of_it in samples.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="turns for each case; the median counts (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="runs whose bits are compared (%(default)s)")
    parser.add_argument("--filter", default="", help="cases, a regular expression")
    parser.add_argument("--no-torch", action="store_true", help="attune alone")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU; --device cpu needs none")
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    unit, scale = ("TFLOP/s", 1e-12) if options.device == "cuda" else ("GFLOP/s", 1e-9)
    names = ["attune", *BACKENDS[options.device]]
    print(f"{where}, torch {torch.__version__}; {unit}, and the largest relative error of each")
    print(f"{'case':34}  {'ms':>8} {' '.join(f'{name:>7}' for name in names)}  {' '.join(f'{name:>8}' for name in names)}  bits")
    results = []
    for row in rows_of(options.device):
        if not re.search(options.filter, row["name"]):
            continue
        case = Case(row, options.device)
        try:
            result = measure(case, options)
        except attune.Error as error:
            print(f"{case.name:34}  {error}")
            continue
        results.append(result)
        seconds = result["seconds"]
        rates = [f"{case.flops / seconds[name] * scale:7.0f}" if name in seconds else f"{'-':>7}" for name in names]
        errors = [f"{max(result['errors'][name]):8.1e}" if name in seconds else f"{'-':>8}" for name in names]
        print(f"{case.name:34}  {seconds['attune'] * 1e3:8.3f} {' '.join(rates)}  {' '.join(errors)}  "
              f"{'same' if result['same_bits'] else 'DIFFER'}", flush=True)
        del case
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0 if all(result["same_bits"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
