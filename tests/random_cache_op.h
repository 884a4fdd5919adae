// SPDX-License-Identifier: Apache-2.0
// Random cache operations on the memory of any device, of every format: for tests that compare a device with the CPU
// byte by byte.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support.h"

namespace attune::tests {

enum class Formats { kAll, kPacked };

// A random cache operation on rows and tables that may say anything.
class RandomCacheOp {
 public:
  RandomCacheOp(cases::Memory& memory, uint64_t seed, Formats formats = Formats::kAll)
      : arena_(memory), random_("cuda_ops", seed) {
    op_.struct_size = sizeof(op_);
    dtype_ = random_.pick<attune_dtype>(
        {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8});
    packed_ = random_.chance(0.3) || formats == Formats::kPacked;
    is_656_ = random_.chance(0.5);
    by_slots_ = random_.chance(0.4);
    aligned_ = random_.chance(0.6);
    pages_ = random_.integer(1, 6), page_size_ = random_.pick<int64_t>({1, 3, 4, 16});
    heads_ = packed_ ? 1 : random_.integer(1, 5);
    dim_ = packed_ ? (is_656_ ? 576 : 512) : random_.pick<int64_t>({1, 8, 40, 64, 96, 128, 192, 250, 256});
    const attune_dtype dense = random_.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16});
    tokens_ = random_.integer(1, 90);
    op_.kind = by_slots_ ? static_cast<int32_t>(random_.integer(0, 3))
                         : (random_.chance(0.5) ? ATTUNE_CACHE_APPEND : ATTUNE_CACHE_GATHER);
    const bool whole = op_.kind == ATTUNE_CACHE_QUANTIZE || op_.kind == ATTUNE_CACHE_DEQUANTIZE;
    if (whole) tokens_ = random_.integer(1, pages_ * page_size_);
    const bool power_of_two = random_.chance(0.5);
    add_cache();
    op_.power_of_two_scales = power_of_two && (packed_ || op_.cache.k_scale.rank == 3) ? 1 : 0;
    op_.k = add_rows("k", dense);
    if (!packed_) op_.v = add_rows("v", dense);
    if (!by_slots_) {
      add_sequences();
    } else if (!whole) {
      add_slots();
    }
    arena_.upload();
  }

  const attune_cache_op& host() const { return op_; }
  attune_cache_op device() { return arena_.on_device(op_); }
  const cases::Arena& arena() const { return arena_; }
  std::string describe() const {
    return std::string("kind ") + std::to_string(op_.kind) + (packed_ ? (is_656_ ? ", 656" : ", 584") : "") +
           ", cache " + cases::short_name(dtype_) + ", dense " +
           cases::short_name(static_cast<attune_dtype>(op_.k.dtype)) + ", dim " + std::to_string(dim_) + ", layout " +
           std::to_string(op_.cache.layout) + (aligned_ ? ", aligned" : "") + (by_slots_ ? ", by slots" : "") +
           (op_.power_of_two_scales != 0 ? ", powers of two" : "");
  }

 private:
  cases::Layout layout(std::vector<int64_t> padding) {
    return {{}, aligned_ ? std::vector<int64_t>() : std::move(padding), 0};
  }
  void fill(const attune_tensor& t, double scale) {
    cases::for_each_element(t, [&](const int64_t*, void* element) {
      double x = random_.chance(0.02) ? std::copysign(0.0, random_.normal())
                                      : random_.normal() * scale * (random_.chance(0.02) ? 1e4 : 1.0);
      if (packed_ && random_.chance(0.0005)) x = std::copysign(std::numeric_limits<double>::infinity(), x);
      cases::encode(static_cast<attune_dtype>(t.dtype), x, element);
    });
  }
  attune_tensor add_rows(const char* name, attune_dtype dtype) {
    const attune_tensor t = arena_.add(name, dtype, {tokens_, heads_, dim_}, layout({0, 1, 3}));
    fill(t, 1);
    return t;
  }
  attune_tensor add_integers(const char* name, attune_dtype dtype, const std::vector<int64_t>& shape, int64_t low,
                             int64_t high, double wild) {
    const attune_tensor t = arena_.add(name, dtype, shape);
    cases::for_each_element(t, [&](const int64_t*, void* element) {
      const int64_t x = random_.chance(wild) ? random_.pick<int64_t>({-1, -1000000, high + 1, 0x7fffff00})
                                             : random_.integer(low, high);
      cases::encode(dtype, static_cast<double>(x), element);
    });
    return t;
  }

  void add_cache() {
    attune_kv_cache& c = op_.cache;
    if (packed_) {
      c.format = is_656_ ? ATTUNE_KV_MLA_656 : ATTUNE_KV_MLA_584;
      const attune_kv_format format = is_656_ ? ATTUNE_KV_MLA_656 : ATTUNE_KV_MLA_584;
      c.layout = ATTUNE_KV_BYTES;
      if (is_656_) {
        c.k = arena_.add("cache.k", ATTUNE_UINT8, {pages_, page_size_, 656}, layout({0, 0, random_.integer(0, 3)}));
      } else {
        int64_t bytes = 0;
        EXPECT_ATTUNE_OK(attune_kv_page_bytes(format, page_size_, &bytes));
        c.k = arena_.add("cache.k", ATTUNE_UINT8, {pages_, bytes}, layout({0, random_.integer(0, 3)}));
        c.page_size = page_size_;
      }
      // Any bytes are a cache, but for the scales of NaN.
      cases::for_each_element(c.k, [&](const int64_t*, void* element) {
        *static_cast<uint8_t*>(element) = static_cast<uint8_t>(random_.integer(0, 126));
      });
      return;
    }
    c.layout = random_.pick<attune_kv_layout>({ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED});
    const int64_t x = 16 / cases::element_size(dtype_);
    if (c.layout == ATTUNE_KV_XPACKED && dim_ % x != 0) c.layout = ATTUNE_KV_HND;
    if (c.layout == ATTUNE_KV_XPACKED) {
      c.k = arena_.add("cache.k", dtype_, {pages_, heads_, dim_ / x, page_size_, x});
      c.v = arena_.add("cache.v", dtype_, {pages_, heads_, dim_, page_size_});
    } else {
      std::vector<int64_t> shape = {pages_, page_size_, heads_, dim_};
      if (c.layout == ATTUNE_KV_HND) std::swap(shape[1], shape[2]);
      c.k = arena_.add("cache.k", dtype_, shape, layout({0, 0, 0, 1}));
      c.v = arena_.add("cache.v", dtype_, shape, layout({0, 1, 0, 0}));
    }
    fill(c.k, 3);
    fill(c.v, 3);
    if (cases::element_size(dtype_) == 1) add_scales();
  }

  void add_scales() {
    const int64_t mode = random_.integer(dtype_ == ATTUNE_INT8 ? 1 : 0, 3);
    if (mode == 0) return;
    std::vector<int64_t> shape = {mode == 1 ? 1 : heads_};
    if (mode == 3) {
      shape = {pages_, page_size_, heads_};
      if (op_.cache.layout != ATTUNE_KV_NHD) std::swap(shape[1], shape[2]);
    }
    for (attune_tensor* t : {&op_.cache.k_scale, &op_.cache.v_scale}) {
      *t = arena_.add("scale", ATTUNE_FLOAT32, shape);
      cases::for_each_element(*t, [&](const int64_t*, void* element) {
        // Also far from 1, where quotients leave fp32's range.
        const double scale = random_.chance(0.1) ? std::ldexp(1.0, static_cast<int>(random_.integer(-140, 120))) : 0.01;
        cases::encode(ATTUNE_FLOAT32, scale * random_.uniform(1, 2), element);
      });
    }
  }

  void add_slots() {
    if (op_.kind == ATTUNE_CACHE_GATHER) {
      op_.slots = add_integers("slots", ATTUNE_INT64, {tokens_}, 0, pages_ * page_size_ - 1, 0.1);
      return;
    }
    // No slot twice.
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < std::max(tokens_, pages_ * page_size_); ++i)
      slots.push_back(i < pages_ * page_size_ && !random_.chance(0.1) ? i : -1 - i);
    random_.shuffle(slots);
    op_.slots = arena_.add("slots", ATTUNE_INT64, {tokens_});
    cases::for_each_element(op_.slots, [&](const int64_t* index, void* element) {
      cases::encode(ATTUNE_INT64, static_cast<double>(slots[static_cast<size_t>(index[0])]), element);
    });
  }

  void add_sequences() {
    // Each sequence has pages or rows of its own, so that no slot is written twice.
    const int64_t batch = random_.integer(1, 5);
    const bool contiguous = pages_ >= batch && random_.chance(0.4);
    int64_t holds = page_size_;
    if (!contiguous) {
      const int64_t columns = random_.integer(1, 4);
      holds = columns * page_size_;
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < std::max(batch * columns, pages_); ++i)
        ids.push_back(i < pages_ && !random_.chance(0.1) ? i : random_.pick<int64_t>({-1, pages_, 0x7fffff00}));
      random_.shuffle(ids);
      op_.cache.page_table = arena_.add("page_table", ATTUNE_INT32, {batch, columns});
      cases::for_each_element(op_.cache.page_table, [&](const int64_t* index, void* element) {
        cases::encode(ATTUNE_INT32, static_cast<double>(ids[static_cast<size_t>(index[0] * columns + index[1])]),
                      element);
      });
    }
    if (random_.chance(0.4)) op_.cache.ring_capacity = random_.integer(1, holds);
    op_.seqused_kv = add_integers("seqused", ATTUNE_INT32, {batch}, 0, holds + 3, 0.1);
    if (batch != 1 || random_.chance(0.5)) {
      op_.cu_seqlens = add_integers("cu_seqlens", ATTUNE_INT32, {batch + 1}, 0, tokens_, 0.1);
      if (random_.chance(0.7)) {  // else they decrease here and there
        auto* offsets = static_cast<int32_t*>(op_.cu_seqlens.data);
        std::sort(offsets, offsets + batch + 1);
      }
    }
    if (op_.kind == ATTUNE_CACHE_APPEND && random_.chance(0.5))
      op_.finished = add_integers("finished", ATTUNE_UINT8, {batch}, 0, 1, 0);
  }

  cases::Arena arena_;
  cases::Random random_;
  attune_cache_op op_{};
  attune_dtype dtype_;
  bool packed_, is_656_, by_slots_, aligned_;
  int64_t pages_, page_size_, heads_, dim_, tokens_;
};

// All that one operation left is what the other did.
inline void expect_same_bytes(const RandomCacheOp& want, const RandomCacheOp& have, uint64_t seed) {
  for (size_t i = 0; i < want.arena().buffers().size(); ++i) {
    const auto expected = want.arena().buffers()[i]->download(), got = have.arena().buffers()[i]->download();
    const auto at = std::mismatch(expected.begin(), expected.end(), got.begin());
    EXPECT_TRUE(at.first == expected.end())
        << "seed " << seed << ", " << have.describe() << ": byte " << at.first - expected.begin() << " of "
        << want.arena().buffers()[i]->name();
  }
  EXPECT_EQ(have.arena().check_guards(), "") << seed;
}

}  // namespace attune::tests
