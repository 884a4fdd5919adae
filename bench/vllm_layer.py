# SPDX-License-Identifier: Apache-2.0
"""A layer of attention by Attune's backends of vLLM beside vLLM's own, with vLLM's layers, caches, builders and metadata.

usage: vllm_layer.py [--device cuda] [--only PART_OF_A_NAME] [--rounds 5] [--json FILE] [--allow-missing]. Needs vLLM; on the CPU
(--device cpu), where vLLM's own backends do not run, small cases of Attune's alone, for tests. The exit status is 1 where an output is
wrong, and where one of vLLM's own backends does not run, unless --allow-missing.

Each backend's outputs are compared with attention in float64 first. GPU time is that of a step's layers, back to back behind a kernel
that waits until the host has issued all of them: so the host is not in it. Attune makes its schedule in the step's first layer, inside;
vLLM's backends make theirs with the metadata, outside. Ratios are of GPU times in the same round, median of rounds: above 1, Attune is
faster. Each of a step's layers reads its own cache, of CACHES in turn.
Host: microseconds a layer, and of a step's metadata, median of STEPS steps.
"""

import argparse
import json
import statistics
import sys
import time
from types import SimpleNamespace

import torch

try:
    import vllm
    from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, get_kv_cache_spec, init_attn_backend
    from vllm.v1.worker.utils import allocate_kv_cache

    try:  # since 0.33
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
except ImportError as error:
    sys.exit(f"vllm_layer: vLLM cannot be imported ({error}); install it, or put it on PYTHONPATH")

import attune.integrations.vllm as integration

integration.register()

LAYERS, CACHES = 32, 4
LATENT, ROPE, NOPE, V = 512, 64, 128, 128  # of MLA
DENSE, MLA = ("FLASH_ATTN",), ("FLASHMLA", "FLASH_ATTN_MLA")
TOLERANCE = 0.02  # of the largest output: bfloat16 has 8 bits


def case(name, queries, lengths, heads, heads_kv=None, d=128, block_size=16):
    """heads_kv None: MLA. queries: of each request; lengths: with them."""
    return SimpleNamespace(name=name, queries=queries, lengths=lengths, heads=heads, heads_kv=heads_kv or 1, mla=heads_kv is None,
                           d=d if heads_kv else LATENT + ROPE, block_size=block_size)


def cases(device):
    if device == "cpu":
        return [case("decode/3x40..90", [1] * 3, [40, 64, 90], 8, 2, 32), case("chunk/2x(5+7)", [7, 7], [12, 12], 4, 1, 64),
                case("mla/2x1x70_h16", [1, 1], [70, 70], 16, block_size=64)]
    return [case("decode/128x8192_32_8_d128", [1] * 128, [8192] * 128, 32, 8), case("decode/4x4096_32_8_d128", [1] * 4, [4096] * 4, 32, 8),
            case("chunk/8x(4096+1024)_32_8_d128", [1024] * 8, [5120] * 8, 32, 8),
            case("mla/128x1x8192_h128", [1] * 128, [8192] * 128, 128, block_size=64),
            case("mla/128x1x8192_h16", [1] * 128, [8192] * 128, 16, block_size=64)]


class NoPrompts(MLAPrefillBackend):
    """Stands where vLLM's kernels for prompts would: no case of MLA has one."""

    get_name = staticmethod(lambda: "NO_PROMPTS")

    def run_prefill_new_tokens(self, *arguments, **options):
        raise AssertionError("a decode step has no prompt")

    run_prefill_context_chunk = run_prefill_new_tokens


class Step:
    """What all backends of a case share: the caches, the step's lengths and tables, the new rows."""

    def __init__(self, case, device):
        self.case, self.device, self.caches = case, torch.device(device), None
        blocks = [-(-length // case.block_size) for length in case.lengths]
        generator = torch.Generator().manual_seed(0)
        order = 1 + torch.randperm(sum(blocks), generator=generator)  # block 0 is vLLM's null block
        self.num_blocks = len(order) + 1
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        slots = []
        for row, (mine, count, length) in enumerate(zip(order.split(blocks), case.queries, case.lengths)):
            table[row, : len(mine)] = mine
            at = torch.arange(length - count, length)
            slots.append(mine[at // case.block_size] * case.block_size + at % case.block_size)
        self.table, self.slots = table.to(device), torch.cat(slots).to(device)
        self.starts_cpu = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
        self.lengths_cpu = torch.tensor(case.lengths, dtype=torch.int32)
        self.starts, self.lengths = self.starts_cpu.to(device), self.lengths_cpu.to(device)
        rows = sum(case.queries)
        torch.manual_seed(0)
        self.q = torch.randn(rows, case.heads, case.d, dtype=torch.bfloat16, device=device)
        if case.mla:  # as vLLM's layer has them: a transposed product, and columns of wider rows
            latent = self.q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)
            self.parts = latent, torch.cat([torch.randn_like(self.q[..., :NOPE]), self.q[..., LATENT:]], dim=-1)[..., NOPE:]
        self.k, self.v = (torch.randn(rows, case.heads_kv, case.d, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.scale = (NOPE + ROPE if case.mla else case.d) ** -0.5

    def keys(self, cache, row):
        """K and V of a request, float64 [tokens, heads_kv, ...]."""
        length = self.case.lengths[row]
        blocks = cache[self.table[row].long()].double()
        if self.case.mla:
            k = blocks.flatten(0, -2)[:length].unsqueeze(1)
            return k, k[..., :LATENT]
        return blocks.transpose(1, 2).flatten(0, 1)[:length].split(self.case.d, dim=-1)

    def error(self, cache, out):
        """Largest error of the first and the last request, as a part of the largest output."""
        worst = 0.0
        for row in {0, len(self.case.lengths) - 1}:
            first, last = self.starts_cpu[row : row + 2].tolist()
            k, v = (x.repeat_interleave(self.case.heads // self.case.heads_kv, 1) for x in self.keys(cache, row))
            scores = torch.einsum("qhd,khd->hqk", self.q[first:last].double(), k) * self.scale
            seen = torch.ones_like(scores[0], dtype=torch.bool).tril(self.case.lengths[row] - (last - first))
            exact = torch.einsum("hqk,khd->qhd", scores.masked_fill_(~seen, -torch.inf).softmax(-1), v)
            difference = (out[first:last].view_as(exact).double() - exact).abs().max() / exact.abs().max()
            worst = max(worst, float(difference.nan_to_num(torch.inf)))
        return worst


class Backend:
    """The layers of a model, on one backend."""

    def __init__(self, step, name):
        self.step, self.name, case = step, name, step.case
        backend = AttentionBackendEnum[name].get_class()
        self.config = VllmConfig(device_config=DeviceConfig(device=step.device.type), compilation_config=CompilationConfig(
            mode=0, cudagraph_mode="NONE"), cache_config=CacheConfig(block_size=case.block_size))
        self.config.cache_config.kv_cache_layout = "LBNHC"
        text = SimpleNamespace(model_type="llama")
        self.config.model_config = SimpleNamespace(
            dtype=torch.bfloat16, is_mm_prefix_lm=False, rswa_window=None, max_model_len=max(case.lengths), hf_config=text,
            hf_text_config=text, get_head_size=lambda: case.d, get_num_attention_heads=lambda parallel: case.heads, use_mla=case.mla,
            is_diffusion=False)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(self.config), step.device:
                self.layers = [self.layer(i, backend) for i in range(LAYERS)]
        finally:
            torch.set_default_dtype(default)
        self.bind()
        self.out, self.builder_us = torch.empty_like(step.q), 0.0
        self.builder = self.groups[0][0].get_metadata_builder(0)
        build = self.builder.build

        def timed(*given, **named):
            begin = time.perf_counter()
            made = build(*given, **named)
            self.builder_us = (time.perf_counter() - begin) * 1e6
            return made

        self.builder.build = timed

    def layer(self, i, backend):
        case, options = self.step.case, {"cache_config": self.config.cache_config, "prefix": f"model.layers.{i}.attn", "attn_backend": backend}
        if not case.mla:
            return Attention(case.heads, case.d, self.step.scale, case.heads_kv, **options)
        projection = torch.nn.Linear(LATENT, case.heads * (NOPE + V), bias=False)
        return MLAAttention(case.heads, self.step.scale, NOPE, ROPE, V, None, LATENT, projection, prefill_backend_cls=NoPrompts, **options)

    def bind(self):
        step, specs = self.step, get_kv_cache_spec(self.config)
        spec = next(iter(specs.values()))

        def planned(names):
            return get_kv_cache_config_from_groups(self.config, [KVCacheGroupSpec(names, spec)],
                                                   spec.page_size_bytes * len(names) * step.num_blocks)

        self.cache_config = planned(list(specs))
        with set_current_vllm_config(self.config):
            self.groups, _, sizes = init_attn_backend(self.cache_config, self.config, step.device)
        if step.caches is None:
            layout = self.config.cache_config.get_resolved_kv_cache_layout()
            step.caches = list(allocate_kv_cache(planned(list(specs)[:CACHES]), step.device, layout, sizes).values())
            for cache in step.caches:
                cache.normal_()
        for i, layer in enumerate(self.layers):
            layer.bind_kv_cache(step.caches[i % CACHES])

    def build(self):
        """Metadata of the step, as vLLM's runner makes it."""
        step, counts = self.step, self.step.case.queries
        with set_current_vllm_config(self.config):
            made = build_attn_metadata(
                self.groups, len(counts), sum(counts), step.starts, step.starts_cpu, max(counts), step.lengths, max(step.case.lengths),
                [step.table], step.slots.unsqueeze(0), self.cache_config, seq_lens_cpu_upper_bound=step.lengths_cpu)
        return made[self.layers[0].layer_name]

    def attend(self, metadata):
        """Every layer; -> the last one's output."""
        q, k, v = self.step.q, self.step.k, self.step.v
        if self.step.case.mla:
            q, out = self.step.parts, None
            for layer in self.layers:
                out, _ = layer.impl.forward_mqa(q, layer.kv_cache, metadata, layer)
            return out
        for layer in self.layers:
            layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, self.out)
        return self.out

    def update(self, metadata):
        """Writes the new rows of every layer. MLA's backends share vLLM's own operation: there is nothing to compare."""
        for layer in self.layers:
            layer.impl.do_kv_cache_update(layer, self.step.k, self.step.v, layer.kv_cache, self.step.slots)

    def check(self):
        """Runs everything once; -> the largest error."""
        step, metadata = self.step, self.build()
        if not step.case.mla:
            at = step.slots // step.case.block_size, step.slots % step.case.block_size
            for cache in step.caches:
                cache.transpose(1, 2)[at] = 0
            self.update(metadata)
            if not torch.equal(self.layers[-1].kv_cache.transpose(1, 2)[at], torch.cat([step.k, step.v], dim=-1)):
                return float("inf")
        return step.error(self.layers[-1].kv_cache, self.attend(metadata))


SLEEP = {"cycles": 4_000_000}
STEPS = 8  # that a measurement takes the median of, as an engine goes on from step to step: in the first the host's caches are cold


def microseconds_of(call):
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def time_of(call, device):
    """(GPU, host) microseconds of a layer; call runs LAYERS of them. GPU None on the CPU, and where its time would hold the host's."""
    if device == "cpu":
        return None, statistics.median(microseconds_of(call) for _ in range(STEPS)) / LAYERS
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gpu, host = [], []
    for _ in range(2 * STEPS):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP["cycles"])
        start.record()
        host.append(microseconds_of(call))
        issued_in_time = not start.query()
        stop.record()
        stop.synchronize()
        if issued_in_time:
            gpu.append(start.elapsed_time(stop) * 1e3)
        else:
            SLEEP["cycles"] = min(2 * SLEEP["cycles"], 1 << 30)
        if len(gpu) == STEPS:
            break
    if not gpu:
        print("  the host took longer to issue a step than the GPU waits for it: the GPU's time is not known", flush=True)
    return statistics.median(gpu) / LAYERS if gpu else None, statistics.median(host) / LAYERS


def measure(backend, device):
    builds, builders = [], []  # the latter of the backend; a build has what vLLM does around it, too
    for _ in range(STEPS):
        builds.append(microseconds_of(backend.build))
        builders.append(backend.builder_us)
    metadata = backend.build()
    found = {"build": (None, statistics.median(builds)), "builder": (None, statistics.median(builders)),
             "attention": time_of(lambda: backend.attend(metadata), device)}
    if not backend.step.case.mla:
        found["update"] = time_of(lambda: backend.update(metadata), device)
    return found


def peers_of(case, device):
    """Names of vLLM's own backends that a case is compared with."""
    return () if device == "cpu" else MLA if case.mla else DENSE


def backends_of(step, missing):
    """Attune's, then those of vLLM's own, each with its largest error. The names of those that do not run here are added to missing."""
    ours = Backend(step, "ATTUNE_MLA" if step.case.mla else integration.backend_name())
    made = [(ours, ours.check())]
    for name in peers_of(step.case, step.device.type):
        try:
            theirs = Backend(step, name)
            made.append((theirs, theirs.check()))
        except Exception as error:  # noqa: BLE001  whatever its needs raise where they are not met
            print(f"  {name} does not run here: {str(error).splitlines()[0] if str(error) else error!r}")
            missing.add(name)
    return made


def compare(case, device, rounds, missing):
    """-> a record of the case for each backend, or None where an output is wrong."""
    print(case.name, flush=True)
    made, records = backends_of(Step(case, device), missing), []
    for backend, error in made:
        records.append({"case": case.name, "backend": backend.name, "error": error, "rounds": []})
        if not error <= TOLERANCE:
            print(f"  {backend.name}: WRONG, largest error {error:.3g} of the largest output")
            return None
    for _ in range(rounds):
        for (backend, _), record in zip(made, records):
            record["rounds"].append(measure(backend, device))
    for record in records:
        def median(part, which):
            values = [found[part][which] for found in record["rounds"] if part in found and found[part][which] is not None]
            return statistics.median(values) if values else None

        record["us"] = {f"{where}_{part}": median(part, which) for part in ("attention", "update", "build", "builder")
                        for which, where in enumerate(("gpu", "host"))}
        ratio = {}
        for part in ("attention", "update"):
            pairs = [(mine[part][0], theirs[part][0]) for mine, theirs in zip(records[0]["rounds"], record["rounds"])
                     if part in mine and None not in (mine[part][0], theirs[part][0])]
            if record is not records[0] and device == "cuda" and pairs:
                ratio[part] = statistics.median(theirs / mine for mine, theirs in pairs)
        record["ratio"] = ratio
        us = ", ".join(f"{name} {value:.1f}" for name, value in record["us"].items() if value is not None)
        said = "".join(f", {part} x{value:.3f}" for part, value in ratio.items())
        print(f"  {record['backend']}: error {record['error']:.4f}; us a layer: {us}{said}", flush=True)
    for record in records:
        del record["rounds"]
    return records


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--allow-missing", action="store_true", help="go without those of vLLM's own backends that do not run here")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("vllm_layer: there is no GPU here; --device cpu runs small cases")
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {LAYERS} layers, {CACHES} caches")
    chosen = [x for x in cases(given.device) if given.only in x.name and not (x.mla and integration.backend_name() == "CUSTOM")]
    missing = set()
    found = [compare(one, given.device, given.rounds, missing) for one in chosen]
    if given.json:
        with open(given.json, "w") as file:
            json.dump([record for records in found if records for record in records], file, indent=1)
    if missing and not given.allow_missing:
        print(f"vllm_layer: {', '.join(sorted(missing))} did not run here, so nothing is compared with it; --allow-missing goes without",
              file=sys.stderr)
        return 1
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
