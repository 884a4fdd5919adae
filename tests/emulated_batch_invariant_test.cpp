// SPDX-License-Identifier: Apache-2.0
// With batch_invariant: the CUDA kernels' own source on the CPU (tests/emulator) gives a sequence the same bits alone
// and in any batch, and the host chooses the same specialisation. No GPU.
#include "batch_of.h"
#include "emulated_attend.h"

namespace attune::cuda {
namespace {

class EmulatedBatchInvariant : public tests::Emulated {};

TEST_F(EmulatedBatchInvariant, EachSequenceHasTheSameBitsInAnyBatch) {
  // On a device of fewer multiprocessors than the largest batch has work tiles, and more than a sequence alone.
  const auto attend = [](const attune_attention& a) { emulate_attention(a, 3); };
  for (const cases::Case& spec : cases::parse_cases(R"({"area": "batch", "cases": [
      {"name": "kernels", "dtype": "bf16", "head_dim": [64, 64], "kv": "paged", "seqlens_kv": [300, 1, 150],
       "causal": true, "batch_invariant": true, "max_seqlens": true, "max_logits": true,
       "sweep": {"with": [
         {"name": "decode", "heads": [4, 2]},
         {"name": "prompts", "heads": [4, 2], "seqlens_q": [1, 50, 3], "seqlens_kv": [1100, 60, 3]},
         {"name": "mla", "heads": [16, 1], "head_dim": [576, 512], "shared_kv": true, "seqlens_q": [1, 3, 1]},
         {"name": "few", "heads": [4, 1], "head_dim": [576, 512], "cache": {"format": "mla_656"},
          "queries": "fixed"}]}},
      {"name": "votes", "kv": "dense", "seqlens_q": [33, 3, 34, 0], "seqlens_kv": [129, 70, 40, 9], "heads": [8, 2],
       "causal": true, "batch_invariant": true, "max_seqlens": true, "max_logits": true,
       "sweep": {"with": [
         {"name": "capped", "dtype": "f16", "head_dim": [64, 64], "softcap": 30},
         {"name": "capped low", "dtype": "f16", "head_dim": [64, 64], "softcap": 5},
         {"name": "codes", "dtype": "e4m3", "head_dim": [128, 128], "prologue": {"qkv_scale": true}}]}}]})"))
    EXPECT_EQ(tests::find_other_bits(spec, cases::host_memory(), attend, 2), "") << spec.name;
}

// The groups of warps that have scores take a block's tiles by turns, over all work tiles: which of them begins a work
// tile follows from the work tiles before, but what is added up in which order does not. Also of keys of new tokens.
TEST_F(EmulatedBatchInvariant, WhoeverTakesTheFirstTile) {
  const auto attend = [](const attune_attention& a) { emulate_attention(a, 1); };
  for (const cases::Case& spec : cases::parse_cases(R"({"area": "batch", "cases": [
      {"name": "turns", "dtype": "bf16", "heads": [16, 1], "head_dim": [576, 512], "kv": "paged",
       "cache": {"format": "mla_656", "page_size": 24}, "seqlens_kv": [65, 1, 190, 0], "causal": true,
       "batch_invariant": true, "max_seqlens": true, "lse": true,
       "sweep": {"with": [{"name": "12", "heads": [12, 1], "new_tokens": true},
                          {"name": "32", "heads": [32, 1], "new_tokens": true},
                          {"name": "cache", "heads": [16, 1]}]}}]})"))
    EXPECT_EQ(tests::find_other_bits(spec, cases::host_memory(), attend, 2), "") << spec.name;
}

// In the place of rows that a block does not have lie the next sequence's, whose scores are far beyond those for which
// softcap has its short ways: the shortest, and another where the sequence's own scores are larger.
TEST_F(EmulatedBatchInvariant, RowsThatAreNotThereHaveNoVote) {
  const auto attend = [](const attune_attention& a) { emulate_attention(a, 3); };
  const auto grow = [](cases::Problem& problem, int64_t sequence, double factor) {
    const attune_tensor& q = problem.host().q;
    const auto dtype = static_cast<attune_dtype>(q.dtype);
    for (int64_t row = problem.first_row(sequence); row < problem.first_row(sequence + 1); ++row) {
      for (int64_t head = 0; head < q.shape[1]; ++head) {
        for (int64_t d = 0; d < q.shape[2]; ++d) {
          void* const x = cases::element_at(q, {row, head, d});
          cases::encode(dtype, factor * cases::decode(dtype, x), x);
        }
      }
    }
  };
  // The first tile has keys for all rows.
  const cases::Case spec = tests::make_case(R"({"name": "absent", "kv": "dense", "seqlens_q": [48, 40, 3],
      "seqlens_kv": [896, 640, 256], "heads": [4, 2], "dtype": "bf16", "head_dim": [64, 64], "softcap": 50,
      "batch_invariant": true, "max_seqlens": true})");
  for (const double factor : {1.0, 3.0}) {
    const auto edit = [&](cases::Problem& problem) { grow(problem, 0, factor), grow(problem, 1, 40); };
    EXPECT_EQ(tests::find_other_bits(spec, cases::host_memory(), attend, 2, edit), "") << factor;
  }
}

// The kernel, and what it is compiled for.
std::string chosen(const attune_attention& a) {
  const Problem p = make_problem(a, Data::kRequired);
  const std::string name = choose_kernel(p, traits_of(p, a), ATTUNE_DEVICE_CUDA).name;
  const int num_sms = decode::DeviceShape().num_sms;
  const KernelSpec spec = name == "cuda_decode" ? decode::choose_config(p, {}).main_kernel()
                          : name == "cuda_mla"  ? mla::choose_config(p, num_sms).main_kernel()
                                                : prefill::choose_config(p, num_sms).main_kernel();
  return name + " " + spec_name(spec);
}

TEST(BatchInvariantChoice, DoesNotFollowFromTheOthers) {
  for (const cases::Case& spec : tests::batch_invariant_cases()) {
    cases::Problem problem(spec);
    const std::string whole = chosen(problem.device());
    for (int64_t b = 0; b < spec.batch(); ++b)
      EXPECT_EQ(chosen(tests::BatchOf(problem, {b}).device()), whole) << spec.name << ", sequence " << b << " alone";
    for (const std::vector<int64_t>& some : {std::vector<int64_t>{0, 1}, {2, 1}, std::vector<int64_t>(40, 0)})
      EXPECT_EQ(chosen(tests::BatchOf(problem, some).device()), whole) << spec.name << ", " << some.size();
  }
}

}  // namespace
}  // namespace attune::cuda
