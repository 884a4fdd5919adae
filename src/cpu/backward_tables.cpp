// SPDX-License-Identifier: Apache-2.0
// Gradients of what sequences and rows share: sinks, the bias table, T5's buckets. Each sum has one order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/backward_item.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

// Calls add(row of the chunk, key, dz) for each query of [begin, end) of a head and each key that it may see; dz is the
// gradient of the score behind the softcap.
template <class T, class Add>
void for_each_gradient(GradientTiles<T>& tiles, const Problem& p, const Sequence& sequence, int64_t b, int64_t head,
                       int64_t begin, int64_t end, const GradientScratch<T>& s, Add&& add) {
  for (int64_t first = begin; first < end; first += kChunkRows) {
    const int64_t count = std::min<int64_t>(kChunkRows, end - first);
    const KeyRange seen = visible_keys(p, sequence, b, first, first + count);
    const int64_t last = std::min(seen.last, sequence.seqlen_kv() - 1);
    if (seen.first > last) continue;
    tiles.stage(head, first, count);
    for (int64_t key = seen.first / kTileKeys * kTileKeys; key <= last; key += kTileKeys) {
      tiles.load_keys(head / p.group, key);
      for (int64_t row = 0; row < count; row += kTileRows) {
        typename GradientTiles<T>::Tile tile;
        const int m = static_cast<int>(std::min<int64_t>(kTileRows, count - row));
        if (!tiles.compute(static_cast<int>(row), m, true, tile)) continue;
        for (int r = 0; r < tile.m; ++r) {
          for (int j = 0; j < tile.n; ++j) add(first + tile.row + r, key + j, s.d[r * kTileKeys + j]);
        }
      }
    }
  }
}

}  // namespace

// The sink is a key whose value is 0: its probability times -<dout, out>.
template <class T>
void sum_sink_gradient(const GradientRun& run, const Sequence* sequences, int64_t head, GradientScratch<T>& s) {
  const Problem& p = run.p.forward;
  const double sink = p.sinks(head);
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t row = sequences[b].q_begin; row < sequences[b].q_begin + sequences[b].num_q; ++row) {
      float lse, delta = 0;
      std::memcpy(&lse, p.lse.at(row, head), sizeof(lse));
      if (lse == -std::numeric_limits<float>::infinity()) continue;
      const float* out = s.other_row;
      read_row(run.p.dout, row, head, p.head_dim_v, s.row);
      read_row(p.out, row, head, p.head_dim_v, s.other_row);
      run.kernels.qk_rows_f32(1, 1, static_cast<int>(p.head_dim_v), s.row, static_cast<int>(s.ld_v), &out, &delta, 1);
      sum -= static_cast<double>(delta) / (1 + std::exp(lse - sink));
    }
  }
  run.p.dsinks(0, 0, head) = static_cast<float>(sum);
}

template <class T>
void sum_bias_gradient(const GradientRun& run, const Sequence* sequences, int64_t table_head, int64_t begin,
                       GradientScratch<T>& s) {
  const Problem& p = run.p.forward;
  const TableView& to = run.p.dbias;
  const int64_t end = std::min<int64_t>(begin + kTileRows, to.shape[1]);
  for (int64_t position = begin; position < end; ++position) {
    for (int64_t key = 0; key < to.shape[2]; ++key) to(table_head, position, key) = 0;
  }
  const bool shared = to.shape[0] == 1;
  const int64_t head_begin = shared ? 0 : table_head, head_end = shared ? p.heads_q : table_head + 1;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& sequence = sequences[b];
    const int64_t query_begin = std::clamp<int64_t>(begin - sequence.position(0), 0, sequence.num_q);
    const int64_t query_end = std::clamp<int64_t>(end - sequence.position(0), 0, sequence.num_q);
    GradientTiles<T> tiles(run, sequence, b, s);
    for (int64_t head = head_begin; head < head_end; ++head) {
      for_each_gradient(tiles, p, sequence, b, head, query_begin, query_end, s,
                        [&](int64_t query, int64_t key, float dz) {
                          if (key < to.shape[2]) to(table_head, sequence.position(query), key) += dz;
                        });
    }
  }
}

template <class T>
void sum_t5_gradient(const GradientRun& run, const Sequence* sequences, int64_t head, GradientScratch<T>& s) {
  const Problem& p = run.p.forward;
  std::fill_n(s.buckets, p.t5_num_buckets, 0.0);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& sequence = sequences[b];
    GradientTiles<T> tiles(run, sequence, b, s);
    for_each_gradient(tiles, p, sequence, b, head, 0, sequence.num_q, s, [&](int64_t query, int64_t key, float dz) {
      s.buckets[run.t5(key - sequence.position(query))] += static_cast<double>(dz);
    });
  }
  for (int64_t i = 0; i < p.t5_num_buckets; ++i) run.p.dt5_bias(0, head, i) = static_cast<float>(s.buckets[i]);
}

template void sum_sink_gradient(const GradientRun&, const Sequence*, int64_t, GradientScratch<float>&);
template void sum_sink_gradient(const GradientRun&, const Sequence*, int64_t, GradientScratch<bf16_t>&);
template void sum_bias_gradient(const GradientRun&, const Sequence*, int64_t, int64_t, GradientScratch<float>&);
template void sum_bias_gradient(const GradientRun&, const Sequence*, int64_t, int64_t, GradientScratch<bf16_t>&);
template void sum_t5_gradient(const GradientRun&, const Sequence*, int64_t, GradientScratch<float>&);
template void sum_t5_gradient(const GradientRun&, const Sequence*, int64_t, GradientScratch<bf16_t>&);

}  // namespace attune::cpu
