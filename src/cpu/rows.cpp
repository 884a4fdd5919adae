// SPDX-License-Identifier: Apache-2.0
#include "cpu/rows.h"

#include <cstring>

#include "core/dtype.h"
#include "cpu/kernels.h"

namespace attune::cpu {
namespace {

constexpr int64_t kChunk = 128;  // strided elements go through a buffer of this many

// Calls f with an unsigned number of so many bytes: 1, 2 or 4.
template <class F>
void with_size(int64_t size, F&& f) {
  if (size == 1) return f(uint8_t{});
  if (size == 2) return f(uint16_t{});
  f(uint32_t{});
}

template <class Element>
void gather(const std::byte* from, int64_t stride, int64_t n, Element* to) {
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(to + i, from + i * stride * static_cast<int64_t>(sizeof(Element)), sizeof(Element));
}

template <class Element>
void scatter(const Element* from, int64_t stride, int64_t n, std::byte* to) {
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(to + i * stride * static_cast<int64_t>(sizeof(Element)), from + i, sizeof(Element));
}

template <class Element, class Encode>
void encode_each(const float* from, int64_t n, std::byte* to, Encode encode) {
  for (int64_t i = 0; i < n; ++i) {
    const Element x = encode(from[i]);
    std::memcpy(to + i * static_cast<int64_t>(sizeof(Element)), &x, sizeof(Element));
  }
}

void encode_contiguous(int32_t dtype, const float* from, int64_t n, std::byte* to) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      break;
    case ATTUNE_BFLOAT16:
      kernels().to_bf16(ATTUNE_FLOAT32, from, n, reinterpret_cast<bf16_t*>(to));
      break;
    case ATTUNE_FLOAT16:
      encode_each<uint16_t>(from, n, to, float_to_half);
      break;
    case ATTUNE_FLOAT8_E4M3:
      encode_each<uint8_t>(from, n, to, float_to_e4m3);
      break;
    case ATTUNE_FLOAT8_E5M2:
      encode_each<uint8_t>(from, n, to, float_to_e5m2);
      break;
    case ATTUNE_INT8:
      encode_each<int8_t>(from, n, to, float_to_int8);
      break;
    default:
      break;
  }
}

}  // namespace

void read_elements(int32_t dtype, const std::byte* from, int64_t stride, int64_t n, float* to) {
  if (stride == 1 || n <= 1) {
    kernels().to_f32(static_cast<attune_dtype>(dtype), from, n, to);
    return;
  }
  const int64_t size = dtype_size(dtype);
  alignas(64) std::byte codes[kChunk * sizeof(float)];
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t m = std::min(kChunk, n - first);
    const std::byte* at = from + first * stride * size;
    with_size(size, [&]<class T>(T) { gather(at, stride, m, reinterpret_cast<T*>(codes)); });
    kernels().to_f32(static_cast<attune_dtype>(dtype), codes, m, to + first);
  }
}

void write_elements(int32_t dtype, std::byte* to, int64_t stride, int64_t n, const float* from) {
  if (stride == 1 || n <= 1) {
    encode_contiguous(dtype, from, n, to);
    return;
  }
  const int64_t size = dtype_size(dtype);
  alignas(64) std::byte codes[kChunk * sizeof(float)];
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t m = std::min(kChunk, n - first);
    encode_contiguous(dtype, from + first, m, codes);
    std::byte* at = to + first * stride * size;
    with_size(size, [&]<class T>(T) { scatter(reinterpret_cast<const T*>(codes), stride, m, at); });
  }
}

}  // namespace attune::cpu
