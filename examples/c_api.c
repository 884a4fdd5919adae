/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI: causal attention of one prompt of 16 tokens with 4 heads of 32, and what an error looks like. */
#include <attune/attune.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 16, kHeads = 4, kHeadDim = 32, kSize = kTokens * kHeads * kHeadDim };

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, attune_last_error());
  return 1;
}

int main(void) {
  static float q[kSize], k[kSize], v[kSize], out[kSize]; /* [tokens, heads, head_dim] */
  const int64_t shape[3] = {kTokens, kHeads, kHeadDim};
  const attune_device cpu = {ATTUNE_DEVICE_CPU, 0};
  attune_attention a;
  attune_plan* plan = NULL;
  size_t bytes = 0;
  void* allocation = NULL;
  void* workspace = NULL;
  int i;

  for (i = 0; i < kSize; ++i) {
    q[i] = (float)sin(i);
    k[i] = (float)cos(i);
    v[i] = (float)(i / (kHeads * kHeadDim)); /* v of token t is t everywhere */
  }

  if (attune_attention_init(&a, sizeof a) != ATTUNE_OK) return failed("init");
  a.q = attune_dense_tensor(q, ATTUNE_FLOAT32, 3, shape);
  a.k = attune_dense_tensor(k, ATTUNE_FLOAT32, 3, shape);
  a.v = attune_dense_tensor(v, ATTUNE_FLOAT32, 3, shape);
  a.out = attune_dense_tensor(out, ATTUNE_FLOAT32, 3, shape);
  a.causal = 1;

  if (attune_plan_create(&a, cpu, &plan) != ATTUNE_OK) return failed("plan");
  if (attune_plan_workspace_size(plan, &bytes) != ATTUNE_OK) return failed("workspace size");
  allocation = malloc(bytes + 255);
  if (allocation == NULL) return 1;
  workspace = (void*)(((uintptr_t)allocation + 255) & ~(uintptr_t)255); /* aligned to 256 bytes */
  if (attune_run(plan, &a, workspace, bytes, NULL) != ATTUNE_OK) return failed("run");

  printf("attune %s: out of token 0 is %g, of token %d it is %g\n", attune_version(), out[0], kTokens - 1,
         out[(kTokens - 1) * kHeads * kHeadDim]);

  /* A descriptor that makes no sense is refused with a message; nothing else happens. */
  a.softcap = -1;
  if (attune_supported(&a, cpu) != ATTUNE_INVALID_ARGUMENT) return 1;
  printf("refused: %s\n", attune_last_error());

  attune_plan_destroy(plan);
  free(allocation);
  /* The first token sees only itself; the last sees values from 0 to 15. */
  return out[0] == 0 && out[kSize - 1] > 0 && out[kSize - 1] < kTokens - 1 ? 0 : 1;
}
