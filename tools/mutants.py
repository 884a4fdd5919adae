#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks one line at a time and says which breaks no test catches.

A mutant is a small wrong edit of kernels/ or src/: `<` for `<=`, a barrier left out, q for k. Each is put into a copy
of the checkout (build/mutants), the tests that could notice run until one fails, and the copy is restored. A timeout
counts as caught; what does not compile does not count. Survivors are for a person to read: equivalent, or a gap.

  tools/mutants.py                          # the named mutants of tools/mutants.json: defects that once were
  tools/mutants.py --seed 1 --count 50      # 50 drawn ones instead; the same seed draws the same from the same sources
  tools/mutants.py --count 20 --in kernels/mla --out mla.jsonl   # appends a line per mutant; goes on where it ended
  tools/mutants.py --report mla.jsonl       # the table again
  tools/mutants.py --device cuda:0 --cli build/release/cli/attune --count 50 --in kernels   # judged by a GPU
  tools/mutants.py --dry-run --count 50     # only lists them

Kernels are compiled when a test runs them, so only mutants of src/ and of headers that both sides share are built.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from mutant_edits import ROOT, check_named, draw, files_of, named

COPY = ROOT / "build/mutants/tree"
CLEAN_MODULES = ROOT / "build/mutants/clean_modules"

# ----------------------------------------------------------------------------------------------------------- the copy


def refresh_copy():
    """The checkout as it is, edits included; files that are alike keep their times, so that little is built."""
    files = files_of(["."])
    for file in files:
        to = COPY / file
        if to.exists() and to.read_bytes() == (ROOT / file).read_bytes():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, to)
        shutil.copymode(ROOT / file, to)
    for folder in ("src", "kernels", "tests"):
        for path in (COPY / folder).rglob("*"):
            if path.is_file() and str(path.relative_to(COPY)) not in files:
                path.unlink()


def build(limit, environment=None):
    if not (BUILD / "build.ninja").exists():
        shutil.rmtree(BUILD, ignore_errors=True)
        run(["cmake", "--preset", args.preset], 600)
    return run(["cmake", "--build", "--preset", args.preset, "-j", args.jobs, "--target", "attune_tests",
                *(["attune_cli"] if args.preset == "release" else [])], limit, environment)


def apply(mutant):
    """Puts the edits into the copy. Returns what undoes them."""
    before = {}
    for e in mutant["edits"]:
        path = COPY / e["file"]
        text = path.read_text()
        before.setdefault(path, (text, path.stat()))
        if "line" in e:
            lines = text.split("\n")
            lines[e["line"] - 1] = e["to"]
            text = "\n".join(lines)
        else:
            text = text.replace(e["text"], e["to"])
        path.write_text(text)
    return before


def restore(before):
    for path, (text, stat) in before.items():
        path.write_text(text)
        if not is_built(path):  # as if it had not been touched; what was built is to be built again
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def is_built(path):
    return path.suffix in (".h", ".cpp")


def reset_modules():
    """The emulator's modules are those of the clean kernels again, by links: it removes older ones of the same name."""
    shutil.rmtree(MODULES, ignore_errors=True)
    if CLEAN_MODULES.exists():
        shutil.copytree(CLEAN_MODULES, MODULES, copy_function=os.link)


# -------------------------------------------------------------------------------------------------------------- tests


def run(command, limit, environment=None):
    """(exit code or None after limit seconds, output). Its own session, so that what it starts ends with it."""
    process = subprocess.Popen([str(c) for c in command], cwd=COPY, env={**os.environ, **(environment or {})}, text=True,
                               errors="replace", start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


# Tests of the emulator, by folder of kernels/ and src/cuda/: those that know most of it first.
EMULATED = {
    "backward": ["EmulatedBackward", "EmulatedBackwardPasses", "EmulatedBackwardMma", "EmulatedBiasGradients"],
    "decode": ["EmulatedDecode", "EmulatedMixed"], "mixed": ["EmulatedMixed"], "indexer": ["EmulatedIndexer"],
    "mla": ["EmulatedMla", "EmulatedMlaSchedule"], "rows": ["EmulatedRows"], "ops": ["EmulatedRows"],
    "prefill": ["EmulatedPrefill", "EmulatedPrefillBatches", "EmulatedMixed"],
    "scheduler": ["EmulatedSchedule", "EmulatedMlaSchedule", "EmulatedDecode", "EmulatedMixed"],
    "check": ["EmulatedOracle", "EmulatedBackwardOracle"],
}
EMULATED_ALL = ["EmulatedRows", "EmulatedDecode", "EmulatedMla", "EmulatedPrefill", "EmulatedIndexer", "EmulatedMixed"]
EMULATED_LAST = ["EmulatedBatchInvariant", "EmulatedUnseen"]


def kernel_of(file):
    """What `attune check --stress --only` takes to run a file of kernels/ or src/: a kernel of the registry, operations, or all."""
    for format in ("fp8", "fp32"):
        if file.startswith("kernels/prefill/") and format in file:
            return f"cuda_prefill_{format}"
    if re.match(r"src/cpu/(backward|gradient|kernels_gradient)", file):
        return "cpu_backward"
    folder = file.split("/")[1]
    if folder == "backward" and "mma" in file:
        return "cuda_backward_(fp32|mma)"
    return {"backward": "cuda_backward", "decode": "cuda_decode", "prefill": "cuda_prefill", "mla": "cuda_mla",
            "indexer": "indexer", "rows": "qkv_prepare|cache_op|merge"}.get(folder, "")


def suites_of_tests():
    """{words of a test file's name: its suites}."""
    found = {}
    for file in sorted((ROOT / "tests").glob("*_test.cpp")):
        suites = re.findall(r"^(?:TEST|TEST_F|TEST_P)\((\w+),", file.read_text(), re.M)
        suites += re.findall(r"^INSTANTIATE_TEST_SUITE_P\(\w+, (\w+)", file.read_text(), re.M)
        found[frozenset(file.stem.split("_")) - {"test", "cuda"}] = sorted(set(suites))
    return found


def gtest(tests, without=""):
    """Of suites or single tests."""
    names = ":".join(p for t in tests for p in ((t, ) if "*" in t or "." in t else (f"{t}.*", f"*/{t}.*")))
    return [PROGRAM, f"--gtest_filter={names}{without}", "--gtest_fail_fast"]


def folder_of(file):
    """What a file is about: a folder of kernels/ or src/cuda/, else the one of src/."""
    parts = file.split("/")
    return parts[2] if file.startswith("src/cuda/") and len(parts) > 3 else parts[1]


def stages_of(mutant, caught):
    """[(name, command, environment)]: what is likely to notice first. caught: (file, test) of mutants before."""
    files = [e["file"] for e in mutant["edits"]]
    stress = ["check", "--stress", args.stress, "--seed", args.seed]
    if args.device:
        kernel = kernel_of(files[0])
        only = {"ATTUNE_KERNEL": kernel} if kernel.startswith("cuda_") else {}
        # A broken kernel is compiled again for each configuration: few of them.
        few = ["--configurations", "8", "--only", kernel, "--device", args.device]
        stages = [(f"stress {args.stress} {kernel}", [args.cli, *stress, *few], only),
                  ("attune check", [args.cli, "check", "--device", args.device], {})]
        return stages[:1] if args.stress_only else stages
    in_src = any(f.startswith("src/") for f in files)
    emulated = [s for f in files if f.startswith(("kernels/", "src/cuda/")) for s in
                EMULATED.get(folder_of(f), EMULATED_ALL) + EMULATED_LAST]
    emulated = list(dict.fromkeys(emulated))
    stages = [("named", gtest([mutant["tests"]]), {})] if "tests" in mutant else []
    for name, of in (("seen in file", str), ("seen nearby", folder_of)):
        if tests := [t for f, t in caught if of(f) == of(files[0])]:
            stages.append((name, gtest(list(dict.fromkeys(tests))[:8]), {}))
    if in_src:
        words = {w for f in files for w in re.split(r"[/_.]", f)}
        ranked = sorted(((len(k & words), v) for k, v in suites_of_tests().items()), reverse=True)
        near = [s for rank, suites in ranked if rank == ranked[0][0] for s in suites if not s.startswith("Emulated")]
        stages += [("near", gtest(near), {})] if near else []
    on_cpu = any(f.startswith("src/") and not f.startswith("src/cuda/") for f in files)
    if on_cpu:
        stages.append(("unit", gtest(["*"], "-Emulated*"), {}))
    stages += [(s, gtest([s]), {}) for s in emulated]
    if in_src and not on_cpu:  # tests by parameters run the CPU's kernels
        stages.append(("unit of cuda", gtest(["*"], "-Emulated*:*/*"), {}))
    if on_cpu and args.preset == "release":
        kernel = kernel_of(files[0])
        only = ["--only", kernel] if kernel else []
        stages.append((" ".join(["stress", args.stress, *only[1:]]), [BUILD / "cli/attune", *stress, *only], {}))
    if args.emulate:
        stages += [(f"table {s}", gtest([f"{s}.MatchesTheOracleOnTheTable"]), {"ATTUNE_EMULATE": str(args.emulate)})
                   for s in emulated]
    return stages


def failed_test(output):
    failed = re.search(r"^\[  FAILED  \] ([\w./]+)", output, re.M)
    begun = re.findall(r"^\[ RUN      \] ([\w./]+)", output, re.M)
    return failed.group(1) if failed else begun[-1] if begun else ""


NOT_COMPILED = re.compile(r": error: |error: static assertion|NVRTC_ERROR_COMPILATION|does not compile")


def first_error(output):
    found = re.search(r"error: (.*?)(?:\\n|$)", output, re.M)  # a test prints lines in one
    return found.group(1)[:100] if found else ""


def environment_of(extra):
    # A device's kernels are compiled from the copy, and kept apart from those of users.
    own = {"ATTUNE_KERNEL_DIR": COPY / "kernels", "ATTUNE_CACHE_DIR": COPY.parent / "cache"} if args.device else {}
    return {"OMP_NUM_THREADS": "4", **{k: str(v) for k, v in own.items()}, **extra}


def judge(mutant, caught, clean_seconds):
    """What becomes of a mutant: caught, by which test; survived; or not compiled."""
    if not args.device:
        reset_modules()
    before = apply(mutant)
    try:
        if not args.device and any(is_built(f) for f in before):
            code, output = build(args.limit, {"CCACHE_READONLY": "1"})
            if code != 0:
                return {"result": "not compiled", "by": first_error(output)}
        for stage, command, environment in stages_of(mutant, caught):
            limit = min(args.limit, 30 + 5 * clean_seconds.get(stage, args.limit))
            code, output = run(command, limit, environment_of(environment))
            if code == 0:
                continue
            if code is not None and NOT_COMPILED.search(output):
                return {"result": "not compiled", "by": first_error(output)}
            test = failed_test(output) if command[0] == PROGRAM else ""
            return {"result": "caught", "by": test or stage, "timeout": code is None}
        return {"result": "survived", "by": ""}
    finally:
        restore(before)


def check_clean(mutants):
    """Each stage without a break, once for the same sources: it must pass, and its time bounds a mutant's."""
    file = ROOT / "build/mutants/clean.json"
    inputs = files_of(["src", "kernels", "tests", "cli", "reference"])
    digest = hashlib.sha256(b"".join((ROOT / f).read_bytes() for f in inputs)).hexdigest()
    key = f"{digest} {args.preset} {args.device}"
    known = json.loads(file.read_text()) if file.exists() else {}
    seconds = (list(known.values()) or [{}])[0] if args.known_clean else known.get(key, {})
    if not seconds:
        shutil.rmtree(CLEAN_MODULES, ignore_errors=True)
    if not args.device:
        reset_modules()
    for stage, command, environment in [s for m in mutants for s in stages_of(m, [])]:
        if args.known_clean or stage in seconds or stage in ("near", "named"):  # part of `unit` and of the emulator's
            continue
        began = time.time()
        code, output = run(command, 10 * args.limit, environment_of(environment))
        if code != 0:
            sys.exit(f"{output[-3000:]}\n{stage} fails without a break: {' '.join(map(str, command))}")
        seconds[stage] = round(time.time() - began, 1)
        print(f"without a break: {stage} passes in {seconds[stage]} s", flush=True)
        if MODULES.exists() and not args.device:
            shutil.rmtree(CLEAN_MODULES, ignore_errors=True)
            shutil.copytree(MODULES, CLEAN_MODULES, copy_function=os.link)
        file.write_text(json.dumps({key: seconds}))
    return seconds


def report(results):
    for r in results:
        edit = r["edits"][0]
        print(f"{r['result']:12} {r.get('by', ''):60.60} {r['name']}")
        if r["result"] == "survived":
            print(f"{'':12} - {edit['text'].strip()}\n{'':12} + {edit['to'].strip()}")
    count = {k: sum(r["result"] == k for r in results) for k in ("caught", "survived", "not compiled")}
    print(f"{count['caught'] + count['survived']} mutants: {count['caught']} caught, {count['survived']} survived; "
          f"{count['not compiled']} do not compile")


def read_results(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")] if path and os.path.exists(path) else []


def fits(mutant):
    """What judges it is there."""
    if args.device:
        return all(e["file"].startswith("kernels/") for e in mutant["edits"])
    return not mutant.get("only_device") and mutant.get("preset", "release") == args.preset


def main():
    if args.device:
        args.prefixes = [p for p in args.prefixes if p.startswith("kernels")] or ["kernels/"]
    if args.check:
        return check_named()
    if args.report:
        if not os.path.isfile(args.report):
            sys.exit(f"mutants: --report is {args.report}, which is no file")
        report(read_results(args.report))
        return 0
    mutants = draw(args.seed, args.count, args.prefixes, args.device) if args.count else named(args.named)
    for m in [m for m in mutants if not fits(m)]:
        print(f"left out: {m['name']}: it takes {'--device' if 'only_device' in m else m.get('preset', 'no --device')}")
        mutants.remove(m)
    if args.dry_run:
        for m in mutants:
            print("\n".join([m["name"]] + [f"  - {e['text'].strip()}\n  + {e['to'].strip()}" for e in m["edits"]]))
        return 0
    results = read_results(args.out)
    done = {(r["name"], r["edits"][0]["to"]) for r in results}
    refresh_copy()
    if not args.device:
        code, output = build(3600)
        if code != 0:
            sys.exit(output[-3000:])
    caught = [(r["edits"][0]["file"], r["by"]) for r in reversed(results) if r["result"] == "caught" and "." in r["by"]]
    clean_seconds = check_clean(mutants)
    # First those of which nothing is built: after others the program is to be built again.
    for m in sorted(mutants, key=lambda m: any(is_built(COPY / e["file"]) for e in m["edits"])):
        if (m["name"], m["edits"][0]["to"]) in done:
            continue
        began = time.time()
        m.update(judge(m, caught, clean_seconds), seconds=round(time.time() - began, 1))
        if m["result"] == "caught" and "." in m["by"]:
            caught.insert(0, (m["edits"][0]["file"], m["by"]))
        results.append(m)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(m) + "\n")
        print(f"{m['result']:12} {m['seconds']:6.1f} s  {m['name']}  {m['by']}", flush=True)
    report(results)
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="draw so many mutants; without it the named ones run")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing, and of --stress")
    parser.add_argument("--in", dest="prefixes", nargs="+", default=["kernels/", "src/"], metavar="PREFIX",
                        help="draw from files whose paths begin so")
    parser.add_argument("--named", nargs="*", default=[], metavar="NAME", help="only these of the named ones")
    parser.add_argument("--out", help="append results as lines of JSON; mutants that it has are left out")
    parser.add_argument("--report", metavar="FILE", help="only print the table of such a file")
    parser.add_argument("--check", action="store_true", help="only check that the named ones apply to these sources")
    parser.add_argument("--dry-run", action="store_true", help="only list the mutants")
    parser.add_argument("--preset", default="release", help="of the program; others than release have no --stress")
    parser.add_argument("--device", help="judge kernels by `attune check` and --stress on this device, not by the tests")
    parser.add_argument("--cli", default=str(ROOT / "build/release/cli/attune"),
                        help="of --device: the command, which must find NVRTC")
    parser.add_argument("--stress", default="10", help="seconds of random batches: the last stage, of --device the first")
    parser.add_argument("--stress-only", action="store_true", help="of --device: nothing but --stress; minutes less")
    parser.add_argument("--emulate", type=int, default=0, metavar="N",
                        help="survivors also meet every N-th case of the table in the emulator; minutes")
    parser.add_argument("--known-clean", action="store_true",
                        help="do not run the tests without a break first, as after an edit that cannot matter")
    parser.add_argument("--limit", type=int, default=300, help="seconds of a stage, at most")
    parser.add_argument("--jobs", type=int, default=2, help="of builds")
    return parser.parse_args()


args = parse_arguments()
BUILD = COPY / "build" / args.preset
PROGRAM, MODULES = BUILD / "tests/attune_tests", BUILD / "tests/emulated"
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which restores the copy
    sys.exit(main())
