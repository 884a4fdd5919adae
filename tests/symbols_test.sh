#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# libattune.so exports the C ABI and nothing else, all of it, and calls nothing that prints or ends the process.
set -euo pipefail
library=${1:-${ATTUNE_LIBRARY:?}}
nm=${NM:-nm}
headers=("${ATTUNE_SOURCE_DIR:?}"/include/attune/*.h)
failed=0
report() { # TITLE LIST
  [[ -z $2 ]] && return
  echo "$1:"
  while IFS= read -r symbol; do echo "  $symbol"; done <<<"$2"
  failed=1
}

# The version node (ATTUNE_0) is an absolute symbol.
exported=$("$nm" -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u)
declared=$(grep -ohE '\battune_[a-z0-9_]+\(' "${headers[@]}" | tr -d '(' | sort -u)
report "exported, but not declared" "$(comm -23 <(echo "$exported") <(echo "$declared"))"
report "declared, but not exported" "$(comm -13 <(echo "$exported") <(echo "$declared"))"

undefined=$("$nm" -D --undefined-only "$library" | awk '{ sub(/@.*/, "", $NF); print $NF }' | sort -u)
ends='abort|exit|_exit|_Exit|quick_exit|at_quick_exit|__assert_fail|__assert|raise|kill|_ZN3hwy5AbortEPKciS1_z'
prints='v?printf|__v?printf_chk|v?fprintf|__v?fprintf_chk|v?dprintf|puts|putchar|putc|_IO_putc|fputs|fputc|putchar_unlocked|perror|psignal'
streams='stdout|stderr|_ZSt4cout|_ZSt4cerr|_ZSt4clog|_ZSt5wcout|_ZSt5wcerr|_ZNSt8ios_base4InitC1Ev'
report "ends the process" "$(grep -xE "$ends" <<<"$undefined" || true)"
report "prints" "$(grep -xE "$prints|$streams" <<<"$undefined" || true)"
exit $failed
