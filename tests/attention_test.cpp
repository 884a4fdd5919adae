// SPDX-License-Identifier: Apache-2.0
// Every case of the table on the CPU against the float64 oracle, and random ones. One test is a slice of an area, so
// that ctest starts few processes; a failure names its case, and ATTUNE_CASE=<part of a name> runs only the cases that
// contain it.
#include <map>
#include <set>

#include "picked_cases.h"
#include "support.h"

namespace attune::tests {
namespace {

constexpr int kRandomAttentionCases = 300, kRandomMlaCases = 120;

const std::vector<cases::Case>& table() {
  static const std::vector<cases::Case> all = [] {
    std::vector<cases::Case> list = cases::all_cases();
    for (int seed = 0; seed < kRandomAttentionCases; ++seed)
      list.push_back(cases::random_case(static_cast<uint64_t>(seed)));
    for (int seed = 0; seed < kRandomMlaCases; ++seed)
      list.push_back(cases::random_mla_case(static_cast<uint64_t>(seed)));
    return list;
  }();
  return all;
}

// A slice of an area: every `of`-th of its cases. Their numbers stand here as the table takes long to read, for each
// test.
struct Shard {
  const char* area;
  int index, of;
};

std::vector<Shard> shards() {
  constexpr Shard kAreas[] = {{"decode", 0, 3},  {"edge", 0, 2},     {"masks", 0, 2},  {"mla", 0, 2},
                              {"prefill", 0, 7}, {"prologue", 0, 2}, {"sparse", 0, 1}, {"random", 0, 10}};
  std::vector<Shard> list;
  for (Shard shard : kAreas) {
    for (; shard.index < shard.of; ++shard.index) list.push_back(shard);
  }
  return list;
}

class Attention : public testing::TestWithParam<Shard> {};

TEST_P(Attention, MatchesTheOracle) {
  int index = 0;
  for (const cases::Case& spec : table()) {
    if (spec.area != GetParam().area || index++ % GetParam().of != GetParam().index) continue;
    if (!is_picked(spec)) continue;
    const cases::Report report = cases::run_case(spec);
    EXPECT_TRUE(report.passed()) << spec.name << ": " << report.failure;
  }
  EXPECT_GE(index, GetParam().of);
}

INSTANTIATE_TEST_SUITE_P(Table, Attention, testing::ValuesIn(shards()),
                         [](const auto& info) { return info.param.area + ("_" + std::to_string(info.param.index)); });

TEST(CaseTable, IsInSlicesAsAWhole) {
  std::set<std::string> areas;
  for (const Shard& shard : shards()) areas.insert(shard.area);
  for (const cases::Case& spec : table()) EXPECT_EQ(areas.count(spec.area), 1) << spec.name;
}

TEST(CaseTable, HasNoAccidentalGaps) {
  std::map<std::string, int> areas;
  for (const cases::Case& spec : cases::all_cases()) ++areas[spec.area];
  for (const char* area : {"decode", "prefill", "mla", "sparse", "prologue", "masks", "edge"})
    EXPECT_GT(areas[area], 20) << area;
  EXPECT_GE(cases::bench_cases().size(), 20u);
}

TEST(CaseTable, RejectsUnknownKeysAndValues) {
  const auto parse = [](const char* row) {
    cases::parse_cases(std::string(R"({"area": "a", "cases": [)") + row + "]}");
  };
  EXPECT_THROW(parse(R"({"name": "x", "sequlens_q": [1]})"), std::runtime_error);
  EXPECT_THROW(parse(R"({"name": "x", "kv": "cloud"})"), std::runtime_error);
  EXPECT_THROW(parse(R"({"name": "x", "cache": {"page": 3}})"), std::runtime_error);
  EXPECT_THROW(parse(R"({"name": "x", "causal": [1]})"), std::runtime_error);
  EXPECT_THROW(parse(R"({"name": "x", "heads": [32]})"), std::runtime_error);
  EXPECT_THROW(parse(R"({"name": "x", "window": [1, 2, 3]})"), std::runtime_error);
  EXPECT_NO_THROW(parse(R"({"name": "x", "seqlens_q": [3], "sweep": {"causal": [true, false]}})"));
}

// The comparison itself must fail on small mistakes: one key too many or too few, one bit of a row that must stay
// untouched.
class Comparison : public testing::TestWithParam<const char*> {};

TEST_P(Comparison, SeesOneKeyMoreOrLess) {
  const std::string dtype = GetParam();
  const cases::Case spec = make_case(
      cases::Row(R"("name": "shift", "heads": [4, 2], "kv": "paged", "seqlens_kv": [100, 64])").set("dtype", dtype));
  for (const int32_t shift : {-1, 1}) {
    cases::Problem problem(spec);
    // Either the oracle or the library counts one token less.
    Int32Vector shorter({99, 64});
    const attune_tensor lengths = problem.host().seqused_kv;
    if (shift > 0) problem.host().seqused_kv = shorter.tensor();
    const cases::Expected expected = cases::evaluate(problem);
    problem.host().seqused_kv = lengths;
    attune_attention device = problem.device();
    if (shift < 0) device.seqused_kv = shorter.tensor();
    plan_and_run(device);
    EXPECT_FALSE(cases::compare(problem, expected).passed()) << "a shift of " << shift << " went unnoticed";
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Comparison, testing::Values("f32", "f16", "bf16"),
                         [](const auto& info) { return info.param; });

TEST(ComparisonOfBytes, SeesWritesWhereNothingMayBeWritten) {
  const cases::Case spec = make_case(
      R"({"name": "x", "heads": [2, 1], "kv": "paged", "seqlens_kv": [20, 3], "strides": "odd", "finished": [0, 1]})");
  for (const int where : {0, 1, 2}) {
    cases::Problem problem(spec);
    const cases::Expected expected = cases::evaluate(problem);
    plan_and_run(problem.device());
    EXPECT_TRUE(cases::compare(problem, expected).passed());
    const attune_attention device = problem.device();
    const attune_tensor& target = where == 0 ? device.out : where == 1 ? device.cache.k : device.q;
    // The last row of out belongs to a finished sequence; the others are inputs.
    auto* bytes = static_cast<unsigned char*>(where == 0 ? cases::element_at(target, {1, 0, 0}) : target.data);
    bytes[0] ^= 1;
    EXPECT_FALSE(cases::compare(problem, expected).passed()) << "where " << where;
  }
}

}  // namespace
}  // namespace attune::tests
