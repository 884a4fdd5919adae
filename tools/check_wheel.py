#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks wheels: check_wheel.py WHEEL.... What one holds, its size, and that its libraries need no more than its name says:

the glibc of its manylinux tag (by the versions of the symbols that they need), its machine, and no library but glibc's own and
those inside. Exit code 1 where one is not so. Needs readelf (binutils).
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

MAX_BYTES = 20e6
FILES = ("attune/__init__.py", "attune/py.typed", "attune/_core.pyi", "attune/libattune.so.0", "attune/attune_kernels.bundle")
LICENSES = ("LICENSE", "LICENSE-highway", "LICENSE-nanobind")
GLIBC = re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux-[\w-]+)\.so\.\d$")
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
# What may be seen of each library from outside.
EXPORTS = {"libattune.so": re.compile(r"attune_\w+$|ATTUNE_\d+$"), "_core.": re.compile(r"PyInit__core$")}


def readelf(path, *options):
    return subprocess.run(["readelf", "--wide", *options, path], check=True, capture_output=True, text=True).stdout


def platform_of(name):
    """(glibc, machine) of "attune-0.2.0-cp312-abi3-manylinux_2_17_x86_64.whl"; of several tags the oldest."""
    tags = re.findall(r"manylinux_(\d+)_(\d+)_(\w+?)(?=\.|$)", name.removesuffix(".whl"))
    if not tags or len({machine for _, _, machine in tags}) != 1:
        raise ValueError("its name has no manylinux_X_Y_MACHINE tag")
    return min((int(major), int(minor)) for major, minor, _ in tags), tags[0][2]


def library_faults(path, glibc, machine, inside):
    """What is wrong with one shared library, and the newest glibc that it needs."""
    faults = []
    found = re.search(r"Machine:\s+(.*)", readelf(path, "--file-header")).group(1).strip()
    if found != MACHINES.get(machine):
        faults.append(f"is for {found}, the wheel for {machine}")
    dynamic = readelf(path, "--dynamic")
    for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if not GLIBC.match(needed) and needed not in inside:
            faults.append(f"needs {needed}, which is neither glibc's nor in the wheel")
    for runpath in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        if runpath != "$ORIGIN":
            faults.append(f"looks for libraries in {runpath}")
    newest = (0, 0)
    for symbol, version in re.findall(r"\bUND +(\S+?)@(\S+)", readelf(path, "--dyn-syms")):
        if version.startswith("ATTUNE_"):
            continue
        number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
        if number is None:
            faults.append(f"needs {symbol} of {version}, which is not glibc's")
            continue
        version = int(number.group(1)), int(number.group(2))
        newest = max(newest, version)
        if version > glibc:
            faults.append(f"needs {symbol} of glibc %d.%d; the wheel says %d.%d" % (*version, *glibc))
    allowed = next((pattern for start, pattern in EXPORTS.items() if path.name.startswith(start)), None)
    exported = re.findall(r"(?:GLOBAL|WEAK) +DEFAULT +(?!UND)\S+ +([^\s@]+)", readelf(path, "--dyn-syms"))
    strangers = sorted({name for name in exported if allowed and not allowed.match(name)})
    if strangers:
        faults.append(f"exports {', '.join(strangers[:5])}")
    return faults, newest


def check(wheel):
    """(faults, the newest glibc that is needed) of one wheel."""
    faults, newest = [], (0, 0)
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        faults.append(f"{size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f}")
    glibc, machine = platform_of(wheel.name)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        infos = {name.split("/")[0] for name in names if ".dist-info/" in name}
        wanted = [*FILES, *(f"{info}/licenses/{name}" for info in infos for name in LICENSES)]
        faults += [f"{name} is missing" for name in wanted if name not in names]
        libraries = [name for name in names if re.search(r"\.so(\.\d+)*$", name)]
        if not any(name.startswith("attune/_core.") for name in libraries):
            faults.append("attune/_core.*.so is missing")
        for name in libraries:
            path = pathlib.Path(archive.extract(name, folder))
            inside = {pathlib.PurePath(other).name for other in libraries}
            found, needed = library_faults(path, glibc, machine, inside)
            faults += [f"{name} {fault}" for fault in found]
            newest = max(newest, needed)
    return faults, newest


def main(wheels):
    if not wheels:
        sys.exit(__doc__)
    bad = 0
    for wheel in map(pathlib.Path, wheels):
        try:
            faults, newest = check(wheel)
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            faults, newest = [str(error)], (0, 0)
        for fault in faults:
            print(f"{wheel.name}: {fault}")
        bad += bool(faults)
        if not faults:
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, needs glibc %d.%d" % newest)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
