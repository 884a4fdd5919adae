// SPDX-License-Identifier: Apache-2.0
// Compiled kernels on disk, shared by processes. One file an entry; no locks: files appear whole, by rename. What is
// loaded is run, so directories and entries are taken only where nobody but the user and root can write.
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

  // The entry, if it is there, trusted and whole. A damaged one is logged and removed. A directory that is not taken is
  // logged once.
  std::optional<std::string> load(const Digest& key);
  // Never fails: a full disk or a directory that is unwritable or not trusted is logged once, and the kernel lives in
  // memory. The first call removes what processes that died left in tmp/.
  void store(const Digest& key, std::string_view image);
  void remove(const Digest& key);
  std::string path_of(const Digest& key) const;

 private:
  // "" or what went wrong.
  std::string publish(const Digest& key, std::string_view image);
  void tell(const char* what, const std::string& why);

  std::string directory_;
  std::atomic<bool> told_{false}, swept_{false};
};

// $ATTUNE_CACHE_DIR, else $XDG_CACHE_HOME/attune, else ~/.cache/attune; "" where none of the variables is set.
std::string default_cache_directory();

}  // namespace attune::cuda
