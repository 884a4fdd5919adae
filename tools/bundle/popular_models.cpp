// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "popular.h"

namespace attune::bundle {
namespace {

using nlohmann::json;

template <class T>
T field(const json& object, const char* key, T otherwise) {
  return object.contains(key) ? object.at(key).get<T>() : otherwise;
}

PopularModel parse_model(const json& j) {
  PopularModel m;
  m.name = j.at("name").get<std::string>();
  m.num_heads_q = j.at("num_heads_q").get<int64_t>();
  m.num_heads_kv = j.at("num_heads_kv").get<int64_t>();
  m.head_dim_qk = j.at("head_dim_qk").get<int64_t>();
  m.head_dim_v = field(j, "head_dim_v", m.head_dim_qk);
  m.alibi = field(j, "alibi", false);
  m.sinks = field(j, "sinks", false);
  m.softcap = field(j, "softcap", 0.0);
  m.latent = j.at("kind") == "mla" || j.at("kind") == "sparse-mla";
  m.packed_cache = field(j, "kv_dtype", std::string()) == "mla656";
  m.cross_attention = j.at("kind") == "encoder-decoder";
  if (j.contains("t5_bias")) {
    m.t5_buckets = j["t5_bias"].at("num_buckets").get<int64_t>();
    m.t5_max_distance = j["t5_bias"].at("max_distance").get<int64_t>();
  }
  if (j.contains("rope")) {
    m.rope_dim = field(j["rope"], "dim", m.head_dim_qk);
    m.rope_offset = field(j["rope"], "offset", int64_t{0});
    m.rope_interleaved = field(j["rope"], "interleaved", false);
  }
  for (const int64_t window : field(j, "windows", std::vector<int64_t>())) m.window = std::max(m.window, window);
  return m;
}

}  // namespace

std::vector<PopularModel> read_models(const std::string& directory) {
  std::vector<PopularModel> models;
  for (const auto& file : std::filesystem::directory_iterator(directory)) {
    if (file.path().extension() != ".json") continue;
    try {
      std::ifstream in(file.path());
      models.push_back(parse_model(json::parse(in)));
    } catch (const std::exception& e) {
      throw std::runtime_error(file.path().string() + ": " + e.what());
    }
  }
  if (models.empty()) throw std::runtime_error(directory + " holds no models");
  std::sort(models.begin(), models.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return models;
}

}  // namespace attune::bundle
