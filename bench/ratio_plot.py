# SPDX-License-Identifier: Apache-2.0
"""Ratios of speed as an SVG: a bar a case and peer, its spread as a line, and a rule at 1."""

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
