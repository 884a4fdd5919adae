#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention of prompts by attune and by PyTorch's scaled_dot_product_attention on one GPU, in turns.

Needs the attune package, PyTorch and a GPU. PyTorch runs what it can of a shape, with cuDNN and with flash attention, and fp32
with its memory-efficient attention (on keys repeated for each head beforehand); where it can, results are compared too. TFLOP/s
count 2 (head_dim_qk + head_dim_v) operations for every visible pair of a query head and a key, GB/s keys and values of every
sequence once. Dense cases are a tensor of equal lengths, as PyTorch has them; others are ragged. "attune" is plan.run(), which
schedules each time, "sched." plan.run_scheduled(): one schedule serves all layers of a step. Before each figure the card
rests for a quarter of a second.

--kernel NAME takes that kernel of attune alone (ATTUNE_KERNEL); several are timed in turns, and their results compared with
the first one's:
    bench/compare_torch_cuda.py --filter ^mixed --kernel cuda_mixed --kernel cuda_prefill --kernel cuda_decode

usage: bench/compare_torch_cuda.py [--rounds N] [--filter REGEX] [--kernel NAME]... [--no-torch] [--json FILE]
"""

import argparse
import json
import os
import re
import statistics
import sys

import attune
import torch
from tensors import normal, offsets, paged, visible_pairs
from timing import seconds_of
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "effic.": SDPBackend.EFFICIENT_ATTENTION}


class Case:
    """One call of attune.attention, and of PyTorch's where it can do the same."""

    def __init__(self, name, lengths, heads, head_dim=(128, 128), causal=True, window=None, torch_runs=False,
                 equal=False, dtype=torch.bfloat16, **fields):
        self.name, self.causal, self.torch_runs, self.equal, self.dtype = name, causal, torch_runs, equal, dtype
        self.lengths, self.heads, self.head_dim, self.window, self.fields = lengths, heads, head_dim, window, fields
        pairs = sum(visible_pairs(n_q, n_kv, causal, window) for n_q, n_kv in lengths)
        self.flops = 2.0 * pairs * heads[0] * sum(head_dim)
        self.bytes = sum(n_kv for _, n_kv in lengths) * heads[1] * sum(head_dim) * dtype.itemsize

    def build(self):
        """The arrays."""
        n_q = [n for n, _ in self.lengths]
        total, (heads_q, heads_kv), (dim_qk, dim_v) = sum(n_q), self.heads, self.head_dim
        rows = (len(n_q), n_q[0]) if self.equal else (total,)
        self.q = normal(*rows, heads_q, dim_qk, dtype=self.dtype)
        arguments = {"causal": self.causal}
        if not self.equal:
            arguments["cu_seqlens_q"] = offsets(n_q)
        if self.window is not None:
            arguments["window_left"] = self.window
        fields = dict(self.fields)
        cache = fields.pop("cache", None)
        if cache is None or fields.pop("new_tokens", False):
            arguments["k"] = normal(*rows, heads_kv, dim_qk, dtype=self.dtype)
            arguments["v"] = normal(*rows, heads_kv, dim_v, dtype=self.dtype)
            cached = [n_kv - n for n, n_kv in self.lengths]
        else:
            cached = [n_kv for _, n_kv in self.lengths]
        if cache is not None:
            arguments.update(paged(cached, heads_kv, dim_qk, dim_v, **cache))
        for name, make in fields.items():
            arguments[name] = make(heads_q) if callable(make) else make
        self.arguments = arguments
        self.out = torch.empty(*rows, heads_q, dim_v, device="cuda",
                               dtype=torch.float32 if self.dtype == torch.float32 else torch.bfloat16)

    def plan(self, kernel):
        """By that kernel, or by the one that attune chooses."""
        kept = os.environ.pop("ATTUNE_KERNEL", None)
        if kernel or kept:
            os.environ["ATTUNE_KERNEL"] = kernel or kept
        try:
            return attune.Plan(self.q, out=self.out, **self.arguments)
        finally:
            os.environ.pop("ATTUNE_KERNEL", None)
            if kept:
                os.environ["ATTUNE_KERNEL"] = kept

    def torch_call(self):
        n_q, batch = self.lengths[0][0], len(self.lengths)
        q, k, v = (x.view(batch, n_q, *x.shape[-2:]).transpose(1, 2)
                   for x in (self.q, self.arguments["k"], self.arguments["v"]))
        grouped = self.heads[0] != self.heads[1]
        if self.dtype == torch.float32 and grouped:
            k, v = (x.repeat_interleave(self.heads[0] // self.heads[1], dim=1) for x in (k, v))
            grouped = False
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)


def dense(batch, seqlen, heads, head_dim=(128, 128), causal=True, **fields):
    name = f"dense/{batch}x{seqlen}_{heads[0]}_{heads[1]}_d{head_dim[0]}_{head_dim[1]}{'' if causal else '_full'}"
    return Case(name, [(seqlen, seqlen)] * batch, heads, head_dim, causal, torch_runs=True, equal=True, **fields)


def codes(batch, seqlen, heads, head_dim=(128, 128), causal=True):
    """Queries, keys and values of e4m3."""
    case = dense(batch, seqlen, heads, head_dim, causal, dtype=torch.float8_e4m3fn)
    case.name, case.torch_runs = case.name.replace("dense/", "e4m3/"), False
    return case


def floats(batch, seqlen, heads, head_dim=(128, 128), causal=True):
    """Queries, keys and values of fp32."""
    case = dense(batch, seqlen, heads, head_dim, causal, dtype=torch.float32)
    case.name = case.name.replace("dense/", "fp32/")
    return case


def chunk(name, batch, context, new, new_tokens=True, window=None, head_dim=(128, 128), **cache):
    return Case(f"chunk/{batch}x{context}+{new}_{name}", [(new, context + new)] * batch, (32, 8), head_dim, window=window,
                cache=cache, new_tokens=new_tokens)


def mixed(name, prompts, steps, new_tokens=True, **cache):
    """A step of continuous batching: (sequences, new tokens, keys) of prompts' chunks, and of sequences that decode."""
    lengths = [(new, keys) for count, new, keys in (prompts, steps) for _ in range(count)]
    label = "+".join(f"{count}x{new}_of_{keys}" for count, new, keys in (prompts, steps))
    # In turn, as they come.
    lengths = [lengths[i] for i in sorted(range(len(lengths)), key=lambda i: i * 37 % len(lengths))]
    case = Case(f"mixed/{label}_{name}", lengths, (32, 8), cache=cache, new_tokens=new_tokens, max_seqlen_q=prompts[1])
    if "dtype" in cache:
        case.bytes = case.bytes // case.dtype.itemsize * cache["dtype"].itemsize
    return case


def long_prompt(name, seqlen=16384, **fields):
    return Case(f"long/{name}", [(seqlen, seqlen)], (32, 8), **fields)


def ragged(batch):
    torch.manual_seed(1)
    lengths = torch.logspace(torch.tensor(17.0).log2(), 13, batch, base=2).round().int().tolist()
    return [(lengths[i], lengths[i]) for i in torch.randperm(batch).tolist()]


CASES = [
    dense(2, 8192, (16, 16)),
    dense(2, 8192, (16, 16), causal=False),
    dense(1, 16384, (32, 8)),
    dense(4, 4096, (32, 8)),
    dense(16, 1024, (32, 8)),
    dense(2, 8192, (16, 16), (192, 128)),
    dense(2, 8192, (16, 16), (192, 128), causal=False),
    dense(2, 8192, (128, 128), (192, 128)),
    dense(2, 8192, (32, 32), (64, 64)),
    dense(2, 8192, (16, 16), (96, 96)),
    dense(2, 8192, (16, 8), (256, 256)),
    dense(4, 4096, (32, 8), (100, 100)),
    codes(1, 16384, (32, 8)),
    codes(1, 16384, (32, 8), causal=False),
    codes(2, 8192, (16, 16)),
    codes(2, 8192, (16, 16), causal=False),
    codes(4, 4096, (32, 8)),
    codes(2, 8192, (32, 32), (64, 64)),
    codes(2, 8192, (16, 16), (192, 128)),
    floats(4, 4096, (32, 8)),
    floats(4, 4096, (32, 8), causal=False),
    floats(16, 1024, (32, 8)),
    floats(2, 8192, (32, 32), (64, 64)),
    floats(2, 8192, (16, 16), (192, 128)),
    floats(2, 8192, (16, 8), (256, 256)),
    chunk("p16", 8, 4096, 1024, page_size=16),
    chunk("p16", 1, 32768, 4096, page_size=16),
    chunk("p16_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16),
    chunk("p64_all_cached", 8, 4096, 1024, new_tokens=False, page_size=64),
    chunk("hnd_p16_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16, layout="hnd"),
    chunk("xpacked_p16", 8, 4096, 1024, page_size=16, layout="xpacked"),
    chunk("xpacked_p16_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16, layout="xpacked"),
    chunk("xpacked_p32_all_cached", 8, 4096, 1024, new_tokens=False, page_size=32, layout="xpacked"),
    chunk("xpacked_p48_all_cached", 8, 4096, 1024, new_tokens=False, page_size=48, layout="xpacked"),
    chunk("xpacked_p8_all_cached", 8, 4096, 1024, new_tokens=False, page_size=8, layout="xpacked"),
    chunk("xpacked_p20_all_cached", 8, 4096, 1024, new_tokens=False, page_size=20, layout="xpacked"),
    chunk("xpacked_p24", 8, 4096, 1024, page_size=24, layout="xpacked"),
    chunk("xpacked_p24_all_cached", 8, 4096, 1024, new_tokens=False, page_size=24, layout="xpacked"),
    chunk("xpacked_p24_all_cached", 8, 4096, 32, new_tokens=False, page_size=24, layout="xpacked"),
    chunk("d100_p16_all_cached", 8, 4096, 1024, new_tokens=False, head_dim=(100, 100), page_size=16),
    chunk("p16_e4m3", 8, 4096, 1024, page_size=16, dtype=torch.float8_e4m3fn),
    chunk("p16_e4m3_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16, dtype=torch.float8_e4m3fn),
    chunk("p64_e4m3_all_cached", 8, 4096, 1024, new_tokens=False, page_size=64, dtype=torch.float8_e4m3fn),
    chunk("p16_int8_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16, dtype=torch.int8),
    chunk("xpacked_p16_e4m3", 8, 4096, 1024, page_size=16, layout="xpacked", dtype=torch.float8_e4m3fn),
    chunk("xpacked_p16_e4m3_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16, layout="xpacked",
          dtype=torch.float8_e4m3fn),
    chunk("xpacked_p32_e4m3_all_cached", 8, 4096, 1024, new_tokens=False, page_size=32, layout="xpacked",
          dtype=torch.float8_e4m3fn),
    chunk("xpacked_p64_e4m3_all_cached", 8, 4096, 1024, new_tokens=False, page_size=64, layout="xpacked",
          dtype=torch.float8_e4m3fn),
    chunk("xpacked_p48_e4m3_all_cached", 8, 4096, 1024, new_tokens=False, page_size=48, layout="xpacked",
          dtype=torch.float8_e4m3fn),
    chunk("xpacked_p16_int8_all_cached", 8, 4096, 1024, new_tokens=False, page_size=16, layout="xpacked",
          dtype=torch.int8),
    Case("ragged/64_17_to_8192", ragged(64), (32, 8)),
    mixed("p16", (2, 2048, 8192), (62, 1, 8192), page_size=16),
    mixed("p16_all_cached", (2, 2048, 8192), (62, 1, 8192), new_tokens=False, page_size=16),
    mixed("p16_all_cached", (1, 512, 2048), (127, 1, 2048), new_tokens=False, page_size=16),
    mixed("p16_all_cached", (2, 2048, 8192), (62, 4, 8192), new_tokens=False, page_size=16),
    mixed("p16_all_cached", (2, 2048, 2048), (62, 1, 32768), new_tokens=False, page_size=16),
    mixed("p16_all_cached", (1, 8192, 8192), (63, 1, 1024), new_tokens=False, page_size=16),
    mixed("p16_all_cached", (8, 1024, 5120), (8, 1, 5120), new_tokens=False, page_size=16),
    mixed("p16_e4m3_all_cached", (2, 2048, 8192), (62, 1, 8192), new_tokens=False, page_size=16, dtype=torch.float8_e4m3fn),
    long_prompt("plain"),
    long_prompt("sinks", sinks=lambda heads: torch.randn(heads, device="cuda")),
    long_prompt("alibi", alibi_slopes=lambda heads: torch.tensor(attune.alibi_slopes(heads)).cuda()),
    long_prompt("softcap", softcap=30.0),
    long_prompt("softcap_50", softcap=50.0),
    long_prompt("softcap_5", softcap=5.0),
    long_prompt("window_1024_at_32k", seqlen=32768, window=1023),
]


def scheduled(kernel):
    return f"{kernel}, scheduled"


def measure(case, options):
    case.build()
    calls, plans, error, first = {}, {}, None, None
    for kernel in options.kernel or [None]:
        plan = plans[kernel or "attune"] = case.plan(kernel)
        case.out.zero_()
        plan.run()
        torch.cuda.synchronize()
        calls[kernel or "attune"] = plan.run
        calls[scheduled(kernel or "attune")] = plan.run_scheduled
        if first is None:
            first = case.out.float()
        else:
            error = max(error or 0.0, ((case.out.float() - first).norm() / first.norm()).item())
    del first
    if case.torch_runs and not options.no_torch:
        in_torch = case.torch_call()
        for name, backend in BACKENDS.items():
            if (name == "effic.") != (case.dtype == torch.float32):
                continue
            def with_backend(backend=backend):
                with sdpa_kernel(backend):
                    return in_torch()
            try:
                want = with_backend()
            except RuntimeError:
                continue
            calls[name] = with_backend
            want = want.transpose(1, 2).reshape(case.out.shape).float()
            error = ((case.out.float() - want).norm() / want.norm()).item()
    samples = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            samples[name].append(seconds_of(call))
    return {"name": case.name, "flops": case.flops, "bytes": case.bytes, "error": error,
            "plan": "\n".join(plan.describe().strip() for plan in plans.values()),
            "seconds": {name: statistics.median(all_of_it) for name, all_of_it in samples.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns for each case; the median counts (%(default)s)")
    parser.add_argument("--filter", default="", help="cases, a regular expression")
    parser.add_argument("--kernel", action="append", default=[], help="a kernel of attune by name; may be repeated")
    parser.add_argument("--no-torch", action="store_true", help="attune alone")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; TFLOP/s")
    columns = " ".join(f"{name:>7}" for name in ("attune", "sched.", *BACKENDS))
    print(f"{'case':40}  {'ms':>8} {'GB/s':>6} {columns}  {'error':>8}")
    results = []
    for case in CASES:
        if not re.search(options.filter, case.name):
            continue
        try:
            result = measure(case, options)
        except attune.Error as error:
            print(f"{case.name:40}  {error}")
            continue
        results.append(result)
        error = f"{result['error']:8.1e}" if result["error"] is not None else f"{'-':>8}"
        for kernel in options.kernel or ["attune"]:
            seconds = result["seconds"][kernel]
            rates = [f"{case.flops / result['seconds'][name] * 1e-12:7.0f}" if name in result["seconds"] else f"{'-':>7}"
                     for name in (kernel, scheduled(kernel), *BACKENDS)]
            print(f"{case.name:40}  {seconds * 1e3:8.3f} {case.bytes / seconds * 1e-9:6.0f} {' '.join(rates)}  {error}"
                  f"{'  ' + kernel if options.kernel else ''}", flush=True)
        del case.q, case.arguments, case.out
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
