"""The draft worker: a process that holds a small model and drafts ahead of engines that verify (SpecActor 4.1).

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from paceline.drafting.ahead import Ahead, Chain, Decided
from paceline.drafting.learned import Learned
from paceline.drafting.model import ModelDrafter
from paceline.drafting.proposal import NO_GRID
from paceline.drafting.wire import Seal, read_secret
from paceline.drafting.worker_wire import (
    Begin,
    DraftCounts,
    Drafts,
    Open,
    Step,
    ToWorker,
    WorkerSettings,
    encode,
    hello,
)
from paceline.drafting.worker_wire import decode_for_worker as decode
from paceline.planning.acceptance import pool_outcomes
from paceline.planning.draft_ahead import choose_depth, choose_leaves
from paceline.planning.latency import StepTimeModel, update_measured_time
from paceline.planning.sharpness import SHARPNESS_GRID
from paceline.types import DraftQuery, Int32Array

GRID = np.asarray(SHARPNESS_GRID, dtype=np.float32)

UNSEALED = Seal(None)

PULSE_S = 0.5
"""A worker that has nothing new to say repeats itself so often, and says so often that it is lost."""

_CALL_KEPT = 0.8
"""What a call counts one later, in what a level takes."""

_ACCEPTANCE_TOKENS = 200.0
"""Decided draft tokens after which one counts 1/e in the mean acceptance."""

RIVAL_PRIOR = 0.5
"""How often the rival of a rejected token is assumed to be the correction, before any was rejected."""


@dataclass(slots=True)
class _Engine:
    """An engine that it drafts for."""

    is_lost: bool = True
    """The worker has to be told everything: at the start, or because a message did not arrive."""
    begun: int = 0
    number: int = 0
    """Of the last `Step`."""
    step_ends_s: float = 0.0
    """When the step that runs there ends, at the earliest."""
    responses: dict[int, Ahead] = field(default_factory=dict)
    counts: DraftCounts = field(default_factory=DraftCounts)
    """Since the worker was told everything."""
    has_news: bool = False
    """Something was drafted since it was told."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Where something may be drafted: behind a chain, behind a branch, or behind one that is still to be made."""

    engine: _Engine
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
        seal: Seal = UNSEALED,
    ) -> None:
        """num_branches: at any time, of all responses together; the drafter has as many rows more.

        More responses than these get none: there is not one for each.

        seal: of what its engines and it say to each other.
        """
        self._drafter, self._floor, self.seal = drafter, floor, seal
        prior = drafter.prior_calibration()
        self._learned = Learned(prior, sharpness)
        self._rivals = Learned(np.full_like(prior, RIVAL_PRIOR), 1.0)
        self._level_time = StepTimeModel.initial()
        self._accepted, self._decided = 1.0, 2.0  # decayed draft tokens; a coin's before any is known
        self._engines: dict[str, _Engine] = {}
        self._rows = itertools.count()
        self._num_branches = num_branches
        self._spare_rows = list(itertools.islice(self._rows, num_branches))
        self._calls_s, self._levels = 0.0, 0.0  # decayed sums over the calls
        self._num_levels = 0

    # -- what it is told

    def begin(self, engines: Iterable[str]) -> None:
        """Draft for these engines, by their addresses, and for no others; all have to tell everything."""
        for engine in self._engines.values():
            self._forget(engine)
        self._engines = {address: _Engine() for address in engines}

    def is_lost(self, engine: str) -> bool:
        """Whether that engine has to tell everything: at the start, or because a message did not arrive."""
        return self._engines[engine].is_lost

    def hear(self, engine: str, message: ToWorker, now_s: float) -> None:
        """Take a message of an engine. Until it is told everything a lost worker hears nothing else of it."""
        told = self._engines[engine]
        if isinstance(message, Begin):
            self._forget(told)
            self._engines[engine] = told = _Engine(False, message.begun, message.number)
            for opened in message.opened:
                self._open(told, opened)
        elif not told.is_lost:
            told.is_lost = message.number != told.number + 1
            if not told.is_lost:
                told.step_ends_s = now_s + message.step_s
                self._step(told, message)

    def _forget(self, engine: _Engine) -> None:
        for response in list(engine.responses):
            self._close(engine, response)

    def _step(self, engine: _Engine, step: Step) -> None:
        engine.number = step.number
        for response in np.frombuffer(step.ended, np.int64).tolist():
            self._close(engine, response)
        self._grow(engine, step)
        for opened in step.opened:
            self._open(engine, opened)
        allowed, most_ahead = np.frombuffer(step.allowed, np.int64), np.frombuffer(step.most_ahead, np.int32)
        for response, most in zip(allowed.tolist(), most_ahead.tolist(), strict=True):
            if (one := engine.responses.get(response)) is not None:
                one.most_ahead = most

    def _open(self, engine: _Engine, opened: Open) -> None:
        engine.responses[opened.response] = Ahead(opened, next(self._rows), self._drafter.max_model_len)

    def _close(self, engine: _Engine, response: int) -> None:
        if (one := engine.responses.pop(response, None)) is not None:
            self._drafter.forget([one.chain.row])
            self._spare_rows += [branch.row for branch in one.branches.values()]

    def _grow(self, engine: _Engine, step: Step) -> None:
        tokens = np.frombuffer(step.tokens, np.int32)
        ends = np.frombuffer(step.offsets, np.int32).tolist()
        told: list[Decided] = []
        for row, response in enumerate(np.frombuffer(step.responses, np.int64).tolist()):
            if (one := engine.responses.get(response)) is not None:
                told.append(self._decide(engine, one, tokens[ends[row] : ends[row + 1]]))
        if told:
            self._learn(told)

    def _decide(self, engine: _Engine, one: Ahead, tokens: Int32Array) -> Decided:
        """A response has grown."""
        if one.probes is not None and len(tokens):
            self._learned.learn_sharpness(one.probes[None], tokens[:1])
        decided = one.decide(tokens)
        self._spare_rows += decided.void_rows
        if decided.stands is not None:
            self._drafter.rewind(one.chain.row, decided.stands)
        engine.counts.num_wasted += decided.num_wasted
        engine.counts.num_hits += decided.is_hit
        engine.counts.num_branch_tokens += decided.num_prepared
        return decided

    def _learn(self, told: Sequence[Decided]) -> None:
        cells = np.concatenate([cells for one in told for cells in one.cells])
        accepted = np.concatenate([right for one in told for right in one.accepted])
        self._learned.learn(pool_outcomes(cells, accepted, self._learned.num_cells))
        rejected = [cell for one in told for cell in one.rejected_cells]
        is_right = [right for one in told for right in one.is_rival_right]
        rivals = np.array(rejected, np.int32), np.array(is_right, np.bool_)
        self._rivals.learn(pool_outcomes(*rivals, self._rivals.num_cells))
        decay = float(np.exp(-len(cells) / _ACCEPTANCE_TOKENS))
        self._accepted = self._accepted * decay + float(accepted.sum())
        self._decided = self._decided * decay + len(cells)

    # -- what it drafts

    def draft(self, now_s: float) -> bool:
        """Draft a few tokens more where they are of most use; False where the windows are full, or nothing runs."""
        running = [one for one in self._engines.values() if one.responses and not one.is_lost]
        leaves = [leaf for engine in running for leaf in self._chains(engine)]
        if sum(len(engine.responses) for engine in running) <= self._num_branches:
            leaves += [leaf for engine in running for leaf in self._branches(engine)]
        left_s = min((engine.step_ends_s for engine in running), default=0.0) - now_s
        order = choose_leaves(
            np.array([leaf.probability for leaf in leaves]),
            np.array([leaf.rest_tokens for leaf in leaves], np.int64),
            np.array([leaf.is_branch for leaf in leaves], np.bool_),
            self._level_time,
            left_s,
        )
        chosen = [leaves[at] for at in order.tolist()]
        has_branch = any(leaf.is_branch for leaf in chosen)
        grown = [(leaf, chain) for leaf in chosen if (chain := self._chain_of(leaf)) is not None]
        if grown:
            self._extend(
                grown, choose_depth(len(grown), self._level_time, left_s if has_branch else math.inf)
            )
        return bool(grown)

    def _chains(self, engine: _Engine) -> Iterator[_Leaf]:
        """Chains behind which something may be drafted."""
        for one in engine.responses.values():
            if one.room(one.chain, self._floor) > 0:
                yield _Leaf(engine, one, one.chain, one.chain.probability, is_branch=False)

    def _branches(self, engine: _Engine) -> Iterator[_Leaf]:
        """Branches that may grow, and those that may be made."""
        for one in engine.responses.values():
            for branch in one.branches.values():
                if one.room(branch, self._floor) > 0:
                    yield _Leaf(engine, one, branch, branch.probability, is_branch=True)
            if self._spare_rows:
                for cut, acceptance, probability in one.cuts(self._rivals.calibration, self._floor):
                    yield _Leaf(engine, one, one.chain, probability, True, cut, acceptance)

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
        leaf.engine.counts.num_branches += 1
        return made

    def _extend(self, grown: Sequence[tuple[_Leaf, Chain]], depth: int) -> None:
        """Draft up to `depth` tokens behind each of these chains."""
        started_s, count = time.perf_counter(), len(grown)
        rooms = np.fromiter((leaf.one.room(chain, self._floor) for leaf, chain in grown), np.int32, count)
        query = DraftQuery(
            groups=np.zeros(count, np.int64),
            responses=np.fromiter((chain.row for _, chain in grown), np.int64, count),
            keys=np.fromiter((leaf.one.key for leaf, _ in grown), np.uint64, count),
            positions=np.fromiter((chain.end for _, chain in grown), np.int64, count),
            temperatures=np.fromiter((leaf.one.temperature for leaf, _ in grown), np.float32, count),
            max_tokens=rooms,
        )
        probes = any(chain.end == leaf.one.known for leaf, chain in grown)
        batch, growth = self._drafter.draft(
            [chain.tokens[: chain.end] for _, chain in grown],
            query,
            min(depth, int(rooms.max())),
            sharpness=self._learned.beta,
            sharpness_grid=GRID if probes else NO_GRID,
            calibration=self._learned.calibration,
            floor=0.0,
        )
        for row, (leaf, chain) in enumerate(grown):
            engine, one = leaf.engine, leaf.one
            if chain.end == one.known and batch.num_tokens[row] and batch.probes.shape[1]:
                one.probes = batch.probes[row]
            one.packed, engine.has_news = b"", True
            engine.counts.num_drafted += chain.put(batch, row)
        call_s = time.perf_counter() - started_s
        for leaf, _ in grown:
            leaf.engine.counts.draft_s += call_s / count
        if growth.num_levels:
            rows = max(round(growth.num_rows / growth.num_levels), 1)
            self._level_time = update_measured_time(
                self._level_time, rows, growth.seconds / growth.num_levels
            )
            self._num_levels = growth.num_levels
            self._calls_s = self._calls_s * _CALL_KEPT + call_s
            self._levels = self._levels * _CALL_KEPT + growth.num_levels

    def has_news(self, engine: str) -> bool:
        """Whether something was drafted that this engine has not been told."""
        return self._engines[engine].has_news

    def say(self, engine: str) -> Drafts:
        """Everything that is drafted ahead for an engine."""
        told = self._engines[engine]
        told.has_news = False
        return Drafts(
            begun=told.begun,
            number=told.number,
            trees=b"".join(one.pack(name) for name, one in told.responses.items()),
            level_s=self._calls_s / self._levels if self._levels else 0.0,
            num_levels=self._num_levels,
            mean_acceptance=self._accepted / self._decided,
            counts=told.counts,
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
    seal = Seal(read_secret(settings.secret_file))
    return DraftWorker(drafter, settings.floor, settings.sharpness, settings.num_branches, seal)


class _Connection:
    """A worker's end of the sockets of an engine."""

    def __init__(self, context: zmq.Context[Any], address: str, seal: Seal) -> None:
        self._context, self.address, self._seal = context, address, seal
        self.steps = self._open(zmq.DEALER, address)
        self._drafts = context.socket(zmq.PUSH)
        self.said_s = -PULSE_S
        """When something was said last."""

    def _open(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        if kind == zmq.PUSH:
            made.setsockopt(zmq.CONFLATE, 1)
        made.connect(address)
        return made

    def hear(self) -> Iterator[ToWorker]:
        """What the engine has told."""
        while self.steps.poll(0):
            if (packed := self._seal.open(self.steps.recv())) is None:
                continue
            message = decode(packed)
            if isinstance(message, Begin):
                self._drafts.close()
                self._drafts = self._open(zmq.PUSH, message.drafts_to)
            yield message

    def say(self, drafts: Drafts | None) -> None:
        """Send what is drafted, or that the worker is lost. What the engine does not take now the next message has."""
        with contextlib.suppress(zmq.Again):
            if drafts is None:
                self.steps.send(self._seal.close(hello(self.address)), zmq.NOBLOCK)
            else:
                self._drafts.send(self._seal.close(encode(drafts)), zmq.NOBLOCK)

    def close(self) -> None:
        self.steps.close()
        self._drafts.close()


def serve(
    worker: DraftWorker, addresses: Sequence[str], goes_on: Callable[[], bool], idle_s: float = PULSE_S
) -> None:
    """Hear and draft by turns for the engines at these addresses.

    goes_on: asked after each turn, and every `idle_s` at least.
    """
    worker.begin(addresses)
    with contextlib.ExitStack() as opened:
        context = opened.enter_context(zmq.Context())
        poller = zmq.Poller()
        engines = [_Connection(context, address, worker.seal) for address in addresses]
        for engine in engines:
            opened.callback(engine.close)
            poller.register(engine.steps, zmq.POLLIN)
        while goes_on():
            has_drafted = worker.draft(time.monotonic())
            now_s = time.monotonic()
            for engine in engines:
                if worker.has_news(engine.address) or now_s - engine.said_s >= PULSE_S:
                    is_lost = worker.is_lost(engine.address)
                    engine.say(None if is_lost else worker.say(engine.address))
                    engine.said_s = now_s
            poller.poll(0 if has_drafted else int(1e3 * idle_s))
            for engine in engines:
                for message in engine.hear():
                    worker.hear(engine.address, message, time.monotonic())


def main(text: str) -> None:
    """Be a worker. text: `WorkerSettings` as JSON. Ctrl-C is the parent's business."""
    import torch

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(text, type=WorkerSettings)
    torch.set_num_threads(1)
    serve(load_worker(settings), (settings.address,), lambda: os.getppid() == settings.parent)


if __name__ == "__main__":
    main(sys.argv[1])
