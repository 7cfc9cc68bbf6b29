"""The numbers on top of the report, and what the record does not hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from paceline.config import name_drafters
from paceline.report.figures import duration, number, percent
from paceline.report.history import RunHistory


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Saving:
    """What speculation saved: seconds of the rollouts that were run side by side without and with it."""

    plain_s: float
    accelerated_s: float

    @property
    def ratio(self) -> float:
        """How many times faster."""
        return self.plain_s / self.accelerated_s


def saving_of(history: RunHistory) -> Saving | None:
    """The saving if there was a side-by-side run, else None."""
    plain_s = math.fsum(c.plain_s for c in history.comparisons)
    accelerated_s = math.fsum(c.accelerated_s for c in history.comparisons)
    return Saving(plain_s, accelerated_s) if plain_s > 0 and accelerated_s > 0 else None


def headline(history: RunHistory) -> list[Tile]:
    """The tiles, most important first."""
    return [
        _speed(history),
        _reward(history),
        _acceptance(history),
        _tail(history),
        _tokens(history),
        _steps(history),
    ]


def _speed(history: RunHistory) -> Tile:
    saving = saving_of(history)
    if saving is None:
        return Tile("Rollout speed-up", "–", "not measured in this run")
    seconds = f"{duration(saving.plain_s)} plain, {duration(saving.accelerated_s)} accelerated"
    return Tile("Rollout speed-up", f"{saving.ratio:.2f}×", f"measured side by side: {seconds}")


def _reward(history: RunHistory) -> Tile:
    rates = [history.evaluations[step] for step in sorted(history.evaluations)]
    if rates:
        first, last = rates[0], rates[-1]
        value = percent(last.solve_rate, 1)
        note = f"of {number(last.n)} held-out problems at step {last.step}"
        if len(rates) > 1:
            note += f"; {percent(first.solve_rate, 1)} at step {first.step}"
        return Tile("Solve rate", value, note)
    rewards = [train.reward_mean for _, train in history.finished_rows if train.reward_mean is not None]
    if rewards:
        return Tile("Train reward", f"{rewards[-1]:.2f}", f"last step; {rewards[0]:.2f} at the first")
    return Tile("Reward", "–", "none recorded")


def _acceptance(history: RunHistory) -> Tile:
    total = history.total
    mean = total.acceptance_length
    if mean is None:
        known = [a for row in history.rows if (a := row.acceptance_length) is not None]
        mean = sum(known) / len(known) if known else None
    if mean is None:
        return Tile("Acceptance length", "–", "no engine step recorded")
    drafted, accepted = total.drafted, total.accepted
    rate = f"; {percent(accepted / drafted)} of drafts accepted" if drafted else ""
    if model := total.model:
        rate += f", {percent(model / accepted)} of these from the model drafter"
        rate += _split(history, [percent(tokens / accepted) for tokens in _parts(model, total.further)])
    if adopted := total.adopted:
        rate += f", {percent(adopted / accepted)} from the other worker of a race"
    if wasted := total.wasted:
        rate += f"; {number(wasted)} drafted ahead in vain"
        rate += _split(history, [number(tokens) for tokens in _parts(wasted, total.further_wasted)])
    if total.wait_s > 0.0:
        share = percent(total.wait_s / total.busy_s, 1)
        rate += f"; {share} of the steps' time for drafts made elsewhere"
    if branches := total.branches:
        rate += f"; {number(branches)} corrections prepared, {number(total.branch_hits)} came"
    return Tile("Acceptance length", f"{mean:.2f}", f"tokens per request and engine step{rate}")


def _parts(total: int, further: tuple[int, ...]) -> list[int]:
    """What the model drafter and each further drafter have of all."""
    return [total - sum(further), *further]


def _split(history: RunHistory, parts: list[str]) -> str:
    """By drafter, where there are several: by name where the record tells it."""
    if len(parts) < 2:
        return ""
    engine = history.header.config.get("engine") or {}
    folders = (engine.get("model_drafter"), *(engine.get("further_drafters") or ()))
    names = name_drafters([folder for folder in folders if folder])
    if len(names) != len(parts):
        return f" ({' + '.join(parts)} by drafter)"
    return f" ({', '.join(f'{name} {part}' for name, part in zip(names, parts, strict=True))})"


def _tail(history: RunHistory) -> Tile:
    known = [
        (row.tail_s, train.phases.rollout_s)
        for row, train in history.finished_rows
        if row.tail_s is not None and train.phases.rollout_s > 0
    ]
    if not known:
        return Tile("Tail", "–", "no finished rollout recorded")
    share = sum(t for t, _ in known) / sum(r for _, r in known)
    typical = median(t for t, _ in known)
    return Tile(
        "Tail",
        duration(typical),
        f"from {percent(0.9)} finished to the end, median; {percent(share)} of rollout time",
    )


def _tokens(history: RunHistory) -> Tile:
    trains = [train for _, train in history.finished_rows]
    rollout_s = math.fsum(train.phases.rollout_s for train in trains)
    tokens = sum(train.tokens for train in trains)
    if not tokens:
        return Tile("Tokens", number(history.total.generated), "generated")
    rate = f"; {number(tokens / rollout_s)} per second of rollout" if rollout_s > 0 else ""
    value = number(tokens) if tokens < 10**7 else f"{number(tokens / 1e6)}\u00a0M"
    return Tile("Tokens", value, f"in {number(history.num_responses)} responses{rate}")


def _steps(history: RunHistory) -> Tile:
    done, planned = len(history.finished_rows), history.header.num_steps_planned
    value = f"{done} of {planned}" if planned is not None else str(done)
    return Tile("Train steps", value, f"in {duration(history.end_s)}")


def verdict(history: RunHistory) -> str:
    """What the side-by-side runs say, in sentences; empty without one."""
    return " ".join(filter(None, (_exactness(history), _tail_saving(history), _whole_saving(history))))


def _tail_saving(history: RunHistory) -> str | None:
    pairs = [
        (c.plain_tail_s, c.accelerated_tail_s)
        for c in history.comparisons
        if c.plain_tail_s is not None and c.accelerated_tail_s is not None
    ]
    cut = sum(row.num_cut for row in history.steps.values())
    if not pairs or 10 * cut >= max(history.num_responses, 1):
        # The length limit ends the last tenth of a plain rollout in one and the same step: there is no tail to compare.
        return None
    plain_s, accelerated_s = (math.fsum(column) for column in zip(*pairs, strict=True))
    return f"The tail took {duration(accelerated_s)} instead of {duration(plain_s)}."


def _whole_saving(history: RunHistory) -> str | None:
    """What the measured ratio amounts to over all rollouts of the run."""
    saving = saving_of(history)
    rollout_s = math.fsum(train.phases.rollout_s for _, train in history.finished_rows)
    if saving is None or not rollout_s:
        return None
    saved_s = rollout_s * (saving.ratio - 1)
    kind = "saved" if saved_s >= 0 else "cost"
    return f"At this ratio speculation {kind} about {duration(abs(saved_s))} of rollout over the whole run."


def _exactness(history: RunHistory) -> str | None:
    counted = [c for c in history.comparisons if c.diverged_tokens is not None]
    tokens = sum(c.tokens for c in counted)
    if not tokens:
        return None
    diverged = sum(c.diverged_tokens or 0 for c in counted)
    if diverged == 0:
        return f"All {number(tokens)} tokens compared with plain decoding are the same."
    return (
        f"{number(diverged)} of {number(tokens)} tokens differ from plain decoding "
        f"({number(1e6 * diverged / tokens)} per million): the engine was not batch-invariant."
    )


def missing(history: RunHistory) -> list[str]:
    """What a reader should know the record lacks, one sentence each."""
    done, planned = len(history.finished_rows), history.header.num_steps_planned
    found = []
    if history.end is None:
        found.append("The record has no end: the run is still going, or it was cut off.")
    elif history.end.reason != "finished":
        found.append(f"The run ended early ({history.end.reason}) after {duration(history.end.t_s)}.")
    if not done:
        found.append("No train step ended.")
    elif planned is not None and done < planned:
        found.append(f"{done} of {planned} train steps ended.")
    begun = [row.step for row in history.rows if row.train is None and row.step > 0]
    if begun:
        found.append(f"Step {begun[-1]} had begun; what it generated is shown, its training is not.")
    if history.torn:
        found.append("The last line of the record is torn and was left out.")
    if saving_of(history) is None:
        found.append("No side-by-side run with plain decoding: the speed-up is unknown.")
    return found
