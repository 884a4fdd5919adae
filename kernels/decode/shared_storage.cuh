// SPDX-License-Identifier: Apache-2.0
// The shared memory of a block of the decode kernels.
#pragma once

#include "decode/config.cuh"
#include "tile/shared_array.h"

namespace attune::decode {

struct alignas(16) SharedStorage {
  // Of each warp, a ring of 16 keys and values each. In a cluster the end of a pair lies here, too (cluster_merge.cuh),
  // when every block is past its last key.
  unsigned char stages[Config::kWarps][Config::kStages][Config::kStageBytes];
  unsigned char queries[Config::kParts][Config::kRows][Config::LayoutQ::kPitch];
  float exchange[Config::kWarps][Config::kScratchFloats];  // channels in a merge; a warp's new token between merges
  // What warps have of rows, in a merge: maxima in base 2, sums, and the maxima that values are against.
  float max[Config::kWarps][Config::kRows];
  union {
    float sum[Config::kWarps][Config::kRows];
    float weight[Config::kWarps][Config::kRows];  // once sums have been read
  };
  float value_max[Config::kWarps][Config::kRows];
  float query_scales[Config::kRows];  // undo what queries were multiplied with before they were rounded
  alignas(16) unsigned notes[Config::kWarps][Config::kStages];  // which of a stage's keys are there, where some are not
  kernels::Share shares[1 + Config::kWarps];                    // of the block, and of each warp's loader
  union {
    int is_last;                // whether this block has the last part of something
    kernels::Barrier received;  // in a cluster: counts the bytes of parts
  };
  unsigned stamp;  // of the call, where the schedule's is checked
};
static_assert(sizeof(SharedStorage) ==
                  kernels::decode_shared_bytes(Config::kWarps, Config::kStages, Config::kElement, Config::kHeadDimQk,
                                               Config::kHeadDimV, Config::kRowTiles, Config::kParts,
                                               Config::kTokenScales),
              "the host asks for another size");

}  // namespace attune::decode
