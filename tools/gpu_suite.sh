#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What CI cannot see: on a machine with a GPU, the CUDA tests in shards side by side, the Python suite if the package can be
# imported, compute-sanitizer over cases of every kernel, then, alone, the benchmarks. Needs only what ./dev build has left in build/release.
# usage: tools/gpu_suite.sh [OUT]    logs and timings go to OUT (build/gpu)
# FILTER: gtest's filter (Cuda*). SHARDS: processes (8). BENCH: a regular expression of cases to time; - for none.
# ARCHS: architectures as which the case table runs too, by ATTUNE_ARCH, e.g. "sm_80 sm_86 sm_89" (none).
# STRESS: seconds of random batches, in as many processes, each with a seed of its own (60).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
readonly out=${1:-build/gpu} shards=${SHARDS:-8} bench=${BENCH:-.}
readonly sanitized='^(decode/(format|scaled|append|uneven)|prefill/(codes|floats|xpacked|mixed|chunk_format)|mla/|prologue/parts|indexer/layout)'
readonly tests=build/release/tests/attune_tests attune=build/release/cli/attune
[[ -x $tests && -x $attune ]] || {
  echo "gpu_suite: build first: ./dev build release" >&2
  exit 2
}
mkdir -p "$out"
failed=0
pids=()
start() { # NAME COMMAND...: in the background, its output to OUT/NAME.log
  local name=$1
  shift
  ("$@" >"$out/$name.log" 2>&1 || {
    echo "FAILED: $name (rc $?), $out/$name.log"
    exit 1
  }) &
  pids+=($!)
}

# Processes share the GPU by NVIDIA's MPS where it works: 12 that took turns ran 106 batches in the time of 1,762. None may be killed while
# it runs: NVIDIA documents that the others may then fail. Sanitizers and benchmarks go without.
share=(env) mps=
end_sharing() {
  [[ -n $mps ]] || return 0
  echo quit | "${share[@]}" nvidia-cuda-mps-control
  rm -rf "$mps"
  share=(env) mps=
}
trap end_sharing EXIT
if command -v nvidia-cuda-mps-control >/dev/null; then
  mps=$(mktemp -d) || exit 1
  share=(env "CUDA_MPS_PIPE_DIRECTORY=$mps" "CUDA_MPS_LOG_DIRECTORY=$mps")
  # The daemon also starts where its server cannot.
  "${share[@]}" nvidia-cuda-mps-control -d
  "${share[@]}" "$attune" check --device cuda:0 --random 0 --filter '^decode/format/cache.layout=nhd/bf16$' >/dev/null || end_sharing
fi

for ((i = 0; i < shards; ++i)); do
  start "tests_$i" "${share[@]}" GTEST_TOTAL_SHARDS="$shards" GTEST_SHARD_INDEX="$i" "$tests" --gtest_filter="${FILTER:-Cuda*}"
done
for arch in ${ARCHS:-}; do
  start "check_$arch" "${share[@]}" ATTUNE_ARCH="$arch" "$attune" check --device cuda:0
done
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck synccheck initcheck racecheck; do
    # What racecheck reports is explained where it stands (docs/testing.md): it is counted, not judged.
    judge=(--error-exitcode 9)
    [[ $tool == racecheck ]] && judge=(--racecheck-report analysis)
    start "$tool" compute-sanitizer --tool "$tool" "${judge[@]}" "$attune" check --device cuda:0 --random 0 --filter "$sanitized"
  done
fi
if python3 -c 'import attune, torch, pytest' 2>/dev/null; then
  start python "${share[@]}" python3 -m pytest -q --tb=short --deselect python/tests/test_cuda.py::test_overhead_of_a_decode_step python/tests
fi
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
pids=()
grep -H 'SUMMARY' "$out"/{mem,sync,init,race}check.log 2>/dev/null
grep -h -E '^\[  (PASSED|FAILED|SKIPPED) +\]' "$out"/tests_*.log | sort | uniq -c | sort -rn | head -20

for ((i = 0; i < shards; ++i)); do
  start "stress_$i" "${share[@]}" "$attune" check --device cuda:0 --stress "${STRESS:-60}" --seed "$((RANDOM * 32768 + RANDOM))"
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
grep -h -E '^(seed|FAILED)|^  cuda' "$out"/stress_*.log

end_sharing
if [[ $bench != - ]]; then
  "$attune" bench --device cuda:0 --no-check --filter "$bench" 2>&1 | tee "$out/decode.txt"
  if python3 -c 'import attune, torch' 2>/dev/null; then
    python3 bench/mla_cuda.py --rounds 1 --filter "$bench" 2>&1 | tee "$out/mla.txt"
    python3 bench/compare_torch_cuda.py --rounds 1 --filter "$bench" 2>&1 | tee "$out/prefill.txt"
  fi
fi
exit "$failed"
