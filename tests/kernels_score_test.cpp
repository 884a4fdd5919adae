// SPDX-License-Identifier: Apache-2.0
// The kernel tables' work on scores (softmax, softcap, scales, ALiBi, the scan for values that are not finite) and the
// choice of a table.
#include <gtest/gtest.h>

#include <bit>
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

float widen(bf16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
float widen(float x) { return x; }
bf16_t narrow(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  return static_cast<bf16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

std::vector<std::string> all_isas() {
  int count = 0;
  const char* const* names = isa_names(&count);
  return {names, names + count};
}

class ScoreKernels : public testing::TestWithParam<std::string> {
 protected:
  const KernelTable& k = *kernels_for(GetParam().c_str());
  std::mt19937 rng{54321};
};

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Isa, ScoreKernels, testing::ValuesIn(all_isas()), test_name);

// A tile with its state; P is float or bf16_t.
template <typename P>
struct Tile {
  int m, n, lds, dv, ldo, ldp;
  std::vector<float> s, row_max, row_sum, o;
  std::vector<P> p;

  Tile(int m, int n, int dv, std::mt19937& rng)
      : m(m),
        n(n),
        lds(n + 3),
        dv(dv),
        ldo(dv + 1),
        ldp((n + 1) / 2 * 2 + 2),
        s(static_cast<size_t>(m - 1) * lds + n, kNan),
        row_max(m, -kInf),
        row_sum(m, 0.0f),
        o(static_cast<size_t>(m - 1) * ldo + dv, kNan),
        p(static_cast<size_t>(m) * ldp, P{77}) {
    for (int i = 0; i < m; ++i) std::fill_n(o.begin() + static_cast<size_t>(i) * ldo, dv, 0.0f);
    fill(rng);
  }
  void fill(std::mt19937& rng) {
    std::normal_distribution<float> normal(0.0f, 4.0f);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) at(i, j) = rng() % 5 == 0 ? -kInf : normal(rng);
    }
  }
  float& at(int i, int j) { return s[static_cast<size_t>(i) * lds + j]; }
  P& prob(int i, int j) { return p[static_cast<size_t>(i) * ldp + j]; }
  float& out(int i, int c) { return o[static_cast<size_t>(i) * ldo + c]; }
  void run(const KernelTable& k, float scale2, const float* v_scale = nullptr) {
    k.softmax({.m = m,
               .n = n,
               .s = s.data(),
               .lds = lds,
               .scale2 = scale2,
               .v_scale = v_scale,
               .row_max = row_max.data(),
               .row_sum = row_sum.data(),
               .o = o.data(),
               .ldo = ldo,
               .dv = dv,
               .p = p.data(),
               .ldp = ldp,
               .p_type = sizeof(P) == 4 ? TileType::kF32 : TileType::kBF16});
  }
};

// Two tiles, one after the other, against the definition.
template <typename P>
void check_softmax(const KernelTable& k, std::mt19937& rng, int m, int n, float scale2, bool scaled_v) {
  constexpr double kRelative = sizeof(P) == 4 ? 3e-7 : 0.00392;  // of p: about 2 ulp of fp32, half an ulp of bf16
  const int dv = n % 37 + 1;
  Tile<P> t(m, n, dv, rng);
  std::vector<float> v_scale(n);
  std::vector<double> max(m, -kInf), sum(m, 0.0), o(static_cast<size_t>(m) * dv, 0.0);
  for (int pass = 0; pass < 3; ++pass) {
    t.fill(rng);
    if (pass == 0) {
      for (int j = 0; j < n; ++j) t.at(m - 1, j) = -kInf;  // a row that has seen nothing yet
    }
    for (float& v : v_scale) v = static_cast<float>(rng() % 1000) * 0.01f;
    const Tile<P> before = t;
    t.run(k, scale2, scaled_v ? v_scale.data() : nullptr);
    for (int i = 0; i < m; ++i) {
      double new_max = max[i];
      const auto x = [&](int j) {
        const float s = before.s[static_cast<size_t>(i) * before.lds + j];
        return s == -kInf ? -static_cast<double>(kInf) : static_cast<double>(s) * scale2;
      };
      for (int j = 0; j < n; ++j) new_max = std::max(new_max, x(j));
      ASSERT_TRUE(t.row_max[i] == new_max || std::fabs(t.row_max[i] - new_max) <= 1e-6 * std::fabs(new_max)) << i;
      const double rescale = new_max == max[i] ? 1.0 : std::exp2(max[i] - new_max);
      const bool moved = new_max != max[i] && max[i] != -kInf;
      const double rescale_error = 1e-5 + (moved ? (std::fabs(max[i]) + std::fabs(new_max)) * 0x1p-23 : 0.0);
      double added = 0.0, rounded = 0.0;
      for (int j = 0; j < n; ++j) {
        const double e = new_max == -kInf ? 0.0 : std::exp2(x(j) - new_max);
        // The exponent's own rounding: |x - max| half units of it.
        const double slack = kRelative + (std::fabs(x(j)) + std::fabs(new_max)) * 0x1p-24;
        const double expected = scaled_v ? e * v_scale[j] : e;
        const double got = widen(t.prob(i, j));
        if (e == 0.0) {
          ASSERT_EQ(got, 0.0) << i << "," << j;
        } else {
          ASSERT_TRUE(std::fabs(got - expected) <= slack * expected + 1.2e-38 * (1.0 + v_scale[j]))
              << m << "x" << n << " " << got << " " << expected;
        }
        added += e;
        rounded += got;
      }
      sum[i] = sum[i] * rescale + added;
      max[i] = new_max;
      ASSERT_TRUE(std::fabs(t.row_sum[i] - sum[i]) <= (kRelative + rescale_error) * sum[i])
          << t.row_sum[i] << " " << sum[i];
      // The sum is that of p as it was stored.
      if (pass == 0 && !scaled_v) {
        ASSERT_TRUE(std::fabs(t.row_sum[i] - rounded) <= 1e-6 * (rounded + 1.0)) << t.row_sum[i];
      }
      if (sizeof(P) == 2 && n % 2 != 0) {
        ASSERT_EQ(widen(t.prob(i, n)), 0.0f);
      }
      ASSERT_EQ(t.prob(i, (n + 1) / 2 * 2), P{77});
      for (int c = 0; c < dv; ++c) {
        const double expected = o[static_cast<size_t>(i) * dv + c] * rescale;
        ASSERT_TRUE(std::fabs(t.out(i, c) - expected) <= rescale_error * std::fabs(expected))
            << t.out(i, c) << " " << expected;
        if (rescale == 1.0) {
          ASSERT_EQ(t.out(i, c), before.o[static_cast<size_t>(i) * t.ldo + c]);
        }
        t.out(i, c) += static_cast<float>(c + i + 1);
        o[static_cast<size_t>(i) * dv + c] = t.out(i, c);
      }
      sum[i] = t.row_sum[i];
    }
  }
}

TEST_P(ScoreKernels, Softmax) {
  for (int m : {1, 3, 4, 5, 9}) {
    for (int n = 1; n <= 70; ++n) {
      check_softmax<float>(k, rng, m, n, 0.7f, n % 3 == 0);
      check_softmax<bf16_t>(k, rng, m, n, 0.7f, n % 3 == 0);
    }
  }
  for (float scale2 : {1.0f, 0.0f, -0.5f, 20.0f}) {
    check_softmax<float>(k, rng, 6, 257, scale2, false);
    check_softmax<bf16_t>(k, rng, 6, 257, scale2, true);
  }
}

TEST_P(ScoreKernels, SoftmaxInPlace) {
  Tile<float> apart(5, 67, 16, rng);
  Tile<float> in_place = apart;
  apart.run(k, 0.3f);
  k.softmax({.m = in_place.m,
             .n = in_place.n,
             .s = in_place.s.data(),
             .lds = in_place.lds,
             .scale2 = 0.3f,
             .v_scale = nullptr,
             .row_max = in_place.row_max.data(),
             .row_sum = in_place.row_sum.data(),
             .o = in_place.o.data(),
             .ldo = in_place.ldo,
             .dv = in_place.dv,
             .p = in_place.s.data(),
             .ldp = in_place.lds,
             .p_type = TileType::kF32});
  for (int i = 0; i < apart.m; ++i) {
    for (int j = 0; j < apart.n; ++j) ASSERT_EQ(apart.prob(i, j), in_place.at(i, j));
  }
}

template <typename P>
void check_softmax_alone(const KernelTable& k, std::mt19937& rng, int n) {
  Tile<P> all(7, n, 24, rng);
  std::fill(all.o.begin(), all.o.end(), 1.25f);
  std::fill(all.row_max.begin(), all.row_max.end(), 0.5f);
  std::fill(all.row_sum.begin(), all.row_sum.end(), 3.0f);
  for (int i = 0; i < 7; ++i) {
    Tile<P> one(1, n, 24, rng);
    for (int j = 0; j < n; ++j) one.at(0, j) = all.at(i, j);
    Tile<P> whole = all;
    whole.run(k, 0.6f);
    std::fill(one.o.begin(), one.o.end(), 1.25f);
    one.row_max[0] = 0.5f;
    one.row_sum[0] = 3.0f;
    one.run(k, 0.6f);
    ASSERT_EQ(one.row_max[0], whole.row_max[i]);
    ASSERT_EQ(one.row_sum[0], whole.row_sum[i]);
    for (int j = 0; j < n; ++j) ASSERT_EQ(one.prob(0, j), whole.prob(i, j));
    for (int c = 0; c < 24; ++c) ASSERT_EQ(one.out(0, c), whole.out(i, c));
  }
}

TEST_P(ScoreKernels, SoftmaxOfARowDoesNotDependOnTheOthers) {
  for (int n : {1, 5, 16, 33, 64, 100}) {
    check_softmax_alone<float>(k, rng, n);
    check_softmax_alone<bf16_t>(k, rng, n);
  }
}

template <typename P>
void check_softmax_nan(const KernelTable& k, std::mt19937& rng, int n, int where, float other, uint32_t nan_bits) {
  Tile<P> t(3, n, 20, rng);
  for (int j = 0; j < n; ++j) t.at(1, j) = j == where ? std::bit_cast<float>(nan_bits) : other;
  t.run(k, 0.9f);
  ASSERT_TRUE(std::isnan(widen(t.prob(1, where))))
      << n << " " << where << " " << other << " " << widen(t.prob(1, where));
  ASSERT_TRUE(std::isnan(t.row_sum[1]));
  for (int i : {0, 2}) {
    ASSERT_FALSE(std::isnan(t.row_sum[i]));
    for (int j = 0; j < n; ++j) ASSERT_FALSE(std::isnan(widen(t.prob(i, j))));
  }
}

TEST_P(ScoreKernels, SoftmaxKeepsNan) {
  for (int n : {1, 2, 15, 16, 17, 31, 33, 64, 70}) {
    for (int where : {0, n / 2, n - 1}) {
      for (float other : {1.0f, -kInf}) {
        for (uint32_t nan_bits : {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7fc00001u}) {
          check_softmax_nan<float>(k, rng, n, where, other, nan_bits);
          check_softmax_nan<bf16_t>(k, rng, n, where, other, nan_bits);
        }
      }
    }
  }
}

TEST_P(ScoreKernels, Exp2) {
  // A max of 0 makes p = exp2(s).
  constexpr int kColumns = 1024;
  for (int sweep = 0; sweep < 140; ++sweep) {
    Tile<float> t(1, kColumns, 1, rng);
    Tile<bf16_t> u(1, kColumns, 1, rng);
    for (int j = 0; j < kColumns; ++j) t.at(0, j) = -static_cast<float>(sweep) - static_cast<float>(j) / kColumns;
    if (sweep == 139) t.at(0, 5) = -1e30f;
    u.s = t.s;
    t.row_max[0] = u.row_max[0] = 0.0f;
    t.run(k, 1.0f);
    u.run(k, 1.0f);
    for (int j = 0; j < kColumns; ++j) {
      const double exact = std::exp2(static_cast<double>(t.s[j]));
      ASSERT_TRUE(std::fabs(t.prob(0, j) - exact) <= 2.2e-7 * exact + (exact < 0x1p-126 ? 0x1p-126 : 0.0)) << t.s[j];
      ASSERT_TRUE(std::fabs(widen(u.prob(0, j)) - exact) <= 0.00392 * exact + (exact < 0x1p-126 ? 0x1p-126 : 0.0))
          << t.s[j];
    }
    if (sweep == 0) {
      ASSERT_EQ(t.prob(0, 0), 1.0f);
      ASSERT_EQ(widen(u.prob(0, 0)), 1.0f);
    }
  }
}

// --- Other work on scores

std::vector<float> random_scores(std::mt19937& rng, int m, int n, int lds, float spread) {
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> s(static_cast<size_t>(m - 1) * lds + n, kNan);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) s[static_cast<size_t>(i) * lds + j] = normal(rng);
  }
  return s;
}

TEST_P(ScoreKernels, Softcap) {
  for (int n = 1; n <= 70; ++n) {
    for (float spread : {1e-20f, 0.01f, 1.0f, 30.0f, 1e6f, 1e37f}) {
      const int lds = n + 2;
      std::vector<float> s = random_scores(rng, 3, n, lds, spread);
      s[0] = -kInf;
      s[lds] = kNan;
      const std::vector<float> before = s;
      k.softcap(3, n, s.data(), lds, 0.3f, 30.0f);
      for (int i = 0; i < 3; ++i) {
        for (int j = 0; j < n; ++j) {
          const float x = before[i * lds + j], got = s[i * lds + j];
          const double expected = 30.0 * std::tanh(static_cast<double>(x) * 0.3 / 30.0);
          if (std::isnan(x)) {
            ASSERT_TRUE(std::isnan(got));
          } else {
            ASSERT_TRUE(std::fabs(got - expected) <= 6e-7 * std::fabs(expected)) << x << " " << got << " " << expected;
          }
        }
        for (int j = n; j < lds && i < 2; ++j) ASSERT_TRUE(std::isnan(s[i * lds + j]));
      }
    }
  }
}

TEST_P(ScoreKernels, SoftcapIsAccurateEverywhere) {
  std::vector<float> x, s;
  for (float v = 1e-6f; v < 12.0f; v *= 1.0007f) x.push_back(v), x.push_back(-v);
  s = x;
  k.softcap(1, static_cast<int>(s.size()), s.data(), 0, 1.0f, 1.0f);
  for (size_t j = 0; j < x.size(); ++j) {
    const double expected = std::tanh(static_cast<double>(x[j]));
    ASSERT_TRUE(std::fabs(s[j] - expected) <= 2.5e-7 * std::fabs(expected)) << x[j] << " " << s[j];
    ASSERT_LE(std::fabs(s[j]), 1.0f);
  }
}

TEST_P(ScoreKernels, ScaleColumns) {
  for (int n = 1; n <= 70; ++n) {
    const int lds = n + 1;
    const std::vector<float> before = random_scores(rng, 3, n, lds, 1.0f);
    const std::vector<float> factor = random_scores(rng, 1, n, n, 1.0f);
    std::vector<float> s = before, t = before;
    k.scale_columns(3, n, s.data(), lds, 2.5f, nullptr);
    k.scale_columns(3, n, t.data(), lds, 2.5f, factor.data());
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < n; ++j) {
        ASSERT_EQ(s[i * lds + j], before[i * lds + j] * 2.5f);
        ASSERT_EQ(t[i * lds + j], before[i * lds + j] * (factor[j] * 2.5f));
      }
      if (i < 2) {
        ASSERT_TRUE(std::isnan(s[i * lds + n]) && std::isnan(t[i * lds + n]));
      }
    }
  }
}

TEST_P(ScoreKernels, ReluSum) {
  for (int n = 1; n <= 140; n += n < 20 ? 1 : 7) {
    for (int m : {1, 3, 64}) {
      const int lds = (n + 15) / 16 * 16;
      std::vector<float> s = random_scores(rng, m, n, lds, 1.0f);
      s.resize(static_cast<size_t>(m) * lds, kNan);  // whole vectors are read
      const std::vector<float> w = random_scores(rng, 1, m, m, 1.0f);
      s[0] = kNan;
      std::vector<float> out(lds, 2.0f), added(lds, 2.0f);
      k.relu_sum(m, n, s.data(), lds, w.data(), out.data(), false);
      k.relu_sum(m, n, s.data(), lds, w.data(), added.data(), true);
      ASSERT_TRUE(std::isnan(out[0]) && std::isnan(added[0]));
      for (int j = 1; j < n; ++j) {
        double expected = 0, bound = 0;
        for (int i = 0; i < m; ++i) {
          const double x = std::max(static_cast<double>(s[i * lds + j]), 0.0);
          expected += w[i] * x;
          bound += std::fabs(w[i]) * x;
        }
        bound = (bound + 2) * 1e-6;
        ASSERT_TRUE(std::fabs(out[j] - expected) <= bound) << m << " " << n << " " << j;
        ASSERT_TRUE(std::fabs(added[j] - (expected + 2)) <= bound) << m << " " << n << " " << j;
      }
      // The sum of a column has one order, wherever the column stands.
      std::vector<float> alone(16);
      for (int i = 0; i < m; ++i) s[i * lds] = s[i * lds + n - 1];
      k.relu_sum(m, 1, s.data(), lds, w.data(), alone.data(), false);
      if (n > 1) {
        ASSERT_EQ(alone[0], out[n - 1]);
      }
    }
  }
}

TEST_P(ScoreKernels, AddAlibi) {
  const float slope[3] = {0.5f, 0.0039f, 1.0f}, position[3] = {130000.0f, 64.0f, 0.0f};
  for (int n = 1; n <= 70; ++n) {
    const int lds = n + 1;
    const std::vector<float> before = random_scores(rng, 3, n, lds, 1.0f);
    std::vector<float> s = before;
    k.add_alibi(3, n, s.data(), lds, slope, position, 64.0f);
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < n; ++j) {
        const double bias = static_cast<double>(slope[i]) * (64.0 + j - position[i]);
        const double expected = before[i * lds + j] + bias;
        ASSERT_TRUE(std::fabs(s[i * lds + j] - expected) <= 2.4e-7 * (std::fabs(expected) + std::fabs(bias)));
      }
      if (i < 2) {
        ASSERT_TRUE(std::isnan(s[i * lds + n]));
      }
    }
  }
}

TEST_P(ScoreKernels, AnyNonfinite) {
  for (int n = 0; n <= 140; ++n) {
    std::vector<float> x(n, -std::numeric_limits<float>::max());
    std::vector<bf16_t> y(n, 0xff7f);  // the most negative finite one
    ASSERT_FALSE(k.any_nonfinite_f32(x.data(), n)) << n;
    ASSERT_FALSE(k.any_nonfinite_bf16(y.data(), n)) << n;
    for (int i = 0; i < n; ++i) {
      for (float bad : {kNan, -kNan, kInf, -kInf}) {
        const float x_before = x[i];
        const bf16_t y_before = y[i];
        x[i] = bad;
        y[i] = narrow(bad);
        ASSERT_TRUE(k.any_nonfinite_f32(x.data(), n)) << n << " " << i;
        ASSERT_TRUE(k.any_nonfinite_bf16(y.data(), n)) << n << " " << i;
        x[i] = x_before;
        y[i] = y_before;
      }
    }
  }
}

// --- Choice of a table

TEST(KernelChoice, NamesFindTheirTables) {
  for (const std::string& name : all_isas()) {
    const KernelTable* table = kernels_for(name.c_str());
    ASSERT_NE(table, nullptr);
    EXPECT_EQ(table->isa, name);
    ASSERT_TRUE(force_isa(name.c_str()));
    EXPECT_EQ(&kernels(), table);
  }
  EXPECT_TRUE(force_isa(nullptr));
}

TEST(KernelChoice, UnknownNamesChangeNothing) {
  const KernelTable* before = &kernels();
  EXPECT_EQ(kernels_for("no such isa"), nullptr);
  EXPECT_EQ(kernels_for(nullptr), nullptr);
  EXPECT_FALSE(force_isa("no such isa"));
  EXPECT_EQ(&kernels(), before);
}

}  // namespace
}  // namespace attune::cpu
