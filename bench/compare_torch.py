#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attune and PyTorch's scaled_dot_product_attention on the same shapes of the bench set, on the CPU.

Both run in this session, in turns, with the same number of threads; a ratio above 1 means attune is faster.
PyTorch gets dense [batch, heads, seqlen, head_dim] tensors, so for decode it is spared the page table. Without torch
the script says so and exits with 0.

usage: bench/compare_torch.py [--attune PATH] [--threads N] [--rounds N] [--filter REGEX] [--json FILE]
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

DEFAULT_FILTER = (r"^bench/(prefill_2k|prefill_512x4|prefill_2k_full)/|^bench/decode_4k/(bf16|f16|f32|e4m3|i8)$|"
                  r"^bench/decode_16k_b1$")


def find_attune(given):
    """The attune command: as given, or the newest build below build/."""
    if given:
        return given
    root = pathlib.Path(__file__).resolve().parent.parent
    found = [*root.glob("build/cli/attune"), *root.glob("build/*/cli/attune")]
    built = [p for p in found if os.access(p, os.X_OK)]
    if not built:
        sys.exit("no attune command below build/; build it first, or give --attune PATH")
    return str(max(built, key=lambda p: p.stat().st_mtime))


def run_attune(attune, name, threads, min_time):
    """One timing of one case by attune bench. Seconds of a run, and the entry of its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "bench.json"
        command = [attune, "bench", "--device", "cpu", "--filter", f"^{re.escape(name)}$", "--threads", str(threads)]
        command += ["--min-time", str(min_time), "--no-ceilings", "--no-check", "--json", str(report)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()}")
        result = json.loads(report.read_text())["results"][0]
    return result["seconds"]["median"], result


def case_names(attune, expression):
    command = [attune, "bench", "--device", "cpu", "--list", "--filter", expression]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        sys.exit(listed.stderr.strip())
    return listed.stdout.split()


class TorchCase:
    """The same attention by torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, torch, shape):
        self.torch = torch
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[shape["dtype"]]
        batch, (heads_q, heads_kv), (dim_qk, dim_v) = len(shape["seqlens_q"]), shape["heads"], shape["head_dim"]
        n_q, n_kv = shape["seqlens_q"][0], shape["seqlens_kv"][0]
        self.q = torch.randn(batch, heads_q, n_q, dim_qk).to(dtype)
        self.k = torch.randn(batch, heads_kv, n_kv, dim_qk).to(dtype)
        self.v = torch.randn(batch, heads_kv, n_kv, dim_v).to(dtype)
        # One query sees every key: causality is moot, and is_causal of torch aligns to the top left.
        self.causal = shape["causal"] and n_q > 1
        self.grouped = heads_q != heads_kv

    def run(self):
        attention = self.torch.nn.functional.scaled_dot_product_attention
        with self.torch.inference_mode():
            if not self.grouped:
                return attention(self.q, self.k, self.v, is_causal=self.causal)
            return attention(self.q, self.k, self.v, is_causal=self.causal, enable_gqa=True)

    def seconds(self, min_time):
        self.run()
        times, start = [], time.perf_counter()
        while len(times) < 5 or time.perf_counter() - start < min_time:
            begin = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def comparable(shape):
    """Why torch cannot run this shape; None if it can."""
    if shape["kv"] == "slots" or shape["new_tokens"]:
        return "no counterpart in torch"
    if len(set(shape["seqlens_q"])) > 1 or len(set(shape["seqlens_kv"])) > 1:
        return "ragged"
    if shape["window"] != [-1, -1]:
        return "window"
    if shape["causal"] and shape["seqlens_q"][0] not in (1, shape["seqlens_kv"][0]):
        return "causal with more keys than queries"
    if shape["dtype"] not in ("f32", "f16", "bf16"):
        return "dtype"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attune", help="the attune command (default: the newest below build/)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of both (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns for each case; the median counts (%(default)s)")
    parser.add_argument("--min-time", type=float, default=0.5, help="seconds of each turn at least (%(default)s)")
    parser.add_argument("--filter", default=DEFAULT_FILTER, help="cases of the bench set, a regular expression")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    if options.threads < 1 or options.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")

    try:
        import torch
    except ImportError:
        print("PyTorch is not installed for this Python, so there is nothing to compare with (pip install torch).")
        return 0
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)

    attune = find_attune(options.attune)
    print(f"attune: {attune}; torch {torch.__version__}; {options.threads} threads; medians of {options.rounds} turns")
    print(f"{'case':<34} {'attune ms':>11} {'torch ms':>11} {'ratio':>7}   spread of the ratio")
    results = []
    for name in case_names(attune, options.filter):
        ours, theirs, torch_case, entry = [], [], None, None
        for _ in range(options.rounds):
            seconds, entry = run_attune(attune, name, options.threads, options.min_time)
            reason = comparable(entry["shape"])
            if reason:
                print(f"{name:<34} left out: {reason}")
                break
            if torch_case is None:
                try:
                    torch_case = TorchCase(torch, entry["shape"])
                    torch_case.run()
                except (RuntimeError, TypeError) as error:
                    print(f"{name:<34} left out: torch refuses it: {str(error).splitlines()[0]}")
                    break
            ours.append(seconds)
            theirs.append(torch_case.seconds(options.min_time))
        if len(theirs) < options.rounds:
            continue
        ratios = [b / a for a, b in zip(ours, theirs)]
        a, b = statistics.median(ours), statistics.median(theirs)
        cache = entry["shape"].get("cache_dtype", entry["shape"]["dtype"])
        dtype = entry["shape"]["dtype"]
        note = "" if cache == dtype else f"   (cache {cache}; torch reads {dtype})"
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        print(f"{name:<34} {a * 1e3:>11.3f} {b * 1e3:>11.3f} {b / a:>7.2f}   {spread}{note}", flush=True)
        results.append({"name": name, "attune_seconds": ours, "torch_seconds": theirs, "ratio": b / a,
                        "shape": entry["shape"]})
    if options.json:
        report = {"torch": torch.__version__, "threads": options.threads, "results": results}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
