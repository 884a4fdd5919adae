/* SPDX-License-Identifier: Apache-2.0 */
/* A client that was compiled with the first published header: each of its structs is set up, filled and used with
 * today's library. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixtures/attune_v1.h"

enum { kBatch = 2, kHeads = 2, kHeadDim = 8, kPages = 4, kPageSize = 4, kCached = 3 };

#define REQUIRE(condition)                                                                     \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, attune_last_error()); \
      return 1;                                                                                \
    }                                                                                          \
  } while (0)
#define OK(call) REQUIRE((call) == ATTUNE_OK)

/* A struct, and bytes behind it that the library must not touch. */
#define GUARDED(type) \
  struct {            \
    type s;           \
    char guard[64];   \
  }
#define PREPARE(x) memset(&(x), 0x5a, sizeof(x))

static const attune_device kCpu = {ATTUNE_DEVICE_CPU, 0};
static float storage[8][kPages * kPageSize * kHeads * kHeadDim];
static int32_t table[kBatch * 2] = {0, 1, 2, 3}, lengths[kBatch] = {kCached, kCached};

static int untouched(const char* guard) {
  int i;
  for (i = 0; i < 64; ++i) {
    if (guard[i] != 0x5a) return 0;
  }
  return 1;
}

static attune_tensor floats(float* data, int32_t rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  return attune_dense_tensor(data, ATTUNE_FLOAT32, rank, shape);
}

static attune_tensor integers(int32_t* data, int32_t rank, int64_t a, int64_t b) {
  const int64_t shape[2] = {a, b};
  return attune_dense_tensor(data, ATTUNE_INT32, rank, shape);
}

static attune_kv_cache cache(int with_v) {
  attune_kv_cache c;
  memset(&c, 0, sizeof c);
  c.k = floats(storage[0], 4, kPages, kPageSize, kHeads, kHeadDim);
  if (with_v) c.v = floats(storage[1], 4, kPages, kPageSize, kHeads, kHeadDim);
  c.page_table = integers(table, 2, kBatch, 2);
  return c;
}

static void* aligned(size_t bytes, void** allocation) {
  *allocation = malloc(bytes + 256);
  return (void*)(((uintptr_t)*allocation + 255) & ~(uintptr_t)255);
}

static int attends(void) {
  GUARDED(attune_attention) a;
  attune_plan* plan = NULL;
  void* allocation = NULL;
  void* workspace;
  size_t bytes = 0;
  int i;
  PREPARE(a);
  OK(attune_attention_init(&a.s, sizeof a.s));
  REQUIRE(untouched(a.guard) && a.s.window_left == -1 && a.s.window_right == -1 && a.s.allow_tf32 == 0);
  for (i = 0; i < kPages * kPageSize * kHeads * kHeadDim; ++i) storage[0][i] = 0.1f, storage[1][i] = 1;
  a.s.q = floats(storage[2], 3, kBatch, kHeads, kHeadDim, 0);
  a.s.cache = cache(1);
  a.s.seqused_kv = integers(lengths, 1, kBatch, 0);
  a.s.out = floats(storage[3], 3, kBatch, kHeads, kHeadDim, 0);
  a.s.lse = floats(storage[4], 2, kBatch, kHeads, 0, 0);
  OK(attune_supported(&a.s, kCpu));
  OK(attune_validate(&a.s, kCpu, NULL));
  OK(attune_plan_create(&a.s, kCpu, &plan));
  OK(attune_plan_workspace_size(plan, &bytes));
  workspace = aligned(bytes, &allocation);
  OK(attune_run(plan, &a.s, workspace, bytes, NULL));
  for (i = 0; i < kBatch * kHeads * kHeadDim; ++i) REQUIRE(fabsf(storage[3][i] - 1) <= 1e-6f);
  for (i = 0; i < kBatch * kHeads; ++i) REQUIRE(fabsf(storage[4][i] - logf(kCached)) <= 1e-6f); /* q is 0 */
  OK(attune_plan_destroy(plan));
  free(allocation);
  return 0;
}

static int prepares_and_moves(void) {
  GUARDED(attune_qkv_prepare) p;
  GUARDED(attune_cache_op) g;
  int i;
  PREPARE(p);
  PREPARE(g);
  OK(attune_qkv_prepare_init(&p.s, sizeof p.s));
  REQUIRE(untouched(p.guard));
  for (i = 0; i < kBatch * kHeads * kHeadDim; ++i) storage[2][i] = storage[3][i] = (float)i;
  p.s.k = floats(storage[2], 3, kBatch, kHeads, kHeadDim, 0);
  p.s.v = floats(storage[3], 3, kBatch, kHeads, kHeadDim, 0);
  p.s.cache = cache(1);
  p.s.seqused_kv = integers(lengths, 1, kBatch, 0);
  p.s.prologue.append = 1;
  OK(attune_qkv_prepare_run(&p.s, kCpu, NULL));

  OK(attune_cache_op_init(&g.s, sizeof g.s));
  REQUIRE(untouched(g.guard));
  g.s.kind = ATTUNE_CACHE_DEQUANTIZE;
  g.s.cache = cache(1);
  memset(&g.s.cache.page_table, 0, sizeof g.s.cache.page_table);
  g.s.k = floats(storage[4], 3, kPages * kPageSize, kHeads, kHeadDim, 0);
  g.s.v = floats(storage[5], 3, kPages * kPageSize, kHeads, kHeadDim, 0);
  OK(attune_cache_op_run(&g.s, kCpu, NULL));
  for (i = 0; i < kHeads * kHeadDim; ++i) { /* token kCached of sequence 1 is in its page 2 */
    REQUIRE(storage[5][(2 * kPageSize + kCached) * kHeads * kHeadDim + i] == (float)(kHeads * kHeadDim + i));
  }
  return 0;
}

static int merges(void) {
  GUARDED(attune_merge) m;
  PREPARE(m);
  OK(attune_merge_init(&m.s, sizeof m.s));
  REQUIRE(untouched(m.guard));
  storage[2][0] = 1, storage[2][1] = 3;
  storage[3][0] = storage[3][1] = 0;
  m.s.partial_out = floats(storage[2], 4, 2, 1, 1, 1);
  m.s.partial_lse = floats(storage[3], 3, 2, 1, 1, 0);
  m.s.out = floats(storage[4], 3, 1, 1, 1, 0);
  OK(attune_merge_run(&m.s, kCpu, NULL));
  REQUIRE(fabsf(storage[4][0] - 2) <= 1e-6f);
  return 0;
}

static int chooses(void) {
  GUARDED(attune_indexer) x;
  int32_t chosen[kBatch * 2];
  void* allocation = NULL;
  void* workspace;
  size_t bytes = 0;
  int i;
  PREPARE(x);
  OK(attune_indexer_init(&x.s, sizeof x.s));
  REQUIRE(untouched(x.guard));
  for (i = 0; i < kPages * kPageSize * kHeadDim; ++i) storage[0][i] = (float)(i / kHeadDim); /* later keys score more */
  for (i = 0; i < kBatch * kHeadDim; ++i) storage[2][i] = storage[3][i] = 1;
  x.s.q = floats(storage[2], 3, kBatch, 1, kHeadDim, 0);
  x.s.weights = floats(storage[3], 2, kBatch, 1, 0, 0);
  x.s.cache.k = floats(storage[0], 4, kPages, kPageSize, 1, kHeadDim);
  x.s.cache.page_table = integers(table, 2, kBatch, 2);
  x.s.seqused_kv = integers(lengths, 1, kBatch, 0);
  x.s.indices = integers(chosen, 2, kBatch, 2);
  OK(attune_indexer_workspace_size(&x.s, kCpu, &bytes));
  workspace = aligned(bytes, &allocation);
  OK(attune_indexer_run(&x.s, kCpu, workspace, bytes, NULL));
  REQUIRE(chosen[0] == 1 && chosen[1] == 2 && chosen[2] == 9 && chosen[3] == 10);
  free(allocation);
  return 0;
}

static int turns(void) {
  GUARDED(attune_rope) r;
  double frequencies[4];
  PREPARE(r);
  OK(attune_rope_init(&r.s, sizeof r.s));
  REQUIRE(untouched(r.guard) && r.s.theta == 10000 && r.s.high_freq_factor == 4);
  r.s.dim = 8;
  OK(attune_rope_frequencies(&r.s, frequencies));
  REQUIRE(frequencies[0] == 1 && fabs(frequencies[2] - 0.01) <= 1e-12);
  OK(attune_rope_table(&r.s, 0, 1, storage[2]));
  REQUIRE(storage[2][0] == 1 && storage[2][4] == 0);
  return 0;
}

static int asks(void) {
  GUARDED(attune_device_info) d;
  GUARDED(attune_kernel_info) k;
  PREPARE(d);
  PREPARE(k);
  d.s.struct_size = sizeof d.s;
  OK(attune_get_device_info(0, &d.s));
  REQUIRE(untouched(d.guard) && d.s.struct_size == sizeof d.s && d.s.num_units >= 1 && d.s.memory_bytes > 0);
  k.s.struct_size = sizeof k.s;
  OK(attune_get_kernel_info(0, &k.s));
  REQUIRE(untouched(k.guard) && strcmp(k.s.name, "cpu_attention") == 0 && strlen(k.s.coverage) > 100);
  return 0;
}

int main(void) {
  REQUIRE(attends() == 0);
  REQUIRE(prepares_and_moves() == 0);
  REQUIRE(merges() == 0);
  REQUIRE(chooses() == 0);
  REQUIRE(turns() == 0);
  REQUIRE(asks() == 0);
  return 0;
}
