// SPDX-License-Identifier: Apache-2.0
// wgmma's matrix descriptors of 16-bit operands in shared memory: rows of 128 bytes, eight of which are a swizzle atom
// of 1,024 aligned bytes, swizzled as by TMA (128B). PTX ISA, "Matrix Descriptor".
//
//   K-major: line r holds row r of the operand, 64 elements of K; the next eight rows follow;
//   MN-major: line r holds K = r, 64 elements of M or N; the next 64 are `stride` bytes further.
//
// Two more layouts exist for K-major operands: lines of 32 bytes (16 elements of K) with atoms of 256 aligned bytes
// (32B swizzle); and core matrices without swizzle: eight rows of 16 bytes, one after the other, with the next 8
// elements of K 128 bytes further.
#pragma once

namespace attune::ptx {

enum class Type { kBf16, kF16, kE4m3 };

constexpr int kBytesOfEightRows = 1024;
// The step of a K-major descriptor by 16 elements of K, within a line of 64, in units of 16 bytes.
constexpr int kStepK = 2;

// low holds address and stride. The upper half of the descriptor, swizzle and distance of atoms, is a constant of the
// layout.
template <unsigned kHigh>
struct DescriptorOf {
  unsigned low;
  __device__ __forceinline__ DescriptorOf operator+(int units_of_16_bytes) const { return {low + units_of_16_bytes}; }
  __device__ __forceinline__ unsigned long long bits() const {
    return static_cast<unsigned long long>(kHigh) << 32 | low;
  }
};
// swizzle: 1 is 128B, 3 is 32B, 0 is none.
constexpr unsigned high_of_descriptor(unsigned swizzle, int bytes_of_eight_rows) {
  return swizzle << 30 | static_cast<unsigned>(bytes_of_eight_rows >> 4);
}
using Descriptor = DescriptorOf<high_of_descriptor(1, kBytesOfEightRows)>;

// shared: address of the first element. Atoms are aligned to 1,024 bytes.
__device__ __forceinline__ Descriptor descriptor_k_major(unsigned shared) {
  return {1u << 16 | ((shared & 0x3ffff) >> 4)};
}
__device__ __forceinline__ Descriptor descriptor_mn_major(unsigned shared, int stride) {
  return {static_cast<unsigned>(stride >> 4) << 16 | ((shared & 0x3ffff) >> 4)};
}
// K-major with lines of 32 bytes (32B swizzle).
using Swizzle32Descriptor = DescriptorOf<high_of_descriptor(3, 256)>;
__device__ __forceinline__ Swizzle32Descriptor descriptor_swizzle_32b(unsigned shared) {
  return {1u << 16 | ((shared & 0x3ffff) >> 4)};
}
// K-major core matrices without swizzle; the next eight rows are kEightRows bytes further.
template <int kEightRows>
using NoSwizzleDescriptor = DescriptorOf<high_of_descriptor(0, kEightRows)>;
constexpr int kStepKNoSwizzle = 16;  // as kStepK, without swizzle
template <int kEightRows>
__device__ __forceinline__ NoSwizzleDescriptor<kEightRows> descriptor_no_swizzle(unsigned shared) {
  return {128u >> 4 << 16 | ((shared & 0x3ffff) >> 4)};
}
// The first lane's descriptor. wgmma takes descriptors from uniform registers. The compiler knows that the result of a
// shuffle is uniform, so it computes all descriptors that derive from it in uniform registers.
template <unsigned kHigh>
__device__ __forceinline__ DescriptorOf<kHigh> uniform(DescriptorOf<kHigh> d) {
  return {__shfl_sync(0xffffffffu, d.low, 0)};
}

}  // namespace attune::ptx
