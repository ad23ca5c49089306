"""A picture of a benchmark as SVG: for each case, each kernel's share of the measured limit. It needs no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from tokenspeed_kernel.bench.measure import Row

__all__ = ["plot_svg"]

_WIDTH, _LABEL, _BAR, _GAP, _TITLE, _TOP = 980, 250, 15, 4, 20, 46
_COLOURS: Final = {"chosen": "#2563a8", "other": "#8fb3d9", "torch": "#b8b8b8"}


def plot_svg(rows: Sequence[Row], title: str) -> str:
    """Draw the rows, in their order.

    Args:
        rows: of a benchmark.
        title: device and date.
    Returns:
        The text of an SVG file.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.op}  {row.case}  {row.dtype}", []).append(row)
    scale = (_WIDTH - _LABEL - 150) / max([1.0, *(row.share or 0.0 for row in rows)])
    parts: list[str] = []
    y = _TOP
    for name, group in groups.items():
        bound = f"limit {_number(group[0].limit_us)} us, {group[0].bound}"
        parts.append(f'<text x="8" y="{y + 12}" font-weight="bold">{escape(name)}</text>')
        parts.append(f'<text x="{_WIDTH - 8}" y="{y + 12}" text-anchor="end" fill="#666">{bound}</text>')
        y += _TITLE
        for row in group:
            kind = "chosen" if row.chosen else "torch" if row.kernel.startswith("torch: ") else "other"
            label = f'<text x="{_LABEL - 6}" y="{y + 12}" text-anchor="end">{escape(row.kernel)}</text>'
            if row.share is None or row.time_us is None:
                parts.append(f'{label}<text x="{_LABEL + 4}" y="{y + 12}" fill="#a33">{escape(row.note[:100])}</text>')
            else:
                width = max(1.0, row.share * scale)
                parts.append(label)
                parts.append(f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[kind]}"/>')
                figures = f"{_number(row.time_us)} us, {row.share:.0%}"
                parts.append(f'<text x="{_LABEL + width + 5:.1f}" y="{y + 12}">{figures}</text>')
            y += _BAR + _GAP
        y += 8
    line = _LABEL + scale
    parts.append(f'<line x1="{line:.1f}" y1="{_TOP - 8}" x2="{line:.1f}" y2="{y}" stroke="#a33" stroke-dasharray="3 3"/>')
    parts.append(f'<text x="{line:.1f}" y="{_TOP - 12}" text-anchor="middle" fill="#a33">measured limit</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 10}" font-family="sans-serif" font-size="12">'
    back = f'<rect width="{_WIDTH}" height="{y + 10}" fill="white"/><text x="8" y="20" font-size="14">{escape(title)}</text>'
    return "\n".join([head, back, *parts, "</svg>", ""])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
