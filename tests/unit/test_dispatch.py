"""Dispatch: algorithm 1 against a plain reference, the variants by example, and what must hold for all of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, EngineError, RequestError
from paceline.planning.dispatch import Assignment, Dispatcher, DispatchSettings

VARIANTS = ("even", "context", "no-context", "oracle", "sticky", "group")
PROMPT, BLOCK = 4, 4
Response = tuple[int, int]
seeds = st.integers(0, 2**32)  # of the order of events


def settings_for(variant: str, chunk: int = 8, guard: int = 3) -> DispatchSettings:
    return DispatchSettings(variant, chunk, BLOCK, guard)  # type: ignore[arg-type]


def started(
    variant: str, true: dict[int, list[int]], max_tokens: int, guard: int = 3, chunk: int = 8
) -> Dispatcher:
    dispatcher = Dispatcher(settings_for(variant, chunk, guard), true if variant == "oracle" else None)
    for group, lengths in true.items():
        dispatcher.submit(group, len(lengths), PROMPT, max_tokens)
    return dispatcher


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def all_assignments(dispatcher: Dispatcher) -> list[Assignment]:
    found = []
    while (assignment := dispatcher.next_assignment()) is not None:
        found.append(assignment)
    return found


def responses(assignments: list[Assignment]) -> list[Response]:
    return [(a.group, a.sample) for a in assignments]


# ---------------------------------------------------------------- algorithm 1, rebuilt from scratch at every decision


@dataclass
class Reference:
    """Seer's algorithm 1 as written: loops over everything, no queues."""

    variant: str
    chunk: int
    guard: int
    true: dict[int, list[int]]
    max_tokens: int
    tokens: dict[Response, int]  # R, by submission
    finished: dict[Response, int] = field(default_factory=dict)
    running: dict[Response, str] = field(default_factory=dict)
    reserved: dict[Response, int] = field(default_factory=dict)
    served: Counter[int] = field(default_factory=Counter)
    home: dict[Response, str] = field(default_factory=dict)
    capacity: dict[str, tuple[int, int]] = field(default_factory=dict)  # I, by the order of coming up
    num_rest: int = 0

    def estimate(self, response: Response) -> int:
        if self.variant == "oracle":
            return self.true[response[0]][response[1]]
        if self.variant == "no-context":
            return 0
        ended = [length for (group, _), length in self.finished.items() if group == response[0]]
        return max(ended, default=self.max_tokens)

    def next_assignment(self) -> tuple[Response, str, int] | None:
        spec, rest = [], []
        for response in self.tokens:  # lines 1-10
            if response in self.finished or response in self.running:
                continue
            if self.variant in {"context", "even"} and response[1] == 0:
                spec.append(response)
            else:
                rest.append(response)
        if spec:  # lines 12-13; min and max take the first of equals
            chosen = min(spec, key=lambda r: self.tokens[r])
        elif rest and self.variant == "context" and self.guard and (self.num_rest + 1) % self.guard == 0:
            chosen = min(rest, key=lambda r: self.served[r[0]])
        elif rest and self.variant == "even":  # among equals the group, then who has the fewest tokens
            first = {g: min((self.tokens[r], r) for r in rest if r[0] == g)[1] for g, _ in rest}
            chosen = max(first.values(), key=lambda r: self.estimate(r) - 4 * self.tokens[r])
        elif rest:  # lines 14-15
            chosen = max(rest, key=self.estimate)
        else:  # lines 16-18
            return None
        chunk = min(self.chunk, self.max_tokens - self.tokens[chosen])  # line 19
        need = blocks(PROMPT + self.tokens[chosen] + chunk)
        free = {worker: self.free_blocks(worker) for worker in self.capacity if self.has_slot(worker)}
        worker = max(free, key=lambda w: free[w], default=None)  # line 20
        if worker is None or free[worker] < need:  # lines 21-24
            return None
        home = self.home.get(chosen)
        if home in free and need <= free[home] and free[worker] - need <= free[home]:
            worker = home
        self.running[chosen], self.reserved[chosen] = worker, need
        self.served[chosen[0]] += chunk
        self.num_rest += not spec
        return chosen, worker, chunk

    def free_blocks(self, worker: str) -> int:
        held = sum(need for response, need in self.reserved.items() if self.running[response] == worker)
        return self.capacity[worker][0] - held

    def has_slot(self, worker: str) -> bool:
        return list(self.running.values()).count(worker) < self.capacity[worker][1]

    def leave(self, response: Response) -> None:
        del self.running[response], self.reserved[response]


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[dict[int, list[int]], int, list[tuple[int, int]]]:
    """True lengths by group, their limit, and workers as (KV blocks, concurrency) that fit the longest response."""
    size = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(1, 40), min_size=size, max_size=size)
    true = dict(enumerate(draw(st.lists(lengths, min_size=1, max_size=5))))
    least = blocks(PROMPT + 40)
    worker = st.tuples(st.integers(least, 3 * least), st.integers(1, 5))
    return true, 40, draw(st.lists(worker, min_size=1, max_size=3))


@given(
    rollouts(),
    st.sampled_from(["even", "context", "no-context", "oracle"]),
    st.integers(0, 3),
    seeds,
)
@settings(max_examples=120)
def test_decisions_are_those_of_algorithm_1(
    rollout: tuple[dict[int, list[int]], int, list[tuple[int, int]]],
    variant: str,
    guard: int,
    seed: int,
) -> None:
    true, max_tokens, workers = rollout
    events = random.Random(seed)
    dispatcher = started(variant, true, max_tokens, guard)
    order = {(group, sample): 0 for group, lengths in true.items() for sample in range(len(lengths))}
    reference = Reference(variant, 8, guard, true, max_tokens, order)
    for number, (num_blocks, concurrency) in enumerate(workers):
        dispatcher.worker_up(f"w{number}", num_blocks, concurrency)
        reference.capacity[f"w{number}"] = num_blocks, concurrency
    running: list[Assignment] = []
    while dispatcher.num_unfinished:
        expected = reference.next_assignment()
        assignment = dispatcher.next_assignment()
        if assignment is not None:
            running.append(assignment)
            assert (
                (assignment.group, assignment.sample),
                assignment.worker,
                assignment.chunk_tokens,
            ) == expected
            continue
        assert expected is None
        if events.random() < 0.1:
            worker = events.choice(sorted(reference.capacity))
            lost = dispatcher.worker_lost(worker)
            assert set(responses(list(lost))) == {r for r, w in reference.running.items() if w == worker}
            for response in responses(list(lost)):
                reference.leave(response)
            running = [a for a in running if a not in lost]
            reference.home = {r: w for r, w in reference.home.items() if w != worker}
            num_blocks, concurrency = reference.capacity.pop(worker)
            dispatcher.worker_up(worker, num_blocks, concurrency)
            reference.capacity[worker] = num_blocks, concurrency
            continue
        ended = running.pop(events.randrange(len(running)))
        response = ended.group, ended.sample
        num_tokens = min(true[ended.group][ended.sample], reference.tokens[response] + ended.chunk_tokens)
        finished = num_tokens == true[ended.group][ended.sample]
        assert dispatcher.chunk_finished(ended, num_tokens, finished)
        reference.home[response] = ended.worker
        reference.leave(response)
        reference.tokens[response] = num_tokens
        if finished:
            reference.finished[response] = num_tokens
    assert reference.finished == {(g, s): n for g, row in true.items() for s, n in enumerate(row)}


@given(
    rollouts(),
    st.sampled_from(["even", "context", "no-context", "oracle"]),
    st.integers(0, 3),
    st.integers(0, 12),
    seeds,
)
@settings(max_examples=120)
def test_who_is_next_is_foreseen_and_foreseeing_changes_nothing(
    rollout: tuple[dict[int, list[int]], int, list[tuple[int, int]]],
    variant: str,
    guard: int,
    count: int,
    seed: int,
) -> None:
    """At a random moment so much room comes up that the whole buffer runs: in the order that was foreseen."""
    true, max_tokens, workers = rollout
    events = random.Random(seed)
    dispatcher, twin = (started(variant, true, max_tokens, guard) for _ in range(2))
    for number, room in enumerate(workers):
        dispatcher.worker_up(f"w{number}", *room)
        twin.worker_up(f"w{number}", *room)
    running: list[Assignment] = []
    tokens: Counter[Response] = Counter()
    for _ in range(events.randrange(60)):
        dispatcher.next_waiting(events.randrange(12))
        more = all_assignments(dispatcher)
        assert more == all_assignments(twin)
        running += more
        if not running:
            break
        ended = running.pop(events.randrange(len(running)))
        response = ended.group, ended.sample
        length = true[ended.group][ended.sample]
        tokens[response] = min(length, tokens[response] + ended.chunk_tokens)
        for each in (dispatcher, twin):
            each.chunk_finished(ended, tokens[response], tokens[response] == length)
    foreseen = dispatcher.next_waiting(count)
    num_waiting = dispatcher.num_waiting
    assert len(foreseen) == min(count, num_waiting)
    dispatcher.worker_up("roomy", 10**6, 10**6)
    found = responses(all_assignments(dispatcher))
    assert len(found) == num_waiting
    assert set(foreseen) <= set(found)
    if variant != "context" or not guard:
        assert foreseen == found[:count]


def test_undivided_groups_foresee_nothing() -> None:
    assert started("group", {0: [5, 5]}, 10).next_waiting(4) == []


# ---------------------------------------------------------------- what holds for every variant


@dataclass
class Fleet:
    """A simulated fleet that checks the dispatcher's promises at every event."""

    dispatcher: Dispatcher
    true: dict[int, list[int]]
    room: dict[str, tuple[int, int]] = field(default_factory=dict)
    running: dict[int, Assignment] = field(default_factory=dict)
    late: list[Assignment] = field(default_factory=list)
    tokens: Counter[Response] = field(default_factory=Counter)
    finished: Counter[Response] = field(default_factory=Counter)

    def up(self, worker: str, num_blocks: int, concurrency: int) -> None:
        self.dispatcher.worker_up(worker, num_blocks, concurrency)
        self.room[worker] = num_blocks, concurrency

    def assign(self) -> None:
        for assignment in all_assignments(self.dispatcher):
            assert (assignment.group, assignment.sample) not in responses(list(self.running.values()))
            assert assignment.chunk_tokens > 0
            self.running[assignment.number] = assignment
        for worker, (num_blocks, concurrency) in self.room.items():
            here = [a for a in self.running.values() if a.worker == worker]
            need = sum(blocks(PROMPT + self.tokens[a.group, a.sample] + a.chunk_tokens) for a in here)
            assert need <= num_blocks
            assert len(here) <= concurrency
        assert {a.worker for a in self.running.values()} <= set(self.room)

    def end(self, number: int) -> None:
        assignment = self.running.pop(number)
        response = assignment.group, assignment.sample
        length = self.true[assignment.group][assignment.sample]
        self.tokens[response] = min(length, self.tokens[response] + assignment.chunk_tokens)
        assert self.dispatcher.chunk_finished(
            assignment, self.tokens[response], self.tokens[response] == length
        )
        self.finished[response] += self.tokens[response] == length

    def lose(self, worker: str, progress: int) -> None:
        here = [a for a in self.running.values() if a.worker == worker]
        held = {}
        for a in here:
            most = self.true[a.group][a.sample] - 1
            held[a.group, a.sample] = min(
                self.tokens[a.group, a.sample] + min(progress, a.chunk_tokens), most
            )
        assert list(self.dispatcher.worker_lost(worker, held)) == here
        self.tokens.update({r: held[r] - self.tokens[r] for r in held})
        self.late += here
        del self.room[worker]
        for assignment in here:
            del self.running[assignment.number]

    def check_late_reports(self) -> None:
        before = self.dispatcher.num_unfinished, self.dispatcher.num_waiting
        assert not any(self.dispatcher.chunk_finished(a, a.chunk_tokens, True) for a in self.late)
        assert (self.dispatcher.num_unfinished, self.dispatcher.num_waiting) == before


@given(rollouts(), st.sampled_from(VARIANTS), seeds)
@settings(max_examples=120)
def test_every_response_finishes_once_and_workers_have_room_whatever_is_lost(
    rollout: tuple[dict[int, list[int]], int, list[tuple[int, int]]], variant: str, seed: int
) -> None:
    true, max_tokens, workers = rollout
    fleet, events = Fleet(started(variant, true, max_tokens), true), random.Random(seed)
    for number, room in enumerate(workers):
        fleet.up(f"w{number}", *room)
    while fleet.dispatcher.num_unfinished:
        fleet.assign()
        if events.random() < 0.15:
            loss = events.randrange(len(workers))
            fleet.lose(f"w{loss}", progress=events.randrange(9))
            fleet.assign()
            fleet.up(f"w{loss}", *workers[loss])
            continue
        fleet.end(events.choice(sorted(fleet.running)))
        fleet.check_late_reports()
    assert fleet.finished == {(g, s): 1 for g, row in true.items() for s in range(len(row))}
    assert fleet.dispatcher.num_waiting == 0
    assert fleet.dispatcher.next_assignment() is None


@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 6))
@settings(max_examples=60)
def test_the_guard_bounds_how_long_a_group_waits(interval: int, num_groups: int, concurrency: int) -> None:
    """Chunks are equally long here, so nobody gets a chunk beyond a waiting group's service more than once."""
    size, chunk, limit = 4, 8, 80
    dispatcher = started("context", {g: [limit] * size for g in range(num_groups)}, limit, interval)
    dispatcher.worker_up("w", 10_000, concurrency)
    tokens: Counter[Response] = Counter()
    served: Counter[int] = Counter()
    patience: dict[int, int] = {}  # decisions about the rest that a waiting group may still be passed over in
    waiting = {(g, s) for g in range(num_groups) for s in range(1, size)}
    running: list[Assignment] = []
    while dispatcher.num_unfinished:
        for assignment in all_assignments(dispatcher):
            running.append(assignment)
            served[assignment.group] += chunk
            if assignment.sample == 0:
                continue
            waiting.remove((assignment.group, assignment.sample))
            patience.pop(assignment.group, None)
            still = {group for group, _ in waiting}
            for group in still:
                behind = [
                    max(served[group] - served[other], -chunk) // chunk + 1 for other in range(num_groups)
                ]
                bound = interval * (sum(behind) + 1)
                patience[group] = min(patience.get(group, bound), bound) - 1
                assert patience[group] >= 0
        ended = running.pop(0)
        response = ended.group, ended.sample
        tokens[response] += chunk
        dispatcher.chunk_finished(ended, tokens[response], finished=False)
        if tokens[response] < limit and ended.sample:
            waiting.add(response)


def test_without_the_guard_a_group_with_a_short_estimate_waits_to_the_end() -> None:
    def position(guard: int) -> int:
        dispatcher = started("context", {0: [2, 40], 1: [40] * 9}, 40, guard)
        dispatcher.worker_up("w", 1000, 2)
        first, second = all_assignments(dispatcher)
        dispatcher.chunk_finished(first, 2, finished=True)
        seen = [dispatcher.next_assignment()]
        dispatcher.chunk_finished(second, 8, finished=True)
        while (0, 1) not in {(a.group, a.sample) for a in seen if a is not None}:
            seen.append(dispatcher.next_assignment())
            last = seen[-1]
            assert last is not None
            dispatcher.chunk_finished(last, 8, finished=True)
        return len(seen)

    assert position(guard=0) == 9
    assert position(guard=3) == 3


def test_the_guard_counts_tokens_not_chunks() -> None:
    dispatcher = started("context", {0: [10, 10], 1: [10, 10, 10]}, 10, guard=1)
    ends = [
        ((0, 0), 8, False),
        ((1, 0), 8, True),
        ((0, 0), None, False),
        ((0, 0), 10, True),
        ((1, 1), 8, True),
    ]
    dispatcher.worker_up("w", 1000, 1)
    for response, num_tokens, finished in ends:  # 12 tokens in 3 chunks for group 0, 16 in 2 for group 1
        (assignment,) = all_assignments(dispatcher)
        assert (assignment.group, assignment.sample) == response
        if num_tokens is None:
            dispatcher.worker_lost("w")
            dispatcher.worker_up("w", 1000, 1)
        else:
            dispatcher.chunk_finished(assignment, num_tokens, finished)
    assert responses(all_assignments(dispatcher)) == [(0, 1)]


# ---------------------------------------------------------------- by example


def test_probes_go_before_all_others_and_the_shortest_first() -> None:
    dispatcher = started("context", {0: [40, 40], 1: [40, 40], 2: [40, 40]}, 40)
    dispatcher.worker_up("w", 1000, 2)
    first, second = all_assignments(dispatcher)
    assert responses([first, second]) == [(0, 0), (1, 0)]
    dispatcher.chunk_finished(first, 8, finished=False)
    dispatcher.chunk_finished(second, 5, finished=False)
    assert responses(all_assignments(dispatcher)) == [(2, 0), (1, 0)]


def test_the_rest_goes_by_the_longest_finished_response_of_the_group() -> None:
    dispatcher = started("context", {0: [4, 9], 1: [7, 9], 2: [40, 40]}, 40, guard=0)
    dispatcher.worker_up("w", 1000, 3)
    probes = all_assignments(dispatcher)
    dispatcher.chunk_finished(probes[0], 4, finished=True)
    dispatcher.chunk_finished(probes[1], 7, finished=True)
    dispatcher.worker_up("other", 1000, 1)
    assert responses(all_assignments(dispatcher)) == [(2, 1), (1, 1), (0, 1)]


def test_the_oracle_goes_by_true_length_across_groups() -> None:
    dispatcher = started("oracle", {0: [4, 9, 30], 1: [7, 31, 5]}, 40)
    dispatcher.worker_up("w", 1000, 100)
    assert responses(all_assignments(dispatcher)) == [(1, 1), (0, 2), (0, 1), (1, 0), (1, 2), (0, 0)]


def test_without_context_responses_go_in_the_order_of_submission_and_keep_their_place() -> None:
    dispatcher = started("no-context", {5: [40, 3], 2: [40, 3]}, 40)
    dispatcher.worker_up("w", 1000, 2)
    first, second = all_assignments(dispatcher)
    dispatcher.chunk_finished(second, 3, finished=True)
    dispatcher.chunk_finished(first, 8, finished=False)
    assert responses([first, second, *all_assignments(dispatcher)]) == [(5, 0), (5, 1), (5, 0), (2, 0)]


def test_chunks_are_cut_at_the_limit_and_grow_the_room_that_they_need() -> None:
    dispatcher = started("no-context", {0: [20]}, 20)
    dispatcher.worker_up("w", blocks(PROMPT + 20), 1)
    chunks = []
    for num_tokens in (8, 16, 20):
        (assignment,) = all_assignments(dispatcher)
        chunks.append(assignment.chunk_tokens)
        dispatcher.chunk_finished(assignment, num_tokens, finished=False)
    assert chunks == [8, 8, 4]
    assert dispatcher.num_unfinished == 0


def test_chunks_end_with_a_kv_block() -> None:
    """A prompt of 3 tokens and chunks of up to 8: each ends at a multiple of 4, but for the last one."""
    dispatcher = Dispatcher(settings_for("no-context"))
    dispatcher.submit(0, 1, 3, 22)
    dispatcher.worker_up("w", blocks(3 + 22), 1)
    ends, num_tokens = [], 0
    while (assignment := dispatcher.next_assignment()) is not None:
        num_tokens += assignment.chunk_tokens
        ends.append(3 + num_tokens)
        dispatcher.chunk_finished(assignment, num_tokens, finished=False)
    assert ends == [8, 16, 24, 25]


def test_chunks_shorter_than_a_kv_block_run_as_they_are() -> None:
    dispatcher = Dispatcher(settings_for("no-context", chunk=2))
    dispatcher.submit(0, 1, 3, 9)
    dispatcher.worker_up("w", blocks(3 + 9), 1)
    ends, num_tokens = [], 0
    while (assignment := dispatcher.next_assignment()) is not None:
        num_tokens += assignment.chunk_tokens
        ends.append(3 + num_tokens)
        dispatcher.chunk_finished(assignment, num_tokens, finished=False)
    assert ends == [4, 6, 8, 10, 12]


def test_the_worker_with_the_most_free_blocks_is_chosen() -> None:
    dispatcher = started("no-context", {0: [40] * 5}, 40)
    dispatcher.worker_up("small", 11, 9)
    dispatcher.worker_up("large", 16, 9)
    assert [a.worker for a in all_assignments(dispatcher)] == ["large", "large", "small", "large", "small"]


def test_a_chunk_goes_on_in_place_when_nothing_waits() -> None:
    dispatcher = started("even", {group: [40] for group in range(6)}, 40)
    for worker in ("a", "b"):
        dispatcher.worker_up(worker, 100, 9)
    running = {assignment.group: assignment for assignment in all_assignments(dispatcher)}
    assert [running[group].worker for group in range(6)] == ["a", "b"] * 3
    for group in (3, 5):
        dispatcher.chunk_finished(running[group], 8, finished=True)
    for num_tokens in (8, 16, 24):
        dispatcher.chunk_finished(running[0], num_tokens, finished=False)
        [running[0]] = all_assignments(dispatcher)
        assert running[0].worker == "a", "6 blocks of others there, 3 and its own 5 or more on b"


def test_a_chunk_moves_to_a_worker_that_has_more_room_with_it_than_its_own_without() -> None:
    dispatcher = started("even", {0: [40], 1: [40], 2: [40], 3: [40]}, 40)
    dispatcher.worker_up("a", 100, 9)
    first, *others = all_assignments(dispatcher)
    dispatcher.worker_up("b", 100, 9)
    dispatcher.chunk_finished(first, 8, finished=False)
    [moved] = all_assignments(dispatcher)
    assert (moved.group, moved.worker) == (0, "b"), "a has 9 blocks of others"
    dispatcher.chunk_finished(others[0], 8, finished=False)
    [stayed] = all_assignments(dispatcher)
    assert (stayed.group, stayed.worker) == (1, "a"), "a has 6 blocks of others and b 5, so it would have 10"


@given(rollouts(), st.integers(0, 3), seeds)
@settings(max_examples=120)
def test_who_has_begun_stays_and_goes_on_first_where_nothing_can_move(
    rollout: tuple[dict[int, list[int]], int, list[tuple[int, int]]], guard: int, seed: int
) -> None:
    true, max_tokens, workers = rollout
    dispatcher, events = started("sticky", true, max_tokens, guard), random.Random(seed)
    for number, room in enumerate(workers):
        dispatcher.worker_up(f"w{number}", *room)
    home: dict[Response, str] = {}
    tokens: Counter[Response] = Counter()
    running: list[Assignment] = []
    while dispatcher.num_unfinished:
        for assignment in all_assignments(dispatcher):
            response = assignment.group, assignment.sample
            in_line = {home[r] for r in home if tokens[r] and r not in responses(running) and r != response}
            if response not in home:
                assert assignment.worker not in in_line, "somebody who has begun there waits"
            assert home.setdefault(response, assignment.worker) == assignment.worker
            running.append(assignment)
        ended = running.pop(events.randrange(len(running)))
        response, length = (ended.group, ended.sample), true[ended.group][ended.sample]
        tokens[response] = min(length, tokens[response] + ended.chunk_tokens)
        dispatcher.chunk_finished(ended, tokens[response], tokens[response] == length)
        if tokens[response] == length:
            del home[response]


def test_a_response_moves_from_a_worker_that_is_lost_or_too_small_for_it() -> None:
    dispatcher = started("sticky", {0: [40], 1: [40]}, 40)
    dispatcher.worker_up("large", 11, 1)
    dispatcher.worker_up("small", 5, 1)
    large, small = all_assignments(dispatcher)
    assert (large.worker, small.worker) == ("large", "small")
    dispatcher.chunk_finished(small, 8, finished=False)
    [small] = all_assignments(dispatcher)
    assert small.worker == "small", "16 tokens fit"
    dispatcher.chunk_finished(small, 16, finished=False)
    assert dispatcher.next_assignment() is None, "24 do not, and the other worker is busy"
    dispatcher.worker_lost("large")
    dispatcher.worker_up("new", 11, 2)
    assert [(a.group, a.worker) for a in all_assignments(dispatcher)] == [(0, "new"), (1, "new")]


def test_a_group_is_bound_to_the_worker_with_the_fewest_responses_and_not_divided() -> None:
    dispatcher = started("group", {0: [40] * 3, 1: [40] * 2, 2: [40] * 2, 3: [40]}, 40)
    for worker in ("a", "b"):
        dispatcher.worker_up(worker, 1000, 100)
    assignments = all_assignments(dispatcher)
    assert {a.chunk_tokens for a in assignments} == {40}
    assert {(a.group, a.worker) for a in assignments} == {(0, "a"), (1, "b"), (2, "b"), (3, "a")}


def test_a_bound_group_waits_for_its_worker_while_another_is_empty() -> None:
    dispatcher = started("group", {0: [40] * 2, 1: [40]}, 40)
    for worker in ("a", "b"):
        dispatcher.worker_up(worker, 1000, 1)
    first, second = all_assignments(dispatcher)
    dispatcher.chunk_finished(second, 40, finished=True)
    assert dispatcher.next_assignment() is None
    dispatcher.chunk_finished(first, 40, finished=True)
    assert [(a.group, a.worker) for a in all_assignments(dispatcher)] == [(0, "a")]


def test_a_group_is_bound_to_a_worker_that_is_large_enough_for_it() -> None:
    """Its responses need 11 KV blocks; on a smaller worker they would wait for ever."""
    dispatcher = started("group", {0: [40] * 2, 1: [40]}, 40)
    dispatcher.submit(2, 2, PROMPT, 8)
    dispatcher.worker_up("small", 5, 9)
    dispatcher.worker_up("large", 22, 9)
    first = all_assignments(dispatcher)
    assert [(a.group, a.worker) for a in first] == [(0, "large"), (0, "large"), (2, "small")]
    dispatcher.worker_lost("large")
    assert dispatcher.next_assignment() is None
    dispatcher.chunk_finished(first[2], 8, finished=True)
    assert [(a.group, a.worker) for a in all_assignments(dispatcher)] == [(2, "small")]
    dispatcher.worker_up("large", 11, 9)
    assert [(a.group, a.worker) for a in all_assignments(dispatcher)] == [(0, "large")]


def test_only_unfinished_responses_count_where_groups_are_bound() -> None:
    dispatcher = started("group", {0: [40] * 3, 1: [40] * 2}, 40)
    for worker in ("a", "b", "c"):
        dispatcher.worker_up(worker, 1000, 100)
    for assignment in all_assignments(dispatcher):
        if assignment.sample:
            dispatcher.chunk_finished(assignment, 40, finished=True)
    dispatcher.worker_lost("b")
    dispatcher.submit(2, 1, PROMPT, 40)
    dispatcher.submit(3, 1, PROMPT, 40)
    assert {a.group: a.worker for a in all_assignments(dispatcher)} == {1: "c", 2: "a", 3: "c"}


def test_the_groups_of_a_lost_worker_are_bound_again() -> None:
    dispatcher = started("group", {0: [40] * 3, 1: [40] * 3}, 40)
    for worker in ("a", "b"):
        dispatcher.worker_up(worker, 1000, 2)
    all_assignments(dispatcher)
    assert responses(list(dispatcher.worker_lost("a", {(0, 1): 30}))) == [(0, 0), (0, 1)]
    dispatcher.worker_up("c", 1000, 9)
    again = all_assignments(dispatcher)
    assert [(a.sample, a.worker, a.chunk_tokens) for a in again] == [(0, "c", 40), (1, "c", 10), (2, "c", 40)]


def test_a_lost_response_goes_on_from_the_tokens_that_are_held() -> None:
    dispatcher = started("no-context", {0: [40, 40, 40]}, 40)
    dispatcher.worker_up("a", 1000, 3)
    all_assignments(dispatcher)
    dispatcher.worker_lost("a", {(0, 1): 36, (0, 2): 40})
    dispatcher.worker_up("a", 1000, 3)
    assert [a.chunk_tokens for a in all_assignments(dispatcher)] == [8, 4, 1]


# ---------------------------------------------------------------- errors and cost


def test_a_response_that_can_never_fit_is_refused() -> None:
    dispatcher = started("context", {}, 40)
    dispatcher.worker_up("a", 10, 1)
    with pytest.raises(
        RequestError, match=r"may need 11 KV blocks of 4 tokens.*more than 10: lower max_tokens"
    ):
        dispatcher.submit(0, 2, PROMPT, 40)
    assert dispatcher.num_unfinished == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rollout_that_is_stuck_says_so(variant: str) -> None:
    dispatcher = started(variant, {0: [40]}, 40, chunk=40)
    assert dispatcher.next_assignment() is None
    dispatcher.worker_up("a", 10, 1)
    with pytest.raises(RequestError, match="more than 10: lower max_tokens"):
        dispatcher.next_assignment()


@pytest.mark.parametrize("num_tokens", [7, 17])
def test_a_report_must_count_all_tokens_of_the_response(num_tokens: int) -> None:
    dispatcher = started("no-context", {0: [40]}, 40)
    dispatcher.worker_up("a", 1000, 1)
    dispatcher.chunk_finished(all_assignments(dispatcher)[0], 8, finished=False)
    (second,) = all_assignments(dispatcher)
    with pytest.raises(EngineError, match=f"with {num_tokens} tokens, not 8 to 16"):
        dispatcher.chunk_finished(second, num_tokens, finished=False)


def test_wrong_workers_groups_and_settings_are_named() -> None:
    dispatcher = started("context", {0: [40]}, 40)
    dispatcher.worker_up("a", 1000, 1)
    with pytest.raises(EngineError, match="'a' is up already"):
        dispatcher.worker_up("a", 1000, 1)
    with pytest.raises(EngineError, match="'b' has 0 KV blocks"):
        dispatcher.worker_up("b", 0, 1)
    with pytest.raises(EngineError, match="'b' is not among the 1"):
        dispatcher.worker_lost("b")
    with pytest.raises(RequestError, match="group 0 was submitted before"):
        dispatcher.submit(0, 1, PROMPT, 40)
    with pytest.raises(RequestError, match="group 1 has 0 responses"):
        dispatcher.submit(1, 0, PROMPT, 40)
    with pytest.raises(ConfigError, match="chunk_tokens is 0: set it to at least 1"):
        DispatchSettings(chunk_tokens=0)
    with pytest.raises(ConfigError, match="'oracle' got no true lengths"):
        Dispatcher(DispatchSettings("oracle"))


def test_a_racer_may_finish_beyond_the_chunk() -> None:
    dispatcher = Dispatcher(DispatchSettings(chunk_tokens=10))
    dispatcher.worker_up("a", 100, 10)
    dispatcher.submit(0, 1, 5, 100)
    chunk = dispatcher.next_assignment()
    assert chunk is not None
    with pytest.raises(EngineError, match="10"):
        dispatcher.chunk_finished(chunk, 42, False)
    assert dispatcher.chunk_finished(chunk, 42, True)
    assert dispatcher.num_unfinished == 0


def test_a_running_chunk_moves_and_takes_its_room_along() -> None:
    dispatcher = started("sticky", {0: [9], 1: [9]}, max_tokens=20)
    dispatcher.worker_up("full", 10, 4)
    first, second = all_assignments(dispatcher)
    dispatcher.worker_up("free", 5, 1)
    assert dispatcher.has_room(first, "free")
    moved = dispatcher.move(first, "free")
    assert moved == first._replace(worker="free")
    assert not dispatcher.has_room(second, "free"), "its concurrency is 1"
    assert dispatcher.chunk_finished(moved, 8, False)
    [again] = all_assignments(dispatcher)
    assert (again.group, again.worker) == (0, "free"), "it stays where it was moved to"
    dispatcher.worker_lost("free", {(0, 0): 9})
    [back] = all_assignments(dispatcher)
    assert back.worker == "full"
    assert dispatcher.can_move
    assert not started("group", {0: [9]}, max_tokens=20).can_move


def test_responses_that_exist_in_part_go_on_from_there() -> None:
    dispatcher = Dispatcher(DispatchSettings(variant="no-context", chunk_tokens=8, block_tokens=4))
    dispatcher.submit(0, 2, PROMPT, 20, held=(15, 0))
    dispatcher.worker_up("w", 6 + 3, 2)
    first, second = all_assignments(dispatcher)
    assert (first.sample, first.chunk_tokens) == (0, 5), "up to its limit of 20 tokens"
    assert (second.sample, second.chunk_tokens) == (1, 8)
    with pytest.raises(EngineError, match="not 15 to 20"):
        dispatcher.chunk_finished(first, 14, finished=False)
    assert dispatcher.chunk_finished(first, 20, finished=False)
    assert dispatcher.num_unfinished == 1


@pytest.mark.parametrize("held", [(1,), (1, 20), (-1, 0)])
def test_what_cannot_be_held_is_refused(held: tuple[int, ...]) -> None:
    dispatcher = Dispatcher(DispatchSettings(block_tokens=4))
    with pytest.raises(RequestError, match="one number per response, below the limit"):
        dispatcher.submit(0, 2, 3, 20, held)
