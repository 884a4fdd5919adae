// SPDX-License-Identifier: Apache-2.0
// Rows of 16-byte chunks in shared memory, placed so that ldmatrix reads eight rows of one chunk column without bank conflicts.
#pragma once

namespace attune::tile {

// Powers of two are swizzled within themselves; other widths are padded to an odd number of chunks.
template <int kChunks>
struct RowLayout {
  static constexpr bool kSwizzled = kChunks >= 2 && (kChunks & (kChunks - 1)) == 0;
  static constexpr int kPitchChunks = kSwizzled ? kChunks : kChunks | 1;
  static constexpr int kPitch = kPitchChunks * 16;  // bytes
  // Rows that share the eight chunks of a 128-byte line, as a shift.
  static constexpr int kShift = kChunks >= 8 ? 0 : kChunks == 4 ? 1 : 2;
  static constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;

  // What a row's chunk numbers are XORed with.
  __device__ static constexpr int twist(int row) { return kSwizzled ? (row >> kShift) & kMask : 0; }
  __device__ static constexpr int offset(int row, int chunk) { return row * kPitch + ((chunk ^ twist(row)) << 4); }
};

}  // namespace attune::tile
