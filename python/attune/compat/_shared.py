# SPDX-License-Identifier: Apache-2.0
"""What the modules share."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, NoReturn

import torch

import attune

from .._errors import unknown_argument

INFINITY = float("inf")


def refuse(function: str, argument: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"{function}: {argument} {reason}")


def suggesting(function: Any) -> Any:
    """The function, whose error about an unknown keyword says which one was meant."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise attune.WrongType(f"{function.__name__}: {unknown_argument(name, known)}")
        return function(*args, **kwargs)

    return call


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
    left, right = window_size
    return {name: int(n) for name, n in (("window_left", left), ("window_right", right)) if n is not None and n >= 0}


def first_element(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """One float32 on the device: the first element of a scale that may be an expanded view. Reads nothing back."""
    if not isinstance(scale, torch.Tensor):
        return torch.full((1,), float(scale), dtype=torch.float32, device=like.device)
    return scale[(0,) * scale.dim()].reshape(1).to(torch.float32)
