// SPDX-License-Identifier: Apache-2.0
// Tensor maps describe an array in device memory to the tensor memory accelerator (TMA). Made on the host
// without a device call, so they may be made on every run. In the kernel a copy must start at a multiple of 16 bytes on
// axis 0, and may start outside the shape; elsewhere the H200 stops with an illegal instruction.
#pragma once

#include <cstdint>

#include "cuda/driver_types.h"

namespace attune::cuda {

inline constexpr int kMaxTensorMapRank = 5;

struct TensorMapDesc {
  void* data = nullptr;  // device pointer, 16-byte aligned
  TensorMapType type = TensorMapType::kUint8;
  int32_t rank = 0;                               // 1 to 5
  uint64_t shape[kMaxTensorMapRank] = {};         // elements, innermost first
  uint64_t stride_bytes[kMaxTensorMapRank] = {};  // of axes 1.. (axis 0 is dense, entry 0 is not read); multiples of 16
  uint32_t box[kMaxTensorMapRank] = {};  // elements of one copy; 1 to 256; box[0] * element size a multiple of 16
  TensorMapSwizzle swizzle = TensorMapSwizzle::kNone;  // the box's inner row may not be wider than the swizzle
  TensorMapPromotion promotion = TensorMapPromotion::k128B;
};

int64_t element_size(TensorMapType type);

// Checks the description, naming the field that breaks a rule (ATTUNE_INVALID_ARGUMENT), and encodes it for a device.
// Elements outside the shape read as zero.
TensorMap make_tensor_map(const TensorMapDesc& desc, int32_t device);
// For a kernel parameter that some kernels do not use: rank 0 gives `other`.
inline TensorMap make_tensor_map(const TensorMapDesc& desc, int32_t device, const TensorMap& other) {
  return desc.rank == 0 ? other : make_tensor_map(desc, device);
}
// The checks alone.
void check_tensor_map(const TensorMapDesc& desc);

}  // namespace attune::cuda
