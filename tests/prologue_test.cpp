// SPDX-License-Identifier: Apache-2.0
// The prologue's rows against plain double arithmetic, and the checks of its fields.
#include "cpu/prologue.h"

#include <cstring>
#include <functional>

#include "core/dtype.h"
#include "unit_tensors.h"

namespace attune::unit {
namespace {

constexpr int64_t kTokens = 3, kHeadsQ = 4, kHeadsKv = 2, kDim = 12, kDimV = 5, kBatch = 2;

PrologueShapes shapes() {
  return {kBatch, kTokens, kHeadsQ,        kHeadsKv,       kDim,           kDimV, true,
          true,   true,    ATTUNE_FLOAT32, ATTUNE_FLOAT32, ATTUNE_FLOAT32, true};
}

attune_prologue none() {
  attune_prologue p;
  std::memset(&p, 0, sizeof(p));
  return p;
}

Prologue make(const attune_prologue& p, const PrologueShapes& s = shapes()) {
  return make_prologue(p, s, Data::kRequired);
}

// cos_sin [positions, width] with cosines c(p, j) and sines s(p, j) that are no rotation of anything: a swap shows.
std::vector<float> odd_table(int64_t positions, int64_t width) {
  std::vector<float> t;
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t j = 0; j < width; ++j)
      t.push_back(0.1f * static_cast<float>(p + 1) + 0.01f * static_cast<float>(j * j));
  }
  return t;
}

struct Rows {
  std::vector<float> data = normal(kTokens * kHeadsQ * kDim, 7);
  attune_tensor tensor = dense(data, {kTokens, kHeadsQ, kDim});
  RowView view = row_view(tensor);
  const float* at(int64_t row, int64_t head) const { return data.data() + (row * kHeadsQ + head) * kDim; }
};

std::vector<float> q_row(const Prologue& p, const RowView& q, int64_t row, int64_t head, int64_t batch,
                         int64_t position) {
  std::vector<float> out(kDim, kNan);
  cpu::prepare_q_row(p, q, kDim, row, head, batch, position, out.data());
  return out;
}

TEST(PrologueRows, NothingAskedForChangesNothing) {
  Rows q;
  const Prologue p = make(none());
  EXPECT_FALSE(p.any);
  const std::vector<float> x = q_row(p, q.view, 2, 3, 1, 5);
  EXPECT_EQ(std::memcmp(x.data(), q.at(2, 3), kDim * 4), 0);
}

// Every step at once, on the three sources, in the order of the contract.
TEST(PrologueRows, StepsComeInOrder) {
  std::vector<int8_t> q8(kTokens * kHeadsQ * kDim), k8(kTokens * kHeadsKv * kDim), v8(kTokens * kHeadsKv * kDimV);
  for (size_t i = 0; i < q8.size(); ++i) q8[i] = static_cast<int8_t>(i * 37 % 255 - 127);
  for (size_t i = 0; i < k8.size(); ++i) k8[i] = static_cast<int8_t>(i * 91 % 255 - 127);
  for (size_t i = 0; i < v8.size(); ++i) v8[i] = static_cast<int8_t>(i * 53 % 255 - 127);
  std::vector<float> scale = {0.02f, 0.03f, 0.05f};
  std::vector<float> qb = normal(kHeadsQ * kDim, 1), kb = normal(kHeadsKv * kDim, 2), vb = normal(kHeadsKv * kDimV, 3);
  std::vector<float> ik = normal(2 * kHeadsKv * kDim, 4), iv = normal(2 * kHeadsKv * kDimV, 5);
  std::vector<int32_t> task = {0, 1};
  std::vector<float> table = odd_table(9, 6), logn = {1, 2, 3, 4, 5, 6, 7};
  attune_prologue a = none();
  a.qkv_scale = dense(scale, {3});
  a.q_bias = dense(qb, {kHeadsQ, kDim});
  a.k_bias = dense(kb, {kHeadsKv, kDim});
  a.v_bias = dense(vb, {kHeadsKv, kDimV});
  a.ia3_k = dense(ik, {2, kHeadsKv, kDim});
  a.ia3_v = dense(iv, {2, kHeadsKv, kDimV});
  a.ia3_task = dense(task, {kBatch});
  a.rope_cos_sin = dense(table, {9, 6});
  a.rope_offset = 4;
  a.logn = dense(logn, {7});
  PrologueShapes s = shapes();
  s.q_dtype = s.k_dtype = s.v_dtype = ATTUNE_INT8;
  const Prologue p = make(a, s);
  ASSERT_TRUE(p.any);
  const RowView q = row_view(dense(q8, ATTUNE_INT8, {kTokens, kHeadsQ, kDim}));
  const RowView k = row_view(dense(k8, ATTUNE_INT8, {kTokens, kHeadsKv, kDim}));
  const RowView v = row_view(dense(v8, ATTUNE_INT8, {kTokens, kHeadsKv, kDimV}));
  const int64_t row = 2, batch = 1, position = 6;

  const auto rotate = [&](std::vector<double>& x) {
    for (size_t j = 0; j < 3; ++j) {
      const double c = table[static_cast<size_t>(position) * 6 + j],
                   n = table[static_cast<size_t>(position) * 6 + 3 + j];
      const double a0 = x[4 + j], b0 = x[7 + j];
      x[4 + j] = c * a0 - n * b0;
      x[7 + j] = c * b0 + n * a0;
    }
  };
  for (size_t h = 0; h < kHeadsQ; ++h) {
    std::vector<double> want(kDim);
    for (size_t d = 0; d < kDim; ++d) want[d] = 0.02 * q8[(row * kHeadsQ + h) * kDim + d] + qb[h * kDim + d];
    rotate(want);
    const std::vector<float> got = q_row(p, q, row, static_cast<int64_t>(h), batch, position);
    for (size_t d = 0; d < kDim; ++d) EXPECT_CLOSE(got[d], 7 * want[d], 3e-5);
  }
  for (size_t h = 0; h < kHeadsKv; ++h) {
    std::vector<double> want(kDim);
    for (size_t d = 0; d < kDim; ++d) {
      want[d] = (0.03 * k8[(row * kHeadsKv + h) * kDim + d] + kb[h * kDim + d]) * ik[(kHeadsKv + h) * kDim + d];
    }
    rotate(want);
    std::vector<float> got(kDim, kNan);
    cpu::prepare_k_row(p, k, kDim, row, static_cast<int64_t>(h), batch, position, got.data());
    for (size_t d = 0; d < kDim; ++d) EXPECT_CLOSE(got[d], want[d], 3e-5);
    cpu::prepare_v_row(p, v, kDimV, row, static_cast<int64_t>(h), batch, got.data());
    for (size_t d = 0; d < kDimV; ++d) {
      const double x =
          (0.05 * v8[(row * kHeadsKv + h) * kDimV + d] + vb[h * kDimV + d]) * iv[(kHeadsKv + h) * kDimV + d];
      EXPECT_CLOSE(got[d], x, 3e-5);
    }
  }
}

TEST(PrologueRows, EveryInputDtypeIsExact) {
  const struct {
    attune_dtype dtype;
    std::vector<uint32_t> bits;
    std::vector<float> values;
  } cases[] = {{ATTUNE_FLOAT32, {0x3f800001, 0xc0200000, 0x00000001}, {1.00000012f, -2.5f, 1.4012985e-45f}},
               {ATTUNE_FLOAT16, {0x3c01, 0xc100, 0x0001}, {1.0009766f, -2.5f, 5.9604645e-8f}},
               {ATTUNE_BFLOAT16, {0x3f81, 0xc020, 0x7fc0}, {1.0078125f, -2.5f, kNan}},
               {ATTUNE_FLOAT8_E4M3, {0x39, 0xc2, 0x7f}, {1.125f, -2.5f, kNan}},
               {ATTUNE_FLOAT8_E5M2, {0x3d, 0xc1, 0x7c}, {1.25f, -2.5f, kInf}}};
  const Prologue p = make(none());
  for (const auto& c : cases) {
    std::vector<uint32_t> storage(3);
    const auto size = static_cast<size_t>(dtype_size(c.dtype));
    for (size_t i = 0; i < 3; ++i) std::memcpy(reinterpret_cast<char*>(storage.data()) + i * size, &c.bits[i], size);
    const RowView view = row_view(dense(storage, c.dtype, {1, 1, 3}));
    float x[3] = {};
    cpu::prepare_q_row(p, view, 3, 0, 0, 0, 0, x);
    for (size_t i = 0; i < 3; ++i) EXPECT_CLOSE(x[i], c.values[i], 0);
  }
}

TEST(PrologueRows, PairingsAndPassThrough) {
  Rows q;
  std::vector<float> table = odd_table(4, 6);
  for (const int32_t interleaved : {0, 1}) {
    attune_prologue a = none();
    a.rope_cos_sin = dense(table, {4, 6});
    a.rope_offset = 5;
    a.rope_interleaved = interleaved;
    const std::vector<float> x = q_row(make(a), q.view, 1, 2, 0, 3);
    const float* in = q.at(1, 2);
    for (size_t d : {0, 1, 2, 3, 4, 11}) EXPECT_EQ(x[d], in[d]) << "channel outside the rotary range";
    for (size_t j = 0; j < 3; ++j) {
      const size_t u = 5 + (interleaved ? 2 * j : j), w = 5 + (interleaved ? 2 * j + 1 : j + 3);
      const double c = table[3 * 6 + j], s = table[3 * 6 + 3 + j];
      EXPECT_CLOSE(x[u], c * in[u] - s * in[w], 1e-6);
      EXPECT_CLOSE(x[w], c * in[w] + s * in[u], 1e-6);
    }
  }
}

// The same numbers in other strides and float types of parameters give the same bits.
TEST(PrologueRows, StridesDoNotMatter) {
  Rows q;
  std::vector<float> table = odd_table(4, 8), bias = normal(kHeadsQ * kDim, 9);
  for (float& b : bias) b = bf16_to_float(float_to_bf16(b));
  attune_prologue a = none();
  a.rope_cos_sin = dense(table, {4, 8});
  a.q_bias = dense(bias, {kHeadsQ, kDim});
  const std::vector<float> plain = q_row(make(a), q.view, 1, 3, 0, 2);

  std::vector<float> wide(q.data.size() * 3, kNan), transposed(4 * 8);
  std::vector<uint16_t> narrow(bias.size() * 2, 0x7fc0);
  for (size_t i = 0; i < q.data.size(); ++i) wide[3 * i] = q.data[i];
  for (size_t i = 0; i < 32; ++i) transposed[i % 8 * 4 + i / 8] = table[i];
  for (size_t i = 0; i < bias.size(); ++i) narrow[2 * i] = float_to_bf16(bias[i]);
  attune_tensor strided = q.tensor;
  strided.data = wide.data();
  for (int64_t& s : strided.stride) s *= 3;
  a.rope_cos_sin.data = transposed.data();
  a.rope_cos_sin.stride[0] = 1, a.rope_cos_sin.stride[1] = 4;
  a.q_bias = dense(narrow, ATTUNE_BFLOAT16, {kHeadsQ, kDim});
  a.q_bias.stride[0] *= 2, a.q_bias.stride[1] *= 2;
  const std::vector<float> x = q_row(make(a), row_view(strided), 1, 3, 0, 2);
  EXPECT_EQ(std::memcmp(x.data(), plain.data(), kDim * 4), 0);
}

TEST(PrologueRows, PositionsReplaceTheAbsoluteOneAndZeroIsOne) {
  Rows q;
  std::vector<float> table = odd_table(4, 12);
  std::vector<int32_t> positions = {3, 0, -1};
  attune_prologue a = none();
  a.rope_cos_sin = dense(table, {4, 12});
  const Prologue absolute = make(a);
  a.positions = dense(positions, {kTokens});
  const Prologue given = make(a);
  EXPECT_EQ(q_row(given, q.view, 0, 1, 0, 99), q_row(absolute, q.view, 0, 1, 0, 3));
  EXPECT_EQ(q_row(given, q.view, 1, 1, 0, 2), q_row(absolute, q.view, 1, 1, 0, 0));
  // Outside the table: the row as it is, whatever it holds.
  q.data[(2 * kHeadsQ + 1) * kDim + 4] = kInf;
  EXPECT_EQ(std::memcmp(q_row(given, q.view, 2, 1, 0, 2).data(), q.at(2, 1), kDim * 4), 0);
  EXPECT_EQ(std::memcmp(q_row(absolute, q.view, 2, 1, 0, 4).data(), q.at(2, 1), kDim * 4), 0);
}

TEST(PrologueRows, EachSequenceHasItsTable) {
  Rows q;
  std::vector<float> table = odd_table(8, 4);
  std::vector<int32_t> index = {1, 2};
  attune_prologue a = none();
  a.rope_cos_sin = dense(table, {2, 4, 4});
  const Prologue first = make(a);
  a.rope_table_index = dense(index, {kBatch});
  const Prologue indexed = make(a);
  attune_prologue second = none();
  second.rope_cos_sin = dense(table, {4, 4});
  second.rope_cos_sin.data = table.data() + 16;
  EXPECT_EQ(q_row(indexed, q.view, 0, 0, 0, 1), q_row(make(second), q.view, 0, 0, 0, 1));
  EXPECT_NE(q_row(indexed, q.view, 0, 0, 0, 1), q_row(first, q.view, 0, 0, 0, 1));
  EXPECT_EQ(std::memcmp(q_row(indexed, q.view, 0, 0, 1, 1).data(), q.at(0, 0), kDim * 4), 0)
      << "a bad index turns nothing";
}

// Component of each of six pairs.
void expect_sections(const std::vector<int32_t>& section, bool interleaved, const std::vector<int>& component) {
  Rows q;
  std::vector<float> table = odd_table(10, kDim);
  std::vector<int32_t> positions = {2, 5, 9, 0, 0, 0, 4, 77, 1};
  attune_prologue a = none();
  a.rope_cos_sin = dense(table, {10, kDim});
  a.positions = dense(positions, {kTokens, 3});
  for (size_t i = 0; i < 3; ++i) a.mrope_section[i] = section[i];
  a.mrope_interleaved = interleaved ? 1 : 0;
  const Prologue p = make(a);
  for (const int64_t row : {0, 2}) {
    const std::vector<float> x = q_row(p, q.view, row, 0, 0, 3);
    const float* in = q.at(row, 0);
    for (size_t j = 0; j < 6; ++j) {
      const int64_t at = positions[static_cast<size_t>(row * 3 + component[j])];
      const bool inside = at < 10;
      const double c = inside ? table[static_cast<size_t>(at) * 12 + j] : 1,
                   s = inside ? table[static_cast<size_t>(at) * 12 + 6 + j] : 0;
      EXPECT_CLOSE(x[j], c * in[j] - s * in[j + 6], 2e-6);
      EXPECT_CLOSE(x[j + 6], c * in[j + 6] + s * in[j], 2e-6);
    }
  }
}

TEST(PrologueRows, MropeSections) {
  expect_sections({1, 2, 3}, false, {0, 1, 1, 2, 2, 2});
  expect_sections({1, 1, 1}, false, {0, 1, 2, 0, 1, 2});  // repeated
  expect_sections({2, 0, 1}, false, {0, 0, 2, 0, 0, 2});
  expect_sections({2, 2, 2}, true, {0, 1, 2, 0, 1, 2});
  expect_sections({4, 1, 1}, true, {0, 1, 2, 0, 0, 0});
  expect_sections({3, 2, 1}, true, {0, 1, 2, 0, 1, 0});
}

TEST(PrologueRows, MropeWithOnePositionIsPlainRope) {
  Rows q;
  std::vector<float> table = odd_table(4, 8);
  attune_prologue a = none();
  a.rope_cos_sin = dense(table, {4, 8});
  const std::vector<float> plain = q_row(make(a), q.view, 1, 1, 0, 2);
  a.mrope_section[0] = a.mrope_section[1] = 1, a.mrope_section[2] = 2;
  EXPECT_EQ(q_row(make(a), q.view, 1, 1, 0, 2), plain);
}

TEST(PrologueRows, LognGoesByAbsolutePositionAndItsLastEntryServesTheRest) {
  Rows q;
  std::vector<float> logn = {1, 2, 4}, table = odd_table(4, 8);
  std::vector<int32_t> positions = {0, 0, 0};
  attune_prologue a = none();
  a.logn = dense(logn, {3});
  a.rope_cos_sin = dense(table, {4, 8});
  a.positions = dense(positions, {kTokens});
  const Prologue p = make(a);
  const std::vector<float> base = q_row(p, q.view, 1, 1, 0, 0), scaled = q_row(p, q.view, 1, 1, 0, 1),
                           past = q_row(p, q.view, 1, 1, 0, 99);
  std::vector<float> k(kDim);
  cpu::prepare_k_row(p, q.view, kDim, 1, 1, 0, 99, k.data());
  for (size_t d = 0; d < kDim; ++d) {
    EXPECT_EQ(scaled[d], 2 * base[d]);
    EXPECT_EQ(past[d], 4 * base[d]);
    EXPECT_EQ(k[d], base[d]) << "log-n is for q alone";
  }
}

TEST(PrologueRows, Ia3TaskOutOfRangeIsNone) {
  Rows q;
  std::vector<float> ia3 = normal(3 * kHeadsKv * kDim, 21);
  std::vector<int32_t> task = {-1, 3};
  attune_prologue a = none();
  a.ia3_k = dense(ia3, {3, kHeadsKv, kDim});
  std::vector<float> x(kDim);
  cpu::prepare_k_row(make(a), q.view, kDim, 0, 1, 1, 0, x.data());
  for (size_t d = 0; d < kDim; ++d) EXPECT_EQ(x[d], q.at(0, 1)[d] * ia3[kDim + d]) << "no task: task 0";
  a.ia3_task = dense(task, {kBatch});
  for (const int64_t batch : {0, 1}) {
    cpu::prepare_k_row(make(a), q.view, kDim, 0, 1, batch, 0, x.data());
    EXPECT_EQ(std::memcmp(x.data(), q.at(0, 1), kDim * 4), 0);
  }
}

TEST(PrologueRows, BadFieldsAreNamed) {
  std::vector<float> f(4096, 1.0f);
  std::vector<int32_t> i(64, 0);
  using Change = std::function<void(attune_prologue&, PrologueShapes&)>;
  const auto rope = [&](attune_prologue& a) { a.rope_cos_sin = dense(f, {4, 6}); };
  const std::pair<const char*, Change> cases[] = {
      {"prologue.qkv_scale is absent, but q is int8", [&](auto&, auto& s) { s.q_dtype = ATTUNE_INT8; }},
      {"prologue.qkv_scale is absent, but v is int8", [&](auto&, auto& s) { s.v_dtype = ATTUNE_INT8; }},
      {"prologue.qkv_scale is set, but none", [&](auto& a, auto&) { a.qkv_scale = dense(f, {3}); }},
      {"prologue.qkv_scale.shape[0] is 1",
       [&](auto& a, auto& s) { s.k_dtype = ATTUNE_INT8, a.qkv_scale = dense(f, {1}); }},
      {"prologue.q_bias.shape[0]",
       [&](auto& a, auto&) {
         a.q_bias = dense(f, {kHeadsKv, kDim});
       }},
      {"prologue.q_bias.dtype is int32",
       [&](auto& a, auto&) {
         a.q_bias = dense(i, {kHeadsQ, kDim});
       }},
      {"prologue.q_bias.rank is 1", [&](auto& a, auto&) { a.q_bias = dense(f, {kDim}); }},
      {"prologue.q_bias.data is null",
       [&](auto& a, auto&) {
         a.q_bias = dense(f, {kHeadsQ, kDim}), a.q_bias.data = nullptr;
       }},
      {"prologue.q_bias.data is 1 bytes beyond a multiple of 4",
       [&](auto& a, auto&) {
         a.q_bias = dense(f, {kHeadsQ, kDim}), a.q_bias.data = reinterpret_cast<char*>(f.data()) + 1;
       }},
      {"prologue.k_bias is set, but k is absent",
       [&](auto& a, auto& s) {
         s.has_k = false, a.k_bias = dense(f, {kHeadsKv, kDim});
       }},
      {"prologue.v_bias is set, but v is absent",
       [&](auto& a, auto& s) {
         s.has_v = false, a.v_bias = dense(f, {kHeadsKv, kDimV});
       }},
      {"prologue.v_bias.shape[1]",
       [&](auto& a, auto&) {
         a.v_bias = dense(f, {kHeadsKv, kDim});
       }},
      {"prologue.ia3_task is set, but", [&](auto& a, auto&) { a.ia3_task = dense(i, {kBatch}); }},
      {"prologue.ia3_k.shape[0] is 0",
       [&](auto& a, auto&) {
         a.ia3_k = dense(f, {0, kHeadsKv, kDim});
       }},
      {"prologue.ia3_v.shape[0] is 3",
       [&](auto& a, auto&) {
         a.ia3_k = dense(f, {2, kHeadsKv, kDim}), a.ia3_v = dense(f, {3, kHeadsKv, kDimV});
       }},
      {"prologue.ia3_task.shape[0] is 3",
       [&](auto& a, auto&) {
         a.ia3_k = dense(f, {2, kHeadsKv, kDim}), a.ia3_task = dense(i, {3});
       }},
      {"prologue.rope_cos_sin.shape[1] is 5",
       [&](auto& a, auto&) {
         a.rope_cos_sin = dense(f, {4, 5});
       }},
      {"prologue.rope_cos_sin.shape[1] is 14",
       [&](auto& a, auto&) {
         a.rope_cos_sin = dense(f, {4, 14});
       }},
      {"prologue.rope_cos_sin.rank is 1", [&](auto& a, auto&) { a.rope_cos_sin = dense(f, {6}); }},
      {"prologue.rope_cos_sin is set, but q and k", [&](auto& a, auto& s) { rope(a), s.has_q = s.has_k = false; }},
      {"prologue.rope_offset is 7", [&](auto& a, auto&) { rope(a), a.rope_offset = 7; }},
      {"prologue.rope_offset is -1", [&](auto& a, auto&) { rope(a), a.rope_offset = -1; }},
      {"prologue.rope_offset is 9223372036854775807", [&](auto& a, auto&) { rope(a), a.rope_offset = INT64_MAX; }},
      {"prologue.rope_interleaved is 2", [&](auto& a, auto&) { rope(a), a.rope_interleaved = 2; }},
      {"prologue.rope_table_index.shape[0]",
       [&](auto& a, auto&) { rope(a), a.rope_table_index = dense(i, {kBatch + 1}); }},
      {"prologue.positions.shape[0] is 4", [&](auto& a, auto&) { rope(a), a.positions = dense(i, {kTokens + 1}); }},
      {"prologue.positions.shape[1] is 2", [&](auto& a, auto&) { rope(a), a.positions = dense(i, {kTokens, 2}); }},
      {"prologue.positions has 3 components", [&](auto& a, auto&) { rope(a), a.positions = dense(i, {kTokens, 3}); }},
      {"prologue.positions is set, but q and k are not",
       [&](auto& a, auto& s) { rope(a), a.positions = dense(i, {kTokens}), s.same_tokens = false; }},
      {"prologue.mrope_section[1] is -1", [&](auto& a, auto&) { rope(a), a.mrope_section[1] = -1; }},
      {"prologue.mrope_section covers 4 pairs", [&](auto& a, auto&) { rope(a), a.mrope_section[2] = 4; }},
      {"prologue.mrope_section covers 6442450941 pairs",
       [&](auto& a, auto&) { rope(a), a.mrope_section[0] = a.mrope_section[1] = a.mrope_section[2] = INT32_MAX; }},
      {"prologue.mrope_interleaved is 1, but", [&](auto& a, auto&) { rope(a), a.mrope_interleaved = 1; }},
      {"prologue.rope_table_index is set, but", [&](auto& a, auto&) { a.rope_table_index = dense(i, {kBatch}); }},
      {"prologue.positions is set, but", [&](auto& a, auto&) { a.positions = dense(i, {kTokens}); }},
      {"prologue.rope_offset is set, but", [&](auto& a, auto&) { a.rope_offset = 1; }},
      {"prologue.rope_interleaved is set, but", [&](auto& a, auto&) { a.rope_interleaved = 1; }},
      {"prologue.mrope_section is set, but", [&](auto& a, auto&) { a.mrope_section[0] = 1; }},
      {"prologue.mrope_interleaved is set, but", [&](auto& a, auto&) { a.mrope_interleaved = 1; }},
      {"prologue.logn.shape[0] is 0", [&](auto& a, auto&) { a.logn = dense(f, {0}); }},
      {"prologue.logn is set, but q is absent", [&](auto& a, auto& s) { a.logn = dense(f, {4}), s.has_q = false; }},
      {"prologue.append is 2", [&](auto& a, auto&) { a.append = 2; }},
      {"prologue.power_of_two_scales is -1", [&](auto& a, auto&) { a.append = 1, a.power_of_two_scales = -1; }},
      {"prologue.power_of_two_scales is 1, but prologue.append is 0",
       [&](auto& a, auto&) { a.power_of_two_scales = 1; }}};
  for (const auto& [part, change] : cases) {
    attune_prologue a = none();
    PrologueShapes s = shapes();
    change(a, s);
    const std::string message = failure_of([&] { make(a, s); });
    EXPECT_NE(message.find(part), std::string::npos) << "wanted: " << part << "\ngot: " << message;
  }
}

TEST(PrologueRows, PlanningNeedsNoData) {
  std::vector<float> f(64);
  attune_prologue a = none();
  a.q_bias = dense(f, {kHeadsQ, kDim});
  a.q_bias.data = nullptr;
  EXPECT_TRUE(make_prologue(a, shapes(), Data::kOptional).any);
}

}  // namespace
}  // namespace attune::unit
