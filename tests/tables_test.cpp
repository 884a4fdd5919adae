// SPDX-License-Identifier: Apache-2.0
// RoPE frequencies of every style, cosine tables, log-n, ALiBi slopes and T5 buckets against numbers worked out apart
// from the library.
#include "core/tables.h"

#include <functional>
#include <utility>

#include "unit_tensors.h"

namespace attune::unit {
namespace {

attune_rope make_rope(attune_rope_style style, int64_t dim, double theta) {
  attune_rope r;
  EXPECT_EQ(attune_rope_init(&r, sizeof(r)), ATTUNE_OK);
  r.style = style;
  r.dim = dim;
  r.theta = theta;
  return r;
}

std::vector<double> frequencies(const attune_rope& r) {
  std::vector<double> f(static_cast<size_t>(r.dim / 2), -1.0);
  EXPECT_EQ(attune_rope_frequencies(&r, f.data()), ATTUNE_OK) << attune_last_error();
  return f;
}

void expect_frequencies(const attune_rope& r, const std::vector<std::pair<size_t, double>>& expected) {
  const std::vector<double> f = frequencies(r);
  for (const auto& [j, value] : expected) EXPECT_NEAR(f.at(j), value, 1e-13 * value) << "pair " << j;
}

TEST(RopeTables, LinearStylesDivideByTheScale) {
  for (const attune_rope_style style : {ATTUNE_ROPE_LINEAR, ATTUNE_ROPE_GLM2, ATTUNE_ROPE_MROPE}) {
    attune_rope r = make_rope(style, 8, 10000);
    expect_frequencies(r, {{0, 1.0}, {1, 0.1}, {2, 0.01}, {3, 0.001}});
    r.scale = 4;
    expect_frequencies(r, {{0, 0.25}, {1, 0.025}, {2, 0.0025}, {3, 0.00025}});
  }
}

TEST(RopeTables, NoneTurnsNothing) {
  const attune_rope r = make_rope(ATTUNE_ROPE_NONE, 4, 10000);
  EXPECT_EQ(frequencies(r), (std::vector<double>{0, 0}));
  std::vector<float> table(8, kNan);
  ASSERT_EQ(attune_rope_table(&r, 7, 2, table.data()), ATTUNE_OK);
  EXPECT_EQ(table, (std::vector<float>{1, 1, 0, 0, 1, 1, 0, 0}));
}

TEST(RopeTables, Llama3IsAppliedToTheFrequency) {
  attune_rope r = make_rope(ATTUNE_ROPE_LLAMA3, 128, 500000);
  r.scale = 8;
  r.max_position = 8192;
  expect_frequencies(r, {{0, 1.0},
                         {1, 0.8146172338565447},
                         {28, 0.003211445994752591},
                         {29, 0.002166570763503359},
                         {32, 0.0005248461609929547},
                         {35, 9.556212353964683e-05},
                         {36, 7.78465527393245e-05},
                         {63, 3.068925988914511e-07}});
}

TEST(RopeTables, YarnBlendsOverTheRamp) {
  attune_rope r = make_rope(ATTUNE_ROPE_YARN, 64, 10000);
  r.scale = 40;
  r.max_position = 4096;
  expect_frequencies(r, {{0, 1.0},
                         {10, 0.056234132519034905},
                         {11, 0.03900692656714386},
                         {16, 0.0055},
                         {20, 0.0007905694150420945},
                         {23, 3.33380358040831e-05},
                         {24, 2.5e-05},
                         {31, 3.33380358040831e-06}});
  r.extrapolation_factor = 0;  // all interpolated
  expect_frequencies(r, {{0, 1.0 / 40}, {16, 0.01 / 40}});
}

TEST(RopeTables, NtkStylesStretchTheBasePastTheContext) {
  attune_rope r = make_rope(ATTUNE_ROPE_DYNAMIC_NTK, 64, 10000);
  r.scale = 4;
  r.max_position = 200;
  r.seqlen = 200;
  expect_frequencies(r, {{1, 0.7498942093324559}});
  r.seqlen = 300;
  expect_frequencies(r, {{0, 1.0}, {1, 0.7237840223942559}, {31, 4.4450714405444134e-05}});
}

// Exact powers of two are where a rounded log2 would step over.
TEST(RopeTables, QwenAlphaIsExactAtPowersOfTwo) {
  attune_rope r = make_rope(ATTUNE_ROPE_QWEN_DYNAMIC_NTK, 128, 10000);
  r.max_position = 8192;
  const std::pair<int64_t, double> alphas[] = {
      {1, 1},     {8192, 1},  {8193, 3},   {16384, 3},
      {16385, 7}, {32768, 7}, {65536, 15}, {int64_t{8192} << 40, std::ldexp(1, 41) - 1}};
  for (const auto& [seqlen, alpha] : alphas) {
    r.seqlen = seqlen;
    const double theta = 10000 * std::pow(alpha, 128.0 / 126.0);
    expect_frequencies(r, {{1, std::pow(theta, -2.0 / 128)}, {63, std::pow(theta, -126.0 / 128)}});
  }
}

TEST(RopeTables, CosinesOfLargePositionsKeepDoublePrecision) {
  attune_rope r = make_rope(ATTUNE_ROPE_LINEAR, 4, 10000);
  r.mscale = 1.5;
  std::vector<float> table(8, kNan);
  ASSERT_EQ(attune_rope_table(&r, 999999, 2, table.data()), ATTUNE_OK);
  // mscale * cos and sin of 999999 and 9999.99, then of 1000000 and 10000, to 9 digits.
  const double expected[2][4] = {
      {1.5 * std::cos(999999.0), 1.5 * std::cos(9999.99), 1.5 * std::sin(999999.0), 1.5 * std::sin(9999.99)},
      {1.5 * 0.936752127, 1.5 * -0.952155368, 1.5 * -0.349993502, 1.5 * -0.305614389}};
  for (size_t p = 0; p < 2; ++p) {
    for (size_t c = 0; c < 4; ++c) EXPECT_CLOSE(table[4 * p + c], expected[p][c], 2e-7);
  }
}

// Rows are made in blocks by several threads.
TEST(RopeTables, ThreadsMakeTheSameRowsAsOneByOne) {
  const attune_rope r = make_rope(ATTUNE_ROPE_LINEAR, 6, 1000);
  std::vector<float> whole(1000 * 6, kNan), row(6);
  ASSERT_EQ(attune_rope_table(&r, 5, 1000, whole.data()), ATTUNE_OK);
  for (int64_t p = 0; p < 1000; p += 37) {
    ASSERT_EQ(attune_rope_table(&r, 5 + p, 1, row.data()), ATTUNE_OK);
    for (int64_t c = 0; c < 6; ++c) EXPECT_EQ(whole[static_cast<size_t>(6 * p + c)], row[static_cast<size_t>(c)]);
  }
}

TEST(RopeTables, BadFieldsAreNamed) {
  const auto message = [](attune_rope_style style, const std::function<void(attune_rope&)>& change) {
    attune_rope r = make_rope(style, 8, 10000);
    r.max_position = 100;
    change(r);
    double f[4];
    EXPECT_EQ(attune_rope_frequencies(&r, f), ATTUNE_INVALID_ARGUMENT);
    return std::string(attune_last_error());
  };
  const auto has = [](const std::string& s, const char* part) { return s.find(part) != std::string::npos; };
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.struct_size = 8; }), "rope.struct_size is 8"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.style = 8; }), "rope.style is 8"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.dim = 7; }), "rope.dim is 7"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.dim = 0; }), "rope.dim is 0"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.theta = 0; }), "rope.theta"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.theta = kNan; }), "rope.theta"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.scale = -1; }), "rope.scale"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LINEAR, [](auto& r) { r.mscale = kInf; }), "rope.mscale"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_DYNAMIC_NTK, [](auto& r) { r.dim = 2; }), "rope.dim is 2"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_DYNAMIC_NTK, [](auto& r) { r.seqlen = -1; }), "rope.seqlen"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_YARN, [](auto& r) { r.max_position = 0; }), "rope.max_position"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_YARN, [](auto& r) { r.beta_slow = 0; }), "rope.beta_slow"));
  EXPECT_TRUE(has(message(ATTUNE_ROPE_LLAMA3, [](auto& r) { r.high_freq_factor = 1; }), "rope.high_freq_factor"));
  EXPECT_EQ(attune_rope_table(nullptr, 0, 1, nullptr), ATTUNE_INVALID_ARGUMENT);
  const attune_rope good = make_rope(ATTUNE_ROPE_LINEAR, 8, 10000);
  float row[8];
  EXPECT_EQ(attune_rope_table(&good, -1, 1, row), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_rope_table(&good, INT64_MAX, 1, row), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_rope_table(&good, 0, INT64_MAX, row), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_rope_table(&good, 0, 1, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_rope_table(&good, 0, 0, nullptr), ATTUNE_OK);
}

TEST(LogNTables, StartsPastTheContext) {
  std::vector<float> logn(4098, kNan);
  ASSERT_EQ(attune_logn_table(2048, 4098, logn.data()), ATTUNE_OK);
  EXPECT_EQ(logn[0], 1.0f);
  EXPECT_EQ(logn[2048], 1.0f);
  EXPECT_FLOAT_EQ(logn[2049], 1.0001280f);
  EXPECT_FLOAT_EQ(logn[4096], 1.0909411070436639f);
  EXPECT_EQ(attune_logn_table(1, 8, logn.data()), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_logn_table(2, -1, logn.data()), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_logn_table(2, 1, nullptr), ATTUNE_INVALID_ARGUMENT);
}

TEST(AlibiTables, SlopesOfEightTwelveAndOneHead) {
  const auto slopes = [](int64_t n) {
    std::vector<float> s(static_cast<size_t>(n), kNan);
    EXPECT_EQ(attune_alibi_slopes(n, s.data()), ATTUNE_OK);
    return s;
  };
  EXPECT_EQ(slopes(1), (std::vector<float>{0.00390625f}));
  const std::vector<float> eight = {0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f, 0.0078125f, 0.00390625f};
  EXPECT_EQ(slopes(8), eight);
  const std::vector<float> twelve = slopes(12);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(twelve[i], eight[i]);
  const float rest[] = {0.70710678f, 0.35355339f, 0.17677670f, 0.088388346f};
  for (size_t i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(twelve[8 + i], rest[i]);
  EXPECT_EQ(attune_alibi_slopes(-1, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_alibi_slopes(3, nullptr), ATTUNE_INVALID_ARGUMENT);
}

int64_t bucket(int64_t relative, int64_t buckets, int64_t max_distance, bool bidirectional) {
  int64_t b = -1;
  EXPECT_EQ(attune_t5_bucket(relative, buckets, max_distance, bidirectional ? 1 : 0, &b), ATTUNE_OK)
      << attune_last_error();
  return b;
}

struct Buckets {
  int64_t num, max_distance;
  bool bidirectional;
  std::vector<int64_t> first;  // smallest distance of each bucket of one direction, from the powers themselves
};

TEST(T5Tables, BucketsBeginWhereThePowersSay) {
  const Buckets cases[] = {{32, 128, false, {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                             16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113}},
                           {32, 128, true, {0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91}},
                           {8, 20, false, {0, 1, 2, 3, 4, 6, 9, 14}},
                           {20, 1000, true, {0, 1, 2, 3, 4, 5, 15, 42, 121, 347}},
                           {7, 50, false, {0, 1, 2, 3, 7, 13, 25}},
                           {12, 48, false, {0, 1, 2, 3, 4, 5, 6, 9, 12, 17, 24, 34}}};
  for (const Buckets& c : cases) {
    int64_t expected = -1;
    for (int64_t d = 0; d < c.max_distance + 5; ++d) {
      if (expected + 1 < static_cast<int64_t>(c.first.size()) && d >= c.first[static_cast<size_t>(expected + 1)])
        ++expected;
      EXPECT_EQ(bucket(-d, c.num, c.max_distance, c.bidirectional), expected) << "distance " << d << " of " << c.num;
      const int64_t ahead = !c.bidirectional ? 0 : d == 0 ? 0 : c.num / 2 + expected;
      EXPECT_EQ(bucket(d, c.num, c.max_distance, c.bidirectional), ahead) << "distance " << d << " of " << c.num;
    }
  }
}

// Boundaries that are whole numbers: (12 / 9)^10 == (16 / 9)^5, and logarithms fall short of it.
TEST(T5Tables, ExactBoundariesDoNotJitter) {
  const int64_t cases[][4] = {{9, 128, 8, 5},   {9, 128, 16, 6},   {9, 128, 64, 8},   {19, 16, 12, 14},
                              {36, 32, 24, 27}, {54, 64, 36, 36},  {54, 125, 75, 45}, {55, 48, 36, 41},
                              {6, 81, 27, 5},   {5, 2000, 200, 4}, {4, 648, 36, 3}};  // these three even in 80 bits
  for (const auto& c : cases) {
    EXPECT_EQ(bucket(-c[2], c[0], c[1], false), c[3]) << c[0] << " buckets, distance " << c[2];
    EXPECT_LT(bucket(-c[2] + 1, c[0], c[1], false), c[3]) << c[0] << " buckets, distance " << c[2] - 1;
  }
}

TEST(T5Tables, ExtremeDistancesAndArguments) {
  EXPECT_EQ(bucket(INT64_MIN, 32, 128, false), 31);
  EXPECT_EQ(bucket(INT64_MAX, 32, 128, false), 0);
  EXPECT_EQ(bucket(INT64_MIN, 32, 128, true), 15);
  EXPECT_EQ(bucket(INT64_MAX, 32, 128, true), 31);
  EXPECT_EQ(bucket(-(1 << 24) + 1, 1 << 20, 1 << 24, false), (1 << 20) - 1);
  int64_t b;
  EXPECT_EQ(attune_t5_bucket(0, 1, 128, 0, &b), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_t5_bucket(0, 3, 128, 1, &b), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_t5_bucket(0, 32, 16, 0, &b), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_t5_bucket(0, 32, 128, 2, &b), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_t5_bucket(0, 32, 128, 0, nullptr), ATTUNE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attune::unit
