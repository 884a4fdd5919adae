// SPDX-License-Identifier: Apache-2.0
// Decode's kernels as they are for GPUs before Hopper: without clusters and programmatic launches, 8-bit floats by
// arithmetic, blocks with 163 or 99 KiB of shared memory.
#include "emulated_decode.h"

namespace attune::cuda {
namespace {

class EmulatedAmpere : public EmulatedDecode {};

TEST_F(EmulatedAmpere, Caches) {
  run_as("sm_80");
  check(R"("heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "seqlens_kv": [300, 0, 1],
      "max_logits": true, "cache": {"page_size": 16})",
        {R"("seqlens_q": [3, 3, 3], "causal": true)", R"("cache": {"dtype": "e4m3", "scales": "head"})",
         R"("cache": {"dtype": "e5m2", "scales": "token"})", R"("cache": {"dtype": "i8", "scales": "token"})"},
        2);
}

// e4m3 by arithmetic: K in another order, in units of 2^-8. NaN is seen, or hidden from some rows.
TEST_F(EmulatedAmpere, Codes) {
  run_as("sm_80");
  check(R"("heads": [8, 2], "dtype": "bf16", "kv": "paged", "seqlens_q": [3, 3], "causal": true, "seqlens_kv": [70, 40],
      "cache": {"page_size": 16, "dtype": "e4m3", "scales": "token"})",
        {R"("head_dim": [128, 128], "plant": "nan_v")", R"("head_dim": [80, 48], "plant": "nan_k")",
         R"("head_dim": [64, 64], "dtype": "f32", "plant": "nan_v", "cache": {"dtype": "e4m3", "scales": "head"})",
         R"("head_dim": [128, 64], "dtype": "f16", "softcap": 20, "cache": {"dtype": "e4m3", "scales": "tensor"})"});
}

TEST_F(EmulatedAmpere, NewTokens) {
  run_as("sm_86");
  check(R"("new_tokens": true, "causal": true, "heads": [8, 2], "head_dim": [128, 128], "dtype": "f16", "kv": "paged",
      "seqlens_kv": [300, 0, 64])",
        {R"("prologue": {"append": true, "q_bias": true, "k_bias": true, "rope": {"style": "linear", "dim": 128}},
             "cache": {"page_size": 16, "dtype": "e4m3", "scales": "token", "ring_capacity": 128})",
         R"("head_dim": [64, 64], "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})"});
}

// Rows of which 99 KiB hold few.
TEST_F(EmulatedAmpere, WideRows) {
  run_as("sm_89");
  check(R"("kv": "paged", "seqlens_kv": [200, 33], "heads": [4, 1], "head_dim": [256, 256])", {R"("dtype": "f32")"});
}

// The cases of the table: two stages or more, in the shared memory that there is, and a block for each multiprocessor.
TEST_F(EmulatedAmpere, PlansFitEveryArchitecture) {
  int planned = 0;
  for (const cases::Case& spec : all_cases(100)) {
    cases::Problem problem(spec);
    const attune_attention& a = problem.host();
    const Problem p = make_problem(a, Data::kOptional);
    if (!decode_kernel().coverage.difference(traits_of(p, a)).empty() || !decode::refusal(p).empty()) continue;
    ++planned;
    for (const Architecture& to : kArchitectures) {
      const decode::DeviceShape device = decode::device_shape(to, 132);
      const decode::Config c = decode::choose_config(p, device);
      const int64_t blocks = std::max(1, c.blocks_per_sm), reserved = 1024;
      EXPECT_GE(c.stages, 2) << spec.name << " " << to.name;
      EXPECT_LE(static_cast<int64_t>(c.shared_bytes()), device.shared_bytes_per_block) << spec.name << " " << to.name;
      EXPECT_LE(blocks * (static_cast<int64_t>(c.shared_bytes()) + reserved), device.shared_bytes_per_sm)
          << spec.name << " " << to.name;
      EXPECT_LE(blocks * 32 * c.warps, to.threads_per_sm) << spec.name << " " << to.name;
      EXPECT_LE(blocks, to.blocks_per_sm) << spec.name << " " << to.name;
      EXPECT_TRUE(device.clusters || c.cluster == 0) << spec.name << " " << to.name;
    }
  }
  EXPECT_GT(planned, 200);
}

}  // namespace
}  // namespace attune::cuda
