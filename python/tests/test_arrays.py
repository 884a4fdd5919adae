# SPDX-License-Identifier: Apache-2.0
"""How arrays are read: protocols, dtypes, strides, devices, lifetimes; and what is refused, by name."""

import gc
import threading

import ml_dtypes
import numpy as np
import pytest

import attune
from cases import normal


def qkv(dtype="float32", n=5):
    rng = np.random.default_rng(0)
    return tuple(normal(rng, (n, heads, 16), dtype) for heads in (4, 2, 2))


class Exporter:
    """An array of a framework unknown to attune: DLPack capsules only, of the version asked for or the old one."""

    def __init__(self, array, old=False):
        self.array, self.old, self.exports = array, old, 0

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments):
        self.exports += 1
        if self.old:
            if "max_version" in arguments:
                raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**arguments)


@pytest.mark.parametrize("old", [False, True])
def test_any_array_with_dlpack(old):
    q, k, v = qkv()
    want = attune.attention(q, k, v, causal=True)
    wrapped = [Exporter(x, old) for x in (q, k, v)]
    got = attune.attention(*wrapped, causal=True)
    assert isinstance(got, np.ndarray) and np.array_equal(got, want)
    assert all(x.exports == 1 + old for x in wrapped)


def test_dlpack_without_a_shape():
    class Bare:
        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

    q, k, v = qkv()
    out = np.empty_like(q)
    attune.attention(*map(Bare, (q, k, v)), out=out)
    assert np.array_equal(out, attune.attention(q, k, v))
    with pytest.raises(attune.InvalidArgument, match="out is absent; it is needed, as q, which is .*Bare"):
        attune.attention(*map(Bare, (q, k, v)))


@pytest.mark.parametrize("dtype, view", [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8"), ("float8_e5m2", "uint8")])
def test_views_give_numpy_the_dtypes_it_lacks(dtype, view):
    q, k, v = qkv("bfloat16")
    k8, v8 = (x.astype(getattr(ml_dtypes, dtype)) for x in (k, v))
    lengths = np.array([3], np.int32)
    fields = {"seqused_kv": lengths, "out_dtype": "float32"}
    typed = attune.attention(q[None, :2], cache=attune.KVCache(k8[None], v8[None]), **fields)
    viewed = attune.attention(
        attune.View(q[None, :2].view("uint16"), "bfloat16"),
        cache=attune.KVCache(*(attune.View(x[None].view(view), dtype) for x in (k8, v8))), **fields)
    assert np.array_equal(typed, viewed)


def test_a_raw_uint16_array_is_not_bfloat16():
    q, k, v = (x.view("uint16") for x in qkv("bfloat16"))
    with pytest.raises(TypeError, match="q has dtype uint16"):
        attune.attention(q, k, v, out_dtype="bfloat16")
    with pytest.raises(TypeError, match="q is a view of uint16 as float8_e4m3fn: elements must be of one size"):
        attune.attention(attune.View(q, "float8_e4m3fn"), k, v, out_dtype="bfloat16")


def test_strides_are_free_and_never_copied():
    q, k, v = qkv()
    want = attune.attention(q, k, v)
    wide = np.full((5, 8, 32), np.nan, np.float32)
    wide[:, ::2, ::2] = q
    out = np.full((4, 5, 16), np.nan, np.float32).transpose(1, 0, 2)
    assert attune.attention(wide[:, ::2, ::2], np.asfortranarray(k), v, out=out) is out
    assert np.array_equal(out, want)
    with pytest.raises(ValueError, match=r"q\.stride\[0\] is -64"):
        attune.attention(q[::-1], k, v)


def test_misaligned_and_foreign_byte_orders():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="q has dtype >f4"):
        attune.attention(q.astype(">f4"), k, v)
    raw = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    with pytest.raises(ValueError, match="q is not aligned"):
        attune.attention(raw, k, v)
    record = np.zeros((5, 4, 16), [("x", "f4"), ("y", "u1")])["x"]
    with pytest.raises(ValueError, match="q has a stride of 5 bytes|q is not aligned"):
        attune.attention(record, k, v)


def test_read_only_arrays_may_be_read_and_not_written():
    q, k, v = qkv()
    for x in (q, k, v):
        x.flags.writeable = False
    out = np.empty((5, 4, 16), np.float32)
    attune.attention(q, k, v, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        attune.attention(q, k, v, out=out)
    cache = attune.KVCache(np.zeros((1, 8, 2, 16), np.float32), np.zeros((1, 8, 2, 16), np.float32))
    cache.v.flags.writeable = False
    lengths, cu = np.array([0], np.int32), np.array([0, 5], np.int32)
    attune.attention(q, k, v, cache=cache, seqused_kv=lengths, cu_seqlens_q=cu)
    for call in (lambda: attune.attention(q, k, v, cache=cache, seqused_kv=lengths, cu_seqlens_q=cu,
                                          prologue=attune.Prologue(append=True)),
                 lambda: attune.cache_append(cache, k, v, seqused_kv=lengths)):
        with pytest.raises(ValueError, match=r"cache\.v is read-only"):
            call()
    attune.cache_gather(cache, np.empty((5, 2, 16), np.float32), np.empty((5, 2, 16), np.float32),
                        slots=np.arange(5, dtype=np.int64))


@pytest.mark.parametrize("name, value, kind, message", [
    ("k", [1.0], TypeError, "k is <class 'list'>; an array is expected"),
    ("k", np.zeros((5, 2, 16), np.float64), TypeError, "k has dtype float64"),
    ("k", np.zeros((1,) * 7, np.float32), ValueError, "k has 7 axes; at most 6"),
    ("k", np.zeros((5, 3, 16), np.float32), ValueError, "3"),
    ("cu_seqlens_q", np.array([0, 5]), ValueError, "cu_seqlens_q.*int64"),
    ("causal_", True, TypeError, "'causal_' is not an argument"),
    ("window_left", 2.0, TypeError, "window_left is 2.0; an int is expected"),
    ("window_left", 2**70, ValueError, "window_left is 1180591620717411303424"),
    ("beam_width", 2**31, ValueError, "beam_width is 2147483648"),
    ("softcap", "1", TypeError, "softcap is '1'; a float is expected"),
    ("softcap", -1.0, ValueError, "softcap is -1"),
    ("cache", {"k": 1}, TypeError, "cache is <class 'dict'>; an attune.KVCache is expected"),
    ("prologue", 3, TypeError, "prologue is <class 'int'>; an attune.Prologue is expected"),
    ("prologue", attune.Prologue(mrope_section=(1, 2)), TypeError, r"prologue\.mrope_section is \(1, 2\); three ints"),
    ("out", np.zeros((5, 4, 15), np.float32), ValueError, "out"),
    ("workspace", np.zeros(3, np.float32), ValueError, "workspace must be a dense uint8 array"),
])
def test_what_is_refused(name, value, kind, message):
    q, k, v = qkv()
    arguments = {"q": q, "k": k, "v": v, name: value}
    with pytest.raises(kind, match=message) as raised:
        attune.attention(**arguments)
    assert isinstance(raised.value, attune.Error) and raised.value.status == "invalid argument"


def test_names_of_formats_and_layouts():
    with pytest.raises(ValueError, match="cache.layout is 'NHD'; known are nhd, hnd, xpacked, bytes|layout is 'NHD'"):
        attune.attention(qkv()[0], cache=attune.KVCache(np.zeros((1, 8, 2, 16), np.float32), layout="NHD", page_size=8),
                         head_dim_v=16)
    with pytest.raises(ValueError, match="format is 'x'; known are plain, mla_656, mla_584"):
        attune.kv_page_bytes("x", 64)
    with pytest.raises(ValueError, match="cache.format is 'MLA_656'; known are"):
        attune.attention(np.zeros((1, 2, 576), np.float32), seqused_kv=np.ones(1, np.int32),
                         cache=attune.KVCache(np.zeros((1, 8, 656), np.uint8), format="MLA_656"))


def test_no_array_is_held_after_a_call():
    q, k, v = qkv()

    class Tracked(np.ndarray):
        pass

    import weakref

    tracked = q.view(Tracked)
    gone = weakref.ref(tracked)
    for _ in range(3):
        attune.attention(tracked, k, v)
    exporter = Exporter(k)
    attune.attention(q, exporter, v)
    released = weakref.ref(exporter)
    del tracked, exporter
    gc.collect()
    assert gone() is None and released() is None


def test_an_array_replaced_while_others_are_read_stays_until_the_end():
    import weakref

    q, k, v = qkv()
    cache = attune.KVCache(np.array(k[None]), None)
    gone, seen = weakref.ref(cache.k), []

    class Replacing(Exporter):
        def __dlpack__(self, **arguments):
            cache.k = None
            gc.collect()
            seen.append(gone() is not None)
            return super().__dlpack__(**arguments)

    cache.v = Replacing(v[None])
    attune.attention(q, cache=cache, seqused_kv=np.array([5], np.int32), cu_seqlens_q=np.array([0, 5], np.int32))
    assert seen == [True] and gone() is None


def test_errors_of_an_array_name_it():
    class Deleted(Exporter):
        def __dlpack_device__(self):
            raise RuntimeError("array has been deleted\nand more")

    q, k, v = qkv()
    with pytest.raises(TypeError, match="^k cannot be read: .*array has been deleted$"):
        attune.attention(q, Deleted(k), v)


def test_many_threads():
    q, k, v = qkv(n=40)
    want = attune.attention(q, k, v, causal=True)
    wrong = []

    def work():
        for _ in range(30):
            if not np.array_equal(attune.attention(q, k, v, causal=True), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed: its arrays are not tested")
    q, k, v = qkv()
    want = attune.attention(q, k, v, causal=True)
    with jax.default_device(jax.devices("cpu")[0]):
        out, lse = attune.attention(*(jax.numpy.asarray(x) for x in (q, k, v)), causal=True, return_lse=True)
        assert isinstance(out, jax.Array) and isinstance(lse, jax.Array) and np.array_equal(np.asarray(out), want)
        small = [jax.numpy.asarray(x, dtype=jax.numpy.bfloat16) for x in (q, k, v)]
        assert attune.attention(*small, causal=True).dtype == jax.numpy.bfloat16
        with pytest.raises(ValueError, match="out is read-only"):
            attune.attention(q, k, v, out=jax.numpy.zeros((5, 4, 16)))
        deleted = jax.numpy.asarray(k)
        deleted.delete()
        with pytest.raises(TypeError, match="^k cannot be read: "):
            attune.attention(q, deleted, v)


def test_jax_on_a_gpu_is_refused_with_a_way_out():
    jax = pytest.importorskip("jax", reason="jax is not installed: its arrays are not tested")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU")
    q, k, v = (jax.numpy.asarray(x, dtype=jax.numpy.bfloat16) for x in qkv())
    with pytest.raises(attune.Unsupported, match="q is a JAX array on CUDA.*torch.from_dlpack"):
        attune.attention(q, k, v)
