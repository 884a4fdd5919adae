// SPDX-License-Identifier: Apache-2.0
// attune_bundler: compiles the manifest into the bundle that stands beside the library, and keeps the ledger. Needs
// NVRTC, no GPU.
#include <fmt/core.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "builder.h"
#include "cuda/jit/files.h"
#include "popular.h"
#include "portable.h"

namespace {

using attune::bundle::Ledger;

constexpr char kUsage[] =
    "usage: attune_bundler build BUNDLE REPORT MANIFEST.. compile with NVRTC; modules whose sources did not change are "
    "kept\n"
    "       attune_bundler sample LEDGER BUNDLE REPORT MANIFEST.. the same, without the modules that the ledger has of "
    "the same code; one of each source is compiled always\n"
    "       attune_bundler check REPORT LEDGER            exit code 1 where the ledger disagrees, or the compiler "
    "warned\n"
    "       attune_bundler update REPORT LEDGER           write the ledger from the report\n"
    "       attune_bundler verify MANIFEST BUNDLE REPORT  exit code 1 unless the library finds every module in the "
    "bundle, but for those of the report that a sample left out\n"
    "       attune_bundler portable check LEDGER          compile for other GPUs what the ledger does not have of the "
    "same code; exit code 1 where it disagrees\n"
    "       attune_bundler portable write LEDGER          the same, and write the ledger\n"
    "       attune_bundler popular write MODELS MANIFEST PORTABLE  write what the models of a directory ask for, on "
    "Hopper and on others\n"
    "       attune_bundler popular check MODELS MANIFEST PORTABLE  exit code 1 unless the manifests list just that\n";

std::string read(const std::string& path) {
  std::optional<std::string> text = attune::cuda::read_file(path);
  if (!text) throw std::runtime_error("cannot read " + path);
  return *text;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

const attune::cuda::Nvrtc* require_nvrtc() {
  std::string why;
  const attune::cuda::Nvrtc* nvrtc = attune::cuda::find_nvrtc(attune::cuda::kAnyMajor, &why);
  if (nvrtc == nullptr) throw std::runtime_error(why + "; " + attune::cuda::nvrtc_advice(attune::cuda::kAnyMajor));
  return nvrtc;
}

// ledger_path: of a sample, else "".
int build(const std::string& ledger_path, const std::string& bundle_path, const std::string& report_path,
          const std::vector<std::string>& manifests) {
  const attune::cuda::Nvrtc* nvrtc = require_nvrtc();
  std::vector<attune::bundle::ManifestEntry> manifest;
  for (const std::string& path : manifests) {
    const auto more = attune::bundle::parse_manifest(read(path));
    manifest.insert(manifest.end(), more.begin(), more.end());
  }
  Ledger known;
  if (!ledger_path.empty()) known = attune::bundle::parse_ledger(read(ledger_path));
  const auto result =
      attune::bundle::build_bundle(manifest, *nvrtc, bundle_path, attune::cuda::read_file(report_path).value_or(""),
                                   ledger_path.empty() ? nullptr : &known);
  size_t bytes = 0;
  for (const auto& entry : result.entries) bytes += entry.image.size();
  const std::string fault = attune::cuda::write_bundle(bundle_path, nvrtc->major(), nvrtc->minor(), result.entries);
  if (!fault.empty()) throw std::runtime_error(fault);
  write(report_path, attune::bundle::report_text(result));
  fmt::print("{}: {} modules, {} KiB; compiled {} with NVRTC {}, the slowest in {:.0f} ms\n", bundle_path,
             result.entries.size(), bytes / 1024, result.compiled, nvrtc->version(), result.longest_ms);
  if (!result.left_out.empty())
    fmt::print("{} modules are left out: {} has them of this code\n", result.left_out.size(), ledger_path);
  return 0;
}

int check(const std::string& report_path, const std::string& ledger_path) {
  const std::string report = read(report_path);
  const Ledger expected = attune::bundle::parse_ledger(read(ledger_path));
  const Ledger measured = attune::bundle::report_ledger(report);
  std::vector<std::string> faults = attune::bundle::check_ledger(expected, measured);
  for (const std::string& line : attune::bundle::report_warnings(report))
    faults.push_back("the compiler warns: " + line);
  for (const std::string& fault : faults) fmt::print("{}\n", fault);
  if (expected.compiler != measured.compiler) {
    fmt::print("the ledger is of NVRTC {}, this is {}: only spills were compared\n", expected.compiler,
               measured.compiler);
  }
  if (!faults.empty())
    fmt::print("{} faults; where a change is meant: attune_bundler update {} {}\n", faults.size(), report_path,
               ledger_path);
  return faults.empty() ? 0 : 1;
}

int portable(const std::string& verb, const std::string& ledger_path) {
  const attune::cuda::Nvrtc* nvrtc = require_nvrtc();
  std::vector<std::string> faults;
  const std::optional<std::string> old = attune::cuda::read_file(ledger_path);
  const Ledger known = verb == "check" || old ? attune::bundle::parse_ledger(read(ledger_path)) : Ledger();
  size_t compiled = 0;
  const Ledger measured = attune::bundle::compile_portable(*nvrtc, known, &compiled, &faults);
  if (verb == "write") return write(ledger_path, attune::bundle::ledger_text(measured)), 0;
  const auto differences = attune::bundle::check_ledger(known, measured);
  faults.insert(faults.end(), differences.begin(), differences.end());
  for (const std::string& fault : faults) fmt::print("{}\n", fault);
  fmt::print("{} kernels, {} compiled here, {} faults\n", measured.kernels.size(), compiled, faults.size());
  return faults.empty() ? 0 : 1;
}

int popular(const std::string& verb, const std::string& directory, const std::string& manifest_path,
            const std::string& portable_path) {
  using attune::bundle::Code;
  const auto models = attune::bundle::read_models(directory);
  int code = 0;
  for (const auto& [path, kind] : {std::pair{manifest_path, Code::kHopper}, {portable_path, Code::kPortable}}) {
    const std::string text = attune::bundle::popular_manifest(attune::bundle::popular_kernels(models, kind), kind);
    if (verb == "write") {
      write(path, text);
    } else if (read(path) != text) {
      fmt::print(
          "{} is not what src/cuda asks for at the shapes of {}: attune_bundler popular write {} {} {}, then update "
          "the "
          "ledger\n",
          path, directory, directory, manifest_path, portable_path);
      code = 1;
    }
  }
  return code;
}

int verify(const std::string& manifest_path, const std::string& bundle_path, const std::string& report_path) {
  // As on a machine with neither a compiler nor a cache.
  attune::cuda::ImageFinder finder({bundle_path, "", false, 99000});
  size_t missing = 0, found = 0;
  const std::vector<std::string> left_out = attune::bundle::report_left_out(read(report_path));
  const std::set<std::string> absent(left_out.begin(), left_out.end());
  const auto manifest = attune::bundle::parse_manifest(read(manifest_path));
  for (const auto& entry : manifest) {
    if (absent.contains(attune::cuda::module_name(entry.module))) continue;
    try {
      finder.find(entry.module);
      ++found;
    } catch (const std::exception& e) {
      fmt::print("{}\n", e.what());
      ++missing;
    }
  }
  fmt::print("{} of {} modules are in {}; {} were left out\n", found, manifest.size(), bundle_path, absent.size());
  return missing == 0 && found > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Both would put what this library does not look for, or does not hold, into the bundle.
  unsetenv("ATTUNE_NVRTC_FLAGS");
  unsetenv("ATTUNE_KERNEL_DIR");
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() >= 4 && args[0] == "build") return build("", args[1], args[2], {args.begin() + 3, args.end()});
    if (args.size() >= 5 && args[0] == "sample")
      return build(args[1], args[2], args[3], {args.begin() + 4, args.end()});
    if (args.size() == 3 && args[0] == "check") return check(args[1], args[2]);
    if (args.size() == 4 && args[0] == "verify") return verify(args[1], args[2], args[3]);
    if (args.size() == 5 && args[0] == "popular" && (args[1] == "write" || args[1] == "check")) {
      return popular(args[1], args[2], args[3], args[4]);
    }
    if (args.size() == 3 && args[0] == "portable" && (args[1] == "write" || args[1] == "check"))
      return portable(args[1], args[2]);
    if (args.size() == 3 && args[0] == "update") {
      write(args[2], attune::bundle::ledger_text(attune::bundle::report_ledger(read(args[1]))));
      return 0;
    }
  } catch (const std::exception& e) {
    fmt::print(stderr, "attune_bundler: {}\n", e.what());
    return 1;
  }
  fmt::print(stderr, "{}", kUsage);
  return 2;
}
