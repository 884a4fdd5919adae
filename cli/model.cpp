// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "embedded.h"
#include "files.h"
#include "text.h"
#include "user_error.h"

namespace attune::cli {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<const char*, KvDtype>, 6> kKvDtypes = {{{"bf16", KvDtype::kBf16},
                                                                       {"fp16", KvDtype::kFp16},
                                                                       {"fp32", KvDtype::kFp32},
                                                                       {"e4m3", KvDtype::kE4m3},
                                                                       {"int8", KvDtype::kInt8},
                                                                       {"mla656", KvDtype::kMla656}}};
constexpr std::array<std::pair<const char*, ModelKind>, 4> kKinds = {{{"decoder", ModelKind::kDecoder},
                                                                      {"mla", ModelKind::kMla},
                                                                      {"sparse-mla", ModelKind::kSparseMla},
                                                                      {"encoder-decoder", ModelKind::kEncoderDecoder}}};
constexpr std::array<std::pair<const char*, attune_rope_style>, 4> kRopeStyles = {{{"linear", ATTUNE_ROPE_LINEAR},
                                                                                   {"glm2", ATTUNE_ROPE_GLM2},
                                                                                   {"yarn", ATTUNE_ROPE_YARN},
                                                                                   {"llama3", ATTUNE_ROPE_LLAMA3}}};

template <typename Table>
std::string names(const Table& table) {
  std::string text;
  for (const auto& [name, value] : table) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

// The fields of one JSON object. Whatever is not asked for is an error, so a misspelt name cannot pass.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) throw UserError(where_ + ": must be a JSON object");
  }

  template <typename T>
  void read(const char* key, T& value, bool required = false) {
    known_.push_back(key);
    const auto at = object_.find(key);
    if (at == object_.end()) {
      if (required) throw UserError(fmt::format("{}: \"{}\" is missing", where_, key));
      return;
    }
    const bool fits = std::is_same_v<T, bool>          ? at->is_boolean()
                      : std::is_same_v<T, std::string> ? at->is_string()
                      : std::is_same_v<T, int64_t>     ? at->is_number_integer()
                      : std::is_same_v<T, double>      ? at->is_number()
                                                       : at->is_array();
    try {
      if (!fits) throw UserError("");
      at->get_to(value);
    } catch (const std::exception&) {
      throw UserError(fmt::format("{}: \"{}\" is {}, which is of the wrong type", where_, key, at->dump()));
    }
  }

  // A whole number in [least, most].
  void read_in(const char* key, int64_t& value, int64_t least, int64_t most, bool required = false) {
    read(key, value, required);
    if (object_.contains(key))
      check_range(key, static_cast<double>(value), static_cast<double>(least), static_cast<double>(most));
  }
  void read_in(const char* key, double& value, double least, double most) {
    read(key, value);
    if (object_.contains(key)) check_range(key, value, least, most);
  }
  template <typename Table, typename T>
  void read_name(const char* key, const Table& table, T& value, bool required = false) {
    std::string text;
    read(key, text, required);
    if (!object_.contains(key)) return;
    const auto at = std::find_if(table.begin(), table.end(), [&](const auto& entry) { return text == entry.first; });
    if (at == table.end())
      throw UserError(fmt::format("{}: \"{}\" is \"{}\"; known are {}", where_, key, text, names(table)));
    value = at->second;
  }
  const json* object(const char* key) {
    known_.push_back(key);
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  const std::string& where() const { return where_; }

  void done() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(known_.begin(), known_.end(), key) == known_.end()) {
        throw UserError(
            fmt::format("{}: \"{}\" is not a known field; known are {}", where_, key, fmt::join(known_, ", ")));
      }
    }
  }

 private:
  void check_range(const char* key, double value, double least, double most) const {
    if (!(value >= least && value <= most)) {
      throw UserError(fmt::format("{}: \"{}\" is {}; it must be {} to {}", where_, key, value, least, most));
    }
  }

  const json& object_;
  std::string where_;
  std::vector<std::string> known_;
};

RopeSpec parse_rope(const json& object, const Model& model, const std::string& where) {
  Fields fields(object, where);
  RopeSpec rope;
  rope.dim = model.head_dim_qk;
  fields.read_name("style", kRopeStyles, rope.style, true);
  fields.read_in("dim", rope.dim, 2, model.head_dim_qk);
  fields.read_in("offset", rope.offset, 0, model.head_dim_qk - rope.dim);
  fields.read("interleaved", rope.interleaved);
  fields.read_in("theta", rope.theta, 1.0 + 1e-9, 1e12);
  fields.read_in("scale", rope.scale, 1e-6, 1e6);
  fields.read_in("mscale", rope.mscale, 1e-6, 1e6);
  fields.read_in("beta_fast", rope.beta_fast, 1e-6, 1e6);
  fields.read_in("beta_slow", rope.beta_slow, 1e-6, 1e6);
  fields.read_in("low_freq_factor", rope.low_freq_factor, 1e-6, 1e6);
  fields.read_in("high_freq_factor", rope.high_freq_factor, 1e-6, 1e6);
  fields.read_in("max_position", rope.max_position, 1, int64_t{1} << 32);
  fields.done();
  if (rope.dim % 2 != 0) throw UserError(fmt::format("{}: \"dim\" is {}; it must be even", where, rope.dim));
  if ((rope.style == ATTUNE_ROPE_YARN || rope.style == ATTUNE_ROPE_LLAMA3) && rope.max_position == 0) {
    throw UserError(where + ": \"max_position\" is missing; this style needs the original context length");
  }
  return rope;
}

void check_kind(const Model& m, const std::string& source) {
  if (m.num_heads_q % m.num_heads_kv != 0) {
    throw UserError(fmt::format("{}: \"num_heads_q\" ({}) is not a multiple of \"num_heads_kv\" ({})", source,
                                m.num_heads_q, m.num_heads_kv));
  }
  if (m.is_mla() && (m.num_heads_kv != 1 || m.head_dim_v > m.head_dim_qk)) {
    throw UserError(
        source + ": an MLA model has one KV head, and V is part of K: \"head_dim_v\" must not exceed \"head_dim_qk\"");
  }
  if ((m.kind == ModelKind::kSparseMla) != (m.topk > 0))
    throw UserError(source + ": \"topk\" belongs to the kind sparse-mla, and only there");
  if (m.index_heads > 0 && m.topk == 0)
    throw UserError(source + ": \"indexer\" belongs to the kind sparse-mla, and only there");
  if ((m.kind == ModelKind::kEncoderDecoder) != (m.t5_num_buckets > 0)) {
    throw UserError(source + ": \"t5_bias\" belongs to the kind encoder-decoder, and only there");
  }
  const bool windowed = m.windows != std::vector<int64_t>{0};
  if (windowed && (m.kind == ModelKind::kSparseMla || m.kind == ModelKind::kEncoderDecoder)) {
    throw UserError(fmt::format("{}: the kind {} has no windows", source, model_kind_name(m.kind)));
  }
}

}  // namespace

const char* kv_dtype_name(KvDtype dtype) {
  for (const auto& [name, value] : kKvDtypes) {
    if (value == dtype) return name;
  }
  return "?";
}

KvDtype kv_dtype_from_name(std::string_view name) {
  for (const auto& [known, value] : kKvDtypes) {
    if (name == known) return value;
  }
  throw UserError(fmt::format("unknown KV dtype '{}'; known are {}", name, names(kKvDtypes)));
}

attune_dtype activation_dtype(KvDtype dtype) {
  if (dtype == KvDtype::kFp32) return ATTUNE_FLOAT32;
  return dtype == KvDtype::kFp16 ? ATTUNE_FLOAT16 : ATTUNE_BFLOAT16;
}

int64_t kv_element_size(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kFp32:
      return 4;
    case KvDtype::kBf16:
    case KvDtype::kFp16:
      return 2;
    default:
      return 1;
  }
}

const char* model_kind_name(ModelKind kind) {
  for (const auto& [name, value] : kKinds) {
    if (value == kind) return name;
  }
  return "?";
}

const char* rope_style_name(attune_rope_style style) {
  for (const auto& [name, value] : kRopeStyles) {
    if (value == style) return name;
  }
  return "none";
}

double Model::scale() const {
  return softmax_scale > 0 ? softmax_scale : 1.0 / std::sqrt(static_cast<double>(head_dim_qk));
}

int64_t Model::kv_bytes_per_token(KvDtype dtype) const {
  if (dtype == KvDtype::kMla656) return 656;
  const int64_t scale_bytes = dtype == KvDtype::kInt8 ? 4 : 0;  // one for each token and head
  const int64_t k = head_dim_qk * kv_element_size(dtype) + scale_bytes;
  const int64_t v = is_mla() ? 0 : head_dim_v * kv_element_size(dtype) + scale_bytes;
  return num_heads_kv * (k + v);
}

Model parse_model(std::string_view text, const std::string& source) {
  json root;
  try {
    root = json::parse(text);
  } catch (const json::parse_error& e) {
    const std::string_view before = text.substr(0, std::min(e.byte > 0 ? e.byte - 1 : 0, text.size()));
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t start = before.rfind('\n');
    const size_t column = before.size() - (start == std::string_view::npos ? 0 : start + 1) + 1;
    throw UserError(fmt::format("{}: line {}, column {}: not JSON", source, line, column));
  }
  Fields fields(root, source);
  Model m;
  fields.read("name", m.name, true);
  fields.read("title", m.title);
  fields.read_name("kind", kKinds, m.kind, true);
  fields.read_in("num_layers", m.num_layers, 1, 4096, true);
  fields.read_in("num_heads_q", m.num_heads_q, 1, 1024, true);
  fields.read_in("num_heads_kv", m.num_heads_kv, 1, 1024, true);
  fields.read_in("head_dim_qk", m.head_dim_qk, 1, 576, true);
  m.head_dim_v = m.head_dim_qk;
  fields.read_in("head_dim_v", m.head_dim_v, 1, 576);
  fields.read_in("max_context", m.max_context, 1, int64_t{1} << 32, true);
  fields.read_in("softmax_scale", m.softmax_scale, 1e-6, 1e6);
  fields.read_in("softcap", m.softcap, 0.0, 1e6);
  fields.read("windows", m.windows);
  const auto least = std::min_element(m.windows.begin(), m.windows.end());
  if (least == m.windows.end() || *least < 0) {
    throw UserError(
        fmt::format("{}: \"windows\" {}; it must list a number of keys for each kind of layer (0: all keys)", source,
                    m.windows.empty() ? "is empty" : fmt::format("has {}", *least)));
  }
  fields.read("alibi", m.alibi);
  fields.read("sinks", m.sinks);
  fields.read_in("topk", m.topk, 1, 1 << 20);
  fields.read_name("kv_dtype", kKvDtypes, m.kv_dtype);
  if (const json* t5 = fields.object("t5_bias")) {
    Fields bias(*t5, source + ": \"t5_bias\"");
    bias.read_in("num_buckets", m.t5_num_buckets, 4, 1 << 16, true);
    bias.read_in("max_distance", m.t5_max_distance, 4, 1 << 20, true);
    bias.done();
  }
  if (const json* indexer = fields.object("indexer")) {
    Fields of_indexer(*indexer, source + ": \"indexer\"");
    of_indexer.read_in("num_heads", m.index_heads, 1, 1024, true);
    of_indexer.read_in("head_dim", m.index_head_dim, 1, 576, true);
    of_indexer.done();
  }
  if (const json* rope = fields.object("rope")) m.rope = parse_rope(*rope, m, source + ": \"rope\"");
  fields.done();
  check_kind(m, source);
  require_kv_dtype(m, m.kv_dtype);
  return m;
}

void require_kv_dtype(const Model& model, KvDtype dtype) {
  if (dtype == KvDtype::kMla656 && !(model.is_mla() && model.head_dim_qk == 576 && model.head_dim_v == 512)) {
    throw UserError(fmt::format("the KV dtype mla656 is for MLA with head dims 576 and 512; {} has {} and {}",
                                model.name, model.head_dim_qk, model.head_dim_v));
  }
}

std::vector<Model> builtin_models() {
  std::vector<Model> models;
  for (const EmbeddedFile& file : embedded_files()) {
    if (file.name.substr(0, 7) == "models/") models.push_back(parse_model(file.text, std::string(file.name)));
  }
  std::sort(models.begin(), models.end(), [](const Model& a, const Model& b) { return a.name < b.name; });
  return models;
}

Model load_model(const std::string& name) {
  const bool is_path =
      name.find('/') != std::string::npos || (name.size() > 5 && name.substr(name.size() - 5) == ".json");
  if (is_path) {
    return parse_model(read_file(name), name);
  }
  std::string known;
  for (Model& model : builtin_models()) {
    if (model.name == name) return std::move(model);
    known += (known.empty() ? "" : ", ") + model.name;
  }
  throw UserError(fmt::format("unknown model '{}'; known are {} (or give a .json file)", name, known));
}

Model shard(const Model& model, int64_t ways) {
  if (ways == 1) return model;
  Model part = model;
  // A KV head that cannot be divided is repeated on every part, as engines do.
  if (ways < 1 || model.num_heads_q % ways != 0 || (model.num_heads_kv % ways != 0 && ways % model.num_heads_kv != 0)) {
    throw UserError(fmt::format("{} has {} and {}, which cannot be divided by {}", model.name,
                                counted(model.num_heads_q, "query head"), counted(model.num_heads_kv, "KV head"),
                                ways));
  }
  part.num_heads_q = model.num_heads_q / ways;
  part.num_heads_kv = std::max<int64_t>(1, model.num_heads_kv / ways);
  return part;
}

}  // namespace attune::cli
