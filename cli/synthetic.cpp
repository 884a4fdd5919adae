// SPDX-License-Identifier: Apache-2.0
#include "synthetic.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace attune::cli {
namespace {

constexpr int kQuantileBits = 12;    // five draws from 64 random bits, and a table that stays in the first-level cache
constexpr int64_t kExtraRows = 509;  // so that steps of full size differ; a prime, to be out of step with chunk sizes

// Quantile p of the standard normal distribution, by bisection.
double normal_quantile(double p) {
  double low = -8, high = 8;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

// The numbers themselves are drawn from a table of equally likely quantiles, stored in the wanted type.
template <size_t kSize>
void draw(std::byte* out, int64_t n, const std::byte* table, cases::Random& random) {
  constexpr uint64_t kMask = (1u << kQuantileBits) - 1;
  for (int64_t i = 0; i < n;) {
    uint64_t bits = random.next();
    for (int j = 0; j < 64 / kQuantileBits && i < n; ++j, ++i, bits >>= kQuantileBits) {
      std::memcpy(out + i * static_cast<int64_t>(kSize), table + (bits & kMask) * kSize, kSize);
    }
  }
}

}  // namespace

void fill_normal(attune_dtype dtype, void* elements, int64_t n, double deviation, cases::Random& random) {
  static const std::vector<double> quantiles = [] {
    std::vector<double> q(size_t{1} << kQuantileBits);
    for (size_t i = 0; i < q.size(); ++i)
      q[i] = normal_quantile((static_cast<double>(i) + 0.5) / static_cast<double>(q.size()));
    return q;
  }();
  const auto size = static_cast<size_t>(cases::element_size(dtype));
  std::vector<std::byte> table(quantiles.size() * size);
  for (size_t i = 0; i < quantiles.size(); ++i) cases::encode(dtype, quantiles[i] * deviation, table.data() + i * size);
  auto* out = static_cast<std::byte*>(elements);
  if (size == 4) return draw<4>(out, n, table.data(), random);
  if (size == 2) return draw<2>(out, n, table.data(), random);
  draw<1>(out, n, table.data(), random);
}

void fill_mla_656(void* rows, int64_t n, cases::Random& random) {
  constexpr int64_t kCodes = 512, kScales = 4, kRope = 64;
  auto* row = static_cast<std::byte*>(rows);
  fill_normal(ATTUNE_FLOAT8_E4M3, row, n * kMla656Bytes, 1 / static_cast<double>(kE4m3Scale), random);
  std::vector<uint16_t> rope(static_cast<size_t>(n * kRope));
  fill_normal(ATTUNE_BFLOAT16, rope.data(), n * kRope, 1, random);
  for (int64_t i = 0; i < n; ++i, row += kMla656Bytes) {
    for (int64_t group = 0; group < kScales; ++group) {
      const auto scale = static_cast<float>(random.uniform(0.5, 1.5)) * kE4m3Scale;
      std::memcpy(row + kCodes + group * 4, &scale, sizeof(scale));
    }
    std::memcpy(row + kCodes + kScales * 4, rope.data() + i * kRope, kRope * sizeof(uint16_t));
  }
}

RowPool::RowPool(attune_dtype dtype, int64_t max_rows, int64_t heads, int64_t dim, double deviation,
                 cases::Random& random)
    : dtype_(dtype),
      rows_(max_rows + kExtraRows),
      heads_(heads),
      dim_(dim),
      data_(static_cast<size_t>(rows_ * heads * dim * cases::element_size(dtype))) {
  fill_normal(dtype, data_.data(), rows_ * heads * dim, deviation, random);
}

attune_tensor RowPool::take(int64_t rows, cases::Random& random) const {
  const int64_t first = random.integer(0, rows_ - rows);
  const int64_t shape[] = {rows, heads_, dim_};
  return attune_dense_tensor(data_.as<std::byte>() + first * heads_ * dim_ * cases::element_size(dtype_), dtype_, 3,
                             shape);
}

}  // namespace attune::cli
