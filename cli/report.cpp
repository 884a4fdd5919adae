// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "attune/attune.hpp"
#include "device.h"
#include "files.h"
#include "text.h"
#include "user_error.h"

namespace attune::cli {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const Distribution& d) {
  return {{"count", d.count}, {"mean", d.mean}, {"p50", d.p50}, {"p90", d.p90}, {"p99", d.p99}, {"max", d.max}};
}

ordered_json to_json(const Rate& r) {
  return {{"steps", r.steps},      {"tokens", r.tokens},
          {"seconds", r.seconds},  {"tokens_per_second", r.tokens_per_second()},
          {"flops", r.work.flops}, {"bytes", r.work.bytes},
          {"gflops", r.gflops()},  {"gbps", r.gbps()}};
}

ordered_json model_json(const Model& m) {
  ordered_json j = {{"name", m.name},
                    {"title", m.title},
                    {"kind", model_kind_name(m.kind)},
                    {"num_layers", m.num_layers},
                    {"num_heads_q", m.num_heads_q},
                    {"num_heads_kv", m.num_heads_kv},
                    {"head_dim_qk", m.head_dim_qk},
                    {"head_dim_v", m.head_dim_v},
                    {"softmax_scale", m.scale()},
                    {"windows", m.windows},
                    {"alibi", m.alibi},
                    {"sinks", m.sinks},
                    {"topk", m.topk}};
  if (m.rope) j["rope"] = rope_style_name(m.rope->style);
  return j;
}

ordered_json settings_json(const ReplayResult& r) {
  const ReplayOptions& o = r.options;
  return {{"trace", r.trace_name},
          {"limit", o.limit},
          {"max_batch", o.max_batch},
          {"chunk", o.chunk},
          {"kv_dtype", kv_dtype_name(r.kv_dtype)},
          {"page_size", o.page_size},
          {"num_pages", r.num_pages},
          {"pool_bytes", r.pool_bytes},
          {"max_context", o.max_context},
          {"tensor_parallel", o.tensor_parallel},
          {"time_scale", o.time_scale},
          {"arrival", !o.no_arrival},
          {"seed", o.seed},
          {"verify", o.verify},
          {"device", device_name(r.device.device)},
          {"device_name", r.device.name},
          {"isa", r.device.isa},
          {"threads", r.threads},
          {"version", std::string(version())},
          {"plans", r.plans}};
}

ordered_json steps_json(const ReplayResult& r) {
  ordered_json j;
  for (const char* key : {"start", "seconds", "sequences", "prefill_tokens", "decode_tokens", "pages_used", "flops",
                          "bytes", "layer_kind"}) {
    j[key] = ordered_json::array();
  }
  for (const StepRecord& s : r.steps) {
    j["start"].push_back(s.start);
    j["seconds"].push_back(s.seconds);
    j["sequences"].push_back(s.sequences);
    j["prefill_tokens"].push_back(s.prefill_tokens);
    j["decode_tokens"].push_back(s.decode_tokens);
    j["pages_used"].push_back(s.pages_used);
    j["flops"].push_back(s.work.flops);
    j["bytes"].push_back(s.work.bytes);
    if (!s.layer_kind.empty()) j["layer_kind"].push_back(s.layer_kind);
  }
  return j;
}

ordered_json requests_json(const ReplayResult& r) {
  ordered_json j;
  for (const char* key : {"arrival", "first_token", "finish", "prompt_tokens", "output_tokens", "preemptions"})
    j[key] = ordered_json::array();
  const auto time = [](double t) { return t >= 0 ? ordered_json(t) : ordered_json(nullptr); };
  for (size_t i = 0; i < r.requests.size(); ++i) {
    j["arrival"].push_back(r.requests[i].arrival);
    j["first_token"].push_back(time(r.requests[i].first_token));
    j["finish"].push_back(time(r.requests[i].finish));
    j["prompt_tokens"].push_back(r.lengths[i].prompt_tokens);
    j["output_tokens"].push_back(r.lengths[i].output_tokens);
    j["preemptions"].push_back(r.requests[i].preemptions);
  }
  return j;
}

ordered_json verify_json(const VerifyResult& v) {
  ordered_json j = {
      {"rows", v.rows}, {"failed", v.failed}, {"worst_error_over_bound", v.worst_ratio}, {"seconds", v.seconds}};
  if (v.first_mismatch) j["first_mismatch"] = v.first_mismatch->text();
  return j;
}

}  // namespace

void prepare_output(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw UserError(fmt::format("--output {}: {}", directory, error.message()));
  for (const char* name : {"report.json", "report.html"})
    require_writable((std::filesystem::path(directory) / name).string());
}

std::string report_json(const ReplayResult& r, const Summary& s) {
  ordered_json j;
  j["settings"] = settings_json(r);
  j["model"] = model_json(r.model);
  ordered_json& summary = j["summary"];
  summary = {{"requests", r.num_requests},
             {"finished", r.num_finished},
             {"preemptions", r.num_preemptions},
             {"interrupted", r.interrupted},
             {"prompt_tokens", s.prompt_tokens},
             {"generated_tokens", s.generated_tokens},
             {"all", to_json(s.all)},
             {"prefill", to_json(s.prefill)},
             {"decode", to_json(s.decode)},
             {"step_seconds", to_json(s.step_seconds)},
             {"prefill_step_seconds", to_json(s.prefill_step_seconds)},
             {"decode_step_seconds", to_json(s.decode_step_seconds)},
             {"first_token_seconds", to_json(s.first_token_seconds)},
             {"output_token_seconds", to_json(s.output_token_seconds)},
             {"kv_peak", s.kv_peak},
             {"wall_seconds", r.wall_seconds}};
  if (r.ceilings) summary["decode"]["share_of_read_ceiling"] = s.decode.gbps() / r.ceilings->read_gbps_all;
  if (r.ceilings && r.ceilings->fma_gflops_all == 0) {
    // A GPU: what its tensor cores can do is not measured.
    summary["decode"]["read_ceiling_gbps"] = r.ceilings->read_gbps_all;
  } else if (r.ceilings) {
    j["ceilings"] = {{"fma_gflops_1", r.ceilings->fma_gflops_1},
                     {"fma_gflops_all", r.ceilings->fma_gflops_all},
                     {"read_gbps_all", r.ceilings->read_gbps_all},
                     {"threads", r.ceilings->threads}};
    summary["prefill"]["share_of_fma_ceiling"] = s.prefill.gflops() / r.ceilings->fma_gflops_all;
  }
  j["verify"] = verify_json(r.verify);
  j["steps"] = steps_json(r);
  j["requests"] = requests_json(r);
  // One line for each part: small, and still fit for a person's eyes.
  std::string text;
  for (const auto& [key, value] : j.items()) {
    text += fmt::format("{}\"{}\": {}", text.empty() ? "{\n" : ",\n", key,
                        value.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  }
  return text + "\n}\n";
}

std::string write_report(const ReplayResult& result, const Summary& summary) {
  const std::filesystem::path directory = result.options.output;
  const std::string json_path = (directory / "report.json").string(), html_path = (directory / "report.html").string();
  OutputFile(json_path).write(report_json(result, summary));
  std::string why;
  std::string plots;
  if (result.options.no_plots) {
    why = "no plots: they were turned off";
  } else {
    plots = make_plots(json_path, why);
    if (!why.empty()) say("warning: {}\n", why);
  }
  OutputFile(html_path).write(report_html(result, summary, plots, why));
  return html_path;
}

}  // namespace attune::cli
