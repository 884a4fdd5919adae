// SPDX-License-Identifier: Apache-2.0
// Sizes on which the host agrees with mla/mma.cu. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "mla/mla_params.h"

namespace attune::kernels {

constexpr int kMlaMmaConsumerThreads = 256, kMlaMmaSlices = 4;  // slices of the channels of Q and K

// The pitch of packed rows in shared memory, in bytes; 0: rows are not packed.
ATTUNE_SHARED_FUNCTION int mla_mma_packed_pitch(int producer) {
  return producer == kMlaDequant656 ? 656 : producer == kMlaDequant584 ? 592 : 0;
}
// With 64 rows the consumer warps copy keys as well, because their registers leave no room for producer warps.
ATTUNE_SHARED_FUNCTION bool mla_mma_has_producer_warps(int rows) { return rows < 64; }
// Rows of 656 bytes are dequantized by eight warps if 128 registers a thread are enough and each warp has four keys.
ATTUNE_SHARED_FUNCTION int mla_mma_threads(int producer, int rows, int keys) {
  if (!mla_mma_has_producer_warps(rows)) return kMlaMmaConsumerThreads;
  return kMlaMmaConsumerThreads + (producer == kMlaDequant656 && rows == 16 && keys == 32 ? 256 : 128);
}
// Blocks of 16 channels of a slice whose queries stay in registers; the others are in shared memory.
ATTUNE_SHARED_FUNCTION int mla_mma_q_register_blocks(int head_dim, int rows) {
  const int blocks = head_dim / 16 / kMlaMmaSlices;
  return rows == 64 ? 5 : rows == 32 ? 4 : blocks;
}
// The pitch of rows of head_dim 16-bit numbers in shared memory, in bytes (common/row_layout.cuh).
ATTUNE_SHARED_FUNCTION int mla_mma_pitch(int head_dim) {
  const int chunks = head_dim / 8;
  return ((chunks & (chunks - 1)) == 0 ? chunks : chunks | 1) * 16;
}
// Tiles of 16-bit keys. Packed rows are dequantized into two of them alternately.
ATTUNE_SHARED_FUNCTION int mla_mma_tiles(int producer, int stages) {
  return mla_mma_packed_pitch(producer) > 0 ? 2 : stages;
}
ATTUNE_SHARED_FUNCTION int mla_mma_fewest_stages(int producer) { return mla_mma_packed_pitch(producer) > 0 ? 1 : 2; }
// Queries, key tiles, the codes of all stages, the partial sums of four slices, P, and at least 1 KiB for the work tile
// and row stats.
ATTUNE_SHARED_FUNCTION int mla_mma_shared_bytes(int producer, int head_dim, int rows, int keys, int stages) {
  const int in_shared = head_dim - 16 * kMlaMmaSlices * mla_mma_q_register_blocks(head_dim, rows);
  return rows * mla_mma_pitch(in_shared) + mla_mma_tiles(producer, stages) * keys * mla_mma_pitch(head_dim) +
         stages * keys * mla_mma_packed_pitch(producer) + rows * keys * (4 * kMlaMmaSlices + 2) +
         (mla_mma_has_producer_warps(rows) ? 1024 : 1280);
}

}  // namespace attune::kernels
