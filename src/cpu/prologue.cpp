// SPDX-License-Identifier: Apache-2.0
#include "cpu/prologue.h"

#include <algorithm>

#include "core/dtype.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

constexpr int64_t kChunk = 128;  // channels at a time where parameters need conversion

void load(const Prologue& p, int which, const RowView& view, int64_t n, int64_t row, int64_t head, float* x) {
  read_row(view, row, head, n, x);
  if (p.qkv_scale == nullptr || !is_8bit(view.dtype)) return;
  const float scale = p.qkv_scale[which * p.qkv_scale_stride];
  for (int64_t d = 0; d < n; ++d) x[d] *= scale;
}

// Calls apply(channel, count, values) over the row (i, j) of a parameter.
template <class Apply>
void for_param_row(const ParamView& view, int64_t i, int64_t j, int64_t n, Apply apply) {
  const std::byte* row = view.data + i * view.stride[0] + j * view.stride[1];
  const int64_t stride = view.stride[2] / dtype_size(view.dtype);
  float values[kChunk];
  for (int64_t d = 0; d < n; d += kChunk) {
    const int64_t m = std::min(kChunk, n - d);
    read_elements(view.dtype, row + d * view.stride[2], stride, m, values);
    apply(d, m, values);
  }
}

void add_bias(const ParamView& bias, int64_t head, int64_t n, float* x) {
  if (!bias) return;
  for_param_row(bias, 0, head, n, [x](int64_t d, int64_t m, const float* b) {
    for (int64_t i = 0; i < m; ++i) x[d + i] += b[i];
  });
}

void multiply_ia3(const Prologue& p, const ParamView& ia3, int64_t head, int64_t batch, int64_t n, float* x) {
  if (!ia3) return;
  const int64_t task = p.ia3_task ? p.ia3_task(batch) : 0;
  if (task < 0 || task >= ia3.shape[0]) return;
  for_param_row(ia3, task, head, n, [x](int64_t d, int64_t m, const float* w) {
    for (int64_t i = 0; i < m; ++i) x[d + i] *= w[i];
  });
}

inline void rotate_pair(float& x, float& y, float c, float s) {
  const float a = x, b = y;
  x = c * a - s * b;
  y = c * b + s * a;
}

// Rotates n pairs (x[j], y[j]) (NeoX), or adjacent pairs of x (interleaved).
void rotate_run(bool interleaved, float* x, float* y, int64_t n, const float* c, const float* s) {
  if (interleaved) {
    for (int64_t j = 0; j < n; ++j) rotate_pair(x[2 * j], x[2 * j + 1], c[j], s[j]);
  } else {
    for (int64_t j = 0; j < n; ++j) rotate_pair(x[j], y[j], c[j], s[j]);
  }
}

// The cosines and sines of a position; null outside the table.
const float* position_row(const Prologue& p, int64_t table, int64_t position) {
  if (position < 0 || position >= p.num_positions) return nullptr;
  return p.cos_sin + table * p.table_stride + position * p.position_stride;
}

// Which of the three components of a position (mRoPE) rotates pair j.
class SectionOf {
 public:
  explicit SectionOf(const Prologue& p) : p_(p), total_(p.mrope_section[0] + p.mrope_section[1] + p.mrope_section[2]) {}
  int operator()(int64_t j) const {
    if (p_.mrope_interleaved) {
      if (j % 3 == 1 && j < 3 * int64_t{p_.mrope_section[1]}) return 1;
      if (j % 3 == 2 && j < 3 * int64_t{p_.mrope_section[2]}) return 2;
      return 0;
    }
    const int64_t u = j % total_;
    if (u < p_.mrope_section[0]) return 0;
    return u < p_.mrope_section[0] + p_.mrope_section[1] ? 1 : 2;
  }

 private:
  const Prologue& p_;
  int64_t total_;
};

void rotate_sections(const Prologue& p, int64_t table, int64_t row, float* x) {
  const float* rows[3];
  for (int c = 0; c < 3; ++c) rows[c] = position_row(p, table, p.positions(row, c));
  const int64_t half = p.rotary_dim / 2;
  const SectionOf section_of(p);
  for (int64_t j = 0; j < half; ++j) {
    const float* at = rows[section_of(j)];
    if (at == nullptr) continue;
    const int64_t first = p.interleaved ? 2 * j : j, second = p.interleaved ? 2 * j + 1 : j + half;
    rotate_pair(x[first], x[second], at[j * p.channel_stride], at[(half + j) * p.channel_stride]);
  }
}

void rotate(const Prologue& p, int64_t row, int64_t batch, int64_t position, float* x) {
  if (p.cos_sin == nullptr) return;
  const int64_t table = p.rope_table_index ? p.rope_table_index(batch) : 0;
  if (table < 0 || table >= p.num_tables) return;
  x += p.rope_offset;
  if (p.has_positions && p.positions.cols == 3) {
    rotate_sections(p, table, row, x);
    return;
  }
  const float* at = position_row(p, table, p.has_positions ? p.positions(row, 0) : position);
  if (at == nullptr) return;
  const int64_t half = p.rotary_dim / 2;
  if (p.channel_stride == 1) {
    rotate_run(p.interleaved, x, x + half, half, at, at + half);
    return;
  }
  float c[kChunk], s[kChunk];
  for (int64_t j = 0; j < half; j += kChunk) {
    const int64_t m = std::min(kChunk, half - j);
    for (int64_t i = 0; i < m; ++i) {
      c[i] = at[(j + i) * p.channel_stride];
      s[i] = at[(half + j + i) * p.channel_stride];
    }
    rotate_run(p.interleaved, p.interleaved ? x + 2 * j : x + j, x + half + j, m, c, s);
  }
}

}  // namespace

void prepare_q_row(const Prologue& p, const RowView& q, int64_t head_dim, int64_t row, int64_t head, int64_t batch,
                   int64_t position, float* out) {
  load(p, 0, q, head_dim, row, head, out);
  if (!p.any) return;
  add_bias(p.q_bias, head, head_dim, out);
  rotate(p, row, batch, position, out);
  if (!p.logn) return;
  const float factor = p.logn(std::clamp<int64_t>(position, 0, p.logn_length - 1));
  for (int64_t d = 0; d < head_dim; ++d) out[d] *= factor;
}

void prepare_k_row(const Prologue& p, const RowView& k, int64_t head_dim, int64_t row, int64_t head, int64_t batch,
                   int64_t position, float* out) {
  load(p, 1, k, head_dim, row, head, out);
  if (!p.any) return;
  add_bias(p.k_bias, head, head_dim, out);
  multiply_ia3(p, p.ia3_k, head, batch, head_dim, out);
  rotate(p, row, batch, position, out);
}

void prepare_v_row(const Prologue& p, const RowView& v, int64_t head_dim, int64_t row, int64_t head, int64_t batch,
                   float* out) {
  load(p, 2, v, head_dim, row, head, out);
  if (!p.any) return;
  add_bias(p.v_bias, head, head_dim, out);
  multiply_ia3(p, p.ia3_v, head, batch, head_dim, out);
}

}  // namespace attune::cpu
