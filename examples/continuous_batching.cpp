// SPDX-License-Identifier: Apache-2.0
// A continuous-batching engine in small: requests come and go, and each step batches chunks of prompts with decoding
// sequences. The model is a toy with random weights. The tokens of every request must be those of a loop that serves it
// alone, with plain attention in double and no cache. docs/engine.md explains the parts.
#include <attune/attune.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kVocab = 97, kHidden = 64, kLayers = 2, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 32;
constexpr int64_t kRowQ = kHeadsQ * kHeadDim, kRowKv = kHeadsKv * kHeadDim, kRowQkv = kRowQ + 2 * kRowKv;
constexpr int64_t kPageSize = 16, kPages = 12, kMaxPages = 6;  // the pool of a layer, and the most pages of a sequence
constexpr int64_t kSlots = 4, kBudget = 24;                    // most sequences of a step, and most new tokens
constexpr double kTheta = 10000;

using Tokens = std::vector<int32_t>;

// ------------------------------------------------------------------------------------------------------ the toy model

std::vector<float> random_floats(int64_t count, double deviation, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(normal(engine));
  return values;
}

struct Weights {
  std::vector<float> embedding = random_floats(kVocab * kHidden, 1, 1);
  std::vector<float> qkv = random_floats(kLayers * kHidden * kRowQkv, 2 / std::sqrt(kHidden), 2);
  std::vector<float> out = random_floats(kLayers * kRowQ * kHidden, 1 / std::sqrt(kRowQ), 3);
  std::vector<float> head = random_floats(kHidden * kVocab, 1, 4);
};

// y [rows, out] = x [rows, in] w [in, out]
template <class T>
std::vector<T> matmul(const std::vector<T>& x, const float* w, int64_t in, int64_t out) {
  const int64_t rows = static_cast<int64_t>(x.size()) / in;
  std::vector<T> y(static_cast<size_t>(rows * out));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t o = 0; o < out; ++o) y[r * out + o] += x[r * in + i] * static_cast<T>(w[i * out + o]);
    }
  }
  return y;
}

template <class T>
std::vector<T> normalised(std::vector<T> x) {
  for (size_t r = 0; r < x.size(); r += kHidden) {
    T sum = 0;
    for (int64_t i = 0; i < kHidden; ++i) sum += x[r + i] * x[r + i];
    for (int64_t i = 0; i < kHidden; ++i) x[r + i] /= std::sqrt(sum / kHidden);
  }
  return x;
}

// attend(layer, qkv [tokens, kRowQkv]) gives [tokens, kRowQ].
template <class T>
using Attend = std::function<std::vector<T>(int64_t, const std::vector<T>&)>;

// The best next token behind each of these.
template <class T>
Tokens forward(const Weights& w, const Tokens& tokens, const Attend<T>& attend) {
  std::vector<T> x;
  for (const int32_t token : tokens) {
    x.insert(x.end(), &w.embedding[token * kHidden], &w.embedding[token * kHidden] + kHidden);
  }
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const auto qkv = matmul(normalised(x), &w.qkv[layer * kHidden * kRowQkv], kHidden, kRowQkv);
    const auto y = matmul(attend(layer, qkv), &w.out[layer * kRowQ * kHidden], kRowQ, kHidden);
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  const auto logits = matmul(normalised(x), w.head.data(), kHidden, kVocab);
  Tokens best;
  for (auto row = logits.begin(); row != logits.end(); row += kVocab) {
    best.push_back(static_cast<int32_t>(std::max_element(row, row + kVocab) - row));
  }
  return best;
}

// --------------------------------------------------------------------------------------------------------- the engine

struct Request {
  int64_t arrives = 0;  // the step
  Tokens prompt;
  int64_t max_new = 0;
  Tokens tokens;       // prompt and answer
  int32_t cached = 0;  // how many of them are in the cache
  std::vector<int32_t> pages;
  int64_t new_tokens() const { return static_cast<int64_t>(tokens.size()) - cached; }
};

class Engine {
 public:
  Engine() {
    std::iota(free_.begin(), free_.end(), 0);
    // One plan for the largest step: it takes smaller ones, and every layer.
    a_.cu_seqlens_q = attune::dense(starts_.data(), {kSlots + 1});
    a_.seqused_kv = attune::dense(lengths_.data(), {kSlots});
    a_.cache.page_table = attune::dense(table_.data(), {kSlots, kMaxPages});
    a_.causal = 1;
    a_.max_seqlen_q = kBudget;
    a_.prologue.rope_cos_sin = attune::dense(cos_sin_.data(), {kMaxPages * kPageSize, kHeadDim});
    a_.prologue.append = 1;
    set_layer(0, nullptr, nullptr, kBudget);  // planning reads no data
    plan_.emplace(a_);
    workspace_.emplace(plan_->workspace_size());
  }

  // Requests get a slot and all pages that they may need; others wait.
  void admit(std::vector<Request*>& waiting) {
    for (int64_t i = 0; i < kSlots; ++i) {
      if (slots_[i] != nullptr || waiting.empty()) continue;
      Request& request = *waiting.front();
      const int64_t most = static_cast<int64_t>(request.prompt.size()) + request.max_new;
      const int64_t pages = (most + kPageSize - 1) / kPageSize;
      if (pages > static_cast<int64_t>(free_.size())) return;
      slots_[i] = &request;
      waiting.erase(waiting.begin());
      request.tokens = request.prompt;
      request.pages.assign(free_.end() - pages, free_.end());
      free_.resize(free_.size() - pages);
      std::copy(request.pages.begin(), request.pages.end(), &table_[i * kMaxPages]);
    }
  }

  // One pass of the model. True if a sequence decoded beside a chunk of a prompt.
  bool step(const Weights& weights) {
    int64_t count[kSlots] = {}, left = kBudget, decoding = 0, prompts = 0;
    for (const bool decode : {true, false}) {  // decoding sequences first, prompts share what is left
      for (int64_t i = 0; i < kSlots; ++i) {
        if (slots_[i] == nullptr || (slots_[i]->new_tokens() == 1) != decode) continue;
        count[i] = std::min(left, slots_[i]->new_tokens());
        left -= count[i];
        (decode ? decoding : prompts) += count[i] > 0;
      }
    }
    Tokens tokens;
    for (int64_t i = 0; i < kSlots; ++i) {
      lengths_[i] = slots_[i] != nullptr ? slots_[i]->cached : 0;  // before this step's tokens
      starts_[i + 1] = starts_[i] + static_cast<int32_t>(count[i]);
      if (count[i] == 0) continue;
      const auto first = slots_[i]->tokens.begin() + slots_[i]->cached;
      tokens.insert(tokens.end(), first, first + count[i]);
    }
    if (tokens.empty()) return false;

    const Tokens best = forward<float>(weights, tokens, [this](int64_t layer, const std::vector<float>& qkv) {
      const int64_t rows = static_cast<int64_t>(qkv.size()) / kRowQkv;
      std::vector<float> out(static_cast<size_t>(rows * kRowQ));
      set_layer(layer, qkv.data(), out.data(), rows);
      if (layer == 0) plan_->schedule(a_, *workspace_);  // once a step: all layers have these lengths
      plan_->run_scheduled(a_, *workspace_);             // RoPE, append to the cache, and attention over it
      return out;
    });

    for (int64_t i = 0; i < kSlots; ++i) {
      if (count[i] == 0) continue;
      Request& request = *slots_[i];
      request.cached += static_cast<int32_t>(count[i]);
      if (request.new_tokens() > 0) continue;  // more of the prompt is to come
      request.tokens.push_back(best[starts_[i + 1] - 1]);
      if (static_cast<int64_t>(request.tokens.size() - request.prompt.size()) < request.max_new) continue;
      free_.insert(free_.end(), request.pages.begin(), request.pages.end());
      slots_[i] = nullptr;
    }
    return decoding > 0 && prompts > 0;
  }

  bool idle() const {
    return std::all_of(slots_, slots_ + kSlots, [](const Request* request) { return request == nullptr; });
  }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }

 private:
  // q, k and v are columns of one buffer [rows, kRowQkv].
  void set_layer(int64_t layer, const float* qkv, float* out, int64_t rows) {
    const auto columns = [&](int64_t first, int64_t heads) {
      return attune::strided(qkv == nullptr ? nullptr : qkv + first, ATTUNE_FLOAT32, {rows, heads, kHeadDim},
                             {kRowQkv, kHeadDim, 1});
    };
    a_.q = columns(0, kHeadsQ);
    a_.k = columns(kRowQ, kHeadsKv);
    a_.v = columns(kRowQ + kRowKv, kHeadsKv);
    a_.cache.k = attune::dense(&cache_k_[layer * kPages * kPageSize * kRowKv], {kPages, kPageSize, kHeadsKv, kHeadDim});
    a_.cache.v = attune::dense(&cache_v_[layer * kPages * kPageSize * kRowKv], {kPages, kPageSize, kHeadsKv, kHeadDim});
    a_.out = attune::dense(out, {rows, kHeadsQ, kHeadDim});
  }

  static std::vector<float> rope_table() {
    attune::Rope rope;
    rope.style = ATTUNE_ROPE_LINEAR;
    rope.dim = kHeadDim;
    rope.theta = kTheta;
    return rope.table(kMaxPages * kPageSize);
  }

  std::vector<float> cos_sin_ = rope_table();
  std::vector<float> cache_k_ = std::vector<float>(kLayers * kPages * kPageSize * kRowKv), cache_v_ = cache_k_;
  std::vector<int32_t> starts_ = std::vector<int32_t>(kSlots + 1), lengths_ = std::vector<int32_t>(kSlots);
  std::vector<int32_t> table_ = std::vector<int32_t>(kSlots * kMaxPages), free_ = std::vector<int32_t>(kPages);
  Request* slots_[kSlots] = {};
  attune::Attention a_;
  std::optional<attune::Plan> plan_;
  std::optional<attune::Workspace> workspace_;
};

// --------------------------------------------------------------------------------------------------------- the check

// Turns the heads of a row as the token at this position.
void turn(double* row, int64_t heads, int64_t position) {
  for (int64_t h = 0; h < heads; ++h, row += kHeadDim) {
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
      const double angle = static_cast<double>(position) * std::pow(kTheta, -2.0 * static_cast<double>(i) / kHeadDim);
      const double x = row[i], y = row[i + kHeadDim / 2];
      row[i] = std::cos(angle) * x - std::sin(angle) * y;
      row[i + kHeadDim / 2] = std::cos(angle) * y + std::sin(angle) * x;
    }
  }
}

std::vector<double> plain_attention(std::vector<double> qkv) {
  const int64_t rows = static_cast<int64_t>(qkv.size()) / kRowQkv;
  std::vector<double> out(static_cast<size_t>(rows * kRowQ));
  for (int64_t r = 0; r < rows; ++r) turn(&qkv[r * kRowQkv], kHeadsQ + kHeadsKv, r);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < kHeadsQ; ++h) {
      const int64_t head_kv = h / (kHeadsQ / kHeadsKv);
      double sum = 0, *to = &out[r * kRowQ + h * kHeadDim];
      for (int64_t j = 0; j <= r; ++j) {
        const double* q = &qkv[r * kRowQkv + h * kHeadDim];
        const double* k = &qkv[j * kRowQkv + kRowQ + head_kv * kHeadDim];
        const double p = std::exp(std::inner_product(q, q + kHeadDim, k, 0.0) / std::sqrt(kHeadDim));
        sum += p;
        for (int64_t d = 0; d < kHeadDim; ++d) to[d] += p * k[kRowKv + d];
      }
      for (int64_t d = 0; d < kHeadDim; ++d) to[d] /= sum;
    }
  }
  return out;
}

// The same tokens one at a time, everything computed again for each.
Tokens alone(const Weights& weights, const Request& request) {
  Tokens tokens = request.prompt;
  for (int64_t i = 0; i < request.max_new; ++i) {
    const auto attend = [](int64_t, const std::vector<double>& qkv) { return plain_attention(qkv); };
    tokens.push_back(forward<double>(weights, tokens, attend).back());
  }
  return tokens;
}

int run() {
  const Weights weights;
  std::vector<Request> requests;
  std::mt19937 random(5);
  const int64_t shapes[][3] = {{0, 5, 20}, {0, 40, 6},  {2, 1, 30},  {3, 33, 9},
                               {3, 17, 1}, {9, 60, 12}, {10, 8, 25}, {60, 30, 3}};
  for (const auto& [arrives, prompt, max_new] : shapes) {
    Tokens tokens(static_cast<size_t>(prompt));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
    requests.push_back({arrives, tokens, max_new, {}, 0, {}});
  }

  Engine engine;
  std::vector<Request*> waiting;
  int64_t steps = 0, mixed = 0;
  for (size_t next = 0; next < requests.size() || !waiting.empty() || !engine.idle(); ++steps) {
    while (next < requests.size() && requests[next].arrives <= steps) waiting.push_back(&requests[next++]);
    engine.admit(waiting);
    mixed += engine.step(weights);
  }

  for (const Request& request : requests) {
    if (request.tokens != alone(weights, request)) {
      std::printf("the request of step %lld has other tokens than alone\n", static_cast<long long>(request.arrives));
      return 1;
    }
  }
  std::printf("%zu requests in %lld steps, %lld with prompts and decoding side by side: the tokens of each alone\n",
              requests.size(), static_cast<long long>(steps), static_cast<long long>(mixed));
  return mixed > 3 && engine.free_pages() == kPages ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& e) {  // attune::Error among them, with its status
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
