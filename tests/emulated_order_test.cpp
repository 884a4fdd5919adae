// SPDX-License-Identifier: Apache-2.0
// Whatever the order in which a GPU runs blocks, warps and lanes, the bits are the same (tests/emulator): random ragged
// batches on devices that are small, so that a block has several work tiles, and larger than the work. No GPU.
#include <optional>
#include <set>

#include "emulated_attend.h"

namespace attune::cuda {
namespace {

class EmulatedOrder : public tests::Emulated {
 protected:
  static constexpr uint64_t kSeeds = 3;  // and one of lanes that fall behind

  static std::vector<std::byte> results(const cases::Problem& problem) {
    std::vector<std::byte> all;
    for (const attune_tensor* t : {&problem.host().out, &problem.host().lse, &problem.host().max_logits}) {
      if (t->rank == 0) continue;
      const std::vector<std::byte> bytes = problem.arena().owner(t->data)->download();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }

  // "" or the first order by which a run fails, is wrong, or has other bits.
  static std::string find_failure(const cases::Case& spec, int num_sms) {
    std::optional<cases::Expected> expected;
    std::vector<std::byte> in_order;
    for (uint64_t seed = 0; seed <= kSeeds + 1; ++seed) {
      const std::string where = "seed " + std::to_string(seed) + ": ";
      cases::Problem problem(spec);
      problem.arena().upload();
      if (!expected) expected = cases::evaluate(problem);
      try {
        std::optional<emulator::Shuffled> shuffled;
        if (seed > 0) shuffled.emplace(seed, 4, seed > kSeeds ? emulator::Lanes::kApart : emulator::Lanes::kTogether);
        emulate_attention(problem.device(), num_sms);
      } catch (const std::exception& e) {
        return where + e.what();
      }
      const std::string failure = cases::compare(problem, *expected, ATTUNE_DEVICE_CUDA).failure;
      if (!failure.empty()) return where + failure;
      if (seed == 0) in_order = results(problem);
      if (results(problem) != in_order) return where + "other bits";
    }
    return "";
  }

  struct Lengths {
    int64_t most_sequences, most_queries, most_keys;
    double steps = 0;  // share of the sequences with one query
    int64_t fewest_sequences = 2;
  };
  // kernel: what `of_all` gets.
  static void check(const char* kernel, const std::string& of_all, const Lengths& most, int batches = 2) {
    cases::Random random(of_all, 7);
    for (int i = 0; i < batches; ++i) {
      std::vector<int64_t> q, kv;
      for (int64_t n = random.integer(most.fewest_sequences, most.most_sequences); n > 0; --n) {
        // The first has the most, by which kernels are chosen.
        const int64_t queries = q.empty()                   ? most.most_queries
                                : random.chance(most.steps) ? 1
                                : random.chance(0.2)        ? 0
                                                            : random.integer(1, most.most_queries);
        q.push_back(queries);
        kv.push_back(queries + random.integer(0, random.chance(0.3) ? most.most_keys : 40));
      }
      const cases::Row row = cases::Row(of_all).set("causal", true).set("max_seqlens", most.steps == 0);
      const cases::Case spec = tests::make_case(row.set("seqlens_q", q).set("seqlens_kv", kv));
      {
        cases::Problem problem(spec);
        const Problem p = make_problem(problem.device(), Data::kRequired);
        ASSERT_EQ(std::string(choose_kernel(p, traits_of(p, problem.device()), ATTUNE_DEVICE_CUDA).name), kernel)
            << testing::PrintToString(q) << " of " << testing::PrintToString(kv);
      }
      for (const int num_sms : {1, 3, 24})
        EXPECT_EQ(find_failure(spec, num_sms), "")
            << num_sms << ": " << testing::PrintToString(q) << " of " << testing::PrintToString(kv);
    }
  }
};

TEST_F(EmulatedOrder, OfPrompts) {
  check("cuda_prefill", R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense")", {5, 150, 300});
  check("cuda_prefill", R"("heads": [8, 1], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "new_tokens": true,
                           "cache": {"page_size": 64, "dtype": "e4m3", "scales": "head"})",
        {4, 60, 900}, 1);
  check("cuda_prefill", R"("heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
                           "cache": {"page_size": 16})",
        {4, 250, 400}, 1);
}

TEST_F(EmulatedOrder, OfSteps) {
  check("cuda_decode", R"("heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged")", {9, 2, 900});
  check("cuda_decode", R"("heads": [16, 1], "head_dim": [128, 128], "dtype": "f16", "kv": "contiguous")", {5, 1, 1500});
}

TEST_F(EmulatedOrder, OfLatentCaches) {
  check("cuda_mla",
        R"("dtype": "bf16", "head_dim": [576, 512], "kv": "paged", "cache": {"page_size": 64}, "heads": [16, 1],
                       "shared_kv": true)",
        {4, 3, 500}, 1);
  check("cuda_mla",
        R"("dtype": "bf16", "head_dim": [576, 512], "kv": "paged", "cache": {"page_size": 64}, "heads": [128, 1],
                       "shared_kv": true)",
        {3, 2, 300}, 1);
  check("cuda_mla", R"("dtype": "bf16", "head_dim": [576, 512], "kv": "paged", "heads": [4, 1],
                       "cache": {"format": "mla_656"})",
        {4, 1, 500}, 1);
}

TEST_F(EmulatedOrder, OfBothKinds) {
  check("cuda_mixed", R"("heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "max_logits": true,
                         "seqused": true)",
        {16, 120, 500, 0.9, 14});
}

// --- What an order by seed is.

using Numbers = std::vector<unsigned>;

TEST_F(EmulatedOrder, FollowsFromTheSeed) {
  const auto kernel = reinterpret_cast<void (*)(unsigned*)>(
      emulator::find_kernel({"emulator/kernels/order.cu", "come_in_turn", {}, 0}));
  const auto tickets = [&](uint64_t seed) {
    Numbers all(6 * 8);
    const emulator::Shuffled shuffled(seed);
    emulator::run(6, 256, [&] { kernel(all.data()); });
    return all;
  };
  std::set<Numbers> different;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const Numbers all = tickets(seed);
    EXPECT_EQ(all, tickets(seed)) << seed;
    for (size_t block = 0; block < 6; ++block) {
      const auto begin = all.begin() + static_cast<int64_t>(8 * block);
      EXPECT_EQ(std::set<unsigned>(begin, begin + 8).size(), 8u) << "seed " << seed << ", block " << block;
      different.insert(Numbers(begin, begin + 8));
    }
  }
  EXPECT_GT(different.size(), 20u);
}

TEST_F(EmulatedOrder, RunsSoManyBlocksAtATime) {
  const auto kernel = reinterpret_cast<void (*)(int*, int*)>(
      emulator::find_kernel({"emulator/kernels/order.cu", "meet_others", {}, 0}));
  for (const unsigned clusters : {1u, 2u, 7u}) {
    int running = 0;
    std::vector<int> seen(40);
    const emulator::Shuffled shuffled(1, clusters);
    emulator::run(40, 64, [&] { kernel(&running, seen.data()); });
    EXPECT_EQ(*std::max_element(seen.begin(), seen.end()), static_cast<int>(clusters));
    EXPECT_EQ(running, 0);
  }
}

TEST_F(EmulatedOrder, GivesEachBlockItsStaticVariables) {
  const auto kernel = reinterpret_cast<void (*)(unsigned*)>(
      emulator::find_kernel({"emulator/kernels/order.cu", "keep_own_shared", {}, 0}));
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Numbers sums(9);
    const emulator::Shuffled shuffled(seed, 3);
    emulator::run(9, 256, [&] { kernel(sums.data()); });
    for (unsigned block = 0; block < 9; ++block) EXPECT_EQ(sums[block], 256 * (10000 * block + 45)) << block;
  }
}

}  // namespace
}  // namespace attune::cuda
