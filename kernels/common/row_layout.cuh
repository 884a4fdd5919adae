// SPDX-License-Identifier: Apache-2.0
// Swizzled rows of 16-byte chunks in shared memory: ldmatrix reads a chunk of eight rows without bank conflicts.
#pragma once

namespace attune::common {

// Rows of a power of two of chunks are swizzled; others are padded to an odd number of chunks.
template <int kChunks>
struct RowLayout {
  static constexpr bool kSwizzled = kChunks >= 2 && (kChunks & (kChunks - 1)) == 0;
  static constexpr int kPitchChunks = kSwizzled ? kChunks : kChunks | 1;
  static constexpr int kPitch = kPitchChunks * 16;  // bytes
  // log2 of the rows in a 128-byte line.
  static constexpr int kShift = kChunks >= 8 ? 0 : kChunks == 4 ? 1 : 2;
  static constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;

  // The swizzle: a row's chunk numbers are XORed with it.
  __device__ static constexpr int twist(int row) { return kSwizzled ? (row >> kShift) & kMask : 0; }
  __device__ static constexpr int offset(int row, int chunk) { return row * kPitch + ((chunk ^ twist(row)) << 4); }

  // Steps by constants from the address of (row, chunk) in a tile aligned to 128 bytes, in one or two instructions.
  // This one is to (row, chunk ^ step), where chunk has no bit of step.
  __device__ static constexpr unsigned chunks_on(unsigned at, int step) {
    return kSwizzled ? (at ^ ((step & kMask) << 4)) + ((step & ~kMask) << 4) : at + (step << 4);
  }
  // To (row + step, chunk), where row < step, and step is a power of two or a multiple of one.
  __device__ static constexpr unsigned rows_down(unsigned at, int step) {
    return (at ^ (twist(step) << 4)) + step * kPitch;
  }
};

// What lane l gives ldmatrix.x4: the address of row l % 8 of matrix l / 8. For A operands, and V transposed: matrices
// go down 8 rows, then on 8 channels.
template <class Layout>
__device__ __forceinline__ unsigned down_then_on(unsigned tile) {
  const int lane = threadIdx.x % 32;
  return tile + Layout::offset(lane / 8 % 2 * 8 + lane % 8, lane / 16);
}
// For K: on, then down.
template <class Layout>
__device__ __forceinline__ unsigned on_then_down(unsigned tile) {
  const int lane = threadIdx.x % 32;
  return tile + Layout::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

}  // namespace attune::common
