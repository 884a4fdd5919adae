// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/disk_cache.h"

#include "core/status.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/files.h"

namespace attune::cuda {
namespace {

// An entry: magic with the format's number, sha256 of the image, image.
constexpr std::string_view kMagic = "ATTNKRN1";
constexpr size_t kHeaderBytes = kMagic.size() + sizeof(Digest);

constexpr char kKernels[] = "kernels";
// A process writes an entry in milliseconds; a day forgives clocks that disagree on a shared file system.
constexpr int64_t kStaleSeconds = 24 * 3600;

std::string folder_of(const Digest& key) { return to_hex(key).substr(0, 2); }
std::string name_of(const Digest& key) { return to_hex(key) + ".cubin"; }

std::string_view as_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool is_whole(std::string_view entry) {
  if (entry.size() < kHeaderBytes || !entry.starts_with(kMagic)) return false;
  return as_bytes(sha256(entry.substr(kHeaderBytes))) == entry.substr(kMagic.size(), sizeof(Digest));
}

// The directory of this entry; else empty, with *why unless it is absent.
std::optional<Directory> entries(const Directory& cache, const Digest& key, bool make, std::string* why) {
  const std::optional<Directory> kernels = cache.below(kKernels, make, why);
  return kernels ? kernels->below(folder_of(key), make, why) : std::nullopt;
}

}  // namespace

std::string DiskCache::path_of(const Digest& key) const {
  return cat(directory_, "/", kKernels, "/", folder_of(key), "/", name_of(key));
}

void DiskCache::tell(const char* what, const std::string& why) {
  if (told_.exchange(true)) return;
  log_message(ATTUNE_LOG_WARNING, cat(what, ": ", why, " (ATTUNE_CACHE_DIR chooses another place)"));
}

std::optional<std::string> DiskCache::load(const Digest& key) {
  if (directory_.empty()) return std::nullopt;
  std::string why;
  const std::optional<Directory> cache = Directory::open_trusted(directory_, &why);
  const std::optional<Directory> directory = cache ? entries(*cache, key, false, &why) : std::nullopt;
  if (!directory) {
    if (!why.empty()) tell("compiled kernels are not taken from disk", why);
    return std::nullopt;
  }
  std::optional<std::string> entry = read_trusted_file(*directory, name_of(key), &why);
  if (!why.empty()) log_message(ATTUNE_LOG_WARNING, cat("a cached kernel is not taken: ", why));
  if (!entry) return std::nullopt;
  if (!is_whole(*entry)) {
    log_message(ATTUNE_LOG_WARNING,
                cat("the cached kernel ", path_of(key), " is damaged; it is removed and compiled again"));
    directory->remove(name_of(key));
    return std::nullopt;
  }
  entry->erase(0, kHeaderBytes);
  return entry;
}

void DiskCache::store(const Digest& key, std::string_view image) {
  if (directory_.empty()) return;
  const std::string fault = publish(key, image);
  if (!fault.empty()) tell("compiled kernels are not kept on disk", fault);
}

std::string DiskCache::publish(const Digest& key, std::string_view image) {
  std::string why = make_directories(directory_);
  if (!why.empty()) return why;
  const std::optional<Directory> cache = Directory::open_trusted(directory_, &why);
  const std::optional<Directory> directory = cache ? entries(*cache, key, true, &why) : std::nullopt;
  const std::optional<Directory> scratch = directory ? cache->below("tmp", true, &why) : std::nullopt;
  if (!scratch) return why.empty() ? directory_ + " was removed meanwhile" : why;
  if (!swept_.exchange(true)) remove_stale_temporaries(*scratch, kStaleSeconds);
  return publish_file(*directory, name_of(key), *scratch, {kMagic, as_bytes(sha256(image)), image});
}

void DiskCache::remove(const Digest& key) {
  if (directory_.empty()) return;
  std::string why;
  const std::optional<Directory> cache = Directory::open_trusted(directory_, &why);
  const std::optional<Directory> directory = cache ? entries(*cache, key, false, &why) : std::nullopt;
  if (directory) directory->remove(name_of(key));
}

std::string default_cache_directory() {
  if (std::string chosen = environment("ATTUNE_CACHE_DIR"); !chosen.empty()) return chosen;
  if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty()) return cache + "/attune";
  if (const std::string home = environment("HOME"); !home.empty()) return home + "/.cache/attune";
  return "";
}

}  // namespace attune::cuda
