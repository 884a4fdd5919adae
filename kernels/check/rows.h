// SPDX-License-Identifier: Apache-2.0
// The channels of a token and head, in dense tensors and in caches of any format (Cache or attune_kv_cache). For host
// and device (check/host_device.h).
#pragma once

#include "check/elements.h"

namespace attune::oracle {

// The channels of one token and head, in any of the formats.
struct Row {
  const char* first;  // channel 0
  long long step;     // bytes from one channel to the next
  int dtype;
  double scale;
  int pack;             // > 0: packs have this many channels
  long long pack_step;  // and begin this many bytes apart
  int format;
  const char* scales;  // for groups of channels
};

ATTUNE_CHECK_BOTH double byte_pair_bf16(const char* at) {
  const unsigned low = load<unsigned char>(at), high = load<unsigned char>(at + 1);
  return decode_bf16(low | high << 8);
}
// Rows of bytes need no alignment.
ATTUNE_CHECK_BOTH double bytes_fp32(const char* at) {
  unsigned bits = 0;
  for (int i = 3; i >= 0; --i) bits = bits << 8 | load<unsigned char>(at + i);
  return decode_float(bits, 8, 23, true);
}

ATTUNE_CHECK_BOTH double channel(const Row& row, int d) {
  switch (row.format) {
    case kMla656:  // 512 e4m3 | 4 fp32 scales, one per 128 | 64 bf16
      if (d >= 512) return byte_pair_bf16(row.first + 528 + 2 * (d - 512));
      return decode_e4m3(load<unsigned char>(row.first + d)) * bytes_fp32(row.first + 512 + 4 * (d / 128));
    case kMla584:  // 448 e4m3 | 64 bf16; 7 e8m0 scales, one per 64, are stored elsewhere
      if (d >= 448) return byte_pair_bf16(row.first + 448 + 2 * (d - 448));
      return decode_e4m3(load<unsigned char>(row.first + d)) * decode_e8m0(load<unsigned char>(row.scales + d / 64));
    default: {
      const char* at = row.pack > 0 ? row.first + d / row.pack * row.pack_step + d % row.pack * row.step
                                    : row.first + d * row.step;
      return decode(row.dtype, at) * row.scale;
    }
  }
}

// The channels along the last axis of a tensor.
ATTUNE_CHECK_BOTH Row strided_row(const auto& t, const char* first, double scale = 1.0) {
  return {first, t.stride[t.rank - 1] * element_bytes(t.dtype), t.dtype, scale, 0, 0, kPlain, nullptr};
}

// A row of q, k or v: [rows, heads, dim], or [batch, seqlen, heads, dim] with rows = batch * seqlen.
ATTUNE_CHECK_BOTH Row dense_row(const auto& t, long long row, long long head) {
  const char* first = t.rank == 4 ? element_at(t, row / t.shape[1], row % t.shape[1], head) : element_at(t, row, head);
  return strided_row(t, first);
}

ATTUNE_CHECK_BOTH double scale_of(const auto& c, const auto& scale, long long page, long long offset, long long head) {
  if (!present(scale)) return 1.0;
  if (scale.rank == 1) return number_at(scale, scale.shape[0] == 1 ? 0 : head);
  return c.layout == kNhd ? number_at(scale, page, offset, head) : number_at(scale, page, head, offset);
}

// page_size: of the cache, even if the descriptor leaves it to the shape of K.
ATTUNE_CHECK_BOTH Row cached_row(const auto& c, long long page_size, long long slot, long long head, bool is_v) {
  const long long page = slot / page_size, offset = slot % page_size;
  if (c.format == kMla656) return {element_at(c.k, page, offset), 1, kUint8, 1.0, 0, 0, kMla656, nullptr};
  if (c.format == kMla584) {  // all rows of a page, then their scales
    const char* first = element_at(c.k, page);
    return {first + offset * 576, 1, kUint8, 1.0, 0, 0, kMla584, first + page_size * 576 + offset * 8};
  }
  const auto& t = is_v ? c.v : c.k;
  const double scale = scale_of(c, is_v ? c.v_scale : c.k_scale, page, offset, head);
  if (c.layout == kNhd) return strided_row(t, element_at(t, page, offset, head), scale);
  if (c.layout == kHnd) return strided_row(t, element_at(t, page, head, offset), scale);
  const int bytes = element_bytes(t.dtype);
  const char* first = element_at(t, page, head, 0, offset);
  if (is_v) return {first, t.stride[2] * bytes, t.dtype, scale, 0, 0, kPlain, nullptr};
  const int pack = static_cast<int>(t.shape[4]);
  return {first, t.stride[4] * bytes, t.dtype, scale, pack, t.stride[2] * bytes, kPlain, nullptr};
}

}  // namespace attune::oracle
