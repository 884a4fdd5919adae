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
  // Calls each with a stream of its own, so that what they enqueue is in flight at once, and waits for it. Here: from
  // two threads, on the null stream.
  virtual void side_by_side(const std::function<void(void* stream)>& one,
                            const std::function<void(void* stream)>& other);
  // Whether it can run kernels of kernels/; and runs one that takes one pointer, and waits.
  virtual bool launches() const { return false; }
  virtual void launch(const char* /*source*/, const char* /*entry*/, int64_t /*blocks*/, int64_t /*threads*/,
                      const void* /*params*/) {}
  // Bytes that it could still allocate, of all that there are; 0 where that is not known.
  struct Room {
    size_t free = 0, total = 0;
  };
  virtual Room room() const { return {}; }
  // "", or what was overwritten far from all buffers, where the memory looks after that (far_guards.h).
  virtual std::string check_far() { return ""; }
};

// Another memory with something about it that is its own.
class MemoryOver : public Memory {
 public:
  explicit MemoryOver(Memory& below) : below_(below) {}
  attune_device device() const override { return below_.device(); }
  void* allocate(size_t bytes) override { return below_.allocate(bytes); }
  void release(void* data) noexcept override { below_.release(data); }
  void upload(void* device, const void* host, size_t bytes) override { below_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { below_.download(host, device, bytes); }
  void fill(void* device, std::byte value, size_t bytes) override { below_.fill(device, value, bytes); }
  std::function<void()> captured(const std::function<void(void* stream)>& work) override {
    return below_.captured(work);
  }
  void side_by_side(const std::function<void(void* stream)>& one,
                    const std::function<void(void* stream)>& other) override {
    below_.side_by_side(one, other);
  }
  bool launches() const override { return below_.launches(); }
  void launch(const char* source, const char* entry, int64_t blocks, int64_t threads, const void* params) override {
    below_.launch(source, entry, blocks, threads, params);
  }
  Room room() const override { return below_.room(); }
  std::string check_far() override { return below_.check_far(); }

 protected:
  Memory& below_;
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
