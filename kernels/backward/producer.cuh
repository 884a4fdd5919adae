// SPDX-License-Identifier: Apache-2.0
// The TMA producer of the gradient kernel: one warp copies the block's resident rows, then one tile of the streamed
// side after the other, as far ahead as the stages allow. Rows after a sequence's end belong to other sequences, or are
// zeros; they are masked.
#pragma once

#include "backward/config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::backward {

// [batch or 1, rows, heads, channels]: boxes of one line of channels, of the resident rows or of a tile's rows.
struct Maps {
  const ptx::TensorMap &resident_qk, &resident_vdo, &qk, &vdo;
};

class Producer {
 public:
  __device__ __forceinline__ Producer(const BackwardParams& p, const Maps& maps, const Smem& smem, const WorkTile& work)
      : p_(p), maps_(maps), smem_(smem), work_(work) {}

  __device__ __forceinline__ void run() const {
    if (!ptx::elect()) return;
    if (work_.tiles == 0) return;
    const unsigned full = smem_.resident_full();
    ptx::arrive_expecting(full, Config::kLinesResident * kBackwardRows * 128);
    copy<Config::kLinesQk, kBackwardRows>(smem_.resident_qk(), maps_.resident_qk, full, Config::kOfQueries, work_.head,
                                          work_.begin);
    if constexpr (Config::kWithDqk)
      copy<Config::kLinesV, kBackwardRows>(smem_.resident_vdo(), maps_.resident_vdo, full, Config::kOfQueries,
                                           work_.head, work_.begin);
    common::PipelineState qk, vdo;
    Step step(work_);
    for (int i = 0; i < work_.steps(); ++i, step.next(work_)) {
      const int head = Config::kOfQueries ? work_.head / p_.group : work_.q_head(p_, step.head);
      load_qk(qk, head, step.row);
      load_vdo(vdo, head, step.row);
      qk.next<Config::kQkStages>();
      vdo.next<Config::kVdoStages>();
    }
  }

 private:
  // Rows of queries come together with their stats.
  __device__ __forceinline__ void load_qk(const common::PipelineState& pipe, int head, int row) const {
    constexpr int kStatsBytes = Config::kOfQueries ? 0 : Config::kTile * sizeof(RowStats);
    const unsigned full = smem_.qk_full(pipe.stage);
    ptx::wait_phase(smem_.qk_empty(pipe.stage), pipe.phase ^ 1);
    ptx::arrive_expecting(full, Config::kQkBytes + kStatsBytes);
    copy<Config::kLinesQk, Config::kTile>(smem_.qk(pipe.stage), maps_.qk, full, !Config::kOfQueries, head, row);
    if constexpr (!Config::kOfQueries)
      ptx::copy_bytes(smem_.stats(pipe.stage), stats_of(p_, work_.s, work_.batch, head) + row, kStatsBytes, full);
  }
  __device__ __forceinline__ void load_vdo(const common::PipelineState& pipe, int head, int row) const {
    const unsigned full = smem_.vdo_full(pipe.stage);
    ptx::wait_phase(smem_.vdo_empty(pipe.stage), pipe.phase ^ 1);
    ptx::arrive_expecting(full, Config::kVdoBytes);
    copy<Config::kLinesV, Config::kTile>(smem_.vdo(pipe.stage), maps_.vdo, full, !Config::kOfQueries, head, row);
  }

  // of_q: rows are those of q, otherwise those of k.
  template <int kLines, int kCount>
  __device__ __forceinline__ void copy(unsigned to, const ptx::TensorMap& map, unsigned full, bool of_q, int head,
                                       int row) const {
    const int first = static_cast<int>(of_q ? work_.s.q_row : work_.s.kv_row) + row;
    const int batch = (of_q ? p_.q_flat : p_.kv_flat) ? 0 : work_.batch;
#pragma unroll
    for (int line = 0; line < kLines; ++line)
      ptx::tma_load(to + line * kCount * 128, map, full, 64 * line, head, first, batch);
  }

  const BackwardParams& p_;
  const Maps& maps_;
  const Smem& smem_;
  const WorkTile& work_;
};

}  // namespace attune::backward
