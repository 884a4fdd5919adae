#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where a kernel waits: the instructions with the most samples of an ncu report's source page, in program order.

usage: ncu --set full --import-source no -k regex:attune_mla -c 1 -o report COMMAND
       ncu -i report.ncu-rep --page source --csv > source.csv
       tools/stalls.py source.csv [COUNT]
"""

import csv
import sys


def number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    count = int(sys.argv[2]) if len(sys.argv) == 3 else 40
    with open(sys.argv[1], newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.reader(file))
    begin = next((i for i, row in enumerate(rows) if "Source" in row), None)
    if begin is None:
        sys.exit(f"{sys.argv[1]} has no column Source: it is not a source page of ncu as csv")
    head, rows = rows[begin], rows[begin + 1:]
    column = {name: i for i, name in enumerate(head)}
    samples = next(i for name, i in column.items() if name.startswith("Warp Stall Sampling (All"))
    executed = next(i for name, i in column.items() if name.startswith("Instructions Executed"))
    stalls = {name[6:]: i for name, i in column.items() if name.startswith("stall_") and "Not Issued" not in name}
    total = sum(number(row[samples]) for row in rows) or 1.0
    hottest = sorted(range(len(rows)), key=lambda i: -number(rows[i][samples]))[:count]
    for i in sorted(hottest):
        row = rows[i]
        reasons = sorted(((number(row[at]), name) for name, at in stalls.items()), reverse=True)[:2]
        print(f"{i:6d} {100 * number(row[samples]) / total:5.1f} % x{number(row[executed]):.0f} {row[column['Source']]:70.70} "
              + " ".join(f"{name}:{value:.0f}" for value, name in reasons))


if __name__ == "__main__":
    main()
