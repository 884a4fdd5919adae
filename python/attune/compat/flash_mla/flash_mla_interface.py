# SPDX-License-Identifier: Apache-2.0
"""The functions under the name of the module that has them in flash_mla."""

from attune.compat.flash_mla import (FlashMLASchedMeta, flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,  # noqa: F401
                                     flash_attn_varlen_qkvpacked_func, flash_mla_sparse_fwd, flash_mla_with_kvcache,
                                     get_mla_metadata)
