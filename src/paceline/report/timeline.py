"""A worker timeline: one lane per worker, drawn as an SVG that needs no script.

Lanes are ordered by the caller; what is drawn scales with the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, AXIS = 1000, 26
"""Units of the drawing; the browser scales them."""


class Stretch(NamedTuple):
    """What a worker does from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    colour: int
    """Index into the palette of `style.css` (1 to 6)."""


def draw_timeline(lanes: Sequence[Sequence[Stretch]], end_s: float, label: str, tail_from_s: float) -> str:
    """SVG of the lanes, the tail shaded. label: what a screen reader says. Lanes without anything are drawn empty."""
    height = max(2.0, min(14.0, 320.0 / max(len(lanes), 1)))
    bottom = height * len(lanes)
    scale = WIDTH / max(end_s, 1e-9)
    parts = [
        f'<rect class="tail" x="{tail_from_s * scale:.1f}" y="0" width="{(end_s - tail_from_s) * scale:.1f}" '
        f'height="{bottom:.1f}"/>'
    ]
    gap = 0.15 * height
    for at, lane in enumerate(lanes):
        parts += [
            f'<rect class="bar c{one.colour}" x="{one.start_s * scale:.1f}" y="{at * height + gap / 2:.1f}" '
            f'width="{max((one.end_s - one.start_s) * scale, 0.5):.1f}" height="{height - gap:.1f}"/>'
            for one in lane
        ]
    for tick in _ticks(end_s):
        x, anchor = tick * scale, "end" if tick * scale > WIDTH - 30 else "start" if tick == 0 else "middle"
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 5:.1f}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="{anchor}">{tick:g} s</text>')
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {bottom + AXIS:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _ticks(end_s: float) -> list[float]:
    power = 1.0
    while power * 10 <= end_s:
        power *= 10
    step = next(power * f for f in (0.2, 0.5, 1.0, 2.0, 5.0) if end_s / (power * f) <= 6)
    return [step * at for at in range(int(end_s / step) + 1)]
