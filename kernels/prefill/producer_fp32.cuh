// SPDX-License-Identifier: Apache-2.0
// The producer of fp32 inputs: four warps load rows of q, K and V, four channels a thread at a time, split each number
// into three bf16 and store these as three tiles, swizzled as the TMA writes them. Tiles come from the last to the
// first, as far ahead of the consumer warps as the stages allow.
//
// Threads load the rows, so any strides, layout and element type of a cache will do. Keys that the block may not see,
// keys on pages that do not exist, and channels beyond the head dim are not read; zeros are stored for them.
#pragma once

#include "common/finish.cuh"
#include "common/operand.cuh"
#include "prefill/row_vec4.cuh"
#include "prefill/shared_storage.cuh"
#include "ptx/shared.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill {

class Fp32Producer {
 public:
  __device__ __forceinline__ Fp32Producer(const WorkTileParams& p, const kernels::Fp32Rows& vec4, const Smem& smem)
      : p_(p), vec4_(vec4), smem_(smem), thread_(static_cast<int>(threadIdx.x)) {}

  // The first warp also takes the work tiles from the list.
  __device__ __forceinline__ void run() {
    TileScheduler<Smem, 1, Config::kCached> scheduler(p_, smem_);
    for (PipelineState slot;; slot.next<kernels::kWorkSlots>()) {
      if (thread_ < 32) scheduler.next();
      ptx::wait_phase(smem_.work_full(slot.stage), slot.phase);
      const int head_tile = smem_.head_tile(slot.stage);
      if (head_tile == kNoMoreWork) return;
      load(smem_.work(slot.stage), head_tile);
      __syncwarp();
      if (thread_ % 32 == 0) ptx::arrive(smem_.work_empty(slot.stage));
    }
  }

 private:
  __device__ __forceinline__ void load(const WorkTile& work, int head_tile) {
    const int kv_head = head_tile * p_.heads_of_tile / p_.group;
    const Tiles tiles(work.num_cached, work.first_key, work.end_key);
    for (int i = work.tile_end - 1; i >= work.tile_begin; --i) {
      const Tile tile = tile_at(work, tiles, i);
      load_k(work, kv_head, tile);
      if (i == work.tile_end - 1) load_q(work, head_tile);
      load_v(work, kv_head, tile);
    }
  }

  // --- Rows

  using Row = RowSource;

  // Loads kRows rows of kHeadDim channels and stores them as three bf16 tiles from `to` on. find: from a row's number
  // to its Row. empty, phase: the barrier to wait for before storing. The threads cover eight rows of 64 channels at a
  // time: a thread has the same position in each such set, and so the same swizzle.
  //
  // rows_contiguous: neighbouring rows are contiguous in memory, neighbouring channels are not. Then neighbouring
  // threads have rows, not channels.
  template <int kType, int kHeadDim, int kRows, bool kVec4, class Find>
  __device__ __forceinline__ void store_bf16x3(const Find& find, const Strided& strides, unsigned to, unsigned empty,
                                               unsigned phase, bool rows_contiguous = false) const {
    // Units of four channels that a thread loads ahead. Blocks of 256 threads have registers for more.
    constexpr int kAtATime = !kVec4 ? 4 : Config::kConsumerGroups == 1 ? 16 : 8;
    constexpr int kBlocks = (kHeadDim + 63) / 64, kEights = kRows / 8, kTotal = kBlocks * kEights;
    const int vec = rows_contiguous ? thread_ / 8 : thread_ % 16,
              first = rows_contiguous ? thread_ % 8 : thread_ / 16;
    to += first * 128 + ((vec / 2 ^ first) << 4) + vec % 2 * 8;
#pragma unroll 1
    for (int begin = 0; begin < kTotal; begin += kAtATime) {
      Vec4 vec4s[kAtATime];
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        const int block = (begin + j) / kEights, row = (begin + j) % kEights * 8 + first;
        if (kTotal % kAtATime == 0 || begin + j < kTotal)
          vec4s[j] = load_vec4<kType, kHeadDim, kVec4>(find(row), strides, 64 * block + 4 * vec);
      }
      ptx::wait_phase(empty, phase);
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        if (kTotal % kAtATime != 0 && begin + j >= kTotal) break;
        float x[4];
        to_floats<kType>(vec4s[j], x);
        unsigned low[common::kSplitParts], high[common::kSplitParts];
        common::split_pair(x[0], x[1], low);
        common::split_pair(x[2], x[3], high);
#pragma unroll
        for (int part = 0; part < common::kSplitParts; ++part)
          ptx::store_shared_two(to + (begin + j + part * kTotal) * 1024, low[part], high[part]);
      }
    }
  }
  template <int kType, int kHeadDim, int kRows, class Find>
  __device__ __forceinline__ void store_bf16x3(const Find& find, const Strided& strides, int vec4, unsigned to,
                                               unsigned empty, unsigned phase, bool rows_contiguous = false) const {
    if (vec4 != 0) {
      store_bf16x3<kType, kHeadDim, kRows, true>(find, strides, to, empty, phase);
    } else {
      store_bf16x3<kType, kHeadDim, kRows, false>(find, strides, to, empty, phase, rows_contiguous);
    }
  }
  __device__ __forceinline__ void producer_commit(unsigned full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (thread_ % 32 == 0) ptx::arrive(full);
  }

  // --- Tiles

  __device__ __forceinline__ void load_q(const WorkTile& work, int head_tile) {
    const auto find = [&](int row) -> Row {
      const int local = row / p_.heads_of_tile, head = head_tile * p_.heads_of_tile + row - local * p_.heads_of_tile;
      if (local >= work.num_tokens) return {nullptr, {1.0f}};
      return {p_.q + 4 * common::row_offset(p_, work.batch, work.q_begin, work.token_begin + local, head,
                                            p_.q_batch_stride, p_.q_row_stride, p_.q_head_stride),
              {1.0f}};
    };
    store_bf16x3<common::kFloat32, Config::kHeadDimQk, Config::kRows>(find, {0, 0, p_.q_dim_stride}, vec4_.q, smem_.q(),
                                                                      smem_.q_empty(), q_phase_ ^ 1);
    q_phase_ ^= 1;
    producer_commit(smem_.q_full());
  }

  __device__ __forceinline__ void load_k(const WorkTile& work, int kv_head, const Tile& tile) {
    const PipelineState pipe = k_pipe_;
    k_pipe_.next<Config::kStages>();
    load_tile<false, Config::kHeadDimQk>(work, kv_head, tile, smem_.k(pipe.stage), smem_.k_empty(pipe.stage),
                                         pipe.phase ^ 1);
    if (Config::kCached && thread_ < 32) write_tile_mask(smem_.mask(pipe.stage), work, tile);
    producer_commit(smem_.k_full(pipe.stage));
  }

  __device__ __forceinline__ void load_v(const WorkTile& work, int kv_head, const Tile& tile) {
    const PipelineState pipe = v_pipe_;
    v_pipe_.next<Config::kStages>();
    load_tile<true, Config::kHeadDimV>(work, kv_head, tile, smem_.v(pipe.stage), smem_.v_empty(pipe.stage),
                                       pipe.phase ^ 1);
    producer_commit(smem_.v_full(pipe.stage));
  }

  template <bool kValues, int kHeadDim>
  __device__ __forceinline__ void load_tile(const WorkTile& work, int kv_head, const Tile& tile, unsigned to,
                                            unsigned empty, unsigned phase) const {
    if (Config::kCached && (tile.cached || !Config::kDense)) {  // otherwise the tile has no keys
      const kernels::KvPlane& plane = kValues ? p_.v : p_.k;
      const auto find = [&](int row) -> Row {
        const int key = tile.start + row;
        if (key < tile.low || key >= tile.high) return {nullptr, {1.0f}};
        const Slot s = find_slot(p_, work.batch, key, kValues);
        if (!page_exists(p_, s.page)) return {nullptr, {1.0f}};
        return {plane.data + s.page * plane.page_stride + s.slot * plane.slot_stride + kv_head * plane.head_stride,
                Config::kCacheTypeDiffers ? scale_of(p_, work, kv_head, key, kValues) : common::RowScale{1.0f}};
      };
      store_bf16x3<Config::kCacheType, kHeadDim, Config::kKeys>(
          find, Strided::of(plane), kValues ? vec4_.cached_v : vec4_.cached_k, to, empty, phase,
          plane.slot_stride == common::element_size(Config::kCacheType));
    } else if constexpr (Config::kDense) {
      const kernels::NewRows& rows = kValues ? p_.new_v : p_.new_k;
      const long long before = work.kv_row + tile.start - work.num_cached;
      const char* const first =
          rows.data + 4 * (work.batch * rows.batch_stride + before * rows.row_stride + kv_head * rows.head_stride);
      const int low = tile.low - tile.start, high = tile.high - tile.start;
      const auto find = [&](int row) -> Row {
        return {low <= row && row < high ? first + 4 * row * rows.row_stride : nullptr, {1.0f}};
      };
      store_bf16x3<common::kFloat32, kHeadDim, Config::kKeys>(find, Strided::of(rows),
                                                            kValues ? vec4_.dense_v : vec4_.dense_k, to, empty, phase);
    }
  }

  // Writes the TileMask: which keys are on pages that do not exist. The stage is empty.
  __device__ __forceinline__ void write_tile_mask(unsigned at, const WorkTile& work, const Tile& tile) const {
    unsigned any = 0;
#pragma unroll
    for (int word = 0; word < Config::kKeys / 32; ++word) {
      const int key = tile.start + 32 * word + thread_;
      const bool bad = tile.cached && key >= tile.low && key < tile.high &&
                       !(page_exists(p_, find_slot(p_, work.batch, key, false).page) && has_value(p_, work.batch, key));
      const unsigned bits = __ballot_sync(0xffffffffu, bad);
      if (thread_ == 0) ptx::store_shared_u32(at + 4 + 4 * word, bits);
      any |= bits;
    }
    // racecheck reports this with the loads of mainloop_fp32.cuh: it does not model a thread that arrives for its warp.
    if (thread_ == 0) ptx::store_shared_u32(at, any != 0 ? 1 : 0);
  }

  const WorkTileParams& p_;
  const kernels::Fp32Rows& vec4_;
  const Smem& smem_;
  const int thread_;
  PipelineState k_pipe_, v_pipe_;
  unsigned q_phase_ = 0;
};

}  // namespace attune::prefill
