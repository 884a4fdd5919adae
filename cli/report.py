# SPDX-License-Identifier: Apache-2.0
"""Draws the plots of a replay: report.py REPORT.json PLOTS.html. Exit code 3: matplotlib is missing.

Writes figures as HTML, each with its picture inside, to be placed in the page that the attune command composes. What is text or
lines has the page's colours, by the names of its style sheet, so that a dark page has light ones.
"""

import html
import io
import json
import re
import sys

try:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError:
    sys.exit(3)

# Stand for the page's colours until the picture is written.
INK, SOFT, GRID = "#010203", "#040506", "#070809"
PAGE_COLORS = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--line)"}
PREFILL, DECODE, ACCENT = "#d9822b", "#3b82cc", "#4a9c6d"
MAX_SLICES, MAX_POINTS = 120, 1500
WIDE, HALF = (11.6, 3.1), (5.0, 3.3)

plt.rcParams.update(
    {
        "font.size": 9,
        "font.family": "sans-serif",
        "text.color": INK,
        "axes.labelcolor": SOFT,
        "axes.edgecolor": GRID,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "figure.constrained_layout.use": True,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "svg.fonttype": "path",
    }
)


def si_seconds(value, _=None):
    """0.0012 as "1.2 ms"."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 0.9995 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    return ""


def si_count(value, _=None):
    """12000 as "12k"."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def counted(n, noun):
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


class Report:
    def __init__(self, data):
        self.data = data
        steps = data["steps"]
        self.start = np.array(steps["start"], float)
        self.seconds = np.array(steps["seconds"], float)
        self.layers = data["model"]["num_layers"]
        self.end = self.start + self.seconds * self.layers
        self.prefill = np.array(steps["prefill_tokens"], float)
        self.decode = np.array(steps["decode_tokens"], float)
        self.sequences = np.array(steps["sequences"], float)
        self.pages = np.array(steps["pages_used"], float)
        self.flops = np.array(steps["flops"], float)
        self.bytes = np.array(steps["bytes"], float)
        self.has_prefill = self.prefill > 0
        self.ceilings = data.get("ceilings")
        # Equal slices of the model's clock, wide enough to hold some steps.
        span = float(self.end[-1]) if len(self.end) else 1.0
        self.slices = np.linspace(0, span, int(np.clip(len(self.start) / 8, 4, MAX_SLICES)) + 1)
        self.which = np.clip(np.digitize(self.start, self.slices) - 1, 0, len(self.slices) - 2)

    def total(self, weights):
        """Sum over the steps of each slice."""
        return np.bincount(self.which, weights=weights, minlength=len(self.slices) - 1)

    def thinned(self, values):
        """Edges and heights of a stairs plot over the clock, with runs of steps averaged where there are many."""
        run = -(-len(values) // MAX_POINTS)
        first = np.arange(0, len(values), run)
        heights = np.add.reduceat(values, first) / np.diff(np.append(first, len(values)))
        return heights, np.append(self.start[first], self.end[-1])


def new_axes(size, title, xlabel, ylabel):
    figure, axes = plt.subplots(figsize=size)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def plain_log(axis, formatter):
    """A logarithmic axis with labels at 1, 2 and 5 when it is short, and no minor labels."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high / max(low, 1e-300) < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(formatter))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def legend_above(axes, **options):
    """On the line of the title, at its right."""
    handles = options.pop("handles", axes.get_legend_handles_labels()[0])
    if handles:
        axes.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(1.01, 1.0),
            ncols=3,
            borderaxespad=0.3,
            handlelength=1.4,
            columnspacing=1.2,
            handletextpad=0.5,
            **options,
        )


def step_time(r, size=WIDE):
    figure, axes = new_axes(size, "Step time", "model clock, s", "time of the layer's calls")
    for mask, color, label in ((~r.has_prefill, DECODE, "decode only"), (r.has_prefill, PREFILL, "with prefill")):
        if mask.any():
            axes.scatter(
                r.start[mask], r.seconds[mask], s=7, color=color, alpha=0.5, linewidths=0, label=label, rasterized=True
            )
    axes.set_yscale("log")
    p99 = r.data["summary"]["step_seconds"]["p99"]
    axes.axhline(p99, color=SOFT, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"p99 {si_seconds(p99)}",
        (1, p99),
        xycoords=("axes fraction", "data"),
        xytext=(-3, 3),
        textcoords="offset points",
        ha="right",
        color=SOFT,
        fontsize=8.5,
    )
    plain_log(axes.yaxis, si_seconds)
    legend_above(axes, markerscale=2)
    return (
        figure,
        "Each point is one step: all calls of one layer. The model clock advances by that time for every layer.",
    )


def throughput(r):
    figure, axes = new_axes(HALF, "Throughput", "model clock, s", "tokens/s through the layer")
    busy = r.total(r.seconds)
    with np.errstate(invalid="ignore", divide="ignore"):
        prefill, decode = r.total(r.prefill) / busy, r.total(r.decode) / busy
    middle = (r.slices[:-1] + r.slices[1:]) / 2
    for values, color, label in ((prefill, PREFILL, "prompt tokens"), (decode, DECODE, "decode tokens")):
        # Slices without such tokens leave a gap.
        axes.plot(
            middle,
            np.where(values > 0, values, np.nan),
            color=color,
            linewidth=1.2,
            marker=".",
            markersize=3,
            label=label,
        )
    axes.set_yscale("log")
    plain_log(axes.yaxis, si_count)
    legend_above(axes)
    return figure, "Tokens over the time that the calls took, in equal slices of the clock."


def composition(r):
    figure, axes = new_axes(HALF, "Batch", "model clock, s", "sequences in a step")
    heights, edges = r.thinned(r.sequences)
    axes.stairs(heights, edges, color=DECODE, fill=True, alpha=0.2, linewidth=0)
    axes.stairs(heights, edges, color=DECODE, linewidth=1.1, label="sequences")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, max(1.0, r.sequences.max(initial=0)) * 1.25)
    right = axes.twinx()
    right.spines["right"].set_visible(False)
    right.grid(False)
    right.plot(
        r.start[r.has_prefill],
        r.prefill[r.has_prefill],
        ".",
        color=PREFILL,
        markersize=3,
        alpha=0.7,
        label="prompt tokens",
        rasterized=True,
    )
    right.set_ylim(0, max(1.0, r.prefill.max(initial=0)) * 1.25)
    right.set_ylabel("prompt tokens in a step")
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    handles = axes.get_legend_handles_labels()[0] + right.get_legend_handles_labels()[0]
    legend_above(axes, handles=handles)
    return figure, "Sequences that a step serves, and prompt tokens that it carries beside them."


def kv_pages(r):
    total = r.data["settings"]["num_pages"]
    figure, axes = new_axes(HALF, "KV pages", "model clock, s", "pages in use")
    heights, edges = r.thinned(r.pages)
    axes.stairs(heights, edges, color=ACCENT, fill=True, alpha=0.25, linewidth=0)
    axes.stairs(heights, edges, color=ACCENT, linewidth=1.1)
    peak = r.pages.max(initial=0)
    axes.set_ylim(0, max(peak, 1) * 1.2)
    if total <= axes.get_ylim()[1]:
        axes.axhline(total, color=SOFT, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(si_count))
    preemptions = r.data["summary"]["preemptions"]
    return figure, (
        f"Most at once: {peak:,.0f} of {counted(total, 'page')} of {counted(r.data['settings']['page_size'], 'token')}; "
        f"{counted(preemptions, 'preemption')}."
    )


def roofline(r):
    figure, axes = new_axes(HALF, "Roofline", "FLOP a byte", "GFLOP/s")
    intensity, rate = r.flops / r.bytes, r.flops / r.seconds / 1e9
    for mask, color, label in ((~r.has_prefill, DECODE, "decode only"), (r.has_prefill, PREFILL, "with prefill")):
        if mask.any():
            axes.scatter(
                intensity[mask], rate[mask], s=8, color=color, alpha=0.4, linewidths=0, label=label, rasterized=True
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    text = "What each step computes and moves at least, by its lengths."
    if r.ceilings:
        fma, read = r.ceilings["fma_gflops_all"], r.ceilings["read_gbps_all"]
        low, high = min(intensity.min(), fma / read) / 2, max(intensity.max(), fma / read) * 2
        x = np.geomspace(low, high, 200)
        axes.plot(x, np.minimum(fma, x * read), color=INK, linewidth=1.2)
        axes.set_xlim(low, high)
        axes.annotate(
            f"{fma:.0f} GFLOP/s fp32 FMA",
            (high, fma),
            xytext=(-3, 4),
            textcoords="offset points",
            ha="right",
            color=SOFT,
            fontsize=8.5,
        )
        axes.annotate(
            f"{read:.1f} GB/s read",
            (low, low * read),
            xytext=(8, -3),
            textcoords="offset points",
            va="top",
            color=SOFT,
            fontsize=8.5,
        )
        text += f" The roof is what this machine reaches: {fma:.0f} GFLOP/s and {read:.1f} GB/s."
        text += " Caches and bfloat16 arithmetic can exceed it."
    plain_log(axes.xaxis, si_count)
    plain_log(axes.yaxis, si_count)
    legend_above(axes, markerscale=2)
    return figure, text


def cumulative(axes, sample, color, label):
    if len(sample) == 0:
        return
    values = np.sort(sample)
    axes.step(
        np.append(values, values[-1]),
        np.append(np.arange(len(values)), len(values)) / len(values),
        color=color,
        linewidth=1.4,
        label=label,
    )


def finish_cumulative(axes):
    axes.set_xscale("log")
    plain_log(axes.xaxis, si_seconds)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    legend_above(axes)


def step_distribution(r):
    figure, axes = new_axes(HALF, "Step time, distribution", "time of the layer's calls", "of the steps")
    cumulative(axes, r.seconds[~r.has_prefill], DECODE, "decode only")
    cumulative(axes, r.seconds[r.has_prefill], PREFILL, "with prefill")
    finish_cumulative(axes)
    s = r.data["summary"]["step_seconds"]
    return (
        figure,
        "All steps: " + ", ".join(f"{key} {si_seconds(s[key])}" for key in ("p50", "p90", "p99", "max")) + ".",
    )


def latency(r):
    figure, axes = new_axes(HALF, "Latency", "model clock", "of the requests")
    q = r.data["requests"]
    first = [f - a for a, f in zip(q["arrival"], q["first_token"]) if f is not None]
    between = [
        (e - f) / (n - 1)
        for f, e, n in zip(q["first_token"], q["finish"], q["output_tokens"])
        if e is not None and n > 1
    ]
    whole = [e - a for a, e in zip(q["arrival"], q["finish"]) if e is not None]
    for sample, color, label in (
        (between, DECODE, "between tokens"),
        (first, PREFILL, "first token"),
        (whole, ACCENT, "request"),
    ):
        cumulative(axes, [x for x in sample if x > 0], color, label)
    finish_cumulative(axes)
    return (
        figure,
        f"Attention of {'the one layer' if r.layers == 1 else f'all {r.layers} layers'} alone, waiting included: what the rest of the model takes comes on top.",
    )


def picture(figure, name, style=""):
    """The figure as an element of the page, as wide as there is room."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    title = figure.axes[0].get_title(loc="left")
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    start, rest = svg.split(">", 1)
    start = re.sub(r' (xmlns|xmlns:xlink|width|height|version)="[^"]*"', "", start)
    # Other pictures of the page have the same names.
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", rest)
    for color, variable in PAGE_COLORS.items():
        rest = rest.replace(color, variable)
    return f'{start} role="img" aria-label="{html.escape(title)}"{style}>{rest}'


def main(json_path, html_path):
    with open(json_path, encoding="utf-8") as file:
        report = Report(json.load(file))
    parts = []
    if len(report.start) == 0:
        parts.append('<p class="missing">no step ran: there is nothing to draw</p>')
    else:
        for plot in (step_time, throughput, composition, roofline, kv_pages, step_distribution, latency):
            figure, caption = plot(report)
            name, style = plot.__name__, ""
            if plot is step_time:  # as wide as the page; a phone gets a narrow one instead
                image = picture(figure, name, ' class="wide"') + picture(plot(report, HALF)[0], "narrow", ' class="narrow"')
                style = ' style="grid-column: 1 / -1"'
            else:
                image = picture(figure, name)
            parts.append(f'<figure class="card"{style}>{image}<figcaption>{html.escape(caption)}</figcaption></figure>')
    with open(html_path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
