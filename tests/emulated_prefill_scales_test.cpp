// SPDX-License-Identifier: Apache-2.0
// Scales of 8-bit caches in the prefill kernel: whatever they are, no element of K or V is rounded.
#include "emulated_prefill.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

// fp16 queries, and elements of K and V that leave fp16's range when scaled.
TEST_F(EmulatedPrefill, ScalesBeyondFp16) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f16", "out_dtype": "f32", "kv": "paged",
      "causal": true, "seqlens_q": [70, 9], "seqlens_kv": [90, 260], "max_logits": true)");
  for (const char* scales : {"head", "token"}) {
    for (const char* cache : {R"("cache": {"dtype": "e4m3", "page_size": 16})",
                              R"("cache": {"dtype": "i8", "page_size": 16, "layout": "xpacked"})"}) {
      for (const bool new_tokens : {false, true}) {
        for (const float times : {0x1p20f, -0x1p-40f}) {
          const auto edit = [&](const attune_attention& a) {
            tests::multiply(a.cache.v_scale, times);
            tests::multiply(a.cache.k_scale, times > 0 ? -1.0f : 0.5f);
          };
          const cases::Row row = common.set("new_tokens", new_tokens).with(cache).set("cache.scales", scales);
          EXPECT_EQ(run(tests::make_case(row), 1, edit), "")
              << scales << ", " << cache << ", times " << times << ", new tokens " << new_tokens;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attune::cuda
