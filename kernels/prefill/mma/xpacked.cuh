// SPDX-License-Identifier: Apache-2.0
// Tiles of an x-packed cache. K is stored as chunks of 16 bytes of a token's channels, those of a page's tokens one
// after another: its rows are copied as any others, by other strides. V is stored as the tokens of each channel. It
// stays so in shared memory, where a row is a channel (Config::LayoutVt): ldmatrix gives the B operand of P V from it
// without a transposition.
//
// A chunk of V has 8 tokens (16 of an 8-bit cache) of a page, which the host requires to be multiples of 16. Tokens of
// a chunk that are not read are there as well, and may be anything: P is 0 for them, and extract_nonfinite_v() removes
// what is not finite.
#pragma once

#include "prefill/mma/cached_rows.cuh"

namespace attune::prefill_mma {

// The tokens that a warp copies of a tile.
struct WarpTokens {
  const char* from;  // of the KV head: channel 0 of the warp's first token
  int low, high;     // those in [low, high) are read
};
template <bool kValues, class FindTile>
__device__ __forceinline__ WarpTokens find_tokens(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                                  const FindTile& tile_at, int kv_head, const SharedStorage& shared) {
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const int first = warp_rows().first_row;
  int page = -1, slot = 0, low = 0, high = kWarpRows;
  if (steady) {
    page = steady_page(shared, first), slot = steady_key(shared, i, first) & shared.steady.slot_mask;
  } else {
    const Tile tile = tile_at(i);
    low = tile.low - tile.start - first, high = tile.high - tile.start - first;
    if (low < kWarpRows && high > 0)
      page = page_of_row(p, t, tile, shared, first, kValues), slot = common::slot_in_page(p, tile.start + first);
  }
  const bool exists = common::page_exists(p, page);
  return {plane.data + kv_head * plane.head_stride + (exists ? page : 0) * plane.page_stride + slot * plane.slot_stride,
          low, exists ? high : low};
}

// Calls copy(here, step, from, there) for each of a lane's chunks, chunk_of(lane, step). Of V a chunk's row is a
// channel, and its number counts the chunks of the warp's tokens.
template <bool kValues, int kSteps, class FindTile, class ChunkOf, class Copy>
__device__ __forceinline__ void copy_xpacked_chunks(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                                    const FindTile& tile_at, int kv_head, const SharedStorage& shared,
                                                    const ChunkOf& chunk_of, const Copy& copy) {
  constexpr int kSize = common::element_size(Config::kCacheType), kTokens = 16 / kSize;  // tokens of a chunk of V
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const WarpTokens tokens = find_tokens<kValues>(p, t, i, steady, tile_at, kv_head, shared);
  const WarpRows here = warp_rows();
  const long long row_stride = kValues ? plane.inner_stride * kSize : plane.slot_stride,
                  chunk_stride = kValues ? 16 : plane.outer_stride * kSize;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const Chunk mine = chunk_of(here.lane, step);
    const int begin = kValues ? mine.number * kTokens : mine.row, end = begin + (kValues ? kTokens : 1);
    copy(here, step, tokens.from + mine.row * row_stride + mine.number * chunk_stride,
         begin < tokens.high && end > tokens.low);
  }
}

// 16-bit channels. Chunks after the channels, and those of which no token is read, become zeros.
template <bool kValues, class FindTile>
__device__ __forceinline__ void copy_xpacked_tile(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                                  const FindTile& tile_at, int kv_head, const SharedStorage& shared,
                                                  unsigned to) {
  using LayoutK = Config::LayoutK;
  using LayoutVt = Config::LayoutVt;
  constexpr int kSteps = kWarpRows / 16 * (kValues ? Config::kBlocksV : Config::kBlocksQk);
  static_assert(!Config::kXpacked || kWarpRows == 16, "a warp's tokens are two chunks of V");
  // Lanes take the same chunk of 16 tokens (K) or channels (V), so that eight of them store to different banks.
  const auto chunk_of = [](int lane, int step) {
    return kValues ? Chunk{step * 16 + lane % 16, lane / 16} : Chunk{lane % 16, step * 2 + lane / 16};
  };
  const auto copy = [&](const WarpRows& here, int step, const char* from, bool there) {
    const Chunk mine = chunk_of(here.lane, step), first = chunk_of(here.lane, 0);
    unsigned at;
    bool reads = there;
    if constexpr (kValues) {
      at = LayoutVt::rows_down(to + LayoutVt::offset(first.row, here.first_row / 8 + first.number),
                               chunk_of(0, step).row);
      reads = reads && mine.row < Config::kHeadDimV;
    } else {
      at = LayoutK::chunks_on(to + LayoutK::offset(here.first_row + first.row, first.number), chunk_of(0, step).number);
      reads = reads && mine.number < Config::kHeadDimQk / 8;
    }
    ptx::copy_async<16>(at, from, reads ? 16 : 0);
  };
  copy_xpacked_chunks<kValues, kSteps>(p, t, i, steady, tile_at, kv_head, shared, chunk_of, copy);
}

}  // namespace attune::prefill_mma
