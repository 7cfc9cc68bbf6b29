"""The engine's end of a draft worker: tells it what each step has changed, takes what it has drafted, keeps it alive.

Nothing here waits for the worker unless it is asked to (`await_worker`, `take` with a timeout), and a step costs one
message each way, however much the worker has said. A worker that dies is started again; one that says nothing for
`SILENCE_S` while responses run, and computes nothing, is killed first: one that reads long contexts says nothing for a
while. A new worker is told everything. One thread, the scheduler's.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paceline.drafting.child_process import ChildProcess, make_socket_folder
from paceline.drafting.tree import DraftTrees
from paceline.drafting.wire import MAX_MESSAGE_BYTES, MAX_QUEUED, Seal, read_secret
from paceline.drafting.worker_wire import (
    HELLO_BYTES,
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
from paceline.drafting.worker_wire import decode_for_engine as decode
from paceline.errors import ConfigError
from paceline.types import Int32Array, Int64Array

if TYPE_CHECKING:
    import zmq

LOGGER = logging.getLogger(__name__)

HELPER_SILENCE_S = 5.0
"""A drafter that is nobody's child, and says nothing for so long, is not counted on until it does."""

SILENCE_S = 20.0
"""A worker that has drafted before and says nothing for so long is killed; it says something twice a second."""

START_S = 120.0
"""The same for one that has said nothing yet: it may have to load a model."""

BUSY_SHARE = 0.1
"""A silent worker that has used so much of a core since it was last found silent reads, and is left alone: one that
hangs after it has worked is found at the second look."""

LEAST_LIFE_S = 60.0
"""A worker that ended sooner by itself cannot be: its model does not load, say."""

NAP_S = 5e-5
"""ZeroMQ waits for whole milliseconds; what is left of a wait passes in naps of so much."""

LOOK_S = 0.1
"""So often is looked whether a worker is lost, silent or dead."""


@dataclass(slots=True)
class _Response:
    """What a worker has to know of a response, beside its text."""

    key: int
    temperature: float
    limit: int
    most_ahead: int = 0
    """Undecided tokens that may be drafted, once it has begun."""


class WorkerLink:
    """One engine's draft worker. Shut it down."""

    def __init__(
        self, settings: WorkerSettings, most_ahead: int, trees: DraftTrees, *, has_child: bool = True
    ) -> None:
        """settings: the worker's; its address and parent are filled in here.

        most_ahead: undecided tokens of a response that may be drafted, until `allow` or `begin_with` says
        otherwise, and again after `begin_anew`.
        trees: have the text of every running response.
        has_child: start a worker and keep it alive; False: whoever comes drafts.

        Raises ConfigError where there is no place for a socket, or for a secret that cannot be.
        """
        import zmq

        self._seal = Seal(read_secret(settings.secret_file))
        folder = make_socket_folder("worker")
        if folder is None:
            raise ConfigError("a draft worker needs a folder for its socket: set TMPDIR to a short path")
        self._folder, self._trees = folder, trees
        self._most_ahead = self._most_at_first = most_ahead
        self._context = zmq.Context()
        self._lost = self._context.socket(zmq.ROUTER)
        self._lost.setsockopt(zmq.LINGER, 0)
        self._lost.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._drafts = self._context.socket(zmq.PULL)
        self._drafts.setsockopt(zmq.CONFLATE, 1)
        try:
            address = self._bind(self._lost, "worker", settings.interface, HELLO_BYTES)
            self._drafts_to = self._bind(self._drafts, "drafts", settings.interface, MAX_MESSAGE_BYTES)
        except ConfigError:
            self._close_sockets()
            raise
        self._no_message = zmq.Again
        self._nonblocking, self._more = zmq.NOBLOCK, zmq.SNDMORE
        self._hello = hello(address)
        self.settings = msgspec.structs.replace(settings, address=address, parent=os.getpid())
        self.child = _start_child(self.settings) if has_child else None
        self._waiting: dict[int, _Response] = {}  # not begun: nothing is drafted for them
        self._running: dict[int, _Response] = {}
        self._ended: list[int] = []  # the worker has not heard of it yet
        self._allowed: dict[int, int] = {}  # likewise
        self._worker: bytes | None = None
        self._begun = 0
        self.number = 0
        """Of the last `Step` that was sent."""
        self._looked_s = self._silent_since_s = self._idle_since_s = time.monotonic()
        self._core_s = 0.0  # that the child had used when it was looked at for its silence
        self._is_silent = self._is_resting = False
        self._past = DraftCounts()  # of what was begun before
        self._latest: Drafts | None = None

    def await_worker(self, until_s: float) -> None:
        """Wait for the child's first word, at most until then (`time.monotonic`), or until it ends.

        While it loads it takes the time of a core, and all that an engine would measure beside it would mislead.
        """
        while self.child is not None and self._worker is None and not self.child.has_ended:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                return
            self._lost.poll(int(1e3 * min(left_s, LOOK_S)) + 1)
            self._look(time.monotonic())

    def _bind(self, socket: zmq.Socket[bytes], name: str, interface: str | None, max_bytes: int) -> str:
        """Where it can be reached, then. Raises ConfigError for an interface that is not there.

        max_bytes: of a message that comes in.
        """
        import zmq

        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        try:
            socket.bind(f"ipc://{self._folder.path / name}" if interface is None else f"tcp://{interface}:*")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"draft_interface {interface!r}: {error}; name a network interface of this machine, or its address"
            ) from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    # -- what the worker is told

    def open(self, response: int, key: int, temperature: float, limit: int) -> None:
        """A response is to run; nothing can be drafted for it any more at position `limit`.

        The worker is told when it grows for the first time.
        """
        if (
            not self._waiting and not self._running
        ):  # silence counts while responses run, in one rollout or several
            now_s = time.monotonic()
            self._silent_since_s += now_s - max(self._idle_since_s, self._silent_since_s)
        self._waiting[response] = _Response(key, temperature, limit)

    def grow(
        self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array, step_s: float
    ) -> list[int]:
        """Responses have grown, response i by tokens[offsets[i]:offsets[i + 1]], which their texts have already.

        step_s: what the next step is expected to take. Returns those that have begun.
        """
        begun = list(self._waiting.keys() & responses.tolist()) if self._waiting else []
        for response in begun:
            one = self._running[response] = self._waiting.pop(response)
            one.most_ahead = self.first_ahead
        if self._worker is not None:
            self._tell_step(responses, offsets, tokens, step_s, begun)
        return begun

    def _tell_step(
        self,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        step_s: float,
        begun: Iterable[int] = (),
    ) -> None:
        self.number += 1
        step = Step(
            self.number,
            array("q", self._ended).tobytes(),
            responses.tobytes(),
            offsets.tobytes(),
            tokens.tobytes(),
            tuple(map(self._tell, begun)),
            array("q", self._allowed).tobytes(),
            array("i", self._allowed.values()).tobytes(),
            step_s,
        )
        self._ended.clear()
        self._allowed.clear()
        self._send(step)

    def _tell(self, response: int) -> Open:
        one = self._running[response]
        text = self._trees.text(response)
        return Open(response, one.key, one.temperature, one.limit, one.most_ahead, text)

    def allow(self, responses: Sequence[int], most_ahead: Sequence[int]) -> None:
        """So many undecided tokens of these running responses may be drafted from now on."""
        for response, most in zip(responses, most_ahead, strict=True):
            if (one := self._running.get(response)) is not None:
                one.most_ahead = self._allowed[response] = most

    def begin_with(self, most_ahead: int) -> None:
        """So many undecided tokens may be drafted of responses that begin from now on."""
        self._most_ahead = most_ahead

    def begin_anew(self) -> None:
        """Responses may have as many undecided tokens as at first, those that run too."""
        self._most_ahead = self._most_at_first
        self.allow(list(self._running), [self.first_ahead] * len(self._running))

    @property
    def first_ahead(self) -> int:
        """Undecided tokens of a response that begins now."""
        return 0 if self._is_resting else self._most_ahead

    def rest(self) -> None:
        """Have nothing drafted until `forget` or `wake`, neither for responses that run nor for those to come."""
        self._is_resting = True
        self.allow(list(self._running), [0] * len(self._running))

    def wake(self) -> list[int]:
        """End a rest: running responses go on with the window that others begin with. Returns them."""
        self._is_resting = False
        running = list(self._running)
        self.allow(running, [self.first_ahead] * len(running))
        return running

    def most_ahead(self, responses: Sequence[int]) -> Int32Array:
        """Undecided tokens of each response that this worker may draft. [num_responses]"""
        first = self.first_ahead
        found = (one.most_ahead if (one := self._running.get(name)) else first for name in responses)
        return np.fromiter(found, np.int32, len(responses))

    def close(self, response: int) -> None:
        """A response has ended. The worker hears of it with the next step, or now if nothing runs any more."""
        was_waiting = self._waiting.pop(response, None) is not None
        was_running = self._running.pop(response, None) is not None
        if was_running and self._worker is not None:
            self._allowed.pop(response, None)
            self._ended.append(response)
            if not self._running:
                nothing = np.zeros(1, np.int32)
                self._tell_step(np.empty(0, np.int64), nothing, nothing[1:], 0.0)
        if (was_waiting or was_running) and self.is_idle:
            self._idle_since_s = time.monotonic()

    def forget(self) -> None:
        """Forget all responses: the policy has changed."""
        self._is_resting = False
        for response in [*self._waiting, *self._running]:
            self.close(response)

    @property
    def is_idle(self) -> bool:
        """Whether no response runs, nor waits to."""
        return not self._waiting and not self._running

    @property
    def is_there(self) -> bool:
        """Whether a worker has come, and may be counted on: one that is nobody's child once it has drafted, as the
        engine drafts by itself while the helper reads.
        """
        has_read = self.child is not None or self._latest is not None
        return self._worker is not None and not self._is_silent and has_read

    def let_go(self) -> None:
        """The worker drafts for this engine no more; what it may still say is not heard."""
        self._worker = None
        self._begun += 1

    def _send(self, message: ToWorker) -> None:
        """What a full or dead worker does not take is lost, and it asks for everything."""
        assert self._worker is not None
        self._lost.send(self._worker, self._more | self._nonblocking)
        self._lost.send(self._seal.close(encode(message)), self._nonblocking)

    # -- what the worker has drafted

    def take(self, timeout_s: float = 0.0) -> Drafts | None:
        """What the worker has said since it was asked last, if anything; with a timeout, waiting so long for it."""
        drafts = None if self._worker is None else self._receive(timeout_s)
        now_s = time.monotonic()
        if drafts is not None:
            self._latest, self._silent_since_s, self._is_silent = drafts, now_s, False
        if now_s - self._looked_s >= LOOK_S:
            self._look(now_s)
        return drafts

    def _receive(self, timeout_s: float) -> Drafts | None:
        if timeout_s and not self._await_drafts(timeout_s):
            return None
        try:
            packed = self._seal.open(self._drafts.recv(self._nonblocking))
        except self._no_message:
            return None
        drafts = None if packed is None else decode(packed)
        return drafts if drafts is not None and drafts.begun == self._begun else None

    def _await_drafts(self, timeout_s: float) -> bool:
        """Wait until the worker has said something; returns whether it has."""
        until_s = time.perf_counter() + timeout_s
        timeout_ms = int(1e3 * timeout_s)
        while not self._drafts.poll(timeout_ms):
            left_s = until_s - time.perf_counter()
            if left_s <= 0.0:
                return False
            time.sleep(min(left_s, NAP_S))
            timeout_ms = 0
        return True

    def _look(self, now_s: float) -> None:
        """Answer a lost worker; while responses run start the worker again if it has died, or hangs.

        One that is nobody's child, and silent, is not counted on until it says something.
        """
        self._looked_s = now_s
        for _ in range(MAX_QUEUED):
            if not self._lost.poll(0):
                break
            worker, *_, frame = self._lost.recv_multipart()
            if self._seal.open(frame) == self._hello:
                self._greet(worker)
                self._silent_since_s, self._is_silent = now_s, False
        if self.is_idle:
            return
        silent_s = now_s - self._silent_since_s
        if self.child is None:
            self._is_silent = silent_s > HELPER_SILENCE_S
            return
        pid = self.child.pid
        if self.child.has_ended:
            self.let_go()
        elif silent_s > (START_S if self._worker is None else SILENCE_S):
            core_s = self.child.core_s() or 0.0
            if core_s - self._core_s < BUSY_SHARE * silent_s:
                LOGGER.warning("the draft worker (process %d) is silent: it is started again", pid)
                self.child.kill()
            self._core_s, self._silent_since_s = core_s, now_s
        self.child.check()
        if self.child.pid != pid:
            self._core_s, self._silent_since_s = 0.0, now_s
            self.let_go()

    def _greet(self, worker: bytes) -> None:
        """Tell a worker everything."""
        if self._latest is not None:
            self._past += self._latest.counts
            self._latest = None
        self._worker = worker
        self._begun += 1
        self._ended.clear()
        self._allowed.clear()
        self._send(Begin(self._begun, self._drafts_to, self.number, tuple(map(self._tell, self._running))))

    @property
    def counts(self) -> DraftCounts:
        """What this engine's workers have done, as far as was heard."""
        return self._past if self._latest is None else self._past + self._latest.counts

    def shut_down(self) -> None:
        """End the worker."""
        if self.child is not None:
            self.child.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._lost.close()
        self._drafts.close()
        self._context.term()
        self._folder.close()


def _start_child(settings: WorkerSettings) -> ChildProcess:
    module, text = "paceline.drafting.draft_worker", msgspec.json.encode(settings).decode()
    return ChildProcess("draft worker", module, (text,), {"OMP_NUM_THREADS": "1"}, LEAST_LIFE_S)
