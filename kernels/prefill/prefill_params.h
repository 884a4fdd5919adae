// SPDX-License-Identifier: Apache-2.0
// What the host and the prefill kernels share besides the parameters: sizes of shared memory, and loads of fp32 rows.
// Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/work_tile_params.h"

namespace attune::kernels {

// A bit of ATTUNE_SCORE besides those of common/kinds.h: scores are scaled before row_max is taken. Otherwise row_max
// is of products, whose largest is the largest score only if the scale is positive.
constexpr int kScaleFirst = 256;

// Raw rows of an 8-bit cache are blocks of 128 channels, with zeros beyond the head dim.
ATTUNE_SHARED_FUNCTION int raw_blocks(int head_dim) { return (head_dim + 127) / 128; }
ATTUNE_SHARED_FUNCTION int raw_bytes(int keys, int head_dim_qk, int head_dim_v) {
  return keys * kRawPitch * raw_blocks(head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v);
}

// In a cluster: the mbarriers of V's edge tiles, and the slots of the ring of tile indices.
ATTUNE_SHARED_FUNCTION int prefill_edge_barriers(int cluster, int value_stages) {
  return cluster > 1 ? value_stages : 1;
}
ATTUNE_SHARED_FUNCTION int prefill_tile_idx_slots(int cluster) { return cluster > 1 ? 8 : 0; }

// How many scales of a key, or of its value, a tile has room for.
ATTUNE_SHARED_FUNCTION int tile_scales(int token_scales, int head_dim_qk, int head_dim_v) {
  return token_scales > 0 ? scales_of_key(token_scales, head_dim_qk, head_dim_v) : 1;
}

// sizeof(prefill::SharedStorage); that file asserts it. raw_stages: of 8-bit tiles; 0 if there are none. element_size:
// of q. With fp8 only V passes through raw stages, and it has a line of 128 keys for each channel. fp32 numbers are
// three bf16 numbers (bf16x3).
ATTUNE_SHARED_FUNCTION int prefill_shared_bytes(int rows, int keys, int stages, int raw_stages, int token_scales,
                                                int head_dim_qk, int head_dim_v, int element_size,
                                                int query_stages = 1, int cluster = 1) {
  const bool fp8 = element_size == 1;
  const int bf16_parts = element_size == 4 ? 3 : 1, line = fp8 ? 128 : 64;
  const int blocks_qk = (head_dim_qk + line - 1) / line * bf16_parts,
            blocks_v = (head_dim_v + line - 1) / line * bf16_parts;
  const int q = query_stages * blocks_qk * rows * 128, k = stages * blocks_qk * keys * 128;
  const int v = (stages - (query_stages - 1)) * (fp8 ? align_up(head_dim_v, 32) : blocks_v * keys) * 128;
  const int raw = raw_stages * raw_bytes(keys, fp8 ? head_dim_v : head_dim_qk, head_dim_v);
  const int edges = prefill_edge_barriers(cluster, stages - (query_stages - 1)), ring = prefill_tile_idx_slots(cluster);
  const int barriers =
      align_up((4 * stages + 2 * raw_stages + 2 * kWorkSlots + edges + 2 * query_stages + ring) * 8, 16);
  const int masks = (stages + raw_stages) * align_up(4 + keys / 8, 16), over_cap = 16;
  const int limits = fp8 ? rows * 2 * 16 : 0, of_key = 2 * 4 * tile_scales(token_scales, head_dim_qk, head_dim_v);
  const int scales = !fp8 && raw_stages > 0 ? stages * keys * of_key : 0;
  const int slots = kWorkSlots * static_cast<int>(sizeof(WorkSlot)), is_last = align_up(8 + ring * 4, 16);
  return align_up(q + k + v + raw + barriers + masks + over_cap + limits + scales + slots + is_last, 1024);
}

// For threads that load rows themselves: whether four channels can be loaded at a time, because they are contiguous and
// aligned.
struct Fp32Rows {
  int q, dense_k, dense_v, cached_k, cached_v;
};

}  // namespace attune::kernels
