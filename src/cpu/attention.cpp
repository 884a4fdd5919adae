// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.h"

#include <atomic>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "core/integers.h"
#include "cpu/append.h"
#include "cpu/attention_item.h"
#include "cpu/attention_output.h"
#include "cpu/attention_schedule.h"
#include "cpu/prologue.h"
#include "cpu/threads.h"

namespace attune::cpu {
namespace {

// Tiles are bf16 where that is faster and no operand loses bits: bf16 queries; keys and values of bf16 or 8 bits, which
// are exact in bf16; rows that their codec decodes, which are rounded once in any case.
bool is_bf16_exact(int32_t dtype) { return dtype == ATTUNE_BFLOAT16 || is_8bit(dtype); }

bool kv_is_bf16_exact(const Problem& p) {
  auto cache_ok = [](const KvCache& c) {
    return !c || !c.one_factor || (is_bf16_exact(c.k.dtype) && is_bf16_exact(c.v.dtype));
  };
  const bool dense_ok = !p.k || (p.k.dtype == ATTUNE_BFLOAT16 && p.v.dtype == ATTUNE_BFLOAT16) ||
                        (!p.prologue.any && is_bf16_exact(p.k.dtype) && is_bf16_exact(p.v.dtype));
  return dense_ok && cache_ok(p.cache) && cache_ok(p.extra_cache);
}

// Codes of a cache become bf16 in fewer instructions than fp32.
bool has_codes(const Problem& p) { return p.cache.one_factor && is_8bit(p.cache.k.dtype); }

bool all_rows_are_f16(const Problem& p) {
  const auto cache_is = [](const KvCache& c) {
    return !c || (c.one_factor && c.k.dtype == ATTUNE_FLOAT16 && c.v.dtype == ATTUNE_FLOAT16);
  };
  const bool dense_is = !p.k || (!p.prologue.any && p.k.dtype == ATTUNE_FLOAT16 && p.v.dtype == ATTUNE_FLOAT16);
  return dense_is && cache_is(p.cache) && cache_is(p.extra_cache);
}

Compute choose_compute(const Problem& p) {
  Compute c;
  c.kernels = &kernels();
  const bool exact = kv_is_bf16_exact(p);
  const bool worth_it = c.kernels->fast_bf16 || (c.kernels->native_bf16 && has_codes(p));
  if (worth_it && p.q.dtype == ATTUNE_BFLOAT16 && exact) c.tile = TileType::kBF16;
  // Staged rows are bf16 where that loses nothing, even if the arithmetic is fp32: half of the bytes.
  const bool decoded = (p.cache && !p.cache.one_factor) || (p.extra_cache && !p.extra_cache.one_factor);
  const bool lossless = exact && !decoded && !(p.k && p.prologue.any);
  c.decode_rows = c.tile == TileType::kBF16 || lossless ? TileType::kBF16 : TileType::kF32;
  if (c.decode_rows == TileType::kF32 && all_rows_are_f16(p)) c.decode_rows = TileType::kF16;  // in place
  return c;
}

// Offsets of the arrays in the workspace.
struct Layout {
  size_t header = 0, sequences = 0, items = 0, merges = 0, partials = 0, k_rows = 0, v_rows = 0, scratch = 0, total = 0;
  size_t scratch_each = 0;
};

struct Header {
  uint64_t owner, stamp;  // the plan's number and schedule_stamp(), which run_scheduled compares with its own
  int64_t num_items, num_merges;
};

// A number that no other plan of the process has. Memory with other contents is unlikely to begin with it.
uint64_t new_owner() {
  static std::atomic<uint64_t> count{0};
  return 0x6174'7475'6e65'0000u + count.fetch_add(1);
}

class AttentionPlan final : public KernelPlan {
 public:
  explicit AttentionPlan(const Problem& p)
      : threads_(num_threads()),
        compute_(choose_compute(p)),
        limits_(schedule_limits(p, threads_)),
        t5_(make_t5_buckets(p)) {
    ready_threads(threads_);
    rows_ = std::max(prefill_rows(p.head_dim_qk, p.head_dim_v), kDecodeRows);
    partial_floats_ = limits_.partial_rows * partial_row_floats(p);
    prepared_ = p.k && p.prologue.any;
    size_t at = 0;
    auto take = [&](int64_t count, size_t size) {
      const size_t begin = at;
      const unsigned __int128 bytes = static_cast<unsigned __int128>(static_cast<uint64_t>(count)) * size;
      if (bytes > (static_cast<unsigned __int128>(1) << 56))
        fail(ATTUNE_UNSUPPORTED, "the workspace would exceed 2^56 bytes");
      at += (static_cast<size_t>(bytes) + 255) / 256 * 256;
      return begin;
    };
    layout_.header = take(1, sizeof(Header));
    layout_.sequences = take(p.batch, sizeof(Sequence));
    layout_.items = take(limits_.max_items, sizeof(Item));
    layout_.merges = take(limits_.max_merges, sizeof(MergeTask));
    layout_.partials = take(limits_.max_partials * partial_floats_, sizeof(float));
    if (prepared_) {
      layout_.k_rows = take(p.k.rows * p.heads_kv * p.head_dim_qk, prepared_size());
      layout_.v_rows = p.v_aliases_k ? layout_.k_rows : take(p.k.rows * p.heads_kv * p.head_dim_v, prepared_size());
    }
    layout_.scratch_each = (scratch_bytes(rows_, p.head_dim_qk, p.head_dim_v) + 255) / 256 * 256;
    layout_.scratch = take(threads_, layout_.scratch_each);
    layout_.total = at;
  }

  size_t workspace_size() const override { return layout_.total; }

  std::string describe() const override {
    return cat("kernel cpu_attention (", compute_.kernels->isa, ", ", threads_, " thread", plural_s(threads_),
               "), arithmetic ", compute_.tile == TileType::kBF16 ? "bf16 with fp32 sums" : "fp32",
               "; prefill tiles of up to ", rows_, " packed rows x ", kPrefillN, " keys, decode tiles of ", kDecodeN,
               " keys; ", limits_.max_partials > 0 ? "long sequences are split over the threads" : "no splits",
               "; workspace ", layout_.total, " bytes");
  }

  void schedule(const Problem& p, void* workspace, void*) const override {
    Schedule s = arrays(workspace);
    make_schedule(p, limits_, s);
    const Header header{owner_, schedule_stamp(p), s.num_items, s.num_merges};
    std::memcpy(workspace, &header, sizeof(header));
  }

  void run(const Problem& p, void* workspace, void*) const override {
    Schedule s = arrays(workspace);
    Header header;
    std::memcpy(&header, workspace, sizeof(header));
    if (p.scheduled_before) check_scheduled(p, header);
    std::byte* base = static_cast<std::byte*>(workspace);
    DenseRows dense{p.k, p.v};
    if (prepared_) dense = prepare_dense(p, s.sequences, base);
    run_items(p, s, header, dense, base);
    merge(p, s, header, base);
    if (p.zero_finished) zero_skipped(p, s.sequences, base);
    if (p.prologue.append) append(p, s.sequences);
  }

 private:
  void check_scheduled(const Problem& p, const Header& header) const {
    require(header.owner == owner_, "workspace holds no schedule of this plan; call attune_schedule first");
    require(header.stamp == schedule_stamp(p),
            "lengths, offsets, finished, topk_length, windows, ranges or shapes changed since attune_schedule; call it "
            "again");
  }

  size_t prepared_size() const { return compute_.tile == TileType::kBF16 ? 2 : 4; }

  Schedule arrays(void* workspace) const {
    std::byte* base = static_cast<std::byte*>(workspace);
    Schedule s{};
    s.sequences = reinterpret_cast<Sequence*>(base + layout_.sequences);
    s.items = reinterpret_cast<Item*>(base + layout_.items);
    s.merges = reinterpret_cast<MergeTask*>(base + layout_.merges);
    return s;
  }

  Scratch scratch_of(const Problem& p, std::byte* base, int thread) const {
    return make_scratch(base + layout_.scratch + static_cast<size_t>(thread) * layout_.scratch_each, rows_,
                        p.head_dim_qk, p.head_dim_v, compute_.tile);
  }

  // K and V of the dense tokens through the prologue, into the workspace.
  DenseRows prepare_dense(const Problem& p, const Sequence* sequences, std::byte* base) const {
    auto view = [&](size_t offset, int64_t dim) {
      RowView v;
      v.data = base + offset;
      v.dtype = compute_.tile == TileType::kBF16 ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT32;
      v.element_size = static_cast<int32_t>(prepared_size());
      v.rows = p.k.rows;
      v.row_stride = p.heads_kv * dim;
      v.head_stride = dim;
      v.dim_stride = 1;
      return v;
    };
    const DenseRows out{view(layout_.k_rows, p.head_dim_qk),
                        view(layout_.v_rows, p.v_aliases_k ? p.head_dim_qk : p.head_dim_v)};
    constexpr int64_t kChunk = 16;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence& s = sequences[b];
      if (s.num_dense == 0 || is_skipped(p, s, b)) continue;
      parallel_for(ceil_div(s.num_dense, kChunk), threads_, [&](int64_t chunk, int) {
        alignas(64) float row[kMaxHeadDim];
        auto store = [&](const RowView& to, int64_t r, int64_t h, int64_t n) {
          if (compute_.tile == TileType::kBF16) {
            compute_.kernels->to_bf16(ATTUNE_FLOAT32, row, n, reinterpret_cast<bf16_t*>(to.at(r, h)));
          } else {
            std::memcpy(to.at(r, h), row, static_cast<size_t>(n) * sizeof(float));
          }
        };
        for (int64_t i = chunk * kChunk; i < std::min(s.num_dense, (chunk + 1) * kChunk); ++i) {
          const int64_t r = s.kv_begin + i;
          for (int64_t h = 0; h < p.heads_kv; ++h) {
            prepare_k_row(p.prologue, p.k, p.head_dim_qk, r, h, b, s.num_cached + i, row);
            store(out.k, r, h, p.head_dim_qk);
            if (p.v_aliases_k) continue;
            prepare_v_row(p.prologue, p.v, p.head_dim_v, r, h, b, row);
            store(out.v, r, h, p.head_dim_v);
          }
        }
      });
    }
    return out;
  }

  void run_items(const Problem& p, const Schedule& s, const Header& header, const DenseRows& dense,
                 std::byte* base) const {
    const TileSource prefill(p, dense, compute_.tile, false, *compute_.kernels);
    const TileSource decode(p, dense, compute_.decode_rows, compute_.tile == TileType::kBF16, *compute_.kernels);
    parallel_for(header.num_items, threads_, [&](int64_t i, int thread) {
      Scratch scratch = scratch_of(p, base, thread);
      const Item& item = s.items[i];
      const Sequence& sequence = s.sequences[item.sequence];
      const ScoreRows rows{p, sequence, item, t5_, item.kv_head};
      if (is_prefill(p, sequence)) {
        run_prefill_item(rows, prefill, compute_, scratch);
      } else {
        run_decode_item(rows, decode, compute_, scratch);
      }
      if (item.partial >= 0) {
        save_partial(p, item, scratch, partials(base) + item.partial * partial_floats_);
        return;
      }
      for (int i = 0; i < item.num_heads * item.num_rows; ++i) {
        const int r = i % item.num_rows;
        store_row(p, sequence.q_begin + rows.query(r), rows.head(r) + i / item.num_rows * p.group,
                  scratch.o + i * scratch.ld_o, scratch.row_max[i], scratch.row_sum[i]);
      }
    });
  }

  void merge(const Problem& p, const Schedule& s, const Header& header, std::byte* base) const {
    parallel_for(header.num_merges, threads_, [&](int64_t i, int thread) {
      Scratch scratch = scratch_of(p, base, thread);
      const MergeTask& task = s.merges[i];
      merge_partials(p, s.sequences[task.sequence], task, partials(base), partial_floats_, scratch.o);
    });
  }

  void zero_skipped(const Problem& p, const Sequence* sequences, std::byte* base) const {
    Scratch scratch = scratch_of(p, base, 0);
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence& s = sequences[b];
      if (!is_skipped(p, s, b)) continue;
      for (int64_t i = 0; i < s.num_q; ++i) {
        for (int64_t h = 0; h < p.heads_q; ++h) store_empty_row(p, s.q_begin + i, h, scratch.o);
      }
    }
  }

  // Runs after every read of the cache, as queries may still see tokens that a ring evicts here. Appends from the
  // inputs, not from the rows that attended, so that each element is rounded once.
  void append(const Problem& p, const Sequence* sequences) const {
    parallel_for(p.batch, threads_, [&](int64_t b, int) {
      const Sequence& s = sequences[b];
      if (is_skipped(p, s, b)) return;
      const int64_t retained = p.cache.ring_capacity > 0 ? std::min(s.num_dense, p.cache.ring_capacity) : s.num_dense;
      alignas(64) float k[kMaxHeadDim];
      alignas(64) float v[kMaxHeadDim];
      for (int64_t i = s.num_dense - retained; i < s.num_dense; ++i) {
        const int64_t position = s.num_cached + i, row = s.kv_begin + i;
        for (int64_t h = 0; h < p.heads_kv; ++h) {
          prepare_k_row(p.prologue, p.k, p.head_dim_qk, row, h, b, position, k);
          if (!p.v_aliases_k) prepare_v_row(p.prologue, p.v, p.head_dim_v, row, h, b, v);
          append_row(p.cache, b, position, h, k, p.v_aliases_k ? nullptr : v, p.prologue.power_of_two_scales);
        }
      }
    });
  }

  float* partials(std::byte* base) const { return reinterpret_cast<float*>(base + layout_.partials); }

  const uint64_t owner_ = new_owner();
  int threads_;
  Compute compute_;
  ScheduleLimits limits_;
  T5Buckets t5_;
  int rows_ = 0;
  int64_t partial_floats_ = 0;
  bool prepared_ = false;
  Layout layout_;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t) { return std::make_unique<AttentionPlan>(p); }

// Every value that there is today. A new one is refused until it is named here.
Coverage coverage() {
  Coverage c;
  c[Axis::kQueries] = use::kRagged | use::kFixed | use::kRopeApart;
  c[Axis::kQueryDtype] = use::kQF32 | use::kQF16 | use::kQBf16 | use::kQE4m3 | use::kQE5m2 | use::kQInt8;
  c[Axis::kKvSource] = use::kDense | use::kPaged | use::kContiguous | use::kNewTokens | use::kSparseSlots |
                       use::kSparseDense | use::kSecondCache | use::kRing | use::kBeams;
  c[Axis::kKvFormat] = use::kF32 | use::kF16 | use::kBf16 | use::kE4m3 | use::kE5m2 | use::kInt8 | use::kMla656 |
                       use::kMla584 | use::kValiasesK | use::kVBesideK;
  c[Axis::kKvScales] = use::kCodecScales;
  c[Axis::kKvLayout] = use::kNhd | use::kHnd | use::kXpacked | use::kBytes;
  c[Axis::kMask] = use::kNoMask | kScoreMasks | use::kFinished | use::kSkipDecode;
  c[Axis::kScore] = kScoreTerms | use::kSinks;
  c[Axis::kPrologue] = use::kNoPrologue | use::kDequantize | use::kQkvBias | use::kIa3 | use::kRope | use::kMrope |
                       use::kLogn | use::kAppend | use::kPowerOfTwoScales;
  c[Axis::kOutput] = use::kOutF32 | use::kOutF16 | use::kOutBf16 | use::kOutE4m3 | use::kLse | use::kMaxLogits;
  c[Axis::kDeterminism] = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = kMaxHeadDim;
  c.head_dim_v_max = kMaxHeadDim;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& attention_kernel() {
  static const Kernel kernel{"cpu_attention", "attention", ATTUNE_DEVICE_CPU, 0, coverage(), make_plan};
  return kernel;
}

}  // namespace attune::cpu
