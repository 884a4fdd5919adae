// SPDX-License-Identifier: Apache-2.0
// The C ABI of the operations beside attention, and of the tables: checks, translates, catches. Nothing else.
#include <algorithm>
#include <cstring>
#include <vector>

#include "attune/attune.h"
#include "core/aliasing.h"
#include "core/indexer.h"
#include "core/integers.h"
#include "core/kv_format.h"
#include "core/ops.h"
#include "core/status.h"
#include "core/tables.h"
#include "core/versioned.h"
#include "cpu/threads.h"
#include "dispatch/device.h"
#include "dispatch/operations.h"

using attune::guarded;
using attune::Known;
using attune::require;

namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 31;  // position ids are int32
constexpr int64_t kMaxHeads = int64_t{1} << 24;

// Zeroes a struct that begins with its size.
template <class Struct>
void init_struct(const char* name, Struct* s, uint64_t struct_size) {
  attune::write_struct(name, s, struct_size, [](Struct&) {});
}

// Checks the fields that the style reads and computes its frequencies.
std::vector<double> checked_frequencies(const attune_rope& rope) {
  attune::check_rope(rope);
  std::vector<double> frequencies(static_cast<size_t>(rope.dim / 2));
  attune::rope_frequencies(rope, frequencies.data());
  return frequencies;
}

// make: checks and normalises the operation. run: on its device.
template <class Op, class Make, class Run>
attune_status run_op(const char* name, const Op* op, attune_device device, void* stream, Make make, Run run) {
  return guarded([&] {
    const Known<Op> known(name, op);
    attune::check_device(device);
    attune::check_stream(device, stream);
    run(make(*known), device, stream);
  });
}

void check_count(const char* name, int64_t value, int64_t most) {
  require(value >= 0 && value <= most, name, " is ", value, "; it must be 0..", most);
}

}  // namespace

extern "C" {

attune_status attune_qkv_prepare_init(attune_qkv_prepare* op, uint64_t struct_size) {
  return guarded([&] { init_struct("qkv_prepare", op, struct_size); });
}

attune_status attune_qkv_prepare_run(const attune_qkv_prepare* op, attune_device device, void* stream) {
  return run_op("qkv_prepare", op, device, stream, attune::make_qkv_prepare, attune::run_qkv_prepare);
}

attune_status attune_merge_init(attune_merge* op, uint64_t struct_size) {
  return guarded([&] { init_struct("merge", op, struct_size); });
}

attune_status attune_merge_run(const attune_merge* op, attune_device device, void* stream) {
  return run_op("merge", op, device, stream, attune::make_merge, attune::run_merge);
}

attune_status attune_cache_op_init(attune_cache_op* op, uint64_t struct_size) {
  return guarded([&] { init_struct("cache_op", op, struct_size); });
}

attune_status attune_cache_op_run(const attune_cache_op* op, attune_device device, void* stream) {
  return run_op("cache_op", op, device, stream, attune::make_cache_op, attune::run_cache_op);
}

attune_status attune_indexer_init(attune_indexer* op, uint64_t struct_size) {
  return guarded([&] { init_struct("indexer", op, struct_size); });
}

attune_status attune_indexer_workspace_size(const attune_indexer* op, attune_device device, size_t* bytes) {
  return guarded([&] {
    const Known<attune_indexer> known("indexer", op);
    require(bytes != nullptr, "bytes is null");
    *bytes = attune::indexer_workspace_size(attune::make_indexer(*known, attune::Data::kOptional), device);
  });
}

attune_status attune_indexer_run(const attune_indexer* op, attune_device device, void* workspace,
                                 size_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Known<attune_indexer> known("indexer", op);
    attune::check_device(device);
    attune::check_stream(device, stream);
    const attune::IndexerProblem p = attune::make_indexer(*known, attune::Data::kRequired);
    const size_t need = attune::indexer_workspace_size(p, device);
    attune::check_apart(*known, workspace, std::min(need, workspace_bytes));
    attune::run_indexer(p, device, workspace, workspace_bytes, stream);
  });
}

attune_status attune_kv_page_bytes(attune_kv_format format, int64_t page_size, int64_t* bytes) {
  return guarded([&] {
    require(bytes != nullptr, "bytes is null");
    int32_t id;  // copied as bytes: a C caller may pass any number, which must not be read as an enumerator
    std::memcpy(&id, &format, sizeof(id));
    const attune::KvFormat* f = attune::kv_format(id);
    require(f != nullptr, "format is ", id, "; it must be one of attune_kv_format (0..", attune::kv_format_count() - 1,
            ")");
    require(!f->plain, "format is plain, which has no fixed bytes a token; only MLA formats do");
    require(page_size >= 1 && page_size <= kMaxPositions, "page_size is ", page_size, "; it must be 1..",
            kMaxPositions);
    *bytes = attune::kv_page_bytes(*f, page_size);
  });
}

attune_status attune_rope_init(attune_rope* rope, uint64_t struct_size) {
  return guarded([&] {
    attune::write_struct("rope", rope, struct_size, [](attune_rope& known) {
      known.style = ATTUNE_ROPE_LINEAR;
      known.theta = 10000.0;
      known.scale = 1.0;
      known.beta_fast = 32.0;
      known.beta_slow = 1.0;
      known.extrapolation_factor = 1.0;
      known.mscale = 1.0;
      known.low_freq_factor = 1.0;
      known.high_freq_factor = 4.0;
    });
  });
}

attune_status attune_rope_table(const attune_rope* rope, int64_t first_position, int64_t num_positions,
                                float* cos_sin) {
  return guarded([&] {
    const Known<attune_rope> known("rope", rope);
    const std::vector<double> frequencies = checked_frequencies(*known);
    check_count("first_position", first_position, kMaxPositions);
    check_count("num_positions", num_positions, kMaxPositions - first_position);
    require(cos_sin != nullptr || num_positions == 0, "cos_sin is null");
    constexpr int64_t kBlock = 256;
    attune::cpu::parallel_for(attune::ceil_div(num_positions, kBlock), [&](int64_t block) {
      const int64_t first = block * kBlock, n = std::min(kBlock, num_positions - first);
      attune::rope_rows(*known, frequencies.data(), first_position + first, n, cos_sin + first * known->dim);
    });
  });
}

attune_status attune_rope_frequencies(const attune_rope* rope, double* frequencies) {
  return guarded([&] {
    const std::vector<double> values = checked_frequencies(*Known<attune_rope>("rope", rope));
    require(frequencies != nullptr, "frequencies is null");
    std::copy(values.begin(), values.end(), frequencies);
  });
}

attune_status attune_logn_table(int64_t max_position, int64_t num_positions, float* logn) {
  return guarded([&] {
    require(max_position >= 2, "max_position is ", max_position, "; it must be >= 2");
    check_count("num_positions", num_positions, kMaxPositions);
    require(logn != nullptr || num_positions == 0, "logn is null");
    attune::logn_table(max_position, num_positions, logn);
  });
}

attune_status attune_alibi_slopes(int64_t num_heads, float* slopes) {
  return guarded([&] {
    check_count("num_heads", num_heads, kMaxHeads);
    require(slopes != nullptr || num_heads == 0, "slopes is null");
    attune::alibi_slopes(num_heads, slopes);
  });
}

attune_status attune_t5_bucket(int64_t relative_position, int64_t num_buckets, int64_t max_distance,
                               int32_t bidirectional, int64_t* bucket) {
  return guarded([&] {
    require(bucket != nullptr, "bucket is null");
    require(bidirectional == 0 || bidirectional == 1, "bidirectional is ", bidirectional, "; it must be 0 or 1");
    attune::check_t5(num_buckets, max_distance, bidirectional == 1);
    *bucket = attune::t5_bucket(relative_position, num_buckets, max_distance, bidirectional == 1);
  });
}

}  // extern "C"
