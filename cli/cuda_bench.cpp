// SPDX-License-Identifier: Apache-2.0
#include "cuda_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "cases/compare.h"
#include "cases/work.h"
#include "cuda_problem.h"
#include "synthetic.h"
#include "verify.h"

namespace attune::cli {
namespace {

// Several times what an H200 keeps in its second-level cache, so that no run finds the keys of the one before.
constexpr double kRotatedBytes = 512.0 * (1 << 20);
constexpr int kMostCopies = 256;
constexpr double kGraphSeconds = 2e-3;  // of one captured graph, by an estimate
constexpr int kFewestSamples = 15;
constexpr double kCheckedRows = 6;

struct Plan {
  attune_plan* handle = nullptr;
  size_t bytes = 0;
  ~Plan() { attune_plan_destroy(handle); }
};

void check_call(attune_status status) {
  if (status != ATTUNE_OK) throw std::runtime_error(attune_last_error());
}

// Bytes of the cache; 0 where there is none.
double bytes_of_cache(const cases::Case& c) {
  if (!c.has_cache()) return 0;
  double keys = 0;
  for (int64_t b = 0; b < c.batch(); ++b) keys += static_cast<double>(c.stored(b));
  const int64_t elements = c.num_heads_kv * (c.head_dim_qk + (c.shared_kv ? 0 : c.head_dim_v));
  const bool packed = c.cache.format == ATTUNE_KV_MLA_656;
  return keys * static_cast<double>(packed ? kMla656Bytes : elements * cases::element_size(c.cache_dtype()));
}

// How many copies of a case's pools runs must take in turn, so that none finds its keys in a cache of the device. Dense
// keys need one: so many rows of queries read them that it hardly matters where they come from.
int copies_of(const cases::Case& c) {
  const double bytes = bytes_of_cache(c);
  return bytes > 0 ? static_cast<int>(std::clamp(std::ceil(kRotatedBytes / bytes), 1.0, double{kMostCopies})) : 1;
}

std::string why_not_covered(const attune_attention& a, attune_device device) {
  const attune_status status = attune_supported(&a, device);
  if (status == ATTUNE_UNSUPPORTED) return attune_last_error();
  check_call(status);
  return "";
}

class Bench {
 public:
  Bench(const cases::Case& spec, int32_t device)
      : memory_(device),
        problem_(spec, memory_, copies_of(spec)),
        seconds_(cases::work_of(spec).flops / 4e14 + problem_.kv_bytes() / 4e12 + 8e-6) {
    for (int copy = 0; copy < problem_.num_copies(); ++copy) copies_.push_back(problem_.device(copy));
  }

  CudaTiming run(bool check, double min_time) {
    CudaTiming timing;
    timing.kv_bytes = problem_.kv_bytes();
    timing.not_covered = why_not_covered(copies_[0], memory_.device());
    if (!timing.not_covered.empty()) return timing;
    check_call(attune_plan_create(&copies_[0], memory_.device(), &plan_.handle));
    check_call(attune_plan_workspace_size(plan_.handle, &plan_.bytes));
    workspace_ = std::make_unique<cases::Workspace>(memory_, plan_.bytes);
    char text[1024];
    check_call(attune_plan_describe(plan_.handle, text, sizeof(text), nullptr));
    timing.plan = text;
    if (check) verify(timing);
    if (timing.failure.empty()) time(timing, min_time);
    return timing;
  }

 private:
  void enqueue(int run, void* stream) {
    check_call(attune_run(plan_.handle, &copies_[static_cast<size_t>(run % problem_.num_copies())],
                          workspace_->buffer.device(), plan_.bytes, stream));
  }

  void verify(CudaTiming& timing) {
    VerifyOptions options;
    options.amount = kCheckedRows;
    options.max_keys = 200'000;
    Verifier verifier(options, 1);
    verifier.expect(problem_.host(), problem_.keys_of_row());
    problem_.upload_out();
    enqueue(0, memory_.stream().handle());
    problem_.download_out();
    verifier.compare(problem_.host(), 0, "attention");
    timing.worst = verifier.worst_ratio();
    if (verifier.first_mismatch()) timing.failure = verifier.first_mismatch()->text();
    if (timing.failure.empty()) timing.failure = workspace_->buffer.check_guards();
  }

  void time(CudaTiming& timing, double min_time) {
    timing.seconds = time_graphs(
        memory_.device().index, [this](int run, void* stream) { enqueue(run, stream); }, seconds_,
        problem_.num_copies(), min_time);
  }

  cases::CudaMemory memory_;
  CudaProblem problem_;
  double seconds_;  // of a run, about
  std::vector<attune_attention> copies_;
  Plan plan_;
  std::unique_ptr<cases::Workspace> workspace_;
};

// A block of 256 threads reads 32 KiB: eight loads of 16 bytes a thread, all in flight before the first is used. The
// result is stored where it is a number that does not occur, so that the loads are not in vain.
constexpr char kReadPtx[] = R"(.version 7.8
.target sm_80
.address_size 64
.visible .entry read_all(.param .u64 data, .param .u64 sink)
{
  .reg .pred %p;
  .reg .b32 %r<40>;
  .reg .b64 %d<6>;
  ld.param.u64 %d0, [data];
  ld.param.u64 %d1, [sink];
  mov.u32 %r32, %ctaid.x;
  mov.u32 %r33, %tid.x;
  mul.wide.u32 %d2, %r32, 32768;
  mul.wide.u32 %d3, %r33, 16;
  add.u64 %d0, %d0, %d2;
  add.u64 %d0, %d0, %d3;
  ld.global.nc.L1::no_allocate.v4.u32 {%r0, %r1, %r2, %r3}, [%d0];
  ld.global.nc.L1::no_allocate.v4.u32 {%r4, %r5, %r6, %r7}, [%d0+4096];
  ld.global.nc.L1::no_allocate.v4.u32 {%r8, %r9, %r10, %r11}, [%d0+8192];
  ld.global.nc.L1::no_allocate.v4.u32 {%r12, %r13, %r14, %r15}, [%d0+12288];
  ld.global.nc.L1::no_allocate.v4.u32 {%r16, %r17, %r18, %r19}, [%d0+16384];
  ld.global.nc.L1::no_allocate.v4.u32 {%r20, %r21, %r22, %r23}, [%d0+20480];
  ld.global.nc.L1::no_allocate.v4.u32 {%r24, %r25, %r26, %r27}, [%d0+24576];
  ld.global.nc.L1::no_allocate.v4.u32 {%r28, %r29, %r30, %r31}, [%d0+28672];
)";

std::string read_ptx() {
  std::string text = kReadPtx;
  for (int i = 1; i < 32; ++i) text += "  xor.b32 %r0, %r0, %r" + std::to_string(i) + ";\n";
  text += "  setp.ne.u32 %p, %r0, 2654435769;\n  @%p ret;\n  st.global.u32 [%d1], %r0;\n  ret;\n}\n";
  return text;
}

}  // namespace

CudaTiming time_on_cuda(const cases::Case& spec, int32_t device, bool check, double min_time) {
  return Bench(spec, device).run(check, min_time);
}

std::vector<double> time_graphs(int32_t device, const std::function<void(int run, void* stream)>& enqueue,
                                double estimate, int rounds_of, double min_time) {
  const int rounds = std::max(1, static_cast<int>(kGraphSeconds / (estimate * rounds_of)));
  const int runs = rounds * rounds_of;
  const cuda::Stream stream(device);
  const cuda::Graph graph(stream, [&] {
    for (int i = 0; i < runs; ++i) enqueue(i, stream.handle());
  });
  for (int warm_up = 0; warm_up < 2; ++warm_up) graph.replay(stream);
  cuda::Timer timer(device);
  std::vector<double> seconds;
  double total = 0;
  while (total < min_time || static_cast<int>(seconds.size()) < kFewestSamples) {
    timer.start(stream);
    graph.replay(stream);
    timer.stop(stream);
    const double all = timer.milliseconds() * 1e-3;
    seconds.push_back(all / runs);
    total += all;
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

double measure_cuda_read(int32_t device) {
  constexpr size_t kBlock = 32768, kSeed = size_t{64} << 20;
  const cuda::Stream stream(device);
  const cuda::ScopedContext context(device);
  const cuda::Driver& d = cuda::require_driver();
  size_t free = 0, all = 0;
  cuda::check(d.cuMemGetInfo(&free, &all), "cuMemGetInfo");
  const size_t bytes = std::min(size_t{16} << 30, free / 4 * 3) / kSeed * kSeed;
  const cuda::DeviceMemory memory(device, bytes), sink(device, 4);

  // Random bytes: constant data may read faster than any cache ever will.
  std::vector<uint64_t> seed(kSeed / sizeof(uint64_t));
  cases::Random random(1);
  for (uint64_t& word : seed) word = random.next();
  cuda::copy_to_device(stream, memory.data(), seed.data(), kSeed);
  const auto base = reinterpret_cast<cuda::DevicePointer>(memory.data());
  const auto handle = static_cast<cuda::StreamHandle>(stream.handle());
  for (size_t at = kSeed; at < bytes; at += kSeed) {
    cuda::check(d.cuMemcpyDtoDAsync(base + at, base, kSeed, handle), "filling memory");
  }

  cuda::Library library = nullptr;
  cuda::LibraryKernel kernel = nullptr;
  cuda::Function function = nullptr;
  const std::string ptx = read_ptx();
  cuda::check(d.cuLibraryLoadData(&library, ptx.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0),
              "loading the read kernel");
  cuda::check(d.cuLibraryGetKernel(&kernel, library, "read_all"), "loading the read kernel");
  cuda::check(d.cuKernelGetFunction(&function, kernel), "loading the read kernel");
  const void *data = memory.data(), *result = sink.data();
  void* args[] = {&data, &result, nullptr};
  const cuda::DriverLaunchConfig config = {
      {static_cast<uint32_t>(bytes / kBlock), 1, 1}, {256, 1, 1}, 0, handle, nullptr, 0};
  cuda::Timer timer(device);
  double best = 0;
  for (int pass = 0; pass < 8; ++pass) {
    timer.start(stream);
    cuda::check(d.cuLaunchKernelEx(&config, function, args, nullptr), "reading memory");
    timer.stop(stream);
    best = std::max(best, static_cast<double>(bytes) / (timer.milliseconds() * 1e-3) * 1e-9);
  }
  d.cuLibraryUnload(library);
  return best;
}

}  // namespace attune::cli
