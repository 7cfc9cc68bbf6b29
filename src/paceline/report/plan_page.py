"""The pages of `paceline profile` and `paceline ladder`: what was measured and fitted, what a drafter would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from paceline.planning.latency_profile import AffineLatency, LatencyFit, StepLatency
from paceline.record.ladder_file import Ladder
from paceline.record.profile import Profile
from paceline.report.figures import Axis, Figure, Mark, Series, percent
from paceline.report.shell import canvas, document, embed, facts_table, write_page

MAX_COLOURS = 6


def build_profile_page(
    path: Path,
    profile: Profile,
    target: LatencyFit[StepLatency],
    drafters: Mapping[str, LatencyFit[AffineLatency]],
) -> None:
    """Write a profile's page. drafters: the fit of each by name. Raises RecordError when it cannot be written."""
    figures = {"steps": _steps_figure(profile, target.model)}
    if drafters:
        figures["drafting"] = _drafting_figure(profile, drafters)
    titles = {"steps": "Engine step", "drafting": "Drafting one token for each request"}
    facts = {
        "dtype": profile.dtype,
        "devices per engine": profile.num_gpus,
        "threads": profile.threads,
        **profile.versions,
    }
    machine = f"{profile.machine.cores} cores {profile.machine.cpu}"
    lead = (
        f"The fitted step time explains {percent(target.r_squared, 1)} of the variance; its largest error is "
        f"{percent(target.largest_relative_error)}."
    )
    write_page(path, _page(profile.target, "Paceline profile", machine, lead, titles, figures, facts))


def build_ladder_page(
    path: Path, ladder: Ladder, acceptance: Mapping[str, float], facts: Mapping[str, Any]
) -> None:
    """Write a ladder's page. acceptance: where each drafter stands. Raises RecordError when it cannot be written."""
    figures = {"ladder": _ladder_figure(ladder, acceptance)}
    titles = {"ladder": "Speed-up over plain decoding"}
    lead = f"Measured on the engine with {ladder.batch} responses, whose right tokens were known."
    write_page(path, _page("Draft ladder", "Paceline", "", lead, titles, figures, facts))


def _page(
    title: str,
    kicker: str,
    subtitle: str,
    lead: str,
    titles: Mapping[str, str],
    figures: Mapping[str, Figure],
    facts: Mapping[str, Any],
) -> str:
    sections = "".join(
        f'<section class="figure" id="{name}"><h2>{escape(titles[name])}</h2>{canvas(name)}'
        f'<p class="summary">{escape(figure.summary)}</p></section>'
        for name, figure in figures.items()
    )
    body = (
        f'<header><p class="kicker">{escape(kicker)}</p><h1>{escape(title)}</h1>'
        f'<p class="facts">{escape(subtitle)}</p><p class="lead">{escape(lead)}</p></header>'
        f'<div class="figures">{sections}</div>'
        f'<section class="wide"><h2>Settings</h2>{facts_table(facts)}</section>'
    )
    return document(f"{title} · {kicker}", body, embed(figures))


def _steps_figure(profile: Profile, model: StepLatency) -> Figure:
    """Measured steps as points, the fit as thin lines, one colour per (batch, context)."""
    families = sorted({(point.context, point.batch) for point in profile.steps})
    shown = _spread(families, MAX_COLOURS)
    series = []
    for colour, (context, batch) in enumerate(shown, start=1):
        points = sorted(
            (p.tokens_per_request * batch, p.step_s)
            for p in profile.steps
            if (p.context, p.batch) == (context, batch)
        )
        tokens = [float(n) for n, _ in points]
        grid = np.linspace(tokens[0], tokens[-1], 32)
        fitted = model.seconds(grid, batch * context)
        name = f"batch {batch}, context {context}"
        series.append(_series(name, tokens, [1e3 * s for _, s in points], colour, "points"))
        series.append(_series(f"{name}, fitted", grid.tolist(), (1e3 * fitted).tolist(), colour, "thin"))
    return Figure(
        x=Axis("tokens of the step", low=0.0),
        y=Axis("milliseconds"),
        series=series,
        summary=f"{len(profile.steps)} shapes; {1e6 * model.context_s:.2f} us of a step per token of context.",
    )


def _drafting_figure(profile: Profile, fits: Mapping[str, LatencyFit[AffineLatency]]) -> Figure:
    measured = {one.name: one.points for one in profile.drafters}
    series = []
    for colour, (name, fit) in enumerate(fits.items(), start=1):
        points = measured[name]
        batches = [float(p.batch) for p in points]
        colour = min(colour, MAX_COLOURS)
        series.append(_series(name, batches, [1e3 * p.token_s for p in points], colour, "points"))
        fitted = 1e3 * fit.model.seconds(batches)
        series.append(_series(f"{name}, fitted", batches, fitted.tolist(), colour, "thin"))
    return Figure(
        x=Axis("requests", low=0.0),
        y=Axis("milliseconds"),
        series=series,
        summary="Lines that are fitted are what a planner uses.",
    )


def _ladder_figure(ladder: Ladder, acceptance: Mapping[str, float]) -> Figure:
    series = [
        _series(one.drafter, ladder.rates, one.speedup, at % MAX_COLOURS + 1, "line")
        for at, one in enumerate(ladder.drafters)
    ]
    return Figure(
        x=Axis("acceptance rate of a draft token", low=0.0, high=1.0),
        y=Axis("times plain decoding"),
        series=series,
        summary="1 is plain decoding; the marks are the drafters' own rates.",
        marks=[Mark(rate, name) for name, rate in acceptance.items()],
    )


def _series(name: str, x: Sequence[float], y: Sequence[float], colour: int, style: str) -> Series:
    rounded = [float(f"{value:.5g}") for value in y]
    return Series(name=name, x=[float(f"{v:.5g}") for v in x], y=[*rounded], colour=colour, style=style)  # type: ignore[arg-type]


def _spread(families: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most so many, evenly over the list, its ends among them."""
    at = np.unique(np.linspace(0, len(families) - 1, min(most, len(families))).round().astype(int))
    return [families[i] for i in at.tolist()]
