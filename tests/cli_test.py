#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the attune command as users do: cli_test.py PATH_OF_ATTUNE [unittest options]."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ATTUNE = None
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the command takes a GPU where there is one
REPOSITORY = Path(__file__).resolve().parent.parent
MODELS = [
    "bloom-7b",
    "chatglm3-6b",
    "deepseek-v3",
    "deepseek-v3.2",
    "gpt-oss-120b",
    "llama-2-7b", "llama-3-70b",
    "llama-3-8b", "mistral-7b",
    "qwen3-32b",
    "t5-11b",
    "t5-large",
]
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "".join(
    f"2024-02-28 23:59:{58 + i // 2:02d}.{i * 1234567 % 10000000:07d},{prompt},{output}\r\n"
    for i, (prompt, output) in enumerate([(40, 5), (3, 9), (70, 1), (17, 0)])
)


def attune(*arguments, env=None):
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"} | (env or {})
    return subprocess.run(
        [ATTUNE, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=170, check=False
    )


class CliTest(unittest.TestCase):
    def setUp(self):
        self.directory = Path(tempfile.mkdtemp(prefix="attune-test-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def write(self, name, text):
        path = self.directory / name
        path.write_bytes(text.encode())
        return path

    def replay(self, *arguments, trace=TRACE, code=0, **options):
        """Replays a trace without ceilings; returns the process and the report."""
        output = self.directory / "out"
        shutil.rmtree(output, ignore_errors=True)
        path = self.write("trace.csv", trace)
        plots = () if options.pop("plots", False) else ("--no-plots",)
        done = attune("replay", path, "--no-ceilings", *plots, "--output", output, *arguments, **options)
        self.assertEqual(done.returncode, code, done.stderr)
        report = output / "report.json"
        return done, json.loads(report.read_text()) if report.exists() else None

    def spoilt(self, source):
        """The environment in which this C source takes the place of functions of the library."""
        compiler = shutil.which(os.environ.get("CC", "cc"))
        source = self.write("spoil.c", "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include \"attune/attune.h\"\n" + source)
        library = self.directory / "spoil.so"
        if (
            not compiler
            or subprocess.run(
                [compiler, "-shared", "-fPIC", f"-I{REPOSITORY / 'include'}", source, "-o", library, "-ldl"],
                capture_output=True,
                check=False,
            ).returncode
        ):
            self.skipTest("no C compiler")
        if "libattune" not in subprocess.run(["ldd", ATTUNE], capture_output=True, text=True, check=False).stdout:
            self.skipTest("the library is linked statically")
        preload = {"LD_PRELOAD": str(library)}
        if "ASan" in attune("--version", env=preload).stderr:
            self.skipTest("AddressSanitizer must come first")
        return preload

    def refuse(self, done, *words):
        """Bad input: exit code 2, one line on stderr that holds the words, nothing on stdout."""
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


class Basics(CliTest):
    def test_an_unknown_option_is_named_and_the_nearest_one(self):
        trace = self.write("trace.csv", TRACE)
        for arguments, said in (
            (("replay", trace, "--modle", "x"), "replay has no option '--modle'; did you mean --model? (see attune replay --help)"),
            (("replay", trace, "--page_size=16"), "replay has no option '--page_size'; did you mean --page-size?"),
            (("info", "--device", "cuda"), "info has no option '--device' (see attune info --help)"),
            (("models", "--foo", "bar"), "models has no option '--foo'"),
        ):
            done = attune(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(said, done.stderr)

    def test_an_empty_path_is_refused(self):
        trace = self.write("trace.csv", TRACE)
        for arguments in (("bench", "--json", ""), ("explain", "--json", ""), ("replay", trace, "--output", "")):
            done = attune(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"{arguments[-2]}: is empty; a path is expected", done.stderr)

    def test_version_and_help(self):
        self.assertRegex(attune("--version").stdout, r"^attune \d+\.\d+\.\d+\n$")
        commands = ["replay", "demo", "check", "bench", "info", "explain", "models"]
        text = attune("--help").stdout
        for command in commands:
            self.assertIn(command, text)
            done = attune(command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("Usage", done.stdout)

    def test_models_are_listed(self):
        done = attune("models")
        self.assertEqual(done.returncode, 0)
        self.assertEqual([line.split()[0] for line in re.findall(r"^\S.*", done.stdout, re.M)[1:]], MODELS)

    def test_bad_commands(self):
        self.refuse(attune(), "subcommand")
        self.refuse(attune("reply"), "'reply'", "replay, demo")
        self.refuse(attune("models", "--fast"), "--fast")
        self.refuse(attune("replay"), "trace")

    def test_info(self):
        done = attune("info", "--json", "--no-ceilings")
        info = json.loads(done.stdout)
        self.assertEqual(info["devices"][0]["device"], "cpu")
        self.assertNotIn("ceilings", info)
        self.assertIn("cpu_attention", [kernel["name"] for kernel in info["kernels"]])
        self.assertIn("kernels", attune("info", "--no-ceilings").stdout)

    def test_threads_of_the_environment(self):
        def threads(text):
            return json.loads(attune("info", "--json", "--no-ceilings", env={"OMP_NUM_THREADS": text}).stdout)["threads"]

        for text, count in (("3", 3), (" 5 ", 5), ("4,2", 4), ("4096", 4096)):  # a list is of OpenMP's nested levels
            self.assertEqual(threads(text), count, text)
        for text in ("", "0", "-3", "4097", "4294967297", "99999999999", "99999999999999999999", "3x", "2.5", "0x10"):
            self.assertEqual(threads(text), len(os.sched_getaffinity(0)), text)

    def test_matrix_is_a_markdown_table(self):
        lines = attune("info", "--matrix").stdout.splitlines()
        self.assertTrue(lines[0].startswith("| axis |"))
        self.assertRegex(lines[1], r"^\|(---\|)+$")
        self.assertEqual({line.count("|") for line in lines}, {lines[0].count("|")})
        self.assertTrue(any(line.startswith("| mask |") and "causal" in line for line in lines))

    def test_explain(self):
        for model in MODELS:
            file = self.directory / f"{model}.json"
            done = attune("explain", "--model", model, "--batch", 2, "--seqlen-q", 3, "--seqlen-kv", 50, "--json", file)
            self.assertEqual(done.returncode, 0, done.stderr)
            calls = json.loads(file.read_text())["calls"]
            self.assertEqual(len(calls), {"gpt-oss-120b": 2, "t5-large": 3, "t5-11b": 3}.get(model, 1))
            for call in calls:
                self.assertTrue(call["supported"])
                self.assertGreater(call["flops"], 0)
        self.refuse(attune("explain", "--seqlen-q", 9, "--seqlen-kv", 8), "--seqlen-q is 9")
        self.refuse(attune("explain", "--batch", 0), "--batch")
        trace = self.write("trace.csv", TRACE)
        for arguments in (["check", "--stress"], ["bench", "--min-time"], ["replay", trace, "--time-scale"]):
            self.refuse(attune(*arguments, "nan"), f"{arguments[-1]}: Value nan not in range")
        for arguments in (["check", "--stress", 1], ["replay", trace], ["demo"]):
            for seed in ("-1", "-18446744073709551615", "1000000000000000000", "18446744073709551616", "1.5"):
                self.refuse(attune(*arguments, "--seed", seed), f"--seed: Value {seed} not in range")

    def test_explain_counts_work(self):
        file = self.directory / "explain.json"
        attune("explain", "--model", "mistral-7b", "--batch", 3, "--seqlen-q", 1, "--seqlen-kv", 5000, "--json", file)
        call = json.loads(file.read_text())["calls"][0]
        # A window of 4096 keys, 32 heads, two products of 128 columns.
        self.assertEqual(call["flops"], 3 * 4096 * 32 * 2 * 256)
        # 4095 cached keys and a new one, 8 heads of K and V in two bytes; q, out, k and v of the new token.
        self.assertEqual(call["bytes"], 3 * (4096 * 8 * 512 + 2 * 32 * 256 + 8 * 512))


class Replay(CliTest):
    def test_every_model_replays_and_agrees_with_the_oracle(self):
        for model in MODELS:
            with self.subTest(model):
                done, report = self.replay("--model", model, "--tensor-parallel", 4, "--chunk", 32, "--verify", 3)
                summary, steps = report["summary"], report["steps"]
                self.assertEqual(summary["finished"], 4)
                self.assertEqual(report["verify"]["failed"], 0)
                self.assertGreater(report["verify"]["rows"], 0)
                self.assertEqual(sum(steps["prefill_tokens"]), 130)
                # The first token comes with the prompt; a decoder beside an encoder starts from nothing.
                self.assertEqual(sum(steps["decode_tokens"]), 5 + 9 + 1 + 1 if model.startswith("t5") else 4 + 8)
                self.assertEqual(report["requests"]["prompt_tokens"], [40, 3, 70, 17])
                self.assertTrue(all(p <= report["settings"]["num_pages"] for p in steps["pages_used"]))
                self.assertIn("verified", done.stdout)

    def test_decode_steps_alone(self):
        _, whole = self.replay()
        for model in "llama-3-8b", "t5-large", "deepseek-v3.2":
            _, report = self.replay("--phase", "decode", "--model", model, "--verify", "4")
            self.assertGreater(report["verify"]["rows"], 0)
            self.assertEqual(report["verify"]["failed"], 0)
            self.assertEqual(report["summary"]["prompt_tokens"], 0)
            self.assertEqual(report["requests"]["output_tokens"], whole["requests"]["output_tokens"])
        self.refuse(attune("replay", self.write("trace.csv", TRACE), "--phase", "half"), "--phase", "decode")

    def test_names_of_another_device_are_listed_anywhere(self):
        done = attune("bench", "--device", "cuda:0", "--list")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("bench_cuda/bf16/64x4096_32_8_p64\n", done.stdout)
        self.assertIn("bench_backward/2x8192_16_16_d128_causal\n", done.stdout)
        for command in "check", "bench", "explain":
            self.refuse(attune(command, "--device", "cuda:99"), "device cuda:99 is not available: ", "cpu")

    def test_the_backward_is_timed_by_its_five_products(self):
        json_file = self.directory / "bench.json"
        done = attune("bench", "--filter", "backward_ragged", "--reps", "1", "--no-ceilings", "--json", json_file)
        self.assertEqual(done.returncode, 0, done.stderr)
        (result,) = json.loads(json_file.read_text())["results"]
        pairs = sum(n * (n + 1) // 2 for n in result["shape"]["seqlens_q"])
        self.assertEqual(result["flops"], 2 * pairs * 32 * (3 * 128 + 2 * 128))
        self.assertGreater(result["share_of_bound"], 0)
        self.assertIn("cpu_backward", result["plan"])

    def test_every_cache_dtype(self):
        for model, dtypes in (
            ("llama-3-8b", ["fp16", "fp32", "e4m3", "int8"]),
            ("deepseek-v3", ["e4m3", "int8", "mla656"]),
            ("deepseek-v3.2", ["bf16", "fp32"]),
            ("t5-large", ["int8", "e4m3"]),
        ):
            for dtype in dtypes:
                with self.subTest(f"{model} {dtype}"):
                    _, report = self.replay(
                        "--model", model, "--kv-dtype", dtype, "--tensor-parallel", 8, "--verify", "3%"
                    )
                    self.assertEqual(report["settings"]["kv_dtype"], dtype)
                    self.assertEqual(report["verify"]["failed"], 0)
                    self.assertGreater(report["verify"]["rows"], 10)

    def test_whole_requests_on_a_gpu(self):
        devices = json.loads(attune("info", "--json", "--no-ceilings").stdout)["devices"]
        if all(device["device"] != "cuda:0" for device in devices):
            self.skipTest("no CUDA device")
        sparse = json.loads((REPOSITORY / "cli/models/deepseek-v3.2.json").read_text()) | {"topk": 64, "name": "few"}
        few = self.write("few.json", json.dumps(sparse))  # most rows have more keys than the list holds
        for model, dtypes in (
            ("llama-3-8b", ["bf16", "e4m3"]),
            ("deepseek-v3", ["bf16", "fp16", "mla656"]),
            ("deepseek-v3.2", ["bf16", "mla656"]),
            (few, ["mla656"]),
            ("t5-large", ["bf16"]),
        ):
            for dtype in dtypes:
                for shards in (1, 8):
                    with self.subTest(f"{model} {dtype}, 1 of {shards}"):
                        _, report = self.replay(
                            *("--device", "cuda:0", "--model", model, "--kv-dtype", dtype, "--verify", "3%"),
                            *("--tensor-parallel", shards, "--chunk", 50),
                        )
                        self.assertEqual(report["verify"]["failed"], 0)
                        self.assertGreater(report["verify"]["rows"], 10)

    def test_prefill_is_chunked_and_mixed_with_decode(self):
        _, report = self.replay("--no-arrival", "--chunk", 16)
        steps = report["steps"]
        self.assertLessEqual(max(steps["prefill_tokens"]), 16)
        self.assertTrue(any(p > 0 and d > 0 for p, d in zip(steps["prefill_tokens"], steps["decode_tokens"])))
        _, report = self.replay("--no-arrival", "--max-batch", 1)
        self.assertEqual(max(report["steps"]["sequences"]), 1)

    def test_preemption_when_pages_run_out(self):
        trace = TRACE.splitlines()[0] + "\n" + "".join(f"{i},20,60\n" for i in range(6))
        for model, pages in (("llama-3-8b", 12), ("t5-large", 16)):
            with self.subTest(model):
                _, report = self.replay(
                    "--no-arrival", "--page-size", 8, "--pages", pages, "--model", model, "--chunk", 24, trace=trace
                )
                self.assertEqual(report["summary"]["finished"], 6)
                self.assertGreater(report["summary"]["preemptions"], 0)
                self.assertEqual(sum(report["requests"]["preemptions"]), report["summary"]["preemptions"])
                self.assertLessEqual(max(report["steps"]["pages_used"]), pages)
                self.assertEqual(report["verify"]["failed"], 0)

    def test_alternating_layers(self):
        _, report = self.replay("--model", "gpt-oss-120b", "--tensor-parallel", 8)
        self.assertEqual(report["steps"]["layer_kind"][:3], ["window 128", "full", "window 128"])

    def test_window_and_sparse_selection(self):
        trace = TRACE.splitlines()[0] + "\n0,300,20\n"
        window = json.loads((REPOSITORY / "cli/models/mistral-7b.json").read_text()) | {
            "windows": [50],
            "name": "narrow",
        }
        sparse = json.loads((REPOSITORY / "cli/models/deepseek-v3.2.json").read_text()) | {
            "topk": 64,
            "num_heads_q": 4,
            "name": "few",
            "indexer": {"num_heads": 16, "head_dim": 128},
        }
        chosen = {name: value for name, value in sparse.items() if name != "indexer"}
        index_flops = sum(i + 1 for i in range(319)) * 2 * 16 * 128
        flops = {}
        for case, model in {"window": window, "indexer": sparse, "chosen": chosen}.items():
            path = self.write("model.json", json.dumps(model))
            _, report = self.replay("--model", path, "--chunk", 100, "--verify", 8, trace=trace)
            self.assertEqual(report["model"]["name"], model["name"])
            self.assertEqual(report["verify"]["failed"], 0)
            flops[case] = sum(report["steps"]["flops"])
        # 236 of the 300 prompt rows and all 19 decode rows have more keys than the list holds.
        rows = sum(min(i + 1, 64) for i in range(319))
        self.assertEqual(flops["chosen"], rows * 4 * 2 * (576 + 512))
        self.assertEqual(flops["indexer"], flops["chosen"] + index_flops)

    def test_arrival_and_clock(self):
        trace = TRACE.splitlines()[0] + "\n100,5,2\n0,5,2\n"
        _, report = self.replay(trace=trace)
        self.assertEqual(report["requests"]["arrival"], [0, 100])
        self.assertGreaterEqual(report["steps"]["start"][-1], 100)
        _, report = self.replay("--time-scale", 4, trace=trace)
        self.assertEqual(report["requests"]["arrival"], [0, 25])
        _, report = self.replay("--no-arrival", trace=trace)
        self.assertEqual(report["requests"]["arrival"], [0, 0])

    def test_limit_and_clamp(self):
        _, report = self.replay("--limit", 2, "--max-context", 20)
        self.assertEqual(report["requests"]["prompt_tokens"], [15, 3])
        self.assertEqual(report["requests"]["output_tokens"], [5, 9])

    def test_same_seed_same_schedule(self):
        first, second = (self.replay("--no-arrival", "--seed", 7)[1] for _ in range(2))
        for key in ("prefill_tokens", "decode_tokens", "pages_used", "flops"):
            self.assertEqual(first["steps"][key], second["steps"][key])
        self.assertEqual(first["verify"]["worst_error_over_bound"], second["verify"]["worst_error_over_bound"])

    def test_report_page(self):
        done, _ = self.replay(plots=True)
        page = (self.directory / "out/report.html").read_text()
        self.assertIn("llama-3-8b", page)
        self.assertNotIn("{{", page)
        self.assertNotIn("http://", page)
        if "no plots" not in done.stderr:
            self.assertEqual(page.count("<figure "), 7)

    def test_report_without_python(self):
        tools = self.directory / "bin"
        tools.mkdir()
        (tools / "python3").write_text("#!/bin/sh\nexit 127\n")
        (tools / "python3").chmod(0o755)
        done, report = self.replay(plots=True, env={"PATH": str(tools)})
        self.assertIn("python3-matplotlib", done.stderr)
        page = (self.directory / "out/report.html").read_text()
        self.assertIn("python3-matplotlib", page)
        self.assertIn("first token", page)
        self.assertEqual(report["summary"]["finished"], 4)

    def test_interrupt_gives_a_partial_report(self):
        trace = self.write("long.csv", TRACE.splitlines()[0] + "\n" + "0,500,4000\n" * 50)
        output = self.directory / "partial"
        process = subprocess.Popen(
            [ATTUNE, "replay", trace, "--no-ceilings", "--no-plots", "--output", output],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ, OMP_NUM_THREADS="2"),
        )
        self.assertIn("requests", process.stderr.readline())
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("interrupted", out)
        self.assertTrue(json.loads((output / "report.json").read_text())["summary"]["interrupted"])

    def test_progress_bar_on_a_terminal(self):
        path = self.write("trace.csv", TRACE)
        parent, child = pty.openpty()
        subprocess.run(
            [ATTUNE, "replay", path, "--no-ceilings", "--no-plots", "--output", self.directory],
            stdout=subprocess.DEVNULL,
            stderr=child,
            env=dict(os.environ, TERM="xterm"),
            timeout=170,
            check=True,
        )
        os.close(child)
        text = os.read(parent, 1 << 16).decode()
        os.close(parent)
        self.assertIn("█", text)
        self.assertIn("/4 requests", text)

    def test_a_wrong_result_is_found(self):
        preload = self.spoilt(
            """
            /* Spoils every output slightly: more than rounding, less than an eye would see. */
            attune_status attune_run(const attune_plan* p, const attune_attention* a, void* w, size_t n, void* s) {
              typedef attune_status (*run_function)(const attune_plan*, const attune_attention*, void*, size_t, void*);
              attune_status status = ((run_function)dlsym(RTLD_NEXT, "attune_run"))(p, a, w, n, s);
              float* out = a->out.data;
              for (int64_t i = 0; i < a->out.shape[0] * a->out.shape[1] * a->out.shape[2]; ++i) out[i] *= 1.001f;
              return status;
            }""",
        )
        done, report = self.replay("--kv-dtype", "fp32", code=1, env=preload)
        self.assertRegex(
            done.stderr,
            r"verification failed: step 0, attention, row \d+, head \d+, column \d+: got .*, expected .*, allowed",
        )
        self.assertGreater(report["verify"]["failed"], 0)
        self.assertIn("FAILED", done.stdout)


class BadInput(CliTest):
    def refuse_trace(self, text, *words):
        path = self.write("bad.csv", text)
        self.refuse(attune("replay", path, "--output", self.directory), str(path), *words)

    def test_malformed_traces_name_line_and_column(self):
        head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        self.refuse_trace("", "line 1, column 1", "empty")
        self.refuse_trace("TIMESTAMP,ContextTokens\n1,2\n", "line 1", "GeneratedTokens")
        self.refuse_trace(head.replace("\n", ",TIMESTAMP\n"), "line 1, column 41", "twice")
        self.refuse_trace(head, "no requests")
        self.refuse_trace(
            head + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50,x12,109\r\n", "line 3, column 21", "'x12'"
        )
        self.refuse_trace(head + "2023-02-29 18:15:46,374,44\n", "line 2, column 1", "2023-02-29")
        self.refuse_trace(head + "0,374\n", "line 2, column 6", "2 of 3 columns")
        self.refuse_trace(head + "0,374,-1\n", "line 2, column 7", "GeneratedTokens")
        self.refuse_trace(head + "0,0,1\n", "line 2, column 3", "ContextTokens")
        self.refuse_trace(head + "0,99999999999999999999,1\n", "line 2, column 3")
        self.refuse_trace(head + '0,"374,44\n', "line 2, column 3", "quote")
        self.refuse_trace(head + "nan,1,1\n", "line 2, column 1")

    def test_columns_in_any_order(self):
        trace = '\ufeffid,"GeneratedTokens" , TIMESTAMP,ContextTokens\n'
        trace += '7,2,2023-11-16T18:15:46Z,11\n\n8,"3",2023-11-16 18:15:46.5+00:00,12\n'
        _, report = self.replay(trace=trace)
        self.assertEqual(report["requests"]["prompt_tokens"], [11, 12])
        self.assertEqual(report["requests"]["output_tokens"], [2, 3])
        self.assertEqual(report["requests"]["arrival"], [0, 0.5])

    def test_options(self):
        path = self.write("trace.csv", TRACE)
        run = lambda *arguments: attune("replay", path, "--output", self.directory / "out", "--no-ceilings", *arguments)
        self.refuse(attune("replay", self.directory / "none.csv"), "none.csv", "cannot be read")
        self.refuse(attune("replay", self.directory), "cannot be read")
        self.refuse(run("--model", "llama-9"), "unknown model 'llama-9'", *MODELS)
        self.refuse(run("--device", "tpu"), "tpu", "cpu")
        self.refuse(run("--device", "cuda:99"), "cuda:99")
        self.refuse(run("--kv-dtype", "fp4"), "fp4", "mla656")
        self.refuse(run("--kv-dtype", "mla656"), "mla656")
        self.refuse(run("--verify", "some"), "--verify")
        self.refuse(run("--verify", "101%"), "--verify")
        self.refuse(run("--page-size", "0"), "--page-size")
        self.refuse(run("--chunk", "many"), "--chunk")
        self.refuse(run("--time-scale", "0"), "--time-scale")
        self.refuse(run("--max-context", "1"), "--max-context")
        self.refuse(run("--tensor-parallel", "5"), "cannot be divided by 5")
        self.refuse(run("--pages", "1000000000"), "1000000000 pages", "GiB")
        self.refuse(run("--pages", "2"), "line 2", "3 pages")
        self.refuse(attune("replay", path, "--output", path / "x"), "--output")

    def test_model_files(self):
        trace = self.write("trace.csv", TRACE)
        good = json.loads((REPOSITORY / "cli/models/llama-3-8b.json").read_text())
        load = lambda text: attune("replay", trace, "--model", self.write("m.json", text), "--output", self.directory)
        self.refuse(load('{\n "name": }'), "m.json", "line 2, column 10")
        self.refuse(load("[]"), "m.json", "object")
        self.refuse(load(json.dumps(good | {"num_head_q": 3})), '"num_head_q" is not a known field')
        self.refuse(load(json.dumps({k: v for k, v in good.items() if k != "num_layers"})), '"num_layers" is missing')
        self.refuse(load(json.dumps(good | {"num_heads_q": "8"})), '"num_heads_q" is "8"', "type")
        self.refuse(load(json.dumps(good | {"num_heads_q": 12})), "not a multiple")
        self.refuse(load(json.dumps(good | {"head_dim_qk": 577})), "1 to 576")
        self.refuse(load(json.dumps(good | {"kind": "rnn"})), '"rnn"', "sparse-mla")
        self.refuse(load(json.dumps(good | {"rope": {"style": "spiral"}})), "rope", "spiral", "yarn")
        self.refuse(load(json.dumps(good | {"windows": []})), "windows")
        self.refuse(load(json.dumps(good | {"windows": [0, -5]})), '"windows" has -5; it must list')
        self.refuse(load(json.dumps(good | {"topk": 5})), "topk")
        indexer = {"num_heads": 64, "head_dim": 128}
        self.refuse(load(json.dumps(good | {"indexer": indexer})), "indexer", "sparse-mla")
        self.refuse(load(json.dumps(good | {"indexer": indexer | {"head_dim": 0}})), "head_dim", "1 to 576")
        self.refuse(attune("replay", trace, "--model", "./none.json"), "none.json")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ATTUNE = os.path.abspath(sys.argv.pop(1))
    unittest.main(argv=sys.argv)
