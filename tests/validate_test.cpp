// SPDX-License-Identifier: Apache-2.0
// Every wrong field of the attention descriptor is refused with a message that names it.
#include <functional>

#include "support.h"

namespace attune::tests {
namespace {

using cases::every_tensor_cases;
using cases::Problem;

// The name of a case without its area.
std::string name_in_area(const cases::Case& c) { return c.name.substr(c.area.size() + 1); }

attune_status run_status(const attune_attention& a, std::string* message) {
  attune_plan* plan = nullptr;
  attune_status status = attune_plan_create(&a, kCpu, &plan);
  if (status == ATTUNE_OK) {
    size_t bytes = 0;
    EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
    cases::Workspace workspace(cases::host_memory(), bytes);
    status = attune_run(plan, &a, workspace.buffer.device(), bytes, nullptr);
  }
  *message = status == ATTUNE_OK ? "" : attune_last_error();
  attune_plan_destroy(plan);
  return status;
}

// The call must fail as INVALID_ARGUMENT or UNSUPPORTED, name what is wrong, and change nothing.
void expect_refused(const Problem& problem, const attune_attention& a, const std::string& name,
                    const std::string& what) {
  const cases::Snapshot before(problem.arena());
  std::string message;
  const attune_status status = run_status(a, &message);
  EXPECT_TRUE(status == ATTUNE_INVALID_ARGUMENT || status == ATTUNE_UNSUPPORTED)
      << problem.spec().name << ": " << what << " gave " << attune_status_name(status);
  EXPECT_NE(message.find(name), std::string::npos)
      << problem.spec().name << ": " << what << " is not named by: " << message;
  const attune_tensor out = before.after(problem.host().out);
  EXPECT_EQ(gather(out), gather(problem.device().out)) << what << " was refused, yet out changed";
}

// The last part of a tensor's name: messages may say "cache.k" or "cache: k".
std::string short_of(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// By the number of a case: each test is a process of its own, and all of them would read the table to name this one.
constexpr size_t kNumCases = 29;
class WrongTensor : public testing::TestWithParam<size_t> {
 protected:
  static const cases::Case& spec() { return every_tensor_cases().at(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Cases, WrongTensor, testing::Range(size_t{0}, kNumCases));
TEST(WrongTensors, AreOfEveryCase) { EXPECT_EQ(every_tensor_cases().size(), kNumCases); }

// Calls f(tensor of a fresh copy, its name, the copy) for every tensor that is present.
void for_each_tensor(Problem& problem,
                     const std::function<void(attune_tensor&, const std::string&, attune_attention&)>& f) {
  attune_attention device = problem.device();
  const size_t count = cases::tensors_of(device).size();
  for (size_t i = 0; i < count; ++i) {
    attune_attention copy = device;
    const cases::NamedTensor tensor = cases::tensors_of(copy)[i];
    if (tensor.second->dtype != ATTUNE_DTYPE_NONE) f(*tensor.second, tensor.first, copy);
  }
}

TEST_P(WrongTensor, TheProblemItselfRuns) {
  const cases::Report report = cases::run_case(spec());
  EXPECT_EQ(report.failure, "");
}

TEST_P(WrongTensor, Dtype) {
  Problem problem(spec());
  for (const int32_t dtype : {99, -1, static_cast<int32_t>(ATTUNE_INT64)}) {
    for_each_tensor(problem, [&](attune_tensor& t, const std::string& name, attune_attention& a) {
      t.dtype = dtype;
      expect_refused(problem, a, short_of(name), name + ".dtype = " + std::to_string(dtype));
    });
  }
}

TEST_P(WrongTensor, Rank) {
  Problem problem(spec());
  for (const int32_t rank : {0, -3, 7, 1 << 30}) {
    for_each_tensor(problem, [&](attune_tensor& t, const std::string& name, attune_attention& a) {
      t.rank = rank;
      expect_refused(problem, a, short_of(name), name + ".rank = " + std::to_string(rank));
    });
  }
}

TEST_P(WrongTensor, NegativeExtent) {
  Problem problem(spec());
  for (int axis = 0; axis < ATTUNE_MAX_RANK; ++axis) {
    for_each_tensor(problem, [&](attune_tensor& t, const std::string& name, attune_attention& a) {
      if (axis >= t.rank) return;
      t.shape[axis] = -1;
      expect_refused(problem, a, short_of(name), name + ".shape[" + std::to_string(axis) + "] = -1");
    });
  }
}

TEST_P(WrongTensor, HugeExtent) {
  Problem problem(spec());
  for_each_tensor(problem, [&](attune_tensor& t, const std::string&, attune_attention& a) {
    t.shape[0] = INT64_MAX;
    // Which check comes first depends on the tensor; it must be some check.
    std::string message;
    EXPECT_NE(run_status(a, &message), ATTUNE_OK);
    EXPECT_NE(message, "");
  });
}

TEST_P(WrongTensor, Stride) {
  Problem problem(spec());
  for (const int64_t stride : {int64_t{-1}, INT64_MAX}) {
    for_each_tensor(problem, [&](attune_tensor& t, const std::string& name, attune_attention& a) {
      for (int axis = 0; axis < t.rank; ++axis) {
        if (t.shape[axis] < 2) continue;
        attune_tensor good = t;
        t.stride[axis] = stride;
        expect_refused(problem, a, short_of(name),
                       name + ".stride[" + std::to_string(axis) + "] = " + std::to_string(stride));
        t = good;
      }
    });
  }
}

TEST_P(WrongTensor, Alignment) {
  Problem problem(spec());
  for_each_tensor(problem, [&](attune_tensor& t, const std::string& name, attune_attention& a) {
    if (cases::element_size(static_cast<attune_dtype>(t.dtype)) == 1) return;
    t.data = static_cast<std::byte*>(t.data) + 1;
    expect_refused(problem, a, short_of(name), name + " off its alignment");
  });
}

TEST_P(WrongTensor, NullDataIsFineForPlansOnly) {
  Problem problem(spec());
  for_each_tensor(problem, [&](attune_tensor& t, const std::string& name, attune_attention& a) {
    t.data = nullptr;
    EXPECT_EQ(attune_supported(&a, kCpu), ATTUNE_OK) << name << ": " << attune_last_error();
    expect_refused(problem, a, short_of(name), name + ".data = null");
  });
}

attune_tensor fp32_table(std::vector<int64_t> shape) {
  static float numbers[50 * 8] = {};
  return attune_dense_tensor(numbers, ATTUNE_FLOAT32, static_cast<int32_t>(shape.size()), shape.data());
}

struct WrongField {
  const char* row;    // which problem
  const char* names;  // what the message must contain
  void (*spoil)(attune_attention&);
};

const WrongField kFields[] = {
    {"cache", "struct_size", [](attune_attention& a) { a.struct_size = 0; }},
    {"cache", "struct_size", [](attune_attention& a) { a.struct_size = UINT64_MAX; }},
    {"cache", "causal", [](attune_attention& a) { a.causal = 2; }},
    {"cache", "window_left", [](attune_attention& a) { a.window_left = -2; }},
    {"cache", "window_right", [](attune_attention& a) { a.window_right = INT64_MIN; }},
    {"cache", "skip_decode", [](attune_attention& a) { a.skip_decode = -1; }},
    {"cache", "zero_finished", [](attune_attention& a) { a.zero_finished = 7; }},
    {"cache", "softmax_scale is nan", [](attune_attention& a) { a.softmax_scale = __builtin_nanf(""); }},
    {"cache", "softcap", [](attune_attention& a) { a.softcap = -1; }},
    {"cache", "softcap", [](attune_attention& a) { a.softcap = __builtin_inff(); }},
    {"cache", "alibi_sqrt", [](attune_attention& a) { a.alibi_sqrt = 5; }},
    {"dense", "alibi_sqrt", [](attune_attention& a) { a.alibi_sqrt = 1; }},
    {"cache", "t5_max_distance", [](attune_attention& a) { a.t5_max_distance = 0; }},
    {"cache", "t5_bidirectional", [](attune_attention& a) { a.t5_bidirectional = 2; }},
    {"cache", "max_seqlen_q", [](attune_attention& a) { a.max_seqlen_q = -1; }},
    {"cache", "max_seqlen_kv", [](attune_attention& a) { a.max_seqlen_kv = -1; }},
    {"cache", "batch_invariant", [](attune_attention& a) { a.batch_invariant = 2; }},
    {"cache", "allow_tf32", [](attune_attention& a) { a.allow_tf32 = 2; }},
    {"cache", "head_dim_v", [](attune_attention& a) { a.head_dim_v = 63; }},
    {"cache", "layout", [](attune_attention& a) { a.cache.layout = 9; }},
    {"cache", "format", [](attune_attention& a) { a.cache.format = 9; }},
    {"cache", "layout", [](attune_attention& a) { a.cache.layout = ATTUNE_KV_BYTES; }},
    {"cache", "page_size", [](attune_attention& a) { a.cache.page_size = 15; }},
    {"cache", "page_size", [](attune_attention& a) { a.cache.page_size = -16; }},
    {"cache", "ring_capacity", [](attune_attention& a) { a.cache.ring_capacity = -1; }},
    {"cache", "ring_capacity", [](attune_attention& a) { a.cache.ring_capacity = 1 << 20; }},
    {"cache", "append", [](attune_attention& a) { a.prologue.append = 3; }},
    {"cache", "power_of_two_scales", [](attune_attention& a) { a.prologue.power_of_two_scales = 2; }},
    {"int8", "power_of_two_scales is 1, but the cache",
     [](attune_attention& a) { a.prologue.append = a.prologue.power_of_two_scales = 1; }},
    {"cache", "rope_offset", [](attune_attention& a) { a.prologue.rope_offset = 33; }},
    {"cache", "rope_offset", [](attune_attention& a) { a.prologue.rope_offset = -1; }},
    {"cache", "rope_interleaved", [](attune_attention& a) { a.prologue.rope_interleaved = 2; }},
    {"cache", "rope_cos_sin", [](attune_attention& a) { a.prologue.rope_cos_sin.shape[2] = 31; }},
    {"int8", "mrope_section", [](attune_attention& a) { a.prologue.mrope_section[1] = -4; }},
    {"int8", "qkv_scale", [](attune_attention& a) { a.prologue.qkv_scale = {}; }},
    {"dense", "append", [](attune_attention& a) { a.prologue.append = 1; }},
    {"cache", "seqused_kv", [](attune_attention& a) { a.seqused_kv = {}; }},
    {"cache", "q", [](attune_attention& a) { a.q = {}; }},
    {"cache", "out", [](attune_attention& a) { a.out = {}; }},
    {"cache", "v", [](attune_attention& a) { a.v = {}; }},
    {"dense", "k", [](attune_attention& a) { a.k = {}; }},
    {"dense", "k", [](attune_attention& a) { a.k = a.v = {}; }},
    {"cache", "cache.v", [](attune_attention& a) { a.cache.v.shape[0] -= 1; }},
    {"cache", "cache", [](attune_attention& a) { a.cache.k = {}; }},
    {"cache", "k_scale", [](attune_attention& a) { a.cache.k_scale = {}; }},
    {"cache", "page_table", [](attune_attention& a) { a.cache.page_table.shape[0] = 1; }},
    {"cache", "v_page_table", [](attune_attention& a) { a.cache.page_table = {}; }},
    {"contiguous", "batch_index", [](attune_attention& a) { a.cache.batch_index.shape[0] = 1; }},
    {"cache", "q", [](attune_attention& a) { a.q.shape[1] = 3; }},
    {"cache", "out", [](attune_attention& a) { a.out.shape[2] = 63; }},
    {"cache", "out", [](attune_attention& a) { a.out.stride[0] = 1; }},
    {"cache", "lse", [](attune_attention& a) { a.lse.shape[0] -= 1; }},
    {"cache", "lse", [](attune_attention& a) { a.lse.stride[0] = 0; }},
    {"dense", "out_scale",
     [](attune_attention& a) {
       a.out_scale = a.lse;
       a.out_scale.rank = 1;
       a.out_scale.shape[0] = 1;
     }},
    {"dense", "cu_seqlens_kv", [](attune_attention& a) { a.cu_seqlens_kv.shape[0] = 2; }},
    {"dense", "mask_start",
     [](attune_attention& a) {
       a.mask_start = a.seqused_kv;
       a.mask_bits = {};
     }},
    {"dense", "extra", [](attune_attention& a) { a.extra_cache.k = a.k; }},
    {"dense", "prologue", [](attune_attention& a) { a.prologue.append = 1; }},
    {"sparse", "causal is 1, but indices", [](attune_attention& a) { a.causal = 1; }},
    {"sparse", "window_left is 3, but indices", [](attune_attention& a) { a.window_left = 3; }},
    {"sparse", "window_right is 0, but indices", [](attune_attention& a) { a.window_right = 0; }},
    {"sparse", "mask_bits is set, but indices", [](attune_attention& a) { a.mask_bits = a.q; }},
    {"sparse", "bidirectional_ranges is set, but indices", [](attune_attention& a) { a.bidirectional_ranges = a.q; }},
    {"sparse", "alibi_slopes is set, but indices", [](attune_attention& a) { a.alibi_slopes = a.q; }},
    {"sparse", "new_token_bias is set, but indices", [](attune_attention& a) { a.new_token_bias = a.q; }},
    {"mla_656", "cache: head_dim_qk is 512; the format mla_656 has 576",
     [](attune_attention& a) { a.q.shape[2] = 512; }},
    {"mla_656", "cache: head_dim_v is 256; the format mla_656 has 512",
     [](attune_attention& a) { a.head_dim_v = 256; }},
    {"sparse", "t5_bias is set, but indices", [](attune_attention& a) { a.t5_bias = a.q; }},
    {"sparse", "prologue.rope_cos_sin is set without prologue.positions, but indices",
     [](attune_attention& a) {
       a.prologue.rope_cos_sin = fp32_table({50, 8});
     }},
    {"sparse", "prologue.logn is set, but indices", [](attune_attention& a) { a.prologue.logn = fp32_table({50}); }},
    {"sparse", "cache.batch_index is set, but indices", [](attune_attention& a) { a.cache.batch_index = a.q; }},
    {"sparse", "cache.page_table is set, but indices", [](attune_attention& a) { a.cache.page_table = a.q; }},
    {"dense", "cache.v_scale is set, but cache.k is absent", [](attune_attention& a) { a.cache.v_scale = a.q; }},
    {"dense", "cache.page_table is set, but cache.k is absent", [](attune_attention& a) { a.cache.page_table = a.q; }},
    {"dense", "cache.ring_capacity is 8, but cache.k is absent",
     [](attune_attention& a) { a.cache.ring_capacity = 8; }},
    {"dense", "cache.layout is 9; it must be one of attune_kv_layout (0..3)",
     [](attune_attention& a) { a.cache.layout = 9; }},
    {"dense", "cache.format is 9; it must be one of attune_kv_format (0..2)",
     [](attune_attention& a) { a.cache.format = 9; }},
    {"dense", "extra_cache.layout is -1; it must be one of", [](attune_attention& a) { a.extra_cache.layout = -1; }},
    {"paged", "cu_seqlens_kv is set, but k is absent", [](attune_attention& a) { a.cu_seqlens_kv = a.q; }},
    {"dense", "extra_cache.k_scale is set, but extra_cache.k is absent",
     [](attune_attention& a) { a.extra_cache.k_scale = a.q; }},
    {"dense", "q.data is 1 bytes beyond a multiple of 2",
     [](attune_attention& a) { a.q.data = static_cast<std::byte*>(a.q.data) + 1; }},
    {"dense", "k: shape [", [](attune_attention& a) { a.k.stride[0] = int64_t{1} << 61; }},
    {"sparse", "extra_indices", [](attune_attention& a) { a.extra_indices = {}; }},
    {"sparse", "extra_cache", [](attune_attention& a) { a.extra_cache = {}; }},
    {"sparse", "topk_length", [](attune_attention& a) { a.topk_length.shape[0] = 7; }},
    {"sparse", "indices", [](attune_attention& a) { a.indices.shape[0] = 1; }},
    {"beams", "beam_width", [](attune_attention& a) { a.beam_width = 3; }},
    {"beams", "beam_width", [](attune_attention& a) { a.beam_width = -1; }},
    {"beams", "cache_indirection", [](attune_attention& a) { a.cache_indirection = {}; }},
    {"beams", "beam_prompt_length", [](attune_attention& a) { a.beam_prompt_length.shape[0] = 1; }},
    {"q_rope", "q_rope.shape[0] is 2; it must be 3 (as q)", [](attune_attention& a) { a.q_rope.shape[0] = 2; }},
    {"q_rope", "q_rope.shape[1] is 3; it must be 4 (as q)", [](attune_attention& a) { a.q_rope.shape[1] = 3; }},
    {"q_rope", "q_rope has 0 channels beside the 16 of q; it must have 1 or more, and both together at most 576",
     [](attune_attention& a) { a.q_rope.shape[2] = 0; }},
    {"q_rope", "q_rope has 561 channels beside the 16 of q", [](attune_attention& a) { a.q_rope.shape[2] = 561; }},
    {"q_rope", "cache.k has head_dim 24; it must be 23 (head_dim_qk)",
     [](attune_attention& a) { a.q_rope.shape[2] = 7; }},
    {"q_rope", "q_rope.dtype is float16 (2); allowed: float32",
     [](attune_attention& a) { a.q_rope.dtype = ATTUNE_FLOAT16; }},
    {"q_rope", "q_rope is set, but q is int8; with q_rope it must be float32, float16 or bfloat16",
     [](attune_attention& a) { a.q.dtype = ATTUNE_INT8; }},
    {"q_rope", "q_rope is set beside a prologue", [](attune_attention& a) { a.prologue.logn = fp32_table({50}); }},
    {"cache", "q_rope is set beside a prologue",
     [](attune_attention& a) {
       a.q_rope = a.q;
       a.q_rope.shape[2] = 4;
       a.q.shape[2] = 12;
     }},
};

TEST(WrongField, IsNamed) {
  for (const cases::Case& spec : every_tensor_cases()) {
    Problem problem(spec);
    const std::string name = name_in_area(spec);
    int number = 0;
    for (const WrongField& field : kFields) {
      ++number;
      if (name != field.row) continue;
      attune_attention a = problem.device();
      field.spoil(a);
      expect_refused(problem, a, field.names, "wrong field " + std::to_string(number) + " (" + field.names + ")");
    }
  }
}

TEST(WrongBias, DoesNotCoverFixedLengths) {
  Problem problem(make_case(cases::Row(R"("name": "x", "heads": [4, 2], "queries": "fixed", "seqlens_q": [3, 3],
      "seqlens_kv": [9, 9], "bias": 2)")));
  for (const int axis : {1, 2}) {
    attune_attention a = problem.device();
    a.bias.shape[axis] = 8;
    const std::string name = "bias.shape[" + std::to_string(axis) + "]";
    expect_refused(problem, a, name + " is 8; it must be at least 9 (seqlen_kv)", name);
    Int32Vector shorter({8, 8});  // only the device may know these
    a.seqused_kv = shorter.tensor();
    EXPECT_ATTUNE_OK(attune_validate(&a, kCpu, nullptr));
  }
}

TEST(Workspace, TooSmallSaysByHowMuch) {
  Problem problem(every_tensor_case("cache"));
  const attune_attention a = problem.device();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  if (bytes > 0) {
    cases::Workspace workspace(cases::host_memory(), bytes);
    void* data = workspace.buffer.device();
    EXPECT_EQ(attune_run(plan, &a, data, bytes - 1, nullptr), ATTUNE_WORKSPACE_TOO_SMALL);
    EXPECT_NE(std::string(attune_last_error()).find(std::to_string(bytes)), std::string::npos) << attune_last_error();
    EXPECT_EQ(attune_schedule(plan, &a, data, 0, nullptr), ATTUNE_WORKSPACE_TOO_SMALL);
    EXPECT_EQ(attune_run_scheduled(plan, &a, data, bytes / 2, nullptr), ATTUNE_WORKSPACE_TOO_SMALL);
    EXPECT_EQ(attune_run(plan, &a, nullptr, bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("workspace"), std::string::npos);
    EXPECT_EQ(attune_run(plan, &a, static_cast<std::byte*>(data) + 64, bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("workspace is 64 bytes beyond"), std::string::npos);
  }
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(Plan, RefusesWhatItWasNotMadeFor) {
  Problem problem(every_tensor_case("dense"));
  const attune_attention a = problem.device();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  cases::Workspace workspace(cases::host_memory(), bytes);
  const cases::Row row(R"("heads": [4, 2], "head_dim": [16, 16], "dtype": "f16", "seqlens_q": [5, 2],
      "seqlens_kv": [9, 7], "seqused": true, "mask_bits": 1)");
  Problem larger(make_case(row.with(R"("seqlens_q": [5, 2, 4], "seqlens_kv": [9, 7, 4])")));
  Problem other(make_case(row.with(R"("dtype": "bf16")")));
  for (Problem* p : {&larger, &other}) {
    const attune_attention b = p->device();
    EXPECT_EQ(attune_run(plan, &b, workspace.buffer.device(), bytes, nullptr), ATTUNE_INVALID_ARGUMENT)
        << p->spec().name;
    EXPECT_NE(std::string(attune_last_error()), "");
  }
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(NullArguments, AreRefused) {
  Problem problem(every_tensor_case("dense"));
  const attune_attention a = problem.device();
  attune_plan* plan = nullptr;
  size_t bytes = 0;
  EXPECT_EQ(attune_attention_init(nullptr, sizeof(attune_attention)), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_supported(nullptr, kCpu), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_plan_create(nullptr, kCpu, &plan), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_plan_create(&a, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_plan_workspace_size(nullptr, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_run(nullptr, &a, nullptr, 0, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_validate(nullptr, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_plan_destroy(nullptr), ATTUNE_OK);
  EXPECT_EQ(attune_device_count(nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_get_device_info(0, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_kernel_count(nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_get_kernel_info(0, nullptr), ATTUNE_INVALID_ARGUMENT);
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  EXPECT_EQ(attune_plan_workspace_size(plan, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_run(plan, nullptr, nullptr, 0, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(Device, ThatDoesNotExistIsRefused) {
  Problem problem(every_tensor_case("dense"));
  const attune_attention a = problem.device();
  for (const attune_device device :
       {attune_device{77, 0}, attune_device{ATTUNE_DEVICE_CPU, 1}, attune_device{ATTUNE_DEVICE_CPU, -1}}) {
    EXPECT_EQ(attune_supported(&a, device), ATTUNE_INVALID_ARGUMENT) << device.type << ":" << device.index;
    EXPECT_NE(std::string(attune_last_error()).find("device"), std::string::npos) << attune_last_error();
  }
  EXPECT_NE(attune_supported(&a, {ATTUNE_DEVICE_CUDA, 1000}), ATTUNE_OK);
}

TEST(Stream, OfTheCpuIsRefused) {
  Problem problem(every_tensor_case("cache"));
  const attune_attention a = problem.device();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  cases::Workspace workspace(cases::host_memory(), bytes);
  void* const data = workspace.buffer.device();
  void* const stream = &bytes;
  attune_merge merge;
  ASSERT_ATTUNE_OK(attune_merge_init(&merge, sizeof merge));
  attune_indexer indexer;
  ASSERT_ATTUNE_OK(attune_indexer_init(&indexer, sizeof indexer));
  const std::function<attune_status()> calls[] = {
      [&] { return attune_run(plan, &a, data, bytes, stream); },
      [&] { return attune_schedule(plan, &a, data, bytes, stream); },
      [&] { return attune_run_scheduled(plan, &a, data, bytes, stream); },
      [&] { return attune_validate(&a, kCpu, stream); },
      [&] { return attune_merge_run(&merge, kCpu, stream); },
      [&] { return attune_indexer_run(&indexer, kCpu, data, bytes, stream); }};
  for (const auto& call : calls) {
    EXPECT_EQ(call(), ATTUNE_INVALID_ARGUMENT);
    EXPECT_STREQ(attune_last_error(), "stream is set, but the CPU has no streams; it must be null there");
  }
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(PlanDescription, IsCutToTheCapacity) {
  Problem problem(every_tensor_case("dense"));
  const attune_attention a = problem.device();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t needed = 0;
  ASSERT_ATTUNE_OK(attune_plan_describe(plan, nullptr, 0, &needed));
  ASSERT_GT(needed, 10u);
  std::string text(needed, 'x');
  ASSERT_ATTUNE_OK(attune_plan_describe(plan, text.data(), text.size(), nullptr));
  EXPECT_EQ(std::strlen(text.c_str()) + 1, needed);
  char small[6] = {1, 1, 1, 1, 1, 1};
  ASSERT_ATTUNE_OK(attune_plan_describe(plan, small, 5, nullptr));
  EXPECT_EQ(std::string(small), text.substr(0, 4));
  EXPECT_EQ(small[5], 1);
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

}  // namespace
}  // namespace attune::tests
