"""What happens to a fleet, and what is to be done about it: the controller's events and actions.

All frozen, without behaviour. A worker is a place with a name; each time an engine is started there it begins another
life, so that what an earlier life still had to say is known as late. Chunks are numbered by the controller, uniquely
over all rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from paceline.config import Variant
from paceline.errors import PacelineError
from paceline.types import KvPoolCounters, KvUse, Response, RolloutRequest, StepObservation

# ---------------------------------------------------------------- what workers tell


@dataclass(frozen=True, slots=True)
class Growth:
    """Further tokens of a running chunk. Never its last ones: those come with its Ending."""

    chunk: int
    start: int
    """Index within the response of the first token."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_steps: int
    """Engine steps in which the chunk has decoded so far."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A chunk ended. It tells the whole chunk again, so that lost or damaged reports come to light."""

    chunk: int
    start: int
    """Index within the response of the chunk's first token."""
    tokens: Sequence[int]
    """A tuple from a live worker, a list in a log, a range from a simulated worker: there they are only counted."""
    logprobs: Sequence[float]
    num_steps: int
    num_draft_tokens: int
    finish_reason: str
    """"stop" ends the response, "length" the chunk."""


class WorkerStep(NamedTuple):
    """An engine step, and what it brought."""

    seen: StepObservation
    num_tokens: int
    """Tokens of responses; drafts accepted behind the end of one do not count."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """How a worker is doing."""

    kv: KvUse
    num_running: int
    """Chunks that it has."""
    steps: tuple[WorkerStep, ...]
    """Engine steps since the last report."""
    kv_pool: KvPoolCounters = field(default_factory=KvPoolCounters)
    """What this life has done with the KV pool."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened on a worker since its last report."""

    num_steps: int
    """Engine steps of this life."""
    growths: tuple[Growth, ...] = ()
    endings: tuple[Ending, ...] = ()
    refused: tuple[int, ...] = ()
    """Chunks of another policy version than the engine has."""
    rejected: tuple[tuple[int, str], ...] = ()
    """Chunks that the engine cannot run, and why."""
    telemetry: Telemetry | None = None


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Opened:
    """The fleet begins."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a response from an earlier run."""

    tokens: tuple[int, ...]
    """Response tokens from `RolloutRequest.generated` on."""
    logprobs: tuple[float, ...]
    num_steps: int = 0
    num_draft_tokens: int = 0
    finish_reason: str | None = None
    """None: it is not finished."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A rollout begins."""

    requests: tuple[RolloutRequest, ...]
    """With key and group; numbered by their place here."""
    kept: Mapping[int, Kept] = field(default_factory=dict)
    true_lengths: tuple[int, ...] = ()
    """Response tokens of each request, for the oracle."""
    variant: Variant | None = None
    """How this rollout is dispatched; None: as the settings say."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Nobody wants the rest of the rollout."""


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """There are new weights; everyone has to load them before it generates."""

    version: int


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """An engine has started, with weights of `version`."""

    worker: str
    life: int
    version: int
    num_kv_blocks: int
    block_tokens: int
    max_concurrency: int
    """Most responses that decode at once."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone."""

    worker: str
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A worker has weights of `version` now."""

    worker: str
    life: int
    version: int


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker tells what it did."""

    worker: str
    life: int
    report: Report


@dataclass(frozen=True, slots=True)
class Tick:
    """Time goes on. Any clock that does not go back."""

    now_s: float


WorkerEvent: TypeAlias = WorkerUp | WorkerLost | WeightsLoaded | Reported
Event: TypeAlias = Opened | Submitted | Abandoned | WeightsChanged | Tick | WorkerEvent


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start an engine in this place."""

    worker: str
    life: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Kill a worker that does not answer."""

    worker: str
    life: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Give a worker the weights of `version`."""

    worker: str
    life: int
    version: int


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Generate a chunk."""

    worker: str
    life: int
    chunk: int
    request: RolloutRequest
    """`generated` holds the tokens so far, `max_tokens` is where the chunk ends."""
    version: int
    """Policy version that the engine must have."""
    index: int
    """Place of the response's request in the rollout."""


@dataclass(frozen=True, slots=True)
class CancelChunk:
    """Stop generating a chunk."""

    worker: str
    life: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Keep:
    """A response has grown: write it where a restarted driver finds it."""

    index: int
    start: int
    """Index of the first token, counted from `RolloutRequest.generated` on."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_steps: int
    """Of the whole response so far, as are the draft tokens."""
    num_draft_tokens: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Deliver:
    """A response is finished: hand it over. Nobody will continue it, so what a KV pool holds of it can go."""

    index: int
    response: Response


@dataclass(frozen=True, slots=True)
class Fail:
    """The rollout cannot go on: raise this error once everything else is carried out."""

    error: type[PacelineError]
    message: str


Order: TypeAlias = RunChunk | CancelChunk
Action: TypeAlias = StartWorker | StopWorker | LoadWeights | Order | Keep | Deliver | Fail
