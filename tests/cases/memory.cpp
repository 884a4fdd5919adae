// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

// Under AddressSanitizer the guards of host buffers also catch reads.
#if defined(__SANITIZE_ADDRESS__)
#define ATTUNE_CASES_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ATTUNE_CASES_ASAN 1
#endif
#endif
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

}  // namespace

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
  const std::vector<std::byte> guard(total, kGuardByte);
  memory_.upload(allocation_, guard.data(), total);
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
  const bool on_host = memory_.device().type == ATTUNE_DEVICE_CPU;
  std::string wrong;
  const auto check = [&](const std::byte* guard, size_t bytes, const char* side) {
    if (on_host) allow(guard, bytes);
    std::vector<std::byte> copy(bytes);
    memory_.download(copy.data(), guard, bytes);
    if (on_host) forbid(guard, bytes);
    const auto changed = std::find_if(copy.begin(), copy.end(), [](std::byte b) { return b != kGuardByte; });
    if (changed != copy.end() && wrong.empty()) {
      wrong = "byte " + std::to_string(changed - copy.begin()) + " of the guard " + side + " \"" + name_ +
              "\" was overwritten";
    }
  };
  check(allocation_, front_, "before");
  check(device_ + host_.size(), kGuard, "after");
  return wrong;
}

}  // namespace attune::cases
