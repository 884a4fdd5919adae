// SPDX-License-Identifier: Apache-2.0
// The C ABI of plans, attention, devices and the registry: checks, translates, catches. Nothing else.
#include <cstring>
#include <iterator>
#include <new>
#include <string>

#include "api/plan.h"
#include "attune/attune.h"
#include "core/aliasing.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/versioned.h"
#include "cpu/threads.h"
#include "cuda/host_tables.h"
#include "dispatch/device.h"
#include "dispatch/registry.h"
#include "dispatch/warm.h"

using attune::Data;
using attune::guarded;
using attune::Known;
using attune::Problem;
using attune::require;

namespace {

void copy_text(char* to, size_t capacity, const std::string& from) {
  const size_t n = std::min(capacity - 1, from.size());
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

void return_text(const std::string& from, char* text, size_t capacity, size_t* needed) {
  require(text != nullptr || capacity == 0, "text is null, but capacity is ", capacity);
  if (needed != nullptr) *needed = from.size() + 1;
  if (capacity > 0) copy_text(text, capacity, from);
}

}  // namespace

namespace attune {

namespace {

// What differs on an axis, by the name of an argument where one decides it.
std::string difference_from_plan(Axis axis, uint32_t run, uint32_t planned) {
  const auto made_for = [&](std::string_view what, uint32_t among) {
    return cat(what, " is ", value_list(axis, run & among), "; the plan was made for ",
               value_list(axis, planned & among));
  };
  const auto given = [&](const char* what, uint32_t bit) {
    return cat(what,
               (run & bit) != 0 ? " is given; the plan was made without it" : " is absent; the plan was made with it");
  };
  if (axis == Axis::kQueryDtype) return made_for("q.dtype", ~0u);
  if (axis == Axis::kQueries && ((run ^ planned) & use::kRopeApart) != 0) return given("q_rope", use::kRopeApart);
  if (axis == Axis::kOutput) {
    constexpr uint32_t kDtypes = use::kOutF32 | use::kOutF16 | use::kOutBf16 | use::kOutE4m3;
    if (((run ^ planned) & kDtypes) != 0) return made_for("out.dtype", kDtypes);
    return ((run ^ planned) & use::kLse) != 0 ? given("lse", use::kLse) : given("max_logits", use::kMaxLogits);
  }
  if (axis == Axis::kDeterminism) {
    return cat("batch_invariant is ", run >> 1, "; the plan was made for ", planned >> 1);
  }
  return made_for(axis_info(axis).name, ~0u);
}

}  // namespace

void check_fits(const attune_plan& plan, const Problem& p, const Traits& traits) {
  for (int i = 0; i < kNumAxes; ++i) {
    const uint32_t run = traits.axes[i], planned = plan.traits.axes[i];
    if (run != planned) {
      fail(ATTUNE_INVALID_ARGUMENT,
           "attention differs from its plan: ", difference_from_plan(static_cast<Axis>(i), run, planned));
    }
  }
  check_limits(plan.limits, p);
}

}  // namespace attune

namespace {

// The checks common to every run.
Problem check_run(const attune_plan* plan, const attune_attention* attention, void* workspace, size_t bytes,
                  const void* stream) {
  require(plan != nullptr, "plan is null");
  require(plan->impl != nullptr, "plan is of attention_backward; attune_attention_backward_run runs it");
  attune::check_stream(plan->device, stream);
  const Known<attune_attention> known("attention", attention);
  const Problem p = attune::make_problem(*known, Data::kRequired);
  attune::check_fits(*plan, p, attune::traits_of(p, *known));
  const size_t need = plan->impl->workspace_size();
  attune::check_workspace("the plan", need, workspace, bytes);
  attune::check_apart(*known, p.prologue.append ? &p.cache : nullptr, workspace, need);
  if (plan->device.type == ATTUNE_DEVICE_CUDA) {
    // A host pointer would destroy the CUDA context. Such callers pass host memory for every tensor, so two pointers
    // are checked here; attune_validate checks all.
    attune::cuda::check_reachable("workspace", workspace, plan->device.index);
    attune::cuda::check_reachable("q.data", p.q.data, plan->device.index);
  }
  return p;
}

}  // namespace

extern "C" {

const char* attune_version(void) { return ATTUNE_VERSION_STRING; }

const char* attune_status_name(attune_status status) {
  static constexpr const char* kNames[] = {
      "ok",       "invalid argument", "unsupported",   "workspace too small", "out of memory",
      "bad data", "device error",     "internal error"};
  static_assert(std::size(kNames) == ATTUNE_INTERNAL + 1, "a status is missing");
  const auto i = static_cast<size_t>(status);
  return i < std::size(kNames) ? kNames[i] : "unknown status";
}

const char* attune_last_error(void) { return attune::last_error(); }

attune_status attune_set_log_callback(attune_log_callback callback, void* user) {
  return guarded([&] { attune::set_log_callback(callback, user); });
}

attune_status attune_device_count(int32_t* count) {
  return guarded([&] {
    require(count != nullptr, "count is null");
    *count = attune::device_count();
  });
}

attune_status attune_get_device_info(int32_t i, attune_device_info* info) {
  return guarded([&] {
    require(info != nullptr, "info is null");
    require(i >= 0 && i < attune::device_count(), "i is ", i, "; it must be 0..", attune::device_count() - 1,
            " (attune_device_count)");
    attune::write_struct("info", info, info->struct_size,
                         [&](attune_device_info& known) { attune::describe_device(i, &known); });
  });
}

attune_status attune_describe_cuda(char* text, size_t capacity, size_t* needed) {
  return guarded([&] { return_text(attune::describe_cuda(), text, capacity, needed); });
}

attune_status attune_set_num_threads(int32_t num_threads) {
  return guarded([&] {
    require(num_threads >= 0 && num_threads <= attune::cpu::kMostThreads, "num_threads is ", num_threads,
            "; it must be 0 (default) to ", attune::cpu::kMostThreads);
    attune::cpu::set_num_threads(num_threads);
  });
}

attune_status attune_get_num_threads(int32_t* num_threads) {
  return guarded([&] {
    require(num_threads != nullptr, "num_threads is null");
    *num_threads = attune::cpu::num_threads();
  });
}

attune_tensor attune_dense_tensor(void* data, attune_dtype dtype, int32_t rank, const int64_t* shape) {
  attune_tensor t;
  std::memset(&t, 0, sizeof(t));
  if (rank < 1 || rank > ATTUNE_MAX_RANK || shape == nullptr) return t;
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  // Unsigned, so that an absurd shape may wrap here. The checks of the operation that gets the tensor reject it.
  uint64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(shape[i] > 0 ? shape[i] : 1);
  }
  return t;
}

int64_t attune_dtype_size(attune_dtype dtype) { return attune::dtype_size(dtype); }
const char* attune_dtype_name(attune_dtype dtype) { return attune::dtype_name(dtype); }

attune_status attune_attention_init(attune_attention* attention, uint64_t struct_size) {
  return guarded([&] {
    attune::write_struct("attention", attention, struct_size,
                         [](attune_attention& known) { known.window_left = known.window_right = -1; });
  });
}

attune_status attune_supported(const attune_attention* attention, attune_device device) {
  return guarded([&] {
    const Known<attune_attention> known("attention", attention);
    attune::check_device_argument(device);
    const Problem p = attune::make_problem(*known, Data::kOptional);
    attune::find_kernel(p, attune::traits_of(p, *known), device);
  });
}

attune_status attune_supported_by_capability(const attune_attention* attention, int32_t capability) {
  return guarded([&] {
    const Known<attune_attention> known("attention", attention);
    const Problem p = attune::make_problem(*known, Data::kOptional);
    require(capability >= 0 && capability <= 999, "capability is ", capability,
            "; it must be 0 to 999: 10 * major + minor of a compute capability");
    const std::string old = attune::cuda::too_old(capability);
    if (!old.empty()) attune::fail(ATTUNE_UNSUPPORTED, "a GPU that ", old);
    attune::choose_kernel(p, attune::traits_of(p, *known), ATTUNE_DEVICE_CUDA, attune::kAttention,
                          attune::cuda::own_target(capability));
  });
}

attune_status attune_plan_create(const attune_attention* attention, attune_device device, attune_plan** plan) {
  return guarded([&] {
    require(plan != nullptr, "plan is null");
    *plan = nullptr;
    const Known<attune_attention> known("attention", attention);
    attune::check_device_argument(device);
    const Problem p = attune::make_problem(*known, Data::kOptional);
    auto out = std::make_unique<attune_plan>();
    out->traits = attune::traits_of(p, *known);
    out->kernel = &attune::find_kernel(p, out->traits, device);
    out->device = device;
    out->limits = attune::plan_limits(p);
    out->impl = out->kernel->make_plan(p, device.index);
    *plan = out.release();
  });
}

attune_status attune_plan_destroy(attune_plan* plan) {
  return guarded([&] { delete plan; });
}

attune_status attune_warm(const attune_attention* const* attentions, int32_t count, attune_device device) {
  return guarded([&] {
    require(count >= 0, "count is ", count, "; it must be >= 0");
    require(attentions != nullptr || count == 0, "attentions is null, but count is ", count);
    attune::warm_kernels({attentions, static_cast<size_t>(count)}, device);
  });
}

attune_status attune_plan_workspace_size(const attune_plan* plan, size_t* bytes) {
  return guarded([&] {
    require(plan != nullptr, "plan is null");
    require(bytes != nullptr, "bytes is null");
    *bytes = plan->impl != nullptr ? plan->impl->workspace_size() : plan->backward->workspace_size();
  });
}

attune_status attune_plan_describe(const attune_plan* plan, char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    require(plan != nullptr, "plan is null");
    return_text(plan->impl != nullptr ? plan->impl->describe() : plan->backward->describe(), text, capacity, needed);
  });
}

attune_status attune_run(const attune_plan* plan, const attune_attention* attention, void* workspace,
                         size_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Problem p = check_run(plan, attention, workspace, workspace_bytes, stream);
    plan->impl->schedule(p, workspace, stream);
    plan->impl->run(p, workspace, stream);
  });
}

attune_status attune_schedule(const attune_plan* plan, const attune_attention* attention, void* workspace,
                              size_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Problem p = check_run(plan, attention, workspace, workspace_bytes, stream);
    plan->impl->schedule(p, workspace, stream);
  });
}

attune_status attune_run_scheduled(const attune_plan* plan, const attune_attention* attention, void* workspace,
                                   size_t workspace_bytes, void* stream) {
  return guarded([&] {
    Problem p = check_run(plan, attention, workspace, workspace_bytes, stream);
    p.scheduled_before = true;
    plan->impl->run(p, workspace, stream);
  });
}

attune_status attune_validate(const attune_attention* attention, attune_device device, void* stream) {
  return guarded([&] {
    const Known<attune_attention> known("attention", attention);
    attune::check_device_argument(device);
    attune::check_stream(device, stream);
    const Problem p = attune::make_problem(*known, Data::kRequired);
    attune::check_apart(*known, p.prologue.append ? &p.cache : nullptr, nullptr, 0);
    attune::find_kernel(p, attune::traits_of(p, *known), device);
    if (device.type == ATTUNE_DEVICE_CPU) return attune::validate_contents(p);
    attune::cuda::check_reachable(*known, device.index);
    attune::validate_contents(attune::cuda::HostTables(p, device.index, stream).problem());
  });
}

attune_status attune_kernel_count(int32_t* count) {
  return guarded([&] {
    require(count != nullptr, "count is null");
    *count = attune::kernel_count();
  });
}

attune_status attune_get_kernel_info(int32_t i, attune_kernel_info* info) {
  return guarded([&] {
    require(info != nullptr, "info is null");
    require(i >= 0 && i < attune::kernel_count(), "i is ", i, "; there are ", attune::kernel_count(), " kernels");
    const attune::Kernel& k = attune::kernel_at(i);
    attune::write_struct("info", info, info->struct_size, [&](attune_kernel_info& known) {
      copy_text(known.name, sizeof(known.name), k.name);
      copy_text(known.operation, sizeof(known.operation), k.operation);
      known.device_type = k.device_type;
      copy_text(known.coverage, sizeof(known.coverage), k.coverage.text());
    });
  });
}

}  // extern "C"
