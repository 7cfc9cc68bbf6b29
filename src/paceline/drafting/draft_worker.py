"""The draft worker: a process that holds a small model and drafts ahead of an engine that verifies (SpecActor 4.1).

Owns, of every running response, the tokens that it was told of and those that it has drafted behind them (ahead.py). It
is told what responses grow by, drops what a rejection has made void, drafts on by the shared dice up to two windows
ahead, prepares the likeliest corrections while the verifier works (planning/draft_ahead.py), and sends everything ahead
of a response whenever it has grown. What was drafted and then decided teaches it how sure its drafts are, how often a
rival is the correction, and how sharply to draw. Run as a module it is that process; it ends with its parent.

Invariant: nothing that it does, or fails to do, changes a token.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.drafting.ahead import Ahead, Chain, Decided
from paceline.drafting.learned import Learned
from paceline.drafting.model import ModelDrafter
from paceline.drafting.worker_wire import (
    HELLO,
    Begin,
    DraftCounts,
    Drafts,
    Open,
    Step,
    ToWorker,
    WorkerSettings,
    encode,
)
from paceline.drafting.worker_wire import decode_for_worker as decode
from paceline.planning.draft_ahead import choose_depth, choose_leaves
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import DraftQuery, Int32Array

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)
NO_GRID = GRID[:0]

PULSE_S = 0.5
"""A worker that has nothing new to say repeats itself so often, and says so often that it is lost."""

_CALL_SMOOTHING = 0.2
"""What a new measurement of a call's time counts."""

_ACCEPTANCE_TOKENS = 200.0
"""Decided draft tokens after which one counts 1/e in the mean acceptance."""

RIVAL_PRIOR = 0.5
"""How often the rival of a rejected token is assumed to be the correction, before any was rejected."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Where something may be drafted: behind a chain, behind a branch, or behind one that is still to be made."""

    one: Ahead
    chain: Chain
    """The branch is to leave it, where there is none yet."""
    probability: float
    """That everything drafted up to there is accepted."""
    is_branch: bool
    cut: int | None = None
    """Where a new branch leaves the chain."""
    acceptance: float = 0.0
    """Of the rival there."""

    @property
    def rest_tokens(self) -> int:
        """That may still be drafted."""
        return self.one.limit - (self.chain.end if self.cut is None else self.cut + 1)


class DraftWorker:
    """What a worker knows and decides; without a socket or a clock of its own. One thread."""

    def __init__(
        self,
        drafter: ModelDrafter,
        floor: float = 0.0,
        sharpness: float | None = None,
        num_branches: int = 0,
    ) -> None:
        """num_branches: at any time, of all responses together; the drafter has as many rows more.

        More responses than these get none: there is not one for each.
        """
        self._drafter, self._floor = drafter, floor
        prior = drafter.prior_calibration()
        self._learned = Learned(prior, sharpness)
        self._rivals = Learned(np.full_like(prior, RIVAL_PRIOR), 1.0)
        self._level_time = StepTimeModel.initial()
        self._accepted, self._decided = 1.0, 2.0  # decayed draft tokens; a coin's before any is known
        self._responses: dict[int, Ahead] = {}
        self._rows = itertools.count()
        self._num_branches = num_branches
        self._spare_rows = list(itertools.islice(self._rows, num_branches))
        self._step_ends_s = 0.0
        self._begun = self._number = 0
        self._call_s, self._num_levels = 0.0, 0
        self.is_lost = True
        """Whether it has to be told everything: at the start, or because a message did not arrive."""
        self.counts = DraftCounts()
        """Since it was told everything."""

    # -- what it is told

    def hear(self, message: ToWorker, now_s: float) -> None:
        """Take a message of the engine. Until it is told everything a lost worker hears nothing else."""
        if isinstance(message, Begin):
            self._begin(message)
        elif not self.is_lost:
            self.is_lost = message.number != self._number + 1
            if not self.is_lost:
                self._step_ends_s = now_s + message.step_s
                self._step(message)

    def _begin(self, begin: Begin) -> None:
        for response in list(self._responses):
            self._close(response)
        self._begun, self._number, self.is_lost = begin.begun, begin.number, False
        self.counts = DraftCounts()
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
        self._responses[opened.response] = Ahead(opened, next(self._rows), self._drafter.max_model_len)

    def _close(self, response: int) -> None:
        if (one := self._responses.pop(response, None)) is not None:
            self._drafter.forget([one.chain.row])
            self._spare_rows += [branch.row for branch in one.branches.values()]

    def _grow(self, step: Step) -> None:
        tokens = np.frombuffer(step.tokens, np.int32)
        ends = np.frombuffer(step.offsets, np.int32).tolist()
        told: list[Decided] = []
        for row, response in enumerate(np.frombuffer(step.responses, np.int64).tolist()):
            if (one := self._responses.get(response)) is not None:
                told.append(self._decide(one, tokens[ends[row] : ends[row + 1]]))
        if told:
            self._learn(told)

    def _decide(self, one: Ahead, tokens: Int32Array) -> Decided:
        """A response has grown."""
        if one.probes is not None and len(tokens):
            self._learned.learn_sharpness(one.probes[None], tokens[:1])
        decided = one.decide(tokens)
        self._spare_rows += decided.void_rows
        if decided.stands is not None:
            self._drafter.rewind(one.chain.row, decided.stands)
        self.counts.num_wasted += decided.num_wasted
        self.counts.num_hits += decided.is_hit
        return decided

    def _learn(self, told: Sequence[Decided]) -> None:
        cells = np.concatenate([cells for one in told for cells in one.cells])
        accepted = np.concatenate([right for one in told for right in one.accepted])
        self._learned.learn(cells, accepted)
        rejected = [cell for one in told for cell in one.rejected_cells]
        is_right = [right for one in told for right in one.is_rival_right]
        self._rivals.learn(np.array(rejected, np.int32), np.array(is_right, np.bool_))
        decay = float(np.exp(-len(cells) / _ACCEPTANCE_TOKENS))
        self._accepted = self._accepted * decay + float(accepted.sum())
        self._decided = self._decided * decay + len(cells)

    # -- what it drafts

    def draft(self, now_s: float) -> bool:
        """Draft a few tokens more where they are of most use; False where the windows are full, or nothing runs."""
        if self.is_lost:
            return False
        leaves = [*self._chains(), *self._branches()]
        left_s = self._step_ends_s - now_s
        order = choose_leaves(
            np.array([leaf.probability for leaf in leaves]),
            np.array([leaf.rest_tokens for leaf in leaves], np.int64),
            np.array([leaf.is_branch for leaf in leaves], np.bool_),
            self._level_time,
            left_s,
        )
        chosen = [leaves[at] for at in order.tolist()]
        has_branch = any(leaf.is_branch for leaf in chosen)
        grown = [(leaf.one, chain) for leaf in chosen if (chain := self._chain_of(leaf)) is not None]
        if grown:
            self._extend(
                grown, choose_depth(len(grown), self._level_time, left_s if has_branch else math.inf)
            )
        return bool(grown)

    def _chains(self) -> Iterator[_Leaf]:
        """Chains behind which something may be drafted."""
        for one in self._responses.values():
            if one.room(one.chain, self._floor) > 0:
                yield _Leaf(one, one.chain, one.chain.probability, is_branch=False)

    def _branches(self) -> Iterator[_Leaf]:
        """Branches that may grow, and those that may be made."""
        if len(self._responses) > self._num_branches:
            return
        for one in self._responses.values():
            for branch in one.branches.values():
                if one.room(branch, self._floor) > 0:
                    yield _Leaf(one, branch, branch.probability, is_branch=True)
            if self._spare_rows:
                for cut, acceptance, probability in one.cuts(self._rivals.calibration, self._floor):
                    yield _Leaf(one, one.chain, probability, True, cut, acceptance)

    def _chain_of(self, leaf: _Leaf) -> Chain | None:
        """The leaf's chain or branch, which is made where there is none yet; None where there is no row for it."""
        if leaf.cut is None:
            return leaf.chain
        if not self._spare_rows:
            return None
        row = self._spare_rows.pop()
        self._drafter.fork(leaf.chain.row, row, leaf.cut)
        made = leaf.chain.fork(row, leaf.cut, leaf.acceptance, leaf.probability)
        leaf.one.branches[leaf.cut] = made
        self.counts.num_branches += 1
        return made

    def _extend(self, grown: Sequence[tuple[Ahead, Chain]], depth: int) -> None:
        """Draft up to `depth` tokens behind each of these chains."""
        started_s, count = time.perf_counter(), len(grown)
        rooms = np.fromiter((one.room(chain, self._floor) for one, chain in grown), np.int32, count)
        query = DraftQuery(
            groups=np.zeros(count, np.int64),
            responses=np.fromiter((chain.row for _, chain in grown), np.int64, count),
            keys=np.fromiter((one.key for one, _ in grown), np.uint64, count),
            positions=np.fromiter((chain.end for _, chain in grown), np.int64, count),
            temperatures=np.fromiter((one.temperature for one, _ in grown), np.float32, count),
            max_tokens=rooms,
        )
        probes = any(chain.end == one.known for one, chain in grown)
        batch, growth = self._drafter.draft(
            [chain.tokens[: chain.end] for _, chain in grown],
            query,
            min(depth, int(rooms.max())),
            sharpness=self._learned.beta,
            sharpness_grid=GRID if probes else NO_GRID,
            calibration=self._learned.calibration,
            floor=0.0,
        )
        for row, (one, chain) in enumerate(grown):
            if chain.end == one.known and batch.num_tokens[row] and batch.probes.shape[1]:
                one.probes = batch.probes[row]
            one.packed = b""
            self.counts.num_drafted += chain.put(batch, row)
        if growth.num_levels:
            rows = max(round(growth.num_rows / growth.num_levels), 1)
            self._level_time = update_measured_time(
                self._level_time, rows, growth.seconds / growth.num_levels
            )
            self._num_levels, call_s = growth.num_levels, time.perf_counter() - started_s
            self._call_s += _CALL_SMOOTHING * (call_s - self._call_s) if self._call_s else call_s

    def say(self) -> Drafts:
        """Everything that is drafted ahead."""
        return Drafts(
            begun=self._begun,
            number=self._number,
            trees=b"".join(one.pack(name) for name, one in self._responses.items()),
            call_s=self._call_s,
            num_levels=self._num_levels,
            mean_acceptance=self._accepted / self._decided,
            counts=self.counts,
        )


def load_worker(settings: WorkerSettings) -> DraftWorker:
    """The worker with its model. Raises CheckpointError or ConfigError."""
    drafter = ModelDrafter(
        settings.model,
        max_model_len=settings.max_model_len,
        max_requests=settings.max_requests + settings.num_branches,
        dtype=settings.dtype,
        vocab_size=settings.vocab_size,
    )
    return DraftWorker(drafter, settings.floor, settings.sharpness, settings.num_branches)


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
            has_drafted = worker.draft(time.monotonic())
            now_s = time.monotonic()
            if has_drafted or now_s - said_s >= PULSE_S:
                engine.say(None if worker.is_lost else worker.say())
                said_s = now_s
            for message in engine.hear(0.0 if has_drafted else idle_s):
                worker.hear(message, time.monotonic())


def main(text: str) -> None:
    """Be a worker. text: `WorkerSettings` as JSON. Ctrl-C is the parent's business."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(text, type=WorkerSettings)
    torch.set_num_threads(1)
    serve(load_worker(settings), settings.address, lambda: os.getppid() == settings.parent)


if __name__ == "__main__":
    main(sys.argv[1])
