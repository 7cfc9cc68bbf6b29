"""The scheduler for steps that overlap: each is made while the one before is under way (vLLM's async scheduling).

PacelineScheduler turns into it where the engine schedules asynchronously. What a step under way decides is not known
when the next one's drafts are made. So they are drafted through it: from the last known token over the ones that are
being decided to those that the next step verifies. The device compares the first part with what was decided, and
verifies the rest where that is the same, else nothing that could be accepted (v2/ahead.py). The host does the same
comparison one step later, to know what its drafts were worth.

Invariant: as everywhere, drafts change no token. Cost per step is O(batch).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.compat import (
    AsyncScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
)
from paceline.engine.fast_loop import Proposal, leading_matches, table_of
from paceline.engine.live import LiveBatch, ScheduledResponse
from paceline.engine.runner import (
    AheadDrafts,
    give_order,
    order_of,
    report_undrawable,
    report_withdrawn,
    undrawable_of,
    withdrawn_of,
)
from paceline.engine.scheduler import PacelineScheduler, rows_of
from paceline.types import Int32Array, StepObservation

AWAY_SHARE = 0.25
"""Of the time between two steps' ends, spent outside the engine, up to which it is taken for the later step's."""


@dataclass(slots=True)
class _Step:
    """A step that has been scheduled and whose tokens have not come."""

    scheduled: SchedulerOutput
    proposal: Proposal | None
    names: list[str]
    """Requests that could draft, by id."""
    responses: list[ScheduledResponse]
    num_sent: Int32Array  # [len(names)] draft tokens that vLLM has scheduled
    context: int
    started_s: float
    before: list[list[int]] = field(init=False)
    """What the step before has decided for each of the requests: the first tokens of their drafts, or others."""
    num_before: Int32Array = field(init=False)  # [len(names)] tokens of `before`
    goes_on: NDArray[np.bool_] = field(init=False)
    """Whose drafts begin with `before`, so that the rest of them is verified. [len(names)]"""
    is_void: NDArray[np.bool_] = field(init=False)
    """Of whom neither the draft nor a branch does. [len(names)]"""

    def __post_init__(self) -> None:
        self.tell([[] for _ in self.names])

    def tell(self, before: list[list[int]]) -> None:
        """Take what the step before has decided."""
        self.before = before
        self.num_before = np.fromiter(map(len, before), np.int32, len(before))
        if self.proposal is not None:
            decided, branches = table_of(before), self.proposal.branches
            self.goes_on = self._begins(self.proposal.batch.tokens, decided)
            self.is_void = ~self.goes_on
            if branches is not None:
                for tokens, num_tokens in zip(
                    branches.tokens.swapaxes(0, 1), branches.num_tokens.T, strict=True
                ):
                    self.is_void &= ~(self._begins(tokens, decided) & (num_tokens > self.num_before))

    def _begins(self, drafts: Int32Array, decided: Int32Array) -> NDArray[np.bool_]:
        """Which drafts begin with `before`. drafts: [len(names), any]"""
        return np.asarray(leading_matches(drafts, self.num_before, decided) == self.num_before)


class OverlappingScheduler(PacelineScheduler, AsyncScheduler):  # type: ignore[misc]
    """Paceline's scheduler on top of vLLM's asynchronous one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: deque[_Step] = deque()
        self._ahead = np.empty(0, np.int32)  # [len(_queried)] tokens of each that are being decided, at most
        self._likely_ahead = self._ahead  # the same without drafts under way that are known to be void
        self._ended_s = 0.0
        self._away_s = 0.0  # between the last step's end and the making of the next
        self._uncounted: set[str] = set()  # requests of which the present step's tokens do not count
        self._left: dict[str, tuple[list[int], ...]] = {}  # KV blocks of who left while a step computes them

    # -- a step is made

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._away_s = time.perf_counter() - self._ended_s
        output = super().schedule(*args, **kwargs)
        names = self._queried
        drafts = output.scheduled_spec_decode_tokens
        num_sent = np.array([len(drafts.get(name, ())) for name in names], np.int32)
        responses = [self.live[name] for name in names]
        step = _Step(output, self._proposal, names, responses, num_sent, self._context, self._started_s)
        self._steps.append(step)
        if self._proposal is not None and num_sent.any():
            give_order(output, replace(order_of(output), ahead=self._order(self._proposal, num_sent)))
        return output

    def _order(self, proposal: Proposal, num_sent: Int32Array) -> AheadDrafts:
        """The drafts of the requests that have any in the step, from the last known token on."""
        rows = np.flatnonzero(num_sent)
        most = int((self._ahead + num_sent)[rows].max())
        tokens, num_tokens = proposal.batch.tokens[rows, None], proposal.batch.num_tokens[rows, None]
        if (branches := proposal.branches) is not None:
            tokens = np.concatenate([tokens, branches.tokens[rows]], axis=1)
            num_tokens = np.concatenate([num_tokens, branches.num_tokens[rows]], axis=1)
        return AheadDrafts(
            [self._queried[row] for row in rows.tolist()],
            self._positions[rows],
            tokens[:, :, :most],
            np.minimum(num_tokens, most).astype(np.int32),
        )

    def _divide(self) -> tuple[list[Request], list[Request]]:
        ready: list[Request] = []
        others: list[Request] = []
        for request in self.running:
            request.spec_token_ids = []  # vLLM's placeholders for drafts that nobody may make
            (ready if self._can_draft(request) else others).append(request)
        self._queried = [request.request_id for request in ready]
        self._positions, self._ends = np.array([r.num_tokens for r in ready], np.int64), self._ends_of(ready)
        self._ahead = np.array([request.num_output_placeholders for request in ready], np.int32)
        void = self._void()
        is_void = [name in void for name in self._queried]
        self._likely_ahead = np.where(is_void, 1, self._ahead).astype(np.int32)
        return ready, others

    def _void(self) -> set[str]:
        """Requests of the step under way with nothing there that goes on with what has been decided since."""
        if not self._steps or (step := self._steps[-1]).proposal is None:
            return set()
        return set(compress(step.names, step.is_void & (step.num_sent > 0)))

    def _unread(self, request: Request) -> int:
        return super()._unread(request) + int(request.num_output_placeholders)

    def _propose(self, ready: list[Request], others: list[Request], max_alternatives: int) -> Proposal:
        batch = LiveBatch.of([self.live[name] for name in self._queried])
        room = np.clip(self._ends - self._positions - 1 - self._ahead, 0, self.num_spec_tokens)
        longest = np.where(room > 0, room + self._likely_ahead, 0).astype(np.int32)
        num_other_tokens = self._num_other_tokens(len(ready), others)
        weights, left = self._weights(batch), self._ends - self._positions
        proposal = self.loop.propose(
            self._query(batch, longest), num_other_tokens, 0, weights, left, self._likely_ahead
        )
        for request, length in zip(ready, proposal.lengths.tolist(), strict=True):
            request.spec_token_ids = [-1] * length
        return proposal

    # -- requests leave while a step computes them

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._remember(request)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._remember(request)
        super()._preempt_request(request, *args, **kwargs)

    def _remember(self, request: Request) -> None:
        if self._steps:
            self._left[request.request_id] = self._blocks_of(request.request_id)

    # -- a step's tokens have come

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        while self._steps[0].scheduled is not scheduler_output:
            self._steps.popleft()  # vLLM has given it up
        self._step = step = self._steps.popleft()
        self._queried, self._context = step.names, step.context
        self._started_s = max(step.started_s, self._ended_s)
        for following in self._steps:
            following.tell(rows_of(model_runner_output, following.names))
        self._drop_stale(scheduler_output, model_runner_output)
        result: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._ended_s = time.perf_counter()
        return result

    def _drop_stale(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Leave out what is said of requests that have ended, or were preempted, after this step had begun. NaN that it
        may have left in their blocks is to be cleared.
        """
        stale, self._uncounted = set(), set()
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.is_finished():
                self._uncounted.add(name)
            elif request.num_stale_output_tokens > 0:
                stale.add(name)
                if request.drop_stale_output:
                    self._uncounted.add(name)
        stale |= self._uncounted
        if stale:
            undrawable, withdrawn = undrawable_of(output), withdrawn_of(output)
            for name in stale.intersection((*undrawable, *withdrawn)):
                self._stained += self._left.get(name, ())
            report_undrawable(output, {name: why for name, why in undrawable.items() if name not in stale})
            report_withdrawn(output, [name for name in withdrawn if name not in stale])
        under_way = [step.scheduled.num_scheduled_tokens for step in self._steps]
        for name in [name for name in self._left if not any(name in tokens for tokens in under_way)]:
            del self._left[name]

    def _judge(self, scheduled: SchedulerOutput, rows: list[list[int]]) -> StepObservation | None:
        step = self._step
        counted = [name not in self._uncounted for name in step.names]
        rows = [row if counts else [] for counts, row in zip(counted, rows, strict=True)]
        made = np.fromiter(map(len, rows), np.int64, len(rows))
        num_sent = np.where(counted, step.num_sent, 0).astype(np.int32)
        if step.proposal is not None and step.names:
            verified = step.num_before + np.where(step.goes_on, step.num_sent, 0).astype(np.int32)
            decided = table_of([[*early, *late] for early, late in zip(step.before, rows, strict=True)])
            self.loop.learn(step.proposal, verified, decided)
            for live, count in zip(step.responses, num_sent.tolist(), strict=True):
                live.num_draft_tokens += count
        tokens = scheduled.num_scheduled_tokens
        if len(self._uncounted) == len(tokens):
            return None  # nothing ran, or nothing that counts
        # What was computed for nobody took its time too.
        num_requests, drafted = sum(name in tokens for name in step.names), int(step.num_sent.sum())
        return StepObservation(
            num_requests=num_requests,
            num_draft_tokens=drafted,
            num_accepted_tokens=int(made.sum() - np.count_nonzero(made)),
            num_prefill_tokens=int(scheduled.total_num_scheduled_tokens) - num_requests - drafted,
            step_s=0.0,
            num_waiting=len(self.waiting),
            num_context_tokens=step.context,
        )

    def _time(self, step: StepObservation | None) -> None:
        """A step in which whoever takes the tokens was long away tells nothing of the engine's time."""
        away_s, self._away_s = self._away_s, 0.0
        is_told = away_s <= AWAY_SHARE * (time.perf_counter() - self._started_s)
        super()._time(step if is_told else None)
