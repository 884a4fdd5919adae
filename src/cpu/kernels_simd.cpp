// SPDX-License-Identifier: Apache-2.0
// Compiles the kernels once for each Highway target and lists the tables.
#include "cpu/kernels_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_simd.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first so that the following are seen for every target.
#include <hwy/highway.h>

#include "cpu/kernels_convert-inl.h"
#include "cpu/kernels_gemm-inl.h"
#include "cpu/kernels_gradient-inl.h"
#include "cpu/kernels_rows-inl.h"
#include "cpu/kernels_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {

extern const KernelTable kTable;
const KernelTable kTable = {
    .isa = nullptr,  // named by kernels.cpp
    .native_bf16 = false,
    .fast_bf16 = false,
    .to_f32 = to_f32,
    .to_bf16 = to_bf16,
    .pack_k_f32 = pack_k_f32,
    .pack_k_bf16 = pack_k_bf16,
    .pack_v_bf16 = pack_v_bf16,
    .gemm_f32 = gemm_f32,
    .gemm_bf16 = gemm_bf16,
    .qk_rows_f32 = qk_rows_f32,
    .qk_rows_mixed = qk_rows_mixed,
    .qk_rows_f16 = qk_rows_f16,
    .qk_rows_bf16 = qk_rows_bf16,
    .pv_rows_f32 = pv_rows_f32,
    .pv_rows_mixed = pv_rows_mixed,
    .pv_rows_f16 = pv_rows_f16,
    .pv_rows_bf16 = pv_rows_bf16,
    .qk_rows_8bit = qk_rows_8bit,
    .pv_rows_8bit = pv_rows_8bit,
    .softmax = softmax,
    .softmax_gradient = softmax_gradient,
    .softcap = softcap,
    .scale_columns = scale_columns,
    .relu_sum = relu_sum,
    .add_alibi = add_alibi,
    .any_nonfinite_f32 = any_nonfinite_f32,
    .any_nonfinite_bf16 = any_nonfinite_bf16,
};

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attune::cpu {

const TargetTable* target_tables(int* count) {
  static const TargetTable kTables[] = {
#if (HWY_TARGETS & HWY_AVX3) && HWY_STATIC_TARGET != HWY_AVX3
    {HWY_AVX3, &N_AVX3::kTable},
#endif
#if (HWY_TARGETS & HWY_AVX2) && HWY_STATIC_TARGET != HWY_AVX2
    {HWY_AVX2, &N_AVX2::kTable},
#endif
#if (HWY_TARGETS & HWY_SSE4) && HWY_STATIC_TARGET != HWY_SSE4
    {HWY_SSE4, &N_SSE4::kTable},
#endif
    {HWY_STATIC_TARGET, &HWY_STATIC_DISPATCH(kTable)},
  };
  *count = static_cast<int>(sizeof(kTables) / sizeof(kTables[0]));
  return kTables;
}

}  // namespace attune::cpu
#endif  // HWY_ONCE
