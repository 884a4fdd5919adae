# SPDX-License-Identifier: Apache-2.0
"""What the modules share."""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import attune

from .._errors import refuse_unknown

if TYPE_CHECKING:
    from .._errors import Function

INFINITY = float("inf")


def refuse(function: str, argument: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"{function}: {argument} {reason}")


# Arguments of attune, and what callers of these modules may have in their place.
_THEIRS = {"seqused_kv": ("cache_seqlens", "seqused_k", "cu_seqlens_k"), "cu_seqlens_q": ("cu_seqlens_qo",), "max_seqlen_q": ("max_seqlen_qo",),
           "cu_seqlens_kv": ("cu_seqlens_k",), "max_seqlen_kv": ("max_seqlen_k",), "cache.page_table": ("block_table", "page_table"),
           "cache.k": ("k_cache", "k"), "cache.v": ("v_cache", "v"), "cache.batch_index": ("cache_batch_idx",),
           "cache.k_scale": ("k_descale",), "cache.v_scale": ("v_descale",), "prologue.rope_cos_sin": ("rotary_cos",),
           "prologue.qkv_scale": ("q_descale",), "mask_bits": ("cache_leftpad",), "partial_out": ("out_partial",),
           "partial_lse": ("lse_partial",)}


def suggesting(function: Function) -> Function:
    """The function, whose errors have the names of its own arguments: one that is none, one of a wrong kind, and what attune says."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            refuse_unknown(function.__name__, kwargs, parameters)
            for name, value in (*zip(parameters, args), *kwargs.items()):
                _check_kind(f"{function.__name__}: {name}", str(parameters[name].annotation), value)
            if isinstance(error, attune.Error):
                names = {ours: next((name for name in theirs if name in parameters), ours)
                         for ours, theirs in _THEIRS.items() if ours not in parameters}
                raise in_their_words(error, names) from None
            raise

    return call  # type: ignore[return-value]


def _check_kind(argument: str, annotation: str, value: Any) -> None:
    kinds = annotation.split(" | ")
    if "torch.Tensor" in kinds and not isinstance(value, torch.Tensor):
        if not (value is None and "None" in kinds) and not (isinstance(value, int) and "int" in kinds):
            raise attune.WrongType(f"{argument} is {type(value)!r}; a tensor of torch{' or an int' * ('int' in kinds)} is expected") from None
    elif kinds == ["int"]:
        try:
            int(value)
        except (TypeError, ValueError):
            raise attune.WrongType(f"{argument} is {value!r}; an int is expected") from None


def in_their_words(error: attune.Error, names: dict[str, str]) -> attune.Error:
    """The same error with the caller's names of arguments: `names` has them by those of attune."""
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    text = re.sub(rf"(?<![\w.])({longest_first})(?!\w)", lambda match: names[match[1]], str(error))
    said = type(error)(text)
    said.status = error.status
    return said


def wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def int32(tensor: Any) -> Any:
    """Lengths and tables that some callers hold as int64."""
    return tensor.to(torch.int32) if tensor is not None and tensor.dtype == torch.int64 else tensor


def lse_heads_first(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse as [batch, heads, seqlen_q] or [heads, total_q], its view with the axes of q)."""
    *batch, rows, heads, _ = q.shape
    lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)
    return lse, lse.transpose(-1, -2)


def empty_rows_to(value: float, lse: torch.Tensor) -> torch.Tensor:
    """A row that sees nothing has -inf here; others want +inf."""
    return lse.nan_to_num_(nan=float("nan"), posinf=INFINITY, neginf=value)  # one launch


def window(window_size: Any) -> dict[str, int]:
    """(left, right), -1 for no limit, as fields of attention."""
    try:
        left, right = window_size
        return {name: int(n) for name, n in (("window_left", left), ("window_right", right)) if n is not None and n >= 0}
    except (TypeError, ValueError):
        raise attune.WrongType(f"window_size is {window_size!r}; a pair is expected: keys to the left and to the right, -1: no limit") from None


def first_element(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """One float32 on the device: the first element of a scale that may be an expanded view. Reads nothing back."""
    if not isinstance(scale, torch.Tensor):
        return torch.full((1,), float(scale), dtype=torch.float32, device=like.device)
    return scale[(0,) * scale.dim()].reshape(1).to(torch.float32)
