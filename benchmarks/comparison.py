"""Ratios between the systems of one case, and what they have to reach. Pure.

Every ratio is plain vLLM's time divided by that of the system. `ratio`: for the very same tokens, plain vLLM made to
generate as many in each response and timed. `normalised`: for responses of the same lengths, plain vLLM's time summed
up from its step times; rivals end by themselves, with other random numbers and so other lengths, and have only this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bounds import Clairvoyant
from plain_time import PlainTime
from rollouts import Timed

Repetitions = list[list[Timed]]
"""[repetition][rollout]; the rollouts of a repetition count as one, so that no short one decides it."""


@dataclass(frozen=True)
class Bound:
    """What the same steps would have taken without the time of drafting and of rejected tokens, in seconds."""

    wall_s: float
    tail_s: float


def summarise(
    system: str, runs: Repetitions, plain: PlainTime, forced: Repetitions | None, off: Repetitions | None
) -> dict[str, Any]:
    """The row of one system.

    forced: plain vLLM on the same lengths. off: Paceline without drafts on the same prompts and keys.
    """
    walls = [sum(run.wall_s for run in one) for one in runs]
    tails = [sum(run.tail_s for run in one) for one in runs]
    tokens = [sum(run.num_tokens for run in one) for one in runs]
    times = [[plain.seconds(run) for run in one] for one in runs]
    normalised = [sum(all_s for all_s, _ in one) / wall for one, wall in zip(times, walls, strict=True)]
    row: dict[str, Any] = {
        "system": system,
        "wall_s": median(walls),
        "tokens_per_s": median(n / wall for n, wall in zip(tokens, walls, strict=True)),
        "normalised": median(normalised),
        "normalised_range": [min(normalised), max(normalised)],
        "tail_s": median(tails),
        "normalised_tail": ratio(sum(tail_s for one in times for _, tail_s in one), sum(tails)),
        "acceptance_length": sum(tokens) / sum(sum(run.num_steps) for one in runs for run in one),
        "nats_per_token": sum(run.nats for one in runs for run in one) / sum(tokens),
        "mean_length": sum(tokens) / sum(len(run.ids) for one in runs for run in one),
        "walls_s": walls,
        "tails_s": tails,
        "lengths": [[run.lengths for run in one] for one in runs],
        "ends_s": [[[round(end, 3) for end in run.ends_s] for run in one] for one in runs],
    }
    if forced is not None:
        row |= _identical("ratio", runs, forced)
        row["tail_ratio"] = ratio(_total(forced, "tail_s"), sum(tails))
    if off is not None:
        row |= _identical("over_off", runs, off)
        row["equal"] = _ids(runs) == _ids(off)
    return row


def ratio(above: float, below: float) -> float | None:
    """None where there is nothing to compare: a rollout of one response has no tail."""
    return above / below if below else None


def _identical(name: str, runs: Repetitions, others: Repetitions) -> dict[str, Any]:
    found = [
        sum(run.wall_s for run in other) / sum(run.wall_s for run in one)
        for one, other in zip(runs, others, strict=True)
    ]
    return {name: median(found), f"{name}_range": [min(found), max(found)]}


def _total(runs: Repetitions, name: str) -> float:
    return float(sum(getattr(run, name) for one in runs for run in one))


def _ids(runs: Repetitions) -> list[list[list[tuple[int, ...]]]]:
    return [[run.ids for run in one] for one in runs]


def add_bound(row: dict[str, Any], bound: Bound, forced: Repetitions) -> None:
    """Put the ratios that a bound allows into the row."""
    row["without_waste"] = _total(forced, "wall_s") / bound.wall_s
    row["without_waste_tail"] = ratio(_total(forced, "tail_s"), bound.tail_s)


def add_clairvoyant(
    row: dict[str, Any], best: Clairvoyant, forced: Sequence[Timed], runs: Sequence[Timed]
) -> None:
    """Put into the row what the clairvoyant policy would reach. best: what it needs for all of these rollouts."""
    row["clairvoyant"] = sum(run.wall_s for run in forced) / best.free_s
    row["clairvoyant_paid"] = sum(run.wall_s for run in forced) / best.paid_s
    row["clairvoyant_tail"] = ratio(sum(run.tail_s for run in forced), best.tail_s)
    row["share_of_clairvoyant"] = best.free_s / sum(run.wall_s for run in runs)


def add_rival(rows: Sequence[dict[str, Any]], rivals: Sequence[str]) -> None:
    """Compare Paceline's rows with the best of `rivals`, or with plain vLLM where that is faster; both by what does not
    depend on whose tokens they are.
    """
    found = {row["system"]: row["normalised"] for row in rows if row["system"] in rivals}
    if not found:
        return
    best = max(found, key=lambda name: found[name])
    reached = max(found[best], 1.0)  # who loses by speculation switches it off
    for row in rows:
        if row["system"].startswith("paceline"):
            row["best_rival"], row["over_best_rival"] = best, row["normalised"] / reached


# --- bars

OVER_RIVAL = {"1x1": 1.3, "2x4": 1.2, "8x16": 1.05}
"""First pair: Paceline over the best rival."""
CLAIRVOYANT_SHARE = 0.9
"""First pair, 8x16: of what the clairvoyant policy would reach."""
TAIL_RATIO = 2.5
"""First pair, 8x16: of plain vLLM, on identical tokens."""
WAY_TO_CLAIRVOYANT = 1 / 3
"""Second pair: from the best rival to the clairvoyant policy."""


def check_bars(pair: str, case: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached in a case and what was, for Paceline's full row; a bar without its figures is left out."""
    row = next((row for row in rows if row["system"] == "paceline"), {})
    if pair != "countdown":
        way = _way(row)
        return _bars(case, [("way from the best rival to the clairvoyant policy", way, WAY_TO_CLAIRVOYANT)])
    bars = [("over the best rival", row.get("over_best_rival"), OVER_RIVAL[case])]
    if case == "8x16":
        bars.append(("share of the clairvoyant policy", row.get("share_of_clairvoyant"), CLAIRVOYANT_SHARE))
        bars.append(("tail over plain, as many tokens", row.get("tail_ratio"), TAIL_RATIO))
    return _bars(case, bars)


def _way(row: Mapping[str, Any]) -> float | None:
    if not {"over_best_rival", "share_of_clairvoyant", "ratio"} <= set(row):
        return None
    rival = row["ratio"] / row["over_best_rival"]
    return float((row["ratio"] - rival) / (row["ratio"] / row["share_of_clairvoyant"] - rival))


def _bars(case: str, bars: Sequence[tuple[str, float | None, float]]) -> list[dict[str, Any]]:
    return [
        {"case": case, "bar": bar, "needed": needed, "reached": reached, "met": reached >= needed}
        for bar, reached, needed in bars
        if reached is not None
    ]
