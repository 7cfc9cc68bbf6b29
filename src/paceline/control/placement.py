"""Which chunk runs where: the chunks of responses, their workers and the dispatcher's view of them, changed together.

Used by the controller, which decides what shall run. Invariants: a chunk that runs is among its worker's `chunks` and
its response's `runs`, or in neither; the first of `runs` is the owner, whom the dispatcher knows; a second one is a
copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.control.events import Adopt, CancelChunk, RunChunk
from paceline.control.helping import Pair
from paceline.control.live_response import LiveResponse, RunningChunk
from paceline.control.worker import Worker
from paceline.planning.dispatch import Assignment, Dispatcher


class Placement:
    """One per controller."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._numbers = itertools.count()
        self.dispatcher: Dispatcher | None = None
        """Of the rollout; None: there is none, or no worker is up yet."""
        self.version = 0
        """Of the weights that chunks run with."""
        self.changed: dict[str, None] = {}
        """Workers that run other chunks than when this was emptied last."""

    @property
    def known(self) -> Dispatcher:
        """The dispatcher of a rollout whose chunks run."""
        assert self.dispatcher is not None
        return self.dispatcher

    def give(self, assignment: Assignment, response: LiveResponse) -> Worker:
        """A worker gets a response's next chunk, and holds it until it may begin."""
        worker = self._workers[assignment.worker]
        worker.has_run = True
        start, response.is_raced = response.num_tokens, False
        end = start + assignment.chunk_tokens
        chunk = RunningChunk(assignment, response, worker.name, start, end, response.num_steps)
        worker.held.append(self._place(worker, chunk))
        return worker

    def _place(self, worker: Worker, chunk: RunningChunk, pair: Pair | None = None) -> RunChunk:
        """A chunk runs on a worker from now on."""
        number, response = next(self._numbers), chunk.response
        if response.runs:
            worker.second.add(number)
        worker.chunks[number], response.runs[number] = chunk, worker.name
        self.changed[worker.name] = None
        kind, helped = (None, None) if pair is None else (pair.kind, pair.helped.worker)
        request = response.next_request(chunk.end)
        return RunChunk(*worker.place, number, request, self.version, response.index, kind, helped)

    def remove(self, worker: Worker, number: int) -> None:
        """A chunk has left its worker."""
        runs = worker.chunks.pop(number).response.runs
        del runs[number]
        self.changed |= dict.fromkeys((worker.name, *runs.values()))
        worker.second.discard(number)
        worker.new.pop(number, None)

    def cancel(self, response: LiveResponse, *, keep_kv: bool = False) -> list[CancelChunk]:
        """What still generates the response stops."""
        cancels = []
        for number, name in list(response.runs.items()):
            worker = self._workers[name]
            self.remove(worker, number)
            cancels.append(CancelChunk(*worker.place, number, keep_kv))
        return cancels

    def clear(self, worker: Worker) -> dict[int, RunningChunk]:
        """Nothing runs on the worker any more. Gives what had begun there, by number."""
        self.changed[worker.name] = None
        return worker.clear()

    def withdraw(self, worker: Worker) -> dict[int, RunningChunk]:
        """Take the worker out of the rollout; its chunks wait again. Gives those that had begun, by number."""
        if not worker.verifies or self.dispatcher is None:
            return {}
        held = {order.chunk for order in worker.held}
        lost = dict(worker.chunks)
        for number, chunk in lost.items():
            if len(chunk.response.runs) > 1:
                self.leave_race(worker, number)
        progress = {}
        for number, chunk in worker.chunks.items():
            del chunk.response.runs[number]
            progress[chunk.assignment.group, chunk.assignment.sample] = chunk.response.num_tokens
        self.dispatcher.worker_lost(worker.name, progress)
        self.clear(worker)
        return {number: chunk for number, chunk in lost.items() if number not in held}

    # -- a response on two workers

    def copy(self, helper: Worker, helped: Worker, pair: Pair) -> RunChunk | None:
        """A free worker generates a response of another one too; None: it has no room for it."""
        [number] = pair.chunks
        chunk = helped.chunks[number]
        if not self.known.has_room(chunk.assignment, helper.name):
            return None
        response = chunk.response
        response.is_raced = True
        copy = replace(chunk, worker=helper.name, start=response.num_tokens, num_steps=response.num_steps)
        return self._place(helper, copy, pair)

    def take_over(self, helper: Worker, helped: Worker, pair: Pair) -> list[CancelChunk | RunChunk]:
        """A free worker goes on with responses of another one, as far as it has room for them."""
        orders: list[CancelChunk | RunChunk] = []
        for number in pair.chunks:
            chunk = helped.chunks[number]
            if not self.known.has_room(chunk.assignment, helper.name):
                break
            response = chunk.response
            moved = self.known.move(chunk.assignment, helper.name)
            self.remove(helped, number)
            orders.append(CancelChunk(*helped.place, number, keep_kv=True))
            start, response.is_raced = response.num_tokens, False
            there = RunningChunk(moved, response, helper.name, start, chunk.end, response.num_steps)
            orders.append(order := self._place(helper, there, pair))
            helper.has_run, helper.new[order.chunk] = True, response
        return orders

    def leave_race(self, worker: Worker, number: int, *, for_good: bool = False) -> None:
        """One of the two that generate a response stops; the other one owns it from now on.

        for_good: the response gets no further copy.
        """
        chunk = worker.chunks[number]
        chunk.response.may_race &= not for_good
        was_owner = chunk.response.owner == number
        self.remove(worker, number)
        [(copy, name)] = chunk.response.runs.items()
        if was_owner:
            other, moved = self._workers[name], self.known.move(chunk.assignment, name)
            other.chunks[copy] = replace(other.chunks[copy], assignment=moved)

    def end_copies(self, worker: Worker) -> list[CancelChunk]:
        """A worker gets a chunk of its own: it runs copies no more."""
        copies = worker.copies
        for number in copies:
            self.leave_race(worker, number)
        return [CancelChunk(*worker.place, number) for number in copies]

    def share_lead(self, number: int, response: LiveResponse, known: int) -> Sequence[Adopt]:
        """In a race the other worker hears what this chunk was the first to tell, behind `known` tokens."""
        others = [(name, other) for other, name in response.runs.items() if other != number]
        tokens = response.tokens[known:].tobytes() if others else b""
        return [Adopt(*self._workers[name].place, other, known, tokens) for name, other in others]
