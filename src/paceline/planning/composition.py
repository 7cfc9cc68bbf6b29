"""Composition: plain decoding, drafters inside the engine, or drafters that draft ahead on devices of their own?

Owns one decision, taken before a rollout: of all ways to use the devices, the one with the highest token rate of a
request, at the batch and the context that the rollout begins with. Inside the engine a drafter takes turns with the
target, and all devices verify (`window.best_window`); on devices of its own it drafts ahead, and fewer verify
(SpecActor algorithm 1, `placement.place`). All ways serve the same requests, so the rate of one request orders them as
that of the cluster does.

Invariant: plain decoding is always among the options; equal rates: plain, then in the order of the drafters, inside
the engine first. KV memory is not asked: a placement whose batch does not fit has to be left out by the caller.
Called by `paceline plan` and by the simulator's Paceline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.planning.latency_profile import LatencyModel, VerifyLatency, verify_s
from paceline.planning.placement import Cluster, place
from paceline.planning.window import Mode, Rules, best_window, profiled_times


@dataclass(frozen=True, slots=True)
class Devices:
    """What a composition is chosen for."""

    num_gpus: int
    num_requests: int
    """Of all devices together, at the start."""
    verify: Mapping[int, VerifyLatency]
    """By engine size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that may draft."""

    name: str
    acceptance: float
    """Probability that a draft token is accepted if those before it were."""
    inside: LatencyModel | None = None
    """D(b) inside the engine, in its steps; None: it cannot draft there."""
    alone: Mapping[int, LatencyModel] = field(default_factory=dict)
    """D(b) on devices of its own, by their number; empty: it cannot draft there."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the devices, with its best window."""

    mode: Mode | None
    """None: plain decoding."""
    drafter: str
    """Empty: none."""
    num_draft_gpus: int
    """Of one group; 0: none of its own."""
    num_verify_gpus: int
    """Of one group."""
    num_groups: int
    batch: int
    """Requests of one group."""
    window: int
    tokens_per_s: float
    """Of one request."""


def rank_options(
    devices: Devices,
    candidates: Sequence[Candidate],
    max_window: int,
    rules: Rules = Rules.PROTOCOL,
    num_alternatives: int = 0,
) -> tuple[Option, ...]:
    """All options, the best first; those of a drafter inside the engine only where it is worth its time.

    num_alternatives: losing placements of each drafter that are listed too. Raises ConfigError if no engine fits the
    devices, EngineError for an acceptance outside [0, 1].
    """
    if not devices.verify or min(devices.verify) > devices.num_gpus:
        raise ConfigError(
            f"no engine of {sorted(devices.verify)} GPUs fits {devices.num_gpus}: give more GPUs"
        )
    options = [*_plain(devices)]
    for one in candidates:
        options += _inside(devices, one, max_window, rules)
        options += _alone(devices, one, max_window, rules, num_alternatives)
    return tuple(sorted(options, key=lambda option: -option.tokens_per_s))


def best_of(options: Sequence[Option], mode: Mode | None) -> Option | None:
    """The first option of this mode; None: there is none."""
    return next((one for one in options if one.mode is mode), None)


def describe(options: Sequence[Option]) -> str:
    """The best option in a line, with the rates that it was chosen over."""
    best = options[0]
    others = [(mode, best_of(options, mode)) for mode in (Mode.DECOUPLED, Mode.COUPLED, None)]
    losing = [
        f"{_NAMES[mode]} {one.tokens_per_s:.0f}" for mode, one in others if one is not None and one != best
    ]
    over = f" (instead: {', '.join(losing)})" if losing else ""
    return f"{_described(best)}: {best.tokens_per_s:.0f} tokens/s per request{over}"


_NAMES = {Mode.DECOUPLED: "ahead", Mode.COUPLED: "in the engine", None: "plain"}


def _described(one: Option) -> str:
    where = f"{one.num_groups} engines of {one.num_verify_gpus} GPUs, {one.batch} requests each"
    if one.mode is Mode.DECOUPLED:
        return (
            f"{one.drafter} drafts {one.window} tokens ahead on {one.num_draft_gpus} more per engine; {where}"
        )
    if one.mode is Mode.COUPLED:
        return f"{one.drafter} drafts {one.window} tokens in the engine; {where}"
    return f"no drafts; {where}"


def _sizes(devices: Devices) -> Iterator[tuple[int, VerifyLatency, int, int]]:
    """(GPUs of an engine, V, engines, requests of each) without drafters of their own."""
    for size, verify in sorted(devices.verify.items()):
        if size <= devices.num_gpus:
            groups = devices.num_gpus // size
            yield size, verify, groups, -(-devices.num_requests // groups)


def _plain(devices: Devices) -> Iterator[Option]:
    for size, verify, groups, batch in _sizes(devices):
        yield Option(None, "", 0, size, groups, batch, 0, 1.0 / float(verify_s(verify, batch, 0)))


def _inside(devices: Devices, one: Candidate, max_window: int, rules: Rules) -> Iterator[Option]:
    if one.inside is None:
        return
    for size, verify, groups, batch in _sizes(devices):
        times = profiled_times(one.inside, verify, batch, max_window)
        best = best_window(one.acceptance, times, Mode.COUPLED, rules)
        if window := int(best.window):
            rate = float(best.tokens_per_s)
            yield Option(Mode.COUPLED, one.name, 0, size, groups, batch, window, rate)


def _alone(
    devices: Devices, one: Candidate, max_window: int, rules: Rules, num_alternatives: int
) -> Iterator[Option]:
    if not any(d <= v and d + v <= devices.num_gpus for d in one.alone for v in devices.verify):
        return  # no larger than its engine, and beside it (`placement.place`)
    cluster = Cluster(devices.num_gpus, devices.num_requests, one.alone, devices.verify)
    found = place(cluster, one.acceptance, max_window, rules, num_alternatives)
    for p in (found.best, *found.alternatives):
        yield Option(
            Mode.DECOUPLED,
            one.name,
            p.num_draft_gpus,
            p.num_verify_gpus,
            p.num_groups,
            p.batch,
            p.window,
            p.tokens_per_s,
        )
