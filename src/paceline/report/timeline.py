"""A worker timeline: one lane per worker, drawn as an SVG that needs no script.

Lanes are ordered by the caller; what is drawn scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 1000
"""Units of the drawing; the browser stretches them."""


class Stretch(NamedTuple):
    """What a worker does from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    colour: int
    """Index into the palette of `style.css` (1 to 6)."""


def draw_timeline(lanes: Sequence[Sequence[Stretch]], end_s: float, label: str, tail_from_s: float) -> str:
    """HTML of the lanes over an axis in seconds, the tail shaded. label: what a screen reader says."""
    height = max(2.0, min(14.0, 320.0 / max(len(lanes), 1)))
    bottom, scale, gap = height * len(lanes), WIDTH / max(end_s, 1e-9), 0.15 * height
    parts = [
        f'<rect class="tail" x="{tail_from_s * scale:.1f}" y="0" width="{(end_s - tail_from_s) * scale:.1f}" '
        f'height="{bottom:.1f}"/>'
    ]
    for at, lane in enumerate(lanes):
        parts += [
            f'<rect class="bar c{one.colour}" x="{one.start_s * scale:.1f}" y="{at * height + gap / 2:.1f}" '
            f'width="{max((one.end_s - one.start_s) * scale, 0.5):.1f}" height="{height - gap:.1f}"/>'
            for one in lane
        ]
    ticks = "".join(f'<span style="left:{100 * tick / end_s:.2f}%">{tick:g}</span>' for tick in _ticks(end_s))
    return (
        f'<svg class="timeline" style="height:{bottom:.0f}px" viewBox="0 0 {WIDTH} {bottom:.1f}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
        f'<div class="ticks">{ticks}<span class="unit">seconds</span></div>'
    )


def _ticks(end_s: float) -> list[float]:
    """Round seconds from 0 on, at most 6, with room for the unit behind the last."""
    power = 10.0 ** math.floor(math.log10(max(end_s, 1e-9)))
    step = next(power * f for f in (0.2, 0.5, 1.0, 2.0) if end_s / (power * f) <= 5)
    return [step * at for at in range(int(0.9 * end_s / step) + 1)]
