"""The rollout worker: an engine in a Ray actor that takes chunks, cancels them and tells what it generates.

A thread of its own starts the engine and steps it; chunks come and go between two steps. Calls from outside put orders
into a queue, `report` waits for news. Invariants: a chunk of another policy version than the engine's is refused; the
last tokens of a chunk are told in its Ending and never before. Knows nothing of Ray: fleet/actors.py makes it an actor,
calls everything but `report` in order in one thread, and `report` in another.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.config import EngineSettings
from paceline.control.events import (
    Adopt,
    CancelChunk,
    DraftFor,
    Ending,
    Growth,
    Growths,
    LoseDrafter,
    Order,
    Report,
    Rest,
    RunChunk,
    Telemetry,
    WorkerStep,
)
from paceline.control.packed import Digest, Packed
from paceline.engine.kv.use import read_kv_use
from paceline.errors import CheckpointError, EngineError, PacelineError
from paceline.fleet.weights import PackedTensor, unpack_weights
from paceline.types import Progress

if TYPE_CHECKING:
    from vllm import SamplingParams

    from paceline.distillation.packing import Sample
    from paceline.drafting.draft_worker import DraftWorker
    from paceline.engine.rollout_engine import RolloutEngine, TokenEvent
    from paceline.record.ladder_file import LadderFile
    from paceline.types import Response


LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every engine of a fleet is started with; the arguments of RolloutEngine."""

    model: str | Path
    settings: EngineSettings = field(default_factory=EngineSettings)
    dtype: str = "auto"
    max_model_len: int = 2048
    max_num_seqs: int = 128
    kv_cache_bytes: int = 1 << 30
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs."""
    tells_costs: bool = False
    """Whether the controller wants to know what steps cost (`Report.costs`)."""

    def start(self) -> RolloutEngine:
        """Start the engine in this process."""
        from paceline.engine.rollout_engine import RolloutEngine

        return RolloutEngine(
            self.model,
            self.settings,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_bytes=self.kv_cache_bytes,
            **self.vllm,
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker says of its engine once it has started."""

    num_kv_blocks: int
    block_tokens: int
    max_concurrency: int
    vocab_size: int
    process: int
    draft_addresses: tuple[str, ...] = ()
    """Where other workers may draft for it, with each of its model drafters."""
    kv_pool_obstacle: str | None = None
    """Why the engine goes without the fleet's KV pool."""
    invariance_gap: str | None = None
    """`RolloutEngine.invariance_gap`."""


HEAR_S = 0.05
"""A worker that drafts for another one looks so often for orders."""

ASK_S = 1.0
"""Who asks the engine's thread looks so often whether it is still there."""

MOST_GROWTHS_PER_S = 100_000
"""What all workers together tell their driver: it takes about a third of one of its cores."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a worker tells what its chunks have grown by."""

    progress_s: float
    """At most so often."""
    num_workers: int
    """They share what the driver can hear."""

    def interval_s(self, num_chunks: int) -> float:
        """Time from one report of growths to the next, for a worker with so many chunks."""
        return max(self.progress_s, num_chunks * self.num_workers / MOST_GROWTHS_PER_S)


@dataclass(slots=True)
class _Chunk:
    """A chunk that runs here."""

    start: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """Those that no growth has told, as are the log-probabilities."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    num_told: int = 0
    digest: Digest = field(default_factory=Digest)
    """Of the tokens told."""
    num_steps: int = 0

    def tell(self) -> Packed:
        """What no growth has told; now one does."""
        piece = Packed(self.tokens.tobytes(), self.logprobs.tobytes())
        self.num_told += len(piece)
        self.digest = self.digest.add(piece.tokens, piece.logprobs)
        del self.tokens[:], self.logprobs[:]
        return piece


class RolloutWorker:
    """One engine and the thread that steps it. Build it, wait for `start`, then give it orders."""

    def __init__(self, spec: EngineSpec, pace: Pace) -> None:
        self._spec = spec
        self._pace = pace
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards everything below
        self._chunks: dict[int, _Chunk] = {}
        self._endings: list[Ending] = []
        self._refused: list[int] = []
        self._rejected: list[tuple[int, str]] = []
        self._steps: list[WorkerStep] = []
        self._num_steps = 0
        self._progress = Progress()
        self._told_s = 0.0
        self._has_news = self._has_failed_drafting = False
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._engine: RolloutEngine
        self._drafters: list[DraftWorker] = []  # by place; with these it drafts for other engines
        self._helped: tuple[str, ...] = ()  # their addresses
        self._place = 0  # of the drafter for them
        self._ready: Future[Facts] = Future()
        self._thread = threading.Thread(target=self._run, name="paceline engine", daemon=True)
        self._thread.start()

    # -- called from outside

    def start(self) -> Facts:
        """Wait for the engine. Raises PacelineError when it does not start."""
        try:
            return self._ready.result()
        except PacelineError:
            raise
        except BaseException as error:
            raise EngineError(f"the engine did not start: {_describe_failure(error)}") from None

    def take(self, orders: Sequence[Order], params: SamplingParams | None) -> None:
        """Run and cancel chunks. params: for the chunks to run. Returns at once."""
        for order in orders:
            match order:
                case RunChunk():
                    assert params is not None
                    self._order(self._begin, order, params)
                case CancelChunk():
                    self._order(self._cancel, order)
                case Adopt():
                    self._order(self._adopt, order)
                case DraftFor():
                    self._order(self._help, order.addresses, order.drafter)
                case Rest():
                    self._order(self._help, ())
                case LoseDrafter():
                    self._order(lambda: self._engine.lose_drafter())

    def load_weights(self, weights: Sequence[PackedTensor], version: int) -> int:
        """Load weights of a version, once everything ordered before is done. Raises EngineError if chunks run."""
        return self._ask(lambda: self._engine.push_weights(unpack_weights(weights), version=version))

    def set_drafting(self, wanted: bool) -> None:
        """Switch drafting off or on, once everything ordered before is done. Returns at once."""
        self._order(lambda: self._engine.set_drafting(wanted))

    def use_drafter(self, place: int) -> None:
        """Draft with another of the engine's models, once everything ordered before is done. Returns at once."""
        self._order(lambda: self._engine.use_drafter(place))

    def load_drafter(self, weights: Sequence[PackedTensor] | None) -> None:
        """Give the engine's model drafter these weights, once everything ordered before is done; None: do not use those
        that it has. Those that do not fit are not taken: the old ones go on, with a warning. Returns at once.
        """
        self._order(self._load_drafter, weights)

    def collect_states(self, share: float, max_bytes: int) -> None:
        """Keep hidden states of a share of the responses, as `RolloutEngine.collect_states`, once everything ordered
        before is done. Returns at once.
        """
        self._order(lambda: self._engine.collect_states(share, max_bytes))

    def take_samples(self) -> list[Sample]:
        """`RolloutEngine.take_samples`, once everything ordered before is done."""
        return self._ask(lambda: self._engine.take_samples())

    def collection_s(self) -> float:
        """`RolloutEngine.collection_s`, once everything ordered before is done."""
        return self._ask(lambda: self._engine.collection_s())

    def measure_ladder(self, responses: Sequence[Response], params: SamplingParams) -> LadderFile:
        """The draft ladder (engine/rungs.py), measured once everything ordered before is done."""
        from paceline.engine.rungs import measure_ladder

        return self._ask(lambda: measure_ladder(self._engine, responses, params))

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks and suffix trees, once everything ordered before is done. Returns at once."""
        self._order(lambda: self._engine.reset_prefix_cache())

    def report(self, wait_s: float) -> Report:
        """What happened since the last report; waits for something to tell, at most `wait_s`.

        Raises EngineError once the engine has failed.
        """
        with self._changed:
            self._changed.wait_for(self._is_due, timeout=wait_s)
            if self._failure is not None:
                raise EngineError(f"the engine failed: {_describe_failure(self._failure)}")
            return self._collect()

    def stop(self) -> None:
        """Shut the engine down and free what it holds."""
        self._order(self._stop)
        self._thread.join()

    # -- the engine's thread

    def _order(self, do: Callable[..., None], *arguments: Any) -> None:
        self._orders.put(lambda: do(*arguments))

    def _ask(self, do: Callable[[], T]) -> T:
        """What this gives in the engine's thread. Raises EngineError where that has ended."""
        done: Future[T] = Future()
        self._order(self._answer, do, done)
        while True:
            is_over = not self._thread.is_alive()  # asked first: it may have answered last of all
            with suppress(TimeoutError):
                return done.result(timeout=0.0 if is_over else ASK_S)
            if is_over:
                why = "it was stopped" if self._failure is None else _describe_failure(self._failure)
                raise EngineError(f"the engine has ended and answers nothing more ({why}): start another")

    def _answer(self, do: Callable[[], T], done: Future[T]) -> None:
        try:
            done.set_result(do())
        except BaseException as error:  # half-loaded weights, say: this engine must not go on
            done.set_exception(error)
            raise

    def _run(self) -> None:
        try:
            self._engine = self._spec.start()
            self._drafters = self._engine.make_draft_workers()
            self._ready.set_result(self._describe())
            while not self._is_stopping:
                self._obey()
                if self._engine.num_running():
                    self._step()
            self._engine.close()
        except BaseException as error:  # told by `start` or by the next report
            if not self._ready.done():
                self._ready.set_exception(error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _describe(self) -> Facts:
        kv = read_kv_use(self._engine.scheduler)
        return Facts(
            kv.num_blocks,
            kv.block_tokens,
            self._spec.max_num_seqs,
            self._engine.vocab_size,
            os.getpid(),
            self._engine.draft_addresses,
            self._engine.kv_pool_obstacle,
            self._engine.invariance_gap,
        )

    def _obey(self) -> None:
        """Do what was ordered; without anything to generate wait for it, and draft for another engine meanwhile."""
        if not self._engine.num_running():
            self._draft()
            self._orders.get()()
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def _help(self, addresses: tuple[str, ...], place: int = 0) -> None:
        """While nothing runs here draft for the engines at these addresses, with the drafter of this place."""
        self._helped, self._place = addresses, place

    def _draft(self) -> None:
        """Draft for other engines, if that is ordered, until something else is."""
        if not self._helped or not self._drafters:
            return
        from paceline.drafting.draft_worker import serve

        try:
            serve(self._drafters[self._place], self._helped, self._end_turn, HEAR_S)
        except Exception:  # drafts are no reason to end an engine
            LOGGER.warning("drafting for other workers has failed", exc_info=True)
            self._helped = ()
            with self._changed:
                self._has_failed_drafting = True
                self._changed.notify_all()

    def _end_turn(self) -> bool:
        """A turn of drafting for others is over; whether to go on."""
        with self._changed:
            self._num_steps += 1
        return self._orders.empty()

    def _begin(self, order: RunChunk, params: SamplingParams) -> None:
        self._helped = ()
        if order.version != self._engine.policy_version:
            self._tell(self._refused, order.chunk)
            return
        try:
            self._engine.submit(order.chunk, order.request, params)
        except EngineError:  # it has died: no chunk runs here any more
            raise
        except Exception as error:  # a request or parameters that this engine cannot run: no reason to end it
            self._tell(self._rejected, (order.chunk, _describe_failure(error)))
            return
        with self._changed:
            self._chunks[order.chunk] = _Chunk(len(order.request.generated))

    def _tell(self, news: list[Any], item: Any) -> None:
        with self._changed:
            news.append(item)
            self._changed.notify_all()

    def _cancel(self, order: CancelChunk) -> None:
        self._engine.abort([order.chunk], keep_kv=order.keep_kv)
        with self._changed:
            self._chunks.pop(order.chunk, None)

    def _adopt(self, order: Adopt) -> None:
        self._engine.adopt(order.chunk, order.start, memoryview(order.tokens).cast("i").tolist())

    def _load_drafter(self, weights: Sequence[PackedTensor] | None) -> None:
        if weights is None:
            self._engine.drop_drafter()
            return
        try:
            self._engine.push_drafter(dict(unpack_weights(weights)))
        except CheckpointError as error:  # the old ones go on: no reason to end an engine
            LOGGER.warning("new weights of the drafter were not taken: %s", error)

    def _stop(self) -> None:
        self._is_stopping = True

    def _step(self) -> None:
        began_s = time.perf_counter()
        events = self._engine.step()
        steps = self._engine.take_observations()
        step_s = time.perf_counter() - began_s
        with self._changed:
            self._num_steps += 1
            num_tokens = sum(len(event.tokens) for event in events)
            self._progress += Progress(num_tokens, step_s, step_s * len(self._chunks), 1)
            if steps:  # one, unless nothing was scheduled
                self._steps.append(WorkerStep(steps[-1], num_tokens))
            for event in events:
                self._book(event)
            self._has_news = True
            if self._is_due():
                self._changed.notify_all()

    def _book(self, event: TokenEvent) -> None:
        chunk = self._chunks[event.index]
        chunk.tokens.extend(event.tokens)
        chunk.logprobs.extend(event.logprobs)
        chunk.num_steps += bool(event.tokens)
        if event.response is None:
            return
        del self._chunks[event.index]
        rest = chunk.tell()
        self._endings.append(
            Ending(
                chunk=event.index,
                start=chunk.start,
                num_tokens=chunk.num_told,
                rest=rest,
                digest=chunk.digest,
                num_steps=chunk.num_steps,
                num_draft_tokens=event.response.num_draft_tokens,
                finish_reason="error" if event.failure else event.response.finish_reason,
                failure=event.failure and event.failure.partition(": ")[2],  # the cause
            )
        )

    # -- reports

    def _is_due(self) -> bool:
        if self._failure is not None or self._endings or self._refused or self._rejected:
            return True
        if self._has_failed_drafting:
            return True
        interval_s = self._pace.interval_s(len(self._chunks))
        return self._has_news and time.monotonic() - self._told_s >= interval_s

    def _collect(self) -> Report:
        growths = [
            Growth(number, chunk.start + chunk.num_told, chunk.tell(), chunk.num_steps)
            for number, chunk in self._chunks.items()
            if chunk.tokens
        ]
        report = Report(
            num_steps=self._num_steps,
            growths=Growths.pack(growths),
            endings=tuple(self._endings),
            refused=tuple(self._refused),
            rejected=tuple(self._rejected),
            telemetry=Telemetry(
                read_kv_use(self._engine.scheduler),
                len(self._chunks),
                tuple(self._steps),
                self._engine.kv_pool_counters(),
                self._engine.draft_sharing_counters(),
                self._engine.drafter_score(),
            ),
            costs=self._engine.step_costs() if self._spec.tells_costs else None,
            progress=self._progress if self._spec.tells_costs else None,
            has_failed_drafting=self._has_failed_drafting,
        )
        for news in (self._endings, self._refused, self._rejected, self._steps):
            news.clear()
        self._told_s, self._has_news, self._has_failed_drafting = time.monotonic(), False, False
        return report


def _describe_failure(error: BaseException) -> str:
    """An error of whatever kind as text: it may not survive the way to the driver."""
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
