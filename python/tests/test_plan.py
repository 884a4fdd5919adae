# SPDX-License-Identifier: Apache-2.0
"""Plans, support queries and validation."""

import os
import sys
import threading
import types

import numpy as np
import pytest

import attune
from attune import _frameworks
from cases import normal


def decode(batch=3, heads_q=4, heads_kv=2, d=16, pages=8, page_size=4):
    rng = np.random.default_rng(0)
    cache = attune.KVCache(normal(rng, (pages, page_size, heads_kv, d)), normal(rng, (pages, page_size, heads_kv, d)),
                           page_table=np.array([[0, 1], [2, 3], [4, 5]], np.int32))
    return normal(rng, (batch, heads_q, d)), cache, np.array([5, 0, 8], np.int32)


def test_a_plan_runs_on_changed_contents_and_other_arrays():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths, return_lse=True)
    out, lse = plan.run()
    assert np.array_equal(out, attune.attention(q, cache=cache, seqused_kv=lengths)) and lse.shape == (3, 4)
    lengths[:] = 7, 2, 1
    again, _ = plan.run()
    assert again is out  # the plan's own
    assert np.array_equal(out, attune.attention(q, cache=cache, seqused_kv=lengths))

    other, mine = q[:2] * 2, np.empty((2, 4, 16), np.float32)
    shorter = attune.KVCache(cache.k, cache.v, page_table=cache.page_table[:2])
    got = plan.run(q=other, cache=shorter, seqused_kv=lengths[:2], out=mine, lse=lse[:2])
    assert got[0] is mine and np.array_equal(mine, attune.attention(other, cache=shorter, seqused_kv=lengths[:2]))


def test_schedule_serves_several_layers():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    plan.schedule()
    for factor in (1, 2):
        got = plan.run_scheduled(q=q * factor)
        assert np.array_equal(got, attune.attention(q * factor, cache=cache, seqused_kv=lengths))


def test_run_scheduled_needs_the_schedule_of_its_plan():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    with pytest.raises(attune.Error, match="this plan has no schedule; call schedule"):
        plan.run_scheduled()
    with pytest.raises(attune.Error, match="page_table.shape"):
        plan.schedule(q=q[:2])
    with pytest.raises(attune.Error, match="this plan has no schedule; call schedule"):
        plan.run_scheduled()
    plan.run()
    plan.run_scheduled()
    lengths[0] += 1
    with pytest.raises(attune.Error, match="lengths, offsets, .* changed since attune_schedule"):
        plan.run_scheduled()
    plan.schedule()
    assert np.array_equal(plan.run_scheduled(), attune.attention(q, cache=cache, seqused_kv=lengths))


def test_plans_that_share_a_workspace():
    q, cache, lengths = decode()
    memory = np.zeros(1 << 22, np.uint8)
    memory = memory[-memory.ctypes.data % 256:]
    first, second = (attune.Plan(q, cache=cache, seqused_kv=lengths, workspace=memory) for _ in range(2))
    first.schedule()
    first.run_scheduled()
    second.schedule()
    second.run_scheduled()
    with pytest.raises(attune.Error, match="another plan has used the workspace; call schedule"):
        first.run_scheduled()
    first.run()
    first.run_scheduled()


def test_what_a_plan_refuses():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    with pytest.raises(ValueError, match="out.shape"):
        plan.run(q=q[:2], cache=attune.KVCache(cache.k, cache.v, page_table=cache.page_table[:2]), seqused_kv=lengths[:2])
    with pytest.raises(ValueError, match="differs from its plan: mask is causal; the plan was made for none$"):
        plan.run(causal=True)
    with pytest.raises(ValueError, match="differs from its plan: lse is absent; the plan was made with it$"):
        attune.Plan(q, cache=cache, seqused_kv=lengths, return_lse=True).run(lse=None)
    with pytest.raises(ValueError, match="differs from its plan: q.dtype is float16; the plan was made for float32$"):
        plan.run(q=q.astype(np.float16))
    with pytest.raises(ValueError, match="differs from its plan: batch_invariant is 1; the plan was made for 0$"):
        plan.run(batch_invariant=True)
    with pytest.raises(TypeError, match="'quux' is not an argument"):
        plan.run(quux=1)
    for named in ({"return_lse": "no"}, {"return_max_logits": 2}):
        with pytest.raises(attune.WrongType, match="return_.* is .*; a bool is expected"):
            attune.Plan(q, cache=cache, seqused_kv=lengths, **named)


def test_a_workspace_is_refused_when_the_plan_is_made():
    q, cache, lengths = decode()
    size = attune.Plan(q, cache=cache, seqused_kv=lengths).workspace_size
    with pytest.raises(attune.Error, match=f"workspace has 1 byte; it must have {size}$") as raised:
        attune.Plan(q, cache=cache, seqused_kv=lengths, workspace=np.zeros(1, np.uint8))
    assert raised.value.status == "workspace too small"
    room = np.zeros(size + 512, np.uint8)
    begin = -room.ctypes.data % 256
    with pytest.raises(attune.InvalidArgument, match="workspace is 64 bytes beyond a multiple of 256; it must be a multiple$"):
        attune.Plan(q, cache=cache, seqused_kv=lengths, workspace=room[begin + 64 :])
    attune.Plan(q, cache=cache, seqused_kv=lengths, workspace=room[begin : begin + size]).run()


def test_an_array_replaced_after_planning_is_seen():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    cache.k = cache.k * 2
    assert np.array_equal(plan.run(), attune.attention(q, cache=cache, seqused_kv=lengths))
    q.resize((1, 4, 16), refcheck=False)  # its memory moved: shapes are read again, so this is an error and no wild read
    with pytest.raises(ValueError):
        plan.run()


def test_one_plan_in_two_threads_is_refused_not_wrong():
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (700, 4, 64)) for _ in range(3))
    plan = attune.Plan(q, k, v)
    want = attune.attention(q, k, v)
    seen = []

    def work():
        for _ in range(20):
            try:
                plan.run()
            except ValueError as e:
                seen.append(str(e))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("running in another thread" in message for message in seen)
    assert np.array_equal(plan.run(), want)


def test_support_of_shapes_without_data():
    spec = attune.Spec((4, 8, 64), "bfloat16")
    answer = attune.supported(spec, attune.Spec((4, 2, 64), "bfloat16"), attune.Spec((4, 2, 64), "bfloat16"), causal=True)
    assert answer and answer.reason == ""
    refused = attune.supported(spec, spec, spec, device="cuda:63")
    assert not refused and refused.reason
    with pytest.raises(ValueError, match="num_heads"):
        attune.supported(spec, attune.Spec((4, 3, 64), "bfloat16"), attune.Spec((4, 3, 64), "bfloat16"))
    with pytest.raises(ValueError, match="q has head_dim_qk 1024"):
        attune.supported(*[attune.Spec((4, 8, 1024), "float32")] * 3)
    attune.warm([{"q": spec, "k": spec, "v": spec}])
    with pytest.raises(ValueError, match="device is 'tpu'"):
        attune.supported(spec, spec, spec, device="tpu")


def test_heads_and_channels_may_be_one_axis_in_a_run():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, heads, 16), np.float32) for heads in (4, 2, 2))
    plan = attune.Plan(q, k, v, causal=True, out=np.empty((6, 4, 16), np.float32))
    want = attune.attention(q, k, v, causal=True)
    rows = rng.standard_normal((6, 100), np.float32)
    rows[:, :64] = q.reshape(6, 64)
    for given in (q.reshape(6, 64), rows[:, :64]):
        out = np.full((6, 64), np.nan, np.float32)
        assert plan.run(q=given, out=out) is out and np.array_equal(out.reshape(6, 4, 16), want)
    assert np.array_equal(plan.run(q=q[:3].reshape(3, 64), k=k[:3], v=v[:3], out=np.empty((3, 4, 16), np.float32)), want[:3])
    for wrong in (rows[:, :63], rows[:, :80], rows[:, 64:0:-1], np.zeros((6, 128), np.float32)[:, ::2]):
        with pytest.raises(attune.InvalidArgument, match="q"):
            plan.run(q=wrong)


def test_supported_by_gpus_that_are_not_here():
    """Of each compute capability that the registry has kernels for."""
    spec = attune.Spec((4, 8, 64), "bfloat16")
    floats = attune.Spec((4, 8, 64), "float32")
    wide = attune.Spec((4, 8, 320), "bfloat16")
    for capability in (8, 0), (8, 6), (8, 9), (9, 0), (12, 0):
        for given in spec, floats:
            assert attune.supported(given, given, given, capability=capability)
        refused = attune.supported(wide, wide, wide, capability=capability)
        assert not refused and "head_dim_qk: 320 (at most 256)" in refused.reason
    assert attune.supported(spec, spec, spec, capability=(7, 5)).reason.endswith("the kernels need 8.0 (Ampere) or newer")
    for given, error, reason in ((90, attune.WrongType, "capability is 90; a pair"), ((9,), attune.WrongType, "capability is"),
                                 ((-1, 99), attune.InvalidArgument, r"capability is \(-1, 99\); .* 0..99 and .* 0..9"),
                                 ((10**12, 0), attune.InvalidArgument, "0..99")):
        with pytest.raises(error, match=reason):
            attune.supported(spec, spec, spec, capability=given)
    with pytest.raises(attune.InvalidArgument, match="device='cpu' and capability="):
        attune.supported(spec, spec, spec, device="cpu", capability=(9, 0))


def test_no_gpu_is_an_error_with_the_reason():
    spec = attune.Spec((4, 8, 64), "bfloat16", device="cuda:5")
    with pytest.raises(attune.Error) as raised:
        attune.warm([{"q": spec, "k": spec, "v": spec}])
    assert raised.value.status == "device error"


def test_a_plan_of_specs_takes_memory_of_a_framework_that_is_in_use(monkeypatch):
    """On a GPU: a step of new tokens alone has no array yet when engines plan it."""
    spec, asked = attune.Spec((4, 8, 64), "bfloat16", device="cuda:1"), []
    for name, framework in (("torch", _frameworks._Torch), ("cupy", _frameworks._Cupy)):
        for other in ("torch", "cupy"):
            monkeypatch.delitem(sys.modules, other, raising=False)
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(framework, "allocate", staticmethod(lambda *what, name=name: asked.append((name, *what))))
        _frameworks.allocate(spec, 1, 100, None)
    assert asked == [("torch", 1, 100, None), ("cupy", 1, 100, None)]
    monkeypatch.delitem(sys.modules, "cupy")
    with pytest.raises(TypeError, match=r"device of a Spec: pass workspace=, or import torch or cupy before"):
        _frameworks.allocate(spec, 1, 100, None)


def test_data_of_a_spec_is_missed_when_running():
    spec = attune.Spec((4, 8, 64), "float32")
    plan = attune.Plan(spec, spec, spec)
    with pytest.raises(ValueError, match="q.data"):
        plan.run()


def test_validate_names_the_entry():
    q, cache, lengths = decode()
    attune.validate(q, cache=cache, seqused_kv=lengths)
    cache.page_table[2, 1] = 99
    with pytest.raises(attune.Error, match="page_table.*99") as raised:
        attune.validate(q, cache=cache, seqused_kv=lengths)
    assert raised.value.status == "bad data"


def test_describe_and_threads():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    assert "cpu_attention" in plan.describe() and "cpu_attention" in repr(plan)
    assert plan.workspace_size >= 0 and plan.device == (0, 0)
    before = attune.get_num_threads()
    attune.set_num_threads(3)
    assert attune.get_num_threads() == 3
    attune.set_num_threads(0)
    assert attune.get_num_threads() == before
    with pytest.raises(ValueError, match="count is -1"):
        attune.set_num_threads(-1)


def test_info():
    assert attune.devices()[0].type == "cpu"
    assert "cpu_attention" in {kernel.name for kernel in attune.kernels()}
    text = attune.info()
    assert attune.__version__ in text and "driver" in text
    levels = []
    attune.set_log_callback(lambda level, message: levels.append(level))
    attune.set_log_callback(None)
    assert os.getpid()  # still here
