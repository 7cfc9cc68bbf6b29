"""Dispatch: which response runs its next chunk where, and how long is the chunk?

Owns the request buffer of a rollout as a state machine without I/O, called by the controller, live and
simulated: `submit` groups, report `worker_up` and `worker_lost`, ask `next_assignment` until it gives None, report
`chunk_finished` or `retry`; `next_waiting` looks ahead and changes nothing. Each is O(log n) per response it touches.

Invariants: a waiting or running response is in exactly one place; the chunks that run on a worker never need more KV
blocks than it has nor exceed its concurrency, so no engine has to preempt; a response finishes once, whatever workers
are lost and however late their reports arrive.

Source: Seer 4.2 (divided rollout) and 4.3, algorithm 1. Its lines here:
    1-10   the buffer is kept, not rebuilt: `chunk_finished` updates the estimate and drops finished responses
    12-13  `DividedBuffer`: probes first, the one with the fewest tokens so far (SFS)
    14-15  then the group with the longest estimate (LFS), in it the first sample
    19     `Dispatcher._wait`: the next chunk and the KV blocks that it needs
    20-24  `Rooms.choose`: the worker with the most free KV blocks, if they are enough
Ties go to what was submitted (or came up) first; a response keeps its place when it returns.

`even`, the default, is ours (docs/decisions/0005): the same probes, but line 14 takes the longest estimate less
`_TOKEN_WEIGHT` times the response's own tokens, within a group the fewest tokens. So unfinished responses keep level,
those of groups that look longer a quarter of the difference ahead: the last ones end about a chunk apart as long as
there are enough to fill the workers, however wrong the estimates are. Nobody but the probes, which run to their end,
keeps others waiting: whoever runs sinks. It wants room in the KV pool for every response, and moves more chunks.

`sticky`, the default without a KV pool, is Seer's order for responses that have not begun; those that have go
on first, where they are (docs/decisions/0015).

Differs: (1) the paper's guard against wrong estimates draws from the groups that ran least "at random"; here every
`guard_interval`-th response that is no probe comes from the group that was ordered the fewest tokens, so that decisions
can be replayed and the wait is bounded. (2) "Least loaded" is the most free blocks, not the lowest share in use: the
same between equal workers, and one look decides whether anyone has room. (3) A chunk that would end within a KV block
ends with the one before, so that none is taken for a few tokens: where chunks are a few blocks long, more of them fit.
(4) A prompt's blocks count once per response, although an engine may share them in a group: the bound errs on the safe
side. (5) A response goes on where its last chunk ran unless moving it evens out the workers' free blocks
(`Rooms.choose`): its keys and values are there. So a chunk goes on in place when nothing else waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.config import Variant
from paceline.errors import ConfigError, EngineError, RequestError
from paceline.planning.length import GroupLengths, LengthEstimator, NoLengths, TrueLengths, expected_rest
from paceline.planning.request_buffer import (
    BoundBuffer,
    BufferedGroup,
    BufferedResponse,
    DividedBuffer,
    RequestBuffer,
    Rooms,
    StickyBuffer,
)

_TOKEN_WEIGHT = 4


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How responses are dispatched. Raises ConfigError for a value out of range."""

    variant: Variant = "even"
    """even: who has the fewest tokens, those of long groups ahead. context: Seer, the longest estimate first.
    no-context: divided rollout alone, in order of submission. oracle: longest first by true lengths, without probes.
    sticky: a response stays on one worker and goes on before any that has not begun; those as with context. group: a
    whole group is bound to one worker and not divided, as veRL does."""
    chunk_tokens: int = 8192
    """Longest chunk; `group` runs every response to its end."""
    block_tokens: int = 16
    """Tokens per KV block of the engines."""
    guard_interval: int = 16
    """Every how many responses (probes not counted) one comes from the group that ran least, 0: never. `context`
    and `sticky` only."""

    def __post_init__(self) -> None:
        for name, least in (("chunk_tokens", 1), ("block_tokens", 1), ("guard_interval", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"dispatch {name} is {getattr(self, name)}: set it to at least {least}")


class Assignment(NamedTuple):
    """One decision: run the next chunk of a response. Keep it: it names the chunk when it ends."""

    number: int
    """Counts the decisions of a rollout, from 0."""
    group: int
    sample: int
    worker: str
    chunk_tokens: int
    """Response tokens to add at most."""


class Dispatcher:
    """The request buffer and the fleet as it sees it. One per rollout."""

    def __init__(
        self, settings: DispatchSettings, true_lengths: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """true_lengths: response tokens by group and sample, for the oracle. Raises ConfigError if it has none."""
        self._settings = settings
        self._lengths = _choose_estimator(settings, true_lengths)
        self._rooms = Rooms()
        self._buffer = _make_buffer(settings, self._rooms, self._lengths)
        self._groups: dict[int, BufferedGroup] = {}
        self._running: dict[int, tuple[Assignment, BufferedResponse]] = {}  # by Assignment.number
        self._num_assigned = 0
        self._num_responses = 0
        self._num_finished = 0

    @property
    def num_unfinished(self) -> int:
        """Responses that wait or run."""
        return self._num_responses - self._num_finished

    @property
    def num_waiting(self) -> int:
        """Responses that wait for a worker."""
        return self.num_unfinished - len(self._running)

    def submit(
        self, group: int, group_size: int, prompt_tokens: int, max_tokens: int, held: Sequence[int] = ()
    ) -> None:
        """Put the responses of a new group into the buffer.

        prompt_tokens: length of the prompt. max_tokens: limit of each response. held: response tokens that exist
        already, by sample; without, none. Raises RequestError if the group is known already, has nothing to generate,
        or a response at its limit fits on no worker that was up so far.
        """
        if group in self._groups:
            raise RequestError(f"group {group} was submitted before: number the groups of a rollout uniquely")
        if group_size < 1 or max_tokens < 1:
            raise RequestError(
                f"group {group} has {group_size} responses of up to {max_tokens} tokens: ask for at least 1 of each"
            )
        held = held or (0,) * group_size
        if len(held) != group_size or not 0 <= min(held) <= max(held) < max_tokens:
            raise RequestError(
                f"group {group} has {group_size} responses of up to {max_tokens} tokens and holds {tuple(held)} of "
                "them: give one number per response, below the limit"
            )
        blocks = self._blocks(prompt_tokens + max_tokens)
        if self._rooms.largest_blocks and blocks > self._rooms.largest_blocks:
            raise self._no_room(group, blocks)
        ranks = [-self._lengths.estimate(group, sample, max_tokens) for sample in range(group_size)]
        new = BufferedGroup(group, len(self._groups), prompt_tokens, max_tokens, group_size)
        self._groups[group] = new
        for sample, rank in enumerate(ranks):
            response = BufferedResponse(new, sample, rank, self._num_responses)
            response.num_tokens = held[sample]
            self._wait(response)
            self._num_responses += 1

    def worker_up(self, worker: str, num_kv_blocks: int, max_concurrency: int) -> None:
        """A worker can take chunks.

        num_kv_blocks: what rollouts may fill, without those that drafts in flight need. max_concurrency: responses at
        once. Raises EngineError if it is up already or has room for nothing.
        """
        self._rooms.add(worker, num_kv_blocks, max_concurrency)

    def worker_lost(
        self, worker: str, progress: Mapping[tuple[int, int], int] | None = None
    ) -> tuple[Assignment, ...]:
        """A worker takes no more chunks; what it ran returns to the buffer. Gives the lost assignments, in order.

        progress: response tokens, by (group, sample), that the controller holds of them; without, a response goes on
        from where its chunk began. One token is always left to generate, as only `chunk_finished` finishes. Raises
        EngineError if the worker is not up.
        """
        lost = self._rooms.remove(worker)
        self._buffer.lost(lost)
        chunks = [self._running.pop(number) for number in sorted(lost.running)]
        for assignment, response in chunks:
            held = (progress or {}).get((assignment.group, assignment.sample), 0)
            response.num_tokens = min(max(response.num_tokens, held), response.group.max_tokens - 1)
            self._wait(response)
        return tuple(assignment for assignment, _ in chunks)

    def chunk_finished(
        self, assignment: Assignment, num_tokens: int, finished: bool, *, is_sound: bool = True
    ) -> bool:
        """A chunk ended: the response is finished, or returns to the buffer. is_sound: wherever it failed before, it
        may go there again.

        num_tokens: response tokens so far, all chunks together; at the limit the response is finished, whatever
        `finished` says. Returns False, and changes nothing, if the assignment is not running (any more): the late
        report of a lost worker. Raises EngineError if there are fewer tokens than before, or more than were ordered; a
        finished response may have more, as a racer elsewhere may have finished it.
        """
        if assignment.number not in self._running:
            return False
        response = self._running[assignment.number][1]
        most = response.group.max_tokens if finished else response.num_tokens + assignment.chunk_tokens
        if not response.num_tokens <= num_tokens <= most:
            raise EngineError(
                f"sample {response.sample} of group {response.group.number} ended a chunk with {num_tokens} tokens, "
                f"not {response.num_tokens} to {most}: report its tokens of all chunks together"
            )
        finished = finished or num_tokens == response.group.max_tokens
        response.num_tokens = num_tokens
        if is_sound:
            response.failed_in = None
        if finished:
            self._lengths.finish(response.group.number, num_tokens)
        self._leave(assignment, finished)
        if not finished:
            self._wait(response)
        return True

    def retry(self, assignment: Assignment, num_tokens: int) -> bool:
        """A chunk failed: the response, with so many tokens by now, runs on another worker next, before anything else.

        Returns False, and changes nothing, where no other one could run it; not with `group`, which binds.
        """
        response = self._running[assignment.number][1]
        room = self._rooms.by_worker[assignment.worker]
        is_full = num_tokens >= response.group.max_tokens
        if is_full or not self.can_move or not self._rooms.has_other(room, response.num_blocks):
            return False
        response.failed_in = room
        return self.chunk_finished(assignment, num_tokens, finished=False, is_sound=False)

    @property
    def can_move(self) -> bool:
        """Whether running chunks may be moved: `group` binds them."""
        return self._settings.variant != "group"

    def has_room(self, assignment: Assignment, worker: str) -> bool:
        """Whether a running chunk would fit on another worker beside what runs there."""
        response = self._running[assignment.number][1]
        return self._rooms.by_worker[worker].has_room(response.num_blocks)

    def move(self, assignment: Assignment, worker: str) -> Assignment:
        """A running chunk goes on on another worker, which has room for it; not with `group`, which binds.

        Gives its assignment from now on, of the same number.
        """
        _, response = self._running[assignment.number]
        before, room = (self._rooms.by_worker[name] for name in (assignment.worker, worker))
        self._rooms.give_back(before, assignment.number, response.num_blocks)
        self._rooms.take(room, assignment.number, response.num_blocks)
        self._buffer.returned(response.group, before, finished=False)
        moved = assignment._replace(worker=worker)
        self._running[assignment.number] = moved, response
        return moved

    def give_up(self, assignment: Assignment) -> None:
        """A running response will not go on: it counts as finished, and its length tells nothing about others."""
        self._leave(assignment, finished=True)

    def _leave(self, assignment: Assignment, finished: bool) -> None:
        """A running chunk has left its worker."""
        response = self._running.pop(assignment.number)[1]
        response.home = room = self._rooms.by_worker[assignment.worker]
        self._rooms.give_back(room, assignment.number, response.num_blocks)
        self._num_finished += finished
        self._buffer.returned(response.group, room, finished)

    def next_assignment(self) -> Assignment | None:
        """The next decision, or None: nothing waits, or the response whose turn it is finds no room (lines 18, 24).

        Raises RequestError if it never will: all workers are empty.
        """
        match = self._buffer.match()
        if match is None:
            self._check_stuck()
            return None
        response, room = match
        number = self._num_assigned
        assignment = Assignment(
            number, response.group.number, response.sample, room.worker, response.chunk_tokens
        )
        self._num_assigned += 1
        self._running[number] = assignment, response
        self._rooms.take(room, number, response.num_blocks)
        return assignment

    def next_waiting(self, count: int) -> list[tuple[int, int]]:
        """Whose turn is next if nothing else happens, as (group, sample), in that order; at most `count`.

        For who prepares their chunks. Left out is what the guard will draw, and with `sticky` whoever has begun; the
        variant `group` foresees nothing.
        """
        return [(response.group.number, response.sample) for response in self._buffer.peek(count)]

    def expected_rest(self, assignment: Assignment, num_tokens: int) -> int:
        """Tokens that a running response will still get, now that it has `num_tokens`."""
        group, limit = assignment.group, self._groups[assignment.group].max_tokens
        return expected_rest(self._lengths.estimate(group, assignment.sample, limit), num_tokens, limit)

    def _wait(self, response: BufferedResponse) -> None:
        """Line 19, for the chunk that the response will run next; then into the buffer."""
        group, failed_in = response.group, response.failed_in
        if failed_in is not None and self._rooms.by_worker.get(failed_in.worker) is not failed_in:
            response.failed_in = None
        is_divided = self._settings.variant != "group"
        left = group.max_tokens - response.num_tokens
        held = group.prompt_tokens + response.num_tokens
        response.chunk_tokens = self._chunk_tokens(held, left) if is_divided else left
        response.num_blocks = self._blocks(held + response.chunk_tokens)
        self._buffer.add(response)

    def _chunk_tokens(self, held: int, left: int) -> int:
        """Of a chunk behind `held` tokens, with `left` to the limit: it ends where a KV block does, if it can."""
        most = min(self._settings.chunk_tokens, left)
        beyond = (held + most) % self._settings.block_tokens
        return most - beyond if beyond < most < left else most

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._settings.block_tokens)

    def _check_stuck(self) -> None:
        if self._running or not self._rooms.by_worker or not self.num_waiting:
            return
        group = max(self._groups.values(), key=lambda group: group.prompt_tokens + group.max_tokens)
        raise self._no_room(group.number, self._blocks(group.prompt_tokens + group.max_tokens))

    def _no_room(self, group: int, blocks: int) -> RequestError:
        return RequestError(
            f"a response of group {group} may need {blocks} KV blocks of {self._settings.block_tokens} tokens, and no "
            f"worker has more than {self._rooms.largest_blocks}: lower max_tokens or give the engines more KV memory"
        )


def _make_buffer(settings: DispatchSettings, rooms: Rooms, lengths: LengthEstimator) -> RequestBuffer:
    variant, guard_interval = settings.variant, settings.guard_interval
    if variant == "group":
        return BoundBuffer(rooms)
    if variant == "sticky":
        return StickyBuffer(rooms, lengths, guard_interval=guard_interval)
    return DividedBuffer(
        rooms,
        lengths,
        has_probes=variant in {"context", "even"},
        guard_interval=guard_interval if variant == "context" else 0,
        token_weight=_TOKEN_WEIGHT if variant == "even" else 0,
    )


def _choose_estimator(
    settings: DispatchSettings, true_lengths: Mapping[int, Sequence[int]] | None
) -> LengthEstimator:
    if settings.variant == "oracle":
        if true_lengths is None:
            raise ConfigError("the dispatch variant 'oracle' got no true lengths: give them, or use 'even'")
        return TrueLengths(true_lengths)
    return NoLengths() if settings.variant in {"no-context", "group"} else GroupLengths()
