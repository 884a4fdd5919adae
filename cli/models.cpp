// SPDX-License-Identifier: Apache-2.0
// attune models.
#include <fmt/format.h>

#include <algorithm>

#include "commands.h"
#include "model.h"
#include "text.h"

namespace attune::cli {
namespace {

std::string extras(const Model& m) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (m.rope) {
    add(fmt::format("RoPE {}", rope_style_name(m.rope->style)));
    if (m.rope->dim != m.head_dim_qk) add(fmt::format("{} from {}", counted(m.rope->dim, "column"), m.rope->offset));
    if (m.rope->interleaved) add("interleaved");
  }
  if (m.alibi) add("ALiBi");
  if (m.t5_num_buckets > 0) add("T5 bias of " + counted(m.t5_num_buckets, "bucket"));
  for (const int64_t window : m.windows) {
    if (window > 0)
      add(fmt::format("window {}{}", window,
                      m.windows.size() > 1 ? fmt::format(" on 1 layer of {}", m.windows.size()) : ""));
  }
  if (m.sinks) add("sinks");
  if (m.softcap > 0) add(fmt::format("softcap {:g}", m.softcap));
  if (m.topk > 0) add(fmt::format("topk {}", m.topk));
  return text;
}

}  // namespace

void add_models_command(CLI::App& app) {
  app.add_subcommand("models", "List the built-in models")->callback([] {
    const std::vector<Model> models = builtin_models();
    size_t width = 0;
    for (const Model& m : models) width = std::max(width, m.name.size());
    fmt::print("{:<{}}  {:<15}  layers  heads q/kv  dims qk/v  cache\n", "name", width, "kind");
    for (const Model& m : models) {
      fmt::print("{:<{}}  {:<15}  {:>6}  {:>10}  {:>9}  {}\n", m.name, width, model_kind_name(m.kind), m.num_layers,
                 fmt::format("{}/{}", m.num_heads_q, m.num_heads_kv), fmt::format("{}/{}", m.head_dim_qk, m.head_dim_v),
                 kv_dtype_name(m.kv_dtype));
      // What it has beside plain attention, on a line of its own: there are no columns left.
      if (const std::string text = extras(m); !text.empty())
        fmt::print("{}\n", wrapped(std::string(width + 2, ' ') + text, width + 2));
    }
  });
}

}  // namespace attune::cli
