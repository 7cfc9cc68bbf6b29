"""A rollout of several methods side by side, as `paceline bench --json RUN/bench.json` leaves it in a run's folder.

`page.py` shows it after the run's own figures. Absent: no section.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import msgspec

from paceline.errors import RecordError
from paceline.record.damage import UNREADABLE
from paceline.report.figures import Axis, Figure, Series, duration, number
from paceline.report.history import MAX_POINTS
from paceline.report.shell import canvas

FILE_NAME = "bench.json"
SECTION = "side-by-side"
REFERENCE = "none"
NAMES = {"plain": "vLLM without Paceline", REFERENCE: "Paceline, no drafts"}
COLOURS = (6, 2, 1, 3, 4, 5)


class Row(msgspec.Struct, frozen=True):
    """One method; times in seconds."""

    method: str
    wall_s: float
    tail_s: float
    tokens_per_s: float
    acceptance_length: float
    compared_tokens: int
    diverged_tokens: int
    ends_s: list[float]
    """When each response of the last repetition finished, ascending."""

    @property
    def name(self) -> str:
        return NAMES.get(self.method, f"Paceline, {self.method} drafts")


class Case(msgspec.Struct, frozen=True):
    """What was generated."""

    model: str
    prompts: int
    samples: int


class SideBySide(msgspec.Struct, frozen=True):
    """What `bench` measured; further fields are passed over."""

    case: Case
    rows: list[Row]


def read_side_by_side(run_dir: Path) -> SideBySide | None:
    """The run's bench; None without one. Raises RecordError for a file that is no result of `paceline bench`."""
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=SideBySide)
    except (OSError, *UNREADABLE) as error:
        raise RecordError(f"{path} is no result of 'paceline bench': {error}; remove it") from error


def side_by_side_figure(found: SideBySide) -> Figure:
    """Responses that are not finished, over the time since the rollout began."""
    series = [_unfinished(row, COLOURS[at % len(COLOURS)]) for at, row in enumerate(found.rows) if row.ends_s]
    return Figure(
        x=Axis("time since the rollout began", unit="s", low=0),
        y=Axis("responses that are not finished", whole=True),
        series=series,
        summary=_summary(found),
    )


def _unfinished(row: Row, colour: int) -> Series:
    """A staircase from all to none, of at most `MAX_POINTS` points: where there are more responses, several a stair."""
    count = len(row.ends_s)
    stride = -(-count // ((MAX_POINTS - 1) // 2))
    xs, ys = [0.0], [float(count)]
    for done in (min(at, count) for at in range(stride, count + stride, stride)):
        xs += [row.ends_s[done - 1]] * 2
        ys += [ys[-1], float(count - done)]
    return Series(name=row.name, x=xs, y=[*ys], colour=colour, style="line")


def _summary(found: SideBySide) -> str:
    case, by_method = found.case, {row.method: row for row in found.rows}
    text = f"{case.prompts} prompts with {case.samples} responses each, by {Path(case.model).name}. "
    reference = by_method.get(REFERENCE)
    fastest = min(
        (row for row in found.rows if row.compared_tokens), key=lambda row: row.wall_s, default=None
    )
    if reference is None or fastest is None:
        return text
    text += (
        f"{fastest.name}: {duration(fastest.wall_s)} instead of {duration(reference.wall_s)} without drafts, "
        f"{reference.wall_s / fastest.wall_s:.2f} times as fast; {number(fastest.diverged_tokens)} of "
        f"{number(fastest.compared_tokens)} tokens differ. "
    )
    if (plain := by_method.get("plain")) is not None:
        text += (
            f"vLLM without Paceline draws other tokens, so compare tokens per second: {number(plain.tokens_per_s)}, "
            f"Paceline {number(fastest.tokens_per_s)}."
        )
    return text


def side_by_side_section(found: SideBySide, figure: Figure) -> str:
    """HTML of the section: figure, summary, one row per method."""
    heads = "".join(
        f"<th>{head}</th>" for head in ("", "rollout s", "tail s", "tokens/s", "accept.", "differ")
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(row.name)}</th><td>{row.wall_s:.1f}</td><td>{row.tail_s:.1f}</td>'
        f"<td>{number(row.tokens_per_s)}</td><td>{row.acceptance_length:.2f}</td>"
        f"<td>{number(row.diverged_tokens) if row.compared_tokens else '–'}</td></tr>"
        for row in found.rows
    )
    return (
        f'<section class="figure" id="{SECTION}"><h2>The same rollout side by side</h2>{canvas(SECTION)}'
        f'<p class="summary">{escape(figure.summary)}</p><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )
