// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/disk_cache.h"

#include <unistd.h>

#include <cstring>

#include "core/status.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/files.h"

namespace attune::cuda {
namespace {

// An entry: magic with the format's number, sha256 of the image, image.
constexpr std::string_view kMagic = "ATTNKRN1";
constexpr size_t kHeaderBytes = kMagic.size() + sizeof(Digest);

std::string_view as_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool is_whole(std::string_view entry) {
  if (entry.size() < kHeaderBytes || !entry.starts_with(kMagic)) return false;
  return as_bytes(sha256(entry.substr(kHeaderBytes))) == entry.substr(kMagic.size(), sizeof(Digest));
}

}  // namespace

std::string DiskCache::path_of(const Digest& key) const {
  const std::string hex = to_hex(key);
  return cat(directory_, "/kernels/", hex.substr(0, 2), "/", hex, ".cubin");
}

std::optional<std::string> DiskCache::load(const Digest& key) {
  if (directory_.empty()) return std::nullopt;
  std::optional<std::string> entry = read_file(path_of(key));
  if (!entry) return std::nullopt;
  if (!is_whole(*entry)) {
    log_message(ATTUNE_LOG_WARNING,
                cat("the cached kernel ", path_of(key), " is damaged; it is removed and compiled again"));
    remove(key);
    return std::nullopt;
  }
  entry->erase(0, kHeaderBytes);
  return entry;
}

void DiskCache::store(const Digest& key, std::string_view image) {
  if (directory_.empty()) return;
  const std::string path = path_of(key);
  const std::string scratch = directory_ + "/tmp";
  std::string fault = make_directories(path.substr(0, path.rfind('/')));
  if (fault.empty()) fault = make_directories(scratch);
  if (fault.empty()) fault = publish_file(path, scratch, {kMagic, as_bytes(sha256(image)), image});
  if (fault.empty() || told_.exchange(true)) return;
  log_message(ATTUNE_LOG_WARNING,
              cat("compiled kernels are not kept on disk: ", fault, " (ATTUNE_CACHE_DIR chooses another place)"));
}

void DiskCache::remove(const Digest& key) {
  if (!directory_.empty()) unlink(path_of(key).c_str());
}

std::string default_cache_directory() {
  if (std::string chosen = environment("ATTUNE_CACHE_DIR"); !chosen.empty()) return chosen;
  if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty()) return cache + "/attune";
  if (const std::string home = environment("HOME"); !home.empty()) return home + "/.cache/attune";
  return "";
}

}  // namespace attune::cuda
