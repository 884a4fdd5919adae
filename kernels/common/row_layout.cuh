// SPDX-License-Identifier: Apache-2.0
// Swizzled rows of 16-byte chunks in shared memory. ldmatrix reads the same chunk of eight rows without bank conflicts.
#pragma once

namespace attune::common {

// Rows are swizzled if their number of chunks is a power of two; others are padded to an odd number of chunks.
template <int kChunks>
struct RowLayout {
  static constexpr bool kSwizzled = kChunks >= 2 && (kChunks & (kChunks - 1)) == 0;
  static constexpr int kPitchChunks = kSwizzled ? kChunks : kChunks | 1;
  static constexpr int kPitch = kPitchChunks * 16;  // bytes
  // log2 of the rows in a 128-byte line.
  static constexpr int kShift = kChunks >= 8 ? 0 : kChunks == 4 ? 1 : 2;
  static constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;

  // The swizzle: chunk numbers of a row are XORed with this.
  __device__ static constexpr int swizzle(int row) { return kSwizzled ? (row >> kShift) & kMask : 0; }
  __device__ static constexpr int offset(int row, int chunk) { return row * kPitch + ((chunk ^ swizzle(row)) << 4); }

  // Two increments of an address that keep the swizzle: an XOR of the chunk, or of a chunk and then an addition for the
  // row. Constant steps take one or two instructions. Tiles are aligned to 128 bytes.
  //
  // The address of (row, chunk ^ step) from that of (row, chunk); chunk and step have no bit in common.
  __device__ static constexpr unsigned chunks_on(unsigned at, int step) {
    return kSwizzled ? (at ^ ((step & kMask) << 4)) + ((step & ~kMask) << 4) : at + (step << 4);
  }
  // The address of (row + step, chunk); step is a multiple of a power of two that is larger than row.
  __device__ static constexpr unsigned rows_down(unsigned at, int step) {
    return (at ^ (swizzle(step) << 4)) + step * kPitch;
  }
};

// The address that lane l gives to ldmatrix.x4: row l % 8 of matrix l / 8. For A operands and transposed V the matrices
// go 8 rows down first, then 8 channels on.
template <class Layout>
__device__ __forceinline__ unsigned down_then_on(unsigned tile) {
  const int lane = threadIdx.x % 32;
  return tile + Layout::offset(lane / 8 % 2 * 8 + lane % 8, lane / 16);
}
// For K the matrices go 8 channels on first, then 8 rows down.
template <class Layout>
__device__ __forceinline__ unsigned on_then_down(unsigned tile) {
  const int lane = threadIdx.x % 32;
  return tile + Layout::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

}  // namespace attune::common
