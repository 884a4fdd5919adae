// SPDX-License-Identifier: Apache-2.0
// The producer half of a warp: walks the block's share ahead of the arithmetic and copies this warp's 16 keys of each
// tile into the warp's own ring of stages. Warps share nothing here, so the main loop needs no barrier of the block.
#pragma once

#include "decode/shared_storage.cuh"
#include "decode/slot.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/shared.cuh"
#include "schedule/cursor.cuh"

namespace attune::decode {

using kernels::Piece;
using kernels::Share;

struct Loader {
  Share& share;        // this warp's, in shared memory
  const char *k, *v;   // the head's rows; kLoadTiles: of this lane's key and bytes in a page's first 16 (lane_begin())
  int batch;           // of the piece
  int num_cached;      // of the sequence
  // Token scales, of the piece's head; lanes 0..15 for keys, the others for values. scales: of the lane's key in a tile
  // that begins with a page's slot 0, or of slot 0. Strides in bytes.
  const char* scales;
  long long scale_page_stride, scale_slot_stride;
  bool has_scales;
  int next, end;  // first key of this warp's next tile, and of that behind the piece's last
  int first_key, end_key;
  const int *table, *v_table;  // the sequence's rows (kLoadTiles)
  int stage;
  int live;  // tiles are left
  Slot slot;  // of the next tile: of its first key (kLoadTiles), or of this lane's key
  unsigned full;  // bit i: all 16 keys of the tile that was requested i before the last one are there
  const int warp, lane;
  const unsigned ring;    // shared address of this warp's stages
  unsigned* const notes;  // [kStages]: which of the 16 keys are there, where some are not

  // first: where the walk begins.
  __device__ __forceinline__ Loader(const DecodeParams& p, const Share& first, Share* shares, SharedStorage& shared)
      : share(shares[1 + threadIdx.x / 32]),
        stage(0),
        full(0),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        ring(ptx::shared_address(&shared) + warp * Config::kStages * Config::kStageBytes),
        notes(shared.notes[warp]) {
    enter(p, first);
    __syncwarp();  // one lane may step on soon
  }

  // Takes over the piece that the walk has stepped to.
  __device__ __forceinline__ void enter(const DecodeParams& p, const Share& s) {
    live = s.live != 0 && s.piece.first_tile < s.piece.end_tile ? 1 : 0;
    if (live == 0) return;
    batch = s.piece.batch, next = first_key_of(s.piece.first_tile), end = first_key_of(s.piece.end_tile);
    if constexpr (Config::kCluster) num_cached = s.sequence.num_keys - s.sequence.num_new;
    first_key = s.sequence.first_key, end_key = s.sequence.end_key;
    k = p.k.data + s.piece.head * p.k.head_stride + lane_begin<Config::kHeadDimQk>(p.k);
    v = p.v.data + s.piece.head * p.v.head_stride + lane_begin<Config::kHeadDimV>(p.v);
    if constexpr (Config::kLoad == kLoadTiles) {
      table = p.page_table.data + batch * p.page_table.row_stride;
      v_table = p.v_page_table.data + batch * p.v_page_table.row_stride;
    }
    if constexpr (Config::kTokenScales) enter_scales(p, s.piece.head);
    locate(p);
  }

  // Of this warp in a tile of the block.
  __device__ __forceinline__ int first_key_of(int tile) const {
    return tile * Config::kTileKeys + warp * kernels::kKeysOfWarp;
  }

  // Reads the tables for the next tile, a tile ahead of the copies that need them.
  __device__ __forceinline__ void locate(const DecodeParams& p) {
    const int first = next;
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
    full <<= 1;
    if (live != 0) {
      const unsigned there = mask_of_keys(p);
      if (there == kAllKeys) {  // the rule: nothing of it is looked at key by key
        full |= 1;
        copy(p, kAllKeys);
      } else {
        if (lane == 0) notes[stage] = there;
        if (there != 0) copy(p, there);
      }
      next += Config::kTileKeys;
      if (next != end) {
        locate(p);
      } else if constexpr (Config::kCluster) {
        live = 0;
      } else {
        __syncwarp();  // all lanes have read the share
        if (lane == 0) schedule::step_in_place<Config::kTileKeys, Config::kRows>(p, share);
        __syncwarp();
        enter(p, share);
        __syncwarp();
      }
    }
    ptx::commit_copies();
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // Which keys are there of the tile in stage `at`, the oldest that is requested.
  __device__ __forceinline__ unsigned keys_of_oldest(int at) const {
    return (full >> (Config::kStages - 2) & 1) != 0 ? kAllKeys : notes[at];
  }

 private:
  static constexpr unsigned kAllKeys = 0xffffu;

  // In registers only where there is one piece, and `share` is not kept.
  __device__ __forceinline__ int cached() const {
    return Config::kCluster ? num_cached : share.sequence.num_keys - share.sequence.num_new;
  }

  __device__ __forceinline__ unsigned mask_of_keys(const DecodeParams& p) const {
    const bool found = slot.exists(p);
    if constexpr (Config::kLoad == kLoadTiles) {
      if (!found) return 0;
      if (next >= first_key && next + kernels::kKeysOfWarp <= end_key) return kAllKeys;
      const int begin = max(first_key - next, 0), behind = min(end_key - next, kernels::kKeysOfWarp);
      return (kAllKeys >> (kernels::kKeysOfWarp - behind)) & (kAllKeys << begin);
    } else {
      return __ballot_sync(0xffffffffu, found) & kAllKeys;
    }
  }

  __device__ __forceinline__ void copy(const DecodeParams& p, unsigned there) const {
    const unsigned to = ring + stage * Config::kStageBytes;
    copy_plane<Config::kHeadDimQk, Config::LayoutK>(p.k, k, slot.k_page, to, there);
    copy_plane<Config::kHeadDimV, Config::LayoutV>(p.v, v, slot.v_page(p), to + Config::kBytesK, there);
    if constexpr (Config::kTokenScales) copy_scales(p, to + Config::kBytesK + Config::kBytesV, there);
  }

  // Numbers that are not below zero multiply a stride in two instructions, others in four.
  __device__ __forceinline__ static long long steps(int count, long long stride) {
    return static_cast<long long>(static_cast<unsigned>(count)) * stride;
  }

  // cp.async's of a row; whether the warp copies a whole number of rows at a time.
  template <int kHeadDim>
  static constexpr int kCopiesOfRow = kHeadDim* Config::kElement / Config::kCopyBytes;
  template <int kHeadDim>
  static constexpr bool kByRows = Config::kLoad == kLoadTiles && 32 % kCopiesOfRow<kHeadDim> == 0 &&
                                  kCopiesOfRow<kHeadDim> > 1;

  template <int kHeadDim>
  __device__ __forceinline__ long long lane_begin(const kernels::KvPlane& plane) const {
    constexpr int kCopies = kCopiesOfRow<kHeadDim>;
    if constexpr (!kByRows<kHeadDim>) return 0;
    return lane / kCopies * plane.slot_stride + lane % kCopies * Config::kCopyBytes;
  }

  // Scales by token: those of all heads lie in one sector, of which each head's blocks take 4 bytes. It stays in the L2
  // until the slowest of them has come by, if keys and values, which nobody wants again, make room first.
  __device__ __forceinline__ static void copy_bytes(unsigned to, const char* from, unsigned valid) {
    if constexpr (Config::kTokenScales) {
      ptx::copy_async<Config::kCopyBytes>(to, from, valid, ptx::evict_first_policy());
    } else {
      ptx::copy_async<Config::kCopyBytes>(to, from, valid);
    }
  }

  // Rows that are not there become zeros: what a row may not see must not even be multiplied by zero.
  template <int kHeadDim, class Layout>
  __device__ __forceinline__ void copy_plane(const kernels::KvPlane& plane, const char* base, int page, unsigned to,
                                             unsigned there) const {
    constexpr int kCopies = kCopiesOfRow<kHeadDim>;
    const char* row = base + steps(page, plane.page_stride) + steps(slot.offset, plane.slot_stride);
    if constexpr (Config::kLoad == kLoadElements) {
      copy_elements<kHeadDim, Layout>(plane, row, to, there);
    } else if constexpr (kByRows<kHeadDim>) {
      copy_tile<kCopies, Layout>(row, plane.slot_stride, to, there);
    } else {
      copy_rows<kCopies, Layout>(plane, row, to, there);
    }
  }

  // Rows a fixed distance apart, a whole number of them in one copy of the warp. from: of this lane.
  template <int kCopies, class Layout>
  __device__ __forceinline__ void copy_tile(const char* from, long long stride, unsigned to, unsigned there) const {
    constexpr int kRows = 32 / kCopies;
    const int key = lane / kCopies, byte = lane % kCopies * Config::kCopyBytes;
    const unsigned here = there >> key, lane_at = to + Layout::offset(key, byte / 16) + byte % 16;
#pragma unroll
    for (int i = 0; i < kernels::kKeysOfWarp / kRows; ++i) {
      const bool is_there = there == kAllKeys || (here & (1u << i * kRows)) != 0;
      copy_bytes(Layout::rows_down(lane_at, i * kRows), from, is_there ? Config::kCopyBytes : 0);
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
      copy_bytes(to + Layout::offset(key, byte / 16) + byte % 16, from,
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
    const bool is_there = (there == kAllKeys || (there >> key & 1) != 0) && has_scales;
    ptx::copy_async<4>(to + lane * 4, scales + steps(page, scale_page_stride) + steps(slot.offset, scale_slot_stride),
                       is_there ? 4 : 0);
  }
  __device__ __forceinline__ void enter_scales(const DecodeParams& p, int head) {
    const kernels::KvScale& scale = lane < kernels::kKeysOfWarp ? p.k_scale : p.v_scale;
    has_scales = scale.mode == 3;
    scale_page_stride = scale.page_stride * 4, scale_slot_stride = scale.slot_stride * 4;
    scales = reinterpret_cast<const char*>(scale.data + head * scale.head_stride);
    if (Config::kLoad == kLoadTiles) scales += lane % kernels::kKeysOfWarp * scale_slot_stride;
  }
};

}  // namespace attune::decode
