// SPDX-License-Identifier: Apache-2.0
// The shared memory of a block of the decode kernels.
#pragma once

#include "common/host_device.h"
#include "decode/config.cuh"

namespace attune::decode {

struct alignas(16) SharedStorage {
  // Each warp's ring of stages: 16 keys, then their values. In a cluster the epilogue reuses it once every block has
  // read its last key (cluster_epilogue.cuh).
  unsigned char stages[Config::kWarps][Config::kStages][Config::kStageBytes];
  unsigned char queries[Config::kParts][Config::kRows][Config::LayoutQ::kPitch];
  // in the epilogue channels of O, before it a warp's new token
  float exchange[Config::kWarps][Config::kScratchFloats];
  // Row statistics of the warps, for the epilogue. Maxima are in base 2.
  float row_max[Config::kWarps][Config::kRows];
  union {
    float row_sum[Config::kWarps][Config::kRows];
    float o_rescale[Config::kWarps][Config::kRows];  // overlays the sums once they have been read
  };
  float pv_max[Config::kWarps][Config::kRows];
  float query_scales[Config::kRows];  // they undo the factors with which queries were rounded
  // A bit for each of a stage's 16 keys. It is written only if not all keys are valid.
  alignas(16) unsigned valid_keys[Config::kWarps][Config::kStages];
  kernels::StreamKRange stream_k[2 + Config::kWarps];  // of the block, now and next; then of each warp's producer
  union {
    int is_last;                // whether this block is the last to arrive at a counter
    kernels::Barrier received;  // in a cluster: the mbarrier that counts the bytes of partial results
  };
  unsigned stamp;  // of this call, to compare with the schedule's
};
static_assert(sizeof(SharedStorage) ==
                  kernels::decode_shared_bytes(Config::kWarps, Config::kStages, Config::kElement, Config::kHeadDimQk,
                                               Config::kHeadDimV, Config::kRowTiles, Config::kParts,
                                               Config::kTokenScales),
              "the host asks for another size");

}  // namespace attune::decode
