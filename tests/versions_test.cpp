// SPDX-License-Identifier: Apache-2.0
// Structs of older and newer clients: taken as far as they mean the same, refused by name where they do not.
#include <algorithm>
#include <functional>
#include <vector>

#include "core/versioned.h"
#include "failure.h"
#include "support.h"

namespace attune {
namespace tests {

// A struct of which a later version has a field more.
struct Toy {
  uint64_t struct_size;
  int32_t a, b;
  int64_t later;
};

}  // namespace tests

template <>
inline constexpr uint64_t kFirstSize<tests::Toy> = 16;

namespace tests {
namespace {

// The struct of a client of another version: no byte more than its struct_size says.
std::vector<uint64_t> client(uint64_t bytes) {
  std::vector<uint64_t> memory(bytes / 8, 0);
  memory[0] = bytes;
  const int32_t numbers[2] = {3, 4};
  std::memcpy(&memory[1], numbers, sizeof(numbers));
  return memory;
}

TEST(Versions, AnOlderStructLacksWhatCameLater) {
  const std::vector<uint64_t> memory = client(16);
  const Known<Toy> toy("toy", reinterpret_cast<const Toy*>(memory.data()));
  EXPECT_EQ(toy->struct_size, 16u);
  EXPECT_EQ(toy->a, 3);
  EXPECT_EQ((*toy).b, 4);
  EXPECT_EQ(toy->later, 0);
}

// Every struct of every size from the first version's on: what it does not have is 0. A field that a later version adds
// needs no test of its own.
template <class Struct>
void expect_older() {
  for (uint64_t size = kFirstSize<Struct>; size <= sizeof(Struct); size += 8) {
    const std::vector<uint64_t> memory = client(size);
    std::vector<uint64_t> expected = memory;
    expected.resize(sizeof(Struct) / 8, 0);
    const Known<Struct> known("struct", reinterpret_cast<const Struct*>(memory.data()));
    EXPECT_EQ(std::memcmp(&*known, expected.data(), sizeof(Struct)), 0) << size << " of " << sizeof(Struct);
  }
}

TEST(Versions, WhatOlderClientsLackIsZero) {
  expect_older<Toy>();
  expect_older<attune_attention>();
  expect_older<attune_attention_backward>();
  expect_older<attune_qkv_prepare>();
  expect_older<attune_merge>();
  expect_older<attune_cache_op>();
  expect_older<attune_indexer>();
  expect_older<attune_rope>();
}

TEST(Versions, ThisVersionAndNewerOnesAreReadInPlace) {
  for (const uint64_t bytes : {24u, 32u, 4096u}) {
    std::vector<uint64_t> memory = client(bytes);
    memory[2] = 5;
    const Known<Toy> toy("toy", reinterpret_cast<const Toy*>(memory.data()));
    EXPECT_EQ(static_cast<const void*>(&*toy), static_cast<const void*>(memory.data()));
    EXPECT_EQ(toy->later, 5);
  }
}

TEST(Versions, WhatANewerClientAsksForIsNotLeftOut) {
  for (uint64_t at = 24; at < 48; ++at) {
    std::vector<uint64_t> memory = client(48);
    reinterpret_cast<unsigned char*>(memory.data())[at] = 7;
    EXPECT_EQ(failure_of([&] { Known<Toy>("toy", reinterpret_cast<const Toy*>(memory.data())); }),
              cat("toy has 7 at byte ", at, " of 48; this library (", ATTUNE_VERSION_STRING,
                  ") knows 24 bytes and needs 0 behind them"));
  }
}

TEST(Versions, SizesOfNoVersionAreRefused) {
  const std::vector<uint64_t> sizes = {0, 8, 15, kMostStructSize + 1, UINT64_MAX};
  for (const uint64_t size : sizes) {
    std::vector<uint64_t> memory = client(24);
    memory[0] = size;
    const std::string read = failure_of([&] { Known<Toy>("toy", reinterpret_cast<const Toy*>(memory.data())); });
    EXPECT_EQ(read.find(cat("toy.struct_size is ", size, "; it must be 16 (version 0.1.0) to 65536")), 0u) << read;
    auto* const toy = reinterpret_cast<Toy*>(memory.data());
    EXPECT_EQ(failure_of([&] { write_struct("toy", toy, size, [](Toy&) {}); }), read);
  }
}

TEST(Versions, ExactlyTheCallersBytesAreWritten) {
  for (const uint64_t size : {16u, 20u, 24u, 40u}) {
    std::vector<unsigned char> memory(64, 0x5a);
    write_struct("toy", reinterpret_cast<Toy*>(memory.data()), size, [](Toy& toy) {
      toy.a = 3, toy.b = 4;
      toy.later = -1;
    });
    std::vector<unsigned char> expected(64, 0x5a);
    Toy toy{size, 3, 4, -1};
    std::memset(expected.data(), 0, size);
    std::memcpy(expected.data(), &toy, std::min<size_t>(size, sizeof(toy)));
    EXPECT_EQ(memory, expected) << size;
  }
}

// A struct of the ABI as a newer client has it.
template <class Struct>
struct Newer {
  Struct s;
  unsigned char later[24];
};

template <class Struct>
Newer<Struct> newer(const Struct& of) {
  Newer<Struct> n{};
  n.s = of;
  n.s.struct_size = sizeof(n);
  return n;
}

// Every function that reads the struct; each takes what it is given where its version does not matter.
template <class Struct>
using Readers = std::vector<std::function<attune_status(const Struct*)>>;

template <class Struct>
void expect_versions(const char* name, const Struct& good, const Readers<Struct>& readers) {
  static_assert(sizeof(Newer<Struct>) == sizeof(Struct) + 24);
  for (size_t i = 0; i < readers.size(); ++i) {
    SCOPED_TRACE(cat(name, ", function ", i));
    Newer<Struct> n = newer(good);
    EXPECT_ATTUNE_OK(readers[i](&n.s));
    for (size_t at = 0; at < sizeof(n.later); ++at) {
      n.later[at] = 1;
      EXPECT_EQ(readers[i](&n.s), ATTUNE_INVALID_ARGUMENT);
      EXPECT_NE(std::string(attune_last_error()).find(cat(name, " has 1 at byte ", sizeof(Struct) + at)),
                std::string::npos)
          << attune_last_error();
      n.later[at] = 0;
    }
    for (const uint64_t size : {uint64_t{0}, kFirstSize<Struct> - 1, kMostStructSize + 1}) {
      Struct s = good;
      s.struct_size = size;
      EXPECT_EQ(readers[i](&s), ATTUNE_INVALID_ARGUMENT);
      EXPECT_NE(std::string(attune_last_error()).find(cat(name, ".struct_size is ", size, ";")), std::string::npos)
          << attune_last_error();
    }
    EXPECT_EQ(readers[i](nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find(cat(name, " is null")), std::string::npos) << attune_last_error();
  }
}

template <class Struct>
void expect_init(attune_status (*init)(Struct*, uint64_t), const char* name) {
  SCOPED_TRACE(name);
  EXPECT_EQ(init(nullptr, sizeof(Struct)), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attune_last_error()), cat(name, " is null"));
  Struct plain;
  std::memset(&plain, 0x5a, sizeof(plain));
  ASSERT_ATTUNE_OK(init(&plain, sizeof(plain)));
  EXPECT_EQ(plain.struct_size, sizeof(plain));
  Newer<Struct> n;
  std::memset(&n, 0x5a, sizeof(n));
  constexpr uint64_t kSize = sizeof(Struct) + 16;  // not all of it
  ASSERT_ATTUNE_OK(init(&n.s, kSize));
  EXPECT_EQ(n.s.struct_size, kSize);
  EXPECT_TRUE(std::all_of(n.later, n.later + 16, [](unsigned char c) { return c == 0; }));
  EXPECT_TRUE(std::all_of(n.later + 16, std::end(n.later), [](unsigned char c) { return c == 0x5a; }));
  n.s.struct_size = sizeof(plain);
  EXPECT_EQ(std::memcmp(&n.s, &plain, sizeof(plain)), 0);
  EXPECT_EQ(init(&n.s, kFirstSize<Struct> - 1), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find(cat(name, ".struct_size is ")), std::string::npos);
}

TEST(Versions, EveryStructOfTheAbiIsInitialised) {
  expect_init(attune_attention_init, "attention");
  expect_init(attune_attention_backward_init, "attention_backward");
  expect_init(attune_qkv_prepare_init, "qkv_prepare");
  expect_init(attune_merge_init, "merge");
  expect_init(attune_cache_op_init, "cache_op");
  expect_init(attune_indexer_init, "indexer");
  expect_init(attune_rope_init, "rope");
}

attune_tensor floats(std::vector<float>& data, std::vector<int64_t> shape) {
  return attune_dense_tensor(data.data(), ATTUNE_FLOAT32, static_cast<int32_t>(shape.size()), shape.data());
}

TEST(Versions, AttentionOfANewerClient) {
  cases::Problem problem(make_case(R"({"name": "x", "heads": [4, 2], "kv": "paged", "seqlens_kv": [20, 7]})"));
  const attune_attention a = problem.device();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  cases::Workspace workspace(cases::host_memory(), bytes);
  void* const data = workspace.buffer.device();
  expect_versions<attune_attention>(
      "attention", a,
      {[](const attune_attention* x) { return attune_supported(x, kCpu); },
       [](const attune_attention* x) { return attune_validate(x, kCpu, nullptr); },
       [](const attune_attention* x) { return attune_warm(&x, 1, kCpu); },
       [](const attune_attention* x) {
         attune_plan* other = nullptr;
         const attune_status status = attune_plan_create(x, kCpu, &other);
         attune_plan_destroy(other);
         return status;
       },
       [&](const attune_attention* x) { return attune_run(plan, x, data, bytes, nullptr); },
       [&](const attune_attention* x) { return attune_schedule(plan, x, data, bytes, nullptr); },
       [&](const attune_attention* x) { return attune_run_scheduled(plan, x, data, bytes, nullptr); }});
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(Versions, BackwardOfANewerClient) {
  std::vector<float> in(64, 1), gradient(64), lse(8);
  attune_attention a;
  ASSERT_ATTUNE_OK(attune_attention_init(&a, sizeof(a)));
  a.q = a.k = a.v = a.out = floats(in, {2, 1, 4});
  a.lse = floats(lse, {2, 1});
  attune_attention_backward op;
  ASSERT_ATTUNE_OK(attune_attention_backward_init(&op, sizeof(op)));
  op.attention = &a;
  op.dout = floats(in, {2, 1, 4}), op.dq = floats(gradient, {2, 1, 4});
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_attention_backward_plan(&op, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  cases::Workspace workspace(cases::host_memory(), bytes);
  void* const data = workspace.buffer.device();
  using Op = attune_attention_backward;
  const Readers<Op> readers = {
      [](const Op* x) { return attune_attention_backward_supported(x, kCpu); },
      [](const Op* x) {
        attune_plan* other = nullptr;
        const attune_status status = attune_attention_backward_plan(x, kCpu, &other);
        attune_plan_destroy(other);
        return status;
      },
      [&](const Op* x) { return attune_attention_backward_run(plan, x, data, bytes, nullptr); }};
  expect_versions<Op>("attention_backward", op, readers);
  // The forward's descriptor has a version of its own.
  for (const auto& reader : readers) {
    expect_versions<attune_attention>("attention", a, {[&](const attune_attention* x) {
                                        op.attention = x;
                                        return reader(&op);
                                      }});
  }
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(Versions, OperationsOfANewerClient) {
  std::vector<float> in(64, 1), out(64), lse(8), more(256);
  attune_qkv_prepare prepare;
  ASSERT_ATTUNE_OK(attune_qkv_prepare_init(&prepare, sizeof(prepare)));
  prepare.q = floats(in, {2, 1, 4}), prepare.q_out = floats(out, {2, 1, 4});
  expect_versions<attune_qkv_prepare>(
      "qkv_prepare", prepare, {[](const attune_qkv_prepare* x) { return attune_qkv_prepare_run(x, kCpu, nullptr); }});

  attune_merge merge;
  ASSERT_ATTUNE_OK(attune_merge_init(&merge, sizeof(merge)));
  merge.partial_out = floats(in, {2, 1, 1, 4}), merge.partial_lse = floats(lse, {2, 1, 1});
  merge.out = floats(out, {1, 1, 4});
  expect_versions<attune_merge>("merge", merge,
                                {[](const attune_merge* x) { return attune_merge_run(x, kCpu, nullptr); }});

  attune_cache_op copy;
  ASSERT_ATTUNE_OK(attune_cache_op_init(&copy, sizeof(copy)));
  copy.kind = ATTUNE_CACHE_QUANTIZE;
  copy.cache.k = floats(more, {2, 4, 1, 4}), copy.k = floats(in, {8, 1, 4});
  expect_versions<attune_cache_op>("cache_op", copy,
                                   {[](const attune_cache_op* x) { return attune_cache_op_run(x, kCpu, nullptr); }});

  attune_indexer indexer;
  ASSERT_ATTUNE_OK(attune_indexer_init(&indexer, sizeof(indexer)));
  Int32Vector lengths({2}), chosen({0, 0});
  indexer.q = floats(in, {1, 1, 4}), indexer.weights = floats(lse, {1, 1});
  indexer.cache.k = floats(more, {1, 4, 1, 4}), indexer.seqused_kv = lengths.tensor();
  indexer.indices = chosen.tensor();
  indexer.indices.rank = 2, indexer.indices.shape[0] = 1, indexer.indices.shape[1] = 2, indexer.indices.stride[1] = 1;
  alignas(256) static std::byte workspace[1 << 20];
  size_t bytes = 0;
  expect_versions<attune_indexer>(
      "indexer", indexer,
      {[&](const attune_indexer* x) { return attune_indexer_workspace_size(x, kCpu, &bytes); },
       [](const attune_indexer* x) { return attune_indexer_run(x, kCpu, workspace, sizeof(workspace), nullptr); }});

  attune_rope rope;
  ASSERT_ATTUNE_OK(attune_rope_init(&rope, sizeof(rope)));
  rope.dim = 8;
  std::vector<double> frequencies(4);
  expect_versions<attune_rope>("rope", rope,
                               {[&](const attune_rope* x) { return attune_rope_table(x, 0, 2, out.data()); },
                                [&](const attune_rope* x) { return attune_rope_frequencies(x, frequencies.data()); }});
}

template <class Info>
void expect_info(attune_status (*get)(int32_t, Info*)) {
  Info plain;
  std::memset(&plain, 0x5a, sizeof(plain));
  plain.struct_size = sizeof(plain);
  ASSERT_ATTUNE_OK(get(0, &plain));
  Newer<Info> n;
  std::memset(&n, 0x5a, sizeof(n));  // a caller of outputs need not clear them
  n.s.struct_size = sizeof(Info) + 8;
  ASSERT_ATTUNE_OK(get(0, &n.s));
  EXPECT_EQ(n.s.struct_size, sizeof(Info) + 8);
  EXPECT_TRUE(std::all_of(n.later, n.later + 8, [](unsigned char c) { return c == 0; }));
  EXPECT_TRUE(std::all_of(n.later + 8, std::end(n.later), [](unsigned char c) { return c == 0x5a; }));
  n.s.struct_size = sizeof(Info);
  EXPECT_EQ(std::memcmp(&n.s, &plain, sizeof(plain)), 0);
  n.s.struct_size = kFirstSize<Info> - 1;
  EXPECT_EQ(get(0, &n.s), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find("info.struct_size is "), std::string::npos) << attune_last_error();
}

TEST(Versions, StructsThatTheLibraryFills) {
  expect_info(attune_get_device_info);
  expect_info(attune_get_kernel_info);
}

}  // namespace
}  // namespace tests
}  // namespace attune
