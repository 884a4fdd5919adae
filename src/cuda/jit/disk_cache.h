// SPDX-License-Identifier: Apache-2.0
// Compiled kernels on disk, shared by processes. One file an entry; no locks: files appear whole, by rename.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <string_view>

#include "cuda/jit/sha256.h"

namespace attune::cuda {

class DiskCache {
 public:
  // directory "": every load misses and every store does nothing.
  explicit DiskCache(std::string directory) : directory_(std::move(directory)) {}

  // The entry, if it is there and whole. A damaged one is logged and removed.
  std::optional<std::string> load(const Digest& key);
  // Never fails: a full disk or an unwritable directory is logged once, and the kernel lives in memory.
  void store(const Digest& key, std::string_view image);
  void remove(const Digest& key);
  std::string path_of(const Digest& key) const;

 private:
  std::string directory_;
  std::atomic<bool> told_{false};
};

// $ATTUNE_CACHE_DIR, else $XDG_CACHE_HOME/attune, else ~/.cache/attune; "" where none of the variables is set.
std::string default_cache_directory();

}  // namespace attune::cuda
