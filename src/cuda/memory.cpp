// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.h"

#include "core/status.h"
#include "cuda/device.h"

namespace attune::cuda {
namespace {

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }
StreamHandle handle(const Stream& stream) { return static_cast<StreamHandle>(stream.handle()); }

}  // namespace

Stream::Stream(int32_t device) : device_(device) {
  const ScopedContext context(device);
  check(require_driver().cuStreamCreate(&stream_, kStreamNonBlocking), "cuStreamCreate");
}

Stream::~Stream() {
  const ScopedContext context(device_, std::nothrow);
  require_driver().cuStreamDestroy(stream_);
}

void Stream::synchronize() const {
  const ScopedContext context(device_);
  check(require_driver().cuStreamSynchronize(stream_), "waiting for a stream");
}

DeviceMemory::DeviceMemory(int32_t device, size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const ScopedContext context(device);
  check(require_driver().cuMemAlloc(&pointer_, bytes), cat("allocating ", bytes, " bytes on CUDA device ", device));
}

DeviceMemory::~DeviceMemory() {
  if (pointer_ == 0) return;
  const ScopedContext context(device_, std::nothrow);
  require_driver().cuMemFree(pointer_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), bytes_(std::exchange(other.bytes_, 0)), pointer_(std::exchange(other.pointer_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(bytes_, other.bytes_);
  std::swap(pointer_, other.pointer_);
  return *this;
}

void copy_to_device(const Stream& stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const ScopedContext context(stream.device());
  check(require_driver().cuMemcpyHtoDAsync(address(to), from, bytes, handle(stream)), "copying to the device");
  stream.synchronize();
}

void copy_to_host(const Stream& stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const ScopedContext context(stream.device());
  check(require_driver().cuMemcpyDtoHAsync(to, address(from), bytes, handle(stream)), "copying to the host");
  stream.synchronize();
}

void fill_bytes(const Stream& stream, void* to, unsigned char value, size_t bytes) {
  if (bytes == 0) return;
  const ScopedContext context(stream.device());
  check(require_driver().cuMemsetD8Async(address(to), value, bytes, handle(stream)), "cuMemsetD8Async");
}

void Graph::begin(const Stream& stream) {
  const ScopedContext context(device_);
  check(require_driver().cuStreamBeginCapture(handle(stream), kCaptureThreadLocal), "cuStreamBeginCapture");
}

void Graph::end(const Stream& stream) {
  const ScopedContext context(device_);
  const Driver& d = require_driver();
  GraphHandle graph = nullptr;
  check(d.cuStreamEndCapture(handle(stream), &graph), "cuStreamEndCapture");
  const Result result = d.cuGraphInstantiateWithFlags(&exec_, graph, 0);
  d.cuGraphDestroy(graph);
  check(result, "cuGraphInstantiateWithFlags");
}

void Graph::abandon(const Stream& stream) {
  const ScopedContext context(device_, std::nothrow);
  GraphHandle graph = nullptr;
  require_driver().cuStreamEndCapture(handle(stream), &graph);
  if (graph != nullptr) require_driver().cuGraphDestroy(graph);
}

Graph::~Graph() {
  const ScopedContext context(device_, std::nothrow);
  require_driver().cuGraphExecDestroy(exec_);
}

void Graph::replay(const Stream& stream) const {
  const ScopedContext context(device_);
  check(require_driver().cuGraphLaunch(exec_, handle(stream)), "cuGraphLaunch");
}

Timer::Timer(int32_t device) : device_(device) {
  const ScopedContext context(device);
  const Driver& d = require_driver();
  check(d.cuEventCreate(&start_, 0), "cuEventCreate");
  const Result result = d.cuEventCreate(&stop_, 0);
  if (result != kSuccess) d.cuEventDestroy(start_);
  check(result, "cuEventCreate");
}

Timer::~Timer() {
  const ScopedContext context(device_, std::nothrow);
  require_driver().cuEventDestroy(start_);
  require_driver().cuEventDestroy(stop_);
}

void Timer::start(const Stream& stream) {
  const ScopedContext context(device_);
  check(require_driver().cuEventRecord(start_, handle(stream)), "cuEventRecord");
}

void Timer::stop(const Stream& stream) {
  const ScopedContext context(device_);
  check(require_driver().cuEventRecord(stop_, handle(stream)), "cuEventRecord");
}

double Timer::milliseconds() const {
  const ScopedContext context(device_);
  check(require_driver().cuEventSynchronize(stop_), "cuEventSynchronize");
  float elapsed = 0;
  check(require_driver().cuEventElapsedTime(&elapsed, start_, stop_), "cuEventElapsedTime");
  return elapsed;
}

}  // namespace attune::cuda
