// SPDX-License-Identifier: Apache-2.0
#include "kv_pool.h"

#include <cstring>
#include <vector>

#include "cases/number.h"
#include "cases/tensors.h"
#include "synthetic.h"

namespace attune::cli {
namespace {

attune_dtype element_dtype(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kFp32:
      return ATTUNE_FLOAT32;
    case KvDtype::kFp16:
      return ATTUNE_FLOAT16;
    case KvDtype::kE4m3:
      return ATTUNE_FLOAT8_E4M3;
    case KvDtype::kInt8:
      return ATTUNE_INT8;
    default:
      return ATTUNE_BFLOAT16;
  }
}

Buffer allocate(attune_tensor& tensor) {
  if (tensor.dtype == ATTUNE_DTYPE_NONE) return {};
  const auto dtype = static_cast<attune_dtype>(tensor.dtype);
  Buffer buffer(static_cast<size_t>(cases::num_elements(tensor) * cases::element_size(dtype)));
  std::memset(buffer.data(), 0xff, buffer.size());  // NaN in every float format, as code and as scale
  tensor.data = buffer.data();
  return buffer;
}

}  // namespace

attune_kv_cache kv_cache_shape(const Model& m, KvDtype dtype, int64_t page_size, int64_t num_pages) {
  attune_kv_cache cache{};
  cache.page_size = page_size;
  if (dtype == KvDtype::kMla656) {
    const int64_t shape[] = {num_pages, page_size, kMla656Bytes};
    cache.format = ATTUNE_KV_MLA_656;
    cache.layout = ATTUNE_KV_BYTES;
    cache.k = attune_dense_tensor(nullptr, ATTUNE_UINT8, 3, shape);
    return cache;
  }
  const int64_t k_shape[] = {num_pages, page_size, m.num_heads_kv, m.head_dim_qk};
  const int64_t v_shape[] = {num_pages, page_size, m.num_heads_kv, m.head_dim_v};
  cache.format = ATTUNE_KV_PLAIN;
  cache.layout = ATTUNE_KV_NHD;
  cache.k = attune_dense_tensor(nullptr, element_dtype(dtype), 4, k_shape);
  if (!m.is_mla()) cache.v = attune_dense_tensor(nullptr, element_dtype(dtype), 4, v_shape);
  if (dtype == KvDtype::kInt8) cache.k_scale = attune_dense_tensor(nullptr, ATTUNE_FLOAT32, 3, k_shape);
  if (dtype == KvDtype::kE4m3) cache.k_scale = attune_dense_tensor(nullptr, ATTUNE_FLOAT32, 1, &m.num_heads_kv);
  if (!m.is_mla()) cache.v_scale = cache.k_scale;
  return cache;
}

KvPool::KvPool(const Model& model, KvDtype dtype, int64_t page_size, int64_t num_pages)
    : view_(kv_cache_shape(model, dtype, page_size, num_pages)),
      k_(allocate(view_.k)),
      v_(allocate(view_.v)),
      k_scale_(allocate(view_.k_scale)),
      v_scale_(allocate(view_.v_scale)) {
  if (dtype != KvDtype::kE4m3) return;
  for (int64_t h = 0; h < model.num_heads_kv; ++h) {
    // Different for each head, so that a head read with another's scale is seen.
    const float factor = 1.0f + 0.0625f * static_cast<float>(h % 8);
    k_scale_.as<float>()[h] = kE4m3Scale * factor;
    if (v_scale_.size() > 0) v_scale_.as<float>()[h] = kE4m3Scale * (2.0f - 0.5f * factor);
  }
}

void KvPool::fill_plane(const attune_tensor& plane, const attune_tensor& scale, cases::Random& random) {
  if (plane.dtype == ATTUNE_DTYPE_NONE) return;
  constexpr double kInt8Deviation = 30;
  const double deviation = plane.dtype == ATTUNE_INT8          ? kInt8Deviation
                           : plane.dtype == ATTUNE_FLOAT8_E4M3 ? 1 / static_cast<double>(kE4m3Scale)
                                                               : 1;
  fill_normal(static_cast<attune_dtype>(plane.dtype), plane.data, cases::num_elements(plane), deviation, random);
  if (plane.dtype != ATTUNE_INT8) return;
  auto* scales = static_cast<float*>(scale.data);
  for (int64_t i = 0; i < cases::num_elements(scale); ++i)
    scales[i] = static_cast<float>(random.uniform(0.5, 1.5) / kInt8Deviation);
}

void KvPool::fill(cases::Random& random) {
  if (view_.format == ATTUNE_KV_MLA_656) {
    return fill_mla_656(view_.k.data, cases::num_elements(view_.k) / kMla656Bytes, random);
  }
  fill_plane(view_.k, view_.k_scale, random);
  fill_plane(view_.v, view_.v_scale, random);
}

}  // namespace attune::cli
