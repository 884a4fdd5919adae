// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile.h"

#include <cstring>

#include "core/workspace.h"

namespace attune::cpu {
namespace {

Scratch carve(Workspace& c, int64_t rows, int64_t head_dim_qk, int64_t head_dim_v, TileType tile) {
  Scratch s{};
  s.ld_q = round_up(head_dim_qk, 16);
  s.ld_o = round_up(head_dim_v, 16);
  s.q = c.take<float>(rows * s.ld_q);
  s.row_f32 = c.take<float>(std::max(s.ld_q, s.ld_o) + 16);
  s.o = c.take<float>(rows * s.ld_o);
  s.s = c.take<float>(rows * kMaxTileN);
  uint16_t* p = c.take<uint16_t>(rows * kMaxTileN);
  s.p = tile == TileType::kBF16 ? static_cast<void*>(p) : static_cast<void*>(s.s);
  s.row_max = c.take<float>(rows);
  s.row_sum = c.take<float>(rows);
  s.position = c.take<float>(rows);
  s.slope = c.take<float>(rows);
  s.k_stage = c.take<std::byte>(kMaxTileN * s.ld_q * 4);
  s.v_stage = c.take<std::byte>(kMaxTileN * s.ld_o * 4);
  s.k_pack = c.take<float>(s.ld_q * packed_columns(kMaxTileN));
  s.v_pack = c.take<float>(kMaxTileN * packed_columns(head_dim_v));
  s.zeros = c.take<std::byte>(std::max(s.ld_q, s.ld_o) * 4);
  s.tile = c.take<KvTile>(1);
  s.factors = c.take<float>(2 * kDecodeRows * kDecodeN);
  for (AheadRows*& rows : s.ahead) rows = c.take<AheadRows>(1);
  return s;
}

}  // namespace

size_t scratch_bytes(int64_t rows, int64_t head_dim_qk, int64_t head_dim_v) {
  Workspace c(nullptr, kCacheLine);
  carve(c, rows, head_dim_qk, head_dim_v, TileType::kF32);
  return c.size();
}

Scratch make_scratch(std::byte* base, int64_t rows, int64_t head_dim_qk, int64_t head_dim_v, TileType tile) {
  Workspace c(base, kCacheLine);
  Scratch s = carve(c, rows, head_dim_qk, head_dim_v, tile);
  std::memset(s.zeros, 0, static_cast<size_t>(std::max(s.ld_q, s.ld_o) * 4));
  return s;
}

}  // namespace attune::cpu
