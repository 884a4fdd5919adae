// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_item.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "cpu/prologue.h"

namespace attune::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Element i of row j of V.
float v_element(TileType row_type, const KvTile& tile, int j, int64_t i) {
  if (tile.codes != ATTUNE_DTYPE_NONE) return load_as_float(tile.codes, static_cast<const uint8_t*>(tile.v[j]) + i);
  if (row_type == TileType::kF16) return load_as_float(ATTUNE_FLOAT16, static_cast<const f16_t*>(tile.v[j]) + i);
  return row_type == TileType::kBF16 ? bf16_to_float(static_cast<const bf16_t*>(tile.v[j])[i])
                                     : static_cast<const float*>(tile.v[j])[i];
}

bool v_row_nonfinite(const Problem& p, const Compute& compute, TileType row_type, const KvTile& tile, int j) {
  if (tile.codes != ATTUNE_DTYPE_NONE) {
    bf16_t row[kMaxHeadDim];
    compute.kernels->to_bf16(tile.codes, tile.v[j], p.head_dim_v, row);
    return compute.kernels->any_nonfinite_bf16(row, p.head_dim_v);
  }
  if (row_type == TileType::kF16) {
    float row[kMaxHeadDim];
    compute.kernels->to_f32(ATTUNE_FLOAT16, tile.v[j], p.head_dim_v, row);
    return compute.kernels->any_nonfinite_f32(row, p.head_dim_v);
  }
  return row_type == TileType::kBF16
             ? compute.kernels->any_nonfinite_bf16(static_cast<const bf16_t*>(tile.v[j]), p.head_dim_v)
             : compute.kernels->any_nonfinite_f32(static_cast<const float*>(tile.v[j]), p.head_dim_v);
}

}  // namespace

void load_queries(const ScoreRows& rows, const Compute& compute, Scratch& scratch) {
  const Problem& p = rows.p;
  const int64_t d = p.head_dim_qk, rope = p.dim_q_rope;
  const bool plain = !p.prologue.any && p.q.dim_stride == 1 && (rope == 0 || p.q_rope.dim_stride == 1);
  const int32_t tile_dtype = compute.tile == TileType::kBF16 ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT32;
  const int64_t size = dtype_size(tile_dtype);
  for (int r = 0; r < rows.item.num_rows; ++r) {
    const int64_t query = rows.query(r), head = rows.head(r);
    const int64_t q_row = rows.sequence.q_begin + query;
    std::byte* to = static_cast<std::byte*>(scratch.q) + r * scratch.ld_q * size;
    if (plain && p.q.dtype == tile_dtype) {
      std::memcpy(to, p.q.at(q_row, head), static_cast<size_t>(p.dim_q * size));
      if (rope > 0) std::memcpy(to + p.dim_q * size, p.q_rope.at(q_row, head), static_cast<size_t>(rope * size));
    } else {
      float* row = compute.tile == TileType::kF32 ? reinterpret_cast<float*>(to) : scratch.row_f32;
      const int64_t position = rows.sequence.position(query);
      prepare_q_row(p.prologue, p.q, p.dim_q, q_row, head, rows.item.sequence, position, row);
      if (rope > 0) prepare_q_row(p.prologue, p.q_rope, rope, q_row, head, rows.item.sequence, position, row + p.dim_q);
      if (compute.tile == TileType::kBF16)
        compute.kernels->to_bf16(ATTUNE_FLOAT32, row, d, reinterpret_cast<bf16_t*>(to));
    }
    std::memset(to + d * size, 0, static_cast<size_t>((scratch.ld_q - d) * size));
  }
}

void start_rows(int num_rows, Scratch& scratch) {
  std::fill(scratch.row_max, scratch.row_max + num_rows, -kInf);
  std::fill(scratch.row_sum, scratch.row_sum + num_rows, 0.0f);
  std::fill(scratch.o, scratch.o + num_rows * scratch.ld_o, 0.0f);
}

bool v_nonfinite(const Problem& p, const Compute& compute, TileType row_type, const KvTile& tile) {
  for (int j = 0; j < tile.n; ++j) {
    if (tile.scaled && !std::isfinite(tile.v_factor[j])) return true;
    if (v_row_nonfinite(p, compute, row_type, tile, j)) return true;
  }
  return false;
}

void pv_of_visible(const Problem& p, TileType row_type, const KvTile& tile, int m, const bool* visible,
                   const void* p_tile, TileType p_type, float* o, int64_t ld_o) {
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < tile.n; ++j) {
      const int64_t at = static_cast<int64_t>(r) * kMaxTileN + j;
      if (!visible[at]) continue;
      const float weight = p_type == TileType::kBF16 ? bf16_to_float(static_cast<const bf16_t*>(p_tile)[at])
                                                     : static_cast<const float*>(p_tile)[at];
      for (int64_t c = 0; c < p.head_dim_v; ++c) o[r * ld_o + c] += weight * v_element(row_type, tile, j, c);
    }
  }
}

bool needs_recompute(const Problem& p, const Compute& compute, int64_t num_rows, const Scratch& scratch) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (std::isfinite(scratch.row_sum[r]) &&
        compute.kernels->any_nonfinite_f32(scratch.o + r * scratch.ld_o, p.head_dim_v))
      return true;
  }
  return false;
}

SoftmaxTile softmax_tile(const Problem& p, const Compute& compute, const KvTile& tile, int row, int m, int n,
                         float scale2, Scratch& scratch) {
  SoftmaxTile t{};
  t.m = m;
  t.n = n;
  t.s = scratch.s + static_cast<int64_t>(row) * kMaxTileN;
  t.lds = kMaxTileN;
  t.scale2 = scale2;
  t.v_scale = tile.scaled ? tile.v_factor : nullptr;
  t.row_max = scratch.row_max + row;
  t.row_sum = scratch.row_sum + row;
  t.o = scratch.o + row * scratch.ld_o;
  t.ldo = static_cast<int>(scratch.ld_o);
  t.dv = static_cast<int>(p.head_dim_v);
  t.p_type = compute.tile;
  t.p = compute.tile == TileType::kBF16
            ? static_cast<void*>(static_cast<bf16_t*>(scratch.p) + static_cast<int64_t>(row) * kMaxTileN)
            : static_cast<void*>(t.s);
  t.ldp = kMaxTileN;
  return t;
}

void record_visible(const float* s, int m, int n, bool* visible) {
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < n; ++j) {
      const int64_t at = static_cast<int64_t>(r) * kMaxTileN + j;
      visible[at] = s[at] != -kInf;
    }
  }
}

}  // namespace attune::cpu
