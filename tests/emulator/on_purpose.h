// SPDX-License-Identifier: Apache-2.0
// What the emulator does not report: kernels have it on purpose, or the compiler does not instrument enough.
#pragma once

#include <string>

namespace attune::emulator {

// A report that has all three; and why that is well.
struct OnPurpose {
  const char *what, *where, *other, *why;
};

inline constexpr OnPurpose kOnPurpose[] = {
    {"reads", "start_next_qk", "store_through_smem",
     "after the last work tile stale memory is multiplied, and nobody reads the result"},
    {"nobody has written", "prefill::qk_gemm", "", "no box copies keys that nobody sees; their scores are masked"},
    {"nobody has written", "mla::Mainloop", "", "the same in MLA"},
    {"nobody has written", "Dequantizer::dequant_blocks", "", "the same of 8-bit tiles"},
    {"nobody has written", "dequant_xpacked_k", "", "the same of x-packed ones"},
    {"nobody has written", "dequant_xpacked_v", "", "and of their V"},
    {"nobody has written", "Dequantizer::dequant_tiles", "", "the TileMask is read only where `any` is set"},
    {"nobody has written", "indexer::Keys::load_fragments", "", "a scale that a cache without scales does not have"},
    {"nobody has written", "Fp16Queries::convert", "", "rows that a block does not have"},
    {"nobody has written", "mla::TileMask", "", "sparse tiles have no edges"},
    {"of static shared memory", "rows::", "nobody has written", "gcc does not tell of what functions return there"},
    {" writes, perhaps", "lane 0 of warp", "GatherProducer::write_tile_mask",
     "warps that share keys say the same of them"},
    {" writes, perhaps", "lane ", "run_softcap_small", "all who write the flag write 1"},
    {"writes, perhaps later", "fetch_table", "cp.async", "what it copies nobody reads: the L1 is to have it"},
};

inline bool is_on_purpose(const std::string& report) {
  for (const OnPurpose& x : kOnPurpose) {
    const auto has = [&](const char* words) { return report.find(words) != std::string::npos; };
    if (has(x.what) && has(x.where) && has(x.other)) return true;
  }
  return false;
}

}  // namespace attune::emulator
