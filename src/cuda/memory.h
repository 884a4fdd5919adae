// SPDX-License-Identifier: Apache-2.0
// Owned device memory, streams, events and graphs: for tests, tools and validation. Runs use the caller's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/driver_types.h"

namespace attune::cuda {

class Stream {
 public:
  explicit Stream(int32_t device);  // does not synchronise with the NULL stream
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* handle() const { return stream_; }
  int32_t device() const { return device_; }
  void synchronize() const;

 private:
  int32_t device_;
  StreamHandle stream_ = nullptr;
};

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(int32_t device, size_t bytes);  // 0 bytes: a null pointer
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  void* data() const { return reinterpret_cast<void*>(pointer_); }
  size_t bytes() const { return bytes_; }

 private:
  int32_t device_ = 0;
  size_t bytes_ = 0;
  DevicePointer pointer_ = 0;
};

// Both enqueue a copy. Host memory is pageable, so they return once the host buffer may be used again.
void copy_to_device(const Stream& stream, void* to, const void* from, size_t bytes);
void copy_to_host(const Stream& stream, void* to, const void* from, size_t bytes);
void fill_bytes(const Stream& stream, void* to, unsigned char value, size_t bytes);

template <class T>
DeviceMemory to_device(const Stream& stream, const std::vector<T>& values) {
  DeviceMemory memory(stream.device(), values.size() * sizeof(T));
  copy_to_device(stream, memory.data(), values.data(), values.size() * sizeof(T));
  return memory;
}
template <class T>
std::vector<T> to_host(const Stream& stream, const DeviceMemory& memory) {
  std::vector<T> values(memory.bytes() / sizeof(T));
  copy_to_host(stream, values.data(), memory.data(), values.size() * sizeof(T));
  return values;
}

// Work captured from a stream, to be replayed.
class Graph {
 public:
  // body enqueues on the stream; nothing runs until replay.
  template <class Body>
  Graph(const Stream& stream, Body&& body) : device_(stream.device()) {
    begin(stream);
    try {
      body();
    } catch (...) {
      abandon(stream);
      throw;
    }
    end(stream);
  }
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay(const Stream& stream) const;

 private:
  void begin(const Stream& stream);
  void end(const Stream& stream);
  void abandon(const Stream& stream);

  int32_t device_;
  GraphExecHandle exec_ = nullptr;
};

// Device time between two points of a stream.
class Timer {
 public:
  explicit Timer(int32_t device);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(const Stream& stream);
  void stop(const Stream& stream);
  double milliseconds() const;  // waits for stop

 private:
  int32_t device_;
  EventHandle start_ = nullptr, stop_ = nullptr;
};

}  // namespace attune::cuda
