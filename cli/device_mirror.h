// SPDX-License-Identifier: Apache-2.0
// A layer's data on the device that runs it. The host keeps everything, for the oracle; what a GPU reads is copied to
// it before a call, and what it wrote is fetched after.
#pragma once

#include <cstddef>
#include <memory>

#include "attune/attune.h"

namespace attune::cli {

class DeviceMirror {
 public:
  // On the CPU nothing is copied.
  explicit DeviceMirror(attune_device device);
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  // Runs the plan with these host data and returns its seconds: wall time on the CPU, device time between two events on
  // a GPU. workspace: host memory, which a GPU replaces by its own. Throws attune::Error-like std::runtime_error.
  //
  // Queries, new tokens, lengths, page tables, lists of slots and out are copied on every call; everything else (cache,
  // tables of the model) once, when it is first seen, so the host may not change it. After the call out is fetched, and
  // with append the pages that it wrote.
  double run(const attune_plan* plan, const attune_attention& a, void* workspace, size_t bytes);
  // The same for an append of tokens by cu_seqlens to a paged cache.
  double append(const attune_cache_op& op);
  // The same for the indexer, whose indices and topk_length are fetched. workspace: host memory of the size that it
  // asks for on the device.
  double choose(const attune_indexer& op, void* workspace, size_t bytes);
  // The same for q_out, which may be q, and an append to a paged cache. k_out and v_out must be absent.
  double prepare(const attune_qkv_prepare& op);

 private:
  struct Gpu;
  std::unique_ptr<Gpu> gpu_;
};

}  // namespace attune::cli
