// SPDX-License-Identifier: Apache-2.0
// Runs of 8 channels (or 1) of any element type, between memory and fp32 registers. Accesses have 16 bytes if the
// caller knows that they are aligned, otherwise they go element by element. A constant dtype removes the branches.
// Loading and decoding are separate functions, so that a thread can have several runs in flight.
#pragma once

#include "common/element.cuh"
#include "ptx/convert.cuh"

namespace attune::common {

// Elements as they are in memory, from the low bits on.
template <int kWidth>
struct RawRun {
  static_assert(kWidth == 8 || kWidth == 1, "runs are of 8 channels, or of one");
  unsigned word[kWidth];  // narrower elements leave the last words unused
};

__device__ __forceinline__ unsigned load_bits(int size, const char* at) {
  if (size == 4) return *reinterpret_cast<const unsigned*>(at);
  if (size == 2) return *reinterpret_cast<const unsigned short*>(at);
  return *reinterpret_cast<const unsigned char*>(at);
}
__device__ __forceinline__ void store_bits(int size, char* at, unsigned bits) {
  if (size == 4) {
    *reinterpret_cast<unsigned*>(at) = bits;
  } else if (size == 2) {
    *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(bits);
  } else {
    *reinterpret_cast<unsigned char*>(at) = static_cast<unsigned char>(bits);
  }
}

// stride: in bytes. vector: elements are contiguous, and `at` is aligned to the size of the run or to 16 bytes.
template <int kWidth>
__device__ __forceinline__ RawRun<kWidth> load_run(int dtype, const char* at, long long stride, bool vector) {
  RawRun<kWidth> r;
  const int size = element_size(dtype);
  if constexpr (kWidth == 1) {
    r.word[0] = load_bits(size, at);
  } else if (vector) {
    if (size == 1) {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      r.word[0] = x.x, r.word[1] = x.y;
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      r.word[0] = x.x, r.word[1] = x.y, r.word[2] = x.z, r.word[3] = x.w;
    }
    if (size == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(at + 16);
      r.word[4] = x.x, r.word[5] = x.y, r.word[6] = x.z, r.word[7] = x.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const unsigned bits = load_bits(size, at + k * stride);
      if (size == 4) {
        r.word[k] = bits;
      } else if (size == 2) {
        r.word[k / 2] = k % 2 == 0 ? bits : r.word[k / 2] | bits << 16;
      } else {
        r.word[k / 4] = k % 4 == 0 ? bits : r.word[k / 4] | bits << (k % 4 * 8);
      }
    }
  }
  return r;
}

template <int kWidth>
__device__ __forceinline__ void store_run(int dtype, const RawRun<kWidth>& r, char* at, long long stride, bool vector) {
  const int size = element_size(dtype);
  if constexpr (kWidth == 1) {
    store_bits(size, at, r.word[0]);
  } else if (vector) {
    if (size == 1) {
      *reinterpret_cast<uint2*>(at) = make_uint2(r.word[0], r.word[1]);
    } else {
      *reinterpret_cast<uint4*>(at) = make_uint4(r.word[0], r.word[1], r.word[2], r.word[3]);
    }
    if (size == 4) *reinterpret_cast<uint4*>(at + 16) = make_uint4(r.word[4], r.word[5], r.word[6], r.word[7]);
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const unsigned bits = size == 4   ? r.word[k]
                            : size == 2 ? r.word[k / 2] >> (k % 2 * 16)
                                        : r.word[k / 4] >> (k % 4 * 8);
      store_bits(size, at + k * stride, bits);
    }
  }
}

// Contiguous 16-bit elements at any address, byte by byte unless vector is set: the bf16 channels of packed formats.
template <int kWidth>
__device__ __forceinline__ RawRun<kWidth> load_halves(const char* at, bool vector) {
  if (kWidth == 8 && vector) return load_run<kWidth>(kBFloat16, at, 2, true);
  RawRun<kWidth> r;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const unsigned bits = load_bits(1, at + 2 * k) | load_bits(1, at + 2 * k + 1) << 8;
    r.word[k / 2] = k % 2 == 0 ? bits : r.word[k / 2] | bits << 16;
  }
  return r;
}
template <int kWidth>
__device__ __forceinline__ void store_halves(const RawRun<kWidth>& r, char* at, bool vector) {
  if (kWidth == 8 && vector) return store_run<kWidth>(kBFloat16, r, at, 2, true);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const unsigned bits = r.word[k / 2] >> (k % 2 * 16);
    store_bits(1, at + 2 * k, bits);
    store_bits(1, at + 2 * k + 1, bits >> 8);
  }
}

// Converts two elements of an 8- or 16-bit type in the low bits.
__device__ __forceinline__ float2 decode_pair(int dtype, unsigned bits) {
  switch (dtype) {
    case kBFloat16:
      return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    case kInt8:
      return make_float2(static_cast<float>(static_cast<signed char>(bits & 0xff)),
                         static_cast<float>(static_cast<signed char>(bits >> 8 & 0xff)));
    case kE4m3:
      bits = e4m3_to_f16(static_cast<unsigned short>(bits));
      break;
    case kE5m2:
      bits = e5m2_to_f16(static_cast<unsigned short>(bits));
      break;
    default:
      break;
  }
  return make_float2(ptx::f16_to_float(static_cast<unsigned short>(bits)),
                     ptx::f16_to_float(static_cast<unsigned short>(bits >> 16)));
}

// Converts a run to fp32, exactly.
template <int kWidth>
__device__ __forceinline__ void decode_run(int dtype, const RawRun<kWidth>& r, float (&x)[kWidth]) {
  const int size = element_size(dtype);
  if (size == 4) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] = __uint_as_float(r.word[k]);
  } else if constexpr (kWidth == 1) {
    x[0] = decode_pair(dtype, r.word[0]).x;
  } else {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const unsigned bits = size == 2 ? r.word[k / 2] : r.word[k / 4] >> (k % 4 * 8) & 0xffff;
      const float2 pair = decode_pair(dtype, bits);
      x[k] = pair.x, x[k + 1] = pair.y;
    }
  }
}

// Rounds to nearest even and saturates to -127..127; NaN becomes 0.
__device__ __forceinline__ unsigned encode_int8(float x) {
  return static_cast<unsigned>(min(max(__float2int_rn(x), -127), 127)) & 0xff;
}

// Rounds two numbers to an 8- or 16-bit type, to nearest even. 8-bit types saturate; NaN stays NaN (int8: 0).
__device__ __forceinline__ unsigned encode_pair(int dtype, float lo, float hi) {
  switch (dtype) {
    case kBFloat16:
      return ptx::pack_bf16(lo, hi);
    case kInt8:
      return encode_int8(lo) | encode_int8(hi) << 8;
    case kE4m3:
      return pack_e4m3(lo, hi);
    case kE5m2:
      return pack_e5m2(lo, hi);
    default:
      return ptx::pack_f16(lo, hi);
  }
}

template <int kWidth>
__device__ __forceinline__ RawRun<kWidth> encode_run(int dtype, const float (&x)[kWidth]) {
  RawRun<kWidth> r;
  const int size = element_size(dtype);
  if (size == 4) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) r.word[k] = __float_as_uint(x[k]);
  } else if constexpr (kWidth == 1) {
    r.word[0] = encode_pair(dtype, x[0], 0.0f);
  } else {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const unsigned bits = encode_pair(dtype, x[k], x[k + 1]);
      if (size == 2) {
        r.word[k / 2] = bits;
      } else {
        r.word[k / 4] = k % 4 == 0 ? bits : r.word[k / 4] | bits << 16;
      }
    }
  }
  return r;
}

}  // namespace attune::common
