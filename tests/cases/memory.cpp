// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "sanitizer.h"

// Under AddressSanitizer the guards of host buffers also catch reads.
#ifdef ATTUNE_CASES_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace attune::cases {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kGuard = 256;
constexpr std::byte kGuardByte = kPoison;

class HostMemory final : public Memory {
 public:
  attune_device device() const override { return {ATTUNE_DEVICE_CPU, 0}; }
  void* allocate(size_t bytes) override {
    void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }
  void release(void* data) noexcept override { std::free(data); }
  void upload(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void download(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void fill(void* device, std::byte value, size_t bytes) override {
    if (bytes > 0) std::memset(device, std::to_integer<int>(value), bytes);
  }
};

void forbid([[maybe_unused]] const std::byte* p, [[maybe_unused]] size_t bytes) {
#ifdef ATTUNE_CASES_ASAN
  ASAN_POISON_MEMORY_REGION(p, bytes);
#endif
}

void allow([[maybe_unused]] const std::byte* p, [[maybe_unused]] size_t bytes) {
#ifdef ATTUNE_CASES_ASAN
  ASAN_UNPOISON_MEMORY_REGION(p, bytes);
#endif
}

// What is wrong with one guard of a buffer of that name, or "".
std::string guard_failure(Memory& memory, const std::string& name, const char* side, const std::byte* guard,
                          size_t bytes) {
  const bool on_host = memory.device().type == ATTUNE_DEVICE_CPU;
  if (on_host) allow(guard, bytes);
  std::vector<std::byte> copy(bytes);
  memory.download(copy.data(), guard, bytes);
  if (on_host) forbid(guard, bytes);
  const auto changed = std::find_if(copy.begin(), copy.end(), [](std::byte b) { return b != kGuardByte; });
  if (changed == copy.end()) return "";
  return "byte " + std::to_string(changed - copy.begin()) + " of the guard " + side + " \"" + name +
         "\" was overwritten";
}

}  // namespace

void Memory::side_by_side(const std::function<void(void* stream)>& one,
                          const std::function<void(void* stream)>& other) {
  std::exception_ptr fault;
  std::thread thread([&] {
    try {
      other(nullptr);
    } catch (...) {
      fault = std::current_exception();
    }
  });
  try {
    one(nullptr);
  } catch (...) {
    thread.join();
    throw;
  }
  thread.join();
  if (fault) std::rethrow_exception(fault);
}

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

Buffer::Buffer(Memory& memory, std::string name, size_t bytes, size_t offset, std::byte filler)
    : memory_(memory), name_(std::move(name)), front_(kGuard + offset) {
  host_.reserve(std::max<size_t>(bytes, 1));  // an address of its own even when it is empty
  host_.assign(bytes, filler);
  const size_t total = front_ + bytes + kGuard;
  allocation_ = static_cast<std::byte*>(memory_.allocate(total));
  device_ = allocation_ + front_;
  memory_.fill(allocation_, kGuardByte, total);
  if (memory_.device().type == ATTUNE_DEVICE_CPU) {
    forbid(allocation_, front_);
    forbid(device_ + bytes, kGuard);
  }
}

Buffer::~Buffer() {
  allow(allocation_, front_ + host_.size() + kGuard);
  memory_.release(allocation_);
}

bool Buffer::contains(const void* p) const {
  // Not one past the end: the heap may put the next buffer right there. An empty buffer holds its own address.
  const auto* byte = static_cast<const std::byte*>(p);
  return byte >= host_.data() && byte < host_.data() + std::max<size_t>(host_.size(), 1);
}

void Buffer::upload() { memory_.upload(device_, host_.data(), host_.size()); }

std::vector<std::byte> Buffer::download() const {
  std::vector<std::byte> bytes(host_.size());
  memory_.download(bytes.data(), device_, bytes.size());
  return bytes;
}

std::string Buffer::check_guards() const {
  std::string wrong = guard_failure(memory_, name_, "before", allocation_, front_);
  return !wrong.empty() ? wrong : guard_failure(memory_, name_, "after", device_ + host_.size(), kGuard);
}

DeviceArray::DeviceArray(Memory& memory, std::string name, size_t bytes)
    : memory_(memory),
      name_(std::move(name)),
      bytes_(bytes),
      allocation_(static_cast<std::byte*>(memory.allocate(kGuard + bytes + kGuard))),
      device_(allocation_ + kGuard) {
  memory_.fill(allocation_, kGuardByte, kGuard + bytes + kGuard);
}

DeviceArray::~DeviceArray() { memory_.release(allocation_); }

std::vector<std::byte> DeviceArray::download() const {
  std::vector<std::byte> bytes(bytes_);
  memory_.download(bytes.data(), device_, bytes.size());
  return bytes;
}

std::string DeviceArray::check_guards() const {
  std::string wrong = guard_failure(memory_, name_, "before", allocation_, kGuard);
  return !wrong.empty() ? wrong : guard_failure(memory_, name_, "after", device_ + bytes_, kGuard);
}

}  // namespace attune::cases
