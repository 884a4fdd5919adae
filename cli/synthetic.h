// SPDX-License-Identifier: Apache-2.0
// Synthetic activations: normal numbers, made once. A step takes its rows from a random place of the pool, without a
// copy.
#pragma once

#include <cstdint>

#include "attune/attune.h"
#include "buffer.h"
#include "cases/number.h"

namespace attune::cli {

// Fills n elements with mean 0 and the given deviation, about a nanosecond each.
void fill_normal(attune_dtype dtype, void* elements, int64_t n, double deviation, cases::Random& random);

// A normal number of deviation 1 stays far inside of e4m3's 448 with this scale, and uses most of its range.
inline constexpr float kE4m3Scale = 0.0125f;
// Bytes of a latent row of the format MLA-656.
inline constexpr int64_t kMla656Bytes = 656;
// Fills n such rows: codes, then what lies behind them in each row, scales and the channels that are not quantised.
void fill_mla_656(void* rows, int64_t n, cases::Random& random);

class RowPool {
 public:
  // Serves up to max_rows rows [heads, dim] at a time.
  RowPool(attune_dtype dtype, int64_t max_rows, int64_t heads, int64_t dim, double deviation, cases::Random& random);
  // A dense [rows, heads, dim] view of random rows.
  attune_tensor take(int64_t rows, cases::Random& random) const;

 private:
  attune_dtype dtype_;
  int64_t rows_, heads_, dim_;
  Buffer data_;
};

}  // namespace attune::cli
