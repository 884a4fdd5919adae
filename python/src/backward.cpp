// SPDX-License-Identifier: Apache-2.0
#include "backward.h"

#include "plan.h"

namespace attune::python {
namespace {

const Table& backward_table() {
#define B(name, kind) \
  { #name, kind, offsetof(attune_attention_backward, name) }
  static constexpr Field kFields[] = {
      B(dout, Kind::kInput), B(dlse, Kind::kInput),    B(dq, Kind::kOutput),    B(dk, Kind::kOutput),
      B(dv, Kind::kOutput),  B(dsinks, Kind::kOutput), B(dbias, Kind::kOutput), B(dt5_bias, Kind::kOutput),
  };
#undef B
  static const Table* table = new Table(kFields);
  return *table;
}

// Both descriptors of a call.
struct Backward {
  Backward(nb::dict attention_arguments, nb::dict arguments) {
    Values values;
    values.take(attention_table(), attention_arguments);
    arrays.read_outputs(true);
    attention = read_attention(values, &arrays);
    arrays.read_outputs(false);
    check(attune_attention_backward_init(&op, sizeof op));
    fill(&op, backward_table(), arguments, &arrays);
    op.attention = &attention;
  }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  Arrays arrays;
  attune_attention attention;
  attune_attention_backward op;
};

}  // namespace

void attention_backward(nb::dict attention, nb::dict arguments, nb::object workspace, nb::object stream_given) {
  const Backward call(attention, arguments);
  attune_plan* plan = nullptr;
  check(attune_attention_backward_plan(&call.op, call.arrays.device(), &plan));
  const PlanHandle handle(plan);
  size_t bytes = 0;
  check(attune_plan_workspace_size(plan, &bytes));
  const Workspace own(bytes, call.arrays, workspace, stream_given);
  void* stream = call.arrays.stream(stream_given);
  attune_status status;
  {
    nb::gil_scoped_release release;
    status = attune_attention_backward_run(plan, &call.op, own.data(), own.size(), stream);
  }
  check(status);
}

nb::tuple attention_backward_supported(nb::dict attention, nb::dict arguments, nb::object device) {
  const Backward call(attention, arguments);
  const attune_device on = device.is_none() ? call.arrays.device()
                                            : attune_device{nb::cast<int32_t>(device[0]), nb::cast<int32_t>(device[1])};
  const attune_status status = attune_attention_backward_supported(&call.op, on);
  if (status == ATTUNE_INVALID_ARGUMENT) check(status);
  return nb::make_tuple(status == ATTUNE_OK, status == ATTUNE_OK ? "" : attune_last_error());
}

}  // namespace attune::python
