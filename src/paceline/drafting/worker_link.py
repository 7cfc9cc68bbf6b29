"""The engine's end of a draft worker: tells it what responses grow by, takes what it has drafted, keeps it alive.

Nothing here waits for the worker unless it is asked to (`take` with a timeout). A worker that dies is started again;
one that says nothing for `SILENCE_S` while responses run is killed first. A new worker is told everything, so the
tokens of the running responses are kept here. One thread, the scheduler's.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.drafting.child_process import ChildProcess, make_socket_folder
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
from paceline.drafting.worker_wire import decode_for_engine as decode
from paceline.errors import ConfigError
from paceline.types import Int32Array, Int64Array

LOGGER = logging.getLogger(__name__)

HELPER_SILENCE_S = 5.0
"""A drafter that is nobody's child, and says nothing for so long, is counted on no more."""

SILENCE_S = 20.0
"""A worker that has drafted before and says nothing for so long is killed; it says something twice a second."""

START_S = 120.0
"""The same for one that has said nothing yet: it may have to load a model."""

LEAST_LIFE_S = 60.0
"""A worker that ended sooner by itself cannot be: its model does not load, say."""


@dataclass(slots=True)
class _Told:
    """What a worker has to know of a running response."""

    key: int
    temperature: float
    limit: int
    tokens: array[int]
    most_ahead: int
    """Undecided tokens that may be drafted."""
    is_running: bool = False
    """Whether it has grown: nothing is drafted for what still waits."""


class WorkerLink:
    """One engine's draft worker. Shut it down."""

    def __init__(self, settings: WorkerSettings, window: int, *, has_child: bool = True) -> None:
        """settings: the worker's; its address and parent are filled in here. window: w, draft tokens.

        has_child: start a worker and keep it alive; False: whoever comes drafts.

        Raises ConfigError where there is no place for a socket.
        """
        import zmq

        folder = make_socket_folder("worker")
        if folder is None:
            raise ConfigError("a draft worker needs a folder for its socket: set TMPDIR to a short path")
        self._folder, self._window = folder, window
        address = f"ipc://{folder / 'worker'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._no_message = zmq.Again
        self._nonblocking = zmq.NOBLOCK
        self.settings = msgspec.structs.replace(settings, address=address, parent=os.getpid())
        self.child = _start_child(self.settings) if has_child else None
        self._responses: dict[int, _Told] = {}
        self._worker: bytes | None = None
        self.number = 0
        """Of the last `Grow` that was sent."""
        self._silent_since_s = time.monotonic()
        self._past_drafted = self._past_wasted = 0  # of workers that are gone
        self._latest: Drafts | None = None

    # -- what the worker is told

    def open(self, response: int, key: int, temperature: float, limit: int, tokens: Sequence[int]) -> None:
        """A response is to run: its tokens, and the position `limit` at which nothing can be drafted any more.

        The worker is told when it grows for the first time.
        """
        self._responses[response] = _Told(key, temperature, limit, array("i", tokens), 2 * self._window)
        if len(self._responses) == 1:
            self._silent_since_s = time.monotonic()

    def grow(self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array) -> None:
        """Responses have grown: response i by tokens[offsets[i]:offsets[i + 1]]. Unknown ones are ignored."""
        known, starts, counts, parts = [], [], [], []
        text, ends = tokens.tobytes(), offsets.tolist()
        for at, response in enumerate(responses.tolist()):
            if (told := self._responses.get(response)) is None:
                continue
            part = text[4 * ends[at] : 4 * ends[at + 1]]
            if told.is_running:
                known.append(response)
                starts.append(len(told.tokens))
                counts.append(ends[at + 1] - ends[at])
                parts.append(part)
            told.tokens.frombytes(part)
            if not told.is_running:
                told.is_running = True
                self._send(_open(response, told))
        self.number += 1
        self._send(
            Grow(
                self.number,
                array("q", known).tobytes(),
                array("q", starts).tobytes(),
                array("i", counts).tobytes(),
                b"".join(parts),
            )
        )

    def allow(self, responses: Sequence[int], most_ahead: Sequence[int]) -> None:
        """So many undecided tokens of these running responses may be drafted from now on; 2w until it is said."""
        for response, most in zip(responses, most_ahead, strict=True):
            if (told := self._responses.get(response)) is not None:
                told.most_ahead = most
        self._send(Allow(array("q", responses).tobytes(), array("i", most_ahead).tobytes()))

    def most_ahead(self, responses: Iterable[int]) -> list[int]:
        """What is allowed of each of these responses; 2w of unknown ones."""
        told = map(self._responses.get, responses)
        return [2 * self._window if one is None else one.most_ahead for one in told]

    def close(self, response: int) -> None:
        """A response has ended."""
        told = self._responses.pop(response, None)
        if told is not None and told.is_running:
            self._send(Close(response))

    def forget(self) -> None:
        """Forget all responses: the policy has changed."""
        for response in list(self._responses):
            self.close(response)

    @property
    def is_there(self) -> bool:
        """Whether a worker has come."""
        return self._worker is not None

    def let_go(self) -> None:
        """The worker drafts for this engine no more."""
        self._worker = None

    def _send(self, message: ToWorker) -> None:
        """Send unless nobody is there; what a full or dead worker does not take is lost, and it asks for everything."""
        if self._worker is not None:
            self._socket.send_multipart((self._worker, encode(message)), self._nonblocking)

    # -- what the worker has drafted

    def take(self, timeout_s: float = 0.0) -> list[Drafts]:
        """What has arrived, without waiting; with a timeout, waiting so long for the first message."""
        arrived: list[Drafts] = []
        if timeout_s and not self._socket.poll(math.ceil(1e3 * timeout_s)):
            return arrived
        while True:
            try:
                worker, frame = self._socket.recv_multipart(self._nonblocking)
            except self._no_message:
                break
            self._hear(worker, decode(frame), arrived)
        if not arrived and self._responses:
            self._watch()
        return arrived

    def _hear(self, worker: bytes, message: Hello | Drafts, arrived: list[Drafts]) -> None:
        self._silent_since_s = time.monotonic()
        if isinstance(message, Hello):
            self._greet(worker)
        elif worker == self._worker:
            self._latest = message
            if message.responses:
                arrived.append(message)

    def _greet(self, worker: bytes) -> None:
        """Tell a worker everything."""
        if self._worker != worker and self._latest is not None:
            self._past_drafted += self._latest.num_drafted
            self._past_wasted += self._latest.num_wasted
            self._latest = None
        self._worker = worker
        self._send(Begin(self._window, self.number))
        running = {response: told for response, told in self._responses.items() if told.is_running}
        for response, told in running.items():
            self._send(_open(response, told))
        own = {name: told.most_ahead for name, told in running.items() if told.most_ahead != 2 * self._window}
        if own:
            self.allow([*own], [*own.values()])

    def _watch(self) -> None:
        """Start the worker again if it has died, or hangs; one that is nobody's child is counted on no more."""
        silent_s = time.monotonic() - self._silent_since_s
        if self.child is None:
            if silent_s > HELPER_SILENCE_S:
                self.let_go()
            return
        pid = self.child.pid
        limit_s = START_S if self._worker is None else SILENCE_S
        if silent_s > limit_s:
            LOGGER.warning("the draft worker (process %d) is silent: it is started again", pid)
            self.child.kill()
            self._silent_since_s = time.monotonic()
        self.child.check()
        if self.child.pid != pid:
            self._worker, self._silent_since_s = None, time.monotonic()

    @property
    def num_drafted(self) -> int:
        """Tokens that this engine's workers have drafted, as far as was heard."""
        return self._past_drafted + (self._latest.num_drafted if self._latest is not None else 0)

    @property
    def num_wasted(self) -> int:
        """Of these, drafted behind a rejected one."""
        return self._past_wasted + (self._latest.num_wasted if self._latest is not None else 0)

    def shut_down(self) -> None:
        """End the worker."""
        if self.child is not None:
            self.child.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _start_child(settings: WorkerSettings) -> ChildProcess:
    module, text = "paceline.drafting.draft_worker", msgspec.json.encode(settings).decode()
    return ChildProcess("draft worker", module, (text,), {"OMP_NUM_THREADS": "1"}, LEAST_LIFE_S)


def _open(response: int, told: _Told) -> Open:
    return Open(response, told.key, told.temperature, told.limit, told.tokens.tobytes())
