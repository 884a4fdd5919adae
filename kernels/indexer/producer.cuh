// SPDX-License-Identifier: Apache-2.0
// The producers of the scores kernel: four warps that load queries to shared memory, in the type of the wgmma operands.
// The first of them also publishes work tiles.
//
// Channels along wgmma's K have the order in which a lane can load a key: channel 64 c + 16 j + i, of lane j of a quad,
// is k = 64 c + 16 (i / 4) + 8 (i / 2 % 2) + 2 j + i % 2. A thread loads 64 channels of a head, which are a row of a
// panel.
#pragma once

#include "indexer/tile_scheduler.cuh"

namespace attune::indexer {

class Producer {
 public:
  __device__ __forceinline__ Producer(const IndexScoresParams& p, SharedStorage& shared)
      : p_(p), shared_(shared), scheduler_(p) {}

  __device__ __forceinline__ void run() {
    if (!next_work()) return;
    load_first();
    for (;;) {
      ptx::wait_phase(address(shared_.query_empty[query_pipe_.stage]), query_pipe_.phase ^ 1);
      store();
      ptx::fence_async_proxy();
      ptx::arrive(address(shared_.query_full[query_pipe_.stage]));
      query_pipe_.next<Config::kQueryStages>();
      if (!advance()) return;
      load_first();
    }
  }

 private:
  static constexpr int kPanelRows = Config::kN * Config::kPanels;  // of all panels
  static constexpr bool kOneRowEach = kPanelRows <= 128;

  // Called by the first warp: publishes work tiles until it is kWorkAhead tiles ahead of the one to be loaded.
  __device__ __forceinline__ void publish_work() {
    while (!all_published_ && num_published_ <= work_index_ + Config::kWorkAhead) {
      ptx::wait_phase(address(shared_.work_empty[publish_pipe_.stage]), publish_pipe_.phase ^ 1);
      WorkTile work;
      if (!scheduler_.next(work)) {
        work.mask = 0;
        all_published_ = true;
      }
      if (threadIdx.x % 32 == 0) {
        shared_.work_tiles[publish_pipe_.stage] = work;
        ptx::arrive(address(shared_.work_full[publish_pipe_.stage]));
      }
      __syncwarp();
      ++num_published_;
      publish_pipe_.next<Config::kWorkSlots>();
    }
  }

  // Reads the next work tile. Returns false at the end of work.
  __device__ __forceinline__ bool next_work() {
    if (threadIdx.x < 32) publish_work();
    ptx::wait_phase(address(shared_.work_full[work_pipe_.stage]), work_pipe_.phase);
    work_ = shared_.work_tiles[work_pipe_.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(address(shared_.work_empty[work_pipe_.stage]));
    ++work_index_;
    work_pipe_.next<Config::kWorkSlots>();
    if (work_.mask == 0) return false;
    start_row();
    return true;
  }

  __device__ __forceinline__ void start_row() {
    const int r = __ffs(static_cast<int>(work_.mask)) - 1;
    work_.mask &= work_.mask - 1;
    row_ = work_.row + r;
    range_ = visible(p_.rows, row_, work_.i + r, work_.n, work_.keys);
    pass_ = 0;
  }

  // Advances to the next pass over a row's heads, or to the next row.
  __device__ __forceinline__ bool advance() {
    if (Config::kPasses > 1 && ++pass_ < Config::kPasses) return true;
    if (work_.mask == 0) return next_work();
    start_row();
    return true;
  }

  // Returns false if the row needs no scores; its columns are only cleared.
  __device__ __forceinline__ bool is_scored() const {
    return range_.begin < work_.key + Config::kKeys && range_.end > work_.key && range_.begin < range_.end;
  }

  __device__ __forceinline__ Raw<Config::kQueryType> load(int panel_row, int j) const {
    const int head = pass_ * Config::kN + panel_row % Config::kN, channel = panel_row / Config::kN * 64 + 16 * j;
    if (head >= Config::kHeads || channel >= p_.head_dim) return Raw<Config::kQueryType>::zero();
    const char* at = row_of(p_.rows, p_.q, row_) + head * p_.q.head_stride;
    if constexpr (Config::kQueryVectors) {
      return Raw<Config::kQueryType>::vectors(at + channel * common::element_size(Config::kQueryType));
    } else {
      return Raw<Config::kQueryType>::elements(min(16, p_.head_dim - channel),
                                               [&](int i) { return at + (channel + i) * p_.q.channel_stride; });
    }
  }

  // Issues the loads that the thread can hold in registers while it waits for an empty stage.
  __device__ __forceinline__ void load_first() {
    if (!is_scored()) return;
    if (kOneRowEach && threadIdx.x < kPanelRows) load(threadIdx.x, raw_);
    const int head = pass_ * Config::kN + static_cast<int>(threadIdx.x);
    if (threadIdx.x < Config::kN && head < Config::kHeads) {
      weight_ = common::load_element(p_.weights.dtype,
                                     row_of(p_.rows, p_.weights, row_) + head * p_.weights.head_stride, 0);
      scale_ = p_.q_scale.data == nullptr
                   ? 1.0f
                   : *reinterpret_cast<const float*>(row_of(p_.rows, p_.q_scale, row_) + head * p_.q_scale.head_stride);
    }
  }

  __device__ __forceinline__ void store() {
    if (threadIdx.x == 0) shared_.ranges[query_pipe_.stage] = range_;
    if (!is_scored()) return;
    if (threadIdx.x < Config::kN) shared_.weights[query_pipe_.stage][threadIdx.x] = weight_ * scale_;
    if constexpr (kOneRowEach) {
      if (threadIdx.x < kPanelRows) store(threadIdx.x, raw_);
    } else {
#pragma unroll 1
      for (int panel_row = threadIdx.x; panel_row < kPanelRows; panel_row += 128) {
        load(panel_row, raw_);
        store(panel_row, raw_);
      }
    }
  }

  __device__ __forceinline__ void load(int panel_row, Raw<Config::kQueryType> (&raw)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      raw[j] = load(panel_row, j);
      if constexpr (!Config::kQueryVectors) ptx::fence_operand(raw[j].word);  // fewer in flight: fewer registers
    }
  }

  __device__ __forceinline__ void store(int panel_row, const Raw<Config::kQueryType> (&raw)[4]) {
    const int head = panel_row % Config::kN, panel = panel_row / Config::kN;
    unsigned char* const row = shared_.queries[query_pipe_.stage].panels + panel * Config::kPanelBytes + head * 128;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      *reinterpret_cast<uint4*>(row + ((k ^ head % 8) * 16)) =
          make_uint4(raw[0].pair(k), raw[1].pair(k), raw[2].pair(k), raw[3].pair(k));
    }
  }

  const IndexScoresParams& p_;
  SharedStorage& shared_;
  TileScheduler scheduler_;
  int num_published_ = 0, work_index_ = 0;
  bool all_published_ = false;
  common::PipelineState publish_pipe_, work_pipe_, query_pipe_;
  WorkTile work_;
  long long row_;
  KeyRange range_;
  int pass_ = 0;
  Raw<Config::kQueryType> raw_[4];
  float weight_ = 0, scale_ = 1;
};

}  // namespace attune::indexer
