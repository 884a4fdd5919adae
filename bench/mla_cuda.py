#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times MLA attention on one GPU: dense decode, sparse decode and sparse prefill.

Needs the attune package, PyTorch and a GPU. A time is that of plan.run_scheduled(): one schedule serves all layers of a step,
and peers too make their metadata before; what run() takes, which schedules each time, stands in a column of its own. Before each
figure the card rests for a quarter of a second.
TFLOP/s count 2 (head_dim_qk + head_dim_v) operations for every pair of a query head and a key that its sequence has, or its
list; GB/s the queries, every row of the cache that is read, once for each token of its own, and the output. One row of each
output is compared with float64 first.

usage: bench/mla_cuda.py [--rounds N] [--filter REGEX] [--json FILE]
"""

import argparse
import json
import re
import statistics
import sys

import attune
import torch
from tensors import MLA_QK as DIM_QK
from tensors import MLA_V as DIM_V
from tensors import mla_rows as rows_of
from tensors import tenth as normal
from timing import seconds_of


class Case:
    def __init__(self, name, tokens, heads, keys_a_token, rows_read):
        self.name, self.heads = name, heads
        self.flops = 2.0 * tokens * heads * keys_a_token * (DIM_QK + DIM_V)
        self.other_bytes, self.rows_read = 2.0 * tokens * heads * (DIM_QK + DIM_V), rows_read

    def finish(self, q, rows, **arguments):
        self.q, self.arguments = q, arguments
        self.out = torch.empty(*q.shape[:-1], DIM_V, device="cuda", dtype=torch.bfloat16)
        self.bytes = self.other_bytes + self.rows_read * rows.shape[-1] * rows.element_size()
        self.plan = attune.Plan(q, out=self.out, head_dim_v=DIM_V, **arguments)

    def error_of(self, q, keys, out):
        """q, out: the heads of one token; keys: what it sees."""
        p = torch.softmax(q.double() @ keys.T * DIM_QK**-0.5, dim=-1)
        want = p @ keys[:, :DIM_V]
        return ((out.double() - want).norm() / want.norm()).item()


class Decode(Case):
    """Over pages of 64 tokens. ragged: sequences of a sixteenth of the keys up to all, evenly."""

    def __init__(self, batch, seqlen_q, keys, heads, packed=False, ragged=False):
        name = f"decode/{batch}x{seqlen_q}x{keys}_h{heads}{'_656' if packed else ''}{'_ragged' if ragged else ''}"
        self.lengths = [keys * (1 + 15 * i // max(1, batch - 1)) // 16 if ragged else keys for i in range(batch)]
        every = sum(self.lengths)  # as peers count: all keys for all tokens
        super().__init__(name, batch * seqlen_q, heads, every / batch, every)
        self.batch, self.seqlen_q, self.keys, self.packed = batch, seqlen_q, keys, packed

    def build(self):
        pages = -(-self.keys // 64)
        rows, read = rows_of(self.batch * pages * 64, self.packed)
        table = torch.randperm(self.batch * pages, device="cuda", dtype=torch.int32).view(self.batch, pages)
        q = normal(self.batch, self.seqlen_q, self.heads, DIM_QK)
        if self.packed:
            cache = attune.KVCache(rows.view(-1, 64, 656), page_table=table, format="mla_656", layout="bytes")
        else:
            cache = attune.KVCache(rows.view(-1, 64, 1, DIM_QK), page_table=table)
        used = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        self.finish(q, rows, cache=cache, seqused_kv=used, causal=True)

        def check():
            last = (table[-1].long()[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)[:self.lengths[-1]]
            return self.error_of(q[-1, -1], read(last), self.out[-1, -1])
        return check


class Sparse(Case):
    """Decode from a pool of slots, or prefill over dense rows."""

    def __init__(self, kind, tokens, heads, topk, pool, packed=True, seqlen_q=1, invalid=0.0):
        name = f"{kind}/{tokens // seqlen_q}x{seqlen_q}_h{heads}_topk{topk}_of_{pool}"
        name += ("" if packed or kind == "prefill" else "_bf16") + (f"_{invalid:.0%}_invalid" if invalid else "")
        super().__init__(name, tokens, heads, topk * (1 - invalid), tokens * topk * (1 - invalid))
        self.kind, self.tokens, self.topk, self.pool, self.packed, self.invalid = kind, tokens, topk, pool, packed, invalid

    def build(self):
        rows, read = rows_of(self.pool, self.packed)
        q = normal(self.tokens, self.heads, DIM_QK)
        indices = torch.randint(self.pool, (self.tokens, self.topk), device="cuda", dtype=torch.int32)
        if self.invalid:
            indices[torch.rand(indices.shape, device="cuda") < self.invalid] = -1
        if self.kind == "prefill":
            self.finish(q, rows, k=rows.view(-1, 1, DIM_QK), indices=indices, cu_seqlens_q=ends(self.tokens),
                        cu_seqlens_kv=ends(self.pool))
        else:
            shape = (-1, 64, 656) if self.packed else (-1, 64, 1, DIM_QK)
            form = {"format": "mla_656", "layout": "bytes"} if self.packed else {}
            self.finish(q, rows, cache=attune.KVCache(rows.view(*shape), **form), indices=indices)

        def check():
            index = indices[-1].long()
            return self.error_of(q[-1], read(index[index >= 0]), self.out[-1])
        return check


def ends(count):
    return torch.tensor([0, count], dtype=torch.int32, device="cuda")


CASES = [
    Decode(128, 1, 4096, 128), Decode(128, 2, 4096, 128), Decode(128, 1, 8192, 128), Decode(128, 2, 8192, 128),
    Decode(128, 1, 32768, 128), Decode(132, 2, 16384, 128), Decode(128, 1, 8192, 64), Decode(128, 1, 8192, 32),
    Decode(128, 1, 8192, 96), Decode(128, 1, 8192, 24),
    Decode(128, 1, 8192, 16), Decode(128, 1, 32768, 16), Decode(64, 1, 4096, 16), Decode(1, 1, 131072, 128),
    Decode(128, 1, 8192, 128, packed=True), Decode(128, 1, 8192, 64, packed=True), Decode(128, 1, 8192, 32, packed=True),
    Decode(128, 1, 8192, 16, packed=True), Decode(128, 2, 8192, 16), Decode(128, 2, 8192, 16, packed=True),
    Decode(128, 1, 32768, 16, packed=True), Decode(128, 1, 32768, 32), Decode(128, 1, 32768, 32, packed=True),
    *[Decode(batch, 1, 8192, heads, ragged=True) for batch in (128, 90) for heads in (16, 64)],
    Decode(128, 1, 8192, 128, ragged=True), *[Decode(128, 1, 8192, heads, packed=True, ragged=True) for heads in (16, 32)],
    # Between rounds of the grid.
    *[Decode(batch, 1, 8192, 128) for batch in (40, 70, 96, 160)], *[Decode(batch, 1, 8192, 64) for batch in (90, 144)],
    Decode(144, 1, 8192, 16), Decode(96, 1, 8192, 16, packed=True), Decode(96, 1, 8192, 128, packed=True),
    Sparse("sparse", 70, 128, 2048, 1 << 20), Sparse("sparse", 96, 128, 2048, 1 << 20),
    Sparse("sparse", 96, 64, 2048, 1 << 20), Sparse("sparse", 144, 16, 2048, 1 << 20),
    Decode(600, 1, 1024, 128), Sparse("prefill", 600, 128, 2048, 32768, packed=False),
    Sparse("sparse", 128, 128, 2048, 1 << 20), Sparse("sparse", 256, 128, 2048, 1 << 20, seqlen_q=2),
    Sparse("sparse", 256, 128, 16384, 1 << 20, seqlen_q=2), Sparse("sparse", 64, 128, 2048, 1 << 20),
    Sparse("sparse", 16, 128, 2048, 1 << 20), Sparse("sparse", 256, 64, 2048, 1 << 20, seqlen_q=2),
    Sparse("sparse", 256, 32, 2048, 1 << 20, seqlen_q=2), Sparse("sparse", 256, 16, 2048, 1 << 20, seqlen_q=2),
    Sparse("sparse", 2, 128, 2048, 1 << 20), Sparse("sparse", 1, 128, 2048, 1 << 20), Sparse("sparse", 4, 128, 2048, 1 << 20),
    Sparse("sparse", 8, 128, 2048, 1 << 20), Decode(1, 1, 4096, 128), Decode(4, 1, 4096, 128), Decode(8, 1, 1024, 128),
    Sparse("sparse", 1, 128, 1024, 1 << 20), Sparse("sparse", 4, 128, 512, 1 << 20), Sparse("sparse", 4, 64, 2048, 1 << 20),
    Sparse("sparse", 8, 32, 2048, 1 << 20), Decode(1, 1, 1024, 128), Decode(8, 1, 512, 128),
    Sparse("sparse", 128, 128, 2048, 1 << 20, invalid=0.1), Sparse("sparse", 128, 128, 2048, 1 << 20, packed=False),
    Sparse("prefill", 4096, 128, 2048, 8192, packed=False), Sparse("prefill", 4096, 128, 2048, 32768, packed=False),
    Sparse("prefill", 4096, 128, 2048, 131072, packed=False), Sparse("prefill", 4096, 128, 512, 32768, packed=False),
    Sparse("prefill", 4096, 64, 2048, 32768, packed=False),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case; the median counts (%(default)s)")
    parser.add_argument("--filter", default="", help="cases, a regular expression")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':44} {'us':>9} {'TFLOP/s':>8} {'GB/s':>6} {'with sch.':>9} {'error':>8}")
    results = []
    for case in CASES:
        if not re.search(options.filter, case.name):
            continue
        torch.manual_seed(1)
        check = case.build()
        case.plan.run()
        error = check()
        whole = statistics.median(seconds_of(case.plan.run) for _ in range(options.rounds))
        case.plan.schedule()
        seconds = statistics.median(seconds_of(case.plan.run_scheduled) for _ in range(options.rounds))
        print(f"{case.name:44} {seconds * 1e6:9.1f} {case.flops / seconds * 1e-12:8.0f} {case.bytes / seconds * 1e-9:6.0f} "
              f"{whole * 1e6:9.1f} {error:8.1e}", flush=True)
        results.append({"name": case.name, "seconds": seconds, "seconds_with_schedule": whole, "flops": case.flops,
                        "bytes": case.bytes, "error": error})
        del check, case.q, case.arguments, case.out, case.plan
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
