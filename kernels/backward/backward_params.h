// SPDX-License-Identifier: Apache-2.0
// The parameters of the backward's kernels. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/work_tile_params.h"

namespace attune::kernels {

// dout, or a gradient: strides as in NewRows. data null: not given.
struct GradientRows {
  char* data;
  long long batch_stride, row_stride, head_stride, dim_stride;  // in elements
  int dtype;
};

// The stats of a row of q, from which P = 2^(score - lse2) and dS = P (dP - delta).
struct alignas(8) RowStats {
  float lse2;   // the lse in base 2; infinity: the row sees nothing
  float delta;  // <dout, out> - dlse
};
// The stats of a row of q in calls with both sinks and dlse. lse2 leaves the sink out, and share adds it to P:
// a = 2^(score - lse2), P = a share, dS = a (share dP - delta).
struct alignas(16) SinkRowStats {
  float lse2;
  float delta;  // share <dout, out> - dlse
  float share;  // the sum of P over the keys: 1 minus P of the sink
  float unused;
};

// The rows of a thread block, of q or of k: kBackwardRows rows of a sequence from `begin` on, the same for all heads.
struct BackwardTile {
  int batch, begin;
};
// The header of a list, which is followed by its tiles: series with the most work first (backward/schedule.cu).
struct alignas(16) BackwardList {
  int num_tiles;
  unsigned next;  // the counter of the tile scheduler: the next ticket (backward/config.cuh)
};

// The dense keys are new_k and new_v.
struct BackwardParams : WorkTileParams {
  GradientRows dout, dq, dk, dv;
  const float* dlse;  // as lse; null: 0
  long long dlse_batch_stride, dlse_row_stride, dlse_head_stride;
  // RowStats or SinkRowStats [num_heads_q][stats_stride], sequence after sequence: stats_of() (backward/rows.cuh)
  char* stats;
  long long stats_stride;
  int stats_vectors;               // out and dout are 16-bit and allow loads of 16 bytes
  BackwardList *q_list, *kv_list;  // blocks of queries; of keys
  // If all gradients are computed in one pass: sums of dq without the scale, [num_heads_q][dq_tiles] of
  // backward/dq.cuh; and a semaphore for each, which counts the blocks of keys that have added.
  float* dq_sums;
  unsigned* dq_semaphores;
  int dq_tiles;
  // [blocks][heads]: whether a block of rows has a NaN or infinity, for recompute.cu. null: not recorded.
  int *q_nonfinite, *kv_nonfinite;
  int max_q_tiles, max_kv_tiles;
  // Sums of blocks of queries, [entry][total_q / 128 + batch], for sum_blocks.cu; null: not wanted. sink_sums: -dsinks,
  // an entry for each query head. t5_sums: dt5_bias, an entry for each of its entries.
  float *sink_sums, *t5_sums;
  int t5_entries;  // of a head
  float* dbias;    // [dbias_heads][bias.rows][bias.columns]
  int dbias_heads;  // 1: all query heads share the table
  long long dbias_head_stride, dbias_row_stride, dbias_column_stride;
};

// The parameters of sum_blocks.cu.
struct BlockSumParams : BackwardParams {
  const float* sums;
  float* to;  // [heads][entries]
  long long to_head_stride, to_entry_stride;
  int entries;
  float factor;
};

// Rows of a thread block, queries or keys.
constexpr int kBackwardRows = 128;

// ATTUNE_GRADIENTS: what a launch of a gradient kernel computes. All of dq, dk and dv; dk and dv; or one of them.
constexpr int kGradientDq = 1, kGradientDk = 2, kGradientDv = 4, kGradientDkDv = kGradientDk | kGradientDv,
              kGradients = kGradientDq | kGradientDkDv;
constexpr int kGradientDbias = 8, kGradientDt5Bias = 16, kGradientTables = kGradientDbias | kGradientDt5Bias,
              kGradientDsinks = 32;

ATTUNE_SHARED_FUNCTION int lines_of(int head_dim) { return (head_dim + 63) / 64; }
// Whether the registers hold dk and dv of 128 keys together, in accumulators of 32 channels. If not, each gradient has
// a separate pass.
ATTUNE_SHARED_FUNCTION bool has_one_pass(int head_dim_qk, int head_dim_v) {
  return lines_of(head_dim_qk) <= 3 && align_up(head_dim_qk, 32) + align_up(head_dim_v, 32) <= 320;
}
// Rows of a tile of the streamed side, which a block takes one after the other. There are half as many if dk and dv
// leave few registers.
ATTUNE_SHARED_FUNCTION int backward_tile(int head_dim_qk, int head_dim_v) {
  const bool narrow = head_dim_qk <= 128 && head_dim_v <= 128;
  return !narrow && has_one_pass(head_dim_qk, head_dim_v) ? 32 : 64;
}

// The number of floats in a tile of dq's sums: whole lines of 64 channels.
ATTUNE_SHARED_FUNCTION int dq_tile_floats(int head_dim_qk, int head_dim_v) {
  return lines_of(head_dim_qk) * 64 * backward_tile(head_dim_qk, head_dim_v);
}

// Shared memory of the gradient kernel (backward/config.cuh): stages of qk (q, or k in the pass of dq) and of vdo
// (dout, or v). row_stats: the bytes of a row's stats.
constexpr int kBackwardWorkTileBytes = 112;  // with its index before it
ATTUNE_SHARED_FUNCTION int backward_shared_bytes(int head_dim_qk, int head_dim_v, int gradients, int qk_stages,
                                                 int vdo_stages, int row_stats) {
  const int tile = backward_tile(head_dim_qk, head_dim_v), lines_qk = lines_of(head_dim_qk),
            lines_v = lines_of(head_dim_v);
  const int resident = lines_qk + (gradients == kGradientDv ? 0 : lines_v);
  const int inputs = resident * kBackwardRows + (lines_qk * qk_stages + lines_v * vdo_stages) * tile;
  const int sums = 2 * (kBackwardRows * tile * 2 + dq_tile_floats(head_dim_qk, head_dim_v) * 4);
  const int stats = qk_stages * tile * row_stats;
  const int barriers_and_work = (1 + 2 * qk_stages + 2 * vdo_stages) * 8 + kBackwardWorkTileBytes;
  return align_up(inputs * 128 + (gradients == kGradients ? sums : 16) + stats + barriers_and_work, 1024);
}

}  // namespace attune::kernels
