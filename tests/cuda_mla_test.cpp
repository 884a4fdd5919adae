// SPDX-License-Identifier: Apache-2.0
// The MLA kernels on a GPU: every case of the table that their coverage takes, and shapes of their own that take
// several tiles, tasks and parts, against the oracle. Skipped, with the reason, where there is no GPU.
#include <functional>

#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "cuda/prefill/prologue.h"
#include "cuda_run.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

constexpr int kRandomCases = 300;
constexpr uint64_t kRandomMlaCases = 150;

bool covered(const attune_attention& a, const Problem& p) {
  return mla_kernel().coverage.difference(traits_of(p, a)).empty() && mla::refusal(p).empty();
}

class Subject final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (covered(a, p)) plans.push_back(mla_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!covered(a, p)) return {};
    const mla::Config c = mla::choose_config(p, require_device(kDevice).num_sms);
    return {c.main_kernel(), c.schedule_kernel(), c.combine_kernel()};
  }
};

cases::Case make(const std::string& name, const std::string& fields) {
  return tests::make_case(R"({"name": ")" + name + R"(", "dtype": "bf16", "max_logits": true, )" + fields + "}");
}

// 1 to 128 query heads, and 1 to 16 tokens of a sequence, in whichever way keys come.
std::vector<cases::Case> every_number_of_heads() {
  const char* const kinds[] = {
      R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512])",
      R"("kv": "paged", "head_dim": [576, 512])",
      R"("kv": "paged", "head_dim": [512, 512])",
      R"("kv": "contiguous", "shared_kv": true, "head_dim": [576, 512])",
      R"("kv": "slots", "shared_kv": true, "head_dim": [512, 512])",
      R"("kv": "slots", "head_dim": [576, 512])",
      R"("kv": "slots", "head_dim": [512, 512])",
  };
  const char* const formats[] = {"plain", "mla_656", "mla_584", "plain", "plain", "mla_656", "mla_584"};
  std::vector<cases::Case> list;
  for (int heads = 1; heads <= 128; ++heads) {
    const int kind = heads % 7, page_size = 16 << (heads / 7 % 7), tokens = 1 + heads * 7 % 16;
    const std::string cache = R"(, "cache": {"format": ")" + std::string(formats[kind]) + R"(", "page_size": )" +
                              std::to_string(page_size) + "}";
    const std::string lists = R"(, "sparse": {"topk": )" + std::to_string(heads + 7) +
                              R"(, "topk_length": "batch", "slots": 200}, "sinks": "mixed")";
    for (const int seqlen_q : {1, tokens}) {
      const std::string rows = R"("queries": "fixed", "seqlens_q": )" + std::to_string(seqlen_q) + ", ";
      list.push_back(make("mla heads " + std::to_string(heads) + "x" + std::to_string(seqlen_q),
                          rows + kinds[kind] + (kind == 3 ? "" : cache) +
                              (kind > 3 ? R"(, "batch": 2)" + lists : R"(, "seqlens_kv": [190, 3], "causal": true)") +
                              R"(, "heads": [)" + std::to_string(heads) + ", 1]"));
    }
  }
  return list;
}

std::vector<cases::Case> edges_of_lists() {
  std::vector<cases::Case> list;
  for (const char* kv :
       {R"("shared_kv": true, "head_dim": [576, 512])", R"("head_dim": [576, 512], "cache": {"format": "mla_656"})",
        R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_padding": true})"}) {
    for (const int topk : {1, 63, 64, 65, 2047, 16385}) {
      for (const int heads : {16, 20, 128}) {
        if (topk == 16385 && heads == 20) continue;
        list.push_back(make("mla list " + std::to_string(list.size()),
                            R"("kv": "slots", "seqlens_q": )" + std::string(topk > 2000 ? "[1]" : "[2, 1, 3]") +
                                R"(, "heads": [)" + std::to_string(heads) +
                                R"(, 1], "sparse": {"slots": 3000, "topk": )" + std::to_string(topk) + "}, " + kv));
      }
    }
    for (const char* heads : {"[16, 1]", "[20, 1]", "[128, 1]"}) {
      list.push_back(make("mla finished " + std::to_string(list.size()),
                          R"("kv": "slots", "seqlens_q": [1, 2, 1], "finished": [0, 1, 0], "zero_finished": true,
          "sparse": {"topk": 200}, "extra": {"topk": 9, "page_size": 16}, "heads": )" +
                              std::string(heads) + ", " + kv));
    }
    // All in the second cache, whose pages are larger.
    list.push_back(
        make("mla second " + std::to_string(list.size()),
             R"("kv": "slots", "seqlens_q": [2, 1, 3], "heads": [20, 1], "sparse": {"topk": 70, "invalid": 1},
        "extra": {"topk": 65, "page_size": 256}, "sinks": "mixed", )" +
                 std::string(kv)));
  }
  // Prompts: by offsets, several of one length, several KV heads with lists of their own.
  for (const char* dims :
       {R"("head_dim": [576, 512], "shared_kv": true, )", R"("head_dim": [512, 512], "shared_kv": true, )"}) {
    for (
        const char* rest :
        {R"("heads": [20, 1], "seqlens_q": [3, 0, 5], "seqlens_kv": [90, 40, 200], "sparse": {"topk": 75, "topk_length": "token"})",
         R"("heads": [128, 1], "seqlens_q": [3, 2, 5], "seqlens_kv": [90, 40, 200], "sparse": {"topk": 75}, "strides": "transposed")",
         R"("heads": [64, 1], "queries": "fixed", "seqlens_q": 3, "seqlens_kv": [90, 200], "sparse": {"topk": 75, "topk_length": "batch"})",
         R"("heads": [6, 2], "queries": "flat", "cu_seqlens_kv": false, "seqlens_q": [7], "seqlens_kv": [200],
             "sparse": {"topk": 75, "topk_length": "token", "per_head": true})",
         R"("heads": [20, 1], "dtype": "f16", "seqlens_q": [3, 2], "seqlens_kv": [90, 200], "sparse": {"topk": 75, "invalid": 0.5})"})
      list.push_back(make("mla lists of prompts " + std::to_string(list.size()), std::string(dims) + rest));
  }
  return list;
}

class CudaMla : public CudaCases {
 protected:
  // What of the list is picked; all of it must be covered.
  static void check_all_of(std::vector<cases::Case> list) {
    if (const char* only = std::getenv("ATTUNE_CASE"); only != nullptr)
      std::erase_if(list, [&](const cases::Case& spec) { return spec.name.find(only) == std::string::npos; });
    warm_all(list, Subject());
    EXPECT_EQ(check_all(list, Subject()), static_cast<int>(list.size()));
  }
};

TEST_F(CudaMla, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomCases);
  warm_all(list, Subject());
  EXPECT_GT(check_all(list, Subject()), picks_cases() ? 0 : 20);
}

TEST_F(CudaMla, Dense) {
  std::vector<cases::Case> list;
  for (const char* kv :
       {R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 64})",
        R"("kv": "paged", "shared_kv": true, "head_dim": [512, 512], "cache": {"page_size": 16})",
        R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 3})",
        R"("kv": "contiguous", "shared_kv": true, "head_dim": [576, 512])",
        R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 256}, "new_tokens": true)",
        R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
        R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})"}) {
    for (const char* heads : {"[16, 1]", "[128, 1]", "[7, 1]"}) {
      for (const char* lengths :
           {R"("seqlens_q": [1, 1, 1, 1], "seqlens_kv": [2000, 0, 1, 130], "causal": true)",
            R"("seqlens_q": [2, 3, 17, 0], "seqlens_kv": [1500, 70, 64, 9], "causal": true)",
            R"("seqlens_q": [4, 1], "seqlens_kv": [700, 129], "window": [200, 0], "causal": true)"}) {
        list.push_back(make("mla dense " + std::to_string(list.size()),
                            std::string(kv) + R"(, "heads": )" + heads + ", " + lengths));
      }
    }
  }
  // 17 to 32 heads over packed rows have a kernel of their own.
  for (
      const char* rest :
      {R"("heads": [32, 1], "seqlens_kv": [5000, 0, 1, 130, 2047], "sinks": "mixed")",
       R"("heads": [17, 1], "seqlens_kv": [2000, 3000, 64, 65], "causal": true, "window": [1000, 0], "out_dtype": "f32")",
       R"("heads": [32, 1], "seqlens_kv": [5000, 3000], "data": "spread")",
       R"("heads": [30, 1], "seqlens_q": [1, 1, 0, 1], "seqlens_kv": [1999, 0, 7, 700], "causal": true, "new_tokens": true)",
       R"("heads": [32, 1], "seqlens_kv": [900, 800, 70], "queries": "fixed", "batch_invariant": true)"}) {
    list.push_back(
        make("mla half " + std::to_string(list.size()),
             std::string(R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656"}, )") + rest));
  }
  check_all_of(std::move(list));
}

TEST_F(CudaMla, Prologues) {
  std::vector<cases::Case> list;
  for (const char* kv :
       {R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 64})",
        R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 3}, "strides": "packed")",
        R"("kv": "contiguous", "shared_kv": true, "head_dim": [512, 512])",
        R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
        R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})"}) {
    for (const char* prologue :
         {R"("append": true)",
          R"("append": true, "rope": {"style": "yarn", "dim": 64, "offset": 448, "interleaved": true})",
          R"("q_bias": true, "k_bias": true, "ia3_tasks": 2, "logn": 100, "append": true,
             "rope": {"style": "linear", "dim": 64, "positions": 1})"}) {
      for (
          const char* rest :
          {R"("heads": [128, 1], "seqlens_q": [1, 1, 1, 1], "seqlens_kv": [2000, 0, 1, 130])",
           R"("heads": [16, 1], "seqlens_q": [2, 3, 300, 0], "seqlens_kv": [1500, 70, 64, 9], "finished": [0, 1, 0, 0])"}) {
        list.push_back(
            make("mla prologue " + std::to_string(list.size()),
                 std::string(kv) + R"(, "new_tokens": true, "causal": true, "prologue": {)" + prologue + "}, " + rest));
      }
    }
  }
  check_all_of(std::move(list));
}

TEST_F(CudaMla, Sparse) {
  std::vector<cases::Case> list;
  for (const char* kv : {R"("kv": "slots", "shared_kv": true, "head_dim": [576, 512])",
                         R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"})",
                         R"("kv": "slots", "head_dim": [512, 512], "cache": {"format": "mla_584"})"}) {
    for (const char* heads : {"[16, 1]", "[128, 1]", "[64, 1]", "[24, 1]"}) {
      for (const char* rest :
           {R"("seqlens_q": [2, 1, 2], "sparse": {"topk": 512, "invalid": 0.1})",
            R"("seqlens_q": [1, 1, 0, 4], "sparse": {"topk": 130, "topk_length": "token", "slots": 300},
                                  "extra": {"topk": 70, "topk_length": "batch", "page_size": 16}, "sinks": "mixed")",
            R"("seqlens_q": [3], "sparse": {"topk": 65, "invalid": 1})"}) {
        list.push_back(make("mla sparse " + std::to_string(list.size()),
                            std::string(kv) + R"(, "heads": )" + heads + ", " + rest));
      }
    }
  }
  // Small batches go to the kernel of few rows; these do not.
  for (const char* kv : {R"("kv": "slots", "shared_kv": true, "head_dim": [576, 512])",
                         R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"})"}) {
    for (const char* rest :
         {R"("seqlens_q": [2, 1, 2], "sparse": {"topk": 512, "invalid": 0.1}, "batch_invariant": true)",
          R"("seqlens_q": [24], "sparse": {"topk": 1024, "invalid": 0.1})"}) {
      list.push_back(make("mla sparse many " + std::to_string(list.size()),
                          std::string(kv) + R"(, "heads": [128, 1], "sinks": "mixed", )" + rest));
    }
  }
  for (const char* heads : {"[8, 1]", "[128, 1]"}) {
    list.push_back(make("mla prefill " + std::to_string(list.size()),
                        std::string(R"("shared_kv": true, "head_dim": [576, 512], "queries": "flat", "kv": "dense",
            "cu_seqlens_kv": false, "seqlens_q": [40], "seqlens_kv": [600], "sinks": "normal",
            "sparse": {"topk": 200, "topk_length": "token"}, "heads": )") +
                            heads));
  }
  check_all_of(std::move(list));
}

TEST_F(CudaMla, RandomCases) {
  std::vector<cases::Case> list;
  for (uint64_t seed = 0; seed < kRandomMlaCases; ++seed) list.push_back(cases::random_mla_case(seed));
  check_all_of(std::move(list));
}

TEST_F(CudaMla, EveryNumberOfHeads) { check_all_of(every_number_of_heads()); }

TEST_F(CudaMla, EdgesOfLists) { check_all_of(edges_of_lists()); }

TEST_F(CudaMla, TablesThatMakeNoSense) {
  cases::CudaMemory memory(kDevice);
  const std::vector<tests::SpoiltCase> list = tests::spoilt_mla_cases();
  std::vector<cases::Case> specs;
  for (const tests::SpoiltCase& spoilt : list) specs.push_back(spoilt.spec);
  warm_calls(memory, specs);
  for (const tests::SpoiltCase& spoilt : list) {
    cases::Problem problem(spoilt.spec, memory);
    spoilt.spoil(problem);
    problem.arena().upload();
    const cases::Expected expected = cases::evaluate(problem);
    plan_and_run(memory, problem.device());
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << spoilt.spec.name;
  }
}

// What the host decides, without a GPU.
TEST(CudaMlaConfig, TakesEveryNumberOfHeadsAndEveryList) {
  for (const auto& list : {every_number_of_heads(), edges_of_lists()}) {
    for (const cases::Case& spec : list) {
      cases::Problem problem(spec);
      EXPECT_TRUE(covered(problem.host(), make_problem(problem.host(), Data::kRequired))) << spec.name;
    }
  }
}

TEST(CudaMlaConfig, RefusesWhatItCannotDo) {
  for (
      const auto& [wrong, why] :
      {std::pair{R"("head_dim": [96, 64], "shared_kv": true, "kv": "paged")", "head_dim_qk 96 with head_dim_v 64"},
       {R"("head_dim": [576, 512], "kv": "paged", "dtype": "f16", "cache": {"format": "mla_656"})", "not bfloat16"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "strides": "odd")", "multiples of 16 bytes"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "prologue": {"rope": {"style": "linear", "dim": 64}})",
        "queries alone that asks where they stand"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "new_tokens": true, "skip_decode": true,
            "prologue": {"append": true})",
        "skip_decode"},
       {R"("head_dim": [512, 576], "kv": "paged")", "head_dim_qk 512 with head_dim_v 576"},
       {R"("head_dim": [544, 512], "shared_kv": true, "kv": "paged")", "head_dim_qk 544 with head_dim_v 512"}}) {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "heads": [4, 1], "dtype": "bf16", "seqlens_q": [5], "seqlens_kv": [5], )") +
        wrong + "}"));
    const std::string refusal = mla::refusal(make_problem(problem.host(), Data::kRequired));
    EXPECT_NE(refusal.find(why), std::string::npos) << wrong << ": " << refusal;
  }
  // What a case of the table is not.
  const auto refusal_of = [](const char* kv, const std::function<void(Problem&)>& change) {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "heads": [4, 1], "dtype": "bf16", "head_dim": [576, 512], "shared_kv": true, )") +
        kv + "}"));
    Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(mla::refusal(p), "") << kv;
    change(p);
    return mla::refusal(p);
  };
  const char* const lists = R"("kv": "slots", "seqlens_q": [2, 1], "sparse": {"topk": 9}, "extra": {"topk": 9,
      "page_size": 16})";
  const char* const dense = R"("kv": "dense", "seqlens_q": [5], "seqlens_kv": [5])";
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.format = kv_format(ATTUNE_KV_MLA_656); }),
            "a second cache of another format");
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.k.page_stride += 4; }),
            "rows of extra_cache that do not lie at multiples of 16 bytes");
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.k.dtype = ATTUNE_FLOAT16; }),
            "q and extra_cache of different dtypes");
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.k.data += 8; }),
            "data that do not lie at multiples of 16 bytes, as extra_cache.k.data here");
  EXPECT_EQ(refusal_of(dense, [](Problem& p) { p.k.dtype = ATTUNE_FLOAT16; }), "q and k of different dtypes");
  EXPECT_EQ(refusal_of(dense, [](Problem& p) { p.k.head_stride += 4; }),
            "rows of k that do not lie at multiples of 16 bytes");
  EXPECT_EQ(refusal_of(R"("kv": "paged", "seqlens_kv": [5], "shared_kv": false, "cache": {"format": "mla_656"})",
                       [](Problem& p) { p.cache.page_size = (1 << 21) + 1; }),
            "pages of more than 2097152 tokens in cache");
  EXPECT_EQ(refusal_of(dense, [](Problem& p) { p.total_q = (int64_t{1} << 29) - 1; }), "");
  EXPECT_EQ(refusal_of(dense, [](Problem& p) { p.total_q = int64_t{1} << 29; }),
            "2^31 or more rows of queries and heads");
}

// A run may bring other strides, pages and scales than its plan saw: what would fault, or be wrong, is named.
TEST(CudaMlaConfig, NamesWhatARunMayNotBring) {
  const auto change = [](const char* kv, const std::function<void(attune_attention&)>& other) -> std::string {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "heads": [20, 1], "dtype": "bf16", "head_dim": [576, 512], "seqlens_q": [2],
            "seqlens_kv": [70], )") +
        kv + "}"));
    attune_attention a = problem.host();
    const mla::Config c = mla::choose_config(make_problem(a, Data::kRequired), 132);
    mla::check_run(make_problem(a, Data::kRequired), c);
    other(a);
    try {
      mla::check_run(make_problem(a, Data::kRequired), c);
    } catch (const Failure& e) {
      return e.status() == ATTUNE_INVALID_ARGUMENT ? e.what() : "another status";
    }
    return "";
  };
  const char* const paged = R"("kv": "paged", "shared_kv": true, "cache": {"page_size": 64})";
  const char* const packed = R"("kv": "slots", "cache": {"format": "mla_656"}, "sparse": {"topk": 9})";
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.q.stride[0] += 8; }), "");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.cache.k.stride[0] += 3; }),
            "attention differs from its plan: kernel cuda_mla does not take rows of cache that do not lie at multiples "
            "of 16 bytes");
  EXPECT_EQ(change(packed, [](attune_attention& a) { a.cache.k.stride[1] += 8; }),
            "attention differs from its plan: kernel cuda_mla does not take rows of cache that do not lie at multiples "
            "of 16 bytes");
  EXPECT_EQ(
      change(paged, [](attune_attention& a) { a.q.stride[0] += 4; }),
      "attention differs from its plan: kernel cuda_mla does not take rows of q that do not lie at multiples of 16 "
      "bytes");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.softmax_scale = -1; }),
            "attention differs from its plan: kernel cuda_mla does not take a scale that is not positive");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.q.data = static_cast<char*>(a.q.data) + 2; }),
            "q.data is 2 bytes beyond a multiple of 16; kernel cuda_mla needs a multiple of 16, or a plan made for "
            "such data");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.cache.k.shape[1] = 4; }),
            "cache.page_size is 4; the plan was made for pages of multiples of 8 tokens");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.cache.k.shape[1] = 16; }), "");
}

// Rows that no copy could take from where they lie are read by the launch before.
TEST(CudaMlaConfig, PrologueLeavesItsRowsInTheWorkspace) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [4, 1], "dtype": "bf16", "head_dim": [576, 512],
      "shared_kv": true, "kv": "paged", "new_tokens": true, "seqlens_q": [5, 2], "seqlens_kv": [5, 0],
      "cache": {"page_size": 64}, "prologue": {"append": true, "k_bias": true}})"));
  problem.arena().upload();
  attune_attention a = problem.device();
  a.q.stride[0] += 3;
  const Problem p = make_problem(a, Data::kOptional);
  EXPECT_EQ(mla_kernel().coverage.difference(traits_of(p, a)), "");
  EXPECT_EQ(mla::refusal(p), "");
  EXPECT_EQ(prefill::prologue_bytes(p),
            static_cast<size_t>((7 * 4 * 576 * 2 + 255) / 256 * 256 + (7 * 576 * 2 + 255) / 256 * 256));
  alignas(256) static std::byte memory[1 << 16];
  const PrepareProblem op = prefill::to_prepare(p, memory);
  const Problem after = prefill::after_prologue(p, memory);
  EXPECT_FALSE(op.v || op.v_out);
  EXPECT_EQ(op.k_out.data, after.k.data);
  EXPECT_EQ(after.v.data, after.k.data);
  EXPECT_EQ(after.q.data, memory);
  EXPECT_FALSE(prefill::has_prologue(after));
  EXPECT_EQ(mla::refusal(after), "");
}

TEST(CudaMlaConfig, ChoosesHowKeysCome) {
  for (const auto& [kv, loader] : {std::pair{R"("kv": "paged", "cache": {"page_size": 64})", kernels::kMlaBoxes},
                                   {R"("kv": "paged", "cache": {"page_size": 8})", kernels::kMlaBoxes},
                                   {R"("kv": "paged", "cache": {"page_size": 12})", kernels::kMlaRows},
                                   {R"("kv": "contiguous")", kernels::kMlaBoxes},
                                   {R"("kv": "slots", "sparse": {"topk": 9})", kernels::kMlaRows}}) {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "heads": [20, 1], "dtype": "bf16", "head_dim": [576, 512], "shared_kv": true,
            "seqlens_q": [2], "seqlens_kv": [5], )") +
        kv + "}"));
    EXPECT_EQ(mla::choose_config(make_problem(problem.host(), Data::kRequired), 132).loader, loader) << kv;
  }
}

// One token's heads over cached rows that the kernel of few rows takes: 16 at most, whatever else there is.
TEST(CudaMlaConfig, GivesFewRowsToTheirKernel) {
  const auto entry = [](const std::string& more) {
    cases::Problem problem(tests::make_case(R"({"name": "x", "dtype": "bf16", "seqlens_kv": [5, 9], )" + more + "}"));
    return mla::choose_config(make_problem(problem.host(), Data::kRequired), 132).main_kernel().entry;
  };
  const std::string few = "attune_mla_few", half = "attune_mla_half", many = "attune_mla";
  const std::string packed = R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656"}, )";
  EXPECT_EQ(entry(packed + R"("heads": [16, 1], "seqlens_q": [1, 1])"), few);
  EXPECT_EQ(entry(packed + R"("heads": [16, 1], "seqlens_q": [1, 1], "batch_invariant": true)"), many);
  EXPECT_EQ(entry(packed + R"("heads": [16, 1], "queries": "fixed", "batch_invariant": true)"), few);
  EXPECT_EQ(entry(packed + R"("heads": [17, 1], "seqlens_q": [1, 1], "batch_invariant": true)"), many);
  EXPECT_EQ(entry(packed + R"("heads": [4, 1], "seqlens_q": [2, 1])"), many);
  EXPECT_EQ(entry(packed + R"("heads": [4, 1], "seqlens_q": [1, 1], "new_tokens": true)"), few);
  EXPECT_EQ(entry(R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"}, "heads": [16, 1],
      "seqlens_q": [2, 1], "sparse": {"topk": 9})"),
            few);
  EXPECT_EQ(entry(R"("kv": "paged", "head_dim": [576, 512], "shared_kv": true, "heads": [32, 2])"), few);
  // Up to 32 over packed rows of 656 bytes.
  EXPECT_EQ(entry(packed + R"("heads": [17, 1], "seqlens_q": [1, 1])"), half);
  EXPECT_EQ(entry(packed + R"("heads": [32, 1], "queries": "fixed", "batch_invariant": true)"), half);
  EXPECT_EQ(entry(packed + R"("heads": [33, 1], "seqlens_q": [1, 1])"), many);
  EXPECT_EQ(entry(packed + R"("heads": [32, 1], "seqlens_q": [2, 1])"), many);
  EXPECT_EQ(entry(R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"}, "heads": [32, 1],
      "seqlens_q": [2, 1], "sparse": {"topk": 9})"),
            half);
  EXPECT_EQ(entry(R"("kv": "paged", "head_dim": [576, 512], "shared_kv": true, "heads": [32, 1])"), many);
  EXPECT_EQ(entry(R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584"}, "heads": [32, 1])"), many);
  EXPECT_EQ(entry(R"("kv": "dense", "head_dim": [576, 512], "shared_kv": true, "heads": [16, 1], "seqlens_q": [1, 1])"),
            many);
  EXPECT_EQ(entry(R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584"}, "heads": [16, 1])"), many);
}

// Blocks have as many heads as there are tokens to have beside them: each block reads all keys.
TEST(CudaMlaConfig, FillsBlocksWithTheTokensThatThereAre) {
  const auto heads = [](int of_query, const std::string& more) {
    cases::Problem problem(tests::make_case(R"({"name": "x", "dtype": "bf16", "head_dim": [576, 512], "shared_kv": true,
        "heads": [)" + std::to_string(of_query) +
                                            ", 1], " + more + "}"));
    return mla::choose_config(make_problem(problem.host(), Data::kRequired), 132).heads_of_tile;
  };
  const std::string one = R"("kv": "paged", "seqlens_kv": [9, 9], "seqlens_q": [1, 1])", two = R"("kv": "paged",
      "seqlens_kv": [9], "queries": "fixed", "seqlens_q": [2])",
                    many = R"("kv": "paged", "seqlens_kv": [70], "seqlens_q": [70])",
                    sparse = R"("kv": "slots", "sparse": {"topk": 9}, "seqlens_q": [70])";
  for (const int heads_q : {1, 8, 16, 32, 64}) {
    for (const std::string& tokens : {one, two, many, sparse}) EXPECT_EQ(heads(heads_q, tokens), heads_q) << tokens;
  }
  EXPECT_EQ(heads(128, one), 64);
  EXPECT_EQ(heads(96, one), 48);
  EXPECT_EQ(heads(24, one), 24);
  EXPECT_EQ(heads(24, two), 24);
  EXPECT_EQ(heads(24, many), 12);
  EXPECT_EQ(heads(20, many), 20);
  EXPECT_EQ(heads(40, one), 40);
  EXPECT_EQ(heads(24, sparse), 24);
  EXPECT_EQ(heads(97, one), 1);
}

// More heads where blocks of 64 rows would be cut into parts of a few tiles, and few rows into parts hardly longer.
TEST(CudaMlaConfig, GivesSmallBatchesToTheKernelOfFewRows) {
  const auto few = [](int64_t batch, const std::string& more, int num_sms = 132, const std::string& of_each = "4096") {
    std::string queries = "1", keys = of_each;
    for (int64_t i = 1; i < batch; ++i) queries += ", 1", keys += ", " + of_each;
    const std::string kv = more.find("paged") != std::string::npos ? R"("seqlens_kv": [)" + keys + "], " : "";
    cases::Problem problem(tests::make_case(R"({"name": "x", "dtype": "bf16", "head_dim": [576, 512], "seqlens_q": [)" +
                                            queries + "], " + kv + more + "}"));
    const mla::Config c = mla::choose_config(make_problem(problem.host(), Data::kRequired), num_sms);
    EXPECT_TRUE(!c.few || c.cluster == 1);
    EXPECT_LE(c.few ? c.heads_of_tile : 0, 16);
    return c.few;
  };
  const std::string sparse = R"("kv": "slots", "cache": {"format": "mla_656"}, "sparse": {"topk": 2048}, )";
  EXPECT_TRUE(few(1, sparse + R"("heads": [128, 1])"));
  EXPECT_FALSE(few(2, sparse + R"("heads": [128, 1])"));
  EXPECT_TRUE(few(2, sparse + R"("heads": [64, 1])"));
  EXPECT_FALSE(few(4, sparse + R"("heads": [64, 1])"));
  EXPECT_TRUE(few(8, sparse + R"("heads": [32, 1])"));
  EXPECT_FALSE(few(1, sparse + R"("heads": [128, 1])", 66));
  EXPECT_FALSE(few(1, sparse + R"("heads": [128, 1], "batch_invariant": true)"));
  const auto listed = [](const std::string& topk) {
    return R"("kv": "slots", "cache": {"format": "mla_656"}, "heads": [128, 1], "sparse": {"topk": )" + topk + "}";
  };
  EXPECT_FALSE(few(1, listed("128")));
  EXPECT_TRUE(few(4, listed("512")));
  EXPECT_FALSE(few(8, listed("512")));
  EXPECT_TRUE(few(1, listed("4096")));
  EXPECT_FALSE(few(1, listed("8192")));  // merging many parts of the other kernel takes less than tiles of this one
  const std::string paged = R"("kv": "paged", "shared_kv": true, "cache": {"page_size": 64}, )";
  EXPECT_TRUE(few(1, paged + R"("heads": [128, 1])", 132, "1024"));
  EXPECT_FALSE(few(1, paged + R"("heads": [128, 1])"));
  EXPECT_FALSE(few(2, paged + R"("heads": [128, 1])"));
  EXPECT_FALSE(
      few(1, R"("kv": "slots", "head_dim": [512, 512], "cache": {"format": "mla_584"}, "sparse": {"topk": 2048},
      "heads": [128, 1])"));
}

// Where two blocks of rows have the same keys, and these are decoded or copied by the TMA.
TEST(CudaMlaConfig, PairsBlocksThatShareKeys) {
  const auto cluster = [](const std::string& heads, const std::string& more, int num_sms) {
    cases::Problem problem(tests::make_case(R"({"name": "x", "dtype": "bf16", "head_dim": [576, 512], "seqlens_q": [60],
        "heads": )" + heads + more + "}"));
    return mla::choose_config(make_problem(problem.host(), Data::kRequired), num_sms).cluster;
  };
  const char* packed = R"(, "kv": "slots", "sparse": {"topk": 9}, "cache": {"format": "mla_656"})";
  EXPECT_EQ(cluster("[128, 1]", packed, 132), 2);
  EXPECT_EQ(cluster("[192, 1]", packed, 132), 1);  // three
  EXPECT_EQ(cluster("[16, 1]", packed, 132), 1);
  EXPECT_EQ(cluster("[128, 1]", packed, 131), 1);
  EXPECT_EQ(cluster("[128, 1]", R"(, "kv": "slots", "sparse": {"topk": 9}, "shared_kv": true)", 132), 1);
  const std::string paged = R"(, "kv": "paged", "seqlens_kv": [9], "shared_kv": true, "cache": {"page_size": )";
  EXPECT_EQ(cluster("[128, 1]", paged + "64}", 132), 2);
  EXPECT_EQ(cluster("[64, 1]", paged + "64}", 132), 1);
  EXPECT_EQ(cluster("[128, 1]", paged + "3}", 132), 1);
  EXPECT_EQ(cluster("[128, 1]", R"(, "kv": "dense", "seqlens_kv": [9], "shared_kv": true)", 132), 1);
}

}  // namespace
}  // namespace attune::cuda
