// SPDX-License-Identifier: Apache-2.0
// Sizes that the host and mla/mma.cu agree on. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "mla/mla_params.h"

namespace attune::kernels {

constexpr int kMlaMmaThreads = 256;

// Bytes from row to row of queries and 16-bit keys in shared memory (common/row_layout.cuh), and of packed rows.
ATTUNE_SHARED_FUNCTION int mla_mma_pitch(int head_dim) {
  const int chunks = head_dim / 8;
  return ((chunks & (chunks - 1)) == 0 ? chunks : chunks | 1) * 16;
}
ATTUNE_SHARED_FUNCTION int mla_mma_packed_pitch(int producer) {
  return producer == kMlaDequant656 ? 656 : producer == kMlaDequant584 ? 592 : 0;
}
// Of P; with 64 rows, of the parts of S that pairs of warps exchange before.
ATTUNE_SHARED_FUNCTION int mla_mma_p_bytes(int rows, int keys) {
  return rows == 64 ? rows * keys * 4 : rows * keys * 2;
}
// Queries, P, the key tiles (packed: one of them, and the codes of all stages), and 2 KiB: the work tile, row stats.
ATTUNE_SHARED_FUNCTION int mla_mma_shared_bytes(int producer, int head_dim, int rows, int keys, int stages) {
  const int packed = mla_mma_packed_pitch(producer), tiles = packed > 0 ? 1 : stages;
  return (rows + tiles * keys) * mla_mma_pitch(head_dim) + stages * keys * packed +
         mla_mma_p_bytes(rows, keys) + 2048;
}

}  // namespace attune::kernels
