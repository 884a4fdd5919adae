// SPDX-License-Identifier: Apache-2.0
// The oracle reads stored bytes: elements of every type, cache layouts, scales, packed MLA rows.
#include "reference_support.h"

namespace attune::reference_tests {
namespace {

using reference::cache_row;
using reference::decode_element;

template <typename T>
double decode(attune_dtype dtype, T bits) {
  return decode_element(dtype, &bits);
}

TEST(ReferenceElements, AllCodesOfE4m3) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const double sign = code < 128 ? 1 : -1;
    const double value = decode(ATTUNE_FLOAT8_E4M3, static_cast<uint8_t>(code));
    if (exponent == 15 && mantissa == 7) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      // In units of the smallest subnormal, 2^-9.
      const double units = exponent == 0 ? mantissa : (8 + mantissa) * std::exp2(exponent - 1);
      EXPECT_EQ(value, sign * units / 512) << code;
    }
  }
  EXPECT_EQ(decode(ATTUNE_FLOAT8_E4M3, uint8_t{0x7e}), 448);
  EXPECT_EQ(decode(ATTUNE_FLOAT8_E4M3, uint8_t{0xb8}), -1);
  EXPECT_TRUE(std::signbit(decode(ATTUNE_FLOAT8_E4M3, uint8_t{0x80})));
}

TEST(ReferenceElements, AllCodesOfE5m2) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 2) & 31, mantissa = code & 3;
    const double sign = code < 128 ? 1 : -1;
    const double value = decode(ATTUNE_FLOAT8_E5M2, static_cast<uint8_t>(code));
    // e5m2 is the upper byte of an fp16.
    const double half = decode(ATTUNE_FLOAT16, static_cast<uint16_t>(code << 8));
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0) << code;
      EXPECT_EQ(std::isinf(value), mantissa == 0) << code;
      EXPECT_TRUE(std::isnan(value) || std::signbit(value) == (code >= 128)) << code;
    } else {
      const double units = exponent == 0 ? mantissa : (4 + mantissa) * std::exp2(exponent - 1);
      EXPECT_EQ(value, sign * units / 65536) << code;
      EXPECT_EQ(value, half) << code;
    }
  }
  EXPECT_EQ(decode(ATTUNE_FLOAT8_E5M2, uint8_t{0x7b}), 57344);
}

TEST(ReferenceElements, SixteenBits) {
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0x3c00}), 1);
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0xc000}), -2);
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0x7bff}), 65504);
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0x0001}), std::exp2(-24));
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0x83ff}), -1023 * std::exp2(-24));
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0x0400}), std::exp2(-14));
  EXPECT_EQ(decode(ATTUNE_FLOAT16, uint16_t{0xfc00}), -kInf);
  EXPECT_TRUE(std::isnan(decode(ATTUNE_FLOAT16, uint16_t{0x7c01})));
  EXPECT_EQ(decode(ATTUNE_BFLOAT16, uint16_t{0x3f80}), 1);
  EXPECT_EQ(decode(ATTUNE_BFLOAT16, uint16_t{0xc049}), -3.140625);
  EXPECT_EQ(decode(ATTUNE_BFLOAT16, uint16_t{0x0001}), std::exp2(-133));
  EXPECT_EQ(decode(ATTUNE_BFLOAT16, uint16_t{0x7f80}), kInf);
  EXPECT_TRUE(std::isnan(decode(ATTUNE_BFLOAT16, uint16_t{0xffc0})));
}

TEST(ReferenceElements, Others) {
  EXPECT_EQ(decode(ATTUNE_FLOAT32, 0.1f), static_cast<double>(0.1f));
  EXPECT_EQ(decode(ATTUNE_FLOAT32, std::numeric_limits<float>::denorm_min()), std::exp2(-149));
  EXPECT_EQ(decode(ATTUNE_INT8, int8_t{-128}), -128);
  EXPECT_EQ(decode(ATTUNE_UINT8, uint8_t{255}), 255);
  EXPECT_EQ(decode(ATTUNE_INT32, int32_t{-7}), -7);
  EXPECT_EQ(decode(ATTUNE_INT64, int64_t{1} << 40), std::exp2(40));
}

// 2 pages of 3 tokens, 2 heads, 4 channels; the value of (page, token, head, channel) is its decimal digits.
float digits(int64_t page, int64_t token, int64_t head, int64_t channel) {
  return static_cast<float>(1000 * page + 100 * token + 10 * head + channel);
}

TEST(ReferenceCache, Layouts) {
  Store store;
  std::vector<float> nhd(48), hnd(48), packed_k(48), packed_v(48);
  for (int64_t p = 0; p < 2; ++p) {
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 4; ++d) {
          const auto put = [&](std::vector<float>& to, int64_t at) {
            to[static_cast<size_t>(at)] = digits(p, t, h, d);
          };
          put(nhd, ((p * 3 + t) * 2 + h) * 4 + d);
          put(hnd, ((p * 2 + h) * 3 + t) * 4 + d);
          put(packed_k, (((p * 2 + h) * 2 + d / 2) * 3 + t) * 2 + d % 2);
          put(packed_v, ((p * 2 + h) * 4 + d) * 3 + t);
        }
      }
    }
  }
  attune_kv_cache caches[3]{};
  caches[0].layout = ATTUNE_KV_NHD;
  caches[0].k = caches[0].v = store.floats({2, 3, 2, 4}, nhd);
  caches[1].layout = ATTUNE_KV_HND;
  caches[1].k = caches[1].v = store.floats({2, 2, 3, 4}, hnd);
  caches[2].layout = ATTUNE_KV_XPACKED;
  caches[2].k = store.floats({2, 2, 2, 3, 2}, packed_k);
  caches[2].v = store.floats({2, 2, 4, 3}, packed_v);
  for (const attune_kv_cache& cache : caches) {
    for (int64_t slot = 0; slot < 6; ++slot) {
      for (int64_t h = 0; h < 2; ++h) {
        for (const bool is_v : {false, true}) {
          const std::vector<double> row = cache_row(cache, 4, slot, h, is_v);
          ASSERT_EQ(row.size(), 4u);
          for (int64_t d = 0; d < 4; ++d)
            EXPECT_EQ(row[static_cast<size_t>(d)], digits(slot / 3, slot % 3, h, d)) << cache.layout;
        }
      }
    }
  }
}

TEST(ReferenceCache, Scales) {
  Store store;
  attune_kv_cache cache{};
  cache.k = store.add({2, 2, 2, 1}, std::vector<int8_t>{1, 2, 3, 4, 5, 6, 7, -8});
  cache.v = store.add({2, 2, 2, 1}, std::vector<uint8_t>(8, 0x38), ATTUNE_FLOAT8_E4M3);  // ones
  cache.k_scale = store.floats({1}, {0.5f});
  cache.v_scale = store.floats({2}, {10, 20});
  EXPECT_EQ(cache_row(cache, 1, 3, 1, false)[0], -4);
  EXPECT_EQ(cache_row(cache, 1, 3, 0, true)[0], 10);
  EXPECT_EQ(cache_row(cache, 1, 3, 1, true)[0], 20);
  // Per token and head: [pages, page_size, heads], or [pages, heads, page_size] with HND.
  cache.v_scale = store.floats({2, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(cache_row(cache, 1, 2, 1, true)[0], 5);
  EXPECT_EQ(cache_row(cache, 1, 1, 0, true)[0], 2);
  cache.layout = ATTUNE_KV_HND;
  EXPECT_EQ(cache_row(cache, 1, 2, 1, true)[0], 6);
  EXPECT_EQ(cache_row(cache, 1, 1, 0, true)[0], 1);
  // V as the first columns of K takes K's scale.
  attune_kv_cache shared{};
  shared.k = store.add({1, 1, 1, 3}, std::vector<int8_t>{1, 2, 3});
  shared.k_scale = store.floats({1}, {2});
  EXPECT_EQ(cache_row(shared, 2, 0, 0, true), (std::vector<double>{2, 4}));
}

TEST(ReferenceCache, StridedPages) {
  Store store;
  // Pages 7 elements apart, tokens 3 apart; what lies between is NaN.
  std::vector<float> data(14, kNaN);
  data[0] = 1, data[1] = 2, data[3] = 3, data[4] = 4, data[7] = 5, data[8] = 6, data[10] = 7, data[11] = 8;
  attune_kv_cache cache{};
  cache.k = store.floats({2, 7}, data);
  cache.k.rank = 4;
  cache.k.shape[1] = 2, cache.k.shape[2] = 1, cache.k.shape[3] = 2;
  cache.k.stride[1] = 3, cache.k.stride[2] = 99, cache.k.stride[3] = 1;
  EXPECT_EQ(cache_row(cache, 2, 3, 0, false), (std::vector<double>{7, 8}));
  EXPECT_EQ(cache_row(cache, 1, 1, 0, true), (std::vector<double>{3}));
}

void put_float(uint8_t* to, float value) { std::memcpy(to, &value, sizeof(value)); }
void put_u16(uint8_t* to, uint16_t value) { std::memcpy(to, &value, sizeof(value)); }

TEST(ReferenceCache, Mla656) {
  Store store;
  constexpr size_t kTokens = 3;
  std::vector<uint8_t> bytes(kTokens * 656, 0x7f);  // NaN everywhere else
  uint8_t* token = &bytes[2 * 656];
  for (int d = 0; d < 512; ++d) token[d] = d % 2 == 0 ? 0x38 : 0xc0;  // 1, -2
  for (int group = 0; group < 4; ++group) put_float(token + 512 + 4 * group, static_cast<float>(group + 1));
  for (int d = 0; d < 64; ++d) put_u16(token + 528 + 2 * d, static_cast<uint16_t>(0x3f80 + d));  // 1 + d / 128
  attune_kv_cache cache{};
  cache.format = ATTUNE_KV_MLA_656;
  cache.layout = ATTUNE_KV_BYTES;
  cache.k = store.add({1, kTokens, 656}, bytes);
  const std::vector<double> k = cache_row(cache, 0, 2, 0, false);
  ASSERT_EQ(k.size(), 576u);
  for (size_t d = 0; d < 512; ++d) EXPECT_EQ(k[d], (d % 2 == 0 ? 1.0 : -2.0) * static_cast<double>(d / 128 + 1)) << d;
  for (size_t d = 0; d < 64; ++d) EXPECT_EQ(k[512 + d], 1 + static_cast<double>(d) / 128) << d;
  const std::vector<double> v = cache_row(cache, 0, 2, 0, true);
  ASSERT_EQ(v.size(), 512u);
  EXPECT_TRUE(std::equal(v.begin(), v.end(), k.begin()));
}

TEST(ReferenceCache, Mla584) {
  Store store;
  constexpr int64_t kPageSize = 4, kPageBytes = 2880;  // 4 * 584 = 2336, padded to a multiple of 576
  std::vector<uint8_t> bytes(2 * kPageBytes, 0xff);    // NaN in every format
  uint8_t* page = &bytes[kPageBytes];
  uint8_t* token = page + 3 * 576;
  uint8_t* scales = page + kPageSize * 576 + 3 * 8;
  for (int d = 0; d < 448; ++d) token[d] = 0x40;                      // 2
  for (int d = 0; d < 64; ++d) put_u16(token + 448 + 2 * d, 0xbf80);  // -1
  for (int group = 0; group < 7; ++group) scales[group] = static_cast<uint8_t>(127 + group - 3);
  attune_kv_cache cache{};
  cache.format = ATTUNE_KV_MLA_584;
  cache.layout = ATTUNE_KV_BYTES;
  cache.page_size = kPageSize;
  cache.k = store.add({2, kPageBytes}, bytes);
  std::vector<double> k = cache_row(cache, 0, kPageSize + 3, 0, false);
  ASSERT_EQ(k.size(), 512u);
  for (size_t d = 0; d < 448; ++d) EXPECT_EQ(k[d], 2 * std::exp2(static_cast<double>(d / 64) - 3)) << d;
  for (size_t d = 448; d < 512; ++d) EXPECT_EQ(k[d], -1) << d;
  EXPECT_EQ(cache_row(cache, 0, kPageSize + 3, 0, true), k);
  EXPECT_TRUE(std::isnan(cache_row(cache, 0, kPageSize + 2, 0, false)[0]));
}

TEST(ReferenceCache, SlotsOfPositions) {
  Store store;
  attune_kv_cache cache{};
  cache.k = store.filled({3, 2, 1, 1}, 0);
  cache.page_table = store.table(2, {2, 0, /* sequence 1: */ 1, 3});
  EXPECT_EQ(reference::cache_slot(cache, 0, 1, false), 5);
  EXPECT_EQ(reference::cache_slot(cache, 0, 2, false), 0);
  EXPECT_EQ(reference::cache_slot(cache, 1, 2, false), -1);  // page 3 of 3
  EXPECT_EQ(reference::cache_slot(cache, 0, 4, false), -1);  // past the table
  cache.ring_capacity = 3;
  EXPECT_EQ(reference::cache_slot(cache, 0, 7, false), 5);  // 7 mod 3 = 1
  cache.ring_capacity = 0;
  cache.v_page_table = store.table(2, {1, 0, 1, 0});
  cache.v = cache.k;
  EXPECT_EQ(reference::cache_slot(cache, 0, 1, true), 3);
  EXPECT_EQ(reference::cache_slot(cache, 0, 1, false), 5);
  attune_kv_cache rows{};
  rows.k = cache.k;
  EXPECT_EQ(reference::cache_slot(rows, 2, 1, false), 5);
  rows.batch_index = store.ints({1, -1});
  EXPECT_EQ(reference::cache_slot(rows, 0, 1, false), 3);
  EXPECT_EQ(reference::cache_slot(rows, 1, 1, false), -1);
}

}  // namespace
}  // namespace attune::reference_tests
