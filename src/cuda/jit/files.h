// SPDX-License-Identifier: Apache-2.0
// Whole files: read, and published so that a reader sees the old one, the new one or none, never a part. No call waits
// for a pipe.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace attune::cuda {

// An open directory. What is opened, made or removed by name in it is there, whoever renames what meanwhile.
//
// Trusted: nobody but the user and root can have written to it; it is theirs, and neither group nor others may write.
class Directory {
 public:
  // Empty where it cannot be opened or is not trusted, which *why says; where it is absent *why stays as it is.
  static std::optional<Directory> open(const std::string& path, std::string* why);
  static std::optional<Directory> open_trusted(const std::string& path, std::string* why);
  // A directory in this one, trusted; a link is not followed. make: one that is absent is made, private to the user.
  std::optional<Directory> below(const std::string& name, bool make, std::string* why) const;
  void remove(const std::string& name) const;

  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&&) = delete;
  ~Directory();
  int descriptor() const { return descriptor_; }
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  // What open or openat returned.
  static std::optional<Directory> take(int descriptor, std::string path, bool trusted, std::string* why);
  Directory(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}

  int descriptor_;
  std::string path_;  // for messages
};

// The file's bytes; empty optional where it cannot be read or is not a regular file.
std::optional<std::string> read_file(const std::string& path);
// The bytes of a file that is trusted as directories are. Empty optional where it is absent (*why stays as it is), a
// link, not trusted or cannot be read.
std::optional<std::string> read_trusted_file(const Directory& directory, const std::string& name, std::string* why);

// Creates a directory and its parents, private to the user. "" or what went wrong.
std::string make_directories(const std::string& path);

// Writes parts one after the other to a temporary file in scratch (same file system) and renames it to name in to. ""
// or what went wrong, after which neither file is left.
std::string publish_file(const Directory& to, const std::string& name, const Directory& scratch,
                         std::initializer_list<std::string_view> parts);
// Removes the temporary files of publish_file that a process left in scratch at least this long ago.
void remove_stale_temporaries(const Directory& scratch, int64_t seconds);

// The directory of the library or program that holds this code; "" if unknown.
std::string library_directory();

}  // namespace attune::cuda
