// SPDX-License-Identifier: Apache-2.0
// The registry of KV formats: what one token of one KV head is, in bytes. A new format is a new row here, its codec in
// each backend, and its decoder in the oracle.
#pragma once

#include <cstdint>

#include "attune/attune.h"

namespace attune {

struct KvFormat {
  int32_t id;  // attune_kv_format
  const char* name;
  bool plain;           // elements of the tensor's dtype, head_dim free
  int64_t head_dim_qk;  // fixed geometry of packed formats; 0: free
  int64_t head_dim_v;
  int64_t nope;            // leading e4m3 channels with scales
  int64_t group;           // channels a scale covers
  int64_t token_bytes;     // bytes a token in the row part of a page
  int64_t scale_bytes;     // bytes a token in the trailing scale plane of a page; 0: scales lie inside the row
  int64_t page_alignment;  // a page is padded to a multiple of it; 1: none
};

// All rows, in the order of the enum. Null for an unknown id.
const KvFormat* kv_format(int32_t id);
int kv_format_count();
// Bytes of a page of a packed format.
int64_t kv_page_bytes(const KvFormat& format, int64_t page_size);

}  // namespace attune
