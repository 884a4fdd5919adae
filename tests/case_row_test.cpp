// SPDX-License-Identifier: Apache-2.0
// Rows of cases that are put together from parts.
#include <gtest/gtest.h>

#include <stdexcept>

#include "cases/row.h"
#include "support.h"

namespace attune::tests {
namespace {

TEST(CaseRow, LaterMembersReplaceEarlierOnes) {
  const cases::Row common(R"("dtype": "bf16", "cache": {"page_size": 16, "x": 8})");
  EXPECT_EQ(common.text(), R"({"cache":{"page_size":16,"x":8},"dtype":"bf16","name":"x"})");
  EXPECT_EQ(common.with(R"("name": "y", "cache": {"page_size": 64})").text(),
            R"({"cache":{"page_size":64},"dtype":"bf16","name":"y"})");
  EXPECT_EQ(common.with("").text(), common.text());
  EXPECT_EQ(common.set("dtype", "f16").text(), R"({"cache":{"page_size":16,"x":8},"dtype":"f16","name":"x"})");
}

TEST(CaseRow, SetsValuesOfAllKinds) {
  const std::vector<int64_t> lengths = {3, 0, 5};
  EXPECT_EQ(cases::Row()
                .set("causal", true)
                .set("softcap", 0.1)
                .set("batch", 3)
                .set("dtype", "f16")
                .set("heads", {4, 2})
                .set("seqlens_q", lengths)
                .text(),
            R"({"batch":3,"causal":true,"dtype":"f16","heads":[4,2],"name":"x","seqlens_q":[3,0,5],"softcap":0.1})");
  EXPECT_EQ(cases::Row(R"("cache": {"page_size": 16})").set("cache.dtype", "e4m3").set("sparse.topk", 9).text(),
            R"({"cache":{"dtype":"e4m3","page_size":16},"name":"x","sparse":{"topk":9}})");
}

TEST(CaseRow, RefusesWhatIsNotJson) {
  EXPECT_THROW(cases::Row(R"("heads": [4)"), std::runtime_error);
  EXPECT_THROW((void)cases::Row().with(R"("causal": true, )"), std::runtime_error);
  EXPECT_THROW((void)cases::Row().with(R"({"causal": true})"), std::runtime_error);
}

TEST(CaseRow, RefusesPackedRowsThatCannotBe) {
  const cases::Row packed(R"("heads": [2, 1], "head_dim": [8, 8], "seqlens_q": [3, 5], "strides": "packed")");
  EXPECT_NO_THROW(make_case(packed));
  EXPECT_THROW(make_case(packed.set("head_dim", {8, 4})), std::runtime_error);
  EXPECT_THROW(make_case(packed.set("seqlens_kv", {3, 6})), std::runtime_error);
  EXPECT_THROW(make_case(packed.set("seqused", true)), std::runtime_error);
  EXPECT_NO_THROW(make_case(packed.with(R"("kv": "paged", "new_tokens": true, "seqlens_kv": [3, 6])")));
}

TEST(CaseRow, BecomesACase) {
  const cases::Case c = make_case(cases::Row(R"("heads": [4, 2], "seqlens_q": [3, 5])").set("dtype", "bf16"));
  EXPECT_EQ(c.name, "test/x");
  EXPECT_EQ(c.num_heads_q, 4);
  EXPECT_EQ(c.seqlens_q, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(c.dtype, ATTUNE_BFLOAT16);
}

}  // namespace
}  // namespace attune::tests
