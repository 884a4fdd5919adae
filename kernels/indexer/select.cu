// SPDX-License-Identifier: Apache-2.0
// Selects the topk best keys of a row by radix select. Grid: one block for each row, or one cluster if there are few
// rows; each block of a cluster has a part of the row.
//
//   T: the rank of the topk-th best key; ranks > T are selected and, of the ranks equal to T, the first ones
//
//1. A histogram of the first kBits of the ranks finds the bin of T. While that bin has more than kCandidates keys,
//    another pass over the row narrows it by a histogram of the next digit.
//2. One more pass marks the keys above the bin, and those in it, in bit masks. The keys in the bin are candidates: two
//    more histograms, of the candidates alone, find T; then their marks are corrected.
//3. Prefix sums over the marks place each thread's keys in the order of their positions: first in shared memory, then
//    in `indices`, with all entries looked up in parallel.
//
// A row that sees no more than topk keys selects all of them without reading scores. Keys on bad pages are masked: the
// page table is checked once for the row, and key by key only if it has a bad page. Scores in the workspace are -inf on
// bad pages, so they need the check only if T is -inf.
#include "indexer/select_keys.cuh"
#include "ptx/grid.cuh"
#include "ptx/shared.cuh"

namespace attune::indexer {

// The ranks [lower, upper] that T may have. T is the wanted-th largest of the keys in that range.
struct Threshold {
  unsigned lower, upper, wanted;
  int digits;  // how many digits are known

  __device__ __forceinline__ bool exact() const { return lower == upper; }
  __device__ __forceinline__ bool holds(unsigned rank) const { return rank - lower <= upper - lower; }
  // Narrows the range to the bin that was found for the next digit.
  __device__ __forceinline__ void narrow(const SharedStorage& shared) {
    const int shift = Config::shift(digits++);
    lower += static_cast<unsigned>(shared.bin) << shift;
    upper = lower + ((1u << shift) - 1);
    wanted -= static_cast<unsigned>(shared.bin_above);
  }
};

// Histogram of the first digit of all keys, except those already known to be below T.
__device__ __forceinline__ void count_first_digit(const Keys& keys, unsigned wanted, SharedStorage& shared) {
  constexpr int kShift = Config::shift(0);
  const unsigned spare = Config::kBins + threadIdx.x % 32;  // a bin that no digit has, which is cheaper than a branch
  unsigned least = 1;
  for (int base = 0, chunks = 1; base < keys.end; base += Config::kChunk, ++chunks) {
    unsigned rank[Config::kVectors][4];
    keys.load(base + 4 * static_cast<int>(threadIdx.x), rank);
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
      if (base + v * Config::kLine >= keys.end) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned bin = rank[v][e] >= least ? rank[v][e] >> kShift : spare;
        atomicAdd(&shared.search.histogram[bin], 1u);
      }
    }
    if ((chunks & (chunks - 1)) == 0 && base + Config::kChunk < keys.end) {
      __syncthreads();
      find_bin(shared.search.histogram, wanted, shared);
      least = max(static_cast<unsigned>(shared.bin) << kShift, 1u);
    }
  }
}

// Histogram of the next digit of the keys in the range.
__device__ __forceinline__ void count_next_digit(const Keys& keys, const Threshold& t, SharedStorage& shared) {
  const int shift = Config::shift(t.digits);
  for (int base = 0; base < keys.end; base += Config::kChunk) {
    unsigned rank[Config::kVectors][4];
    keys.load(base + 4 * static_cast<int>(threadIdx.x), rank);
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (t.holds(rank[v][e])) atomicAdd(&shared.search.histogram[(rank[v][e] - t.lower) >> shift], 1u);
      }
    }
  }
}

// Marks at most kSpan keys. collect: keys in the range become candidates.
__device__ __forceinline__ void mark(const Keys& keys, const Threshold& t, bool collect, SharedStorage& shared) {
  const bool odd = threadIdx.x % 2 != 0;
  auto* const marks = reinterpret_cast<unsigned char*>(odd ? shared.inside : shared.above);
  for (int base = 0; base < keys.end; base += Config::kChunk) {
    unsigned rank[Config::kVectors][4];
    const int mine = base + 4 * static_cast<int>(threadIdx.x);
    keys.load(mine, rank);
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
      if (base + v * Config::kLine >= keys.end) break;
      const int first = mine + v * Config::kLine;
      unsigned above = 0, inside = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        above |= rank[v][e] > t.upper ? 1u << e : 0;
        inside |= t.holds(rank[v][e]) ? 1u << e : 0;
      }
      if (collect && inside != 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((inside >> e & 1) == 0) continue;
          const int n = atomicAdd(&shared.candidates, 1);
          shared.search.rank[n] = rank[v][e];
          shared.search.key[n] = first + e;
        }
      }
      // Two lanes have the eight keys of a byte: one writes `above`, the other `inside`.
      const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? above : inside, 1);
      marks[first / 8] = static_cast<unsigned char>(odd ? other | inside << 4 : above | other << 4);
    }
  }
  __syncthreads();
}

// Gathers the ranks of all blocks' candidates in one list.
__device__ __forceinline__ const unsigned* gather_candidates(SharedStorage& shared) {
  if constexpr (Config::kCluster == 1) return shared.search.rank;
  constexpr int kWarps = Config::kWarps / Config::kCluster;  // for a block
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = warp % Config::kCluster;
  ptx::cluster_barrier();
  Counts listed{};
  if (lane < Config::kCluster) listed.above = static_cast<unsigned>(*ptx::in_block(&shared.candidates, lane));
  const Counts upto = inclusive_sum_of_warp(listed);
  const int count = static_cast<int>(of_lane(listed, block).above);
  const int before = static_cast<int>(of_lane(upto, block).above) - count;
  const unsigned* const rank = ptx::in_block(shared.search.rank, block);
  for (int i = warp / Config::kCluster * 32 + lane; i < count; i += 32 * kWarps)
    shared.search.gathered[before + i] = rank[i];
  return shared.search.gathered;
}

// Finds T among the `count` candidates of all blocks.
__device__ __forceinline__ void find_threshold(int count, Threshold& t, SharedStorage& shared) {
  const unsigned* const rank = gather_candidates(shared);
  while (t.digits < Config::kDigits) {
    const int shift = Config::shift(t.digits);
    clear_histogram(shared);
    for (int i = threadIdx.x; i < count; i += Config::kThreads) {
      if (t.holds(rank[i])) atomicAdd(&shared.search.histogram[(rank[i] - t.lower) >> shift], 1u);
    }
    __syncthreads();
    find_bin(shared.search.histogram, t.wanted, shared);
    t.narrow(shared);
  }
  for (int i = threadIdx.x; i < shared.candidates; i += Config::kThreads) {
    const int key = shared.search.key[i];
    const unsigned bit = 1u << key % 32;
    if (shared.search.rank[i] > t.upper) atomicOr(&shared.above[key / 32], bit);
    if (!t.holds(shared.search.rank[i])) atomicAnd(&shared.inside[key / 32], ~bit);
  }
  __syncthreads();
}

// Called by all blocks of the cluster, each for its part of the row. Narrows the range until T is known, or until its
// keys fit as candidates. Returns their number; 0: T is known.
__device__ __forceinline__ int search(Keys& keys, int most_keys, const IndexSelectParams& p, Threshold& t,
                                      SharedStorage& shared) {
  const bool fits = most_keys <= Config::kSpan;
  if (threadIdx.x == 0) shared.candidates = 0;
  for (;;) {
    clear_histogram(shared);
    if (t.digits == 0) {
      count_first_digit(keys, t.wanted, shared);
    } else {
      count_next_digit(keys, t, shared);
    }
    find_bin(whole_histogram(shared), t.wanted, shared);
    if (shared.bin == 0 && t.digits == 0) {  // the row sees fewer than topk keys
      t = {0, 0, 0, Config::kDigits};
      return 0;
    }
    t.narrow(shared);
    if (t.digits == 1 && t.holds(kRankOfMinusInf) && p.scores.in_workspace) {  // no other score is in that bin
      t.lower = t.upper = kRankOfMinusInf;
      if (keys.check == Check::kNone) keys.check = Check::kMinusInf;
    }
    if (t.exact()) return 0;
    if (fits && shared.bin_inside <= Config::kCandidates) return shared.bin_inside;
  }
}

// The words of the bit masks that this thread counts and writes out.
struct MarkWords {
  int begin, end;

  __device__ __forceinline__ explicit MarkWords(int keys) {
    const int words = (keys + 31) / 32, each = (words + Config::kThreads - 1) / Config::kThreads;
    begin = min(static_cast<int>(threadIdx.x) * each, words);
    end = min(begin + each, words);
  }

  // The counts of the threads before this one; all: of the block.
  __device__ __forceinline__ Counts sum(SharedStorage& shared, Counts& all) const {
    Counts mine{};
    for (int i = begin; i < end; ++i)
      mine = mine +
             Counts{static_cast<unsigned>(__popc(shared.above[i])), static_cast<unsigned>(__popc(shared.inside[i]))};
    return exclusive_sum(mine, shared, all);
  }
};

struct Row {
  const Tables& tables;
  int* to;           // indices
  long long stride;  // in entries

  // Writes the selected keys: all keys above, and `ties` of those inside. Counts of the row: before these keys; before
  // this thread's words (start); before the end of these keys (after).
  __device__ __forceinline__ void write(const Keys& keys, const MarkWords& words, Counts before, Counts start,
                                        Counts after, unsigned ties, SharedStorage& shared) const {
    const auto place = [&](Counts c) { return static_cast<int>(c.above + min(c.inside, ties)); };
    const int first = place(before), count = place(after) - first;
    for (int window = 0; window < count; window += SharedStorage::kStaged) {
      Counts at = start;
      for (int i = words.begin; i < words.end; ++i) {
        const unsigned inside = at.inside < ties ? shared.inside[i] : 0;  // beyond `ties` none is selected
        for (unsigned rest = shared.above[i] | inside; rest != 0; rest &= rest - 1) {
          const int bit = __ffs(static_cast<int>(rest)) - 1;
          const bool tie = (inside >> bit & 1) != 0;
          const int n = place(at) - first - window;
          if (!(tie && at.inside >= ties) && n >= 0 && n < SharedStorage::kStaged)
            shared.staged[n] = keys.position + 32 * i + bit;
          at = at + (tie ? Counts{0, 1} : Counts{1, 0});
        }
      }
      __syncthreads();
      const int staged = min(count - window, SharedStorage::kStaged);
#pragma unroll 2
      for (int i = threadIdx.x; i < staged; i += Config::kThreads)
        to[(first + window + i) * stride] = tables.entry(shared.staged[i]);
      __syncthreads();
    }
  }

  // Called by all blocks of the cluster. candidates: of all blocks; 0: T is known. Returns the number of selected keys.
  __device__ __forceinline__ int write_all(const Keys& keys, int candidates, Threshold& t,
                                           SharedStorage& shared) const {
    const bool one_span = keys.end <= Config::kSpan;
    bool marked = false;
    Counts before{}, all{}, mine{}, of_span{};
    // In a cluster, pass 0 counts, so that each block knows where its keys begin; pass 1 writes.
    for (int pass = Config::kCluster > 1 ? 0 : 1; pass < 2; ++pass) {
      Counts upto = before;
      int first = 0;
      do {
        const Keys span = keys.part(first, Config::kSpan);
        const MarkWords words(span.end);
        if (!marked) {
          mark(span, t, candidates > 0, shared);
          if (candidates > 0) find_threshold(candidates, t, shared);
          mine = words.sum(shared, of_span);
          marked = one_span;
          __syncthreads();
        }
        const Counts after = upto + of_span;
        if (pass == 1) write(span, words, upto, upto + mine, after, t.wanted, shared);
        upto = after;
        first += Config::kSpan;
      } while (first < keys.end);
      if (pass == 0) {
        before = exclusive_sum_of_blocks(upto, shared, all);
      } else if (Config::kCluster == 1) {
        all = upto;
      }
    }
    return static_cast<int>(all.above + min(all.inside, t.wanted));
  }
};

__device__ __forceinline__ void run_row(const IndexSelectParams& p, long long row, SharedStorage& shared) {
  const Owner owner = owner_of(p.rows, row);
  if (owner.sequence < 0) return;
  const KeyRange range = visible(p.rows, row, owner.i, owner.n, num_keys(p.rows, owner.sequence));
  const Tables tables{p, owner.sequence};
  const int size = range.end - range.begin, rank = Config::kCluster > 1 ? ptx::cluster_rank() : 0;
  const bool takes_all = size <= p.topk;

  const char* const scores =
      takes_all ? nullptr : score_row(p.rows, p.scores, row) + range.begin * p.scores.column_stride;
  const bool dense = !takes_all && p.scores.column_stride == 4;
  const int head = dense ? static_cast<int>(reinterpret_cast<unsigned long long>(scores) / 4 % 4) : 0;
  const int each = ((head + size + Config::kCluster - 1) / Config::kCluster + 127) / 128 * 128;
  const Keys whole{
      tables,      takes_all ? nullptr : scores - head * p.scores.column_stride, range.begin - head, head, head + size,
      Check::kNone};
  Keys keys = whole.part(rank * each, each);
  const bool checks = takes_all || !p.scores.in_workspace || p.slot_table.data != nullptr;
  if (checks && !tables.have(keys.position + keys.begin, keys.position + keys.end)) keys.check = Check::kAll;

  Threshold t{0, 0, 0, Config::kDigits};
  int candidates = 0;
  if (!takes_all) {
    t = {0, 0xffffffffu, static_cast<unsigned>(p.topk), 0};
    candidates = search(keys, each, p, t, shared);
  }
  int* const to = reinterpret_cast<int*>(const_cast<char*>(row_of(p.rows, p.indices, row)));
  const Row out{tables, to, p.indices.head_stride / 4};
  const int count = out.write_all(keys, candidates, t, shared);
  for (int i = count + rank * Config::kThreads + static_cast<int>(threadIdx.x); i < p.topk;
       i += Config::kCluster * Config::kThreads)
    to[i * out.stride] = -1;
  if (rank == 0 && threadIdx.x == 0 && p.topk_length != nullptr) p.topk_length[row * p.topk_length_stride] = count;
}

}  // namespace attune::indexer

extern "C" __global__ void __launch_bounds__(attune::indexer::Config::kThreads, attune::indexer::Config::kBlocksPerSm)
    attune_index_select(const __grid_constant__ attune::kernels::IndexSelectParams p) {
  using namespace attune;
  using namespace attune::indexer;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  // The last rows of a causal prompt see most keys, so they come first.
  for (long long i = blockIdx.x / Config::kCluster; i < p.rows.count; i += gridDim.x / Config::kCluster) {
    run_row(p, p.rows.first + p.rows.count - 1 - i, shared);
    __syncthreads();
  }
}
