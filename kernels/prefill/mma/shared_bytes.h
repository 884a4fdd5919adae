// SPDX-License-Identifier: Apache-2.0
// Sizes on which the host agrees with prefill_mma.cu and prefill_fp32_mma.cu. Compiled by NVRTC and by the host's
// compiler; no standard headers.
#pragma once

#include "common/host_device.h"

namespace attune::kernels {

// Chunks of 16 bytes of a row of 16-bit channels, in whole blocks of 16 channels; the pitch of rows in bytes
// (common/row_layout.cuh).
ATTUNE_SHARED_FUNCTION int mma_chunks(int head_dim) { return (head_dim + 15) / 16 * 2; }
ATTUNE_SHARED_FUNCTION int mma_pitch(int head_dim) {
  const int chunks = mma_chunks(head_dim);
  return ((chunks & (chunks - 1)) == 0 ? chunks : chunks | 1) * 16;
}
// Whether Q of 16 rows a warp fits the registers beside O. Used for 8-bit caches alone, whose codes then take the
// shared memory of Q.
ATTUNE_SHARED_FUNCTION bool mma_q_in_registers(int row_tiles, int head_dim_qk, int head_dim_v) {
  return row_tiles == 1 && head_dim_qk / 4 + head_dim_v / 2 <= 160;
}
// Page ids of a tile: one for each row, or for two or four rows if more bytes would cost a resident block.
ATTUNE_SHARED_FUNCTION int mma_page_ids(int keys, int head_dim_qk, int head_dim_v, bool quantized, bool token_scales) {
  const int widest = head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v;
  return token_scales || (!quantized && widest <= 64) ? 16 : keys < 64 ? 32 : keys;
}
// Q, a tile of K, a tile of V, page ids, and 192 bytes for the work tile, its steady tiles and the bits of the tile's
// keys. quantized: Q may be in registers, and there are codes of a tile of K and of V. token_scales: also scales of a
// tile of K, and of two tiles of V.
ATTUNE_SHARED_FUNCTION int mma_shared_bytes(int rows, int keys, int head_dim_qk, int head_dim_v, bool quantized,
                                            bool token_scales) {
  const int small = 192 + 4 * mma_page_ids(keys, head_dim_qk, head_dim_v, quantized, token_scales) +
                    (token_scales ? keys * 12 : 0);
  int bytes = keys * (mma_pitch(head_dim_qk) + mma_pitch(head_dim_v)) + align_up(small, 128);
  if (!quantized || !mma_q_in_registers(rows / 64, head_dim_qk, head_dim_v)) bytes += rows * mma_pitch(head_dim_qk);
  if (quantized) bytes += keys * 8 * (mma_chunks(head_dim_qk) + mma_chunks(head_dim_v));
  return bytes;
}

// fp32 numbers are three bf16 numbers. Whether the two large parts of Q, of 16 rows a warp, fit the registers beside O.
ATTUNE_SHARED_FUNCTION bool mma_fp32_q_in_registers(int head_dim_qk, int head_dim_v) {
  return mma_chunks(head_dim_qk) * 4 + mma_chunks(head_dim_v) * 4 <= 128;
}
// The offset of Q: after a tile of K and a tile of V, less the bytes of the two parts of Q that are in registers, if
// they are. K, V and Q come first, then 128 bytes for the work tile and the bits of the tile's keys.
ATTUNE_SHARED_FUNCTION int mma_fp32_q_offset(int rows, int keys, int head_dim_qk, int head_dim_v) {
  const int tiles = 3 * keys * (mma_pitch(head_dim_qk) + mma_pitch(head_dim_v)),
            q_register_bytes = mma_fp32_q_in_registers(head_dim_qk, head_dim_v) ? 2 * rows * mma_pitch(head_dim_qk) : 0;
  return tiles > q_register_bytes ? tiles - q_register_bytes : 0;
}
ATTUNE_SHARED_FUNCTION int mma_fp32_tile_bytes(int rows, int keys, int head_dim_qk, int head_dim_v) {
  return mma_fp32_q_offset(rows, keys, head_dim_qk, head_dim_v) + 3 * rows * mma_pitch(head_dim_qk);
}
ATTUNE_SHARED_FUNCTION int mma_fp32_shared_bytes(int rows, int keys, int head_dim_qk, int head_dim_v) {
  return mma_fp32_tile_bytes(rows, keys, head_dim_qk, head_dim_v) + 128;
}

}  // namespace attune::kernels
