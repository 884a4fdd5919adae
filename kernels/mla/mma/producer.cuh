// SPDX-License-Identifier: Apache-2.0
// Copies queries and key rows to shared memory by cp.async, all threads of the block; kLanes neighbouring threads have
// a row. Rows that are not there become zeros.
#pragma once

#include "common/finish.cuh"
#include "mla/mma/config.cuh"
#include "mla/producers/kv_source.cuh"
#include "ptx/async_copy.cuh"

namespace attune::mla {

__device__ __forceinline__ void mma_copy_queries(const WorkTileParams& p, MmaStorage& shared) {
  using Layout = MmaConfig::Layout;
  constexpr int kLanes = MmaConfig::kThreads / MmaConfig::kRows, kChunks = ProblemConfig::kHeadDimQk / 8;
  const int row = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const MmaRow r(p, shared, row);
  const WorkTile& t = shared.work;
  const char* from = p.q;
  if (r.exists) {
    from += 2 * common::row_offset(p, t.batch, t.q_begin, r.token, r.head, p.q_batch_stride, p.q_row_stride,
                                   p.q_head_stride);
  }
  const unsigned to = ptx::shared_address(shared.q);
#pragma unroll 2
  for (int chunk = lane; chunk < kChunks; chunk += kLanes)
    ptx::copy_async<16>(to + Layout::offset(row, chunk), r.exists ? from + 16 * chunk : from, r.exists ? 16 : 0);
}

class MmaProducer {
 public:
  __device__ __forceinline__ MmaProducer(const WorkTileParams& p, MmaStorage& shared)
      : p_(p), shared_(shared), kv_head_(mma_kv_head(p, shared)) {}

  // Asks where the thread's row of a tile lies, for the next issue().
  __device__ __forceinline__ void find(int i) {
    if (i >= shared_.work.tile_end) return;
    const Tile tile = mma_tile_at(shared_.work, i);
    index_ = KvSource(p_, shared_.work, kv_head_, tile).load_index(tile.start + row());
  }
  // Begins the copies of a tile, as a group that is empty behind the last one, and asks for the rows of the next.
  __device__ __forceinline__ void issue(int i, int stage) {
    if (i < shared_.work.tile_end) {
      const Tile tile = mma_tile_at(shared_.work, i);
      const KvSource source(p_, shared_.work, kv_head_, tile);
      const int key = tile.start + row();
      const char* const from = source.locate(key, index_);
      if (lane() == 0) shared_.is_there[stage][row()] = from != nullptr ? 1 : 0;
      if constexpr (!ProblemConfig::kDequant) {
        copy_row<ProblemConfig::kHeadDimQk / 8, MmaConfig::Layout>(ptx::shared_address(shared_.tiles[stage]), from);
      } else if (is_packed(tile)) {
        copy_packed(stage, from, source.scales_of(key, index_));
      }
    }
    ptx::commit_copies();
    find(i + 1);
  }
  // From codes, which have come, to a tile of bf16.
  __device__ __forceinline__ void decode(int i, int stage) const {
    const Tile tile = mma_tile_at(shared_.work, i);
    if (!is_packed(tile)) return copy_dense(tile);
    using Layout = MmaConfig::Layout;
    const unsigned from = ptx::shared_address(shared_.codes[stage * MmaConfig::kKeys + row()]),
                   to = ptx::shared_address(shared_.tiles[0]);
#pragma unroll
    for (int c = lane(); c < Packed::kNope / 16; c += MmaConfig::kLanes) {  // 16 codes
      const int group = 16 * c / Packed::kGroup;
      float scale;
      if constexpr (ProblemConfig::kProducer == kernels::kMlaDequant656) {
        scale = ptx::load_shared(from + Packed::kNope + 4 * group);
      } else {
        scale = common::e8m0_to_float(ptx::load_shared_u8(from + Packed::kRowBytes + group));
      }
      unsigned codes[4], x[8];
      ptx::load_shared_four(from + 16 * c, codes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        unsigned halves[2];
        common::quad_to_f16<common::kE4m3>(codes[k], halves[0], halves[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          x[2 * k + j] = ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(halves[j])) * scale,
                                        ptx::f16_to_float(static_cast<unsigned short>(halves[j] >> 16)) * scale);
      }
      store_chunk(to + Layout::offset(row(), 2 * c), x);
      store_chunk(to + Layout::offset(row(), 2 * c + 1), x + 4);
    }
#pragma unroll
    for (int c = lane(); c < (ProblemConfig::kHeadDimQk - Packed::kNope) / 8; c += MmaConfig::kLanes) {
      unsigned x[4];
      ptx::load_shared_four(from + Packed::kRope + 16 * c, x);
      ptx::store_shared_four(to + Layout::offset(row(), Packed::kNope / 8 + c), x);
    }
  }

 private:
  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / MmaConfig::kLanes; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % MmaConfig::kLanes; }
  // New tokens are 16-bit rows beside a packed cache.
  __device__ __forceinline__ static bool is_packed(const Tile& tile) {
    return ProblemConfig::kSparse || !ProblemConfig::kDense || tile.cached;
  }
  __device__ __forceinline__ static void store_chunk(unsigned at, const unsigned* x) {
    const unsigned four[4] = {x[0], x[1], x[2], x[3]};
    ptx::store_shared_four(at, four);
  }
  template <int kChunks, class Layout>
  __device__ __forceinline__ void copy_row(unsigned to, const char* from) const {
    const char* const at = from != nullptr ? from + 16 * lane() : p_.q;
    const int step = from != nullptr ? 16 : 0;
#pragma unroll
    for (int i = 0; i < kChunks; i += MmaConfig::kLanes) {
      if (kChunks % MmaConfig::kLanes == 0 || i + lane() < kChunks)
        ptx::copy_async<16>(to + Layout::offset(row(), i + lane()), at + i * step, step);
    }
  }
  struct PackedLayout {
    __device__ __forceinline__ static int offset(int row, int chunk) {
      return row * MmaConfig::kPackedPitch + 16 * chunk;
    }
  };
  __device__ __forceinline__ void copy_packed(int stage, const char* from, int scales) const {
    const unsigned to = ptx::shared_address(shared_.codes[stage * MmaConfig::kKeys]);
    copy_row<Packed::kRowBytes / 16, PackedLayout>(to, from);
    if (ProblemConfig::kProducer == kernels::kMlaDequant584 && lane() == 0)
      ptx::copy_async<8>(to + row() * MmaConfig::kPackedPitch + Packed::kRowBytes,
                         from != nullptr ? from + scales : p_.q, from != nullptr ? 8 : 0);
  }
  // Rows of new tokens, of which there are few.
  __device__ __forceinline__ void copy_dense(const Tile& tile) const {
    const KvSource source(p_, shared_.work, kv_head_, tile);
    const int key = tile.start + row();
    const char* const from = source.locate(key, source.load_index(key));
#pragma unroll 1
    for (int c = lane(); c < ProblemConfig::kHeadDimQk / 8; c += MmaConfig::kLanes) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (from != nullptr) x = *reinterpret_cast<const uint4*>(from + 16 * c);
      const unsigned four[4] = {x.x, x.y, x.z, x.w};
      ptx::store_shared_four(ptx::shared_address(shared_.tiles[0]) + MmaConfig::Layout::offset(row(), c), four);
    }
  }

  const WorkTileParams& p_;
  MmaStorage& shared_;
  const int kv_head_;
  int index_ = -1;
};

}  // namespace attune::mla
