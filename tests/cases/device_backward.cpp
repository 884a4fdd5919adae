// SPDX-License-Identifier: Apache-2.0
#include "device_backward.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "device_oracle.h"
#include "reference/operation.h"

namespace attune::cases {
namespace {

constexpr int64_t kDoublesOfPair = 6;  // of the scratch (kernels/check/backward.cu)
constexpr int64_t kDoublesOfSums = 5;
constexpr int64_t kMostScratch = (int64_t{256} << 20) / 8;  // doubles of all blocks

int64_t rows_of(const attune_tensor& t) { return t.rank == 4 ? t.shape[0] * t.shape[1] : t.shape[0]; }

std::string text(double x) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.9g", x);
  return digits;
}

}  // namespace

template <class T>
T* DeviceBackwardOracle::add_array(const char* name, int64_t count) {
  const auto bytes = static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T);
  arrays_.push_back(std::make_unique<DeviceArray>(memory_, name, bytes));
  return static_cast<T*>(arrays_.back()->device());
}

DeviceBackwardOracle::DeviceBackwardOracle(const BackwardProblem& problem, int64_t blocks, int64_t threads)
    : memory_(problem.arena().memory()), params_(memory_, "params", sizeof(host_)) {
  const attune_attention& a = problem.host().attention;
  const BackwardCall device = problem.device();
  host_.forward = described(problem.forward());
  host_.out = device_tensor(device.attention.out);
  host_.lse = device_tensor(device.attention.lse);
  host_.dout = device_tensor(device.op.dout);
  host_.dlse = device_tensor(device.op.dlse);
  host_.rows_kv = rows_of(a.k);
  const std::vector<NamedGradient> gradients = gradients_of(problem);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const NamedGradient& g = gradients[i];
    host_.gradients[i].terms = g.terms;
    if (g.host.dtype == ATTUNE_DTYPE_NONE) continue;
    host_.gradients[i].value = add_array<double>(g.name, num_elements(g.host));
    host_.gradients[i].bound = add_array<double>(g.name, num_elements(g.host));
  }
  host_.q_written = add_array<unsigned char>("q_written", host_.forward.rows);
  host_.kv_written = add_array<unsigned char>("kv_written", host_.rows_kv);
  const reference::Operation op(a);
  int64_t keys = 0, queries = 0;
  for (const reference::Sequence& s : op.sequences) {
    keys = std::max(keys, s.num_dense);
    queries = std::max(queries, s.num_queries);
  }
  const int64_t pairs = std::max(keys, queries * (op.num_heads_q / op.num_heads_kv));
  host_.scratch_size = std::max(pairs * kDoublesOfPair, threads * kDoublesOfSums);
  const int64_t outputs = host_.forward.rows * op.num_heads_q + host_.rows_kv * op.num_heads_kv;
  blocks_ = std::clamp<int64_t>(outputs, 1, std::clamp<int64_t>(kMostScratch / host_.scratch_size, 1, blocks));
  host_.scratch = add_array<double>("scratch", blocks_ * host_.scratch_size);
  std::memcpy(params_.host(), &host_, sizeof(host_));
  params_.upload();
}

template <class T>
std::vector<T> DeviceBackwardOracle::download(const T* device) const {
  for (const auto& array : arrays_) {
    if (array->device() != device) continue;
    const std::vector<std::byte> bytes = array->download();
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
  return {};
}

DeviceBackwardOracle::Result DeviceBackwardOracle::result(size_t gradient) const {
  const oracle::Gradient& g = host_.gradients[gradient];
  return {download(g.value), download(g.bound)};
}

std::vector<bool> DeviceBackwardOracle::flags(const unsigned char* device) const {
  const std::vector<unsigned char> bytes = download(device);
  return {bytes.begin(), bytes.end()};
}

std::string DeviceBackwardOracle::check_guards() const {
  for (const auto& array : arrays_) {
    if (std::string guards = array->check_guards(); !guards.empty()) return guards;
  }
  return params_.check_guards();
}

DeviceCompareGradients::DeviceCompareGradients(const BackwardProblem& problem, const DeviceBackwardOracle& oracle,
                                               int64_t blocks, int64_t threads)
    : gradients_(gradients_of(problem)),
      params_(problem.arena().memory(), "compare's params", sizeof(oracle::CompareGradientsParams)),
      verdicts_(problem.arena().memory(), "verdicts", static_cast<size_t>(blocks * threads) * sizeof(oracle::Verdict)) {
  oracle::CompareGradientsParams p{};
  const oracle::BackwardOracleParams& results = oracle.device_results();
  const BackwardCall device = problem.device();
  const attune_attention_backward& op = device.op;
  const attune_tensor* const actual[] = {&op.dq, &op.dk, &op.dv, &op.dsinks, &op.dbias, &op.dt5_bias};
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const std::string_view name = gradients_[i].name;
    const unsigned char* const written = name == "dq"                   ? results.q_written
                                         : name == "dk" || name == "dv" ? results.kv_written
                                                                        : nullptr;
    p.gradients[i] = {device_tensor(*actual[i]), results.gradients[i].value, results.gradients[i].bound, written};
  }
  p.filler = std::to_integer<int>(kPoison);
  p.verdicts = static_cast<oracle::Verdict*>(verdicts_.device());
  std::memcpy(params_.host(), &p, sizeof(p));
  params_.upload();
  verdicts_.upload();
}

std::string DeviceCompareGradients::failure() const {
  for (const Buffer* buffer : {&params_, &verdicts_}) {
    if (std::string guards = buffer->check_guards(); !guards.empty()) return guards;
  }
  const std::vector<std::byte> bytes = verdicts_.download();
  std::vector<oracle::Verdict> verdicts(bytes.size() / sizeof(oracle::Verdict));
  std::memcpy(verdicts.data(), bytes.data(), bytes.size());
  oracle::Verdict first{};
  int64_t num_elements_seen = 0, num_bad = 0;
  for (const oracle::Verdict& v : verdicts) {
    num_elements_seen += v.num_elements;
    if (v.num_bad > 0 && (num_bad == 0 || v.first < first.first)) first = v;
    num_bad += v.num_bad;
  }
  if (num_bad == 0) return "";
  int64_t at = first.first;
  std::string place;
  for (const NamedGradient& g : gradients_) {
    const int64_t count = g.host.dtype == ATTUNE_DTYPE_NONE ? 0 : num_elements(g.host);
    if (at >= count) {
      at -= count;
      continue;
    }
    for (int axis = g.host.rank - 1; axis >= 0; at /= g.host.shape[axis--])
      place = std::to_string(at % g.host.shape[axis]) + (place.empty() ? "" : ", ") + place;
    place = std::string(g.name) + "[" + place + "]";
    break;
  }
  return std::to_string(num_bad) + " of " + std::to_string(num_elements_seen) + " elements are wrong, first " + place +
         ": expected " + text(first.expected) + ", got " + text(first.actual) + ", allowed error " + text(first.bound);
}

}  // namespace attune::cases
