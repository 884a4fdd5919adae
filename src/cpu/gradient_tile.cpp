// SPDX-License-Identifier: Apache-2.0
#include "cpu/gradient_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <type_traits>

#include "cpu/rows.h"

namespace attune::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, bf16_t>;
template <class T>
constexpr int32_t kDtype = kIsBf16<T> ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT32;

void pack_columns(const KernelTable& kt, const float* const* rows, int n, int64_t d, float* out) {
  kt.pack_k_f32(rows, n, static_cast<int>(d), out, kTileKeys);
}
void pack_columns(const KernelTable& kt, const bf16_t* const* rows, int n, int64_t d, bf16_t* out) {
  kt.pack_k_bf16(rows, n, static_cast<int>(d), out, kTileKeys);
}

}  // namespace

template <class T>
GradientScratch<T>::GradientScratch(Workspace& c, int64_t head_dim_qk, int64_t head_dim_v, int64_t keys,
                                    int64_t num_buckets) {
  const bool bf16 = kIsBf16<T>;
  ld_q = round_up(head_dim_qk, 16);
  ld_v = round_up(head_dim_v, 16);
  const int64_t ld = std::max(ld_q, ld_v);
  q = c.take<T>(kChunkRows * ld_q);
  dout = c.take<T>(kChunkRows * ld_v);
  q_pairs = bf16 ? c.take<T>(kChunkRows * ld_q) : nullptr;
  dout_pairs = bf16 ? c.take<T>(kChunkRows * ld_v) : nullptr;
  lse2 = c.take<float>(kChunkRows);
  share = c.take<float>(kChunkRows);
  delta = c.take<float>(kChunkRows);
  bad_q = c.take<bool>(kChunkRows);
  bad_dout = c.take<bool>(kChunkRows);
  k_columns = c.take<T>(ld_q * kTileKeys);
  v_columns = c.take<T>(ld_v * kTileKeys);
  k_rows = c.take<T>(kTileKeys * ld_q);
  stage = c.take<T>(kTileKeys * ld);
  bad_k = c.take<bool>(kTileKeys);
  s = c.take<float>(kTileRows * kTileKeys);
  d = c.take<float>(kTileRows * kTileKeys);
  capped = c.take<float>(kTileRows * kTileKeys);
  seen = c.take<bool>(kTileRows * kTileKeys);
  transposed = c.take<float>(kTileKeys * kTileRows);
  p_columns = bf16 ? c.take<T>(kTileKeys * kTileRows) : reinterpret_cast<T*>(transposed);
  d_columns = c.take<T>(kTileKeys * kTileRows);
  d_rows = bf16 ? c.take<T>(kTileRows * kTileKeys) : nullptr;
  clean = bf16 ? nullptr : c.take<T>(kTileRows * ld);
  slope = c.take<float>(kTileRows);
  position = c.take<float>(kTileRows);
  row = c.take<float>(ld);
  other_row = c.take<float>(ld);
  rows = c.take<const T*>(kChunkRows);
  dq = c.take<float>(kChunkRows * ld_q);
  dk = c.take<float>(keys * ld_q);
  dv = c.take<float>(keys * ld_v);
  buckets = c.take<double>(num_buckets);
}

template <class T>
bool GradientTiles<T>::any_nonfinite(const T* x, int64_t n) const {
  if constexpr (kIsBf16<T>) {
    return run_.kernels.any_nonfinite_bf16(x, n);
  } else {
    return run_.kernels.any_nonfinite_f32(x, n);
  }
}

// A row as operands, exactly, padded with zeros.
template <class T>
void GradientTiles<T>::stage_row(const RowView& from, int64_t row, int64_t head, int64_t n, T* to) const {
  if (from.dtype == kDtype<T> && from.dim_stride == 1) {
    std::memcpy(to, from.at(row, head), static_cast<size_t>(n) * sizeof(T));
  } else if constexpr (kIsBf16<T>) {
    read_row(from, row, head, n, s_.row);
    run_.kernels.to_bf16(ATTUNE_FLOAT32, s_.row, n, to);
  } else {
    read_row(from, row, head, n, to);
  }
  std::fill(to + n, to + round_up(n, 16), T{0});
}

// Stores the constants of row i of the chunk: lse2, share = 1 / (1 + exp(sink - lse)) and delta = share * <dout, out> -
// dlse. With a = exp(z - lse), P is a * share, and the gradient of a score a * (share * dP - delta).
template <class T>
void GradientTiles<T>::stage_constants(int64_t i, int64_t row, int64_t head) {
  const BackwardProblem& p = run_.p;
  float lse;
  std::memcpy(&lse, p_.lse.at(row, head), sizeof(lse));
  s_.lse2[i] = lse * std::numbers::log2e_v<float>;
  s_.share[i] = p_.sinks ? static_cast<float>(1 / (1 + std::exp(static_cast<double>(p_.sinks(head)) - lse))) : 1.0f;
  float sum = 0, dlse = 0;
  const float* out = s_.other_row;
  read_row(p.dout, row, head, p_.head_dim_v, s_.row);
  read_row(p_.out, row, head, p_.head_dim_v, s_.other_row);
  run_.kernels.qk_rows_f32(1, 1, static_cast<int>(p_.head_dim_v), s_.row, static_cast<int>(s_.ld_v), &out, &sum, 1);
  if (p.dlse) std::memcpy(&dlse, p.dlse.at(row, head), sizeof(dlse));
  s_.delta[i] = s_.share[i] * sum - dlse;
}

template <class T>
void GradientTiles<T>::stage(int64_t head, int64_t first, int64_t count) {
  head_ = head;
  first_query_ = first;
  num_queries_ = count;
  any_bad_rows_ = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = sequence_.q_begin + first + i;
    stage_row(p_.q, row, head, p_.head_dim_qk, s_.q + i * s_.ld_q);
    stage_row(run_.p.dout, row, head, p_.head_dim_v, s_.dout + i * s_.ld_v);
    stage_constants(i, row, head);
    s_.bad_q[i] = any_nonfinite(s_.q + i * s_.ld_q, p_.head_dim_qk);
    s_.bad_dout[i] = any_nonfinite(s_.dout + i * s_.ld_v, p_.head_dim_v);
    any_bad_rows_ = any_bad_rows_ || s_.bad_q[i] || s_.bad_dout[i];
  }
  if constexpr (kIsBf16<T>) {
    const auto pack = [&](const T* from, const bool* bad, int64_t n, int64_t ld, T* to) {
      for (int64_t i = 0; i < count; ++i) s_.rows[i] = bad[i] ? nullptr : from + i * ld;
      run_.kernels.pack_v_bf16(s_.rows, static_cast<int>(count), static_cast<int>(n), to, static_cast<int>(ld));
    };
    pack(s_.q, s_.bad_q, p_.head_dim_qk, s_.ld_q, s_.q_pairs);
    pack(s_.dout, s_.bad_dout, p_.head_dim_v, s_.ld_v, s_.dout_pairs);
  }
}

template <class T>
const T* GradientTiles<T>::place_key(const RowView& from, int64_t row, int64_t head, int64_t n, T* stage) const {
  if (from.dtype == kDtype<T> && from.dim_stride == 1) return reinterpret_cast<const T*>(from.at(row, head));
  stage_row(from, row, head, n, stage);
  return stage;
}

template <class T>
void GradientTiles<T>::load_keys(int64_t kv_head, int64_t first) {
  first_key_ = first;
  num_keys_ = static_cast<int>(std::min<int64_t>(kTileKeys, sequence_.seqlen_kv() - first));
  const auto place = [&](const RowView& from, int64_t n, int64_t ld) {
    for (int j = 0; j < num_keys_; ++j) {
      s_.rows[j] = place_key(from, sequence_.kv_begin + first + j, kv_head, n, s_.stage + j * ld);
    }
  };
  place(p_.v, p_.head_dim_v, s_.ld_v);
  pack_columns(run_.kernels, s_.rows, num_keys_, p_.head_dim_v, s_.v_columns);
  place(p_.k, p_.head_dim_qk, s_.ld_q);
  pack_columns(run_.kernels, s_.rows, num_keys_, p_.head_dim_qk, s_.k_columns);
  any_bad_k_ = false;
  for (int j = 0; j < num_keys_; ++j) {
    s_.bad_k[j] = any_nonfinite(s_.rows[j], p_.head_dim_qk);
    any_bad_k_ = any_bad_k_ || s_.bad_k[j];
    if (s_.bad_k[j]) s_.rows[j] = nullptr;
  }
  if constexpr (kIsBf16<T>) {
    run_.kernels.pack_v_bf16(s_.rows, num_keys_, static_cast<int>(p_.head_dim_qk), s_.k_rows,
                             static_cast<int>(s_.ld_q));
  } else {
    for (int j = 0; j < num_keys_; ++j) {
      T* to = s_.k_rows + j * s_.ld_q;
      const int64_t n = s_.rows[j] != nullptr ? p_.head_dim_qk : 0;
      std::copy_n(s_.rows[j], n, to);
      std::fill(to + n, to + s_.ld_q, T{0});
    }
  }
}

// Leaves out rows that see none of the keys, by causality and windows alone. Begins at an even row of the chunk, as
// rows of bf16 come in pairs.
template <class T>
typename GradientTiles<T>::Tile GradientTiles<T>::trim(int row, int m) const {
  const int64_t first = first_query_ + row;
  Tile tile{row, m, 0};
  if (p_.num_ranges == 0) {
    const int64_t position = sequence_.position(first), last_key = first_key_ + num_keys_ - 1;
    // Row r sees keys up to last_visible(position) + r, and from position + r - window_left on.
    const int64_t before = std::clamp<int64_t>(first_key_ - p_.last_visible(position), 0, m) / 2 * 2;
    const int64_t end = p_.window_left < 0 ? m : std::clamp<int64_t>(last_key + p_.window_left - position + 1, 0, m);
    tile.row += static_cast<int>(before);
    tile.m = static_cast<int>(std::max<int64_t>(end - before, 0));
    if (tile.m == 0) return tile;
  }
  const int64_t begin = first_query_ + tile.row;
  const KeyRange keys = visible_keys(p_, sequence_, b_, begin, begin + tile.m);
  if (keys.first >= first_key_ + num_keys_) return tile;
  tile.n = static_cast<int>(std::clamp<int64_t>(keys.last - first_key_ + 1, 0, num_keys_));
  return tile;
}

template <class T>
bool GradientTiles<T>::compute(int row, int m, bool for_bias, Tile& tile) {
  tile = trim(row, m);
  if (tile.m == 0 || tile.n == 0) return false;
  const KernelTable& kt = run_.kernels;
  multiply(kt, tile.m, tile.n, static_cast<int>(p_.head_dim_qk), s_.q + tile.row * s_.ld_q, s_.ld_q, s_.k_columns,
           kTileKeys, s_.s, kTileKeys, false);
  const bool capped = p_.softcap > 0 && !for_bias;
  if (capped) {
    std::memcpy(s_.capped, s_.s, static_cast<size_t>(tile.m) * kTileKeys * sizeof(float));
    kt.softcap(tile.m, tile.n, s_.capped, kTileKeys, p_.scale, p_.softcap);
  }
  KvTile keys;
  keys.n = tile.n;
  Item item{};
  item.row_begin = first_query_;
  item.sequence = static_cast<int32_t>(b_);
  const ScoreRows rows{run_.single, sequence_, item, run_.t5, head_};
  Scratch for_terms{};
  for_terms.slope = s_.slope;
  for_terms.position = s_.position;
  GradientTile t{};
  t.scale2 = apply_score_terms(rows, tile.row, tile.m, first_key_, keys, s_.s, for_terms, kt);
  if (!fully_visible(rows, tile.row, tile.m, first_key_, keys) &&
      apply_mask(rows, tile.row, tile.m, first_key_, keys, s_.s) == 0) {
    return false;
  }
  if (any_bad()) {
    for (int r = 0; r < tile.m; ++r) {
      for (int j = 0; j < tile.n; ++j) {
        s_.seen[r * kTileKeys + j] = s_.s[r * kTileKeys + j] != -kInf && s_.lse2[tile.row + r] != -kInf;
      }
    }
  }
  multiply(kt, tile.m, tile.n, static_cast<int>(p_.head_dim_v), s_.dout + tile.row * s_.ld_v, s_.ld_v, s_.v_columns,
           kTileKeys, s_.d, kTileKeys, false);
  t.m = tile.m;
  t.n = tile.n;
  t.s = s_.s;
  t.d = s_.d;
  t.ld = kTileKeys;
  t.lse2 = s_.lse2 + tile.row;
  t.share = s_.share + tile.row;
  t.delta = s_.delta + tile.row;
  t.capped = capped ? s_.capped : nullptr;
  t.cap = p_.softcap;
  kt.softmax_gradient(t);
  return true;
}

template struct GradientScratch<float>;
template struct GradientScratch<bf16_t>;
template class GradientTiles<float>;
template class GradientTiles<bf16_t>;

}  // namespace attune::cpu
