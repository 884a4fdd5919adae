// SPDX-License-Identifier: Apache-2.0
// The bundler: the manifest's rules, ptxas's log, the ledger, and modules that are kept from the last build.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "attune/attune.h"
#include "builder.h"
#include "popular.h"

namespace attune::bundle {
namespace {

std::string manifest_fault(const std::string& text) {
  try {
    parse_manifest(text);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

TEST(Manifest, ListsStandForEveryCombination) {
  const auto list = parse_manifest(R"({"arch": "sm_90a", "kernels": [
      {"source": "a.cu", "entries": ["f", "g"], "defines": {"D": [64, 128], "KV": "bf16", "APPEND": [false, true]}}]})");
  ASSERT_EQ(list.size(), 4u);
  EXPECT_EQ(cuda::module_name(list[0].module), "a.cu APPEND=0 D=64 KV=bf16");
  EXPECT_EQ(cuda::module_name(list[1].module), "a.cu APPEND=1 D=64 KV=bf16");
  EXPECT_EQ(cuda::module_name(list[3].module), "a.cu APPEND=1 D=128 KV=bf16");
  EXPECT_EQ(list[3].entries, (std::vector<std::string>{"f", "g"}));
}

TEST(Manifest, SaysWhichFieldIsWrong) {
  EXPECT_NE(manifest_fault("{"), "");
  EXPECT_EQ(manifest_fault(R"({"arch": "sm_80", "kernels": []})"),
            "manifest.arch: must be \"sm_90a\" or \"compute_80\"");
  EXPECT_EQ(manifest_fault(R"({"arch": "sm_90a"})"), "manifest.kernels: must be a list");
  EXPECT_EQ(manifest_fault(R"({"arch": "sm_90a", "kernels": [{"source": "a.cu", "entries": []}]})"),
            "manifest.kernels[0].entries: must be a list of function names");
  EXPECT_EQ(manifest_fault(R"({"arch": "sm_90a", "kernels": [{"source": "a.cu", "entries": ["f"], "define": {}}]})"),
            "manifest.kernels[0]: has an unknown field 'define'");
  EXPECT_EQ(
      manifest_fault(R"({"arch": "sm_90a", "kernels": [{"source": "a.cu", "entries": ["f"], "defines": {"A": 1.5}}]})"),
      "manifest.kernels[0].defines.A: must be an integer, a string or a boolean, or a list of them");
  EXPECT_EQ(manifest_fault(
                R"({"arch": "sm_90a", "kernels": [{"source": "a.cu", "entries": ["f"], "defines": {"A": [1, 1]}}]})"),
            "manifest.kernels[0]: repeats a.cu A=1");
}

TEST(Popular, ListsWhatADecodeModelAsksFor) {
  PopularModel model;
  model.name = "test";
  model.num_heads_q = 32, model.num_heads_kv = 8, model.head_dim_qk = model.head_dim_v = 128;
  const auto kernels = popular_kernels({model, model});
  const auto listed = [&](const std::string& source, const std::pair<std::string, std::string>& define) {
    return std::any_of(kernels.begin(), kernels.end(), [&](const cuda::KernelSpec& k) {
      return k.source == source && std::find(k.defines.begin(), k.defines.end(), define) != k.defines.end();
    });
  };
  EXPECT_TRUE(listed("decode/decode.cu", {"ATTUNE_KV_TYPE", std::to_string(ATTUNE_FLOAT8_E4M3)}));
  EXPECT_TRUE(listed("decode/decode_cluster.cu", {"ATTUNE_KV_TYPE", std::to_string(ATTUNE_BFLOAT16)}));
  EXPECT_TRUE(listed("scheduler/stream_k.cu", {"ATTUNE_ROW_TILES", "1"}));
  EXPECT_FALSE(listed("decode/decode.cu", {"ATTUNE_HEAD_DIM_QK", "64"}));
  // The manifest that is written lists just these, each once, beside the self test's.
  const auto manifest = parse_manifest(popular_manifest(kernels));
  ASSERT_EQ(manifest.size(), kernels.size() + 2);
  for (size_t i = 0; i < kernels.size(); ++i) {
    EXPECT_EQ(cuda::module_name(manifest[i + 2].module), cuda::module_name({kernels[i].source, kernels[i].defines}));
    EXPECT_EQ(manifest[i + 2].entries, std::vector<std::string>{kernels[i].entry});
  }
  // What the kernel does not cover is left out.
  model.head_dim_qk = model.head_dim_v = 576;
  EXPECT_TRUE(popular_kernels({model}).empty());
}

TEST(Popular, ListsWhatOtherGpusAskFor) {
  PopularModel model;
  model.name = "test";
  model.num_heads_q = 32, model.num_heads_kv = 8, model.head_dim_qk = model.head_dim_v = 128;
  const auto kernels = popular_kernels({model}, Code::kPortable);
  const auto count = [&](const std::string& source) {
    return std::count_if(kernels.begin(), kernels.end(), [&](const cuda::KernelSpec& k) { return k.source == source; });
  };
  EXPECT_GT(count("decode/decode.cu"), 0);
  EXPECT_GT(count("prefill/prefill_mma.cu"), 0);
  EXPECT_GT(count("rows/store.cu"), 0);
  for (const char* source : {"decode/decode_cluster.cu", "prefill/prefill.cu", "backward/gradients.cu"})
    EXPECT_EQ(count(source), 0) << source << " needs Hopper";
  const auto manifest = parse_manifest(popular_manifest(kernels, Code::kPortable));
  ASSERT_EQ(manifest.size(), kernels.size() + 2);
  for (const ManifestEntry& entry : manifest) EXPECT_EQ(entry.module.target.option(), "compute_80");
  // The largest blocks of both kinds of GPU.
  const auto has = [&](size_t least, size_t most) {
    return std::any_of(kernels.begin(), kernels.end(),
                       [&](const cuda::KernelSpec& k) { return least < k.shared_bytes && k.shared_bytes <= most; });
  };
  EXPECT_TRUE(has(99 * 1024, 163 * 1024));
  EXPECT_TRUE(has(64 * 1024, 99 * 1024));
  EXPECT_FALSE(has(163 * 1024, 1024 * 1024));
}

TEST(Popular, ListsWhatALatentCacheAsksFor) {
  PopularModel model;
  model.name = "test";
  model.num_heads_q = 128, model.num_heads_kv = 1, model.head_dim_qk = 576, model.head_dim_v = 512;
  model.rope_dim = 64, model.rope_offset = 512, model.rope_interleaved = true;
  model.latent = true;
  const auto count = [&](const std::string& part, const std::string& source = "") {
    const auto kernels = popular_kernels({model});
    return std::count_if(kernels.begin(), kernels.end(), [&](const cuda::KernelSpec& k) {
      return k.source.starts_with(source) && cuda::spec_name(k).find(part) != std::string::npos;
    });
  };
  EXPECT_EQ(count("mla/mla.cu"), 2);  // over the cache alone; with the step's tokens beside it
  EXPECT_EQ(count("ATTUNE_LOADER=0"), 2);
  EXPECT_EQ(count("ATTUNE_DENSE=1", "mla/"), 1);  // by blocks of 64 rows, one short sequence too
  EXPECT_EQ(count("indexer/"), 0);
  // Prompts over up-projected keys; of those that are long and not causal, blocks copy the keys in pairs.
  EXPECT_EQ(count("ATTUNE_HEAD_DIM_QK=192", "prefill/prefill.cu"), 2);
  EXPECT_EQ(count("ATTUNE_ROW_PAIRS=1", "prefill/"), 1);
  model.packed_cache = true;
  EXPECT_EQ(count("rows/mla_"), 3);  // gather; append; qkv_prepare
  EXPECT_EQ(count("mla/mla.cu"), 1);
  EXPECT_EQ(count("ATTUNE_ROWS=32"), 1);  // half a block, a quarter
  EXPECT_EQ(count("ATTUNE_ROWS=16"), 1);
  EXPECT_EQ(count("ATTUNE_LOADER=1"), 1);  // lists of 16-bit rows
  EXPECT_EQ(count("mla/combine.cu"), 1);
  EXPECT_GT(count("indexer/select.cu"), 0);
}

TEST(Popular, NamesAModelFileThatIsWrong) {
  const std::string directory = testing::TempDir() + "attune_popular_test";
  std::filesystem::create_directories(directory);
  EXPECT_THROW(read_models(directory), std::runtime_error);
  std::ofstream(directory + "/bad.json") << R"({"name": "bad"})";
  try {
    read_models(directory);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& e) {
    EXPECT_NE(std::string(e.what()).find("bad.json"), std::string::npos) << e.what();
  }
  std::filesystem::remove_all(directory);
}

constexpr char kLog[] =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'first' for 'sm_90a'\n"
    "ptxas info    : Function properties for first\n"
    "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size, 1032 bytes smem\n"
    "ptxas info    : Compile time = 5.750 ms\n"
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\n"
    "a.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n"
    "ptxas info    : Compiling entry function 'second' for 'sm_90a'\n"
    "ptxas info    : Function properties for second\n"
    "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 8 registers, used 0 barriers\n";

TEST(PtxasLog, GivesResourcesAndKeepsWarnings) {
  std::vector<std::string> warnings;
  const auto kernels = parse_ptxas_log(kLog, &warnings);
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_EQ(kernels.at("first"), (Resources{168, 1032, 16, 8, 12}));
  EXPECT_EQ(kernels.at("second"), (Resources{8, 0, 0, 0, 0}));
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_EQ(warnings[0], "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored");
  EXPECT_EQ(warnings[1], "a.cu(3): warning #177-D: variable \"x\" was declared but never referenced");
}

TEST(Code, ComparesWhatIsClamped) {
  const auto image = [](std::initializer_list<uint64_t> halves) {
    std::string bytes;
    for (const uint64_t half : halves) bytes.append(reinterpret_cast<const char*>(&half), sizeof(half));
    return bytes;
  };
  // VIMNMX.RELU R5, P0, P0, R5, 0x80, PT, behind another; without predicates; VIMNMX; no instruction.
  EXPECT_TRUE(compares_clamped(image({0x0000008005057848, 0x000fca0003fe0100, 0x0000008005057848, 0x000fda0003801100}) +
                               "rest"));
  EXPECT_FALSE(compares_clamped(image({0x0000000504057248, 0x001fc80007fe1100})));
  EXPECT_FALSE(compares_clamped(image({0x0000008005057848, 0x000fca0003fe0100})));
  EXPECT_FALSE(compares_clamped(image({0x9848, 0x9308})));
  EXPECT_FALSE(compares_clamped(""));
}

TEST(Ledger, RoundTrips) {
  const Ledger ledger = {
      "13.0", {{"a.cu f D=64", {168, 1032, 0, 0, 0}}, {"a.cu g", {8, 0, 0, 0, 0}}}, {{"a.cu g", "12ab"}}};
  const Ledger read = parse_ledger(ledger_text(ledger));
  EXPECT_EQ(read.code, ledger.code);
  EXPECT_EQ(read.compiler, ledger.compiler);
  EXPECT_EQ(read.kernels, ledger.kernels);
  EXPECT_THROW(parse_ledger(R"({"compiler": "13.0", "kernels": {"f": {"registers": 1}}})"), std::runtime_error);
}

TEST(Ledger, ReportsEveryDifference) {
  const Ledger expected = {"13.0", {{"f", {100, 0, 0, 0, 0}}, {"gone", {8, 0, 0, 0, 0}}}, {}};
  EXPECT_TRUE(check_ledger(expected, expected).empty());
  Ledger measured = {"13.0", {{"f", {101, 0, 0, 0, 0}}, {"new", {8, 0, 0, 0, 0}}}, {}};
  EXPECT_EQ(check_ledger(expected, measured).size(), 3u);
  // Another compiler's registers are its own affair; its spills are not.
  measured = {"13.1", {{"f", {101, 0, 0, 0, 0}}, {"gone", {8, 0, 0, 0, 0}}}, {}};
  EXPECT_TRUE(check_ledger(expected, measured).empty());
  measured.kernels["f"].spill_loads = 4;
  ASSERT_EQ(check_ledger(expected, measured).size(), 1u);
  EXPECT_NE(check_ledger(expected, measured)[0].find("f spills"), std::string::npos);
  // A spill that someone wrote into the ledger stays a fault.
  EXPECT_EQ(check_ledger(measured, measured).size(), 1u);
}

TEST(Ledger, KnowsCodeByWhatIsCompiled) {
  cuda::SourceUnit unit;
  unit.path = "a.cu", unit.text = "int a;  // one\n\n  f(\"//x\");\n";
  unit.headers = {{"b.h", "// two\nint b;\n"}};
  const std::string code = code_digest(unit, {"-arch=sm_90a"});
  const auto with = [&](const std::string& text, const std::string& header) {
    cuda::SourceUnit other = unit;
    other.text = text, other.headers[0].second = header;
    return code_digest(other, {"-arch=sm_90a"});
  };
  EXPECT_EQ(with("int a;\n// other\nf(\"//x\");", "int b;  // three"), code);
  EXPECT_NE(with("int a;\nf(\"//y\");\n", "int b;\n"), code);
  EXPECT_NE(with(unit.text, "int c;\n"), code);
  EXPECT_NE(with("inta;\nf(\"//x\");", "int b;\n"), code);
  EXPECT_NE(code_digest(unit, {"-arch=sm_80"}), code);

  const Ledger ledger = {"13.0", {{"f", {100, 0, 0, 0, 0}}, {"g", {8, 0, 0, 0, 0}}}, {{"f", code}}};
  EXPECT_EQ(recorded(ledger, "13.0", "f", code), (Resources{100, 0, 0, 0, 0}));
  EXPECT_FALSE(recorded(ledger, "13.1", "f", code));
  EXPECT_FALSE(recorded(ledger, "13.0", "f", code + "0"));
  EXPECT_FALSE(recorded(ledger, "13.0", "g", code));  // its compiler warned
  EXPECT_FALSE(recorded(ledger, "13.0", "h", code));
}

TEST(Builder, SamplesWhatTheLedgerKnows) {
  std::string why;
  const cuda::Nvrtc* nvrtc = cuda::find_nvrtc(99, &why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  std::vector<ManifestEntry> manifest;
  for (const char* a : {"2", "3", "4"}) manifest.push_back({{"selftest/saxpy.cu", {{"A", a}}}, {"saxpy"}});
  Ledger known = build_bundle(manifest, *nvrtc, "", "").resources;
  ASSERT_EQ(known.code.size(), 3u);
  Build sample = build_bundle(manifest, *nvrtc, "", "", &known);
  EXPECT_EQ(sample.compiled, 1u);  // the first of the source
  EXPECT_EQ(sample.entries.size(), 1u);
  EXPECT_EQ(sample.resources.kernels, known.kernels);
  std::vector<std::string> left_out = report_left_out(report_text(sample));
  std::sort(left_out.begin(), left_out.end());
  EXPECT_EQ(left_out, (std::vector<std::string>{"selftest/saxpy.cu A=3", "selftest/saxpy.cu A=4"}));
  // Code that changed, or a ledger of another compiler: compiled, so that the ledger's word is checked.
  known.code["selftest/saxpy.cu saxpy A=3"] = "0";
  sample = build_bundle(manifest, *nvrtc, "", "", &known);
  EXPECT_EQ(sample.compiled, 2u);
  EXPECT_EQ(sample.left_out, std::vector<std::string>{"selftest/saxpy.cu A=4"});
  known.compiler = "1.0";
  EXPECT_EQ(build_bundle(manifest, *nvrtc, "", "", &known).compiled, 3u);
}

TEST(Builder, KeepsWhatDidNotChange) {
  std::string why;
  const cuda::Nvrtc* nvrtc = cuda::find_nvrtc(99, &why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  const std::string bundle = testing::TempDir() + "attune_builder_test.bundle";
  std::filesystem::remove(bundle);
  std::vector<ManifestEntry> manifest = {{{"selftest/saxpy.cu", {{"A", "2"}}}, {"saxpy"}}};
  Build build = build_bundle(manifest, *nvrtc, bundle, "");
  EXPECT_EQ(build.compiled, 1u);
  EXPECT_GT(build.resources.kernels.at("selftest/saxpy.cu saxpy A=2").registers, 0);
  ASSERT_EQ(cuda::write_bundle(bundle, nvrtc->major(), nvrtc->minor(), build.entries), "");

  const std::string report = report_text(build);
  manifest.push_back({{"selftest/saxpy.cu", {{"A", "3"}}}, {"saxpy"}});
  const Build next = build_bundle(manifest, *nvrtc, bundle, report);
  EXPECT_EQ(next.compiled, 1u);
  EXPECT_EQ(next.entries.size(), 2u);
  EXPECT_EQ(next.resources.kernels.at("selftest/saxpy.cu saxpy A=2"),
            build.resources.kernels.at("selftest/saxpy.cu saxpy A=2"));
  // The file of the report is not to be trusted blindly.
  EXPECT_EQ(build_bundle(manifest, *nvrtc, bundle, report.substr(0, report.size() / 2)).compiled, 2u);

  // A comment changes the key by which the library finds a module, and not its code.
  const std::string folder = testing::TempDir() + "attune_builder_test_kernels";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder + "/selftest");
  const cuda::SourceUnit unit = cuda::read_source("selftest/saxpy.cu", "");
  std::ofstream(folder + "/" + unit.path) << "// A comment.\n" << unit.text;
  for (const auto& [path, text] : unit.headers) std::ofstream(folder + "/" + path) << text;
  setenv("ATTUNE_KERNEL_DIR", folder.c_str(), 1);
  const Build commented = build_bundle({manifest[0]}, *nvrtc, bundle, report);
  unsetenv("ATTUNE_KERNEL_DIR");
  std::filesystem::remove_all(folder);
  EXPECT_EQ(commented.compiled, 0u);
  EXPECT_NE(commented.entries.at(0).key, build.entries.at(0).key);
  EXPECT_EQ(commented.entries.at(0).image, build.entries.at(0).image);

  // PTX has no resources to report, and is kept likewise.
  manifest.push_back({{"selftest/saxpy.cu", {{"A", "2"}}, cuda::portable_target()}, {"saxpy"}});
  build = build_bundle(manifest, *nvrtc, bundle, "");
  EXPECT_EQ(build.entries.size(), 3u);
  EXPECT_EQ(build.resources.kernels.size(), 2u);
  ASSERT_EQ(cuda::write_bundle(bundle, nvrtc->major(), nvrtc->minor(), build.entries), "");
  EXPECT_EQ(build_bundle(manifest, *nvrtc, bundle, report_text(build)).compiled, 0u);

  manifest[0].entries = {"no_such_kernel"};
  EXPECT_THROW(build_bundle(manifest, *nvrtc, bundle, ""), std::runtime_error);
  std::filesystem::remove(bundle);
}

}  // namespace
}  // namespace attune::bundle
