"""What each engine step of a rollout had to do and how long it took, seen from the scheduler; any system."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch


class Step(NamedTuple):
    """One engine step, from its scheduling to that of the next."""

    num_requests: int
    num_tokens: int
    """Through the target, draft tokens included."""
    num_context_tokens: int
    """Of all running requests, before the step."""
    num_gained: int
    """Tokens that the responses grew by."""
    is_decode: bool
    """False: some request was prefilled."""
    drafting_s: float
    """Paceline's model drafter, within `step_s`."""
    step_s: float


@dataclass
class StepLog:
    """The steps of one rollout; whoever takes the engine's events adds to `num_gained`."""

    steps: list[Step]
    num_gained: int = 0
    drafting_s: float = 0.0


@contextlib.contextmanager
def watch_steps(scheduler: Any) -> Iterator[StepLog]:
    """Log the engine's steps while the context lasts; the last one ends with it."""
    log = StepLog([])
    schedule, loop = scheduler.schedule, getattr(scheduler, "loop", None)
    receive: Any = getattr(loop, "receive", None)
    last: tuple[int, int, int, bool, float] | None = None

    def close(now: float) -> None:
        if last is not None:
            requests, tokens, context, is_decode, since = last
            log.steps.append(
                Step(requests, tokens, context, log.num_gained, is_decode, log.drafting_s, now - since)
            )
        log.num_gained, log.drafting_s = 0, 0.0

    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        now = time.perf_counter()
        close(now)
        running = {request.request_id: request for request in scheduler.running}
        output = schedule(*args, **kwargs)
        counts, last = output.num_scheduled_tokens, None
        if counts:
            drafts = output.scheduled_spec_decode_tokens
            own = [n - len(drafts.get(name, ())) for name, n in counts.items()]
            is_decode = not output.scheduled_new_reqs and all(n == 1 for n in own)
            context = sum(running[name].num_tokens for name in counts if name in running)
            last = len(counts), sum(counts.values()), context, is_decode, now
        return output

    def timed_receive(drafts: Any) -> None:
        log.drafting_s += drafts.total_s
        receive(drafts)

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch.object(scheduler, "schedule", timed_schedule))
        if loop is not None:
            replaced.enter_context(patch.object(loop, "receive", timed_receive))
        try:
            yield log
        finally:
            close(time.perf_counter())
