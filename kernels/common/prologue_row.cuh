// SPDX-License-Identifier: Apache-2.0
// The prologue of a row of q, k or v in registers, in fp32: dequantise, bias, IA3, RoPE, log-n. A thread takes units,
// each of two runs of kWidth channels (8, or 1 for any layout), so that it has both channels of each RoPE pair.
//
//   const PrologueToken token = prologue_token(p, row, sequence, position);          // once a token
//   for (int u = lane; u < num_units<kWidth>(rotary, head_dim); u += lanes) {        // rotary: 0 for rows of v
//     const Unit unit = unit_at<kWidth>(p, rotary, head_dim, u);
//     float x[2][kWidth];  // channels unit.first.. and unit.second.. as they were loaded (fp32); second -1: none
//     prepare_unit<kWidth>(p, token, kRowOfK, head, unit, load_rope<kWidth>(p, token, unit), /*narrow=*/8-bit, x);
//   }
//
// Tensors of the prologue may be null. Its branches do not diverge if all lanes of a warp have the same token.
#pragma once

#include "common/element.cuh"
#include "common/prologue_params.h"
#include "common/run.cuh"

namespace attune::common {

using kernels::PrologueParams;

constexpr int kRowOfQ = 0, kRowOfK = 1, kRowOfV = 2;

// The terms of the prologue that all rows of a token share.
struct PrologueToken {
  const float* rope[3];  // cosines and sines by component of the position; null: outside the table, no RoPE
  float logn;
  int task;  // of IA3; -1: none
};

// row: in q, k, v and positions; sequence: in the tables by sequence; position: absolute.
__device__ __forceinline__ PrologueToken prologue_token(const PrologueParams& p, long long row, int sequence,
                                                        long long position) {
  PrologueToken t = {{nullptr, nullptr, nullptr}, 1.0f, -1};
  if (p.ia3_k.data != nullptr || p.ia3_v.data != nullptr) {
    t.task = p.ia3_task.data != nullptr ? p.ia3_task.data[sequence * p.ia3_task.column_stride] : 0;
    if (t.task < 0 || t.task >= p.num_tasks) t.task = -1;
  }
  if (p.logn != nullptr) {
    const long long at = position < 0 ? 0 : position < p.logn_length ? position : p.logn_length - 1;
    t.logn = p.logn[at * p.logn_stride];
  }
  if (p.cos_sin == nullptr) return t;
  const long long table =
      p.rope_table_index.data != nullptr ? p.rope_table_index.data[sequence * p.rope_table_index.column_stride] : 0;
  if (table < 0 || table >= p.num_tables) return t;
  const int components = p.positions.data != nullptr ? p.components : 1;
#pragma unroll  // keeps rope[] in registers
  for (int c = 0; c < 3; ++c) {
    if (c >= components) break;
    const long long at = p.positions.data != nullptr
                             ? p.positions.data[row * p.positions.row_stride + c * p.positions.column_stride]
                             : position;
    if (at >= 0 && at < p.num_positions) t.rope[c] = p.cos_sin + table * p.table_stride + at * p.position_stride;
  }
  return t;
}

// Two runs of channels. pair: the unit's first RoPE pair; -1: no RoPE.
struct Unit {
  int first, second, pair;
};

// Units without RoPE come first, so that neighbouring units have a scale group of MLA.
template <int kWidth>
__device__ __forceinline__ int num_units(int rotary_dim, int head_dim) {
  return ((head_dim - rotary_dim) / kWidth + 1) / 2 + rotary_dim / (2 * kWidth);
}

// kWidth divides head_dim, rope_offset and half of rotary_dim, as the host has checked.
template <int kWidth>
__device__ __forceinline__ Unit unit_at(const PrologueParams& p, int rotary_dim, int head_dim, int u) {
  const int passing = (head_dim - rotary_dim) / kWidth;  // runs without RoPE
  const int rotary_unit = u - (passing + 1) / 2;
  if (rotary_unit >= 0) {
    if (p.interleaved) {
      const int first = p.rope_offset + rotary_unit * 2 * kWidth;
      return {first, first + kWidth, rotary_unit * kWidth};
    }
    const int first = p.rope_offset + rotary_unit * kWidth;
    return {first, first + rotary_dim / 2, rotary_unit * kWidth};
  }
  int first = 2 * u * kWidth, second = first + kWidth;
  if (rotary_dim > 0) {
    if (first >= p.rope_offset) first += rotary_dim;
    if (second >= p.rope_offset) second += rotary_dim;
  }
  return {first, 2 * u + 1 < passing ? second : -1, -1};
}

// The component of the position (mRoPE) that rotates pair j.
__device__ __forceinline__ int mrope_component(const PrologueParams& p, int j) {
  if (p.mrope_interleaved) {
    if (j % 3 == 1 && j < 3 * p.mrope_section[1]) return 1;
    if (j % 3 == 2 && j < 3 * p.mrope_section[2]) return 2;
    return 0;
  }
  const int u = j % (p.mrope_section[0] + p.mrope_section[1] + p.mrope_section[2]);
  return u < p.mrope_section[0] ? 0 : u < p.mrope_section[0] + p.mrope_section[1] ? 1 : 2;
}

__device__ __forceinline__ void rotate_pair(float& x, float& y, float c, float s) {
  const float a = x, b = y;
  x = c * a - s * b;
  y = c * b + s * a;
}

// The cosines and sines of a unit. All heads of q and k of a token share them.
template <int kWidth>
struct RopeUnit {
  float c[kWidth], s[kWidth];
  unsigned rotated;  // bit k: the position of pair k is inside the table
};

template <int kWidth>
__device__ __forceinline__ RopeUnit<kWidth> load_rope(const PrologueParams& p, const PrologueToken& t,
                                                      const Unit& unit) {
  RopeUnit<kWidth> r;
  r.rotated = 0;
  if (unit.pair < 0) return r;
  const int half = p.rotary_dim / 2;
  if (p.positions.data != nullptr && p.components == 3) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int j = unit.pair + k, which = mrope_component(p, j);
      const float* row = which == 0 ? t.rope[0] : which == 1 ? t.rope[1] : t.rope[2];
      if (row == nullptr) continue;
      r.c[k] = row[j * p.channel_stride];
      r.s[k] = row[(half + j) * p.channel_stride];
      r.rotated |= 1u << k;
    }
    return r;
  }
  if (t.rope[0] == nullptr) return r;
  const auto* row = reinterpret_cast<const char*>(t.rope[0]);
  const long long step = p.channel_stride * 4;
  const bool vector = p.cos_sin_vector != 0;
  decode_run<kWidth>(kFloat32, load_run<kWidth>(kFloat32, row + unit.pair * step, step, vector), r.c);
  decode_run<kWidth>(kFloat32, load_run<kWidth>(kFloat32, row + (half + unit.pair) * step, step, vector), r.s);
  r.rotated = (1u << kWidth) - 1;
  return r;
}

template <int kWidth>
__device__ __forceinline__ void rotate_unit(const PrologueParams& p, const RopeUnit<kWidth>& r, float (&x)[2][kWidth]) {
  if (r.rotated == 0) return;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    if ((r.rotated >> k & 1) == 0) continue;
    if (p.interleaved) {
      rotate_pair(x[2 * k / kWidth][2 * k % kWidth], x[(2 * k + 1) / kWidth][(2 * k + 1) % kWidth], r.c[k], r.s[k]);
    } else {
      rotate_pair(x[0][k], x[1][k], r.c[k], r.s[k]);
    }
  }
}

// A row of bias or IA3 weights. It is passed by value, so that the compiler selects between values and not addresses.
struct WeightRow {
  const char* data;  // null: none
  long long stride;
  int dtype;
  bool vector;
};
__device__ __forceinline__ WeightRow weight_row(const kernels::FloatTable& t, int outer, int head) {
  if (t.data == nullptr) return {nullptr, 0, kFloat32, false};
  return {t.data + outer * t.outer_stride + head * t.head_stride, t.channel_stride, t.dtype, t.vector != 0};
}

// Calls f(x, weight) for each channel of a unit.
template <int kWidth, class F>
__device__ __forceinline__ void for_weights(const WeightRow& row, const Unit& unit, float (&x)[2][kWidth], F f) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int channel = side == 0 ? unit.first : unit.second;
    if (channel < 0) continue;
    float w[kWidth];
    decode_run<kWidth>(row.dtype, load_run<kWidth>(row.dtype, row.data + channel * row.stride, row.stride, row.vector),
                       w);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) f(x[side][k], w[k]);
  }
}

// Applies the whole prologue to a unit of a row of q, k or v (kRowOf..). narrow: the input is 8-bit, so qkv_scale
// applies. rope: of the unit; unused for rows of v.
template <int kWidth>
__device__ __forceinline__ void prepare_unit(const PrologueParams& p, const PrologueToken& t, int row, int head,
                                             const Unit& unit, const RopeUnit<kWidth>& rope, bool narrow,
                                             float (&x)[2][kWidth]) {
  const float factor = row == kRowOfQ ? t.logn : 1.0f;
  if (narrow && p.qkv_scale != nullptr) {
    const float scale = p.qkv_scale[row * p.qkv_scale_stride];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[0][k] *= scale, x[1][k] *= scale;
  }
  const WeightRow bias = row == kRowOfQ   ? weight_row(p.q_bias, 0, head)
                         : row == kRowOfK ? weight_row(p.k_bias, 0, head)
                                          : weight_row(p.v_bias, 0, head);
  if (bias.data != nullptr) for_weights<kWidth>(bias, unit, x, [](float& y, float w) { y += w; });
  if (row != kRowOfQ && t.task >= 0) {
    const WeightRow ia3 = row == kRowOfK ? weight_row(p.ia3_k, t.task, head) : weight_row(p.ia3_v, t.task, head);
    if (ia3.data != nullptr) for_weights<kWidth>(ia3, unit, x, [](float& y, float w) { y *= w; });
  }
  if (row != kRowOfV) rotate_unit<kWidth>(p, rope, x);
  if (factor != 1.0f) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[0][k] *= factor, x[1][k] *= factor;
  }
}

}  // namespace attune::common
