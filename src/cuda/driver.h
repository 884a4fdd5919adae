// SPDX-License-Identifier: Apache-2.0
// libcuda, opened at run time. Functions are looked up with the ABI of CUDA 12.4, whatever the driver's own version is.
#pragma once

#include <string>

#include "cuda/driver_types.h"

namespace attune::cuda {

// The oldest driver that works: the first with every call below, and with programmatic launches inside captured graphs.
inline constexpr int kMinDriverVersion = 12040;

// Every function of the table: name, parameters. The result is always CUresult.
#define ATTUNE_CUDA_DRIVER_FUNCTIONS(X)                                                                              \
  X(cuInit, (uint32_t flags))                                                                                        \
  X(cuDriverGetVersion, (int32_t * version))                                                                         \
  X(cuGetErrorName, (Result error, const char** name))                                                               \
  X(cuGetErrorString, (Result error, const char** text))                                                             \
  X(cuDeviceGetCount, (int32_t * count))                                                                             \
  X(cuDeviceGet, (Ordinal * device, int32_t index))                                                                  \
  X(cuDeviceGetName, (char* name, int32_t capacity, Ordinal device))                                                 \
  X(cuDeviceTotalMem, (size_t * bytes, Ordinal device))                                                              \
  X(cuDeviceGetAttribute, (int32_t * value, DeviceAttribute attribute, Ordinal device))                              \
  X(cuDevicePrimaryCtxRetain, (Context * context, Ordinal device))                                                   \
  X(cuCtxGetCurrent, (Context * context))                                                                            \
  X(cuCtxPushCurrent, (Context context))                                                                             \
  X(cuCtxPopCurrent, (Context * context))                                                                            \
  X(cuCtxSynchronize, ())                                                                                            \
  X(cuLibraryLoadData, (Library * library, const void* code, void* jit_options, void** jit_values, uint32_t num_jit, \
                        void* options, void** values, uint32_t num_options))                                         \
  X(cuLibraryUnload, (Library library))                                                                              \
  X(cuLibraryGetKernel, (LibraryKernel * kernel, Library library, const char* name))                                 \
  X(cuKernelGetFunction, (Function * function, LibraryKernel kernel))                                                \
  X(cuKernelSetAttribute, (FunctionAttribute attribute, int32_t value, LibraryKernel kernel, Ordinal device))        \
  X(cuFuncGetAttribute, (int32_t * value, FunctionAttribute attribute, Function function))                           \
  X(cuFuncLoad, (Function function))                                                                                 \
  X(cuLaunchKernelEx, (const DriverLaunchConfig* config, Function function, void** args, void** extra))              \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                                     \
    (int32_t * blocks, Function function, int32_t block_size, size_t shared_bytes))                                  \
  X(cuOccupancyMaxActiveClusters, (int32_t * clusters, Function function, const DriverLaunchConfig* config))         \
  X(cuTensorMapEncodeTiled,                                                                                          \
    (TensorMap * map, TensorMapType type, uint32_t rank, void* address, const uint64_t* shape,                       \
     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int32_t interleave,              \
     TensorMapSwizzle swizzle, TensorMapPromotion promotion, int32_t fill))                                          \
  X(cuPointerGetAttribute, (void* value, PointerAttribute attribute, DevicePointer pointer))                         \
  X(cuMemGetInfo, (size_t * free_bytes, size_t * total_bytes))                                                       \
  X(cuMemAlloc, (DevicePointer * pointer, size_t bytes))                                                             \
  X(cuMemFree, (DevicePointer pointer))                                                                              \
  X(cuMemHostAlloc, (void** pointer, size_t bytes, uint32_t flags))                                                  \
  X(cuMemFreeHost, (void* pointer))                                                                                  \
  X(cuMemcpyHtoDAsync, (DevicePointer to, const void* from, size_t bytes, StreamHandle stream))                      \
  X(cuMemcpyDtoHAsync, (void* to, DevicePointer from, size_t bytes, StreamHandle stream))                            \
  X(cuMemcpyDtoDAsync, (DevicePointer to, DevicePointer from, size_t bytes, StreamHandle stream))                    \
  X(cuMemsetD8Async, (DevicePointer to, unsigned char value, size_t count, StreamHandle stream))                     \
  X(cuMemsetD32Async, (DevicePointer to, uint32_t value, size_t count, StreamHandle stream))                         \
  X(cuStreamCreate, (StreamHandle * stream, uint32_t flags))                                                         \
  X(cuStreamDestroy, (StreamHandle stream))                                                                          \
  X(cuStreamSynchronize, (StreamHandle stream))                                                                      \
  X(cuStreamWaitEvent, (StreamHandle stream, EventHandle event, uint32_t flags))                                     \
  X(cuStreamBeginCapture, (StreamHandle stream, int32_t mode))                                                       \
  X(cuStreamEndCapture, (StreamHandle stream, GraphHandle * graph))                                                  \
  X(cuGraphInstantiateWithFlags, (GraphExecHandle * exec, GraphHandle graph, unsigned long long flags))              \
  X(cuGraphLaunch, (GraphExecHandle exec, StreamHandle stream))                                                      \
  X(cuGraphExecDestroy, (GraphExecHandle exec))                                                                      \
  X(cuGraphDestroy, (GraphHandle graph))                                                                             \
  X(cuEventCreate, (EventHandle * event, uint32_t flags))                                                            \
  X(cuEventDestroy, (EventHandle event))                                                                             \
  X(cuEventRecord, (EventHandle event, StreamHandle stream))                                                         \
  X(cuEventSynchronize, (EventHandle event))                                                                         \
  X(cuEventElapsedTime, (float* milliseconds, EventHandle start, EventHandle end))

struct Driver {
#define ATTUNE_CUDA_DECLARE(name, parameters) Result(*name) parameters;
  ATTUNE_CUDA_DRIVER_FUNCTIONS(ATTUNE_CUDA_DECLARE)
#undef ATTUNE_CUDA_DECLARE
  int version;  // newest CUDA that the driver supports, e.g. 12040
};

// The initialised driver; null when there is none that works, with one sentence in *why (which may be null). Opened
// once.
const Driver* driver(std::string* why);
// The same, or Failure(ATTUNE_DEVICE_ERROR) with that sentence.
const Driver& require_driver();

// Whether there is a driver that does not work, for another reason than that it finds no GPU.
bool driver_fails();

// Throws Failure (ATTUNE_OUT_OF_MEMORY or ATTUNE_DEVICE_ERROR) unless result is success. what: "cuMemAlloc of 12
// bytes".
void check(Result result, const char* what);
void check(Result result, const std::string& what);
// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string error_text(const Driver& driver, Result result);

// "12.4", of a number as the driver has it.
std::string version_text(int version);

// For driver() and its tests: fills the table with what find(name, version) returns, then initialises. False: *why says
// why.
using FindFunction = void* (*)(const char* name, int version);
bool load_driver(FindFunction find, Driver* table, std::string* why);

}  // namespace attune::cuda
