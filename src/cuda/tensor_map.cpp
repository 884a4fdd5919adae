// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_map.h"

#include "core/status.h"
#include "cuda/device.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kMaxExtent = uint64_t{1} << 32;
constexpr uint64_t kMaxStride = uint64_t{1} << 40;
constexpr uint32_t kMaxBox = 256;
constexpr uint32_t kAlignment = 16;

// Of an inner row.
uint64_t swizzle_bytes(TensorMapSwizzle swizzle) {
  return swizzle == TensorMapSwizzle::kNone ? UINT64_MAX : uint64_t{16} << static_cast<int>(swizzle);
}

}  // namespace

int64_t element_size(TensorMapType type) {
  switch (type) {
    case TensorMapType::kUint8:
      return 1;
    case TensorMapType::kUint16:
    case TensorMapType::kFloat16:
    case TensorMapType::kBfloat16:
      return 2;
    default:
      return 4;
  }
}

void check_tensor_map(const TensorMapDesc& t) {
  require(t.rank >= 1 && t.rank <= kMaxTensorMapRank, "tensor map: rank is ", t.rank, "; it must be 1 to ",
          kMaxTensorMapRank);
  require(t.data != nullptr, "tensor map: data is null");
  require(reinterpret_cast<uintptr_t>(t.data) % kAlignment == 0, "tensor map: data is not aligned to 16 bytes");
  const uint64_t row_bytes = t.box[0] * static_cast<uint64_t>(element_size(t.type));
  for (int i = 0; i < t.rank; ++i) {
    require(t.shape[i] >= 1 && t.shape[i] <= kMaxExtent, "tensor map: shape[", i, "] is ", t.shape[i],
            "; it must be 1 to 2^32");
    require(t.box[i] >= 1 && t.box[i] <= kMaxBox, "tensor map: box[", i, "] is ", t.box[i], "; it must be 1 to ",
            kMaxBox);
    if (i == 0) continue;
    require(t.stride_bytes[i] % kAlignment == 0 && t.stride_bytes[i] < kMaxStride, "tensor map: stride_bytes[", i,
            "] is ", t.stride_bytes[i], "; it must be a multiple of 16 under 2^40");
  }
  require(row_bytes % kAlignment == 0, "tensor map: box[0] is ", t.box[0], ", ", row_bytes,
          " bytes; it must be a multiple of 16 bytes");
  require(row_bytes <= swizzle_bytes(t.swizzle), "tensor map: box[0] is ", row_bytes, " bytes, wider than the swizzle");
}

TensorMap make_tensor_map(const TensorMapDesc& t, int32_t device) {
  check_tensor_map(t);
  const ScopedContext context(device);  // the driver refuses to encode without one
  constexpr uint32_t kDense[kMaxTensorMapRank] = {1, 1, 1, 1, 1};
  alignas(128) TensorMap map;  // drivers of CUDA 13 and later declare it so
  check(require_driver().cuTensorMapEncodeTiled(&map, t.type, static_cast<uint32_t>(t.rank), t.data, t.shape,
                                                t.stride_bytes + 1, t.box, kDense, 0, t.swizzle, t.promotion, 0),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace attune::cuda
