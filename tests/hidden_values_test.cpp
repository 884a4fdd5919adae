// SPDX-License-Identifier: Apache-2.0
// A key whose score is -inf counts for nothing, whatever its value holds: on every instruction set of this machine.
#include <cmath>
#include <functional>
#include <limits>

#include "cpu/kernels.h"
#include "support.h"

namespace attune::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Index = const int64_t*;

void fill(const attune_tensor& t, const std::function<double(Index)>& value) {
  cases::for_each_element(
      t, [&](Index at, void* element) { cases::encode(static_cast<attune_dtype>(t.dtype), value(at), element); });
}

bool is_hidden(int64_t key) { return key % 5 == 3; }

// The values of hidden keys to NaN: axis `axis` of t counts keys.
void spoil_hidden(const attune_tensor& t, int axis, double with) {
  cases::for_each_element(t, [&](Index at, void* element) {
    if (is_hidden(at[axis])) cases::encode(static_cast<attune_dtype>(t.dtype), with, element);
  });
}

// The case after edit, against the oracle, on every instruction set.
void check(const cases::Row& row, const std::function<void(const attune_attention&)>& edit) {
  const cases::Case spec = make_case(row.set("max_logits", true));
  int count = 0;
  const char* const* names = cpu::isa_names(&count);
  for (int i = 0; i < count; ++i) {
    ASSERT_TRUE(cpu::force_isa(names[i]));
    cases::Problem problem(spec);
    edit(problem.host());
    for (const auto& buffer : problem.arena().buffers()) buffer->upload();
    const cases::Expected expected = cases::evaluate(problem);
    plan_and_run(problem.device());
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << names[i] << ": " << row.text();
  }
  EXPECT_TRUE(cpu::force_isa(nullptr));
}

// A contiguous cache has keys on axis 1; one sequence of dense rows on axis 0.
struct Keys {
  const char* row;
  int axis;
};
const Keys kKeys[] = {
    {R"("kv": "contiguous", "queries": "fixed", "seqlens_kv": [170, 70])", 1},
    {R"("kv": "contiguous", "queries": "fixed", "seqlens_kv": [170, 70], "cache": {"dtype": "e4m3", "scales": "token"})",
     1},
    {R"("kv": "contiguous", "queries": "fixed", "seqlens_q": [40, 40], "seqlens_kv": [300, 70])", 1},
    {R"("kv": "dense", "seqlens_q": [150], "seqlens_kv": [150])", 0},
    {R"("kv": "dense", "seqlens_q": [150], "seqlens_kv": [150], "causal": true)", 0},
};

const attune_tensor& values(const attune_attention& a) { return a.cache.v.rank > 0 ? a.cache.v : a.v; }

class HiddenValues : public testing::TestWithParam<const char*> {
 protected:
  // members: what the test adds to the shape.
  static cases::Row row_with(std::string_view members) {
    return cases::Row(R"("heads": [4, 2], "head_dim": [64, 64])").set("dtype", GetParam()).with(members);
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, HiddenValues, testing::Values("f32", "f16", "bf16"),
                         [](const auto& info) { return info.param; });

TEST_P(HiddenValues, ByBiases) {
  for (const Keys& keys : kKeys) {
    for (const double with : {std::nan(""), kInfinity}) {
      if (with == kInfinity && std::string(keys.row).find("e4m3") != std::string::npos) continue;
      check(row_with(keys.row).set("bias", 1), [&](const attune_attention& a) {
        fill(a.bias, [](Index at) { return is_hidden(at[2]) ? -kInfinity : 0.01 * static_cast<double>(at[2] % 7); });
        spoil_hidden(values(a), keys.axis, with);
      });
    }
  }
}

// Every key of some rows: they see nothing.
TEST_P(HiddenValues, WholeRowsByBiases) {
  check(row_with(R"("bias": 1, "kv": "dense", "seqlens_q": [150], "seqlens_kv": [150])"),
        [&](const attune_attention& a) {
          fill(a.bias, [](Index at) { return is_hidden(at[2]) || at[1] % 3 == 1 ? -kInfinity : 0.0; });
          spoil_hidden(a.v, 0, std::nan(""));
        });
}

// The last queries of a sequence see what lies close behind them: keys that are far get -inf from the table.
TEST_P(HiddenValues, ByTheT5Table) {
  for (const char* lengths : {R"("seqlens_q": [1, 1])", R"("seqlens_q": [4, 4])"}) {
    check(row_with(R"("kv": "contiguous", "queries": "fixed", "t5_buckets": 32, "t5_max_distance": 128,
                      "seqlens_kv": [300, 300])")
              .with(lengths),
          [&](const attune_attention& a) {
            fill(a.t5_bias, [](Index at) { return at[1] >= 28 ? -kInfinity : 0.1 * static_cast<double>(at[1]); });
            cases::for_each_element(a.cache.v, [&](Index at, void* element) {
              if (at[1] < 100) cases::encode(static_cast<attune_dtype>(a.cache.v.dtype), std::nan(""), element);
            });
          });
  }
}

TEST_P(HiddenValues, ByTreesOfNewTokens) {
  check(row_with(R"("kv": "paged", "new_tokens": true, "new_token_bias": true, "seqlens_q": [5], "seqlens_kv": [70])"),
        [&](const attune_attention& a) {
          fill(a.new_token_bias, [](Index at) { return at[1] == 2 ? -kInfinity : 0.125; });
          cases::for_each_element(a.v, [&](Index at, void* element) {
            if (at[0] == 2) cases::encode(static_cast<attune_dtype>(a.v.dtype), std::nan(""), element);
          });
        });
}

// An infinity in a key makes its score -inf where the query is negative there.
TEST_P(HiddenValues, ByInfinitiesInKeys) {
  for (const char* queries : {R"("seqlens_q": [150])", R"("seqlens_q": [3])"}) {
    check(row_with(R"("kv": "dense", "seqlens_kv": [150])").with(queries), [&](const attune_attention& a) {
      fill(a.q, [](Index at) { return at[2] == 5 ? -1.0 : 0.03 * static_cast<double>(at[2] % 9 - 4); });
      cases::for_each_element(a.k, [&](Index at, void* element) {
        if (is_hidden(at[0]) && at[2] == 5) cases::encode(static_cast<attune_dtype>(a.k.dtype), kInfinity, element);
      });
      spoil_hidden(a.v, 0, std::nan(""));
    });
  }
}

// A NaN among visible scores is in out, lse and max_logits, but max_logits is +inf where another score is.
TEST_P(HiddenValues, NanBesideAnInfiniteScore) {
  for (const char* queries : {R"("seqlens_q": [150])", R"("seqlens_q": [3])"}) {
    for (const int64_t infinite : {2, 140}) {
      check(row_with(R"("kv": "dense", "seqlens_kv": [150])").with(queries), [&](const attune_attention& a) {
        fill(a.q, [](Index at) { return at[2] == 5 ? 1.0 : 0.03 * static_cast<double>(at[2] % 9 - 4); });
        cases::for_each_element(a.k, [&](Index at, void* element) {
          if (at[2] != 5 || (at[0] != infinite && at[0] != 70)) return;
          cases::encode(static_cast<attune_dtype>(a.k.dtype), at[0] == 70 ? std::nan("") : kInfinity, element);
        });
      });
    }
  }
}

}  // namespace
}  // namespace attune::tests
