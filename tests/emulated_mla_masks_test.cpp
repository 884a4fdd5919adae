// SPDX-License-Identifier: Apache-2.0
// The MLA kernels in the emulator (emulated_mla.h): masks that are looked up key by key.
#include "emulated_mla.h"

namespace attune::cuda {
namespace {

// By every producer: TMA boxes, gathered rows, packed rows alone and in clusters, rows beside a cache.
TEST_F(EmulatedMla, MaskBits) {
  check(R"("head_dim": [576, 512], "causal": true, "mask_bits": 1, "max_logits": true, "seqlens_q": [3, 1, 9],
        "seqlens_kv": [200, 0, 70])",
        {R"("heads": [16, 1], "kv": "paged", "shared_kv": true, "cache": {"page_size": 64})",
         R"("heads": [64, 1], "kv": "paged", "shared_kv": true, "cache": {"page_size": 3}, "mask_bits": 2)",
         R"("heads": [20, 1], "kv": "contiguous", "shared_kv": true, "mask_start": 60, "dtype": "f16")",
         R"("heads": [128, 1], "kv": "paged", "cache": {"format": "mla_656", "page_size": 64}, "mask_bits": 2)",
         R"("heads": [16, 1], "kv": "paged", "cache": {"format": "mla_656"}, "new_tokens": true, "mask_start": 30)",
         R"("heads": [24, 1], "kv": "paged", "cache": {"format": "mla_584", "page_size": 16}, "head_dim": [512, 512])",
         R"("heads": [4, 2], "kv": "dense", "shared_kv": true, "mask_bits": 2, "window": [40, 0])"});
}

// One token: the m16 and the swap-AB kernel have no such masks, so the M = 64 kernel takes the call.
TEST_F(EmulatedMla, MaskBitsOfDecode) {
  check(R"("head_dim": [576, 512], "kv": "paged", "mask_bits": 1, "seqlens_kv": [500, 1, 130])",
        {R"("heads": [16, 1], "shared_kv": true, "cache": {"page_size": 64})",
         R"("heads": [32, 1], "cache": {"format": "mla_656", "page_size": 64}, "mask_bits": 2, "mask_keys": 100)"},
        2);
}

// NaN values that the mask shows to some rows of an M block alone.
TEST_F(EmulatedMla, MaskBitsOverBadValues) {
  check(R"("head_dim": [576, 512], "kv": "paged", "heads": [8, 1], "plant": "nan_v", "mask_bits": 2,
        "seqlens_q": [8, 3], "seqlens_kv": [300, 70])",
        {R"("shared_kv": true, "cache": {"page_size": 64})", R"("shared_kv": true, "cache": {"page_size": 3})",
         R"("cache": {"format": "mla_656", "page_size": 64}, "causal": true)"});
}

}  // namespace
}  // namespace attune::cuda
