// SPDX-License-Identifier: Apache-2.0
// Tiles of codes from an x-packed cache: K becomes rows, swizzled as the TMA would have written them, V what it is in a
// tile of 16 bits (packed.cuh). The TMA brings of each 8 keys pieces of 16 channels, those keys one after the other, 128
// bytes; and of V of each 16 keys all channels, 16 bytes each.
#pragma once

#include "prefill/codes.cuh"
#include "prefill/packed.cuh"

namespace attune::prefill {

// K. A warp takes four pieces of 8 keys at a time: eight lanes a piece, which they load side by side and store to eight
// rows, whose swizzle puts them into different banks.
class PackedKeys {
 public:
  static constexpr int kPieces = Config::kHeadDimQk / 16, kBlocks = (kPieces + 3) / 4;  // of 64 channels
  static constexpr int kUnits = Config::kKeys / 8 * kBlocks, kSteps = (kUnits + 2) / 3;

  __device__ __forceinline__ PackedKeys(unsigned raw, unsigned to, int thread)
      : warp_(thread / 32), piece_(thread / 8 % 4), from_(raw + thread % 32 * 16),
        to_(to + thread % 8 * 128 + ((2 * piece_) ^ (thread % 8)) * 16) {}

  // As many steps later as there are blocks, a warp is 24 keys further in the same one.
  __device__ __forceinline__ bool has(int step) const {
    const int unit = warp_ + 3 * step;
    return (3 * step + 2 < kUnits || unit < kUnits) && (kPieces % 4 == 0 || 4 * block_of(step) + piece_ < kPieces);
  }
  __device__ __forceinline__ unsigned from(int step) const {
    return from_ + eight_of(step) * (kPieces * 128) + block_of(step) * 512 + later(step) * (kPieces * 128);
  }
  // The first half; the second lies at ^ 16.
  __device__ __forceinline__ unsigned to(int step) const {
    return to_ + block_of(step) * (Config::kKeys * 128) + eight_of(step) * 1024 + later(step) * 1024;
  }

 private:
  __device__ __forceinline__ int block_of(int step) const { return (warp_ + 3 * (step % kBlocks)) % kBlocks; }
  __device__ __forceinline__ int eight_of(int step) const { return (warp_ + 3 * (step % kBlocks)) / kBlocks; }
  __device__ __forceinline__ static constexpr int later(int step) { return step / kBlocks * 3; }

  int warp_, piece_;
  unsigned from_, to_;
};

__device__ __forceinline__ void packed_keys(unsigned raw, unsigned to, int thread) {
  const PackedKeys mine(raw, to, static_cast<int>(ptx::kept(thread)));
  convert_steps<PackedKeys::kSteps, kCodesAhead>(
      [&](int step) { return mine.has(step); },
      [&](int step, unsigned(&words)[4]) { ptx::load_shared_four(mine.from(step), words); },
      [&](int step, const unsigned(&words)[4]) {
        unsigned out[8];
        decode_sixteen<Config::kCacheType, tile::kFloat16, false>(words, [](int) { return 1.0f; }, out);
        ptx::store_shared_four(mine.to(step), out);
        ptx::store_shared_four(mine.to(step) ^ 16, out + 4);
      });
}

// V, as it lies: 16 bytes become 32, which the swizzle puts into different banks for eight neighbours. scales: of the
// tile's keys. Keys outside of [low, high) become zero.
template <int kTo, bool kScaled>
__device__ __forceinline__ void packed_values(unsigned raw, unsigned to, unsigned scales, int low, int high,
                                              int thread) {
  constexpr int kPieces = Config::kKeys / 16 * Config::kChannels, kSteps = (kPieces + kConverters - 1) / kConverters;
  static_assert(kConverters % 8 == 0, "a thread's rows are swizzled alike");
  const int mine = static_cast<int>(ptx::kept(thread));
  const unsigned from = raw + mine * 16, at = to + mine * 32 + mine / 4 % 2 * 16;
  const auto has = [&](int step) {
    return (step + 1) * kConverters <= kPieces || mine + step * kConverters < kPieces;
  };
  const auto load = [&](int step, unsigned(&words)[4]) {
    ptx::load_shared_four(from + step * (kConverters * 16), words);
  };
  const auto decode = [&](int step, const unsigned(&words)[4]) {
    unsigned out[8], of_keys[16] = {};
    if constexpr (kScaled) {
      const unsigned first = scales + (mine + step * kConverters) / Config::kChannels * 64;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned four[4];
        ptx::load_shared_four(first + 16 * i, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) of_keys[4 * i + j] = four[j];
      }
    }
    decode_sixteen<Config::kCacheType, kTo, kScaled>(words, [&](int i) { return __uint_as_float(of_keys[i]); }, out);
    ptx::store_shared_four(at + step * (kConverters * 32), out);
    ptx::store_shared_four((at ^ 16) + step * (kConverters * 32), out + 4);
  };
  if constexpr (kScaled) {
#pragma unroll 1
    for (int step = 0; step < kSteps && mine + step * kConverters < kPieces; ++step) {
      unsigned words[4];
      load(step, words);
      decode(step, words);
    }
  } else {
    convert_steps<kSteps, kCodesAhead>(has, load, decode);
  }
  if (low == 0 && high == Config::kKeys) return;
  ptx::sync_some(kAllConverters, kConverters);
  clear_columns<kConverters>(to, low, high, mine);
}

}  // namespace attune::prefill
