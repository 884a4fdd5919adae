#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attune beside other libraries, in turns, on a GPU or the CPU. The cases are those of bench/side_by_side.json.

Outputs of every library are compared with float64 first, at 48 rows of q; one that is wrong is not timed, and fails the run. Then
come rounds of one figure of each call, one after the other. A ratio is their time by ours, above 1 where attune is faster: the
median of the rounds, and from the least to the most. "outside": without the schedule, as all layers of a step but the first run;
"inside": with it. A library without a schedule of its own stands with the same time in both. lse is written by attune always, and
by a peer as it does. Calls rotate over sets of random tensors that are larger together than twice the last cache. Joules are the
energy counter's (NVML; RAPL on the CPU), from one of its moves to another, at least --joules seconds and 10 moves later.

A peer is a Python module on the path, --peer NAME (repeatable); without one peer_torch, PyTorch's own attention, and on the CPU
peer_onnxruntime and peer_openvino where installed. It defines

    prepare(case) -> None | call | (call, call) | {name: call or (call, call)}
    NAME, version()         optional: what the table calls it, and what the report says of it

None: it has no such case. case has the tensors (side_cases.py says which); what a peer makes of them before the first call is not
timed. What it raises counts against the peer in that case, as what a call raises does. A call takes nothing and returns (out, lse) or out: [.., num_heads_q, head_dim_v] and [.., num_heads_q] in the order of
case.q, views will do; lse is the natural logarithm, or None. Of a pair the first call runs by a schedule made before, the second
makes it. prepare() is called once for each set of tensors. For example, for a library `other`:

    def prepare(case):
        if case.kv != "paged":
            return None
        metadata = other.schedule(case.seqused_kv)
        run = lambda made: other.decode(case.q, case.k, case.v, case.page_table, case.seqused_kv, made)
        return lambda: run(metadata), lambda: run(other.schedule(case.seqused_kv))

usage: bench/side_by_side.py [--device cuda|cpu|tiny] [--peer MODULE]... [--filter REGEX] [--rounds N] [--rest SECONDS]
                             [--joules SECONDS] [--cases FILE] [--json FILE] [--plot FILE]
"""

import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import sys

import attune
import torch
from peers import load_peers, pairs_of
from ratio_plot import ratio_plot
from side_cases import TABLE, Case, rows_of
from timing import MOVES, REST, energy_meter, joules_of, seconds_of, wait

OURS = "attune"
# Most that the rms error of a right output may be. Whose is smaller is in the table.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float8_e4m3fn: 1e-1, torch.int8: 1e-1}
LSE_BOUND = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float8_e4m3fn: 3e-1, torch.int8: 3e-1}
MOST_SETS = 8


def last_cache(device):
    """Bytes of the device's last cache."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    try:
        return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), os.sysconf("SC_LEVEL2_CACHE_SIZE"), 1 << 20)
    except (ValueError, OSError):
        return 32 << 20


def fault(problem):
    """An exception as the table shows it."""
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def calls_of(case, peers, faults):
    """{name: (without the schedule, with it)} of one set of tensors. Peers that cannot prepare are put into faults."""
    plan = case.plan()

    def ours():
        plan.run_scheduled()
        return case.out, case.lse

    def whole():
        plan.run()
        return case.out, case.lse

    plan.schedule()
    calls = {OURS: (ours, whole)}
    for module in peers:
        try:
            calls |= pairs_of(module.prepare(case), module)
        except Exception as problem:  # a peer's own, as in check()
            faults[getattr(module, "NAME", module.__name__)] = fault(problem)
    return calls, plan


def rotating(calls):
    """A call that takes the next of the sets each time."""
    at = -1

    def call():
        nonlocal at
        at = (at + 1) % len(calls)
        return calls[at]()
    return call


def output_of(result):
    return result if isinstance(result, tuple) else (result, None)


def check(case, calls):
    """Errors of each library, and what is wrong with some."""
    exact, errors, wrong = case.exact(), {}, {}
    for name, both in calls.items():
        for call in dict.fromkeys(both):
            try:
                error, lse = case.errors(*output_of(call()), exact)
            except Exception as problem:  # whatever a peer raises is its own, and the other cases go on
                wrong[name] = fault(problem)
                break
            errors[name] = {"rms": error, "lse": lse}
            if not error <= BOUNDS[case.dtype]:
                wrong[name] = f"rms error {error:.1e}, at most {BOUNDS[case.dtype]:.0e}"
            elif lse is not None and not lse <= LSE_BOUND[case.dtype]:
                wrong[name] = f"lse off by {lse:.1e}, at most {LSE_BOUND[case.dtype]:.0e}"
    return errors, wrong


def ratios_of(theirs, ours):
    each = [a / b for a, b in zip(theirs, ours)]
    return {"median": statistics.median(each), "least": min(each), "most": max(each)}


def measure(row, peers, options, meter):
    device = options.device
    case = Case(row, device, seed=1)
    sets = max(1, min(MOST_SETS, -(-2 * last_cache(device) // case.footprint))) if not options.tiny else 2
    cases = [case] + [Case(row, device, seed=2 + i) for i in range(sets - 1)]
    faults = {}
    prepared = [calls_of(one, peers, faults) for one in cases]
    errors, wrong = check(case, prepared[0][0])
    wrong |= faults
    names = [name for name in prepared[0][0] if name not in wrong and all(name in calls for calls, _ in prepared)]
    result = {"name": case.name, "row": row, "sets": sets, "flops": case.flops, "bytes": case.bytes, "errors": errors, "wrong": wrong,
              "plan": prepared[0][1].describe().strip(), "seconds": {}, "ratios": {}, "joules": {}}
    timed = {name: tuple(rotating([calls[name][i] for calls, _ in prepared]) for i in (0, 1)) for name in names}
    same = {name: prepared[0][0][name][0] is prepared[0][0][name][1] for name in names}
    samples = {name: ([], []) for name in names}
    turns = [(name, i) for name in names for i in (0, 1) if i == 0 or not same[name]]
    for _ in range(options.rounds):
        for name, i in turns:
            samples[name][i].append(seconds_of(timed[name][i], device, options.seconds, 1, options.rest))
            if same[name]:
                samples[name][1].append(samples[name][0][-1])
        turns.reverse()  # whoever comes after another library finds a cold cache
    for name, (outside, inside) in samples.items():
        result["seconds"][name] = {"outside": outside, "inside": inside}
        if name != OURS and OURS in samples:
            result["ratios"][name] = {"outside": ratios_of(outside, samples[OURS][0]), "inside": ratios_of(inside, samples[OURS][1])}
        if meter is not None and options.joules > 0:
            joules = joules_of(timed[name][0], device, meter, options.joules)
            if joules is not None:
                result["joules"][name] = joules
    return result


def duration(seconds):
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def lines_of(result, scale):
    """The rows of the table of one case: ours, then each peer."""
    for name in result["errors"]:
        error = result["errors"][name]
        lse = "-" if error["lse"] is None else f"{error['lse']:.0e}"
        line = f"  {name:18} rms {error['rms']:.2e} lse {lse:>6}"
        if name in result["seconds"]:
            outside, inside = (statistics.median(result["seconds"][name][key]) for key in ("outside", "inside"))
            joules = f"{result['joules'][name] * 1e3:.3g} mJ" if name in result["joules"] else "n/a"
            line += (f"  {duration(outside):>11} {duration(inside):>11} {result['flops'] / outside * scale:8.1f} "
                     f"{result['bytes'] / outside * 1e-9:7.1f} {joules:>10}")
        if name in result["ratios"]:
            line += "  " + "  ".join(f"{r['median']:.2f} ({r['least']:.2f}..{r['most']:.2f})" for r in result["ratios"][name].values())
        yield line
    for name, reason in result["wrong"].items():
        yield f"  {name:18} WRONG: {reason}"


def environment(options, peers, meter):
    if options.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")] \
            if os.path.exists("/proc/cpuinfo") else []
        where = f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
    versions = [module.version() for module in peers if hasattr(module, "version")]
    return {"device": where, "torch": torch.__version__, "attune": attune.__version__, "peers": versions, "rounds": options.rounds,
            "rest": options.rest, "energy": meter.source if meter else "n/a", "arguments": sys.argv[1:]}


def plot_of(about, results):
    title = f"Times as fast as each peer, schedule outside: {about['device']}, medians of {about['rounds']} rounds"
    return ratio_plot(title, [(r["name"], {peer: tuple(both["outside"][key] for key in ("median", "least", "most"))
                                           for peer, both in r["ratios"].items()}) for r in results])


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "tiny"], default="cuda",
                        help="tiny: the CPU, on small cases of every kind (%(default)s)")
    parser.add_argument("--peer", action="append", default=[], help="a module that defines prepare(case); may be repeated")
    parser.add_argument("--filter", default="", help="cases, a regular expression")
    parser.add_argument("--rounds", type=int, default=7, help="figures of each call; the median counts (%(default)s)")
    parser.add_argument("--rest", type=float, default=None, help=f"seconds of rest before each figure ({REST} on a GPU, else 0)")
    parser.add_argument("--seconds", type=float, default=None, help="of one figure, about (0.02 on a GPU, else 0.1)")
    parser.add_argument("--joules", type=float, default=1.0,
                        help=f"least seconds of each call for its energy, which takes as long as the counter needs to move {MOVES} times: about "
                             "1 s on a GPU; 0: none (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="on the CPU, of all libraries (%(default)s)")
    parser.add_argument("--cases", default=TABLE, help="another table of cases")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--plot", help="also draw the ratios, as an SVG")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if not 0 <= options.joules < float("inf"):
        parser.error(f"--joules is {options.joules}; it must be a time, or 0")
    options.kind, options.tiny = options.device, options.device == "tiny"
    options.device = "cuda" if options.device == "cuda" else "cpu"
    if options.rest is None:
        options.rest = REST if options.device == "cuda" else 0.0
    if options.seconds is None and options.tiny:
        options.seconds = 1e-3
    return options


def main(arguments=None):
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU; --device cpu needs none")
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
        attune.set_num_threads(options.threads)
    peers, meter = load_peers(options.peer, options.device), energy_meter(options.device)
    about = environment(options, peers, meter)
    print(f"{about['device']}, torch {about['torch']}, attune {about['attune']}; {'; '.join(about['peers'])}")
    print(f"medians of {options.rounds} rounds; energy by {about['energy']}")
    scale, unit = (1e-12, "TFLOP/s") if options.device == "cuda" else (1e-9, "GFLOP/s")
    print(f"  {'':18} {'error against float64':>23}  {'outside':>11} {'inside':>11}  {unit}    GB/s     energy  ratio outside"
          "      ratio inside")
    results, failed = [], False
    for row in rows_of(options.cases, options.kind):
        if not re.search(options.filter, row["name"]):
            continue
        print(row["name"], flush=True)
        try:
            result = measure(row, peers, options, meter)
        except (attune.Error, torch.OutOfMemoryError) as error:
            print(f"  not run: {str(error).splitlines()[0]}")
            failed |= isinstance(error, attune.Error)
            continue
        finally:
            wait(options.device)
            if options.device == "cuda":
                torch.cuda.empty_cache()
        results.append(result)
        failed |= bool(result["wrong"])
        print("\n".join(lines_of(result, scale)), flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    if options.plot:
        pathlib.Path(options.plot).write_text(plot_of(about, results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
