// SPDX-License-Identifier: Apache-2.0
// Cache operations on the memory of any device: what is written is exact up to rounding, what is read back is what the
// oracle decodes, and nothing else moves.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/op_problem.h"
#include "support.h"

namespace attune::tests {

struct Kind {
  std::string name;
  attune_kv_format format;
  attune_dtype dtype;
  ScaleMode scales;
};
// Every dtype with the scales that it takes, and the packed formats.
inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = [] {
    std::vector<Kind> made;
    for (const attune_dtype dtype :
         {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8}) {
      for (const auto& [name, mode] : cases::scale_modes()) {
        const std::string suffix = mode == ScaleMode::kNone ? "" : std::string("_") + name;
        if (cases::takes_scales(dtype, mode))
          made.push_back({cases::short_name(dtype) + suffix, ATTUNE_KV_PLAIN, dtype, mode});
      }
    }
    made.push_back({"mla_656", ATTUNE_KV_MLA_656, ATTUNE_UINT8, ScaleMode::kNone});
    made.push_back({"mla_584", ATTUNE_KV_MLA_584, ATTUNE_UINT8, ScaleMode::kNone});
    return made;
  }();
  return all;
}
inline const Kind& kind_of(const std::string& name) {
  return *std::find_if(kinds().begin(), kinds().end(), [&](const Kind& k) { return k.name == name; });
}
inline constexpr attune_kv_layout kLayouts[] = {ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED};

inline constexpr int64_t kPages = 5, kPageSize = 6, kSlots = kPages * kPageSize;

// A cache, empty (poison) but for its fixed scales, and dense rows beside it. aligned: rows lie so that vectors can
// move them; else with padding that no vector divides.
class CacheFixture {
 public:
  CacheFixture(cases::Memory& memory, const Kind& kind, attune_kv_layout layout, attune_dtype dense, int64_t tokens,
               bool aligned = false)
      : arena_(memory), random_(kind.name, static_cast<uint64_t>(layout)), packed_(kind.format != ATTUNE_KV_PLAIN) {
    op_.struct_size = sizeof(op_);
    heads_ = packed_ ? 1 : 3;
    dim_k_ = kind.format == ATTUNE_KV_MLA_656 ? 576 : packed_ ? 512 : 32;
    dim_v_ = packed_ ? 512 : 48;
    const auto pad = [&](std::vector<int64_t> padding) {
      return cases::Layout{{}, aligned ? std::vector<int64_t>() : std::move(padding), 0};
    };
    attune_kv_cache& c = op_.cache;
    c.format = kind.format;
    c.layout = packed_ ? ATTUNE_KV_BYTES : layout;
    if (kind.format == ATTUNE_KV_MLA_656) {
      c.k = arena_.add("cache.k", ATTUNE_UINT8, {kPages, kPageSize, 656}, {{}, {0, 656, 0}, 0});
    } else if (packed_) {
      int64_t bytes = 0;
      EXPECT_ATTUNE_OK(attune_kv_page_bytes(kind.format, kPageSize, &bytes));
      c.k = arena_.add("cache.k", ATTUNE_UINT8, {kPages, bytes});
      c.page_size = kPageSize;
    } else {
      const int64_t x = 16 / cases::element_size(kind.dtype);
      c.k = arena_.add("cache.k", kind.dtype, cases::plane_shape(layout, false, kPages, kPageSize, heads_, dim_k_, x),
                       layout == ATTUNE_KV_XPACKED ? cases::Layout() : pad({0, 5, 0, 1}));
      c.v = arena_.add("cache.v", kind.dtype, cases::plane_shape(layout, true, kPages, kPageSize, heads_, dim_v_, x));
    }
    add_scales(kind, layout);
    op_.k = arena_.add("k", dense, {tokens, heads_, dim_k_}, pad({0, 0, 3}));
    if (!packed_) op_.v = arena_.add("v", dense, {tokens, heads_, dim_v_});
  }

  void fill_dense() {
    for (const attune_tensor* t : {&op_.k, &op_.v}) {
      cases::for_each_element(*t, [&](const int64_t* index, void* element) {
        // A row of zeros, one of large numbers, and one whose largest element is negative.
        double x = random_.normal();
        if (index[0] == 1) x = 0;
        if (index[0] == 2) x *= 100;
        if (index[0] == 3) x = -std::fabs(x);
        cases::encode(static_cast<attune_dtype>(t->dtype), x, element);
      });
    }
  }

  attune_tensor add_integers(const char* name, attune_dtype dtype, const std::vector<int64_t>& values) {
    const attune_tensor t = arena_.add(name, dtype, {static_cast<int64_t>(values.size())});
    cases::for_each_element(t, [&](const int64_t* index, void* element) {
      cases::encode(dtype, static_cast<double>(values[static_cast<size_t>(index[0])]), element);
    });
    return t;
  }

  // What writing dense row `row` to `slot` must leave.
  void expect_write(int64_t row, int64_t slot) {
    for (int64_t h = 0; h < heads_; ++h) {
      reference::CacheWrite write;
      write.slot = write.v_slot = slot;
      write.head = h;
      for (int64_t d = 0; d < dim_k_; ++d)
        write.k.push_back(cases::decode(dense_dtype(), cases::element_at(op_.k, {row, h, d})));
      for (int64_t d = 0; d < dim_v_ && !packed_; ++d) {
        write.v.push_back(cases::decode(dense_dtype(), cases::element_at(op_.v, {row, h, d})));
      }
      writes_.push_back(std::move(write));
    }
  }

  void run(attune_cache_op_kind kind) {
    op_.kind = kind;
    arena_.upload();
    const attune_cache_op device = arena_.on_device(op_);
    ASSERT_ATTUNE_OK(attune_cache_op_run(&device, arena_.memory().device(), nullptr));
  }

  void check_writes(const std::string& what) {
    cases::Checker checker;
    cases::Snapshot snapshot(arena_);
    cases::check_writes(op_.cache, writes_, op_.power_of_two_scales != 0, snapshot, checker);
    snapshot.check(checker);
    EXPECT_EQ(checker.report().failure, "") << what;
  }

  // Makes the cache as it is now the state before the next call, and empties the dense rows.
  void keep_cache() {
    for (const attune_tensor* t : {&op_.cache.k, &op_.cache.v, &op_.cache.k_scale, &op_.cache.v_scale}) {
      if (t->dtype == ATTUNE_DTYPE_NONE) continue;
      cases::Buffer* buffer = arena_.owner(t->data);
      const std::vector<std::byte> now = buffer->download();
      std::copy(now.begin(), now.end(), buffer->host());
    }
    for (const attune_tensor* t : {&op_.k, &op_.v}) {
      if (t->dtype != ATTUNE_DTYPE_NONE)
        std::fill_n(arena_.owner(t->data)->host(), arena_.owner(t->data)->size(), std::byte{0xff});
    }
    writes_.clear();
  }

  // Dense row `row` must hold slot `slot` as the oracle decodes it; slot < 0: zeros.
  void check_reads(const std::vector<int64_t>& slots, const std::string& what) {
    reference::CacheMoves moves;
    for (size_t row = 0; row < slots.size(); ++row) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (const bool is_v : {false, true}) {
          if (is_v && packed_) continue;
          std::vector<double> expected(static_cast<size_t>(is_v ? dim_v_ : dim_k_), 0.0);
          if (slots[row] >= 0) expected = reference::cache_row(op_.cache, dim_v_, slots[row], h, is_v);
          std::vector<double>& to = is_v ? moves.v : moves.k;
          to.insert(to.end(), expected.begin(), expected.end());
        }
      }
    }
    // Rows behind those are not written.
    moves.k.resize(static_cast<size_t>(cases::num_elements(op_.k)));
    moves.v.resize(static_cast<size_t>(cases::num_elements(op_.v)));
    moves.written.assign(slots.size(), true);
    moves.written.resize(static_cast<size_t>(op_.k.shape[0]), false);
    cases::Checker checker;
    cases::Snapshot snapshot(arena_);
    cases::check_fetched(op_, moves, snapshot, checker);
    snapshot.check(checker);
    EXPECT_EQ(checker.report().failure, "") << what;
  }

  attune_cache_op& op() { return op_; }
  cases::Arena& arena() { return arena_; }

 private:
  attune_dtype dense_dtype() const { return static_cast<attune_dtype>(op_.k.dtype); }

  void add_scales(const Kind& kind, attune_kv_layout layout) {
    if (kind.scales == ScaleMode::kNone) return;
    for (const bool is_v : {false, true}) {
      attune_tensor& t = is_v ? op_.cache.v_scale : op_.cache.k_scale;
      t = arena_.add(is_v ? "cache.v_scale" : "cache.k_scale", ATTUNE_FLOAT32,
                     cases::scale_shape(kind.scales, layout, kPages, kPageSize, heads_, is_v ? dim_v_ : dim_k_));
      if (cases::scales_by_token(kind.scales)) continue;  // written, not read
      cases::for_each_element(t, [&](const int64_t* index, void* element) {
        cases::encode(ATTUNE_FLOAT32, 0.03 * (1 + static_cast<double>(index[0])) * (is_v ? 1.5 : 1.0), element);
      });
    }
  }

  cases::Arena arena_;
  cases::Random random_;
  bool packed_;
  int64_t heads_, dim_k_, dim_v_;
  attune_cache_op op_{};
  std::vector<reference::CacheWrite> writes_;
};

// Runs f for every layout that the kind has and all dense types.
template <typename F>
void for_each_layout(const Kind& kind, F&& f) {
  for (const attune_kv_layout layout : kLayouts) {
    for (const attune_dtype dense : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16}) {
      f(layout, dense, kind.name + ", layout " + std::to_string(layout) + ", dense " + cases::short_name(dense));
    }
    if (kind.format != ATTUNE_KV_PLAIN) return;
  }
}

inline void check_slots(cases::Memory& memory, const Kind& kind, bool aligned) {
  for_each_layout(kind, [&](attune_kv_layout layout, attune_dtype dense, const std::string& what) {
    // Negative slots are skipped.
    const std::vector<int64_t> slots = {7, 0, kSlots - 1, -1, 12, 13, -5, 6};
    CacheFixture f(memory, kind, layout, dense, static_cast<int64_t>(slots.size()), aligned);
    f.fill_dense();
    f.op().slots = f.add_integers("slots", ATTUNE_INT64, slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] >= 0) f.expect_write(static_cast<int64_t>(i), slots[i]);
    }
    f.run(ATTUNE_CACHE_APPEND);
    f.check_writes(what);
    f.keep_cache();
    f.run(ATTUNE_CACHE_GATHER);
    f.check_reads(slots, what);
  });
}

inline void check_whole_cache(cases::Memory& memory, const Kind& kind, bool aligned) {
  for_each_layout(kind, [&](attune_kv_layout layout, attune_dtype dense, const std::string& what) {
    CacheFixture f(memory, kind, layout, dense, kSlots, aligned);
    f.fill_dense();
    for (const int power_of_two : {0, 1}) {
      if (power_of_two == 1 && kind.format == ATTUNE_KV_PLAIN && f.op().cache.k_scale.rank != 3) continue;
      f.op().power_of_two_scales = power_of_two;
      for (int64_t slot = 0; slot < kSlots; ++slot) f.expect_write(slot, slot);
      f.run(ATTUNE_CACHE_QUANTIZE);
      f.check_writes(what);
    }
    f.keep_cache();
    f.op().power_of_two_scales = 0;
    f.run(ATTUNE_CACHE_DEQUANTIZE);
    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < kSlots; ++slot) slots.push_back(slot);
    f.check_reads(slots, what);
  });
}

inline void check_sequences(cases::Memory& memory, const Kind& kind, bool aligned) {
  for_each_layout(kind, [&](attune_kv_layout layout, attune_dtype dense, const std::string& what) {
    // Three sequences of a paged cache; the second has no new token, the third is finished.
    const std::vector<int64_t> table = {3, 0, 9999, 1, 9999, 9999, 4, 2, 9999};
    const std::vector<int64_t> cached = {4, 3, 6}, offsets = {0, 4, 4, 6};
    CacheFixture f(memory, kind, layout, dense, 6, aligned);
    f.fill_dense();
    f.op().cache.page_table = f.arena().add("cache.page_table", ATTUNE_INT32, {3, 3});
    cases::for_each_element(f.op().cache.page_table, [&](const int64_t* index, void* element) {
      cases::encode(ATTUNE_INT32, static_cast<double>(table[static_cast<size_t>(index[0] * 3 + index[1])]), element);
    });
    f.op().seqused_kv = f.add_integers("seqused_kv", ATTUNE_INT32, cached);
    f.op().cu_seqlens = f.add_integers("cu_seqlens", ATTUNE_INT32, offsets);
    f.op().finished = f.add_integers("finished", ATTUNE_UINT8, {0, 0, 1});
    const std::vector<int64_t> slots = {3 * kPageSize + 4, 3 * kPageSize + 5, 0, 1};
    for (size_t i = 0; i < slots.size(); ++i) f.expect_write(static_cast<int64_t>(i), slots[i]);
    f.run(ATTUNE_CACHE_APPEND);
    f.check_writes(what);
  });
}

inline void check_gather_by_sequence(cases::Memory& memory, bool aligned) {
  for (const attune_kv_layout layout : kLayouts) {
    CacheFixture f(memory, kind_of("bf16"), layout, ATTUNE_FLOAT32, kSlots, aligned);
    f.fill_dense();
    for (int64_t slot = 0; slot < kSlots; ++slot) f.expect_write(slot, slot);
    f.run(ATTUNE_CACHE_QUANTIZE);
    f.keep_cache();
    f.op().cache.page_table = f.arena().add("cache.page_table", ATTUNE_INT32, {2, 2});
    const int32_t table[] = {4, 1, 2, 0x7fffff00};
    std::memcpy(f.op().cache.page_table.data, table, sizeof(table));
    f.op().seqused_kv = f.add_integers("seqused_kv", ATTUNE_INT32, {8, 2});
    f.op().cu_seqlens = f.add_integers("cu_seqlens", ATTUNE_INT32, {0, 8, 10});
    f.run(ATTUNE_CACHE_GATHER);
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < 8; ++t) slots.push_back((t < kPageSize ? 4 : 1) * kPageSize + t % kPageSize);
    slots.insert(slots.end(), {2 * kPageSize, 2 * kPageSize + 1});
    f.check_reads(slots, "layout " + std::to_string(layout));
  }
}

inline void check_gather_out_of_range(cases::Memory& memory, bool aligned) {
  CacheFixture f(memory, kind_of("bf16"), ATTUNE_KV_NHD, ATTUNE_BFLOAT16, 4, aligned);
  f.fill_dense();
  f.op().slots = f.add_integers("slots", ATTUNE_INT64, {1, 2, 3, 4});
  for (int64_t i = 0; i < 4; ++i) f.expect_write(i, i + 1);
  f.run(ATTUNE_CACHE_APPEND);
  f.check_writes("append");
  f.keep_cache();
  const int64_t wanted[] = {3, -1, kSlots, int64_t{1} << 40};
  std::memcpy(f.op().slots.data, wanted, sizeof(wanted));
  f.run(ATTUNE_CACHE_GATHER);
  f.check_reads({3, -1, -1, -1}, "gather");
}

inline void check_saturation(cases::Memory& memory, bool aligned) {
  for (const Kind& kind : {kind_of("e4m3_tensor"), kind_of("i8_tensor")}) {
    CacheFixture f(memory, kind, ATTUNE_KV_NHD, ATTUNE_FLOAT32, 1, aligned);
    f.fill_dense();
    auto* k = static_cast<float*>(f.op().k.data);
    k[0] = 1e30f;
    k[1] = -1e30f;
    k[2] = std::numeric_limits<float>::quiet_NaN();
    f.op().slots = f.add_integers("slots", ATTUNE_INT64, {0});
    f.run(ATTUNE_CACHE_APPEND);
    const attune_tensor cache = cases::Snapshot(f.arena()).after(f.op().cache.k);
    const std::vector<std::byte> bytes = f.arena().owner(f.op().cache.k.data)->download();
    const double largest = kind.dtype == ATTUNE_INT8 ? 127 : 448;
    EXPECT_EQ(cases::decode(kind.dtype, bytes.data()), largest);
    EXPECT_EQ(std::fabs(cases::decode(kind.dtype, bytes.data() + 1)), kind.dtype == ATTUNE_INT8 ? 127 : 448);
    EXPECT_LT(cases::decode(kind.dtype, bytes.data() + 1), 0);
    const double nan = cases::decode(kind.dtype, bytes.data() + 2);
    EXPECT_TRUE(kind.dtype == ATTUNE_INT8 ? nan == 0 : std::isnan(nan)) << nan;
    (void)cache;
  }
}

}  // namespace attune::tests
