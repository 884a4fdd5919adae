// SPDX-License-Identifier: Apache-2.0
// The size of the decode kernels' shared memory. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "common/kv_scale.h"
#include "scheduler/stream_k_params.h"

namespace attune::kernels {

constexpr int kMergeFloats = 512;  // of a warp: what the epilogue exchanges at a time

ATTUNE_SHARED_FUNCTION int row_chunks(int element_size, int head_dim) { return (head_dim + 15) / 16 * element_size; }
ATTUNE_SHARED_FUNCTION int row_pitch(int chunks) {
  return 16 * (chunks >= 2 && (chunks & (chunks - 1)) == 0 ? chunks : chunks | 1);
}
// The bytes of a stage of one warp.
ATTUNE_SHARED_FUNCTION int stage_bytes(int element_size, int head_dim_qk, int head_dim_v, int token_scales) {
  return kKeysOfWarp *
         (row_pitch(row_chunks(element_size, head_dim_qk)) + row_pitch(row_chunks(element_size, head_dim_v)) +
          2 * 4 * scales_of_key(token_scales, head_dim_qk, head_dim_v));
}
// sizeof(decode::SharedStorage); that file asserts it.
ATTUNE_SHARED_FUNCTION int decode_shared_bytes(int warps, int num_stages, int element_size, int head_dim_qk,
                                               int head_dim_v, int row_tiles, int parts, int token_scales) {
  const int rows = 8 * row_tiles;
  const int stages = warps * num_stages * stage_bytes(element_size, head_dim_qk, head_dim_v, token_scales);
  const int queries = parts * rows * row_pitch(row_chunks(2, head_dim_qk));
  const int exchange = warps * (kMergeFloats + 4 * rows) * 4;  // its rows are padded by four floats
  const int stats = (warps * 3 + 1) * rows * 4, valid_keys = align_up(warps * num_stages * 4, 16);
  return stages + queries + exchange + stats + valid_keys + (warps + 2) * static_cast<int>(sizeof(StreamKRange)) + 16;
}

}  // namespace attune::kernels
