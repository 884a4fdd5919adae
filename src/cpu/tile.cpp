// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile.h"

#include <cstring>

namespace attune::cpu {
namespace {

// Hands out 64-byte aligned pieces; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    std::byte* p = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(p);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

Scratch carve(Carver& c, int64_t rows, int64_t head_dim_qk, int64_t head_dim_v, TileType tile) {
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
  s.k_pack = c.take<float>(s.ld_q * kMaxTileN);
  s.v_pack = c.take<float>(kMaxTileN * s.ld_o);
  s.zeros = c.take<std::byte>(std::max(s.ld_q, s.ld_o) * 4);
  s.tile = c.take<KvTile>(1);
  s.factors = c.take<float>(2 * kDecodeRows * kDecodeN);
  for (AheadRows*& rows : s.ahead) rows = c.take<AheadRows>(1);
  return s;
}

}  // namespace

size_t scratch_bytes(int64_t rows, int64_t head_dim_qk, int64_t head_dim_v) {
  Carver c(nullptr);
  carve(c, rows, head_dim_qk, head_dim_v, TileType::kF32);
  return c.used();
}

Scratch make_scratch(std::byte* base, int64_t rows, int64_t head_dim_qk, int64_t head_dim_v, TileType tile) {
  Carver c(base);
  Scratch s = carve(c, rows, head_dim_qk, head_dim_v, tile);
  std::memset(s.zeros, 0, static_cast<size_t>(std::max(s.ld_q, s.ld_o) * 4));
  return s;
}

}  // namespace attune::cpu
