// SPDX-License-Identifier: Apache-2.0
// The operations beside attention, sent to the backend of their device.
#pragma once

#include <cstddef>

#include "core/indexer.h"
#include "core/ops.h"

namespace attune {

// The functions of one backend. An operation that it lacks is null.
struct Operations {
  void (*merge)(const MergeProblem& op, int32_t device_index, void* stream);
  void (*qkv_prepare)(const PrepareProblem& op, int32_t device_index, void* stream);
  void (*cache_op)(const CacheProblem& op, int32_t device_index, void* stream);
  size_t (*indexer_workspace_size)(const IndexerProblem& op, int32_t device_index);
  void (*indexer)(const IndexerProblem& op, int32_t device_index, void* workspace, size_t bytes, void* stream);
};

// These throw what check_device throws, and UNSUPPORTED where the device has no kernel for the operation.
void run_merge(const MergeProblem& op, attune_device device, void* stream);
void run_qkv_prepare(const PrepareProblem& op, attune_device device, void* stream);
void run_cache_op(const CacheProblem& op, attune_device device, void* stream);
size_t indexer_workspace_size(const IndexerProblem& op, attune_device device);
// As above; also throws where the workspace is too small or not aligned.
void run_indexer(const IndexerProblem& op, attune_device device, void* workspace, size_t bytes, void* stream);

}  // namespace attune
