// SPDX-License-Identifier: Apache-2.0
// What nobody may see changes no bit: the CUDA kernels' own source on the CPU (tests/emulator). No GPU. A row that is
// computed again (prefill/recompute.cuh) because a product was NaN is seen by its bits: its P is not rounded.
#include "emulated_attend.h"
#include "unseen.h"

namespace attune::cuda {
namespace {

class EmulatedUnseen : public tests::Emulated {};

TEST_F(EmulatedUnseen, ChangesNoBits) {
  for (const cases::Case& spec : cases::parse_cases(R"({"area": "unseen", "cases": [
      {"name": "dense", "heads": [4, 2], "head_dim": [64, 64], "kv": "dense", "seqlens_q": [33, 70, 0],
       "seqlens_kv": [33, 200, 9], "seqused": true,
       "sweep": {"dtype": ["bf16", "f32", "e4m3"], "with": [
         {"name": "causal", "causal": true},
         {"name": "window", "window": [50, 20]}]}},
      {"name": "cached", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "seqlens_q": [33, 70],
       "seqlens_kv": [300, 40], "causal": true, "window": [150, 0],
       "sweep": {"with": [
         {"name": "nhd", "cache": {"page_size": 16}},
         {"name": "new", "cache": {"page_size": 48, "layout": "hnd"}, "new_tokens": true},
         {"name": "xpacked", "cache": {"layout": "xpacked", "page_size": 32}},
         {"name": "e4m3", "cache": {"dtype": "e4m3", "scales": "head", "page_size": 16}},
         {"name": "i8", "cache": {"dtype": "i8", "scales": "token", "page_size": 64}},
         {"name": "xpacked codes", "cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "tensor", "page_size": 32}}]}},
      {"name": "steps", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "seqlens_q": [1, 2],
       "seqlens_kv": [300, 40], "causal": true, "window": [150, 0],
       "sweep": {"with": [
         {"name": "nhd", "cache": {"page_size": 16}},
         {"name": "new", "cache": {"page_size": 48, "layout": "hnd"}, "new_tokens": true},
         {"name": "xpacked", "cache": {"layout": "xpacked", "page_size": 32}},
         {"name": "e5m2", "cache": {"dtype": "e5m2", "scales": "head", "page_size": 16}},
         {"name": "i8", "cache": {"dtype": "i8", "scales": "token", "page_size": 64}}]}},
      {"name": "mla", "dtype": "bf16", "head_dim": [576, 512], "kv": "paged", "seqlens_kv": [90, 1, 70], "causal": true,
       "cache": {"page_size": 64},
       "sweep": {"with": [
         {"name": "plain", "heads": [16, 1], "shared_kv": true, "seqlens_q": [1, 3, 1]},
         {"name": "plain window", "heads": [16, 1], "shared_kv": true, "seqlens_q": [3, 2, 1],
          "seqlens_kv": [300, 1, 170], "window": [100, 0]},
         {"name": "few 656", "heads": [4, 1], "cache": {"format": "mla_656"}, "queries": "fixed"}]}},
      {"name": "sparse", "dtype": "bf16", "head_dim": [576, 512], "kv": "slots", "seqlens_q": [2, 1],
       "sparse": {"topk": 100, "topk_length": "token", "slots": 256, "invalid": 0.1},
       "sweep": {"with": [
         {"name": "h64", "heads": [64, 1], "shared_kv": true},
         {"name": "h64 656", "heads": [64, 1], "cache": {"format": "mla_656"}}]}}]})")) {
    EXPECT_EQ(tests::find_bits_of_unseen(spec, cases::host_memory(),
                                         [](const attune_attention& a) { emulate_attention(a, 3); }),
              "")
        << spec.name;
  }
}

}  // namespace
}  // namespace attune::cuda
