// SPDX-License-Identifier: Apache-2.0
// How wgmma finds 16-bit operands in shared memory: rows of 128 bytes, eight of which make an atom of 1,024 aligned
// bytes, their 16-byte pieces swizzled as the TMA writes them. PTX ISA, "Matrix Descriptor".
//
//   along K: row r holds element row r of the operand, 64 of its K; the next eight rows follow;
//   along N: row r holds K = r, 64 elements of N; 64 more of N lie `stride` bytes further.
//
// Along K there are two more: rows of 32 bytes, 16 of its K, eight of which make an atom of 256 aligned bytes; and no
// rows at all, but pieces of 16 bytes, eight element rows one after the other, their next 8 of K 128 bytes further.
#pragma once

namespace attune::ptx {

enum class Type { kBf16, kF16, kE4m3 };

constexpr int kBytesOfEightRows = 1024;
// 16 elements of K further, in a row along K: to be added to a descriptor. The next 64 are in the next rows.
constexpr int kStepK = 2;

// The lower half is where the operand begins and the stride; the upper half, swizzle and distance of atoms, is the same
// for all of a kind.
template <unsigned kHigh>
struct DescriptorOf {
  unsigned low;
  __device__ __forceinline__ DescriptorOf operator+(int units_of_16_bytes) const { return {low + units_of_16_bytes}; }
  __device__ __forceinline__ unsigned long long bits() const {
    return static_cast<unsigned long long>(kHigh) << 32 | low;
  }
};
// swizzle: 1 by 128 bytes, 3 by 32, 0 none.
constexpr unsigned high_of_descriptor(unsigned swizzle, int bytes_of_eight_rows) {
  return swizzle << 30 | static_cast<unsigned>(bytes_of_eight_rows >> 4);
}
using Descriptor = DescriptorOf<high_of_descriptor(1, kBytesOfEightRows)>;

// shared: address of the first element. Its alignment to 1,024 makes the atoms.
__device__ __forceinline__ Descriptor descriptor_k_major(unsigned shared) {
  return {1u << 16 | ((shared & 0x3ffff) >> 4)};
}
__device__ __forceinline__ Descriptor descriptor_mn_major(unsigned shared, int stride) {
  return {static_cast<unsigned>(stride >> 4) << 16 | ((shared & 0x3ffff) >> 4)};
}
// Rows of 32 bytes.
using NarrowDescriptor = DescriptorOf<high_of_descriptor(3, 256)>;
__device__ __forceinline__ NarrowDescriptor descriptor_of_narrow_rows(unsigned shared) {
  return {1u << 16 | ((shared & 0x3ffff) >> 4)};
}
// Pieces; the next eight element rows are kEightRows bytes further.
template <int kEightRows>
using PieceDescriptor = DescriptorOf<high_of_descriptor(0, kEightRows)>;
constexpr int kStepOfPieces = 16;  // what kStepK is of rows
template <int kEightRows>
__device__ __forceinline__ PieceDescriptor<kEightRows> descriptor_of_pieces(unsigned shared) {
  return {128u >> 4 << 16 | ((shared & 0x3ffff) >> 4)};
}
// The first lane's. The instructions take descriptors from registers that a warp shares: of what comes from a shuffle
// the compiler knows that it fits there, and computes all others from it without going through each lane's own.
template <unsigned kHigh>
__device__ __forceinline__ DescriptorOf<kHigh> uniform(DescriptorOf<kHigh> d) {
  return {__shfl_sync(0xffffffffu, d.low, 0)};
}

}  // namespace attune::ptx
