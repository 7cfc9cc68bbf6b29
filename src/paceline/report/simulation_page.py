"""The page of `paceline simulate`: systems side by side, claims beside ours, who waits for whom."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from paceline.report.figures import Axis, Figure, Series, number, percent
from paceline.report.shell import canvas, document, embed, facts_table, write_page
from paceline.report.timeline import Lane, Stretch, draw_timeline
from paceline.sim.comparison import ClaimResult, SystemResult
from paceline.sim.rollout import RolloutResult

MAX_LINES = 6
POINTS = 240


def build_simulation_page(
    path: Path,
    title: str,
    results: Mapping[str, SystemResult],
    claims: Sequence[ClaimResult],
    facts: Mapping[str, Any],
) -> None:
    """Write the page. Raises RecordError when it cannot be written."""
    names = list(results)
    first, best = results[names[0]], min(results.values(), key=lambda one: one.rollout_s)
    lead = (
        f"{best.name} runs the rollout {number(first.rollout_s / best.rollout_s)} times as fast as {first.name}. "
        "Simulated: see the assumptions in the scenario file."
    )
    figures = {"running": _running_figure(results)}
    shown = [first] if best is first else [first, best]
    timelines = "".join(
        f'<section class="wide"><h2>Workers: {escape(one.name)}</h2>{_timeline(one.last)}'
        f'<p class="summary">One lane per worker, those that are busy longest first; '
        f"{percent(one.idle_share)} of their time is idle.{_race_note(one.last)} Shaded: from 90 % of the responses "
        "finished.</p></section>"
        for one in shown
    )
    body = (
        f'<header><p class="kicker">Paceline simulation</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{escape(lead)}</p></header>'
        f'<section class="wide"><h2>Systems</h2>{_systems_table(results)}{_notes(results)}</section>'
        + (
            f'<section class="wide"><h2>Published numbers and ours</h2>{_claims_table(claims)}</section>'
            if claims
            else ""
        )
        + f'<div class="figures"><section class="figure" id="running"><h2>Responses that are not finished</h2>'
        f'{canvas("running")}<p class="summary">{escape(figures["running"].summary)}</p></section></div>'
        + timelines
        + f'<section class="wide"><h2>Scenario</h2>{facts_table(facts)}</section>'
    )
    write_page(path, document(f"{title} · Paceline simulation", body, embed(figures)))


def _systems_table(results: Mapping[str, SystemResult]) -> str:
    baseline = next(iter(results.values()))
    rows = [
        (
            one.name,
            f"{one.rollout_s:.0f}",
            f"{baseline.rollout_s / one.rollout_s:.2f}",
            f"{baseline.step_s / one.step_s:.2f}",
            f"{one.tail_s:.0f}",
            percent(one.idle_share),
            f"{one.acceptance_length:.2f}",
            percent(one.wasted_tokens / one.drafted_tokens) if one.drafted_tokens else "",
        )
        for one in results.values()
    ]
    head = ("", "rollout, s", "x", "x end to end", "tail, s", "idle", "acceptance length", "drafts wasted")
    return _table(head, rows)


def _notes(results: Mapping[str, SystemResult]) -> str:
    """What was planned."""
    return "".join(
        f'<p class="summary">{escape(one.name)}: {escape(one.note)}.</p>'
        for one in results.values()
        if one.note
    )


def _claims_table(claims: Sequence[ClaimResult]) -> str:
    rows = []
    for one in claims:
        paper = f"{one.claim.paper:g}" + (
            f" to {one.claim.paper_to:g}" if one.claim.paper_to is not None else ""
        )
        of = one.claim.of + (f" over {one.claim.over}" if one.claim.over else "")
        rows.append(
            (
                one.claim.text,
                of,
                paper,
                one.ours_text,
                one.difference_text,
                one.claim.standing,
                one.claim.source,
            )
        )
    head = ("", "published", "ours", "difference", "", "of", "source")
    return _table(head, [(r[0], *r[2:6], r[1], r[6]) for r in rows], {4, 5, 6})


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Container[int] = frozenset()) -> str:
    """texts: columns that are not numbers."""
    looks = [' class="text"' if at in texts else "" for at in range(len(head))]
    top = "".join(f"<th{look}>{escape(text)}</th>" for look, text in zip(looks, head, strict=True))
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{looks[at]}>{escape(text)}</td>" for at, text in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    head_row, body = f"<thead><tr>{top}</tr></thead>", f"<tbody>{lines}</tbody>"
    return f'<div class="scroll"><table class="compare">{head_row}{body}</table></div>'


def _running_figure(results: Mapping[str, SystemResult]) -> Figure:
    ranked = sorted(results.values(), key=lambda one: one.rollout_s)
    names = {next(iter(results)), *(one.name for one in ranked[: MAX_LINES - 1])}
    series = []
    for colour, name in enumerate([name for name in results if name in names], start=1):
        ends = np.sort(results[name].last.end_s)
        at = np.linspace(0.0, ends[-1], POINTS)
        left = len(ends) - np.searchsorted(ends, at, side="right")
        series.append(
            Series(name=name, x=[float(f"{v:.5g}") for v in at], y=[float(v) for v in left], colour=colour)
        )
    return Figure(
        x=Axis("time", unit="s", low=0.0),
        y=Axis("responses"),
        series=series,
        summary="The long flat end is what the techniques fight.",
    )


def _race_note(rollout: RolloutResult) -> str:
    return " Second colour: racing for responses that others run." if rollout.num_racers else ""


def _timeline(rollout: RolloutResult) -> str:
    order = np.argsort([-one.busy_s for one in rollout.counters])
    lanes = []
    for at in order.tolist():
        busy = rollout.counters[at].intervals
        lane = [Stretch(start, end, 1) for start, end in busy]
        for since, until in rollout.racing[at]:
            overlaps = ((max(start, since), min(end, until)) for start, end in busy)
            lane += [Stretch(start, end, 3) for start, end in overlaps if start < end]
        lanes.append(Lane([lane]))
    tail_from_s = rollout.rollout_s - rollout.tail_s
    return draw_timeline(lanes, rollout.rollout_s, "When each worker was busy", tail_from_s)
