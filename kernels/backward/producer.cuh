// SPDX-License-Identifier: Apache-2.0
// The TMA producer of the gradient kernel: one warp copies the block's keys, then tile after tile of queries, as far
// ahead as the stages allow. Rows behind a sequence's end belong to others, or are zeros; they are masked.
#pragma once

#include "backward/config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::backward {

// [batch or 1, rows, heads, channels]: boxes of one line of channels of a block's keys, or of a tile's queries.
struct Maps {
  const ptx::TensorMap &k, &v, &q, &dout;
};

class Producer {
 public:
  __device__ __forceinline__ Producer(const BackwardParams& p, const Maps& maps, const Smem& smem, const Work& work)
      : p_(p), maps_(maps), smem_(smem), work_(work) {}

  __device__ __forceinline__ void run() const {
    if (!ptx::elect()) return;
    if (work_.tiles == 0) return;
    ptx::arrive_expecting(smem_.own_full(), (Config::kLinesQk + Config::kLinesV) * Config::kKeys * 128);
    copy_keys<Config::kLinesQk>(smem_.k(), maps_.k);
    copy_keys<Config::kLinesV>(smem_.v(), maps_.v);
    common::PipelineState q, dout;
    Step step(work_);
    for (int i = 0; i < work_.steps(); ++i, step.next(work_)) {
      const int head = work_.head * p_.group + step.head;
      load_q(q, head, step.row);
      load_dout(dout, head, step.row);
      q.next<Config::kQStages>();
      dout.next<Config::kDoutStages>();
    }
  }

 private:
  template <int kLines>
  __device__ __forceinline__ void copy_keys(unsigned to, const ptx::TensorMap& map) const {
    copy<kLines, Config::kKeys>(to, map, smem_.own_full(), work_.head,
                                static_cast<int>(work_.s.kv_row) + work_.begin, p_.kv_flat);
  }

  // With the stats of its rows.
  __device__ __forceinline__ void load_q(const common::PipelineState& pipe, int head, int row) const {
    const unsigned full = smem_.q_full(pipe.stage);
    ptx::wait_phase(smem_.q_empty(pipe.stage), pipe.phase ^ 1);
    ptx::arrive_expecting(full, Config::kQBytes + Config::kTile * sizeof(RowStats));
    copy<Config::kLinesQk, Config::kTile>(smem_.q(pipe.stage), maps_.q, full, head, q_row(row), p_.q_flat);
    ptx::copy_bytes(smem_.stats(pipe.stage), stats_of(p_, work_.s, work_.batch, head) + row,
                    Config::kTile * sizeof(RowStats), full);
  }
  __device__ __forceinline__ void load_dout(const common::PipelineState& pipe, int head, int row) const {
    const unsigned full = smem_.dout_full(pipe.stage);
    ptx::wait_phase(smem_.dout_empty(pipe.stage), pipe.phase ^ 1);
    ptx::arrive_expecting(full, Config::kDoutBytes);
    copy<Config::kLinesV, Config::kTile>(smem_.dout(pipe.stage), maps_.dout, full, head, q_row(row), p_.q_flat);
  }
  __device__ __forceinline__ int q_row(int row) const { return static_cast<int>(work_.s.q_row) + row; }

  template <int kLines, int kCount>
  __device__ __forceinline__ void copy(unsigned to, const ptx::TensorMap& map, unsigned full, int head, int row,
                                       bool flat) const {
#pragma unroll
    for (int line = 0; line < kLines; ++line)
      ptx::tma_load(to + line * kCount * 128, map, full, 64 * line, head, row, flat ? 0 : work_.batch);
  }

  const BackwardParams& p_;
  const Maps& maps_;
  const Smem& smem_;
  const Work& work_;
};

}  // namespace attune::backward
