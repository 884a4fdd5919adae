// SPDX-License-Identifier: Apache-2.0
// The producer of gradients_mma.cu: all threads of the block copy rows of q, k, v and dout to shared memory, as fp32 or
// unchanged (Config::kIn16Bits). Missing rows and channels become 0.
#pragma once

#include "backward/mma/config.cuh"
#include "ptx/shared.cuh"

namespace attune::backward::mma {

// Rows of one head.
struct Rows {
  const char* first;
  long long row_stride, dim_stride;  // in elements
  int count;                         // rows that exist
  bool vectors;                      // rows are aligned to 16 bytes and have contiguous channels
  int missing = 0;  // rows before the first one that exists; count includes them, `first` is after them

  __device__ __forceinline__ bool has(int row) const { return row < count && (!Config::kOfTables || row >= missing); }
};
// How many rows from `begin` on do not exist because they are before row 0.
__device__ __forceinline__ int missing_rows(int begin) { return Config::kOfTables ? max(-begin, 0) : 0; }

// The rows from row `begin` on, of a sequence that has `rows` rows.
template <class Array>
__device__ __forceinline__ Rows rows_of(const Array& x, bool vectors, long long offset, int begin, int rows) {
  return {x.data + offset * common::element_size(Config::kType),
          x.row_stride,
          x.dim_stride,
          rows - begin,
          vectors,
          missing_rows(begin)};
}

// Copies the channels of a chunk of 16 bytes of the row that begins at `row`, or zeros.
template <int kHeadDim>
__device__ __forceinline__ void copy_chunk(unsigned to, const Rows& rows, const char* row, bool there, int chunk) {
  constexpr int kSize = common::element_size(Config::kType), kChannels = 16 / Config::kNumberBytes;
  const int channels = there ? min(max(kHeadDim - kChannels * chunk, 0), kChannels) : 0;
  const char* const from = channels > 0 ? row + kChannels * chunk * rows.dim_stride * kSize : rows.first;
  if constexpr (Config::kIsFp32 || Config::kIn16Bits) {
    if (rows.vectors) {
      ptx::copy_async<16>(to, from, kSize * channels);
      return;
    }
  }
  if constexpr (Config::kIn16Bits) {
#pragma unroll 1
    for (int i = 0; i < kChannels; ++i) {
      const char* const at = from + 2 * i * rows.dim_stride;
      ptx::store_shared_u16(to + 2 * i, i < channels ? *reinterpret_cast<const unsigned short*>(at) : 0);
    }
  } else if constexpr (Config::kIsFp32) {
#pragma unroll 1
    for (int i = 0; i < 4; ++i)
      ptx::copy_async<4>(to + 4 * i, i < channels ? from + 4 * i * rows.dim_stride : from, i < channels ? 4 : 0);
  } else {
    unsigned x[4] = {};
    if (rows.vectors && channels == 4) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(from);
      const auto number = [](unsigned half) {
        const unsigned short bits = static_cast<unsigned short>(half);
        return __float_as_uint(Config::kType == common::kBFloat16 ? ptx::bf16_to_float(bits) : ptx::f16_to_float(bits));
      };
      x[0] = number(pairs.x), x[1] = number(pairs.x >> 16), x[2] = number(pairs.y), x[3] = number(pairs.y >> 16);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < channels) x[i] = __float_as_uint(common::load_element(Config::kType, from, i * rows.dim_stride));
      }
    }
    ptx::store_shared_four(to, x);
  }
}

template <int kHeadDim, int kCount>
__device__ __forceinline__ void copy_rows(unsigned to, const Rows& rows) {
  using To = Layout<kernels::mma_lines(kHeadDim, Config::kNumberBytes)>;
  constexpr int kChunks = To::kPitch / 16, kLanes = kChunks >= 32 ? 32 : kChunks == 16 ? 16 : 8;  // of a row
  constexpr int kStep = Config::kThreads / kLanes;
  const int first = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const char* from = rows.first + (first - rows.missing) * rows.row_stride * common::element_size(Config::kType);
#pragma unroll 1  // otherwise the terms of addresses stay in registers over the loop of tiles
  for (int row = first; row < kCount; row += kStep) {
#pragma unroll
    for (int chunk = lane; chunk < kChunks; chunk += kLanes)
      copy_chunk<kHeadDim>(to + To::offset(row, chunk), rows, from, rows.has(row), chunk);
    from += kStep * rows.row_stride * common::element_size(Config::kType);
  }
}

// q or k. row: the first row.
template <bool kQ, int kCount>
__device__ __forceinline__ void copy_qk(const BackwardParams& p, const WorkTile& w, unsigned to, int head, int row) {
  constexpr int kSize = common::element_size(Config::kType);
  if constexpr (kQ) {
    const long long at = q_offset(p, w.s, w.batch, p.q_batch_stride, p.q_row_stride) +
                         (row + missing_rows(row)) * p.q_row_stride + head * p.q_head_stride;
    copy_rows<Config::kHeadDimQk, kCount>(to, {p.q + at * kSize, p.q_row_stride, p.q_dim_stride, w.s.num_q - row,
                                               (w.vectors & kVectorsQ) != 0, missing_rows(row)});
  } else {
    copy_rows<Config::kHeadDimQk, kCount>(to, rows_of(p.new_k, (w.vectors & kVectorsK) != 0,
                                                      key_offset(w.s, w.batch, p.new_k, row, head), row, w.s.num_keys));
  }
}
// dout or v.
template <bool kQ, int kCount>
__device__ __forceinline__ void copy_vdo(const BackwardParams& p, const WorkTile& w, unsigned to, int head, int row) {
  if constexpr (kQ) {
    copy_rows<Config::kHeadDimV, kCount>(
        to, rows_of(p.dout, (w.vectors & kVectorsDout) != 0,
                    query_offset(p, w.s, w.batch, p.dout, row + missing_rows(row), head), row, w.s.num_q));
  } else {
    copy_rows<Config::kHeadDimV, kCount>(to, rows_of(p.new_v, (w.vectors & kVectorsV) != 0,
                                                     key_offset(w.s, w.batch, p.new_v, row, head), row, w.s.num_keys));
  }
}
// The stats of Smem::kQueries rows.
__device__ __forceinline__ void copy_stats(const BackwardParams& p, const Smem& smem, int head, int row) {
  const WorkTile& w = smem.work();
  const int i = static_cast<int>(threadIdx.x);
  if (i >= Smem::kQueries) return;
  const bool there = row + i < w.s.num_q && (!Config::kOfTables || row + i >= 0);
  ptx::copy_async<sizeof(RowStats)>(smem.stats(i), stats_of(p, w.s, w.batch, head) + (there ? row + i : 0),
                                    there ? sizeof(RowStats) : 0);
}

__device__ __forceinline__ void copy_resident(const BackwardParams& p, const Smem& smem) {
  const WorkTile& w = smem.work();
  copy_qk<Config::kOfQueries, Config::kRows>(p, w, smem.resident_qk(), w.head, w.begin);
  if constexpr (Config::kWithDqk)
    copy_vdo<Config::kOfQueries, Config::kRows>(p, w, smem.resident_vdo(), w.head, w.begin);
  if constexpr (Config::kOfQueries) copy_stats(p, smem, w.head, w.begin);
}
// Copies the tile that begins at `row`. q_head: of the pairs.
__device__ __forceinline__ void copy_tile(const BackwardParams& p, const Smem& smem, int q_head, int row) {
  const WorkTile& w = smem.work();
  const int head = Config::kOfQueries ? kernels::divide(q_head, p.by_group) : q_head;
  copy_qk<!Config::kOfQueries, Config::kTile>(p, w, smem.qk(), head, row);
  copy_vdo<!Config::kOfQueries, Config::kTile>(p, w, smem.vdo(), head, row);
  if constexpr (!Config::kOfQueries) copy_stats(p, smem, q_head, row);
}

}  // namespace attune::backward::mma
