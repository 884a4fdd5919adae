// SPDX-License-Identifier: Apache-2.0
#include "files.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "user_error.h"

namespace attune::cli {

std::string file_fault(const std::string& path, const char* what, int error) {
  std::string text = path + ": cannot be " + what;
  if (error != 0) text += ": " + std::generic_category().message(error);
  return text;
}

std::string read_file(const std::string& path) {
  std::string text;
  errno = 0;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  bool good = file != nullptr;
  char block[1 << 16];
  for (size_t n; good && (n = std::fread(block, 1, sizeof(block), file)) > 0;) text.append(block, n);
  good = good && std::ferror(file) == 0;
  const int error = errno;
  if (file != nullptr) std::fclose(file);
  if (!good) throw UserError(file_fault(path, "read", error));
  return text;
}

OutputFile::OutputFile(std::string path) : path_(std::move(path)), file_(std::fopen(path_.c_str(), "wb")) {
  if (file_ == nullptr) throw UserError(file_fault(path_, "written", errno));
}

void OutputFile::write(std::string_view text) {
  errno = 0;
  bool good = std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size();
  int error = errno;
  // Some of it may arrive, or not, only here.
  if (std::fclose(file_.release()) != 0 && good) {
    good = false;
    error = errno;
  }
  if (!good) throw std::runtime_error(file_fault(path_, "written", error));
}

void require_writable(const std::string& path) {
  const bool existed = access(path.c_str(), F_OK) == 0;
  std::FILE* file = std::fopen(path.c_str(), "ab");
  if (file == nullptr) throw UserError(file_fault(path, "written", errno));
  std::fclose(file);
  if (!existed) std::remove(path.c_str());
}

void flush_output() {
  if (std::fflush(stdout) != 0) throw std::system_error(errno, std::generic_category(), "stdout: cannot be written");
}

}  // namespace attune::cli
