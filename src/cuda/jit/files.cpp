// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/files.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "core/status.h"

namespace attune::cuda {
namespace {

// No wait for a writer of a pipe. O_NOFOLLOW is added where a link is not to be followed.
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

// Temporary files are kTemporary and kNumRandom letters and digits.
constexpr std::string_view kTemporary = "entry-";
constexpr size_t kNumRandom = 16;
constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyz";

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

std::optional<std::string> read_all(int file) {
  struct stat status;
  if (fstat(file, &status) != 0) return std::nullopt;
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = read(file, &bytes[done], bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    done += static_cast<size_t>(n);
  }
  return bytes;
}

bool is_regular(int file) {
  struct stat status;
  return fstat(file, &status) == 0 && S_ISREG(status.st_mode);
}

// A new file under a name that no other process takes, in whatever container or on whatever host of a shared file
// system it runs; -1 and errno.
int create_temporary(const Directory& scratch, std::string* name) {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    *name = kTemporary;
    for (size_t i = 0; i < kNumRandom; ++i) *name += kLetters[random() % kLetters.size()];
    const int file = openat(scratch.descriptor(), name->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0 || errno != EEXIST) return file;
  }
  return -1;
}

// Also the names of earlier versions, with six random characters of either case.
bool is_temporary(std::string_view name) {
  if (!name.starts_with(kTemporary)) return false;
  name.remove_prefix(kTemporary.size());
  return (name.size() == kNumRandom || name.size() == 6) &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) != 0; });
}

// "" or why others than the user and root can have written to what is open.
std::string why_not_trusted(int descriptor, const std::string& path) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return error_message("cannot examine", path, errno);
  const uid_t user = geteuid();
  if (status.st_uid != user && status.st_uid != 0) {
    return cat(path, " is owned by user ", status.st_uid, "; only what user ", user, user == 0 ? "" : " or root",
               " owns is taken");
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) == 0) return "";
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(status.st_mode & 07777));
  return cat(path, " can be written by other users (mode ", mode, "); chmod go-w, if what is in it is yours");
}

}  // namespace

Directory::Directory(Directory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

Directory::~Directory() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::optional<Directory> Directory::take(int descriptor, std::string path, bool trusted, std::string* why) {
  if (descriptor < 0) {
    if (errno != ENOENT) *why = error_message("cannot open", path, errno);
    return std::nullopt;
  }
  std::optional<Directory> directory = Directory(descriptor, std::move(path));
  const std::string fault = trusted ? why_not_trusted(descriptor, directory->path_) : "";
  if (fault.empty()) return directory;
  *why = fault;
  return std::nullopt;
}

std::optional<Directory> Directory::open(const std::string& path, std::string* why) {
  return take(::open(path.c_str(), kReadFlags | O_DIRECTORY), path, false, why);
}

std::optional<Directory> Directory::open_trusted(const std::string& path, std::string* why) {
  return take(::open(path.c_str(), kReadFlags | O_DIRECTORY), path, true, why);
}

std::optional<Directory> Directory::below(const std::string& name, bool make, std::string* why) const {
  if (make && mkdirat(descriptor_, name.c_str(), 0700) != 0 && errno != EEXIST) {
    *why = error_message("cannot create", path_of(name), errno);
    return std::nullopt;
  }
  return take(openat(descriptor_, name.c_str(), kReadFlags | O_DIRECTORY | O_NOFOLLOW), path_of(name), true, why);
}

void Directory::remove(const std::string& name) const { unlinkat(descriptor_, name.c_str(), 0); }

std::optional<std::string> read_file(const std::string& path) {
  const int file = open(path.c_str(), kReadFlags);
  if (file < 0) return std::nullopt;
  std::optional<std::string> bytes = is_regular(file) ? read_all(file) : std::nullopt;
  close(file);
  return bytes;
}

std::optional<std::string> read_trusted_file(const Directory& directory, const std::string& name, std::string* why) {
  const std::string path = directory.path_of(name);
  const int file = openat(directory.descriptor(), name.c_str(), kReadFlags | O_NOFOLLOW);
  if (file < 0) {
    // A link is ELOOP; a socket, or a device without its driver, is ENXIO.
    if (errno == ELOOP || errno == ENXIO) {
      *why = path + " is not a regular file";
    } else if (errno != ENOENT) {
      *why = error_message("cannot open", path, errno);
    }
    return std::nullopt;
  }
  std::string fault = is_regular(file) ? why_not_trusted(file, path) : path + " is not a regular file";
  std::optional<std::string> bytes;
  if (fault.empty()) {
    bytes = read_all(file);
    if (!bytes) fault = path + " cannot be read";
  }
  close(file);
  if (!fault.empty()) *why = fault;
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

std::string publish_file(const Directory& to, const std::string& name, const Directory& scratch,
                         std::initializer_list<std::string_view> parts) {
  std::string temporary;
  const int file = create_temporary(scratch, &temporary);
  if (file < 0) return error_message("cannot create a file in", scratch.path(), errno);
  const std::string path = scratch.path_of(temporary);
  std::string fault;
  for (const std::string_view part : parts) {
    if (fault.empty()) fault = write_all(file, path, part);
  }
  // Some file systems report a full disk only here.
  if (close(file) != 0 && fault.empty()) fault = error_message("cannot write", path, errno);
  if (fault.empty() && renameat(scratch.descriptor(), temporary.c_str(), to.descriptor(), name.c_str()) != 0)
    fault = error_message("cannot create", to.path_of(name), errno);
  if (!fault.empty()) scratch.remove(temporary);
  return fault;
}

void remove_stale_temporaries(const Directory& scratch, int64_t seconds) {
  // fdopendir takes the descriptor it is given.
  const int descriptor = openat(scratch.descriptor(), ".", kReadFlags | O_DIRECTORY);
  DIR* list = descriptor >= 0 ? fdopendir(descriptor) : nullptr;
  if (list == nullptr) {
    if (descriptor >= 0) close(descriptor);
    return;
  }
  const time_t now = time(nullptr);
  while (const dirent* entry = readdir(list)) {
    struct stat status;
    if (is_temporary(entry->d_name) &&
        fstatat(scratch.descriptor(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(status.st_mode) &&
        now - status.st_mtime >= seconds)
      scratch.remove(entry->d_name);
  }
  closedir(list);
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
