# SPDX-License-Identifier: Apache-2.0
"""A roofline of `attune bench --json results.json`: what each case reaches, under what this machine's memory and arithmetic allow.

usage: roofline.py RESULTS.json OUTPUT.png
"""

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402


def plot(results: dict[str, Any], axes: Axes) -> int:
    """results: the object that `attune bench --json` writes. Returns the number of cases."""
    ceilings = results["ceilings"]
    points = [(case["flops"] / case["bytes"], case["gflops"], case["name"].partition("/")[2]) for case in results["results"]
              if case["bytes"] and case["flops"]]
    if not points:
        raise SystemExit("no case in the file has both flops and bytes")
    intensities, read = [intensity for intensity, _, _ in points], ceilings["read_gbps_all"]
    low, high = min(intensities) / 2, max(intensities) * 2
    arithmetic = ceilings.get("fma_gflops_all")  # not measured on every device
    if arithmetic:
        ridge, high = arithmetic / read, max(high, 2 * arithmetic / read)
        axes.plot([low, ridge, high], [low * read, arithmetic, arithmetic], color="0.3", lw=1.5)
        axes.annotate(f"{arithmetic:.0f} GFLOP/s (fp32)", (high, arithmetic), (0, 4), textcoords="offset points", ha="right")
    else:
        ridge = high
        axes.plot([low, high], [low * read, high * read], color="0.3", lw=1.5)
    middle = (low * ridge) ** 0.5
    axes.annotate(f"{read:.0f} GB/s", (middle, middle * read), (-6, 4), textcoords="offset points", ha="right")
    groups = sorted({name.partition("/")[0] for _, _, name in points})
    for i, group in enumerate(groups):
        mine = [(x, y) for x, y, name in points if name.partition("/")[0] == group]
        axes.scatter([x for x, _ in mine], [y for _, y in mine], label=group, color=plt.get_cmap("tab10")(i % 10), s=28, zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s",
             title=f"attune {results['version']} on {results['name']}")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    axes.grid(alpha=0.2, which="both")
    return len(points)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit((__doc__ or "").strip().splitlines()[-1])
    with open(sys.argv[1]) as file:
        results = json.load(file)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    count = plot(results, axes)
    figure.savefig(sys.argv[2], dpi=150)
    print(f"{count} cases in {sys.argv[2]}")


if __name__ == "__main__":
    main()
