// SPDX-License-Identifier: Apache-2.0
// Drives a fuzz target with random inputs where libFuzzer is not at hand: target [iterations] [seed]. A crash is
// repeated by giving the seed that was printed last and one iteration.
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <unistd.h>

#include "cases/number.h"
#include "fuzz.h"

namespace {

volatile uint64_t current_seed = 0;

// Only calls that are allowed in a signal handler.
void report(int signal) {
  char text[64] = "\nfuzz: crashed at seed ";
  size_t length = 0;
  while (text[length] != '\0') ++length;
  char digits[24];
  size_t n = 0;
  for (uint64_t seed = current_seed; n == 0 || seed > 0; seed /= 10) digits[n++] = static_cast<char>('0' + seed % 10);
  while (n > 0) text[length++] = digits[--n];
  text[length++] = '\n';
  if (write(STDERR_FILENO, text, length) < 0) _exit(2);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

bool parse(const char* text, uint64_t* value) {
  char* end = nullptr;
  errno = 0;
  *value = std::strtoull(text, &end, 10);
  return errno == 0 && end != text && *end == '\0' && *text != '-';
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t iterations = static_cast<uint64_t>(fuzz_default_iterations()), seed = 0;
  if (argc > 3 || (argc > 1 && !parse(argv[1], &iterations)) || (argc > 2 && !parse(argv[2], &seed))) {
    std::fprintf(stderr, "usage: %s [iterations] [seed]\n", argv[0]);
    return 2;
  }
  for (const int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL}) std::signal(signal, report);
  std::vector<uint8_t> input;
  for (uint64_t i = 0; i < iterations; ++i) {
    current_seed = seed + i;
    attune::cases::Random random(current_seed);
    input.resize(static_cast<size_t>(random.integer(8, 160)));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random.next() >> 32);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%" PRIu64 " inputs, seeds %" PRIu64 "..%" PRIu64 "\n", iterations, seed,
              seed + iterations - (iterations > 0));
  return 0;
}
