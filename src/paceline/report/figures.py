"""The report's figures as plain data; `charts.js` draws them in the reader's browser at the width it finds.

Every figure function takes the history and returns a `Figure`, or a sentence that says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from paceline.record import Phases, measure_tail
from paceline.report.bins import Bins, coarsen
from paceline.report.history import MAX_POINTS, Rollout, RunHistory, Speculation
from paceline.types import Float64Array

MAX_BARS = 120
NARROW_SPACE = "\u202f"
NO_BREAK_SPACE = "\u00a0"
PHASES = {
    "rollout_s": "rollout",
    "reward_s": "reward",
    "train_s": "train",
    "push_weights_s": "push weights",
    "eval_s": "evaluation",
    "other_s": "other",
}
PHASE_COLOURS = (1, 3, 2, 5, 4, 6)


class Axis(msgspec.Struct, frozen=True, omit_defaults=True):
    """One axis; without bounds it fits the data (y always includes 0 unless `floating`)."""

    label: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    whole: bool = False
    """Ticks at whole numbers only."""
    floating: bool = False


ACCEPTANCE_AXIS = Axis("tokens per request and engine step (plain decoding: 1)", low=1.0, floating=True)


class Series(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line or one colour of bars. `colour` is an index into the palette of `style.css` (1 to 6)."""

    name: str
    y: list[float | None]
    x: list[float] = []
    """Empty for bars."""
    colour: int = 1
    style: Literal["line", "thin", "area", "points", "band", "bars"] = "line"
    low: list[float | None] = []
    """Lower edge of a band; `y` is the upper one."""
    unit: str = ""


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A vertical line at `x`, or a shaded stretch from `x` to `until`."""

    x: float
    label: str
    until: float | None = None


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One set of axes."""

    x: Axis
    y: Axis
    series: list[Series]
    summary: str
    """What a screen reader says, and what stands under the figure."""
    edges: list[float] = []
    """Bars only: `len(bars) + 1` edges on the x axis."""
    names: list[str] = []
    """Bars only: what each bar is called; they replace the ticks when `named` is set."""
    named: bool = False
    details: list[str] = []
    """Bars only: further lines of each bar's tooltip."""
    marks: list[Mark] = []


class Choice(msgspec.Struct, frozen=True):
    """Figures of which one is shown at a time; the last one first."""

    label: str
    names: list[str]
    figures: list[Figure]


Drawing = Figure | Choice


def number(value: float) -> str:
    """A number for people: 3 to 4 significant digits, thousands grouped by a narrow space."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}".replace(",", NARROW_SPACE)
    digits = 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:.{digits}f}"


def percent(share: float, digits: int = 0) -> str:
    """A share of 1 as a percentage: `73.5 %`."""
    return f"{100 * share:.{digits}f}{NARROW_SPACE}%"


def duration(seconds: float) -> str:
    """Seconds for people: `0.8 s`, `42.0 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    whole = round(seconds)
    if seconds < 60:
        text = f"{number(seconds)} s"
    elif whole < 3600:
        text = f"{whole // 60} min {whole % 60} s"
    elif whole < 86400:
        text = f"{whole // 3600} h {whole % 3600 // 60} min"
    else:
        text = f"{whole // 86400} d {whole % 86400 // 3600} h"
    return text.replace(" ", NO_BREAK_SPACE)


def _clock(end_s: float) -> tuple[float, str]:
    """Seconds per unit, and the unit, that suit an axis up to `end_s`."""
    if end_s > 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if end_s > 180 else (1.0, "s")


def _floats(values: Sequence[float | None] | Float64Array) -> list[float | None]:
    """JSON-ready, 5 significant digits; what is unknown or not finite becomes null."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]


def _line(name: str, x: Sequence[float], y: Sequence[float | None], **look: object) -> Series:
    """A line of at most `MAX_POINTS` points; longer ones become means of neighbours."""
    values = np.array([math.nan if v is None else v for v in y], dtype=float)
    known = np.isfinite(values).astype(float)
    columns = np.stack(
        [np.asarray(x, dtype=float), np.nan_to_num(values) * known, known, np.ones(len(values))], 1
    )
    columns[:, 1] = np.where(known > 0, values, 0.0)
    sums = coarsen(columns, MAX_POINTS)
    with np.errstate(invalid="ignore", divide="ignore"):
        thinned = _floats(sums[:, 1] / np.where(sums[:, 2] > 0, sums[:, 2], math.nan))
    xs = [float(f"{v:.7g}") for v in sums[:, 0] / sums[:, 3]]
    return msgspec.convert({"name": name, "x": xs, "y": thinned, **look}, Series)


def reward_figure(history: RunHistory) -> Drawing | str:
    """Reward of the training responses (mean, one standard deviation) and solve rate on held-out problems."""
    rows = [train for _, train in history.finished_rows if train.reward_mean is not None]
    evaluations = [history.evaluations[step] for step in sorted(history.evaluations)]
    if not rows and not evaluations:
        return "No train step with a reward and no evaluation was recorded."
    steps = [float(train.step) for train in rows]
    means = [train.reward_mean for train in rows]
    series = []
    spread = [
        (m, s)
        for train in rows
        if (m := train.reward_mean) is not None and (s := train.reward_std) is not None
    ]
    if rows and len(spread) == len(rows):
        high = _line("mean + std", steps, [m + s for m, s in spread])
        low = _line("mean - std", steps, [m - s for m, s in spread])
        series.append(Series(name="± 1 std", x=high.x, y=high.y, low=low.y, style="band", colour=1))
    if rows:
        series.append(_line("train reward", steps, means, colour=1))
    if evaluations:
        rates = [e.solve_rate for e in evaluations]
        series.append(
            _line(
                "held-out solve rate", [float(e.step) for e in evaluations], rates, colour=2, style="points"
            )
        )
    return Figure(
        x=Axis("train step", whole=True),
        y=Axis("reward · solve rate"),
        series=series,
        summary=_reward_summary(history),
    )


def _reward_summary(history: RunHistory) -> str:
    evaluations = [history.evaluations[step] for step in sorted(history.evaluations)]
    parts = []
    rewards = [t.reward_mean for _, t in history.finished_rows if t.reward_mean is not None]
    if rewards:
        edge = max(1, len(rewards) // 10)
        first, last = float(np.mean(rewards[:edge])), float(np.mean(rewards[-edge:]))
        parts.append(f"Train reward went from {first:.2f} to {last:.2f} (first and last tenth of the steps).")
    if len(evaluations) > 1:
        first_rate, last_rate = evaluations[0].solve_rate, evaluations[-1].solve_rate
        parts.append(
            f"Solve rate on {evaluations[-1].n} held-out problems: {percent(first_rate, 1)} at step "
            f"{evaluations[0].step}, {percent(last_rate, 1)} at step {evaluations[-1].step}."
        )
    elif not evaluations:
        parts.append("No held-out evaluation was recorded.")
    return " ".join(parts)


def quantile(bins: Bins, share: float) -> float:
    """The value below which `share` of the first column's counts lie, to one bin width."""
    counts = np.cumsum(bins.used()[:, 0])
    row = int(np.searchsorted(counts, share * counts[-1]))
    return row * bins.width


def length_figure(history: RunHistory) -> Drawing | str:
    """How long the responses were, and which of them the length limit cut."""
    lengths = history.lengths
    if not history.num_responses:
        return "No finished response was recorded."
    merged = coarsen(lengths.used(), 60)
    width = lengths.width * max(1, math.ceil(lengths.num_used / 60))
    edges = [i * width for i in range(len(merged) + 1)]
    p50, p90, p99 = (quantile(lengths, share) for share in (0.5, 0.9, 0.99))
    cut = int(merged[:, 1].sum())
    mean = history.response_tokens / history.num_responses
    series = [
        Series(name="ended by itself", y=_floats(merged[:, 0] - merged[:, 1]), colour=1, style="bars"),
    ]
    if cut:
        series.append(Series(name="cut at the limit", y=_floats(merged[:, 1]), colour=2, style="bars"))
    return Figure(
        x=Axis("response length", unit="tokens", low=0, high=edges[-1]),
        y=Axis("responses"),
        series=series,
        edges=edges,
        names=[f"{number(a)} to {number(max(a, b - 1))} tokens" for a, b in pairwise(edges)],
        marks=[Mark(p50, "p50"), Mark(p90, "p90"), Mark(p99, "p99")],
        summary=(
            f"{number(history.num_responses)} responses, mean {number(mean)} tokens; half are below "
            f"{number(p50)}, {percent(0.9)} below {number(p90)}, {percent(0.99)} below {number(p99)}. "
            f"{percent(cut / history.num_responses, 1)} were cut at the length limit."
        ),
    )


def running_figure(history: RunHistory) -> Drawing | str:
    """Requests decoding over the time of one rollout, the tail marked; the reader chooses the rollout."""
    rollouts = history.drawn_rollouts
    if not rollouts:
        return "No engine step and no finished response was recorded."
    figures = [_one_rollout(rollout) for rollout in rollouts.values()]
    return Choice(label="train step", names=[str(step) for step in rollouts], figures=figures)


def _one_rollout(rollout: Rollout) -> Figure:
    if rollout.running.num_used:
        x, means = _means_over_time(rollout)
        series = [_line("decoding", x, means[:, 0].tolist(), style="area", colour=1)]
        if means[:, 1].max() > 0:
            series.append(_line("waiting", x, means[:, 1].tolist(), style="thin", colour=6))
    else:
        series = [_in_flight(rollout)]
    marks, summary = [], "No response of this rollout finished."
    if rollout.ends_s:
        ends = rollout.ends_s
        end_s, tail_s = max(ends), measure_tail(ends)
        if tail_s > 0:
            marks.append(Mark(end_s - tail_s, f"tail: {number(tail_s)} s", until=end_s))
        marks += [
            Mark(one.t_start_s - rollout.begin_s, "drafter trained", until=one.t_end_s - rollout.begin_s)
            for one in rollout.sessions
        ]
        share = percent(tail_s / end_s if end_s > 0 else 0.0)
        summary = (
            f"{len(ends)} responses in {duration(end_s)}; {percent(0.9)} had finished after "
            f"{duration(end_s - tail_s)}. The tail, the last tenth, took {share} of the rollout."
        )
    return Figure(
        x=Axis("time since the rollout began", unit="s", low=0),
        y=Axis("requests", whole=True),
        series=series,
        marks=marks,
        summary=summary,
    )


def _means_over_time(rollout: Rollout) -> tuple[list[float], Float64Array]:
    """Middle of each stretch of time, requests running and waiting in it; the last is cut at the end.

    Returns ([num_stretches], [num_stretches, 2]).
    """
    sums, width = rollout.running.used(), rollout.running.width
    begins = np.arange(len(sums)) * width
    lasted = np.minimum(width, rollout.last_s - begins)
    kept = (lasted > 0.02 * width) | (begins == 0.0)
    lasted = np.where(lasted > 0, lasted, width)[kept]
    means: Float64Array = sums[kept] / lasted[:, None]
    return (begins[kept] + lasted / 2).tolist(), means


def _in_flight(rollout: Rollout) -> Series:
    """Responses between submission and end, where no engine step was recorded."""
    starts, ends = np.sort(rollout.starts_s), np.sort(rollout.ends_s)
    x = np.linspace(0.0, ends[-1], 300)
    count = np.searchsorted(starts, x, side="right") - np.searchsorted(ends, x, side="right")
    return _line("in flight", x.tolist(), count.astype(float).tolist(), style="area", colour=1)


def throughput_figure(history: RunHistory) -> Drawing | str:
    """Generated tokens per second during rollouts, over the whole run, and the mean of each rollout."""
    used = history.throughput.used()
    if not used[:, 1].any():
        return "No engine step was recorded."
    scale_s, unit = _clock(history.end_s)
    busy = used[:, 1] > 0
    busy_s = np.where(busy, np.minimum(used[:, 1], history.throughput.width), math.nan)
    rates = np.where(busy, used[:, 0] / busy_s, math.nan)
    x = history.throughput.centres() / scale_s
    series = [_line("momentary", x.tolist(), rates.tolist(), style="thin", colour=6, unit="tokens/s")]
    means = [
        ((t.t_start_s + t.phases.rollout_s / 2) / scale_s, t.tokens / t.phases.rollout_s)
        for _, t in history.finished_rows
        if t.phases.rollout_s > 0
    ]
    if means:
        xs, ys = zip(*means, strict=True)
        series.append(_line("mean of a rollout", xs, ys, colour=1, unit="tokens/s"))
    tokens, lasted_s = used.sum(axis=0).tolist()
    return Figure(
        x=Axis("run time", unit=unit, low=0),
        y=Axis("generated tokens per second"),
        series=series,
        summary=(
            f"{number(tokens)} tokens in {duration(lasted_s)} of engines' rollouts: "
            f"{number(tokens / lasted_s if lasted_s else 0.0)} per second and engine."
        ),
    )


def acceptance_figure(history: RunHistory) -> Drawing | str:
    """Acceptance length of each train step's rollout, and beside a model drafter what the model-free one gave of it."""
    known = [(float(row.step), a) for row in history.rows if (a := row.acceptance_length) is not None]
    if not known:
        return "No acceptance length was recorded."
    xs, ys = zip(*known, strict=True)
    total = history.total
    mean = total.acceptance_length or float(np.mean(ys))
    rate = (
        f" {percent(total.accepted / total.drafted)} of the draft tokens were accepted."
        if total.drafted
        else ""
    )
    return Figure(
        x=Axis("train step", whole=True),
        y=ACCEPTANCE_AXIS,
        series=[_line("acceptance length", xs, ys, colour=3), *_model_free(history)],
        summary=f"On average {mean:.2f} tokens per request and engine step.{rate}",
    )


def _model_free(history: RunHistory) -> list[Series]:
    """The acceptance length by the model-free drafter's accepted tokens alone; none without a model drafter."""
    found = [
        (float(row.step), length)
        for row in history.rows
        if (length := row.speculation.model_free_length) is not None
    ]
    if not history.total.model or not found:
        return []
    xs, ys = zip(*found, strict=True)
    return [_line("of this, model-free drafts", xs, ys, colour=6, style="thin")]


def drafter_figure(history: RunHistory) -> Drawing | str:
    """How often the first token of an adaptive drafter was right in each train step, and what its trainer expected: of
    it, and of the drafter that the run began with.

    Only for a run that has one; words alone while neither is known.
    """
    steps = [history.drafter_steps[step] for step in sorted(history.drafter_steps)]
    xs = [float(one.step) for one in steps]
    used = [one.acceptance for one in steps]
    last = steps[-1]
    reached = next((one for one in reversed(used) if one is not None), None)
    result = (
        "The engine has not used it yet."
        if reached is None
        else f"In its last rollout {percent(reached)} of its first draft tokens were right."
    )
    summary = (
        f"{result} Trained for {duration(last.trained_s)} of processor time on {number(last.trained_tokens)} "
        f"tokens, in sessions of {duration(history.session_s)} together{_cores(history.session_core_s)}."
    )
    expected, first = [one.agreement for one in steps], [one.first_agreement for one in steps]
    if all(share is None for share in used + expected):
        return summary
    frozen = [_line("as it was at first, by its trainer", xs, first, colour=2, style="thin")]
    if last.first_agreement is not None and last.agreement is not None:
        summary += (
            f" Its trainer expects {percent(last.agreement)} of it, and {percent(last.first_agreement)} of the drafter "
            "that the run began with."
        )
    return Figure(
        x=Axis("train step", whole=True),
        y=Axis("share of first draft tokens that are right", low=0.0, high=1.0),
        series=[
            _line("in the engine", xs, used, colour=3),
            _line("expected by its trainer", xs, expected, colour=6, style="thin"),
            *(frozen if any(share is not None for share in first) else ()),
        ],
        summary=summary,
    )


def _cores(core_s: float | None) -> str:
    """What sessions have used, behind how long they took; nothing where that is not known."""
    return "" if core_s is None else f" ({core_s:.1f} core-seconds)"


def batch_figure(history: RunHistory) -> Drawing | str:
    """Acceptance length by the number of requests decoding together."""
    by_batch, total = history.by_batch, history.total
    if not by_batch:
        return "No engine step was recorded."
    sizes, groups = list(by_batch), list(by_batch.values())
    names = [str(2**s) if s == 0 else f"{2**s}–{2 ** (s + 1) - 1}" for s in sizes]
    return Figure(
        x=Axis("requests decoding together"),
        y=ACCEPTANCE_AXIS,
        series=[
            Series(
                name="acceptance length",
                y=_floats([g.acceptance_length for g in groups]),
                colour=3,
                style="bars",
            )
        ],
        edges=[float(i) for i in range(len(sizes) + 1)],
        names=names,
        named=True,
        details=[_batch_detail(group, total) for group in groups],
        summary=_batch_summary(names, groups),
    )


def _batch_summary(names: list[str], groups: list[Speculation]) -> str:
    if len(groups) == 1:
        return f"All steps had {names[0]} requests decoding."
    small, large = (group.acceptance_length or 1.0 for group in (groups[0], groups[-1]))
    room = ": the fuller the batch, the fewer drafts are worth their time." if large < small else "."
    return f"{small:.2f} with {names[0]} decoding, {large:.2f} with {names[-1]}{room}"


def _batch_detail(group: Speculation, total: Speculation) -> str:
    lines = [
        f"drafted per request and step: {number(group.drafted / group.request_steps)}",
        f"acceptance rate: {percent(group.accepted / group.drafted)}" if group.drafted else "nothing drafted",
    ]
    if group.busy_s and total.busy_s:
        lines.append(f"tokens per second: {number(group.generated / group.busy_s)}")
        lines.append(f"share of engine time: {percent(group.busy_s / total.busy_s, 1)}")
    return "\n".join(lines)


def phase_totals(history: RunHistory) -> dict[str, float]:
    """Seconds of each phase over all finished steps, phases that took no time left out."""
    trains = [train for _, train in history.finished_rows]
    totals = {name: math.fsum(getattr(t.phases, field) for t in trains) for field, name in PHASES.items()}
    return {name: seconds for name, seconds in totals.items() if seconds > 0}


def phase_figure(history: RunHistory) -> Drawing | str:
    """Seconds of each phase, stacked per train step (neighbours averaged when there are many)."""
    trains = [train for _, train in history.finished_rows]
    totals = phase_totals(history)
    if not totals:
        return "No train step ended, so no phase was timed."
    fields = [field for field in PHASES if PHASES[field] in totals]
    seconds = np.array([[getattr(t.phases, field) for field in fields] + [1.0] for t in trains])
    merged = coarsen(seconds, MAX_BARS)
    means = merged[:, :-1] / merged[:, -1:]
    first = np.concatenate([[0], np.cumsum(merged[:, -1])]).astype(int)
    spans = [(trains[a].step, trains[b - 1].step) for a, b in pairwise(first)]
    series = [
        Series(
            name=PHASES[field], y=_floats(means[:, i]), colour=_phase_colour(field), style="bars", unit="s"
        )
        for i, field in enumerate(fields)
    ]
    whole_s = sum(totals.values())
    shares = ", ".join(
        f"{name} {percent(s / whole_s)}" for name, s in sorted(totals.items(), key=lambda item: -item[1])
    )
    return Figure(
        x=Axis("train step", whole=True),
        y=Axis("seconds per step"),
        series=series,
        edges=[a - 0.5 for a, _ in spans] + [spans[-1][1] + 0.5],
        names=[f"step {a}" if a == b else f"steps {a} to {b}, mean" for a, b in spans],
        details=[f"together {duration(total_s)}" for total_s in means.sum(axis=1)],
        summary=f"Of {duration(whole_s)} in {len(trains)} steps: {shares}.",
    )


def _phase_colour(field: str) -> int:
    return PHASE_COLOURS[list(Phases.__struct_fields__).index(field)]


def metric_figures(history: RunHistory) -> dict[str, Figure]:
    """One small figure for each of the first six further metrics that vary."""
    rows = [train for _, train in history.finished_rows]
    figures: dict[str, Figure] = {}
    for name in sorted({name for train in rows for name in train.metrics}):
        points = [(float(t.step), v) for t in rows if (v := t.metrics.get(name)) is not None]
        if len({v for _, v in points}) > 1 and len(figures) < 6:
            xs, ys = zip(*points, strict=True)
            figures[name] = Figure(
                x=Axis("train step", whole=True),
                y=Axis("", floating=True),
                series=[_line(name, xs, ys, colour=1)],
                summary=f"{number(ys[0])} at first, {number(ys[-1])} at last.",
            )
    return figures


FIGURES: dict[str, Callable[[RunHistory], Drawing | str]] = {
    "reward": reward_figure,
    "lengths": length_figure,
    "running": running_figure,
    "throughput": throughput_figure,
    "acceptance": acceptance_figure,
    "batch": batch_figure,
    "phases": phase_figure,
}
