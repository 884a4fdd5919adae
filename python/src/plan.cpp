// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <new>
#include <unordered_map>

#include "order.h"

namespace attune::python {
namespace {

constexpr std::align_val_t kAlignment{256};

// The fields by which outputs go back to the caller.
struct OutputFields {
  int out, lse, max_logits;
};
const OutputFields& output_fields() {
  static const OutputFields fields = {attention_table().find(nb::str("out")), attention_table().find(nb::str("lse")),
                                      attention_table().find(nb::str("max_logits"))};
  return fields;
}

nb::object outputs_of(const Values& values) {
  const OutputFields& fields = output_fields();
  nb::object outputs[3];
  size_t count = 0;
  for (int i : {fields.out, fields.lse, fields.max_logits})
    if (values.items[i] != nullptr) outputs[count++] = nb::borrow(values.items[i]);
  if (count == 1) return outputs[0];
  if (count == 2) return nb::make_tuple(outputs[0], outputs[1]);
  return nb::make_tuple(outputs[0], outputs[1], outputs[2]);
}

attune_status run_without_lock(RunFunction run, const attune_plan* plan, const attune_attention& attention,
                               const Workspace& workspace, void* stream) {
  nb::gil_scoped_release release;
  return run(plan, &attention, workspace.data(), workspace.size(), stream);
}

// The plan that was the last to write to an array that callers gave as workspace: they may give it to several.
std::unordered_map<const void*, const Plan*>& last_of_given() {
  static std::unordered_map<const void*, const Plan*> last;
  return last;
}

// Gives a run's tensor [..., num_heads * head_dim] the plan's two last axes. Others are left as they are: the library
// says what is wrong with them. A view of the framework would take longer than all else that Python does for a run.
void split_heads(attune_tensor* t, const attune_tensor& planned) {
  if (t->rank != planned.rank - 1 || t->rank < 1) return;
  const int last = t->rank - 1;
  const int64_t heads = planned.shape[last], head_dim = planned.shape[last + 1];
  if (t->stride[last] != 1 || t->shape[last] != heads * head_dim) return;
  t->rank = planned.rank;
  t->shape[last] = heads;
  t->stride[last] = head_dim;
  t->shape[last + 1] = head_dim;
  t->stride[last + 1] = 1;
}

}  // namespace

void Workspace::Free::operator()(void* p) const noexcept { ::operator delete(p, kAlignment); }

Workspace::Workspace(size_t bytes, const Arrays& arrays, nb::handle given, nb::handle stream)
    : size_(bytes), given_(!given.is_none()) {
  if (given.is_none() && arrays.device().type == ATTUNE_DEVICE_CPU) {
    heap_.reset(::operator new(std::max<size_t>(bytes, 1), kAlignment));
    data_ = heap_.get();
    return;
  }
  if (given.is_none() && stream.is_none()) {
    direct_.reset(arrays.allocate_directly(bytes));
    if (direct_ != nullptr) {
      data_ = static_cast<std::byte*>(direct_->tensor.data) + direct_->tensor.byte_offset;
      if (reinterpret_cast<uintptr_t>(data_) % static_cast<uintptr_t>(kAlignment) == 0) return;
      direct_.reset();
    }
  }
  array_ = given.is_none() ? arrays.allocate(bytes, stream) : nb::borrow(given);
  Arrays own;
  const attune_tensor tensor = own.view({"", "workspace"}, array_, Arrays::Use::kWrite);
  if (tensor.dtype != ATTUNE_UINT8 || tensor.rank != 1 || (tensor.shape[0] > 1 && tensor.stride[0] != 1))
    invalid_argument("workspace must be a dense uint8 array of one axis");
  if (own.device().type != arrays.device().type || own.device().index != arrays.device().index)
    invalid_argument("workspace is on another device than the other arrays");
  data_ = tensor.data;
  size_ = static_cast<size_t>(tensor.shape[0]);
  if (given.is_none()) return;
  if (size_ < bytes)
    workspace_too_small("workspace has " + std::to_string(size_) + " byte" + (size_ == 1 ? "" : "s") +
                        "; it must have " + std::to_string(bytes));
  const auto over = reinterpret_cast<uintptr_t>(data_) % static_cast<uintptr_t>(kAlignment);
  if (over != 0 && data_ != nullptr)
    invalid_argument("workspace is " + std::to_string(over) + " bytes beyond a multiple of " +
                     std::to_string(static_cast<size_t>(kAlignment)) + "; it must be a multiple");
}

attune_attention read_attention(const Values& values, Arrays* arrays) {
  attune_attention attention;
  check(attune_attention_init(&attention, sizeof attention));
  fill(&attention, attention_table(), values, arrays);
  if (attention.prologue.append != 0) arrays->require_writable_cache();
  check_order(attention);
  return attention;
}

Plan::Plan(nb::dict arguments, nb::object workspace) : arguments_(nb::steal<nb::dict>(PyDict_Copy(arguments.ptr()))) {
  values_.take(attention_table(), arguments_);
  Arrays arrays;
  const attune_attention attention = read_attention(values_, &arrays);
  device_ = arrays.device();
  q_ = attention.q;
  q_rope_ = attention.q_rope;
  out_ = attention.out;
  attune_plan* plan = nullptr;
  attune_status status;
  {
    nb::gil_scoped_release release;  // a kernel may have to be compiled
    status = attune_plan_create(&attention, device_, &plan);
  }
  check(status);
  plan_.reset(plan);
  size_t bytes = 0;
  check(attune_plan_workspace_size(plan_.get(), &bytes));
  workspace_ = Workspace(bytes, arrays, workspace, nb::none());
}

nb::object Plan::call(RunFunction run, nb::kwargs changes) {
  Values values = values_;
  nb::object stream = nb::none();
  if (changes.size() != 0) {
    static PyObject* const name = PyUnicode_InternFromString("stream");
    if (PyObject* given = PyDict_GetItemWithError(changes.ptr(), name); given != nullptr) {
      stream = nb::borrow(given);
      PyDict_DelItem(changes.ptr(), name);
    }
    values.take(attention_table(), changes);
  }
  Arrays arrays;
  attune_attention attention = read_attention(values, &arrays);
  split_heads(&attention.q, q_);
  split_heads(&attention.q_rope, q_rope_);
  split_heads(&attention.out, out_);
  if (arrays.device().type != device_.type || arrays.device().index != device_.index)
    invalid_argument("the arrays are on another device than the plan");
  void* const on = arrays.stream(stream);  // may throw
  if (running_) invalid_argument("this plan is running in another thread; each thread needs a plan of its own");
  running_ = true;
  const attune_status status = run_without_lock(run, plan_.get(), attention, workspace_, on);
  running_ = false;
  check(status);
  scheduled_ = true;
  if (workspace_.is_given()) last_of_given()[workspace_.data()] = this;
  return outputs_of(values);
}

nb::object Plan::run_scheduled(nb::kwargs changes) {
  // On CUDA the library cannot see it: what a kernel takes for a schedule is on the device.
  if (!scheduled_) invalid_argument("this plan has no schedule; call schedule (or run) before run_scheduled");
  if (workspace_.is_given() && last_of_given()[workspace_.data()] != this)
    invalid_argument("another plan has used the workspace; call schedule (or run) again before run_scheduled");
  return call(attune_run_scheduled, changes);
}

Plan::~Plan() {
  if (!workspace_.is_given()) return;
  const auto at = last_of_given().find(workspace_.data());
  if (at != last_of_given().end() && at->second == this) last_of_given().erase(at);
}

std::string Plan::describe() const {
  size_t needed = 0;
  check(attune_plan_describe(plan_.get(), nullptr, 0, &needed));
  std::string text(needed, '\0');
  check(attune_plan_describe(plan_.get(), text.data(), text.size(), &needed));
  text.resize(needed - 1);
  return text;
}

nb::object run_attention(nb::dict arguments, nb::object workspace, nb::object stream) {
  Values values;
  values.take(attention_table(), arguments);
  Arrays arrays;
  const attune_attention attention = read_attention(values, &arrays);
  attune_plan* plan = nullptr;
  check(attune_plan_create(&attention, arrays.device(), &plan));
  const PlanHandle handle(plan);
  size_t bytes = 0;
  check(attune_plan_workspace_size(plan, &bytes));
  const Workspace own(bytes, arrays, workspace, stream);
  check(run_without_lock(attune_run, plan, attention, own, arrays.stream(stream)));
  return outputs_of(values);
}

}  // namespace attune::python
