"""The schema of `record.jsonl`: one frozen struct per event, told apart by the field `event`.

Times named `t_s`, `t_start_s`, `t_end_s` are seconds since the run began on the run clock
(`RecordWriter.now_s`), which stands still between an interruption and its `--resume`. `docs/run-folder.md`
describes every field. A change that an older reader would misread raises `SCHEMA_VERSION`; a new optional
field or a new kind of event, which readers pass over, does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

SCHEMA_VERSION = 1
FILE_NAME = "record.jsonl"


class Machine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machine that a run (or a resumed part of it) ran on."""

    cpu: str
    """Processor model name."""
    cores: int
    """Cores this process may use."""
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    """Model name of each GPU."""


class Phases(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the wall time of one train step went; the sum is the step's duration."""

    rollout_s: float = 0.0
    reward_s: float = 0.0
    train_s: float = 0.0
    push_weights_s: float = 0.0
    eval_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Duration of the step."""
        return math.fsum(getattr(self, name) for name in self.__struct_fields__)


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="event"):
    """Base of every line; the field `event` tells them apart."""


class Header(_Event, frozen=True, tag="header", omit_defaults=False):
    """The first line."""

    machine: Machine
    versions: dict[str, str]
    """Package name to version: paceline, python, vllm, torch, trl, ..."""
    started_unix_s: float
    config: dict[str, Any] = {}
    """The recipe, resolved, as plain JSON values."""
    model: str = ""
    task: str = ""
    num_steps_planned: int | None = None
    """Train steps the run was asked for."""
    schema: int = SCHEMA_VERSION


class EngineStepSample(_Event, frozen=True, tag="engine"):
    """Consecutive engine steps of one worker, merged (`StepMerger`)."""

    t_s: float
    """When the first of the steps began."""
    num_steps: int
    """Engine steps merged here."""
    step_s: float
    """Wall time of these steps together."""
    num_running: float
    """Decoding requests per step, mean over the steps."""
    num_waiting: float = 0.0
    """Waiting requests, mean over the steps."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Accepted draft tokens, bonus tokens not counted."""
    num_model_tokens: int = 0
    """Of these, drafted by a model drafter, in the engine or ahead of it."""
    further_tokens: tuple[int, ...] = ()
    """Of these, drafted by each of the engine's further drafters."""
    num_adopted_tokens: int = 0
    """Of the accepted ones, those that another worker had generated before (a race)."""
    num_wasted_tokens: int = 0
    """Drafted ahead of the engine behind a rejected one."""
    further_wasted_tokens: tuple[int, ...] = ()
    """Of these, drafted by each further drafter."""
    num_branches: int = 0
    """Likely corrections that a draft worker has prepared."""
    num_branch_hits: int = 0
    """Rejections whose correction was prepared."""
    ahead_tokens: tuple[int, ...] = ()
    """Tokens that draft workers have drafted ahead for this one, by model drafter."""
    ahead_s: tuple[float, ...] = ()
    """What they have spent on them."""
    wait_s: float = 0.0
    """Part of `step_s`: taking drafts that were made elsewhere, and waiting for them."""
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    step: int = 0
    """Train step whose rollout this is; 0 outside of training (evaluation, side by side)."""
    worker: str = ""

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens per decoding request and engine step; 1 when nothing decoded."""
        rows = self.num_running * self.num_steps
        return 1.0 + self.num_accepted_tokens / rows if rows else 1.0


class ResponseDone(_Event, frozen=True, tag="response"):
    """One response finished or was aborted."""

    t_start_s: float
    """When it was submitted to the engine."""
    t_end_s: float
    step: int
    """Train step, from 1; 0 outside of training."""
    group: int
    sample: int
    prompt_tokens: int
    response_tokens: int
    num_steps: int
    """Engine steps in which it decoded."""
    drafted: int = 0
    accepted: int = 0
    finish_reason: str = "stop"
    """`stop`, `length` or `abort`."""
    reward: float | None = None
    worker: str = ""


class ChunkDone(_Event, frozen=True, tag="chunk"):
    """A rollout worker of a fleet has run a chunk of a response, or was lost with it."""

    t_start_s: float
    """When it was given to the worker."""
    t_end_s: float
    step: int
    """Train step, from 1."""
    group: int
    sample: int
    worker: str
    start: int = 0
    """Tokens that the response had before."""
    tokens: int = 0
    """Tokens that it gained."""
    finish_reason: str = "length"
    """`length` (the chunk's limit), `stop`, `abort` (cancelled) or `lost` (with its worker)."""


class HelpDone(_Event, frozen=True, tag="help"):
    """A free worker of a fleet has helped another one with its stragglers."""

    t_start_s: float
    t_end_s: float
    """The same for `take`."""
    step: int
    """Train step, from 1."""
    worker: str
    helped: str
    kind: str
    """`draft` (drafted ahead for it), `copy` (generated a response of its too) or `take` (took one over)."""
    drafter: str = ""
    """draft: with which model drafter, where there are several."""
    outcome: str = ""
    """copy: `won` (ended first), `lost`, or `stopped` before either had ended."""
    num_leads: int = 0
    """copy: times that one of the two got ahead of the other."""


class TrainStep(_Event, frozen=True, tag="train_step"):
    """One train step ended."""

    step: int
    t_start_s: float
    phases: Phases
    tokens: int
    """Response tokens generated in the step's rollout."""
    reward_mean: float | None = None
    reward_std: float | None = None
    tail_s: float | None = None
    """Seconds from 90 % of the responses finished to the last one (`measure_tail`)."""
    acceptance_length: float | None = None
    metrics: dict[str, float | None] = {}
    """Whatever else the trainer reports (loss, KL, gradient norm, ...)."""


class Evaluation(_Event, frozen=True, tag="evaluation"):
    """Held-out evaluation of the policy after train step `step` (0: before training)."""

    t_s: float
    step: int
    solve_rate: float
    """Solved problems / `n`, 0 to 1."""
    n: int
    tokens_mean: float | None = None


class Comparison(_Event, frozen=True, tag="comparison"):
    """The same prompts and keys rolled out plainly and accelerated, side by side: a measured speed-up."""

    t_s: float
    step: int
    responses: int
    tokens: int
    plain_s: float
    accelerated_s: float
    plain_tail_s: float | None = None
    accelerated_tail_s: float | None = None
    diverged_tokens: int | None = None
    """Tokens that differ between the two; 0 = the same, token for token."""


class DrafterStep(_Event, frozen=True, tag="drafter_step"):
    """What an adaptive drafter was worth in the rollout of a train step, and how far its training has come."""

    t_s: float
    step: int
    version: int
    """Times that the engine has got new weights of it; 0: it is not used yet."""
    tried: int = 0
    """Drafts of which the first token was decided by the target."""
    right: int = 0
    """Of these, the first tokens that were the target's."""
    agreement: float | None = None
    """What its trainer measured of the newest one, on responses that it does not learn from: how often a token of it is
    the target's. The engine gets it if it is no worse than the one that it has."""
    first_agreement: float | None = None
    """The same of the drafter that the run began with, where one was given: what it would be without training."""
    trained_s: float = 0.0
    """Processor time spent on training it so far, without loading."""
    trained_tokens: int = 0
    collected_tokens: int = 0
    """Tokens of the rollout whose hidden states the engines have kept, for a draft head."""
    collection_s: float = 0.0
    """Time that the engines' steps have spent on that."""

    @property
    def acceptance(self) -> float | None:
        """Of the first draft token; None where it was not used."""
        return self.right / self.tried if self.tried else None


class DrafterSession(_Event, frozen=True, tag="drafter_session"):
    """An adaptive drafter was trained in the tail of a rollout. There is none where its trainer did not run."""

    t_start_s: float
    t_end_s: float
    step: int
    worker: str = ""
    """Of a fleet: the free worker whose time it was; empty: the one engine's."""
    core_s: float | None = None
    """Processor time that its trainer has used, loading included; None: an older record does not say."""


class Note(_Event, frozen=True, tag="note"):
    """Something worth knowing, for the reader of the report."""

    t_s: float
    text: str


class Failure(_Event, frozen=True, tag="failure"):
    """Something went wrong; the run may or may not have gone on."""

    t_s: float
    text: str


class Resumed(_Event, frozen=True, tag="resumed"):
    """The run was continued; `machine` and `versions` hold from here on."""

    t_s: float
    resumed_unix_s: float
    machine: Machine
    versions: dict[str, str]


class RunEnd(_Event, frozen=True, tag="end"):
    """The run stopped in an orderly way."""

    t_s: float
    reason: str
    """`finished`, `interrupted` (Ctrl-C) or `failed`."""


Event = (
    EngineStepSample
    | ResponseDone
    | ChunkDone
    | HelpDone
    | TrainStep
    | Evaluation
    | Comparison
    | DrafterStep
    | DrafterSession
    | Note
    | Failure
    | Resumed
    | RunEnd
)
Line = Header | Event


def end_of(event: Event) -> float:
    """When the event was over on the run clock, seconds."""
    match event:
        case EngineStepSample():
            return event.t_s + event.step_s
        case ResponseDone() | ChunkDone() | HelpDone() | DrafterSession():
            return event.t_end_s
        case TrainStep():
            return event.t_start_s + event.phases.total_s
        case _:
            return event.t_s


def measure_tail(ends_s: Sequence[float]) -> float:
    """Seconds from the moment when 90 % of the responses had finished to the last one's end; 0 if empty."""
    if not ends_s:
        return 0.0
    ordered = sorted(ends_s)
    return ordered[-1] - ordered[(9 * len(ordered) + 9) // 10 - 1]
