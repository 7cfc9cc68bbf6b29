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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.drafting.learned import Learned
from paceline.drafting.model import ModelDrafter
from paceline.drafting.worker_wire import (
    Allow,
    Begin,
    Close,
    Drafts,
    Grow,
    Hello,
    Open,
    ToWorker,
    WorkerSettings,
    encode,
)
from paceline.drafting.worker_wire import decode_for_worker as decode
from paceline.planning.draft_ahead import choose_depth, choose_responses, window_room
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import DraftBatch, DraftQuery, Float32Array, Int32Array

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)
NO_GRID = GRID[:0]

PULSE_S = 0.5
"""A worker that has nothing to send says so often that it is alive, and so often that it is lost."""

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
        self.window = 1
        self._number = 0
        self.is_lost = True
        """Whether it has to be told everything: at the start, or because a message did not arrive."""
        self.num_drafted = 0
        self.num_wasted = 0

    # -- what it is told

    def hear(self, message: ToWorker) -> None:
        """Take a message of the engine. Until it is told everything a lost worker hears nothing else."""
        if isinstance(message, Begin):
            for response in list(self._responses):
                self._close(response)
            self.window, self._number, self.is_lost = message.window, message.number, False
        elif self.is_lost:
            return
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            self._close(message.response)
        elif isinstance(message, Allow):
            self._allow(message)
        else:
            self._grow(message)

    def _open(self, message: Open) -> None:
        told = np.frombuffer(message.tokens, np.int32)
        limit = max(min(message.limit, self._drafter.max_model_len), len(told))
        tokens = np.empty(limit, np.int32)
        tokens[: len(told)] = told
        self._responses[message.response] = _Ahead(
            next(self._rows),
            message.key,
            message.temperature,
            tokens,
            np.empty(limit, np.float32),
            np.empty(limit, np.int32),
            len(told),
            len(told),
            2 * self.window,
        )

    def _allow(self, message: Allow) -> None:
        responses = np.frombuffer(message.responses, np.int64).tolist()
        for response, most in zip(
            responses, np.frombuffer(message.most_ahead, np.int32).tolist(), strict=True
        ):
            if (one := self._responses.get(response)) is not None:
                one.most_ahead = most

    def _close(self, response: int) -> None:
        if (one := self._responses.pop(response, None)) is not None:
            self._drafter.forget([one.row])

    def _grow(self, message: Grow) -> None:
        self.is_lost = message.number != self._number + 1
        if self.is_lost:
            return
        self._number = message.number
        tokens = np.frombuffer(message.tokens, np.int32)
        counts = np.frombuffer(message.counts, np.int32)
        ends = np.cumsum(counts)
        cells, outcomes = [], []
        columns = (np.frombuffer(message.responses, np.int64), np.frombuffer(message.starts, np.int64))
        for response, start, first, last in zip(
            *(column.tolist() for column in columns), (ends - counts).tolist(), ends.tolist(), strict=True
        ):
            one = self._responses.get(response)
            if one is not None and start == one.known:
                told = self._decide(one, tokens[first:last])
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
        one.probes, one.is_stuck = None, False
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

    def draft(self) -> Drafts | None:
        """Draft a few tokens more where they are of most use; None where the windows are full, or nothing runs."""
        open_ones = [(name, one) for name, one in self._responses.items() if self._room(one) > 0]
        if self.is_lost or not open_ones:
            return None
        order = choose_responses(
            np.array([one.path_probability for _, one in open_ones]),
            np.array([len(one.tokens) - one.end for _, one in open_ones]),
            self._level_time,
        )
        chosen = [open_ones[at] for at in order.tolist()]
        depth = choose_depth(self.window, len(chosen), self._level_time)
        call_s, num_levels = self._extend([one for _, one in chosen], depth)
        return self._pack(chosen, call_s, num_levels)

    def _room(self, one: _Ahead) -> int:
        """Tokens that may be drafted for a response now."""
        if one.is_stuck or one.path_probability < self._floor:
            return 0
        return min(window_room(one.most_ahead, one.end - one.known), len(one.tokens) - one.end)

    def _extend(self, chosen: Sequence[_Ahead], depth: int) -> tuple[float, int]:
        """Draft up to `depth` tokens for each; returns the seconds and the levels that it took."""
        count = len(chosen)
        query = DraftQuery(
            groups=np.zeros(count, np.int64),
            responses=np.fromiter((one.row for one in chosen), np.int64, count),
            keys=np.fromiter((one.key for one in chosen), np.uint64, count),
            positions=np.fromiter((one.end for one in chosen), np.int64, count),
            temperatures=np.fromiter((one.temperature for one in chosen), np.float32, count),
            max_tokens=np.fromiter((self._room(one) for one in chosen), np.int32, count),
        )
        probes = any(one.end == one.known for one in chosen)
        batch, growth = self._drafter.draft(
            [one.tokens[: one.end] for one in chosen],
            query,
            depth,
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
        return growth.seconds, growth.num_levels

    def _put(self, one: _Ahead, batch: DraftBatch, row: int) -> None:
        length = int(batch.num_tokens[row])
        new = slice(one.end, one.end + length)
        one.tokens[new] = batch.tokens[row, :length]
        one.acceptance[new] = batch.acceptance[row, :length]
        one.cells[new] = batch.cells[row, :length]
        if one.end == one.known and length and batch.probes.shape[1]:
            one.probes = batch.probes[row]
        one.is_stuck = not length
        one.end += length
        one.path_probability *= float(np.prod(one.acceptance[new]))
        self.num_drafted += length

    def _pack(self, chosen: Sequence[tuple[int, _Ahead]], call_s: float, num_levels: int) -> Drafts:
        counts = np.fromiter((one.end - one.known for _, one in chosen), np.int32, len(chosen))
        width = int(counts.max(initial=0))
        tokens = np.zeros((len(chosen), width), np.int32)
        acceptance = np.zeros((len(chosen), width), np.float32)
        for row, (_, one) in enumerate(chosen):
            tokens[row, : counts[row]] = one.tokens[one.known : one.end]
            acceptance[row, : counts[row]] = one.acceptance[one.known : one.end]
        return Drafts(
            number=self._number,
            width=width,
            responses=np.fromiter((name for name, _ in chosen), np.int64, len(chosen)).tobytes(),
            starts=np.fromiter((one.known for _, one in chosen), np.int64, len(chosen)).tobytes(),
            counts=counts.tobytes(),
            tokens=tokens.tobytes(),
            acceptance=acceptance.tobytes(),
            call_s=call_s,
            num_levels=num_levels,
            mean_acceptance=self._accepted / self._decided,
            num_drafted=self.num_drafted,
            num_wasted=self.num_wasted,
        )

    def pulse(self) -> Drafts:
        """A message without drafts: the worker is alive."""
        return self._pack([], 0.0, 0)


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


def serve(worker: DraftWorker, address: str, goes_on: Callable[[], bool], idle_s: float = PULSE_S) -> None:
    """Hear and draft by turns for the engine at an address.

    goes_on: asked after each turn, and every `idle_s` at least.
    """
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        said_s = -PULSE_S
        worker.is_lost = True
        while goes_on():
            drafts = worker.draft()
            now_s = time.monotonic()
            if drafts is not None or now_s - said_s >= PULSE_S:
                said_s = now_s
                message = Hello() if worker.is_lost else drafts or worker.pulse()
                with contextlib.suppress(zmq.Again):  # the engine takes nothing now: the next message has all
                    socket.send(encode(message), zmq.NOBLOCK)
            idle_ms = 0 if drafts is not None else int(1e3 * idle_s)
            while socket.poll(idle_ms):
                worker.hear(decode(socket.recv()))
                idle_ms = 0


def main(text: str) -> None:
    """Be a worker. text: `WorkerSettings` as JSON. Ctrl-C is the parent's business."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(text, type=WorkerSettings)
    torch.set_num_threads(1)
    serve(load_worker(settings), settings.address, lambda: os.getppid() == settings.parent)


if __name__ == "__main__":
    main(sys.argv[1])
