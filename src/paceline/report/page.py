"""Builds the page: HTML around the figures, everything embedded, every text escaped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from paceline.record import Failure, Note
from paceline.report.figures import (
    FIGURES,
    NARROW_SPACE,
    PHASE_COLOURS,
    PHASES,
    Choice,
    Drawing,
    drafter_figure,
    duration,
    metric_figures,
    number,
    percent,
    phase_totals,
)
from paceline.report.headline import headline, missing, verdict
from paceline.report.history import MAX_MESSAGES, RunHistory, StepRow, read_history
from paceline.report.shell import canvas, document, embed, facts_table, write_page
from paceline.report.side_by_side import SECTION as SIDE_BY_SIDE
from paceline.report.side_by_side import (
    SideBySide,
    read_side_by_side,
    side_by_side_figure,
    side_by_side_section,
)
from paceline.report.workers import draw_workers

FILE_NAME = "report.html"
MAX_ROWS = 400
ROOMY = ' class="roomy"'

SECTIONS = {
    "reward": "Reward",
    "lengths": "Response length",
    "running": "Requests decoding",
    "throughput": "Tokens per second",
    "acceptance": "Acceptance length",
    "batch": "Acceptance length by batch size",
    "phases": "Where the time went",
}
DRAFTER = "drafter"
TITLES = SECTIONS | {DRAFTER: "Adaptive drafter"}
HALF_WIDTH = ("reward", "lengths", "acceptance", "batch", DRAFTER)
NUM_COLUMNS = (
    "step",
    "reward",
    "solve rate",
    "responses",
    "tokens",
    "rollout s",
    "step s",
    "tokens/s",
    "accept.",
    "tail s",
    "cut %",
)


def build_report(run_dir: Path) -> Path:
    """Write `<run_dir>/report.html` from `<run_dir>/record.jsonl` and return its path.

    A run that was interrupted, is still going or has recorded nothing yet gives a report that says so.
    RecordError if the record is missing or unreadable, or the page cannot be written.
    """
    page = render(read_history(run_dir), read_side_by_side(run_dir))
    path = Path(run_dir) / FILE_NAME
    write_page(path, page)
    return path


def render(history: RunHistory, bench: SideBySide | None = None) -> str:
    """The page as text. bench: methods that were run side by side."""
    drawings = {name: draw(history) for name, draw in FIGURES.items()}
    if history.drafter_steps:  # few runs have a drafter that grows, and it is nothing that the others lack
        drawings[DRAFTER] = drafter_figure(history)
    metrics = metric_figures(history)
    data: dict[str, Drawing] = {name: d for name, d in drawings.items() if not isinstance(d, str)}
    data |= {f"metric-{i}": figure for i, figure in enumerate(metrics.values())}
    beside = ""
    if bench is not None:
        data[SIDE_BY_SIDE] = figure = side_by_side_figure(bench)
        beside = side_by_side_section(bench, figure)
    body = [
        _head_matter(history),
        _tiles(history),
        _gaps(history),
        '<div class="figures">',
        *(_section(history, name, drawing) for name, drawing in drawings.items()),
        beside,
        "</div>",
        _metrics(list(metrics)),
        _steps(history),
        _messages(history),
        _settings(history),
    ]
    return document(_title(history), "\n".join(body), embed(data))


def _title(history: RunHistory) -> str:
    parts = [part for part in (history.header.task, history.header.model) if part]
    return " · ".join([*parts, "Paceline run"])


def _head_matter(history: RunHistory) -> str:
    header = history.header
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(header.started_unix_s))
    resumed = f", resumed {history.session}×" if history.session else ""
    exact = verdict(history)
    title = escape(header.task or "Run")
    facts = " · ".join(
        escape(part) for part in (header.model, f"started {started}{resumed}", _machine(history)) if part
    )
    lead = f'<p class="lead">{escape(exact)}</p>' if exact else ""
    kicker = '<p class="kicker">Paceline run report</p>'
    return f'<header>{kicker}<h1>{title}</h1><p class="facts">{facts}</p>{lead}</header>'


def _machine(history: RunHistory) -> str:
    machine = history.machine
    gpus = f", {len(machine.gpus)} × {machine.gpus[0]}" if machine.gpus else ""
    return f"{machine.cores} cores {machine.cpu}, {machine.memory_bytes / 2**30:.0f} GiB{gpus}"


def _tiles(history: RunHistory) -> str:
    tiles = "".join(
        f"<div><dt>{escape(tile.label)}</dt><dd><b>{escape(tile.value)}</b><span>{escape(tile.note)}</span></dd></div>"
        for tile in headline(history)
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _gaps(history: RunHistory) -> str:
    gaps = "".join(f"<li>{escape(gap)}</li>" for gap in missing(history))
    return f'<aside class="gaps"><h2>What this report lacks</h2><ul>{gaps}</ul></aside>' if gaps else ""


def _section(history: RunHistory, name: str, drawing: Drawing | str) -> str:
    title = TITLES[name]
    size = " half" if name in HALF_WIDTH else ""
    if isinstance(drawing, str):
        content = f'<p class="none">{escape(drawing)}</p>'
    elif isinstance(drawing, Choice):
        content = _slider(name, drawing) + canvas(name) + '<p class="summary"></p>'
    else:
        content = canvas(name) + f'<p class="summary">{escape(drawing.summary)}</p>'
    extra = _strip(history) if name == "phases" else ""
    below = _workers(history) if name == "running" else ""
    return (
        f'<section class="figure{size}" id="{name}"><h2>{escape(title)}</h2>{extra}{content}{below}</section>'
    )


def _workers(history: RunHistory) -> str:
    """The timelines of a fleet's workers; the slider above shows one of them at a time, the newest first."""
    drawn = draw_workers(history)
    if not drawn:
        return ""
    cells = "".join(f"<div hidden>{one}</div>" for one in drawn[:-1]) + f"<div>{drawn[-1]}</div>"
    return f'<h3 class="inset">Workers</h3><div data-chosen-by="running">{cells}</div>'


def _slider(name: str, choice: Choice) -> str:
    last = len(choice.names) - 1
    hidden = " hidden" if last == 0 else ""
    return (
        f'<label class="choose"{hidden}><span>{escape(choice.label)} '
        f"<output>{escape(choice.names[last])}</output></span>"
        f'<input type="range" min="0" max="{last}" value="{last}" data-choose="{escape(name)}"></label>'
    )


def _strip(history: RunHistory) -> str:
    """All phases of the whole run as one bar of 100 %."""
    totals = phase_totals(history)
    whole = sum(totals.values())
    colours = dict(zip(PHASES.values(), PHASE_COLOURS, strict=True))
    parts = "".join(
        f'<li style="flex-grow:{seconds / whole:.4f}" class="c{colours[name]}" title="{escape(name)}">'
        f"{_strip_label(name, seconds / whole)}</li>"
        for name, seconds in totals.items()
    )
    return f'<ul class="strip">{parts}</ul>' if parts else ""


def _strip_label(name: str, share: float) -> str:
    """Only what has room: nothing below 4 %, the name from 12 %; less on a narrow screen (class `roomy`)."""
    if share < 0.04:
        return ""
    percentage = f"<b{'' if share >= 0.12 else ROOMY}>{percent(share)}</b>"
    return percentage + (
        f"<span{'' if share >= 0.3 else ROOMY}>{escape(name)}</span>" if share >= 0.12 else ""
    )


def _metrics(names: list[str]) -> str:
    if not names:
        return ""
    cells = "".join(
        f"<section><h3>{escape(name)}</h3>{canvas(f'metric-{i}')}</section>" for i, name in enumerate(names)
    )
    return f'<section class="wide"><h2>Trainer metrics</h2><div class="small">{cells}</div></section>'


def _steps(history: RunHistory) -> str:
    rows = [row for row in history.rows if row.step > 0 or row.train]
    if not rows:
        return '<section class="wide"><h2>Steps</h2><p class="none">No train step was recorded.</p></section>'
    stride = -(-len(rows) // MAX_ROWS)
    shown = [row for i, row in enumerate(rows) if i % stride == 0 or row is rows[-1]]
    note = f"<p>1 step in {stride}, of {len(rows)}.</p>" if stride > 1 else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in NUM_COLUMNS)
    lines = "".join(f"<tr>{''.join(_cells(history, row))}</tr>" for row in shown)
    return (
        f'<section class="wide"><h2>Steps</h2>{note}<div class="scroll" tabindex="0"><table class="steps">'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


def _cells(history: RunHistory, row: StepRow) -> Iterator[str]:
    train = row.train
    rollout_s = train.phases.rollout_s if train else 0.0
    tokens = train.tokens if train else row.speculation.generated
    evaluation = history.evaluations.get(row.step)
    yield f'<th scope="row">{row.step}</th>'
    yield _cell(train.reward_mean if train else None, 3)
    yield _cell(100 * evaluation.solve_rate if evaluation else None, 1, NARROW_SPACE + "%")
    yield _cell(row.num_responses or None)
    yield _cell(tokens or None)
    yield _cell(rollout_s or None, 2)
    yield _cell(train.phases.total_s if train else None, 2)
    yield _cell(tokens / rollout_s if rollout_s else None)
    yield _cell(row.acceptance_length, 2)
    yield _cell(row.tail_s, 2)
    yield _cell(100 * row.num_cut / row.num_responses if row.num_responses else None, 1)


def _cell(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "<td>–</td>" if value is None else f"<td>{value:,.{digits}f}{unit}</td>".replace(",", NARROW_SPACE)


def _messages(history: RunHistory) -> str:
    if not history.messages:
        return ""
    lines = "".join(map(_message, history.messages))
    num_left = history.num_messages - MAX_MESSAGES
    more = f"<p>{number(num_left)} more stand in the record.</p>" if num_left > 0 else ""
    table = f'<table class="facts-table">{lines}</table>'
    return f'<section class="wide"><h2>Notes and failures</h2>{table}{more}</section>'


def _message(message: Note | Failure) -> str:
    kind, prefix = ("failure", "Failure: ") if isinstance(message, Failure) else ("note", "")
    when = f'<th scope="row">{escape(duration(message.t_s))}</th>'
    return f'<tr class="{kind}">{when}<td>{prefix}{escape(message.text)}</td></tr>'


def _settings(history: RunHistory) -> str:
    machine = history.machine
    hardware = {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
    }
    hardware |= {f"gpu {i}": name for i, name in enumerate(machine.gpus)}
    tables = (
        ("Settings", dict(flatten(history.header.config))),
        ("Versions", dict(sorted(history.versions.items()))),
        ("Machine", hardware),
    )
    cells = "".join(f"<div><h3>{title}</h3>{facts_table(facts)}</div>" for title, facts in tables)
    return (
        f'<section class="wide"><h2>Settings and versions</h2><div class="settings">{cells}</div></section>'
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping with dotted names; lists stay whole."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
