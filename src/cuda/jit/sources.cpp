// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/sources.h"

#include <map>
#include <optional>
#include <string_view>

#include "core/status.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/files.h"

namespace attune::cuda {
namespace {

std::optional<std::string> read_text(const std::string& path, const std::string& directory) {
  if (!directory.empty()) return read_file(directory + "/" + path);
  for (size_t i = 0; i < kNumEmbeddedKernels; ++i) {
    const EmbeddedFile& file = kEmbeddedKernels[i];
    if (path == file.path) return std::string(file.text, file.size);
  }
  return std::nullopt;
}

void skip_blanks(std::string_view& line) {
  const size_t n = line.find_first_not_of(" \t");
  line.remove_prefix(n == std::string_view::npos ? line.size() : n);
}

// The path of an #include "path" line; empty for any other line.
std::string_view included(std::string_view line) {
  skip_blanks(line);
  if (!line.starts_with('#')) return {};
  line.remove_prefix(1);
  skip_blanks(line);
  if (!line.starts_with("include")) return {};
  line.remove_prefix(7);
  skip_blanks(line);
  if (!line.starts_with('"')) return {};
  line.remove_prefix(1);
  return line.substr(0, line.find('"'));
}

struct Reader {
  const std::string& directory;
  std::map<std::string, std::string> headers;

  void follow(const std::string& includer, std::string_view text) {
    while (!text.empty()) {
      const size_t end = text.find('\n');
      const std::string path(included(text.substr(0, end)));
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
      if (path.empty() || headers.contains(path)) continue;
      std::optional<std::string> header = read_text(path, directory);
      if (!header) {
        fail(ATTUNE_INTERNAL, "kernel source ", includer, " includes \"", path, "\", which is not in ",
             directory.empty() ? std::string("the library") : directory, " (paths start at kernels/)");
      }
      const std::string& kept = headers.emplace(path, std::move(*header)).first->second;
      follow(path, kept);
    }
  }
};

}  // namespace

SourceUnit read_source(const std::string& path, const std::string& directory) {
  std::optional<std::string> text = read_text(path, directory);
  if (!text)
    fail(ATTUNE_INTERNAL, "there is no kernel source ", path, " in ",
         directory.empty() ? std::string("the library") : directory);
  Reader reader{directory, {}};
  reader.follow(path, *text);
  SourceUnit unit{path, std::move(*text), {reader.headers.begin(), reader.headers.end()}, {}};
  Sha256 hash;
  hash.update_field(unit.path).update_field(unit.text);
  for (const auto& [name, body] : unit.headers) hash.update_field(name).update_field(body);
  unit.digest = hash.finish();
  return unit;
}

SourceUnit read_source(const std::string& path) { return read_source(path, environment("ATTUNE_KERNEL_DIR")); }

}  // namespace attune::cuda
