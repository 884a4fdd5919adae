// SPDX-License-Identifier: Apache-2.0
// The oracle's gradients against finite differences, in float64, of the oracle's forward: every term of the score,
// every mask, every input that has a gradient.
#include "reference/backward.h"

#include <functional>
#include <string>

#include "reference_support.h"

namespace attune::reference_tests {
namespace {

using reference::attention;
using reference::attention_backward;
using reference::Backward;
using reference::Gradient;
using reference::RowResult;

// A forward with what comes back to it.
struct Setting {
  Store store;
  attune_attention a = empty_attention();
  attune_tensor dout{}, dlse{};
};

// Irregular multiples of 2^-10 in [-1, 1]: a step of finite differences changes them exactly.
attune_tensor coarse(Store& store, const std::vector<int64_t>& shape, int seed) {
  attune_tensor t = store.varied(shape, seed);
  int64_t size = 1;
  for (const int64_t n : shape) size *= n;
  auto* values = static_cast<float*>(t.data);
  for (int64_t i = 0; i < size; ++i) values[i] = std::round(values[i] * 1024) / 1024;
  return t;
}

// Two sequences of 4 and 3 queries and of 5 and 6 keys, 4 heads on 2, d_qk 3 and d_v 2.
void fill(Setting& s) {
  s.a.softmax_scale = 0.75f;
  s.a.q = coarse(s.store, {7, 4, 3}, 1);
  s.a.k = coarse(s.store, {11, 2, 3}, 2);
  s.a.v = coarse(s.store, {11, 2, 2}, 3);
  s.a.cu_seqlens_q = s.store.ints({0, 4, 7});
  s.a.cu_seqlens_kv = s.store.ints({0, 5, 11});
  s.dout = coarse(s.store, {7, 4, 2}, 4);
}

void run_forward(Setting& s) {
  const std::vector<RowResult> rows = attention(s.a);
  std::vector<float> out, lse;
  for (const RowResult& row : rows) {
    for (size_t d = 0; d < 2; ++d) out.push_back(row.written ? static_cast<float>(row.out[d]) : kNaN);
    lse.push_back(row.written ? static_cast<float>(row.lse) : kNaN);
  }
  s.a.out = s.store.floats({7, 4, 2}, out);
  s.a.lse = s.store.floats({7, 4}, lse);
}

// sum(dout * out) + sum(dlse * lse) over the rows that see something.
double loss(const Setting& s) {
  const std::vector<RowResult> rows = attention(s.a);
  const auto* dout = static_cast<const float*>(s.dout.data);
  const auto* dlse = static_cast<const float*>(s.dlse.data);
  double sum = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].written || rows[i].lse == -kInf) continue;
    for (size_t d = 0; d < rows[i].out.size(); ++d) sum += dout[i * rows[i].out.size() + d] * rows[i].out[d];
    if (dlse != nullptr) sum += dlse[i] * rows[i].lse;
  }
  return sum;
}

// Central differences of two steps, extrapolated.
double difference(Setting& s, float& x) {
  const float middle = x;
  const auto slope = [&](float step) {
    x = middle + step;
    const double above = loss(s);
    x = middle - step;
    const double below = loss(s);
    x = middle;
    return (above - below) / (2.0 * static_cast<double>(step));
  };
  return (4 * slope(0x1p-8f) - slope(0x1p-7f)) / 3;
}

void expect_gradient(Setting& s, const char* name, const attune_tensor& input, const Gradient& gradient) {
  auto* values = static_cast<float*>(input.data);
  double largest = 0;
  for (size_t i = 0; i < gradient.value.size(); ++i) {
    const double expected = difference(s, values[i]);
    // What is stored of out and lse is rounded to fp32.
    EXPECT_NEAR(gradient.value[i], expected, 2e-7 * (1 + gradient.parts[i])) << name << " " << i;
    largest = std::max(largest, std::fabs(expected));
  }
  EXPECT_GT(largest, 1e-3) << name;
}

struct Variant {
  std::string name;
  std::function<void(Setting&)> change;
};

std::ostream& operator<<(std::ostream& out, const Variant& v) { return out << v.name; }

std::vector<Variant> variants() {
  const auto dlse = [](Setting& s) { s.dlse = coarse(s.store, {7, 4}, 5); };
  const auto softcap = [](Setting& s) { s.a.softcap = 0.8f; };
  const auto alibi = [](Setting& s) { s.a.alibi_slopes = s.store.floats({4}, {0.5f, 0.25f, -0.125f, 0.0625f}); };
  const auto bias = [](Setting& s) { s.a.bias = coarse(s.store, {4, 6, 6}, 6); };
  const auto t5 = [](Setting& s) {
    s.a.t5_bias = coarse(s.store, {4, 8}, 7);
    s.a.t5_max_distance = 5;
    s.a.t5_bidirectional = 1;
  };
  const auto sinks = [](Setting& s) { s.a.sinks = coarse(s.store, {4}, 8); };
  const auto causal = [](Setting& s) { s.a.causal = 1; };
  return {
      {"plain", [](Setting&) {}},
      {"causal", causal},
      {"window", [](Setting& s) { s.a.window_left = 2, s.a.window_right = 1; }},
      {"ranges",
       [=](Setting& s) {
         causal(s);
         s.a.bidirectional_ranges = s.store.add<int32_t>({2, 1, 2}, {2, 4, 3, 5});
       }},
      {"mask_bits",
       [](Setting& s) {
         s.a.mask_bits = s.store.add<uint8_t>({7, 1}, {0x15, 0x1f, 0x02, 0x1d, 0x3f, 0x29, 0x13});
       }},
      {"softcap", softcap},
      {"negative_scale", [](Setting& s) { s.a.softmax_scale = -0.75f; }},
      {"alibi", alibi},
      {"alibi_sqrt", [=](Setting& s) { alibi(s), s.a.alibi_sqrt = 1; }},
      {"bias", bias},
      {"shared_bias",
       [](Setting& s) {
         s.a.bias = coarse(s.store, {1, 6, 6}, 6);
       }},
      {"t5", t5},
      {"t5_one_way", [=](Setting& s) { t5(s), causal(s), s.a.t5_bidirectional = 0; }},
      {"sinks", sinks},
      {"dlse", dlse},
      {"sinks_and_dlse", [=](Setting& s) { sinks(s), dlse(s); }},
      {"all", [=](Setting& s) { dlse(s), softcap(s), alibi(s), bias(s), t5(s), sinks(s), causal(s); }},
  };
}

class ReferenceBackward : public testing::TestWithParam<Variant> {};

TEST_P(ReferenceBackward, IsTheSlopeOfTheForward) {
  Setting s;
  fill(s);
  GetParam().change(s);
  run_forward(s);
  const Backward gradients = attention_backward(s.a, s.dout, s.dlse);
  expect_gradient(s, "dq", s.a.q, gradients.dq);
  expect_gradient(s, "dk", s.a.k, gradients.dk);
  expect_gradient(s, "dv", s.a.v, gradients.dv);
  if (s.a.sinks.data != nullptr) expect_gradient(s, "dsinks", s.a.sinks, gradients.dsinks);
  if (s.a.bias.data != nullptr) expect_gradient(s, "dbias", s.a.bias, gradients.dbias);
  if (s.a.t5_bias.data != nullptr) expect_gradient(s, "dt5_bias", s.a.t5_bias, gradients.dt5_bias);
}

INSTANTIATE_TEST_SUITE_P(Terms, ReferenceBackward, testing::ValuesIn(variants()),
                         [](const auto& info) { return info.param.name; });

TEST(ReferenceBackwardRows, ThatSeeNothingAndThatNobodySees) {
  Setting s;
  fill(s);
  s.a.causal = 1;
  s.a.sinks = coarse(s.store, {4}, 8);
  s.a.cu_seqlens_q = s.store.ints({1, 6, 6});   // 5 queries on 2 keys; row 0 and row 6 are of no sequence
  s.a.cu_seqlens_kv = s.store.ints({2, 4, 9});  // and a sequence whose keys are not used
  run_forward(s);
  for (const attune_tensor* t : {&s.a.q, &s.dout}) {  // of queries 0..2, which stand before any key
    std::fill_n(static_cast<float*>(t->data) + t->stride[0], 3 * t->stride[0], kNaN);
  }
  const Backward g = attention_backward(s.a, s.dout, s.dlse);
  EXPECT_EQ(g.q_written, (std::vector<bool>{false, true, true, true, true, true, false}));
  EXPECT_EQ(g.kv_written, (std::vector<bool>{false, false, true, true, true, true, true, true, true, false, false}));
  for (size_t i = 0; i < g.dq.value.size(); ++i) EXPECT_EQ(g.dq.value[i] != 0, i / 12 >= 4 && i / 12 <= 5) << i;
  for (const double x : g.dsinks.value) EXPECT_TRUE(std::isfinite(x) && x != 0) << x;
  for (size_t i = 0; i < g.dk.value.size(); ++i) EXPECT_EQ(g.dk.value[i] != 0, i / 6 == 2 || i / 6 == 3) << i;
  for (size_t i = 0; i < g.dv.value.size(); ++i) EXPECT_EQ(g.dv.value[i] != 0, i / 4 == 2 || i / 4 == 3) << i;
}

TEST(ReferenceBackwardRows, KeysThatAreNotInUseAreWritten) {
  Setting s;
  fill(s);
  s.a.seqused_kv = s.store.ints({2, 0});
  run_forward(s);
  const Backward g = attention_backward(s.a, s.dout, s.dlse);
  for (size_t row = 0; row < 11; ++row) {
    EXPECT_TRUE(g.kv_written[row]);
    EXPECT_EQ(g.dv.value[row * 4] != 0, row < 2) << row;
  }
}

}  // namespace
}  // namespace attune::reference_tests
