# SPDX-License-Identifier: Apache-2.0
"""Runs contract tests under versions of an engine, all at once. There is one engine in a process, so each version has its own; they
are forked behind the imports that all of them need, which take most of their time.

usage: run_contracts.py OUTPUT CONTRACT_FOLDER FETCHED_FOLDER VERSION... Writes OUTPUT/<version>, and OUTPUT/<version>.status.
"""

import os
import pathlib
import sys

import pytest
import torch._inductor.compile_fx  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers.modeling_utils  # noqa: F401


def run(output, contract, fetched, version):
    with open(output / version, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    # Before all that is installed, but behind PYTHONPATH, which may have attune; site is the last.
    given = len(list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    sys.path[1 + given : 1 + given] = [str(fetched / version), str(contract.parent), str(fetched / "site")]
    return pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(contract.parent),
                        *map(str, sorted(contract.glob("contract*.py")))])


def main(output, contract, fetched, *versions):
    output, contract, fetched = map(pathlib.Path, (output, contract, fetched))
    children = {}
    for version in versions:
        child = os.fork()
        if child == 0:
            os._exit(int(run(output, contract, fetched, version)))
        children[child] = version
    for _ in children:
        child, status = os.wait()
        (output / f"{children[child]}.status").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(*sys.argv[1:])
