# SPDX-License-Identifier: Apache-2.0
"""Fetches the Python part of each version of an engine in its versions.txt, and what it imports, for the contract tests.

usage: fetch_engine.py vllm|sglang FOLDER. Makes FOLDER/<version>/<engine> and FOLDER/site; what is there is kept. Exits with 1, and
says why, where something cannot be had.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

TESTS = pathlib.Path(__file__).parents[1]
# SGLang has wheels alone, each of a version of Python and a machine: this one serves all, as nothing compiled is taken.
SGLANG_WHEEL = ("--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--platform",
                "manylinux_2_34_x86_64")


def pip(*arguments, **environment):
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)],
                          env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed:\n{done.stderr[-2000:]}")


def fetch_site(requirements, site):
    stamp = site / "requirements.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return
    shutil.rmtree(site, ignore_errors=True)
    pip("install", "--no-deps", "--no-compile", "--target", site, "-r", requirements)
    shutil.copy(requirements, stamp)


def unpack_vllm(line, version, work, site):
    """The source distribution is unpacked, not built. pip asks its build backend for metadata: of the version that was asked for,
    without compiled parts."""
    pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest", work, "-r", line, PYTHONPATH=str(site),
        VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=version)
    inside = f"vllm-{version}"
    with tarfile.open(work / f"{inside}.tar.gz") as archive:
        members = [member for member in archive if member.name.startswith(f"{inside}/vllm/") and member.name.endswith(".py")]
        archive.extractall(work, members, filter="data")
    return work / inside


def unpack_sglang(line, version, work, site):
    pip("download", "--no-deps", *SGLANG_WHEEL, "--dest", work, "-r", line)
    (wheel,) = work.glob(f"sglang-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("sglang/") and not name.endswith(".so")]
        archive.extractall(work / "wheel", members)
    return work / "wheel"


def fetch_version(engine, requirement, folder, site):
    """requirement: a line with its hash."""
    version = requirement.split()[0].partition("==")[2]
    target = folder / version
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as work:
        line = pathlib.Path(work, "requirement.txt")
        line.write_text(requirement)
        {"vllm": unpack_vllm, "sglang": unpack_sglang}[engine](line, version, line.parent, site).rename(target)


def main(engine, folder):
    contract = TESTS / f"{engine}_contract"
    folder = pathlib.Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    site = folder / "site"
    fetch_site(contract / "requirements.txt", site)
    lines = [line for line in (contract / "versions.txt").read_text().splitlines() if line and not line.startswith("#")]
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        list(pool.map(lambda line: fetch_version(engine, line, folder, site), lines))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RuntimeError as error:
        sys.exit(f"fetch_engine: {error}")
