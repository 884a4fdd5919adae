// SPDX-License-Identifier: Apache-2.0
// Files that the user names. What fails is said with the file and the system's reason.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace attune::cli {

// "PATH: cannot be WHAT: No such file or directory". error: an errno, 0 where none is known.
std::string file_fault(const std::string& path, const char* what, int error);

// The whole file. UserError where it cannot be read.
std::string read_file(const std::string& path);

// A file to be written in one go. Opened, and emptied, by the constructor, so that a wrong name is known before the
// work begins: UserError.
class OutputFile {
 public:
  explicit OutputFile(std::string path);
  // Once. std::runtime_error where not all of it arrives, as on a full disk.
  void write(std::string_view text);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

// UserError unless the file can be written; it is left as it is.
void require_writable(const std::string& path);

// Brings to stdout what was printed until now. std::system_error where it does not arrive; fmt::print throws that, too.
void flush_output();

}  // namespace attune::cli
