# SPDX-License-Identifier: Apache-2.0
"""Time of the host that Attune takes in a decode step of an engine: of a layer, and of metadata.

usage: engine_host.py vllm|sglang FETCHED_FOLDER VERSION. FETCHED_FOLDER: of python/tests/tools/fetch_engine.py, e.g. build/python/vllm. On
the CPU, over caches of few tokens, so attention itself is in it; the least of many short runs, as the machine may be busy.
"""

import pathlib
import sys
import time

LAYERS, REPEATS = 32, 2000


def least(function):
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def of_layers(function, layers):
    return least(lambda: [function(layer) for layer in layers]) / len(layers)


def sglang():
    import stand_ins  # noqa: F401  before SGLang
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    import attune.integrations.sglang as integration

    integration.register()
    from engine import Engine

    engine = Engine([{}] * LAYERS, page_size=16, dtype=torch.bfloat16)
    engine.run({"a": 5, "b": 3})
    engine.run({"a": 1, "b": 1})
    backend, batch = engine.backend, engine.batch(ForwardMode.DECODE, {"a": 1, "b": 1})
    q, k, v = engine.inputs(2)
    print(f"us of metadata: {least(lambda: backend.init_forward_metadata(batch)):.1f}")
    print(f"us a layer: {of_layers(lambda layer: backend.forward_decode(q, k, v, layer, batch, False), engine.layers):.2f}")
    step, ours, out = backend.forward_metadata.step, backend._find(engine.layers[-1]), torch.empty_like(q)
    return step.scheduled[ours.kind][1], {"q": q, "cache": ours.cache(), "out": out, "seqused_kv": step.seq_lens}


def of_builder(engine):
    """Of the builder alone: what vLLM does around it for each step is vLLM's."""
    from attune.integrations.vllm.metadata import AttuneMetadataBuilder

    build, calls = AttuneMetadataBuilder.build, []
    AttuneMetadataBuilder.build = lambda *given, **named: calls.append((given, named)) or build(*given, **named)
    try:
        engine.step({"a": 1, "b": 1})
    finally:
        AttuneMetadataBuilder.build = build
    given, named = calls[0]
    return least(lambda: build(*given, **named))


def vllm():
    import torch

    import attune.integrations.vllm as integration

    integration.register()
    from engine import Engine

    engine = Engine([{}] * LAYERS, dtype=torch.bfloat16)
    engine.run({"a": 5, "b": 3})
    engine.run({"a": 1, "b": 1})
    print(f"us of metadata, by Attune's builder: {of_builder(engine):.1f}")
    metadata = engine.step({"a": 1, "b": 1})
    q, k, v = (torch.randn(2, heads, engine.d, dtype=torch.bfloat16) for heads in (engine.heads, engine.heads_kv, engine.heads_kv))
    out, impl = torch.empty_like(q), engine.layers[-1].impl
    slots = metadata.slot_mapping
    print(f"us a layer: {of_layers(lambda x: x.impl.forward(x, q, k, v, x.kv_cache, metadata, out), engine.layers):.2f}")
    print(f"us of a layer's cache update: {of_layers(lambda x: x.impl.do_kv_cache_update(x, k, v, x.kv_cache, slots), engine.layers):.2f}")
    cache = impl.cache(engine.layers[-1], engine.layers[-1].kv_cache)
    cache.page_table = metadata.step.block_table
    return metadata.step.scheduled[impl.kind][1], {"q": q, "cache": cache, "out": out, "seqused_kv": metadata.step.seq_lens}


def main(engine, fetched, version):
    tests = pathlib.Path(__file__).parents[1] / "python/tests"
    sys.path[1:1] = [str(pathlib.Path(fetched, version)), str(tests / f"{engine}_contract"), str(tests)]
    sys.path.append(str(pathlib.Path(fetched, "site")))
    sys.argv[1:] = []
    import torch

    torch.set_num_threads(1)
    plan, call = {"sglang": sglang, "vllm": vllm}[engine]()
    print(f"of which the run of the plan: {least(lambda: [plan.run_scheduled(**call) for _ in range(LAYERS)]) / LAYERS:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
