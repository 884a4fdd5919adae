// SPDX-License-Identifier: Apache-2.0
// The emulator's shadow of memory: who wrote a byte last, who has read it since, and whether those who touch it next
// know of that. What the kernel's code loads and stores comes from the compiler (tsan.cpp), what instructions do from
// the emulator. Warps and lanes are told apart; what the threads of a cluster do is ordered by barriers, exchanges in
// a warp, copies and products that have been waited for, and across clusters by atomic operations that acquire and
// release.
#pragma once

#include <set>
#include <string>
#include <unordered_map>

#include "emulator/machine.h"

namespace attune::emulator {

// Where in the code: the access, and who called the function that it is in.
struct Site {
  uint32_t at = 0, caller = 0;  // low halves of addresses
};

struct Cell {
  enum Kind : uint8_t { kPlain, kAtomic, kBarrier };
  uint32_t time = 0;
  Site site;
  uint32_t reads = 0;   // the latest of a chain, 0: none
  uint16_t writer = 0;  // 1 + agent, 0: nobody has written
  Kind kind = kPlain;
  bool by_bytes = false;  // of a word: its four bytes have cells of their own
};

// Of a block: a cell for each word, of dynamic shared memory and then of static.
struct Cells {
  std::vector<Cell> words, bytes;
};

// A product's sums, while it runs. Of operands the compiler makes other registers when their variables change.
struct Registers {
  uintptr_t begin;
  size_t bytes;
  uint32_t group;
};

struct ShadowLane {
  ClockPtr base;
  uint32_t fenced = 0;                      // until when its own writes are
  uint32_t copies = 0, product_groups = 0;  // groups that it has committed
  std::vector<uint32_t> copy_groups;        // how many when it closed each
  std::vector<Registers> registers;
  std::vector<void*> calls;  // return addresses
};

class Shadow {
 public:
  Shadow(unsigned cluster, unsigned blocks, unsigned threads, size_t static_bytes);

  // Of the running lane, or of `lane`: ordinary accesses to any memory, and atomic ones.
  void access(const void* at, size_t bytes, bool write, void* pc, Cell::Kind kind = Cell::kPlain);
  void access_as(unsigned lane, const void* at, size_t bytes, bool write);
  // By a warp's products.
  void read_by_product(const void* at, unsigned bytes);
  void begin_product(unsigned lane, const void* sums, size_t bytes);
  // Of each access to a stack: inline, as most of them touch none.
  void touch_registers(uintptr_t at, size_t bytes, bool write, void* pc) {
    for (const Registers& r : lane().registers) {
      if (at + bytes > r.begin && at < r.begin + r.bytes) report_registers(write, pc);
    }
  }
  void close_products();
  void wait_for_products(uint32_t pending);
  // By copies that a barrier counts.
  // async: in the proxy of its own, unlike st.async.
  void write_by_copy(const void* at, unsigned bytes, const Barrier& counts, bool async = true);
  void read_by_copy(const void* at, unsigned bytes, const Barrier& counts);
  // cp.async.
  void begin_copy(const void* at, unsigned bytes);
  // Bulk copies to global memory, which are waited for as those.
  void begin_store(const void* from, const void* to, unsigned bytes);
  void close_copies();
  void wait_for_copies(size_t pending);
  void release_copies(Meeting& m);  // and nothing else that the thread has done

  void init_barrier(Barrier& b, const void* at);
  void use_barrier(const void* at);
  void end_phase(Barrier& b);  // that is over
  void release(Meeting& m);
  void release_lane(Meeting& m, unsigned lane);  // of the running warp
  void acquire(const ClockPtr& clock);
  void meet_warp();
  void fence();
  void synchronize_atomic(const void* at, bool acquires, bool releases);

  void enter(void* from) { lane().calls.push_back(from); }
  void leave() {
    if (!lane().calls.empty()) lane().calls.pop_back();
  }
  void begin_kernel() { lane().calls.clear(); }
  void end_block();  // all its threads have ended: other blocks may not touch its memory any more

 private:
  struct Reads {
    unsigned first;  // agent, or a warp's first thread
    uint32_t mask, time;
    Site site;
    uint32_t next;
  };
  // One access, while its bytes are gone through.
  struct Access {
    unsigned agent, lane;  // who does it; whose knowledge counts
    uint32_t time;
    bool write, async;
    Cell::Kind kind;
    Site site;
    const Block* block = nullptr;  // whose memory; null: global
    unsigned offset = 0;
    uintptr_t address = 0;
    bool is_register = false, is_wide = false,
         any_written = false;  // may take in what lies between fields; some of it is there
  };
  struct GlobalCell {
    uint32_t time = 0;
    Site site;
    uint16_t writer = 0;
    uint16_t cluster = 0;
    Cell::Kind kind = Cell::kPlain;
  };
  struct GlobalPage {
    GlobalCell cells[4096];
  };
  // Of a launch.
  struct Global {
    std::unordered_map<uintptr_t, std::unique_ptr<GlobalPage>> pages;
    std::map<const void*, std::map<unsigned, std::shared_ptr<Clock>>> atomics;
  };

  unsigned running() const { return g_block->first_thread + g_block->current; }
  ShadowLane& lane() { return lanes_[running()]; }
  uint32_t& time_of(unsigned lane) { return times_[lane / 32]; }
  unsigned copies_of(unsigned lane) const { return static_cast<unsigned>(lanes_.size()) + lane; }
  unsigned products_of(unsigned lane) const { return static_cast<unsigned>(2 * lanes_.size()) + lane / 32; }
  unsigned first_barrier() const { return static_cast<unsigned>(2 * lanes_.size() + times_.size()); }
  void wait_for(unsigned agent, uint32_t time);

  bool knows(unsigned lane, unsigned agent, uint32_t time) const;
  bool is_fenced(unsigned lane, unsigned agent, uint32_t time) const;

  Site here(unsigned lane, void* pc) const;
  void go_through(const void* at, size_t bytes, Access access);
  void in_block(Block& b, Cells& cells, unsigned offset, size_t bytes, Access& access);
  void in_global(uintptr_t at, size_t bytes, const Access& access);
  void touch(Cell& cell, Access& access);
  void check_writer(const Cell& cell, Access& access);
  bool is_one_instruction(unsigned writer, Site site, const Access& access) const;
  void check_global(const GlobalCell& cell, uintptr_t at, Access access);
  void check_reads(const Cell& cell, const Access& access);
  void check_end(const Cell& cell, const Clock& all, const Access& access);
  void note_read(Cell& cell, const Access& access);
  void forget_reads(Cell& cell);
  void split(Cells& cells, unsigned word);
  void report(const Access& access, const std::string& what, Site other);
  void report_registers(bool write, void* pc);
  std::string name_of(unsigned agent) const;

  unsigned cluster_;
  std::vector<ShadowLane> lanes_;
  std::vector<uint32_t> times_;  // of each warp: advances with what a lane of it makes known
  std::vector<Cells> cells_;     // of each block
  std::vector<Reads> reads_{1};
  std::vector<uint32_t> free_reads_;
  std::vector<std::string> barriers_;  // agents behind the products
  // The latest of each, as lanes of a warp do the same one after the other.
  struct Memo {
    ClockPtr a, b, result;
  } joined_, fenced_, waited_;
  uint32_t waited_until_ = 0;

 public:
  static void begin_launch();
  // What was found in the launch; "" if nothing.
  static std::string end_launch();

 private:
  static inline Global s_global;
  static inline std::set<std::string> s_keys;
  static inline std::vector<std::string> s_reports;
  static inline uintptr_t s_code = 0;  // an address in the kernel's code
};

}  // namespace attune::emulator
