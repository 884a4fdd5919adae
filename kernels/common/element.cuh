// SPDX-License-Identifier: Apache-2.0
// Element types, numbered as attune_dtype; and access to single elements whose type is known at run time, for code that
// is not hot.
#pragma once

#include "common/fp8.cuh"
#include "ptx/convert.cuh"

namespace attune::common {

constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
constexpr int kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3, kE4m3 = 4, kE5m2 = 5, kInt8 = 6;

__host__ __device__ constexpr int element_size(int dtype) {
  return dtype == kFloat32 ? 4 : dtype == kFloat16 || dtype == kBFloat16 ? 2 : 1;
}

constexpr bool is_16_bit(int dtype) { return dtype == kFloat16 || dtype == kBFloat16; }

// Packs two elements of a 16-bit type, each rounded once to nearest even.
template <int kType>
__device__ __forceinline__ unsigned pack(float lo, float hi) {
  if constexpr (kType == kBFloat16) return ptx::pack_bf16(lo, hi);
  return ptx::pack_f16(lo, hi);
}

// Loads element i of an array.
__device__ __forceinline__ float load_element(int dtype, const void* array, long long i) {
  const char* at = static_cast<const char*>(array) + i * element_size(dtype);
  switch (dtype) {
    case kFloat32:
      return *reinterpret_cast<const float*>(at);
    case kFloat16:
      return ptx::f16_to_float(*reinterpret_cast<const unsigned short*>(at));
    case kBFloat16:
      return ptx::bf16_to_float(*reinterpret_cast<const unsigned short*>(at));
    case kE4m3:
      return ptx::f16_to_float(
          static_cast<unsigned short>(e4m3_to_f16(*reinterpret_cast<const unsigned char*>(at))));
    case kE5m2:
      return ptx::f16_to_float(
          static_cast<unsigned short>(e5m2_to_f16(*reinterpret_cast<const unsigned char*>(at))));
    default:
      return static_cast<float>(*reinterpret_cast<const signed char*>(at));
  }
}

// Stores an element, rounded once to nearest even; e4m3 saturates. Not for int8.
__device__ __forceinline__ void store_element(int dtype, void* array, long long i, float x) {
  char* at = static_cast<char*>(array) + i * element_size(dtype);
  switch (dtype) {
    case kFloat32:
      *reinterpret_cast<float*>(at) = x;
      break;
    case kFloat16:
      *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(ptx::pack_f16(x, 0.0f));
      break;
    case kBFloat16:
      *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(ptx::pack_bf16(x, 0.0f));
      break;
    default:
      *reinterpret_cast<unsigned char*>(at) = static_cast<unsigned char>(pack_e4m3(x, 0.0f));
      break;
  }
}

// Stores four channels, which are dim_stride elements apart, from element `at` on.
template <int kType>
__device__ __forceinline__ void store_four(void* array, long long at, long long dim_stride, const float4& x) {
  if constexpr (element_size(kType) == 2) {
    auto* const to = reinterpret_cast<uint2*>(static_cast<char*>(array) + 2 * at);
    if (dim_stride == 1 && reinterpret_cast<unsigned long long>(to) % sizeof(uint2) == 0) {
      *to = uint2{pack<kType>(x.x, x.y), pack<kType>(x.z, x.w)};
      return;
    }
  }
  store_element(kType, array, at, x.x);
  store_element(kType, array, at + dim_stride, x.y);
  store_element(kType, array, at + 2 * dim_stride, x.z);
  store_element(kType, array, at + 3 * dim_stride, x.w);
}

}  // namespace attune::common
