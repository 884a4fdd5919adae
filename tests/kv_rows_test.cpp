// SPDX-License-Identifier: Apache-2.0
// The codec of every KV format and layout: bytes where the formats say, scales as the rules say, nothing else touched.
#include "cpu/kv_rows.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "cases/cache_rows.h"
#include "core/dtype.h"
#include "core/integers.h"
#include "unit_cache.h"

namespace attune::unit {
namespace {

using Bytes = std::vector<uint8_t>;

KvCache view_of(const attune_kv_cache& c, int64_t head_dim_v = 0) {
  return make_kv_cache("cache", c, CacheUse::kSlots, -1, 0, head_dim_v, Data::kRequired);
}

std::vector<float> read_k(const KvCache& c, KvSlot slot, int64_t head) {
  std::vector<float> x(static_cast<size_t>(c.head_dim_qk) + 1, -99.0f);
  cpu::read_k_row(c, slot, head, x.data());
  EXPECT_EQ(x.back(), -99.0f);
  x.pop_back();
  return x;
}

std::vector<float> read_v(const KvCache& c, KvSlot slot, int64_t head) {
  std::vector<float> x(static_cast<size_t>(c.head_dim_v) + 1, -99.0f);
  cpu::read_v_row(c, slot, head, x.data());
  EXPECT_EQ(x.back(), -99.0f);
  x.pop_back();
  return x;
}

// A value of the cache's dtype after one rounding.
float rounded(attune_dtype dtype, float x) {
  uint8_t bytes[4];
  store_from_float(dtype, x, bytes);
  return load_as_float(dtype, bytes);
}

constexpr int64_t kPages = 3, kPageSize = 4, kHeads = 2, kDim = 24, kDimV = 16, kPack = 8;

// Byte offset of element d of a row, from the definition of the layout.
int64_t offset_of(int32_t layout, bool is_v, int64_t page, int64_t slot, int64_t head, int64_t d) {
  const int64_t dim = is_v ? kDimV : kDim;
  switch (layout) {
    case ATTUNE_KV_NHD:
      return ((page * kPageSize + slot) * kHeads + head) * dim + d;
    case ATTUNE_KV_HND:
      return ((page * kHeads + head) * kPageSize + slot) * dim + d;
    default:
      if (is_v) return ((page * kHeads + head) * dim + d) * kPageSize + slot;
      return (((page * kHeads + head) * (dim / kPack) + d / kPack) * kPageSize + slot) * kPack + d % kPack;
  }
}

struct PlainCache {
  int32_t layout;
  attune_dtype dtype;
  Bytes k, v;
  std::vector<float> k_scale, v_scale;
  attune_kv_cache c = empty_cache();

  PlainCache(int32_t layout_, attune_dtype dtype_, ScaleMode mode) : layout(layout_), dtype(dtype_) {
    const auto size = static_cast<size_t>(dtype_size(dtype));
    k.assign(kPages * kPageSize * kHeads * kDim * size, 0xff);
    v.assign(kPages * kPageSize * kHeads * kDimV * size, 0xff);
    const auto shape = [&](int64_t dim, bool packed) -> std::vector<int64_t> {
      if (layout == ATTUNE_KV_NHD) return {kPages, kPageSize, kHeads, dim};
      if (layout == ATTUNE_KV_HND) return {kPages, kHeads, kPageSize, dim};
      if (packed) return {kPages, kHeads, dim / kPack, kPageSize, kPack};
      return {kPages, kHeads, dim, kPageSize};
    };
    const std::vector<int64_t> ks = shape(kDim, true), vs = shape(kDimV, false);
    c.k = attune_dense_tensor(k.data(), dtype, static_cast<int32_t>(ks.size()), ks.data());
    c.v = attune_dense_tensor(v.data(), dtype, static_cast<int32_t>(vs.size()), vs.data());
    c.layout = layout;
    if (mode == ScaleMode::kNone) return;
    const auto add_scales = [&](std::vector<float>& scales, int64_t dim) {
      const std::vector<int64_t> scale_shape = cases::scale_shape(mode, layout, kPages, kPageSize, kHeads, dim);
      const auto count = std::accumulate(scale_shape.begin(), scale_shape.end(), int64_t{1}, std::multiplies<>());
      for (int64_t i = 0; i < count; ++i)
        scales.push_back(cases::scales_by_token(mode) ? kNan : 0.25f / static_cast<float>(1 + i));
      return dense(scales, scale_shape);
    };
    c.k_scale = add_scales(k_scale, kDim), c.v_scale = add_scales(v_scale, kDimV);
  }
};

// Writes one row, then looks at the bytes themselves: the row where the layout says, everything else as it was.
void expect_round_trip(int32_t layout, attune_dtype dtype, ScaleMode mode) {
  SCOPED_TRACE(cat("layout ", layout, " dtype ", dtype_name(dtype), " scales ", static_cast<int>(mode)));
  PlainCache t(layout, dtype, mode);
  const KvCache c = view_of(t.c);
  const KvSlot slot{2, 1};
  const int64_t head = 1, size = dtype_size(dtype);
  std::vector<float> k = normal(kDim, 3), v = normal(kDimV, 4);
  cpu::write_k_row(c, slot, head, k.data(), false);
  cpu::write_v_row(c, slot, head, v.data(), false);
  const auto check = [&](bool is_v, const std::vector<float>& x, const Bytes& bytes, const std::vector<float>& scales,
                         const std::vector<float>& read) {
    const auto group = static_cast<size_t>(cases::channels_of_scale(mode, static_cast<int64_t>(x.size())));
    const float largest = dtype == ATTUNE_INT8 ? 127.0f : dtype == ATTUNE_FLOAT8_E4M3 ? 448.0f : 57344.0f;
    float scale = 1.0f;
    Bytes expected(bytes.size(), 0xff);
    for (size_t d = 0; d < x.size(); ++d) {
      if (mode != ScaleMode::kNone && d % group == 0) {
        scale = *static_cast<float*>(cases::scale_element(t.c, is_v, 2, 1, 1, static_cast<int64_t>(d)));
        float amax = 0;
        for (size_t i = d; i < std::min(d + group, x.size()); ++i) amax = std::max(amax, std::fabs(x[i]));
        if (cases::scales_by_token(mode)) {
          EXPECT_EQ(scale, amax / largest);
        }
      }
      store_from_float(dtype, x[d] / scale,
                       expected.data() + offset_of(layout, is_v, 2, 1, 1, static_cast<int64_t>(d)) * size);
      EXPECT_EQ(read[d], rounded(dtype, x[d] / scale) * scale);
    }
    EXPECT_EQ(bytes, expected);
    if (!cases::scales_by_token(mode)) return;
    const auto written = std::count_if(scales.begin(), scales.end(), [](float e) { return !std::isnan(e); });
    EXPECT_EQ(written, ceil_div(static_cast<int64_t>(x.size()), static_cast<int64_t>(group)));
  };
  check(false, k, t.k, t.k_scale, read_k(c, slot, head));
  check(true, v, t.v, t.v_scale, read_v(c, slot, head));
}

TEST(KvRows, EveryPlainDtypeLayoutAndScale) {
  for (const int32_t layout : {ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED}) {
    for (const attune_dtype dtype :
         {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8}) {
      for (const cases::NamedMode& m : cases::scale_modes())
        if (cases::takes_scales(dtype, m.mode)) expect_round_trip(layout, dtype, m.mode);
    }
  }
}

// Rows of one channel, and wide ones that go through the buffers more than once.
TEST(KvRows, StridedRowsOfAnyWidth) {
  for (const int64_t dim : {int64_t{1}, int64_t{127}, int64_t{128}, int64_t{300}, int64_t{576}}) {
    std::vector<uint16_t> data(static_cast<size_t>(dim) * 6, 0x7fc0);
    attune_kv_cache c = empty_cache();
    c.k = dense(data, ATTUNE_BFLOAT16, {1, 2, 1, dim});
    c.k.stride[3] = 3, c.k.stride[1] = 3 * dim;
    const KvCache view = view_of(c, dim);
    std::vector<float> x = normal(static_cast<size_t>(dim), 5);
    for (float& e : x) e = rounded(ATTUNE_BFLOAT16, e);
    cpu::write_k_row(view, {0, 1}, 0, x.data(), false);
    EXPECT_EQ(read_k(view, {0, 1}, 0), x);
    EXPECT_EQ(read_v(view, {0, 1}, 0), x);
    for (size_t i = 0; i < data.size(); ++i) {
      const bool of_row = i >= static_cast<size_t>(3 * dim) && i % 3 == 0;
      if (!of_row) {
        EXPECT_EQ(data[i], 0x7fc0) << i;
      }
    }
  }
}

// x / scale, not x * (1 / scale): 45.5 / 7 is a tie, the product with the rounded reciprocal lies above it.
TEST(KvRows, CodesAreQuotients) {
  constexpr int64_t kWide = 300;
  std::vector<int8_t> data(2 * kWide, 99);
  std::vector<float> scale = {7.0f}, x(kWide);
  attune_kv_cache c = empty_cache();
  c.k = dense(data, ATTUNE_INT8, {1, 1, 1, kWide});
  c.k.stride[3] = 2;
  c.k_scale = dense(scale, {1});
  for (size_t d = 0; d < kWide; ++d) x[d] = d % 3 == 0 ? 45.5f : 7.0f * static_cast<float>(d % 100);
  cpu::write_k_row(view_of(c, 1), {0, 0}, 0, x.data(), false);
  for (size_t d = 0; d < kWide; ++d) {
    EXPECT_EQ(data[2 * d], d % 3 == 0 ? 6 : static_cast<int8_t>(d % 100)) << d;
    EXPECT_EQ(data[2 * d + 1], 99);
  }
}

TEST(KvRows, ValueIsTheHeadOfTheKeyWithItsScale) {
  std::vector<int8_t> data(1 * 1 * 1 * 6);
  std::vector<float> scale = {0.5f};
  attune_kv_cache c = empty_cache();
  c.k = dense(data, ATTUNE_INT8, {1, 1, 1, 6});
  c.k_scale = dense(scale, {1});
  const KvCache view = view_of(c, 4);
  const std::vector<float> x = {1, -2, 3, -4, 5, -6};
  cpu::write_k_row(view, {0, 0}, 0, x.data(), false);
  EXPECT_EQ(read_v(view, {0, 0}, 0), (std::vector<float>{1, -2, 3, -4}));
}

// scale 1: ties go to the even code; beyond the range saturates; NaN stays NaN, or 0 in int8.
TEST(KvRows, TiesSaturationAndNan) {
  const struct {
    attune_dtype dtype;
    std::vector<float> in, out;
  } cases[] = {{ATTUNE_INT8,
                {0.5f, 1.5f, 2.5f, -0.5f, -2.5f, 126.5f, 127.6f, -128.0f, kInf, kNan},
                {0, 2, 2, 0, -2, 126, 127, -127, 127, 0}},
               {ATTUNE_FLOAT8_E4M3,
                {17, 19, 18.9f, 464, 1e9f, -kInf, kNan, 0.0009765625f, 0.0029296875f, 0.01171875f},
                {16, 20, 18, 448, 448, -448, kNan, 0, 0.00390625f, 0.01171875f}},
               {ATTUNE_FLOAT8_E5M2,
                {9, 11, 61440, 1e9f, -kInf, kNan, 1.25f, 1.125f, 1.375f, 0},
                {8, 12, 57344, 57344, -57344, kNan, 1.25f, 1, 1.5f, 0}}};
  for (const auto& c : cases) {
    Bytes data(10, 0xff);
    std::vector<float> scale = {1.0f};
    attune_kv_cache cache = empty_cache();
    cache.k = dense(data, c.dtype, {1, 1, 1, 10});
    cache.k_scale = dense(scale, {1});
    const KvCache view = view_of(cache, 10);
    cpu::write_k_row(view, {0, 0}, 0, c.in.data(), false);
    const std::vector<float> got = read_k(view, {0, 0}, 0);
    for (size_t i = 0; i < 10; ++i) EXPECT_CLOSE(got[i], c.out[i], 0) << c.in[i] << " as " << dtype_name(c.dtype);
  }
}

TEST(KvRows, ComputedScalesSurviveZerosNanAndInfinity) {
  for (const attune_dtype dtype : {ATTUNE_INT8, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2}) {
    const float largest = dtype == ATTUNE_INT8 ? 127.0f : dtype == ATTUNE_FLOAT8_E4M3 ? 448.0f : 57344.0f;
    const float nan_read = dtype == ATTUNE_INT8 ? 0.0f : kNan;
    Bytes data(4, 0xff);
    std::vector<float> scale = {kNan};
    attune_kv_cache cache = empty_cache();
    cache.k = dense(data, dtype, {1, 1, 1, 4});
    cache.k_scale = dense(scale, {1, 1, 1});
    const KvCache view = view_of(cache, 4);
    const auto write = [&](std::vector<float> x) {
      cpu::write_k_row(view, {0, 0}, 0, x.data(), false);
      return read_k(view, {0, 0}, 0);
    };
    EXPECT_EQ(write({0, -0.0f, 0, 0}), (std::vector<float>{0, 0, 0, 0}));
    EXPECT_EQ(scale[0], 1.0f);
    const std::vector<float> tiny = write({1e-45f, 0, -1e-45f, 0});
    for (float x : tiny) EXPECT_TRUE(std::fabs(x) <= 1e-44f);
    EXPECT_TRUE(scale[0] > 0);
    const std::vector<float> with_nan = write({1, kNan, -2, 0.5f});
    EXPECT_EQ(scale[0], 2 / largest);
    EXPECT_CLOSE(with_nan[1], nan_read, 0);
    EXPECT_CLOSE(with_nan[2], -2, 1e-6);
    const std::vector<float> with_inf = write({1, kInf, -kInf, kNan});
    EXPECT_EQ(scale[0], std::numeric_limits<float>::max() / largest);
    EXPECT_EQ(with_inf[0], 0.0f);
    EXPECT_TRUE(with_inf[1] > 3.4e38f && with_inf[2] < -3.4e38f);
    EXPECT_CLOSE(with_inf[3], nan_read, 0);
  }
}

struct Mla656 {
  // A spare row between pages, as engines leave.
  Bytes data = Bytes(2 * 5 * 656, 0xff);
  attune_kv_cache c = empty_cache();
  Mla656() {
    c.k = dense(data, ATTUNE_UINT8, {2, 4, 656});
    c.k.stride[0] = 5 * 656;
    c.layout = ATTUNE_KV_BYTES;
    c.format = ATTUNE_KV_MLA_656;
  }
  const uint8_t* row(int64_t page, int64_t slot) const { return data.data() + (page * 5 + slot) * 656; }
  float scale(int64_t page, int64_t slot, int64_t group) const {
    float s;
    std::memcpy(&s, row(page, slot) + 512 + 4 * group, 4);
    return s;
  }
};

TEST(KvRows, Mla656Bytes) {
  Mla656 t;
  const KvCache c = view_of(t.c);
  std::vector<float> x = normal(576, 8);
  x[0] = 7.0f, x[130] = -448.0f;
  std::fill(x.begin() + 256, x.begin() + 384, 0.0f);
  const Bytes before = t.data;
  cpu::write_k_row(c, {1, 2}, 0, x.data(), false);
  for (int64_t g = 0; g < 4; ++g) {
    float amax = 0;
    for (int64_t d = 0; d < 128; ++d) amax = std::max(amax, std::fabs(x[static_cast<size_t>(g * 128 + d)]));
    const float scale = t.scale(1, 2, g);
    if (g == 2) {
      EXPECT_TRUE(scale > 0 && scale < 2e-4f) << "zeros: a small scale, never 0 / 0";
    } else {
      EXPECT_EQ(scale, amax / 448.0f);
    }
    for (int64_t d = g * 128; d < (g + 1) * 128; ++d) {
      EXPECT_EQ(t.row(1, 2)[d], float_to_e4m3(x[static_cast<size_t>(d)] / scale)) << "channel " << d;
    }
  }
  for (int64_t d = 0; d < 64; ++d) {
    uint16_t bits;
    std::memcpy(&bits, t.row(1, 2) + 528 + 2 * d, 2);
    EXPECT_EQ(bits, float_to_bf16(x[static_cast<size_t>(512 + d)]));
  }
  for (size_t i = 0; i < before.size(); ++i) {
    if (i < 7 * 656 || i >= 8 * 656) {
      EXPECT_EQ(t.data[i], 0xff) << "byte " << i << " of another slot";
    }
  }
  const std::vector<float> k = read_k(c, {1, 2}, 0), v = read_v(c, {1, 2}, 0);
  ASSERT_EQ(v.size(), 512u);
  EXPECT_TRUE(std::equal(v.begin(), v.end(), k.begin()));
  for (size_t d = 0; d < 512; ++d)
    EXPECT_EQ(k[d], e4m3_to_float(t.row(1, 2)[d]) * t.scale(1, 2, static_cast<int64_t>(d / 128)));
  for (size_t d = 512; d < 576; ++d) EXPECT_EQ(k[d], rounded(ATTUNE_BFLOAT16, x[d]));
}

TEST(KvRows, Mla656PowerOfTwoScalesRoundUp) {
  Mla656 t;
  const KvCache c = view_of(t.c);
  // amax / 448 = 1 exactly, just above 1, 0.75, and far below the floor of 1e-4.
  const float amax[4] = {448.0f, 448.1f, 336.0f, 1e-6f}, scale[4] = {1, 2, 1, 0x1p-13f};
  std::vector<float> x(576, 0.0f);
  for (size_t g = 0; g < 4; ++g) x[g * 128 + 5] = -amax[g];
  cpu::write_k_row(c, {0, 0}, 0, x.data(), true);
  for (int64_t g = 0; g < 4; ++g) EXPECT_EQ(t.scale(0, 0, g), scale[g]);
  // Readers take any scale.
  const float odd = 0.3f;
  std::memcpy(t.data.data() + 512, &odd, 4);
  EXPECT_EQ(read_k(c, {0, 0}, 0)[5], -448.0f * 0.3f);
}

TEST(KvRows, Mla584BytesArePlanar) {
  constexpr int64_t kSize = 3;
  int64_t page_bytes = 0;
  ASSERT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_584, kSize, &page_bytes), ATTUNE_OK);
  ASSERT_EQ(page_bytes, 4 * 576);  // 3 * 584 = 1752, padded to 576s
  Bytes data(static_cast<size_t>(2 * page_bytes), 0xff);
  attune_kv_cache cache = empty_cache();
  cache.k = dense(data, ATTUNE_UINT8, {2, page_bytes});
  cache.layout = ATTUNE_KV_BYTES;
  cache.format = ATTUNE_KV_MLA_584;
  cache.page_size = kSize;
  const KvCache c = view_of(cache);
  std::vector<float> x = normal(512, 12, 3.0f);
  std::fill(x.begin() + 64, x.begin() + 128, 0.0f);
  x[130] = 896.0f;  // a scale of exactly 2
  cpu::write_k_row(c, {1, 2}, 0, x.data(), false);
  const size_t row = static_cast<size_t>(page_bytes) + 2 * 576,
               scales = static_cast<size_t>(page_bytes) + 3 * 576 + 2 * 8;
  for (size_t g = 0; g < 7; ++g) {
    float amax = 0;
    for (size_t d = 0; d < 64; ++d) amax = std::max(amax, std::fabs(x[g * 64 + d]));
    const int code = data[scales + g];
    const double scale = std::ldexp(1.0, code - 127), least = std::max(amax / 448.0, 1e-4);
    EXPECT_TRUE(scale >= least && scale / 2 < least) << "group " << g;
    for (size_t d = 0; d < 64; ++d)
      EXPECT_EQ(data[row + g * 64 + d], float_to_e4m3(x[g * 64 + d] / static_cast<float>(scale)));
  }
  EXPECT_EQ(data[scales + 2], 128);
  for (size_t i = 0; i < data.size(); ++i) {
    const bool of_slot = (i >= row && i < row + 576) || (i >= scales && i < scales + 7);
    if (!of_slot) {
      EXPECT_EQ(data[i], 0xff) << "byte " << i;
    }
  }
  const std::vector<float> k = read_k(c, {1, 2}, 0);
  EXPECT_EQ(read_v(c, {1, 2}, 0), k) << "the rope part is value too";
  EXPECT_EQ(k[130], 896.0f);
  for (size_t d = 448; d < 512; ++d) EXPECT_EQ(k[d], rounded(ATTUNE_BFLOAT16, x[d]));
  // e8m0: 0 is 2^-127, 255 is NaN.
  data[scales] = 0, data[scales + 1] = 0xff, data[row] = 0x38, data[row + 64] = 0x38;
  EXPECT_EQ(read_k(c, {1, 2}, 0)[0], 0x1p-127f);
  EXPECT_TRUE(std::isnan(read_k(c, {1, 2}, 0)[64]));
}

TEST(KvRows, MlaGroupsWithNanAndInfinityKeepTheirScale) {
  Mla656 t;
  const KvCache c = view_of(t.c);
  std::vector<float> x(576, 1.0f);
  x[3] = kNan, x[128] = kInf, x[570] = kNan;
  cpu::write_k_row(c, {0, 1}, 0, x.data(), false);
  EXPECT_EQ(t.scale(0, 1, 0), 1.0f / 448.0f);
  const std::vector<float> k = read_k(c, {0, 1}, 0);
  EXPECT_TRUE(std::isnan(k[3]) && std::isnan(k[570]));
  EXPECT_CLOSE(k[4], 1.0f, 1e-6);
  EXPECT_TRUE(k[128] > 3.4e38f && std::isfinite(t.scale(0, 1, 1)));
}

TEST(KvRows, PageBytes) {
  int64_t bytes = 0;
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_656, 64, &bytes), ATTUNE_OK);
  EXPECT_EQ(bytes, 64 * 656);
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_584, 64, &bytes), ATTUNE_OK);
  EXPECT_EQ(bytes, 65 * 576);  // 37376 bytes, up to a multiple of 576
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_PLAIN, 64, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_kv_page_bytes(static_cast<attune_kv_format>(3), 64, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_656, 0, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_656, 64, nullptr), ATTUNE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attune::unit
