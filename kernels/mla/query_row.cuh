// SPDX-License-Identifier: Apache-2.0
// A row of queries in global memory. Its rope channels may be apart from its latent channels, which are as many as V's.
#pragma once

#include "common/finish.cuh"
#include "mla/problem.cuh"

namespace attune::mla {

struct QueryRow {
  static constexpr int kLatent = ProblemConfig::kHeadDimV;
  static constexpr bool kHasRope = ProblemConfig::kHeadDimQk > kLatent;

  const char *latent = nullptr, *rope = nullptr;  // null: there is no such row

  QueryRow() = default;
  __device__ __forceinline__ QueryRow(const WorkTileParams& p, const WorkTile& t, int token, int head)
      : latent(p.q + 2 * common::row_offset(p, t.batch, t.q_begin, token, head, p.q_batch_stride, p.q_row_stride,
                                            p.q_head_stride)) {
    if constexpr (kHasRope)
      rope = p.q_rope + 2 * common::row_offset(p, t.batch, t.q_begin, token, head, p.q_rope_batch_stride,
                                               p.q_rope_row_stride, p.q_rope_head_stride);
  }
  __device__ __forceinline__ bool exists() const { return latent != nullptr; }
  __device__ __forceinline__ const char* at(int channel) const {
    return kHasRope && channel >= kLatent ? rope + 2 * (channel - kLatent) : latent + 2 * channel;
  }
};

// One channel of a query. It holds no address between calls: where rows are recomputed registers are scarce.
__device__ __forceinline__ float query_channel(const WorkTileParams& p, const WorkTile& t, int token, int head,
                                               int channel) {
  const bool is_rope = QueryRow::kHasRope && channel >= QueryRow::kLatent;
  const char* const row = (is_rope ? p.q_rope : p.q) +
                          2 * common::row_offset(p, t.batch, t.q_begin, token, head,
                                                 is_rope ? p.q_rope_batch_stride : p.q_batch_stride,
                                                 is_rope ? p.q_rope_row_stride : p.q_row_stride,
                                                 is_rope ? p.q_rope_head_stride : p.q_head_stride);
  return common::load_element(ProblemConfig::kType, row, is_rope ? channel - QueryRow::kLatent : channel);
}

}  // namespace attune::mla
