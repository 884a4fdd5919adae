// SPDX-License-Identifier: Apache-2.0
// The producer part of a warp: walks the block's stream-K range ahead of the mainloop and copies this warp's 16 keys of
// each tile to the warp's private ring of stages. Warps share no stages, so the mainloop needs no block barrier.
#pragma once

#include "decode/shared_storage.cuh"
#include "decode/slot.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/shared.cuh"
#include "scheduler/stream_k_range.cuh"

namespace attune::decode {

using kernels::Split;
using kernels::StreamKRange;

struct Producer {
  StreamKRange& range;  // of this warp, in shared memory
  const char *k, *v;    // slot 0 of page 0 for the split's head; kLoadTiles: plus lane_offset()
  int batch;            // of the split
  int num_cached;       // of the sequence
  // Token scales for the split's head: lanes 0..15 copy those of keys, the others those of values. scales: of slot 0,
  // or of the lane's key in a tile that begins at slot 0 (kLoadTiles). Strides are in bytes.
  const char* scales;
  long long scale_page_stride, scale_slot_stride;
  bool has_scales;
  int next_key, end_of_split;  // the first key of this warp's next tile; the first key after the split's last tile
  int first_key, end_key;
  const int *table, *v_table;  // the sequence's rows (kLoadTiles)
  int stage;
  int live;            // there are more tiles
  Slot slot;           // of the next tile's first key (kLoadTiles), or of this lane's key in that tile
  unsigned all_valid;  // bit i: all 16 keys are valid in the tile that was issued i tiles before the latest
  const int warp, lane;
  const unsigned ring;         // shared address of this warp's stages
  unsigned* const valid_keys;  // SharedStorage::valid_keys[warp], [kStages]

  // first: the initial range.
  __device__ __forceinline__ Producer(const AttentionParams& p, const StreamKRange& first, StreamKRange* stream_k,
                                      SharedStorage& shared)
      : range(stream_k[2 + threadIdx.x / 32]),
        stage(0),
        all_valid(0),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        ring(ptx::shared_address(&shared) + warp * Config::kStages * Config::kStageBytes),
        valid_keys(shared.valid_keys[warp]) {
    start_split(p, first);
    __syncwarp();  // all lanes have read the range before one advances it
  }

  // Starts the split to which the range has advanced.
  __device__ __forceinline__ void start_split(const AttentionParams& p, const StreamKRange& s) {
    live = s.live != 0 && s.split.first_tile < s.split.end_tile ? 1 : 0;
    if (live == 0) return;
    batch = s.split.batch;
    next_key = first_key_of_tile(s.split.first_tile), end_of_split = first_key_of_tile(s.split.end_tile);
    if constexpr (Config::kCluster) num_cached = s.sequence.num_keys - s.sequence.num_new;
    first_key = s.sequence.first_key, end_key = s.sequence.end_key;
    k = p.k.data + s.split.head * p.k.head_stride + lane_offset<Config::kHeadDimQk>(p.k);
    v = p.v.data + s.split.head * p.v.head_stride + lane_offset<Config::kHeadDimV>(p.v);
    if constexpr (Config::kLoad == kLoadTiles) {
      table = p.page_table.data + batch * p.page_table.row_stride;
      v_table = p.v_page_table.data + batch * p.v_page_table.row_stride;
    }
    if constexpr (Config::kTokenScales != 0) start_scales(p, s.split.head);
    look_up_slot(p);
  }

  // The first of this warp's 16 keys in a tile of the block.
  __device__ __forceinline__ int first_key_of_tile(int tile) const {
    return tile * Config::kTileKeys + warp * kernels::kKeysOfWarp;
  }

  // Reads the page table for the next tile, one tile before the copies that need it.
  __device__ __forceinline__ void look_up_slot(const AttentionParams& p) {
    const int first = next_key;
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

  // Issues the copies of one tile, or none at the end of the range, and commits their group in both cases.
  __device__ __forceinline__ void issue_tile(const AttentionParams& p) {
    all_valid <<= 1;
    if (live != 0) {
      const unsigned valid = find_valid_keys(p);
      if (valid == kAllKeys) {  // the common case: no masks
        all_valid |= 1;
        copy(p, kAllKeys);
      } else {
        if (lane == 0) valid_keys[stage] = valid;
        if (valid != 0) copy(p, valid);
      }
      next_key += Config::kTileKeys;
      if (next_key != end_of_split) {
        look_up_slot(p);
      } else if constexpr (Config::kCluster) {
        live = 0;
      } else {
        __syncwarp();  // all lanes have read the range
        if (lane == 0) scheduler::advance<Config::kTileKeys, Config::kRows>(p, range);
        __syncwarp();
        start_split(p, range);
        __syncwarp();
      }
    }
    ptx::commit_copies();
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // The valid keys of the oldest tile in flight, which is in stage `at`.
  __device__ __forceinline__ unsigned valid_keys_of_oldest(int at) const {
    return (all_valid >> (Config::kStages - 2) & 1) != 0 ? kAllKeys : valid_keys[at];
  }

 private:
  static constexpr unsigned kAllKeys = 0xffffu;

  // num_cached is a register only in clusters, where a block has one split.
  __device__ __forceinline__ int cached() const {
    return Config::kCluster ? num_cached : range.sequence.num_keys - range.sequence.num_new;
  }

  __device__ __forceinline__ unsigned find_valid_keys(const AttentionParams& p) const {
    const bool found = slot.exists(p);
    if constexpr (Config::kLoad == kLoadTiles) {
      if (!found) return 0;
      if (next_key >= first_key && next_key + kernels::kKeysOfWarp <= end_key) return kAllKeys;
      const int begin = max(first_key - next_key, 0), behind = min(end_key - next_key, kernels::kKeysOfWarp);
      return (kAllKeys >> (kernels::kKeysOfWarp - behind)) & (kAllKeys << begin);
    } else {
      return __ballot_sync(0xffffffffu, found) & kAllKeys;
    }
  }

  __device__ __forceinline__ void copy(const AttentionParams& p, unsigned valid) const {
    const unsigned to = ring + stage * Config::kStageBytes;
    copy_plane<Config::kHeadDimQk, Config::LayoutK>(p.k, k, slot.k_page, to, valid);
    copy_plane<Config::kHeadDimV, Config::LayoutV>(p.v, v, slot.v_page(p), to + Config::kBytesK, valid);
    if constexpr (Config::kTokenScales != 0) copy_scales(p, to + Config::kBytesK + Config::kBytesV, valid);
  }

  // Multiplying a stride by an unsigned count takes two instructions, by a signed one four.
  __device__ __forceinline__ static long long stride_times(int count, long long stride) {
    return static_cast<long long>(static_cast<unsigned>(count)) * stride;
  }

  // The number of cp.async copies of a row; whether the warp copies a whole number of rows at a time.
  template <int kHeadDim>
  static constexpr int kCopiesOfRow = kHeadDim* Config::kElement / Config::kCopyBytes;
  template <int kHeadDim>
  static constexpr bool kByRows = Config::kLoad == kLoadTiles && 32 % kCopiesOfRow<kHeadDim> == 0 &&
                                  kCopiesOfRow<kHeadDim> > 1;

  template <int kHeadDim>
  __device__ __forceinline__ long long lane_offset(const kernels::KvPlane& plane) const {
    constexpr int kCopies = kCopiesOfRow<kHeadDim>;
    if constexpr (!kByRows<kHeadDim>) return 0;
    return lane / kCopies * plane.slot_stride + lane % kCopies * Config::kCopyBytes;
  }

  // Token scales of all heads share a sector, of which each head's blocks read 4 bytes. The sector stays in L2 until
  // the slowest block has read it, because K and V, which are read once, are evicted first.
  __device__ __forceinline__ static void copy_bytes(unsigned to, const char* from, unsigned valid) {
    if constexpr (Config::kTokenScales != 0) {
      ptx::copy_async<Config::kCopyBytes>(to, from, valid, ptx::evict_first_policy());
    } else {
      ptx::copy_async<Config::kCopyBytes>(to, from, valid);
    }
  }

  // Invalid rows become zeros: P is 0 there, but 0 times a stale NaN would be NaN.
  template <int kHeadDim, class Layout>
  __device__ __forceinline__ void copy_plane(const kernels::KvPlane& plane, const char* base, int page, unsigned to,
                                             unsigned valid) const {
    constexpr int kCopies = kCopiesOfRow<kHeadDim>;
    const char* row = base + stride_times(page, plane.page_stride) + stride_times(slot.offset, plane.slot_stride);
    if constexpr (Config::kLoad == kLoadElements) {
      copy_elements<kHeadDim, Layout>(plane, row, to, valid);
    } else if constexpr (kByRows<kHeadDim>) {
      copy_tile<kCopies, Layout>(row, plane.slot_stride, to, valid);
    } else {
      copy_rows<kCopies, Layout>(plane, row, to, valid);
    }
  }

  // Copies rows a fixed stride apart, 32 / kCopies at a time. from: the address of this lane's first copy.
  template <int kCopies, class Layout>
  __device__ __forceinline__ void copy_tile(const char* from, long long stride, unsigned to, unsigned valid) const {
    constexpr int kRows = 32 / kCopies;
    const int key = lane / kCopies, byte = lane % kCopies * Config::kCopyBytes;
    const unsigned here = valid >> key, lane_at = to + Layout::offset(key, byte / 16) + byte % 16;
#pragma unroll
    for (int i = 0; i < kernels::kKeysOfWarp / kRows; ++i) {
      const bool is_valid = valid == kAllKeys || (here & (1u << i * kRows)) != 0;
      copy_bytes(Layout::rows_down(lane_at, i * kRows), from, is_valid ? Config::kCopyBytes : 0);
      from += kRows * stride;
    }
  }

  template <int kCopies, class Layout>
  __device__ __forceinline__ void copy_rows(const kernels::KvPlane& plane, const char* row, unsigned to,
                                            unsigned valid) const {
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
                 (valid >> key & 1) != 0 ? Config::kCopyBytes : 0);
    }
  }

  // Copies element by element: lanes 0..15 copy the row of their key.
  template <int kHeadDim, class Layout>
  __device__ __forceinline__ void copy_elements(const kernels::KvPlane& plane, const char* row, unsigned to,
                                                unsigned valid) const {
    if (lane >= kernels::kKeysOfWarp) return;
    const bool is_valid = (valid >> lane & 1) != 0;
#pragma unroll 8
    for (int d = 0; d < kHeadDim; ++d) {
      const unsigned at = to + Layout::offset(lane, d * Config::kElement / 16) + d * Config::kElement % 16;
      const long long from = plane.element(d) * Config::kElement;
      if constexpr (Config::kElement == 2) {
        const unsigned short x = is_valid ? *reinterpret_cast<const unsigned short*>(row + from) : 0;
        ptx::store_shared_u16(at, x);
      } else if constexpr (Config::kElement == 4) {
        const unsigned x = is_valid ? *reinterpret_cast<const unsigned*>(row + from) : 0;
        ptx::store_shared_u32(at, x);
      } else {
        const unsigned x = is_valid ? *reinterpret_cast<const unsigned char*>(row + from) : 0;
        ptx::store_shared_u8(at, x);
      }
    }
  }

  // Copies the scales of the 16 keys and of the 16 values: the first scale of each, then the second.
  __device__ __forceinline__ void copy_scales(const AttentionParams& p, unsigned to, unsigned valid) const {
    const int key = lane % kernels::kKeysOfWarp;
    const int page = lane < kernels::kKeysOfWarp ? slot.k_page : slot.v_page(p);
    const bool is_valid = (valid == kAllKeys || (valid >> key & 1) != 0) && has_scales;
    const char* from = scales + stride_times(page, scale_page_stride) + stride_times(slot.offset, scale_slot_stride);
#pragma unroll
    for (int i = 0; i < Config::kScalesOfKey; ++i) {
      const int head_dim = lane < kernels::kKeysOfWarp ? Config::kHeadDimQk : Config::kHeadDimV;
      const bool exists = i < scales_of_key(Config::kTokenScales, head_dim, head_dim);
      ptx::copy_async<4>(to + (32 * i + lane) * 4, from + 4 * i, is_valid && exists ? 4 : 0);
    }
  }
  __device__ __forceinline__ void start_scales(const AttentionParams& p, int head) {
    const KvScale& scale = lane < kernels::kKeysOfWarp ? p.k_scale : p.v_scale;
    has_scales = scale.by_token();
    scale_page_stride = scale.page_stride * 4, scale_slot_stride = scale.slot_stride * 4;
    scales = reinterpret_cast<const char*>(scale.data + head * scale.head_stride);
    if (Config::kLoad == kLoadTiles) scales += lane % kernels::kKeysOfWarp * scale_slot_stride;
  }
};

}  // namespace attune::decode
