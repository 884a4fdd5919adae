/* SPDX-License-Identifier: Apache-2.0 */
/* The headers are C99, and the library can be called from C: one small decode, a table, and one refused descriptor. */
#include <attune/ops.h> /* alone: it brings attune.h */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 8, kKeys = 5 };

#define REQUIRE(condition)                                                                     \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, attune_last_error()); \
      return 1;                                                                                \
    }                                                                                          \
  } while (0)

static int refuses_a_wrong_shape(void) {
  attune_attention a;
  attune_device cpu = {ATTUNE_DEVICE_CPU, 0};
  REQUIRE(attune_attention_init(&a, sizeof a) == ATTUNE_OK);
  REQUIRE(attune_supported(&a, cpu) == ATTUNE_INVALID_ARGUMENT); /* q is absent */
  REQUIRE(strstr(attune_last_error(), "q") != NULL);
  REQUIRE(attune_attention_init(NULL, sizeof a) == ATTUNE_INVALID_ARGUMENT);
  REQUIRE(attune_plan_destroy(NULL) == ATTUNE_OK);
  return 0;
}

static int attends(void) {
  const int64_t q_shape[3] = {1, kHeadsQ, kHeadDim};
  const int64_t kv_shape[3] = {kKeys, kHeadsKv, kHeadDim};
  float q[kHeadsQ * kHeadDim], k[kKeys * kHeadsKv * kHeadDim], v[kKeys * kHeadsKv * kHeadDim], out[kHeadsQ * kHeadDim];
  attune_device cpu = {ATTUNE_DEVICE_CPU, 0};
  attune_attention a;
  attune_plan* plan = NULL;
  void* allocation = NULL;
  void* workspace = NULL;
  size_t bytes = 0;
  int i;
  for (i = 0; i < kHeadsQ * kHeadDim; ++i) q[i] = (float)(i % 7) / 7;
  for (i = 0; i < kKeys * kHeadsKv * kHeadDim; ++i) {
    k[i] = (float)(i % 5) / 5;
    v[i] = 1; /* any weights that sum to one give one */
  }
  REQUIRE(attune_attention_init(&a, sizeof a) == ATTUNE_OK);
  a.q = attune_dense_tensor(q, ATTUNE_FLOAT32, 3, q_shape);
  a.k = attune_dense_tensor(k, ATTUNE_FLOAT32, 3, kv_shape);
  a.v = attune_dense_tensor(v, ATTUNE_FLOAT32, 3, kv_shape);
  a.out = attune_dense_tensor(out, ATTUNE_FLOAT32, 3, q_shape);
  REQUIRE(attune_supported(&a, cpu) == ATTUNE_OK);
  REQUIRE(attune_plan_create(&a, cpu, &plan) == ATTUNE_OK);
  REQUIRE(attune_plan_workspace_size(plan, &bytes) == ATTUNE_OK);
  allocation = malloc(bytes + 256);
  REQUIRE(allocation != NULL);
  workspace = (void*)(((uintptr_t)allocation + 255) & ~(uintptr_t)255);
  REQUIRE(attune_run(plan, &a, workspace, bytes, NULL) == ATTUNE_OK);
  for (i = 0; i < kHeadsQ * kHeadDim; ++i) REQUIRE(fabsf(out[i] - 1) <= 1e-6f);
  REQUIRE(attune_plan_destroy(plan) == ATTUNE_OK);
  free(allocation);
  return 0;
}

static int makes_a_table(void) {
  float slopes[kHeadsQ];
  REQUIRE(attune_alibi_slopes(kHeadsQ, slopes) == ATTUNE_OK);
  REQUIRE(slopes[0] == 0.25f); /* 2^(-8 / heads) */
  return 0;
}

int main(void) {
  REQUIRE(strcmp(attune_version(), ATTUNE_VERSION_STRING) == 0);
  REQUIRE(refuses_a_wrong_shape() == 0);
  REQUIRE(attends() == 0);
  REQUIRE(makes_a_table() == 0);
  return 0;
}
