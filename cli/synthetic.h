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

// Bytes of a latent row of the format MLA-656.
inline constexpr int64_t kMla656Bytes = 656;
// Fills n such rows: codes, then what lies behind them in each row, scales and the channels that are not quantised.
// scale: about what a code of 1 stands for.
void fill_mla_656(void* rows, int64_t n, cases::Random& random, float scale = 0.0125f);

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
