// SPDX-License-Identifier: Apache-2.0
#include "layer_runner.h"

#include "layer_runner_decoder.h"
#include "layer_runner_encoder_decoder.h"
#include "layer_runner_sparse.h"

namespace attune::cli {

std::unique_ptr<LayerRunner> make_layer_runner(const RunnerConfig& config) {
  switch (config.model.kind) {
    case ModelKind::kSparseMla:
      return std::make_unique<SparseRunner>(config);
    case ModelKind::kEncoderDecoder:
      return std::make_unique<EncoderDecoderRunner>(config);
    default:
      return std::make_unique<DecoderRunner>(config);
  }
}

}  // namespace attune::cli
