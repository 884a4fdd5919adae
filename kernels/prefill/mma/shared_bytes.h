// SPDX-License-Identifier: Apache-2.0
// Sizes that the host and prefill_mma.cu agree on. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"

namespace attune::kernels {

// Chunks of 16 bytes of a row of 16-bit channels, in whole blocks of 16 channels; bytes from row to row
// (common/row_layout.cuh).
ATTUNE_SHARED_FUNCTION int mma_chunks(int head_dim) { return (head_dim + 15) / 16 * 2; }
ATTUNE_SHARED_FUNCTION int mma_pitch(int head_dim) {
  const int chunks = mma_chunks(head_dim);
  return ((chunks & (chunks - 1)) == 0 ? chunks : chunks | 1) * 16;
}
// Q, a tile of K, a tile of V, and 256 bytes for the work tile and the bits of the tile's keys.
ATTUNE_SHARED_FUNCTION int mma_shared_bytes(int rows, int keys, int head_dim_qk, int head_dim_v) {
  return (rows + keys) * mma_pitch(head_dim_qk) + keys * mma_pitch(head_dim_v) + 256;
}

}  // namespace attune::kernels
