#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`attune check --stress` as users meet it: cli_stress_test.py PATH_OF_ATTUNE [unittest options]."""

import os
import re
import sys
import unittest

import cli_test
from cli_test import CliTest, attune


class Stress(CliTest):
    def test_stress_of_the_backward_alone(self):
        done = attune("check", "--stress", "2", "--only", "cpu_backward", "--budget", "300")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        kernels = [line.split() for line in done.stdout.splitlines()[1:]]
        self.assertEqual([words[0] for words in kernels], ["cpu_backward"])
        self.assertGreater(int(kernels[0][1]), 0)

    def test_stress_repeats_as_often_as_it_is_told(self):
        done = attune("check", "--stress-case", "3:1", "--budget", "300", "--repeats", "37")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        words = done.stdout.splitlines()[1].split()
        self.assertGreaterEqual(int(words[3]), 37)
        self.assertLess(int(words[3]), 60)  # and the other ways to run it

    def test_an_option_without_effect_is_refused(self):
        for option, value in (("--seed", 3), ("--only", "cpu"), ("--configurations", 8), ("--budget", 300), ("--repeats", 3)):
            self.refuse(attune("check", option, value), f"{option} is an option of --stress and --stress-case")
        for arguments in (["--filter", "edge"], ["--random", 3], ["--list"], ["--json"]):
            self.refuse(attune("check", "--stress", 1, *arguments), f"{arguments[0]} is an option of the table")
            self.refuse(attune("check", "--stress-case", "3:1", *arguments), f"{arguments[0]} is an option of the table")

    def test_a_kernel_that_is_none_is_refused(self):
        message = "--only is 'cpu_decode', which matches none of cache_op, cpu_attention, cpu_backward, indexer, merge, qkv_prepare"
        self.refuse(attune("check", "--stress", 1, "--only", "cpu_decode"), message)

    def test_nothing_to_run_says_what_draws_more(self):
        done = attune("check", "--stress", 0.5, "--only", "indexer", "--budget", 100, "--configurations", 1)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("0 of 0 cases well", done.stdout)
        self.assertIn("no batch that was drawn is for these; more seconds draw more batches, more --configurations than 1 more kinds", done.stdout)

    def test_stress_finds_a_wrong_gradient_and_says_how_to_see_it_again(self):
        preload = self.spoilt(
            """
            /* Spoils the first element of dk's last row where there are more than 50. */
            attune_status attune_attention_backward_run(const attune_plan* p, const attune_attention_backward* b, void* w,
                                                        size_t n, void* s) {
              typedef attune_status (*run_function)(const attune_plan*, const attune_attention_backward*, void*, size_t,
                                                    void*);
              attune_status status = ((run_function)dlsym(RTLD_NEXT, "attune_attention_backward_run"))(p, b, w, n, s);
              const int64_t rows = b->dk.shape[0], size = b->dk.dtype == ATTUNE_FLOAT32 ? 4 : 2;
              if (status == ATTUNE_OK && b->dk.rank == 3 && rows > 50)
                ((unsigned char*)b->dk.data)[((rows - 1) * b->dk.stride[0] + 1) * size - 1] ^= 0x41;
              return status;
            }""",
        )
        small = ("--budget", "300", "--configurations", "8")
        done = attune("check", "--stress", "60", "--seed", "4", "--only", "cpu_backward", *small, env=preload)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        match = re.search(r"attune (check --stress-case 4:\d+ .*)\n", done.stdout)
        self.assertTrue(match, done.stdout)
        self.assertRegex(done.stdout, r"still fails with \d sequences?: queries [\d, ]+; keys [\d, ]+\n")
        again = attune(*match.group(1).split(), env=preload)
        self.assertEqual(again.returncode, 1, again.stdout)
        self.assertIn("dk", again.stdout)
        self.assertEqual(attune(*match.group(1).split()).returncode, 0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.ATTUNE = os.path.abspath(sys.argv.pop(1))
    unittest.main(argv=sys.argv)
