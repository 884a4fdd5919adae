// SPDX-License-Identifier: Apache-2.0
// The TMA producer of the gradient kernel: one warp copies the block's own rows, then tile after tile of the other
// side, as far ahead as the stages allow. Rows behind a sequence's end belong to others, or are zeros; they are masked.
#pragma once

#include "backward/config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::backward {

// Of q, k, v and dout, [batch or 1, rows, heads, channels]: boxes of one line of channels of the own side's or the
// tiles' rows.
struct Maps {
  const ptx::TensorMap &own_x, &own_y, &tile_x, &tile_y;
};

class Producer {
 public:
  __device__ __forceinline__ Producer(const BackwardParams& p, const Maps& maps, const Smem& smem, const Work& work)
      : p_(p), maps_(maps), smem_(smem), work_(work) {}

  __device__ __forceinline__ void run() const {
    if (!ptx::elect()) return;
    if (work_.tiles == 0) return;
    ptx::arrive_expecting(smem_.own_full(), (Config::kLinesX + Config::kLinesY) * Config::kRows * 128);
    copy<Config::kLinesX, Config::kRows>(smem_.own_x(), maps_.own_x, smem_.own_full(), work_.head, work_.begin,
                                         Config::kOfKeys);
    copy<Config::kLinesY, Config::kRows>(smem_.own_y(), maps_.own_y, smem_.own_full(), work_.head, work_.begin,
                                         Config::kOfKeys);
    common::PipelineState pipe;
    for (int h = 0; h < work_.heads; ++h) {
      const int head = Config::kOfKeys ? work_.head * p_.group + h : work_.head / p_.group;
      for (int i = 0; i < work_.tiles; ++i, pipe.next<Config::kStages>())
        load(pipe, head, work_.first + i * Config::kTile);
    }
  }

 private:
  __device__ __forceinline__ void load(const common::PipelineState& pipe, int head, int row) const {
    const unsigned full = smem_.full(pipe.stage);
    ptx::wait_phase(smem_.empty(pipe.stage), pipe.phase ^ 1);
    ptx::arrive_expecting(full, Config::kTileBytes);
    copy<Config::kLinesX, Config::kTile>(smem_.tile_x(pipe.stage), maps_.tile_x, full, head, row, !Config::kOfKeys);
    copy<Config::kLinesY, Config::kTile>(smem_.tile_y(pipe.stage), maps_.tile_y, full, head, row, !Config::kOfKeys);
    if constexpr (Config::kOfKeys) {
      ptx::copy_bytes(smem_.stats(pipe.stage), stats_of(p_, work_.s, work_.batch, head) + row,
                      Config::kTile * sizeof(RowStats), full);
    }
  }

  template <int kLines, int kCount>
  __device__ __forceinline__ void copy(unsigned to, const ptx::TensorMap& map, unsigned full, int head, int row,
                                       bool of_keys) const {
    const bool flat = of_keys ? p_.kv_flat : p_.q_flat;
    const int at = static_cast<int>(of_keys ? work_.s.kv_row : work_.s.q_row) + row;
#pragma unroll
    for (int line = 0; line < kLines; ++line)
      ptx::tma_load(to + line * kCount * 128, map, full, 64 * line, head, at, flat ? 0 : work_.batch);
  }

  const BackwardParams& p_;
  const Maps& maps_;
  const Smem& smem_;
  const Work& work_;
};

}  // namespace attune::backward
