// SPDX-License-Identifier: Apache-2.0
#include "core/tables.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <numeric>

#include "core/status.h"

namespace attune {
namespace {

constexpr int64_t kMaxRopeDim = 1 << 16;
constexpr int64_t kMaxBuckets = 1 << 20;
constexpr int64_t kMaxDistance = 1 << 24;

void require_positive(const char* name, double value) {
  require(std::isfinite(value) && value > 0, name, " is ", value, "; it must be finite and > 0");
}

void require_finite(const char* name, double value) {
  require(std::isfinite(value), name, " is ", value, "; it must be finite");
}

// Qwen: 2^ceil(log2(L / max_position) + 1) - 1 for L > max_position. Doubling is exact where logarithms round.
double qwen_alpha(int64_t seqlen, int64_t max_position) {
  int doublings = 0;
  for (auto reach = static_cast<unsigned __int128>(max_position); reach < static_cast<unsigned __int128>(seqlen);
       reach *= 2)
    ++doublings;
  return std::ldexp(1.0, doublings + 1) - 1.0;
}

double ntk_theta(const attune_rope& r) {
  if (r.seqlen <= r.max_position) return r.theta;
  const double width = static_cast<double>(r.dim);
  double factor;
  if (r.style == ATTUNE_ROPE_DYNAMIC_NTK) {
    factor = r.scale * static_cast<double>(r.seqlen) / static_cast<double>(r.max_position) - (r.scale - 1.0);
  } else {
    factor = qwen_alpha(r.seqlen, r.max_position);
  }
  return r.theta * std::pow(factor, width / (width - 2.0));
}

// YaRN blends interpolated and original frequencies over a ramp of pairs.
struct YarnRamp {
  double low, high;
  explicit YarnRamp(const attune_rope& r) {
    const double width = static_cast<double>(r.dim);
    auto pair_of = [&](double rotations) {
      return width * std::log(static_cast<double>(r.max_position) / (2.0 * std::numbers::pi * rotations)) /
             (2.0 * std::log(r.theta));
    };
    low = std::max(std::floor(pair_of(r.beta_fast)), 0.0);
    high = std::min(std::ceil(pair_of(r.beta_slow)), width - 1.0);
    if (low == high) high += 0.001;
  }
  double operator()(int64_t pair) const {
    return std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
  }
};

double llama3_frequency(const attune_rope& r, double f) {
  const double context = static_cast<double>(r.max_position);
  const double wavelength = 2.0 * std::numbers::pi / f;
  if (wavelength < context / r.high_freq_factor) return f;
  if (wavelength > context / r.low_freq_factor) return f / r.scale;
  const double t = (context / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
  return (1.0 - t) * f / r.scale + t * f;
}

// The root-th root of x if x is a perfect power, else 0.
int64_t exact_root(int64_t x, int64_t root) {
  if (x <= 1 || root == 1) return x;
  if (root >= 63) return 0;
  const auto guess =
      static_cast<int64_t>(std::llround(std::pow(static_cast<double>(x), 1.0 / static_cast<double>(root))));
  for (int64_t c = std::max<int64_t>(guess - 1, 1); c <= guess + 1; ++c) {
    unsigned __int128 power = 1;
    for (int64_t i = 0; i < root && power <= static_cast<unsigned __int128>(x); ++i)
      power *= static_cast<unsigned __int128>(c);
    if (power == static_cast<unsigned __int128>(x)) return c;
  }
  return 0;
}

// Whether x^a == y^b for coprime a, b >= 1: then x = c^b and y = c^a.
bool equal_powers(int64_t x, int64_t a, int64_t y, int64_t b) {
  const int64_t c = exact_root(x, b);
  return c != 0 && exact_root(y, a) == c;
}

// floor(steps * ln(d / m) / ln(max / m)) for m <= d < max. At a boundary of buckets the quotient is a whole number, and
// logarithms may round to either side of it. There the powers themselves are compared.
int64_t log_steps(int64_t d, int64_t m, int64_t max, int64_t steps) {
  const auto base = static_cast<long double>(m);
  const long double x = static_cast<long double>(steps) * std::log(static_cast<long double>(d) / base) /
                        std::log(static_cast<long double>(max) / base);
  const auto nearest = static_cast<int64_t>(std::llround(x));
  if (nearest >= 1 && std::fabs(x - static_cast<long double>(nearest)) < 1e-9L * static_cast<long double>(steps)) {
    // (d / m)^steps == (max / m)^nearest, in lowest terms.
    const int64_t g = std::gcd(steps, nearest), of_d = std::gcd(d, m), of_max = std::gcd(max, m);
    if (equal_powers(d / of_d, steps / g, max / of_max, nearest / g) &&
        equal_powers(m / of_d, steps / g, m / of_max, nearest / g)) {
      return nearest;
    }
  }
  return static_cast<int64_t>(std::floor(x));
}

}  // namespace

void check_rope(const attune_rope& r) {
  require(r.style >= ATTUNE_ROPE_NONE && r.style <= ATTUNE_ROPE_MROPE, "rope.style is ", r.style,
          "; it must be one of attune_rope_style (0..", static_cast<int>(ATTUNE_ROPE_MROPE), ")");
  require(r.dim >= 2 && r.dim % 2 == 0 && r.dim <= kMaxRopeDim, "rope.dim is ", r.dim, "; it must be even and 2..",
          kMaxRopeDim);
  require_finite("rope.mscale", r.mscale);
  if (r.style == ATTUNE_ROPE_NONE) return;
  require_positive("rope.theta", r.theta);
  require_positive("rope.scale", r.scale);
  const bool ntk = r.style == ATTUNE_ROPE_DYNAMIC_NTK || r.style == ATTUNE_ROPE_QWEN_DYNAMIC_NTK;
  if (ntk || r.style == ATTUNE_ROPE_YARN || r.style == ATTUNE_ROPE_LLAMA3) {
    require(r.max_position >= 1, "rope.max_position is ", r.max_position,
            "; this style needs the original context length, >= 1");
  }
  if (ntk) {
    require(r.seqlen >= 0, "rope.seqlen is ", r.seqlen, "; it must be >= 0");
    require(r.dim >= 4, "rope.dim is ", r.dim, "; NTK styles need at least 4");
  }
  if (r.style == ATTUNE_ROPE_YARN) {
    require(r.theta != 1.0, "rope.theta is 1; YaRN needs another base");
    require_positive("rope.beta_fast", r.beta_fast);
    require_positive("rope.beta_slow", r.beta_slow);
    require_finite("rope.extrapolation_factor", r.extrapolation_factor);
  }
  if (r.style == ATTUNE_ROPE_LLAMA3) {
    require_positive("rope.low_freq_factor", r.low_freq_factor);
    require_positive("rope.high_freq_factor", r.high_freq_factor);
    require(r.high_freq_factor != r.low_freq_factor, "rope.high_freq_factor and rope.low_freq_factor are both ",
            r.low_freq_factor, "; they must differ");
  }
}

void rope_frequencies(const attune_rope& r, double* frequencies) {
  const int64_t pairs = r.dim / 2;
  if (r.style == ATTUNE_ROPE_NONE) {
    std::fill(frequencies, frequencies + pairs, 0.0);
    return;
  }
  const bool ntk = r.style == ATTUNE_ROPE_DYNAMIC_NTK || r.style == ATTUNE_ROPE_QWEN_DYNAMIC_NTK;
  const double theta = ntk ? ntk_theta(r) : r.theta;
  for (int64_t j = 0; j < pairs; ++j) {
    frequencies[j] = std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(r.dim));
  }
  if (ntk) return;
  if (r.style == ATTUNE_ROPE_YARN) {
    const YarnRamp ramp(r);
    for (int64_t j = 0; j < pairs; ++j) {
      const double f = frequencies[j], original = (1.0 - ramp(j)) * r.extrapolation_factor;
      frequencies[j] = f / r.scale * (1.0 - original) + f * original;
    }
    return;
  }
  for (int64_t j = 0; j < pairs; ++j) {
    frequencies[j] = r.style == ATTUNE_ROPE_LLAMA3 ? llama3_frequency(r, frequencies[j]) : frequencies[j] / r.scale;
  }
}

void rope_rows(const attune_rope& r, const double* frequencies, int64_t first_position, int64_t num_positions,
               float* cos_sin) {
  const int64_t pairs = r.dim / 2;
  for (int64_t i = 0; i < num_positions; ++i) {
    float* row = cos_sin + i * r.dim;
    const double position = static_cast<double>(first_position + i);
    for (int64_t j = 0; j < pairs; ++j) {
      const double angle = position * frequencies[j];
      row[j] = static_cast<float>(r.mscale * std::cos(angle));
      row[pairs + j] = static_cast<float>(r.mscale * std::sin(angle));
    }
  }
}

void logn_table(int64_t max_position, int64_t num_positions, float* logn) {
  const double whole = std::log(static_cast<double>(max_position));
  for (int64_t p = 0; p < num_positions; ++p) {
    logn[p] = p > max_position ? static_cast<float>(std::log(static_cast<double>(p) + 1.0) / whole) : 1.0f;
  }
}

void alibi_slopes(int64_t num_heads, float* slopes) {
  if (num_heads <= 0) return;
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(num_heads)));
  for (int64_t h = 0; h < num_heads; ++h) {
    // The slopes of `power` heads, then every other slope of 2 * power heads.
    const double exponent = h < power ? static_cast<double>(h + 1) : static_cast<double>(h - power) + 0.5;
    slopes[h] = static_cast<float>(std::exp2(-8.0 * exponent / static_cast<double>(power)));
  }
}

void check_t5(int64_t num_buckets, int64_t max_distance, bool bidirectional) {
  const int64_t least = bidirectional ? 4 : 2;
  require(num_buckets >= least && num_buckets <= kMaxBuckets, "num_buckets is ", num_buckets, "; it must be ", least,
          "..", kMaxBuckets);
  const int64_t exact = num_buckets / least;
  require(max_distance > exact && max_distance <= kMaxDistance, "max_distance is ", max_distance, "; it must be ",
          exact + 1, "..", kMaxDistance, " (more than the exact buckets)");
}

int64_t t5_bucket(int64_t relative_position, int64_t num_buckets, int64_t max_distance, bool bidirectional) {
  const int64_t buckets = bidirectional ? num_buckets / 2 : num_buckets;
  const int64_t offset = bidirectional && relative_position > 0 ? buckets : 0;
  if (!bidirectional && relative_position > 0) return 0;
  const uint64_t distance =
      relative_position < 0 ? 0 - static_cast<uint64_t>(relative_position) : static_cast<uint64_t>(relative_position);
  const int64_t exact = buckets / 2;
  if (distance < static_cast<uint64_t>(exact)) return offset + static_cast<int64_t>(distance);
  if (distance >= static_cast<uint64_t>(max_distance)) return offset + buckets - 1;
  const int64_t steps = buckets - exact;
  return offset + std::min(exact + log_steps(static_cast<int64_t>(distance), exact, max_distance, steps), buckets - 1);
}

}  // namespace attune
