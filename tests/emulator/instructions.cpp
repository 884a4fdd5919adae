// SPDX-License-Identifier: Apache-2.0
// The instructions of whole warps, and the TMA's copies, on the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/dtype.h"
#include "emulator/shadow.h"

namespace attune::emulator {
namespace {

constexpr unsigned kLanes = 32, kChunk = 16;  // bytes that swizzling leaves together
constexpr int kRows = 16, kMostSteps = 32, kMostColumns = 256;

// Where a byte lies whose address would be this without swizzling; bits: as TensorMap has them.
unsigned swizzled(unsigned address, unsigned bits) { return address ^ (address >> 3 & bits); }

// Bytes of the block's shared memory.
unsigned char* shared_bytes(unsigned address, unsigned count) {
  const unsigned at = address - kSharedBase;
  if (at > kSharedBytes || kSharedBytes - at < count) throw std::runtime_error("an operand lies outside shared memory");
  return shared_memory() + at;
}

// The same, read by a product.
const unsigned char* operand_bytes(unsigned address, unsigned count) {
  const unsigned char* const bytes = shared_bytes(address, count);
  if (Shadow* const shadow = g_block->cluster->shadow.get(); shadow != nullptr) shadow->read_by_product(bytes, count);
  return bytes;
}

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
// A GPU's NaN is positive, a CPU's often not; kernels take maxima of the bits.
float as_on_device(float x) { return std::isnan(x) ? as_float(0x7fffffff) : x; }

template <size_t kCount, class Decode>
std::array<float, kCount> all_numbers(Decode decode) {
  std::array<float, kCount> numbers;
  for (uint32_t bits = 0; bits < kCount; ++bits) numbers[bits] = decode(bits);
  return numbers;
}

// Of a word: four codes, two 16-bit elements, or one number.
void decode(const void* from, unsigned words, Format format, float* to) {
  for (unsigned i = 0; i < words; ++i) {
    uint32_t word;
    std::memcpy(&word, static_cast<const char*>(from) + 4 * i, 4);
    switch (format) {
      case Format::kBf16:
        *to++ = as_float(word << 16), *to++ = as_float(word & 0xffff0000);
        break;
      case Format::kF16:
        *to++ = from_half(static_cast<uint16_t>(word)), *to++ = from_half(static_cast<uint16_t>(word >> 16));
        break;
      case Format::kE4m3:
        for (int byte = 0; byte < 4; ++byte) *to++ = from_e4m3(static_cast<uint8_t>(word >> 8 * byte));
        break;
      case Format::kTf32:
        *to++ = as_float(word & 0xffffe000);
        break;
    }
  }
}

// The fields of an operand's descriptor (kernels/ptx/descriptor.cuh).
struct Operand {
  unsigned start, leading, strided, layout;
  explicit Operand(uint64_t d)
      : start(static_cast<unsigned>(d & 0x3fff) << 4),
        leading(static_cast<unsigned>(d >> 16 & 0x3fff) << 4),
        strided(static_cast<unsigned>(d >> 32 & 0x3fff) << 4),
        layout(static_cast<unsigned>(d >> 62)) {}
  // 32 bytes along K of a row are two chunks.
  unsigned chunk_along_k(unsigned row, unsigned chunk) const {
    const unsigned rows = start + row / 8 * strided;
    switch (layout) {
      case 0:  // 8 x 16 bytes, `leading` apart along K
        return rows + chunk * leading + row % 8 * 16;
      case 1:
        return swizzled(rows + row % 8 * 128 + chunk * kChunk, 0x70);
      case 3:
        return swizzled(rows + row % 8 * 32 + chunk * kChunk, 0x10);
      default:
        throw std::runtime_error("the emulator has no descriptors swizzled by 64 bytes");
    }
  }
  void row_along_k(unsigned row, Format format, float* to) const {
    for (unsigned chunk = 0; chunk < 2; ++chunk)
      decode(operand_bytes(chunk_along_k(row, chunk), kChunk), 4, format,
             to + chunk * (format == Format::kE4m3 ? 16 : 8));
  }
  // Eight 16-bit elements along N, from n on; of a, along M.
  void columns(unsigned k, unsigned n, Format format, float* to) const {
    if (layout != 1) throw std::runtime_error("the emulator's operands along M and N are swizzled by 128 bytes");
    const unsigned at = start + n / 64 * leading + n % 64 * 2 + k / 8 * strided + k % 8 * 128;
    decode(operand_bytes(swizzled(at, 0x70), kChunk), 4, format, to);
  }
};

// sums [16, n] = a [16, steps] b [steps, n], each sum from the first step on; n: a multiple of 8.
void multiply_tile(const float (&a)[kRows][kMostSteps], const float (&b)[kMostSteps][kMostColumns], int steps, int n,
                   float (&sums)[kRows][kMostColumns]) {
  typedef float Four __attribute__((vector_size(16)));
  constexpr int kTogether = 2;  // rows; with two fours of columns
  for (int column = 0; column < n; column += 8) {
    for (int row = 0; row < kRows; row += kTogether) {
      Four sum[kTogether][2] = {};
      for (int k = 0; k < steps; ++k) {
        Four x[2];
        std::memcpy(x, &b[k][column], sizeof(x));
        for (int r = 0; r < kTogether; ++r) {
          sum[r][0] += a[row + r][k] * x[0];
          sum[r][1] += a[row + r][k] * x[1];
        }
      }
      for (int r = 0; r < kTogether; ++r) std::memcpy(&sums[row + r][column], sum[r], sizeof(sum[r]));
    }
  }
}

// a in registers: lane 4 g + t has in register i of row g + 8 (i % 2) the t-th word of half i / 2 of K.
template <class Lane>
void decode_fragment(const unsigned* (*registers)(const Lane&), const Lane* const (&lanes)[kLanes], Format format,
                     float (&a)[kRows][kMostSteps]) {
  const int of_word = format == Format::kE4m3 ? 4 : format == Format::kTf32 ? 1 : 2, half = 4 * of_word;
  for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
    for (int i = 0; i < 4; ++i)
      decode(registers(*lanes[lane]) + i, 1, format, &a[lane / 4 + 8 * (i % 2)][i / 2 * half + lane % 4 * of_word]);
  }
}

template <class Lane>
void take_lanes(void* const* from, const Lane* (&lanes)[kLanes]) {
  for (unsigned i = 0; i < kLanes; ++i) lanes[i] = static_cast<const Lane*>(from[i]);
}

// Shared by all: only one thread of the program emulates.
float g_a[kRows][kMostSteps], g_b[kMostSteps][kMostColumns], g_sums[kRows][kMostColumns];

void multiply_warp(void* const* all) {
  const ProductLane* lanes[kLanes];
  take_lanes(all, lanes);
  const ProductLane& first = *lanes[0];
  for (const ProductLane* lane : lanes) {
    if (lane->a != first.a || lane->b != first.b || lane->n != first.n || lane->format != first.format ||
        (lane->a_registers == nullptr) != (first.a_registers == nullptr) ||
        (lane->accumulate != 0) != (first.accumulate != 0))
      throw std::runtime_error("the lanes of a warp have different products");
  }
  if (Shadow* const shadow = g_block->cluster->shadow.get(); shadow != nullptr) {
    for (unsigned i = 0; i < kLanes; ++i) shadow->begin_product(i, lanes[i]->d, static_cast<size_t>(first.n) * 2);
  }
  const int steps = first.format == Format::kE4m3 ? 32 : 16;
  const unsigned n = static_cast<unsigned>(first.n);
  if (first.a_registers != nullptr) {
    decode_fragment<ProductLane>([](const ProductLane& lane) { return lane.a_registers; }, lanes, first.format, g_a);
  } else {
    const unsigned row = g_running.thread.x / 32 % 4 * kRows;
    const Operand a_rows(first.a);
    // The instruction is the whole group's: any of its warps may read any row.
    for (unsigned k = 0; first.a_along_m && k < static_cast<unsigned>(steps); ++k) {
      float of_k[4 * kRows];
      for (unsigned m = 0; m < 4 * kRows; m += 8) a_rows.columns(k, m, first.format, of_k + m);
      for (unsigned r = 0; r < kRows; ++r) g_a[r][k] = of_k[row + r];
    }
    for (unsigned r = 0; !first.a_along_m && r < kRows; ++r) a_rows.row_along_k(row + r, first.format, g_a[r]);
    for (unsigned chunk = 0; g_block->cluster->shadow != nullptr && !first.a_along_m && chunk < 2 * 4 * kRows; ++chunk)
      operand_bytes(a_rows.chunk_along_k(chunk / 2, chunk % 2), kChunk);
  }
  const Operand b(first.b);
  if (first.b_along_n) {
    for (unsigned k = 0; k < static_cast<unsigned>(steps); ++k) {
      for (unsigned column = 0; column < n; column += 8) b.columns(k, column, first.format, &g_b[k][column]);
    }
  } else {
    for (unsigned column = 0; column < n; ++column) {
      float row[kMostSteps];
      b.row_along_k(column, first.format, row);
      for (int k = 0; k < steps; ++k) g_b[k][column] = row[k];
    }
  }
  multiply_tile(g_a, g_b, steps, first.n, g_sums);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    float* d = lanes[lane]->d;
    for (unsigned j = 0; j < n / 8; ++j) {
      for (unsigned i = 0; i < 4; ++i) {
        const float sum = g_sums[lane / 4 + 8 * (i / 2)][8 * j + 2 * (lane % 4) + i % 2];
        float& to = d[4 * j + i];
        to = as_on_device(first.accumulate != 0 ? to + sum : sum);
      }
    }
  }
}

// x, which has more bits, rounded towards zero, as the tensor cores round their sums.
float round_to_zero(double x) {
  const float nearest = static_cast<float>(x);
  return std::fabs(nearest) > std::fabs(x) ? std::nextafterf(nearest, 0.0f) : nearest;
}

// The products of TF32, whose users count on fp32's bits: sums are rounded as a GPU does it.
void add_products_of_tf32(const FragmentLane* const (&lanes)[kLanes]) {
  constexpr unsigned kSteps = 8;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned i = 0; i < 2; ++i) decode(lanes[lane]->b + i, 1, Format::kTf32, &g_b[4 * i + lane % 4][lane / 4]);
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      float& to = lanes[lane]->c[i];
      double sum = to;
      for (unsigned k = 0; k < kSteps; ++k)
        sum += static_cast<double>(g_a[lane / 4 + 8 * (i / 2)][k]) * g_b[k][2 * (lane % 4) + i % 2];
      to = as_on_device(round_to_zero(sum));
    }
  }
}

void multiply_fragments_of_warp(void* const* all) {
  const FragmentLane* lanes[kLanes];
  take_lanes(all, lanes);
  const Format format = lanes[0]->format;
  decode_fragment<FragmentLane>([](const FragmentLane& lane) { return lane.a; }, lanes, format, g_a);
  if (format == Format::kTf32) return add_products_of_tf32(lanes);
  for (unsigned lane = 0; lane < kLanes; ++lane) {  // rows 2 t and 2 t + 1 of b, and those eight further, of column g
    for (unsigned i = 0; i < 2; ++i) {
      float two[2];
      decode(lanes[lane]->b + i, 1, format, two);
      for (unsigned e = 0; e < 2; ++e) g_b[8 * i + 2 * (lane % 4) + e][lane / 4] = two[e];
    }
  }
  multiply_tile(g_a, g_b, 16, 8, g_sums);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      float& to = lanes[lane]->c[i];
      to = as_on_device(to + g_sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
    }
  }
}

// Lane 8i + r gives the address of row r of matrix i; element (r, c) of matrix i is that of lane 4r + c / 2, or
// transposed of lane 4c + r / 2.
template <class Element>
void for_matrices(void* const* all, bool stores, Element element) {
  const MatrixLane* lanes[kLanes];
  take_lanes(all, lanes);
  for (const MatrixLane* lane : lanes) {
    if (lane->count != lanes[0]->count || lane->transposed != lanes[0]->transposed)
      throw std::runtime_error("the lanes of a warp have different matrices");
  }
  for (int i = 0; i < lanes[0]->count; ++i) {
    for (unsigned row = 0; row < 8; ++row) {
      const unsigned at = lanes[8 * static_cast<unsigned>(i) + row]->shared;
      if (at % kChunk != 0) throw std::runtime_error("a row of a matrix is not aligned to 16 bytes");
      unsigned char* bytes = shared_bytes(at, kChunk);
      if (Shadow* const shadow = g_block->cluster->shadow.get(); shadow != nullptr)
        shadow->access_as(8 * static_cast<unsigned>(i) + row, bytes, kChunk, stores);
      for (unsigned column = 0; column < 8; ++column) {
        const unsigned r = lanes[0]->transposed ? column : row, c = lanes[0]->transposed ? row : column;
        element(bytes + 2 * column, reinterpret_cast<unsigned char*>(lanes[4 * r + c / 2]->d + i) + c % 2 * 2);
      }
    }
  }
}

}  // namespace

// The library's, whose conversions from few bits are too slow to be asked for every element of a product.
uint16_t to_half(float x) { return float_to_half(x); }
uint16_t to_bf16(float x) { return float_to_bf16(x); }
uint8_t to_e4m3(float x) { return float_to_e4m3(x); }
uint8_t to_e5m2(float x) { return float_to_e5m2(x); }
float from_half(uint16_t x) {
  static const auto numbers =
      all_numbers<1 << 16>([](uint32_t bits) { return half_to_float(static_cast<uint16_t>(bits)); });
  return numbers[x];
}
float from_e4m3(uint8_t x) {
  static const auto numbers = all_numbers<256>([](uint32_t bits) { return e4m3_to_float(static_cast<uint8_t>(bits)); });
  return numbers[x];
}
float from_e5m2(uint8_t x) {
  static const auto numbers = all_numbers<256>([](uint32_t bits) { return e5m2_to_float(static_cast<uint8_t>(bits)); });
  return numbers[x];
}

void multiply(ProductLane lane) { collect(&lane, &multiply_warp); }
void multiply_fragments(FragmentLane lane) { collect(&lane, &multiply_fragments_of_warp); }
void load_matrices(MatrixLane lane) {
  collect(&lane, [](void* const* lanes) {
    for_matrices(lanes, false, [](unsigned char* shared, unsigned char* of_lane) { std::memcpy(of_lane, shared, 2); });
  });
}
void store_matrices(MatrixLane lane) {
  collect(&lane, [](void* const* lanes) {
    for_matrices(lanes, true, [](unsigned char* shared, unsigned char* of_lane) { std::memcpy(shared, of_lane, 2); });
  });
}

unsigned copy_box_into(unsigned char* memory, unsigned shared, const ptx::TensorMap& map, const int (&begin)[5]) {
  const int size = map.element_size, columns = map.box[0];
  if (begin[0] * size % 16 != 0) throw std::runtime_error("a TMA copy begins at no multiple of 16 bytes");
  if (shared % 128 != 0) throw std::runtime_error("a TMA copy goes to no multiple of 128 bytes");
  const unsigned row_bytes = static_cast<unsigned>(columns * size);
  const int rows = map.box[1] * map.box[2] * map.box[3] * map.box[4];
  if (shared - kSharedBase + static_cast<unsigned>(rows) * row_bytes > kSharedBytes)
    throw std::runtime_error("a TMA copy leaves shared memory");
  // Columns inside the array.
  const int64_t first = std::min<int64_t>(std::max(0, -begin[0]), columns),
                last = std::max(first, std::min<int64_t>(columns, map.shape[0] - begin[0]));
  std::vector<unsigned char> bytes(row_bytes);
  unsigned offset = 0;
  for (int row = 0; row < rows; ++row) {
    bool inside = first < last;
    const unsigned char* from = map.data;
    for (int axis = 1, rest = row; axis < 5; rest /= map.box[axis], ++axis) {
      const int64_t at = int64_t{begin[axis]} + rest % map.box[axis];
      inside &= at >= 0 && at < map.shape[axis];
      if (inside) from += at * map.stride_bytes[axis];
    }
    std::fill(bytes.begin(), bytes.end(), static_cast<unsigned char>(0));
    if (inside)
      std::memcpy(&bytes[static_cast<size_t>(first * size)], from + (begin[0] + first) * size,
                  static_cast<size_t>((last - first) * size));
    for (unsigned done = 0; done < row_bytes;) {
      const unsigned at = shared + offset, count = std::min(kChunk - at % kChunk, row_bytes - done);
      std::memcpy(memory + (swizzled(at, map.swizzle) - kSharedBase), &bytes[done], count);
      done += count, offset += count;
    }
  }
  return offset;
}

}  // namespace attune::emulator
