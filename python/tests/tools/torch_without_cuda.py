# SPDX-License-Identifier: Apache-2.0
"""Makes PyTorch's wheel of PyPI importable without the CUDA libraries that it links: 0.5 GB to install instead of 2.5 GB.

usage: torch_without_cuda.py PYTHON_OF_THE_VENV
Libraries that torch needs and nothing provides (but the driver's, which it does without) become empty ones whose functions return 100, no device. Tests on the CPU call none.
They lie beside torch's own libraries, where its loader looks first. Needs nm, readelf and a C compiler; Linux only.
"""

import pathlib
import re
import subprocess
import sys
import tempfile


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def function(name):
    if re.search(r"Error(String|Name)$", name):
        return f'const char* {name}(int code) {{ return "no CUDA"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def main(python):
    site = pathlib.Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    directory = site / "torch/lib"
    libraries = list(directory.glob("*.so*"))
    needed = {name for library in libraries for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", str(library)))}
    absent = sorted(name for name in needed if re.match(r"lib(cu|nccl|nv)", name) and name != "libcuda.so.1" and not (directory / name).exists())
    if not absent:
        return
    versions = {}  # library -> versions that torch asks it for
    symbols = {}  # function -> version, or ""
    for library in libraries:
        of = None
        for line in output("readelf", "-VW", str(library)).splitlines():
            if found := re.search(r"Version: 1\s+File: (\S+)", line):
                of = found[1]
            elif of in absent and (found := re.search(r"Name: (\S+)", line)):
                versions.setdefault(of, set()).add(found[1])
        for line in output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)).splitlines():
            kind, name = line.split()[-2:]
            name, _, version = name.partition("@")
            if kind == "U" and re.match(r"_*(cu|nccl|nv)[A-Za-z]", name):
                symbols[name] = version.lstrip("@")
    with tempfile.TemporaryDirectory() as scratch:
        for name in absent:
            of_name = versions.get(name, set())
            stub, script = pathlib.Path(scratch) / "stub.c", pathlib.Path(scratch) / "stub.map"
            stub.write_text("".join(function(symbol) for symbol, version in sorted(symbols.items())
                                    if not version or version in of_name))
            script.write_text("".join(f"{version} {{ global: {' '.join(s + ';' for s, v in symbols.items() if v == version)} }};\n"
                                      for version in sorted(of_name)))
            scripted = [f"-Wl,--version-script={script}"] if of_name else []
            subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", *scripted, "-o", str(directory / name),
                            str(stub)], check=True)
    print(f"{len(absent)} libraries, {len(symbols)} functions")


if __name__ == "__main__":
    main(sys.argv[1])
