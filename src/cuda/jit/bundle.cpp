// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/bundle.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>

#include "core/status.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/files.h"

namespace attune::cuda {
namespace {

static_assert(std::endian::native == std::endian::little, "the bundle is little endian");

constexpr char kMagic[] = "ATTNBNDL";
constexpr uint32_t kFormat = 1;
constexpr char kFileName[] = "attune_kernels.bundle";

struct Header {
  char magic[8];
  uint32_t format, compiler_major, compiler_minor, count;
  Digest digest;  // of the four numbers and the index
};
struct IndexEntry {
  Digest key;
  uint64_t offset, size;
  Digest image_digest;
};
static_assert(sizeof(Header) == 56 && sizeof(IndexEntry) == 80);

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

Digest digest_of(const Header& header, std::string_view index) {
  const uint32_t numbers[] = {header.format, header.compiler_major, header.compiler_minor, header.count};
  return Sha256().update(bytes_of(numbers)).update(index).finish();
}

IndexEntry entry_at(std::string_view file, size_t i) {
  IndexEntry entry;
  std::memcpy(&entry, file.data() + sizeof(Header) + i * sizeof(IndexEntry), sizeof(entry));
  return entry;
}

}  // namespace

std::string write_bundle(const std::string& path, int compiler_major, int compiler_minor,
                         std::vector<BundleEntry> entries) {
  std::sort(entries.begin(), entries.end(), [](const BundleEntry& a, const BundleEntry& b) { return a.key < b.key; });
  std::string index, images;
  const size_t images_at = sizeof(Header) + entries.size() * sizeof(IndexEntry);
  for (const BundleEntry& e : entries) {
    // The driver reads an ELF file in place.
    images.resize((images.size() + 63) / 64 * 64, '\0');
    const IndexEntry entry = {e.key, images_at + images.size(), e.image.size(), sha256(e.image)};
    index += bytes_of(entry);
    images += e.image;
  }
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof(header.magic));
  header.format = kFormat;
  header.compiler_major = static_cast<uint32_t>(compiler_major);
  header.compiler_minor = static_cast<uint32_t>(compiler_minor);
  header.count = static_cast<uint32_t>(entries.size());
  header.digest = digest_of(header, index);
  const std::filesystem::path target = std::filesystem::absolute(path);
  std::string fault;
  const std::optional<Directory> directory = Directory::open(target.parent_path().string(), &fault);
  if (!directory) return fault.empty() ? "there is no directory " + target.parent_path().string() : fault;
  fault = publish_file(*directory, target.filename().string(), *directory, {bytes_of(header), index, images});
  if (fault.empty() && chmod(path.c_str(), 0644) != 0) fault = "cannot make " + path + " readable";
  return fault;
}

std::unique_ptr<Bundle> Bundle::open(const std::string& path, std::string* why) {
  // Does not wait for a pipe. No check of owners: the bundle is trusted as the library beside it, or named by the user.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return nullptr;
  struct stat status = {};
  const bool regular = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const bool readable = regular && status.st_size >= static_cast<off_t>(sizeof(Header));
  const size_t size = readable ? static_cast<size_t>(status.st_size) : 0;
  void* mapped = readable ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  auto damaged = [&](const char* how) {
    *why = cat("the kernel bundle ", path, " is ", how, "; it is not used");
    return nullptr;
  };
  if (!regular) return damaged("not a regular file");
  if (mapped == MAP_FAILED) return damaged("not readable or too short");

  std::unique_ptr<Bundle> bundle(new Bundle);
  bundle->path_ = path;
  bundle->file_ = {static_cast<const char*>(mapped), size};
  Header header;
  std::memcpy(&header, mapped, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(header.magic)) != 0) return damaged("not a bundle");
  if (header.format != kFormat) return damaged("of another format");
  const uint64_t index_bytes = uint64_t{header.count} * sizeof(IndexEntry);
  if (index_bytes > size - sizeof(Header)) return damaged("cut short");
  if (digest_of(header, bundle->file_.substr(sizeof(Header), index_bytes)) != header.digest) return damaged("damaged");
  bundle->compiler_major_ = static_cast<int>(header.compiler_major);
  bundle->compiler_minor_ = static_cast<int>(header.compiler_minor);
  bundle->count_ = header.count;
  return bundle;
}

Bundle::~Bundle() {
  if (!file_.empty()) munmap(const_cast<char*>(file_.data()), file_.size());
}

std::string_view Bundle::find(const Digest& key, std::string* why) const {
  size_t low = 0, high = count_;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (entry_at(file_, middle).key < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == count_) return {};
  const IndexEntry entry = entry_at(file_, low);
  if (entry.key != key) return {};
  if (entry.offset > file_.size() || entry.size > file_.size() - entry.offset) {
    *why = cat("the kernel bundle ", path_, " is cut short; one of its kernels is not used");
    return {};
  }
  const std::string_view image = file_.substr(entry.offset, entry.size);
  if (sha256(image) == entry.image_digest) return image;
  *why = cat("the kernel bundle ", path_, " is damaged; one of its kernels is not used");
  return {};
}

std::string default_bundle_path() {
  if (std::string forced = environment("ATTUNE_BUNDLE"); !forced.empty()) return forced;
  const std::string here = library_directory();
  if (here.empty()) return "";
  // A program that holds the library itself stands in bin/.
  for (const char* place : {"/", "/../lib/", "/../lib64/"}) {
    std::string path = here + place + kFileName;
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return "";
}

}  // namespace attune::cuda
