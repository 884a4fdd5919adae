// SPDX-License-Identifier: Apache-2.0
// Structs of the C ABI that begin with struct_size: callers may have been compiled with an older or a newer header.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attune/attune.h"
#include "core/status.h"

namespace attune {

// Size of the struct in the first published header (0.1.0); 0: the struct has no versions. Never changes once
// published.
constexpr uint64_t first_size(const void*) { return 0; }
constexpr uint64_t first_size(const attune_attention*) { return 5792; }
constexpr uint64_t first_size(const attune_attention_backward*) { return 912; }
constexpr uint64_t first_size(const attune_qkv_prepare*) { return 3096; }
constexpr uint64_t first_size(const attune_merge*) { return 680; }
constexpr uint64_t first_size(const attune_cache_op*) { return 1496; }
constexpr uint64_t first_size(const attune_indexer*) { return 2088; }
constexpr uint64_t first_size(const attune_rope*) { return 104; }
constexpr uint64_t first_size(const attune_device_info*) { return 224; }
constexpr uint64_t first_size(const attune_kernel_info*) { return 1136; }
template <class Struct>
inline constexpr uint64_t kFirstSize = first_size(static_cast<const Struct*>(nullptr));

// No version of any struct is larger. A larger struct_size is uninitialised memory: so many bytes must not be read.
inline constexpr uint64_t kMostStructSize = 65536;

// Throws unless some version of the struct may have this size.
void check_struct_size(const char* name, uint64_t size, uint64_t first);
// Throws unless the bytes from `known` on are 0: a request of a newer caller must not be ignored in silence.
void check_unknown_bytes(const char* name, const void* given, uint64_t size, uint64_t known);

// A caller's struct in the version that this library knows: the struct itself where sizes agree, else a copy that is
// filled with 0, which means "not given" in every field.
template <class Struct>
class Known {
  static_assert(std::is_trivially_copyable_v<Struct> && kFirstSize<Struct> > 0 && sizeof(Struct) >= kFirstSize<Struct>);

 public:
  Known(const char* name, const Struct* given) {
    require(given != nullptr, name, " is null");
    uint64_t size;
    std::memcpy(&size, given, sizeof(size));  // the caller's object may be smaller than Struct
    if (size == sizeof(Struct)) {
      known_ = given;
      return;
    }
    check_struct_size(name, size, kFirstSize<Struct>);
    if (size > sizeof(Struct)) {
      check_unknown_bytes(name, given, size, sizeof(Struct));
      known_ = given;
      return;
    }
    std::memcpy(static_cast<void*>(&copy_), given, size);
    std::memset(reinterpret_cast<std::byte*>(&copy_) + size, 0, sizeof(Struct) - size);
    known_ = &copy_;
  }
  Known(const Known&) = delete;
  Known& operator=(const Known&) = delete;
  const Struct& operator*() const { return *known_; }
  const Struct* operator->() const { return known_; }

 private:
  const Struct* known_;
  Struct copy_;  // uninitialised if known_ is the caller's struct
};

// Writes struct_size bytes of a caller's struct. fill(Struct&) gets a zeroed struct, whose first struct_size
// bytes are copied to the caller. Bytes that this library does not know become 0.
template <class Struct, class Fill>
void write_struct(const char* name, Struct* to, uint64_t struct_size, const Fill& fill) {
  static_assert(std::is_trivially_copyable_v<Struct> && kFirstSize<Struct> > 0 && sizeof(Struct) >= kFirstSize<Struct>);
  require(to != nullptr, name, " is null");
  check_struct_size(name, struct_size, kFirstSize<Struct>);
  Struct known;
  std::memset(static_cast<void*>(&known), 0, sizeof(known));
  fill(known);
  known.struct_size = struct_size;
  const uint64_t common = std::min<uint64_t>(struct_size, sizeof(Struct));
  std::memcpy(static_cast<void*>(to), &known, common);
  std::memset(reinterpret_cast<std::byte*>(to) + common, 0, struct_size - common);
}

}  // namespace attune
