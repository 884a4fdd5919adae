// SPDX-License-Identifier: Apache-2.0
// Random batches of the backward: of training, whose queries are the keys, and of other lengths on the two sides.
#include <algorithm>
#include <numeric>

#include "serving_draw.h"

namespace attune::cases {
namespace {

constexpr double kWorkOfBudget = 3e5;  // channels of pairs that a batch has for each token of the budget
constexpr double kOfTables = 0.1;      // share of it where the oracle has to visit every pair

struct HeadDims {
  int64_t qk, v;
};

// Half of the configurations have no term that changes scores, or those that kernels of GPUs are made for.
void draw_scores(Random& r, Case& c) {
  if (r.chance(0.5)) {
    if (r.chance(0.3)) c.sinks = r.pick<std::string>({"normal", "mixed"});
    if (r.chance(0.3)) c.softcap = r.pick<double>({3, 30});
    if (r.chance(0.2)) c.alibi = r.pick<int>({1, 2});
    return;
  }
  if (r.chance(0.4)) c.softcap = r.pick<double>({3, 30});
  if (r.chance(0.4)) c.sinks = r.pick<std::string>({"normal", "mixed"});
  if (r.chance(0.3)) c.alibi = r.pick<int>({1, 2});
  c.alibi_sqrt = c.alibi > 0 && r.chance(0.2);
  if (r.chance(0.4)) c.bias = r.pick<int>({1, 2});
  c.new_token_bias = r.chance(0.1);
  if (r.chance(0.25)) {
    c.t5_buckets = r.pick<int64_t>({16, 32});
    c.t5_bidirectional = r.chance(0.5);
  }
  if (r.chance(0.1)) c.softmax_scale = r.uniform(-0.3, 0.3);
  c.aux_dtype = r.pick<std::string>({"f32", "f32", "bf16"});
}

void draw_masks(Random& r, Case& c) {
  c.causal = r.chance(0.65);
  if (r.chance(0.25)) c.window_left = r.pick<int64_t>({0, 15, 127, 500});
  if (r.chance(c.window_left >= 0 && !c.causal ? 0.6 : 0.1)) c.window_right = r.pick<int64_t>({0, 3, 100});
  if (r.chance(0.1)) c.mask_bits = r.pick<int>({1, 2});
}

void draw_configuration(Random& r, Case& c) {
  c.backward.on = true;
  c.dtype = r.pick<attune_dtype>({ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT16, ATTUNE_FLOAT32});
  // With eight KV heads or more, and no groups, a GPU may add to dq in another order.
  c.num_heads_kv = r.pick<int64_t>({1, 2, 2, 2, 3, 3, 8, 10});
  c.num_heads_q =
      c.num_heads_kv * (c.num_heads_kv < 8 ? r.pick<int64_t>({1, 1, 2, 4, 8}) : r.pick<int64_t>({1, 1, 1, 2}));
  const HeadDims dims = r.pick<HeadDims>({{64, 64},
                                          {128, 128},
                                          {128, 128},
                                          {96, 96},
                                          {40, 24},
                                          {192, 128},
                                          {256, 256},
                                          {r.integer(1, 256), r.integer(1, 256)}});
  c.head_dim_qk = dims.qk, c.head_dim_v = dims.v;
  draw_masks(r, c);
  draw_scores(r, c);
  c.queries = r.pick<QueryShape>({QueryShape::kRagged, QueryShape::kRagged, QueryShape::kRagged, QueryShape::kFixed});
  c.strides = r.pick<StrideMode>({StrideMode::kDense, StrideMode::kDense, StrideMode::kDense, StrideMode::kPacked,
                                  StrideMode::kTransposed, StrideMode::kOdd});
  if (c.strides == StrideMode::kPacked && (c.queries != QueryShape::kRagged || c.head_dim_qk != c.head_dim_v))
    c.strides = StrideMode::kDense;
  c.batch_invariant = r.chance(0.3);
  if (r.chance(0.3)) c.backward.dtype = ATTUNE_FLOAT32;
}

// Half of the time all that there are; else any that are not none.
void draw_outputs(Random& r, Case& c) {
  c.backward.dlse = r.chance(0.3);
  if (r.chance(0.5)) return;
  std::vector<std::string> all = {"dq", "dk", "dv"};
  if (!c.sinks.empty()) all.emplace_back("dsinks");
  if (c.bias > 0) all.emplace_back("dbias");
  if (c.t5_buckets > 0) all.emplace_back("dt5_bias");
  for (const std::string& name : all) {
    if (r.chance(0.5)) c.backward.outputs.push_back(name);
  }
  if (c.backward.outputs.empty()) c.backward.outputs = {r.pick(all)};
}

bool asks_for_tables(const Case& c) {
  const std::vector<std::string>& names = c.backward.outputs;
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name[1] == 'b' || name[1] == 't'; }) ||
         (names.empty() && (c.bias > 0 || c.t5_buckets > 0));
}

void draw_sequences(Random& r, Case& c, int64_t budget) {
  const bool fixed = c.queries == QueryShape::kFixed, packed = c.strides == StrideMode::kPacked;
  const bool self = packed || r.chance(0.6);                              // of as many queries as keys
  const bool training = r.chance(0.4);                                    // sequences that fill their length
  const bool tables = c.bias > 0 || c.mask_bits > 0 || c.new_token_bias;  // of the longest sequence squared
  const auto longest = std::min<int64_t>(r.pick<int64_t>({70, 600, 3000, 3000, 6000}), tables ? 300 : 6000);
  const auto most_sequences = std::min<int64_t>(r.pick<int64_t>({1, 3, 20, 100, 400}), tables ? 12 : 400);
  const auto draw = [&](int64_t most) {
    most = std::max<int64_t>(most, 1);
    if (r.chance(0.04)) return int64_t{0};
    return training ? r.integer((most + 1) / 2, most) : draw_length(r, most);
  };
  const double work_of_pair = static_cast<double>(c.num_heads_q * (c.head_dim_qk + c.head_dim_v));
  // Many heads get more, as else no sequence of theirs is long.
  const double share = asks_for_tables(c) ? kOfTables : c.causal && c.num_heads_kv >= 8 ? 3 : 1;
  double work = static_cast<double>(budget) * kWorkOfBudget * share;
  // A row is made, and looked at, by the host.
  int64_t rows = std::max<int64_t>(8, 512 * budget / (c.num_heads_q * std::max(c.head_dim_qk, c.head_dim_v)));
  const int64_t fixed_q = std::min(draw(longest), std::max<int64_t>(1, rows / most_sequences));
  for (int64_t b = 0; b < most_sequences && work > 0 && rows > 0; ++b) {
    int64_t n_q = fixed ? fixed_q : std::min(draw(longest), rows);
    int64_t n_kv = self ? n_q : std::min(draw(longest), rows);
    // What is left of the work.
    while (static_cast<double>(n_q) * static_cast<double>(n_kv) * work_of_pair > work && n_kv > 1) {
      n_kv = (n_kv + 1) / 2;
      if (!fixed) n_q = self ? n_kv : (n_q + 1) / 2;
    }
    c.seqlens_q.push_back(n_q);
    c.seqlens_kv.push_back(n_kv);
    work -= static_cast<double>(n_q) * static_cast<double>(n_kv) * work_of_pair;
    rows -= std::max(n_q, n_kv);
  }
}

}  // namespace

Case serving_backward_case(Random& r, uint64_t configuration, int64_t budget) {
  Case c;
  Random of_configuration("backward configuration", configuration);
  draw_configuration(of_configuration, c);
  draw_outputs(r, c);
  draw_sequences(r, c, budget);
  // A single row of odd strides has none that matters: a plan takes it, and a run refuses its address.
  const auto one_row = [](const std::vector<int64_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) < 2;
  };
  if (c.strides == StrideMode::kOdd && (one_row(c.seqlens_q) || one_row(c.seqlens_kv))) c.strides = StrideMode::kDense;
  // Lengths in an array are what the bits of others must not depend on; and without poison windows may move.
  c.seqused = c.strides != StrideMode::kPacked && r.chance(c.batch_invariant ? 0.9 : 0.3);
  c.poison = !r.chance(c.batch_invariant ? 0.5 : 0.2);
  c.max_seqlens = r.chance(0.3);
  if (r.chance(0.08)) {
    for (int64_t b = 0; b < c.batch(); ++b) {
      const int64_t first = r.integer(0, 300);
      c.ranges.push_back({first, first + r.integer(0, 300)});
    }
  }
  if (r.chance(0.05)) c.data = "spread";
  if (r.chance(0.1)) {
    std::vector<std::string> all = {"nan_k", "nan_v", "nan_q", "no_lse"};
    // A p that is 0 in fp32, and not in float64, times an infinity is NaN.
    if (c.data != "spread" && c.alibi == 0 && c.sinks != "mixed") all.insert(all.end(), {"inf_v", "inf_dout"});
    const std::string bad = r.pick(all);
    (bad == "nan_q" || bad == "inf_dout" || bad == "no_lse" ? c.backward.plant : c.plant) = bad;
  }
  return c;
}

}  // namespace attune::cases
