// SPDX-License-Identifier: Apache-2.0
// A tile of 16 keys in shared memory as the A operand of mma.m16n8k16: K as it is (M rows are keys), V transposed (M
// rows are channels). 8-bit elements are converted to 16 bits after ldmatrix. ldmatrix moves pairs of bytes, so 8-bit
// channels arrive in another order within a block of 16:
//   K: k = 2t + e (e < 2) is channel 4t + e, k = 8 + 2t + e is channel 4t + 2 + e;
//   V: row g is channel 2g, row g + 8 is channel 2g + 1.
// Queries are stored in the order of K, and O is read in the order of V.
#pragma once

#include "common/element.cuh"
#include "common/fp8.cuh"
#include "common/row_layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

namespace attune::common {

// The type of the mma's operands. 8-bit elements are exact in both types. The bf16x3 parts of fp32 Q and P need the
// range of bf16.
__host__ __device__ constexpr int compute_type(int q_type, int kv_type) {
  const bool wide = kv_type == kBFloat16 || kv_type == kFloat32 || (element_size(kv_type) == 1 && q_type == kFloat32);
  return wide ? kBFloat16 : kFloat16;
}

// The mma's k of a channel, for K and Q. It stays within the same block of 16.
template <int kKvType>
__device__ constexpr int k_of_channel(int channel) {
  if (element_size(kKvType) != 1) return channel;
  const int c = channel & 15;
  return (channel & ~15) + ((c >> 2) << 1) + (c & 1) + ((c & 2) << 2);
}

template <int kKvType>
__device__ constexpr int channel_of_k(int k) {
  if (element_size(kKvType) != 1) return k;
  const int p = k & 15;
  return (k & ~15) + ((p & 6) << 1) + ((p & 8) >> 2) + (p & 1);
}

// The channel of M row g + 8 * half in block i of the transposed V.
template <int kKvType>
__device__ constexpr int channel_of_row(int i, int g, int half) {
  return element_size(kKvType) != 1 ? 16 * i + g + 8 * half : 16 * i + 2 * g + half;
}

// Converts the two 8-bit floats in the low half of x.
template <int kKvType>
__device__ __forceinline__ unsigned pair_to_f16(unsigned x) {
  static_assert(kKvType == kE4m3 || kKvType == kE5m2, "int8 converts four at a time");
  if constexpr (kKvType == kE4m3) return e4m3_to_f16(static_cast<unsigned short>(x));
  return e5m2_to_f16(static_cast<unsigned short>(x));
}

// Whether codes are converted by arithmetic on bits. Then KvOperand gives numbers in units of code_unit(): the
// multiplication is left to the scales.
template <int kKvType>
__device__ constexpr bool converts_by_bits() {
  return kKvType == kE4m3 && !ptx::has(ptx::kFp8Conversion);
}
template <int kKvType>
__device__ constexpr float code_unit() {
  return converts_by_bits<kKvType>() ? kE4m3Unit : 1.0f;
}

// Converts bytes 0, 1 of x to lo and bytes 2, 3 to hi.
template <int kKvType>
__device__ __forceinline__ void quad_to_f16(unsigned x, unsigned& lo, unsigned& hi) {
  if constexpr (kKvType == kInt8) {
    // 0x6400 | u is the fp16 number 1024 + u; u = code + 128.
    const unsigned u = x ^ 0x80808080u;
    lo = ptx::subtract_f16x2(ptx::permute_bytes(u, 0x64646464u, 0x4140), 0x64806480u);
    hi = ptx::subtract_f16x2(ptx::permute_bytes(u, 0x64646464u, 0x4342), 0x64806480u);
  } else if constexpr (converts_by_bits<kKvType>()) {
    lo = signed_e4m3_to_f16(ptx::permute_bytes(x, 0, kSigned01));
    hi = signed_e4m3_to_f16(ptx::permute_bytes(x, 0, kSigned23));
  } else if constexpr (!ptx::has(ptx::kFp8Conversion)) {  // e5m2 is the high byte of fp16
    lo = ptx::permute_bytes(x, 0, 0x1404), hi = ptx::permute_bytes(x, 0, 0x3424);
  } else {
    lo = pair_to_f16<kKvType>(x & 0xffffu);
    hi = pair_to_f16<kKvType>(x >> 16);
  }
}

// Converts two fp16 numbers that came from 8 bits to the type of the mma, exactly.
template <int kComputeType>
__device__ __forceinline__ unsigned from_codes(unsigned two) {
  if constexpr (kComputeType == kFloat16) return two;
  return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(two)),
                        ptx::f16_to_float(static_cast<unsigned short>(two >> 16)));
}

// Converts bytes 0, 1 of x to lo and bytes 2, 3 to hi, exactly, in the type of the mma, with the fewest instructions.
template <int kKvType, int kComputeType>
__device__ __forceinline__ void quad_to_operands(unsigned x, unsigned& lo, unsigned& hi) {
  if constexpr (kComputeType == kBFloat16 && kKvType == kInt8) {
    // 0x4300 | u is the bf16 number 128 + u for u < 128. The sign bit falls on the exponent's lowest bit: 128 or 256.
    constexpr unsigned kSigns = 0x00800080u, kMinusOne = 0xbf80bf80u;
    lo = ptx::permute_bytes(x, 0x43434343u, 0x4140), hi = ptx::permute_bytes(x, 0x43434343u, 0x4342);
    lo = ptx::multiply_add_bf16x2(lo & (0xff00ff00u | kSigns), kMinusOne, lo & ~kSigns);
    hi = ptx::multiply_add_bf16x2(hi & (0xff00ff00u | kSigns), kMinusOne, hi & ~kSigns);
  } else if constexpr (kComputeType == kBFloat16 && kKvType == kE4m3 && !ptx::has(ptx::kFp8Conversion)) {
    lo = signed_e4m3_to_bf16(ptx::permute_bytes(x, 0, kSigned01));
    hi = signed_e4m3_to_bf16(ptx::permute_bytes(x, 0, kSigned23));
  } else {
    quad_to_f16<kKvType>(x, lo, hi);
    lo = from_codes<kComputeType>(lo), hi = from_codes<kComputeType>(hi);
  }
}

// Converts bytes 0, 2 of x to lo and bytes 1, 3 to hi.
template <int kKvType>
__device__ __forceinline__ void crossed_quad_to_f16(unsigned x, unsigned& lo, unsigned& hi) {
  if constexpr (kKvType == kInt8) {
    const unsigned u = x ^ 0x80808080u;  // As above; the other order of the permutation costs nothing.
    lo = ptx::subtract_f16x2(ptx::permute_bytes(u, 0x64646464u, 0x4240), 0x64806480u);
    hi = ptx::subtract_f16x2(ptx::permute_bytes(u, 0x64646464u, 0x4341), 0x64806480u);
  } else if constexpr (converts_by_bits<kKvType>()) {
    lo = signed_e4m3_to_f16(ptx::permute_bytes(x, 0, kSigned02));
    hi = signed_e4m3_to_f16(ptx::permute_bytes(x, 0, kSigned13));
  } else if constexpr (!ptx::has(ptx::kFp8Conversion)) {
    lo = ptx::permute_bytes(x, 0, 0x2404), hi = ptx::permute_bytes(x, 0, 0x3414);
  } else {
    quad_to_f16<kKvType>(ptx::permute_bytes(x, 0, 0x3120), lo, hi);
  }
}

// bf16x3: fp32 as the sum of three bf16 numbers, the largest first, exact to 2^-24 of the number. Two are exact to
// 2^-16.
constexpr int kSplitParts = 3;
template <int kParts>
__device__ __forceinline__ void split_pair(float x, float y, unsigned (&parts)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = ptx::pack_bf16(x, y);
    x -= __uint_as_float(parts[i] << 16);
    y -= __uint_as_float(parts[i] & 0xffff0000u);
  }
}

// Loads K, or V transposed, as the A operand. This lane's ldmatrix address is computed once.
template <bool kValues, int kKvType, int kComputeType, int kChunks>
struct KvOperand {
  using Layout = RowLayout<kChunks>;

  __device__ explicit KvOperand(int lane) {
    constexpr bool kCrossed = kValues && element_size(kKvType) == 2;
    const int row = (lane & 7) + (kCrossed ? lane >> 4 : (lane >> 3) & 1) * 8;
    lane_at_ = Layout::offset(row, kCrossed ? (lane >> 3) & 1 : lane >> 4);
    first_chunk_ = Layout::offset(row, 0);
  }

  // Loads block j of 16 channels (16-bit elements), or blocks 2j and 2j + 1 (8-bit ones).
  __device__ __forceinline__ void load_16bit(unsigned tile, int block, unsigned (&a)[4]) const {
    load_x4(a, Layout::chunks_on(tile + lane_at_, 2 * block));
  }
  __device__ __forceinline__ void load_8bit(unsigned tile, int pair, unsigned (&a)[2][4]) const {
    unsigned raw[4];
    load_x4(raw, Layout::chunks_on(tile + lane_at_, 2 * pair));
    unpack(raw[0], raw[1], a[0]);
    unpack(raw[2], raw[3], a[1]);
  }
  // Loads the last block where the number of 8-bit blocks is odd.
  __device__ __forceinline__ void load_8bit_last(unsigned tile, int block, unsigned (&a)[4]) const {
    unsigned raw[2];
    const unsigned at = Layout::chunks_on(tile + first_chunk_, block);
    if constexpr (kValues) {
      ptx::load_matrix_x2_transposed(raw, at);
    } else {
      ptx::load_matrix_x2(raw, at);
    }
    unpack(raw[0], raw[1], a);
  }
  // Loads a block of fp32 channels, as three bf16 parts.
  __device__ __forceinline__ static void load_bf16x3(unsigned tile, int block, unsigned (&a)[kSplitParts][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned parts[kSplitParts];
      if constexpr (kValues) {  // channels g, g + 8 at keys 2t..; then at keys 2t + 8..
        const int key = 2 * t + i / 2 * 8, chunk = 4 * block + i % 2 * 2 + g / 4;
        split_pair(ptx::load_shared(tile + Layout::offset(key, chunk) + g % 4 * 4),
                   ptx::load_shared(tile + Layout::offset(key + 1, chunk) + g % 4 * 4), parts);
      } else {  // rows g, g + 8 at channels 2t..; then at channels 2t + 8..
        const float2 x =
            ptx::load_shared_pair(tile + Layout::offset(g + i % 2 * 8, 4 * block + i / 2 * 2 + t / 2) + t % 2 * 8);
        split_pair(x.x, x.y, parts);
      }
#pragma unroll
      for (int part = 0; part < kSplitParts; ++part) a[part][i] = parts[part];
    }
  }

 private:
  __device__ __forceinline__ static void load_x4(unsigned (&a)[4], unsigned at) {
    if constexpr (kValues) {
      ptx::load_matrix_x4_transposed(a, at);
    } else {
      ptx::load_matrix_x4(a, at);
    }
  }
  // Of V each register holds channels 2g and 2g + 1, first of key 2t, then of key 2t + 1.
  __device__ __forceinline__ static void unpack(unsigned lo, unsigned hi, unsigned (&a)[4]) {
    if constexpr (converts_by_bits<kKvType>()) {
      constexpr unsigned kFirst = kValues ? kSigned02 : kSigned01, kOther = kValues ? kSigned13 : kSigned23;
      constexpr int kNext = kValues ? 1 : 2;  // the register after a[0]
      a[0] = signed_e4m3_to_small_f16(ptx::permute_bytes(lo, 0, kFirst));
      a[kNext] = signed_e4m3_to_small_f16(ptx::permute_bytes(lo, 0, kOther));
      a[3 - kNext] = signed_e4m3_to_small_f16(ptx::permute_bytes(hi, 0, kFirst));
      a[3] = signed_e4m3_to_small_f16(ptx::permute_bytes(hi, 0, kOther));
    } else if constexpr (kValues) {
      crossed_quad_to_f16<kKvType>(lo, a[0], a[1]), crossed_quad_to_f16<kKvType>(hi, a[2], a[3]);
    } else {
      quad_to_f16<kKvType>(lo, a[0], a[2]), quad_to_f16<kKvType>(hi, a[1], a[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = from_codes<kComputeType>(a[i]);
  }
  int lane_at_, first_chunk_;
};

template <int kComputeType>
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (kComputeType == kBFloat16) {
    ptx::mma_bf16(c, a, b);
  } else {
    ptx::mma_f16(c, a, b);
  }
}

// Unpacks one half of a packed word to fp32.
template <int kComputeType>
__device__ __forceinline__ float low_half(unsigned x) {
  if constexpr (kComputeType == kBFloat16) return __uint_as_float(x << 16);
  return ptx::f16_to_float(static_cast<unsigned short>(x));
}
template <int kComputeType>
__device__ __forceinline__ float high_half(unsigned x) {
  if constexpr (kComputeType == kBFloat16) return __uint_as_float(x & 0xffff0000u);
  return ptx::f16_to_float(static_cast<unsigned short>(x >> 16));
}

}  // namespace attune::common
