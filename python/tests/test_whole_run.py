# SPDX-License-Identifier: Apache-2.0
"""bench/whole_run.py: the tables of what its benches wrote, which bench/benchmarks_page.py reads."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def whole_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import whole_run

    return whole_run


ERRORS = {"attune": {"rms": 2.2e-3}, "FA3": {"rms": 2.3e-3}, "broken": {"rms": 1.0}}
FILES = {
    "decode": {"ceilings": {"read_gbps_all": 4000.0},
               "results": [{"name": "bench_cuda/bf16/64x4096", "seconds": {"median": 257.394e-6}, "gbps": 3600.4}]},
    "prompts": [{"name": "dense/2x8192", "flops": 5e11, "seconds": {"attune": 8e-4, "attune, scheduled": 1e-3, "flash": 2e-3}}],
    "latent": [{"name": "decode/128x1", "seconds": 5e-4, "seconds_with_schedule": 1.5e-3, "flops": 3e11, "bytes": 1e9}],
    "side": {"about": {"peers": ["FA3 of X"], "rounds": 7, "rest": 0.05}, "results": [
        {"name": "dense/a", "seconds": {"attune": {"outside": [1e-4, 3e-4, 2e-4], "inside": [2e-4]},
                                        "FA3": {"outside": [3e-4], "inside": [3e-4]}},
         "ratios": {"FA3": {"outside": {"median": 1.5}, "inside": {"median": 1.25}}}, "errors": ERRORS},
        {"name": "e4m3/b", "seconds": {"attune": {"outside": [5e-3], "inside": [5e-3]}}, "ratios": {},
         "errors": {"attune": {"rms": 4e-3}}}]},
    "backward": [{"name": "2x8192", "flops": 1e12, "seconds": {"attune": 2e-3, "cudnn": 4e-3},
                  "errors": {"attune": [1e-3, 3e-3, 2e-3], "cudnn": [4e-3, 1e-3, 1e-3]}}],
    "layer": [{"case": "mla/x", "backend": "ATTUNE_MLA", "error": 3e-3, "ratio": {},
               "us": {"gpu_attention": 463.0, "host_attention": 33.0, "host_builder": 70.0}},
              {"case": "mla/x", "backend": "FLASHMLA", "error": 3e-3, "ratio": {"attention": 1.175},
               "us": {"gpu_attention": 544.0, "host_attention": 78.0, "host_update": 17.0, "host_builder": 285.0}}],
    "indexer": {"benchmarks": [{"name": "indexer/batch:32/queries:1/keys:32768/iterations:20", "real_time": 121.96,
                                "label": "scores 79.5 us, select 31.7 us; 1794 GB/s"}]},
    "ops": {"benchmarks": [{"name": "cache_op/append/iterations:20/manual_time", "us": 144.14, "GB/s": 3727.4},
                           {"name": "merge/small", "us": 4.0}]},
}
ROWS = ["| bf16/64x4096 | 257.39 | 3600 | 90 % |", "| dense/2x8192 | 0.800 | 625 | 500 | - | 250 | - |",
        "| decode/128x1 | 500.0 | 600 | 2000 | 1500 |", "| dense/a | 200.0 | 300.0 | 1.50 | 1.25 | 2.20e-03, 2.30e-03 |",
        "| e4m3/b | 5000 | - | - | - | 4.00e-03 |", "| 2x8192 | 2.000 | 500 | 250 | - | - | 3.0e-03 | 4.0e-03 | - | - |",
        "| mla/x | ATTUNE_MLA | 3.0e-03 | 463.0 |  |  | 33.0 |  | 70.0 |",
        "| mla/x | FLASHMLA | 3.0e-03 | 544.0 |  | 1.175 | 78.0 | 17.0 | 285.0 |", "| 32 | 1 | 32,768 | 122.0 | 79.5 | 31.7 |",
        "| cache_op/append | 144.1 | 3,727 |", "| merge/small | 4.0 | - |"]


def write(folder, names):
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(FILES[name]))


def test_each_bench_has_its_table(whole_run, tmp_path):
    write(tmp_path, FILES)
    lines = list(whole_run.tables(tmp_path))
    assert set(FILES) == set(whole_run.SECTIONS)
    for row in ROWS:
        assert row in lines
    # A row has the cells of its head.
    heads = [i for i, line in enumerate(lines) if line.startswith("|---")]
    for at in heads:
        for line in lines[at + 1 :]:
            if not line.startswith("|"):
                break
            assert line.count("|") == lines[at].count("|"), line


def test_a_missing_file_is_said(whole_run, tmp_path, capsys):
    write(tmp_path, ["ops"])
    lines = list(whole_run.tables(tmp_path))
    assert [line for line in lines if line.startswith("## ")] == ["## Cache operations"]
    assert "prompts.json is missing: no section 'Prompts'" in capsys.readouterr().err


def test_what_does_not_run_is_said_and_the_rest_runs(whole_run, tmp_path, monkeypatch, capsys):
    ran = tmp_path / "ran"
    commands = [("gone", [tmp_path / "no_such_program"]), ("bad", [sys.executable, "-c", "raise SystemExit(3)"]),
                ("good", [sys.executable, "-c", f"open({str(ran)!r}, 'w')"])]
    monkeypatch.setattr(whole_run, "commands", lambda folder, peers: commands)
    monkeypatch.setattr(sys, "argv", ["whole_run.py", str(tmp_path / "new")])
    assert whole_run.main() == 1 and ran.exists()
    said = capsys.readouterr().err
    assert "gone: " in said and "no_such_program" in said and "bad: 3" in said and "good" not in said


def test_the_commands_are_those_of_the_sections(whole_run, tmp_path):
    found = dict(whole_run.commands(tmp_path, ["peer_a", "peer_b"]))
    assert set(found) == set(whole_run.SECTIONS)
    for name, command in found.items():
        assert any(str(tmp_path / f"{name}.json") in str(word) for word in command), name
        assert pathlib.Path(command[1]).exists() or command[0] != sys.executable
    assert [word for word in found["side"] if str(word).startswith("peer_")] == ["peer_a", "peer_b"]
