// SPDX-License-Identifier: Apache-2.0
// Which tensors of an operation may share memory: an output overlaps no other tensor. Throws INVALID_ARGUMENT with both
// names; packed columns do not overlap (core/overlap.h).
#pragma once

#include <cstddef>

#include "attune/attune.h"
#include "core/kv_cache.h"

namespace attune {

// appended: the cache that the operation writes to, or null. workspace: what a run may write of it.
void check_apart(const attune_attention& a, const KvCache* appended, const void* workspace, size_t workspace_bytes);
// a: that of op.attention.
void check_apart(const attune_attention_backward& op, const attune_attention& a, const void* workspace,
                 size_t workspace_bytes);
void check_apart(const attune_qkv_prepare& op, const KvCache* appended);
void check_apart(const attune_merge& op);
void check_apart(const attune_cache_op& op, const KvCache& cache);
void check_apart(const attune_indexer& op, const void* workspace, size_t workspace_bytes);

}  // namespace attune
