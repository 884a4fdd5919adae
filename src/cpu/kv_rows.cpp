// SPDX-License-Identifier: Apache-2.0
#include "cpu/kv_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

constexpr float kE4m3Max = 448.0f;
constexpr float kSmallestGroupScale = 1e-4f;  // of power-of-two scales, before rounding up
constexpr float kSmallestRowAmax = 1e-4f;     // of power-of-two scales of whole rows
constexpr int64_t kChunk = 128;               // channels quantised at a time

// The largest finite magnitude of a row. Ignores NaN and counts infinity as the largest float, so that the scale stays
// finite.
float amax_of(const float* x, int64_t n) {
  float amax = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    amax = a > amax ? a : amax;
  }
  return std::min(amax, std::numeric_limits<float>::max());
}

float largest_code(int32_t dtype) {
  return dtype == ATTUNE_INT8 ? 127.0f : dtype == ATTUNE_FLOAT8_E4M3 ? kE4m3Max : 57344.0f;
}

// 2^ceil(log2(x)), exactly, for x > 0.
float round_up_to_power_of_two(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

float e8m0_to_float(uint8_t e) {
  if (e == 0xff) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0f, static_cast<int>(e) - 127);
}

uint8_t power_of_two_to_e8m0(float scale) { return static_cast<uint8_t>(std::ilogb(scale) + 127); }

// Calls f(first channel, count, address) for each run of a row that has one stride: the whole row, or its packs.
template <class F>
void for_each_run(const KvPlane& plane, std::byte* row, int64_t n, F f) {
  const int64_t run = plane.contiguous ? std::max<int64_t>(n, 1) : plane.pack;
  for (int64_t d = 0; d < n; d += run) f(d, std::min(run, n - d), row + plane.element(d) * plane.element_size);
}

void read_plain(const KvPlane& plane, const KvScale& scale, KvSlot slot, int64_t head, int64_t n, float* out) {
  const int64_t stride = plane.contiguous ? 1 : plane.inner_stride;
  for_each_run(plane, plane.row(slot.page, slot.offset, head), n,
               [&](int64_t d, int64_t m, const std::byte* at) { read_elements(plane.dtype, at, stride, m, out + d); });
  if (scale.mode == KvScale::Mode::kNone) return;
  const float factor = *scale.at(slot.page, slot.offset, head);
  for (int64_t d = 0; d < n; ++d) out[d] *= factor;
}

// x / scale, rounded once, n channels of one stride.
void quantize_run(int32_t dtype, float scale, const float* x, std::byte* to, int64_t stride, int64_t n) {
  float codes[kChunk];
  for (int64_t d = 0; d < n; d += kChunk) {
    const int64_t m = std::min(kChunk, n - d);
    for (int64_t i = 0; i < m; ++i) codes[i] = x[d + i] / scale;
    write_elements(dtype, to + d * stride, stride, m, codes);
  }
}

void write_plain(const KvPlane& plane, const KvScale& scale, KvSlot slot, int64_t head, int64_t n, const float* x,
                 bool power_of_two_scales) {
  const int64_t stride = plane.contiguous ? 1 : plane.inner_stride;
  std::byte* row = plane.row(slot.page, slot.offset, head);
  if (scale.mode == KvScale::Mode::kNone) {
    for_each_run(plane, row, n,
                 [&](int64_t d, int64_t m, std::byte* at) { write_elements(plane.dtype, at, stride, m, x + d); });
    return;
  }
  float* stored = scale.at(slot.page, slot.offset, head);
  if (scale.mode == KvScale::Mode::kTokenHead) {
    const float amax = amax_of(x, n), largest = largest_code(plane.dtype);
    *stored =
        power_of_two_scales ? round_up_to_power_of_two(std::max(amax, kSmallestRowAmax) / largest) : amax / largest;
    if (*stored == 0.0f) *stored = 1.0f;  // a row of zeros: codes 0, never 0 / 0
  }
  const float divisor = *stored;
  for_each_run(plane, row, n,
               [&](int64_t d, int64_t m, std::byte* at) { quantize_run(plane.dtype, divisor, x + d, at, stride, m); });
}

// Where the parts of a token of a packed format lie.
struct PackedRow {
  std::byte* codes;   // e4m3 [nope]
  std::byte* scales;  // fp32 or e8m0 [nope / group]
  std::byte* rope;    // bf16 [head_dim_qk - nope]
};

PackedRow packed_row(const KvCache& c, KvSlot slot) {
  const KvFormat& f = *c.format;
  std::byte* row = c.k.row(slot.page, slot.offset, 0);
  if (f.scale_bytes == 0) {
    std::byte* scales = row + f.nope;
    return {row, scales, scales + f.nope / f.group * static_cast<int64_t>(sizeof(float))};
  }
  std::byte* plane = c.k.row(slot.page, 0, 0) + c.page_size * f.token_bytes;
  return {row, plane + slot.offset * f.scale_bytes, row + f.nope};
}

void read_packed(const KvCache& c, KvSlot slot, int64_t n, float* out) {
  const KvFormat& f = *c.format;
  const PackedRow row = packed_row(c, slot);
  read_elements(ATTUNE_FLOAT8_E4M3, row.codes, 1, f.nope, out);
  for (int64_t g = 0; g < f.nope / f.group; ++g) {
    float scale;
    if (f.scale_bytes == 0) {
      std::memcpy(&scale, row.scales + g * static_cast<int64_t>(sizeof(float)), sizeof(float));
    } else {
      scale = e8m0_to_float(std::to_integer<uint8_t>(row.scales[g]));
    }
    for (int64_t d = g * f.group; d < (g + 1) * f.group; ++d) out[d] *= scale;
  }
  read_elements(ATTUNE_BFLOAT16, row.rope, 1, n - f.nope, out + f.nope);
}

void write_packed(const KvCache& c, KvSlot slot, const float* x, bool power_of_two_scales) {
  const KvFormat& f = *c.format;
  const PackedRow row = packed_row(c, slot);
  const bool inline_scales = f.scale_bytes == 0;
  for (int64_t g = 0; g < f.nope / f.group; ++g) {
    const float* group = x + g * f.group;
    const float amax = amax_of(group, f.group);
    float scale = amax / kE4m3Max;
    // A group of zeros takes the smallest power-of-two scale: 0 / 0 must not make NaN codes.
    if (!inline_scales || power_of_two_scales || scale == 0.0f)
      scale = round_up_to_power_of_two(std::max(scale, kSmallestGroupScale));
    if (inline_scales) {
      std::memcpy(row.scales + g * static_cast<int64_t>(sizeof(float)), &scale, sizeof(float));
    } else {
      row.scales[g] = std::byte{power_of_two_to_e8m0(scale)};
    }
    quantize_run(ATTUNE_FLOAT8_E4M3, scale, group, row.codes + g * f.group, 1, f.group);
  }
  write_elements(ATTUNE_BFLOAT16, row.rope, 1, f.head_dim_qk - f.nope, x + f.nope);
}

void read_row(const KvCache& c, const KvPlane& plane, const KvScale& scale, KvSlot slot, int64_t head, int64_t n,
              float* out) {
  if (c.format->plain) return read_plain(plane, scale, slot, head, n, out);
  read_packed(c, slot, n, out);
}

}  // namespace

void read_k_row(const KvCache& cache, KvSlot slot, int64_t head, float* out) {
  read_row(cache, cache.k, cache.k_scale, slot, head, cache.head_dim_qk, out);
}

void read_v_row(const KvCache& cache, KvSlot slot, int64_t head, float* out) {
  read_row(cache, cache.v, cache.v_scale, slot, head, cache.head_dim_v, out);
}

void write_k_row(const KvCache& cache, KvSlot slot, int64_t head, const float* row, bool power_of_two_scales) {
  if (!cache.format->plain) return write_packed(cache, slot, row, power_of_two_scales);
  write_plain(cache.k, cache.k_scale, slot, head, cache.head_dim_qk, row, power_of_two_scales);
}

void write_v_row(const KvCache& cache, KvSlot slot, int64_t head, const float* row, bool power_of_two_scales) {
  write_plain(cache.v, cache.v_scale, slot, head, cache.head_dim_v, row, power_of_two_scales);
}

}  // namespace attune::cpu
