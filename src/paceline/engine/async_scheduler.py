"""The scheduler for steps that overlap: each is made while the one before is under way (vLLM's async scheduling).

PacelineScheduler turns into it where the engine schedules asynchronously. What a step under way decides is not known
when the next one's drafts are made. So they are drafted through it: from the last known token over the ones that are
being decided to those that the next step verifies. The device compares the first part with what was decided, and
verifies the rest where that is the same, else what a model drafter has left there, or nothing that could
be accepted (v2/ahead.py). The host does the same comparison one step later, to know what its drafts were worth.

Invariant: as everywhere, drafts change no token. Cost per step is O(batch).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._step import joined
from paceline.engine.compat import (
    AsyncScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
)
from paceline.engine.draft_rows import leading_matches, table_of
from paceline.engine.fast_loop import Proposal
from paceline.engine.live import LiveBatch, ScheduledResponse
from paceline.engine.runner import (
    AheadDrafts,
    drafts_of,
    give_order,
    order_of,
    report_undrawable,
    report_withdrawn,
    undrawable_of,
    withdrawn_of,
)
from paceline.engine.scheduler import PacelineScheduler, lengths_of, rows_of
from paceline.types import Int32Array, Int64Array, ModelDrafts, StepObservation

AWAY_SHARE = 0.25
"""Of the time between two steps' ends, spent outside the engine, up to which it is taken for the later step's."""

MOST_UNTYPICAL = 8
"""Steps in a row of whose time nothing is learned because only one of two has drafts."""


@dataclass(slots=True)
class _Step:
    """A step that has been scheduled and whose tokens have not come."""

    scheduled: SchedulerOutput
    proposal: Proposal | None
    ready: list[Request]
    """Requests that could draft."""
    names: list[str]
    """Their ids."""
    responses: list[ScheduledResponse]
    num_sent: Int32Array  # [len(names)] draft tokens that vLLM has scheduled
    context: int
    started_s: float
    before: list[list[int]] | None = None
    """What the step before has decided for each of the requests: the first tokens of their drafts, or others. None:
    nothing yet."""
    num_before: Int32Array = field(init=False)  # [len(names)] tokens of `before`
    goes_on: NDArray[np.bool_] = field(init=False)
    """Whose drafts begin with `before`, so that the rest of them is verified. [len(names)]"""
    is_void: NDArray[np.bool_] = field(init=False)
    """Of whom neither the draft nor a branch does. [len(names)]"""

    def __post_init__(self) -> None:
        count = len(self.names)
        self.num_before, self.goes_on = np.zeros(count, np.int32), np.ones(count, np.bool_)
        self.is_void = np.zeros(count, np.bool_)

    def tell(self, before: list[list[int]]) -> None:
        """Take what the step before has decided."""
        self.before = before
        self.num_before = np.fromiter(map(len, before), np.int32, len(before))
        if self.proposal is not None:
            decided, branches = table_of(before), self.proposal.branches
            batch = self.proposal.batch
            self.goes_on = self._begins(batch.tokens, decided) & (batch.num_tokens > self.num_before)
            self.is_void = ~self.goes_on
            if branches is not None:
                for tokens, num_tokens in zip(
                    branches.tokens.swapaxes(0, 1), branches.num_tokens.T, strict=True
                ):
                    self.is_void &= ~(self._begins(tokens, decided) & (num_tokens > self.num_before))

    def behind(self, rows: list[list[int]]) -> list[list[int]]:
        """`before` and what this step has decided."""
        if self.before is None:
            return rows
        return [[*early, *late] for early, late in zip(self.before, rows, strict=True)]

    @property
    def is_left(self) -> NDArray[np.bool_]:
        """For whom tokens that the model drafter has left on the device are verified. [len(names)]"""
        if self.proposal is None or (left := self.proposal.left) is None:
            return np.zeros(len(self.names), np.bool_)
        return (self.is_void | ~left.takes_free) & (left.num_left > 0)

    @property
    def is_in_vain(self) -> NDArray[np.bool_]:
        """Whose draft tokens are known not to go on with what has been decided since. [len(names)]"""
        return self.is_void & (self.num_sent > 0) & ~self.is_left

    def _begins(self, drafts: Int32Array, decided: Int32Array) -> NDArray[np.bool_]:
        """Which drafts begin with `before`. drafts: [len(names), any]"""
        return np.asarray(leading_matches(drafts, self.num_before, decided) == self.num_before)


class OverlappingScheduler(PacelineScheduler, AsyncScheduler):  # type: ignore[misc]
    """Paceline's scheduler on top of vLLM's asynchronous one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loop.overlaps = True
        self._steps: deque[_Step] = deque()
        self._names: list[str] = []  # of `_ready`
        self._stop_ids: Int32Array | None = (
            None  # where one of `_ready` may end; None: that cannot be foreseen
        )
        self._drafts: ModelDrafts | None = None  # the model's, made before the step whose tokens have come
        self._is_same = False  # whether the step whose tokens have come was one of `_ready`
        self._ahead = np.empty(0, np.int32)  # [len(_queried)] tokens of each that are being decided, at most
        self._likely_ahead = self._ahead  # the same without drafts under way that are known to be void
        self._ended_s = 0.0
        self._away_s = 0.0  # between the last step's end and the making of the next
        self._on_device: tuple[Collection[str], int] = (
            (),
            0,
        )  # whom a model drafts for behind the last step, how far
        self._uncounted: set[str] = set()  # requests of which the present step's tokens do not count
        # KV blocks of who left while a step computes them, and the last such step
        self._left: dict[str, tuple[tuple[list[int], ...], _Step]] = {}
        self._num_untypical = 0  # steps in a row of whose time nothing was learned

    # -- a step is made

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._away_s = time.perf_counter() - self._ended_s
        output = super().schedule(*args, **kwargs)
        names, drafts, proposal = self._queried, output.scheduled_spec_decode_tokens, self._proposal
        num_sent = np.zeros(len(names), np.int32)
        if proposal is not None and drafts:
            num_sent = proposal.lengths
            if int(num_sent.sum()) != sum(map(len, drafts.values())):  # vLLM has cut some
                num_sent = np.array([len(drafts.get(name, ())) for name in names], np.int32)
            give_order(output, replace(order_of(output), ahead=self._order(proposal, num_sent)))
        drafts_wanted = order_of(output).drafts
        self._on_device = output.num_scheduled_tokens, 0 if drafts_wanted is None else drafts_wanted.depth
        assert self._ready is not None
        responses = self._batch.responses
        self._steps.append(
            _Step(output, proposal, self._ready, names, responses, num_sent, self._context, self._started_s)
        )
        return output

    def _order(self, proposal: Proposal, num_sent: Int32Array) -> AheadDrafts | None:
        """The drafts of the requests that have any in the step, from the last known token on; None: the model drafter's
        alone.
        """
        left = proposal.left
        rows = np.flatnonzero(num_sent if left is None else (num_sent > 0) & left.takes_free)
        if not len(rows):
            return None
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
            np.zeros(len(rows), np.bool_) if left is None else left.num_left[rows] > 0,
        )

    def _divide(self) -> tuple[list[Request], list[Request]]:
        for request in self.running:
            request.spec_token_ids = []  # vLLM's placeholders for drafts that nobody may make
        known, self._queried = self._ready, self._names
        ready, others = super()._divide()
        self._ahead = np.array([request.num_output_placeholders for request in ready], np.int32)
        if ready is not known:
            self._names, self._stop_ids = self._queried, _stop_ids_of(ready)
        self._likely_ahead = np.where(self._in_vain(), 1, self._ahead).astype(np.int32)
        return ready, others

    def _went_on(self, ready: list[Request]) -> bool:
        numbers = [request.num_computed_tokens - request.num_output_placeholders for request in ready]
        return np.array_equal(np.array(numbers, np.int64) + 1, self._positions)

    def _in_vain(self) -> NDArray[np.bool_]:
        """For whom nothing in the step under way goes on with what has been decided since. [len(_names)]"""
        if not self._steps:
            return np.zeros(len(self._names), np.bool_)
        step = self._steps[-1]
        if step.ready is self._ready:
            return step.is_in_vain
        names = set(compress(step.names, step.is_in_vain))
        return np.array([name in names for name in self._names], np.bool_)

    def _unread(self, request: Request) -> int:
        return super()._unread(request) + int(request.num_output_placeholders)

    def _propose(self, ready: list[Request], others: list[Request], max_alternatives: int) -> Proposal:
        longest = self._longest(self._positions, self._ahead, self._likely_ahead)
        num_other_tokens = self._num_other_tokens(len(ready), others)
        weights, left = self._weights(self._batch), self._ends - self._positions
        query, ahead = self._query(self._batch, longest), self._likely_ahead
        proposal = self.loop.propose(query, num_other_tokens, 0, weights, left, ahead, self._num_left())
        for request, length in zip(ready, proposal.lengths.tolist(), strict=True):
            request.spec_token_ids = [-1] * length
        return proposal

    def _num_left(self) -> Int32Array | None:
        """Tokens of the model drafter's that the device will have for each of `_ready`. None: for nobody any."""
        names, depth = self._on_device
        if not depth:
            return None
        return np.array([depth if name in names else 0 for name in self._names], np.int32)

    def _longest(self, positions: Int64Array, ahead: Int32Array, likely_ahead: Int32Array) -> Int32Array:
        """What to draft for each of `_ready`, through the tokens that are being decided. [len(_ready)]"""
        room = np.minimum(self._ends - positions - 1 - ahead, self.num_spec_tokens)
        return np.where(room > 0, room + likely_ahead, 0).astype(np.int32)

    # -- requests leave while a step computes them

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._remember(request)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._remember(request)
        super()._preempt_request(request, *args, **kwargs)

    def _remember(self, request: Request) -> None:
        if self._steps:
            self._left[request.request_id] = self._blocks_of(request.request_id), self._steps[-1]

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
        self._is_same = step.ready is self._ready
        if not self._is_same:  # its responses are counted one by one
            self._batch.settle()
            self._batch = LiveBatch.of([])
        self._drafts = drafts_of(model_runner_output)
        result: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if not self._is_same:
            self._refresh_ready()
        self._ended_s = time.perf_counter()
        return result

    def _refresh_ready(self) -> None:
        """Go on with `_ready`, some of which have grown in a step of others too."""
        if self._ready is not None and all(name in self.live for name in self._names):
            self._positions = lengths_of(self._ready)
            self._batch = LiveBatch.of([self.live[name] for name in self._names])
        else:
            self._ready = None

    def _drop_stale(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Leave out what is said of requests that have ended, or were preempted, after this step had begun. NaN that it
        may have left in their blocks is to be cleared.
        """
        stale, self._uncounted = set(), set()
        if not self._left:
            return
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
                if name in self._left:
                    self._stained += self._left[name][0]
            report_undrawable(output, {name: why for name, why in undrawable.items() if name not in stale})
            report_withdrawn(output, [name for name in withdrawn if name not in stale])
        under_way = set(map(id, self._steps))
        for name in [name for name, (_, last) in self._left.items() if id(last) not in under_way]:
            del self._left[name]

    def _learn_left(self, drafts: ModelDrafts, rows: list[list[int]]) -> None:
        """Learn from what the model has drafted before the step. rows: what that has decided for its requests."""
        step = self._step
        accepted = np.fromiter(map(len, rows), np.int64, len(rows)) - 1
        num_accepted = int(accepted[step.is_left & (accepted > 0)].sum())
        numbers = np.array([live.response for live in step.responses], np.int64)
        positions = self._positions
        if not self._is_same:
            found = map(self.requests.get, step.names)
            positions = np.array([-1 if one is None else one.num_tokens for one in found], np.int64)
        self.loop.receive_left(drafts, numbers, positions, table_of(rows), num_accepted)

    def _judge(self, scheduled: SchedulerOutput, rows: list[list[int]]) -> StepObservation | None:
        step, tokens = self._step, scheduled.num_scheduled_tokens
        num_sent = step.num_sent
        if self._uncounted:
            counted = [name not in self._uncounted for name in step.names]
            rows = [row if counts else [] for counts, row in zip(counted, rows, strict=True)]
            num_sent = np.where(counted, num_sent, 0).astype(np.int32)
        if self._drafts is not None and rows:
            self._learn_left(self._drafts, rows)
        made = np.fromiter(map(len, rows), np.int64, len(rows))
        if step.proposal is not None and rows:
            is_verified = step.goes_on & ~step.is_left
            verified = step.num_before + np.where(is_verified, step.num_sent, 0).astype(np.int32)
            self.loop.learn(step.proposal, verified, table_of(step.behind(rows)))
            if self._is_same:
                self._batch.num_draft_tokens[:] += num_sent
            else:
                for live, count in zip(step.responses, num_sent.tolist(), strict=True):
                    live.num_draft_tokens += count
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

    def _grown(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, rows: list[list[int]]
    ) -> tuple[list[Request], LiveBatch, Int64Array, list[list[int]]]:
        if self._is_same:
            return super()._grown(scheduled, output, rows)
        return self._growth_of(list(scheduled.num_scheduled_tokens), output)

    def _draft_early(
        self, requests: list[Request], batch: LiveBatch, before: Int64Array, rows: list[list[int]]
    ) -> None:
        """Draft for the next step while vLLM hands out this one's tokens, where both and the one between are of the
        same requests.
        """
        following = self._steps[-1] if self._steps else None
        if following is None or requests is not self._ready or following.ready is not requests or self._left:
            return
        if not self.loop.drafts_early or self._stop_ids is None:
            return
        if list(following.scheduled.num_scheduled_tokens) != following.names:
            return
        made = np.fromiter(map(len, rows), np.int64, len(rows))
        if not made.all():
            return
        offsets, tokens = joined(rows, made > 0)
        positions = before + made
        if (positions > self._ends).any() or (tokens[:, None] == self._stop_ids).any():
            rows = self._cut(requests, before, rows)
            offsets, tokens = joined(rows, made > 0)
            positions = before + np.diff(offsets)
        ahead = 1 + following.num_sent
        likely_ahead = np.where(following.is_in_vain, 1, ahead).astype(np.int32)
        query = self._query(batch, self._longest(positions, ahead, likely_ahead), positions)
        self.loop.draft_early(batch.groups, batch.numbers, offsets, tokens, query)
        self._is_told = True

    def _cut(self, requests: list[Request], before: Int64Array, rows: list[list[int]]) -> list[list[int]]:
        """A step's tokens as far as they belong to the responses, as vLLM will cut them."""
        cut = []
        for request, row, length, end in zip(
            requests, rows, before.tolist(), self._ends.tolist(), strict=True
        ):
            stops, inside = _stops_of(request), row[: end - length]
            cut.append(
                inside[: next((at for at, token in enumerate(inside, 1) if token in stops), len(inside))]
            )
        return cut

    def _time(self, step: StepObservation | None, *, is_typical: bool = True) -> None:
        """Nothing is learned of the engine's time where whoever takes the tokens was long away, nor from one of two
        steps of which only the other has drafts: what making and launching that one took is in this one's time. Unless
        that goes on, step after step.
        """
        away_s, self._away_s = self._away_s, 0.0
        is_there = away_s <= AWAY_SHARE * (time.perf_counter() - self._started_s)
        differ = len({bool(one.num_sent.any()) for one in (self._step, *self._steps)}) > 1
        self._num_untypical = self._num_untypical + 1 if differ else 0
        is_learned = is_there and (not differ or self._num_untypical > MOST_UNTYPICAL)
        super()._time(step, is_typical=is_typical and is_learned)


def _stop_ids_of(requests: list[Request]) -> Int32Array | None:
    """Tokens at which one of these may end; None where one may end for what it repeats."""
    if any(request.sampling_params.repetition_detection is not None for request in requests):
        return None
    return np.array(sorted(set().union(*map(_stops_of, requests))), np.int32)


def _stops_of(request: Request) -> set[int]:
    """Tokens at which a request ends."""
    params = request.sampling_params
    found = {params.eos_token_id, *(params.stop_token_ids or ())}
    return found - {None}
