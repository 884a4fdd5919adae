// SPDX-License-Identifier: Apache-2.0
#include "case.h"
#include "number.h"

namespace attune::cases {

Case random_backward_case(uint64_t seed) {
  Random random("backward", seed);
  Case c;
  c.area = "backward";
  c.name = "backward/random/" + std::to_string(seed);
  c.backward.on = true;
  c.dtype = random.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16});
  c.num_heads_kv = random.integer(1, 3);
  c.num_heads_q = c.num_heads_kv * random.pick<int64_t>({1, 1, 2, 3, 5});
  c.head_dim_qk = random.chance(0.5) ? random.pick<int64_t>({16, 64, 128}) : random.integer(1, 96);
  c.head_dim_v = random.chance(0.6) ? c.head_dim_qk : random.integer(1, 96);
  c.queries = random.pick<QueryShape>({QueryShape::kRagged, QueryShape::kRagged, QueryShape::kFixed});
  c.strides = random.pick<StrideMode>({StrideMode::kDense, StrideMode::kOdd, StrideMode::kTransposed});
  const int64_t batch = random.integer(1, 4), longest = random.pick<int64_t>({5, 40, 150, 300});
  const int64_t same = random.integer(0, longest);
  for (int64_t b = 0; b < batch; ++b) {
    c.seqlens_q.push_back(c.queries == QueryShape::kFixed ? same : random.integer(0, longest));
    c.seqlens_kv.push_back(random.integer(0, longest));
  }
  c.seqused = random.chance(0.2);
  c.causal = random.chance(0.5);
  if (random.chance(0.3)) c.window_left = random.integer(0, longest);
  if (random.chance(0.2)) c.window_right = random.integer(0, longest);
  if (random.chance(0.15)) c.mask_bits = static_cast<int>(random.integer(1, 2));
  if (random.chance(0.15)) {
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t first = random.integer(0, longest);
      c.ranges.push_back({first, random.integer(first, longest)});
    }
  }
  if (random.chance(0.2)) c.softcap = random.uniform(1, 20);
  if (random.chance(0.1)) c.softmax_scale = random.uniform(-0.3, 0.3);
  if (random.chance(0.2)) c.alibi = static_cast<int>(random.integer(1, 2));
  if (random.chance(0.2)) c.bias = static_cast<int>(random.integer(1, 2));
  if (random.chance(0.2)) {
    c.t5_buckets = 16;
    c.t5_bidirectional = random.chance(0.5);
  }
  if (random.chance(0.3)) c.sinks = random.pick<std::string>({"normal", "mixed"});
  c.aux_dtype = random.pick<std::string>({"f32", "bf16"});
  c.backward.dlse = random.chance(0.3);
  if (random.chance(0.3)) c.backward.dtype = ATTUNE_FLOAT32;
  if (random.chance(0.2)) c.backward.outputs = {random.pick<std::string>({"dq", "dk", "dv"})};
  return c;
}

}  // namespace attune::cases
