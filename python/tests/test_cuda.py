# SPDX-License-Identifier: Apache-2.0
"""What only a machine with a GPU shows: memory, streams and devices of torch and CuPy. The values of every operation are compared there
by the other files, see apis.py and places.py."""

import time

import ml_dtypes
import numpy as np
import pytest

import attune
import reference
from cases import normal
from compare import assert_attention

torch = pytest.importorskip("torch", reason="torch is not installed: CUDA is not tested")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def qkv(dtype="float16", n=5):
    rng = np.random.default_rng(0)
    return tuple(normal(rng, (n, heads, 64), dtype) for heads in (4, 2, 2))


def on_gpu(*arrays):
    return tuple(torch.from_numpy(array).cuda() for array in arrays)


def decode(batch=3, page_size=16, dtype=torch.bfloat16):
    """(q, cache, lengths) of a step over pages."""
    cache = attune.KVCache(*(torch.randn(4 * batch, page_size, 2, 64, device="cuda").to(dtype) for _ in range(2)),
                           page_table=torch.randperm(4 * batch).to(torch.int32).view(batch, 4).cuda())
    return torch.randn(batch, 4, 64, device="cuda").to(dtype), cache, torch.tensor([40, 7, 64][:batch], dtype=torch.int32).cuda()


def test_a_plan_of_specs_alone():
    arrays = [normal(np.random.default_rng(0), (70, heads, 64), "float16") for heads in (4, 2, 2)]
    lengths, (q, k, v) = torch.tensor([0, 30, 70], dtype=torch.int32, device="cuda"), on_gpu(*arrays)
    specs = {name: attune.Spec(tuple(array.shape), "float16", "cuda") for name, array in (("q", q), ("k", k), ("v", v), ("out", q))}
    plan = attune.Plan(**specs, cu_seqlens_q=attune.Spec((3,), "int32", "cuda"), max_seqlen_q=70, causal=True)
    out = torch.empty_like(q)
    plan.run(q=q, k=k, v=v, out=out, cu_seqlens_q=lengths)
    assert torch.equal(out, attune.attention(q, k, v, cu_seqlens_q=lengths, max_seqlen_q=70, causal=True))


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("name", ["k", "v", "cu_seqlens_q", "sinks", "out"])
def test_an_array_of_the_cpu_beside_those_of_the_gpu(name):
    q, k, v = on_gpu(*qkv())
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32).cuda(),
                 "cu_seqlens_kv": torch.tensor([0, 5], dtype=torch.int32).cuda(), "sinks": torch.zeros(4).cuda(),
                 "out": torch.empty_like(q)}
    attune.attention(**arguments)
    with pytest.raises(ValueError, match=f"^{name} is on the CPU, but .* is on cuda:0; all arrays of a call must be on one device"):
        attune.attention(**{**arguments, name: arguments[name].cpu()})
    with pytest.raises(ValueError, match=f"^{name} is on the CPU"):
        attune.attention(**{**arguments, name: arguments[name].cpu().numpy()})


def test_what_is_refused():
    q, k, v = on_gpu(*qkv())
    for change, kind, message in (
            ({"q": q.double()}, TypeError, "q has dtype torch.float64"),
            ({"k": k[:, :1].expand(-1, 3, -1)}, ValueError, r"v.shape\[1\] is 2; it must be 3"),
            ({"v": v.transpose(1, 2)}, ValueError, r"v.shape\[1\] is 64; it must be 2"),
            ({"alibi_slopes": torch.zeros(4, device="cuda", requires_grad=True)}, ValueError, "alibi_slopes requires grad"),
            ({"stream": "side"}, TypeError, "stream is 'side'"),
            ({"stream": -(2**70)}, ValueError, "stream is -1180591620717411303424"),
            ({"workspace": torch.empty(64, dtype=torch.uint8)}, ValueError, "workspace")):
        with pytest.raises(kind, match=message):
            attune.attention(**{"q": q, "k": k, "v": v, **change})
    k.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="k.data"):
        attune.attention(q, k, v)


def test_a_plan_survives_wrong_arguments():
    q, cache, lengths = decode()
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    with pytest.raises(TypeError, match="stream is 'side'"):
        plan.run(stream="side")
    with pytest.raises(ValueError, match="q is on the CPU|is on cuda:0, but q is on the CPU"):
        plan.run(q=q.cpu())
    assert torch.equal(plan.run(), attune.attention(q, cache=cache, seqused_kv=lengths))


# ------------------------------------------------------------------------------------------------------ plans and time


def test_a_run_of_a_plan_allocates_nothing_and_does_not_wait():
    q, cache, lengths = decode()
    out = torch.empty_like(q)
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths, out=out)
    want = plan.run().clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    done = torch.cuda.Event()
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            plan.run(q=q, cache=cache, seqused_kv=lengths, out=out)
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(out, want)


@pytest.mark.parametrize("window", [None, 9])
def test_a_graph_of_one_query_each_serves_any_batch(window):
    """As in vLLM's full graphs: the batch that is captured has as many sequences as tokens, those that are replayed have other offsets,
    lengths and pages in the same tensors. Two layers share a schedule that is in the graph, two plans a workspace."""
    rows, pages, page_size = 8, 40, 16
    layers = [torch.randn(pages, 2, page_size, 128, device="cuda").bfloat16() for _ in range(2)]  # K beside V
    caches = [attune.KVCache(x[..., :64], x[..., 64:], layout="hnd") for x in layers]
    q, out = torch.randn(rows, 4, 64, device="cuda").bfloat16(), torch.empty(2, rows, 4, 64, device="cuda").bfloat16()
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    lengths = torch.ones(rows, dtype=torch.int32, device="cuda")
    table = torch.zeros(rows, 5, dtype=torch.int32, device="cuda")
    fields = {"cu_seqlens_q": starts, "seqused_kv": lengths, "causal": True, "max_seqlen_q": rows, "max_seqlen_kv": 80,
              "window_left": window}
    for cache in caches:
        cache.page_table = table
    size = attune.Plan(q, cache=caches[0], out=out[0], **fields).workspace_size
    workspace = torch.empty(size + 256, dtype=torch.uint8, device="cuda")
    workspace = workspace[-workspace.data_ptr() % 256 :]
    plan, other = (attune.Plan(q, cache=caches[0], out=out[0], workspace=workspace, **fields) for _ in range(2))

    def step():
        plan.run()
        plan.run_scheduled(cache=caches[1], out=out[1])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for counts, seen in (([8], [77]), ([1, 5, 2], [33, 5, 20]), ([1] * 8, [1, 2, 3, 16, 17, 40, 79, 80]), ([1, 1], [64, 7])):
        batch = len(counts)
        starts.fill_(sum(counts))[: batch + 1] = torch.tensor([0, *np.cumsum(counts)])
        lengths.zero_()[:batch] = torch.tensor(seen)
        table.copy_(torch.randperm(pages)[: rows * 5].view(rows, 5))
        other.run()  # an eager step in between
        graph.replay()
        for layer, cache in enumerate(caches):
            want = attune.attention(q, cache=cache, cu_seqlens_q=starts, seqused_kv=lengths, causal=True, window_left=window)
            got = out[layer, : sum(counts)]
            torch.testing.assert_close(got.float(), want[: sum(counts)].float(), atol=0.02, rtol=0.02)


def test_no_memory_for_the_workspace():
    q, cache, lengths = decode()
    out = torch.empty_like(q)
    attune.attention(q, cache=cache, seqused_kv=lengths, out=out)  # loads its kernel
    torch.cuda.set_per_process_memory_fraction(1e-9)
    taken = []
    try:
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(4096, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            attune.attention(q, cache=cache, seqused_kv=lengths, out=out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    taken.clear()
    attune.attention(q, cache=cache, seqused_kv=lengths, out=out)


def issue_us(function, rounds=9, count=200):
    """Microseconds that a call keeps the CPU, of the quietest round; what it starts runs beside."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - start) / count)
    torch.cuda.synchronize()
    return best * 1e6


def test_overhead_of_a_decode_step(record_property, capsys):
    q, cache, lengths = decode()
    out, small = torch.empty_like(q), torch.zeros(1, device="cuda")
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths, out=out)
    times = {"planned": issue_us(lambda: plan.run(q=q, cache=cache, seqused_kv=lengths, out=out)),
             "unplanned": issue_us(lambda: attune.attention(q, cache=cache, seqused_kv=lengths)),
             "launch": issue_us(lambda: small.add_(1))}  # what an operation of torch takes, its launch included
    for name, us in times.items():
        record_property(f"cuda_{name}_us", us)
    with capsys.disabled():
        print("\nus a call: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()))
    # With their launches. Where others use the machine all three take longer.
    assert times["planned"] < max(10, 1.5 * times["launch"]) and times["unplanned"] < max(40, 30 + 2 * times["launch"]), times


# ----------------------------------------------------------------------------------------------------------------- CuPy


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="cupy is not installed: its arrays are not tested")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cupy(cupy, dtype):
    arrays = qkv(dtype)
    expected = reference.attention(*arrays, causal=True)
    if dtype == "bfloat16":
        given = [attune.View(cupy.asarray(x.view(np.uint16)), "bfloat16") for x in arrays]
    else:
        given = [cupy.asarray(x) for x in arrays]
    out, lse = attune.attention(*given, causal=True, return_lse=True)
    assert isinstance(lse, cupy.ndarray)
    if dtype == "bfloat16":
        assert isinstance(out.array, cupy.ndarray) and out.dtype == "bfloat16"
        got = cupy.asnumpy(out.array).view(ml_dtypes.bfloat16)
    else:
        assert isinstance(out, cupy.ndarray) and out.dtype == dtype
        got = cupy.asnumpy(out)
    assert_attention(got, cupy.asnumpy(lse), None, expected, dtype)
    table = attune.rope_table(8, 64, like=given[0])
    assert isinstance(table, cupy.ndarray) and np.array_equal(cupy.asnumpy(table), attune.rope_table(8, 64))


def test_cupy_plan_stream_and_given_output(cupy):
    arrays = qkv()
    q, k, v = (cupy.asarray(x) for x in arrays)
    out = cupy.full((5, 4, 64), 7, cupy.float16)
    plan = attune.Plan(q, k, v, causal=True, out=out)
    cupy.cuda.get_current_stream().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        assert attune._frameworks.current_stream(q, 0) == side.ptr
        assert plan.run() is out
    side.synchronize()
    assert_attention(cupy.asnumpy(out), None, None, reference.attention(*arrays, causal=True), "float16")
    want = cupy.asnumpy(out)
    out.fill(0)
    cupy.cuda.get_current_stream().synchronize()
    plan.run(stream=side)
    side.synchronize()
    assert np.array_equal(cupy.asnumpy(out), want)
    with pytest.raises(ValueError, match="k is on the CPU"):
        attune.attention(q, arrays[1], v)


def test_cupy_and_torch_may_meet(cupy):
    arrays = qkv()
    q, k, v = on_gpu(*arrays)
    torch.cuda.synchronize()
    assert torch.equal(attune.attention(q, cupy.asarray(arrays[1]), cupy.asarray(arrays[2])), attune.attention(q, k, v))
