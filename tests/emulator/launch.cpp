// SPDX-License-Identifier: Apache-2.0
// Lets the threads of blocks run on one thread of the CPU: whose turn it is, and what stack it has.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <optional>

#include "emulator/context.h"
#include "emulator/shadow.h"

namespace attune::emulator {

// A thread's stack, of one block after the other: between two kernels it stands in run_kernels().
struct Fiber {
  std::unique_ptr<char[]> stack;
  Context context;
};

namespace {

// Stacks begin at other lines of the cache each.
constexpr size_t kStackBytes = 256 << 10, kStackLines = 61, kLineBytes = 64, kSharedAlignment = 1024;
constexpr uint64_t kMostIdleTurns = 10000;  // of each block, in order, or of each warp
constexpr unsigned char kNoNumber = 0xff;   // as on a GPU, whatever was there before: here what is no number

Context g_scheduler;

struct Range {
  unsigned char* begin;
  size_t bytes;
};
std::vector<Range> g_statics;         // variables of modules
Block* g_owner_of_statics = nullptr;  // whose values they have

struct Order {
  bool by_seed = false;
  uint64_t state = 0;
  unsigned clusters = 1;
  Lanes lanes = Lanes::kTogether;
  // Less than n.
  uint64_t draw(uint64_t n) {
    state += 0x9e3779b97f4a7c15;
    uint64_t x = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (x ^ x >> 31) % n;
  }
};

Order order_of(std::optional<uint64_t> seed, unsigned clusters, Lanes lanes = Lanes::kTogether) {
  const char* const chosen = setting("SEED");
  if (chosen != nullptr) seed = seed.value_or(0) + 1000003 * std::strtoull(chosen, nullptr, 10);
  if (!seed) return {};
  return {true, *seed, clusters, lanes};
}

constexpr unsigned kClusters = 4;
Order g_order = order_of({}, kClusters);
uint64_t g_turn = 0;  // changes with every turn, for which threads may wait

// The turn, from this on, of a thread that does not wait; as many as there are turns if none.
unsigned find_ready(const Block& b, unsigned turn) {
  for (; turn < b.turns.count; ++turn) {
    const Wait& wait = b.waits[b.turns.thread(turn)];
    if ((*wait.at & wait.mask) != wait.value) break;
  }
  return turn;
}

void run_kernels();

void start(Fiber& f, unsigned thread) {
  f.stack = std::make_unique_for_overwrite<char[]>(g_stack.bytes);
  begin_on(f.context, f.stack.get() + thread % kStackLines * kLineBytes, kStackBytes, run_kernels);
}

// From `context`, of a thread or the scheduler: that turn, or the scheduler's after the last.
void go_on(Block& b, unsigned turn, Context& context) {
  if (turn == b.turns.count) return change(context, g_scheduler);
  b.turn = turn;
  b.current = g_running.thread.x = b.turns.thread(turn);
  Fiber& f = b.fibers[b.current];
  if (f.stack == nullptr) start(f, b.current);
  g_stack.begin = reinterpret_cast<uintptr_t>(f.stack.get());
  change(context, f.context);
}

// All threads give way here, so that they return to one place.
[[gnu::noinline]] void leave(const uint64_t* at, uint64_t mask, uint64_t value) {
  Block& b = *g_block;
  b.waits[b.current] = {at, mask, value};
  Context& context = b.fibers[b.current].context;
  go_on(b, find_ready(b, b.turn + 1), context);
}

void run_kernels() {
  while (true) {
    try {
      if (g_block->cluster->shadow != nullptr) g_block->cluster->shadow->begin_kernel();
      (*g_block->kernel)();
    } catch (const std::exception& e) {
      g_block->failure = e.what();
    }
    Block& b = *g_block;
    if (--b.unfinished == 0 && b.failure.empty() && b.cluster->blocks.size() > 1 && b.cluster->shadow != nullptr)
      b.cluster->shadow->end_block();
    ++b.progress;
    if (!b.failure.empty()) change(b.fibers[b.current].context, g_scheduler);
    leave(kDone.at, kDone.mask, kDone.value);
  }
}

void give_statics_to(Block& b) {
  if (g_owner_of_statics == &b) return;
  const auto for_all = [](std::vector<unsigned char>& copy, auto move) {
    auto at = copy.begin();
    for (const Range& r : g_statics) {
      if (copy.end() - at < static_cast<int64_t>(r.bytes)) break;
      move(r, at);
      at += static_cast<int64_t>(r.bytes);
    }
  };
  if (g_owner_of_statics != nullptr)
    for_all(g_owner_of_statics->static_shared, [](const Range& r, auto at) { std::copy_n(r.begin, r.bytes, at); });
  for_all(b.static_shared, [](const Range& r, auto at) { std::copy_n(at, r.bytes, r.begin); });
  g_owner_of_statics = &b;
}

// One turn for each thread among the block's turns that does not wait.
[[gnu::noinline]] void run_turns(Block& b) {
  g_block = &b;
  give_statics_to(b);
  g_running = {{0, 0, 0}, b.index, b.grid, {static_cast<unsigned>(b.waits.size()), 1, 1}, b.shared};
  if (const unsigned turn = find_ready(b, 0); turn < b.turns.count) go_on(b, turn, g_scheduler);
  if (!g_block->failure.empty()) throw std::runtime_error(g_block->failure);
}

bool run_in_order(Block& b) {
  ++g_turn;
  b.turns = {0, static_cast<unsigned>(b.waits.size())};
  if (find_ready(b, 0) == b.turns.count) return false;
  run_turns(b);
  return true;
}

// A turn for lanes of the warp that is first among those that can go on. Few changes of who is first: a warp runs ahead
// of the others, or falls behind, as far as it can.
bool run_by_seed(Block& b) {
  ++g_turn;
  const Warp* first = nullptr;
  for (const Warp& w : b.warps) {
    if (first != nullptr && w.priority <= first->priority) continue;
    b.turns = {static_cast<unsigned>(&w - b.warps.data()) * 32, 32};
    if (find_ready(b, 0) < 32) first = &w;
  }
  if (first == nullptr) return false;
  const auto warp = static_cast<unsigned>(first - b.warps.data());
  b.turns = {warp * 32, 32, static_cast<unsigned>(g_order.draw(32)), 2 * static_cast<unsigned>(g_order.draw(16)) + 1};
  b.polled = false;
  do {
    run_turns(b);
  } while (g_order.lanes == Lanes::kTogether && find_ready(b, 0) < 32);
  if (b.polled) b.warps[warp].priority = 0;
  if (g_order.draw(b.polled ? 4 : 32) == 0) b.warps[warp].priority = g_order.draw(1 << 30);
  return true;
}

// What a cluster has while it runs.
struct Place {
  std::unique_ptr<Cluster> cluster;  // null: free
  std::vector<Fiber> fibers;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> shared;
};
std::vector<Place> g_places;

class Launch {
 public:
  Launch(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster)
      : grid_(grid),
        threads_(threads),
        kernel_(kernel),
        cluster_(cluster),
        waiting_(grid.x * grid.y * grid.z / cluster) {
    std::iota(waiting_.begin(), waiting_.end(), 0);
    if (g_order.by_seed) {
      for (size_t i = waiting_.size(); i > 1; --i) std::swap(waiting_[i - 1], waiting_[g_order.draw(i)]);
    }
    std::reverse(waiting_.begin(), waiting_.end());
    if (g_places.size() < g_order.clusters) g_places.resize(g_order.clusters);
  }

  void run() {
    while (true) {
      for (size_t i = 0; i < g_order.clusters && !waiting_.empty(); ++i) {
        if (g_places[i].cluster == nullptr) begin(g_places[i]);
      }
      if (running_.empty()) break;
      if (!(g_order.by_seed ? turn_by_seed() : turn_in_order()) || idle_ > kMostIdleTurns * warps_running())
        throw std::runtime_error("threads wait for what nobody will do:" + unfinished());
      for (size_t i = 0; i < g_order.clusters; ++i) {
        if (g_places[i].cluster != nullptr && ended(*g_places[i].cluster)) end(g_places[i]);
      }
    }
    if (std::string races = Shadow::end_launch(); !races.empty()) throw std::runtime_error(races);
    if (beside_others_ && !all_wait_)
      throw std::runtime_error("a block ends that has not waited for the kernels before");
  }

 private:
  static bool ended(const Cluster& c) {
    return std::all_of(c.blocks.begin(), c.blocks.end(), [](const Block& b) { return b.unfinished == 0; });
  }

  void begin(Place& place) {
    if (place.fibers.size() < size_t{threads_} * cluster_) place.fibers.resize(size_t{threads_} * cluster_);
    while (place.shared.size() < cluster_)
      place.shared.emplace_back(std::aligned_alloc(kSharedAlignment, kSharedBytes), &std::free);
    place.cluster = std::make_unique<Cluster>();
    place.cluster->blocks.resize(cluster_);
    const unsigned first = waiting_.back() * cluster_;
    waiting_.pop_back();
    size_t static_bytes = 0;
    for (const Range& r : g_statics) static_bytes += r.bytes;
    if (is_watched())
      place.cluster->shadow = std::make_shared<Shadow>(first / cluster_, cluster_, threads_, static_bytes);
    for (unsigned i = 0; i < cluster_; ++i) {
      Block& b = place.cluster->blocks[i];
      b.cluster = place.cluster.get();
      b.fibers = &place.fibers[size_t{threads_} * i];
      b.first_thread = threads_ * i;
      b.unfinished = threads_;
      b.waits.resize(threads_, kReady);
      b.cluster_generations.resize(threads_);
      b.warps.resize(threads_ / 32);
      if (g_order.by_seed) {
        for (Warp& w : b.warps) w.priority = g_order.draw(1 << 30);
      }
      b.shared = static_cast<unsigned char*>(place.shared[i].get());
      std::fill_n(b.shared, kSharedBytes, kNoNumber);
      b.static_shared.assign(static_bytes, kNoNumber);
      const unsigned at = first + i;
      b.index = {at % grid_.x, at / grid_.x % grid_.y, at / grid_.x / grid_.y};
      b.grid = grid_, b.kernel = &kernel_;
      running_.push_back(&b);
    }
  }

  void end(Place& place) {
    for (Block& b : place.cluster->blocks) {
      beside_others_ |= b.has_waited || b.has_allowed;
      all_wait_ &= b.has_waited;
      for (const auto& [at, barrier] : b.barriers) {
        if (barrier.bytes != 0) throw std::runtime_error("a barrier still expects bytes at the end");
        if (barrier.pending != barrier.count)
          throw std::runtime_error("a block ends in the middle of a barrier's phase");
      }
      if (g_owner_of_statics == &b) g_owner_of_statics = nullptr;
      std::erase(running_, &b);
    }
    place.cluster = nullptr;
  }

  // False where nobody can go on.
  bool turn_in_order() {
    bool ran = false;
    for (Block* b : running_) {
      const uint64_t before = b->progress;
      ran |= run_in_order(*b);
      note_progress(before != b->progress);
    }
    return ran;
  }
  bool turn_by_seed() {
    if (g_order.draw(4) == 0) at_ = g_order.draw(running_.size());  // staying costs less
    for (size_t i = 0; i < running_.size(); ++i, ++at_) {
      Block& b = *running_[at_ % running_.size()];
      const uint64_t before = b.progress;
      if (!run_by_seed(b)) continue;
      note_progress(before != b.progress);
      return true;
    }
    return false;
  }
  void note_progress(bool any) { idle_ = any ? 0 : idle_ + 1; }

  uint64_t warps_running() const { return running_.size() * (g_order.by_seed ? threads_ / 32 : 1); }
  // What threads wait for: each thing once, with the first who does.
  std::string unfinished() const {
    std::string who;
    for (const Block* b : running_) {
      std::map<std::string, std::vector<size_t>> waiting;
      for (size_t i = 0; i < b->waits.size(); ++i) {
        if (b->waits[i].at != kDone.at || b->waits[i].value != kDone.value)
          waiting[name_of(*b, b->waits[i])].push_back(i);
      }
      for (const auto& [what, threads] : waiting)
        who += "\n  block " + std::to_string(b->index.x) + ": " + std::to_string(threads.size()) + " threads from " +
               std::to_string(threads[0]) + " on for " + what;
    }
    return who;
  }
  static std::string name_of(const Block& b, const Wait& wait) {
    for (size_t i = 0; i < b.warps.size(); ++i) {
      if (wait.at == &b.warps[i].generation) return "lanes of warp " + std::to_string(i);
    }
    for (size_t i = 0; i < b.numbered.size(); ++i) {
      if (wait.at == &b.numbered[i].generation) return "numbered barrier " + std::to_string(i);
    }
    for (const auto& [at, barrier] : b.barriers) {
      if (wait.at == &barrier.phase)
        return "the barrier at " + std::to_string(at - kSharedBase) + " in phase " + std::to_string(barrier.phase) +
               " with " + std::to_string(barrier.pending) + " arrivals and " + std::to_string(barrier.bytes) +
               " bytes to come";
    }
    return wait.at == &b.cluster->generation ? "the cluster" : "nothing";
  }

  Index grid_;
  unsigned threads_;
  const std::function<void()>& kernel_;
  unsigned cluster_;
  std::vector<unsigned> waiting_;  // clusters, the next one last
  std::vector<Block*> running_;
  size_t at_ = 0;  // who runs, by seed
  uint64_t idle_ = 0;
  bool beside_others_ = false, all_wait_ = true;  // other kernels, by programmatic dependent launch
};

}  // namespace

Running g_running;
Block* g_block = nullptr;
Stack g_stack = {0, kStackBytes + kStackLines* kLineBytes};

Shuffled::Shuffled(uint64_t seed, unsigned clusters, Lanes lanes) { g_order = order_of(seed, clusters, lanes); }
Shuffled::~Shuffled() { g_order = order_of({}, kClusters); }
Pinned::Pinned() { g_pinned = true, g_order = order_of({}, kClusters); }
Pinned::~Pinned() { g_pinned = false, g_order = order_of({}, kClusters); }

void add_static_shared(unsigned char* begin, size_t bytes) { g_statics.push_back({begin, bytes}); }
size_t offset_among_statics(const unsigned char* at) {
  size_t offset = 0;
  for (const Range& r : g_statics) {
    if (at >= r.begin && at < r.begin + r.bytes) return offset + static_cast<size_t>(at - r.begin);
    offset += r.bytes;
  }
  return SIZE_MAX;
}

void wait_while(const uint64_t& at, uint64_t value, uint64_t mask) {
  if ((at & mask) == value) leave(&at, mask, value);
}
void leave_turn() { leave(&g_turn, ~uint64_t{0}, g_turn); }
void may_leave_turn(unsigned one_in) {
  if (g_order.by_seed && g_order.draw(one_in) == 0) leave_turn();
}
void may_fall_behind(unsigned one_in) {
  if (g_order.lanes == Lanes::kApart) may_leave_turn(one_in);
}

void run(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster) {
  if (threads % 32 != 0) throw std::runtime_error("blocks are of whole warps");
  if (grid.x % cluster != 0) throw std::runtime_error("grids are of whole clusters");
  Shadow::begin_launch();
  try {
    Launch(grid, threads, kernel, cluster).run();
  } catch (const std::exception& e) {
    g_places.clear();  // threads stand in the middle of kernels
    g_block = g_owner_of_statics = nullptr;
    const std::string races = Shadow::end_launch();  // what is wrong may follow from them
    throw std::runtime_error(e.what() + (races.empty() ? "" : "\n" + races));
  }
  g_block = nullptr;
}

}  // namespace attune::emulator
