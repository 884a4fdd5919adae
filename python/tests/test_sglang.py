# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from contracts import Contracts

pytest.importorskip("torch", reason="torch is not installed: attune.integrations.sglang is not tested")
pytest.importorskip("transformers", reason="transformers is not installed: attune.integrations.sglang is not tested")
if sys.version_info < (3, 11):
    pytest.skip("SGLang needs Python 3.11: attune.integrations.sglang is not tested", allow_module_level=True)

SGLANG = Contracts("sglang", "SGLang")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with SGLANG.start(tmp_path_factory.mktemp("sglang")) as running:
        yield running


@pytest.mark.parametrize("version", SGLANG.versions)
def test_contract(version, started):
    SGLANG.check(version, started)


def test_versions_are_those_that_are_known():
    from attune.integrations.sglang import KNOWN_VERSIONS

    assert SGLANG.versions == list(KNOWN_VERSIONS)
