// SPDX-License-Identifier: Apache-2.0
// Accesses: is what they touch known to be there, and to be free?
#include "emulator/shadow.h"

#include <bit>

namespace attune::emulator {
namespace {

constexpr uintptr_t kPage = 4096;

}  // namespace

Shadow::Shadow(unsigned cluster, unsigned blocks, unsigned threads, size_t static_bytes)
    : cluster_(cluster), lanes_(size_t{blocks} * threads), times_(lanes_.size() / 32, 1), cells_(blocks) {
  const auto none = std::make_shared<Clock>();
  none->known.resize(lanes_.size()), none->fenced.resize(lanes_.size());
  for (ShadowLane& lane : lanes_) lane.base = none;
  for (Cells& cells : cells_) cells.words.resize((kSharedBytes + static_bytes + 3) / 4);
}

bool Shadow::knows(unsigned lane, unsigned agent, uint32_t time) const {
  return agent == lane || Clock::holds(lanes_[lane].base->known, agent, time);
}
bool Shadow::is_fenced(unsigned lane, unsigned agent, uint32_t time) const {
  return (agent == lane && lanes_[lane].fenced >= time) || Clock::holds(lanes_[lane].base->fenced, agent, time);
}

// What calls the emulator is a function of one instruction: its caller says more.
Site Shadow::here(unsigned lane, void* pc) const {
  const std::vector<void*>& calls = lanes_[lane].calls;
  const auto call = [&](size_t up) {
    return calls.size() < up ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(calls[calls.size() - up]));
  };
  if (pc == nullptr) return {call(1), call(2)};
  s_code = reinterpret_cast<uintptr_t>(pc);
  return {static_cast<uint32_t>(s_code), call(1)};
}

void Shadow::access(const void* at, size_t bytes, bool write, void* pc, Cell::Kind kind) {
  const unsigned me = running();
  go_through(at, bytes, {me, me, time_of(me), write, false, kind, here(me, pc)});
}
void Shadow::access_as(unsigned lane, const void* at, size_t bytes, bool write) {
  const unsigned who = (running() & ~31u) + lane;
  go_through(at, bytes, {who, who, time_of(who), write, false, Cell::kPlain, here(running(), nullptr)});
}
void Shadow::read_by_product(const void* at, unsigned bytes) {
  const unsigned me = running();
  go_through(at, bytes, {products_of(me), me, lane().product_groups + 1, false, true, Cell::kPlain, here(me, nullptr)});
}
void Shadow::begin_product(unsigned lane, const void* sums, size_t bytes) {
  ShadowLane& l = lanes_[(running() & ~31u) + lane];
  const Registers now = {reinterpret_cast<uintptr_t>(sums), bytes, l.product_groups + 1};
  for (Registers& r : l.registers) {
    if (r.begin == now.begin && r.bytes == bytes) return void(r = now);
  }
  l.registers.push_back(now);
}
void Shadow::report_registers(bool write, void* pc) {
  const unsigned me = running();
  Access access = {me, me, 0, write, false, Cell::kPlain, here(me, pc)};
  access.is_register = true;
  report(access, "which a product has that nobody has waited for", {});
}

void Shadow::write_by_copy(const void* at, unsigned bytes, const Barrier& counts, bool async) {
  const auto time = static_cast<uint32_t>(counts.phase + 1);
  go_through(at, bytes, {counts.agent, running(), time, true, async, Cell::kPlain, here(running(), nullptr)});
}
void Shadow::read_by_copy(const void* at, unsigned bytes, const Barrier& counts) {
  const auto time = static_cast<uint32_t>(counts.phase + 1);
  go_through(at, bytes, {counts.agent, running(), time, false, true, Cell::kPlain, here(running(), nullptr)});
}

void Shadow::begin_copy(const void* at, unsigned bytes) {
  const unsigned me = running();
  go_through(at, bytes, {copies_of(me), me, lane().copies + 1, true, false, Cell::kPlain, here(me, nullptr)});
}

void Shadow::begin_store(const void* from, const void* to, unsigned bytes) {
  const unsigned me = running();
  const Site site = here(me, nullptr);
  go_through(from, bytes, {copies_of(me), me, lane().copies + 1, false, true, Cell::kPlain, site});
  go_through(to, bytes, {copies_of(me), me, lane().copies + 1, true, false, Cell::kPlain, site});
}

void Shadow::init_barrier(Barrier& b, const void* at) {
  const unsigned me = running();
  b.agent = first_barrier() + static_cast<unsigned>(barriers_.size());
  barriers_.push_back(std::to_string(static_cast<const unsigned char*>(at) - g_block->shared));
  go_through(at, 8, {me, me, time_of(me), true, false, Cell::kBarrier, here(me, nullptr)});
}
void Shadow::use_barrier(const void* at) {
  const unsigned me = running();
  go_through(at, 8, {me, me, time_of(me), false, false, Cell::kBarrier, here(me, nullptr)});
}

void Shadow::go_through(const void* at, size_t bytes, Access access) {
  const auto* const p = static_cast<const unsigned char*>(at);
  std::vector<Block>& blocks = g_block->cluster->blocks;
  const auto try_block = [&](Block& b) {
    const auto offset = static_cast<size_t>(p - b.shared);
    if (p < b.shared || offset >= kSharedBytes) return false;
    in_block(b, cells_[static_cast<size_t>(&b - blocks.data())], static_cast<unsigned>(offset), bytes, access);
    return true;
  };
  if (try_block(*g_block)) return;
  for (Block& b : blocks) {
    if (try_block(b)) return;
  }
  const size_t offset = offset_among_statics(p);
  if (offset != SIZE_MAX)
    return in_block(*g_block, cells_[cluster_rank()], static_cast<unsigned>(kSharedBytes + offset), bytes, access);
  in_global(reinterpret_cast<uintptr_t>(p), bytes, access);
}

void Shadow::in_block(Block& b, Cells& cells, unsigned offset, size_t bytes, Access& access) {
  access.block = &b;
  access.is_wide = bytes > 8;
  const auto end = static_cast<unsigned>(offset + bytes);
  if (end > 4 * cells.words.size()) throw std::runtime_error("an access leaves shared memory");
  for (unsigned at = offset; at < end;) {
    const unsigned word = at / 4, next = std::min(end, 4 * word + 4);
    Cell& whole = cells.words[word];
    const bool all = next - at == 4;
    access.offset = at;
    if (all && !whole.by_bytes) {
      touch(whole, access);
      at = next;
      continue;
    }
    if (!whole.by_bytes) split(cells, word);
    for (; at < next; ++at) {
      access.offset = at;
      touch(cells.bytes[at], access);
    }
    if (all && access.write && access.kind != Cell::kAtomic) {  // the same again
      whole = cells.bytes[4 * word];
      whole.by_bytes = false, whole.reads = 0;
    }
  }
  access.offset = offset;
  if (!access.write && access.is_wide && !access.any_written) report(access, "which nobody has written", {});
}

void Shadow::split(Cells& cells, unsigned word) {
  if (cells.bytes.empty()) cells.bytes.resize(4 * cells.words.size());
  Cell& whole = cells.words[word];
  for (unsigned i = 0; i < 4; ++i) {
    Cell& byte = cells.bytes[4 * word + i];
    byte = whole;
    byte.reads = 0;
    for (uint32_t r = whole.reads; r != 0; r = reads_[r].next) {
      const Reads copy = reads_[r];
      reads_.push_back({copy.first, copy.mask, copy.time, copy.site, byte.reads});
      byte.reads = static_cast<uint32_t>(reads_.size() - 1);
    }
  }
  forget_reads(whole);
  whole.by_bytes = true;
}

void Shadow::touch(Cell& cell, Access& access) {
  check_writer(cell, access);
  if (!access.write) {
    if (access.kind != Cell::kBarrier || access.block != g_block) note_read(cell, access);
    return;
  }
  check_reads(cell, access);
  forget_reads(cell);
  cell.time = access.time, cell.site = access.site, cell.kind = access.kind;
  cell.writer = static_cast<uint16_t>(access.agent + 1);
}

void Shadow::check_writer(const Cell& cell, Access& access) {
  if (cell.writer == 0) {
    if (!access.write && !access.is_wide) report(access, "which nobody has written", {});
    return;
  }
  access.any_written = true;
  const unsigned writer = cell.writer - 1u;
  const bool is_ordinary = writer < 2 * lanes_.size();  // cp.async, too
  if (cell.kind == Cell::kBarrier && access.kind != Cell::kBarrier)
    return report(access, "where a barrier is", cell.site);
  if (cell.kind == Cell::kAtomic && access.kind == Cell::kAtomic) return;
  if (!knows(access.lane, writer, cell.time)) {
    if (is_one_instruction(writer, cell.site, access)) return;
    return report(access, "which " + name_of(writer) + " writes, perhaps later", cell.site);
  }
  if (access.async && is_ordinary && !is_fenced(access.lane, writer, cell.time))
    report(access, "which " + name_of(writer) + " has written with no fence between (fence.proxy.async)", cell.site);
}

// Lanes that write one place together: one of them does, and an order by seed shows whether it matters which.
bool Shadow::is_one_instruction(unsigned writer, Site site, const Access& access) const {
  return access.write && access.agent == access.lane && writer / 32 == access.lane / 32 && site.at == access.site.at &&
         site.caller == access.site.caller;
}

void Shadow::check_reads(const Cell& cell, const Access& access) {
  for (uint32_t at = cell.reads; at != 0; at = reads_[at].next) {
    const Reads& r = reads_[at];
    for (uint32_t mask = r.mask; mask != 0; mask &= mask - 1) {
      const unsigned reader = r.first + static_cast<unsigned>(std::countr_zero(mask));
      if (!knows(access.lane, reader, r.time))
        return report(access, "which " + name_of(reader) + " reads, perhaps later", r.site);
    }
  }
}

// What threads of the block know to be over is over when the block ends.
void Shadow::end_block() {
  const unsigned first = g_block->first_thread, count = static_cast<unsigned>(g_block->waits.size());
  Clock all;
  for (unsigned i = first; i < first + count; ++i) {
    all.join(*lanes_[i].base);
    Clock::raise(all.known, i, UINT32_MAX);
  }
  Access access = {running(), running(), 0, true, false, Cell::kPlain, {}};
  access.block = g_block;
  const Cells& cells = cells_[cluster_rank()];
  for (unsigned word = 0; word < kSharedBytes / 4; ++word) {
    access.offset = 4 * word;
    check_end(cells.words[word], all, access);
    for (unsigned i = 0; cells.words[word].by_bytes && i < 4; ++i) check_end(cells.bytes[4 * word + i], all, access);
  }
}
void Shadow::check_end(const Cell& cell, const Clock& all, const Access& access) {
  if (cell.writer != 0 && !cell.by_bytes && !Clock::holds(all.known, cell.writer - 1u, cell.time))
    report(access, "by its end, which " + name_of(cell.writer - 1u) + " writes, perhaps later", cell.site);
  for (uint32_t at = cell.reads; at != 0; at = reads_[at].next) {
    const Reads& r = reads_[at];
    for (uint32_t mask = r.mask; mask != 0; mask &= mask - 1) {
      const unsigned reader = r.first + static_cast<unsigned>(std::countr_zero(mask));
      if (!Clock::holds(all.known, reader, r.time))
        return report(access, "by its end, which " + name_of(reader) + " reads, perhaps later", r.site);
    }
  }
}

void Shadow::note_read(Cell& cell, const Access& access) {
  const bool is_thread = access.agent < lanes_.size();
  const unsigned first = is_thread ? access.agent & ~31u : access.agent;
  const uint32_t mask = is_thread ? 1u << access.agent % 32 : 1;
  for (uint32_t at = cell.reads; at != 0; at = reads_[at].next) {
    Reads& r = reads_[at];
    if (r.first != first) continue;
    if (r.time == access.time) {
      r.mask |= mask, r.site = access.site;
      return;
    }
    bool before = true;
    for (uint32_t rest = is_thread ? r.mask : 0; rest != 0 && before; rest &= rest - 1)
      before = knows(access.lane, first + static_cast<unsigned>(std::countr_zero(rest)), r.time);
    if (!before) continue;
    r.mask = mask, r.time = access.time, r.site = access.site;
    return;
  }
  const Reads read = {first, mask, access.time, access.site, cell.reads};
  if (free_reads_.empty()) {
    reads_.push_back(read);
    cell.reads = static_cast<uint32_t>(reads_.size() - 1);
  } else {
    cell.reads = free_reads_.back();
    free_reads_.pop_back();
    reads_[cell.reads] = read;
  }
}

void Shadow::forget_reads(Cell& cell) {
  for (uint32_t at = cell.reads; at != 0; at = reads_[at].next) free_reads_.push_back(at);
  cell.reads = 0;
}

void Shadow::check_global(const GlobalCell& cell, uintptr_t at, Access access) {
  const unsigned writer = cell.writer - 1u;
  const bool own = cell.cluster == cluster_;
  const auto& others = lanes_[access.lane].base->others;
  const auto other = others.find(cell.cluster);
  if (own ? knows(access.lane, writer, cell.time) || is_one_instruction(writer, cell.site, access)
          : other != others.end() && Clock::holds(other->second->known, writer, cell.time))
    return;
  access.address = at;
  report(access,
         "which " + name_of(writer) + (own ? "" : " of cluster " + std::to_string(cell.cluster)) +
             " writes, perhaps later",
         cell.site);
}

// Only whether two write one place, and whether what is read has been written before: inputs are everybody's.
void Shadow::in_global(uintptr_t at, size_t bytes, const Access& given) {
  GlobalPage* page = nullptr;  // that of the byte before
  for (const uintptr_t end = at + bytes; at < end; ++at) {
    if (page == nullptr || at % kPage == 0) {
      const auto found = s_global.pages.find(at / kPage);
      if (found == s_global.pages.end() && !given.write) {
        page = nullptr;
        at |= kPage - 1;
        continue;
      }
      std::unique_ptr<GlobalPage>& kept = found != s_global.pages.end() ? found->second : s_global.pages[at / kPage];
      if (kept == nullptr) kept = std::make_unique<GlobalPage>();
      page = kept.get();
    }
    GlobalCell& cell = page->cells[at % kPage];
    // A load of several words may take in a counter that it does not look at.
    const bool may_be = cell.kind == Cell::kAtomic && (given.kind == Cell::kAtomic || !given.write);
    if (cell.writer != 0 && !may_be) check_global(cell, at, given);
    if (given.write)
      cell = {given.time, given.site, static_cast<uint16_t>(given.agent + 1), static_cast<uint16_t>(cluster_),
              given.kind};
  }
}

}  // namespace attune::emulator
