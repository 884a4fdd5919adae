// SPDX-License-Identifier: Apache-2.0
// The topk best keys of a row, in the order of their positions: a radix selection by one block a row, or by a
// cluster of them where there are few rows.
//
//   rank(score): its bits as an unsigned number that orders as scores do, NaN highest, -0 as 0; 0: nobody sees the key
//   T: the rank of the topk-th best key; chosen are ranks > T and, of those equal to T, the first ones
//
// 1. A histogram of the first kBits of the ranks finds the bin of T. The blocks of a cluster each count a part of the
//    row, and read each other's histograms.
// 2. What lies in that bin or above goes to a list in shared memory, in order; then two more histograms, over the list,
//    find T. The first block of a cluster gathers the lists of the others and goes on alone. Where the list has no room,
//    as with many equal scores, it goes over the row.
// 3. The chosen are written in order: each warp counts its run of a chunk by ballots, a sum over the warps places it.
//
// A row that sees no more than topk keys takes all, and their scores are not read.
#include "indexer/rows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"
#include "ptx/shared.cuh"

namespace attune::indexer {

using kernels::IndexSelectParams;

struct Config {
  static constexpr int kThreads = ATTUNE_THREADS, kWarps = kThreads / 32;
  static constexpr int kBits = ATTUNE_BITS, kBins = 1 << kBits;  // of the first digit
  static constexpr int kList = ATTUNE_LIST;
  static constexpr int kCluster = ATTUNE_CLUSTER;  // blocks of a row
  static constexpr int kBlocksPerSm = kThreads <= 256 ? 4 : 1;
  static constexpr int kEach = 8;  // keys of a thread at a time
  static constexpr int kDigits = 3, kShift[kDigits] = {32 - kBits, 32 - 2 * kBits, 0};

  static_assert(kThreads % 32 == 0 && kWarps <= 32, "one warp adds up the sums of all");
  static_assert(kBins % kThreads == 0 && 3 * kBits >= 32 && 2 * kBits < 32, "three digits, bins dealt evenly");
  static_assert(32 * kEach * kWarps < 1 << 16, "two counts of a chunk in one word");
};

struct SharedStorage {
  unsigned histogram[Config::kBins];
  unsigned list_rank[Config::kList];
  int list_position[Config::kList];
  unsigned warp_sum[2][Config::kWarps];
  int bin, above, inside;  // of the histogram: the bin of the wanted rank, ranks above it, ranks in it
  int listed;
};

static_assert(sizeof(SharedStorage) <= ATTUNE_SHARED_BYTES, "the host asks for less shared memory than this");

__device__ __forceinline__ unsigned rank_of(float score) {
  const unsigned bits = __float_as_uint(score + 0.0f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
constexpr unsigned kRankOfMinusInf = 0x007fffffu;

// Tables of a row's sequence.
struct Tables {
  const IndexSelectParams& p;
  int sequence;

  // What indices holds for position t; -1: nobody sees the token.
  __device__ __forceinline__ int entry(int t) const {
    long long slot = t;
    if (p.rows.has_cache) {
      const Slot at = find_slot(p.rows, sequence, t);
      if (at.page < 0) return -1;
      slot = at.page * p.rows.cache.page_size + at.offset;
    }
    if (p.slot_table.data != nullptr) {
      const Slot s = split(t, p.slot_page_size, p.by_slot_page);
      const int page = at(p.slot_table, sequence, s.page);
      if (page < 0 || page >= p.slot_pages) return -1;
      slot = static_cast<long long>(page) * p.slot_page_size + s.offset;
    }
    return p.slots ? static_cast<int>(slot) : t;
  }
};

// Keys of the row itself; without scores all ranks are alike.
template <bool kScores>
struct RowKeys {
  const IndexSelectParams& p;
  const Tables& tables;
  const char* scores;  // of position 0
  int begin, size;
  bool always_looks_up;

  __device__ __forceinline__ int position(int i) const { return begin + i; }
  __device__ __forceinline__ unsigned rank(int i) const {
    const int t = begin + i;
    if constexpr (!kScores) return tables.entry(t) >= 0 ? 1 : 0;
    const unsigned r = rank_of(*reinterpret_cast<const float*>(scores + t * p.scores.column_stride));
    return (always_looks_up || r == kRankOfMinusInf) && tables.entry(t) < 0 ? 0 : r;
  }
};

struct ListKeys {
  const SharedStorage& shared;
  int size;

  __device__ __forceinline__ int position(int i) const { return shared.list_position[i]; }
  __device__ __forceinline__ unsigned rank(int i) const { return shared.list_rank[i]; }
};

__device__ __forceinline__ unsigned inclusive_sum_of_warp(unsigned x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, x, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) x += other;
  }
  return x;
}

// Sum over the threads before this one; all: over all threads. `turn` alternates from call to call: then one barrier is
// enough.
__device__ __forceinline__ unsigned exclusive_sum(unsigned x, int turn, SharedStorage& shared, unsigned& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned upto = inclusive_sum_of_warp(x);
  if (lane == 31) shared.warp_sum[turn][warp] = upto;
  __syncthreads();
  const unsigned warps = inclusive_sum_of_warp(lane < Config::kWarps ? shared.warp_sum[turn][lane] : 0);
  all = __shfl_sync(0xffffffffu, warps, Config::kWarps - 1);
  const unsigned before = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
  return upto - x + (warp > 0 ? before : 0);
}

// Counts digit kDigit of the ranks that begin with the digits in `prefix`.
template <int kDigit, class Source>
__device__ __forceinline__ void count(const Source& source, unsigned prefix, SharedStorage& shared) {
  constexpr int kShift = Config::kShift[kDigit], kUpper = kDigit == 0 ? 32 : Config::kShift[kDigit - (kDigit > 0)];
  for (int i = threadIdx.x; i < Config::kBins; i += Config::kThreads) shared.histogram[i] = 0;
  __syncthreads();
  for (int base = threadIdx.x; base < source.size; base += Config::kThreads * Config::kEach) {
    unsigned rank[Config::kEach];
#pragma unroll
    for (int e = 0; e < Config::kEach; ++e) {
      const int i = base + e * Config::kThreads;
      rank[e] = i < source.size ? source.rank(i) : 0;
    }
#pragma unroll
    for (int e = 0; e < Config::kEach; ++e) {
      if (rank[e] == 0 || (kDigit > 0 && rank[e] >> (kUpper % 32) != prefix)) continue;
      atomicAdd(&shared.histogram[rank[e] >> kShift & ((1u << (kUpper - kShift)) - 1)], 1u);
    }
  }
  __syncthreads();
}

// The bin in which the wanted-th largest of the counted lies, to shared.bin, above and inside. False: fewer were counted.
// kBlocks: whose histograms are added.
template <int kBlocks>
__device__ __forceinline__ bool find_bin(int wanted, SharedStorage& shared) {
  constexpr int kOfThread = Config::kBins / Config::kThreads;
  const int first = Config::kBins - (static_cast<int>(threadIdx.x) + 1) * kOfThread;  // the first thread has the top
  unsigned bins[kOfThread] = {}, mine = 0;
#pragma unroll 2
  for (int block = 0; block < kBlocks; ++block) {
    const unsigned* const histogram = kBlocks > 1 ? ptx::in_block(shared.histogram, block) : shared.histogram;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) bins[i] += histogram[first + i];
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) mine += bins[i];
  unsigned all;
  unsigned before = exclusive_sum(mine, 0, shared, all);
  const unsigned want = static_cast<unsigned>(wanted);
#pragma unroll
  for (int i = kOfThread - 1; i >= 0; --i) {
    if (before < want && want <= before + bins[i]) {
      shared.bin = first + i;
      shared.above = static_cast<int>(before);
      shared.inside = static_cast<int>(bins[i]);
    }
    before += bins[i];
  }
  __syncthreads();
  return all >= want;
}

// Calls sink(n, i, rank) for the chosen of a source, n counting them in order: ranks above `threshold` and the first
// `ties` of those equal to it. Returns how many there are.
template <class Source, class Sink>
__device__ __forceinline__ int choose(const Source& source, unsigned threshold, int ties, SharedStorage& shared,
                                      Sink&& sink) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lower = (1u << lane) - 1;
  int above = 0, equal = 0;  // before this chunk
  int turn = 0;
  for (int base = 0; base < source.size; base += Config::kThreads * Config::kEach, turn ^= 1) {
    const int first = base + warp * 32 * Config::kEach + lane;
    unsigned rank[Config::kEach], is_above[Config::kEach], is_equal[Config::kEach], counts = 0;
#pragma unroll
    for (int e = 0; e < Config::kEach; ++e) rank[e] = first + 32 * e < source.size ? source.rank(first + 32 * e) : 0;
#pragma unroll
    for (int e = 0; e < Config::kEach; ++e) {
      is_above[e] = __ballot_sync(0xffffffffu, rank[e] > threshold);
      is_equal[e] = __ballot_sync(0xffffffffu, rank[e] == threshold && rank[e] != 0);
      counts += __popc(is_above[e]) | __popc(is_equal[e]) << 16;
    }
    unsigned all;
    unsigned before = exclusive_sum(lane == 31 ? counts : 0, turn, shared, all);  // of the warp's; lane 31 comes last
    before = __shfl_sync(0xffffffffu, before, 31);
    int n_above = above + static_cast<int>(before & 0xffff), n_equal = equal + static_cast<int>(before >> 16);
#pragma unroll
    for (int e = 0; e < Config::kEach; ++e) {
      const int a = n_above + __popc(is_above[e] & lower), q = n_equal + __popc(is_equal[e] & lower);
      const bool chosen = (is_above[e] >> lane & 1) != 0 || ((is_equal[e] >> lane & 1) != 0 && q < ties);
      if (chosen) sink(a + min(q, ties), first + 32 * e, rank[e]);
      n_above += __popc(is_above[e]), n_equal += __popc(is_equal[e]);
    }
    above += static_cast<int>(all & 0xffff), equal += static_cast<int>(all >> 16);
  }
  __syncthreads();
  return above + min(equal, ties);
}

struct Row {
  const IndexSelectParams& p;
  const Tables& tables;
  int* to;  // indices
  long long stride;

  template <class Source>
  __device__ __forceinline__ int write(const Source& source, unsigned threshold, int ties,
                                       SharedStorage& shared) const {
    return choose(source, threshold, ties, shared,
                  [&](int n, int i, unsigned) { to[n * stride] = tables.entry(source.position(i)); });
  }

  // Digits 1 and 2 of the threshold; `wanted` of the keys that begin with `prefix` are chosen.
  template <class Source>
  __device__ __forceinline__ int finish(const Source& source, unsigned prefix, int wanted,
                                        SharedStorage& shared) const {
    count<1>(source, prefix, shared);
    find_bin<1>(wanted, shared);
    prefix = prefix << (Config::kShift[0] - Config::kShift[1]) | static_cast<unsigned>(shared.bin);
    wanted -= shared.above;
    __syncthreads();
    count<2>(source, prefix, shared);
    find_bin<1>(wanted, shared);
    prefix = prefix << Config::kShift[1] | static_cast<unsigned>(shared.bin);
    wanted -= shared.above;
    __syncthreads();
    return write(source, prefix, wanted, shared);
  }

  // By all blocks of the cluster; the first one gets the count, the others -1.
  __device__ __forceinline__ int select(const RowKeys<true>& keys, SharedStorage& shared) const {
    const RowKeys<true> part = part_of(keys);
    count<0>(part, 0, shared);
    if constexpr (Config::kCluster > 1) ptx::cluster_barrier();
    const bool enough = find_bin<Config::kCluster>(p.topk, shared);
    const auto bin = static_cast<unsigned>(shared.bin);
    const int above = shared.above, kept = above + shared.inside;
    const bool fits = enough && kept <= Config::kList;
    __syncthreads();
    if (fits) {
      const unsigned below = bin == 0 ? 0 : (bin << Config::kShift[0]) - 1;
      const int listed = choose(part, below, 0, shared, [&](int n, int i, unsigned rank) {
        shared.list_rank[n] = rank;
        shared.list_position[n] = part.position(i);
      });
      if (threadIdx.x == 0) shared.listed = listed;
    }
    if constexpr (Config::kCluster > 1) {
      ptx::cluster_barrier();  // histograms have been read, lists are there
      if (fits && ptx::cluster_rank() == 0) gather(shared);
      ptx::cluster_barrier();  // and have been gathered
      if (ptx::cluster_rank() != 0) return -1;
    }
    if (!enough) return write(keys, 0, 0, shared);
    if (!fits) return finish(keys, bin, p.topk - above, shared);
    return finish(ListKeys{shared, kept}, bin, p.topk - above, shared);
  }

  // What this block of the cluster counts and lists.
  __device__ __forceinline__ static RowKeys<true> part_of(const RowKeys<true>& keys) {
    if constexpr (Config::kCluster == 1) return keys;
    const int each = (keys.size + Config::kCluster - 1) / Config::kCluster;
    const int first = min(ptx::cluster_rank() * each, keys.size);
    RowKeys<true> part = keys;
    part.begin += first;
    part.size = min(each, keys.size - first);
    return part;
  }

  // The lists of the other blocks behind that of the first.
  __device__ __forceinline__ static void gather(SharedStorage& shared) {
    int at = shared.listed;
    for (int block = 1; block < Config::kCluster; ++block) {
      const SharedStorage& other = *ptx::in_block(&shared, block);
      const int listed = other.listed;
      for (int i = threadIdx.x; i < listed; i += Config::kThreads) {
        shared.list_rank[at + i] = other.list_rank[i];
        shared.list_position[at + i] = other.list_position[i];
      }
      at += listed;
    }
    __syncthreads();
  }
};

__device__ __forceinline__ void run_row(const IndexSelectParams& p, long long row, SharedStorage& shared) {
  const Owner owner = owner_of(p.rows, row);
  if (owner.sequence < 0) return;
  const KeyRange range = visible(p.rows, row, owner.i, owner.n, num_keys(p.rows, owner.sequence));
  const Tables tables{p, owner.sequence};
  int* const to = reinterpret_cast<int*>(const_cast<char*>(row_of(p.rows, p.indices, row)));
  const Row out{p, tables, to, p.indices.head_stride / 4};
  const int size = range.end - range.begin;
  int count;
  if (size <= p.topk) {
    if (Config::kCluster > 1 && ptx::cluster_rank() != 0) return;
    count = out.write(RowKeys<false>{p, tables, nullptr, range.begin, size, true}, 0, 0, shared);
  } else {
    const bool always = !p.scores.in_workspace || p.slot_table.data != nullptr;
    count = out.select(RowKeys<true>{p, tables, score_row(p.rows, p.scores, row), range.begin, size, always}, shared);
    if (count < 0) return;
  }
  for (int i = count + static_cast<int>(threadIdx.x); i < p.topk; i += Config::kThreads) to[i * out.stride] = -1;
  if (threadIdx.x == 0 && p.topk_length != nullptr) p.topk_length[row * p.topk_length_stride] = count;
}

}  // namespace attune::indexer

extern "C" __global__ void __launch_bounds__(attune::indexer::Config::kThreads, attune::indexer::Config::kBlocksPerSm)
    attune_index_select(const __grid_constant__ attune::kernels::IndexSelectParams p) {
  using namespace attune;
  using namespace attune::indexer;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  for (long long i = blockIdx.x / Config::kCluster; i < p.rows.count; i += gridDim.x / Config::kCluster) {
    run_row(p, p.rows.first + i, shared);
    __syncthreads();
  }
}
