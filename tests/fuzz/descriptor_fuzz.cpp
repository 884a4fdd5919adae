// SPDX-License-Identifier: Apache-2.0
// Damaged descriptors through the C ABI. Every call must return a status, and a failing one a message; nothing may
// crash. A call that touches data is made only when every tensor still lies inside its buffer, since no library could
// know better.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cases/backward_problem.h"
#include "cases/indexer_problem.h"
#include "cases/problem.h"
#include "fuzz.h"

namespace {

using attune::cases::Arena;
using attune::cases::NamedTensor;
using attune::cases::Problem;
using attune::cases::tensors_of;
using attune::fuzz::Input;

constexpr attune_device kCpu = {ATTUNE_DEVICE_CPU, 0};
constexpr size_t kMostWorkspace = size_t{32} << 20;
constexpr int64_t kMostElements = 1 << 20;
constexpr int64_t kMostRopeDim = 1024;

// A problem and its descriptor before the damage.
struct Template {
  explicit Template(const attune::cases::Case& spec) : problem(spec), descriptor(problem.device()) {}
  Problem problem;
  attune_attention descriptor;
};

std::vector<std::unique_ptr<Template>>& templates() {
  static std::vector<std::unique_ptr<Template>> all = [] {
    std::vector<std::unique_ptr<Template>> made;
    for (const auto& spec : attune::cases::every_tensor_cases()) made.push_back(std::make_unique<Template>(spec));
    return made;
  }();
  return all;
}

void check(attune_status status) {
  if (status < ATTUNE_OK || status > ATTUNE_BAD_DATA) {
    std::fprintf(stderr, "status %d: %s\n", status, attune_last_error());
    std::abort();
  }
  if (status != ATTUNE_OK && attune_last_error()[0] == '\0') {
    std::fprintf(stderr, "status %d (%s) without a message\n", status, attune_status_name(status));
    std::abort();
  }
}

// What a struct_size may claim behind a struct: zeros, but for a byte now and then.
template <class Struct>
struct Room {
  Struct s;
  unsigned char later[65536];
};

// The struct, or a copy of it of another size.
template <class Struct>
const Struct* of_any_size(Input& input, const Struct& s) {
  if (input.choose(64) != 0) return &s;
  static Room<Struct> room{};
  std::memset(room.later, 0, sizeof(room.later));
  room.s = s;
  room.s.struct_size = input.choose(2) == 0 ? static_cast<uint64_t>(input.number()) : sizeof(s) + input.choose(64);
  if (input.choose(2) == 0) room.later[input.choose(64)] = 1;
  return &room.s;
}

// One past the last byte that the view reaches; SIZE_MAX when that is absurd.
size_t reach(const attune_tensor& t) {
  const int64_t size = attune::cases::element_size(static_cast<attune_dtype>(t.dtype));
  if (t.rank < 1 || t.rank > ATTUNE_MAX_RANK) return SIZE_MAX;
  __int128 last = 0;
  int64_t count = 1;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] == 0) return 0;
    if (t.shape[axis] < 0 || t.shape[axis] > kMostElements) return SIZE_MAX;
    count *= t.shape[axis];
    if (count > kMostElements) return SIZE_MAX;
    if (t.shape[axis] > 1) last += static_cast<__int128>(t.shape[axis] - 1) * t.stride[axis];
    if (last < 0 || last > kMostElements) return SIZE_MAX;
  }
  return static_cast<size_t>((static_cast<int64_t>(last) + 1) * size);
}

// Absent tensors and those the library must refuse (no data) are fine; the others must lie inside their buffers.
bool inside(const Arena& arena, const std::vector<NamedTensor>& tensors) {
  for (const auto& [name, t] : tensors) {
    if (t->dtype == ATTUNE_DTYPE_NONE || t->data == nullptr) continue;
    const size_t bytes = reach(*t);
    if (bytes == SIZE_MAX) return false;
    bool found = false;
    for (const auto& buffer : arena.buffers()) {
      const auto* begin = static_cast<const std::byte*>(buffer->device());
      const auto* data = static_cast<const std::byte*>(t->data);
      found |= data >= begin && data + bytes <= begin + buffer->size();
    }
    if (!found) return false;
  }
  return true;
}

void damage_tensor(Input& input, const std::vector<NamedTensor>& tensors) {
  attune_tensor& t = *tensors[input.choose(tensors.size())].second;
  const size_t axis = input.choose(ATTUNE_MAX_RANK);
  switch (input.choose(12)) {
    case 0:
      t.dtype = static_cast<int32_t>(input.choose(10));
      break;
    case 1:
      t.dtype = static_cast<int32_t>(input.number());
      break;
    case 2:
      t.rank = static_cast<int32_t>(input.choose(8));
      break;
    case 3:
      t.rank = static_cast<int32_t>(input.number());
      break;
    case 4:
      t.shape[axis] = input.number();
      break;
    case 5:
      t.stride[axis] = input.number();
      break;
    case 6:
      t.shape[axis] = static_cast<int64_t>(static_cast<uint64_t>(t.shape[axis]) + input.choose(3) - 1);
      break;
    case 7:
      t = *tensors[input.choose(tensors.size())].second;
      break;
    case 8:
      t = attune_tensor{};
      break;
    default:
      t.data = input.choose(2) == 0 ? nullptr
                                    : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) + input.choose(9));
      break;
  }
}

// Overwrites one int32 of a table: run must mask it.
void damage_contents(Input& input, const Arena& arena, const std::vector<NamedTensor>& tensors) {
  const attune_tensor& t = *tensors[input.choose(tensors.size())].second;
  if (t.dtype != ATTUNE_INT32 || t.data == nullptr) return;
  for (const auto& buffer : arena.buffers()) {
    if (buffer->device() != t.data || buffer->size() < 4) continue;
    const auto value = static_cast<int32_t>(input.number());
    std::memcpy(static_cast<std::byte*>(buffer->device()) + 4 * input.choose(buffer->size() / 4), &value,
                sizeof(value));
  }
}

void damage_numbers(Input& input, attune_attention& a) {
  std::vector<int32_t*> flags = {&a.cache.format,
                                 &a.cache.layout,
                                 &a.extra_cache.format,
                                 &a.extra_cache.layout,
                                 &a.prologue.rope_interleaved,
                                 &a.prologue.mrope_section[0],
                                 &a.prologue.mrope_section[2],
                                 &a.prologue.mrope_interleaved,
                                 &a.prologue.append,
                                 &a.prologue.power_of_two_scales};
  std::vector<int64_t*> sizes = {&a.cache.page_size, &a.cache.ring_capacity, &a.extra_cache.page_size,
                                 &a.prologue.rope_offset};
  std::vector<float*> floats;
  const auto add = [&](auto& field) {
    using Type = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_same_v<Type, int32_t>) flags.push_back(&field);
    if constexpr (std::is_same_v<Type, int64_t>) sizes.push_back(&field);
    if constexpr (std::is_same_v<Type, float>) floats.push_back(&field);
  };
#define ATTUNE_ADD(name, kind) add(a.name);
  ATTUNE_ATTENTION_FIELDS(ATTUNE_ADD)
#undef ATTUNE_ADD
  switch (input.choose(5)) {
    case 0:
      *flags[input.choose(flags.size())] = static_cast<int32_t>(input.choose(3));
      break;
    case 1:
      *flags[input.choose(flags.size())] = static_cast<int32_t>(input.number());
      break;
    case 2:
    case 3:
      *sizes[input.choose(sizes.size())] = input.number();
      break;
    default: {
      const uint64_t bits = input.word();
      std::memcpy(floats[input.choose(floats.size())], &bits, sizeof(float));
    }
  }
}

void* workspace() {
  static std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(256, kMostWorkspace)), std::free);
  return memory.get();
}

void fuzz_attention(Input& input) {
  Template& from = *templates()[input.choose(templates().size())];
  attune_attention a = from.descriptor;
  const std::vector<NamedTensor> tensors = tensors_of(a);
  Arena& arena = from.problem.arena();
  arena.upload();  // an earlier input may have written anywhere in here
  for (size_t n = 1 + input.choose(4); n > 0; --n) {
    switch (input.choose(4)) {
      case 0:
      case 1:
        damage_tensor(input, tensors);
        break;
      case 2:
        damage_numbers(input, a);
        break;
      default:
        damage_contents(input, arena, tensors);
        break;
    }
  }
  const attune_attention* const given = of_any_size(input, a);
  attune_device device = kCpu;
  if (input.choose(64) == 0) device = {static_cast<int32_t>(input.number()), static_cast<int32_t>(input.number())};
  const attune_status supported = attune_supported(given, device);
  if (device.type == ATTUNE_DEVICE_CPU) check(supported);
  attune_plan* plan = nullptr;
  const attune_status status = attune_plan_create(given, device, &plan);
  if (device.type == ATTUNE_DEVICE_CPU) check(status);
  if ((status == ATTUNE_OK) != (supported == ATTUNE_OK)) std::abort();
  if (status == ATTUNE_OK) {
    size_t bytes = 0;
    check(attune_plan_workspace_size(plan, &bytes));
    char text[64];
    check(attune_plan_describe(plan, text, input.choose(sizeof(text)), nullptr));
    if (bytes <= kMostWorkspace && inside(arena, tensors)) {
      check(attune_validate(given, device, nullptr));
      check(attune_run(plan, given, workspace(), input.choose(16) == 0 ? bytes / 2 : bytes, nullptr));
    }
  }
  check(attune_plan_destroy(plan));
}

void fuzz_prepare(Input& input) {
  Template& from = *templates()[0];
  from.problem.arena().upload();
  const attune_attention& a = from.descriptor;
  attune_qkv_prepare op{};
  op.struct_size = sizeof(op);
  op.q = op.q_out = a.q;
  op.k = op.k_out = a.k;
  op.v = op.v_out = a.v;
  op.cu_seqlens_q = a.cu_seqlens_q;
  op.seqused_kv = a.seqused_kv;
  op.finished = a.finished;
  op.cache = a.cache;
  op.prologue = a.prologue;
  const std::vector<NamedTensor> tensors = tensors_of(op);
  for (size_t n = input.choose(4); n > 0; --n) damage_tensor(input, tensors);
  if (input.choose(2) == 0) damage_contents(input, from.problem.arena(), tensors);
  if (inside(from.problem.arena(), tensors)) check(attune_qkv_prepare_run(&op, kCpu, nullptr));
}

// Buffers for the operations that no case describes.
struct Pool {
  Pool() : arena(attune::cases::host_memory()), bytes(arena.add_bytes("pool", 1 << 17)) {}
  void* at(size_t offset) { return static_cast<std::byte*>(bytes.device()) + offset; }
  Arena arena;
  attune::cases::Buffer& bytes;
};

Pool& pool() {
  static Pool instance;
  return instance;
}

attune_tensor pool_tensor(size_t offset, attune_dtype dtype, std::vector<int64_t> shape) {
  return attune_dense_tensor(pool().at(offset), dtype, static_cast<int32_t>(shape.size()), shape.data());
}

void fuzz_merge(Input& input) {
  pool().arena.upload();
  attune_merge op{};
  op.struct_size = sizeof(op);
  op.partial_out = pool_tensor(0, ATTUNE_FLOAT32, {3, 4, 2, 16});
  op.partial_lse = pool_tensor(4096, ATTUNE_FLOAT32, {3, 4, 2});
  op.out = pool_tensor(8192, ATTUNE_FLOAT32, {4, 2, 16});
  op.lse = pool_tensor(12288, ATTUNE_FLOAT32, {4, 2});
  op.sinks = pool_tensor(16384, ATTUNE_FLOAT32, {2});
  const std::vector<NamedTensor> tensors = tensors_of(op);
  for (size_t n = input.choose(4); n > 0; --n) damage_tensor(input, tensors);
  if (inside(pool().arena, tensors)) check(attune_merge_run(&op, kCpu, nullptr));
}

void fuzz_cache(Input& input) {
  pool().arena.upload();
  attune_cache_op op{};
  op.struct_size = sizeof(op);
  op.kind = static_cast<int32_t>(input.choose(5));
  const auto dtype = static_cast<attune_dtype>(ATTUNE_FLOAT32 + input.choose(6));
  op.cache.k = pool_tensor(0, dtype, {4, 8, 2, 16});
  op.cache.v = pool_tensor(8192, dtype, {4, 8, 2, 16});
  op.cache.layout = static_cast<int32_t>(input.choose(4));
  if (input.choose(2) == 0) op.cache.page_table = pool_tensor(40000, ATTUNE_INT32, {2, 3});
  if (input.choose(2) == 0) {
    op.cache.k_scale = pool_tensor(16384, ATTUNE_FLOAT32, {4, 8, 2});
    op.cache.v_scale = pool_tensor(17408, ATTUNE_FLOAT32, {4, 8, 2});
  }
  if (input.choose(2) == 0) op.slots = pool_tensor(41000, ATTUNE_INT64, {32});
  if (input.choose(2) == 0) op.seqused_kv = pool_tensor(42000, ATTUNE_INT32, {2});
  if (input.choose(2) == 0) op.cu_seqlens = pool_tensor(43000, ATTUNE_INT32, {3});
  op.k = pool_tensor(50000, ATTUNE_FLOAT32, {32, 2, 16});
  op.v = pool_tensor(60000, ATTUNE_FLOAT32, {32, 2, 16});
  op.power_of_two_scales = static_cast<int32_t>(input.choose(3));
  // Contents: anything.
  for (size_t i = 0; i < 40; ++i) {
    const auto value = static_cast<int32_t>(input.number());
    std::memcpy(pool().at(40000 + 97 * i / 4 * 4), &value, sizeof(value));
  }
  const std::vector<NamedTensor> tensors = tensors_of(op);
  for (size_t n = input.choose(4); n > 0; --n) damage_tensor(input, tensors);
  if (input.choose(4) == 0) op.cache.format = static_cast<int32_t>(input.number());
  if (input.choose(4) == 0) op.cache.page_size = input.number();
  if (input.choose(4) == 0) op.cache.ring_capacity = input.number();
  if (inside(pool().arena, tensors)) check(attune_cache_op_run(&op, kCpu, nullptr));
}

void fuzz_indexer(Input& input) {
  static attune::cases::IndexerProblem problem(
      attune::cases::parse_cases(R"({"area": "fuzz", "cases": [{"name": "indexer", "heads": [3, 1],
          "head_dim": [16, 16], "dtype": "e4m3", "kv": "paged", "shared_kv": true, "causal": true, "window": [30, 2],
          "seqlens_q": [3, 1], "seqlens_kv": [40, 7], "cache": {"dtype": "e4m3", "scales": "token"},
          "indexer": {"topk": 5, "q_scale": true, "slot_page_size": 8, "positions": false, "bad_pages": true}}]})")
          .front());
  problem.arena().upload();
  attune_indexer op = problem.device(static_cast<attune_indexer_kind>(input.choose(3)));
  const std::vector<NamedTensor> tensors = tensors_of(op);
  int32_t* const flags[] = {&op.kind, &op.causal, &op.clear_scores, &op.form, &op.cache.format, &op.cache.layout};
  int64_t* const sizes[] = {&op.slot_page_size, &op.slot_pages, &op.max_seqlen_kv, &op.cache.page_size,
                            &op.cache.ring_capacity};
  for (size_t n = input.choose(4); n > 0; --n) {
    switch (input.choose(4)) {
      case 0:
        damage_tensor(input, tensors);
        break;
      case 1:
        *flags[input.choose(std::size(flags))] = static_cast<int32_t>(input.number());
        break;
      case 2:
        *sizes[input.choose(std::size(sizes))] = input.number();
        break;
      default:
        damage_contents(input, problem.arena(), tensors);
        break;
    }
  }
  const attune_indexer* const given = of_any_size(input, op);
  size_t bytes = 0;
  const attune_status status = attune_indexer_workspace_size(given, kCpu, &bytes);
  check(status);
  if (status != ATTUNE_OK || bytes > kMostWorkspace || !inside(problem.arena(), tensors)) return;
  check(attune_indexer_run(given, kCpu, workspace(), input.choose(16) == 0 ? bytes / 2 : bytes, nullptr));
}

void fuzz_backward(Input& input) {
  static attune::cases::BackwardProblem problem(
      attune::cases::parse_cases(R"({"area": "fuzz", "cases": [{"name": "backward", "heads": [4, 2], "causal": true,
          "head_dim": [16, 8], "seqlens_q": [5, 2], "seqlens_kv": [9, 7], "seqused": true, "mask_bits": 1, "bias": 2,
          "t5_buckets": 8, "sinks": "normal", "backward": {"dlse": true}}]})")
          .front());
  problem.arena().upload();
  attune::cases::BackwardCall call = problem.device();
  const std::vector<NamedTensor> tensors = tensors_of(call);
  for (size_t n = input.choose(4); n > 0; --n) {
    if (input.choose(2) == 0) damage_tensor(input, tensors);
    if (input.choose(2) == 0) damage_contents(input, problem.arena(), tensors);
  }
  const attune_attention_backward* const given = of_any_size(input, *call.linked());
  attune_plan* plan = nullptr;
  size_t bytes = 0;
  check(attune_attention_backward_plan(given, kCpu, &plan));
  if (plan == nullptr) return;
  check(attune_plan_workspace_size(plan, &bytes));
  if (bytes <= kMostWorkspace && inside(problem.arena(), tensors))
    check(attune_attention_backward_run(plan, given, workspace(), input.choose(16) == 0 ? bytes / 2 : bytes, nullptr));
  attune_plan_destroy(plan);
}

void fuzz_tables(Input& input) {
  attune_rope rope{};
  rope.struct_size = sizeof(rope);
  rope.style = static_cast<int32_t>(input.choose(10)) - 1;
  rope.dim = input.choose(2) == 0 ? static_cast<int64_t>(input.choose(200))
                                  : static_cast<int64_t>(0 - static_cast<uint64_t>(input.number()));
  rope.dim = std::min(rope.dim, kMostRopeDim);
  double* const numbers[] = {
      &rope.theta,  &rope.scale,           &rope.beta_fast,       &rope.beta_slow, &rope.extrapolation_factor,
      &rope.mscale, &rope.low_freq_factor, &rope.high_freq_factor};
  for (double* number : numbers) {
    *number = static_cast<double>(input.number());
    const uint64_t bits = input.word();
    if (input.choose(4) == 0) std::memcpy(number, &bits, sizeof(bits));
  }
  rope.max_position = input.number();
  rope.seqlen = input.number();
  static std::vector<float> table(kMostRopeDim * 256);
  static std::vector<double> frequencies(kMostRopeDim / 2);
  const attune_rope* const given = of_any_size(input, rope);
  check(attune_rope_table(given, input.number(), static_cast<int64_t>(input.choose(200)) - 20, table.data()));
  check(attune_rope_frequencies(given, frequencies.data()));
  check(attune_logn_table(input.number(), static_cast<int64_t>(input.choose(256)) - 8, table.data()));
  check(attune_alibi_slopes(static_cast<int64_t>(input.choose(256)) - 8, table.data()));
  int64_t bucket = 0;
  check(
      attune_t5_bucket(input.number(), input.number(), input.number(), static_cast<int32_t>(input.number()), &bucket));
  int64_t bytes = 0;
  check(attune_kv_page_bytes(static_cast<attune_kv_format>(input.choose(5)), input.number(), &bytes));
  attune_device_info info{};
  info.struct_size = sizeof(info);
  check(attune_get_device_info(static_cast<int32_t>(input.number()), &info));
  attune_kernel_info kernel{};
  kernel.struct_size = sizeof(kernel);
  check(attune_get_kernel_info(static_cast<int32_t>(input.number()), &kernel));
}

}  // namespace

int64_t fuzz_default_iterations() { return 100000; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  switch (input.choose(12)) {
    case 10:
    case 11:
      fuzz_backward(input);
      break;
    case 0:
      fuzz_prepare(input);
      break;
    case 1:
      fuzz_merge(input);
      break;
    case 2:
      fuzz_cache(input);
      break;
    case 3:
      fuzz_tables(input);
      break;
    case 4:
    case 5:
      fuzz_indexer(input);
      break;
    default:
      fuzz_attention(input);
      break;
  }
  return 0;
}
