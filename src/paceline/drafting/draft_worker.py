"""The draft worker: a process that holds a small model and drafts ahead of an engine that verifies (SpecActor 4.1).

Owns, of every running response, the tokens that it was told of and those that it has drafted behind them. It is told
what responses grow by, drops what a rejection has made void, drafts on by the shared dice up to two windows ahead
(planning/draft_ahead.py), and sends everything ahead of a response whenever it has grown. What was drafted and then
decided teaches it how sure its drafts are and how sharply to draw; the engine has them calibrated. Run as a module it
is that process; it ends with its parent.

Invariant: nothing that it does, or fails to do, changes a token.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.drafting.learned import Learned
from paceline.drafting.model import ModelDrafter
from paceline.drafting.worker_wire import (
    HELLO,
    Begin,
    Drafts,
    Open,
    Step,
    ToWorker,
    WorkerSettings,
    encode,
    pack_draft,
)
from paceline.drafting.worker_wire import decode_for_worker as decode
from paceline.planning.draft_ahead import choose_depth, choose_responses, window_room
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import DraftBatch, DraftQuery, Float32Array, Int32Array

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)
NO_GRID = GRID[:0]

PULSE_S = 0.5
"""A worker that has nothing new to say repeats itself so often, and says so often that it is lost."""

_CALL_SMOOTHING = 0.2
"""What a new measurement of a call's time counts."""

_ACCEPTANCE_TOKENS = 200.0
"""Decided draft tokens after which one counts 1/e in the mean acceptance."""


@dataclass(slots=True)
class _Ahead:
    """A response: `known` tokens as told, and drafted ones up to `end`. Arrays are as long as the response can get."""

    row: int
    """Its number in the model drafter."""
    key: int
    temperature: float
    tokens: Int32Array
    acceptance: Float32Array
    cells: Int32Array
    known: int
    end: int
    most_ahead: int
    """Tokens beyond `known` that may be drafted."""
    path_probability: float = 1.0
    """That everything drafted ahead is accepted."""
    packed: bytes = b""
    """What is drafted ahead, for the engine; empty until it is asked for."""
    is_stuck: bool = False
    """The model has drafted nothing behind these tokens: it gives NaN, or lacks a row."""
    probes: Int32Array | None = None
    """What each sharpness would have drawn at position `known`, if it was asked. [num_sharpness]"""


class DraftWorker:
    """What a worker knows and decides; without a socket or a clock of its own. One thread."""

    def __init__(self, drafter: ModelDrafter, floor: float = 0.0, sharpness: float | None = None) -> None:
        self._drafter, self._floor = drafter, floor
        self._learned = Learned(drafter.prior_calibration(), sharpness)
        self._level_time = StepTimeModel.initial()
        self._accepted, self._decided = 1.0, 2.0  # decayed draft tokens; a coin's before any is known
        self._responses: dict[int, _Ahead] = {}
        self._rows = itertools.count()
        self._begun = self._number = 0
        self._call_s, self._num_levels = 0.0, 0
        self.is_lost = True
        """Whether it has to be told everything: at the start, or because a message did not arrive."""
        self.num_drafted = 0
        self.num_wasted = 0

    # -- what it is told

    def hear(self, message: ToWorker) -> None:
        """Take a message of the engine. Until it is told everything a lost worker hears nothing else."""
        if isinstance(message, Begin):
            self._begin(message)
        elif not self.is_lost:
            self.is_lost = message.number != self._number + 1
            if not self.is_lost:
                self._step(message)

    def _begin(self, begin: Begin) -> None:
        for response in list(self._responses):
            self._close(response)
        self._begun, self._number, self.is_lost = begin.begun, begin.number, False
        self.num_drafted = self.num_wasted = 0
        for opened in begin.opened:
            self._open(opened)

    def _step(self, step: Step) -> None:
        self._number = step.number
        for response in np.frombuffer(step.ended, np.int64).tolist():
            self._close(response)
        self._grow(step)
        for opened in step.opened:
            self._open(opened)
        allowed, most_ahead = np.frombuffer(step.allowed, np.int64), np.frombuffer(step.most_ahead, np.int32)
        for response, most in zip(allowed.tolist(), most_ahead.tolist(), strict=True):
            if (one := self._responses.get(response)) is not None:
                one.most_ahead = most

    def _open(self, opened: Open) -> None:
        told = np.frombuffer(opened.tokens, np.int32)
        limit = max(min(opened.limit, self._drafter.max_model_len), len(told))
        tokens = np.empty(limit, np.int32)
        tokens[: len(told)] = told
        self._responses[opened.response] = _Ahead(
            next(self._rows),
            opened.key,
            opened.temperature,
            tokens,
            np.empty(limit, np.float32),
            np.empty(limit, np.int32),
            len(told),
            len(told),
            opened.most_ahead,
        )

    def _close(self, response: int) -> None:
        if (one := self._responses.pop(response, None)) is not None:
            self._drafter.forget([one.row])

    def _grow(self, step: Step) -> None:
        tokens = np.frombuffer(step.tokens, np.int32)
        ends = np.frombuffer(step.offsets, np.int32).tolist()
        cells, outcomes = [], []
        for row, response in enumerate(np.frombuffer(step.responses, np.int64).tolist()):
            if (one := self._responses.get(response)) is not None:
                told = self._decide(one, tokens[ends[row] : ends[row + 1]])
                cells.append(told[0])
                outcomes.append(told[1])
        if cells:
            self._learn(np.concatenate(cells), np.concatenate(outcomes))

    def _decide(self, one: _Ahead, tokens: Int32Array) -> tuple[Int32Array, np.typing.NDArray[np.bool_]]:
        """A response has grown: (cells, accepted) of the draft tokens that were decided, up to the first rejection."""
        start, num_ahead = one.known, one.end - one.known
        tokens = tokens[: len(one.tokens) - start]
        room = min(len(tokens), num_ahead)
        right = one.tokens[start : start + room] == tokens[:room]
        num_right = room if right.all() else int(right.argmin())
        num_told = min(num_right + 1, room)
        told = one.cells[start : start + num_told].copy(), right[:num_told]
        if one.probes is not None and len(tokens):
            self._learned.learn_sharpness(one.probes[None], tokens[:1])
        one.probes, one.is_stuck, one.packed = None, False, b""
        one.known = start + len(tokens)
        one.tokens[start : one.known] = tokens
        if num_right < room:
            self.num_wasted += num_ahead - num_right - 1
            self._drafter.rewind(one.row, start + num_right)
            one.end = one.known
        else:
            one.end = max(one.end, one.known)
        one.path_probability = float(np.prod(one.acceptance[one.known : one.end]))
        return told

    def _learn(self, cells: Int32Array, outcomes: np.typing.NDArray[np.bool_]) -> None:
        self._learned.learn(cells, outcomes)
        decay = float(np.exp(-len(cells) / _ACCEPTANCE_TOKENS))
        self._accepted = self._accepted * decay + float(outcomes.sum())
        self._decided = self._decided * decay + len(cells)

    # -- what it drafts

    def draft(self) -> bool:
        """Draft a few tokens more where they are of most use; False where the windows are full, or nothing runs."""
        open_ones = [one for one in self._responses.values() if self._room(one) > 0]
        if self.is_lost or not open_ones:
            return False
        order = choose_responses(
            np.array([one.path_probability for one in open_ones]),
            np.array([len(one.tokens) - one.end for one in open_ones]),
            self._level_time,
        )
        chosen = [open_ones[at] for at in order.tolist()]
        self._extend(chosen, choose_depth(len(chosen), self._level_time))
        return True

    def _room(self, one: _Ahead) -> int:
        """Tokens that may be drafted for a response now."""
        if one.is_stuck or one.path_probability < self._floor:
            return 0
        return min(window_room(one.most_ahead, one.end - one.known), len(one.tokens) - one.end)

    def _extend(self, chosen: Sequence[_Ahead], depth: int) -> None:
        """Draft up to `depth` tokens for each."""
        started_s, count = time.perf_counter(), len(chosen)
        rooms = np.fromiter(map(self._room, chosen), np.int32, count)
        query = DraftQuery(
            groups=np.zeros(count, np.int64),
            responses=np.fromiter((one.row for one in chosen), np.int64, count),
            keys=np.fromiter((one.key for one in chosen), np.uint64, count),
            positions=np.fromiter((one.end for one in chosen), np.int64, count),
            temperatures=np.fromiter((one.temperature for one in chosen), np.float32, count),
            max_tokens=rooms,
        )
        probes = any(one.end == one.known for one in chosen)
        batch, growth = self._drafter.draft(
            [one.tokens[: one.end] for one in chosen],
            query,
            min(depth, int(rooms.max())),
            sharpness=self._learned.beta,
            sharpness_grid=GRID if probes else NO_GRID,
            calibration=self._learned.calibration,
            floor=0.0,
        )
        for row, one in enumerate(chosen):
            self._put(one, batch, row)
        if growth.num_levels:
            rows = max(round(growth.num_rows / growth.num_levels), 1)
            self._level_time = update_measured_time(
                self._level_time, rows, growth.seconds / growth.num_levels
            )
            self._num_levels, call_s = growth.num_levels, time.perf_counter() - started_s
            self._call_s += _CALL_SMOOTHING * (call_s - self._call_s) if self._call_s else call_s

    def _put(self, one: _Ahead, batch: DraftBatch, row: int) -> None:
        length = int(batch.num_tokens[row])
        new = slice(one.end, one.end + length)
        one.tokens[new] = batch.tokens[row, :length]
        one.acceptance[new] = batch.acceptance[row, :length]
        one.cells[new] = batch.cells[row, :length]
        if one.end == one.known and length and batch.probes.shape[1]:
            one.probes = batch.probes[row]
        one.is_stuck, one.packed = not length, b""
        one.end += length
        one.path_probability *= float(np.prod(one.acceptance[new]))
        self.num_drafted += length

    def say(self) -> Drafts:
        """Everything that is drafted ahead."""
        return Drafts(
            begun=self._begun,
            number=self._number,
            trees=b"".join(_pack(name, one) for name, one in self._responses.items()),
            call_s=self._call_s,
            num_levels=self._num_levels,
            mean_acceptance=self._accepted / self._decided,
            num_drafted=self.num_drafted,
            num_wasted=self.num_wasted,
        )


def _pack(response: int, one: _Ahead) -> bytes:
    """What is drafted ahead of a response; packed anew only where it has changed."""
    if not one.packed and one.end > one.known:
        ahead = slice(one.known, one.end)
        parents = np.arange(-1, one.end - one.known - 1, dtype=np.int32)
        one.packed = pack_draft(response, one.known, one.tokens[ahead], parents, one.acceptance[ahead])
    return one.packed


def load_worker(settings: WorkerSettings) -> DraftWorker:
    """The worker with its model. Raises CheckpointError or ConfigError."""
    drafter = ModelDrafter(
        settings.model,
        max_model_len=settings.max_model_len,
        max_requests=settings.max_requests,
        dtype=settings.dtype,
        vocab_size=settings.vocab_size,
    )
    return DraftWorker(drafter, settings.floor, settings.sharpness)


class _Connection:
    """A worker's end of the sockets of an engine."""

    def __init__(self, address: str) -> None:
        import zmq

        self._context, self._zmq = zmq.Context(), zmq
        self._steps = self._context.socket(zmq.DEALER)
        self._steps.setsockopt(zmq.LINGER, 0)
        self._steps.connect(address)
        self._drafts = self._context.socket(zmq.PUSH)

    def hear(self, timeout_s: float) -> Iterator[ToWorker]:
        """What the engine has told, waiting so long for the first of it."""
        timeout_ms = int(1e3 * timeout_s)
        while self._steps.poll(timeout_ms):
            message = decode(self._steps.recv())
            if isinstance(message, Begin):
                self._drafts.close()
                self._drafts = self._context.socket(self._zmq.PUSH)
                self._drafts.setsockopt(self._zmq.LINGER, 0)
                self._drafts.setsockopt(self._zmq.CONFLATE, 1)
                self._drafts.connect(message.drafts_to)
            yield message
            timeout_ms = 0

    def say(self, drafts: Drafts | None) -> None:
        """Send what is drafted, or that the worker is lost. What the engine does not take now the next message has."""
        with contextlib.suppress(self._zmq.Again):
            if drafts is None:
                self._steps.send(HELLO, self._zmq.NOBLOCK)
            else:
                self._drafts.send(encode(drafts), self._zmq.NOBLOCK)

    def close(self) -> None:
        self._steps.close()
        self._drafts.close()
        self._context.term()


def serve(worker: DraftWorker, address: str, goes_on: Callable[[], bool], idle_s: float = PULSE_S) -> None:
    """Hear and draft by turns for the engine at an address.

    goes_on: asked after each turn, and every `idle_s` at least.
    """
    worker.is_lost = True
    with contextlib.closing(_Connection(address)) as engine:
        said_s = -PULSE_S
        while goes_on():
            has_drafted = worker.draft()
            now_s = time.monotonic()
            if has_drafted or now_s - said_s >= PULSE_S:
                engine.say(None if worker.is_lost else worker.say())
                said_s = now_s
            for message in engine.hear(0.0 if has_drafted else idle_s):
                worker.hear(message)


def main(text: str) -> None:
    """Be a worker. text: `WorkerSettings` as JSON. Ctrl-C is the parent's business."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(text, type=WorkerSettings)
    torch.set_num_threads(1)
    serve(load_worker(settings), settings.address, lambda: os.getppid() == settings.parent)


if __name__ == "__main__":
    main(sys.argv[1])
