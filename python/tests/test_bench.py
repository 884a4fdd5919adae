# SPDX-License-Identifier: Apache-2.0
"""bench/side_by_side.py on small cases of every kind: what it says of right, wrong and absent peers, and its energy counters."""

import json
import pathlib
import sys
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch")
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """run(peers, *arguments): the exit status, the report and the printed text."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(tmp_path))
    import side_by_side

    def run(peer, *arguments):
        name = f"peer_of_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(peer)
        sys.modules.pop(name, None)
        report = tmp_path / "report.json"
        status = side_by_side.main(["--device", "tiny", "--rounds", "2", "--peer", name, "--json", str(report), "--plot",
                                    str(tmp_path / "plot.svg"), *arguments])
        return status, json.loads(report.read_text())["results"], (tmp_path / "plot.svg").read_text()

    return run


SLOW_COPY = """
import time

NAME = "copy"

def prepare(case):
    if case.packed:
        return None
    plan = case.plan()
    plan.schedule()
    def run():
        plan.run_scheduled()
        return case.out, case.lse
    def whole():
        plan.schedule()
        time.sleep(0.002)
        return run()
    return run, whole
"""


def test_every_kind_of_case_is_right_and_timed(bench):
    status, results, plot = bench(SLOW_COPY)
    assert status == 0
    assert {r["row"]["kv"] for r in results} == {"dense", "paged", "mla", "slots"} and len(results) == 10
    for result in results:
        seconds = result["seconds"]["attune"]
        assert len(seconds["outside"]) == len(seconds["inside"]) == 2 and min(seconds["outside"]) > 0
        # 3 significant digits of bf16, more of the others; never exactly 0, which would be attune compared with itself.
        assert 0 < result["errors"]["attune"]["rms"] < 1e-2
        assert ("copy" in result["ratios"]) != result["row"].get("packed", False)
        if "copy" in result["ratios"]:
            assert result["ratios"]["copy"]["inside"]["median"] > 2 * result["ratios"]["copy"]["outside"]["median"]
    bars = [x for x in ElementTree.fromstring(plot).iter() if x.tag.endswith("rect")]
    assert len(bars) == 2 + sum("copy" in r["ratios"] for r in results)  # with the background and the legend's


@pytest.mark.parametrize("peer, reason", [("return out + 0.1, lse", "rms error"), ("return out, lse + 0.1", "lse off by"),
                                          ("return out * float('nan')", "rms error nan"), ("raise ValueError('no')", "ValueError: no")])
def test_a_wrong_peer_is_named_and_not_timed(bench, peer, reason):
    status, (result,), _ = bench(f"""
def prepare(case):
    def call():
        out, lse = (x.reshape(case.total_q, *x.shape[1:]).clone() for x in whole())
        {peer}
    plan = case.plan()
    def whole():
        plan.run()
        return case.out, case.lse
    return {{"bad": call}}
""", "--filter", "tiny/dense$")
    assert status == 1
    assert reason in result["wrong"]["bad"]
    assert "bad" not in result["seconds"] and "attune" in result["seconds"]


@pytest.mark.parametrize("when, dense", [("case.kv == 'paged'", "right"), ("len(seen) == 2", "wrong")])
def test_a_peer_that_cannot_prepare_is_named_and_the_others_go_on(bench, capsys, when, dense):
    """In one case of two, and for the second set of tensors of a case alone."""
    status, results, _ = bench(f"""
seen = []

def prepare(case):
    seen.append(case)
    plan = case.plan()
    def call():
        plan.run()
        return case.out, case.lse
    if {when}:
        raise RuntimeError('no such pages\\nand more')
    return {{"copy": call}}
""", "--filter", "tiny/(dense|decode)$", "--peer", "peer_torch")
    assert status == 1 and [r["row"]["kv"] for r in results] == ["dense", "paged"]
    failed, fine = results if dense == "wrong" else reversed(results)
    assert list(failed["wrong"].values()) == ["RuntimeError: no such pages"] and "copy" not in failed["seconds"]
    assert list(failed["wrong"])[0].startswith("peer_of_") and f"{list(failed['wrong'])[0]:18} WRONG: RuntimeError: no" in capsys.readouterr().out
    assert not fine["wrong"] and "copy" in fine["seconds"]
    for result in results:
        assert {"attune", "torch"} <= set(result["seconds"]) and "torch" in result["ratios"]


def test_a_peer_that_gives_no_calls_is_named(bench):
    status, (result,), _ = bench("""
def prepare(case):
    return {"bad": 7}
""", "--filter", "tiny/dense$")
    assert status == 1 and result["wrong"]["bad"].startswith("TypeError: 'int' object is not callable")


def test_torch_is_the_peer_where_none_is_given(bench, capsys):
    import side_by_side
    assert side_by_side.main(["--device", "tiny", "--rounds", "1", "--filter", "tiny/(dense|chunk|decode)$"]) == 0
    assert capsys.readouterr().out.count("  torch  ") == 3


def test_lengths_of_a_table(bench):
    from side_cases import lengths_of
    assert lengths_of(7, 3) == [7, 7, 7] and lengths_of([1, 5], 2) == [1, 5]
    evenly = lengths_of({"from": 1, "to": 16, "count": 4}, 1)
    assert sorted(evenly) == [1, 6, 11, 16] and evenly != sorted(evenly)
    assert sorted(lengths_of({"from": 0, "to": 36, "count": 37}, 1)) == list(range(37))  # no step divides the count


class Clock:
    """Stands in for `time`, and for a counter that knows of 100 W at every multiple of `step` seconds."""

    def __init__(self, step):
        self.now, self.step, self.calls = 0.0, step, 0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def joules(self):
        return 100 * self.step * int(self.now / self.step + 1e-9) if self.step else 5.0


@pytest.mark.parametrize("seconds", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("step", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("length", [4e-5, 0.003, 0.25, 0.7])
def test_energy_is_measured_between_moves_of_the_counter(bench, monkeypatch, length, step, seconds):
    import timing
    clock = Clock(step)
    monkeypatch.setattr(timing, "time", clock)

    def call():
        clock.calls += 1
        clock.sleep(length)

    got = timing.joules_of(call, "cpu", clock, seconds)
    assert got == pytest.approx(100 * length, rel=0.04)
    assert seconds <= clock.calls * length <= max(seconds, 3.0) + 1.0 + 2 * length


def test_energy_of_a_counter_that_stands_still_is_not_known(bench, monkeypatch):
    import timing
    clock = Clock(0)
    monkeypatch.setattr(timing, "time", clock)
    assert timing.joules_of(lambda: clock.sleep(0.01), "cpu", clock, 0.5) is None and clock.now < 5
    stops = Clock(0.1)
    monkeypatch.setattr(timing, "time", stops)

    def call():
        stops.sleep(0.01)
        if stops.now > 0.7:
            stops.step = 0

    assert timing.joules_of(call, "cpu", stops, 0.5) is None and stops.now < 5


def test_energy_that_is_not_known_is_not_in_the_report(bench, monkeypatch, capsys):
    import side_by_side
    for joules, shown in ((None, "n/a"), (0.5, "500 mJ")):
        monkeypatch.setattr(side_by_side, "energy_meter", lambda device: Clock(0.1))
        monkeypatch.setattr(Clock, "source", "a clock", raising=False)
        monkeypatch.setattr(side_by_side, "joules_of", lambda *arguments: joules)
        _, (result,), _ = bench("prepare = lambda case: None", "--filter", "tiny/dense$")
        assert result["joules"] == ({} if joules is None else {"attune": joules})
        assert shown in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  attune"))


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_joules_that_are_no_time_are_refused(bench, capsys, value):
    with pytest.raises(SystemExit) as raised:
        bench("prepare = lambda case: None", f"--joules={value}")
    assert raised.value.code == 2 and "--joules is" in capsys.readouterr().err


def test_energy_counters_wrap_around(bench, tmp_path):
    import timing
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text("999")
    (package / "energy_uj").write_text("900")
    meter = timing.Rapl(str(tmp_path))
    begin = meter.joules()
    (package / "energy_uj").write_text("100")
    assert meter.joules() - begin == pytest.approx(200e-6)
    with pytest.raises(OSError, match="no RAPL"):
        timing.Rapl(str(tmp_path / "nowhere"))
