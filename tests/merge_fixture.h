// SPDX-License-Identifier: Apache-2.0
// Merging partial results by lse against the oracle, on the memory of any device.
#pragma once

#include <limits>

#include "cases/op_problem.h"
#include "support.h"

namespace attune::tests {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct MergeShape {
  int64_t parts, rows, heads, dim;
};

inline cases::Case merge_case(MergeShape shape, attune_dtype partial, attune_dtype out, bool sinks, bool padded) {
  cases::Case c;
  c.name = "merge";
  c.op.operation = cases::Operation::kMerge;
  c.op.parts = shape.parts;
  c.seqlens_q = c.seqlens_kv = {shape.rows};
  c.num_heads_q = shape.heads;
  c.head_dim_v = shape.dim;
  c.dtype = partial;
  c.out_dtype = out;
  if (sinks) c.sinks = "normal";
  if (padded) c.strides = cases::StrideMode::kOdd;
  return c;
}

inline void check_merge(cases::Memory& memory) {
  for (const attune_dtype partial : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16}) {
    for (const attune_dtype out : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3}) {
      for (const MergeShape& shape : {MergeShape{1, 3, 2, 64}, MergeShape{2, 4, 3, 17}, MergeShape{7, 5, 1, 128},
                                      MergeShape{33, 3, 4, 1}, MergeShape{40, 3, 2, 576}}) {
        cases::MergeProblem merge(merge_case(shape, partial, out, shape.parts % 2 == 1, shape.dim == 17), memory);
        EXPECT_EQ(merge.run_and_check(), "") << shape.parts << " parts of " << shape.dim;
      }
    }
  }
}

}  // namespace attune::tests
