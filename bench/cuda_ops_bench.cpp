// SPDX-License-Identifier: Apache-2.0
// qkv_prepare, cache operations and merge on the first GPU, on inputs several times its L2, beside a copy by the
// driver: the ceiling of what reads as much as it writes. Bytes are those that must move: each input once, each output
// once.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attune/attune.h"
#include "core/dtype.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace attune::cuda {
namespace {

constexpr attune_device kGpu = {ATTUNE_DEVICE_CUDA, 0};
constexpr int64_t kTokens = 65536, kHeads = 8, kDim = 128;

// Device memory with something in it that is no number twice.
struct Data {
  explicit Data(const Stream& stream, size_t bytes, bool codes = false) : memory(0, bytes) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> block(1 << 20);
    for (uint16_t& x : block) x = codes ? static_cast<uint16_t>(random() & 0x7e7e) : float_to_bf16(normal(random));
    for (size_t at = 0; at < bytes; at += block.size() * 2)
      copy_to_device(stream, static_cast<char*>(memory.data()) + at, block.data(),
                     std::min(bytes - at, block.size() * 2));
  }
  attune_tensor tensor(attune_dtype dtype, std::vector<int64_t> shape) const {
    return attune_dense_tensor(memory.data(), dtype, static_cast<int32_t>(shape.size()), shape.data());
  }
  DeviceMemory memory;
};

attune_tensor vector_of(const DeviceMemory& memory, attune_dtype dtype, std::vector<int64_t> shape) {
  return attune_dense_tensor(memory.data(), dtype, static_cast<int32_t>(shape.size()), shape.data());
}

// Times run, which enqueues one operation, by replaying a graph of several.
template <class Run>
void measure(benchmark::State& state, const Stream& stream, double bytes, int launches, Run&& run) {
  run();
  stream.synchronize();
  const Graph graph(stream, [&] {
    for (int i = 0; i < launches; ++i) run();
  });
  graph.replay(stream);
  Timer timer(0);
  double total = 0;
  for (auto _ : state) {
    timer.start(stream);
    graph.replay(stream);
    timer.stop(stream);
    const double seconds = timer.milliseconds() / 1e3 / launches;
    state.SetIterationTime(seconds);
    total += seconds;
  }
  const double seconds = total / static_cast<double>(state.iterations());
  state.counters["us"] = seconds * 1e6;
  state.counters["GB/s"] = bytes / seconds / 1e9;
}

void fail_on(benchmark::State& state, attune_status status) {
  if (status != ATTUNE_OK) state.SkipWithError(attune_last_error());
}

bool no_gpu(benchmark::State& state) {
  if (why_no_device().empty()) return false;
  state.SkipWithError(why_no_device().c_str());
  return true;
}

void copy_by_driver(benchmark::State& state) {
  if (no_gpu(state)) return;
  const Stream stream(0);
  const size_t bytes = kTokens * kHeads * kDim * 2 * 2;
  const Data from(stream, bytes), to(stream, bytes);
  const ScopedContext context(0);
  measure(state, stream, 2.0 * static_cast<double>(bytes), 5, [&] {
    require_driver().cuMemcpyDtoDAsync(reinterpret_cast<DevicePointer>(to.memory.data()),
                                       reinterpret_cast<DevicePointer>(from.memory.data()), bytes,
                                       static_cast<StreamHandle>(stream.handle()));
  });
}

struct CacheCase {
  attune_cache_op_kind kind;
  attune_kv_format format;
  attune_dtype dtype;
  int64_t page_size;
  bool sequences, token_scales;
};

void cache_op(benchmark::State& state, CacheCase c) {
  if (no_gpu(state)) return;
  const Stream stream(0);
  const bool packed = c.format != ATTUNE_KV_PLAIN;
  const int64_t heads = packed ? 1 : kHeads, dim = c.format == ATTUNE_KV_MLA_656 ? 576 : packed ? 512 : kDim;
  const int64_t tokens = packed ? 4 * kTokens : kTokens, pages = tokens / c.page_size;
  attune_cache_op op;
  attune_cache_op_init(&op, sizeof(op));
  op.kind = c.kind;
  op.cache.format = c.format;
  const int64_t element = dtype_size(c.dtype);
  const Data k(stream, static_cast<size_t>(tokens * heads * dim * 2)),
      v(stream, static_cast<size_t>(tokens * heads * dim * 2));
  int64_t row_bytes = heads * dim * element, page_bytes = row_bytes * c.page_size;
  if (packed) attune_kv_page_bytes(c.format, c.page_size, &page_bytes), row_bytes = page_bytes / c.page_size;
  const bool codes = packed || element == 1;
  const Data cache_k(stream, static_cast<size_t>(pages * page_bytes), codes),
      cache_v(stream, static_cast<size_t>(pages * page_bytes), codes);
  op.k = k.tensor(ATTUNE_BFLOAT16, {tokens, heads, dim});
  double bytes = static_cast<double>(tokens) * static_cast<double>(heads * dim * 2 + row_bytes);
  if (packed) {
    op.cache.layout = ATTUNE_KV_BYTES;
    op.cache.page_size = c.page_size;
    op.cache.k = c.format == ATTUNE_KV_MLA_656 ? cache_k.tensor(ATTUNE_UINT8, {pages, c.page_size, 656})
                                               : cache_k.tensor(ATTUNE_UINT8, {pages, page_bytes});
  } else {
    op.v = v.tensor(ATTUNE_BFLOAT16, {tokens, heads, dim});
    op.cache.k = cache_k.tensor(c.dtype, {pages, c.page_size, heads, dim});
    op.cache.v = cache_v.tensor(c.dtype, {pages, c.page_size, heads, dim});
    bytes *= 2;
  }
  std::vector<float> ones(static_cast<size_t>(c.token_scales ? tokens * heads : 1), 0.02f);
  const DeviceMemory k_scale = to_device(stream, ones), v_scale = to_device(stream, ones);
  if (!packed && element == 1) {
    const std::vector<int64_t> shape =
        c.token_scales ? std::vector<int64_t>{pages, c.page_size, heads} : std::vector<int64_t>{1};
    op.cache.k_scale = vector_of(k_scale, ATTUNE_FLOAT32, shape);
    op.cache.v_scale = vector_of(v_scale, ATTUNE_FLOAT32, shape);
    if (c.token_scales) bytes += 8.0 * static_cast<double>(tokens * heads);
  }
  // 64 sequences whose pages are shuffled.
  const int64_t batch = 64, columns = pages / batch;
  std::vector<int32_t> table(static_cast<size_t>(pages)), cu(batch + 1), used(batch, 0);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  std::shuffle(table.begin(), table.end(), std::mt19937(3));
  for (size_t b = 0; b <= batch; ++b) cu[b] = static_cast<int32_t>(static_cast<int64_t>(b) * tokens / batch);
  const bool reads = c.kind == ATTUNE_CACHE_GATHER || c.kind == ATTUNE_CACHE_DEQUANTIZE;
  if (reads) std::fill(used.begin(), used.end(), static_cast<int32_t>(tokens / batch));
  const DeviceMemory device_table = to_device(stream, table), device_cu = to_device(stream, cu),
                     device_used = to_device(stream, used);
  if (c.sequences) {
    op.cache.page_table = vector_of(device_table, ATTUNE_INT32, {batch, columns});
    op.cu_seqlens = vector_of(device_cu, ATTUNE_INT32, {batch + 1});
    op.seqused_kv = vector_of(device_used, ATTUNE_INT32, {batch});
  }
  measure(state, stream, bytes, 5, [&] { fail_on(state, attune_cache_op_run(&op, kGpu, stream.handle())); });
}

void prepare(benchmark::State& state, int64_t batch, int64_t tokens, bool in_place, attune_dtype cache_dtype) {
  if (no_gpu(state)) return;
  const Stream stream(0);
  constexpr int64_t kHeadsQ = 32, kWidth = kHeadsQ + 2 * kHeads, kPage = 16;
  const int64_t total = batch * tokens, pages_each = (tokens + 1024) / kPage + 1, pages = batch * pages_each;
  const Data packed(stream, static_cast<size_t>(total * kWidth * kDim * 2)),
      out(stream, static_cast<size_t>(total * kHeadsQ * kDim * 2));
  const auto cache_bytes = static_cast<size_t>(pages * kPage * kHeads * kDim * dtype_size(cache_dtype));
  const Data cache_k(stream, cache_bytes), cache_v(stream, cache_bytes);
  attune_qkv_prepare op;
  attune_qkv_prepare_init(&op, sizeof(op));
  const auto part = [&](int64_t heads, int64_t first) {
    attune_tensor t = packed.tensor(ATTUNE_BFLOAT16, {total, heads, kDim});
    t.data = static_cast<char*>(t.data) + first * kDim * 2;
    t.stride[0] = kWidth * kDim;
    return t;
  };
  op.q = part(kHeadsQ, 0), op.k = part(kHeads, kHeadsQ), op.v = part(kHeads, kHeadsQ + kHeads);
  op.q_out = in_place ? op.q : out.tensor(ATTUNE_BFLOAT16, {total, kHeadsQ, kDim});
  op.cache.k = cache_k.tensor(cache_dtype, {pages, kPage, kHeads, kDim});
  op.cache.v = cache_v.tensor(cache_dtype, {pages, kPage, kHeads, kDim});
  std::vector<int32_t> table(static_cast<size_t>(pages)), cu(static_cast<size_t>(batch + 1)),
      used(static_cast<size_t>(batch), 900);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  std::shuffle(table.begin(), table.end(), std::mt19937(3));
  for (size_t b = 0; b < cu.size(); ++b) cu[b] = static_cast<int32_t>(static_cast<int64_t>(b) * tokens);
  std::vector<float> rope(static_cast<size_t>((tokens + 1024) * kDim), 0.7f);
  const DeviceMemory device_table = to_device(stream, table), device_cu = to_device(stream, cu),
                     device_used = to_device(stream, used), device_rope = to_device(stream, rope);
  op.cache.page_table = vector_of(device_table, ATTUNE_INT32, {batch, pages_each});
  if (tokens > 1) op.cu_seqlens_q = vector_of(device_cu, ATTUNE_INT32, {batch + 1});
  op.seqused_kv = vector_of(device_used, ATTUNE_INT32, {batch});
  op.prologue.rope_cos_sin = vector_of(device_rope, ATTUNE_FLOAT32, {tokens + 1024, kDim});
  op.prologue.append = 1;
  const double bytes = static_cast<double>(total * kDim) *
                       static_cast<double>(kWidth * 2 + kHeadsQ * 2 + 2 * kHeads * dtype_size(cache_dtype));
  measure(state, stream, bytes, total > 10000 ? 5 : 20,
          [&] { fail_on(state, attune_qkv_prepare_run(&op, kGpu, stream.handle())); });
}

// RoPE of the last 64 columns of q, in place, and of k on its way to a packed cache.
void prepare_mla(benchmark::State& state, int64_t batch, int64_t tokens) {
  if (no_gpu(state)) return;
  const Stream stream(0);
  constexpr int64_t kHeadsQ = 128, kLatent = 576, kRope = 64, kPage = 64;
  const int64_t total = batch * tokens, pages_each = (tokens + 1024) / kPage + 1, pages = batch * pages_each;
  const Data q(stream, static_cast<size_t>(total * kHeadsQ * kLatent * 2)),
      k(stream, static_cast<size_t>(total * kLatent * 2)),
      cache(stream, static_cast<size_t>(pages * kPage * 656), true);
  attune_qkv_prepare op;
  attune_qkv_prepare_init(&op, sizeof(op));
  op.q = op.q_out = q.tensor(ATTUNE_BFLOAT16, {total, kHeadsQ, kLatent});
  op.k = k.tensor(ATTUNE_BFLOAT16, {total, 1, kLatent});
  op.cache.format = ATTUNE_KV_MLA_656;
  op.cache.layout = ATTUNE_KV_BYTES;
  op.cache.k = cache.tensor(ATTUNE_UINT8, {pages, kPage, 656});
  std::vector<int32_t> table(static_cast<size_t>(pages)), cu(static_cast<size_t>(batch + 1)),
      used(static_cast<size_t>(batch), 900);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  std::shuffle(table.begin(), table.end(), std::mt19937(3));
  for (size_t b = 0; b < cu.size(); ++b) cu[b] = static_cast<int32_t>(static_cast<int64_t>(b) * tokens);
  std::vector<float> rope(static_cast<size_t>((tokens + 1024) * kRope), 0.7f);
  const DeviceMemory device_table = to_device(stream, table), device_cu = to_device(stream, cu),
                     device_used = to_device(stream, used), device_rope = to_device(stream, rope);
  op.cache.page_table = vector_of(device_table, ATTUNE_INT32, {batch, pages_each});
  op.cu_seqlens_q = vector_of(device_cu, ATTUNE_INT32, {batch + 1});
  op.seqused_kv = vector_of(device_used, ATTUNE_INT32, {batch});
  op.prologue.rope_cos_sin = vector_of(device_rope, ATTUNE_FLOAT32, {tokens + 1024, kRope});
  op.prologue.rope_offset = kLatent - kRope;
  op.prologue.rope_interleaved = 1;
  op.prologue.append = 1;
  const double bytes = static_cast<double>(total) * static_cast<double>(kHeadsQ * kRope * 2 * 2 + kLatent * 2 + 656);
  measure(state, stream, bytes, total > 10000 ? 5 : 20,
          [&] { fail_on(state, attune_qkv_prepare_run(&op, kGpu, stream.handle())); });
}

void merge(benchmark::State& state, int64_t parts, int64_t rows) {
  if (no_gpu(state)) return;
  const Stream stream(0);
  constexpr int64_t kHeadsQ = 32;
  const Data in(stream, static_cast<size_t>(parts * rows * kHeadsQ * kDim * 4)),
      out(stream, static_cast<size_t>(rows * kHeadsQ * kDim * 2));
  std::vector<float> lses(static_cast<size_t>(parts * rows * kHeadsQ));
  for (size_t i = 0; i < lses.size(); ++i) lses[i] = static_cast<float>(i % 17) * 0.3f;
  const DeviceMemory lse = to_device(stream, lses);
  attune_merge op;
  attune_merge_init(&op, sizeof(op));
  op.partial_out = in.tensor(ATTUNE_FLOAT32, {parts, rows, kHeadsQ, kDim});
  op.partial_lse = vector_of(lse, ATTUNE_FLOAT32, {parts, rows, kHeadsQ});
  op.out = out.tensor(ATTUNE_BFLOAT16, {rows, kHeadsQ, kDim});
  const double bytes = static_cast<double>(rows * kHeadsQ) * static_cast<double>(parts * (kDim * 4 + 4) + kDim * 2);
  measure(state, stream, bytes, rows > 1000 ? 5 : 20,
          [&] { fail_on(state, attune_merge_run(&op, kGpu, stream.handle())); });
}

#define ATTUNE_OPS_BENCH(...) BENCHMARK_CAPTURE(__VA_ARGS__)->UseManualTime()->Iterations(20)
BENCHMARK(copy_by_driver)->UseManualTime()->Iterations(20);
ATTUNE_OPS_BENCH(cache_op, append_bf16, {ATTUNE_CACHE_APPEND, ATTUNE_KV_PLAIN, ATTUNE_BFLOAT16, 16, true, false});
ATTUNE_OPS_BENCH(cache_op, append_e4m3, {ATTUNE_CACHE_APPEND, ATTUNE_KV_PLAIN, ATTUNE_FLOAT8_E4M3, 16, true, false});
ATTUNE_OPS_BENCH(cache_op, append_i8_token, {ATTUNE_CACHE_APPEND, ATTUNE_KV_PLAIN, ATTUNE_INT8, 16, true, true});
ATTUNE_OPS_BENCH(cache_op, quantize_e4m3,
                 {ATTUNE_CACHE_QUANTIZE, ATTUNE_KV_PLAIN, ATTUNE_FLOAT8_E4M3, 16, false, false});
ATTUNE_OPS_BENCH(cache_op, quantize_e4m3_token,
                 {ATTUNE_CACHE_QUANTIZE, ATTUNE_KV_PLAIN, ATTUNE_FLOAT8_E4M3, 16, false, true});
ATTUNE_OPS_BENCH(cache_op, gather_bf16, {ATTUNE_CACHE_GATHER, ATTUNE_KV_PLAIN, ATTUNE_BFLOAT16, 16, true, false});
ATTUNE_OPS_BENCH(cache_op, gather_e4m3, {ATTUNE_CACHE_GATHER, ATTUNE_KV_PLAIN, ATTUNE_FLOAT8_E4M3, 16, true, false});
ATTUNE_OPS_BENCH(cache_op, append_656, {ATTUNE_CACHE_APPEND, ATTUNE_KV_MLA_656, ATTUNE_UINT8, 64, true, false});
ATTUNE_OPS_BENCH(cache_op, append_584, {ATTUNE_CACHE_APPEND, ATTUNE_KV_MLA_584, ATTUNE_UINT8, 64, true, false});
ATTUNE_OPS_BENCH(cache_op, gather_656, {ATTUNE_CACHE_GATHER, ATTUNE_KV_MLA_656, ATTUNE_UINT8, 64, true, false});
ATTUNE_OPS_BENCH(cache_op, gather_584, {ATTUNE_CACHE_GATHER, ATTUNE_KV_MLA_584, ATTUNE_UINT8, 64, true, false});
ATTUNE_OPS_BENCH(prepare, prefill_in_place, 16, 2048, true, ATTUNE_BFLOAT16);
ATTUNE_OPS_BENCH(prepare, prefill_e4m3, 16, 2048, false, ATTUNE_FLOAT8_E4M3);
ATTUNE_OPS_BENCH(prepare, decode_64, 64, 1, false, ATTUNE_BFLOAT16);
ATTUNE_OPS_BENCH(prepare, decode_1, 1, 1, false, ATTUNE_BFLOAT16);
ATTUNE_OPS_BENCH(prepare_mla, mla_prefill, 16, 2048);
ATTUNE_OPS_BENCH(prepare_mla, mla_decode_64, 64, 1);
ATTUNE_OPS_BENCH(merge, four_parts, 4, 8192);
ATTUNE_OPS_BENCH(merge, small, 8, 64);

}  // namespace
}  // namespace attune::cuda
