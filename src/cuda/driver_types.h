// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver's ABI that this library uses, declared here so that it builds without cuda.h.
// Numbers and layouts are those of the driver API 12.4; the static_asserts below hold what the driver reads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attune::cuda {

using Result = int32_t;   // CUresult
using Ordinal = int32_t;  // CUdevice
using DevicePointer = uint64_t;
using Context = struct ContextOpaque*;
using Function = struct FunctionOpaque*;  // a kernel loaded into one context
using Library = struct LibraryOpaque*;    // code that belongs to no context
using LibraryKernel = struct LibraryKernelOpaque*;
using StreamHandle = struct StreamOpaque*;
using EventHandle = struct EventOpaque*;
using GraphHandle = struct GraphOpaque*;
using GraphExecHandle = struct GraphExecOpaque*;

enum : Result {
  kSuccess = 0,
  kErrorInvalidValue = 1,
  kErrorOutOfMemory = 2,
  kErrorNoDevice = 100,
  kErrorInvalidImage = 200,
  kErrorInvalidContext = 201,
  kErrorNoBinaryForGpu = 209,
  kErrorUnsupportedPtxVersion = 222,
  kErrorInvalidSource = 300,
  kErrorNotFound = 500,
  kErrorNotReady = 600,
  kErrorNotSupported = 801
};

enum class DeviceAttribute : int32_t {
  kMultiprocessorCount = 16,
  kPciBusId = 33,
  kPciDeviceId = 34,
  kL2CacheSize = 38,
  kPciDomainId = 50,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kPageableMemoryAccess = 88,
  kMaxSharedMemoryPerBlockOptin = 97,
  kReservedSharedMemoryPerBlock = 111
};

enum class FunctionAttribute : int32_t {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kLocalSizeBytes = 3,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14
};

enum class PointerAttribute : int32_t { kContext = 1, kMemoryType = 2, kDeviceOrdinal = 9 };
enum class MemoryType : uint32_t { kHost = 1, kDevice = 2 };

enum class LaunchAttributeId : int32_t { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

struct LaunchAttribute {
  LaunchAttributeId id;
  uint32_t padding;
  union Value {
    uint64_t align;
    uint32_t cluster[3];
    int32_t programmatic;
    unsigned char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);

struct DriverLaunchConfig {  // CUlaunchConfig
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};
static_assert(offsetof(DriverLaunchConfig, stream) == 32 && sizeof(DriverLaunchConfig) == 56);

enum class TensorMapType : int32_t {
  kUint8 = 0,
  kUint16 = 1,
  kUint32 = 2,
  kInt32 = 3,
  kFloat16 = 6,
  kFloat32 = 7,
  kBfloat16 = 9
};
enum class TensorMapSwizzle : int32_t { kNone = 0, k32B = 1, k64B = 2, k128B = 3 };
enum class TensorMapPromotion : int32_t { kNone = 0, k64B = 1, k128B = 2, k256B = 3 };

// What a TMA instruction reads; a kernel parameter of its own (const __grid_constant__).
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

inline constexpr uint32_t kStreamNonBlocking = 1;
inline constexpr int32_t kCaptureThreadLocal = 1;

}  // namespace attune::cuda
