#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the attune command says of GPUs that are not there: cli_devices_test.py PATH_OF_ATTUNE [unittest options].

A libcuda and an NVRTC of the test's own stand for them: they load and compile anything, and run nothing."""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import unittest
from pathlib import Path

import cli_test
from cli_test import MODELS, CliTest, attune

CASE = ("check", "--filter", "^sparse/softcap", "--random", "0")
BENCH = ("bench", "--filter", "sparse", "--reps", "1", "--no-check", "--no-ceilings")


def write_bundle(path, major, minor, entries=b""):
    """A kernel bundle of that CUDA, as `src/cuda/jit/bundle.h` has it."""
    numbers = struct.pack("<4I", 1, major, minor, len(entries) // 80)
    Path(path).write_bytes(b"ATTNBNDL" + numbers + hashlib.sha256(numbers + entries).digest() + entries)


class FakeGpus(CliTest):
    def compiled(self, name, source):
        """A shared library of this C source."""
        compiler = shutil.which(os.environ.get("CC", "cc"))
        path, library = self.write(name + ".c", source), self.directory / (name + ".so")
        if not compiler or subprocess.run([compiler, "-shared", "-fPIC", path, "-o", library], capture_output=True, check=False).returncode:
            self.skipTest("no C compiler")
        return library

    def fake_gpus(self, *gpus, cuda=12080, nvrtc=None):
        """The environment of a machine with these GPUs (name, compute capability), whose driver loads whatever there is.

        cuda: the version that it supports. nvrtc: that of the compiler, or None: there is none."""
        listed = ", ".join(f'{{"{name}", {capability}}}' for name, capability in gpus) or "{0, 0}"
        driver = self.compiled(
            "libcuda",
            f"""
            #include <stdint.h>
            #include <string.h>
            static const struct {{ const char* name; int capability; }} gpus[] = {{ {listed} }};
            static int yes(void** handle) {{ if (handle) *handle = (void*)16; return 0; }}
            static int nothing(void) {{ return 0; }}
            static int version(int32_t* out) {{ *out = {cuda}; return 0; }}
            static int count(int32_t* out) {{ *out = {len(gpus)}; return 0; }}
            static int device(int32_t* out, int32_t i) {{ *out = i; return 0; }}
            static int name(char* out, int32_t size, int32_t i) {{ strncpy(out, gpus[i].name, size); return 0; }}
            static int memory(size_t* out, int32_t i) {{ *out = (size_t)141 << 30; return 0; }}
            static int attribute(int32_t* out, int32_t which, int32_t i) {{
              const int c = gpus[i].capability;
              *out = which == 75 ? c / 10 : which == 76 ? c % 10 : which == 16 ? 132 : which == 38 ? 50 << 20 : 227 << 10;
              return 0;
            }}
            static int function_attribute(int32_t* out, int32_t which) {{ *out = 64; return 0; }}
            static const struct {{ const char* name; void* function; }} functions[] = {{
              {{"cuInit", nothing}}, {{"cuDriverGetVersion", version}}, {{"cuDeviceGetCount", count}}, {{"cuDeviceGet", device}},
              {{"cuDeviceGetName", name}}, {{"cuDeviceTotalMem", memory}}, {{"cuDeviceGetAttribute", attribute}},
              {{"cuFuncGetAttribute", function_attribute}}, {{"cuOccupancyMaxActiveBlocksPerMultiprocessor", function_attribute}},
              {{"cuOccupancyMaxActiveClusters", function_attribute}}, {{"cuKernelSetAttribute", nothing}}, {{"cuFuncLoad", nothing}},
              {{"cuCtxPushCurrent", nothing}}}};
            int cuGetProcAddress_v2(const char* wanted, void** function, int version, uint64_t flags, int* status) {{
              *function = yes, *status = 0;
              for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i)
                if (!strcmp(wanted, functions[i].name)) *function = functions[i].function;
              return 0;
            }}""",
        )
        return {
            "ATTUNE_LIBCUDA": str(driver),
            "ATTUNE_NVRTC": str(self.directory / "no-nvrtc.so") if nvrtc is None else self.fake_nvrtc(nvrtc),
            "ATTUNE_CACHE_DIR": str(self.directory / "cache"),
            "ATTUNE_BUNDLE": str(self.directory / "no.bundle"),
        }

    def fake_nvrtc(self, version):
        """The path of a compiler of that major version, which makes nothing of everything."""
        source = "#include <stddef.h>\n"
        for name in "GetCUBINSize", "GetPTXSize", "GetProgramLogSize":
            source += f"int nvrtc{name}(void* program, size_t* out) {{ *out = 1; return 0; }}\n"
        for name in "GetCUBIN", "GetPTX":
            source += f"int nvrtc{name}(void* program, char* out) {{ *out = 1; return 0; }}\n"
        for name in "CreateProgram", "DestroyProgram", "CompileProgram", "GetSupportedArchs", "GetProgramLog", "GetErrorString":
            source += f"int nvrtc{name}(void) {{ return 0; }}\n"
        source += "int nvrtcGetNumSupportedArchs(int* out) { *out = 0; return 0; }\n"
        source += f"int nvrtcVersion(int* major, int* minor) {{ *major = {version}; *minor = 0; return 0; }}\n"
        return str(self.compiled(f"nvrtc{version}", source))


class Devices(FakeGpus):
    def test_gpus_are_taken_where_there_are_some(self):
        preload = self.spoilt(
            """
            #include <stdlib.h>
            #include <string.h>
            /* A CPU, and GPUs of the ordinals that FAKE_GPUS lists, a digit each. */
            attune_status attune_device_count(int32_t* n) {
              *n = 1 + (int32_t)strlen(getenv("FAKE_GPUS"));
              return ATTUNE_OK;
            }
            attune_status attune_get_device_info(int32_t i, attune_device_info* info) {
              info->device.type = i > 0 ? ATTUNE_DEVICE_CUDA : ATTUNE_DEVICE_CPU;
              info->device.index = i > 0 ? getenv("FAKE_GPUS")[i - 1] - '0' : 0;
              strcpy(info->name, "fake");
              strcpy(info->isa, "fake");
              return ATTUNE_OK;
            }""",
        )
        for gpus, device, taken in (
            ("", "auto", "cpu"),
            ("", None, "cpu"),
            ("0", "auto", "cuda:0"),
            ("0", None, "cuda:0"),
            ("20", "auto", "cuda:2"),
            ("20", "cuda", "cuda:0"),
            ("20", "cuda:2", "cuda:2"),
            ("20", "cpu", "cpu"),
        ):
            with self.subTest(f"{device} of '{gpus}'"):
                done = attune("explain", *(["--device", device] if device else []), env=preload | {"FAKE_GPUS": gpus})
                self.assertIn(f"on {taken} (fake)", " ".join(done.stdout.split()), done.stderr)
                # The set of a GPU has names of its own.
                names = attune("bench", "--list", *(["--device", device] if device else []), env=preload | {"FAKE_GPUS": gpus})
                self.assertEqual(names.stdout.startswith("bench_cuda/"), taken != "cpu")
        self.refuse(attune("explain", "--device", "cuda", env=preload | {"FAKE_GPUS": "2"}), "cuda:0", "; this machine has cpu, cuda:2\n")
        self.refuse(attune("check", "--device", "cuda0"), "'cuda0'", "auto, cpu, cuda or cuda:N", "(this machine has cpu)")
        for device in ("cuda:-1", "cuda:4294967296", "cuda:", "cuda:1x"):  # none of them is cuda:0
            for env in ({}, preload | {"FAKE_GPUS": "0"}):
                self.refuse(attune("check", "--device", device, env=env), f"unknown device '{device}'; N of cuda:N must be 0..2147483647")

    def test_a_wrong_architecture_is_no_reason_to_take_the_cpu(self):
        """ATTUNE_ARCH, which with `--device cuda` is refused, too."""
        known = "ATTUNE_ARCH is 'foo'; it must be one of sm_80, sm_86, "
        for command in (["explain"], BENCH, CASE, ["bench", "--list"]):
            with self.subTest(command[0]):
                self.refuse(attune(*command, env={"ATTUNE_ARCH": "foo"}), known)
        self.refuse(self.replay(code=2, env={"ATTUNE_ARCH": "foo"})[0], known)
        a10 = self.fake_gpus(("Fake A10", 86), ("Tesla T4", 75), nvrtc=12)
        self.refuse(attune("explain", env=a10 | {"ATTUNE_ARCH": "foo"}), known)
        newer = (
            "CUDA device 0 (Fake A10) is not used: ATTUNE_ARCH names sm_90, whose code a GPU of compute capability 8.6 does not run; it "
            "may be sm_80 or sm_86"
        )
        newer_env = a10 | {"ATTUNE_ARCH": "sm_90"}
        self.refuse(attune("explain", env=newer_env), newer)
        self.assertIn("not used: " + newer, " ".join(attune("info", "--no-ceilings", env=newer_env).stdout.split()))
        # One that a GPU runs is taken; the CPU needs none.
        done = attune("explain", env=a10 | {"ATTUNE_ARCH": "sm_80"})
        self.assertIn("on cuda:0 (sm_80)", " ".join(done.stdout.split()), done.stderr)
        for environment in newer_env, {"ATTUNE_ARCH": "foo"}:
            done = attune("explain", "--device", "cpu", env=environment)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(attune("explain", env={"ATTUNE_ARCH": "sm_90"}).returncode, 0)

    def test_a_gpu_that_is_too_old_is_named(self):
        why = "CUDA device 0 (Tesla T4) has compute capability 7.5; the kernels need 8.0 (Ampere) or newer"
        old = self.fake_gpus(("Tesla T4", 75), ("Tesla V100", 70))
        for command in (["explain"], BENCH, CASE, ["bench", "--list"]):
            with self.subTest(" ".join(command)):
                done = attune(*command, env=old)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stderr, f"note: --device auto is the CPU: {why}\n")
        done, _ = self.replay(env=old)
        self.assertEqual(done.stderr.count(why), 1)
        self.assertIn("not used: " + why, " ".join(attune("info", "--no-ceilings", env=old).stdout.split()))
        self.assertEqual(attune("explain", "--device", "cpu", env=old).stderr, "")
        done = attune("explain", env=old | {"ATTUNE_ARCH": "sm_80"})
        self.assertEqual((done.returncode, done.stderr), (0, f"note: --device auto is the CPU: {why}\n"))
        done = attune("explain", env=self.fake_gpus(("Fake H200", 90), cuda=12020))
        why = "the NVIDIA driver is too old: it supports CUDA 12.2, and 12.4 (driver 550) or newer is needed"
        self.assertEqual((done.returncode, done.stderr), (0, f"note: --device auto is the CPU: {why}\n"))
        for environment in self.fake_gpus(), {"ATTUNE_LIBCUDA": "/nonexistent"}:
            self.assertEqual(attune("explain", env=environment).stderr, "")
        newer = self.fake_gpus(("Tesla T4", 75), ("Fake A10", 86), nvrtc=12)
        done = attune("explain", env=newer)
        self.assertIn("on cuda:1 (sm_86)", " ".join(done.stdout.split()), done.stderr)
        self.assertEqual(done.stderr, "")

    def test_without_code_for_a_gpu_the_reason_comes_first(self):
        h200 = self.fake_gpus(("Fake H200", 90))
        bundle, compiler = h200["ATTUNE_BUNDLE"], h200["ATTUNE_NVRTC"]
        kernel = r"; the kernel is decode/decode\.cu( ATTUNE_\w+=\d+){3} and \d+ more macros\n$"
        pip = "pip install nvidia-cuda-nvrtc-cu12, or set ATTUNE_NVRTC"
        absent = rf"NVRTC was not found \({compiler}: [^;]*\)"
        driver = "or install a driver of CUDA 13 or newer"

        def expect(reason, **environment):
            done = attune("explain", env=h200 | environment)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, "^attune: [a-z ]*: " + reason + kernel)

        expect(rf"there is no kernel bundle {bundle}; {absent}; {pip}")
        write_bundle(bundle, 13, 0)
        unused = f"the kernel bundle {bundle} was made with CUDA 13.0 and this driver supports CUDA 12.8: it is not used"
        expect(f"{unused}; {absent}; {pip}; {driver}")
        expect(f"{unused}; ATTUNE_JIT=off forbids compiling; set ATTUNE_JIT=on, with NVRTC: {pip}; {driver}", ATTUNE_JIT="off")
        newer, older = self.fake_nvrtc(13), self.fake_nvrtc(12)
        expect(
            rf"{unused}; NVRTC 13\.0 \({newer}\) is newer than the driver, which supports CUDA 12; {pip}; {driver}", ATTUNE_NVRTC=newer
        )
        cache = h200["ATTUNE_CACHE_DIR"]
        not_cached = rf"the kernel is not in the disk cache \({cache}\); ATTUNE_JIT=off forbids compiling; set ATTUNE_JIT=on"
        expect(f"{unused}; {not_cached}; {driver}", ATTUNE_JIT="off", ATTUNE_NVRTC=older)
        write_bundle(bundle, 12, 4)
        expect(f"the kernel is not in the bundle {bundle}; {not_cached}", ATTUNE_JIT="off", ATTUNE_NVRTC=older)
        expect(f"the kernel is not in the bundle {bundle}; {absent}; {pip}")
        info = " ".join(attune("info", "--no-ceilings", env=h200).stdout.split())
        self.assertRegex(info, rf"compiler none \({absent}; {pip}\)")
        # A driver of CUDA 13 needs that of CUDA 13.
        h200 = self.fake_gpus(("Fake H200", 90), cuda=13000)
        expect(rf"the kernel is not in the bundle {bundle}; {absent}; pip install 'nvidia-cuda-nvrtc==13\.\*', or set ATTUNE_NVRTC")

    def test_one_of_a_thing_is_singular(self):
        h200 = self.fake_gpus(("Fake H200", 90), nvrtc=12)
        ampere = h200 | {"ATTUNE_ARCH": "sm_80"}
        write_bundle(h200["ATTUNE_BUNDLE"], 12, 4, bytes(80))
        self.assertIn(", 1 module by NVRTC 12.4", " ".join(attune("info", "--no-ceilings", env=h200).stdout.split()))
        for model in MODELS:
            for batch, queries, keys, page in (1, 1, 1, 1), (1, 1, 4096, 64), (1, 64, 64, 16), (64, 1, 4096, 1):
                shape = ("--model", model, "--batch", batch, "--seqlen-q", queries, "--seqlen-kv", keys, "--page-size", page)
                for environment in {"OMP_NUM_THREADS": "1", "ATTUNE_LIBCUDA": "/dev/null"}, h200, ampere:
                    with self.subTest(f"{shape} {environment.get('ATTUNE_ARCH')}"):
                        text = " ".join(attune("explain", *shape, env=environment).stdout.split())
                        self.assertNotRegex(text, r"\b1 (?!is\b|has\b|warps x 16 keys)[a-z]+s\b")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cli_test.ATTUNE = os.path.abspath(sys.argv.pop(1))
    unittest.main(argv=sys.argv)
