# SPDX-License-Identifier: Apache-2.0
"""Mistakes: each is an exception of the package, and also the built-in one that Python programmers expect, whose message names the
argument."""

import array

import numpy as np
import pytest

import attune

Q, K, V = (np.ones((5, heads, 16), np.float32) for heads in (4, 2, 2))
TABLES = (np.ones((3, 4, 2, 16), np.float32),) * 2
LENGTHS = np.zeros(5, np.int32)
INDEX_CACHE = attune.KVCache(np.ones((5, 4, 1, 16), np.float32))
SCALAR = np.array(1, np.float32)


def scalar_lengths(**options):
    return {"seqused_kv": LENGTHS, **options}


class NoCapsule:
    """Says that it exports, and does not."""

    shape, dtype = Q.shape, Q.dtype

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        return 3


class OddDevice(NoCapsule):
    """Whose __dlpack_device__ is anything at all."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device


class Raises:
    """Whose attributes raise what they like."""

    shape, dtype = Q.shape, Q.dtype

    @property
    def __array_struct__(self):
        raise ZeroDivisionError("odd")


class BadName:
    def __str__(self):
        raise ZeroDivisionError("odd")


class NoStruct:
    shape, dtype, __array_struct__ = Q.shape, Q.dtype, 3


class NoShape:
    """As a tensor of a layout that has no shape."""

    @property
    def shape(self):
        raise RuntimeError("no shape")


ATTENTION = [
    ((None,), {}, ValueError, "q is absent"),
    (([1, 2],), {}, TypeError, "q is <class 'list'>; an array is expected"),
    ((np.ndarray, K, V), {}, TypeError, "q is <class 'type'>; an array is expected"),
    ((memoryview(Q), K, V), {}, TypeError, "q is <class 'memoryview'>; an array is expected"),
    ((array.array("f", [1]), K, V), {}, TypeError, "q is <class 'array.array'>; an array is expected"),
    ((NoShape(), K, V), {}, TypeError, "q is <class 'test_bad_input.NoShape'>; an array is expected"),
    ((NoCapsule(), K, V), {}, TypeError, "q cannot be read"),
    ((NoStruct(), K, V), {}, TypeError, "q cannot be read"),
    *(((OddDevice(device), K, V), {}, TypeError, r"q cannot be read: its __dlpack_device__\(\) is .*; \(type, index\) is expected")
      for device in ("cpu", 1, (), (None, 0), (2**70, 0), (1.5, 0), {0: []}, object(), None)),
    ((Raises(), K, V), {}, TypeError, "q cannot be read: .*odd"),
    ((Q, OddDevice("x"), V), {}, TypeError, "k cannot be read: its __dlpack_device__"),
    ((Q, K, V), {"sinks": OddDevice((None, 0))}, TypeError, "sinks cannot be read: its __dlpack_device__"),
    ((Q, attune.View(K, BadName()), V), {}, TypeError, "k cannot be read: .*odd"),
    ((Q.astype(np.float64), K, V), {}, TypeError, "^q has dtype float64; allowed: float32, float16, bfloat16, float8_e4m3fn, "
                                                  "float8_e5m2, int8$"),
    ((Q, K.astype(np.float64), V), {}, TypeError, "^k has dtype float64; allowed: float32, float16, bfloat16, float8_e4m3fn, "
                                                  "float8_e5m2, int8$"),
    ((Q.astype(">f4"), K, V), {}, TypeError, "q has dtype >f4"),
    ((np.array(["a"]), K, V), {}, TypeError, "q has dtype <U1"),
    ((Q.astype(object), K, V), {}, TypeError, "q has dtype object"),
    ((SCALAR, K, V), {}, ValueError, "q.rank is 1; it must be 3 or 4"),
    ((Q.astype(np.int32), K, V), {}, ValueError, "q.dtype is int32"),
    ((Q.astype(np.int8), K, V), {}, ValueError, "out_dtype is None, and q is int8"),
    ((Q, K, SCALAR), {}, ValueError, "v.rank is 1; it must be 3"),
    ((Q, SCALAR, V), {}, ValueError, "k.rank is 1; it must be 3 or 4"),
    ((Q, K, [1]), {}, TypeError, "v is <class 'list'>; an array is expected"),
    ((Q, K, V[:, :1]), {}, ValueError, r"v.shape\[1\] is 1; it must be 2"),
    ((Q[::-1], K, V), {}, ValueError, r"q.stride\[0\] is -64; it must be >= 0"),
    ((Q[:, :0], K, V), {}, ValueError, "q has 0 heads"),
    ((Q,), {"cache": (K, V)}, TypeError, "^cache is <class 'tuple'>; an attune.KVCache is expected"),
    ((Q,), {}, ValueError, "^k and cache are absent; one of them is needed$"),
    ((Q, K), {}, ValueError, "^v and head_dim_v are absent; one of them is needed, V being the first head_dim_v columns of K without v$"),
    ((Q,), scalar_lengths(cache=attune.KVCache(TABLES[0], SCALAR)), ValueError, "cache.v.rank is 1"),
    ((Q,), scalar_lengths(cache=attune.KVCache(TABLES[0], V[0], layout="xpacked")), ValueError, "cache.k.rank is 4; it must be 5"),
    ((Q,), scalar_lengths(cache=attune.KVCache(None), head_dim_v=16), ValueError, "k and cache.k are both absent"),
    ((Q,), scalar_lengths(cache=attune.KVCache(*TABLES, layout="foo")), ValueError, "cache.layout is 'foo'; known are nhd"),
    ((Q, K), {"head_dim_v": "x"}, TypeError, "head_dim_v is 'x'; an int is expected"),
    ((Q, K), {"head_dim_v": 1.5}, TypeError, "head_dim_v is 1.5; an int is expected"),
    ((Q, K), {"head_dim_v": -3}, ValueError, "v is absent, .* head_dim_v is -3; it must be 1..16"),
    ((Q, K), {"head_dim_v": 2**40}, ValueError, "v is absent, .* head_dim_v is 1099511627776; it must be 1..16"),
    ((Q, K), {"head_dim_v": 2**70}, ValueError, "head_dim_v is 1180591620717411303424"),
    ((Q, K, V), {"out_dtype": "foo"}, TypeError, "out_dtype is 'foo'; known are float32"),
    ((Q, K, V), {"out_dtype": [1]}, TypeError, r"out_dtype is \[1\]; known are float32"),
    ((Q, K, V), {"out": Q[..., :8]}, ValueError, r"out.shape\[2\] is 8; it must be 16"),
    ((Q, K, V), {"out": np.broadcast_to(Q[:1], Q.shape)}, ValueError, "out is read-only"),
    ((Q, K, V), {"causal": np.array([1, 0])}, TypeError, "causal is .*; a bool is expected"),
    ((Q, K, V), {"causal": "no"}, TypeError, "causal is 'no'; a bool is expected"),
    ((Q, K, V), {"causal": 2}, TypeError, "causal is 2; a bool is expected"),
    ((Q, K, V), {"causal": 1.0}, TypeError, "causal is 1.0; a bool is expected"),
    ((Q, K, V), {"causal": []}, TypeError, r"causal is \[\]; a bool is expected"),
    ((Q, K, V), {"causal": np.array(1.0)}, TypeError, "causal is .*; a bool is expected"),
    ((Q, K, V), {"return_lse": "no"}, TypeError, "return_lse is 'no'; a bool is expected"),
    ((Q, K, V), {"return_lse": 2}, TypeError, "return_lse is 2; a bool is expected"),
    ((Q, K, V), {"return_max_logits": 1.0}, TypeError, "return_max_logits is 1.0; a bool is expected"),
    ((Q, K, V), {"stream": 1}, ValueError, "^stream is 1, but the arrays are on the CPU, which has no streams$"),
    ((Q, K, V), {"stream": "x"}, ValueError, "^stream is 'x', but the arrays are on the CPU, which has no streams$"),
    ((Q,), scalar_lengths(cache=attune.KVCache(*TABLES, page_table=np.zeros((5, 1), np.int32)), cu_seqlens_kv=Q), ValueError,
     "^cu_seqlens_kv is set, but k is absent"),
    ((Q, K, V), {"window_left": 1.5}, TypeError, "window_left is 1.5; an int is expected"),
    ((Q, K, V), {"softmax_scale": "1"}, TypeError, "softmax_scale is '1'; a float is expected"),
    ((Q, K, V), {"sinks": 1.0}, TypeError, "sinks is <class 'float'>; an array is expected"),
    ((Q, K, V), {"mask_bits": np.ones((5, 5), bool)}, TypeError, "mask_bits is bool; .* numpy.packbits"),
    ((Q, K, V), {"cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q is <class 'list'>; an array is expected"),
    ((Q, K, V), {"prologue": {}}, TypeError, "^prologue is <class 'dict'>; an attune.Prologue is expected"),
    ((Q, K, V), {"workspace": [1]}, TypeError, "workspace is <class 'list'>; an array is expected"),
    ((Q, K, V), {"softmax_scale": 1e-50}, ValueError, "softmax_scale is 1e-50, which is 0 as a float32"),
    ((Q, K, V), {"softmax_scale": 1e40}, ValueError, "softmax_scale is 1e[+]40, which is infinite as a float32; .* 3.4e38"),
    ((Q, K, V), {"softmax_scale": float("inf")}, ValueError, "softmax_scale is inf; it must be finite"),
    ((Q, K, V), {"softcap": -1e-50}, ValueError, "softcap is -1e-50, which is 0 as a float32"),
    ((Q, K, V), {"scale": 1}, TypeError, "^'scale' is not an argument of this operation; did you mean softmax_scale[?]$"),
    ((Q, K, V), {"softmax_scal": 1}, TypeError, "; did you mean softmax_scale[?]$"),
    ((Q, K, V), {"attn_mask": Q}, TypeError, "; did you mean mask_bits, or attune.sdpa, which has attn_mask[?]$"),
    ((Q, K, V), {"block_table": Q}, TypeError, "; did you mean cache.page_table[?]$"),
    ((Q, K, V), {"quux": 1}, TypeError, "'quux' is not an argument of this operation$"),
]


@pytest.mark.parametrize("positional, named, kind, message", ATTENTION, ids=lambda x: x if isinstance(x, str) else "")
def test_attention(positional, named, kind, message):
    with pytest.raises(kind, match=message) as raised:
        attune.attention(*positional, **named)
    assert isinstance(raised.value, attune.Error)


MISSPELT = {
    "sdpa": (lambda: attune.sdpa(Q, K, V, is_casual=True), "sdpa: 'is_casual' is_causal"),
    "sdpa as of attention": (lambda: attune.sdpa(Q, K, V, causal=True), "is_causal"),
    "sdpa as of torch": (lambda: attune.sdpa(query=Q, key=K, value=V), "sdpa: 'query' q"),
    "KVCache": (lambda: attune.KVCache(*TABLES, page_tabel=K), "KVCache: 'page_tabel' page_table"),
    "KVCache as of others": (lambda: attune.KVCache(*TABLES, block_table=K), "KVCache: 'block_table' page_table"),
    "Prologue": (lambda: attune.Prologue(rope_cos_sine=K), "Prologue: 'rope_cos_sine' rope_cos_sin"),
    "Spec": (lambda: attune.Spec((1, 2, 3), "float32", devcie="cpu"), "Spec: 'devcie' device"),
    "View": (lambda: attune.View(K, dtyp="int8"), "View: 'dtyp' dtype"),
    "merge": (lambda: attune.merge(Q, Q, retrun_lse=True), "merge: 'retrun_lse' return_lse"),
    "qkv_prepare": (lambda: attune.qkv_prepare(Q, prolog=1), "qkv_prepare: 'prolog' prologue"),
    "cache_append": (lambda: attune.cache_append(INDEX_CACHE, K, slot_mapping=1), "cache_append: 'slot_mapping' slots"),
    "cache_quantize": (lambda: attune.cache_quantize(INDEX_CACHE, K, power_of_2_scales=1), "power_of_two_scales"),
    "cache_dequantize": (lambda: attune.cache_dequantize(INDEX_CACHE, K, steam=1), "stream"),
    "cache_gather": (lambda: attune.cache_gather(INDEX_CACHE, K, slot=1), "slots"),
    "indexer_topk": (lambda: attune.indexer_topk(Q, Q, INDEX_CACHE, top_k=1), "indexer_topk: 'top_k' topk"),
    "indexer_scores": (lambda: attune.indexer_scores(Q, Q, INDEX_CACHE, qscale=1), "q_scale"),
    "indexer_select": (lambda: attune.indexer_select(Q, top_k=1), "topk"),
    "alibi_slopes": (lambda: attune.alibi_slopes(8, lik=Q), "like"),
    "kv_page_bytes": (lambda: attune.kv_page_bytes("mla_656", pagesize=3), "page_size"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_argument(name):
    call, said = MISSPELT[name]
    *begin, meant = said.split(" ")  # "function: 'given' meant", or what was meant alone
    with pytest.raises(attune.WrongType, match=f"{' '.join(begin)} ?.*is not an argument of this operation; did you mean {meant}[?]$"):
        call()


OTHERS = {
    "warm": (lambda: attune.warm([{"k": K}]), ValueError, r"attentions\[0\]: q is absent"),
    "warm a string": (lambda: attune.warm(["x"]), TypeError, r"calls\[0\] is 'x'; a dict"),
    "supported on": (lambda: attune.supported(Q, K, V, device="tpu"), ValueError, "device is 'tpu'"),
    "Spec": (lambda: attune.Spec(5, "float32"), TypeError, "shape is 5; "),
    "Spec of too many": (lambda: attune.supported(attune.Spec((5, 4, 2**70), "float32"), K, V, head_dim_v=16), TypeError,
                         "q cannot be read: "),
    "Spec on": (lambda: attune.Spec((5,), "float32", device="cuda:\u00b2"), ValueError, "device is 'cuda:.*'; 'cpu', 'cuda' and"),
    "Spec on too many": (lambda: attune.Spec((5,), "float32", device="cuda:99999999999"), ValueError, "device is 'cuda:99999999999'"),
    "run": (lambda: attune.Plan(Q, K, V).run(q=None), ValueError, "q is absent"),
    "merge": (lambda: attune.merge(None, None), TypeError, "partial_out is <class 'NoneType'>; an array is expected"),
    "merge lists": (lambda: attune.merge([1], [1]), TypeError, "partial_out is <class 'list'>; an array is expected"),
    "merge a vector": (lambda: attune.merge(Q[0, 0], Q[0, 0]), ValueError, "partial_out.rank is 1; it must be 4"),
    "qkv_prepare": (lambda: attune.qkv_prepare([1]), TypeError, "q is <class 'list'>; an array is expected"),
    "cache_append": (lambda: attune.cache_append(attune.KVCache(*TABLES), None, slots=np.zeros(5, np.int64)), ValueError, "k is absent"),
    "indexer_topk": (lambda: attune.indexer_topk([1], [1], INDEX_CACHE, topk=1), TypeError, "q is <class 'list'>; an array is"),
    "topk": (lambda: attune.indexer_topk(Q, Q[..., 0], INDEX_CACHE, topk="x"), TypeError, "topk is 'x'; an int is expected"),
    **{f"topk {topk}": (lambda topk=topk: attune.indexer_topk(Q, Q[..., 0], INDEX_CACHE, topk=topk), ValueError,
                        f"topk is {topk}; 1..2147483647 is allowed") for topk in (-1, 0, 2**40)},
    "scores of many": (lambda: attune.indexer_scores(Q, Q[..., 0], INDEX_CACHE, max_seqlen_kv=2**40), ValueError,
                       "max_seqlen_kv is 1099511627776; 0..2147483647 is allowed"),
    "a huge output": (lambda: attune.Plan(attune.Spec((2**40, 4, 16), "float32"), K, V), MemoryError,
                      r"no memory for an array of shape \[1099511627776, 4, 16\] and dtype float32"),
    "an output beyond all memory": (lambda: attune.Plan(attune.Spec((2**60, 4, 16), "float32"), K, V), ValueError, "cannot be made"),
    "no topk": (lambda: attune.indexer_topk(Q, Q[..., 0], INDEX_CACHE), ValueError, "topk and indices are None"),
    "indexer_scores": (lambda: attune.indexer_scores(Q, Q[..., 0], INDEX_CACHE, max_seqlen_kv="a"), TypeError,
                       "max_seqlen_kv is 'a'; an int is expected"),
    "indexer_select": (lambda: attune.indexer_select(None, topk=1), TypeError, "scores is <class 'NoneType'>; an array is"),
    "rope_table": (lambda: attune.rope_table("3", 8), TypeError, "num_positions is '3'; an int is expected"),
    "rope_table -3": (lambda: attune.rope_table(-3, 8), ValueError, "num_positions is -3"),
    "rope_table dim": (lambda: attune.rope_table(3, 8.0), TypeError, "dim is 8.0; an int is expected"),
    **{f"{name} {dim}": (lambda call=call, dim=dim: call(dim), ValueError, f"dim is {dim}; {said}")
       for name, call in {"frequencies": attune.rope_frequencies, "rope_table": lambda dim: attune.rope_table(3, dim)}.items()
       for dim, said in ((2**40, "2..65536 is allowed"), (0, "2..65536 is allowed"), (7, "it must be even"))},
    "rope_table first": (lambda: attune.rope_table(3, 8, first_position=-5), ValueError, "first_position is -5; 0..2147483648 is"),
    "rope_table like": (lambda: attune.rope_table(3, 8, like=3), TypeError, "like is <class 'int'>; an array is expected"),
    "merge of a flag": (lambda: attune.merge(Q[None], Q[None, ..., 0], return_lse="no"), TypeError, "return_lse is 'no'; a bool"),
    "validate on": (lambda: attune.validate(Q, K, V, stream=1), ValueError, "stream is 1, but the arrays are on the CPU"),
    "logn_table": (lambda: attune.logn_table("0", 3), TypeError, "max_position is '0'; an int is expected"),
    "alibi_slopes": (lambda: attune.alibi_slopes(0), ValueError, "num_heads is 0"),
    "t5_bucket": (lambda: attune.t5_bucket("1", 8, 8, True), TypeError, "relative_position is '1'; an int is expected"),
    "t5_bucket of a text": (lambda: attune.t5_bucket(1, 8, 8, "no"), TypeError, "bidirectional is 'no'; a bool is expected"),
    "kv_page_bytes": (lambda: attune.kv_page_bytes("mla_656", "x"), TypeError, "page_size is 'x'; an int is expected"),
    "set_num_threads": (lambda: attune.set_num_threads(2**40), ValueError, "count is 1099511627776"),
    "set_log_callback": (lambda: attune.set_log_callback(3), TypeError, "callback is 3; a function"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    call, kind, message = OTHERS[name]
    with pytest.raises(kind, match=message) as raised:
        call()
    assert isinstance(raised.value, attune.Error)


@pytest.mark.parametrize("true", [True, 1, np.bool_(True), np.int64(1), np.array(True)], ids=repr)
def test_what_a_bool_may_be(true):
    expected = attune.attention(Q, K, V, causal=True, return_lse=True)
    for got, want in zip(attune.attention(Q, K, V, causal=true, return_lse=true, stream=0), expected):
        assert np.array_equal(got, want)


def test_empty_batches():
    assert attune.attention(Q[:0], K[:0], V[:0]).shape == (0, 4, 16)
    assert attune.attention(Q[None][:0], K[None][:0], V[None][:0]).shape == (0, 5, 4, 16)
    out, lse = attune.attention(Q, K[:0], V[:0], return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_tables_of_no_rows():
    assert attune.rope_table(0, 8).shape == (0, 8) and attune.logn_table(8, 0).shape == (0,)


def test_a_deleted_query():
    jax = pytest.importorskip("jax", reason="jax is not installed: its arrays are not tested")
    q = jax.numpy.asarray(Q)
    q.delete()
    with pytest.raises(TypeError, match="^q cannot be read"):
        attune.attention(q, K, V)
