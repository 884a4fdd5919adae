// SPDX-License-Identifier: Apache-2.0
// Copies by the copy engine without a tensor map (kernels/selftest/copies.cu): on the CPU, where the emulator does what
// ptx/ says, and on a GPU, where the instructions do.
#include <vector>

#include "cuda/launch.h"
#include "cuda_cases.h"
#include "emulated.h"

namespace attune::cuda {
namespace {

constexpr size_t kPieceBytes[] = {16, 656, 32, 1088, 128}, kGap = 16, kBytes = 1920, kPaddedBytes = kBytes + 5 * kGap;
const KernelSpec kSpec = {"selftest/copies.cu", "copies", {}, 2 * kPaddedBytes + 16};

struct Arrays {
  std::vector<uint8_t> from = std::vector<uint8_t>(4 * kBytes),
                       to = std::vector<uint8_t>(4 * kPaddedBytes);  // by block
  Arrays() {
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 37 + i / 251);
  }
};

void expect_results(const Arrays& x) {
  for (size_t run = 0; run < 4; ++run) {  // block, phase
    const uint8_t* from = x.from.data() + (run + 2) % 4 * kBytes;
    std::vector<uint8_t> want;
    for (const size_t bytes : kPieceBytes) {
      for (size_t i = 0; i < bytes; ++i) want.push_back(static_cast<uint8_t>(*from++ + 1));
      want.insert(want.end(), kGap, 0xef);
    }
    const auto begin = x.to.begin() + static_cast<int64_t>(run * kPaddedBytes);
    EXPECT_EQ(std::vector<uint8_t>(begin, begin + kPaddedBytes), want) << run;
  }
}

class EmulatedCopies : public tests::Emulated {};

TEST_F(EmulatedCopies, BringPiecesAndSendThemOn) {
  Arrays x;
  using Copies = void (*)(const uint8_t*, uint8_t*);
  const auto copies = reinterpret_cast<Copies>(emulator::find_kernel(kSpec));
  emulator::run(
      2, 32, [&] { copies(x.from.data(), x.to.data()); }, 2);
  expect_results(x);
}

class CudaCopies : public CudaCases {};

TEST_F(CudaCopies, BringPiecesAndSendThemOn) {
  const Stream stream(kDevice);
  Arrays x;
  const DeviceMemory from = to_device(stream, x.from), to = to_device(stream, x.to);
  LaunchConfig config;
  config.grid[0] = 2;
  config.block[0] = 32;
  config.cluster[0] = 2;
  config.shared_bytes = static_cast<uint32_t>(kSpec.shared_bytes);
  config.stream = stream.handle();
  launch_kernel(get_kernel(kSpec, kDevice), config, from.data(), to.data());
  x.to = to_host<uint8_t>(stream, to);
  stream.synchronize();
  expect_results(x);
}

}  // namespace
}  // namespace attune::cuda
