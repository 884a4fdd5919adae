# SPDX-License-Identifier: Apache-2.0
"""The contracts in <engine>_contract/, under each version of an engine that tools/fetch_engine.py has fetched."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent


class Contracts:
    def __init__(self, engine, name):
        """name: as people write it."""
        self.name, self.folder = name, TESTS / f"{engine}_contract"
        self.fetched = pathlib.Path(os.environ.get(f"ATTUNE_{name.upper()}", TESTS.parents[1] / f"build/python/{engine}")).resolve()
        self.versions = re.findall(rf"^{engine}==(\S+)", (self.folder / "versions.txt").read_text(), re.M)

    @contextlib.contextmanager
    def start(self, output):
        """-> the running process, which writes to output."""
        versions = [version for version in self.versions if (self.fetched / version).is_dir()]
        with open(output / "log", "w") as log:
            process = subprocess.Popen([sys.executable, TESTS / "tools/run_contracts.py", output, self.folder, self.fetched, *versions],
                                       stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                                       start_new_session=True)
        yield process, output
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()

    def check(self, version, started):
        if not (self.fetched / version).is_dir():
            pytest.skip(f"{self.name} {version} is not in {self.fetched}: python/tests/tools/fetch_engine.py fetches it")
        process, output = started
        assert process.wait() == 0, (output / "log").read_text()[-8000:]
        said = (output / version).read_text()
        assert (output / f"{version}.status").read_text() == "0", said[-8000:]
        assert re.search(r"\b\d\d+ passed", said), said
