// SPDX-License-Identifier: Apache-2.0
// Dequantizes tiles of an x-packed 8-bit cache: K to swizzled rows, V to the layout of an x-packed 16-bit tile
// (xpacked.cuh). The TMA brings K as units of 16 channels of 8 keys, key after key, and V as all channels of a box,
// each with the keys of the box.
#pragma once

#include "prefill/dequant_elements.cuh"
#include "prefill/xpacked.cuh"

namespace attune::prefill {

// K: a warp converts four units of 8 keys at a time, eight lanes for each unit. The lanes load contiguous bytes and
// store to eight rows, which the swizzle puts into different banks.
class XpackedKeys {
 public:
  static constexpr int kUnitsOfKey = (Config::kHeadDimQk + 15) / 16, kBlocks = (kUnitsOfKey + 3) / 4;  // of 64 channels
  static constexpr int kUnits = Config::kKeys / 8 * kBlocks, kSteps = (kUnits + 2) / 3;

  __device__ __forceinline__ XpackedKeys(unsigned raw, unsigned to, int thread)
      : warp_(thread / 32),
        unit_(thread / 8 % 4),
        from_(raw + thread % 32 * 16),
        to_(to + thread % 8 * 128 + ((2 * unit_) ^ (thread % 8)) * 16) {}

  // After kBlocks steps a warp is 24 keys further in the same block of channels.
  __device__ __forceinline__ bool has(int step) const {
    return (3 * step + 2 < kUnits || warp_ + 3 * step < kUnits) &&
           (kUnitsOfKey % 4 == 0 || 4 * block_of(step) + unit_ < kUnitsOfKey);
  }
  __device__ __forceinline__ unsigned from(int step) const {
    return from_ + eight_of(step) * (kUnitsOfKey * 128) + block_of(step) * 512 + later(step) * (kUnitsOfKey * 128);
  }
  __device__ __forceinline__ unsigned to(int step, int half) const {
    return (to_ + block_of(step) * (Config::kKeys * 128) + (eight_of(step) + later(step)) * 1024) ^ (16 * half);
  }

 private:
  __device__ __forceinline__ int block_of(int step) const { return (warp_ + 3 * (step % kBlocks)) % kBlocks; }
  __device__ __forceinline__ int eight_of(int step) const { return (warp_ + 3 * (step % kBlocks)) / kBlocks; }
  __device__ __forceinline__ static constexpr int later(int step) { return step / kBlocks * 3; }

  int warp_, unit_;
  unsigned from_, to_;
};

__device__ __forceinline__ void dequant_xpacked_k(unsigned raw, unsigned to, int thread) {
  const XpackedKeys mine(raw, to, static_cast<int>(ptx::opaque(thread)));
  dequant_steps<XpackedKeys::kSteps, kLoadsAhead>(
      [&](int step) { return mine.has(step); },
      [&](int step, unsigned(&words)[4]) { ptx::load_shared_four(mine.from(step), words); },
      [&](int step, const unsigned(&words)[4]) {
        unsigned out[8];
        dequant_16<Config::kCacheType, common::kFloat16>(words, out);
        ptx::store_shared_four(mine.to(step, 0), out);
        ptx::store_shared_four(mine.to(step, 1), out + 4);
      });
}

// V: a thread converts 16 keys of a channel at a time: 16 bytes become 32. Eight threads have neighbouring channels, so
// they store to different banks. If a box has several groups of 16 keys, the threads take different groups, so that
// they load from different banks, too.
class XpackedValues {
 public:
  static constexpr int kSixteens = Config::kKeys / 16, kEights = kDequantThreads / 8;  // groups of 8 threads
  static constexpr int kUnits = kSixteens * Config::kChannels / 8, kSteps = (kUnits + kEights - 1) / kEights;
  // After kPeriod steps a thread has the same keys of other channels.
  static constexpr int kPeriod = kSixteens == 8 ? 2 : 1, kFurther = kEights * kPeriod / kSixteens * 8;
  static_assert(kEights * kPeriod % kSixteens == 0);

  // Where 16 keys of a channel are read and written.
  struct Address {
    unsigned from, to;
  };

  // box_shift: log2 of the keys of a box.
  __device__ __forceinline__ XpackedValues(unsigned raw, unsigned to, int box_shift, int thread)
      : raw_(raw), to_(to), shift_(box_shift - 4), lane_(thread % 8), eight_(thread / 8) {}

  __device__ __forceinline__ bool has(int step) const { return eight_ + step * kEights < kUnits; }
  __device__ __forceinline__ Address address(int step) const {
    const int unit = eight_ + step * kEights, mask = (1 << shift_) - 1, box = unit % kSixteens & ~mask;
    const int within = (unit % kSixteens + (lane_ << shift_ >> 3)) & mask, channel = unit / kSixteens * 8 + lane_;
    return {raw_ + (box * Config::kChannels + (channel << shift_) + within) * 16,
            to_ + ((box + within) * Config::kChannels + channel) * 32 + lane_ / 4 * 16};
  }
  // The address `further` channels after `from`.
  __device__ __forceinline__ unsigned from(unsigned from, int further) const { return from + (further * 16 << shift_); }

 private:
  unsigned raw_, to_;
  int shift_, lane_, eight_;
};

// Keys outside of [low, high) become zero.
template <int kTo>
__device__ __forceinline__ void dequant_xpacked_v(unsigned raw, unsigned to, int low, int high, int box_shift,
                                                  int thread) {
  constexpr int kPeriod = XpackedValues::kPeriod, kSteps = XpackedValues::kSteps;
  const XpackedValues mine(raw, to, box_shift, static_cast<int>(ptx::opaque(thread)));
  XpackedValues::Address first[kPeriod];
#pragma unroll
  for (int i = 0; i < kPeriod; ++i) first[i] = mine.address(i);
  const auto further = [](int step) { return step / kPeriod * XpackedValues::kFurther; };
  dequant_steps<kSteps, kLoadsAhead>(
      [&](int step) { return (step + 1) * XpackedValues::kEights <= XpackedValues::kUnits || mine.has(step); },
      [&](int step, unsigned(&words)[4]) {
        ptx::load_shared_four(mine.from(first[step % kPeriod].from, further(step)), words);
      },
      [&](int step, const unsigned(&words)[4]) {
        const unsigned at = first[step % kPeriod].to + further(step) * 32;
        unsigned out[8];
        dequant_16<Config::kCacheType, kTo>(words, out);
        ptx::store_shared_four(at, out);
        ptx::store_shared_four(at ^ 16, out + 4);
      });
  if (low == 0 && high == Config::kKeys) return;
  ptx::named_barrier_sync(kLoadBarrier, kDequantThreads);
  zero_v_columns<kDequantThreads>(to, low, high, thread);
}

}  // namespace attune::prefill
