// SPDX-License-Identifier: Apache-2.0
// Where test data live. A device plugs in by implementing Memory; buffers carry guard bytes that catch writes outside
// of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attune/attune.h"

namespace attune::cases {

class Memory {
 public:
  virtual ~Memory() = default;
  virtual attune_device device() const = 0;
  // Aligned to 256 bytes. Throws std::bad_alloc.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* device, size_t bytes) = 0;
  virtual void fill(void* device, std::byte value, size_t bytes) = 0;
  // What work puts on the stream, captured: each call runs it anew and waits. Empty where the device captures nothing.
  virtual std::function<void()> captured(const std::function<void(void* stream)>& /*work*/) { return {}; }
  // Whether it can run kernels of kernels/; and runs one that takes one pointer, and waits.
  virtual bool launches() const { return false; }
  virtual void launch(const char* /*source*/, const char* /*entry*/, int64_t /*blocks*/, int64_t /*threads*/,
                      const void* /*params*/) {}
};

// The memory of the CPU backend.
Memory& host_memory();

// NaN in every float format, an invalid index in every table.
inline constexpr std::byte kPoison{0xff};

// Bytes on the host (as they were before the run) and their copy on the device, between guards.
class Buffer {
 public:
  // offset: bytes after a 256-byte boundary at which the data start, for deliberately weak alignment. filler: what the
  // bytes are at first.
  Buffer(Memory& memory, std::string name, size_t bytes, size_t offset = 0, std::byte filler = kPoison);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::string& name() const { return name_; }
  size_t size() const { return host_.size(); }
  std::byte* host() { return host_.data(); }
  const std::byte* host() const { return host_.data(); }
  void* device() { return device_; }
  bool contains(const void* p) const;

  void upload();
  std::vector<std::byte> download() const;
  // "" if the guards are as they were, else what is wrong.
  std::string check_guards() const;

 private:
  Memory& memory_;
  std::string name_;
  std::vector<std::byte> host_;
  size_t front_;                     // bytes of the front guard
  std::byte* allocation_ = nullptr;  // front guard | data | back guard
  std::byte* device_ = nullptr;
};

// Bytes on the device alone, poison at first, between guards.
class DeviceArray {
 public:
  DeviceArray(Memory& memory, std::string name, size_t bytes);
  ~DeviceArray();
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* device() const { return device_; }
  std::vector<std::byte> download() const;
  // As Buffer's.
  std::string check_guards() const;

 private:
  Memory& memory_;
  std::string name_;
  size_t bytes_;
  std::byte *allocation_, *device_;
};

}  // namespace attune::cases
