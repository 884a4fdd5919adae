# SPDX-License-Identifier: Apache-2.0
import pytest

from contracts import Contracts

pytest.importorskip("torch", reason="torch is not installed: attune.integrations.vllm is not tested")
pytest.importorskip("transformers", reason="transformers is not installed: attune.integrations.vllm is not tested")

VLLM = Contracts("vllm", "vLLM")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with VLLM.start(tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.mark.parametrize("version", VLLM.versions)
def test_contract(version, started):
    VLLM.check(version, started)


def test_versions_are_those_that_are_known():
    from attune.integrations.vllm import KNOWN_VERSIONS

    assert [version.rpartition(".")[0] for version in VLLM.versions] == list(KNOWN_VERSIONS)
