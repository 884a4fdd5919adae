# SPDX-License-Identifier: Apache-2.0
"""Fetches the Python part of each version of vLLM in versions.txt, and what it imports, for the contract tests.

usage: fetch_vllm.py FOLDER. Makes FOLDER/<version>/vllm and FOLDER/site; what is there is kept. Exits with 1, and says why, where
something cannot be had.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

CONTRACT = pathlib.Path(__file__).parents[1] / "vllm_contract"


def pip(*arguments, **environment):
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)],
                          env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed:\n{done.stderr[-2000:]}")


def fetch_site(site):
    requirements = CONTRACT / "requirements.txt"
    stamp = site / "requirements.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return
    shutil.rmtree(site, ignore_errors=True)
    pip("install", "--no-deps", "--target", site, "-r", requirements)
    shutil.copy(requirements, stamp)


def fetch_version(line, folder, site):
    """line: a requirement with its hash. The source distribution is unpacked, not built: only Python files are wanted."""
    version = line.split()[0].partition("==")[2]
    target = folder / version
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as work:
        work = pathlib.Path(work)
        (work / "requirement.txt").write_text(line)
        # pip asks the build backend for metadata: of the version that was asked for, without compiled parts.
        pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest", work, "-r", work / "requirement.txt",
            PYTHONPATH=str(site), VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=version)
        with tarfile.open(work / f"vllm-{version}.tar.gz") as archive:
            inside = f"vllm-{version}/vllm/"
            members = [member for member in archive if member.name.startswith(inside) and member.name.endswith(".py")]
            archive.extractall(work, members, filter="data")
        (work / f"vllm-{version}").rename(target)


def main(folder):
    folder = pathlib.Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    site = folder / "site"
    fetch_site(site)
    lines = [line for line in (CONTRACT / "versions.txt").read_text().splitlines() if line and not line.startswith("#")]
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        list(pool.map(lambda line: fetch_version(line, folder, site), lines))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RuntimeError as error:
        sys.exit(f"fetch_vllm: {error}")
