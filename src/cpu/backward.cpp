// SPDX-License-Identifier: Apache-2.0
#include "cpu/backward.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/backward.h"
#include "cpu/backward_item.h"
#include "cpu/threads.h"

namespace attune::cpu {
namespace {

constexpr int64_t kItemKeys = 4 * kTileKeys;          // keys of an item that sums dk and dv alone
constexpr int64_t kMostSumBytes = int64_t{16} << 20;  // a thread's sums of dk and dv for a whole sequence
constexpr double kCutCost = 1.4;                      // a cut item computes S and dP twice: seven products, not five

// How the sequences of a run are cut into items. An item that sums all gradients of a sequence and KV head computes a
// tile once; where there are too few of them for the threads, dq and dk, dv have items of their own.
struct Cut {
  const Sequence* sequences;  // keys in use
  const Sequence* extents;    // all keys, in use or not
  const int32_t* order;       // sequences, longest work first
  const int64_t* ends;        // of the items of each, in that order
  bool whole;
  int64_t whole_keys;  // longer sequences are always cut
};

class BackwardItems {
 public:
  BackwardItems(const BackwardProblem& p, const Cut& cut) : p_(p), f_(p.forward), cut_(cut) {}

  int64_t count(int64_t b) const {
    if (is_whole(b)) return cut_.sequences[b].num_q > 0 || cut_.extents[b].num_dense > 0 ? f_.heads_kv : 0;
    return key_items(b) + (p_.dq ? f_.heads_q * ceil_div(cut_.sequences[b].num_q, kChunkRows) : 0);
  }

  GradientItem at(int64_t index) const {
    const int64_t rank = std::upper_bound(cut_.ends, cut_.ends + f_.batch, index) - cut_.ends;
    const int64_t b = cut_.order[rank];
    const int64_t i = index - (rank == 0 ? 0 : cut_.ends[rank - 1]);
    const int64_t queries = cut_.sequences[b].num_q, keys = cut_.extents[b].num_dense;
    GradientItem item{b, 0, 0, 0, 0, queries, 0, keys, false, static_cast<bool>(p_.dk), static_cast<bool>(p_.dv)};
    if (is_whole(b)) {
      of_kv_head(i, item);
      item.dq = true;
    } else if (i < key_items(b)) {
      of_kv_head(i % f_.heads_kv, item);
      item.key_begin = i / f_.heads_kv * kItemKeys;  // under causality the first keys have most queries
      item.key_end = std::min(item.key_begin + kItemKeys, keys);
    } else {
      const int64_t query_item = i - key_items(b);
      item.head_begin = query_item % f_.heads_q;
      item.head_end = item.head_begin + 1;
      item.kv_head = item.head_begin / f_.group;
      item.query_begin =
          (ceil_div(queries, kChunkRows) - 1 - query_item / f_.heads_q) * kChunkRows;  // and the last queries most keys
      item.query_end = std::min(item.query_begin + kChunkRows, queries);
      item.dq = true;
      item.dk = item.dv = false;
    }
    return item;
  }

 private:
  bool is_whole(int64_t b) const { return cut_.whole && cut_.sequences[b].seqlen_kv() <= cut_.whole_keys; }
  int64_t key_items(int64_t b) const {
    return p_.dk || p_.dv ? f_.heads_kv * ceil_div(cut_.extents[b].num_dense, kItemKeys) : 0;
  }
  void of_kv_head(int64_t kv_head, GradientItem& item) const {
    item.kv_head = kv_head;
    item.head_begin = kv_head * f_.group;
    item.head_end = item.head_begin + f_.group;
  }

  const BackwardProblem& p_;
  const Problem& f_;
  const Cut& cut_;
};

// About how many pairs of a query and a key a head of the sequence computes.
int64_t work_of(const Problem& p, const Sequence& s, int64_t b) {
  int64_t pairs = 0;
  for (int64_t first = 0; first < s.num_q; first += kTileRows) {
    const int64_t end = std::min<int64_t>(first + kTileRows, s.num_q);
    const KeyRange keys = visible_keys(p, s, b, first, end);
    pairs += std::max<int64_t>(keys.last - keys.first + 1, 0) * (end - first);
  }
  return pairs;
}

bool takes_bf16(const BackwardProblem& p) {
  const Problem& f = p.forward;
  const int32_t dtypes[] = {f.q.dtype, f.k.dtype, f.v.dtype, p.dout.dtype};
  return kernels().fast_bf16 &&
         std::all_of(std::begin(dtypes), std::end(dtypes), [](int32_t dtype) { return dtype == ATTUNE_BFLOAT16; });
}

class CpuBackwardPlan final : public BackwardPlan {
 public:
  explicit CpuBackwardPlan(const BackwardProblem& p)
      : threads_(num_threads()), kernels_(kernels()), bf16_(takes_bf16(p)), t5_(make_t5_buckets(p.forward)) {
    ready_threads(threads_);
    const Problem& f = p.forward;
    const int64_t key_bytes = (round_up(f.head_dim_qk, 16) + round_up(f.head_dim_v, 16)) * int64_t{sizeof(float)};
    keys_ = std::clamp<int64_t>(round_up(std::min(f.max_seqlen_kv, f.k.rows), kTileKeys), kItemKeys,
                                std::max(kMostSumBytes / key_bytes, kItemKeys));
    Workspace counted(nullptr, kCacheLine);
    take_scratch(counted, f);
    scratch_each_ = static_cast<int64_t>(counted.size());
    const auto take = [&](int64_t count, size_t size) {
      const size_t at = workspace_;
      workspace_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(size), 64));
      return at;
    };
    layout_.sequences = take(f.batch, sizeof(Sequence));
    layout_.extents = take(f.batch, sizeof(Sequence));
    layout_.order = take(f.batch, sizeof(int32_t));
    layout_.ends = take(f.batch, sizeof(int64_t));
    layout_.work = take(f.batch, sizeof(int64_t));
    layout_.scratch = take(threads_, static_cast<size_t>(scratch_each_));
  }

  size_t workspace_size() const override { return workspace_; }

  std::string describe() const override {
    return cat("kernel cpu_backward (", kernels_.isa, ", ", threads_, " thread", plural_s(threads_), "), arithmetic ",
               bf16_ ? "bf16 with fp32 sums" : "fp32", "; tiles of ", kTileRows, " queries x ", kTileKeys,
               " keys; dq with dk and dv of up to ", keys_, " key", plural_s(keys_), " at a time; workspace ",
               workspace_, " bytes");
  }

  void run(const BackwardProblem& p, void* workspace, void*) const override {
    if (bf16_) {
      run_as<bf16_t>(p, workspace);
    } else {
      run_as<float>(p, workspace);
    }
  }

 private:
  // Offsets of the arrays in the workspace.
  struct Layout {
    size_t sequences = 0, extents = 0, order = 0, ends = 0, work = 0, scratch = 0;
  };

  void take_scratch(Workspace& c, const Problem& p) const {
    if (bf16_) {
      GradientScratch<bf16_t>(c, p.head_dim_qk, p.head_dim_v, keys_, p.t5_num_buckets);
    } else {
      GradientScratch<float>(c, p.head_dim_qk, p.head_dim_v, keys_, p.t5_num_buckets);
    }
  }

  // Whether items of whole sequences keep all threads at work.
  bool prefers_whole(const Problem& p, const int64_t* work) const {
    const double total = static_cast<double>(std::accumulate(work, work + p.batch, int64_t{0})) * p.heads_kv;
    const double longest = p.batch > 0 ? static_cast<double>(*std::max_element(work, work + p.batch)) : 0.0;
    const double each = total / threads_;
    const double in_rounds = longest * static_cast<double>(ceil_div(p.batch * p.heads_kv, threads_));
    return std::min(in_rounds, each + longest * (threads_ - 1) / threads_) <= kCutCost * each;
  }

  template <class T>
  void run_as(const BackwardProblem& p, void* workspace) const {
    const Problem& f = p.forward;
    Problem single = f;
    single.group = 1;
    single.heads_kv = f.heads_q;
    std::byte* const base = static_cast<std::byte*>(workspace);
    auto* const sequences = reinterpret_cast<Sequence*>(base + layout_.sequences);
    auto* const extents = reinterpret_cast<Sequence*>(base + layout_.extents);
    auto* const order = reinterpret_cast<int32_t*>(base + layout_.order);
    auto* const ends = reinterpret_cast<int64_t*>(base + layout_.ends);
    auto* const work = reinterpret_cast<int64_t*>(base + layout_.work);
    make_sequences(f, sequences);
    make_key_extents(p, extents);
    for (int64_t b = 0; b < f.batch; ++b) work[b] = work_of(f, sequences[b], b);
    std::iota(order, order + f.batch, 0);
    std::sort(order, order + f.batch,
              [&](int32_t x, int32_t y) { return work[x] != work[y] ? work[x] > work[y] : x < y; });
    const Cut cut{sequences, extents, order, ends, p.dq && (p.dk || p.dv) && prefers_whole(f, work), keys_};
    const BackwardItems items(p, cut);
    int64_t num_items = 0;
    for (int64_t r = 0; r < f.batch; ++r) ends[r] = num_items += items.count(order[r]);

    const GradientRun run{p, single, t5_, kernels_};
    const auto on_threads = [&](int64_t n, auto&& body) {
      parallel_for(n, threads_, [&](int64_t i, int thread) {
        Workspace own(base + layout_.scratch + thread * scratch_each_, kCacheLine);
        GradientScratch<T> s(own, f.head_dim_qk, f.head_dim_v, keys_, f.t5_num_buckets);
        body(i, s);
      });
    };
    if (p.dq || p.dk || p.dv) {
      on_threads(num_items, [&](int64_t i, GradientScratch<T>& s) {
        const GradientItem item = items.at(i);
        run_gradient_item(run, sequences[item.sequence], item, s);
      });
    }
    if (p.dsinks) {
      on_threads(f.heads_q, [&](int64_t i, GradientScratch<T>& s) { sum_sink_gradient(run, sequences, i, s); });
    }
    if (p.dbias) {
      const int64_t blocks = ceil_div(p.dbias.shape[1], kTileRows);
      on_threads(p.dbias.shape[0] * blocks, [&](int64_t i, GradientScratch<T>& s) {
        sum_bias_gradient(run, sequences, i / blocks, i % blocks * kTileRows, s);
      });
    }
    if (p.dt5_bias) {
      on_threads(f.heads_q, [&](int64_t i, GradientScratch<T>& s) { sum_t5_gradient(run, sequences, i, s); });
    }
  }

  int threads_;
  const KernelTable& kernels_;
  bool bf16_;
  T5Buckets t5_;
  int64_t keys_ = 0;  // of an item, at most: what its sums have room for
  int64_t scratch_each_ = 0;
  Layout layout_;
  size_t workspace_ = 0;
};

std::unique_ptr<BackwardPlan> make_plan(const BackwardProblem& p, int32_t) {
  return std::make_unique<CpuBackwardPlan>(p);
}

// Sequences are counted in int32, and the workspace stays far from 2^63 bytes.
std::string refusal(const Problem& p) {
  return p.batch > std::numeric_limits<int32_t>::max() ? "more than 2^31 - 1 sequences" : "";
}

Coverage coverage() {
  Coverage c;
  c[Axis::kQueries] = use::kRagged | use::kFixed;
  c[Axis::kQueryDtype] = use::kQF32 | use::kQF16 | use::kQBf16;
  c[Axis::kKvSource] = use::kDense;
  c[Axis::kKvFormat] = use::kF32 | use::kF16 | use::kBf16 | use::kVBesideK;
  c[Axis::kKvScales] = use::kNoScale;
  c[Axis::kKvLayout] = use::kNhd;
  c[Axis::kMask] = use::kNoMask | kScoreMasks;
  c[Axis::kScore] = kScoreTerms | use::kSinks;
  c[Axis::kPrologue] = use::kNoPrologue;
  c[Axis::kOutput] = use::kOutF32 | use::kOutF16 | use::kOutBf16;
  c[Axis::kDeterminism] = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = c.head_dim_v_max = 256;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& backward_kernel() {
  static const Kernel kernel{"cpu_backward", kAttentionBackward, ATTUNE_DEVICE_CPU, 0, coverage(), nullptr, refusal,
                             nullptr,        make_plan};
  return kernel;
}

}  // namespace attune::cpu
