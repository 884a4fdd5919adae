// SPDX-License-Identifier: Apache-2.0
// The caches of a problem: where tokens are placed, which slots may be read, and what the others hold (poison).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "number.h"
#include "problem.h"

namespace attune::cases {
namespace {

// In table entries that must not be followed.
constexpr double kBadPages[] = {0x7fffff00, -7, 2147480000.0};

double scale_unit(attune_dtype dtype) { return dtype == ATTUNE_INT8 ? 3.3 / 127 : 0.0125; }

}  // namespace

// Pages of every sequence. A contiguous cache is one with a page for each row.
struct Problem::Placement {
  int64_t page_size = 1;
  int64_t num_pages = 0;
  int64_t table_width = 1;
  std::vector<std::vector<int64_t>> k_pages, v_pages;  // [b][entry]
  std::vector<std::vector<uint8_t>> entry_needed;      // [b][entry]: some reader or writer follows it
  std::vector<uint8_t> k_needed, v_needed;             // [page * page_size + offset]: some reader may use it
  int64_t bad_k_slot = -1, bad_v_slot = -1;            // the planted key
};

void Problem::place_pages(Placement& p) {
  const Case& c = case_;
  const CacheSpec& spec = c.cache;
  std::vector<int64_t> capacity;
  for (int64_t b = 0; b < c.batch(); ++b) {
    const int64_t appended = c.prologue.append ? c.seqlens_q[static_cast<size_t>(b)] : 0;
    capacity.push_back(spec.ring_capacity > 0 ? spec.ring_capacity : c.stored(b) + appended);
  }
  const auto batch = static_cast<size_t>(c.batch());
  p.k_pages.resize(batch);
  p.v_pages.resize(batch);
  if (c.kv == KvSource::kContiguous) {
    const int64_t most = capacity.empty() ? 0 : *std::max_element(capacity.begin(), capacity.end());
    p.page_size = spec.ring_capacity > 0 ? spec.ring_capacity : std::max<int64_t>(1, most + spec.slack);
    p.num_pages = c.batch() + (spec.batch_index ? 2 : 0);
  } else {
    p.page_size = spec.page_size;
    for (const int64_t tokens : capacity) p.table_width = std::max(p.table_width, ceil_div(tokens, p.page_size));
    p.table_width += 2;
    for (const int64_t tokens : capacity) p.num_pages += ceil_div(tokens, p.page_size);
    p.num_pages = std::max<int64_t>(1, p.num_pages + spec.slack);
  }
  std::vector<int64_t> k_order(static_cast<size_t>(p.num_pages));
  std::iota(k_order.begin(), k_order.end(), 0);
  if (c.kv == KvSource::kPaged || spec.batch_index) random_.shuffle(k_order);
  std::vector<int64_t> v_order = k_order;
  if (spec.separate_v_table) random_.shuffle(v_order);
  size_t next = 0;
  for (size_t b = 0; b < batch; ++b) {
    const int64_t entries = c.kv == KvSource::kContiguous ? 1 : ceil_div(capacity[b], p.page_size);
    int64_t shared = 0;
    if (spec.share_prefix && b > 0) shared = std::min(c.stored(0), c.stored(static_cast<int64_t>(b))) / p.page_size;
    for (int64_t e = 0; e < entries; ++e) {
      const bool is_shared = e < shared;
      p.k_pages[b].push_back(is_shared ? p.k_pages[0][static_cast<size_t>(e)] : k_order[next]);
      p.v_pages[b].push_back(is_shared ? p.v_pages[0][static_cast<size_t>(e)] : v_order[next]);
      if (!is_shared) ++next;
    }
    p.entry_needed.emplace_back(static_cast<size_t>(entries), c.poison ? 0 : 1);
  }
}

void Problem::mark_needed(Placement& p) {
  const Case& c = case_;
  const int64_t ring = c.cache.ring_capacity;
  p.k_needed.assign(static_cast<size_t>(p.num_pages * p.page_size), 0);
  p.v_needed = p.k_needed;
  for (int64_t b = 0; b < c.batch(); ++b) {
    for (int64_t t = 0; t < c.stored(b); ++t) {
      if (seen_[static_cast<size_t>(b)][static_cast<size_t>(t)] == 0) continue;
      const int64_t slot = ring > 0 ? t % ring : t;
      int64_t owner = b;
      if (c.beam_width > 1) {
        const bool wrapped = ring > 0 && c.stored(b) > ring;
        const bool prompt = !wrapped && t < c.beam_prompt[static_cast<size_t>(b)];
        const void* beam = element_at(host_.cache_indirection, {b, slot});
        owner = b / c.beam_width * c.beam_width + (prompt ? 0 : static_cast<int64_t>(decode(ATTUNE_INT32, beam)));
      }
      const auto row = static_cast<size_t>(owner);
      const auto entry = static_cast<size_t>(slot / p.page_size);
      p.entry_needed[row][entry] = 1;
      const int64_t k_slot = p.k_pages[row][entry] * p.page_size + slot % p.page_size;
      const int64_t v_slot = p.v_pages[row][entry] * p.page_size + slot % p.page_size;
      p.k_needed[static_cast<size_t>(k_slot)] = 1;
      p.v_needed[static_cast<size_t>(v_slot)] = 1;
      if (b == bad_batch_ && t == bad_key_) {
        p.bad_k_slot = k_slot;
        p.bad_v_slot = v_slot;
      }
    }
    if (!c.prologue.append || is_inactive(c, b)) continue;
    for (int64_t t = c.stored(b); t < c.keys(b); ++t) {
      p.entry_needed[static_cast<size_t>(b)][static_cast<size_t>((ring > 0 ? t % ring : t) / p.page_size)] = 1;
    }
  }
}

void Problem::write_tables(const Placement& p) {
  const Case& c = case_;
  if (c.kv == KvSource::kContiguous) {
    if (!c.cache.batch_index) return;
    std::vector<int64_t> rows;
    for (const auto& pages : p.k_pages) rows.push_back(pages[0]);
    host_.cache.batch_index = add_vector("cache.batch_index", ATTUNE_INT32, rows);
    return;
  }
  const auto add_table = [&](const char* name, const std::vector<std::vector<int64_t>>& pages) {
    Layout layout;
    layout.padding = {0, 1};
    const attune_tensor table = arena_.add(name, ATTUNE_INT32, {c.batch(), p.table_width}, layout);
    for_each_element(table, [&](const int64_t* index, void* element) {
      const auto b = static_cast<size_t>(index[0]), e = static_cast<size_t>(index[1]);
      const bool valid = e < pages[b].size() && p.entry_needed[b][e] != 0;
      encode(ATTUNE_INT32, valid ? static_cast<double>(pages[b][e]) : kBadPages[(b + e) % 3], element);
    });
    return table;
  };
  host_.cache.page_table = add_table("cache.page_table", p.k_pages);
  if (c.cache.separate_v_table) host_.cache.v_page_table = add_table("cache.v_page_table", p.v_pages);
}

void Problem::make_pool(attune_kv_cache& cache, const CacheSpec& spec, int64_t pages, int64_t page_size,
                        const char* prefix) {
  const Case& c = case_;
  const std::string name = prefix;
  const attune_dtype dtype = spec.dtype == ATTUNE_DTYPE_NONE ? c.dtype : spec.dtype;
  cache.format = spec.format;
  cache.layout = spec.layout;
  if (spec.format != ATTUNE_KV_PLAIN) {
    Layout layout;
    if (spec.format == ATTUNE_KV_MLA_656) {
      if (spec.page_padding) layout.padding = {0, 656, 0};
      cache.k = arena_.add(name + ".k", ATTUNE_UINT8, {pages, page_size, 656}, layout);
    } else {
      if (spec.page_padding) layout.padding = {0, 64};
      cache.k = arena_.add(name + ".k", ATTUNE_UINT8, {pages, ceil_div(page_size * 584, 576) * 576}, layout);
      cache.page_size = page_size;
    }
    return;
  }
  const int64_t heads = c.num_heads_kv;
  const bool odd = c.strides == StrideMode::kOdd;
  const auto add = [&](const std::string& which, std::vector<int64_t> shape, bool pad_rows) {
    Layout layout;
    layout.padding.assign(shape.size(), 0);
    if (spec.page_padding || odd) layout.padding[1] = 7;
    if (pad_rows) layout.padding.back() = spec.row_padding + (odd ? 1 : 0);
    return arena_.add(name + which, dtype, shape, layout);
  };
  const auto shape = [&](bool is_v, int64_t dim) {
    const int64_t x = spec.x > 0 ? spec.x : 16 / element_size(dtype);
    return plane_shape(spec.layout, is_v, pages, page_size, heads, dim, x);
  };
  if (spec.one_pool) {
    // K and V of a page side by side: [pages, 2, ...].
    std::vector<int64_t> both = shape(false, std::max(c.head_dim_qk, c.head_dim_v));
    both.insert(both.begin() + 1, 2);
    const attune_tensor pool = arena_.add(name + ".kv", dtype, both);
    const auto plane = [&](int64_t which, int64_t dim) {
      attune_tensor t = pool;
      t.data = element_at(pool, {0, which, 0, 0, 0});
      t.rank = 4;
      for (int axis = 1; axis < 4; ++axis) {
        t.shape[axis] = pool.shape[axis + 1];
        t.stride[axis] = pool.stride[axis + 1];
      }
      t.shape[3] = dim;
      t.shape[4] = t.stride[4] = 0;
      return t;
    };
    cache.k = plane(0, c.head_dim_qk);
    cache.v = plane(1, c.head_dim_v);
  } else {
    const bool pad_rows = spec.layout != ATTUNE_KV_XPACKED;
    cache.k = add(".k", shape(false, c.head_dim_qk), pad_rows);
    if (!c.shared_kv) cache.v = add(".v", shape(true, c.head_dim_v), pad_rows);
  }
  if (spec.scales == ScaleMode::kNone) return;
  const auto add_scales = [&](const char* which, int64_t dim) {
    const std::vector<int64_t> scales = scale_shape(spec.scales, spec.layout, pages, page_size, heads, dim);
    Layout layout;
    layout.padding.assign(scales.size(), 0);
    if (scales_by_token(spec.scales) && (spec.page_padding || odd)) layout.padding[1] = 3;
    return arena_.add(name + which, ATTUNE_FLOAT32, scales, layout);
  };
  cache.k_scale = add_scales(".k_scale", c.head_dim_qk);
  if (!c.shared_kv) cache.v_scale = add_scales(".v_scale", c.head_dim_v);
  if (scales_by_token(spec.scales)) return;
  const auto fill = [&](const attune_tensor& t, double unit) {
    for_each_element(t, [&](const int64_t* index, void* element) {
      encode(ATTUNE_FLOAT32, scale_unit(dtype) * unit * (1 + 0.25 * static_cast<double>(index[0])), element);
    });
  };
  fill(cache.k_scale, 1.0);
  if (!c.shared_kv) fill(cache.v_scale, 1.3);
}

// Of a row of 656 bytes: any number may be one, so some are powers of two, large (codes become small), huge (0) or tiny
// (the largest).
static double scale_656(size_t slot, int64_t group, double usual) {
  switch ((slot * 3 + static_cast<size_t>(group)) % 16) {
    case 2:
      return 0x1p-7;
    case 7:
      return 0x1p60;
    case 9:
      return 300;
    case 12:
      return 0x1p-100;
    default:
      return usual;
  }
}

void Problem::fill_pool(attune_kv_cache& cache, const CacheSpec& spec, const std::vector<uint8_t>& k_needed,
                        const std::vector<uint8_t>& v_needed) {
  const Case& c = case_;
  const int64_t page_size = page_size_of(cache);
  if (spec.format != ATTUNE_KV_PLAIN) {
    for (size_t slot = 0; slot < k_needed.size(); ++slot) {
      if (k_needed[slot] == 0) continue;
      const PackedRow row =
          packed_row(cache, static_cast<int64_t>(slot) / page_size, static_cast<int64_t>(slot) % page_size);
      for (int64_t first = 0; first < row.num_codes; first += row.group) {
        const int64_t group = first / row.group;
        double scale = 0.0125 * (0.5 + random_.uniform());
        if (spec.format == ATTUNE_KV_MLA_656) {
          if (c.poison) scale = scale_656(slot, group, scale);
          encode(ATTUNE_FLOAT32, scale, row.scales + group * 4);
          scale = decode(ATTUNE_FLOAT32, row.scales + group * 4);
        } else {
          const int exponent = -7 + static_cast<int>(random_.integer(0, 1));
          scale = std::ldexp(1.0, exponent);
          row.scales[group] = static_cast<std::byte>(exponent + 127);
        }
        for (int64_t d = first; d < first + row.group; ++d)
          encode(ATTUNE_FLOAT8_E4M3, key_value(d) / scale, row.codes + d, true);
      }
      for (int64_t d = 0; d < 64; ++d) encode(ATTUNE_BFLOAT16, key_value(row.num_codes + d), row.rope + 2 * d);
    }
    return;
  }
  const auto dtype = static_cast<attune_dtype>(cache.k.dtype);
  const auto fill = [&](bool is_v, const std::vector<uint8_t>& needed, int64_t dim) {
    for (size_t slot = 0; slot < needed.size(); ++slot) {
      if (needed[slot] == 0) continue;
      const int64_t page = static_cast<int64_t>(slot) / page_size, offset = static_cast<int64_t>(slot) % page_size;
      for (int64_t g = 0; g < c.num_heads_kv; ++g) {
        double scale = 1;
        for (int64_t d = 0; d < dim; ++d) {
          if (spec.scales != ScaleMode::kNone && d % channels_of_scale(spec.scales, dim) == 0) {
            void* at = scale_element(cache, is_v, page, offset, g, d);
            if (scales_by_token(spec.scales)) encode(ATTUNE_FLOAT32, scale_unit(dtype) * (0.5 + random_.uniform()), at);
            scale = decode(ATTUNE_FLOAT32, at);
          }
          const double x = is_v ? value_value() : key_value(d);
          encode(dtype, x / scale, pool_element(cache, is_v, page, offset, g, d), dtype == ATTUNE_FLOAT8_E5M2);
        }
      }
    }
  };
  fill(false, k_needed, c.head_dim_qk);
  if (!c.shared_kv) fill(true, v_needed, c.head_dim_v);
}

void Problem::build_cache() {
  const Case& c = case_;
  if (c.kv == KvSource::kSlots) return;  // pools of slots are made with their indices
  Placement p;
  place_pages(p);
  mark_needed(p);
  write_tables(p);
  make_pool(host_.cache, c.cache, p.num_pages, p.page_size, "cache");
  host_.cache.ring_capacity = c.cache.ring_capacity;
  fill_pool(host_.cache, c.cache, p.k_needed, p.v_needed);
  host_.seqused_kv = add_vector("seqused_kv", ATTUNE_INT32, c.seqlens_kv);
  if (p.bad_k_slot >= 0 && c.cache.format != ATTUNE_KV_PLAIN) {
    const PackedRow row = packed_row(host_.cache, p.bad_k_slot / p.page_size, p.bad_k_slot % p.page_size);
    spoil(ATTUNE_FLOAT8_E4M3, row.codes + 1);
  } else if (p.bad_k_slot >= 0) {
    const bool is_v = c.plant != "nan_k" && !c.shared_kv;
    const int64_t slot = is_v ? p.bad_v_slot : p.bad_k_slot;
    spoil(static_cast<attune_dtype>(host_.cache.k.dtype),
          pool_element(host_.cache, is_v, slot / p.page_size, slot % p.page_size, 0, 1));
  }
}

void Problem::build_beams() {
  const Case& c = case_;
  if (c.beam_width <= 1) return;
  const int64_t ring = c.cache.ring_capacity;
  int64_t longest = 1;
  for (int64_t b = 0; b < c.batch(); ++b) longest = std::max(longest, c.stored(b));
  if (ring > 0) longest = ring;
  host_.cache_indirection = arena_.add("cache_indirection", ATTUNE_INT32, {c.batch(), longest}, {{}, {0, 3}, 0});
  for_each_element(host_.cache_indirection, [&](const int64_t* index, void* element) {
    const int64_t stored = c.stored(index[0]);
    const bool wrapped = ring > 0 && stored > ring;
    const bool used = index[1] < stored && (wrapped || index[1] >= c.beam_prompt[static_cast<size_t>(index[0])]);
    encode(ATTUNE_INT32, used ? static_cast<double>(random_.integer(0, c.beam_width - 1)) : kBadPages[0], element);
  });
  host_.beam_prompt_length = add_vector("beam_prompt_length", ATTUNE_INT32, c.beam_prompt);
  host_.beam_width = static_cast<int32_t>(c.beam_width);
}

void Problem::fill_indices(const char* name, const SparseSpec& spec, int64_t slots, attune_tensor& indices,
                           attune_tensor& lengths, std::vector<uint8_t>& named) {
  const Case& c = case_;
  const bool rank4 = host_.q.rank == 4;
  std::vector<int64_t> shape = {num_rows_, spec.topk};
  if (spec.per_head) shape = {num_rows_, c.num_heads_kv, spec.topk};
  if (rank4) shape = {c.batch(), host_.q.shape[1], spec.topk};
  Layout layout;
  if (c.strides == StrideMode::kOdd) {
    layout.padding.assign(shape.size(), 0);
    layout.padding.back() = 3;
  } else if (c.strides == StrideMode::kTransposed) {
    layout.padding.assign(shape.size(), 0);
  }
  // The rows of one sequence do not follow those of the one before.
  if (rank4 && !layout.padding.empty()) layout.padding[1] = 1;
  indices = arena_.add(name, ATTUNE_INT32, shape, layout);
  // With as many rows as sequences the two kinds of lengths look alike, and they count sequences.
  const Lengths kind = spec.lengths == Lengths::kToken && num_rows_ == c.batch() ? Lengths::kBatch : spec.lengths;
  if (kind != Lengths::kNone) {
    std::vector<int64_t> used;
    const int64_t n = kind == Lengths::kBatch ? c.batch() : num_rows_;
    // The edges first, then anything between them.
    const int64_t edges[] = {spec.topk, 0, 1, std::max<int64_t>(0, spec.topk - 1)};
    for (int64_t i = 0; i < n; ++i) used.push_back(i < 4 ? edges[i] : random_.integer(0, spec.topk));
    lengths = add_vector((std::string(name) + ".topk_length").c_str(), ATTUNE_INT32, used);
  }
  // Slots past the usable ones hold poison; only entries past topk_length may name them.
  const int64_t usable = std::max<int64_t>(1, slots - slots / 8);
  const double invalid[] = {-1, static_cast<double>(named.size()), 0x7fffff00, -2147483648.0};
  for_each_element(indices, [&](const int64_t* index, void* element) {
    const int64_t k = index[indices.rank - 1];
    const int64_t row = rank4 ? index[0] * shape[1] + index[1] : index[0];
    int64_t b = rank4 ? index[0] : 0;
    while (!rank4 && b + 1 < c.batch() && row >= first_row(b + 1)) ++b;
    int64_t length = spec.topk;
    if (kind == Lengths::kBatch) length = static_cast<int64_t>(decode(ATTUNE_INT32, element_at(lengths, {b})));
    if (kind == Lengths::kToken) length = static_cast<int64_t>(decode(ATTUNE_INT32, element_at(lengths, {row})));
    double value;
    if (random_.chance(spec.invalid)) {
      value = invalid[random_.integer(0, 3)];
    } else if (k >= length) {
      value = static_cast<double>(random_.integer(0, static_cast<int64_t>(named.size()) - 1));
    } else {
      const int64_t slot = random_.integer(0, usable - 1);
      if (row < c.total_q() && !is_inactive(c, b)) named[static_cast<size_t>(slot)] = 1;
      value = static_cast<double>(slot);
    }
    encode(ATTUNE_INT32, value, element);
  });
}

void Problem::build_sparse() {
  const Case& c = case_;
  if (c.kv != KvSource::kSlots) return;
  const auto build = [&](attune_kv_cache& cache, const SparseSpec& spec, int64_t page_size, const char* prefix,
                         const char* name, attune_tensor& indices, attune_tensor& lengths) {
    const int64_t pages = std::max<int64_t>(1, ceil_div(spec.slots, page_size));
    std::vector<uint8_t> named(static_cast<size_t>(pages * page_size), 0);
    fill_indices(name, spec, pages * page_size, indices, lengths, named);
    if (!c.poison) named.assign(named.size(), 1);
    make_pool(cache, c.cache, pages, page_size, prefix);
    fill_pool(cache, c.cache, named, named);
  };
  build(host_.cache, c.sparse, c.cache.page_size, "cache", "indices", host_.indices, host_.topk_length);
  if (c.extra.topk > 0) {
    build(host_.extra_cache, c.extra, c.extra_page_size, "extra_cache", "extra_indices", host_.extra_indices,
          host_.extra_topk_length);
  }
}

void Problem::choose_bad_key() {
  if (case_.plant.empty()) return;
  for (int64_t b = case_.batch() - 1; b >= 0 && bad_batch_ < 0; --b) {
    const auto& seen = seen_[static_cast<size_t>(b)];
    // From the middle on, so that some rows see it and some do not.
    for (size_t n = 0; n < seen.size() && bad_batch_ < 0; ++n) {
      const size_t j = (seen.size() / 2 + n) % seen.size();
      if (seen[j] == 0) continue;
      bad_batch_ = b;
      bad_key_ = static_cast<int64_t>(j);
    }
  }
}

void Problem::spoil(attune_dtype dtype, void* element) {
  const bool infinite = case_.plant == "inf_v";
  encode(dtype, infinite ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN(), element);
}

}  // namespace attune::cases
