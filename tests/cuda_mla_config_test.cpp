// SPDX-License-Identifier: Apache-2.0
// What the host decides for the MLA kernels, without a GPU: what they take, by which kernel, and what a run may bring.
#include <functional>

#include "cuda/attention/prologue.h"
#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "cuda/prefill/prefill.h"
#include "cuda_run.h"
#include "failure.h"

namespace attune::cuda {
namespace {

TEST(CudaMlaConfig, RefusesWhatItCannotDo) {
  const cases::Row common(R"("heads": [4, 1], "dtype": "bf16", "seqlens_q": [5], "seqlens_kv": [5])");
  for (
      const auto& [wrong, why] :
      {std::pair{R"("head_dim": [96, 64], "shared_kv": true, "kv": "paged")", "head_dim_qk 96 with head_dim_v 64"},
       {R"("head_dim": [576, 512], "kv": "paged", "dtype": "f16", "cache": {"format": "mla_656"})",
        "q of float16 over cache, a packed one; it takes bfloat16"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "strides": "odd")", "multiples of 16 bytes"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "prologue": {"rope": {"style": "linear", "dim": 64}})",
        "queries alone that asks where they stand"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "new_tokens": true, "skip_decode": true,
            "prologue": {"append": true})",
        "skip_decode"},
       {R"("head_dim": [512, 576], "kv": "paged")", "head_dim_qk 512 with head_dim_v 576"},
       {R"("head_dim": [544, 512], "shared_kv": true, "kv": "paged")", "head_dim_qk 544 with head_dim_v 512"}}) {
    cases::Problem problem(tests::make_case(common.with(wrong)));
    const std::string refusal = mla::refusal(make_problem(problem.host(), Data::kRequired));
    EXPECT_NE(refusal.find(why), std::string::npos) << wrong << ": " << refusal;
  }
  // What no case of the table has.
  const auto refusal_of = [](const char* kv, const std::function<void(Problem&)>& change) {
    cases::Problem problem(tests::make_case(
        cases::Row(R"("heads": [4, 1], "dtype": "bf16", "head_dim": [576, 512], "shared_kv": true)").with(kv)));
    Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(mla::refusal(p), "") << kv;
    change(p);
    return mla::refusal(p);
  };
  const char* const lists = R"("kv": "slots", "seqlens_q": [2, 1], "sparse": {"topk": 9}, "extra": {"topk": 9,
      "page_size": 16})";
  const char* const dense = R"("kv": "dense", "seqlens_q": [5], "seqlens_kv": [5])";
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.format = kv_format(ATTUNE_KV_MLA_656); }),
            "extra_cache of format mla_656 beside a cache of format plain; it takes one for both");
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.k.page_stride += 4; }),
            "rows of extra_cache that do not lie at multiples of 16 bytes");
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.k.dtype = ATTUNE_FLOAT16; }),
            "extra_cache of float16 with q of bfloat16; it takes one dtype for both");
  EXPECT_EQ(refusal_of(lists, [](Problem& p) { p.extra_cache.k.data += 8; }),
            "data that do not lie at multiples of 16 bytes, as extra_cache.k.data here");
  EXPECT_EQ(refusal_of(dense, [](Problem& p) { p.k.dtype = ATTUNE_FLOAT16; }),
            "k of float16 with q of bfloat16; it takes one dtype for both");
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
    cases::Problem problem(
        tests::make_case(cases::Row(R"("heads": [20, 1], "dtype": "bf16", "head_dim": [576, 512], "seqlens_q": [2],
            "seqlens_kv": [70])")
                             .with(kv)));
    attune_attention a = problem.host();
    const mla::Config c = mla::choose_config(make_problem(a, Data::kRequired), 132);
    mla::check_run(make_problem(a, Data::kRequired), c);
    other(a);
    return failure_of([&] { mla::check_run(make_problem(a, Data::kRequired), c); });
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
            "attention differs from its plan: kernel cuda_mla does not take softmax_scale -1.000000; it takes positive "
            "ones");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.q.data = static_cast<char*>(a.q.data) + 2; }),
            "q.data is 2 bytes beyond a multiple of 16; kernel cuda_mla needs a multiple of 16, or a plan made for "
            "such data");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.cache.k.shape[1] = 4; }),
            "cache.page_size is 4; the plan was made for pages of multiples of 8 tokens");
  EXPECT_EQ(change(paged, [](attune_attention& a) { a.cache.k.shape[1] = 8; }), "");
  const char* const apart = R"("kv": "paged", "shared_kv": true, "q_rope": 64, "cache": {"page_size": 64})";
  EXPECT_EQ(change(apart, [](attune_attention& a) { a.q_rope.stride[0] += 8; }), "");
  EXPECT_EQ(change(apart, [](attune_attention& a) { a.q_rope.stride[1] += 4; }),
            "attention differs from its plan: kernel cuda_mla does not take rows of q_rope that do not lie at "
            "multiples of 16 bytes");
  EXPECT_EQ(change(apart, [](attune_attention& a) { a.q_rope.data = static_cast<char*>(a.q_rope.data) + 4; }),
            "q_rope.data is 4 bytes beyond a multiple of 16; kernel cuda_mla needs a multiple of 16, or a plan made "
            "for such data");
}

// Rope channels that are apart, and those at the end of whole rows, are read alike.
TEST(CudaMlaConfig, TakesRopeChannelsApart) {
  const auto problem_of = [](int64_t q_rope) {
    cases::Case spec = tests::make_case(R"({"name": "x", "heads": [20, 1], "dtype": "bf16", "head_dim": [576, 512],
        "seqlens_q": [2], "seqlens_kv": [70], "kv": "paged", "shared_kv": true})");
    spec.q_rope = q_rope;
    return cases::Problem(spec);
  };
  cases::Problem whole = problem_of(0), apart = problem_of(64), uneven = problem_of(32);
  const Problem w = make_problem(whole.host(), Data::kRequired), a = make_problem(apart.host(), Data::kRequired);
  const mla::Config c = mla::choose_config(w, 132);
  EXPECT_EQ(mla::choose_config(a, 132).main_kernel().defines, c.main_kernel().defines);
  const mla::Maps of_w = mla::describe_maps(w, c), of_a = mla::describe_maps(a, c);
  EXPECT_EQ(of_w.q.shape[0], 512u);
  EXPECT_EQ(of_w.q_rope.shape[0], 64u);
  EXPECT_EQ(of_w.q_rope.data, static_cast<char*>(whole.host().q.data) + 1024);
  EXPECT_EQ(of_a.q_rope.data, apart.host().q_rope.data);
  EXPECT_EQ(of_a.q_rope.stride_bytes[1], 128u);
  alignas(256) static std::byte workspace[1 << 20];
  EXPECT_EQ(mla::to_params(w, c, workspace).q_rope, static_cast<char*>(whole.host().q.data) + 1024);
  EXPECT_EQ(mla::to_params(w, c, workspace).q_rope_head_stride, 576);
  EXPECT_EQ(mla::to_params(a, c, workspace).q_rope_head_stride, 64);
  EXPECT_EQ(mla::refusal(make_problem(uneven.host(), Data::kRequired)),
            "q_rope beside 544 channels of q; it takes 512");
  EXPECT_EQ(prefill_kernel().coverage.difference(traits_of(a, apart.host())),
            "queries: q_rope; head_dim_qk: 576 (at most 256); head_dim_v: 512 (at most 256)");
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
  EXPECT_EQ(attention::prologue_bytes(p),
            static_cast<size_t>((7 * 4 * 576 * 2 + 255) / 256 * 256 + (7 * 576 * 2 + 255) / 256 * 256));
  alignas(256) static std::byte memory[1 << 16];
  const PrepareProblem op = attention::to_prepare(p, memory);
  const Problem after = attention::after_prologue(p, memory);
  EXPECT_FALSE(op.v || op.v_out);
  EXPECT_EQ(op.k_out.data, after.k.data);
  EXPECT_EQ(after.v.data, after.k.data);
  EXPECT_EQ(after.q.data, memory);
  EXPECT_FALSE(attention::has_prologue(after));
  EXPECT_EQ(mla::refusal(after), "");
}

TEST(CudaMlaConfig, ChoosesTheProducer) {
  const cases::Row common(R"("heads": [20, 1], "dtype": "bf16", "head_dim": [576, 512], "shared_kv": true,
      "seqlens_q": [2], "seqlens_kv": [5])");
  for (const auto& [kv, producer] : {std::pair{R"("kv": "paged", "cache": {"page_size": 64})", kernels::kMlaTma},
                                     {R"("kv": "paged", "cache": {"page_size": 8})", kernels::kMlaTma},
                                     {R"("kv": "paged", "cache": {"page_size": 12})", kernels::kMlaGather},
                                     {R"("kv": "contiguous")", kernels::kMlaTma},
                                     {R"("kv": "slots", "sparse": {"topk": 9})", kernels::kMlaGather}}) {
    cases::Problem problem(tests::make_case(common.with(kv)));
    EXPECT_EQ(mla::choose_config(make_problem(problem.host(), Data::kRequired), 132).producer, producer) << kv;
  }
}

// One token's heads over cached rows: 16 at most, or 32 of packed rows of 656 bytes, whatever else there is.
TEST(CudaMlaConfig, ChoosesTheKernelByItsRows) {
  const auto entry = [](const cases::Row& row) {
    cases::Problem problem(tests::make_case(row));
    const KernelSpec kernel = mla::choose_config(make_problem(problem.host(), Data::kRequired), 132).main_kernel();
    std::string rows;
    for (const auto& [name, value] : kernel.defines) {
      if (name == "ATTUNE_ROWS") rows = " " + value;
    }
    return kernel.entry + rows;
  };
  const std::string m16 = "attune_mla_m16", swap_ab_16 = "attune_mla_swap_ab 16", swap_ab_32 = "attune_mla_swap_ab 32",
                    m64 = "attune_mla";
  const cases::Row common(R"("dtype": "bf16", "seqlens_kv": [5, 9])");
  const cases::Row packed = common.with(R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656"})");
  EXPECT_EQ(entry(packed.with(R"("heads": [16, 1], "seqlens_q": [1, 1])")), swap_ab_16);
  EXPECT_EQ(entry(packed.with(R"("heads": [16, 1], "seqlens_q": [1, 1], "batch_invariant": true)")), m64);
  EXPECT_EQ(entry(packed.with(R"("heads": [16, 1], "queries": "fixed", "batch_invariant": true)")), swap_ab_16);
  EXPECT_EQ(entry(packed.with(R"("heads": [17, 1], "seqlens_q": [1, 1], "batch_invariant": true)")), m64);
  EXPECT_EQ(entry(packed.with(R"("heads": [4, 1], "seqlens_q": [2, 1])")), m64);
  EXPECT_EQ(entry(packed.with(R"("heads": [4, 1], "seqlens_q": [1, 1], "new_tokens": true)")), swap_ab_16);
  EXPECT_EQ(
      entry(common.with(R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"}, "heads": [16, 1],
      "seqlens_q": [2, 1], "sparse": {"topk": 9})")),
      swap_ab_16);
  EXPECT_EQ(entry(common.with(R"("kv": "paged", "head_dim": [576, 512], "shared_kv": true, "heads": [32, 2])")), m16);
  // Up to 32 over packed rows of 656 bytes.
  EXPECT_EQ(entry(packed.with(R"("heads": [17, 1], "seqlens_q": [1, 1])")), swap_ab_32);
  EXPECT_EQ(entry(packed.with(R"("heads": [32, 1], "queries": "fixed", "batch_invariant": true)")), swap_ab_32);
  EXPECT_EQ(entry(packed.with(R"("heads": [33, 1], "seqlens_q": [1, 1])")), m64);
  EXPECT_EQ(entry(packed.with(R"("heads": [32, 1], "seqlens_q": [2, 1])")), m64);
  EXPECT_EQ(
      entry(common.with(R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"}, "heads": [32, 1],
      "seqlens_q": [2, 1], "sparse": {"topk": 9})")),
      swap_ab_32);
  EXPECT_EQ(entry(common.with(R"("kv": "paged", "head_dim": [576, 512], "shared_kv": true, "heads": [32, 1])")), m64);
  EXPECT_EQ(
      entry(common.with(R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584"}, "heads": [32, 1])")),
      m64);
  EXPECT_EQ(entry(common.with(
                R"("kv": "dense", "head_dim": [576, 512], "shared_kv": true, "heads": [16, 1], "seqlens_q": [1, 1])")),
            m64);
  EXPECT_EQ(
      entry(common.with(R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584"}, "heads": [16, 1])")),
      m64);
}

// M blocks have as many heads as leave room for the tokens that there are: each block reads all keys.
TEST(CudaMlaConfig, FillsMBlocksWithTokens) {
  const auto heads = [](int of_query, const std::string& more) {
    const cases::Row common(R"("dtype": "bf16", "head_dim": [576, 512], "shared_kv": true)");
    cases::Problem problem(tests::make_case(common.set("heads", {of_query, 1}).with(more)));
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

// Rows of an M block and fewest tiles of a split, where blocks of as many rows as heads would be split into few tiles
// each: what was fastest on an H200.
TEST(CudaMlaConfig, ChoosesTheKernelOfSmallBatches) {
  const cases::Row common(R"("dtype": "bf16", "head_dim": [576, 512])");
  // keys: of each sequence; 0: as many as the lists have.
  const auto form = [](int64_t batch, const cases::Row& row, int num_sms = 132, int64_t keys = 0) {
    const std::vector<int64_t> queries(static_cast<size_t>(batch), 1), all_keys(static_cast<size_t>(batch), keys);
    const cases::Row asked = row.set("seqlens_q", queries);
    cases::Problem problem(tests::make_case(keys == 0 ? asked : asked.set("seqlens_kv", all_keys)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    const mla::Config c = mla::choose_config(p, num_sms);
    EXPECT_TRUE((!c.m16 && !c.swap_ab) || c.cluster == 1);
    EXPECT_LE(c.heads_of_tile, c.rows);
    EXPECT_EQ(mla::to_params(p, c, nullptr).fewest_tiles, c.fewest_tiles);
    return cat(c.rows, " ", c.fewest_tiles);
  };
  const auto sparse = [&](int heads, int topk) {
    return common.with(R"("kv": "slots", "cache": {"format": "mla_656"})")
        .set("heads", {heads, 1})
        .set("sparse.topk", topk);
  };
  EXPECT_EQ(form(1, sparse(128, 2048)), "16 2");
  EXPECT_EQ(form(2, sparse(128, 2048)), "64 2");
  EXPECT_EQ(form(4, sparse(128, 2048)), "64 2");
  EXPECT_EQ(form(16, sparse(128, 2048)), "64 2");
  EXPECT_EQ(form(1, sparse(128, 1024)), "16 1");
  EXPECT_EQ(form(1, sparse(128, 8192)), "32 2");
  EXPECT_EQ(form(1, sparse(128, 16384)), "64 2");
  EXPECT_EQ(form(4, sparse(64, 2048)), "16 2");
  EXPECT_EQ(form(4, sparse(32, 2048)), "16 2");
  EXPECT_EQ(form(8, sparse(32, 2048)), "16 2");
  EXPECT_EQ(form(16, sparse(32, 2048)), "32 2");
  EXPECT_EQ(form(8, sparse(16, 1024)), "16 1");
  EXPECT_EQ(form(1, sparse(16, 2048)), "16 1");
  EXPECT_EQ(form(1, sparse(128, 2048), 66), "64 1");
  // Batch-invariant calls, and those that are not split, go by the number of heads.
  EXPECT_EQ(form(1, sparse(128, 2048).set("batch_invariant", true)), "64 2");
  EXPECT_EQ(form(1, sparse(32, 2048).set("batch_invariant", true)), "32 2");
  EXPECT_EQ(form(132, sparse(64, 70)), "64 2");
  EXPECT_EQ(form(132, sparse(16, 70)), "16 2");
  const cases::Row paged = common.with(R"("kv": "paged", "heads": [128, 1], "shared_kv": true,
      "cache": {"page_size": 64}, "max_seqlens": true)");
  EXPECT_EQ(form(1, paged, 132, 1024), "64 1");
  EXPECT_EQ(form(8, paged, 132, 512), "64 1");
  EXPECT_EQ(form(1, paged, 132, 4096), "64 2");
  EXPECT_EQ(form(2, paged, 132, 4096), "64 2");
  // Neither the m16 nor the swap-AB kernel takes the other packed format, or several tokens of a sequence; the swap-AB
  // kernel takes no 16-bit rows.
  EXPECT_EQ(form(2, common.with(R"("kv": "slots", "head_dim": [512, 512], "cache": {"format": "mla_584"},
      "sparse": {"topk": 2048}, "heads": [128, 1])")),
            "64 2");
  EXPECT_EQ(form(2, common.with(R"("kv": "slots", "shared_kv": true, "sparse": {"topk": 2048}, "heads": [64, 1])")),
            "16 2");
  cases::Problem tokens(tests::make_case(R"({"name": "x", "dtype": "bf16", "head_dim": [576, 512], "heads": [128, 1],
      "kv": "paged", "cache": {"format": "mla_656", "page_size": 64}, "seqlens_q": [2], "seqlens_kv": [2048]})"));
  EXPECT_FALSE(mla::choose_config(make_problem(tokens.host(), Data::kRequired), 132).swap_ab);
}

// Clusters, where two M blocks have the same keys, which are dequantized or copied by the TMA.
TEST(CudaMlaConfig, FormsClustersThatShareKeys) {
  const cases::Row common(R"("dtype": "bf16", "head_dim": [576, 512], "seqlens_q": [60])");
  const auto cluster = [](int heads, const cases::Row& row, int num_sms) {
    cases::Problem problem(tests::make_case(row.set("heads", {heads, 1})));
    return mla::choose_config(make_problem(problem.host(), Data::kRequired), num_sms).cluster;
  };
  const cases::Row packed = common.with(R"("kv": "slots", "sparse": {"topk": 9}, "cache": {"format": "mla_656"})");
  EXPECT_EQ(cluster(128, packed, 132), 2);
  EXPECT_EQ(cluster(192, packed, 132), 1);  // three
  EXPECT_EQ(cluster(16, packed, 132), 1);
  EXPECT_EQ(cluster(128, packed, 131), 1);
  EXPECT_EQ(cluster(128, common.with(R"("kv": "slots", "sparse": {"topk": 9}, "shared_kv": true)"), 132), 1);
  const cases::Row paged = common.with(R"("kv": "paged", "seqlens_kv": [9], "shared_kv": true)");
  EXPECT_EQ(cluster(128, paged.set("cache.page_size", 64), 132), 2);
  EXPECT_EQ(cluster(64, paged.set("cache.page_size", 64), 132), 1);
  EXPECT_EQ(cluster(128, paged.set("cache.page_size", 3), 132), 1);
  EXPECT_EQ(cluster(128, common.with(R"("kv": "dense", "seqlens_kv": [9], "shared_kv": true)"), 132), 1);
}

}  // namespace
}  // namespace attune::cuda
