// SPDX-License-Identifier: Apache-2.0
// Whole files: read, and published so that a reader sees the old one, the new one or none, never a part.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace attune::cuda {

// The file's bytes; empty optional where it cannot be read.
std::optional<std::string> read_file(const std::string& path);

// Creates a directory and its parents, private to the user. "" or what went wrong.
std::string make_directories(const std::string& path);

// Writes parts one after the other to a temporary file in scratch (same file system) and renames it to path. "" or what
// went wrong, after which neither file is left.
std::string publish_file(const std::string& path, const std::string& scratch,
                         std::initializer_list<std::string_view> parts);

// The directory of the library or program that holds this code; "" if unknown.
std::string library_directory();

}  // namespace attune::cuda
