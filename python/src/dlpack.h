// SPDX-License-Identifier: Apache-2.0
// The ABI of DLPack 1.x, as far as this package reads it: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace attune::python::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 12
};

constexpr bool is_float(uint8_t code) { return code != kInt && code != kUInt && code != kBool; }

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};

// Capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major, minor;
};

// Capsule "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};
inline constexpr uint64_t kFlagReadOnly = 1;

// Capsule "dlpack_exchange_api", an attribute of the array's type: views without a call into Python.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  // A new array of the prototype's dtype, shape and device, for work on the current stream. Not 0: it has told why.
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** made, void* context,
                  void (*tell)(void* context, const char* kind, const char* message));
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* view);  // may be null; the view lives as long as the object
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace attune::python::dlpack
