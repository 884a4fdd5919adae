# SPDX-License-Identifier: Apache-2.0
"""The arguments of attention that have a backward, for torch and for JAX."""

# What has a gradient, in the order of torch's operators, and the name of that gradient; those of tables are float32.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "bias": "dbias", "t5_bias": "dt5_bias"}
TABLES = ("sinks", "bias", "t5_bias")
# Other arguments: arrays, and values with their types in torch's schemas.
ARRAYS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_kv", "mask_bits", "mask_start", "bidirectional_ranges", "alibi_slopes",
          "new_token_bias")
VALUES = {"causal": "bool?", "window_left": "int?", "window_right": "int?", "softmax_scale": "float?", "softcap": "float?",
          "alibi_sqrt": "bool?", "t5_max_distance": "int?", "t5_bidirectional": "bool?", "max_seqlen_q": "int?",
          "max_seqlen_kv": "int?", "batch_invariant": "bool?", "allow_tf32": "bool?"}
