"""A worker timeline: one lane per worker, drawn as an SVG that needs no script.

Lanes and their rows are ordered by the caller; what is drawn scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH = 1000
"""Units of the drawing; the browser stretches them."""
USUAL_HEIGHT, MOST_HEIGHT = 340.0, 900.0
LANE_GAP = 6.0
"""Between lanes of several rows."""
NAME_HEIGHT = 15.0


class Stretch(NamedTuple):
    """What a worker does from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    colour: int
    """Index into the palette of `style.css` (1 to 6)."""
    title: str = ""
    """What the reader sees who points at it; stretches of one title light up together."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker."""

    rows: Sequence[Sequence[Stretch]]
    """From top to bottom. Within a row, later ones are drawn over earlier ones."""
    name: str = ""
    losses: Sequence[tuple[float, str]] = ()
    """When the worker was lost, and what to say of it."""


class _Band(NamedTuple):
    """Where a lane is drawn."""

    lane: Lane
    top: float
    bottom: float


def draw_timeline(lanes: Sequence[Lane], end_s: float, label: str, tail_from_s: float) -> str:
    """HTML of the lanes over an axis in seconds, the tail shaded. label: what a screen reader says."""
    end_s = max(end_s, 1e-9)
    row_height, bands = _lay_out(lanes)
    bottom = bands[-1].bottom if bands else 0.0
    scale = WIDTH / end_s
    tail = (
        f'<rect class="tail" x="{tail_from_s * scale:.1f}" y="0" width="{(end_s - tail_from_s) * scale:.1f}" '
        f'height="{bottom:.1f}"/>'
    )
    shapes = [tail, *_bars(bands, row_height, scale), *_losses(bands, scale)]
    ticks = "".join(f'<span style="left:{100 * tick / end_s:.2f}%">{tick:g}</span>' for tick in _ticks(end_s))
    drawing = (
        f'<svg class="timeline" style="height:{bottom:.0f}px" viewBox="0 0 {WIDTH} {bottom:.1f}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'
        f'<div class="ticks">{ticks}<span class="unit">s</span></div>'
    )
    names = _names(bands)
    return f'<div class="lanes">{names}<div>{drawing}</div></div>' if names else drawing


def _lay_out(lanes: Sequence[Lane]) -> tuple[float, list[_Band]]:
    """Height of a row, and where each lane lies."""
    num_rows = max(sum(max(len(lane.rows), 1) for lane in lanes), 1)
    height = max(min(2.0, MOST_HEIGHT / num_rows), min(14.0, USUAL_HEIGHT / num_rows))
    gap = LANE_GAP if any(len(lane.rows) > 1 for lane in lanes) else 0.0
    bands = []
    top = gap / 2
    for lane in lanes:
        bottom = top + height * max(len(lane.rows), 1)
        bands.append(_Band(lane, top, bottom))
        top = bottom + gap
    return height, bands


def _bars(bands: Sequence[_Band], row_height: float, scale: float) -> Iterator[str]:
    """One shape for all stretches of one colour and title."""
    margin = 0.15 * row_height
    paths: dict[tuple[int, str], list[str]] = {}
    for lane, top, _ in bands:
        for number, row in enumerate(lane.rows):
            y = _short(top + number * row_height + margin / 2)
            for one in row:
                width = (one.end_s - one.start_s) * scale
                shown = _short(max(width - 1.0 if one.title and width > 4.0 else width, 0.5))
                paths.setdefault((one.colour, one.title), []).append(
                    f"M{_short(one.start_s * scale)} {y}h{shown}v{_short(row_height - margin)}h-{shown}z"
                )
    for (colour, title), path in paths.items():
        shape = f'class="bar{" named" if title else ""} c{colour}" d="{"".join(path)}"'
        yield f"<path {shape}><title>{escape(title)}</title></path>" if title else f"<path {shape}/>"


def _losses(bands: Sequence[_Band], scale: float) -> Iterator[str]:
    for lane, top, bottom in bands:
        for at_s, text in lane.losses:
            yield (
                f'<path class="lost" d="M{_short(at_s * scale)} {_short(top)}V{_short(bottom)}">'
                f"<title>{escape(text)}</title></path>"
            )


def _names(bands: Sequence[_Band]) -> str:
    """The lanes' names, as many as there is room for."""
    spans, free_from = [], -NAME_HEIGHT
    for lane, top, bottom in bands:
        middle = (top + bottom) / 2
        if lane.name and middle - NAME_HEIGHT / 2 >= free_from:
            spans.append(f'<span style="top:{middle - NAME_HEIGHT / 2:.0f}px">{escape(lane.name)}</span>')
            free_from = middle + NAME_HEIGHT / 2
    width = max((len(band.lane.name) for band in bands), default=0)
    return f'<div class="names" style="width:{width}ch">{"".join(spans)}</div>' if spans else ""


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _ticks(end_s: float) -> list[float]:
    """Round seconds from 0 on, at most 6, with room for the unit behind the last."""
    power = 10.0 ** math.floor(math.log10(max(end_s, 1e-9)))
    step = next(power * f for f in (0.2, 0.5, 1.0, 2.0) if end_s / (power * f) <= 5)
    return [step * at for at in range(int(0.9 * end_s / step) + 1)]
