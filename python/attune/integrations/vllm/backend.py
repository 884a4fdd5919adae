# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks a backend before it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from . import backend_name, coverage, kv_cache, unknown_version
from .impl import AttuneImpl
from .metadata import AttuneMetadataBuilder

# Where to go instead: Attune's own, then vLLM's, the fastest first.
_DENSE = (backend_name(), "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_MLA = ("ATTUNE_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
_MLA_SPARSE = ("ATTUNE_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE")
_HEADS = 8  # the selector does not say how many: AttuneImpl asks again with the layer's


class Validated(AttentionBackend):
    """Refusals that say the field, its value, and where to go."""

    @classmethod
    def refusal(cls, asked: dict[str, Any]) -> str | None:
        """What the registry says of a configuration that vLLM's own questions have passed."""
        raise NotImplementedError

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # max_query_len of the host chooses the kernel, and bounds what it computes

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """Every reason against it, with the field and its value; the last one names a backend that takes it."""
        reasons = cls.reasons(*args, **asked)
        if reasons:
            reasons.append(f"nearest backend that takes it: {nearest(asked) or 'none of vLLM here'}")
        return reasons

    @classmethod
    def reasons(cls, *args: Any, **asked: Any) -> list[str]:
        """As validate_configuration, without the last one: backends that ask each other would never end."""
        reasons = [_with_value(cls, reason, asked) for reason in super().validate_configuration(*args, **asked)]
        if (unknown := unknown_version()) is not None:
            reasons.append(unknown)
        if not reasons and (refused := cls.refusal(asked)) is not None:
            reasons.append(refused)
        return reasons


class AttuneBackend(Validated):
    """Dense decoder attention over paged caches of [blocks, num_kv_heads, block_size, K beside V] in any order of memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(kv_cache.DTYPES)
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @staticmethod
    def get_impl_cls() -> type[AttuneImpl]:
        return AttuneImpl

    @staticmethod
    def get_builder_cls() -> type[AttuneMetadataBuilder]:
        return AttuneMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for the scales of caches with one for each token and head. Called before there is a cache."""
        if spec.head_size_v != spec.head_size:
            raise NotImplementedError(f"ATTUNE: head_size_v={spec.head_size_v} is not covered beside head_size={spec.head_size}: "
                                      "FLASH_ATTN_DIFFKV and TRITON_ATTN_DIFFKV are for it")
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        return replace(spec, state_content_bytes=kv_cache.content_bytes("int8_per_token_head", spec.head_size, spec.head_size_v))

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def refusal(cls, asked: dict[str, Any]) -> str | None:
        if asked.get("use_dcp") and asked.get("has_sliding_window"):
            return "has_sliding_window=True is not covered with DCP: vLLM splits no such cache over ranks"
        window: dict[str, Any] = {"window_left": 127} if asked.get("has_sliding_window") else {}
        return coverage.refusal(asked["device_capability"], num_heads=_HEADS, num_kv_heads=_HEADS, head_size=asked["head_size"], dtype=asked["dtype"],
                                kv_cache_dtype=asked["kv_cache_dtype"], block_size=asked["block_size"], sinks=asked["has_sink"],
                                causal=True, **window)


# What vLLM's own reasons say is not supported, by the field that asks for it.
_FIELDS = {"MLA": "use_mla", "non-MLA": "use_mla", "sparse": "use_sparse", "non-sparse": "use_sparse", "attention sinks": "has_sink",
           "per-head quant scales": "use_per_head_quant_scales", "compute capability": "device_capability",
           "sliding window": "has_sliding_window", "R-SWA": "use_rswa", "non-causal attention": "use_non_causal",
           "non-causal MLA attention with DCP": "use_non_causal", "batch invariance": "use_batch_invariant",
           "KV connector": "use_kv_connector", "PCP": "use_pcp", "DCP": "use_dcp",
           "partial multimodal token full attention": "use_mm_prefix", "device-cpu query lens mismatch": "use_adaptive_verification"}


def _with_value(backend: type[Validated], reason: str, asked: dict[str, Any]) -> str:
    what = reason.partition(" not supported")[0]
    field = "attn_type" if what.startswith("attention type ") else _FIELDS.get(what, what)
    if field not in asked:
        return reason
    known = {"dtype": backend.supported_dtypes, "kv_cache_dtype": backend.supported_kv_cache_dtypes,
             "head_size": backend.get_supported_head_sizes()}.get(field)
    if known is None:
        return f"{reason}: {field} is {asked[field]}"
    return f"{reason}: it is {asked[field]}, and {', '.join(map(str, known))} are"


def nearest(asked: dict[str, Any]) -> str | None:
    """The first backend that takes a configuration, as far as it can be asked on this machine."""
    for name in _MLA_SPARSE if asked.get("use_sparse") else _MLA if asked.get("use_mla") else _DENSE:
        try:
            backend = AttentionBackendEnum[name].get_class()
            if not (backend.reasons if issubclass(backend, Validated) else backend.validate_configuration)(**asked):
                return name
        except Exception:  # noqa: BLE001  a backend whose needs are not installed may fail in any way; it is not the nearest then
            continue
    return None
