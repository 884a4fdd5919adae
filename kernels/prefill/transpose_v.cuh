// SPDX-License-Identifier: Apache-2.0
// fp8: two warps transpose tiles of V. wgmma of 8-bit types needs both operands K-major, so V must be [channels][keys].
// The producer copies [keys][channels] to raw stages.
//
// ldmatrix moves pairs of bytes: of 16 channels, lane (g, t) = (l / 4, l % 4) receives channels 2g, 2g + 1 of keys 2t,
// 2t + 1 and, from the next matrix, of keys 2t + 8, 2t + 9. The bytes are sorted by channel and stored as rows of 16
// keys: position 4t + i has key {2t, 2t + 1, 2t + 8, 2t + 9}[i]. In this order a thread has its P in the accumulators
// of the QK GEMM. Even channels go to rows 0..7 of the block, odd channels to rows 8..15, so eight neighbouring lines
// are stored at a time. In the PV GEMM a thread then has channels 4t .. 4t + 3.
#pragma once

#include "prefill/shared_storage.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill {

class VTransposer {
 public:
  // warp: its number among the transposing warps.
  __device__ __forceinline__ VTransposer(const Smem& smem, int warp)
      : smem_(smem), warp_(warp), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    for (unsigned work_tiles = 0;; ++work_tiles) {
      const int slot = work_tiles % kernels::kWorkSlots;
      ptx::wait_phase(smem_.work_full(slot), work_tiles / kernels::kWorkSlots % 2);
      if (smem_.head_tile(slot) == kNoMoreWork) return;
      const WorkTile& work = smem_.work(slot);
      for (int i = work.tile_end - 1; i >= work.tile_begin; --i)
        transpose(work.end_key - work.first_key - i * Config::kKeys);
      __syncwarp();
      if (lane_ == 0) ptx::arrive(smem_.work_empty(slot));
    }
  }

 private:
  static constexpr int kBlocks = Config::kChannels / 16;  // blocks of 16 channels; each warp has every second block

  // Transposes the next tile, whose first `seen` keys may be read, or all keys if `seen` is more. (seen is not clamped
  // before the comparison: HACKING.md, "Style".)
  __device__ __forceinline__ void transpose(int seen) {
    const int from = tiles_ % Config::kRawStages, to = tiles_ % Config::kStages;
    ptx::wait_phase(smem_.raw_full(from), tiles_ / Config::kRawStages % 2);
    const unsigned raw = smem_.raw(from);
    if (seen < Config::kKeys) {
      zero_rows_from(max(seen, 0), raw);
      __syncwarp();
    }
    ptx::wait_phase(smem_.v_empty(to), tiles_ / Config::kStages % 2 ^ 1);
    const int line = lane_ & 7, half = lane_ >> 4;  // the line and half of this lane in the stored matrices
    const unsigned v = smem_.v(to) + (lane_ & 15) * 128;
#pragma unroll 1
    for (int block = warp_; block < kBlocks; block += Config::kTransposeWarps) {
      const unsigned load = raw + lane_ * 128 + ((block ^ line) << 4);
      const unsigned store = v + block * 2048;
      unsigned bytes[Config::kKeys / 32][4];
#pragma unroll
      for (int i = 0; i < Config::kKeys / 32; ++i) ptx::load_matrix_x4_transposed(bytes[i], load + i * 4096);
#pragma unroll
      for (int i = 0; i < Config::kKeys / 32; ++i) {
        const unsigned(&c)[4] = bytes[i];
        const unsigned rows[4] = {ptx::permute_bytes(c[0], c[1], 0x6420), ptx::permute_bytes(c[0], c[1], 0x7531),
                                  ptx::permute_bytes(c[2], c[3], 0x6420), ptx::permute_bytes(c[2], c[3], 0x7531)};
        ptx::store_matrix_x4(store + (((2 * i + half) ^ line) << 4), rows);
      }
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) {
      ptx::arrive(smem_.raw_empty(from));
      ptx::arrive(smem_.v_full(to));
    }
    ++tiles_;
  }

  // Zeroes masked keys, from `begin` on, in this warp's channels.
  __device__ __forceinline__ void zero_rows_from(int begin, unsigned raw) const {
#pragma unroll 1
    for (int key = begin + lane_; key < Config::kKeys; key += 32) {
#pragma unroll 1
      for (int block = warp_; block < kBlocks; block += Config::kTransposeWarps)
        ptx::store_shared_zero(raw + key * 128 + ((block ^ (key & 7)) << 4));
    }
  }

  const Smem& smem_;
  const int warp_, lane_;
  unsigned tiles_ = 0;  // tiles before the current one
};

}  // namespace attune::prefill
