# SPDX-License-Identifier: Apache-2.0
"""The arguments of attention that have a backward, for torch and for JAX."""

from .. import _core

# What has a gradient, in the order of torch's operators, and the name of that gradient; those of tables are float32.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "bias": "dbias", "t5_bias": "dt5_bias"}
TABLES = ("sinks", "bias", "t5_bias")
# What a call with gradients cannot have: lists of keys, beams, sequences that are left out, V as a part of K, outputs of 8 bits,
# queries in two parts.
_REFUSED = {"indices", "topk_length", "extra_indices", "extra_topk_length", "cache_indirection", "beam_prompt_length", "beam_width",
            "finished", "skip_decode", "zero_finished", "out_scale", "head_dim_v", "q_rope"}
_OTHERS = {name: kind for name, kind in _core.fields["attune_attention"].items() if name not in GRADIENTS and name not in _REFUSED}
# Other arguments: arrays, and values with their types in torch's schemas.
ARRAYS = tuple(name for name, kind in _OTHERS.items() if kind == "array")
VALUES = {name: kind + "?" for name, kind in _OTHERS.items() if kind in ("bool", "int", "float")}
