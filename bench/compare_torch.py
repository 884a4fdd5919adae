#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the attune command beside PyTorch, and onnxruntime and OpenVINO where installed, on the CPU.

All run in this session, in turns, with the same number of threads, each in the strongest form of its call (bench/peer_*.py); a
ratio above 1 means attune is faster. Peers get dense [batch, heads, seqlen, head_dim] tensors, so for decode they are spared the
page table. bench/side_by_side.py --device cpu compares results, too; this needs no attune package. Without torch the script says
so and exits with 0.

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
import types

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


def tensors_of(torch, shape):
    """The case as peers take it, its keys dense."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[shape["dtype"]]
    lengths_q, lengths_kv, heads, head_dim = shape["seqlens_q"], shape["seqlens_kv"], shape["heads"], shape["head_dim"]

    def normal(rows, count, dim):
        return torch.randn(rows, count, dim).to(dtype)

    return types.SimpleNamespace(
        device="cpu", kv="dense", equal=True, dtype=dtype, lengths_q=lengths_q, lengths_kv=lengths_kv, heads=tuple(heads),
        head_dim=tuple(head_dim), scale=head_dim[0] ** -0.5,
        causal=shape["causal"] and lengths_q[0] > 1,  # one query sees every key
        q=normal(sum(lengths_q), heads[0], head_dim[0]), k=normal(sum(lengths_kv), heads[1], head_dim[0]),
        v=normal(sum(lengths_kv), heads[1], head_dim[1]))


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

    from peers import load_peers, pairs_of
    from timing import seconds_of
    peers = load_peers([], "cpu")
    attune = find_attune(options.attune)
    print(f"attune: {attune}; torch {torch.__version__}; {'; '.join(m.version() for m in peers if hasattr(m, 'version'))}")
    print(f"{options.threads} threads; medians of {options.rounds} turns")
    print(f"{'case':<34} {'attune ms':>11}   peer ms and ratio, with its spread")
    results = []
    for name in case_names(attune, options.filter):
        ours, theirs, calls, entry = [], {}, None, None
        for _ in range(options.rounds):
            seconds, entry = run_attune(attune, name, options.threads, options.min_time)
            reason = comparable(entry["shape"])
            if reason:
                print(f"{name:<34} left out: {reason}")
                break
            if calls is None:
                case = tensors_of(torch, entry["shape"])
                calls = {peer: call for module in peers for peer, (call, _) in pairs_of(module.prepare(case), module).items()}
            ours.append(seconds)
            for peer, call in calls.items():
                theirs.setdefault(peer, []).append(seconds_of(call, "cpu", options.min_time / 5, 5, 0.0))
        if len(ours) < options.rounds:
            continue
        a, shape = statistics.median(ours), entry["shape"]
        dtype, cache = shape["dtype"], shape.get("cache_dtype", shape["dtype"])
        texts = []
        for peer, seconds in theirs.items():
            ratios = [y / x for x, y in zip(ours, seconds)]
            b = statistics.median(seconds)
            texts.append(f"{peer} {b * 1e3:.3f}, {b / a:.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
        note = "" if cache == dtype else f"   (cache {cache}; peers read {dtype})"
        print(f"{name:<34} {a * 1e3:>11.3f}   {'; '.join(texts)}{note}", flush=True)
        results.append({"name": name, "attune_seconds": ours, "peer_seconds": theirs, "shape": shape,
                        "ratios": {peer: statistics.median(seconds) / a for peer, seconds in theirs.items()}})
    if options.json:
        report = {"torch": torch.__version__, "threads": options.threads, "results": results}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
