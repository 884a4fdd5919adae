#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_wheel.py on small wheels with one thing wrong each. CC is the compiler; a glibc of our own has the versions."""

import os
import platform
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "check_wheel.py"
MACHINE = platform.machine()
INFO = "attune-0.2.0.dist-info"


class CheckWheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        # Two versions of glibc, a function each.
        (self.folder / "glibc.map").write_text("GLIBC_2.17 { global: old; local: *; };\nGLIBC_2.28 { global: fresh; } GLIBC_2.17;\n")
        self.compile("libc.so.6", "void old(void) {} void fresh(void) {}", "-Wl,--version-script=glibc.map")
        (self.folder / "attune.map").write_text("ATTUNE_0 { global: attune_*; local: *; };\n")

    def compile(self, name, code, *options):
        (self.folder / "code.c").write_text(code)
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-nostdlib", "code.c", "-o", name, f"-Wl,-soname={name}", *options]
        subprocess.run(command, cwd=self.folder, check=True)
        return self.folder / name

    def wheel(self, platforms=f"manylinux_2_17_{MACHINE}", leave_out=(), size=0, call="old", attune="", core="", options=()):
        """A wheel; attune and core are more code of its two libraries."""
        library = self.compile("libattune.so.0", f"void {call}(void); void attune_run(void) {{ {call}(); }} {attune}", "./libc.so.6",
                               *(["-Wl,--version-script=attune.map"] if not attune else []))  # fmt: skip
        module = self.compile("_core.abi3.so", f"void attune_run(void); void PyInit__core(void) {{ attune_run(); }} {core}",
                              "./libattune.so.0", "-Wl,--allow-shlib-undefined", *(options or ["-Wl,-rpath,$ORIGIN"]))  # fmt: skip
        files = {f"attune/{name}": b"" for name in ("__init__.py", "py.typed", "_core.pyi")}
        files["attune/libattune.so.0"] = library.read_bytes()
        files["attune/_core.abi3.so"] = module.read_bytes()
        files["attune/attune_kernels.bundle"] = os.urandom(size)
        files |= {f"{INFO}/licenses/{name}": b"" for name in ("LICENSE", "LICENSE-highway", "LICENSE-nanobind")}
        path = self.folder / f"attune-0.2.0-cp312-abi3-{platforms}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                if name not in leave_out:
                    archive.writestr(name, data)
        return path

    def check(self, wheel, code, text):
        done = subprocess.run([sys.executable, TOOL, wheel], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertIn(f"{wheel.name}: ", done.stdout)
        self.assertIn(text, done.stdout)
        self.assertEqual(done.stdout.count("\n"), 1, done.stdout)

    def test_what_is_well(self):
        self.check(self.wheel(), 0, "0.0 MB, needs glibc 2.17")
        self.check(self.wheel(f"manylinux_2_28_{MACHINE}", call="fresh"), 0, "needs glibc 2.28")
        self.check(self.wheel(f"manylinux2014_{MACHINE}.manylinux_2_17_{MACHINE}"), 0, "needs glibc 2.17")

    def test_a_newer_glibc_than_the_name_says(self):
        self.check(self.wheel(call="fresh"), 1, "libattune.so.0 needs fresh of glibc 2.28; the wheel says 2.17")

    def test_names(self):
        self.check(self.wheel(f"linux_{MACHINE}"), 1, "no manylinux_X_Y_MACHINE tag")
        other = "aarch64" if MACHINE == "x86_64" else "x86_64"
        wheel = self.wheel(f"manylinux_2_17_{other}")
        done = subprocess.run([sys.executable, TOOL, wheel], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout.count(f", the wheel for {other}"), 2, done.stdout)

    def test_libraries_from_outside(self):
        self.compile("libhwy.so.1", "void hwy(void) {}")
        wheel = self.wheel(core="void hwy(void); void PyInit_(void) __attribute__((visibility(\"hidden\"))); void PyInit_(void) { hwy(); }",
                           options=("./libhwy.so.1", "-Wl,-rpath,$ORIGIN"))  # fmt: skip
        self.check(wheel, 1, "needs libhwy.so.1, which is neither glibc's nor in the wheel")
        (self.folder / "cxx.map").write_text("GLIBCXX_3.4.30 { global: throws; };\n")
        self.compile("libm.so.6", "void throws(void) {}", "-Wl,--version-script=cxx.map")
        wheel = self.wheel(core="void throws(void); static void f(void) { throws(); } void (*PyInit__core_)(void) "
                           "__attribute__((visibility(\"hidden\"))) = f;", options=("./libm.so.6", "-Wl,-rpath,$ORIGIN"))  # fmt: skip
        self.check(wheel, 1, "needs throws of GLIBCXX_3.4.30, which is not glibc's")
        self.check(self.wheel(options=("-Wl,-rpath,/opt/lib",)), 1, "_core.abi3.so looks for libraries in /opt/lib")

    def test_exports(self):
        self.check(self.wheel(attune="void other(void) {}"), 1, "libattune.so.0 exports other")
        self.check(self.wheel(core="void __cxa_throw(void) {}"), 1, "_core.abi3.so exports __cxa_throw")

    def test_contents(self):
        for name in ("attune/attune_kernels.bundle", "attune/py.typed", f"{INFO}/licenses/LICENSE-highway"):
            self.check(self.wheel(leave_out=[name]), 1, f"{name} is missing")
        self.check(self.wheel(size=20_100_000), 1, "20.1 MB; at most 20")


if __name__ == "__main__":
    unittest.main()
