// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/files.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "core/status.h"

namespace attune::cuda {
namespace {

std::string error_message(const char* what, const std::string& path, int error) {
  return cat(what, " ", path, ": ", std::generic_category().message(error));
}

// "" or what went wrong.
std::string write_all(int file, const std::string& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(file, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return error_message("cannot write", path, n < 0 ? errno : ENOSPC);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return "";
}

}  // namespace

std::optional<std::string> read_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  struct stat status;
  const bool regular = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  std::string bytes(regular ? static_cast<size_t>(status.st_size) : 0, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = read(file, &bytes[done], bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  close(file);
  if (!regular || done < bytes.size()) return std::nullopt;
  return bytes;
}

std::string make_directories(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return "";
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  if (!parent.empty() && parent != path) {
    if (std::string fault = make_directories(parent.string()); !fault.empty()) return fault;
  }
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return error_message("cannot create", path, errno);
  return std::filesystem::is_directory(path, error) ? "" : error_message("cannot create", path, ENOTDIR);
}

std::string publish_file(const std::string& path, const std::string& scratch,
                         std::initializer_list<std::string_view> parts) {
  // A name that no other process takes, in whatever container or on whatever host of a shared file system it runs.
  std::string temporary = scratch + "/entry-XXXXXX";
  const int file = mkostemp(temporary.data(), O_CLOEXEC);
  if (file < 0) return error_message("cannot create a file in", scratch, errno);
  std::string fault;
  for (const std::string_view part : parts) {
    if (fault.empty()) fault = write_all(file, temporary, part);
  }
  // Some file systems report a full disk only here.
  if (close(file) != 0 && fault.empty()) fault = error_message("cannot write", temporary, errno);
  if (fault.empty() && rename(temporary.c_str(), path.c_str()) != 0)
    fault = error_message("cannot create", path, errno);
  if (!fault.empty()) unlink(temporary.c_str());
  return fault;
}

std::string library_directory() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&library_directory), &info) == 0 || info.dli_fname == nullptr) return "";
  std::error_code error;
  // A program found through PATH is known by its bare name.
  const std::string name =
      std::string(info.dli_fname).find('/') != std::string::npos ? info.dli_fname : "/proc/self/exe";
  const std::filesystem::path path = std::filesystem::canonical(name, error);
  return error ? "" : path.parent_path().string();
}

}  // namespace attune::cuda
