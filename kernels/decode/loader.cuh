// SPDX-License-Identifier: Apache-2.0
// The producer half of a warp: walks the block's share ahead of the arithmetic and copies this warp's 16 keys of each
// tile into the warp's own ring of stages. Warps share nothing here, so the main loop needs no barrier of the block.
#pragma once

#include "decode/config.cuh"
#include "decode/slot.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/shared.cuh"
#include "schedule/cursor.cuh"

namespace attune::decode {

using kernels::Piece;
using kernels::Share;

struct Loader {
  Share& share;        // this warp's, in shared memory
  const char *k, *v;   // the head's rows
  int batch;           // of the piece
  int num_cached;      // of the sequence
  // Token scales, of the piece's head; lanes 0..15 for keys, the others for values. scales: of the lane's key in a tile
  // that begins with a page's slot 0, or of slot 0.
  const float* scales;
  long long scale_page_stride, scale_slot_stride;
  bool has_scales;
  int tile, end_tile;  // of the block, absolute; this warp's keys are 16 of it
  int first_key, end_key;
  const int *table, *v_table;  // the sequence's rows (kLoadTiles)
  int stage;
  bool live;  // tiles are left
  Slot slot;  // of the next tile: of its first key (kLoadTiles), or of this lane's key
  const int warp, lane;
  const unsigned ring;    // shared address of this warp's stages
  unsigned* const notes;  // [kStages]: which of the 16 keys are there

  // first: where the walk begins.
  __device__ __forceinline__ Loader(const DecodeParams& p, const Share& first, Share* shares, unsigned char* shared)
      : share(shares[1 + threadIdx.x / 32]),
        stage(0),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        ring(ptx::shared_address(shared) + warp * Config::kStages * Config::kStageBytes),
        notes(reinterpret_cast<unsigned*>(shared + Config::kShared.notes) + warp * Config::kStages) {
    enter(p, first);
    __syncwarp();  // one lane may step on soon
  }

  // Takes over the piece that the walk has stepped to.
  __device__ __forceinline__ void enter(const DecodeParams& p, const Share& s) {
    live = s.live != 0 && s.piece.first_tile < s.piece.end_tile;
    if (!live) return;
    batch = s.piece.batch, tile = s.piece.first_tile, end_tile = s.piece.end_tile;
    if constexpr (Config::kCluster) num_cached = s.sequence.num_keys - s.sequence.num_new;
    first_key = s.sequence.first_key, end_key = s.sequence.end_key;
    k = p.k.data + s.piece.head * p.k.head_stride;
    v = p.v.data + s.piece.head * p.v.head_stride;
    if constexpr (Config::kLoad == kLoadTiles) {
      table = p.page_table.data + batch * p.page_table.row_stride;
      v_table = p.v_page_table.data + batch * p.v_page_table.row_stride;
    }
    if constexpr (Config::kTokenScales) enter_scales(p, s.piece.head);
    locate(p);
  }

  __device__ __forceinline__ int first_token() const { return tile * Config::kTileKeys + warp * kernels::kKeysOfWarp; }

  // Reads the tables for the next tile, a tile ahead of the copies that need them.
  __device__ __forceinline__ void locate(const DecodeParams& p) {
    const int first = first_token();
    slot = {-1, -1, 0};
    if constexpr (Config::kLoad == kLoadTiles) {
      const int token = max(first, first_key);
      if (token >= min(end_key, first + kernels::kKeysOfWarp)) return;
      slot = p.paged ? find_in_rows(p, table, v_table, token) : find_slot(p, batch, token);
      slot.offset += first - token;
    } else {
      const int token = first + lane % kernels::kKeysOfWarp;
      if (token < first_key || token >= end_key) return;
      slot = find_token(p, batch, cached(), token);
    }
  }

  // Starts the copies of one tile, or of nothing at the end of the share; closes their group either way.
  __device__ __forceinline__ void issue(const DecodeParams& p) {
    if (live) {
      const unsigned there = mask_of_keys(p);
      if (lane == 0) notes[stage] = there;
      const unsigned to = ring + stage * Config::kStageBytes;
      if (there != 0) {
        copy_plane<Config::kHeadDimQk, Config::LayoutK>(p.k, k, slot.k_page, to, there);
        copy_plane<Config::kHeadDimV, Config::LayoutV>(p.v, v, slot.v_page(p), to + Config::kBytesK, there);
        if constexpr (Config::kTokenScales) copy_scales(p, to + Config::kBytesK + Config::kBytesV, there);
      }
      if (++tile != end_tile) {
        locate(p);
      } else if constexpr (Config::kCluster) {
        live = false;
      } else {
        if (lane == 0) schedule::step_in_place<Config::kTileKeys, Config::kRows>(p, share);
        __syncwarp();
        enter(p, share);
        __syncwarp();
      }
    }
    ptx::commit_copies();
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

 private:
  // In registers only where there is one piece, and `share` is not kept.
  __device__ __forceinline__ int cached() const {
    return Config::kCluster ? num_cached : share.sequence.num_keys - share.sequence.num_new;
  }

  __device__ __forceinline__ unsigned mask_of_keys(const DecodeParams& p) const {
    const bool found = slot.exists(p);
    if constexpr (Config::kLoad == kLoadTiles) {
      if (!found) return 0;
      const int first = first_token();
      if (first >= first_key && first + kernels::kKeysOfWarp <= end_key) return 0xffffu;
      const int begin = max(first_key - first, 0), end = min(end_key - first, kernels::kKeysOfWarp);
      return (0xffffu >> (kernels::kKeysOfWarp - end)) & (0xffffu << begin);
    } else {
      return __ballot_sync(0xffffffffu, found) & 0xffffu;
    }
  }

  // Rows that are not there become zeros: what a row may not see must not even be multiplied by zero.
  template <int kHeadDim, class Layout>
  __device__ __forceinline__ void copy_plane(const kernels::KvPlane& plane, const char* base, int page, unsigned to,
                                             unsigned there) const {
    constexpr int kCopies = kHeadDim * Config::kElement / Config::kCopyBytes;  // a row
    const char* row = base + page * plane.page_stride + slot.offset * plane.slot_stride;
    if constexpr (Config::kLoad == kLoadElements) {
      copy_elements<kHeadDim, Layout>(plane, row, to, there);
    } else if constexpr (Config::kLoad == kLoadTiles && 32 % kCopies == 0 && kCopies > 1) {
      copy_tile<kCopies, Layout>(row, plane.slot_stride, to, there);
    } else {
      copy_rows<kCopies, Layout>(plane, row, to, there);
    }
  }

  // Rows a fixed distance apart, a whole number of them in one copy of the warp.
  template <int kCopies, class Layout>
  __device__ __forceinline__ void copy_tile(const char* row, long long stride, unsigned to, unsigned there) const {
    constexpr int kRows = 32 / kCopies;
    const int key = lane / kCopies, byte = lane % kCopies * Config::kCopyBytes;
    const char* from = row + key * stride + byte;
    const unsigned here = there >> key, lane_at = to + Layout::offset(key, byte / 16) + byte % 16;
#pragma unroll
    for (int i = 0; i < kernels::kKeysOfWarp / kRows; ++i) {
      ptx::copy_async<Config::kCopyBytes>(Layout::rows_down(lane_at, i * kRows), from,
                                          (here & (1u << i * kRows)) != 0 ? Config::kCopyBytes : 0);
      from += kRows * stride;
    }
  }

  template <int kCopies, class Layout>
  __device__ __forceinline__ void copy_rows(const kernels::KvPlane& plane, const char* row, unsigned to,
                                            unsigned there) const {
    constexpr int kTotal = kCopies * kernels::kKeysOfWarp;
#pragma unroll
    for (int i = 0; i < (kTotal + 31) / 32; ++i) {
      const int copy = i * 32 + lane;
      const int key = copy / kCopies, byte = copy % kCopies * Config::kCopyBytes;
      const char* from;
      if constexpr (Config::kLoad == kLoadTiles) {
        from = row + key * plane.slot_stride + byte;
      } else {
        from = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), key)) +
               byte;
      }
      if (kTotal % 32 != 0 && copy >= kTotal) break;
      ptx::copy_async<Config::kCopyBytes>(to + Layout::offset(key, byte / 16) + byte % 16, from,
                                          (there >> key & 1) != 0 ? Config::kCopyBytes : 0);
    }
  }

  // Lanes 0..15 copy the row of their key, element by element.
  template <int kHeadDim, class Layout>
  __device__ __forceinline__ void copy_elements(const kernels::KvPlane& plane, const char* row, unsigned to,
                                                unsigned there) const {
    if (lane >= kernels::kKeysOfWarp) return;
    const bool is_there = (there >> lane & 1) != 0;
#pragma unroll 8
    for (int d = 0; d < kHeadDim; ++d) {
      const unsigned at = to + Layout::offset(lane, d * Config::kElement / 16) + d * Config::kElement % 16;
      const long long from =
          (d / plane.pack * plane.outer_stride + d % plane.pack * plane.inner_stride) * Config::kElement;
      if constexpr (Config::kElement == 2) {
        const unsigned short x = is_there ? *reinterpret_cast<const unsigned short*>(row + from) : 0;
        ptx::store_shared_u16(at, x);
      } else if constexpr (Config::kElement == 4) {
        const unsigned x = is_there ? *reinterpret_cast<const unsigned*>(row + from) : 0;
        ptx::store_shared_u32(at, x);
      } else {
        const unsigned x = is_there ? *reinterpret_cast<const unsigned char*>(row + from) : 0;
        ptx::store_shared_u8(at, x);
      }
    }
  }

  // Scales of the 16 keys, then of the 16 values.
  __device__ __forceinline__ void copy_scales(const DecodeParams& p, unsigned to, unsigned there) const {
    const int key = lane % kernels::kKeysOfWarp;
    const int page = lane < kernels::kKeysOfWarp ? slot.k_page : slot.v_page(p);
    const bool is_there = (there >> key & 1) != 0 && has_scales;
    ptx::copy_async<4>(to + lane * 4, scales + page * scale_page_stride + slot.offset * scale_slot_stride,
                       is_there ? 4 : 0);
  }
  __device__ __forceinline__ void enter_scales(const DecodeParams& p, int head) {
    const kernels::KvScale& scale = lane < kernels::kKeysOfWarp ? p.k_scale : p.v_scale;
    has_scales = scale.mode == 3;
    scale_page_stride = scale.page_stride, scale_slot_stride = scale.slot_stride;
    scales = scale.data + head * scale.head_stride;
    if (Config::kLoad == kLoadTiles) scales += lane % kernels::kKeysOfWarp * scale.slot_stride;
  }
};

}  // namespace attune::decode
