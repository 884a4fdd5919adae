// SPDX-License-Identifier: Apache-2.0
// The configuration of the scores kernel and its shared memory.
#pragma once

#include "common/pipeline_state.cuh"
#include "common/run.cuh"
#include "indexer/rows.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

namespace attune::indexer {

using kernels::IndexScoresParams;

struct Config {
  static constexpr int kQueryType = ATTUNE_Q_TYPE, kKeyType = ATTUNE_K_TYPE;
  static constexpr bool kBf16 = ATTUNE_BF16 != 0;        // the wgmma operands are bf16; otherwise fp16
  static constexpr int kHeads = ATTUNE_HEADS;            // in all
  static constexpr int kN = ATTUNE_PASS_HEADS;           // N of one wgmma
  static constexpr int kChannels = ATTUNE_CHANNELS;      // head_dim rounded up to whole panels
  static constexpr int kTiles = ATTUNE_KEY_TILES;        // tiles of 64 keys in one warpgroup
  static constexpr int kKeyStages = ATTUNE_KEY_STAGES;   // 0: no pipeline, keys are loaded element by element
  static constexpr int kKeySlots = kKeyStages > 0 ? kKeyStages : 1;
  static constexpr int kQueryStages = ATTUNE_Q_STAGES;
  static constexpr bool kQueryVectors = ATTUNE_Q_VECTORS != 0;  // rows of q allow loads of 16 bytes

  static constexpr int kPasses = (kHeads + kN - 1) / kN;
  static constexpr int kPanels = kChannels / 64, kSteps = kChannels / 16;
  static constexpr int kPanelBytes = kN * 128;
  static constexpr int kConsumerThreads = 256, kThreads = 128 + kConsumerThreads,
                       kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kKeys = 2 * 64 * kTiles;  // of a block
  static constexpr int kWorkSlots = 8;           // slots of the ring of work tiles
  static constexpr int kWorkAhead = 5;  // work tiles that are published before the queries of a work tile are loaded
  // Keys of many channels need the consumers' registers; otherwise a producer thread has a row of q in flight.
  static constexpr bool kWide = kChannels > 384;
  static constexpr int kProducerRegisters = kWide ? 88 : 120, kConsumerRegisters = kWide ? 208 : 192;

  static_assert(kN == 8 || kN == 16 || kN == 32 || kN == 64, "N of a wgmma");
  static_assert(kChannels % 64 == 0 && kChannels <= 576, "panels of 64 channels");
  static_assert(kTiles == 1 || kTiles == 2, "a quad of lanes writes four scores, or two");
  static_assert(kKeyStages + 1 < kWorkAhead && kWorkAhead < kWorkSlots,
                "work tiles are published before their keys are copied");
};

// A work tile: a block of keys of one sequence against up to 32 of its rows.
struct WorkTile {
  long long row;       // the row of bit 0 of mask
  int i, n;            // row is the sequence's row i of n
  int sequence, keys;  // the sequence and its number of keys
  int key;             // the first key of the block
  unsigned mask;       // the rows that need the block; 0: end of work
};

struct SharedStorage {
  struct Query {
    unsigned char panels[Config::kPanels * Config::kPanelBytes];
  };
  Query queries[Config::kQueryStages];
  // In chunks of 16 bytes. The same thread writes and reads a chunk.
  static constexpr int kChunks = Config::kPanels * common::element_size(Config::kKeyType);
  static constexpr int kKeyChunks = Config::kKeyStages > 0 ? 2 * Config::kTiles* kChunks* Config::kConsumerThreads : 1;
  uint4 keys[Config::kKeySlots][kKeyChunks];
  float key_scale[Config::kKeySlots][Config::kConsumerThreads];
  int key_masked[Config::kKeySlots][Config::kConsumerThreads];
  float weights[Config::kQueryStages][Config::kN];
  KeyRange ranges[Config::kQueryStages];
  WorkTile work_tiles[Config::kWorkSlots];
  unsigned long long query_full[Config::kQueryStages], query_empty[Config::kQueryStages];
  unsigned long long work_full[Config::kWorkSlots], work_empty[Config::kWorkSlots];
};

static_assert(sizeof(SharedStorage) <= ATTUNE_SHARED_BYTES, "the host asks for less shared memory than this");

__device__ __forceinline__ unsigned address(const unsigned long long& barrier) {
  return ptx::shared_address(&barrier);
}

// Sixteen elements as they are in memory.
template <int kType>
struct Raw {
  static constexpr int kSize = common::element_size(kType), kWords = 4 * kSize;
  static_assert(kSize <= 2, "fp32 runs on scores_exact.cu");
  unsigned word[kWords];

  __device__ __forceinline__ static Raw zero() {
    Raw r;
#pragma unroll
    for (int i = 0; i < kWords; ++i) r.word[i] = 0;
    return r;
  }
  __device__ __forceinline__ static Raw vectors(const char* at) {
    Raw r;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(at + 16 * i);
      r.word[4 * i] = x.x, r.word[4 * i + 1] = x.y, r.word[4 * i + 2] = x.z, r.word[4 * i + 3] = x.w;
    }
    return r;
  }
  // Loads the first count elements; the others are zero. where(i): the address of element i.
  template <class Where>
  __device__ __forceinline__ static Raw elements(int count, Where&& where) {
    Raw r = zero();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned bits = i < count ? common::load_bits(kSize, where(i)) : 0;
      r.word[i * kSize / 4] |= bits << (i * kSize % 4 * 8);
    }
    return r;
  }
  // Elements 2 i and 2 i + 1 in the type of the wgmma operands, exactly.
  __device__ __forceinline__ unsigned pair(int i) const {
    const unsigned bits = kSize == 2 ? word[i] : word[i / 2] >> (i % 2 * 16) & 0xffff;
    if constexpr (kType == (Config::kBf16 ? common::kBFloat16 : common::kFloat16)) return bits;
    if constexpr (!Config::kBf16 && kType == common::kE4m3) return ptx::e4m3_to_f16(static_cast<unsigned short>(bits));
    if constexpr (!Config::kBf16 && kType == common::kE5m2) return ptx::e5m2_to_f16(static_cast<unsigned short>(bits));
    const float2 x = common::decode_pair(kType, bits);
    return Config::kBf16 ? ptx::pack_bf16(x.x, x.y) : ptx::pack_f16(x.x, x.y);
  }
};

}  // namespace attune::indexer
