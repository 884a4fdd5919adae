# SPDX-License-Identifier: Apache-2.0
"""Ratios of speed as an SVG, with a rule at 1: a bar a case and peer, its spread as a line; or a strip of dots a peer, a dot a case."""

import math
from html import escape

WIDTH, LABEL, ROW, GROUP, TOP = 900, 300, 16, 6, 44
COLORS = ["#1b6ca8", "#e08a1e", "#3a9a5b", "#8a5ab8", "#9aa5b1"]


def ratio_plot(title, cases):
    """cases: [(name, {peer: (median, least, most)})]. Returns the text of the SVG."""
    cases = [(name, ratios) for name, ratios in cases if ratios]
    peers = list(dict.fromkeys(peer for _, ratios in cases for peer in ratios))
    most = max([1.25, *(high for _, ratios in cases for _, _, high in ratios.values())]) * 1.02
    most = min(most, 4.0)  # a bar that is cut off has its number beside it

    def x(value):
        return LABEL + min(value, most) / most * (WIDTH - LABEL - 60)

    height = TOP + sum(len(ratios) * ROW + GROUP for _, ratios in cases) + 10
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
             f'<text x="10" y="16" font-size="13">{escape(title)}</text>']
    for i, peer in enumerate(peers):
        at = 10 + i * 150
        parts.append(f'<rect x="{at}" y="25" width="10" height="10" fill="{COLORS[i % len(COLORS)]}"/>'
                     f'<text x="{at + 14}" y="34">{escape(peer)}</text>')
    y = TOP
    for name, ratios in cases:
        middle = y + len(ratios) * ROW / 2 + 4
        parts.append(f'<text x="{LABEL - 8}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>')
        for peer, (median, low, high) in ratios.items():
            center = y + ROW / 2
            parts += [f'<rect x="{LABEL}" y="{y + 2}" width="{x(median) - LABEL:.1f}" height="{ROW - 4}" '
                      f'fill="{COLORS[peers.index(peer) % len(COLORS)]}"/>',
                      f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{center}" y2="{center}" stroke="#222"/>',
                      f'<text x="{x(high) + 4:.1f}" y="{center + 4:.0f}">{median:.2f}</text>']
            y += ROW
        y += GROUP
    parts += [f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{TOP - 4}" y2="{height - 6}" stroke="#b00" stroke-dasharray="3 2"/>', "</svg>"]
    return "\n".join(parts) + "\n"


STRIP_WIDTH, EDGE, RADIUS, STEP, STRIPS_TOP = 400, 14, 3, 6.5, 60  # in pixels of a phone
FASTER, SAME, SLOWER = "#1b6ca8", "#9aa5b1", "#c8321e"


def levels_of(places):
    """Of each place, in order: its level 0, 1, -1, 2, ..., the nearest to 0 on which its dot covers no other."""
    last, found = {}, []
    for place in places:
        level, tried = 0, 0
        while place - last.get(level, -math.inf) < STEP:
            tried += 1
            level = (tried + 1) // 2 * (1 if tried % 2 else -1)
        last[level] = place
        found.append(level)
    return found


def strip_plot(title, equal, groups):
    """groups: [(label, [(name, ratio)])]: strips below each other, on one logarithmic scale. Less than `equal` from 1 counts as the same.
    Returns the text of the SVG: the same ratios give the same text on every machine."""
    ratios = [ratio for _, cases in groups for _, ratio in cases]
    first, last = math.floor(math.log2(min(ratios))), math.ceil(math.log2(max(ratios)))

    def x(ratio):
        return round(EDGE + (math.log2(ratio) - first) / (last - first) * (STRIP_WIDTH - 2 * EDGE), 1)

    def color(ratio):
        return SLOWER if ratio < 1 - equal else FASTER if ratio > 1 + equal else SAME

    strips, y = [], STRIPS_TOP
    for label, cases in groups:
        cases = sorted(cases, key=lambda case: (case[1], case[0]))
        levels, slower = levels_of([x(ratio) for _, ratio in cases]), sum(ratio < 1 - equal for _, ratio in cases)
        top = y + 17
        middle = top + 2 * RADIUS - STEP * min(levels)
        y = round(middle + STEP * max(levels) + 2 * RADIUS)
        strips += [f'<text x="{EDGE}" y="{top - 6}">{escape(label)}</text>',
                   f'<text x="{STRIP_WIDTH - EDGE}" y="{top - 6}" text-anchor="end" fill="{SLOWER if slower else "#555"}">'
                   f"{slower} of {len(cases)} slower</text>"]
        strips += [f'<line x1="{x(2**power)}" x2="{x(2**power)}" y1="{top}" y2="{y}" stroke="{"#ddd" if power else "#333"}"/>'
                   for power in range(first, last + 1)]
        strips += [f'<circle cx="{x(ratio)}" cy="{middle + STEP * level:.1f}" r="{RADIUS}" fill="{color(ratio)}">'
                   f"<title>{escape(name)}: {ratio:.2f}</title></circle>" for (name, ratio), level in zip(cases, levels)]
    height = y + 22
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {STRIP_WIDTH} {height}" width="{STRIP_WIDTH * 1.2:.0f}" '
             f'height="{height * 1.2:.0f}" font-family="sans-serif" font-size="12">',
             f"<title>{escape(title)}</title>", f'<rect width="{STRIP_WIDTH}" height="{height}" fill="white"/>',
             f'<text x="{EDGE}" y="18" font-size="14">{escape(title)}</text>']
    for at, (fill, what) in zip((EDGE, 150, 262), ((SLOWER, "Attune is slower"), (SAME, "the same"), (FASTER, "Attune is faster"))):
        parts.append(f'<circle cx="{at + 4}" cy="32" r="{RADIUS}" fill="{fill}"/><text x="{at + 13}" y="36">{what}</text>')
    parts += [f'<text x="{x(2**power)}" y="{where}" text-anchor="middle" fill="#555">{2**power:g}</text>'
              for power in range(first, last + 1) for where in (STRIPS_TOP - 6, y + 14)]
    return "\n".join([*parts, *strips, "</svg>"]) + "\n"
