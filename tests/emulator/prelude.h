// SPDX-License-Identifier: Apache-2.0
// Precompiled for modules (module.cpp): the CUDA language, and the instructions of the GPU that kernels are compiled
// for. A kernel includes what it uses all the same, as NVRTC knows.
#pragma once

#include "emulator/device.h"
#include "ptx/async_copy.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/reduce.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#if __CUDA_ARCH__ >= 900
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#endif
