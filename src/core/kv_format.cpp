// SPDX-License-Identifier: Apache-2.0
#include "core/kv_format.h"

#include "core/integers.h"

namespace attune {
namespace {

constexpr KvFormat kFormats[] = {
    {ATTUNE_KV_PLAIN, "plain", true, 0, 0, 0, 0, 0, 0, 1},
    {ATTUNE_KV_MLA_656, "mla_656", false, 576, 512, 512, 128, 656, 0, 1},
    {ATTUNE_KV_MLA_584, "mla_584", false, 512, 512, 448, 64, 576, 8, 576},
};

}  // namespace

const KvFormat* kv_format(int32_t id) {
  for (const KvFormat& f : kFormats) {
    if (f.id == id) return &f;
  }
  return nullptr;
}

int kv_format_count() { return static_cast<int>(sizeof(kFormats) / sizeof(kFormats[0])); }

int64_t kv_page_bytes(const KvFormat& format, int64_t page_size) {
  const int64_t bytes = page_size * (format.token_bytes + format.scale_bytes);
  return round_up(bytes, format.page_alignment);
}

}  // namespace attune
