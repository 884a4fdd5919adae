// SPDX-License-Identifier: Apache-2.0
// From checked operations to the flat parameters of the kernels in kernels/rows/.
#pragma once

#include <cstdint>

#include "core/ops.h"
#include "rows/rows_params.h"

namespace attune::cuda::ops {

kernels::KvPlane kv_plane(const KvPlane& p);
kernels::IntTable int_table(const IntView& v);
kernels::FloatTable float_table(const ParamView& v);
kernels::PrologueParams prologue_params(const Prologue& p);
kernels::RowTensor row_tensor(const RowView& v);
kernels::RowCache row_cache(const KvCache& c);

kernels::StoreParams store_params(const PrepareProblem& op);
kernels::StoreParams store_params(const CacheProblem& op);  // append, quantise
kernels::FetchParams fetch_params(const CacheProblem& op);  // gather, dequantise
kernels::MergeParams merge_params(const MergeProblem& op);

// Whether vectors can move every row, in runs of 8 channels. Tensors that are not given: yes.
bool has_vectors(const RowView& v, int64_t channels);
bool has_vectors(const KvCache& c);

}  // namespace attune::cuda::ops
