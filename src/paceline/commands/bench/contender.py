"""One drafting method of `paceline bench`: its engine in a process of its own, told what to generate and when.

vLLM keeps one engine's state in module globals, so each method gets a process; they start together and then work one
at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.commands.inputs.launch import Launch, describe_failure, hush
from paceline.commands.inputs.sampling import Sampling
from paceline.errors import EngineError, PacelineError
from paceline.types import Response, RolloutRequest

TAIL_SHARE = 0.9
"""The tail begins when this share of the responses has finished."""
LOG_LINES = 6
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One repetition of one method."""

    wall_s: float
    tail_s: float
    """Time from the response with which TAIL_SHARE have finished to the last."""
    tokens: tuple[tuple[int, ...], ...]
    """Of each response, in the order of the requests."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    """(response, engine step) pairs."""
    ends_s: tuple[float, ...]
    """When each response finished, ascending."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


class Contender:
    """The parent's end of one engine process."""

    def __init__(self, name: str, launch: Launch, sampling: Sampling, memory_share: float) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        descriptor, log = tempfile.mkstemp(prefix=f"paceline-bench-{name}-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        arguments = (theirs, launch, sampling, memory_share, self._log)
        self._process = context.Process(target=_serve, args=arguments, name=f"bench {name}", daemon=True)
        self._busy = True
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait for the engine's start. Raises EngineError when it does not start."""
        self._receive()

    def measure(self, requests: Sequence[RolloutRequest]) -> Measurement:
        """Generate, from an empty cache. Raises EngineError when the engine fails."""
        self._busy = True
        try:
            self._pipe.send(tuple(requests))
        except OSError as error:
            raise self._died() from error
        result = self._receive()
        if not isinstance(result, Measurement):
            raise EngineError(f"the engine of method {self.name!r} answered {result!r}")
        return result

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        self._busy = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _died(self) -> EngineError:
        return EngineError(
            f"the engine of method {self.name!r} died (exit code {self._exit_code()}); its last words:\n"
            f"{self._words()}"
        )

    def _exit_code(self) -> int | None:
        self._process.join(STOP_S)
        return self._process.exitcode

    def _words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "(none)"

    def close(self) -> None:
        """End the process and remove its log. One that is waiting for work is given the time to shut down by itself."""
        self._pipe.close()
        if not self._busy:
            self._process.join(STOP_S)
        self._process.terminate()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.unlink(missing_ok=True)


def _serve(pipe: Connection, launch: Launch, sampling: Sampling, memory_share: float, log: Path) -> None:
    """The child's life: start, answer, until the pipe closes. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with hush(log):
        try:
            _answer(pipe, launch, sampling, memory_share)
        except (EOFError, BrokenPipeError):
            return
        except PacelineError as error:
            pipe.send(error)
        except Exception as error:
            pipe.send(EngineError(f"the engine failed: {describe_failure(error)}"))


def _answer(pipe: Connection, launch: Launch, sampling: Sampling, memory_share: float) -> None:
    from paceline.engine.rollout_engine import prepare_environment

    prepare_environment()
    from paceline.engine.compat import is_cpu

    own = {} if is_cpu() else {"gpu_memory_utilization": memory_share}
    with launch.start(**own) as engine:
        params = sampling.build()
        pipe.send("ready")
        while True:
            requests = pipe.recv()
            engine.reset_prefix_cache()
            began_s = time.perf_counter()
            finished_s: list[float] = []
            responses: list[Response | None] = [None] * len(requests)
            for event in engine.stream(requests, params):
                if event.response is not None:
                    finished_s.append(time.perf_counter() - began_s)
                    responses[event.index] = event.response
            pipe.send(summarise([r for r in responses if r is not None], finished_s))


def summarise(responses: Sequence[Response], finished_s: Sequence[float]) -> Measurement:
    """The measurement of one repetition.

    Args:
        responses: in the order of the requests.
        finished_s: when each finished, ascending, seconds from the start. [num_responses]
    """
    wall_s = finished_s[-1]
    begin = max(-(-len(finished_s) * int(TAIL_SHARE * 100) // 100) - 1, 0)
    return Measurement(
        wall_s=wall_s,
        tail_s=wall_s - finished_s[begin],
        tokens=tuple(response.tokens for response in responses),
        num_draft_tokens=sum(response.num_draft_tokens for response in responses),
        num_accepted_tokens=sum(response.num_accepted_tokens for response in responses),
        num_steps=sum(response.num_steps for response in responses),
        ends_s=tuple(finished_s),
    )
