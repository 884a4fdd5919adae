// SPDX-License-Identifier: Apache-2.0
// The prefill kernel of GPUs before Hopper in the emulator: x-packed caches, whose tiles of V are stored by channels.
#include <limits>
#include <utility>

#include "emulated_prefill_mma.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

class EmulatedPrefillMmaXpacked : public EmulatedPrefillMma {
 protected:
  // The first tile begins before the first visible key, the last one has keys behind the sequence's.
  static constexpr const char* kRagged =
      R"("kv": "paged", "causal": true, "seqlens_q": [70, 3], "seqlens_kv": [200, 131],
      "window": [75, 0], "dtype": "bf16", "heads": [2, 1], "head_dim": [128, 128], "cache": {"layout": "xpacked"})";
  static constexpr const char* kCaches[] = {R"("cache": {"layout": "xpacked"})",
                                            R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head"})",
                                            R"("cache": {"layout": "xpacked", "dtype": "i8", "scales": "token"})",
                                            R"("cache": {"layout": "xpacked", "dtype": "e5m2", "scales": "tensor"})"};
};

TEST_F(EmulatedPrefillMmaXpacked, PagesAndHeadDims) {
  const cases::Row common(kRagged);
  for (const char* cache : kCaches) {
    for (const int page_size : {16, 48, 64})
      check(common.with(cache).set("cache.page_size", page_size), {"", R"("dtype": "f16")"});
    check(common.with(cache).set("cache.page_size", 32),
          {R"("head_dim": [64, 64])", R"("head_dim": [96, 48])", R"("head_dim": [192, 128])",
           R"("head_dim": [80, 32], "dtype": "f16")"});
  }
  check(common.set("cache.page_size", 16), {R"("head_dim": [256, 256])", R"("head_dim": [72, 16])"});
}

TEST_F(EmulatedPrefillMmaXpacked, BesideNewTokens) {
  const cases::Row common = cases::Row(kRagged).with(R"("new_tokens": true)");
  for (const char* cache : kCaches) {
    check(common.with(cache).set("cache.page_size", 16), {"", R"("dtype": "f16", "head_dim": [64, 64])"}, true);
    check(common.with(cache).set("cache.page_size", 64), {R"("window": [-1, -1], "prologue": {"append": true})"});
  }
}

TEST_F(EmulatedPrefillMmaXpacked, ScoresAndMasks) {
  const cases::Row common = cases::Row(kRagged).with(R"("window": [-1, -1])");
  for (const char* cache : {kCaches[0], kCaches[2]}) {
    check(common.with(cache).set("cache.page_size", 16),
          {R"("softcap": 20, "alibi": 1)", R"("mask_bits": 1, "bias": 1, "causal": false)",
           R"("ranges": [[3, 200], [50, 99]])", R"("sinks": "mixed", "window": [40, 0])"});
  }
}

// What rows do not see has no say, whatever it is: hidden values, and infinite scales of tokens.
TEST_F(EmulatedPrefillMmaXpacked, HiddenValuesThatAreNotFinite) {
  const cases::Row common = cases::Row(kRagged).with(R"("plant": "nan_v", "head_dim": [64, 64])");
  for (const char* cache : {kCaches[0], kCaches[1]})
    check(common.with(cache).set("cache.page_size", 16), {R"("window": [-1, -1])", R"("dtype": "f16")"});
  check(cases::Row(kRagged).with(kCaches[2]).set("cache.page_size", 16), {"", R"("dtype": "f16")"}, false,
        [](const attune_attention& a) {
          const int64_t page = tests::entry(a.cache.page_table, {0, 150 / 16});
          cases::encode(ATTUNE_FLOAT32, std::numeric_limits<float>::infinity(),
                        cases::element_at(a.cache.v_scale, {page, 0, 150 % 16}));
        });
}

// Entries of K's table, and of V's own, that are no pages.
TEST_F(EmulatedPrefillMmaXpacked, PagesThatAreNotThere) {
  const cases::Row common = cases::Row(kRagged).with(R"("new_tokens": true)");
  for (const char* cache : kCaches) {
    for (const int page_size : {16, 48})
      check(common.with(cache).set("cache.page_size", page_size).set("cache.separate_v_table", true), {""}, false,
            tests::spoil_pages);
  }
}

// What the kernel leaves to others, by name.
TEST_F(EmulatedPrefillMmaXpacked, Refuses) {
  const cases::Row common = cases::Row(kRagged).set("cache.page_size", 16);
  for (const auto& [more, why] :
       {std::pair{R"("cache": {"layout": "xpacked", "page_size": 8})", "multiple of 16"},
        {R"("head_dim": [64, 40])", "multiple of 16"},
        {R"("head_dim": [256, 256], "cache": {"layout": "xpacked", "dtype": "e4m3"})", "192"}}) {
    cases::Problem problem(tests::make_case(common.with(more)));
    EXPECT_NE(prefill_mma::refusal(make_problem(problem.device(), Data::kRequired)).find(why), std::string::npos)
        << more;
  }
}

}  // namespace
}  // namespace attune::cuda
