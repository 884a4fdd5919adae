# SPDX-License-Identifier: Apache-2.0
"""Runs the contracts in <engine>_contract/ under each version of an engine that tools/fetch_engine.py has fetched. An engine is large and
there is one of it in a process, so each version has its own."""

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
        self.engine, self.name = engine, name
        self.folder = TESTS / f"{engine}_contract"
        self.fetched = pathlib.Path(os.environ.get(f"ATTUNE_{name.upper()}", TESTS.parents[1] / f"build/python/{engine}"))
        self.versions = re.findall(rf"^{engine}==(\S+)", (self.folder / "versions.txt").read_text(), re.M)

    @contextlib.contextmanager
    def start(self, tmp_path_factory):
        """version -> (process, its output), all at once: most of each is the import of the engine."""
        started = {}
        for version in self.versions:
            if not (self.fetched / version).is_dir():
                continue
            path = [*filter(None, [os.environ.get("PYTHONPATH")]), self.fetched / version, TESTS, self.fetched / "site"]
            output = tmp_path_factory.mktemp(version) / "output"
            started[version] = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", TESTS,
                 *sorted(self.folder.glob("contract*.py"))], stdout=output.open("w"), stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}), output
        yield started
        for process, _ in started.values():
            process.kill()
            process.wait()

    def check(self, version, started):
        if version not in started:
            pytest.skip(f"{self.name} {version} is not in {self.fetched}: python/tests/tools/fetch_engine.py fetches it")
        process, output = started[version]
        status = process.wait()
        said = output.read_text()
        assert status == 0, said[-8000:]
        assert re.search(r"\b\d\d+ passed", said), said
