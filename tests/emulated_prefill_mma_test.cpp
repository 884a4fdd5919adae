// SPDX-License-Identifier: Apache-2.0
// Prefill by mma.sync, from its own source on the CPU (tests/emulator): as on GPUs before Hopper, against the oracle,
// with poisoned memory.
#include "cuda/prefill/mma.h"

#include "cuda/architecture.h"

#include <algorithm>

#include "emulated.h"
#include "support.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 300;

class EmulatedPrefillMma : public tests::Emulated {
 protected:
  // few_blocks: a block of the grid for each head takes all row blocks of all sequences.
  static std::string run(const cases::Case& spec, const char* like = "sm_80", bool few_blocks = false) {
    const emulator::Capability ampere(80);
    cases::Problem problem(spec);
    problem.arena().upload();
    const attune_attention a = problem.device();
    const Problem p = make_problem(a, Data::kRequired);
    if (!prefill_mma_kernel().coverage.difference(traits_of(p, a)).empty() || !prefill_mma::refusal(p).empty())
      return tests::kNotCovered;
    const prefill_mma::Config c = prefill_mma::choose_config(p, find_architecture(like)->shared_per_sm);
    if (c.shared_bytes() > 99 * 1024) return cat(c.shared_bytes(), " bytes of shared memory");
    const cases::Expected expected = cases::evaluate(problem);
    prefill_mma::check_run(p, c);
    const kernels::WorkTileParams params = prefill_mma::to_params(p, c);
    const auto kernel = reinterpret_cast<void (*)(kernels::WorkTileParams)>(emulator::find_kernel(c.kernel()));
    auto grid = c.grid(p);
    if (few_blocks) grid[1] = grid[2] = 1;
    try {
      if (p.batch > 0 && p.total_q > 0)
        emulator::run(emulator::Index{grid[0], grid[1], grid[2]}, prefill_mma::kThreads, [&] { kernel(params); });
    } catch (const std::exception& e) {
      return e.what();
    }
    return cases::compare(problem, expected, ATTUNE_DEVICE_CUDA).failure;
  }
  static void check(std::string_view common, std::initializer_list<const char*> rest, bool few_blocks = false) {
    for (const char* more : rest) {
      for (const char* like : {"sm_80", "sm_86"})
        EXPECT_EQ(run(tests::make_case(cases::Row(common).with(more)), like, few_blocks), "") << more << " " << like;
    }
  }
};

TEST_F(EmulatedPrefillMma, DenseKeys) {
  check(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense", "max_logits": true)",
        {R"("causal": true, "seqlens_q": [150, 0, 3], "seqlens_kv": [150, 5, 300])",
         R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200])", R"("queries": "fixed", "seqlens_q": 70,
             "seqlens_kv": [100, 100], "cu_seqlens_kv": false, "causal": true, "lse": false)",
         R"("causal": true, "seqlens_q": [90], "seqlens_kv": [170], "window": [40, 0], "sinks": "mixed")"});
}

TEST_F(EmulatedPrefillMma, CachesAndNewTokens) {
  check(
      R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f16", "causal": true, "seqlens_q": [80, 1, 33])",
      {R"("kv": "paged", "seqlens_kv": [200, 300, 40], "cache": {"page_size": 16})",
       R"("kv": "contiguous", "seqlens_kv": [200, 300, 40])",
       R"("kv": "paged", "new_tokens": true, "seqlens_kv": [100, 0, 65], "cache": {"page_size": 64, "layout": "hnd"})"});
}

// What rows do not see has no say, whatever it is.
TEST_F(EmulatedPrefillMma, HiddenValuesThatAreNotFinite) {
  check(R"("heads": [2, 1], "kv": "dense", "causal": true, "seqlens_q": [70, 130], "seqlens_kv": [90, 260])",
        {R"("head_dim": [72, 40], "dtype": "bf16", "plant": "nan_v")",
         R"("head_dim": [64, 64], "dtype": "f16", "plant": "nan_v", "window": [50, 0])"});
}

TEST_F(EmulatedPrefillMma, HeadDims) {
  check(R"("kv": "dense", "causal": true, "seqlens_q": [70], "dtype": "bf16")",
        {R"("heads": [2, 1], "head_dim": [256, 256])"});
}

TEST_F(EmulatedPrefillMma, ScoresAndMasks) {
  check(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "seqlens_q": [90, 20], "seqlens_kv": [90, 100])",
        {R"("kv": "dense", "softcap": 20, "alibi": 1, "causal": true)", R"("kv": "paged", "mask_bits": 1, "bias": 1)",
         R"("kv": "dense", "window": [0, 0], "ranges": [[3, 300], [50, 99]])",
         R"("kv": "dense", "causal": true, "mask_bits": 1, "ranges": [[40, 80], [0, 200]])"});
}

// Warps share Q, K, V and what is said of keys; blocks take several sequences.
TEST_F(EmulatedPrefillMma, HasNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(7);
  check(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "causal": true, "seqlens_q": [70, 130])",
        {R"("kv": "dense", "seqlens_kv": [90, 260], "plant": "nan_v")",
         R"("kv": "paged", "new_tokens": true, "seqlens_kv": [100, 65], "cache": {"page_size": 16})"},
        true);
}

TEST_F(EmulatedPrefillMma, MatchesTheOracleOnTheTable) {
  check_table(all_cases(kRandomCases), 100, [](const cases::Case& spec) { return run(spec); });
}

}  // namespace
}  // namespace attune::cuda
