# SPDX-License-Identifier: Apache-2.0
"""bench/vllm_layer.py on the CPU: its small cases of Attune's backends, against float64."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[3] / "bench"))

import vllm_layer  # noqa: E402
from attune.integrations.vllm.impl import AttuneImpl  # noqa: E402

CPU = ["--device", "cpu", "--rounds", "1"]


def test_every_case_is_right_and_timed(tmp_path):
    assert vllm_layer.main([*CPU, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    mla = vllm_layer.integration.backend_name() != "CUSTOM"
    assert [record["case"].partition("/")[0] for record in found] == ["decode", "chunk", "mla"][: 2 + mla]
    assert all(record["error"] < 0.01 and record["us"]["host_attention"] > 0 for record in found)
    assert all(0 < record["us"]["host_builder"] < record["us"]["host_build"] for record in found)


@pytest.mark.parametrize("method", ["forward", "do_kv_cache_update"])
def test_a_wrong_backend_is_said(method, monkeypatch, capsys):
    real = getattr(AttuneImpl, method)

    def wrong(self, layer, q_or_k, *others, **options):
        return real(self, layer, q_or_k * 1.1, *others, **options)

    monkeypatch.setattr(AttuneImpl, method, wrong)
    assert vllm_layer.main([*CPU, "--only", "decode"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_backend_that_does_not_run_is_said(monkeypatch, capsys, tmp_path):
    """vLLM's own FLASH_ATTN, whose compiled part is not here."""
    monkeypatch.setattr(vllm_layer, "peers_of", lambda case, device: ("FLASH_ATTN",))
    asked = [*CPU, "--only", "decode", "--json", str(tmp_path / "found.json")]
    assert vllm_layer.main(asked) == 1
    said = capsys.readouterr()
    assert "FLASH_ATTN does not run here: " in said.out
    assert "FLASH_ATTN did not run here, so nothing is compared with it; --allow-missing goes without" in said.err
    assert [record["backend"] for record in json.loads((tmp_path / "found.json").read_text())] == [vllm_layer.integration.backend_name()]
    assert vllm_layer.main([*asked, "--allow-missing"]) == 0
    assert "did not run" not in capsys.readouterr().err


def test_a_gpu_is_compared_with_backends_of_vllm():
    for case in vllm_layer.cases("cuda"):
        assert vllm_layer.peers_of(case, "cuda") == (vllm_layer.MLA if case.mla else vllm_layer.DENSE) != ()


def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(SystemExit, match="there is no GPU here"):
        vllm_layer.main([])
