# SPDX-License-Identifier: Apache-2.0
"""Attune as attention backends of vLLM: `vllm serve MODEL --attention-backend ATTUNE`, or ATTUNE_MLA, or ATTUNE_MLA_SPARSE.

vLLM finds `register` by the entry point group "vllm.general_plugins" and calls it in each of its processes. docs/vllm.md has what
is covered.
"""

from __future__ import annotations

import logging

KNOWN_VERSIONS = ("0.31", "0.32", "0.33")  # minors of vLLM whose own classes python/tests/vllm_contract drives


def register() -> None:
    """Adds the backends, under the names that `backend_name` gives. May be called more than once.

    vLLM runs it for everybody who has attune installed, so where there is no registry that is known it only says so.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        logging.getLogger(__name__).warning("%s; Attune's backends are not offered: %s", unknown_version() or "no registry", error)
        return

    path = f"{__name__}.backend.AttuneBackend"
    if backend_name() == "CUSTOM":
        register_backend(AttentionBackendEnum.CUSTOM, path)
        return
    for name, path in (("ATTUNE", path), ("ATTUNE_MLA", f"{__name__}.mla.AttuneMLABackend"),
                       ("ATTUNE_MLA_SPARSE", f"{__name__}.sparse.AttuneMLASparseBackend")):
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)


def backend_name() -> str:
    """"ATTUNE"; "CUSTOM" for vLLM 0.31, whose registry takes no new names, and so has neither ATTUNE_MLA nor ATTUNE_MLA_SPARSE."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return "ATTUNE" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def unknown_version() -> str | None:
    """Why this version of vLLM is refused, or None."""
    import vllm

    minor = ".".join(vllm.__version__.split(".")[:2])
    if minor in KNOWN_VERSIONS:
        return None
    return f"vLLM {vllm.__version__} is not known to Attune: known are {', '.join(KNOWN_VERSIONS)}"
