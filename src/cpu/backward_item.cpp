// SPDX-License-Identifier: Apache-2.0
#include "cpu/backward_item.h"

#include <algorithm>
#include <type_traits>

#include "core/dtype.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

float element(float x) { return x; }
float element(bf16_t x) { return bf16_to_float(x); }

template <class T>
class ItemRun {
 public:
  using Tile = typename GradientTiles<T>::Tile;

  ItemRun(const GradientRun& run, const Sequence& sequence, const GradientItem& item, GradientScratch<T>& scratch)
      : run_(run),
        p_(run.p.forward),
        sequence_(sequence),
        item_(item),
        s_(scratch),
        tiles_(run, sequence, item.sequence, scratch) {}

  void run() {
    const int64_t keys = std::min(item_.key_end, sequence_.seqlen_kv()) - item_.key_begin;
    if (item_.dk) std::fill_n(s_.dk, std::max<int64_t>(keys, 0) * s_.ld_q, 0.0f);
    if (item_.dv) std::fill_n(s_.dv, std::max<int64_t>(keys, 0) * s_.ld_v, 0.0f);
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
      for (int64_t first = item_.query_begin; first < item_.query_end; first += kChunkRows) {
        run_chunk(head, first, std::min<int64_t>(kChunkRows, item_.query_end - first));
      }
    }
    const auto store = [&](const RowView& to, int64_t head_dim, float* sums, int64_t ld, float scale) {
      for (int64_t j = item_.key_begin; j < item_.key_end; ++j) {
        const bool in_use = j < sequence_.seqlen_kv();
        float* const row = in_use ? sums + (j - item_.key_begin) * ld : s_.row;
        if (!in_use) std::fill_n(row, head_dim, 0.0f);
        store_row(to, sequence_.kv_begin + j, item_.kv_head, head_dim, scale, row);
      }
    };
    if (item_.dk) store(run_.p.dk, p_.head_dim_qk, s_.dk, s_.ld_q, p_.scale);
    if (item_.dv) store(run_.p.dv, p_.head_dim_v, s_.dv, s_.ld_v, 1.0f);
  }

 private:
  void store_row(const RowView& to, int64_t row, int64_t head, int64_t n, float scale, float* sums) const {
    for (int64_t i = 0; i < n; ++i) sums[i] *= scale;
    write_row(to, row, head, n, sums);
  }

  void run_chunk(int64_t head, int64_t first, int64_t count) {
    const KeyRange seen = visible_keys(p_, sequence_, item_.sequence, first, first + count);
    const int64_t begin = std::max(seen.first, item_.key_begin) / kTileKeys * kTileKeys;
    const int64_t end = std::min({seen.last + 1, item_.key_end, sequence_.seqlen_kv()});
    if (item_.dq) std::fill_n(s_.dq, count * s_.ld_q, 0.0f);
    if (begin < end) tiles_.stage(head, first, count);
    for (int64_t key = begin; key < end; key += kTileKeys) {
      tiles_.load_keys(item_.kv_head, key);
      for (int64_t row = 0; row < count; row += kTileRows) {
        Tile tile;
        if (!tiles_.compute(static_cast<int>(row), static_cast<int>(std::min<int64_t>(kTileRows, count - row)), false,
                            tile)) {
          continue;
        }
        add_products(tile);
        if (tiles_.any_bad()) add_bad_products(tile);
      }
    }
    for (int64_t i = 0; item_.dq && i < count; ++i) {
      store_row(run_.p.dq, sequence_.q_begin + first + i, head, p_.head_dim_qk, p_.scale, s_.dq + i * s_.ld_q);
    }
  }

  int64_t first_sum() const { return tiles_.first_key() - item_.key_begin; }

  // Rows with a NaN or an infinity are 0 in all three products: 0 * NaN must not reach rows that do not see them.
  // add_bad_products() adds what they give to those that do.
  void add_products(const Tile& tile) {
    const KernelTable& kt = run_.kernels;
    if (item_.dv) {
      transpose(tile, s_.s, s_.p_columns);
      multiply(kt, tile.n, p_.head_dim_v, tile.m, s_.p_columns, kTileRows,
               rows_of(tile, s_.dout, s_.dout_pairs, s_.bad_dout, s_.ld_v), s_.ld_v, s_.dv + first_sum() * s_.ld_v,
               s_.ld_v, true);
    }
    if (item_.dk) {
      transpose(tile, s_.d, s_.d_columns);
      multiply(kt, tile.n, p_.head_dim_qk, tile.m, s_.d_columns, kTileRows,
               rows_of(tile, s_.q, s_.q_pairs, s_.bad_q, s_.ld_q), s_.ld_q, s_.dk + first_sum() * s_.ld_q, s_.ld_q,
               true);
    }
    if (item_.dq) {
      multiply(kt, tile.m, p_.head_dim_qk, tile.n, gradient_rows(tile), kTileKeys, s_.k_rows, s_.ld_q,
               s_.dq + tile.row * s_.ld_q, s_.ld_q, true);
    }
  }

  // Transposes a tile, to the type of the operands.
  void transpose(const Tile& tile, const float* from, T* to) {
    const float* rows[kTileRows];
    for (int r = 0; r < tile.m; ++r) rows[r] = from + r * kTileKeys;
    if constexpr (std::is_same_v<T, float>) {
      run_.kernels.pack_k_f32(rows, tile.m, tile.n, to, kTileRows);
    } else {
      run_.kernels.pack_k_f32(rows, tile.m, tile.n, s_.transposed, kTileRows);
      const int64_t n = round_up(tile.m, 16);
      for (int j = 0; j < tile.n; ++j) {
        run_.kernels.to_bf16(ATTUNE_FLOAT32, s_.transposed + j * kTileRows, n, to + j * kTileRows);
      }
    }
  }

  const T* gradient_rows(const Tile& tile) {
    if constexpr (std::is_same_v<T, float>) {
      return s_.d;
    } else {
      const int64_t n = round_up(tile.n, 16);
      for (int r = 0; r < tile.m; ++r) {
        run_.kernels.to_bf16(ATTUNE_FLOAT32, s_.d + r * kTileKeys, n, s_.d_rows + r * kTileKeys);
      }
      return s_.d_rows;
    }
  }

  // The tile's rows of q or dout as the right operand; those with a NaN or an infinity as zeros.
  const T* rows_of(const Tile& tile, const T* rows, const T* pairs, const bool* bad, int64_t ld) {
    if constexpr (!std::is_same_v<T, float>) return pairs + tile.row * ld;
    const T* const from = rows + tile.row * ld;
    if (std::none_of(bad + tile.row, bad + tile.row + tile.m, [](bool b) { return b; })) return from;
    for (int r = 0; r < tile.m; ++r) {
      if (bad[tile.row + r]) {
        std::fill_n(s_.clean + r * ld, ld, T{0});
      } else {
        std::copy_n(from + r * ld, ld, s_.clean + r * ld);
      }
    }
    return s_.clean;
  }

  // Adds what rows with a NaN or an infinity give to the rows that see them.
  void add_bad_products(const Tile& tile) {
    const auto add = [](float weight, const T* row, int64_t n, float* to) {
      for (int64_t c = 0; c < n; ++c) to[c] += weight * element(row[c]);
    };
    const int64_t d = p_.head_dim_qk;
    for (int r = 0; r < tile.m; ++r) {
      const int64_t i = tile.row + r;
      for (int j = 0; j < tile.n; ++j) {
        const int at = r * kTileKeys + j;
        if (!s_.seen[at]) continue;
        const int64_t sum = first_sum() + j;
        if (item_.dv && s_.bad_dout[i]) {
          add(s_.s[at], s_.dout + i * s_.ld_v, p_.head_dim_v, s_.dv + sum * s_.ld_v);
        }
        if (item_.dk && s_.bad_q[i]) add(s_.d[at], s_.q + i * s_.ld_q, d, s_.dk + sum * s_.ld_q);
        if (item_.dq && s_.bad_k[j]) {
          add_strided(s_.d[at], sequence_.kv_begin + tiles_.first_key() + j, s_.dq + i * s_.ld_q);
        }
      }
    }
  }

  void add_strided(float weight, int64_t key_row, float* to) {
    read_row(p_.k, key_row, item_.kv_head, p_.head_dim_qk, s_.row);
    for (int64_t c = 0; c < p_.head_dim_qk; ++c) to[c] += weight * s_.row[c];
  }

  const GradientRun& run_;
  const Problem& p_;
  const Sequence& sequence_;
  const GradientItem& item_;
  GradientScratch<T>& s_;
  GradientTiles<T> tiles_;
};

}  // namespace

template <class T>
void run_gradient_item(const GradientRun& run, const Sequence& sequence, const GradientItem& item,
                       GradientScratch<T>& scratch) {
  ItemRun<T>(run, sequence, item, scratch).run();
}

template void run_gradient_item(const GradientRun&, const Sequence&, const GradientItem&, GradientScratch<float>&);
template void run_gradient_item(const GradientRun&, const Sequence&, const GradientItem&, GradientScratch<bf16_t>&);

}  // namespace attune::cpu
