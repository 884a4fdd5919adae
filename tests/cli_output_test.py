#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What becomes of the attune command's output, and of the files it is given: cli_output_test.py PATH_OF_ATTUNE [unittest options]."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
import unittest

import cli_test
from cli_test import MODELS, REPOSITORY, TRACE, CliTest, attune

FULL = "/dev/full"
NO_SPACE = os.strerror(errno.ENOSPC)
CASE = ("--filter", "^sparse/softcap")
BENCH = ("--filter", "sparse", "--reps", "1", "--no-check", "--no-ceilings")


def run(*arguments, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([cli_test.ATTUNE, *map(str, arguments)], text=True, timeout=170, check=False, **streams)


class LostOutput(CliTest):
    def commands(self):
        trace = self.write("trace.csv", TRACE)
        return (
            ["models"],
            ["--version"],
            ["--help"],
            ["--help-all"],
            ["models", "--help"],
            ["info", "--no-ceilings"],
            ["info", "--no-ceilings", "--json"],
            ["info", "--matrix"],
            ["explain"],
            ["check", "--list"],
            ["check", *CASE, "--random", "0"],
            ["check", *CASE, "--random", "0", "--json"],
            ["bench", "--list"],
            ["bench", *BENCH],
            ["replay", trace, "--no-ceilings", "--no-plots", "--output", self.directory],
        )

    @unittest.skipUnless(os.path.exists(FULL), "no /dev/full")
    def test_a_full_disk(self):
        for command in self.commands():
            with self.subTest(" ".join(map(str, command))), open(FULL, "w") as full:
                done = run(*command, stdout=full)
                self.assertEqual(done.returncode, 1)
                # Progress and notes may stand before.
                self.assertEqual(done.stderr.splitlines()[-1], f"attune: stdout: cannot be written: {NO_SPACE}")
                self.assertEqual(done.stderr.count("attune: "), 1)

    def test_a_closed_stdout(self):
        for command in self.commands():
            with self.subTest(" ".join(map(str, command))):
                done = run(*command, stdout=None, preexec_fn=lambda: os.close(1))
                self.assertEqual(done.returncode, 1)
                self.assertIn(f"attune: stdout: cannot be written: {os.strerror(errno.EBADF)}\n", done.stderr)
        # No file takes its place.
        report = self.directory / "report.json"
        json.loads(report.read_text())

    @unittest.skipUnless(os.path.exists(FULL), "no /dev/full")
    def test_nobody_reads_stderr(self):
        trace = self.write("trace.csv", TRACE)
        for command, code in (
            (["bogus"], 2),
            (["models"], 0),
            (["replay", trace, "--no-ceilings", "--no-plots", "--output", self.directory], 0),
        ):
            with self.subTest(command[0]), open(FULL, "w") as full:
                self.assertEqual(run(*command, stderr=full).returncode, code)
                self.assertEqual(run(*command, stderr=None, preexec_fn=lambda: os.close(2)).returncode, code)

    def test_other_faults_keep_their_code(self):
        with open(os.devnull, "w") as null:
            self.assertEqual(run("bogus", stdout=null).returncode, 2)

    @unittest.skipUnless(os.path.exists(FULL), "no /dev/full")
    def test_files_on_a_full_disk(self):
        for command in (
            ["explain", "--json", FULL],
            ["bench", *BENCH, "--json", FULL],
        ):
            with self.subTest(command[0]):
                done = run(*command)
                self.assertEqual(done.returncode, 1)
                self.assertEqual(done.stderr, f"attune: {FULL}: cannot be written: {NO_SPACE}\n")
        trace = self.write("trace.csv", TRACE)
        for name in "report.json", "report.html":
            (self.directory / name).unlink(missing_ok=True)
            (self.directory / name).symlink_to(FULL)
            done = run("replay", trace, "--no-ceilings", "--no-plots", "--output", self.directory)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"attune: {self.directory / name}: cannot be written: {NO_SPACE}\n", done.stderr)
            (self.directory / name).unlink()

    def test_plots_without_room(self):
        done, _ = self.replay(plots=True, env={"TMPDIR": "/dev/null"})
        self.assertIn("warning: no plots: ", done.stderr)


class Reasons(CliTest):
    """Why a file cannot be read or written, in the system's words."""

    def test_files_that_cannot_be_read(self):
        trace = self.write("trace.csv", TRACE)
        absent, is_directory = os.strerror(errno.ENOENT), os.strerror(errno.EISDIR)
        none = self.directory / "none.csv"
        self.refuse(attune("replay", none), f"attune: {none}: cannot be read: {absent}\n")
        self.refuse(attune("replay", self.directory), f"attune: {self.directory}: cannot be read: {is_directory}\n")
        for command in ["explain"], ["replay", trace]:
            self.refuse(attune(*command, "--model", "./none.json"), f"attune: ./none.json: cannot be read: {absent}\n")
            self.refuse(attune(*command, "--model", f"{self.directory}/"), f"cannot be read: {is_directory}\n")
        if os.geteuid() != 0:
            trace.chmod(0)
            self.refuse(attune("replay", trace), f"cannot be read: {os.strerror(errno.EACCES)}\n")

    def test_files_that_cannot_be_written(self):
        trace = self.write("trace.csv", TRACE)
        absent, is_directory = os.strerror(errno.ENOENT), os.strerror(errno.EISDIR)
        for command in ["explain"], ["bench", *BENCH]:
            nowhere = self.directory / "no" / "such.json"
            self.refuse(attune(*command, "--json", nowhere), f"attune: {nowhere}: cannot be written: {absent}\n")
            self.refuse(attune(*command, "--json", self.directory), f"{self.directory}: cannot be written: {is_directory}\n")
        for name in "report.json", "report.html":
            (self.directory / "out" / name).mkdir(parents=True)
            done = attune("replay", trace, "--output", self.directory / "out")
            self.refuse(done, f"{self.directory / 'out' / name}: cannot be written: {is_directory}\n")
            (self.directory / "out" / name).rmdir()

    def test_a_pipe_is_a_trace_too(self):
        read, write = os.pipe()
        os.write(write, TRACE.encode())
        os.close(write)
        output = self.directory / "out"
        done = run("replay", f"/dev/fd/{read}", "--no-ceilings", "--no-plots", "--output", output, pass_fds=[read])
        os.close(read)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads((output / "report.json").read_text())["summary"]["finished"], 4)


class Words(CliTest):
    def test_one_of_a_kind(self):
        # One of everything, with two of it beside.
        model = json.loads((REPOSITORY / "cli/models/llama-3-8b.json").read_text())
        model |= {"num_layers": 1, "num_heads_q": 1, "num_heads_kv": 1, "name": "one"}
        path = self.write("one.json", json.dumps(model))
        header = TRACE.splitlines()[0] + "\n"
        one = ["--model", path, "--threads", 1, "--page-size", 1, "--pages", 1, "--max-batch", 1, "--chunk", 1, "--verify", 1]
        done, _ = self.replay(*one, trace=header + "0,1,1\n")
        text = done.stdout + done.stderr + (self.directory / "out/report.html").read_text()
        for phrase in (
            "1 request, one (one of 1 layer), bf16 cache of 1 page of 1 token (",
            "1 thread)",
            "up to 100 % of 1 page in use",
            "1 row ",
            "attention of the one layer",
            "1 query head, 1 KV head",
            "one of 1 layer",
            "up to 1 sequence",
            "and 1 prompt token a step",
            "1 row a call",
            "The one sampled row agrees",
        ):
            self.assertIn(phrase, text)
        # A number that ends in 1 has a plural: 0.1, 1.1, 1,001.
        self.assertNotRegex(text, r"(?<![\d.,])1 [a-z]+ ?[a-z]*s\b(?<! is)(?<! us)(?<! ms)")
        done, _ = self.replay(*one[:2], "--page-size", 2, "--pages", 4, "--threads", 2, trace=header + "0,1,1\n0,2,2\n")
        self.assertIn("2 requests, one (one of 1 layer), bf16 cache of 4 pages of 2 tokens (", done.stderr)
        self.assertIn("2 threads)", done.stderr)

    def test_one_of_a_kind_elsewhere(self):
        text = attune("explain", "--batch", 1, "--seqlen-q", 1, "--seqlen-kv", 1, env={"OMP_NUM_THREADS": "1"}).stdout
        self.assertIn("\n1 sequence, 1 query and 1 key each, bf16 cache", text)
        text = attune("explain", "--batch", 2, "--seqlen-q", 2, "--seqlen-kv", 2).stdout
        self.assertIn("\n2 sequences, 2 queries and 2 keys each, bf16 cache", text)
        name = attune("check", "--list", "--random", 0).stdout.split()[0]
        text = attune("check", "--random", 0, "--filter", f"^{name.replace('.', '[.]')}$").stdout
        self.assertRegex(text, r"^1 of 1 case inside its bounds on cpu: \d+ elements in ")
        text = attune("info", "--no-ceilings", env={"OMP_NUM_THREADS": "1"}).stdout
        self.assertIn(", 1 thread, ", text)
        trace = self.write("trace.csv", TRACE.splitlines()[0] + "\n0,9000,1\n")
        done = attune("replay", trace, "--pages", 1, "--no-ceilings", "--output", self.directory)
        self.refuse(done, "needs 563 pages and the pool has 1;")
        done = attune("replay", trace, "--page-size", 8192, "--limit", 1, "--max-context", 8193, "--pages", 1, "--no-ceilings",
                      "--output", self.directory)  # fmt: skip
        self.assertIn("1 page of 8192 tokens", done.stderr)
        trace = self.write("trace.csv", TRACE.splitlines()[0] + "\n0,9000,1\n0,1,1\n")
        path = self.write("m.json", (REPOSITORY / "cli/models/llama-3-8b.json").read_text())
        model = json.loads(path.read_text()) | {"num_heads_q": 1, "num_heads_kv": 1, "max_context": 10}
        path = self.write("m.json", json.dumps(model))
        self.refuse(attune("explain", "--model", path, "--tensor-parallel", 2), "1 query head and 1 KV head, which")
        done = attune("replay", trace, "--model", path, "--no-ceilings", "--no-plots", "--output", self.directory, "--verify", 1)
        self.assertIn("note: 1 of 2 requests exceeds the 10 tokens that", done.stderr)
        self.assertIn("--max-context 10 clamps it\n", done.stderr)


class Tables(CliTest):
    def lines(self, *arguments, code=0):
        done = attune(*arguments)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout.splitlines()

    def test_they_fit_80_columns(self):
        trace = self.write("trace.csv", TRACE)
        for command in (
            ["--help"],
            *([name, "--help"] for name in ("replay", "demo", "check", "bench", "info", "explain", "models")),
            ["models"],
            ["info", "--no-ceilings"],
            *(["explain", "--model", model] for model in MODELS),
            ["check", *CASE, "--random", "0"],
            ["bench", "--filter", "sparse", "--reps", "1", "--no-check"],
            ["replay", trace, "--no-ceilings", "--no-plots", "--output", self.directory],
        ):
            with self.subTest(" ".join(map(str, command))):
                lines = self.lines(*command)
                self.assertTrue(lines)
                # A path is not cut.
                self.assertEqual([line for line in lines if len(line) > 80 and " " in line.strip()], [])

    def test_what_is_too_long_goes_on_below_itself(self):
        lines = self.lines("info", "--no-ceilings")
        at = next(i for i, line in enumerate(lines) if line.startswith("    KV source "))
        self.assertTrue(lines[at].endswith(","), lines[at])
        self.assertTrue(lines[at + 1].startswith(" " * 18) and lines[at + 1][18] != " ", lines[at + 1])
        whole = " ".join(line.strip() for line in lines[at : at + 2])
        self.assertIn("KV source     dense, paged cache, contiguous cache, cache + new tokens, sparse slots, ", whole)

    def test_features_do_not_join_ranges_with_a_gap(self):
        rows = dict(re.findall(r"^\| (head_dim_\w+) \| (.*) \|$", attune("info", "--features").stdout, re.M))
        self.assertEqual(rows, {"head_dim_qk": "1..576 | 1..256, 512, 576", "head_dim_v": "1..576 | 1..256, 512"})

    def test_long_names_have_lines_of_their_own(self):
        for cases, own in ("^bench/(decode_4k/bf16|sparse_2k)$", False), ("(mla_decode_4k/bf16|sparse_2k)$", True):
            lines = self.lines("bench", "--filter", cases, "--reps", "1", "--no-check", "--no-ceilings")
            self.assertEqual(len(lines), 5 if own else 3)
            head, row = lines[0], lines[2 if own else 1]
            self.assertRegex(row, r"^ +[\d.]+ " if own else r"^bench/decode_4k/bf16 +[\d.]+ ")
            # Figures end below their headings.
            self.assertEqual(re.search(r"median ms", head).end(), re.search(r" [\d.]+ ", row).end() - 1)


def luminance(color):
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """As WCAG counts it; text wants 4.5, lines and points 3."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


class Page(CliTest):
    """report.html, light and dark, on a desk and on a phone."""

    def setUp(self):
        super().setUp()
        done, _ = self.replay(plots=True)
        self.has_plots = "no plots" not in done.stderr
        self.path = self.directory / "out/report.html"
        self.page = self.path.read_text()
        self.style = self.page[self.page.index("<style>") : self.page.index("</style>")]

    def test_colours_of_both_themes(self):
        light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", self.style, re.S))
        self.assertIn("color-scheme: light dark", self.style)
        self.assertRegex(self.style, r"@media \(prefers-color-scheme: dark\) \{\s*:root")
        self.assertEqual(light.keys(), dark.keys())
        for theme in light, dark:
            for text in "ink", "soft":
                for ground in "page", "card":
                    self.assertGreaterEqual(contrast(theme[text], theme[ground]), 4.5, (text, ground, theme))
            for text in "good", "bad", "plain", "missing":
                self.assertGreaterEqual(contrast(theme[text], theme[f"on-{text}"]), 4.5, (text, theme))
            for color in set(re.findall(r"(?:fill|stroke): (#\w{6})", self.page)):
                self.assertGreaterEqual(contrast(color, theme["card"]), 2.8, (color, theme))
        # No colour stands beside the two lists, in the style or in a picture.
        rules = re.sub(r":root \{.*?\}", "", self.style, flags=re.S)
        self.assertEqual(re.findall(r"#[0-9a-fA-F]{3,8}\b|\b(?:white|black)\b(?!-)", rules), [])
        for name in re.findall(r"var\(--([\w-]+)\)", self.page):
            self.assertIn(name, light)

    def test_pictures_take_the_pages_colours_and_width(self):
        if not self.has_plots:
            self.skipTest("no matplotlib")
        pictures = re.findall(r"<svg .*?</svg>", self.page, re.S)
        self.assertEqual(len(pictures), 8)  # seven, one of them wide and narrow
        self.assertEqual([sum(f'class="{kind}"' in picture for picture in pictures) for kind in ("wide", "narrow")], [1, 1])
        for picture in pictures:
            start = picture[: picture.index(">")]
            self.assertRegex(start, r' aria-label="\w')
            self.assertIn("viewBox", start)
            self.assertNotRegex(start, r" (width|height)=")
            self.assertIn("var(--soft)", picture)
            self.assertNotRegex(picture, r"#ffffff|#000000|#01?0203|#040506|#070809")
        names = re.findall(r'\bid="([^"]+)"', self.page)
        self.assertEqual(len(names), len(set(names)))
        for reference in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', self.page):
            self.assertIn("".join(reference), names)

    @unittest.skipUnless(shutil.which("chromium"), "no chromium")
    def test_a_phone_shows_all_of_it(self):
        frame = self.directory / "frame.html"
        for width, wide in (360, "none"), (390, "none"), (1280, "block"):
            # Widths that a browser's own window may not have.
            frame.write_text(
                f'<iframe src="out/report.html" style="width:{width}px;height:900px;border:0"></iframe><pre></pre><script>onload = () => {{'
                'const page = document.querySelector("iframe").contentDocument, wide = page.querySelector("svg.wide");'
                'const cut = [...page.querySelectorAll("h1, p, th, td, figcaption, svg")].filter(e => e.scrollWidth > e.clientWidth + 1 &&'
                ' e.clientWidth).length;'
                'document.querySelector("pre").textContent = [page.documentElement.scrollWidth, cut, wide ? '
                'getComputedStyle(wide).display : "no picture"].join(" ") }</script>'
            )
            done = subprocess.run(
                ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars",
                 f"--user-data-dir={self.directory}/chromium", "--dump-dom", frame], capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
            measured = re.search(r"<pre>(\d+) (\d+) (.*)</pre>", done.stdout)
            self.assertTrue(measured, done.stdout + done.stderr)
            self.assertEqual(measured.groups(), (str(width), "0", wide if self.has_plots else "no picture"))


class Plans(CliTest):
    def test_explain_makes_no_data(self):
        """A RoPE table of 16 million positions would take a minute, and 8 GiB."""
        for model in MODELS:
            with self.subTest(model):
                start = time.monotonic()
                done = attune("explain", "--model", model, "--seqlen-kv", 1 << 24)
                self.assertLess(time.monotonic() - start, 10)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("16777216 keys", done.stdout)

    def test_numbers_are_for_people(self):
        for arguments, work in (
            (("--batch", 1, "--seqlen-kv", 1), "16.38 kFLOP, 24.58 kB at least: 0.667 FLOP a byte"),
            ((), "536.9 MFLOP, 134.4 MB at least: 4 FLOP a byte"),
            (("--batch", 8, "--seqlen-q", 4096), "1.1 TFLOP, 805.3 MB at least: 1366 FLOP a byte"),
            (("--batch", 512, "--seqlen-kv", 65536, "--seqlen-q", 512), "280.4 TFLOP, 142.8 GB at least: 1963 FLOP a byte"),
        ):
            done = attune("explain", *arguments)
            self.assertRegex(done.stdout, rf"\n  work +{work}\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.ATTUNE = os.path.abspath(sys.argv.pop(1))
    unittest.main(argv=sys.argv)
