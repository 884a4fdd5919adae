# SPDX-License-Identifier: Apache-2.0
"""torch tensors, eager and compiled. Every test of values runs on the CPU, and on the first GPU where there is one."""

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import attune
import reference
from cases import calls
from compare import assert_attention, dtype_name

torch = pytest.importorskip("torch", reason="torch is not installed: its tests are skipped")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
VIEWS = {"bfloat16": ("int16", torch.bfloat16), "float8_e4m3fn": ("uint8", torch.float8_e4m3fn),
         "float8_e5m2": ("uint8", torch.float8_e5m2)}


def to_torch(value, device):
    """Arrays of numpy and ml_dtypes, and records of them, as tensors of the same strides."""
    if isinstance(value, (attune.KVCache, attune.Prologue)):
        made = attune.KVCache(None) if isinstance(value, attune.KVCache) else attune.Prologue()
        for name in value.__slots__:
            setattr(made, name, to_torch(getattr(value, name), device))
        return made
    if not isinstance(value, np.ndarray):
        return value
    view, dtype = VIEWS.get(dtype_name(value), (None, None))
    strides = [stride // value.itemsize for stride in value.strides]
    base = value if value.base is None or not isinstance(value.base, np.ndarray) else value.base
    flat = torch.from_numpy(np.ascontiguousarray(base if view is None else base.view(view))).to(device)
    return (flat if view is None else flat.view(dtype)).as_strided(value.shape, strides)


def to_numpy(tensor):
    return None if tensor is None else tensor.double().cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_random_calls(device, call):
    q, k, v, fields = call
    expected = reference.attention(q, k, v, **fields)
    tensors = [to_torch(x, device) for x in (q, k, v)]
    moved = {name: to_torch(value, device) for name, value in fields.items()}
    try:
        out, lse, max_logits = attune.attention(*tensors, return_lse=True, return_max_logits=True, **moved)
    except attune.Unsupported:
        assert device == "cuda"
        return
    assert out.dtype == tensors[0].dtype and out.device == tensors[0].device
    assert_attention(*map(to_numpy, (out, lse, max_logits)), expected, dtype_name(q))


def qkv(device="cpu", n=5):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, heads, 16, generator=generator).to(device) for heads in (4, 2, 2))


def paged(device="cpu"):
    k, v = torch.randn(4, 4, 2, 16, device=device), torch.randn(4, 4, 2, 16, device=device)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    return attune.KVCache(k, v, page_table=table), torch.tensor([5, 8], dtype=torch.int32, device=device)


def test_matches_torch():
    q, k, v = qkv()
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True,
                                                            enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(attune.attention(q, k, v, causal=True), want, rtol=1e-5, atol=1e-5)


def test_gradients_are_refused_by_name():
    q, k, v = qkv()
    cache, lengths = paged()
    q.requires_grad_()
    with pytest.raises(ValueError, match="cache is given, and q requires grad: attention over dense keys alone has a backward"):
        attune.attention(q[:2], cache=cache, seqused_kv=lengths)
    with pytest.raises(ValueError, match="partial_out requires grad, and this operation has no backward"):
        attune.merge(torch.stack([q, q]), torch.zeros(2, 5, 4))
    with torch.no_grad():
        attune.attention(q[:2], cache=cache, seqused_kv=lengths)
    with torch.inference_mode():
        attune.attention(q, k, v, sinks=torch.nn.Parameter(torch.zeros(4)))


def test_tensors_without_memory_are_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="v cannot be read: .*meta") as raised:
        attune.attention(q, k, v.to("meta"))
    assert "\n" not in str(raised.value)
    with pytest.raises((TypeError, ValueError), match="^k "):
        attune.attention(q, k.to_sparse(), v)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([q, q], layout=layout)
        for arrays in ((nested, k, v), (q, nested, v), (q, k, nested)):
            name = "qkv"[[x is nested for x in arrays].index(True)]
            with pytest.raises(NotImplementedError, match=f"^{name} is a nested tensor; cu_seqlens_q and cu_seqlens_kv are for ragged"):
                attune.attention(*arrays)
    with pytest.raises(TypeError, match="cu_seqlens_q has dtype torch.uint16"):
        attune.attention(q, k, v, cu_seqlens_q=torch.tensor([0, 5], dtype=torch.uint16))
    with pytest.raises(ValueError, match="k is on cuda:3, but q is on the CPU; all arrays of a call must be on one device"):
        attune.attention(q, attune.Spec((5, 2, 16), "float32", device="cuda:3"), v)


def test_a_tensor_whose_memory_was_given_back_is_refused_by_name():
    q, k, v = qkv()
    k.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="k.data"):
        attune.attention(q, k, v)
    plan = attune.Plan(q, v, v)
    q.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="q.data"):
        plan.run()


def test_views_of_several_frameworks():
    """A table like a View is of the framework of the View's array, whichever came first."""
    of_numpy = attune.View(np.zeros((2, 2), np.uint16), "bfloat16")
    of_torch = attune.View(torch.zeros((2, 2), dtype=torch.int16), "bfloat16")
    for like, kind in ((of_numpy, np.ndarray), (of_torch, torch.Tensor), (of_numpy, np.ndarray)):
        assert type(attune.rope_table(3, 8, like=like)) is kind


def test_numpy_and_torch_may_meet():
    q, k, v = qkv()
    assert torch.equal(attune.attention(q, k.numpy(), v.numpy()), attune.attention(q, k, v))


@pytest.mark.parametrize("device", DEVICES)
def test_operations_give_tensors(device):
    q, k, v = qkv(device)
    prologue = attune.Prologue(rope_cos_sin=attune.rope_table(16, 16, like=q))
    assert prologue.rope_cos_sin.device == q.device
    outs = attune.qkv_prepare(q, k, v, prologue=prologue)
    assert all(isinstance(out, torch.Tensor) and out.device == q.device for out in outs)
    out, lse = attune.merge(torch.stack([q, q]), torch.zeros(2, 5, 4, device=device), return_lse=True)
    torch.testing.assert_close(out, q)
    cache, lengths = paged(device)
    attune.cache_append(attune.KVCache(cache.k, cache.v), k[:2], v[:2], slots=torch.tensor([3, 9], device=device))
    assert torch.equal(cache.k[0, 3], k[0]) and torch.equal(cache.v[2, 1], v[1])


# --------------------------------------------------------------------------------------------------------- torch.compile


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


def both(function, *arguments):
    """Eager and compiled results, with copies of the arguments so that what is written is compared too."""
    copies = [x.clone() for x in arguments]
    with torch.no_grad():
        want, got = function(*arguments), compiled(function)(*copies)
    for a, b in zip(arguments, copies):
        assert torch.equal(a, b)
    return want, got


def test_compile_plain():
    want, got = both(lambda q, k, v: attune.attention(q * 2, k, v, causal=True, return_lse=True), *qkv())
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])
    want, got = both(lambda q, k, v: attune.attention(q, k, v, out_dtype="bfloat16") + 1, *qkv())
    assert got.dtype == torch.bfloat16 and torch.equal(want, got)


def test_compile_cache_prologue_and_append():
    cache, lengths = paged()
    rope = attune.rope_table(32, 16, like=lengths)

    def step(q, k, v, k_cache, v_cache, table, lengths, rope):
        cache = attune.KVCache(k_cache, v_cache, page_table=table)
        return attune.attention(q, k, v, cache=cache, seqused_kv=lengths - 2, window_left=4,
                                prologue=attune.Prologue(rope_cos_sin=rope, rope_interleaved=True, append=True))

    q, k, v = (x[:2] for x in qkv())
    before = cache.k.clone()
    want, got = both(step, q, k, v, cache.k, cache.v, cache.page_table, lengths, rope)
    assert torch.equal(want, got) and not torch.equal(before, cache.k)


def test_compile_into_given_outputs():
    def into(q, k, v, out, lse):
        return attune.attention(q, k, v, out=out, lse=lse)[0] * 1

    q, k, v = qkv()
    want, got = both(into, q, k, v, torch.zeros_like(q), torch.zeros(5, 4))
    assert torch.equal(want, got)


def test_compile_merge_and_cache_append():
    def both_ops(q, k, v, k_cache, v_cache, slots):
        attune.cache_append(attune.KVCache(k_cache, v_cache), k, v, slots=slots)
        return attune.merge(torch.stack([q, -q]), torch.zeros(2, 5, 4), return_lse=True)

    q, k, v = qkv()
    want, got = both(both_ops, q, k, v, torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16), torch.tensor([1, 7, 0, 2, -1]))
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


def test_compile_qkv_prepare():
    cache, lengths = paged()
    rope = attune.rope_table(32, 16, like=lengths)

    def step(q, k, v, k_cache, v_cache, table, lengths, rope):
        cache = attune.KVCache(k_cache, v_cache, page_table=table)
        prologue = attune.Prologue(rope_cos_sin=rope, append=True)
        q_out, k_out, v_out = attune.qkv_prepare(q * 1, k, v, cache=cache, seqused_kv=lengths - 2, prologue=prologue)
        return q_out * 2, k_out, v_out, attune.qkv_prepare(q, prologue=attune.Prologue(rope_cos_sin=rope), out_dtype="bfloat16")[0]

    q, k, v = (x[:2] for x in qkv())
    before = cache.k.clone()
    want, got = both(step, q, k, v, cache.k, cache.v, cache.page_table, lengths, rope)
    assert all(torch.equal(a, b) for a, b in zip(want, got)) and not torch.equal(before, cache.k)
    with pytest.raises(Exception, match="out_dtype is None, and q is torch.int8"):
        compiled(lambda q: attune.qkv_prepare(q)[0])(q.to(torch.int8))


def test_compile_cache_reads():
    def reads(k_cache, v_cache, slots):
        cache = attune.KVCache(k_cache, v_cache)
        k, v = torch.zeros(5, 2, 16), torch.zeros(5, 2, 16)
        attune.cache_gather(cache, k, v, slots=slots)
        whole = torch.zeros(8, 2, 16)
        attune.cache_dequantize(cache, whole, torch.zeros_like(whole))
        attune.cache_quantize(attune.KVCache(k_cache, v_cache), whole + 1, whole)
        return k, v, whole

    pools = torch.randn(2, 2, 4, 2, 16)
    want, got = both(reads, pools[0].clone(), pools[1].clone(), torch.tensor([1, 7, 0, 2, -1]))
    assert all(torch.equal(a, b) for a, b in zip(want, got)) and want[0].any()


def test_compile_indexer():
    def choose(q, weights, keys, table, lengths):
        cache = attune.KVCache(keys, page_table=table)
        indices, count = attune.indexer_topk(q, weights, cache, topk=3, seqused_kv=lengths, max_seqlen_kv=12)
        scores = attune.indexer_scores(q, weights, cache, seqused_kv=lengths, max_seqlen_kv=12)
        again = attune.indexer_select(scores * 1, topk=3, cache=cache, seqused_kv=lengths, max_seqlen_kv=12)
        return indices, count, scores, *again

    table, lengths = torch.tensor([[3, 0, 5], [1, 2, 4]], dtype=torch.int32), torch.tensor([12, 7], dtype=torch.int32)
    want, got = both(choose, torch.randn(2, 4, 16), torch.rand(2, 4), torch.randn(6, 4, 1, 16), table, lengths)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert torch.equal(want[0], want[3]) and want[0].min() >= 0


def test_compile_refuses_gradients():
    q, k, v = qkv()
    cache, lengths = paged()
    with pytest.raises(Exception, match="q requires grad"):
        compiled(lambda q: attune.attention(q, cache=cache, seqused_kv=lengths))(q[:2].clone().requires_grad_())


def test_opcheck():
    q, k, v = qkv()
    attune.attention(q, k, v)  # operators are there once attune has met a tensor
    ops = torch.ops.attune
    cache, lengths = paged()
    caches = {"cache_k": cache.k, "cache_v": cache.v, "cache_page_table": cache.page_table, "seqused_kv": lengths - 3}
    indexed = {"cache_k": cache.k[:, :, :1].contiguous(), "cache_page_table": cache.page_table, "seqused_kv": lengths - 3}
    append = {"k": k[:2], "v": v[:2], "more_arrays": [torch.zeros(4, 16)], "more_names": ["prologue_q_bias", "prologue_append=1"]}
    checks = [
        (ops.attention, (q,), {"k": k, "v": v, "causal": True, "return_lse": True, "out_dtype": torch.float16}),
        (ops.attention_out, (q, torch.empty_like(q)), {"k": k, "v": v, "lse": torch.empty(5, 4), "max_logits": torch.empty(5, 4)}),
        (ops.attention_append, (q[:2],), {**caches, **append}),
        (ops.attention_append_out, (q[:2], torch.empty_like(q[:2])), {**caches, **append}),
        (ops.merge, (torch.stack([q, q]), torch.zeros(2, 5, 4)), {"sinks": torch.zeros(4)}),
        (ops.cache_append, (k,), {"v": v, "cache_k": cache.k, "cache_v": cache.v, "slots": torch.arange(5)}),
        (ops.cache_quantize, (k,), {"v": v, "cache_k": cache.k, "cache_v": cache.v}),
        (ops.cache_dequantize, (k,), {"v": v, "cache_k": cache.k, "cache_v": cache.v}),
        (ops.cache_gather, (k,), {"v": v, "cache_k": cache.k, "cache_v": cache.v, "slots": torch.arange(5)}),
        (ops.qkv_prepare, (), {"q": q, "q_out": torch.empty_like(q), "more_arrays": [torch.zeros(4, 16)],
                               "more_names": ["prologue_q_bias"]}),
        (ops.qkv_prepare, (), {"k": k[:2], "v": v[:2], "k_out": torch.empty(2, 2, 16), **caches, "more_arrays": [],
                               "more_names": ["prologue_append=1"]}),
        (ops.indexer_topk, (q[:2], torch.ones(2, 4), torch.empty(2, 3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)),
         {**indexed, "max_seqlen_kv": 8}),
        (ops.indexer_scores, (q[:2], torch.ones(2, 4), torch.empty(2, 8)), {**indexed, "clear_scores": True}),
        (ops.indexer_select, (torch.randn(2, 8), torch.empty(2, 3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)), indexed),
    ]
    for operator, arguments, options in checks:
        results = torch.library.opcheck(operator.default, arguments, options)
        assert set(results.values()) == {"SUCCESS"}, (operator, results)


def test_operator_refuses_unknown_names():
    q, k, v = qkv()
    attune.attention(q, k, v)
    with pytest.raises(ValueError, match="more_names holds 'prologue_x'"):
        torch.ops.attune.attention(q, k=k, v=v, more_arrays=[q], more_names=["prologue_x"])


# ------------------------------------------------------------------------------------------------------------- overhead


def best_of(*functions, rounds=1000, count=20):
    """Microseconds a call of each, of its quietest round: short ones and in turn, as other processes may share the cores."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(count):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / count)
    return [seconds * 1e6 for seconds in best]


def test_overhead_of_a_decode_step(record_property):
    """In copies of a small tensor by torch, which take 0.5 to 1.5 us: machines and their clocks differ."""
    q, cache, lengths = torch.randn(2, 4, 16), paged()[0], torch.tensor([1, 1], dtype=torch.int32)
    out = torch.empty_like(q)
    attune.set_num_threads(1)
    try:
        plan = attune.Plan(q, cache=cache, seqused_kv=lengths, out=out)
        planned, unplanned, copy = best_of(lambda: plan.run(q=q, cache=cache, seqused_kv=lengths, out=out),
                                           lambda: attune.attention(q, cache=cache, seqused_kv=lengths), lambda: out.copy_(q))
    finally:
        attune.set_num_threads(0)
    record_property("planned_us", planned)
    record_property("unplanned_us", unplanned)
    assert planned < 11 * copy and unplanned < 30 * copy, (planned, unplanned, copy)  # with the attention itself, of two keys


# ----------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: streams are not tested")
def test_a_stream_that_is_given_has_its_own_workspace(monkeypatch):
    torch_functions, streams = attune._frameworks._Torch, []
    allocate = torch_functions.allocate

    def watched(index, size, stream):
        streams.append(stream)
        return allocate(index, size, stream)

    monkeypatch.setattr(torch_functions, "allocate", staticmethod(watched))
    cache, lengths = paged("cuda")
    q = torch.randn(2, 4, 16, device="cuda")
    want = attune.attention(q, cache=cache, seqused_kv=lengths)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (side, side.cuda_stream):
        got = attune.attention(q, cache=cache, seqused_kv=lengths, stream=stream)
        side.synchronize()
        assert torch.equal(got, want)
    assert streams == [side.cuda_stream, side.cuda_stream]  # the current stream's comes without a call into Python


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA graphs are not tested")
def test_cuda_graph():
    cache, lengths = paged("cuda")
    q, out = torch.randn(2, 4, 16, device="cuda"), torch.empty(2, 4, 16, device="cuda")
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths, out=out)
    plan.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run()
    lengths.copy_(torch.tensor([2, 7], dtype=torch.int32))
    q.normal_()
    graph.replay()
    torch.testing.assert_close(out, attune.attention(q, cache=cache, seqused_kv=lengths), rtol=0, atol=0)
