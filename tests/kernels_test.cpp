// SPDX-License-Identifier: Apache-2.0
// Every function of every kernel table that this machine runs, against double loops. What may not be read is poisoned
// with NaN, what may not be written is guarded; buffers end where their contents do, so that ASan sees the rest.
#include "cpu/kernels.h"
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace attune::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kUnit = 0x1p-24;  // unit roundoff of fp32

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float widen(bf16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
float widen(f16_t x) { return load_as_float(ATTUNE_FLOAT16, &x); }
float widen(float x) { return x; }

bf16_t narrow(float x) {
  const uint32_t u = bits(x);
  if (std::isnan(x)) return static_cast<bf16_t>((u >> 16) | 0x40);
  return static_cast<bf16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

template <typename T>
T make(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, f16_t>) {
    return {float_to_half(x)};
  } else {
    return narrow(x);
  }
}

// [rows][ld] in a block that is exactly as long as its last row: `columns` values, NaN in the padding of the others.
template <typename T>
struct Matrix {
  int rows, columns, ld;
  std::vector<T> data;

  Matrix(int rows, int columns, int ld, std::mt19937& rng, float scale = 1.0f)
      : rows(rows), columns(columns), ld(ld), data(static_cast<size_t>(rows - 1) * ld + columns, make<T>(kNan)) {
    std::normal_distribution<float> normal(0.0f, scale);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) at(i, j) = make<T>(normal(rng));
    }
  }
  T& at(int i, int j) { return data[static_cast<size_t>(i) * ld + j]; }
  T* row(int i) { return data.data() + static_cast<size_t>(i) * ld; }
};

// Rows with addresses of their own, each off alignment and exactly as long as its contents.
template <typename T>
struct Rows {
  std::vector<std::vector<T>> storage;
  std::vector<const T*> pointers;

  Rows(int n, int columns, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < n; ++i) {
      std::vector<T> row(1, make<T>(kNan));
      for (int c = 0; c < columns; ++c) row.push_back(make<T>(normal(rng)));
      storage.push_back(std::move(row));
    }
    for (const auto& row : storage) pointers.push_back(row.data() + 1);
  }
  float at(int i, int c) const { return widen(pointers[i][c]); }
};

// 64-byte aligned scratch of T, filled with NaN.
template <typename T>
struct Scratch {
  std::vector<T> data;
  T* begin;
  explicit Scratch(size_t n) : data(n + 64 / sizeof(T), make<T>(kNan)) {
    const auto address = reinterpret_cast<uintptr_t>(data.data());
    begin = data.data() + (64 - address % 64) % 64 / sizeof(T);
  }
};

std::vector<std::string> all_isas() {
  int count = 0;
  const char* const* names = isa_names(&count);
  return {names, names + count};
}

class Kernels : public testing::TestWithParam<std::string> {
 protected:
  const KernelTable& k = *kernels_for(GetParam().c_str());
  std::mt19937 rng{12345};
};

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Isa, Kernels, testing::ValuesIn(all_isas()), test_name);

const int kSizes[] = {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 70, 96, 127, 128, 200};

// --- Conversions

double minifloat(int code, int mantissa_bits, int bias, bool has_inf) {
  const int exponent_bits = 7 - mantissa_bits;
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int fraction = code & ((1 << mantissa_bits) - 1);
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (has_inf && exponent == (1 << exponent_bits) - 1) return fraction == 0 ? sign * kInf : kNan;
  if (!has_inf && (code & 0x7f) == 0x7f) return kNan;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - mantissa_bits);
  return sign * std::ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

double half_value(int code) {
  const int exponent = (code & 0x7fff) >> 10, fraction = code & 0x3ff;
  const double sign = code & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction == 0 ? sign * kInf : kNan;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25));
}

// A source of every code of a dtype (or, for fp32, of a spread of bit patterns), and what each means.
struct Codes {
  attune_dtype dtype;
  std::vector<uint8_t> bytes;
  std::vector<double> values;
  size_t size;  // bytes a code
};

template <typename T, class Value>
Codes codes_of(attune_dtype dtype, int64_t count, Value value) {
  Codes codes{dtype, {}, {}, sizeof(T)};
  for (int64_t i = 0; i < count; ++i) {
    const T code = static_cast<T>(sizeof(T) == 4 ? static_cast<uint32_t>(i * 65521 + (i % 3) * 0x8000) : i);
    const auto* p = reinterpret_cast<const uint8_t*>(&code);
    codes.bytes.insert(codes.bytes.end(), p, p + sizeof(T));
    codes.values.push_back(value(code));
  }
  return codes;
}

std::vector<Codes> all_codes() {
  return {
      codes_of<uint32_t>(ATTUNE_FLOAT32, 70000,
                         [](uint32_t c) { return static_cast<double>(std::bit_cast<float>(c)); }),
      codes_of<uint16_t>(ATTUNE_FLOAT16, 65536, [](uint16_t c) { return half_value(c); }),
      codes_of<uint16_t>(ATTUNE_BFLOAT16, 65536, [](uint16_t c) { return static_cast<double>(widen(c)); }),
      codes_of<uint8_t>(ATTUNE_FLOAT8_E4M3, 256, [](uint8_t c) { return minifloat(c, 3, 7, false); }),
      codes_of<uint8_t>(ATTUNE_FLOAT8_E5M2, 256, [](uint8_t c) { return minifloat(c, 2, 15, true); }),
      codes_of<uint8_t>(ATTUNE_INT8, 256, [](uint8_t c) { return static_cast<double>(static_cast<int8_t>(c)); }),
  };
}

TEST_P(Kernels, ConvertsEveryCode) {
  for (const Codes& codes : all_codes()) {
    const int64_t n = static_cast<int64_t>(codes.values.size());
    std::vector<float> wide(n, 12345.0f);
    std::vector<bf16_t> half(n, 12345);
    k.to_f32(codes.dtype, codes.bytes.data(), n, wide.data());
    k.to_bf16(codes.dtype, codes.bytes.data(), n, half.data());
    for (int64_t i = 0; i < n; ++i) {
      const float expected = static_cast<float>(codes.values[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << "dtype " << codes.dtype << " code " << i;
        ASSERT_TRUE(std::isnan(widen(half[i]))) << "dtype " << codes.dtype << " code " << i;
      } else {
        ASSERT_EQ(bits(wide[i]), bits(expected)) << "dtype " << codes.dtype << " code " << i;
        ASSERT_EQ(half[i], narrow(expected)) << "dtype " << codes.dtype << " code " << i;
      }
    }
  }
}

TEST_P(Kernels, ConvertsAnyLengthAndNothingBehindIt) {
  for (const Codes& codes : all_codes()) {
    for (int n = 0; n <= 140; ++n) {
      const int start = n % 7;
      const std::vector<uint8_t> source(codes.bytes.begin() + start * codes.size,
                                        codes.bytes.begin() + (start + n) * codes.size);
      std::vector<float> wide(n + 1, -7.0f);
      std::vector<bf16_t> half(n + 1, 0x1234);
      k.to_f32(codes.dtype, source.data(), n, wide.data());
      k.to_bf16(codes.dtype, source.data(), n, half.data());
      for (int i = 0; i < n; ++i) {
        const float expected = static_cast<float>(codes.values[start + i]);
        if (std::isnan(expected)) continue;
        ASSERT_EQ(bits(wide[i]), bits(expected)) << "dtype " << codes.dtype << " n " << n << " i " << i;
        ASSERT_EQ(half[i], narrow(expected)) << "dtype " << codes.dtype << " n " << n << " i " << i;
      }
      ASSERT_EQ(wide[n], -7.0f);
      ASSERT_EQ(half[n], 0x1234);
    }
  }
}

// --- Packing

TEST_P(Kernels, PacksKeys) {
  for (int n : {1, 3, 15, 16, 17, 33, 64}) {
    for (int d : {1, 2, 3, 4, 7, 8, 63, 64, 65, 96, 128, 576}) {
      Rows<float> wide(n, d, rng);
      Rows<bf16_t> half(n, d, rng);
      for (int i = 2; i < n; i += 5) wide.pointers[i] = nullptr, half.pointers[i] = nullptr;
      const int padded = (n + 15) / 16 * 16, ld = padded + 16, pairs = (d + 1) / 2;
      Scratch<float> out(static_cast<size_t>(d) * ld);
      Scratch<bf16_t> out2(static_cast<size_t>(pairs) * ld * 2);
      k.pack_k_f32(wide.pointers.data(), n, d, out.begin, ld);
      k.pack_k_bf16(half.pointers.data(), n, d, out2.begin, ld);
      for (int i = 0; i < ld; ++i) {
        const bool written = i < padded, present = i < n && wide.pointers[i] != nullptr;
        for (int c = 0; c < 2 * pairs; ++c) {
          const uint32_t expected = !written ? narrow(kNan) : present && c < d ? half.pointers[i][c] : 0;
          ASSERT_EQ(out2.begin[(static_cast<size_t>(c / 2) * ld + i) * 2 + c % 2], expected)
              << n << " " << d << " " << i << " " << c;
          if (c < d) {
            const float value = !written ? kNan : present ? wide.pointers[i][c] : 0.0f;
            ASSERT_EQ(bits(out.begin[static_cast<size_t>(c) * ld + i]), bits(value))
                << n << " " << d << " " << i << " " << c;
          }
        }
      }
    }
  }
}

TEST_P(Kernels, PacksValues) {
  for (int n : {1, 2, 3, 16, 33}) {
    for (int dv : {1, 8, 15, 16, 17, 31, 32, 33, 64, 80, 128, 130}) {
      Rows<bf16_t> rows(n, dv, rng);
      for (int i = 1; i < n; i += 4) rows.pointers[i] = nullptr;
      const int padded = (dv + 15) / 16 * 16, ld = padded + 16;
      Scratch<bf16_t> out(static_cast<size_t>((n + 1) / 2) * ld * 2);
      k.pack_v_bf16(rows.pointers.data(), n, dv, out.begin, ld);
      for (int i = 0; i < (n + 1) / 2 * 2; ++i) {
        for (int c = 0; c < ld; ++c) {
          const bool present = i < n && rows.pointers[i] != nullptr && c < dv;
          const bf16_t expected = c >= padded ? narrow(kNan) : present ? rows.pointers[i][c] : bf16_t{0};
          ASSERT_EQ(out.begin[(static_cast<size_t>(i / 2) * ld + c) * 2 + i % 2], expected)
              << n << " " << dv << " " << i << " " << c;
        }
      }
    }
  }
}

// --- Products

// Worst-case bound of an fp32 sum of `count` products of magnitude `sum` in total, twice for the steps inside
// VDPBF16PS.
double bound(double sum, int count) { return 2.0 * (count + 2) * kUnit * sum + 1e-37; }

template <typename T, class Run>
void check_gemm(std::mt19937& rng, int m, int n, int depth, bool accumulate, Run run) {
  constexpr bool kPairs = sizeof(T) == 2;
  const int padded = (n + 15) / 16 * 16, ldb = padded + 16, ldc = padded + 3, depth_even = (depth + 1) / 2 * 2;
  Matrix<T> a(m, kPairs ? depth_even : depth, depth_even + 5, rng);
  if (kPairs && depth % 2 != 0) {
    for (int i = 0; i < m; ++i) a.at(i, depth) = 0;
  }
  std::vector<double> b(static_cast<size_t>(depth) * padded);
  Scratch<T> packed(static_cast<size_t>(kPairs ? depth_even : depth) * ldb);
  std::normal_distribution<float> normal;
  for (int kk = 0; kk < (kPairs ? depth_even : depth); ++kk) {
    for (int j = 0; j < padded; ++j) {
      const T value = make<T>(kk < depth && j < n ? normal(rng) : 0.0f);
      if (kk < depth) b[static_cast<size_t>(kk) * padded + j] = widen(value);
      packed.begin[kPairs ? (static_cast<size_t>(kk / 2) * ldb + j) * 2 + kk % 2 : static_cast<size_t>(kk) * ldb + j] =
          value;
    }
  }
  Matrix<float> c(m, padded, ldc, rng);
  Matrix<float> before = c;
  run(m, n, depth, a.data.data(), a.ld, packed.begin, ldb, c.data.data(), ldc, accumulate);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = accumulate ? before.at(i, j) : 0.0, magnitude = std::fabs(sum);
      for (int kk = 0; kk < depth; ++kk) {
        const double product = widen(a.at(i, kk)) * b[static_cast<size_t>(kk) * padded + j];
        sum += product;
        magnitude += std::fabs(product);
      }
      ASSERT_TRUE(std::fabs(c.at(i, j) - sum) <= bound(magnitude, depth))
          << m << "x" << n << "x" << depth << " at " << i << "," << j;
    }
    for (int j = padded; j < ldc && i + 1 < m; ++j) ASSERT_TRUE(std::isnan(c.at(i, j)));
  }
  // Row by row: the same bits.
  for (int i = 0; i < m; ++i) {
    std::vector<float> alone(before.row(i), before.row(i) + padded);
    run(1, n, depth, a.row(i), a.ld, packed.begin, ldb, alone.data(), ldc, accumulate);
    ASSERT_EQ(std::memcmp(alone.data(), c.row(i), sizeof(float) * n), 0)
        << "row " << i << " of " << m << "x" << n << "x" << depth;
  }
}

TEST_P(Kernels, Gemm) {
  for (int m : {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 17, 64}) {
    for (int n : {1, 15, 16, 17, 32, 48, 49, 64, 65, 80, 100, 128}) {
      for (int depth : {1, 2, 3, 8, 31, 64, 65}) {
        check_gemm<float>(rng, m, n, depth, (m + n + depth) % 2 != 0, k.gemm_f32);
        check_gemm<bf16_t>(rng, m, n, depth, (m + n + depth) % 2 != 0, k.gemm_bf16);
      }
    }
  }
  check_gemm<float>(rng, 61, 130, 576, true, k.gemm_f32);
  check_gemm<bf16_t>(rng, 61, 130, 576, true, k.gemm_bf16);
}

template <typename Q, typename K, class Run>
void check_qk(std::mt19937& rng, int m, int n, int d, Run run) {
  Matrix<Q> q(m, d, d + 3, rng);
  Rows<K> rows(n, d, rng);
  Matrix<float> s(m, n, n + 2, rng);
  run(m, n, d, q.data.data(), q.ld, rows.pointers.data(), s.data.data(), s.ld);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0.0, magnitude = 0.0;
      for (int c = 0; c < d; ++c) {
        const double product = static_cast<double>(widen(q.at(i, c))) * rows.at(j, c);
        sum += product;
        magnitude += std::fabs(product);
      }
      ASSERT_TRUE(std::fabs(s.at(i, j) - sum) <= bound(magnitude, d))
          << m << "x" << n << "x" << d << " at " << i << "," << j;
      float alone = kNan;
      run(1, 1, d, q.row(i), q.ld, &rows.pointers[j], &alone, 1);
      ASSERT_EQ(bits(alone), bits(s.at(i, j))) << m << "x" << n << "x" << d << " at " << i << "," << j;
    }
    for (int j = n; j < s.ld && i + 1 < m; ++j) ASSERT_TRUE(std::isnan(s.at(i, j)));
  }
}

TEST_P(Kernels, QkRows) {
  for (int m : {1, 2, 3, 4, 5, 8, 11}) {
    for (int n : {1, 2, 3, 4, 5, 17, 33}) {
      for (int d : kSizes) {
        check_qk<float, float>(rng, m, n, d, k.qk_rows_f32);
        check_qk<float, bf16_t>(rng, m, n, d, k.qk_rows_mixed);
        check_qk<float, f16_t>(rng, m, n, d, k.qk_rows_f16);
        check_qk<bf16_t, bf16_t>(rng, m, n, d, k.qk_rows_bf16);
      }
    }
  }
  check_qk<bf16_t, bf16_t>(rng, 128, 37, 576, k.qk_rows_bf16);
  check_qk<float, float>(rng, 16, 37, 576, k.qk_rows_f32);
}

template <typename P, typename W, class Run>
void check_pv(std::mt19937& rng, int m, int n, int dv, Run run) {
  Matrix<P> p(m, n, n + 3, rng);
  Rows<W> rows(n, dv, rng);
  Matrix<float> o(m, dv, dv + 2, rng);
  Matrix<float> before = o;
  run(m, n, dv, p.data.data(), p.ld, rows.pointers.data(), o.data.data(), o.ld);
  for (int i = 0; i < m; ++i) {
    for (int c = 0; c < dv; ++c) {
      double sum = before.at(i, c), magnitude = std::fabs(sum);
      for (int j = 0; j < n; ++j) {
        const double product = static_cast<double>(widen(p.at(i, j))) * rows.at(j, c);
        sum += product;
        magnitude += std::fabs(product);
      }
      ASSERT_TRUE(std::fabs(o.at(i, c) - sum) <= bound(magnitude, n))
          << m << "x" << n << "x" << dv << " at " << i << "," << c;
    }
    for (int c = dv; c < o.ld && i + 1 < m; ++c) ASSERT_TRUE(std::isnan(o.at(i, c)));
    std::vector<float> alone(before.row(i), before.row(i) + dv);
    run(1, n, dv, p.row(i), p.ld, rows.pointers.data(), alone.data(), o.ld);
    ASSERT_EQ(std::memcmp(alone.data(), o.row(i), sizeof(float) * dv), 0)
        << "row " << i << " of " << m << "x" << n << "x" << dv;
  }
}

TEST_P(Kernels, PvRows) {
  for (int m : {1, 2, 3, 4, 5, 8, 11}) {
    for (int n : {1, 2, 3, 4, 31, 32, 33, 64, 65}) {
      for (int dv : kSizes) {
        check_pv<float, float>(rng, m, n, dv, k.pv_rows_f32);
        check_pv<float, bf16_t>(rng, m, n, dv, k.pv_rows_mixed);
        check_pv<float, f16_t>(rng, m, n, dv, k.pv_rows_f16);
        check_pv<bf16_t, bf16_t>(rng, m, n, dv, k.pv_rows_bf16);
      }
    }
  }
  check_pv<bf16_t, bf16_t>(rng, 128, 70, 512, k.pv_rows_bf16);
  check_pv<float, float>(rng, 16, 70, 512, k.pv_rows_f32);
}

// Rows of codes give the bits of rows converted before.
TEST_P(Kernels, RowsOfCodes) {
  for (const attune_dtype dtype : {ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8}) {
    for (int m : {1, 2, 3, 4, 5, 9}) {
      for (int n : {1, 2, 3, 4, 5, 17, 64, 65, 67}) {
        for (int d : kSizes) {
          Matrix<bf16_t> q(m, d, d + 3, rng), p(m, n, n + 3, rng);
          std::vector<std::vector<uint8_t>> codes(n);
          std::vector<std::vector<bf16_t>> converted(n);
          std::vector<const uint8_t*> code_rows(n);
          std::vector<const bf16_t*> rows(n);
          for (int j = 0; j < n; ++j) {
            for (int c = 0; c < d; ++c) {
              uint8_t code = static_cast<uint8_t>(rng());
              if (dtype == ATTUNE_FLOAT8_E4M3 && (code & 0x7f) == 0x7f) code = 0x70;
              if (dtype == ATTUNE_FLOAT8_E5M2 && (code & 0x7c) == 0x7c) code = 0x50;
              codes[j].push_back(code);
            }
            converted[j].resize(d);
            k.to_bf16(dtype, codes[j].data(), d, converted[j].data());
            code_rows[j] = codes[j].data();
            rows[j] = converted[j].data();
          }
          Matrix<float> s(m, n, n + 2, rng), o(m, d, d + 2, rng);
          Matrix<float> s2 = s, o2 = o;
          k.qk_rows_8bit(dtype, m, n, d, q.data.data(), q.ld, code_rows.data(), s.data.data(), s.ld, {});
          k.qk_rows_bf16(m, n, d, q.data.data(), q.ld, rows.data(), s2.data.data(), s2.ld);
          k.pv_rows_8bit(dtype, m, n, d, p.data.data(), p.ld, code_rows.data(), o.data.data(), o.ld, {});
          k.pv_rows_bf16(m, n, d, p.data.data(), p.ld, rows.data(), o2.data.data(), o2.ld);
          ASSERT_EQ(std::memcmp(s.data.data(), s2.data.data(), s.data.size() * sizeof(float)), 0)
              << dtype << " " << m << "x" << n << "x" << d;
          ASSERT_EQ(std::memcmp(o.data.data(), o2.data.data(), o.data.size() * sizeof(float)), 0)
              << dtype << " " << m << "x" << n << "x" << d;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attune::cpu
