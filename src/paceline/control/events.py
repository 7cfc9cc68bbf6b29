"""What happens to a fleet, and what is to be done about it: the controller's events and actions.

All frozen, without behaviour beyond packing. A worker is a place with a name; each time an engine is started there it
begins another life, so that what an earlier life still had to say is known as late. Chunks are numbered by the
controller, uniquely over all rollouts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import msgspec

from paceline.config import Variant
from paceline.control.packed import TOKEN_BYTES, Digest, Packed
from paceline.errors import PacelineError
from paceline.planning.help import Drafting, Help
from paceline.types import (
    DrafterScore,
    DraftSharingCounters,
    KvPoolCounters,
    KvUse,
    Progress,
    Response,
    RolloutRequest,
    StepCosts,
    StepObservation,
)

# ---------------------------------------------------------------- what workers tell


class Growth(msgspec.Struct, frozen=True, gc=False):
    """Further tokens of a running chunk. Never its last ones: those come with its Ending."""

    chunk: int
    start: int
    """Index within the response of the first token."""
    piece: Packed
    num_steps: int
    """Engine steps in which the chunk has decoded so far."""


_GROWTH = struct.Struct("=qiii")


class Growths(msgspec.Struct, frozen=True, gc=False):
    """All growths of a report, packed: a worker has hundreds, ten times a second, of a few tokens each."""

    places: bytes = b""  # [num_growths] of `_GROWTH`: chunk, start, number of tokens, num_steps
    packed: Packed = Packed()

    @classmethod
    def pack(cls, growths: Iterable[Growth]) -> Self:
        """One after another."""
        found = list(growths)
        return cls(
            b"".join(_GROWTH.pack(one.chunk, one.start, len(one.piece), one.num_steps) for one in found),
            Packed(
                b"".join(one.piece.tokens for one in found), b"".join(one.piece.logprobs for one in found)
            ),
        )

    def extents(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each growth its chunk, the index of its first token, how many tokens it has, and `num_steps`."""
        return _GROWTH.iter_unpack(self.places)

    def __iter__(self) -> Iterator[Growth]:
        tokens, logprobs, done = self.packed.tokens, self.packed.logprobs, 0
        for chunk, start, count, num_steps in self.extents():
            end = done + count * TOKEN_BYTES
            yield Growth(chunk, start, Packed(tokens[done:end], logprobs[done:end]), num_steps)
            done = end

    def __len__(self) -> int:
        return len(self.places) // _GROWTH.size


@dataclass(frozen=True, slots=True)
class Ending:
    """A chunk ended. Length and digest are of the whole chunk, so that lost or damaged reports come to light."""

    chunk: int
    start: int
    """Index within the response of the chunk's first token."""
    num_tokens: int
    """Of the chunk."""
    rest: Packed
    """The last of them, which no growth has told."""
    digest: Digest
    """Of all its tokens. A simulated worker tells no tokens, and none."""
    num_steps: int
    num_draft_tokens: int
    finish_reason: str
    """"stop" and "error" end the response, "length" the chunk."""
    failure: str | None = None
    """Why the engine gave the response up, where `finish_reason` is "error"."""


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
    draft_sharing: DraftSharingCounters = field(default_factory=DraftSharingCounters)
    """What this life has told the draft servers and heard from them."""
    drafter_score: DrafterScore = field(default_factory=DrafterScore)
    """How often its own model drafter was right in this life."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened on a worker since its last report."""

    num_steps: int
    """Of this life: engine steps, and turns of drafting for other engines."""
    growths: Growths = field(default_factory=Growths)
    endings: tuple[Ending, ...] = ()
    refused: tuple[int, ...] = ()
    """Chunks of another policy version than the engine has."""
    rejected: tuple[tuple[int, str], ...] = ()
    """Chunks that the engine cannot run, and why."""
    has_failed_drafting: bool = False
    """Since the last report drafting for other engines has failed; it has ended."""
    telemetry: Telemetry | None = None
    costs: StepCosts | None = None
    """None: not measured, or of no use."""
    progress: Progress | None = None
    """Of this life; None as for `costs`."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Opened:
    """The fleet begins."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a response from an earlier run."""

    packed: Packed
    """Response tokens from `RolloutRequest.generated` on."""
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
    drafter: int = 0
    """With which of their model drafters the engines draft, by its place in their settings."""
    others: tuple[Drafting, ...] = ()
    """The other ones, as far as it is known what they cost and how often they are right."""
    trainers: int = 0
    """Trainers of a drafter, which train on workers that fall free, one on each."""


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
    draft_addresses: tuple[str, ...] = ()
    """Where other workers may draft for it, with each of its model drafters by place; empty: nowhere."""


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
    help: Help | None = None
    """copy: another worker generates it too; take: another one has done so until now. None: neither."""
    helped: str | None = None
    """That worker."""


@dataclass(frozen=True, slots=True)
class CancelChunk:
    """Stop generating a chunk."""

    worker: str
    life: int
    chunk: int
    keep_kv: bool = False
    """Leave keys and values in the KV pool: the response goes on elsewhere."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """The other worker that generates a chunk's response has these tokens already: take them for drafts."""

    worker: str
    life: int
    chunk: int
    start: int
    """Index within the response of the first token."""
    tokens: bytes
    """[num_tokens] int32"""


@dataclass(frozen=True, slots=True)
class DraftFor:
    """Draft for the responses of these workers, and no others, until a chunk comes, or `Rest`."""

    worker: str
    life: int
    helped: tuple[str, ...]
    addresses: tuple[str, ...]
    drafter: int = 0
    """The place of the model drafter to draft with."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Draft for nobody any more."""

    worker: str
    life: int


@dataclass(frozen=True, slots=True)
class LoseDrafter:
    """Nobody outside drafts for this worker any more."""

    worker: str
    life: int


@dataclass(frozen=True, slots=True)
class TrainDrafter:
    """Let a trainer of the drafter go on: this worker's cores are free."""

    worker: str
    life: int
    leader: str
    """The worker whose trainer leads from here on."""


@dataclass(frozen=True, slots=True)
class EndTraining:
    """Stop the worker's trainer now, before anything else: the worker is needed, or gone, or the rollout is over."""

    worker: str
    life: int
    leader: str | None = None
    """The worker whose trainer leads those that go on; None: none does, or one that begins now."""


@dataclass(frozen=True, slots=True)
class Disagree:
    """Two workers that generate a response do not agree about a token: this one stops, the other goes on."""

    worker: str
    index: int
    """Of the response's request."""
    message: str


@dataclass(frozen=True, slots=True)
class Keep:
    """A response has grown: write it where a restarted driver finds it."""

    index: int
    start: int
    """Index of the first token, counted from `RolloutRequest.generated` on."""
    packed: Packed
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


Order: TypeAlias = RunChunk | CancelChunk | Adopt | DraftFor | Rest | LoseDrafter
Training: TypeAlias = TrainDrafter | EndTraining
Action: TypeAlias = (
    StartWorker | StopWorker | LoadWeights | Order | Training | Disagree | Keep | Deliver | Fail
)
