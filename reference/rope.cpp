// SPDX-License-Identifier: Apache-2.0
// Rope frequencies of every style, from f_j = theta^(-2j / dim).
#include <algorithm>
#include <cmath>
#include <numbers>

#include "reference/reference.h"

namespace attune::reference {
namespace {

constexpr double kPi = std::numbers::pi;

// theta of the NTK styles beyond the original context: larger, so that the slowest pairs keep their range.
double stretched_theta(const attune_rope& rope, double ratio) {
  const auto width = static_cast<double>(rope.dim);
  return rope.theta * std::pow(ratio, width / (width - 2));
}

double ntk_theta(const attune_rope& rope) {
  if (rope.seqlen <= rope.max_position) return rope.theta;
  const double length = static_cast<double>(rope.seqlen) / static_cast<double>(rope.max_position);
  return stretched_theta(rope, rope.scale * length - (rope.scale - 1));
}

double qwen_theta(const attune_rope& rope) {
  if (rope.seqlen <= rope.max_position) return rope.theta;
  // 2^ceil(log2(seqlen / max_position)) in integers: a logarithm would round at exact powers of two.
  int64_t power = 1;
  while (power * rope.max_position < rope.seqlen) power *= 2;
  return stretched_theta(rope, static_cast<double>(std::max<int64_t>(2 * power - 1, 1)));
}

// The (fractional) pair whose wave turns the given number of times within the original context.
double pair_of_turns(const attune_rope& rope, double turns) {
  const double per_turn = static_cast<double>(rope.max_position) / (2 * kPi * turns);
  return static_cast<double>(rope.dim) * std::log(per_turn) / (2 * std::log(rope.theta));
}

double yarn_frequency(const attune_rope& rope, double f, int64_t j) {
  const double low = std::max(std::floor(pair_of_turns(rope, rope.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_of_turns(rope, rope.beta_slow)), static_cast<double>(rope.dim - 1));
  if (low == high) high += 0.001;
  const double ramp = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
  const double extrapolated = (1 - ramp) * rope.extrapolation_factor;
  return f / rope.scale * (1 - extrapolated) + f * extrapolated;
}

double llama3_frequency(const attune_rope& rope, double f) {
  const double wavelength = 2 * kPi / f;
  const auto context = static_cast<double>(rope.max_position);
  if (wavelength < context / rope.high_freq_factor) return f;
  if (wavelength > context / rope.low_freq_factor) return f / rope.scale;
  const double t = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - t) * f / rope.scale + t * f;
}

}  // namespace

std::vector<double> rope_frequencies(const attune_rope& rope) {
  double theta = rope.theta;
  if (rope.style == ATTUNE_ROPE_DYNAMIC_NTK) theta = ntk_theta(rope);
  if (rope.style == ATTUNE_ROPE_QWEN_DYNAMIC_NTK) theta = qwen_theta(rope);
  std::vector<double> frequencies;
  for (int64_t j = 0; j < rope.dim / 2; ++j) {
    const double f = std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(rope.dim));
    switch (rope.style) {
      case ATTUNE_ROPE_NONE:
        frequencies.push_back(0);
        break;
      case ATTUNE_ROPE_YARN:
        frequencies.push_back(yarn_frequency(rope, f, j));
        break;
      case ATTUNE_ROPE_LLAMA3:
        frequencies.push_back(llama3_frequency(rope, f));
        break;
      case ATTUNE_ROPE_DYNAMIC_NTK:
      case ATTUNE_ROPE_QWEN_DYNAMIC_NTK:
        frequencies.push_back(f);
        break;
      default:
        frequencies.push_back(f / rope.scale);
        break;  // linear, GLM2, mRoPE
    }
  }
  return frequencies;
}

}  // namespace attune::reference
