// SPDX-License-Identifier: Apache-2.0
#include "case.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>

#include "embedded.h"
#include "json_object.h"

namespace attune::cases {
namespace {

std::vector<int64_t> lengths_of(const json& value, int64_t batch, const std::string& where) {
  if (value.is_array()) return value.get<std::vector<int64_t>>();
  if (value.is_number_integer()) return std::vector<int64_t>(static_cast<size_t>(batch), value.get<int64_t>());
  Object object(value, where);
  std::vector<int64_t> range;
  int64_t seed = 0;
  object.get("random", range);
  object.get("seed", seed);
  object.finish();
  if (range.size() != 2) throw std::runtime_error(where + ".random must be [low, high]");
  Random random("lengths", static_cast<uint64_t>(seed));
  std::vector<int64_t> lengths(static_cast<size_t>(batch));
  for (int64_t& length : lengths) length = random.integer(range[0], range[1]);
  return lengths;
}

void read_cache(Object& parent, CacheSpec& cache) {
  const json* value = parent.find("cache");
  if (value == nullptr) return;
  Object object(*value, parent.where() + ".cache");
  object.get("dtype", cache.dtype);
  object.choose<attune_kv_format>(
      "format", cache.format,
      {{"plain", ATTUNE_KV_PLAIN}, {"mla_656", ATTUNE_KV_MLA_656}, {"mla_584", ATTUNE_KV_MLA_584}});
  object.choose<attune_kv_layout>("layout", cache.layout,
                                  {{"nhd", ATTUNE_KV_NHD}, {"hnd", ATTUNE_KV_HND}, {"xpacked", ATTUNE_KV_XPACKED}});
  std::map<std::string, ScaleMode> modes;
  for (const NamedMode& m : scale_modes()) modes[m.name] = m.mode;
  object.choose("scales", cache.scales, modes);
  object.get("page_size", cache.page_size);
  object.get("ring_capacity", cache.ring_capacity);
  object.get("slack", cache.slack);
  object.get("x", cache.x);
  object.get("batch_index", cache.batch_index);
  object.get("separate_v_table", cache.separate_v_table);
  object.get("share_prefix", cache.share_prefix);
  object.get("one_pool", cache.one_pool);
  object.get("page_padding", cache.page_padding);
  object.get("row_padding", cache.row_padding);
  object.finish();
  if (cache.format != ATTUNE_KV_PLAIN) cache.layout = ATTUNE_KV_BYTES;
}

void read_sparse(Object& parent, const char* key, SparseSpec& sparse, int64_t* page_size) {
  const json* value = parent.find(key);
  if (value == nullptr) return;
  Object object(*value, parent.where() + "." + key);
  object.get("topk", sparse.topk);
  object.get("per_head", sparse.per_head);
  object.choose<Lengths>("topk_length", sparse.lengths,
                         {{"none", Lengths::kNone}, {"batch", Lengths::kBatch}, {"token", Lengths::kToken}});
  object.get("invalid", sparse.invalid);
  object.get("slots", sparse.slots);
  if (page_size != nullptr) object.get("page_size", *page_size);
  object.finish();
}

void read_indexer(Object& parent, IndexerSpec& indexer) {
  const json* value = parent.find("indexer");
  if (value == nullptr) return;
  Object object(*value, parent.where() + ".indexer");
  object.get("topk", indexer.topk);
  object.get("positions", indexer.positions);
  object.get("slot_page_size", indexer.slot_page_size);
  object.get("bad_pages", indexer.bad_pages);
  object.get("q_scale", indexer.q_scale);
  object.get("clear", indexer.clear);
  object.get("lengths", indexer.lengths);
  object.get("weights", indexer.weights);
  object.finish();
}

void read_backward(Object& parent, BackwardSpec& backward) {
  const json* value = parent.find("backward");
  if (value == nullptr) return;
  Object object(*value, parent.where() + ".backward");
  backward.on = true;
  object.get("dtype", backward.dtype);
  object.get("dlse", backward.dlse);
  object.get("outputs", backward.outputs);
  object.get("plant", backward.plant);
  object.finish();
}

void read_rope(Object& parent, RopeSpec& rope) {
  const json* value = parent.find("rope");
  if (value == nullptr) return;
  Object object(*value, parent.where() + ".rope");
  object.choose<int32_t>("style", rope.style,
                         {{"none", ATTUNE_ROPE_NONE},
                          {"linear", ATTUNE_ROPE_LINEAR},
                          {"glm2", ATTUNE_ROPE_GLM2},
                          {"dynamic_ntk", ATTUNE_ROPE_DYNAMIC_NTK},
                          {"qwen_dynamic_ntk", ATTUNE_ROPE_QWEN_DYNAMIC_NTK},
                          {"yarn", ATTUNE_ROPE_YARN},
                          {"llama3", ATTUNE_ROPE_LLAMA3},
                          {"mrope", ATTUNE_ROPE_MROPE}});
  object.get("dim", rope.dim);
  object.get("offset", rope.offset);
  object.get("interleaved", rope.interleaved);
  object.get("theta", rope.theta);
  object.get("scale", rope.scale);
  object.get("max_position", rope.max_position);
  object.get("mscale", rope.mscale);
  object.get("tables", rope.tables);
  object.get("positions", rope.positions);
  object.get("mrope_section", rope.mrope_section);
  object.get("mrope_interleaved", rope.mrope_interleaved);
  object.finish();
}

void read_prologue(Object& parent, PrologueSpec& prologue) {
  const json* value = parent.find("prologue");
  if (value == nullptr) return;
  Object object(*value, parent.where() + ".prologue");
  object.get("qkv_scale", prologue.qkv_scale);
  object.get("q_bias", prologue.q_bias);
  object.get("k_bias", prologue.k_bias);
  object.get("v_bias", prologue.v_bias);
  object.get("ia3_tasks", prologue.ia3_tasks);
  object.get("ia3_no_task", prologue.ia3_no_task);
  read_rope(object, prologue.rope);
  object.get("logn", prologue.logn);
  object.get("append", prologue.append);
  object.get("power_of_two_scales", prologue.power_of_two_scales);
  object.finish();
}

void read_score(Object& o, Case& c) {
  o.get("softmax_scale", c.softmax_scale);
  o.get("softcap", c.softcap);
  o.get("alibi", c.alibi);
  o.get("alibi_sqrt", c.alibi_sqrt);
  o.get("alibi_negative", c.alibi_negative);
  o.get("bias", c.bias);
  o.get("new_token_bias", c.new_token_bias);
  o.get("t5_buckets", c.t5_buckets);
  o.get("t5_max_distance", c.t5_max_distance);
  o.get("t5_bidirectional", c.t5_bidirectional);
  o.get("sinks", c.sinks);
  o.get("aux_dtype", c.aux_dtype);
}

Case read_case(const json& value, const std::string& area) {
  Case c;
  c.area = area;
  c.name = value.value("name", "");
  Object o(value, area + "/" + c.name);
  o.find("name");
  o.get_pair("heads", c.num_heads_q, c.num_heads_kv);
  o.get_pair("head_dim", c.head_dim_qk, c.head_dim_v);
  o.get("q_rope", c.q_rope);
  o.get("dtype", c.dtype);
  o.get("out_dtype", c.out_dtype);
  o.choose<QueryShape>("queries", c.queries,
                       {{"ragged", QueryShape::kRagged}, {"fixed", QueryShape::kFixed}, {"flat", QueryShape::kFlat}});
  o.choose<StrideMode>("strides", c.strides,
                       {{"dense", StrideMode::kDense},
                        {"odd", StrideMode::kOdd},
                        {"transposed", StrideMode::kTransposed},
                        {"packed", StrideMode::kPacked},
                        {"spread", StrideMode::kSpread}});
  int64_t batch = 1;
  o.get("batch", batch);
  if (const json* lengths = o.find("seqlens_kv")) {
    c.seqlens_kv = lengths_of(*lengths, batch, o.where() + ".seqlens_kv");
    batch = static_cast<int64_t>(c.seqlens_kv.size());
  }
  const json* lengths_q = o.find("seqlens_q");
  c.seqlens_q = lengths_of(lengths_q == nullptr ? json(1) : *lengths_q, batch, o.where() + ".seqlens_q");
  if (c.seqlens_kv.empty()) c.seqlens_kv = c.seqlens_q;
  o.choose<KvSource>("kv", c.kv,
                     {{"dense", KvSource::kDense},
                      {"contiguous", KvSource::kContiguous},
                      {"paged", KvSource::kPaged},
                      {"slots", KvSource::kSlots}});
  o.get("new_tokens", c.new_tokens);
  o.get("shared_kv", c.shared_kv);
  o.get("seqused", c.seqused);
  o.get("cu_seqlens_kv", c.cu_seqlens_kv);
  read_cache(o, c.cache);
  read_sparse(o, "sparse", c.sparse, nullptr);
  read_sparse(o, "extra", c.extra, &c.extra_page_size);
  read_indexer(o, c.indexer);
  read_backward(o, c.backward);
  o.get("beam_width", c.beam_width);
  o.get("beam_prompt", c.beam_prompt);
  read_masks(o, c);
  read_score(o, c);
  read_prologue(o, c.prologue);
  o.get("out_scale", c.out_scale);
  o.get("lse", c.lse);
  o.get("max_logits", c.max_logits);
  o.get("batch_invariant", c.batch_invariant);
  o.get("max_seqlens", c.max_seqlens);
  o.get("plant", c.plant);
  o.get("data", c.data);
  o.get("poison", c.poison);
  o.finish();
  if (c.seqlens_q.size() != c.seqlens_kv.size())
    throw std::runtime_error(o.where() + ": seqlens_q and seqlens_kv differ in size");
  if (c.q_rope < 0 || c.q_rope >= c.head_dim_qk || (c.q_rope > 0 && c.strides == StrideMode::kPacked))
    throw std::runtime_error(o.where() + ": q_rope must leave q a channel, and not be packed");
  // q, k and v of a token are one row.
  const bool dense = c.kv == KvSource::kDense;
  if (c.strides == StrideMode::kPacked && (dense || c.new_tokens)) {
    if (c.head_dim_qk != c.head_dim_v && !c.shared_kv)
      throw std::runtime_error(o.where() + ": packed rows have one head_dim for q, k and v");
    if (dense && (c.seqlens_kv != c.seqlens_q || c.seqused))
      throw std::runtime_error(o.where() + ": packed rows have as many keys as queries, without seqused");
  }
  if (c.cache.format != ATTUNE_KV_PLAIN) c.shared_kv = true;
  return c;
}

// What a swept value adds to the name.
std::string suffix(const std::string& key, const json& value, size_t index) {
  if (value.is_object()) return value.value("name", key + std::to_string(index));
  if (value.is_string()) return key + "=" + value.get<std::string>();
  if (value.is_boolean() || value.is_number()) return key + "=" + value.dump();
  std::string text = key + "=";
  if (value.size() > 6) return text + "#" + std::to_string(index);
  for (const json& item : value) {
    if (text.back() != '=') text += 'x';
    text += item.dump();
  }
  return text.find('{') == std::string::npos && text.find('[') == std::string::npos
             ? text
             : key + "=#" + std::to_string(index);
}

// The product over the lists of "sweep". A dotted key ("cache.layout") reaches into an object; the key "with" merges
// objects. Of "cache.scales" the value "each" is a list of all but "none".
void expand(json row, std::vector<json>& rows) {
  if (!row.contains("sweep") || row["sweep"].empty()) {
    row.erase("sweep");
    rows.push_back(std::move(row));
    return;
  }
  const auto first = row["sweep"].begin();
  const std::string key = first.key();
  json values = first.value();
  if (values == "each") {
    values = json::array();
    for (const NamedMode& m : scale_modes())
      if (m.mode != ScaleMode::kNone) values.push_back(m.name);
  }
  row["sweep"].erase(key);
  for (size_t i = 0; i < values.size(); ++i) {
    json next = row;
    const std::string name = row.at("name").get<std::string>() + "/" + suffix(key, values[i], i);
    if (key == "with") {
      json patch = values[i];
      patch.erase("name");
      next.merge_patch(patch);
    } else {
      std::string pointer = "/" + key;
      std::replace(pointer.begin(), pointer.end(), '.', '/');
      next[json::json_pointer(pointer)] = values[i];
    }
    next["name"] = name;
    expand(std::move(next), rows);
  }
}

// The areas whose file has this name; "": all of attention, but the bench's.
std::vector<Case> load(std::string_view area) {
  std::vector<Case> cases;
  std::set<std::string> names;
  for (const EmbeddedFile& file : embedded_files()) {
    const std::string_view name = file.name;
    if (area.empty() ? name.substr(0, 5) == "bench" || name == "indexer" || name == "backward" || name == "every_tensor"
                     : name != area)
      continue;
    for (Case& c : parse_cases(file.text)) {
      if (!names.insert(c.name).second) throw std::runtime_error("two cases are named " + c.name);
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

}  // namespace

int64_t Case::total_q() const { return std::accumulate(seqlens_q.begin(), seqlens_q.end(), int64_t{0}); }

int64_t Case::max_seqlen_q() const {
  return seqlens_q.empty() ? 0 : *std::max_element(seqlens_q.begin(), seqlens_q.end());
}

attune_dtype Case::resolved_out_dtype() const {
  if (out_dtype != ATTUNE_DTYPE_NONE) return out_dtype;
  return element_size(dtype) == 1 ? ATTUNE_FLOAT32 : dtype;
}

Case with_sequences(const Case& whole, const std::vector<size_t>& kept) {
  Case c = whole;
  keep_masks(kept, c);
  c.seqlens_q.clear(), c.seqlens_kv.clear(), c.finished.clear(), c.beam_prompt.clear();
  for (const size_t b : kept) {
    c.seqlens_q.push_back(whole.seqlens_q[b]);
    c.seqlens_kv.push_back(whole.seqlens_kv[b]);
    if (!whole.finished.empty()) c.finished.push_back(whole.finished[b]);
    if (!whole.beam_prompt.empty()) c.beam_prompt.push_back(whole.beam_prompt[b]);
  }
  return c;
}

std::vector<Case> parse_cases(std::string_view text) {
  const json file = json::parse(text);
  const std::string area = file.at("area").get<std::string>();
  std::vector<Case> cases;
  for (const json& row : file.at("cases")) {
    json named = row;
    named["name"] = area + "/" + row.at("name").get<std::string>();
    std::vector<json> rows;
    expand(std::move(named), rows);
    for (const json& expanded : rows) cases.push_back(read_case(expanded, area));
  }
  return cases;
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = load("");
  return cases;
}

const std::vector<Case>& indexer_cases() {
  static const std::vector<Case> cases = load("indexer");
  return cases;
}

const std::vector<Case>& backward_cases() {
  static const std::vector<Case> cases = load("backward");
  return cases;
}

const std::vector<Case>& every_tensor_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all = load("every_tensor");
    // The first of each row of masks, without wild table entries, at which attune_validate looks.
    std::set<std::string> rows;
    for (Case& c : load("masks")) {
      const size_t row = c.name.find('/', c.area.size() + 1);
      c.poison = false;
      if (rows.insert(c.name.substr(0, row)).second) all.push_back(std::move(c));
    }
    return all;
  }();
  return cases;
}

const std::vector<Case>& bench_cases() {
  static const std::vector<Case> cases = load("bench");
  return cases;
}

const std::vector<Case>& cuda_bench_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all = load("bench_cuda");
    for (Case& c : load("bench_backward")) all.push_back(std::move(c));
    return all;
  }();
  return cases;
}

}  // namespace attune::cases
