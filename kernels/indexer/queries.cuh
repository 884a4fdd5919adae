// SPDX-License-Identifier: Apache-2.0
// The producer of the scores kernel: four warps that bring queries to shared memory in the type of the products, and
// the first of them also says what there is to do.
//
// The product's order of channels is that in which a lane can read a key: channel 64 c + 16 j + i, of lane j of a quad,
// is k = 64 c + 16 (i / 4) + 8 (i / 2 % 2) + 2 j + i % 2. A thread takes 64 channels of a head, which is a row of a
// panel.
#pragma once

#include "indexer/units.cuh"

namespace attune::indexer {

class Producer {
 public:
  __device__ __forceinline__ Producer(const IndexScoresParams& p, SharedStorage& shared)
      : p_(p), shared_(shared), finder_(p) {}

  __device__ __forceinline__ void run() {
    if (!next_unit()) return;
    load_first();
    for (;;) {
      ptx::wait_phase(address(shared_.query_empty[query_.stage]), query_.parity ^ 1);
      store();
      ptx::fence_async_proxy();
      ptx::arrive(address(shared_.query_full[query_.stage]));
      query_.next();
      if (!advance()) return;
      load_first();
    }
  }

 private:
  static constexpr int kPieces = Config::kN * Config::kPanels;  // rows of panels
  static constexpr bool kOneEach = kPieces <= 128;

  // Announces units until kAhead follow the one that is about to be loaded. The first warp.
  __device__ __forceinline__ void announce() {
    while (!all_announced_ && announced_ <= unit_index_ + Config::kAhead) {
      ptx::wait_phase(address(shared_.unit_empty[announced_turn_.stage]), announced_turn_.parity ^ 1);
      Unit unit;
      if (!finder_.next(unit)) {
        unit.mask = 0;
        all_announced_ = true;
      }
      if (threadIdx.x % 32 == 0) {
        shared_.units[announced_turn_.stage] = unit;
        ptx::arrive(address(shared_.unit_full[announced_turn_.stage]));
      }
      __syncwarp();
      ++announced_;
      announced_turn_.next();
    }
  }

  // Takes the next unit. False: there are no more.
  __device__ __forceinline__ bool next_unit() {
    if (threadIdx.x < 32) announce();
    ptx::wait_phase(address(shared_.unit_full[unit_turn_.stage]), unit_turn_.parity);
    unit_ = shared_.units[unit_turn_.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(address(shared_.unit_empty[unit_turn_.stage]));
    ++unit_index_;
    unit_turn_.next();
    if (unit_.mask == 0) return false;
    start_row();
    return true;
  }

  __device__ __forceinline__ void start_row() {
    const int r = __ffs(static_cast<int>(unit_.mask)) - 1;
    unit_.mask &= unit_.mask - 1;
    row_ = unit_.row + r;
    range_ = visible(p_.rows, row_, unit_.i + r, unit_.n, unit_.keys);
    pass_ = 0;
  }

  // To the next row or pass.
  __device__ __forceinline__ bool advance() {
    if (Config::kPasses > 1 && ++pass_ < Config::kPasses) return true;
    if (unit_.mask == 0) return next_unit();
    start_row();
    return true;
  }

  // Rows are here only to be cleared.
  __device__ __forceinline__ bool is_scored() const {
    return range_.begin < unit_.key + Config::kKeys && range_.end > unit_.key && range_.begin < range_.end;
  }

  __device__ __forceinline__ Raw<Config::kQueryType> load(int piece, int j) const {
    const int head = pass_ * Config::kN + piece % Config::kN, channel = piece / Config::kN * 64 + 16 * j;
    if (head >= Config::kHeads || channel >= p_.head_dim) return Raw<Config::kQueryType>::zero();
    const char* at = row_of(p_.rows, p_.q, row_) + head * p_.q.head_stride;
    if constexpr (Config::kQueryVectors) {
      return Raw<Config::kQueryType>::vectors(at + channel * tile::element_size(Config::kQueryType));
    } else {
      return Raw<Config::kQueryType>::elements(min(16, p_.head_dim - channel),
                                               [&](int i) { return at + (channel + i) * p_.q.channel_stride; });
    }
  }

  // What the thread can have on its way while it waits for room.
  __device__ __forceinline__ void load_first() {
    if (!is_scored()) return;
    if (kOneEach && threadIdx.x < kPieces) load(threadIdx.x, piece_);
    const int head = pass_ * Config::kN + static_cast<int>(threadIdx.x);
    if (threadIdx.x < Config::kN && head < Config::kHeads) {
      weight_ = tile::load_element(p_.weights.dtype,
                                   row_of(p_.rows, p_.weights, row_) + head * p_.weights.head_stride, 0);
      scale_ = p_.q_scale.data == nullptr
                   ? 1.0f
                   : *reinterpret_cast<const float*>(row_of(p_.rows, p_.q_scale, row_) + head * p_.q_scale.head_stride);
    }
  }

  __device__ __forceinline__ void store() {
    if (threadIdx.x == 0) shared_.ranges[query_.stage] = range_;
    if (!is_scored()) return;
    if (threadIdx.x < Config::kN) shared_.weights[query_.stage][threadIdx.x] = weight_ * scale_;
    if constexpr (kOneEach) {
      if (threadIdx.x < kPieces) store(threadIdx.x, piece_);
    } else {
#pragma unroll 1
      for (int piece = threadIdx.x; piece < kPieces; piece += 128) {
        load(piece, piece_);
        store(piece, piece_);
      }
    }
  }

  __device__ __forceinline__ void load(int piece, Raw<Config::kQueryType> (&raw)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      raw[j] = load(piece, j);
      if constexpr (!Config::kQueryVectors) ptx::pin(raw[j].word);  // single elements: not all on their way at a time
    }
  }

  __device__ __forceinline__ void store(int piece, const Raw<Config::kQueryType> (&raw)[4]) {
    const int head = piece % Config::kN, panel = piece / Config::kN;
    unsigned char* const row = shared_.queries[query_.stage].panels + panel * Config::kPanelBytes + head * 128;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      *reinterpret_cast<uint4*>(row + ((k ^ head % 8) * 16)) =
          make_uint4(raw[0].pair(k), raw[1].pair(k), raw[2].pair(k), raw[3].pair(k));
    }
  }

  const IndexScoresParams& p_;
  SharedStorage& shared_;
  UnitFinder finder_;
  int announced_ = 0, unit_index_ = 0;
  bool all_announced_ = false;
  Turn<Config::kUnits> announced_turn_, unit_turn_;
  Turn<Config::kQueryStages> query_;
  Unit unit_;
  long long row_;
  KeyRange range_;
  int pass_ = 0;
  Raw<Config::kQueryType> piece_[4];
  float weight_ = 0, scale_ = 1;
};

}  // namespace attune::indexer
