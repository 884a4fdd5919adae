# SPDX-License-Identifier: Apache-2.0
"""Attune as an attention backend of SGLang: `python -m sglang.launch_server --model-path MODEL --attention-backend attune`.

SGLang finds `register` by the entry point group "sglang.srt.plugins" and calls it in each of its processes. docs/sglang.md has what
is covered.
"""

from __future__ import annotations

import logging
from typing import Any

KNOWN_VERSIONS = ("0.5.22", "0.5.23")  # whose own classes python/tests/sglang_contract drives
NAME = "attune"


def register() -> None:
    """Adds the backend. May be called more than once.

    SGLang runs it for everybody who has attune installed, so where there is no registry that is known it only says so.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        logging.getLogger(__name__).warning("%s; Attune's backend is not offered: %s", unknown_version() or "no registry", error)
        return

    register_attention_backend(NAME)(create)
    if NAME in ATTENTION_BACKEND_CHOICES:
        return
    add_attention_backend_choices([NAME])
    if unknown_version() is None:
        _register_for_drafts()


def _register_for_drafts() -> None:
    """For draft models SGLang looks names up in a closed list, to which its registry of hooks lets a plug-in add."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def offer(*args: Any, **kwargs: Any) -> None:
        from .draft import offer as add

        add(*args, **kwargs)

    HookRegistry.register("sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", offer, HookType.BEFORE)


def create(model_runner: Any) -> Any:
    """The backend of a model: dense, MLA or sparse MLA. Raises NotImplementedError, by the name of the field, for what is not covered."""
    if (unknown := unknown_version()) is not None:
        raise NotImplementedError(f"{NAME}: {unknown}")
    from .backend import AttuneBackend
    from .coverage import is_sparse
    from .mla import AttuneMLABackend

    if is_sparse(model_runner):
        from .sparse import AttuneDSABackend

        return AttuneDSABackend(model_runner)
    return (AttuneMLABackend if model_runner.use_mla_backend else AttuneBackend)(model_runner)


def unknown_version() -> str | None:
    """Why this version of SGLang is refused, or None."""
    from sglang.version import __version__ as version

    if ".".join(version.split(".")[:3]) in KNOWN_VERSIONS:
        return None
    return f"SGLang {version} is not known to Attune: known are {', '.join(KNOWN_VERSIONS)}"
