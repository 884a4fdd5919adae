// SPDX-License-Identifier: Apache-2.0
// attune explain: which kernel each call of a layer gets, and why.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "descriptors.h"
#include "device.h"
#include "files.h"
#include "layer_state.h"
#include "page_allocator.h"
#include "text.h"
#include "work.h"

namespace attune::cli {
namespace {

using nlohmann::ordered_json;

struct ExplainOptions {
  std::string model = "llama-3-8b", device = "auto", kv_dtype, json;
  int64_t batch = 8, seqlen_q = 1, seqlen_kv = 4096, page_size = 16, tensor_parallel = 1;
};

struct Call {
  std::string name;
  Attention descriptor;
  Work work;
};

Work operator*(const Work& work, int64_t times) {
  return {work.flops * static_cast<double>(times), work.bytes * static_cast<double>(times)};
}

// The calls of a step in which every sequence has seqlen_q queries after so many cached tokens that it has seqlen_kv
// keys in all.
std::vector<Call> layer_calls(const Model& m, KvDtype kv, const ExplainOptions& o, const LayerParameters& layer) {
  const int64_t cached = o.seqlen_kv - o.seqlen_q, max_pages = pages_for(o.seqlen_kv, o.page_size);
  const attune_kv_cache cache = kv_cache_shape(m, kv, o.page_size, o.batch * max_pages);
  const CallShape shape{o.batch, o.batch * o.seqlen_q, max_pages, o.seqlen_q, o.seqlen_kv};
  std::vector<Call> calls;
  if (m.kind == ModelKind::kSparseMla) {
    Work work;
    for (int64_t i = 0; i < o.seqlen_q; ++i) work += sparse_work(m, kv, std::min(m.topk, cached + i + 1));
    calls.push_back({"sparse attention", sparse_call(m, kv, layer, cache, shape), work * o.batch});
    return calls;
  }
  if (m.kind == ModelKind::kEncoderDecoder) {
    const CallShape prompt{o.batch, o.batch * o.seqlen_kv, max_pages, o.seqlen_kv, o.seqlen_kv};
    calls.push_back(
        {"encoder self attention", encoder_call(m, kv, layer, prompt), encoder_work(m, kv, o.seqlen_kv) * o.batch});
  }
  for (size_t kind = 0; kind < m.windows.size(); ++kind) {
    const auto i = static_cast<int64_t>(kind);
    const std::string layer_name = layer_kind_name(m, i);
    calls.push_back({layer_name.empty() ? "self attention" : fmt::format("self attention ({})", layer_name),
                     decoder_call(m, kv, layer, cache, i, shape),
                     decoder_work(m, kv, cached, o.seqlen_q, m.windows[kind]) * o.batch});
  }
  if (m.kind == ModelKind::kEncoderDecoder) {
    calls.push_back({"cross attention", cross_call(m, kv, layer, cache, shape),
                     cross_work(m, kv, o.seqlen_q, o.seqlen_kv) * o.batch});
  }
  return calls;
}

struct Answer {
  Support support;
  std::string plan;
  size_t workspace = 0;
};

Answer ask(const Call& call, attune_device device) {
  Answer answer{supported(call.descriptor, device), "", 0};
  if (!answer.support) return answer;
  const Plan plan(call.descriptor, device);
  answer.plan = plan.describe();
  answer.workspace = plan.workspace_size();
  return answer;
}

void print_call(const Call& call, const Answer& answer) {
  constexpr size_t kIndent = 13;
  fmt::print("{}\n", call.name);
  if (!answer.support) {
    fmt::print("{}\n", wrapped("  not supported: " + answer.support.reason, kIndent));
    return;
  }
  // A description may have several lines.
  std::string plan = answer.plan;
  for (size_t at = plan.find('\n'); at != std::string::npos; at = plan.find('\n', at + 1))
    plan.insert(at + 1, std::string(kIndent, ' '));
  plan.erase(plan.find_last_not_of(" \n") + 1);
  fmt::print("{}\n", wrapped("  plan       " + plan, kIndent));
  fmt::print("  workspace  {}\n", counted(static_cast<int64_t>(answer.workspace), "byte"));
  const double intensity = call.work.flops / call.work.bytes;
  fmt::print("  work       {}, {} at least: {} FLOP a byte\n", with_unit(call.work.flops, "FLOP"),
             with_unit(call.work.bytes, "B"),
             intensity < 1000 ? fmt::format("{:.3g}", intensity) : fmt::format("{:.0f}", intensity));
}

ordered_json to_json(const Call& call, const Answer& answer) {
  ordered_json j = {{"call", call.name}, {"supported", static_cast<bool>(answer.support)}};
  if (!answer.support) {
    j["reason"] = answer.support.reason;
    return j;
  }
  j["plan"] = answer.plan;
  j["workspace_bytes"] = answer.workspace;
  j["flops"] = call.work.flops;
  j["bytes"] = call.work.bytes;
  return j;
}

void explain(const ExplainOptions& o) {
  if (o.seqlen_q > o.seqlen_kv) {
    throw UserError(fmt::format("--seqlen-q is {} and --seqlen-kv {}; the keys include those of the queries",
                                o.seqlen_q, o.seqlen_kv));
  }
  const Model model = shard(load_model(o.model), o.tensor_parallel);
  const KvDtype kv = o.kv_dtype.empty() ? model.kv_dtype : kv_dtype_from_name(o.kv_dtype);
  require_kv_dtype(model, kv);
  const attune_device device = parse_device(o.device);
  std::optional<OutputFile> file;
  if (!o.json.empty()) file.emplace(o.json);
  const LayerParameters layer(model, o.seqlen_kv);
  fmt::print("{}\n", wrapped(fmt::format("{}: {}\n{}, {} and {} each, {} cache in pages of {}, on {} ({})\n",
                                         model.name, model.title, counted(o.batch, "sequence"),
                                         counted(o.seqlen_q, "query", "queries"), counted(o.seqlen_kv, "key"),
                                         kv_dtype_name(kv), o.page_size, device_name(device), device_info(device).isa),
                             2));
  ordered_json calls = ordered_json::array();
  bool all_supported = true;
  for (const Call& call : layer_calls(model, kv, o, layer)) {
    const Answer answer = ask(call, device);
    all_supported &= static_cast<bool>(answer.support);
    print_call(call, answer);
    calls.push_back(to_json(call, answer));
  }
  if (file) {
    const ordered_json j = {
        {"model", model.name},    {"device", device_name(device)}, {"kv_dtype", kv_dtype_name(kv)}, {"batch", o.batch},
        {"seqlen_q", o.seqlen_q}, {"seqlen_kv", o.seqlen_kv},      {"page_size", o.page_size},      {"calls", calls}};
    file->write(j.dump(1) + "\n");
  }
  if (!all_supported) throw CLI::RuntimeError(kExitFailed);
}

}  // namespace

void add_explain_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("explain", "Say which kernel a layer of a model gets, and why");
  auto options = std::make_shared<ExplainOptions>();
  ExplainOptions& o = *options;
  const auto whole = [&](const char* name, int64_t& value, const char* text) {
    command->add_option(name, value, text)->check(CLI::Range(int64_t{1}, int64_t{1} << 24))->capture_default_str();
  };
  command->add_option("--model", o.model, "Model name (see attune models) or a .json file")->capture_default_str();
  command->add_option("--device", o.device, kDeviceHelp)->capture_default_str();
  command->add_option("--kv-dtype", o.kv_dtype, "bf16, fp16, fp32, e4m3, int8 or mla656; default: the model's");
  whole("--batch", o.batch, "Sequences");
  whole("--seqlen-q", o.seqlen_q, "Queries of each");
  whole("--seqlen-kv", o.seqlen_kv, "Keys of each, those of the queries included");
  whole("--page-size", o.page_size, "Tokens in a page of the KV cache");
  whole("--tensor-parallel", o.tensor_parallel, "Take the share of the heads that one of N devices holds");
  command->add_option("--json", o.json, "Write the answer to this file as well")->check(refuse_empty);
  command->callback([options] { explain(*options); });
}

}  // namespace attune::cli
