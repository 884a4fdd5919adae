// SPDX-License-Identifier: Apache-2.0
// The kernel tables' softmax_gradient against float64, on every instruction set.
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace attune::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<std::string> all_isas() {
  int count = 0;
  const char* const* names = isa_names(&count);
  return {names, names + count};
}

class GradientKernels : public testing::TestWithParam<std::string> {
 protected:
  const KernelTable& k = *kernels_for(GetParam().c_str());
  std::mt19937 rng{4321};
};

INSTANTIATE_TEST_SUITE_P(Isa, GradientKernels, testing::ValuesIn(all_isas()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

// A tile between rows of NaN, with columns up to the next multiple of 16.
struct Tile {
  int m, n, ld;
  std::vector<float> s, d, capped, lse2, share, delta;

  Tile(int m, int n, std::mt19937& rng) : m(m), n(n), ld((n + 15) / 16 * 16 + 3) {
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    s.assign(static_cast<size_t>(m + 1) * ld, kNan);
    d = capped = s;
    for (int i = 0; i < m; ++i) {
      lse2.push_back(normal(rng) + 5);
      share.push_back(uniform(rng));
      delta.push_back(normal(rng));
      for (int j = 0; j < n; ++j) {
        at(s, i, j) = rng() % 4 == 0 ? -kInf : normal(rng);
        at(d, i, j) = normal(rng);
        at(capped, i, j) = 2.5f * std::tanh(normal(rng));
      }
    }
  }
  float& at(std::vector<float>& x, int i, int j) const { return x[static_cast<size_t>(i) * ld + j]; }
  GradientTile args(float scale2, bool with_cap) {
    return {m,      n,           s.data(),     d.data(),     ld,
            scale2, lse2.data(), share.data(), delta.data(), with_cap ? capped.data() : nullptr,
            2.5f};
  }
};

TEST_P(GradientKernels, MatchFloat64) {
  for (const int n : {1, 5, 15, 16, 17, 33, 64, 128}) {
    for (const bool with_cap : {false, true}) {
      Tile tile(3, n, rng);
      Tile before = tile;
      k.softmax_gradient(tile.args(1.25f, with_cap));
      for (int i = 0; i < tile.m; ++i) {
        for (int j = 0; j < n; ++j) {
          const double score = before.at(before.s, i, j);
          const double a = std::exp2(score * 1.25 - before.lse2[i]);
          const double dp = before.share[i] * static_cast<double>(before.at(before.d, i, j));
          const double x = before.at(before.capped, i, j) / 2.5;
          const double p = score == -kInf ? 0.0 : a * before.share[i];
          const double gradient = score == -kInf ? 0.0 : a * (dp - before.delta[i]) * (with_cap ? 1 - x * x : 1.0);
          // The exponent is rounded, the power, and what is made of it.
          const double error =
              4e-7 + (score == -kInf ? 0 : 6e-8 * (1.25 * std::fabs(score) + std::fabs(before.lse2[i])));
          EXPECT_LE(std::fabs(tile.at(tile.s, i, j) - p), error * p) << n << " " << i << " " << j;
          EXPECT_LE(std::fabs(tile.at(tile.d, i, j) - gradient),
                    (error + 6e-7) * a * (std::fabs(dp) + std::fabs(before.delta[i])))
              << n << " " << i << " " << j;
        }
        for (int j = n; j < (n + 15) / 16 * 16; ++j) {
          EXPECT_EQ(tile.at(tile.s, i, j), 0.0f) << n << " " << j;
          EXPECT_EQ(tile.at(tile.d, i, j), 0.0f) << n << " " << j;
        }
        for (int j = (n + 15) / 16 * 16; j < tile.ld; ++j) EXPECT_TRUE(std::isnan(tile.at(tile.s, i, j)));
      }
      for (int j = 0; j < tile.ld; ++j) EXPECT_TRUE(std::isnan(tile.at(tile.s, tile.m, j)));
    }
  }
}

// What is hidden gives 0 whatever is there; a NaN that is seen stays.
TEST_P(GradientKernels, HiddenIsZeroAndNanSpreads) {
  Tile tile(4, 20, rng);
  for (int i = 0; i < tile.m; ++i) {
    for (int j = 0; j < tile.n; ++j) tile.at(tile.s, i, j) = 1.0f;
  }
  tile.at(tile.s, 0, 3) = -kInf;
  tile.at(tile.d, 0, 3) = tile.at(tile.capped, 0, 3) = kNan;
  tile.lse2[1] = -kInf;  // sees nothing
  tile.delta[1] = kNan;
  tile.at(tile.s, 1, 2) = kNan;
  tile.at(tile.s, 2, 17) = kNan;
  tile.lse2[3] = kNan;
  tile.at(tile.s, 3, 4) = -kInf;
  k.softmax_gradient(tile.args(1.0f, true));
  EXPECT_EQ(tile.at(tile.s, 0, 3), 0.0f);
  EXPECT_EQ(tile.at(tile.d, 0, 3), 0.0f);
  for (int j = 0; j < tile.n; ++j) {
    EXPECT_EQ(tile.at(tile.s, 1, j), 0.0f);
    EXPECT_EQ(tile.at(tile.d, 1, j), 0.0f);
    EXPECT_EQ(std::isnan(tile.at(tile.s, 2, j)), j == 17);
    EXPECT_EQ(std::isnan(tile.at(tile.d, 2, j)), j == 17);
    EXPECT_EQ(std::isnan(tile.at(tile.s, 3, j)), j != 4);
    EXPECT_EQ(std::isnan(tile.at(tile.d, 3, j)), j != 4);
  }
}

}  // namespace
}  // namespace attune::cpu
