"""Rollouts that are watched: recorded step by step, shown while they run, interruptible, comparable.

Called by training_run.py for training rollouts, evaluations and comparisons; on one engine (`WatchedRollouts`) or on a
fleet (fleet_rollouts.py). Adds nothing to the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import RewardSettings
from paceline.control.events import Keep
from paceline.control.live_response import LiveResponse
from paceline.control.packed import Packed
from paceline.engine.rollout_engine import RolloutEngine
from paceline.fleet.rewards import Reward
from paceline.record import Comparison, Note, RecordWriter, measure_tail
from paceline.terminal.interruption import Interruption
from paceline.terminal.meter import RolloutMeter
from paceline.training.randomness import unchanged_randomness
from paceline.types import DrafterScore, Response, RolloutRequest, StepObservation

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.fleet.chunk_log import ChunkSpan
    from paceline.fleet.journal import Journal


DEAD_DRAFTER = (
    "the target accepts nothing from the model drafter: random, stale or lost weights, or another tokenizer (its "
    "warning in the log says what is likely); the run goes on without it"
)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished rollout and when it was made, on the run clock."""

    responses: tuple[Response, ...]
    begin_s: float
    ends_s: tuple[float, ...]  # [num_responses]
    rewards: tuple[float | None, ...] = ()
    """By response, where some were scored while others still ran, or have failed; None: the trainer scores it."""
    chunks: tuple[ChunkSpan, ...] = ()
    """On a fleet: what ran where, on the run clock."""

    @property
    def wall_s(self) -> float:
        """From the first request to the last response."""
        return max(self.ends_s) - self.begin_s

    @property
    def tail_s(self) -> float:
        """From 90 % of the responses finished to the last one."""
        return measure_tail(self.ends_s)

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(response.logprobs) for response in self.responses)

    @property
    def acceptance_length(self) -> float:
        """Tokens per response and engine step."""
        return self.num_tokens / max(sum(response.num_steps for response in self.responses), 1)


class Watcher(Protocol):
    """Who is told how a rollout is going."""

    def show_rollout(self, meter: RolloutMeter) -> None:
        """Called after every engine step; must be cheap."""
        ...


class Engines(Protocol):
    """One engine or many, between rollouts."""

    def push_weights(self, weights: Iterable[tuple[str, Any]], *, version: int | None = None) -> int:
        """Take new weights; returns the policy version."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget cached key-value blocks and the suffix trees of all groups."""
        ...

    def set_drafting(self, wanted: bool) -> None:
        """Switch drafting off, for plain decoding, or on again."""
        ...

    def use_drafter(self, place: int) -> None:
        """Draft with another of the model drafters, by its place in the settings."""
        ...

    def drafter_score(self) -> DrafterScore:
        """How often the model drafter was right, counted since the start."""
        ...

    @property
    def vllm_engine(self) -> Any:
        """The vLLM engine behind it."""
        ...


class Rollouts(ABC):
    """Runs requests, one rollout at a time."""

    def __init__(
        self, engine: Engines, record: RecordWriter, watcher: Watcher, interruption: Interruption
    ) -> None:
        self.engine = engine
        self.record = record
        self.watcher = watcher
        self.interruption = interruption

    def push_weights(self, weights: Iterable[tuple[str, Any]], version: int | None) -> int:
        """Give the engines new weights of the policy; returns its version."""
        return self.engine.push_weights(weights, version=version)

    @abstractmethod
    def run(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        step: int | None,
        journal: Journal | None = None,
    ) -> Rollout:
        """Generate all requests. Engine steps are recorded for train step `step`; None records none.

        journal: keeps what responses have so far; what it knows of them is not generated again.

        Raises Interrupted between two engine steps.
        """

    def settle(self) -> None:  # noqa: B027 (most have nothing beside it)
        """Called after the last update of a step: wait for what has gone on beside the learner."""

    def compare(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, step: int, plain_first: bool
    ) -> tuple[Rollout, Comparison]:
        """Generate the same requests with and without drafts, each from a cold start, and compare the tokens.

        Returns the accelerated rollout, the only one that is recorded as the step's, and the comparison.
        """
        done: dict[bool, Rollout] = {}
        self.settle()
        for plain in (plain_first, not plain_first):
            self.engine.reset_prefix_cache()
            with self._drafting(not plain):
                done[plain] = self.run(requests, params, None if plain else step)
        plain_rollout, fast = done[True], done[False]
        diverged = sum(map(_count_diverged, plain_rollout.responses, fast.responses))
        return fast, Comparison(
            t_s=self.record.now_s(),
            step=step,
            responses=len(requests),
            tokens=fast.num_tokens,
            plain_s=plain_rollout.wall_s,
            accelerated_s=fast.wall_s,
            plain_tail_s=plain_rollout.tail_s,
            accelerated_tail_s=fast.tail_s,
            diverged_tokens=diverged,
        )

    def _note_alarms(self, before: int) -> None:
        """Note that the drafter was found dead. before: alarms before the rollout."""
        if self.engine.drafter_score().alarms > before:
            self.record.write(Note(t_s=self.record.now_s(), text=DEAD_DRAFTER))

    def _note_failures(self, rewards: Sequence[Reward | None]) -> tuple[float | None, ...]:
        """The rewards, as `Rollout` has them; why some are those of a failure is noted in the record."""
        failures = [reward.failure for reward in rewards if reward is not None and reward.failure is not None]
        if failures:
            text = f"{len(failures)} of {len(rewards)} responses have no reward of their own: {failures[0]}"
            self.record.write(Note(t_s=self.record.now_s(), text=text))
        return tuple(None if reward is None else reward.value for reward in rewards)

    @contextmanager
    def _drafting(self, wanted: bool) -> Iterator[None]:
        self.engine.set_drafting(wanted)
        try:
            yield
        finally:
            self.engine.set_drafting(True)


class WatchedRollouts(Rollouts):
    """Rollouts on one engine. A response that fails is delivered with the others, and a journal does not keep it."""

    def __init__(
        self, engine: RolloutEngine, record: RecordWriter, watcher: Watcher, interruption: Interruption
    ) -> None:
        super().__init__(engine, record, watcher, interruption)
        self._engine = engine

    def run(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        step: int | None,
        journal: Journal | None = None,
    ) -> Rollout:
        self._engine.take_observations()
        num_alarms = self._engine.drafter_score().alarms
        begin_s = self.record.now_s()
        responses = self._recall(requests, journal)
        missing = [index for index, response in enumerate(responses) if response is None]
        ends_s = [self.record.now_s()] * len(requests)
        recording = _StepRecording(self.record, step)
        meter = RolloutMeter(len(requests))
        meter.count(0, len(requests) - len(missing))
        rest = [requests[index] for index in missing]
        stream = self._engine.stream(rest, params, on_failure="deliver")
        with unchanged_randomness(), closing(stream) as events:
            for event in events:
                self.interruption.check()
                if steps := self._engine.take_observations():  # the first event of a step
                    now_s = self.record.now_s()
                    for observation in steps:
                        recording.begin(observation, now_s)
                    meter.observe(steps)
                    self.watcher.show_rollout(meter)
                recording.num_tokens += len(event.tokens)
                meter.count(len(event.tokens), event.response is not None)
                if event.response is not None:
                    index = missing[event.index]
                    responses[index], ends_s[index] = event.response, self.record.now_s()
                    if journal is not None and event.failure is None:
                        journal.write([_keep(index, event.response)])
        recording.flush()
        self._note_alarms(num_alarms)
        done = tuple(r for r in responses if r is not None)
        return Rollout(done, begin_s, tuple(ends_s), self._reward_failures(done))

    def _reward_failures(self, responses: Sequence[Response]) -> tuple[float | None, ...]:
        """What a response that failed gets; the trainer scores the others."""
        value = RewardSettings().failure_reward
        rewards = [None if r.failure is None else Reward(value, f"it {r.failure}") for r in responses]
        return self._note_failures(rewards) if any(rewards) else ()

    def _recall(self, requests: Sequence[RolloutRequest], journal: Journal | None) -> list[Response | None]:
        """The responses that an earlier run has finished, by place."""
        known = {} if journal is None else journal.find(requests)
        version = self._engine.policy_version
        return [
            LiveResponse(index, request, kept).finish(kept.finish_reason, version)
            if (kept := known.get(index)) is not None and kept.finish_reason is not None
            else None
            for index, request in enumerate(requests)
        ]


def _keep(index: int, response: Response) -> Keep:
    """A finished response, as a journal takes it."""
    new = response.tokens[len(response.request.generated) :]
    return Keep(
        index=index,
        start=0,
        packed=Packed.of(new, response.logprobs),
        num_steps=response.num_steps,
        num_draft_tokens=response.num_draft_tokens,
        finish_reason=response.finish_reason,
    )


class _StepRecording:
    """Writes engine steps to the record, each once its tokens are known."""

    def __init__(self, record: RecordWriter, step: int | None) -> None:
        self._record = record
        self._step = step
        self._open: tuple[StepObservation, float] | None = None
        self.num_tokens = 0

    def begin(self, observation: StepObservation, now_s: float) -> None:
        self.flush()
        self._open = (observation, now_s)

    def flush(self) -> None:
        if self._open is not None and self._step is not None:
            seen, now_s = self._open
            self._record.add_step(
                max(now_s - seen.step_s, 0.0), seen, num_generated_tokens=self.num_tokens, step=self._step
            )
        self._open = None
        self.num_tokens = 0


def _count_diverged(one: Response, other: Response) -> int:
    """Positions at which two responses differ; a missing token counts as different."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(one.tokens) - len(other.tokens))
