// SPDX-License-Identifier: Apache-2.0
// The shared memory of prefill_fp32_mma.cu. A tile of fp32 numbers is three tiles of bf16, the largest parts first.
#pragma once

#include "prefill/mma/config.cuh"
#include "ptx/async_copy.cuh"

namespace attune::prefill_mma {

constexpr int kParts = common::kSplitParts, kQRegisterParts = Config::kQPartsInRegisters ? 2 : 0;

struct Fp32Storage {
  // The bytes of one bf16 tile.
  static constexpr int kPartQ = Config::kRows * Config::LayoutK::kPitch,
                       kPartK = Config::kKeys * Config::LayoutK::kPitch,
                       kPartV = Config::kKeys * Config::LayoutV::kPitch;
  alignas(128) unsigned char tiles[kernels::mma_fp32_tile_bytes(Config::kRows, Config::kKeys, Config::kHeadDimQk,
                                                                Config::kHeadDimV)];
  WorkTile work;
  int head, kv_head;
  unsigned valid_keys;  // a bit for each key of the tile: whether it is valid; bits beyond the tile are set

  __device__ __forceinline__ unsigned k() { return ptx::shared_address(tiles); }
  __device__ __forceinline__ unsigned v() { return k() + kParts * kPartK; }
  // Parts of Q that stay in registers leave their shared memory to K and V.
  __device__ __forceinline__ unsigned q() {
    return k() + kernels::mma_fp32_q_offset(Config::kRows, Config::kKeys, Config::kHeadDimQk,
                                            Config::kHeadDimV);
  }
};
static_assert(Config::kFp32 && Config::kRowTiles == 1, "fp32 rows, 16 of a warp");
static_assert(Config::kKeys <= 32, "the bits of a tile's keys fit a word");
static_assert(sizeof(Fp32Storage) <= kernels::mma_fp32_shared_bytes(Config::kRows, Config::kKeys, Config::kHeadDimQk,
                                                                    Config::kHeadDimV),
              "the host asks for less shared memory than this");

}  // namespace attune::prefill_mma
