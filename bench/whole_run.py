#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every bench of a GPU, and makes the tables of bench/results of what they wrote.

usage: bench/whole_run.py FOLDER [--peer MODULE]...     all benches, their JSON into FOLDER
       bench/whole_run.py FOLDER --tables                the tables of FOLDER, in Markdown, to standard output

Needs the attune package, PyTorch, and `./dev microbench`'s programs in build/release/bench; what is missing is said and left out. A peer
is a module as side_by_side.py takes it. bench/vllm_layer.py runs where vLLM is installed.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parent
BUILD = BENCH.parent / "build/release"
DECODE = "bench_cuda/(bf16|group|8bit|fused|model)"
MICRO = ["--benchmark_out_format=json", "--benchmark_min_time=0.05"]


def commands(folder, peers):
    """(name, command) of each bench; each writes FOLDER/name.json."""
    def script(name, file, *arguments):
        return file, [sys.executable, BENCH / f"{name}.py", *arguments, "--json", folder / f"{file}.json"]

    yield "decode", [BUILD / "cli/attune", "bench", "--device", "cuda:0", "--filter", DECODE, "--min-time", "0.2", "--json", folder / "decode.json"]
    for name in ("indexer", "ops"):
        yield name, [BUILD / f"bench/cuda_{name}_bench", *MICRO, f"--benchmark_out={folder / name}.json"]
    yield script("compare_torch_cuda", "prompts", "--rounds", "1")
    yield script("mla_cuda", "latent", "--rounds", "1")
    yield script("backward_torch", "backward", "--rounds", "3", "--repeats", "10")
    yield script("side_by_side", "side", "--rest", "0.05", *[word for peer in peers for word in ("--peer", peer)])
    yield script("vllm_layer", "layer", "--rounds", "3")


def run_all(folder, peers):
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, command in commands(folder, peers):
        try:
            status = subprocess.run([str(word) for word in command], check=False).returncode
        except OSError as error:
            status = error
        if status != 0:
            failed.append(f"{name}: {status}")
    return failed


def table(*columns):
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)


def row(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def us(seconds):
    """Microseconds with three or four figures; "-" of None."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f}" if seconds < 999e-6 else f"{seconds * 1e6:.0f}"


def decode(report):
    ceiling = report["ceilings"]["read_gbps_all"]
    yield f"Shares are of {ceiling:,.0f} GB/s, which this card read at most in the same run."
    yield ""
    yield from table("case", "us", "GB/s", "share")
    for one in report["results"]:
        name = one["name"].removeprefix("bench_cuda/")
        yield row(name, f"{one['seconds']['median'] * 1e6:.2f}", f"{one['gbps']:.0f}", f"{100 * one['gbps'] / ceiling:.0f} %")


def prompts(results):
    peers = {"cudnn": "cuDNN", "flash": "flash", "effic.": "memory-efficient"}
    yield from table("case", "ms", "attune", "scheduled", *peers.values())
    for one in results:
        rates = {name: f"{one['flops'] / seconds * 1e-12:.0f}" for name, seconds in one["seconds"].items()}
        yield row(one["name"], f"{one['seconds']['attune'] * 1e3:.3f}", rates["attune"], rates["attune, scheduled"],
                  *[rates.get(peer, "-") for peer in peers])


def latent(results):
    yield from table("case", "us", "TFLOP/s", "GB/s", "run(), us")
    for one in results:
        yield row(one["name"], us(one["seconds"]), f"{one['flops'] / one['seconds'] * 1e-12:.0f}", f"{one['bytes'] / one['seconds'] * 1e-9:.0f}",
                  us(one["seconds_with_schedule"]))


def backward(results):
    peers = {"cudnn": "cuDNN", "flash": "flash", "mem": "memory-efficient"}
    yield from table("sequences x tokens, heads, d", "ms", "attune", *peers.values(), "error", *[f"error, {name}" for name in peers.values()])
    for one in results:
        rates = {name: f"{one['flops'] / seconds * 1e-12:.0f}" for name, seconds in one["seconds"].items()}
        errors = {name: f"{max(each):.1e}" for name, each in one["errors"].items()}
        yield row(one["name"], f"{one['seconds']['attune'] * 1e3:.3f}", rates["attune"], *[rates.get(peer, "-") for peer in peers],
                  errors.get("attune", "-"), *[errors.get(peer, "-") for peer in peers])


def side(results, about):
    peers = list(dict.fromkeys(peer for one in results for peer in one["ratios"]))
    yield f"{', '.join(about['peers'])}; {about['rounds']} rounds in turns, {about['rest']} s of rest before each figure, medians. Ratios"
    yield "above 1 are Attune's, one for each peer that has the case, without the schedule and with it; rms errors are relative, against"
    yield "float64, Attune's first."
    yield ""
    yield from table("case, us", "attune", *peers, "ratio", "with the schedule", "rms errors")
    for one in results:
        had = [peer for peer in peers if peer in one["ratios"]]
        times = [us(statistics.median(one["seconds"][name]["outside"])) if name in one["seconds"] else "-" for name in ("attune", *peers)]
        ratios = [", ".join(f"{one['ratios'][peer][which]['median']:.2f}" for peer in had) or "-" for which in ("outside", "inside")]
        yield row(one["name"], *times, *ratios, ", ".join(f"{one['errors'][name]['rms']:.2e}" for name in ("attune", *had)))


def layer(results):
    def cell(value):
        return "" if value is None else f"{value:.1f}"

    yield from table("step", "backend", "error", "attention", "cache update", "ratio", "host, layer", "host, update", "host, builder")
    for one in results:
        ratio = one["ratio"].get("attention")
        yield row(one["case"], one["backend"], f"{one['error']:.1e}", cell(one["us"]["gpu_attention"]), cell(one["us"].get("gpu_update")),
                  "" if ratio is None else f"{ratio:.3f}", cell(one["us"]["host_attention"]), cell(one["us"].get("host_update")),
                  cell(one["us"]["host_builder"]))


def indexer(report):
    yield from table("batch", "queries", "keys", "TOPK", "SCORES", "SELECT")
    for one in report["benchmarks"]:
        shape = re.search(r"batch:(\d+)/queries:(\d+)/keys:(\d+)", one["name"])
        parts = re.search(r"scores ([\d.]+) us, select ([\d.]+) us", one["label"])
        yield row(*[f"{int(number):,}" for number in shape.groups()], f"{one['real_time']:.1f}", *parts.groups())


def ops(report):
    yield from table("operation", "us", "GB/s")
    for one in report["benchmarks"]:
        yield row(one["name"].split("/iterations")[0], f"{one['us']:.1f}", f"{one['GB/s']:,.0f}" if "GB/s" in one else "-")


SECTIONS = {
    "decode": ("Decode", """
`attune bench`, us by CUDA events, one query a sequence over a paged cache; GB/s count K, V and token scales once."""),
    "prompts": ("Prompts", """
`compare_torch_cuda.py`: TFLOP/s of `run()`, which schedules, and of `run_scheduled()`, beside PyTorch's backends; each figure after a
rest of 0.25 s, median of five loops of 20 ms."""),
    "latent": ("Latent caches", """
`mla_cuda.py`: us of `run_scheduled()`, TFLOP/s and GB/s of it, and us of `run()`; ragged: sequences of a sixteenth of the keys up to
all. What takes less than about 14 us is what the host took."""),
    "side": ("Beside other libraries", """
`side_by_side.py`. Calls are not graphs: a call that takes the GPU less than the library's host shows the host's time."""),
    "backward": ("The backward", """
`backward_torch.py`: TFLOP/s by 2 pairs heads (3 d_qk + 2 d_v), the largest relative error of dq, dk and dv against float64. Repeats had
the same bits; PyTorch's backends do not promise that."""),
    "layer": ("In vLLM", """
`vllm_layer.py`: us of GPU time a layer, 32 layers back to back behind a kernel that waits for the host; error against float64, relative
to the largest output. Attune's schedule is inside. Ratio: the median of the rounds' ratios. Host: us a layer, of its cache update, and of
the builder a step, medians of steps."""),
    "indexer": ("The indexer", """
`cuda_indexer_bench`, us: 64 heads of 128 channels, e4m3, topk 2,048."""),
    "ops": ("Cache operations", """
`cuda_ops_bench`."""),
}


def tables(folder):
    for name, (heading, intro) in SECTIONS.items():
        file = folder / f"{name}.json"
        if not file.exists():
            print(f"{file} is missing: no section '{heading}'", file=sys.stderr)
            continue
        found = json.loads(file.read_text())
        yield f"## {heading}"
        yield from intro.split("\n")
        yield ""
        yield from side(found["results"], found["about"]) if name == "side" else globals()[name](found)
        yield ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--peer", action="append", default=[], help="a module for side_by_side.py; may be repeated")
    parser.add_argument("--tables", action="store_true", help="no run: the tables of the folder's files")
    options = parser.parse_args()
    if options.tables:
        print("\n".join(tables(options.folder)).rstrip())
        return 0
    failed = run_all(options.folder, options.peer)
    for line in failed:
        print(f"whole_run: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
